"""Metrics without a gradient: a loss learned by F1 itself, beside one learned by a proxy.

``innerloop estimate`` trains a linear model to find a rare character among others. The weights
that its loss gives to each character, and its learning rate, are learned by the validation set: by
the exact gradient of the cross-entropy (the proxy), by that of the expected F1 (REINFORCE), or by
evolution strategies on F1. All are judged by the F1 score on test drawings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch

from innerloop.experiments.estimate import problem as rare
from innerloop.experiments.estimate.cell import Cell
from innerloop.experiments.framework.command_line import check_choice, check_seed, refuse
from innerloop.experiments.framework.experiment import command
from innerloop.experiments.framework.parts import Parts

ARMS = ("proxy", "reinforce", "evolution")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a run; each is also a flag."""

    arms: Annotated[str, f"some of {','.join(ARMS)}"] = ",".join(ARMS)
    seeds: Annotated[int, "problems, with characters of their own"] = 5
    seed: Annotated[int, "the first of them; the same seed gives the same result"] = 0
    characters: Annotated[int, "characters, of which the first is searched for"] = 10
    common: Annotated[int, "drawings of each of the others, in each of three parts"] = 200
    rare: Annotated[int, "drawings of the one that is searched for"] = 80
    noise: Annotated[float, "noise of the pictures"] = 0.5
    steps: Annotated[int, "inner steps"] = 20
    batch: Annotated[int, "drawings in an inner step"] = 128
    inner_lr: Annotated[float, "inner learning rate, before it is learned"] = 0.1
    updates: Annotated[int, "meta-updates"] = 40
    every: Annotated[int, "meta-updates between two tests"] = 5
    meta_lr: Annotated[float, "learning rate of the outer Adam"] = 0.1
    samples: Annotated[int, "draws of reinforce and evaluations of evolution, per meta-update"] = 16
    sigma: Annotated[float, "how far evolution moves the meta-parameters"] = 0.2
    trained: Annotated[int, "models trained for a test"] = 5
    out: Annotated[Path, "folder of the run"] = Path("out/estimate")

    def __post_init__(self) -> None:
        for arm in self.names:
            check_choice("arms", arm, ARMS)
        check_seed(self.seed, self.seeds)
        least = {"seeds": 1, "characters": 2, "common": 1, "rare": 1, "steps": 1}
        least |= {"batch": 1, "updates": 1, "every": 1, "samples": 2, "trained": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                refuse(name, getattr(self, name), f"at least {low}")
        if self.rare > self.common:
            refuse("rare", self.rare, f"at most the {self.common} drawings of the others")
        if self.samples % 2:
            refuse("samples", self.samples, "even: evolution takes them in pairs")
        for name in ("inner_lr", "meta_lr", "sigma", "noise"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                refuse(name, value, "a number above 0")

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(self.arms.split(",")))


PRESETS: dict[str, dict[str, Any]] = {
    "quick": {},
    "paper": {"seeds": 10, "updates": 150, "every": 10, "samples": 32, "trained": 20},
}


def configured(given: dict[str, Any], preset: str) -> Config:
    """The preset with what was written instead."""
    check_choice("preset", preset, tuple(PRESETS))
    return Config(**{**PRESETS[preset], **given})


class Comparison(Parts):
    """All ways on all problems, one meta-update after another."""

    unit = "meta-updates"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.cells = [(s, arm) for s in range(config.seeds) for arm in config.names]
        self._known: tuple[int, rare.Search] | None = None
        super().__init__([config.updates] * len(self.cells))

    def _problem(self, seed: int) -> rare.Search:
        c = self.config
        if self._known is None or self._known[0] != seed:
            self._known = seed, rare.search(seed, c.characters, c.common, c.rare, c.noise)
        return self._known[1]

    def make(self, number: int) -> Cell:
        seed, arm = self.cells[number]
        seed += self.config.seed
        return Cell(self.config, arm, seed, self._problem(seed))

    def result(self) -> dict[str, Any]:
        """By arm, over seeds; ``start`` is before anything is learned."""
        ends = {"start": self._of(self.config.names[0], 0)}
        ends |= {arm: self._of(arm, self.config.updates) for arm in self.config.names}
        return {"arms": {arm: _summary(found) for arm, found in ends.items()}}

    def _of(self, arm: str, update: int) -> list[dict[str, Any]]:
        return [r for r in self.records if r["arm"] == arm and r["update"] == update]

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        from innerloop.experiments.estimate import figures as _estimate_figures

        _estimate_figures.draw(self.records, folder)

    def told(self, result: dict[str, Any]) -> str:
        lines = [f"{'learned by':<12}{'test F1':>18}{'cross-entropy':>18}{'accuracy':>18}"]
        for arm, found in result["arms"].items():
            shown = [f"{found[m]['mean']:.3f} ± {found[m]['deviation']:.3f}" for m in _METRICS]
            lines.append(f"{arm:<12}" + "".join(f"{text:>18}" for text in shown))
        c = self.config
        lines.append(
            f"Mean and deviation over {c.seeds} seeds, after {c.updates} meta-updates; "
            f"{result['seconds']:.0f} s. Start: all weights 1, learning rate {c.inner_lr}."
        )
        return "\n".join(lines)


_METRICS = ("f1", "cross_entropy", "accuracy")


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric in _METRICS:
        values = torch.tensor([r[metric] for r in records], dtype=torch.float64)
        deviation = values.std().item() if len(values) > 1 else 0.0
        each = values.tolist()
        found[metric] = {"mean": values.mean().item(), "deviation": deviation, "each": each}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    return command("estimate", __doc__, Config, configured, Comparison, argv, _NEXT)


_NEXT = "Next, make the search easier: {innerloop} estimate --noise 0.2 --out out/estimate-easy"


if __name__ == "__main__":
    raise SystemExit(main())

"""All methods of ``innerloop hyperopt`` with all seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import innerloop as il
from innerloop.experiments.framework.parts import Part, Parts
from innerloop.experiments.hyperopt import figures, summary
from innerloop.experiments.hyperopt.cell import Cell, References
from innerloop.experiments.hyperopt.points import digest, load, split
from innerloop.experiments.hyperopt.problem import Problem, build
from innerloop.experiments.hyperopt.settings import SLOTS, Config


class Search(Parts):
    """All methods with all seeds, one trial after the other."""

    unit = "trials"

    def __init__(self, config: Config) -> None:
        self.config = config
        self._points = load(config.dataset, config.data)
        self._digest = digest(*(part for part in self._points if part is not None))
        self._problems: dict[int, Problem] = {}
        seeds = range(config.seed, config.seed + config.seeds)
        self.cells = [(seed, arm) for seed in seeds for arm in config.arms]
        self.problem(config.seed)  # impossible sizes are refused before any work
        super().__init__([config.arms[arm] for _, arm in self.cells])

    @property
    def source(self) -> str:
        return f"{self.config.dataset} ({self._digest})"

    def make(self, number: int) -> Part:
        seed, arm = self.cells[number]
        if arm == "references":
            own = self.problem(seed)
            return References(self.config, own, seed, lambda parts: self.build(seed, parts))
        return Cell(self.config, self.problem(seed), seed, arm)

    def split(self, seed: int) -> Any:
        c = self.config
        return split(*self._points, train=c.train, val=c.val, noise=c.noise, seed=seed)

    def build(self, seed: int, parts: Any) -> Problem:
        """Training on these parts with this seed's net and order."""
        c = self.config
        strategies = {"tape": il.Tape(), "remat": il.Remat(), "binomial": il.Binomial(SLOTS)}
        return build(
            c.what,
            parts,
            seed=seed,
            width=c.width,
            steps=c.steps,
            batch=c.batch,
            lr=c.inner_lr,
            momentum=c.momentum,
            labelled=c.labelled,
            backward=strategies[c.backward],
        )

    def problem(self, seed: int) -> Problem:
        if seed not in self._problems:
            self._problems = {seed: self.build(seed, self.split(seed))}
        return self._problems[seed]

    def result(self) -> dict[str, Any]:
        return summary.summarize(self.config, self.records, self.problem(self.config.seed))

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        figures.draw(self.config, self.records, result, folder)

    def describe(self, result: dict[str, Any]) -> str:
        return summary.describe(self.config, result)

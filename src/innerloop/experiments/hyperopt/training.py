"""All methods of ``innerloop hyperopt`` with all seeds, and their comparison."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from innerloop.experiments.framework.parts import Part, Parts
from innerloop.experiments.framework.tables import plus_minus, table
from innerloop.experiments.hyperopt import figures
from innerloop.experiments.hyperopt.cell import Cell, References
from innerloop.experiments.hyperopt.figures import ABOUT
from innerloop.experiments.hyperopt.problem import Problem, build, load, split
from innerloop.experiments.hyperopt.settings import RANGES, Config
from innerloop.experiments.meta_lr.problem import digest

MEASURES = ("val_loss", "test_loss", "test_accuracy")


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
            return References(self.config, self.problem(seed), seed)
        return Cell(self.config, self.problem(seed), seed, arm)

    def problem(self, seed: int) -> Problem:
        if seed not in self._problems:
            c = self.config
            parts = split(*self._points, train=c.train, val=c.val, noise=c.noise, seed=seed)
            self._problems = {seed: build(c, parts, seed)}
        return self._problems[seed]

    def result(self) -> dict[str, Any]:
        return summarize(self.config, self.records, self.problem(self.config.seed))

    def draw(self, folder: Path, result: dict[str, Any]) -> None:
        figures.draw(self.config, self.records, result, folder)

    def describe(self, result: dict[str, Any]) -> str:
        c, rows = self.config, result["rows"]
        low, high = RANGES[c.what]
        head = (
            f"{c.what} on {c.dataset}: {result['hyperparameters']} numbers in "
            f"[{low:g}, {high:g}], {c.seeds} seeds, {result['trainings']} trainings' worth each. "
            f"The gradient: {c.scouts} scouts, {c.updates} updates, one training at the end "
            f"(an update counts as {result['counted_cost']}; "
            f"it took {result['cpu']['update_by_training']:.1f} times the processor's time)."
        )
        found = [["", "validation loss", "test loss", "test accuracy"]]
        for name, columns in rows.items():
            cells = [_mean_text(columns[m], m.endswith("accuracy")) for m in MEASURES]
            found.append([str(ABOUT.get(name, name)), *cells])
        better = []
        for arm, counts in result["better"].items():
            won = ", ".join(f"{m.replace('_', ' ')} {counts[m]}" for m in MEASURES)
            better.append(f"Seeds of {c.seeds} in which the gradient beats {ABOUT[arm]}: {won}.")
        by_seed = [["Validation loss with seed", *(f"{c.seed + k}" for k in range(c.seeds))]]
        for arm in (arm for arm in ABOUT if arm in rows):
            by_seed.append([ABOUT[arm], *(f"{loss:.4f}" for loss in rows[arm]["val_loss"])])
        parts = [head, "", table(found), "", *better, "", table(by_seed)]
        return "\n".join(parts + _describe_recovery(result))


def summarize(config: Any, records: list[dict[str, Any]], problem: Problem) -> dict[str, Any]:
    """Every number that is reported."""
    by_arm = {arm: [r for r in records if r["arm"] == arm] for arm in config.arms}
    plain = [name for name, value in by_arm["references"][0].items() if isinstance(value, dict)]
    rows = {arm: _columns(found) for arm, found in by_arm.items() if arm != "references"}
    rows |= {name: _columns([r[name] for r in by_arm["references"]]) for name in plain}
    spent = {arm: [sum(r["cpu"]) for r in by_arm[arm]] for arm in ABOUT if arm in by_arm}
    updates = slice(config.scouts, config.scouts + config.updates)
    update = mean(second for r in by_arm["gradient"] for second in r["cpu"][updates])
    training = mean(second for r in by_arm["random"] for second in r["cpu"])
    found = {
        "hyperparameters": problem.raw.numel(),
        "names": problem.names,
        "trainings": sum(config.costs),
        "counted_cost": config.cost,
        "cpu": spent | {"update_by_training": update / training},
        "rows": rows,
        "better": {
            arm: {m: _better(rows["gradient"][m], rows[arm][m], m) for m in MEASURES}
            for arm in ("random", "shared")
            if arm in rows
        },
    }
    return found | (_recovery(by_arm, rows) if config.what == "example-weights" else {})


def _columns(found: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {measure: [record[measure] for record in found] for measure in MEASURES}


def _better(ours: list[float], theirs: list[float], measure: str) -> int:
    """The number of seeds in which the first is strictly better."""
    sign = -1 if measure.endswith("loss") else 1
    return sum(sign * a > sign * b for a, b in zip(ours, theirs, strict=True))


def _recovery(by_arm: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """The part of the accuracy lost to wrong labels that came back, and the mean weights."""
    noisy, clean, learned = (
        rows[name]["test_accuracy"] for name in ("noisy labels", "clean labels", "gradient")
    )
    lost = [c - n for c, n in zip(clean, noisy, strict=True)]
    won = [w - n for w, n in zip(learned, noisy, strict=True)]
    weights: dict[str, list[float | None]] = {"right": [], "wrong": []}
    for arm, plain in zip(by_arm["gradient"], by_arm["references"], strict=True):
        for kind in weights:
            chosen = [
                number
                for number, wrong in zip(arm["numbers"], plain["wrong"], strict=True)
                if wrong == (kind == "wrong")
            ]
            weights[kind].append(mean(chosen) if chosen else None)
    # No share of nothing, where the noise did no harm.
    each = [w / d if d > 0 else None for w, d in zip(won, lost, strict=True)]
    total = sum(won) / sum(lost) if sum(lost) > 0 else None
    return {"recovered": each, "recovered_of_mean": total, "mean_weights": weights}


def _mean_text(values: list[float], percent: bool) -> str:
    factor, digits, unit = (100, 1, " %") if percent else (1, 3, "")
    spread = factor * stdev(values) if len(values) > 1 else None
    return plus_minus(factor * mean(values), spread, digits, unit)


def _describe_recovery(result: dict[str, Any]) -> list[str]:
    if "recovered" not in result:
        return []
    each = ["-" if r is None else f"{100 * r:.0f} %" for r in result["recovered"]]
    total = result["recovered_of_mean"]
    whole = "none was lost" if total is None else f"{100 * total:.0f} % of the mean"
    weights = {}
    for kind, values in result["mean_weights"].items():
        known = [value for value in values if value is not None]
        weights[kind] = f"{mean(known):.3f}" if known else "- (there are none)"
    return [
        f"Of the accuracy lost to wrong labels, recovered: {', '.join(each)} by seed, {whole}.",
        f"Mean weight of right labels {weights['right']}, of wrong ones {weights['wrong']}.",
    ]

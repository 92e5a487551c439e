"""Results of the methods over all seeds: numbers and a table."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import Any

from innerloop.experiments.hyperopt.problem import RANGES, Problem, names

MEASURES = ("val_loss", "test_loss", "test_accuracy")
ABOUT = {
    "gradient": "gradient of the validation loss",
    "random": "random search",
    "shared": "random search, one number for all",
}


def least_so_far(values: list[float]) -> list[float | None]:
    """The best validation loss after each trial; ``None`` as long as all have diverged.

    >>> least_so_far([math.inf, 2.0, 3.0, 1.0])
    [None, 2.0, 2.0, 1.0]
    """
    found = [min(values[: k + 1]) for k in range(len(values))]
    return [value if math.isfinite(value) else None for value in found]


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
        "names": names(config.what, problem.inner),
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


# --- a table ------------------------------------------------------------------------------------


def describe(config: Any, result: dict[str, Any]) -> str:
    """The result as lines for a terminal."""
    low, high = RANGES[config.what]
    lines = [
        f"{config.what} on {config.dataset}: {result['hyperparameters']} numbers in "
        f"[{low:g}, {high:g}], {config.seeds} seeds, {result['trainings']} trainings' worth each. "
        f"The gradient: {config.scouts} scouts, {config.updates} updates, one training at the end "
        f"(an update counts as {result['counted_cost']}; "
        f"it took {result['cpu']['update_by_training']:.1f} times the processor's time).",
        "",
        f"{'':36}{'validation loss':>18}{'test loss':>18}{'test accuracy':>18}",
    ]
    for name, columns in result["rows"].items():
        cells = [_cell(columns[m], m.endswith("accuracy")) for m in MEASURES]
        lines.append(f"{ABOUT.get(name, name):36}" + "".join(f"{cell:>18}" for cell in cells))
    lines.append("")
    for arm, counts in result["better"].items():
        won = ", ".join(f"{m.replace('_', ' ')} {counts[m]}" for m in MEASURES)
        lines.append(f"Seeds of {config.seeds} in which the gradient beats {ABOUT[arm]}: {won}.")
    lines += ["", *_by_seed(config, result["rows"])]
    return "\n".join(lines + _describe_recovery(result))


def _by_seed(config: Any, rows: dict[str, Any]) -> list[str]:
    """The validation losses that were searched for."""
    seeds = range(config.seed, config.seed + config.seeds)
    lines = [f"{'Validation loss with seed':36}" + "".join(f"{seed:>8}" for seed in seeds)]
    for arm in (arm for arm in ABOUT if arm in rows):
        found = "".join(f"{value:8.4f}" for value in rows[arm]["val_loss"])
        lines.append(f"{ABOUT[arm]:36}{found}")
    return lines


def _cell(values: list[float], percent: bool) -> str:
    factor, digits, unit = (100, 1, " %") if percent else (1, 3, "")
    spread = f" ± {factor * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{factor * mean(values):.{digits}f}{spread}{unit}"


def _describe_recovery(result: dict[str, Any]) -> list[str]:
    if "recovered" not in result:
        return []
    each = ["-" if r is None else f"{100 * r:.0f} %" for r in result["recovered"]]
    total = result["recovered_of_mean"]
    whole = "none was lost" if total is None else f"{100 * total:.0f} % of the mean"
    weights = {kind: _mean_text(values) for kind, values in result["mean_weights"].items()}
    return [
        f"Of the accuracy lost to wrong labels, recovered: {', '.join(each)} by seed, {whole}.",
        f"Mean weight of right labels {weights['right']}, of wrong ones {weights['wrong']}.",
    ]


def _mean_text(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{mean(known):.3f}" if known else "- (there are none)"

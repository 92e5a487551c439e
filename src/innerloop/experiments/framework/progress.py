"""Progress of a run: a bar in the terminal, and events for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from innerloop.experiments.framework.run import Run


class Bar:
    """Units done, values of the last unit, and the time left."""

    def __init__(self, experiment: Any, run: Run, hidden: bool) -> None:
        self._bar: Any = tqdm(
            total=experiment.total,
            initial=experiment.done,
            unit=f" {experiment.unit}",
            disable=hidden,
            dynamic_ncols=True,
            smoothing=0.05,
        )
        # Events that a killed process wrote after its last checkpoint are dropped.
        known = max((record["iteration"] for record in experiment.records), default=-1)
        self._events = None if hidden else SummaryWriter(str(run.folder), purge_step=known + 1)

    def close(self) -> None:
        self._bar.close()
        if self._events is not None:
            self._events.close()

    def advance(self, shown: dict[str, str], units: int = 1) -> None:
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(units)

    def record(self, found: list[dict[str, Any]]) -> None:
        """Writes numbers as events; of a list the mean, the least and the most."""
        if self._events is None:
            return
        for record in found:
            for name, value in _scalars(record):
                self._events.add_scalar(name, value, record["iteration"])
        self._events.flush()


def _scalars(values: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _scalars(value, f"{name}/{key}" if name else key)
    elif isinstance(values, list):
        if flat := _flat(values):
            yield f"{name}/mean", sum(flat) / len(flat)
            yield f"{name}/least", min(flat)
            yield f"{name}/most", max(flat)
    elif isinstance(values, int | float) and name != "iteration":
        yield name, values


def _flat(values: Any) -> list[float]:
    if isinstance(values, list):
        return [x for v in values for x in _flat(v)]
    return [values] if isinstance(values, int | float) else []

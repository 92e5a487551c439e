"""Progress of a run: a bar in the terminal, and events for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from innerloop.experiments.framework.run import Run


class Bar:
    """Units done, values of the last unit, and the time left."""

    def __init__(self, experiment: Any, run: Run, quiet: bool) -> None:
        self._bar: Any = tqdm(
            total=experiment.total,
            initial=experiment.done,
            unit=f" {experiment.unit}",
            disable=quiet,
            dynamic_ncols=True,
            smoothing=0.05,
        )
        self._known = 0
        last = [self._step(record) for record in experiment.records]
        purged = last[-1] + 1 if last else 0
        self._events = None if quiet else SummaryWriter(str(run.folder), purge_step=purged)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: Any) -> None:
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
            step = self._step(record)
            for name, value in _scalars(record):
                self._events.add_scalar(name, value, step)
        self._events.flush()

    def _step(self, record: dict[str, Any]) -> int:
        self._known += 1
        found = record.get("iteration")
        return found if type(found) is int else self._known


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

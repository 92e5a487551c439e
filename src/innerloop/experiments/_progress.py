"""What a run shows while it goes on: a bar in the terminal, and events for TensorBoard."""

from __future__ import annotations

from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from innerloop.experiments._run import Run


class Bar:
    """Loss, validation accuracy, tasks per second and the time left."""

    def __init__(self, config: Any, progress: Any, run: Run, quiet: bool) -> None:
        self._tasks = config.tasks
        self._bar: Any = tqdm(
            total=config.iterations,
            initial=progress.iteration,
            unit=" updates",
            disable=quiet,
            dynamic_ncols=True,
            smoothing=0.05,
        )
        self._events = SummaryWriter(str(run.folder), purge_step=progress.iteration + 1)
        last = progress.records[-1] if progress.records else None
        self._accuracy = last["val_accuracy"] if last else None
        self._loss: float | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()
        self._events.close()

    def advance(self, loss: float, progress: Any) -> None:
        self._loss = loss if self._loss is None else 0.95 * self._loss + 0.05 * loss
        shown = {"loss": f"{self._loss:.3f}"}
        if self._accuracy is not None:
            shown["val"] = f"{100 * self._accuracy:.1f} %"
        rate = self._bar.format_dict["rate"]
        if rate:
            shown["tasks/s"] = f"{rate * self._tasks:.1f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(1)

    def epoch(self, record: dict[str, Any]) -> None:
        self._accuracy = record["val_accuracy"]
        step = record["iteration"]
        for name in ("train_loss", "val_accuracy", "meta_lr"):
            self._events.add_scalar(name, record[name], step)
        for name, values in record["learned"].items():
            flat = _flat(values)
            self._events.add_scalar(f"learned/{name}/mean", sum(flat) / len(flat), step)
            self._events.add_scalar(f"learned/{name}/least", min(flat), step)
            self._events.add_scalar(f"learned/{name}/most", max(flat), step)
        self._events.flush()


def _flat(values: Any) -> list[float]:
    return [x for v in values for x in _flat(v)] if isinstance(values, list) else [values]

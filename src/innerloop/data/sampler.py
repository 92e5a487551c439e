"""Few-shot tasks: a support set to train on and a query set to evaluate on, drawn at random."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop.data.arguments import SEEDS, check_integer
from innerloop.data.images import Images
from innerloop.data.refusals import refusal
from innerloop.errors import InnerLoopError


class Batch(NamedTuple):
    """Images and their labels."""

    x: Tensor
    """``[tasks, way*shot, channel, height, width]``, float32 in [0, 1]."""
    y: Tensor
    """``[tasks, way*shot]``, int64 from 0 to way - 1."""


class Episode(NamedTuple):
    """One meta-batch of few-shot tasks; every tensor has a leading task axis.

    Rows are ordered by class: the images of label 0 first, then those of label 1, and so on.
    Which class gets which label is drawn anew for every task.
    """

    support: Batch
    """The inner loop's training data: ``way * shot`` images per task."""
    query: Batch
    """The outer loss's data: ``way * query`` other images of the same classes."""

    def tasks(self, which: slice) -> Episode:
        """Return some of the tasks, still with a task axis."""
        if not isinstance(which, slice):
            raise refusal(
                f"You asked for the tasks {which!r}.",
                "a slice.",
                "every tensor of an episode has a task axis, which a number would remove.",
                "episode.tasks(slice(0, 1)) for the first task alone.",
            )
        return Episode(*(Batch(part.x[which], part.y[which]) for part in self))

    def to(self, target: torch.dtype | torch.device | str) -> Episode:
        """Return the same tasks on another device, or their images in another precision."""
        if not isinstance(target, torch.dtype):
            return Episode(*(Batch(part.x.to(target), part.y.to(target)) for part in self))
        if not target.is_floating_point:
            raise refusal(
                f"You asked for an episode as {target}.",
                "a device, or a dtype of floating-point numbers.",
                "images are numbers between 0 and 1.",
                "episode.to('cuda') or episode.to(torch.float64).",
            )
        return Episode(*(Batch(part.x.to(target), part.y) for part in self))


class Sampler:
    """Draw meta-batches of N-way K-shot tasks from one split.

    Every task has ``way`` different classes, and from each ``shot`` support and ``query`` query
    images, no image twice. A draw is a few tensor operations and one lookup in the split's
    pixels, on the device where these are. The random numbers come from the sampler's own generator
    on the CPU: the same seed gives the same tasks on every device and for any number of threads,
    and no other random number of the program changes them.

    Example:
        >>> from innerloop.data import Sampler, glyphs
        >>> images = glyphs(train=10, val=5, test=5).train
        >>> sampler = Sampler(images, way=5, shot=1, query=3, tasks=2, seed=0)
        >>> support, query = sampler.sample()
        >>> list(support.x.shape), list(query.x.shape)
        ([2, 5, 1, 28, 28], [2, 15, 1, 28, 28])
        >>> support.y[0].tolist()
        [0, 1, 2, 3, 4]
    """

    def __init__(
        self, images: Images, way: int, shot: int, query: int, tasks: int, seed: int = 0
    ) -> None:
        """Check that the split has enough classes and images, and seed the generator."""
        self.images = images
        self.way = check_integer("way", way)
        self.shot = check_integer("shot", shot)
        self.query = check_integer("query", query)
        self.tasks = check_integer("tasks", tasks)
        self.seed = check_integer("seed", seed, *SEEDS)
        self._check()
        self._starts, self._counts = images.offsets[:-1], images.counts
        self._generator = torch.Generator().manual_seed(self.seed)

    def sample(self) -> Episode:
        """Draw the next meta-batch."""
        support, query = self._rows().split([self.shot, self.query], dim=-1)
        return Episode(self._look_up(support), self._look_up(query))

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state and the settings.

        The settings hold a digest of the split, so that changed images are noticed.
        """
        return {**self._settings(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state: the next draws are those that followed it."""
        saved = {name: value for name, value in state.items() if name != "generator"}
        if saved != self._settings():
            raise refusal(
                f"The saved sampler has {saved}, this one has {self._settings()}.",
                "the same settings and the same split.",
                "the same random numbers would draw other tasks.",
                "a Sampler with the saved settings, then load_state_dict.",
            )
        self._generator.set_state(state["generator"])

    def _rows(self) -> Tensor:
        """Draw the rows of the split's pixels: ``[tasks, way, shot + query]``."""
        classes = self._random(self.tasks, len(self.images)).argsort(stable=True)[:, : self.way]
        counts = self._counts[classes].unsqueeze(-1)
        order = self._random(self.tasks, self.way, int(self._counts.max()))
        # Classes may differ in size: places past the end of a class sort last.
        past = torch.arange(order.shape[-1]) >= counts
        order = order.masked_fill(past, 2.0).argsort(stable=True)[..., : self.shot + self.query]
        return self._starts[classes].unsqueeze(-1) + order

    def _random(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=self._generator)

    def _look_up(self, rows: Tensor) -> Batch:
        """The images in these rows ``[tasks, way, each]``, with their labels."""
        pixels = self.images.pixels
        found = pixels.index_select(0, rows.reshape(-1).to(pixels.device))
        x = found.view(self.tasks, -1, *pixels.shape[1:]).to(torch.float32).div_(255)
        y = torch.arange(self.way).repeat_interleave(rows.shape[-1]).repeat(self.tasks, 1)
        return Batch(x, y.to(pixels.device))

    def _settings(self) -> dict[str, int | str]:
        return {
            "way": self.way,
            "shot": self.shot,
            "query": self.query,
            "tasks": self.tasks,
            "classes": len(self.images),
            "images": len(self.images.pixels),
            "digest": self.images.digest,
        }

    def _check(self) -> None:
        if self.way > len(self.images):
            raise self._impossible(
                f"at most the {len(self.images)} classes that the split has.",
                "the classes of a task are different ones.",
                f"way={len(self.images)} or fewer, or a split with more classes.",
            )
        fewest = int(self.images.counts.min())
        if self.shot + self.query > fewest:
            name = self.images.names[int(self.images.counts.argmin())]
            raise self._impossible(
                f"at most {fewest} per class: class {name!r} has no more.",
                "no image may be in a task twice.",
                f"shot + query <= {fewest}.",
            )

    def _impossible(self, needed: str, why: str, write: str) -> InnerLoopError:
        wrote = f"You asked for {self.way}-way tasks with {self.shot} + {self.query} images."
        return refusal(wrote, needed, why, write)

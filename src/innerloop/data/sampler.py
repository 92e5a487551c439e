"""Draws few-shot tasks, a whole meta-batch at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from innerloop.data._numbers import SEEDS, whole
from innerloop.data.episodes import Batch, Episode
from innerloop.data.images import Images
from innerloop.errors import InnerLoopError, four_part


class Sampler:
    """Draw meta-batches of N-way K-shot tasks from one split.

    Every task has ``way`` different classes, and from each ``shot`` support and ``query`` query
    pictures, no picture twice. A draw is a few tensor operations and one lookup in the split's
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
        """Check that the split has enough classes and pictures, and seed the generator."""
        self.images, self.seed = images, whole("seed", seed, *SEEDS)
        self.way, self.shot = whole("way", way), whole("shot", shot)
        self.query, self.tasks = whole("query", query), whole("tasks", tasks)
        self._check()
        device = images.pixels.device
        self._starts, self._counts = images.offsets[:-1], images.counts
        self._support_labels = self._labels(self.shot).to(device)
        self._query_labels = self._labels(self.query).to(device)
        self._generator = torch.Generator().manual_seed(self.seed)

    def sample(self) -> Episode:
        """Draw the next meta-batch."""
        rows = self._rows()
        support, query = rows.split([self.shot, self.query], dim=-1)
        return Episode(
            Batch(self._look_up(support), self._support_labels.clone()),
            Batch(self._look_up(query), self._query_labels.clone()),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on from here: the generator's state, and the settings.

        The settings hold a digest of the split, so that changed pictures are noticed.
        """
        return {**self._settings(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: the next draws are those that followed it."""
        given: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
        saved = {name: given.get(name) for name in self._settings()}
        if saved != self._settings():
            raise InnerLoopError(
                four_part(
                    f"The saved sampler has {_said(saved)}, this one has "
                    f"{_said(self._settings())}.",
                    "the same settings and the same split.",
                    "the same random numbers would draw other tasks.",
                    "a Sampler with the saved settings, then load_state_dict.",
                )
            )
        try:
            self._generator.set_state(given["generator"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise InnerLoopError(
                four_part(
                    f"The saved sampler's generator cannot be read ({error}).",
                    "the state of a torch.Generator, under the name 'generator'.",
                    "without it the next tasks are not those that followed.",
                    "load_state_dict with what state_dict returned, whole.",
                )
            ) from error

    def _rows(self) -> Tensor:
        """``[tasks, way, shot + query]``: rows of the split's pixels."""
        classes = self._random(self.tasks, len(self.images)).argsort(stable=True)[:, : self.way]
        counts = self._counts[classes].unsqueeze(-1)
        order = self._random(self.tasks, self.way, int(self._counts.max()))
        # Classes may differ in size: places past the end of a class sort last.
        past = torch.arange(order.shape[-1]) >= counts
        order = order.masked_fill(past, 2.0).argsort(stable=True)[..., : self.shot + self.query]
        return self._starts[classes].unsqueeze(-1) + order

    def _random(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=self._generator)

    def _look_up(self, rows: Tensor) -> Tensor:
        pixels = self.images.pixels
        found = pixels.index_select(0, rows.reshape(-1).to(pixels.device))
        return found.view(self.tasks, -1, *pixels.shape[1:]).to(torch.float32).div_(255)

    def _labels(self, each: int) -> Tensor:
        return torch.arange(self.way).repeat_interleave(each).repeat(self.tasks, 1)

    def _settings(self) -> dict[str, int | str]:
        return {
            "way": self.way,
            "shot": self.shot,
            "query": self.query,
            "tasks": self.tasks,
            "classes": len(self.images),
            "pictures": len(self.images.pixels),
            "digest": self.images.digest,
        }

    def _check(self) -> None:
        asked = f"You asked for {self.way}-way tasks with {self.shot} + {self.query} pictures."
        if self.way > len(self.images):
            raise InnerLoopError(
                four_part(
                    asked,
                    f"at most the {len(self.images)} classes that the split has.",
                    "the classes of a task are different ones.",
                    f"way={len(self.images)} or fewer, or a split with more classes.",
                )
            )
        fewest = int(self.images.counts.min())
        if self.shot + self.query > fewest:
            name = self.images.names[int(self.images.counts.argmin())]
            raise InnerLoopError(
                four_part(
                    asked,
                    f"at most {fewest} per class: class {name!r} has no more.",
                    "no picture may be in a task twice.",
                    f"shot + query <= {fewest}.",
                )
            )


def _said(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())

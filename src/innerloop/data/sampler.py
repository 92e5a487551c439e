"""Draws few-shot tasks, one meta-batch at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from innerloop.data.episodes import Batch, Episode
from innerloop.data.images import Images
from innerloop.data.integers import SEEDS, check_integer
from innerloop.data.refusals import refusal
from innerloop.errors import InnerLoopError


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
        """Return the generator's state and the settings.

        The settings hold a digest of the split, so that changed images are noticed.
        """
        return {**self._settings(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state: the next draws are those that followed it."""
        given: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
        saved = {name: given.get(name) for name in self._settings()}
        if saved != self._settings():
            raise _other_sampler(saved, self._settings())
        try:
            self._generator.set_state(given["generator"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise _unreadable_generator(error) from error

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


def _other_sampler(saved: dict[str, Any], settings: dict[str, Any]) -> InnerLoopError:
    return refusal(
        f"The saved sampler has {_format(saved)}, this one has {_format(settings)}.",
        "the same settings and the same split.",
        "the same random numbers would draw other tasks.",
        "a Sampler with the saved settings, then load_state_dict.",
    )


def _unreadable_generator(error: Exception) -> InnerLoopError:
    return refusal(
        f"The saved sampler's generator cannot be read ({error}).",
        "the state of a torch.Generator, under the name 'generator'.",
        "without it the next tasks are not those that followed.",
        "load_state_dict with the complete result of state_dict.",
    )


def _format(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())

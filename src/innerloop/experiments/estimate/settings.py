"""Settings of ``innerloop estimate``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

from innerloop.experiments.framework.settings import (
    Bounds,
    Choice,
    Count,
    Rate,
    Seed,
    Seeds,
    Settings,
    refuse,
    split_words,
)

ARMS = ("proxy", "reinforce", "evolution")


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a run; each is also a flag."""

    arms: Annotated[str, Choice(ARMS, several=True)] = ",".join(ARMS)
    seeds: Annotated[Seeds, "problems, with characters of their own"] = 5
    seed: Annotated[Seed, "the first of them; the same seed gives the same result"] = 0
    characters: Annotated[int, Bounds(2), "characters, of which the first is rare"] = 10
    common: Annotated[Count, "images of each of the others, in each of three parts"] = 200
    rare: Annotated[Count, "images of the rare character"] = 80
    noise: Annotated[Rate, "noise of the images"] = 0.5
    steps: Annotated[Count, "inner steps"] = 20
    batch: Annotated[Count, "images in an inner step"] = 128
    inner_lr: Annotated[Rate, "inner learning rate, before it is learned"] = 0.1
    updates: Annotated[Count, "meta-updates"] = 40
    every: Annotated[Count, "meta-updates between two tests"] = 5
    meta_lr: Annotated[Rate, "learning rate of the outer Adam"] = 0.1
    samples: Annotated[int, Bounds(2), "of reinforce, or evaluations of evolution"] = 16
    sigma: Annotated[Rate, "standard deviation of evolution's perturbations"] = 0.2
    trained: Annotated[Count, "models trained for a test"] = 5
    out: Annotated[Path, "folder of the run"] = Path("out/estimate")

    PRESETS: ClassVar = {
        "quick": {},
        "paper": {"seeds": 10, "updates": 150, "every": 10, "samples": 32, "trained": 20},
    }

    def check(self) -> None:
        if self.rare > self.common:
            refuse("rare", self.rare, f"at most the {self.common} images of the others")
        if self.samples % 2:
            refuse("samples", self.samples, "even", "evolution takes them in pairs")

    @property
    def names(self) -> list[str]:
        return split_words(self.arms)

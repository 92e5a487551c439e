"""Settings of ``innerloop maml-rl``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from innerloop.experiments.framework.settings import (
    Bounds,
    Choice,
    Count,
    Rate,
    Settings,
    refuse,
)
from innerloop.experiments.maml_rl.problem import WORLDS

TEST_SEED = 1_000_003
_Share = Annotated[float, Bounds(0, 1)]


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a run; each is also a flag."""

    world: Annotated[str, Choice(tuple(WORLDS))] = "navigation"
    seeds: Annotated[Count, "policies, each meta-trained from a seed of its own"] = 5
    seed: Annotated[int, Bounds(0), "the first of the seeds"] = 0
    iterations: Annotated[Count, "meta-updates of each policy"] = 100
    tasks: Annotated[Count, "tasks in a meta-batch"] = 20
    episodes: Annotated[int, Bounds(2), "episodes for each gradient"] = 20
    horizon: Annotated[Count, "actions in an episode"] = 20
    steps: Annotated[int, Bounds(0), "inner steps in meta-training; 0: no inner loop"] = 1
    hidden: Annotated[Count, "width of the policy's net"] = 64
    inner_lr: Annotated[Rate, "inner learning rate, before it is learned"] = 0.05
    meta_lr: Annotated[Rate, "learning rate of the outer Adam"] = 3e-3
    discount: Annotated[_Share, "weight of a reward one step later"] = 0.99
    decay: Annotated[_Share, "of the memory in the surrogate: 1 is DiCE, 0 forgets"] = 1.0
    test_tasks: Annotated[int, Bounds(2), "held-out tasks for each seed"] = 40
    test_episodes: Annotated[Count, "episodes by which a return is measured"] = 40
    out: Annotated[Path, "folder of the run"] = Path("out/maml-rl")

    PRESETS: ClassVar = {"quick": {}, "paper": {}}  # by world, below

    def check(self) -> None:
        if self.seed + self.seeds > TEST_SEED:
            refuse("seed", self.seed, f"such that all seeds are below {TEST_SEED}")

    @classmethod
    def preset(cls, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The preset of the world."""
        return dict(_PRESETS[name][given.get("world", cls.world)])


_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "quick": {
        "navigation": {},
        "cartpole": {"seeds": 3, "iterations": 60, "tasks": 8, "horizon": 100, "hidden": 32}
        | {"inner_lr": 0.1, "meta_lr": 0.01, "test_tasks": 20, "test_episodes": 20},
    },
    "paper": {
        "navigation": {"iterations": 500, "horizon": 100, "hidden": 100, "inner_lr": 0.01},
        "cartpole": {"iterations": 500, "horizon": 200, "inner_lr": 0.1, "meta_lr": 0.01},
    },
}

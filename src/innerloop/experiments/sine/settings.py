"""Settings of ``innerloop sine``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

from innerloop.experiments.framework.settings import Bounds, Count, Rate, Settings

# Keep the held-out sines, and those on which a rate is chosen, apart from each other and from the
# training sines of every seed a person would type.
HELD_OUT_SEED, CHOICE_SEED = 1_000_003, 2_000_003


@dataclasses.dataclass(frozen=True)
class Config(Settings):
    """Settings of a run; each is also a flag."""

    seed: Annotated[int, Bounds(0, HELD_OUT_SEED - 1), "the same seed gives the same result"] = 0
    iterations: Annotated[Count, "outer updates of each net"] = 1200
    tasks: Annotated[Count, "sines in an outer update"] = 4
    steps: Annotated[Count, "inner gradient steps while meta-learning"] = 1
    inner_lr: Annotated[Rate, "learning rate of the inner SGD, before it is learned"] = 0.02
    meta_lr: Annotated[Rate, "learning rate of the outer Adam"] = 0.005
    held_out: Annotated[int, Bounds(3), "unseen sines in the final comparison"] = 200
    out: Annotated[Path, "folder of the run"] = Path("out/sine")

    # MAML's own experiment took 70000 updates of 25 tasks.
    PRESETS: ClassVar = {"quick": {}, "paper": {"iterations": 70_000, "tasks": 25}}

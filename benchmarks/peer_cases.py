"""What is compared with the peers: one `Case` per row of the table. Knows sizes, no library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

SYSTEMS = ("innerloop", "higher", "torchopt", "torch.func", "jax", "torch")
REFERENCE = "torch"  # the plain loop: gradients are held to it


@dataclass(frozen=True)
class Case:
    """One meta-step: train for `steps`, measure, and differentiate by what is learned.

    Ways are words that say how a system computes it, such as `vmap compiled`; each is a
    measurement of its own, and a system's column shows the fastest.
    """

    name: str
    about: str
    network: str  # by its name in `models.py`, and in `systems/jax_models.py`
    sizes: Mapping[str, Any]
    data: str  # by its name in `peer_data.py`
    support: int  # examples in a batch to train on, of each task
    query: int  # examples to measure on
    steps: int
    ways: Mapping[str, tuple[str, ...]]  # system -> ways
    tasks: int | None = None  # None: there is no task axis
    rule: str = "sgd"
    rate: float = 0.01
    learn: tuple[str, ...] = ("init",)
    per: str = "group"  # what has a learning rate of its own
    fresh: bool = False  # every step has a batch of its own
    large: bool = False  # processes of all ways hardly fit side by side

    @property
    def batches(self) -> int:
        return self.steps if self.fresh else 1

    @property
    def composed(self) -> bool:
        """Whether the network has norms that `vmap` gets wrong."""
        return self.network in ("conv4", "resnet12")


@dataclass(frozen=True)
class Limit:
    """What was promised: innerloop's time divided by that of a system is at most `most`, or the
    other way round at least `least`.

    With `memory`, by a way of innerloop that takes at most `memory` times the system's memory.
    """

    case: str
    system: str  # or `PEERS`: the fastest of all others
    most: float | None = None
    least: float | None = None
    memory: float | None = None


PEERS = "every other"
LIMITS = (
    Limit("a", "higher", least=50),
    Limit("a", "jax", most=1),
    Limit("b", "higher", least=50),
    Limit("c", "higher", most=0.65),
    Limit("c", PEERS, most=1),
    Limit("d", "higher", most=0.8),
    Limit("e", "higher", most=0.8),
    Limit("f", "higher", most=0.8),
    Limit("g", "higher", most=0.8, memory=0.3),
    Limit("h", "higher", least=10),
)

# --- ways -------------------------------------------------------------------------------------

_LOOPS = {"higher": ("loop",), "torch": ("loop",)}
_MANY_SMALL = _LOOPS | {
    "innerloop": ("auto", "loop", "threads", "vmap", "vmap step", "vmap whole"),
    "torchopt": ("loop", "vmap"),
    "torch.func": ("vmap", "vmap compiled"),
    "jax": ("vmap", "vmap scan"),
}
_IMAGES = _LOOPS | {
    "innerloop": ("auto", "loop", "threads", "vmap", "threads Remat"),
    "torchopt": ("loop", "vmap"),
    "torch.func": ("vmap",),
    "jax": ("vmap", "loop"),
}
# d, e and f are c with other sizes, and calls that take long: what is fastest in c, and `Remat`.
_LARGE_IMAGES = _LOOPS | {
    "innerloop": ("auto", "threads", "threads Remat"),
    "torchopt": ("vmap",),
    "torch.func": ("vmap",),
    "jax": ("loop",),
}
_ONE_TASK = _LOOPS | {
    "innerloop": ("Tape", "Remat", "step"),
    "torchopt": ("loop",),
    "torch.func": ("grad",),
    "jax": ("scan", "scan remat"),
}
_SWEEP = _LOOPS | {
    "innerloop": ("vmap", "vmap whole"),
    "torchopt": ("loop",),
    "torch.func": ("vmap",),
    "jax": ("vmap",),
}

# --- the cases --------------------------------------------------------------------------------

_SINE = Case(
    "a",
    "sine MAML, 25 tasks x 5 SGD steps, MLP 1-40-40-1",
    "mlp",
    {"widths": [1, 40, 40, 1]},
    "sines",
    support=10,
    query=10,
    steps=5,
    tasks=25,
    ways=_MANY_SMALL,
)
_OMNIGLOT = Case(
    "c",
    "Omniglot-shaped MAML, 4 conv-64, 5-way 1-shot, 8 tasks x 5 steps",
    "conv4",
    {"way": 5},
    "images",
    support=5,
    query=25,
    steps=5,
    tasks=8,
    rate=0.1,
    ways=_IMAGES,
)
CASES = (
    _SINE,
    replace(
        _SINE,
        name="b",
        about="the same with Adam; learned rate and betas",
        rule="adam",
        learn=("init", "lr", "betas"),
        ways=_MANY_SMALL | {"jax": ("vmap", "vmap safe", "vmap scan safe")},
    ),
    _OMNIGLOT,
    replace(
        _OMNIGLOT,
        name="d",
        about="the same 20-way",
        sizes={"way": 20},
        support=20,
        query=100,
        ways=_LARGE_IMAGES,
        large=True,
    ),
    replace(
        _OMNIGLOT,
        name="e",
        ways=_LARGE_IMAGES,
        about="mini-ImageNet-shaped, 84x84, 48 filters, 5-way 1-shot, 2 tasks x 5 steps",
        sizes={"way": 5, "channels": 48, "colours": 3, "size": 84},
        query=75,
        tasks=2,
    ),
    replace(
        _OMNIGLOT,
        name="f",
        ways=_LARGE_IMAGES,
        about="resnet-12 (32-64-128-256), 28x28, 5-way 1-shot, 2 tasks x 5 steps",
        network="resnet12",
        sizes={"way": 5, "channels": 32},
        tasks=2,
    ),
    Case(
        "g",
        "GPT, 4 layers, width 256, length 256, batch 4, 10 SGD steps; learned rate per layer",
        "gpt",
        {},
        "text",
        support=4,
        query=4,
        steps=10,
        ways=_ONE_TASK,
        learn=("lr",),
        fresh=True,
        large=True,
    ),
    Case(
        "h",
        "1,000 SGD steps, MLP 20-64-64-1, batch 32; learned rate per step",
        "mlp",
        {"widths": [20, 64, 64, 1]},
        "regression",
        support=32,
        query=256,
        steps=1000,
        ways=_ONE_TASK,
        learn=("lr",),
        per="step",
        fresh=True,
    ),
)


# --- tiny -------------------------------------------------------------------------------------

TINY = "tiny: "
_TINY: dict[str, dict[str, Any]] = {
    "a": {"tasks": 3, "steps": 2},
    "b": {"tasks": 3, "steps": 2},
    "c": {"sizes": {"way": 5, "channels": 4}},
    "d": {"sizes": {"way": 20, "channels": 4}, "query": 20},
    "e": {"sizes": {"way": 5, "channels": 4, "colours": 3, "size": 32}},
    "f": {"sizes": {"way": 5, "channels": 4}},
    "g": {"sizes": {"layers": 2, "width": 16, "heads": 2, "length": 8, "vocabulary": 16}},
    "h": {"steps": 20},
}
_TINY_IMAGES = {"tasks": 2, "steps": 1, "query": 5}


def tiny(case: Case) -> Case:
    """The same computation, small: shows that everything runs, not how well."""
    first = {system: ways[:1] for system, ways in case.ways.items()}
    sizes = (_TINY_IMAGES if case.data == "images" else {}) | _TINY.get(case.name, {})
    return replace(case, about=f"{TINY}{case.about}", ways=first, **sizes)


# --- growth -----------------------------------------------------------------------------------

GROWTH = "i"
AXES = {"steps": "inner steps J, with 25 tasks", "tasks": "tasks, with 5 steps"}
_VALUES = {"steps": (1, 5, 20), "tasks": (1, 10, 100)}


def growth(quick: bool) -> list[Case]:
    """Case a with other numbers of steps and of tasks, named as `i steps 10`."""
    cases = [
        replace(
            _SINE,
            ways=_SWEEP,
            name=f"{GROWTH} {axis} {value}",
            about=f"sine MAML, {axis} = {value}",
            **{axis: value},
        )
        for axis, values in _VALUES.items()
        for value in (values[:1] if quick else values)
    ]
    return [tiny(case) for case in cases] if quick else cases

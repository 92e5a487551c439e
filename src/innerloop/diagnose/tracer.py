"""Tracing of the user's code: operations that take values out of the graph, and their lines."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from innerloop import _tree
from innerloop.guard.graph import nodes

_NUMBERS = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__"}
_COPIES = {"tensor", "new_tensor", "from_numpy"}
_ZERO_DERIVATIVE = {
    *("round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside"),
    *("floor_divide", "__floordiv__", "__rfloordiv__"),
}
# Their results have the shape of a tensor and not its values.
_SHAPE_ONLY = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "size"),
}
_HALF = (torch.float16, torch.bfloat16)
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


# Places. ----------------------------------------------------------------------------------------

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = str(Path(__file__).parents[1]) + os.sep
# Layers and models of this library, which run inside the user's functions.
_LAYERS = tuple(os.path.join(_OWN, name) for name in ("nn", "modules/exact", "models", "learned"))
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = os.path.join(_LIBRARY, "site-packages") + os.sep
_PATH = "_path_in_diagnosis"


class Place(NamedTuple):
    """A line of the user's code, and the module of the model that was running."""

    file: str = ""
    line: int = 0
    code: str = ""
    module: str = ""

    def __str__(self) -> str:
        parts = [f"in {self.module}"] if self.module else []
        if self.file:
            path, here = Path(self.file), Path.cwd()
            shown = path.relative_to(here) if path.is_relative_to(here) else path
            parts.insert(0, f"{shown}:{self.line}")
        text = ", ".join(parts)
        code = self.code if len(self.code) <= 80 else f"{self.code[:78]} …"
        return f"{text}: {code}" if code else text


def _owner(file: str) -> str:
    """``"user"``, ``"engine"`` (this library's loop), or ``"library"``: torch, Python, layers."""
    if file.startswith(_OWN):
        return "library" if file.startswith(_LAYERS) else "engine"
    if file.startswith((_TORCH, "<frozen")):
        return "library"
    return "user" if file.startswith(_PACKAGES) or not file.startswith(_LIBRARY) else "library"


def calling_place(frame: FrameType | None) -> Place | None:
    """The user's line that led to an operation; ``None`` if the engine itself called it."""
    module, inside = "", False
    while frame is not None:
        file = frame.f_code.co_filename
        owner = _owner(file)
        if owner == "engine":
            return Place(module=module) if inside else None
        inside = inside or not file.startswith(_TORCH)
        own = _module_path(frame)
        if owner == "user":
            return _line(frame, frame.f_lineno, own or module)
        module = module or own
        frame = frame.f_back
    return None


def failing_place(frames: Iterable[tuple[FrameType, int]]) -> Place | None:
    """The innermost line of the user's code in a traceback, below the engine."""
    found, entered = None, False
    for frame, line in frames:
        owner = _owner(frame.f_code.co_filename)
        entered = entered or owner == "engine"
        if entered and owner == "user":
            found = _line(frame, line, "")
    return found


def _line(frame: FrameType, line: int, module: str) -> Place:
    file = frame.f_code.co_filename
    return Place(file, line, linecache.getline(file, line, frame.f_globals).strip(), module)


def _module_path(frame: FrameType) -> str:
    if frame.f_code.co_varnames[:1] != ("self",):
        return ""
    self = frame.f_locals.get("self")
    return vars(self).get(_PATH, "") if isinstance(self, nn.Module) else ""


@contextmanager
def paths_in_modules(roots: Mapping[str, Any]) -> Iterator[None]:
    """Writes into each module its path, which its replicas then have too."""
    marked: list[nn.Module] = []
    for prefix, root in roots.items():
        for name, module in root.named_modules() if isinstance(root, nn.Module) else ():
            if _PATH not in vars(module):
                vars(module)[_PATH] = f"{prefix}.{name}" if name else prefix
                marked.append(module)
    try:
        yield
    finally:
        for module in marked:
            del vars(module)[_PATH]


# The tracer. ------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """An operation with a gradient in front of it and none behind it."""

    kind: str
    """One of the kinds of ``advice.CUTS``."""
    op: str
    stage: str
    """The function that was running: ``"loss"``, ``"update"`` or ``"val_loss"``."""
    sources: frozenset[str]
    """The weights and meta-parameters whose gradient ends here."""
    place: Place


class Tracer(TorchFunctionMode):
    """Records every :class:`Cut`, and the values that were computed from it.

    ``names`` are the leaves that gradients should reach; ``outside`` are weights of the original
    model, in whose place those of the replica should be used.
    """

    def __init__(
        self, stage: str, names: Mapping[str, Tensor], outside: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.stage = stage
        self.cuts: list[Cut] = []
        self.calls: list[tuple[str, Place]] = []
        """The torch functions that the user's code called."""
        self.used: set[str] = set()
        """The names of leaves that the user's code used."""
        self.half: list[tuple[torch.dtype, Place]] = []
        """Casts to half precision."""
        self.connected: dict[str, bool] = {}
        """By finished stage: True if its result depends on a leaf."""
        self._outside = {id(t): name for name, t in outside.items()}
        self._names: dict[int, str] = {}
        self._ends: dict[str, set[int]] = {}
        """By finished stage: the cuts that its result was computed from."""
        self._escaped: set[int] = set()
        """Cuts whose values left torch, so that it is unknown where they went."""
        self._behind: dict[int, set[int]] = {}
        """By tensor: the cuts that it was computed from."""
        self._written: dict[int, set[int]] = {}
        """The same by memory, for writes that autograd does not see."""
        self._origin: dict[int, Tensor] = {}
        """By memory: the last tensor there that requires grad."""
        self._gradless: set[int] = set()
        """Tensors that some operation returned without a graph."""
        self._kept: list[Any] = []  # an id is only valid while its tensor lives
        self.add_leaves(names)

    def add_leaves(self, leaves: Mapping[str, Tensor]) -> None:
        """Adds leaves that gradients should reach, by name."""
        for name, leaf in leaves.items():
            self._kept.append(leaf)
            self._names[id(leaf)] = name
            self._origin[_memory(leaf)] = leaf

    def finish(self, stage: str, results: Iterable[Any]) -> None:
        """Records the cuts behind the results of a stage."""
        tensors = [t for t in results if isinstance(t, Tensor)]
        self.connected[stage] = bool(self._sources(tensors))
        self._ends[stage] = set().union(*map(self._history, tensors))

    def harmful_cuts(self, stage: str) -> list[Cut]:
        """The cuts of a stage that its result was computed from.

        A Python number or a numpy array cannot be followed, so its cut counts too, as the least
        sure kind. A stage that raised has no result; then all of its cuts count.
        """
        mine = [(i, cut) for i, cut in enumerate(self.cuts) if cut.stage == stage]
        if stage not in self._ends:
            return [cut for _, cut in mine]
        sure = self._ends[stage] | (self._ends.get("update", set()) if stage == "loss" else set())
        return [cut for i, cut in mine if i in sure | self._escaped]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = "data" if func == _DATA else getattr(func, "__name__", type(func).__name__)
        if op == "__get__":
            return func(*args, **kwargs)
        place = calling_place(sys._getframe(1))
        inputs = _tree.tensors((args, kwargs))
        if place is not None:
            self._note_use(inputs, place)
            self.calls.append((op, place))
        carrying = [t for t in inputs if t.requires_grad]
        out = func(*args, **kwargs)
        behind = set().union(*map(self._history, inputs))
        outputs = _tree.tensors(out)
        if place is None:
            self._note_aliases(inputs, outputs)
        else:
            behind |= self._note_cuts(op, carrying, outputs, place)
            behind |= self._note_hidden_write(func, op, args, place)
        if op in _NUMBERS:
            self._escaped |= behind
        if _is_in_place(op):
            outputs.append(args[0])
        self._follow(outputs, behind)
        return out

    # Where values go. ---------------------------------------------------------------------------

    def _follow(self, outputs: list[Tensor], behind: set[int]) -> None:
        for tensor in outputs:
            self._kept.append(tensor)
            self._behind[id(tensor)] = self._behind.get(id(tensor), set()) | behind
            if tensor.requires_grad:
                self._gradless.discard(id(tensor))
                self._origin[_memory(tensor)] = tensor
            else:
                self._gradless.add(id(tensor))

    def _history(self, tensor: Tensor) -> set[int]:
        """The cuts that a tensor was computed from."""
        if id(tensor) in self._gradless and tensor.grad_fn is not None:
            # The output of a custom Function, whose forward ran without gradients.
            self._gradless.discard(id(tensor))
            self._behind[id(tensor)] = set()
        written = self._written.get(_memory(tensor), set()) if self._written else set()
        return self._behind.get(id(tensor), set()) | written

    def _note_aliases(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """The engine may hand the model an alias of a leaf; it has the same name."""
        for tensor in outputs:
            for leaf in inputs:
                same = _memory(leaf) == _memory(tensor) and leaf.shape == tensor.shape
                if id(leaf) in self._names and same:
                    self._names.setdefault(id(tensor), self._names[id(leaf)])

    def _sources(self, tensors: list[Tensor]) -> frozenset[str]:
        """The names of the leaves that tensors were computed from."""
        found = {self._names[id(t)] for t in tensors if id(t) in self._names}
        for node in nodes([t.grad_fn for t in tensors])[0]:
            name = self._names.get(id(getattr(node, "variable", None)))
            if name is not None:
                found.add(name)
        return frozenset(found)

    # Notes. -------------------------------------------------------------------------------------

    def _note_use(self, tensors: list[Tensor], place: Place) -> None:
        for tensor in tensors:
            name = self._names.get(id(tensor))
            outside = self._outside.get(id(tensor))
            if name is not None:
                self.used.add(name)
            elif outside is not None:
                cut = Cut("outside", "", self.stage, frozenset([outside]), place)
                self._behind.setdefault(id(tensor), set()).add(self._note(cut))
            elif tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._behind:
                origin = self._origin.get(_memory(tensor))
                if origin is not None and id(origin) not in self._names:
                    cut = Cut("leaf", "", self.stage, self._sources([origin]), place)
                    self._behind[id(tensor)] = {self._note(cut)}
                    self._kept.append(tensor)

    def _note_cuts(
        self, op: str, carrying: list[Tensor], outputs: list[Tensor], place: Place
    ) -> set[int]:
        if not carrying or op in _SHAPE_ONLY:
            return set()
        if not any(t.dtype in _HALF for t in carrying):
            lowered = [t for t in outputs if t.requires_grad and t.dtype in _HALF]
            self.half += [(t.dtype, place) for t in lowered]
        kinds = {"number"} if op in _NUMBERS else {_cut_kind(op, t) for t in outputs}
        noted = set()
        for kind in kinds - {None}:
            sources = self._sources(carrying)
            noted.add(self._note(Cut(str(kind), op, self.stage, sources, place)))
        return noted

    def _note_hidden_write(self, func: Any, op: str, args: Any, place: Place) -> set[int]:
        """A write in place that autograd does not see."""
        replaced = func == _SET_DATA
        if not (replaced or _is_in_place(op)) or op in ("requires_grad_", "detach_"):
            return set()
        target = args[0]
        origin = target if target.requires_grad else self._origin.get(_memory(target))
        initializer = getattr(func, "__module__", "") == "torch.nn.init"
        seen = target.requires_grad and torch.is_grad_enabled() and not (initializer or replaced)
        if origin is None or seen:
            return set()
        index = self._note(Cut("in place", op, self.stage, self._sources([origin]), place))
        self._written.setdefault(_memory(target), set()).add(index)
        return {index}

    def _note(self, cut: Cut) -> int:
        """The index of a cut; those of one line are joined."""
        for index, old in enumerate(self.cuts):
            if (old.kind, old.stage, old.place) == (cut.kind, cut.stage, cut.place):
                self.cuts[index] = old._replace(sources=old.sources | cut.sources)
                return index
        self.cuts.append(cut)
        return len(self.cuts) - 1


def _cut_kind(op: str, output: Tensor) -> str | None:
    if output.requires_grad:
        return "rounding" if op in _ZERO_DERIVATIVE else None
    if op in ("detach", "detach_", "data"):
        return "detach"
    if op in _COPIES:
        return "copy"
    if not torch.is_grad_enabled():
        return "no_grad"
    if op == "grad":
        return "grad"
    return "other" if output.is_floating_point() or output.is_complex() else "discrete"


def _is_in_place(op: str) -> bool:
    return op == "__setitem__" or (op.endswith("_") and not op.endswith("__"))


def _memory(tensor: Tensor) -> int:
    """The address of a tensor's storage; a number of its own if there is none."""
    try:
        return tensor.untyped_storage().data_ptr() or -id(tensor)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)

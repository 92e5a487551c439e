"""Watching one evaluation of the user's code for what takes values out of the graph."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from innerloop import _tree
from innerloop.diagnose.places import Place, caller, is_own, place_of

_NUMBERS = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__"}
_COPIES = {"tensor", "new_tensor", "from_numpy"}
_ZERO_DERIVATIVE = {
    *("round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside"),
    *("floor_divide", "__floordiv__", "__rfloordiv__"),
}
# Their results have a tensor's shape and not its values.
_SHAPE_ONLY = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "size"),
}
# Numbers that a loss may well have of its own; other ones are known again when they are used.
_COMMON = {0.0, 0.5, 1.0, 2.0, -1.0}
_HALF = (torch.float16, torch.bfloat16)
_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
_GRAD_MODE = "_set_grad_enabled"


class Cut(NamedTuple):
    """An operation that has a value in and out, but no gradient."""

    kind: str
    op: str
    stage: str
    """What was running: ``"loss"``, ``"update"`` or ``"val_loss"``."""
    sources: frozenset[str]
    """The weights and meta-parameters that a gradient would have gone on to."""
    place: Place


class Call(NamedTuple):
    """An operation of torch's, and where it was called."""

    op: str
    place: Place


class Tracer(TorchFunctionMode):
    """Notes every :class:`Cut`, and follows what became of the values behind it.

    ``names`` are the leaves that gradients should reach, by id; ``outside`` are weights in whose
    place those of the replica should be used.
    """

    def __init__(self, names: Mapping[int, str], outside: Mapping[int, str]) -> None:
        super().__init__()
        self.stage = "loss"
        self.names = dict(names)
        self.outside = outside
        self.paths: dict[int, str] = {}
        """The names of modules, by id."""
        self.cuts: list[Cut] = []
        self.calls: list[Call] = []
        self.used: set[str] = set()
        self.lowered: list[tuple[torch.dtype, Place]] = []
        """Casts to half precision."""
        self.reached: dict[str, set[int]] = {"loss": set(), "update": set(), "val_loss": set()}
        """Which cuts the results of each stage were computed from."""
        self.finished: set[str] = set()
        self._escaped: set[int] = set()
        """Cuts whose values left torch, so that it is not known where they went."""
        self._index: dict[Any, int] = {}
        self._behind: dict[int, set[int]] = {}
        self._behind_memory: dict[int, set[int]] = {}
        self._memory: dict[int, Tensor] = {}
        self._without: set[int] = set()
        self._numbers: dict[float, set[int]] = {}
        self._kept: list[Any] = []

    def called(self, module: nn.Module, prefix: str) -> None:
        """Learn the names of a replica's modules."""
        self._kept.append(module)
        for name, child in module.named_modules():
            self.paths[id(child)] = f"{prefix}.{name}" if name else prefix

    def result(self, stage: str, values: Iterable[Any]) -> None:
        """Note from which cuts the result of a stage was computed."""
        self.finished.add(stage)
        for value in values:
            if isinstance(value, Tensor):
                self.reached[stage] |= self._history(value)
            elif isinstance(value, float):
                self.reached[stage] |= self._numbers.get(value, set())

    def harmful(self, stage: str) -> list[Cut]:
        """The cuts of a stage that its result was computed from, and those that may be so.

        What becomes of a Python number or a numpy array is not known, so these come last. A stage
        that ended with an error has no result; then it may be any of its cuts.
        """
        sure = self.reached[stage] | (self.reached["update"] if stage == "loss" else set())
        mine = [(i, cut) for i, cut in enumerate(self.cuts) if cut.stage == stage]
        if stage not in self.finished:
            return [cut for _, cut in mine]
        known = [cut for i, cut in mine if i in sure]
        return known or [cut for i, cut in mine if i in self._escaped]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = getattr(func, "__name__", type(func).__name__)
        if op == "__get__" and func != _DATA[0]:
            return func(*args, **kwargs)
        if op == _GRAD_MODE:
            return func(*args, **kwargs)
        frame = caller(sys._getframe(1), func)
        mine = frame is None or is_own(frame.f_code.co_filename)
        inputs = [t for t in _tree.flatten((args, kwargs))[0] if isinstance(t, Tensor | float)]
        tensors = [t for t in inputs if isinstance(t, Tensor)]
        if not mine:
            self._note_use(tensors, frame)
            self.calls.append(Call(op, place_of(frame, self.paths)))
        following = [t for t in tensors if t.requires_grad]
        out = func(*args, **kwargs)
        behind = set().union(*(self._history(value) for value in inputs))
        if func in _DATA:
            op = "data"
        if op in _NUMBERS:
            self._escaped |= behind
        outputs = [t for t in _tree.flatten(out)[0] if isinstance(t, Tensor)]
        if not mine:
            behind |= self._note_cuts(op, following, outputs, out, frame)
            behind |= self._note_writing(func, op, args, frame)
        elif op == "view_as" and id(args[0]) in self.names:
            self.names[id(out)] = self.names[id(args[0])]
        if op == "__setitem__" or (op.endswith("_") and not op.endswith("__")):
            outputs.append(args[0])
        self._follow(outputs, out, behind)
        return out

    # Where values go. ---------------------------------------------------------------------------

    def _follow(self, outputs: list[Tensor], out: Any, behind: set[int]) -> None:
        for tensor in outputs:
            self._kept.append(tensor)
            self._behind[id(tensor)] = self._behind.get(id(tensor), set()) | behind
            memory = _memory(tensor)
            if tensor.requires_grad:
                self._without.discard(id(tensor))
                if memory is not None:
                    self._memory[memory] = tensor
            else:
                self._without.add(id(tensor))
        for number in _tree.flatten(out)[0] if behind else ():
            if isinstance(number, float) and number not in _COMMON:
                self._numbers.setdefault(number, set()).update(behind)

    def _history(self, value: Any) -> set[int]:
        """The cuts that a value was computed from."""
        if not isinstance(value, Tensor):
            return self._numbers.get(value, set())
        if id(value) in self._without and value.grad_fn is not None:
            # What was computed without gradients has one now: a custom Function's output.
            self._without.discard(id(value))
            self._behind[id(value)] = set()
        found = self._behind.get(id(value), set())
        if self._behind_memory:
            found = found | self._behind_memory.get(_memory(value) or 0, set())
        return found

    # What to note. ------------------------------------------------------------------------------

    def _note_use(self, tensors: list[Tensor], frame: Any) -> None:
        for tensor in tensors:
            name = self.names.get(id(tensor))
            if name is not None:
                self.used.add(name)
            elif id(tensor) in self.outside:
                index = self._note("outside", "", [], frame, frozenset([self.outside[id(tensor)]]))
                self._behind.setdefault(id(tensor), set()).add(index)
            elif tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._behind:
                origin = self._memory.get(_memory(tensor) or 0)
                if origin is not None and id(origin) not in self.names:
                    self._behind[id(tensor)] = {self._note("leaf", "nn.Parameter", [origin], frame)}
                    self._kept.append(tensor)

    def _note_cuts(
        self, op: str, following: list[Tensor], outputs: list[Tensor], out: Any, frame: Any
    ) -> set[int]:
        if not following or op in _SHAPE_ONLY:
            return set()
        if op in _NUMBERS:
            index = self._note("number", op, following, frame)
            self._escaped.add(index)
            return {index}
        found = set()
        for tensor in outputs:
            kind = self._kind(op, tensor)
            if kind is not None:
                found.add(self._note(kind, op, following, frame))
            elif tensor.dtype in _HALF and all(t.dtype not in _HALF for t in following):
                self.lowered.append((tensor.dtype, place_of(frame, self.paths)))
        return found

    def _kind(self, op: str, output: Tensor) -> str | None:
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

    def _note_writing(self, func: Any, op: str, args: Any, frame: Any) -> set[int]:
        """Writing in place where autograd does not see it."""
        in_place = op == "__setitem__" or (op.endswith("_") and not op.endswith("__"))
        replaced = func == _DATA[1]
        if not (in_place or replaced) or op in ("requires_grad_", "detach_"):
            return set()
        target = args[0]
        memory = _memory(target) or 0
        origin = target if target.requires_grad else self._memory.get(memory)
        initializer = getattr(func, "__module__", "") == "torch.nn.init"
        hidden = initializer or replaced or not (target.requires_grad and torch.is_grad_enabled())
        if origin is None or not hidden:
            return set()
        index = self._note("in place", op, [origin], frame)
        self._behind_memory.setdefault(memory, set()).add(index)
        return {index}

    def _note(
        self,
        kind: str,
        op: str,
        following: list[Tensor],
        frame: Any,
        sources: frozenset[str] | None = None,
    ) -> int:
        place = place_of(frame, self.paths)
        key = (kind, self.stage, place.file, place.line, place.module if not place.file else "")
        sources = self._sources(following) if sources is None else sources
        if key in self._index:
            index = self._index[key]
            old = self.cuts[index]
            self.cuts[index] = old._replace(sources=old.sources | sources)
            return index
        self._index[key] = len(self.cuts)
        self.cuts.append(Cut(kind, op, self.stage, sources, place))
        return self._index[key]

    def _sources(self, tensors: list[Tensor]) -> frozenset[str]:
        """The names of the leaves that tensors were computed from."""
        found = {self.names[id(t)] for t in tensors if id(t) in self.names}
        stack = [t.grad_fn for t in tensors if t.grad_fn is not None]
        seen = set(stack)
        while stack:
            node = stack.pop()
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in self.names:
                found.add(self.names[id(variable)])
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        return frozenset(found)


def _memory(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None

"""Tensors that a step uses without being given them: noticed, named, and exchanged.

A loss may close over a tensor that requires grad. A strategy that computes a step twice must know
of it, or its gradient would silently be missing.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from innerloop import _tree
from innerloop.errors import RequirementError, four_part

_local = threading.local()


_OWN = "_innerloop_own"


_depth: contextvars.ContextVar[int] = contextvars.ContextVar("innerloop_depth", default=0)


def own(tensor: Tensor) -> Tensor:
    """Mark a leaf that a step made for itself, so that it is not taken for a stranger."""
    setattr(tensor, _OWN, _depth.get())
    return tensor


def is_own(tensor: Tensor) -> bool:
    """Whether it was made so, and not by a loop in whose loss this one is."""
    return getattr(tensor, _OWN, -1) >= _depth.get()


def depth() -> int:
    """In the losses of how many loops this is."""
    return _depth.get()


@contextlib.contextmanager
def at_depth(depth: int) -> Iterator[None]:
    """What is called inside is in the losses of so many loops."""
    token = _depth.set(depth)
    try:
        yield
    finally:
        _depth.reset(token)


class Suspects:
    """Leaves that a computation used and was not given: from outside, or made by itself.

    One that it made is gone when its graph is, or is another one when it is done again. They are
    held weakly; ask when the graph is no longer there.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._leaves = [weakref.ref(leaf) for leaf in leaves]

    @property
    def alive(self) -> list[Tensor]:
        found = [reference() for reference in self._leaves]
        return [leaf for leaf in found if leaf is not None]

    def __len__(self) -> int:
        return len(self._leaves)

    def outside(self, again: Callable[[], Iterable[Tensor]]) -> list[Tensor]:
        """Those from outside; ``again`` repeats the computation and gives the leaves it used."""
        alive = self.alive
        if not alive:
            return []
        others = {id(leaf): leaf for leaf in again()}
        return [leaf for leaf in alive if id(leaf) in others]

    def refuse(self, again: Callable[[], Iterable[Tensor]], roots: Sequence[Any]) -> None:
        """Raise an error that names one from outside, if there is one."""
        for leaf in self.outside(again):
            raise RequirementError(not_followed(leaf, None, roots))


class Watch:
    """The tensors requiring grad that steps were seen to use without being given them."""

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}
        self.made = False
        """Whether a step was seen to make leaves of its own."""
        self._nodes: set[Any] = set()
        self._pending: list[tuple[Suspects, Callable[[], Iterable[Tensor]]]] = []

    def inspect(
        self,
        outputs: Iterable[Tensor],
        sources: Iterable[Tensor],
        since: int,
        again: Callable[[], Iterable[Tensor]],
        roots: Sequence[Any],
    ) -> None:
        """Note what ``outputs`` depend on besides ``sources``; :meth:`settle` is to follow.

        ``since`` is the sequence number of autograd when their computation began; ``again`` repeats
        the computation, to catch tensors that were computed before, and must not hold its graph;
        ``roots`` are the functions that may hold them, to find their names.
        """
        leaves, nodes = strangers(outputs, sources, since)
        unknown = [leaf for leaf in leaves if id(leaf) not in self.found]
        if unknown:
            self._pending.append((Suspects(unknown), lambda: strangers(again(), (), 0)[0]))
        missing = [node for node in nodes if node not in self._nodes]
        if not missing:
            return
        with _Spy(set(missing)) as spy:
            again()
        unseen = set(missing) - {t.grad_fn for t in spy.seen.values()}
        if unseen:
            raise RequirementError(not_followed(None, unseen.pop(), roots))
        self.found.update(spy.seen)
        self._nodes.update(missing)

    def settle(self) -> None:
        """Tell leaves from outside from a step's own, after its graph is gone."""
        pending, self._pending = self._pending, []
        for suspects, again in pending:
            outside = suspects.outside(again)
            self.made = self.made or len(outside) < len(suspects)
            self.found.update((id(leaf), leaf) for leaf in outside)


def current() -> Watch | None:
    """The watch that a strategy has set for the steps of this thread."""
    return getattr(_local, "watch", None)


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Have the steps of this thread report what they were not given."""
    outer, watch = current(), Watch()
    _local.watch = watch
    try:
        yield watch
    finally:
        _local.watch = outer


def sequence_number() -> int:
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def strangers(
    outputs: Iterable[Tensor], sources: Iterable[Tensor], since: int
) -> tuple[list[Tensor], list[Any]]:
    """Leaves, and nodes of the graph made before ``since``, that ``outputs`` depend on."""
    sources = list(sources)
    known = {id(t) for t in sources}
    seen = {t.grad_fn for t in sources if t.grad_fn is not None}
    leaves: dict[int, Tensor] = {}
    nodes: list[Any] = []
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) not in known and not is_own(variable):
                leaves[id(variable)] = variable
        elif node._sequence_nr() < since:
            nodes.append(node)
        else:
            stack.extend(following for following, _ in node.next_functions if following is not None)
    return list(leaves.values()), nodes


def reaches(output: Tensor, tensors: Iterable[Tensor]) -> bool:
    """Whether a graph leads from ``output`` to one of some tensors."""
    wanted = [t for t in tensors if t.requires_grad]
    leaves = {id(t) for t in wanted}
    nodes = {t.grad_fn for t in wanted if t.grad_fn is not None}
    if id(output) in leaves:
        return True
    seen: set[Any] = set()
    stack = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node in nodes or id(getattr(node, "variable", None)) in leaves:
            return True
        seen.add(node)
        stack.extend(following for following, _ in node.next_functions)
    return False


def suspects(
    outputs: Iterable[Tensor], sources: Iterable[Tensor], since: int, roots: Sequence[Any]
) -> Suspects:
    """The leaves that ``outputs`` depend on besides ``sources``.

    Raises an error that names what was computed before, if there is anything.
    """
    leaves, nodes = strangers(outputs, sources, since)
    if nodes:
        raise RequirementError(not_followed(None, nodes[0], roots))
    return Suspects(leaves)


class _Spy(TorchFunctionMode):
    """Collects the arguments of torch's functions that were computed by some nodes."""

    def __init__(self, nodes: set[Any]) -> None:
        super().__init__()
        self.nodes = nodes
        self.seen: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in _tree.flatten((args, kwargs))[0]:
            if isinstance(leaf, Tensor) and leaf.grad_fn in self.nodes:
                self.seen[id(leaf)] = leaf
        return func(*args, **(kwargs or {}))


class exchanged(TorchFunctionMode):
    """Lets torch's functions take other tensors in the place of some, by their ids."""

    def __init__(self, others: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _tree.map(self._other, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _other(self, value: Any) -> Any:
        return self.others.get(id(value), value) if isinstance(value, Tensor) else value


def not_followed(tensor: Tensor | None, node: Any, roots: Sequence[Any]) -> str:
    """The message for a tensor, or one computed by a node, whose gradient cannot be given."""
    named = _found(lambda t: t is tensor or (node is not None and t.grad_fn is node), roots)
    name, tensor = named if named is not None else (None, tensor)
    what = f"{name!r}, a tensor" if name else "a tensor"
    shape = f" of shape {tuple(tensor.shape)}" if tensor is not None else ""
    made = f" (computed by {node.name()})" if node is not None else ""
    return four_part(
        f"The step uses {what}{shape}{made} that requires grad and that it was not given.",
        "every tensor that is to get a gradient in the state, in the meta-parameters, as a "
        "parameter of a loss module, or in the batch (Requirement III).",
        "this strategy takes derivatives step by step and by what a step is given; the gradient of "
        "this tensor would be silently zero.",
        "loss as an nn.Module with it as a parameter, backward=Tape(), or .detach() it if no "
        "gradient is wanted.",
    )


_INTERNAL = frozenset(vars(nn.Module()))
_HOOKS = frozenset(("_forward_hooks", "_forward_pre_hooks"))


def _found(wanted: Callable[[Tensor], bool], roots: Sequence[Any]) -> tuple[str, Tensor] | None:
    """A tensor that functions or modules among ``roots`` hold, and how they call it."""
    level = [(root, "") for root in roots]
    seen: set[int] = set()
    for _ in range(5):
        following: list[tuple[Any, str]] = []
        for value, path in level:
            if isinstance(value, Tensor) and path and wanted(value):
                return path, value
            if id(value) not in seen:
                seen.add(id(value))
                following += [
                    (v, ".".join(part for part in (path, name) if part))
                    for name, v in _held_by(value)
                ]
        level = following
    return None


def _held_by(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        closed = [(name, _content(cell)) for name, cell in cells]
        args = value.__code__.co_varnames[: value.__code__.co_argcount]
        defaults = value.__defaults__ or ()
        closed += zip(args[len(args) - len(defaults) :], defaults, strict=True)
        closed += (value.__kwdefaults__ or {}).items()
        names = value.__code__.co_names
        return closed + [(n, value.__globals__[n]) for n in names if n in value.__globals__]
    if isinstance(value, MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, functools.partial):
        args = [(str(i), arg) for i, arg in enumerate(value.args)]
        return [("", value.func), *args, *value.keywords.items()]
    if isinstance(value, nn.Module):
        inside = [item for one in value.modules() for item in vars(one).items()]
        hooks = [v for name, v in inside if name in _HOOKS and isinstance(v, Mapping)]
        own = [(name, v) for name, v in inside if name not in _INTERNAL]
        return [
            *(*value.named_parameters(), *value.named_buffers(), *own),
            *(("", hook) for held in hooks for hook in held.values()),
        ]
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(str(i), item) for i, item in enumerate(value)]
    if isinstance(value, type | Tensor | ModuleType):
        return []
    return list(getattr(value, "__dict__", {}).items())


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None

"""A function of tensors, recorded once and compiled."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from innerloop import _tree
from innerloop._tracing import tracing
from innerloop._tree import differentiable
from innerloop.guard.fingerprint import NotCompilableError as NotCompilableError
from innerloop.guard.randomness import devices_of, preserved, written
from innerloop.guard.watch import Draws, ForeignError, NumberWatch, Watch
from innerloop.step.mapped import NotBatchableError

Flat = Callable[..., Sequence[Tensor]]


class Recorded:
    """A function of tensors as a graph of operations; what else it read is now a constant."""

    def __init__(self, function: Flat, inputs: Sequence[Tensor]) -> None:
        self.inputs = [t.detach() for t in inputs]
        draws = Draws()

        def watched(*tensors: Tensor) -> Sequence[Tensor]:
            with NumberWatch():
                return function(*tensors)

        with tracing(), _one_error(), preserved(devices_of(inputs)), Watch(reads=True):
            from torch.fx.experimental.proxy_tensor import make_fx

            self.graph = make_fx(watched)(*self.inputs)
        if draws.undone():
            raise NotCompilableError("it draws random numbers outside torch")
        # First, since of what has no other use a shape may have been used.
        for node in self.graph.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise NotCompilableError(
                    "it draws random numbers, which a compiled program would draw differently"
                )
            if _shaped_by_values(node):
                raise NotCompilableError(
                    f"{node.target} has a result whose shape depends on values"
                )
        _without_alpha(self.graph.graph)
        self.graph.graph.eliminate_dead_code()
        self.graph.recompile()
        for node in self.graph.graph.nodes:
            node.meta.clear()  # Examples of values, each of a mode of its own; others are made.

    @property
    def size(self) -> int:
        """How many operations there are."""
        return len(self.graph.graph.nodes)

    def compiled(self, options: dict[str, Any] | None, backend: str) -> Flat:
        if backend == "eager":
            return _uncast(self.graph.forward)  # Not by a call: hooks of all modules are recorded.
        with torch.no_grad(), _one_error():
            from torch import _inductor

            options = self._launched() | (options or {})
            program: Any = _inductor.compile(self.graph, self.inputs, options=options)  # type: ignore[arg-type]
            self._check(program)
        return _uncast(program)

    def _launched(self) -> dict[str, Any]:
        """Kernels are called from C++ on the CPU: from Python, calls take as long as small ones."""
        return {"cpp_wrapper": True} if all(t.is_cpu for t in self.inputs) else {}

    def _check(self, program: Flat) -> None:
        """Compilers have defects: a program that computes something else is not used."""
        expected = self.graph.forward(*self.inputs)
        pairs = [
            (found, expected)
            for found, expected in zip(program(*self.inputs), expected, strict=True)
            if differentiable(expected)
        ]
        norms = [expected.nan_to_num(0.0, 0.0, 0.0).norm().item() for _, expected in pairs]
        for (found, expected), norm in zip(pairs, norms, strict=True):
            tolerance = {8: 1e-7, 4: 1e-3}.get(expected.dtype.itemsize, 1e-1)
            scale = norm + 1e-5 * max(norms)
            defined = torch.equal(found.isnan(), expected.isnan())
            if not defined or (found - expected).nan_to_num().norm().item() > tolerance * scale:
                raise NotCompilableError(
                    "the compiled program gave another result than what it was compiled from"
                )


def _without_alpha(graph: torch.fx.Graph) -> None:
    """Write ``a + alpha * b`` out.

    torch 2.13's inductor fuses ``add(a, b @ c, alpha=...)`` into one operation and silently leaves
    the factor out.
    """
    aten = torch.ops.aten
    sums = (aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor)
    for node in list(graph.nodes):
        alpha = node.kwargs.get("alpha", 1) if node.target in sums else 1
        if alpha != 1:
            with graph.inserting_before(node):
                scaled = graph.call_function(aten.mul.Tensor, (node.args[1], alpha))
            node.args, node.kwargs = (node.args[0], scaled), {}


def _shaped_by_values(node: torch.fx.Node) -> bool:
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    if node.target is not torch.ops.aten.index.Tensor:
        return True
    indices = [i.meta.get("val") for i in node.args[1] if i is not None]  # type: ignore[union-attr]
    return any(not isinstance(i, Tensor) or i.dtype in (torch.bool, torch.uint8) for i in indices)


def _uncast(program: Flat) -> Flat:
    """Casts were recorded; those of the caller's autocast are not to come on top."""

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            return program(*tensors)
        kinds = {t.device.type for t in tensors}
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                if torch.amp.is_autocast_available(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return program(*tensors)

    return run


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """Whatever goes wrong while recording or compiling, the computation can run as it is."""
    try:
        with warnings.catch_warnings():
            # torch's compiler uses parts of torch that are deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except (NotCompilableError, NotBatchableError):
        raise
    except Exception as error:
        first, *rest = str(error).strip().splitlines() or [type(error).__name__]
        # What a C++ compiler complains of stands further below.
        detail = next((f" ({line.strip()[:200]})" for line in rest if "error:" in line), "")
        name = "" if isinstance(error, RuntimeError | ForeignError) else type(error).__name__ + ": "
        raise NotCompilableError(name + first + detail) from error


class Values:
    """The tensors that a program ran with, for a backward that runs one again."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [t.detach() for t in tensors]
        self._versions = [t._version for t in self._tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """They; an error if one was written to."""
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                raise written(tensor)
        return self._tensors


class Programs:
    """Compiled programs by what they were compiled for, or why there is none."""

    def __init__(self, options: dict[str, Any] | None, backend: str, limit: int = 16) -> None:
        self.options, self.backend, self.limit = options, backend, limit
        self.known: dict[Any, Any] = {}
        self.count = 0
        """How many were compiled."""
        self._lock = threading.RLock()

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        found = self.known.get(key)  # One look: to hash a key takes a while.
        if found is None:
            with self._lock:  # Tasks in threads ask for the same at the same time.
                found = self._made(key, make)
        if isinstance(found, Exception):
            raise found
        return found

    def _made(self, key: Any, make: Callable[[], Any]) -> Any:
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= self.limit:
                raise NotCompilableError(
                    f"it was compiled for {self.limit} different shapes or settings already"
                )
            try:
                found = make()
            except (NotCompilableError, NotBatchableError) as error:
                found = error
            self.known[key] = found
        return found

    def compiled(self, recorded: Recorded) -> Flat:
        self.count += 1
        return recorded.compiled(self.options, self.backend)


class Layout:
    """Trees of tensors and other things, taken apart into the tensors and the rest."""

    def __init__(self, tree: Any, moving: Any = ()) -> None:
        self.tree = (moving, tree)
        self.leaves: list[Any] = []
        first = _tree.structure(moving, self.leaves)
        before = len(self.leaves)
        self.structure = first, _tree.structure(tree, self.leaves)
        self.tensors: list[Tensor] = []
        """Each once, in rows: a program is made for one order in memory."""
        self.where: list[int] = []
        seen: dict[int, int] = {}
        for leaf in self.leaves:
            if not isinstance(leaf, Tensor):
                self.where.append(-1)
                continue
            if id(leaf) not in seen:
                seen[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf.contiguous())
            self.where.append(seen[id(leaf)])
        self.moving = 1 + max(self.where[:before], default=-1)
        """How many of the tensors, which come first, are in ``moving``."""

    @property
    def key(self) -> Any:
        """What a program for such a tree depends on."""
        shapes = tuple((t.shape, t.dtype, t.device) for t in self.tensors)
        rest = tuple(_plain(v) for v in self.leaves if not isinstance(v, Tensor))
        return self.structure, tuple(self.where), shapes, rest

    @property
    def requiring(self) -> tuple[bool, ...]:
        """Which tensors require grad."""
        return tuple(t.requires_grad for t in self.tensors)

    def detached(self) -> Layout:
        """The same without a graph."""
        found = copy.copy(self)
        found.tensors = [t.detach() for t in self.tensors]
        found.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        found.tree = _tree.map(lambda v: None if isinstance(v, Tensor) else v, self.tree)
        return found

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Which tensors require grad, or may do so in another call."""
        return tuple(
            t.requires_grad or (i < self.moving and differentiable(t))
            for i, t in enumerate(self.tensors)
        )

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """What ``moving`` and the tree are with other tensors."""
        leaves = [
            leaf if i < 0 else tensors[i] for leaf, i in zip(self.leaves, self.where, strict=True)
        ]
        return _tree.unflatten(leaves, _tree.flatten(self.tree)[1])


def _plain(value: Any) -> Any:
    own = type(value).__module__.partition(".")[0] == "innerloop"
    may_change = isinstance(value, FunctionType | MethodType | ModuleType)
    if may_change or (not own and not _tree.plain(value)):
        raise NotCompilableError(
            f"there is a {type(value).__name__} among the batches, settings or states, whose "
            "content may change; tensors in tuples, lists and dictionaries can be compiled"
        )
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value

"""``torch.compile`` over a whole meta-step, or over each of its inner steps.

Dynamo traces steps with their inner gradients, AOTAutograd derives the backward, and Dynamo's
guards decide whether a program still applies. A new program is used once it has given the losses
and the meta-gradient of the eager call. What cannot be compiled runs eagerly, with one warning.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.nn.utils import get_total_norm

from innerloop import _tree
from innerloop.backward import Auto, Binomial, Forward, Implicit, Remat, Tape
from innerloop.errors import InnerLoopError, four_part
from innerloop.guard.randomness import Draws, Randomness, devices_of
from innerloop.step.protocol import fold
from innerloop.step.state import Meta, State, buffers_of
from innerloop.step.step import InnerStep, as_leaf, call_once
from innerloop.tasks import Way, vmap
from innerloop.tasks.axis import count, spread
from innerloop.tasks.batched import over_tasks

F = TypeVar("F", bound=Callable[..., Any])
_UNITS = ("auto", "whole", "step")
_WHOLE = 100
"""The most steps times modules of which ``"auto"`` makes one program."""


_PROGRAMS = 16
"""The most programs of a loop; torch's own limit, 8, is that of functions without settings."""


class _RefusedError(Exception):
    """A reason to run eagerly that is known before anything is traced."""


class Compiler:
    """The programs of one :class:`innerloop.InnerLoop`."""

    def __init__(self, unit: str, **options: Any) -> None:
        if unit not in _UNITS:
            raise InnerLoopError(
                four_part(
                    f"You wrote compile({unit!r}).",
                    f"one of {', '.join(map(repr, _UNITS))}.",
                    "it says whether one program computes all steps, or each of them.",
                    "inner.compile(), which chooses by the number of steps and modules.",
                )
            )
        self.unit, self._options = unit, options
        self.programs = 0
        """The number of programs that agreed with the eager call."""
        self.refused: str | None = None
        """Why calls run eagerly, if they do."""
        self._whole = _compile(whole, options)
        self._step = _compile(one_step, options)

    def run(
        self,
        inner: Any,
        batches: Sequence[Any],
        val: Any,
        way: Way | None,
        eager: Callable[..., Tensor],
    ) -> Tensor:
        """The losses of a call; ``eager(wrap)`` computes them with ``wrap(step)`` as the step."""
        if self.refused is not None or torch.compiler.is_compiling():
            return eager()
        given = _tree.tensors((*inner.parameters(), list(batches), val))
        inputs = [t for t in given if t.requires_grad]
        if not inputs:
            return eager()
        draws, others, made = Randomness(devices_of(given)), Draws(), _count_programs()
        try:
            with _trace_settings():
                found = self._losses(inner, batches, val, way, eager)
                if _count_programs() == made:
                    return found
                grads = _gradients(found, inputs)
        except Exception as error:  # one of the user's own comes again from the eager call
            draws.set()
            others.undo()
            return self._refuse(eager(), _reason(error))
        draws.set()
        others.undo()
        losses = eager()
        if not draws.is_now() or others.undo():
            return self._refuse(losses, "the model or the loss draws random numbers")
        distance = _distance([found, *grads], [losses, *_gradients(losses, inputs)])
        if not distance <= _tolerance(losses):
            why = f"the program's losses and meta-gradient are off by {distance:.1g}"
            return self._refuse(losses, why)
        self.programs += _count_programs() - made
        return found

    def _losses(
        self, inner: Any, batches: Sequence[Any], val: Any, way: Way | None, eager: Any
    ) -> Tensor:
        backward = inner.backward
        if isinstance(backward, Forward | Implicit):
            raise _RefusedError(f"{type(backward).__name__} does not differentiate by a backward")
        size = len(batches) * sum(1 for _ in inner.model.modules())
        if self.unit == "step":
            return eager(self._compiled_step)
        if self.unit == "auto" and not (isinstance(backward, Tape) and size <= _WHOLE):
            return eager(self._compiled_step)
        if not isinstance(backward, Tape | Remat | Binomial | Auto):
            raise _RefusedError(f"{backward} leaves steps out; inner.compile('step') takes it")
        if isinstance(way, vmap) and way.running_stats != "per-task":
            raise _RefusedError(
                f"tasks={way} changes what steps do; inner.compile('step') takes it"
            )
        run = inner.prepare(len(batches), way is None)
        return self._whole(
            run.step,
            _start_state(run.step, run.state),
            run.meta,
            list(batches),
            val,
            inner.val_loss,
            0 if way is None else count(batches, val),
        )

    def _compiled_step(self, step: InnerStep) -> CompiledStep:
        own = {f.name: getattr(step, f.name) for f in dataclasses.fields(step)}
        return CompiledStep(**own, program=self._step)

    def _refuse(self, losses: Tensor, why: str) -> Tensor:
        self.refused = why
        warnings.warn(
            f"The inner loop cannot be compiled and runs eagerly, with the same result: {why}.",
            stacklevel=5,
        )
        return losses

    def __reduce__(self) -> Any:
        # A copy of a loop makes its own programs.
        return functools.partial(Compiler, self.unit, **self._options), ()

    def __repr__(self) -> str:
        found = f"{self.programs} programs" if self.refused is None else f"eager, {self.refused}"
        return f"compile({self.unit!r}): {found}"


# What is compiled. ------------------------------------------------------------------------------


def whole(
    step: InnerStep,
    state: State,
    meta: Meta,
    batches: Sequence[Any],
    val: Any,
    val_loss: Callable[..., Any] | None,
    tasks: int,
) -> Tensor:
    """The validation loss after one step per batch; of each task, if there are any. [tasks]"""
    over = call_once
    if tasks:
        over, state = over_tasks, spread(state, tasks)
        step = dataclasses.replace(step, map_tasks=over)
    state, _ = fold(step, state, meta, batches)

    def measure(params: Any, buffers: Any, val: Any) -> Tensor:
        model = step.model.bind(params, buffers_of("", buffers))  # type: ignore[union-attr]
        loss: Any = step.loss if val_loss is None else val_loss
        if val_loss is None and step.loss_model is not None:
            loss = step.loss_model.bind(meta.loss, buffers_of("loss", buffers))
        value = loss(model, val)
        return (value[0] if isinstance(value, tuple) else value).reshape(())

    return over(measure, state.params, state.buffers, val)


def one_step(step: InnerStep, state: State, meta: Meta, batch: Any) -> tuple[State, Any]:
    """One step, as it is."""
    return step(state, meta, batch)


@dataclasses.dataclass(frozen=True)
class CompiledStep(InnerStep):
    """A step that runs as a program, with any strategy and any way to run tasks."""

    program: Callable[..., tuple[State, Any]] = one_step

    def _take(self, state: State, meta: Meta, batch: Any) -> tuple[State, Any]:
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(InnerStep)}
        plain = InnerStep(
            **{
                **own,
                "guard": None,
                "look": None,
                "schedule": None,
                "probe": None,
                "needs_view": None,
                "checked": False,
            }
        )
        # The number of the step would be a constant of the program.
        settings = self.settings_at(meta, state.time)
        start = _start_state(self, state)._replace(time=0)
        with torch.enable_grad():
            found = self.program(plain, start, meta._replace(opt=settings), batch)
        if self.look is not None:
            self.look(_tree.tensors(found), start.params.values())
        if not torch.is_grad_enabled():
            found = _tree.map(_tree.detach, found)
        return found[0]._replace(time=state.time + 1), found[1]


def _start_state(step: InnerStep, state: State) -> State:
    """The same, its trained weights requiring grad.

    Dynamo differentiates with respect to what its graph is given, not to leaves made inside.
    """
    params = step.as_trained(state.params)
    for name in step.moving(params):
        if not params[name].requires_grad:
            params[name] = as_leaf(params[name])
    return state._replace(params=params)


# ``torch.compile(inner)``. ----------------------------------------------------------------------


def opaque(forward: F) -> F:
    """A ``forward`` that ``torch.compile(inner)`` does not trace: it means ``inner.compile()``.

    Dynamo only takes frames whose code it was not told to skip. Traced from outside, a call would
    be cut into parts, which cannot be differentiated twice.
    """

    @functools.wraps(forward)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        callback = eval_frame.get_eval_frame_callback()
        if callback is None or isinstance(callback, bool):
            return forward(self, *args, **kwargs)
        eval_frame.set_eval_frame(None)
        try:
            if self.compiler is None:
                self.compile()
            return forward(self, *args, **kwargs)
        finally:
            eval_frame.set_eval_frame(callback)

    method._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    strategy = eval_frame._FrameExecStrategy(*skip)
    eval_frame.set_code_exec_strategy(method.__code__, strategy)  # type: ignore[attr-defined]
    return method  # type: ignore[return-value]


# Around torch.compile. --------------------------------------------------------------------------


def _compile(function: Any, options: dict[str, Any]) -> Any:
    # Dynamo counts recompilations by code object: each loop has its own.
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, fullgraph=True, dynamic=False, **options)


def _trace_settings() -> ExitStack:
    """Inner gradients are traced, and backward(retain_graph=True) stays possible."""
    import torch._dynamo
    from torch._functorch import config as functorch

    stack = ExitStack()
    stack.enter_context(
        torch._dynamo.config.patch(trace_autograd_ops=True, recompile_limit=_PROGRAMS)
    )
    stack.enter_context(functorch.patch(donated_buffer=False))
    stack.enter_context(warnings.catch_warnings())
    # Dynamo reads it of every tensor that it meets.
    warnings.filterwarnings("ignore", "The .grad attribute")
    # Torch's compiler uses what torch has deprecated.
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
    return stack


def _count_programs() -> int:
    """The number of programs that Dynamo has made in this process."""
    from torch._dynamo.utils import counters  # takes a second, which few need

    return counters["stats"]["unique_graphs"]


def _reason(error: Exception) -> str:
    """The first line of an error, and where Dynamo says it was."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = [line for line in lines if line.startswith(("Developer debug context:", "File "))]
    own = [line for line in where if "innerloop" not in line and "/torch/" not in line]
    first = (lines or [type(error).__name__])[: 2 if lines and lines[0].endswith(":") else 1]
    found = [" ".join(first), *own[:1], *own[1:][-1:]]
    return "; ".join([part.removeprefix("Developer debug context: ") for part in found])


def _gradients(losses: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Of the losses with unequal weights."""
    weights = torch.linspace(0.5, 1.5, max(losses.numel(), 2)).to(losses)[: losses.numel()]
    total = (losses.reshape(-1) * weights).sum()
    return list(torch.autograd.grad(total, inputs, retain_graph=True, materialize_grads=True))


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Between all gradients, in relation to their norm; between the losses too."""
    ratios = []
    for part in (slice(1), slice(1, None)):
        pairs = zip(found[part], expected[part], strict=True)
        apart = get_total_norm([(a - b).detach() for a, b in pairs]).item()
        size = get_total_norm(expected[part]).item()
        ratios.append(0.0 if apart == 0 else apart / size if size else float("inf"))
    return max(ratios)


def _tolerance(losses: Tensor) -> float:
    return 10 * torch.finfo(losses.dtype).eps ** 0.5

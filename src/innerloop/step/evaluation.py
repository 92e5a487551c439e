"""One evaluation of an inner loss, and its gradient by the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from innerloop import _deferred, _tree
from innerloop._tracing import readable
from innerloop.errors import InnerLoopError, RequirementError, four_part
from innerloop.guard import closures, randomness, second_order
from innerloop.guard.watch import asked
from innerloop.modules.exact import twice_differentiable
from innerloop.optim import Rule
from innerloop.step.gradient import check_loss
from innerloop.step.state import Meta, State, buffers_of, differentiable, named_leaves, rebuilt


class Evaluation:
    """One evaluation of the loss: its value, and the gradient by the weights it was taken at."""

    def __init__(self, step: Any, state: State, meta: Meta, batch: Any) -> None:
        self.step, self.state, self.meta, self.batch = step, state, meta, batch
        self.buffers = state.buffers
        self.out: Any = None
        self.value: Tensor = None  # type: ignore[assignment]
        self.asked = torch.is_grad_enabled() or closures.current() is not None
        """Whether a meta-gradient is wanted, now or from a later recomputation."""
        self.followed = False
        """Whether anything that a gradient could reach has a part in the loss."""

    def gradients(self, create_graph: bool) -> dict[str, Any]:
        """G = ∇ℓ(θ, φ_loss), with a graph or without; ``None`` for weights the loss leaves out."""
        tracked, since = torch.is_grad_enabled(), closures.sequence_number()
        watch = None if tracked else closures.current()
        again = None if watch is None else self._repeated()
        named = named_leaves(self.state.params)
        sources = {name: source(named[name], tracked) for name in self.moving(named)}
        weights = list(sources.values())
        versions = versions_of(named)
        exact = twice_differentiable() if create_graph else contextlib.nullcontext()
        with exact, torch.enable_grad(), _deferred.claimed() as valueless:
            self.value, self.out = self.evaluated({**named, **sources})
            self.check()
            check_unwritten(versions)
            self.followed = tracked and self._matters(sources.values(), since)
            create_graph = create_graph and self.followed
            put_off = valueless and create_graph
            with _deferred.deferring(weights) if put_off else contextlib.nullcontext():
                found = torch.autograd.grad(
                    self.total,
                    weights,
                    retain_graph=self.followed,
                    create_graph=create_graph,
                    allow_unused=True,
                )
        check_found(found)
        if watch is not None and again is not None:
            watch.inspect(tensors_of(self.out), sources.values(), since, again, self.step.roots)
        if create_graph:
            names = list(sources)
            second_order.guard(self.total, found, weights, names.__getitem__, since)
        if self.step.proximal:
            found = [self.pulled(n, g, named[n]) for n, g in zip(sources, found, strict=True)]
        return dict.fromkeys(named) | dict(zip(sources, found, strict=True))

    def check(self) -> None:
        """Refuse a value that has no gradient."""
        check_loss(self.value)

    @property
    def total(self) -> Tensor:
        """What the gradient is taken of."""
        return self.value

    def updated(self, grads: Mapping[str, Any]) -> tuple[Any, Any]:
        """The rule's part of the step: the new weights and the new optimizer state."""
        return self.step.updated(self.state, self.meta, grads, self)

    def keep(self, part: str, found: Mapping[str, Tensor]) -> None:
        """Note what a forward left in the buffers of the model, the loss or the optimizer."""
        prefix = f"{part}:" if part else ""
        for name, buffer in found.items():
            if buffer.requires_grad and self.asked:
                raise RequirementError(
                    four_part(
                        f"The forward left a tensor with a graph in the buffer {prefix + name!r}.",
                        "buffers without a gradient.",
                        "they are carried from step to step as numbers; the gradient through them "
                        "would silently be missing.",
                        "x.detach() where it is stored; or the quantity as an output of the loss.",
                    )
                )
        new = {
            prefix + name: _unless_same(buffer.detach(), self.buffers.get(prefix + name))
            for name, buffer in found.items()
        }
        self.buffers = {**self.buffers, **new}

    def elsewhere(self, params: Any) -> tuple[Tensor, Any]:
        """The loss and its gradient at other weights, for rules that ask for them."""
        other = type(self)(self.step, State(params, self.buffers), self.meta, self.batch)
        grads = other.gradients(torch.is_grad_enabled() and not self.step.first_order)
        self.buffers = other.buffers
        return other.value, rebuilt(params, grads)

    def trained(self, named: Mapping[str, Any]) -> list[str]:
        """The weights that move: those of the rule that are not frozen in the model."""
        step = self.step
        names = step.rule.names if isinstance(step.rule, Rule) else None
        weights = {} if step.model is None else step.model.params
        # The weights of a replica are no Parameters; whether they require grad says nothing here.
        frozen = {
            name
            for name, p in weights.items()
            if isinstance(p, nn.Parameter) and not p.requires_grad
        }
        own = named if names is None else set(names)
        return [n for n, p in named.items() if n in own and n not in frozen and differentiable(p)]

    def moving(self, named: Mapping[str, Any]) -> list[str]:
        """Those that are trained, of which there must be some."""
        trained = self.trained(named)
        if not trained:
            raise RequirementError(
                four_part(
                    "All weights that the optimizer trains are frozen (requires_grad is False).",
                    "at least one weight that moves.",
                    "a step takes the gradient of the loss by the weights it moves.",
                    "model.requires_grad_(True), or .requires_grad_(True) for the layers to train.",
                )
            )
        return trained

    def _matters(self, sources: Iterable[Tensor], since: int) -> bool:
        given = _tree.flatten((self.state.params, self.meta, self.batch))[0]
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given):
            return True
        return any(closures.strangers(tensors_of(self.out), sources, since))

    def pulled(self, name: str, grad: Tensor | None, param: Tensor) -> Tensor | None:
        pull = self.step.proximal * (param - named_leaves(self.meta.anchor)[name])
        return pull if grad is None else grad + pull

    def evaluated(self, named: dict[str, Tensor]) -> tuple[Tensor, Any]:
        step, loss, given = self.step, self.step.loss, self.state.buffers
        if step.loss_model is not None:
            loss = step.loss_model.bind(self.meta.loss, buffers_of("loss", given))
        extra = () if step.loss_model is not None or not self.meta.loss else (self.meta.loss,)
        around = closures.at_depth(closures.depth() + 1)
        if step.model is None:
            with around:
                out = loss(rebuilt(self.state.params, named), self.batch, *extra)
        else:
            replica = step.model.bind(named, buffers_of("", given))
            with around, asked(step.model.trained, named):
                out = loss(replica, self.batch, *extra)
            left = step.model.buffers_of(replica)
            self.keep("", {n: b for n, b in left.items() if n not in step.frozen})
        if step.loss_model is not None:
            self.keep("loss", step.loss_model.buffers_of(cast(nn.Module, loss)))
        first, *rest = out if isinstance(out, tuple) and out else (out,)
        value: Any = (
            first.reshape(()) if isinstance(first, Tensor) and first.numel() == 1 else first
        )
        return value, (value, *rest) if isinstance(out, tuple) else value

    def _repeated(self) -> Callable[[], list[Tensor]]:
        """The same evaluation once more, if it is called; it holds nothing of this one."""
        kind, step, state, meta = type(self), self.step, self.state, self.meta
        batch = _tree.copied(self.batch)

        def again() -> list[Tensor]:
            named = named_leaves(state.params)
            devices = randomness.devices_of(named.values())
            with randomness.preserved(devices), torch.enable_grad():
                return tensors_of(kind(step, state, meta, batch).evaluated(named)[1])

        return again


def tensors_of(tree: Any) -> list[Tensor]:
    return [t for t in _tree.flatten(tree)[0] if isinstance(t, Tensor)]


def check_found(grads: Sequence[Tensor | None]) -> None:
    """Refuse a loss that has no gradient by any of the weights."""
    if all(g is None for g in grads):
        raise RequirementError(
            four_part(
                "The loss does not depend on any of the weights that the optimizer trains.",
                "a loss computed with the model it is handed.",
                "nothing would move.",
                "def loss(model, batch): ... model(x) ..., with that argument and not with a "
                "model from outside.",
            )
        )


def source(param: Tensor, tracked: bool) -> Tensor:
    """A weight as its own point of the graph: the inner gradient is a *partial* derivative.

    Other weights, or parameters of the loss, may have been computed from this one.
    """
    if tracked and param.requires_grad:
        return param.view_as(param)
    return closures.own(param.detach().requires_grad_())


def versions_of(named: Mapping[str, Any]) -> dict[str, tuple[Tensor, int]]:
    """How often each weight has been written to."""
    return {name: (p, p._version) for name, p in named.items() if isinstance(p, Tensor)}


def check_unwritten(versions: Mapping[str, tuple[Tensor, int]]) -> None:
    """Refuse a loss that changes the weights it is handed."""
    for name, (weight, version) in versions.items():
        if weight._version != version:
            raise InnerLoopError(
                four_part(
                    f"The loss, or the model's forward, wrote in place to the weight {name!r}.",
                    "a forward that only reads the weights.",
                    "they are the model's own at the first step, and a step is a function of them.",
                    "the changed weight as a new tensor: torch.nn.utils.parametrize, or "
                    "weight.clamp(...) without the underscore where it is used.",
                )
            )


def _unless_same(new: Tensor, old: Tensor | None) -> Tensor:
    """The old buffer if the new one has its values: a mask is then one tensor in all states.

    Compared, since batch norm writes to its statistics without telling the version counter.
    """
    if old is None or not readable(new):
        return new
    same = old.dtype == new.dtype and torch.equal(old, new)
    return old if same else new

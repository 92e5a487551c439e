"""Published methods of meta-learning, each as an inner loop.

All return an :class:`innerloop.InnerLoop` and are used alike: ``inner(train, val).backward()``
leaves the meta-gradient, any ``torch.optim`` class over ``inner.parameters()`` is the outer
optimizer, and ``inner.adapt(train)`` is the adapted model. ``options`` are those of ``InnerLoop``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from innerloop.backward import Implicit, Truncated
from innerloop.errors import InnerLoopError, refusal
from innerloop.inner_loop import InnerLoop
from innerloop.settings import Learn

Loss = Callable[[Any, Any], Any]


def maml(model: nn.Module, loss: Loss, lr: float = 0.1, **options: Any) -> InnerLoop:
    """MAML: learn initial weights from which a few steps of SGD fit a task (Finn et al. 2017).

    >>> model = nn.Linear(1, 1)
    >>> inner = maml(model, lambda model, batch: (model(batch) - 1).square().mean())
    >>> inner([torch.ones(4, 1)] * 3, torch.ones(4, 1)).backward()
    >>> model.weight.grad.shape
    torch.Size([1, 1])
    """
    return InnerLoop(model, torch.optim.SGD(model.parameters(), lr=lr), loss, **options)


def first_order_maml(model: nn.Module, loss: Loss, lr: float = 0.1, **options: Any) -> InnerLoop:
    """MAML that takes inner gradients as constants: no second derivatives (Finn et al. 2017)."""
    _check_options("first_order_maml", options, "first_order")
    return maml(model, loss, lr, first_order=True, **options)


def reptile(model: nn.Module, loss: Loss, lr: float = 0.1, **options: Any) -> InnerLoop:
    """Reptile: move the initial weights towards the adapted ones (Nichol et al. 2018).

    There is no validation loss: ``inner(train, None)`` is half the squared distance of the initial
    weights to the adapted ones, taken as fixed, so the gradient is θ₀ - θ_J. With the outer
    optimizer ``torch.optim.SGD(inner.parameters(), lr=ε)`` the update is θ₀ + ε (θ_J - θ₀).
    """
    _check_options("reptile", options, "first_order", "val_loss", "learn")
    return maml(model, loss, lr, first_order=True, val_loss=_Distance(model), **options)


class _Distance:
    """Half the squared distance of a model to its adapted copy. Saved with the model."""

    by_choice = (
        "Reptile takes the adapted weights as fixed: L_val is their distance to the initial ones, "
        "and its gradient the difference.",
        "il.algorithms.maml or first_order_maml for the gradient of a loss after training.",
    )
    """For :func:`innerloop.diagnose`: an intended deviation, and the exact alternative."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, adapted: nn.Module, _: Any) -> Tensor:
        pairs = zip(self.model.parameters(), adapted.parameters(), strict=True)
        return torch.stack([(a - b.detach()).square().sum() / 2 for a, b in pairs]).sum()


def anil(
    model: nn.Module,
    loss: Loss,
    head: nn.Module | Iterable[nn.Parameter],
    lr: float = 0.1,
    **options: Any,
) -> InnerLoop:
    """MAML whose inner loop adapts the head alone (Raghu et al. 2020).

    The outer loop learns all weights: those of the body, and those from which the head starts.
    """
    found = head.parameters() if isinstance(head, nn.Module) else head
    adapting = [] if isinstance(found, str) else list(found)
    if not adapting:
        raise _no_head(head)
    return InnerLoop(model, torch.optim.SGD(adapting, lr=lr), loss, **options)


def meta_sgd(model: nn.Module, loss: Loss, lr: float = 0.1, **options: Any) -> InnerLoop:
    """MAML with a learned rate, of any sign, for every number of the weights (Li et al. 2017)."""
    _check_options("meta_sgd", options, "learn")
    return maml(model, loss, lr, learn={"init": True, "lr": Learn(per="element")}, **options)


def maml_plus_plus(
    model: nn.Module, loss: Loss, steps: int, lr: float = 0.1, **options: Any
) -> InnerLoop:
    """MAML with a learned rate for every tensor of the model and step (Antoniou et al. 2019).

    Its other parts go with it: :func:`multi_step_loss`, first-order updates at the beginning
    (set ``inner.first_order = True`` for them), and a cosine schedule of the
    outer optimizer.
    """
    _check_options("maml_plus_plus", options, "learn")
    rates = Learn(per=("parameter", "step"), steps=steps)
    return maml(model, loss, lr, learn={"init": True, "lr": rates}, **options)


def multi_step_loss(
    inner: InnerLoop, train: Iterable[Any], val: Any, weights: Sequence[float]
) -> Tensor:
    """Sum the weighted validation losses after each step, as MAML++ trains at first.

    MAML++ begins with equal weights and moves them to the last step. As in ``inner(train, val)``,
    a task axis is there if ``inner`` was made with ``tasks``. Every loss that counts has steps of
    its own, so this takes more time than the loss after the last one, and dropout draws other masks
    for each of them.

    >>> model = nn.Linear(1, 1)
    >>> inner = maml_plus_plus(model, lambda model, x: (model(x) - 1).square().mean(), steps=2)
    >>> x = torch.ones(4, 1)
    >>> multi_step_loss(inner, [x, x], x, weights=[0.5, 0.5]).backward()
    """
    if isinstance(inner.backward, Truncated) and inner.backward.carry:
        raise _carrying_loop(inner.backward)
    train = list(train)
    if not any(weights):
        raise _no_weights(weights)
    if len(weights) != len(train):
        raise _other_number_of_weights(weights, len(train))
    wanted = [(k, w) for k, w in enumerate(weights, 1) if w]
    losses = [w * inner(train[:k], val) for k, w in wanted]
    return torch.stack(losses).sum(0)


def imaml(
    model: nn.Module,
    loss: Loss,
    lr: float = 0.1,
    proximal: float = 1.0,
    iterations: int | None = None,
    stationary: float = 1e-3,
    **options: Any,
) -> InnerLoop:
    """iMAML: implicit gradients where training has converged (Rajeswaran et al. 2019).

    ``proximal / 2 · ‖θ - θ₀‖²`` is added to the inner loss. The steps may be many, or of any
    optimizer: only the last weights are kept. ``iterations`` of conjugate gradients solve the
    linear system, by default as many as it takes; a warning says that training has not converged
    to ``stationary``.
    """
    _check_options("imaml", options, "backward")
    implicit = Implicit(proximal=proximal, iterations=iterations, stationary=stationary)
    return maml(model, loss, lr, backward=implicit, **options)


def cavia(model: nn.Module, loss: Loss, context: int, lr: float = 1.0, **options: Any) -> InnerLoop:
    """CAVIA: adapt a few numbers that the model takes as an input (Zintgraf et al. 2019).

    ``model(x, context)`` is called with a vector of ``context`` numbers, which is zero at the start
    of every task and all that the inner loop changes. The outer loop learns the model:
    ``inner.parameters()`` are its weights. ``loss(f, batch)`` calls ``f(x)``, the model with its
    context, and so is the adapted model called.
    """
    _check_options("cavia", options, "learn")
    if not isinstance(context, int) or isinstance(context, bool) or context < 1:
        raise _no_context(context)
    if next(model.parameters(), None) is None:
        raise _model_without_weights(model)
    start = _Context(context, model)
    optimizer = torch.optim.SGD(start.parameters(), lr=lr)
    if options.get("val_loss") is not None:
        # As for the loss: with the weights that the loop has, which are not always the model's.
        options["val_loss"] = partial(_loss_with_context, model, options["val_loss"])
    return InnerLoop(start, optimizer, _Shared(model, loss), learn=(), **options)


class _Context(nn.Module):
    """The context: in CAVIA the inner loop's model."""

    def __init__(self, size: int, model: nn.Module) -> None:
        super().__init__()
        first = next(model.parameters())
        self.context = nn.Parameter(torch.zeros(size, dtype=first.dtype, device=first.device))
        # Not registered: its weights do not adapt.
        self.shared: nn.Module
        self.__dict__["shared"] = model

    def forward(self, x: Any) -> Any:
        # Running statistics stay the model's own, as those of every adapted model.
        buffers = {name: buffer.clone() for name, buffer in self.shared.named_buffers()}
        return functional_call(self.shared, buffers, (x, self.context))


class _Shared(nn.Module):
    """The loss with the shared model, whose weights are meta-parameters of the loss."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, adapting: _Context, batch: Any) -> Any:
        return _loss_with_context(self.model, self.loss, adapting, batch)


def _loss_with_context(model: nn.Module, loss: Loss, adapting: Any, batch: Any) -> Any:
    return loss(lambda x: model(x, adapting.context), batch)


def _check_options(method: str, options: dict[str, Any], *chosen: str) -> None:
    """Refuse options that the method itself sets."""
    given = [name for name in chosen if name in options]
    if given:
        raise _option_of_method(method, given[0], chosen)


def _no_head(head: Any) -> InnerLoopError:
    shown = type(head).__name__ if isinstance(head, nn.Module) else repr(head)
    return refusal(
        f"You wrote anil(..., head={shown}).",
        "a part of the model that has weights, or such weights.",
        "they are all that the inner loop adapts.",
        "anil(model, loss, head=model.head).",
    )


def _carrying_loop(backward: Truncated) -> InnerLoopError:
    return refusal(
        f"You gave an inner loop with {backward} to multi_step_loss.",
        "one that starts anew in each call.",
        "the steps are taken again for each loss.",
        f"Truncated({backward.k}).",
    )


def _no_weights(weights: Sequence[float]) -> InnerLoopError:
    return refusal(
        f"You gave weights={list(weights)}.",
        "at least one that is not 0.",
        "the result is the weighted sum of the losses after each step.",
        "weights=[0.0, 0.0, 1.0] for the loss after the last of three.",
    )


def _other_number_of_weights(weights: Sequence[float], steps: int) -> InnerLoopError:
    return refusal(
        f"You gave {len(weights)} weights for {steps} steps.",
        "one for the loss after each step.",
        "each is measured.",
        f"weights={[round(1 / max(steps, 1), 3)] * steps}.",
    )


def _no_context(context: Any) -> InnerLoopError:
    return refusal(
        f"You wrote cavia(..., context={context!r}).",
        "at least one number, and a whole number of them.",
        "the context is all that adapts.",
        "cavia(model, loss, context=5).",
    )


def _model_without_weights(model: nn.Module) -> InnerLoopError:
    return refusal(
        f"You gave a {type(model).__name__} without weights to cavia.",
        "a model with weights.",
        "the outer loop learns them, and the context is of their kind.",
        "cavia(model, loss, context=5) for a model that is called as model(x, context).",
    )


def _option_of_method(method: str, given: str, chosen: tuple[str, ...]) -> InnerLoopError:
    return refusal(
        f"You gave {given} to {method}.",
        f"other keywords of InnerLoop than {', '.join(chosen)}.",
        "the method sets it itself.",
        "InnerLoop(model, optimizer, loss, ...) for a method of your own.",
    )

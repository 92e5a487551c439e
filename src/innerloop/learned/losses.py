"""A learned loss: a small network over predictions and targets."""

from __future__ import annotations

import itertools
import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from innerloop._numerics import full_precision, widened
from innerloop.errors import InnerLoopError, refusal
from innerloop.learned.state_check import StateCheckedModule

_KINDS = ("values", "classes")
FORMS = ("free", "weighted")
_REACH = 3.0  # of the logarithm of a weight: without a bound, training with it diverges easily
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_IMPOSSIBLE = -1e4  # what the network reads of a class whose log-probability is -inf


class LearnedLoss(StateCheckedModule):
    """A loss ℓ(prediction, target, extras) ≥ 0 by a network, the same for every coordinate.

    ``criterion(prediction, target)`` is a loss like those of ``torch.nn``. The same object is a
    loss of an inner loop, which trains it: ``criterion(model, (x, y))`` is
    ``criterion(model(x), y)``, and whatever follows ``y`` in the batch are the extras.

    With ``targets="values"`` (regression) prediction and target have the same shape. The network
    maps both numbers of each coordinate to its loss; the result is the mean.

    With ``targets="classes"`` the prediction holds logits, [..., classes], and the target class
    numbers, [...], or probabilities, [..., classes]. The network reads the log-probability and the
    target of each class; the result is the sum over classes, in the mean over examples. So it does
    not depend on the number or the order of the classes.

    With ``form="free"`` the network's output is the loss. With ``form="weighted"`` it is a factor
    of the ordinary loss (squared error, cross-entropy): from 1/20 to 20, and 1 before training.

    Such a loss is a mean over independent examples. Examples interact

    - with ``moments`` above 0 (regression only): a second network maps the extras of a coordinate
      to numbers f₁, f₂, …, and Σₖ (mean of fₖ·e)² of the errors e is added. So the cost of an error
      may depend on errors elsewhere, as far as the extras distinguish the places;
    - with ``centered`` (classes only): a learned fraction of the mean logits of all examples, 0 at
      first, is subtracted from each. So what all examples have in common may count less, or more.

    With ``steps`` the last argument after the target is the step of training, from 0 on. The
    networks read it, and each step has its own factor and fraction. Steps beyond count as the last
    one; a tensor below 0, whose value is not checked, as the first.

    Args:
        targets: ``"values"`` or ``"classes"``.
        form: ``"free"`` or ``"weighted"``.
        extras: the number of further inputs for each coordinate: the input, the step, a weight
            of the example. They are numbers, or tensors with as many axes as the prediction, each
            as long or 1 long.
        moments: the number of squared means over all coordinates that are added.
        centered: whether a fraction of the mean logits is subtracted.
        steps: the number of steps of training that it distinguishes.
        hidden: widths of the hidden layers.
        dtype: of its weights.

    S. Bechtle et al. Meta learning via learned loss. ICPR 2020 (ML³).

    >>> criterion = LearnedLoss()
    >>> model = nn.Linear(3, 1)
    >>> x, y = torch.ones(4, 3), torch.ones(4, 1)
    >>> criterion(model(x), y) == criterion(model, (x, y))
    tensor(True)
    """

    def __init__(
        self,
        targets: str = "values",
        *,
        form: str = "free",
        extras: int = 0,
        moments: int = 0,
        centered: bool = False,
        steps: int = 0,
        hidden: Sequence[int] = (40, 40),
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_choice("targets", targets, _KINDS)
        _check_choice("form", form, FORMS)
        for name, count in {"extras": extras, "moments": moments, "steps": steps}.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise _no_count(name, count)
        if moments and (targets == "classes" or not extras):
            raise _impossible_moments(targets, extras, moments)
        if centered and targets != "classes":
            raise _impossible_centering()
        self.targets, self.form, self.extras, self.steps = targets, form, extras, steps
        hidden = [operator.index(width) for width in hidden]
        self.kind = {
            "targets": targets,
            "form": form,
            "extras": extras,
            "moments": moments,
            "centered": bool(centered),
            "steps": steps,
            "hidden": hidden,
        }
        self.net = _network((2 + extras + steps, *hidden, 1), dtype)
        last = self.net[-1]
        assert isinstance(last, nn.Linear)
        if form == "weighted":
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        self.moments = _network((extras + steps, *hidden, moments), dtype) if moments else None
        # For each step: the logarithm of a factor, and how much of the mean is left out.
        self.factors = nn.Parameter(torch.zeros(steps, dtype=dtype)) if steps else None
        self.center = nn.Parameter(torch.zeros(steps or 1, dtype=dtype)) if centered else None

    def forward(self, prediction: Any, target: Any, *extras: Any) -> Tensor:
        """Return the loss of predictions, or of a model on a batch (x, target, *extras)."""
        if not isinstance(prediction, Tensor):
            if not isinstance(target, list | tuple) or len(target) < 2:
                raise _not_a_batch(target)
            x, target, *rest = target
            prediction, extras = prediction(x), (*extras, *rest)
        prediction = widened(prediction)
        inputs, at = self._split_extras(extras)
        values = self._losses(prediction, target, inputs, at)
        found = (values.sum(-1) if self.targets == "classes" else values).mean()
        if self.moments is not None:
            errors = (prediction - _expand(prediction, target)).unsqueeze(-1)
            weighted = self.together(prediction, *extras) * errors
            found = found + weighted.reshape(-1, weighted.shape[-1]).mean(0).square().sum()
        return found * self._factor(at, found)

    def each(self, prediction: Tensor, target: Tensor, *extras: Any) -> Tensor:
        """Return the loss of each coordinate, in the prediction's shape."""
        prediction = widened(prediction)
        inputs, at = self._split_extras(extras)
        values = self._losses(prediction, target, inputs, at)
        if values.shape != prediction.shape:
            right = target.long().unsqueeze(-1)
            values = torch.zeros_like(prediction).scatter(-1, right, values)
        return values * self._factor(at, values)

    def together(self, prediction: Tensor, *extras: Any) -> Tensor:
        """Return the weights f of each coordinate in the moments. [..., moments]

        They depend on the extras alone.
        """
        if self.moments is None:
            raise _impossible_moments(self.targets, self.extras, 0)
        prediction = widened(prediction)
        inputs, at = self._split_extras(extras)
        weights = _apply_network(self.moments, self._read(prediction, at, *inputs))
        return weights.to(prediction.dtype)

    def _split_extras(self, extras: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor]:
        """Return the extras without the step, and the step as a one-hot vector. [steps]"""
        needed = self.extras + bool(self.steps)
        if len(extras) != needed:
            raise _other_number_of_extras(needed, len(extras), bool(self.steps))
        weight = next(self.net.parameters())
        places = torch.arange(self.steps, device=weight.device)
        if not self.steps:
            return extras, places.to(weight.dtype)
        step = _step_index(extras[-1], self.steps - 1)
        return extras[:-1], (places == step).to(weight.dtype)

    def _losses(
        self, prediction: Tensor, target: Tensor, extras: Sequence[Any], at: Tensor
    ) -> Tensor:
        """Return the losses as ``each``; if only the target class has one, that alone: [..., 1]."""
        right = None
        if self.targets == "classes":
            prediction = self._center(prediction, at).log_softmax(-1)
            if not target.is_floating_point() and target.shape == prediction.shape[:-1]:
                right = target.long().unsqueeze(-1)
                target = torch.zeros_like(prediction).scatter(-1, right, 1.0)
        if prediction.shape != target.shape:
            raise _other_shape(prediction, target)
        read = [_expand(prediction, number) for number in (prediction, target, *extras)]
        if self.form == "weighted" and right is not None:
            read = [number.gather(-1, right) for number in read]
        prediction, target, *extras = read
        seen, free = prediction, torch.zeros_like(prediction, dtype=torch.bool)
        if self.targets == "classes":
            # A class that is impossible and not the target costs nothing, as in cross-entropy.
            seen = torch.where(prediction == -math.inf, _IMPOSSIBLE, prediction)
            free = (prediction == -math.inf) & (target == 0)
        read = self._read(prediction, at, seen, target, *extras)
        out = _apply_network(self.net, read).squeeze(-1)
        if self.form == "free":
            return torch.where(free, 0.0, softplus(out).to(prediction.dtype))
        if self.targets == "classes":
            ordinary = -target * torch.where(free, 0.0, prediction)
        else:
            ordinary = (prediction - target).square()
        weight = (_REACH * torch.tanh(out / _REACH)).exp()
        return weight.to(prediction.dtype) * ordinary

    def _center(self, logits: Tensor, at: Tensor) -> Tensor:
        if self.center is None:
            return logits
        part = (self.center * at).sum() if self.steps else self.center
        return logits - part.to(logits.dtype) * _mean_logits(logits)

    def _factor(self, at: Tensor, values: Tensor) -> Tensor | float:
        return 1.0 if self.factors is None else (self.factors * at).sum().exp().to(values.dtype)

    def _read(self, prediction: Tensor, at: Tensor, *numbers: Any) -> Tensor:
        """Stack the network's inputs in the precision of its weights. [..., numbers + steps]"""
        read = torch.stack([_expand(prediction, number) for number in numbers], dim=-1).to(at.dtype)
        return torch.cat([read, at.expand(*prediction.shape, -1)], -1) if self.steps else read

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.kind)

    def set_extra_state(self, state: Any) -> None:
        """Refuse the weights of another kind: they would fit, and mean something else."""
        if state != self.kind:
            known = isinstance(state, dict) and set(state) == set(self.kind)
            kind = f"LearnedLoss({_format(state)})" if known else ""
            raise _other_settings(kind or "something else", self.extra_repr())

    def extra_repr(self) -> str:
        return _format(self.kind)


def _format(kind: dict[str, Any]) -> str:
    """Format settings as arguments, without those that are 0 or False."""
    named = [f"{name}={value!r}" for name, value in kind.items() if value and name != "targets"]
    return ", ".join([repr(kind["targets"]), *named])


def _apply_network(net: nn.Module, read: Tensor) -> Tensor:
    """Apply a network in the precision of its weights, in autocast too, as torch's losses do."""
    with full_precision(read.device):
        return net(read)


def _network(widths: Sequence[int], dtype: torch.dtype | None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        # Smooth, since the meta-gradient differentiates its gradient.
        layers += [nn.Linear(before, after, dtype=dtype), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def _expand(prediction: Tensor, number: Any) -> Tensor:
    if isinstance(number, numbers.Real):
        return torch.full_like(prediction, float(number))
    # With fewer axes [points] would be taken for the last axis of [points, points].
    if not isinstance(number, Tensor) or number.dim() != prediction.dim():
        raise _wrong_extra(prediction, number)
    pairs = zip(number.shape, prediction.shape, strict=True)
    if any(own not in (1, whole) for own, whole in pairs):
        raise _wrong_extra(prediction, number)
    return number.to(prediction.dtype).expand_as(prediction)


def _check_choice(name: str, given: Any, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise refusal(
            f"You gave {name}={given!r} to LearnedLoss.",
            f"{' or '.join(map(repr, choices))}.",
            "it decides what the network reads, and what its output means.",
            f"LearnedLoss({name}={choices[-1]!r}), or leave it out.",
        )


def _step_index(step: Any, last: int) -> Tensor:
    """Return the number of a step, at most the last one. []

    The value of a tensor is not checked: it may be one of a batch, or on another device.
    """
    if isinstance(step, Tensor) and step.dim() == 0 and step.dtype in _INTEGERS:
        return step.long().clamp(0, last)
    try:
        number = -1 if isinstance(step, (bool, Tensor)) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise _no_step(step)
    return torch.tensor(min(number, last))


def _mean_logits(logits: Tensor) -> Tensor:
    """Average over all examples, without those in which a class is impossible. [classes]"""
    flat = logits.reshape(-1, logits.shape[-1])
    possible = flat != -math.inf
    return torch.where(possible, flat, 0.0).sum(0) / possible.sum(0).clamp(min=1)


# Refusals. --------------------------------------------------------------------------------------


def _other_settings(saved: str, own: str) -> InnerLoopError:
    return refusal(
        f"The state is that of {saved}, this is LearnedLoss({own}).",
        "the same settings.",
        "a weight may fit and mean something else: the loss, or a factor of it.",
        "LearnedLoss with the settings that were saved, then load_state_dict.",
    )


def _no_count(name: str, count: Any) -> InnerLoopError:
    return refusal(
        f"You gave {name}={count!r} to LearnedLoss.",
        "a whole number, 0 or more.",
        "it is a number of inputs or outputs of the network.",
        "LearnedLoss(extras=1, moments=16), or none of them.",
    )


def _no_step(step: Any) -> InnerLoopError:
    return refusal(
        f"The step, the last of the extras, is {step!r}.",
        "a whole number from 0 on.",
        "the loss was made with steps, and distinguishes them by their number.",
        "criterion(prediction, target, *extras, 0) for the first step.",
    )


def _other_shape(prediction: Tensor, target: Tensor) -> InnerLoopError:
    return refusal(
        f"The prediction has shape {tuple(prediction.shape)}, the target {tuple(target.shape)}.",
        "the same shape; or for targets='classes' logits [..., classes] and whole numbers [...].",
        "each coordinate of a prediction is compared with one of the target.",
        "criterion(model(x), y.unsqueeze(-1)) if only a last axis is missing.",
    )


def _wrong_extra(prediction: Tensor, extra: Any) -> InnerLoopError:
    shape = f" of shape {tuple(extra.shape)}" if isinstance(extra, Tensor) else ""
    return refusal(
        f"An extra is a {type(extra).__name__}{shape}, for a prediction of shape "
        f"{tuple(prediction.shape)}.",
        "a number, or a tensor with as many axes, each as long or 1 long.",
        "it is clear then which number belongs to which coordinate.",
        "extra.unsqueeze(-1) for one number per example.",
    )


def _impossible_moments(targets: str, extras: int, moments: int) -> InnerLoopError:
    return refusal(
        f"You gave moments={moments} with targets={targets!r} and extras={extras}.",
        "targets='values' and at least one extra.",
        "a moment is a mean of errors, each weighted by a function of the extras.",
        "LearnedLoss(extras=1, moments=16) and the input as the extra, or moments=0.",
    )


def _impossible_centering() -> InnerLoopError:
    return refusal(
        "You gave centered=True with targets='values'.",
        "targets='classes'.",
        "the mean of logits carries no information, that of values is part of the prediction.",
        "LearnedLoss(extras=1, moments=16), with which values count together, or centered=False.",
    )


def _other_number_of_extras(needed: int, found: int, step: bool) -> InnerLoopError:
    last = ", the last of them the step" if step else ""
    return refusal(
        f"The loss was called with {found} extras.",
        f"{needed}, as it was made{last}.",
        "its network has one input for each.",
        "criterion(prediction, target, *extras), or a batch (x, target, *extras).",
    )


def _not_a_batch(batch: Any) -> InnerLoopError:
    count = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
    return refusal(
        f"The batch is a {type(batch).__name__}{count}.",
        "(x, target), or (x, target, *extras).",
        "the model is called with the first, and the result compared with the second.",
        "criterion(model, (x, target)).",
    )

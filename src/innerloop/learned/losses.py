"""A loss that is learned: a small network over predictions and targets."""

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
from innerloop.errors import InnerLoopError, four_part
from innerloop.learned._checked import Checked

_KINDS = ("values", "classes")
FORMS = ("free", "weighted")
_REACH = 3.0  # of the logarithm of a weight: without a bound, training with it diverges easily
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_IMPOSSIBLE = -1e4  # what the network reads of a class whose log-probability is -inf


class LearnedLoss(Checked):
    """A loss ℓ(prediction, target, extras) ≥ 0 by a network, the same for every coordinate.

    ``criterion(prediction, target)`` is a loss like those of ``torch.nn``. The same object is a
    loss of an inner loop, which trains it: ``criterion(model, (x, y))`` is
    ``criterion(model(x), y)``, and whatever follows ``y`` in the batch are the extras.

    With ``targets="values"`` (regression) prediction and target have the same shape. The network
    reads both numbers of each coordinate and says its loss; the result is the mean.

    With ``targets="classes"`` the prediction holds logits, [..., classes], and the target class
    numbers, [...], or probabilities, [..., classes]. The network reads the log-probability and the
    target of each class; the result is the sum over classes, in the mean over examples. So it does
    not depend on the number or the order of the classes.

    With ``form="free"`` the network says the loss itself. With ``form="weighted"`` it says by how
    much to multiply the ordinary one (squared error, cross-entropy): from a twentieth to twenty
    times, and once before it is trained.

    Such a loss is a sum over examples, each by itself. They count together

    - with ``moments`` above 0 (regression only): a second network says numbers f₁, f₂, … from the
      extras of a coordinate, and Σₖ (mean of fₖ·e)² of the errors e is added. So an error in one
      place may count by those in others, as far as the extras tell the places;
    - with ``centered`` (classes only): a part of the mean logits of all examples, learned and 0 at
      first, is left out of each. So what all examples have in common may count less, or more.

    With ``steps`` it is told the step of training, from 0 on, as the last of what follows the
    target. Its networks read it, and it has a factor, and a part to leave out, for each step. Steps
    beyond count as the last one; a tensor below 0, whose value is not looked at, as the first.

    Args:
        targets: ``"values"`` or ``"classes"``.
        form: ``"free"`` or ``"weighted"``.
        extras: how many further numbers it reads for each coordinate: the input, the step, a weight
            of the example. They are numbers, or tensors with as many axes as the prediction, each
            as long or 1 long.
        moments: how many squared means over all coordinates are added.
        centered: whether a part of the mean logits is left out.
        steps: how many steps of training it tells apart.
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
        if targets not in _KINDS:
            raise InnerLoopError(
                four_part(
                    f"You gave targets={targets!r}.",
                    "'values' or 'classes'.",
                    "a class number is not a point on a line.",
                    "LearnedLoss('values') for regression, LearnedLoss('classes') for logits.",
                )
            )
        if form not in FORMS:
            raise InnerLoopError(
                four_part(
                    f"You gave form={form!r}.",
                    "'free' or 'weighted'.",
                    "the network says the loss, or a weight of the ordinary one.",
                    "LearnedLoss(form='weighted') to begin with the ordinary loss.",
                )
            )
        hidden = [operator.index(width) for width in hidden]
        _check_counts(extras=extras, moments=moments, steps=steps)
        if moments and (targets == "classes" or not extras):
            raise InnerLoopError(_no_moments(targets, extras, moments))
        if centered and targets != "classes":
            raise InnerLoopError(_not_centered())
        self.targets, self.form, self.extras, self.steps = targets, form, extras, steps
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
        """The loss of predictions; or of a model on a batch (x, target, *extras)."""
        if not isinstance(prediction, Tensor):
            if not isinstance(target, list | tuple) or len(target) < 2:
                raise InnerLoopError(_no_pair(target))
            x, target, *rest = target
            prediction, extras = prediction(x), (*extras, *rest)
        prediction = widened(prediction)
        told, at = self._told(extras)
        values = self._each(prediction, target, told, at)
        found = (values.sum(-1) if self.targets == "classes" else values).mean()
        if self.moments is not None:
            errors = (prediction - _like(prediction, target)).unsqueeze(-1)
            weighted = self.together(prediction, *extras) * errors
            found = found + weighted.reshape(-1, weighted.shape[-1]).mean(0).square().sum()
        return found * self._factor(at, found)

    def each(self, prediction: Tensor, target: Tensor, *extras: Any) -> Tensor:
        """The loss of each coordinate by itself, of the prediction's shape."""
        prediction = widened(prediction)
        told, at = self._told(extras)
        values = self._each(prediction, target, told, at)
        if values.shape != prediction.shape:
            right = target.long().unsqueeze(-1)
            values = torch.zeros_like(prediction).scatter(-1, right, values)
        return values * self._factor(at, values)

    def together(self, prediction: Tensor, *extras: Any) -> Tensor:
        """The numbers f of each coordinate, by which errors count together. [..., moments]

        They depend on the extras alone.
        """
        if self.moments is None:
            raise InnerLoopError(_no_moments(self.targets, self.extras, 0))
        told, at = self._told(extras)
        prediction = widened(prediction)
        return _outside(self.moments, self._read(prediction, at, *told)).to(prediction.dtype)

    def _told(self, extras: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor]:
        """The extras without the step, and 1 for this step and 0 for the others. [steps]"""
        needed = self.extras + bool(self.steps)
        if len(extras) != needed:
            raise InnerLoopError(_count(needed, len(extras), bool(self.steps)))
        weight = next(self.net.parameters())
        places = torch.arange(self.steps, device=weight.device)
        if not self.steps:
            return extras, places.to(weight.dtype)
        step = _whole(extras[-1], self.steps - 1)
        return extras[:-1], (places == step).to(weight.dtype)

    def _each(
        self, prediction: Tensor, target: Tensor, extras: Sequence[Any], at: Tensor
    ) -> Tensor:
        """As ``each``; where only the right class has a loss, of it alone: [..., 1]."""
        right = None
        if self.targets == "classes":
            prediction = self._centered(prediction, at).log_softmax(-1)
            if not target.is_floating_point() and target.shape == prediction.shape[:-1]:
                right = target.long().unsqueeze(-1)
                target = torch.zeros_like(prediction).scatter(-1, right, 1.0)
        if prediction.shape != target.shape:
            raise InnerLoopError(_shapes(prediction, target))
        read = [_like(prediction, number) for number in (prediction, target, *extras)]
        if self.form == "weighted" and right is not None:
            read = [number.gather(-1, right) for number in read]
        prediction, target, *extras = read
        seen, free = prediction, torch.zeros_like(prediction, dtype=torch.bool)
        if self.targets == "classes":
            # A class that is impossible and not the target costs nothing, as in cross-entropy.
            seen = torch.where(prediction == -math.inf, _IMPOSSIBLE, prediction)
            free = (prediction == -math.inf) & (target == 0)
        read = self._read(prediction, at, seen, target, *extras)
        said = _outside(self.net, read).squeeze(-1)
        if self.form == "free":
            return torch.where(free, 0.0, softplus(said).to(prediction.dtype))
        if self.targets == "classes":
            ordinary = -target * torch.where(free, 0.0, prediction)
        else:
            ordinary = (prediction - target).square()
        weight = (_REACH * torch.tanh(said / _REACH)).exp()
        return weight.to(prediction.dtype) * ordinary

    def _centered(self, logits: Tensor, at: Tensor) -> Tensor:
        if self.center is None:
            return logits
        part = (self.center * at).sum() if self.steps else self.center
        return logits - part.to(logits.dtype) * _mean(logits)

    def _factor(self, at: Tensor, values: Tensor) -> Tensor | float:
        return 1.0 if self.factors is None else (self.factors * at).sum().exp().to(values.dtype)

    def _read(self, prediction: Tensor, at: Tensor, *numbers: Any) -> Tensor:
        """[..., numbers + steps], in the precision of its weights, whatever the prediction's is."""
        read = torch.stack([_like(prediction, number) for number in numbers], dim=-1).to(at.dtype)
        return torch.cat([read, at.expand(*prediction.shape, -1)], -1) if self.steps else read

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.kind)

    def set_extra_state(self, state: Any) -> None:
        """Refuse the weights of another kind: they would fit, and mean something else."""
        if state != self.kind:
            known = isinstance(state, dict) and set(state) == set(self.kind)
            kind = f"LearnedLoss({_said(state)})" if known else "something else"
            raise InnerLoopError(
                four_part(
                    f"The state is that of {kind}, this is LearnedLoss({self.extra_repr()}).",
                    "the same settings.",
                    "a weight may fit and mean something else: the loss, or a factor of it.",
                    f"{kind if known else 'the module that was saved'}, then load_state_dict.",
                )
            )

    def extra_repr(self) -> str:
        return _said(self.kind)


def _said(kind: dict[str, Any]) -> str:
    """As it is written; what is 0 or False is left out."""
    named = [f"{name}={value!r}" for name, value in kind.items() if value and name != "targets"]
    return ", ".join([repr(kind["targets"]), *named])


def _outside(net: nn.Module, read: Tensor) -> Tensor:
    """In the precision of its weights, in autocast too, where torch's own losses have float32."""
    with full_precision(read.device):
        return net(read)


def _network(widths: Sequence[int], dtype: torch.dtype | None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        # Smooth, since the meta-gradient differentiates its gradient.
        layers += [nn.Linear(before, after, dtype=dtype), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def _like(prediction: Tensor, number: Any) -> Tensor:
    if isinstance(number, numbers.Real):
        return torch.full_like(prediction, float(number))
    if not isinstance(number, Tensor):
        raise InnerLoopError(_no_number(number))
    # With fewer axes [points] would be taken for the last axis of [points, points].
    pairs = zip(number.shape, prediction.shape, strict=False)
    if number.dim() != prediction.dim() or any(one not in (1, whole) for one, whole in pairs):
        raise InnerLoopError(_axes(prediction, number))
    return number.to(prediction.dtype).expand_as(prediction)


def _shapes(prediction: Tensor, target: Tensor) -> str:
    return four_part(
        f"The prediction has shape {tuple(prediction.shape)}, the target {tuple(target.shape)}.",
        "the same shape; or for targets='classes' logits [..., classes] and whole numbers [...].",
        "each coordinate of a prediction is compared with one of the target.",
        "criterion(model(x), y.unsqueeze(-1)) if only a last axis is missing.",
    )


def _axes(prediction: Tensor, extra: Tensor) -> str:
    return four_part(
        f"The prediction has shape {tuple(prediction.shape)}, an extra {tuple(extra.shape)}.",
        "as many axes, each as long or 1 long.",
        "it is clear then which number belongs to which coordinate.",
        "extra.unsqueeze(-1) for one number per example.",
    )


def _check_counts(**given: Any) -> None:
    for name, count in given.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise InnerLoopError(
                four_part(
                    f"You gave {name}={count!r} to LearnedLoss.",
                    "a whole number, 0 or more.",
                    "it is how many numbers the network reads, or says.",
                    "LearnedLoss(extras=1, moments=16), or none of them.",
                )
            )


def _no_moments(targets: str, extras: int, moments: int) -> str:
    return four_part(
        f"You gave moments={moments} with targets={targets!r} and extras={extras}.",
        "targets='values' and at least one extra.",
        "a moment is a mean of errors, weighted by what the extras say of each.",
        "LearnedLoss(extras=1, moments=16) and the input as the extra, or moments=0.",
    )


def _not_centered() -> str:
    return four_part(
        "You gave centered=True with targets='values'.",
        "targets='classes'.",
        "the mean of logits says nothing, while that of values is a part of the prediction.",
        "LearnedLoss(extras=1, moments=16), with which values count together, or centered=False.",
    )


def _count(needed: int, found: int, step: bool) -> str:
    last = ", the last of them the step" if step else ""
    return four_part(
        f"The loss was called with {found} extras.",
        f"{needed}, as it was made{last}.",
        "its network has one input for each.",
        "criterion(prediction, target, *extras), or a batch (x, target, *extras).",
    )


def _no_number(extra: Any) -> str:
    return four_part(
        f"An extra is a {type(extra).__name__}.",
        "a number, or a tensor that broadcasts to the prediction's shape.",
        "the network reads a number for each coordinate.",
        "a float, or a tensor with as many axes as the prediction.",
    )


def _no_pair(batch: Any) -> str:
    several = isinstance(batch, list | tuple)
    found = f"{type(batch).__name__} of {len(batch)}" if several else type(batch).__name__
    return four_part(
        f"The batch is a {found}.",
        "(x, target), or (x, target, *extras).",
        "the model is called with the first, and the result compared with the second.",
        "criterion(model, (x, target)).",
    )


def _whole(step: Any, last: int) -> Tensor:
    """The number of a step, at most the last one. []

    The value of a tensor is not looked at: it may be one of a batch, or on another device.
    """
    if isinstance(step, Tensor) and step.dim() == 0 and step.dtype in _WHOLE:
        return step.long().clamp(0, last)
    try:
        number = -1 if isinstance(step, (bool, Tensor)) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise InnerLoopError(
            four_part(
                f"The step, the last of the extras, is {step!r}.",
                "a whole number from 0 on.",
                "the loss was made with steps, and tells them apart by their number.",
                "criterion(prediction, target, *extras, 0) for the first step.",
            )
        )
    return torch.tensor(min(number, last))


def _mean(logits: Tensor) -> Tensor:
    """Over all examples, without those in which a class is ruled out. [classes]"""
    flat = logits.reshape(-1, logits.shape[-1])
    possible = flat != -math.inf
    return torch.where(possible, flat, 0.0).sum(0) / possible.sum(0).clamp(min=1)

"""A loss that is learned: a small network over predictions and targets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from innerloop.errors import InnerLoopError, four_part

_KINDS = ("values", "classes")
FORMS = ("free", "weighted")
_REACH = 3.0  # of the logarithm of a weight: without a bound, training with it diverges easily
_IMPOSSIBLE = -1e4  # what the network reads of a class whose log-probability is -inf


class LearnedLoss(nn.Module):
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

    Such a loss is a sum over examples, each by itself. With ``moments`` above 0 (regression only)
    the errors e of different examples also count together: a second network says numbers f₁, f₂, …
    from the extras of a coordinate, and Σₖ (mean of fₖ·e)² is added. So an error in one place may
    count by those in others, as far as the extras tell the places.

    Args:
        targets: ``"values"`` or ``"classes"``.
        form: ``"free"`` or ``"weighted"``.
        extras: how many further numbers it reads for each coordinate: the input, the step, a weight
            of the example. They are tensors that broadcast to the prediction's shape, or numbers.
        moments: how many squared means over all coordinates are added.
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
        _check_counts(extras=extras, moments=moments)
        if moments and (targets == "classes" or not extras):
            raise InnerLoopError(_no_moments(targets, extras, moments))
        self.targets, self.form, self.extras = targets, form, extras
        self.net = _network((2 + extras, *hidden, 1), dtype)
        last = self.net[-1]
        assert isinstance(last, nn.Linear)
        if form == "weighted":
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        self.moments = _network((extras, *hidden, moments), dtype) if moments else None

    def forward(self, prediction: Any, target: Any, *extras: Any) -> Tensor:
        """The loss of predictions; or of a model on a batch (x, target, *extras)."""
        if not isinstance(prediction, Tensor):
            x, target, *rest = target
            prediction, extras = prediction(x), (*extras, *rest)
        values = self.each(prediction, target, *extras)
        alone = (values.sum(-1) if self.targets == "classes" else values).mean()
        if self.moments is None:
            return alone
        said = self.moments(self._read(prediction, *extras)).to(prediction.dtype)
        errors = (prediction - target).unsqueeze(-1)
        return alone + (said * errors).flatten(end_dim=-2).mean(0).square().sum()

    def each(self, prediction: Tensor, target: Tensor, *extras: Any) -> Tensor:
        """The loss of each coordinate by itself, of the prediction's shape."""
        if self.targets == "classes":
            target = _probabilities(prediction, target)
            prediction = prediction.log_softmax(-1)
        if prediction.shape != target.shape:
            raise InnerLoopError(_shapes(prediction, target))
        if len(extras) != self.extras:
            raise InnerLoopError(_count(self.extras, len(extras)))
        seen = torch.where(prediction == -math.inf, _IMPOSSIBLE, prediction)
        said = self.net(self._read(prediction, seen, target, *extras)).squeeze(-1)
        if self.form == "free":
            return softplus(said).to(prediction.dtype)
        if self.targets == "classes":
            # A class that is impossible and not the target costs nothing, as in cross-entropy.
            ordinary = -target * torch.where(target == 0, seen, prediction)
        else:
            ordinary = (prediction - target).square()
        weight = (_REACH * torch.tanh(said / _REACH)).exp()
        return weight.to(prediction.dtype) * ordinary

    def _read(self, prediction: Tensor, *numbers: Any) -> Tensor:
        """[..., numbers], in the precision of its own weights, whatever the prediction's is."""
        read = [_like(prediction, number) for number in numbers]
        return torch.stack(read, dim=-1).to(next(self.net.parameters()).dtype)

    def get_extra_state(self) -> dict[str, Any]:
        return {"targets": self.targets, "form": self.form}

    def set_extra_state(self, state: Any) -> None:
        """Refuse the weights of another kind: they would fit, and mean something else."""
        if state != self.get_extra_state():
            kind = f"LearnedLoss({state['targets']!r}, form={state['form']!r})"
            raise InnerLoopError(
                four_part(
                    f"The state is that of {kind}, this is LearnedLoss({self.extra_repr()}).",
                    "the same targets and form.",
                    "the same network says a loss in one form, and a weight in the other.",
                    f"{kind}, then load_state_dict.",
                )
            )

    def extra_repr(self) -> str:
        return f"{self.targets!r}, form={self.form!r}, extras={self.extras}"


def _network(widths: Sequence[int], dtype: torch.dtype | None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        # Smooth, since the meta-gradient differentiates its gradient.
        layers += [nn.Linear(before, after, dtype=dtype), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def _probabilities(logits: Tensor, target: Tensor) -> Tensor:
    """Class numbers as vectors; a number that is no class is an error, in batched tasks too."""
    if target.is_floating_point() or target.shape != logits.shape[:-1]:
        return target
    return torch.zeros_like(logits).scatter(-1, target.unsqueeze(-1), 1.0)


def _like(prediction: Tensor, number: Any) -> Tensor:
    if not isinstance(number, Tensor):
        return torch.full_like(prediction, number)
    if number.dim() != prediction.dim():
        # [points] would be taken for the last axis of [points, points].
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
        if not isinstance(count, int) or count < 0:
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


def _count(needed: int, found: int) -> str:
    return four_part(
        f"The loss was called with {found} extras.",
        f"{needed}, as it was made.",
        "its network has one input for each.",
        "criterion(prediction, target, *extras), or a batch (x, target, *extras).",
    )

"""The score-function estimator: the gradient of a metric of sampled predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from innerloop.errors import InnerLoopError, refusal
from innerloop.estimate.baselines import RunningMean, baseline_values


def reinforce(
    predicted: Tensor | Distribution,
    metric: Callable[[Tensor], Any],
    *,
    samples: int = 8,
    baseline: str | float | Tensor | RunningMean | None = "leave-one-out",
) -> Tensor:
    """Average a metric over sampled predictions, with a gradient (Williams 1992).

    The value is the mean metric M of ``samples`` draws y_i from the predicted distribution p. Its
    gradient estimates that of the expected metric ::

        1/n Σ_i (M(y_i) - b_i) ∇ log p(y_i)        b_i: the baseline

    so the metric itself needs no gradient: an error rate, an F1 score, an edit distance. As a
    validation loss, its gradient continues exactly through the inner loop. Like every loss it is
    minimized; return a cost, or minus a score.

    - **Bias**: none, for the *expected* metric of sampled predictions. That of the likeliest
      prediction is something else, though what is good for one is mostly good for the other.
    - **Variance**: falls as 1/n. It is the smaller, the finer the metric is resolved: with one
      value for each example, an example's score is not blamed for another's metric.
    - **Baseline**: ``"leave-one-out"`` is the mean of the other samples; a :class:`RunningMean`,
      a number or a tensor (a critic's) are taken as they are. None of them adds bias.
    - **Higher derivatives** are right too, in expectation (as DiCE, Foerster et al. 2018), so it
      may also be a loss of the inner steps. A metric that has a gradient of its own keeps it.
    - **Randomness**: samples are drawn from torch's own generator, so ``torch.manual_seed``
      repeats them, and strategies that compute steps again replay them.
    - **Tasks**: as every loss. A metric that looks at values (``.item()``, a text metric) cannot
      be batched, and runs in a loop over the tasks, with a warning that says so.

    Args:
        predicted: logits, [..., classes]; or a distribution of ``torch.distributions``.
        metric: from one draw, of the shape of the predictions, to its cost: one number; or a
            tensor with the first axes of the predictions, one number for each part.
        samples: the number of draws.
        baseline: subtracted from the metric.

    >>> logits = torch.zeros(3, 2, requires_grad=True)
    >>> labels = torch.tensor([0, 1, 1])
    >>> _ = torch.manual_seed(0)
    >>> loss = reinforce(logits, lambda drawn: (drawn != labels).float(), samples=1000)
    >>> loss.backward()
    >>> round(loss.item(), 2), logits.grad.argmin(-1)  # half are wrong; the labels' logits grow
    (0.5, tensor([0, 1, 1]))
    """
    _check(predicted, metric, samples)
    law = predicted if isinstance(predicted, Distribution) else _categorical(predicted)
    with torch.no_grad():
        drawn = law.sample(torch.Size((samples,)))
    scores = law.log_prob(drawn)
    values = torch.stack([_as_metric(metric(one), scores) for one in drawn])
    # Of everything that had a part in a value: the axes that the metric does not have.
    scores = scores.reshape(*values.shape, -1).sum(-1)
    advantages = values - baseline_values(baseline, values.detach())
    # expm1 of zero: nothing is added to the value, and every derivative is the right one.
    return (values + torch.expm1(scores - scores.detach()) * advantages).mean()


def _categorical(logits: Tensor) -> Distribution:
    # Its checks look at values, which vmap does not allow.
    return Categorical(logits=logits, validate_args=False)


def _as_metric(value: Any, scores: Tensor) -> Tensor:
    """Return the metric of one draw as a tensor; refuse other results."""
    shape = tuple(scores.shape[1:])
    if isinstance(value, bool | int | float | Tensor):
        found = torch.as_tensor(value, device=scores.device)
        if not found.is_complex() and tuple(found.shape) == shape[: found.dim()]:
            return found if found.is_floating_point() else found.to(scores.dtype)
    raise _wrong_metric(value, shape)


def _wrong_metric(value: Any, shape: tuple[int, ...]) -> InnerLoopError:
    wrote = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    return refusal(
        f"Your metric returned {wrote} for predictions of shape {shape}.",
        f"a number, or a real tensor whose shape is the beginning of {shape}.",
        "the metric of a part is credited to the predictions of that part.",
        "metric=lambda drawn: (drawn != labels).float(), or .mean() of it.",
    )


def _check(predicted: Any, metric: Any, samples: Any) -> None:
    if isinstance(predicted, Tensor):
        good = predicted.is_floating_point() and predicted.dim() > 0
    else:
        good = isinstance(predicted, Distribution)
    if not good:
        dtype = f" of {predicted.dtype}" if isinstance(predicted, Tensor) else ""
        raise _wrong_argument(
            f"a {type(predicted).__name__}{dtype} as predictions",
            "logits of shape [..., classes], or a distribution of torch.distributions",
            "predictions are drawn from it, and scored by it",
        )
    if not callable(metric):
        raise _wrong_argument(
            f"a {type(metric).__name__} as metric", "a function of one draw", "it is called"
        )
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise _wrong_argument(
            f"samples={samples!r}", "a whole number, 1 or more", "it is the number of draws"
        )


def _wrong_argument(wrote: str, needed: str, why: str) -> InnerLoopError:
    write = "reinforce(model(x), lambda drawn: (drawn != y).float(), samples=8)."
    return refusal(f"You gave {wrote} to reinforce.", f"{needed}.", f"{why}.", write)

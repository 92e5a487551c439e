"""Evolution strategies: the gradient estimated from values at perturbed parameters."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from innerloop import _tree
from innerloop.errors import InnerLoopError, refusal
from innerloop.estimate.perturbation import perturb, wrong_argument
from innerloop.guard.randomness import Draws, Randomness, devices_of

_SIGNS = (1, -1)


class evolution:
    """A function whose gradient is estimated from its values alone, by antithetic sampling.

    A call draws normal perturbations ε_i, evaluates at φ + σε_i and at φ - σε_i, and returns the
    mean of these values L. ``backward()`` of what it returns adds to the ``.grad`` of every φ ::

        1/n Σ_i (L(φ + σε_i) - L(φ - σε_i)) / 2σ · ε_i        n = samples / 2

    Nothing has to be differentiable: neither the metric, nor the steps, nor the model.

    - **Bias**: none for the smoothed loss E[L(φ + σε)], whose gradient differs from that of L by
      O(σ²), and by nothing if L is quadratic. A metric with jumps has the smoothed gradient only.
    - **Variance**: falls as 1/n, and grows with the number d of parameters that are perturbed.
      For a nearly linear L the squared error is (d + 1) / n times the squared gradient.
    - **Randomness**: perturbations come from a generator of their own, made of ``seed``. Every
      evaluation begins with the same state of the random numbers of torch, Python and numpy
      (dropout is the same in all of them), and they are left as by one ordinary call.
    - **What is left**: the module is read and never written to; replicas are evaluated, and what
      these do to buffers or attributes is gone with them.
    - **Tasks**: ``tasks=True`` gives one estimate per task, out of the same perturbations; it
      holds for any shape that the function returns.

    With ``persistent=True`` calls are the parts of one long run (persistent evolution strategies,
    Vicol et al. 2021). Each sample goes on, at its own perturbations, from where it was, and the
    perturbations of all calls so far take the place of ε_i in the sum above. The estimates of all
    calls of a run then add up to the gradient of the sum of their losses, without the bias of
    truncation; the variance grows with the number of calls. :meth:`restart` begins another run.

    Args:
        function: an :class:`innerloop.InnerLoop` or any other module, called with what the
            estimator is called with; or a function, whose first argument is then ``params``.
            It returns a number or a real tensor. With ``persistent``, an inner loop carries its
            own state; anything else is called as ``function(state, ...)``, or
            ``function(params, state, ...)``, and returns ``(value, state)``; the first state is
            ``None``.
        params: for a function: the tensors to be perturbed, in any nesting. Of a module it is all
            parameters that require grad.
        samples: evaluations per call, two for each perturbation.
        sigma: standard deviation of a perturbation.
        persistent: whether a call continues the one before.
        seed: the same seed gives the same perturbations. Without one, it is drawn by torch.

    >>> import innerloop as il
    >>> model = torch.nn.Linear(1, 1)
    >>> inner = il.InnerLoop(model, torch.optim.SGD(model.parameters(), lr=0.1),
    ...                      lambda model, batch: (model(batch) - 1).square().mean(),
    ...                      val_loss=lambda model, batch: (model(batch) < 1).float().mean())
    >>> batch = torch.ones(4, 1)
    >>> loss = evolution(inner, samples=32, sigma=0.1, seed=0)([batch] * 3, batch)
    >>> loss.backward()
    >>> model.weight.grad.shape
    torch.Size([1, 1])
    """

    def __init__(
        self,
        function: Callable[..., Any],
        params: Any = None,
        *,
        samples: int = 16,
        sigma: float = 0.01,
        persistent: bool = False,
        seed: int | None = None,
    ) -> None:
        _check_numbers(samples, sigma, seed)
        self.samples, self.sigma, self.persistent = samples, float(sigma), persistent
        self._of = perturb(function, params, persistent)
        drawn = int(torch.randint(2**62, ()).item()) if seed is None else seed
        self._generator = torch.Generator().manual_seed(drawn)
        self._sum: list[Tensor] | None = None
        """The sum of each sample's perturbations in the run so far, divided by sigma."""
        self._states: list[Any] = [None] * samples

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean value, whose gradient is the estimate."""
        params, at = self._of.now()
        self._check_resolution(params)
        # [samples / 2, *shape] each
        noise = [self._draw_noise(p) for p in params]
        values, states = self._evaluate(params, noise, at, args, kwargs)
        noise = [e / self.sigma for e in noise]
        if self.persistent:
            noise = noise if self._sum is None else _add(self._sum, noise)
            self._sum, self._states = noise, states
        return _Estimate.apply(values, noise, *params)  # type: ignore[no-any-return]

    def restart(self) -> None:
        """Begin another run: discard the samples' states and perturbations."""
        self._sum, self._states = None, [None] * self.samples

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state, and in a persistent run the samples' states."""
        random = self._generator.get_state()
        return {"generator": random, "sum": self._sum, "states": _copy(self._states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        if len(state["states"]) != self.samples:
            raise _other_samples(len(state["states"]), self.samples)
        self._generator.set_state(state["generator"])
        self._sum, self._states = state["sum"], _copy(state["states"])

    def _draw_noise(self, param: Tensor) -> Tensor:
        # On the CPU, so that the numbers do not depend on the device.
        shape = (self.samples // 2, *param.shape)
        drawn = torch.randn(shape, generator=self._generator, dtype=param.dtype, device="cpu")
        return drawn.to(param.device)

    def _check_resolution(self, params: list[Tensor]) -> None:
        """Refuse a sigma that is lost in rounding: the estimate would be wrong."""
        for p in params:
            step = torch.finfo(p.dtype).eps * float(p.detach().abs().max()) if p.numel() else 0.0
            if self.sigma < step:
                raise wrong_argument(
                    f"sigma={self.sigma:g} for parameters of {p.dtype} up to {step:.1e} apart",
                    f"sigma above {step:.1e}, or a higher precision",
                    "smaller changes of such numbers are rounded away",
                )

    def _evaluate(
        self, params: list[Tensor], noise: list[Tensor], at: Any, args: Any, kwargs: Any
    ) -> tuple[Tensor, list[Any]]:
        """Return the values, pairs adjacent, [samples, ...], and the samples' states."""
        random, draws = Randomness(devices_of(params)), Draws()
        values, states = [], []
        for number, before in enumerate(self._states):
            pair, sign = number // 2, _SIGNS[number % 2]
            there = [
                p.detach() + sign * self.sigma * e[pair] for p, e in zip(params, noise, strict=True)
            ]
            random.set()
            draws.undo()
            with torch.no_grad() if self._of.without_grad else contextlib.nullcontext():
                value, state = at(there, before, args, kwargs)
            values.append(_as_value(value))
            states.append(state)
        return torch.stack(values), states

    def __repr__(self) -> str:
        kind = "persistent " if self.persistent else ""
        return f"{kind}evolution({self._of.name}, samples={self.samples}, sigma={self.sigma})"


class _Estimate(torch.autograd.Function):
    """The mean of the values, with the estimate as its derivative."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, noise: list[Tensor], *_: Tensor) -> Tensor:
        pairs = values.unflatten(0, (-1, 2))
        ctx.slopes = (pairs[:, 0] - pairs[:, 1]) / (2 * len(pairs))
        ctx.noise = noise
        return values.mean(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        # [pairs]: the task axis, if there is one, is gone before any tensor as large as φ is made.
        weights = ctx.slopes.reshape(len(ctx.slopes), -1) @ grad.reshape(-1)
        grads = [torch.tensordot(weights.to(e.device, e.dtype), e, 1) for e in ctx.noise]
        return None, None, *grads


def _copy(states: list[Any]) -> list[Any]:
    """Copy states deeply: a function may write to its state in place."""
    plain = _tree.map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, states)
    return copy.deepcopy(plain)


def _add(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    if [t.shape for t in first] != [t.shape for t in second]:
        raise _changed_parameters()
    return [a + b for a, b in zip(first, second, strict=True)]


def _as_value(found: Any) -> Tensor:
    # Differences are small against the values: what float32 rounds away would be all of them.
    if isinstance(found, bool | int | float):
        return torch.tensor(float(found), dtype=torch.float64)
    if isinstance(found, Tensor) and not found.is_complex():
        value = found.detach()
        return value if value.is_floating_point() else value.to(torch.float64)
    raise _wrong_value(found)


def _wrong_value(found: Any) -> InnerLoopError:
    return refusal(
        f"Your function returned a {type(found).__name__}.",
        "a number or a real tensor.",
        "the gradient is estimated from differences between values.",
        "return float(metric), or a tensor with one value for each task.",
    )


def _check_numbers(samples: Any, sigma: Any, seed: Any) -> None:
    if type(samples) is not int or samples < 2 or samples % 2:
        raise wrong_argument(
            f"samples={samples!r}",
            "an even number, 2 or more",
            "each perturbation is tried in both directions",
        )
    real = isinstance(sigma, int | float) and not isinstance(sigma, bool)
    if not real or not 0 < sigma < math.inf:
        raise wrong_argument(
            f"sigma={sigma!r}",
            "a number above 0",
            "it is the standard deviation of the perturbations",
        )
    if seed is not None and not (type(seed) is int and -(2**63) <= seed < 2**64):
        raise wrong_argument(
            f"seed={seed!r}",
            "a whole number of at most 64 bits",
            "a torch.Generator is seeded with it",
        )


def _other_samples(saved: int, own: int) -> InnerLoopError:
    return refusal(
        f"You loaded the state of {saved} samples.",
        f"that of {own} samples, as here.",
        "each sample continues from its own state.",
        f"evolution(..., samples={saved}).",
    )


def _changed_parameters() -> InnerLoopError:
    return refusal(
        "You changed which parameters require grad, or their shapes, in a persistent run.",
        "the same parameters in all calls.",
        "the estimate needs every perturbation since the run began.",
        "estimator.restart() after such a change.",
    )

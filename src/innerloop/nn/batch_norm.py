"""Batch normalization by batch statistics, with a second derivative in few passes over memory.

torch's own second derivative is right but made of some forty elementwise operations; in an inner
loop over a convolutional net it is a quarter of the time. Here it is written out: two linear
combinations of three tensors, whose coefficients are per-channel numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_batchedtensor
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm(..., training=True)``; running statistics are updated in place as there.

    ``x`` is ``[batch, channel, ...]``.
    """
    given = x, weight, bias, running_mean, running_var
    mapped = torch._C._are_functorch_transforms_active()
    if torch.compiler.is_compiling() or (
        mapped and not any(t is not None and is_batchedtensor(t) for t in given)
    ):
        return _compose(*given, momentum, eps)
    function = _ForTasks if mapped else _Forward
    return function.apply(*given, momentum, eps)  # type: ignore[return-value]


def _compose(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """The same in elementary operations, which a compiler fuses and autograd follows anywhere."""
    over = [d for d in range(x.dim()) if d != 1]
    shape = [-1, *[1] * (x.dim() - 2)]
    variance, mean = torch.var_mean(x, over, correction=0)
    y = (x - mean.view(shape)) * (variance + eps).rsqrt().view(shape)
    if running_mean is not None and running_var is not None:
        n = x.numel() / x.shape[1]
        _advance(running_mean, mean, momentum)
        _advance(running_var, variance * (n / (n - 1)), momentum)
    if weight is not None:
        y = y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def _advance(running: Tensor, new: Tensor, momentum: float | Tensor) -> None:
    running.add_(momentum * (new.detach() - running))


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, bias, running_mean, running_var, momentum, eps):
        y, mean, rstd = torch.native_batch_norm(
            x, weight, bias, running_mean, running_var, True, momentum, eps
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.eps, ctx.needs = eps, tuple(ctx.needs_input_grad[:3])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        x, weight, mean, rstd = ctx.saved_tensors
        gx, gw, gb = _Backward.apply(grads[0], x, weight, mean, rstd, ctx.eps)  # type: ignore[misc]
        x_needs, w_needs, b_needs = ctx.needs
        return (
            gx if x_needs else None,
            gw if w_needs else None,
            gb if b_needs else None,
            *[None] * 4,
        )


class _ForTasks(torch.autograd.Function):
    """The same under ``vmap``: channels of different tasks are different channels.

    A class of its own, since one that ``vmap`` takes costs twice as much to call.
    """

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return batch_norm(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Never differentiated itself; see :meth:`vmap`."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *args: Any) -> tuple[Tensor, int]:  # type: ignore[override]
        tasks = info.batch_size
        x = (
            x.unsqueeze(1).expand(-1, tasks, *x.shape[1:])
            if in_dims[0] is None
            else x.movedim(in_dims[0], 1)
        )
        each = [_join_tasks(v, d, tasks) for v, d in zip(args[:4], in_dims[1:5], strict=True)]
        weight, bias, mean, variance = each
        y = batch_norm(x.flatten(1, 2), weight, bias, mean, variance, *args[4:])
        return y.unflatten(1, (tasks, -1)), 1


def _join_tasks(value: Tensor | None, dim: int | None, tasks: int) -> Tensor | None:
    """Per-channel values of all tasks, one task after another. [tasks * channels]"""
    if value is None:
        return None
    return value.repeat(tasks) if dim is None else value.movedim(dim, 0).flatten()


class _Backward(torch.autograd.Function):
    """The first derivative as a function of the output's gradient, the input and the weight.

    With x̂ the normalized input, r = 1/σ, g the output's gradient and ⟨·⟩ the mean per channel::

        gx = w r (g - ⟨g⟩ - x̂ ⟨g x̂⟩)     gw = Σ g x̂     gb = Σ g
    """

    @staticmethod
    def forward(ctx: Any, g, x, weight, mean, rstd, eps):
        ctx.save_for_backward(g, x, weight, mean, rstd)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return torch.ops.aten.native_batch_norm_backward(
            g, x, weight, None, None, mean, rstd, True, eps, [True, True, True]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        u, v, w = grads
        g, x, weight, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            # A third derivative is wanted: the statistics must be part of the graph.
            over = [d for d in range(x.dim()) if d != 1]
            variance, mean = torch.var_mean(x, over, correction=0)
            rstd = (variance + ctx.eps).rsqrt()
        return *_second(g, x, weight, mean, rstd, u, v, w), None, None, None


def _second(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    w: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients by ``g``, ``x`` and ``weight`` of ``Σ u gx + Σ v gw + Σ w gb``.

    With a = ⟨g x̂⟩, b = ⟨u x̂⟩ and A = ⟨u g⟩ - ⟨u⟩⟨g⟩ - a b, per channel and n elements in each::

        by g:      w r (u - ⟨u⟩ - b x̂) + v x̂ + w_b
        by weight: n r A
        by x:      r (p - ⟨p⟩ - x̂ ⟨p x̂⟩) - w r² A x̂,   p = -w r (a u + b g) + v g
    """
    shape = [1, x.shape[1], *[1] * (x.dim() - 2)]
    n = x.numel() / x.shape[1]
    scale = rstd if weight is None else weight * rstd
    zero = torch.zeros_like(mean)
    v = zero if v is None else v

    def average(t: Tensor) -> Tensor:
        return t.flatten(2).sum((0, 2)) / n if t.dim() > 2 else t.sum(0) / n

    def per_channel(t: Tensor) -> Tensor:
        return t.view(shape)

    mean_g = average(g)
    a = rstd * (average(g * x) - mean_g * mean)
    if u is None:
        mean_u = b = covariance = zero
    else:
        mean_u = average(u)
        b = rstd * (average(u * x) - mean_u * mean)
        covariance = average(u * g) - mean_u * mean_g - a * b

    # Both results are s·u + t·g + k·x + c; x̂ = r x - r mean is folded into k and c.
    by_x_hat = v - scale * b
    by_g = torch.addcmul(
        per_channel((zero if w is None else w) - scale * mean_u - by_x_hat * rstd * mean),
        x,
        per_channel(by_x_hat * rstd),
    )
    mean_p = by_x_hat * mean_g - scale * a * mean_u
    x_hat = -rstd * (v * a - 2 * scale * a * b) - scale * rstd * covariance
    by_x = torch.addcmul(
        per_channel(-rstd * mean_p - x_hat * rstd * mean), x, per_channel(x_hat * rstd)
    )
    by_x = torch.addcmul(by_x, g, per_channel(rstd * by_x_hat))
    if u is not None:
        by_g = torch.addcmul(by_g, u, per_channel(scale))
        by_x = torch.addcmul(by_x, u, per_channel(-rstd * scale * a))
    return by_g, by_x, None if weight is None else n * rstd * covariance


def batch_norm_forward(module: _BatchNorm, x: Tensor) -> Tensor:
    """``forward`` of torch's batch norms, by :func:`batch_norm` where it applies."""
    by_batch = module.training or (module.running_mean is None and module.running_var is None)
    if not by_batch or x.dim() < 2 or x.numel() <= x.shape[1] or not x.is_floating_point():
        return _BatchNorm.forward(module, x)
    updates = module.training and module.track_running_stats
    if not torch.compiler.is_compiling():
        if is_transformed() and x.dtype in _MEASURED:
            if updates:
                _BatchNorm.forward(module, x.detach())
            return _compose(x, module.weight, module.bias, None, None, 0.0, module.eps)
        if not _is_measured(x, module.weight):
            return _BatchNorm.forward(module, x)
    module._check_input_dim(x)
    if updates and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            return _average_statistics(module, x)
    tracked = updates or not module.training
    return batch_norm(
        x,
        module.weight,
        module.bias,
        module.running_mean if tracked else None,
        module.running_var if tracked else None,
        module.momentum or 0.0,
        module.eps,
    )


def _average_statistics(module: _BatchNorm, x: Tensor) -> Tensor:
    """Running statistics as plain averages; the count of batches stays on its device."""
    assert module.num_batches_tracked is not None
    share = 1.0 / module.num_batches_tracked
    over = [d for d in range(x.dim()) if d != 1]
    variance, mean = torch.var_mean(x.detach(), over, correction=1)
    for running, new in ((module.running_mean, mean), (module.running_var, variance)):
        assert running is not None
        # Statistics change without counting a version, as torch's own layer changes them.
        plain = not torch.compiler.is_compiling() and not _is_mapped()
        _advance(running.data if plain else running, new, share)
    return batch_norm(x, module.weight, module.bias, eps=module.eps)


_MEASURED = (torch.float32, torch.float64)


def _is_measured(x: Tensor, weight: Tensor | None) -> bool:
    """True for the CPU's plain case; torch's own path serves other devices and low precision."""
    return (
        (x.requires_grad or _is_mapped())
        and x.device.type == "cpu"
        and x.dtype in _MEASURED
        and (weight is None or weight.dtype == x.dtype)
        and not is_transformed()
    )


def is_transformed() -> bool:
    """True if forward mode or ``torch.func`` surround this call, other than by one ``vmap``.

    Derivatives of torch's norms are wrong there from the second or third on (pytorch#186256). A
    compiler cannot look, and fuses what is composed.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return True
    return torch._C._are_functorch_transforms_active() and not _is_mapped()


def _is_mapped() -> bool:
    """True if one ``vmap`` is all that surrounds this call."""
    stack = get_interpreter_stack()
    return stack is not None and [i.key() for i in stack] == [TransformType.Vmap]

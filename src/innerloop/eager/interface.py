"""The paper's own interface: a patched model and a differentiable optimizer, driven by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from innerloop.eager.optimizer import (
    BY_CLASS,
    DifferentiableOptimizer,
    GradCallback,
    Override,
    class_for,
)
from innerloop.errors import InnerLoopError, four_part
from innerloop.modules.patched import patched, reference_params
from innerloop.modules.tree import parameters_of, survey
from innerloop.optim import FAMILIES
from innerloop.optim.convert import family_of
from innerloop.optim.settings import per_group

Device = torch.device | str | None


def monkeypatch(
    module: nn.Module,
    device: Device = None,
    copy_initial_weights: bool = True,
    track_higher_grads: bool = True,
) -> Any:
    """A stand-in for ``module`` whose weights are ordinary tensors that can be replaced.

    With ``copy_initial_weights=True`` it starts from copies, which are leaves of their own; with
    ``False`` its first weights are part of the graph of the module's own, so that gradients reach
    those (MAML). Buffers are copied, and what happens to them stays in the stand-in. With
    ``track_higher_grads=False`` only the latest weights are kept, without a graph.

    >>> net = nn.Linear(2, 1)
    >>> fmodel = monkeypatch(net)
    >>> fmodel.update_params([torch.ones(1, 2), torch.zeros(1)])
    >>> fmodel(torch.tensor([[2.0, 3.0]]))
    tensor([[5.]])
    """
    originals = survey(module)
    own = parameters_of(originals)
    if copy_initial_weights:
        weights = [_leaf(p, device) for p in own]
    else:
        weights = [p.clone() if device is None else p.clone().to(device) for p in own]
    return patched(originals, weights, device, track_higher_grads)


def _leaf(param: Tensor, device: Device) -> Tensor:
    copy = param.detach().clone()
    return (copy if device is None else copy.to(device)).requires_grad_(param.requires_grad)


@contextmanager
def innerloop_ctx(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    device: Device = None,
    copy_initial_weights: bool = True,
    override: Override | None = None,
    track_higher_grads: bool = True,
    *,
    grad_callback: GradCallback | None = None,
    first_order: bool = False,
) -> Iterator[tuple[Any, DifferentiableOptimizer]]:
    """Write an inner loop as an ordinary training loop, and differentiate through it.

    Yields ``(fmodel, diffopt)``: a stand-in for the model (see :func:`monkeypatch`) and a
    differentiable version of the optimizer that starts from its settings and its present state. The
    model and the optimizer are not touched.

    ``override`` replaces continuous settings, by name, with a list of one value or of one per
    parameter group; tensors among them get gradients. ``grad_callback`` sees the gradients of every
    step and returns those to use. ``first_order=True`` leaves out the derivative of the inner
    gradients. ``track_higher_grads=False`` trains without keeping any graph.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.constant_(net.weight, 1.0)
    >>> opt = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> with innerloop_ctx(net, opt, copy_initial_weights=False) as (fmodel, diffopt):
    ...     diffopt.step(fmodel(torch.ones(1, 1)).square().sum())
    ...     fmodel(torch.ones(1, 1)).square().sum().backward()
    [tensor([[0.8000]], grad_fn=...)]
    >>> net.weight.grad  # d(0.8 w)²/dw at w = 1
    tensor([[1.2800]])
    """
    fmodel = monkeypatch(model, device, copy_initial_weights, track_higher_grads)
    yield (
        fmodel,
        get_diff_optim(
            opt,
            reference_params(fmodel),
            fmodel=fmodel,
            device=device,
            override=override,
            track_higher_grads=track_higher_grads,
            grad_callback=grad_callback,
            first_order=first_order,
        ),
    )


def get_diff_optim(
    opt: torch.optim.Optimizer,
    reference_params: Iterable[Tensor],
    fmodel: Any = None,
    device: Device = None,
    override: Override | None = None,
    track_higher_grads: bool = True,
    **kwargs: Any,
) -> DifferentiableOptimizer:
    """A differentiable version of an optimizer, from its settings and its present state.

    ``reference_params`` are the parameters of the model the optimizer was built for. Without
    ``fmodel``, every ``step`` needs ``params=``. Further keywords: ``grad_callback``,
    ``first_order``.

    >>> y = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> opt = get_diff_optim(torch.optim.SGD([y], lr=0.5), [y])
    >>> (z,) = opt.step((y**2).sum(), params=[y])
    >>> z.detach()
    tensor([0., 0.])
    """
    return class_for(type(opt))(
        opt,
        reference_params,
        fmodel=fmodel,
        device=device,
        override=override,
        track_higher_grads=track_higher_grads,
        **kwargs,
    )


def create_diff_optim(
    opt_type: type[torch.optim.Optimizer],
    opt_kwargs: dict[str, Any] | None = None,
    params: Iterable[Any] | None = None,
    fmodel: Any = None,
    device: Device = None,
    override: Override | None = None,
    track_higher_grads: bool = True,
    **kwargs: Any,
) -> DifferentiableOptimizer:
    """A differentiable optimizer of a ``torch.optim`` type, without an instance of it.

    ``params`` are tensors, or groups of them as dictionaries, whose shapes it takes; without them
    it takes those of ``fmodel``.

    >>> y = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> opt = create_diff_optim(torch.optim.Adam, {"lr": 0.1}, params=[y])
    >>> (z,) = opt.step((y**2).sum(), params=[y])
    >>> z.detach()
    tensor([0.9000, 1.9000])
    """
    if params is None:
        if fmodel is None:
            raise InnerLoopError(
                four_part(
                    "You gave neither params nor fmodel.",
                    "one of them.",
                    "the optimizer needs to know what it will update.",
                    "create_diff_optim(torch.optim.SGD, {'lr': 0.1}, fmodel=fmodel).",
                )
            )
        params = fmodel.parameters()
    given = list(params or [])
    grouped = bool(given) and isinstance(given[0], dict)
    groups: list[dict[str, Any]] = given if grouped else [{"params": given}]
    stand_ins: list[dict[str, Any]] = []
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        shapes = [torch.zeros_like(p).requires_grad_(p.requires_grad) for p in members]
        stand_ins.append({**group, "params": shapes})
    opt = opt_type(stand_ins, **(opt_kwargs or {}))
    return class_for(opt_type)(
        opt,
        [p for group in stand_ins for p in group["params"]],
        fmodel=fmodel,
        device=device,
        override=override,
        track_higher_grads=track_higher_grads,
        **kwargs,
    )


def register_optim(
    optim_type: type[torch.optim.Optimizer], diff_optim_type: type[DifferentiableOptimizer]
) -> None:
    """Use ``diff_optim_type`` for optimizers of type ``optim_type``.

    It subclasses :class:`DifferentiableOptimizer` and implements ``_update(grouped_grads)``.
    """
    if not (
        isinstance(diff_optim_type, type) and issubclass(diff_optim_type, DifferentiableOptimizer)
    ):
        raise InnerLoopError(
            four_part(
                f"You registered {diff_optim_type!r}.",
                "a subclass of innerloop.DifferentiableOptimizer.",
                "its step, override and state handling are needed.",
                "class Mine(DifferentiableOptimizer): def _update(self, grouped_grads): ...",
            )
        )
    BY_CLASS[optim_type] = diff_optim_type


def get_trainable_opt_params(
    opt: torch.optim.Optimizer, device: Device = None
) -> dict[str, list[Any]]:
    """Every continuous setting of an optimizer as tensors that require grad, group by group.

    The result is an ``override``. For a registered optimizer all numbers count as continuous.

    >>> net = nn.Linear(1, 1)
    >>> opt = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> get_trainable_opt_params(opt)["lr"]
    [tensor(0.1000, requires_grad=True)]
    """
    found: dict[str, list[Any]] = {}
    params = [p for group in opt.param_groups for p in group["params"]]
    dtype = torch.get_default_dtype()
    if any(p.dtype in (torch.float64, torch.complex128) for p in params):
        dtype = torch.float64  # a number goes back as it came if nothing is learned
    for name in _continuous(opt):
        values = [group[name] for group in opt.param_groups]
        if all(_is_numeric(value) for value in values):
            found[name] = [_trainable(value, device, dtype) for value in values]
    return found


def _continuous(opt: torch.optim.Optimizer) -> list[str]:
    try:
        return list(family_of(type(opt), FAMILIES).settings)
    except InnerLoopError:
        if not issubclass(class_for(type(opt)), DifferentiableOptimizer):
            raise
        return [name for name in opt.param_groups[0] if name != "params"]


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_numeric(v) for v in value)
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _trainable(value: Any, device: Device, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_trainable(v, device, dtype) for v in value)
    if isinstance(value, Tensor):
        return value.detach().clone().to(device).requires_grad_()
    return torch.tensor(float(value), device=device, dtype=dtype, requires_grad=True)


def apply_trainable_opt_params(opt: torch.optim.Optimizer, override: Override) -> None:
    """Put learned settings back into an ordinary optimizer, as numbers.

    >>> net = nn.Linear(1, 1)
    >>> opt = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> apply_trainable_opt_params(opt, {"lr": [torch.tensor(0.5)]})
    >>> opt.param_groups[0]["lr"]
    0.5
    """
    checked = {}
    for name, given in override.items():
        missing = [i for i, group in enumerate(opt.param_groups) if name not in group]
        if missing:
            raise InnerLoopError(
                four_part(
                    f"You gave a value for {name!r}.",
                    "a setting that the optimizer has.",
                    f"its parameter group {missing[0]} has none of that name.",
                    ", ".join(key for key in opt.param_groups[0] if key != "params") + ".",
                )
            )
        arity = 2 if isinstance(opt.param_groups[0][name], list | tuple) else 1
        values = per_group(name, given, len(opt.param_groups), arity)
        checked[name] = [
            _written(name, value, group[name])
            for value, group in zip(values, opt.param_groups, strict=True)
        ]
    for name, values in checked.items():
        for group, value in zip(opt.param_groups, values, strict=True):
            if isinstance(group[name], Tensor):
                with torch.no_grad():
                    group[name].copy_(value)
            else:
                group[name] = value


def _written(name: str, value: Any, target: Any) -> Any:
    if isinstance(target, list | tuple):
        several = isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim() > 0)
        values = list(value) if several else []
        if len(values) == len(target):
            return type(target)(_written(name, v, t) for v, t in zip(values, target, strict=True))
    elif isinstance(target, Tensor):
        if (
            isinstance(value, Tensor | float | int)
            and torch.as_tensor(value).numel() == target.numel()
        ):
            return torch.as_tensor(value).detach().reshape(target.shape)
    elif isinstance(value, Tensor):
        if value.numel() == 1:
            number = value.item()
            return bool(number) if isinstance(target, bool) else number
    elif not isinstance(value, list | tuple):
        return value
    raise InnerLoopError(
        four_part(
            f"You gave {value!r} for {name!r}, which is {target!r} in the optimizer.",
            "a value of the same structure.",
            "torch.optim keeps one such value per parameter group.",
            f"{{{name!r}: [value]}} with one value per group.",
        )
    )

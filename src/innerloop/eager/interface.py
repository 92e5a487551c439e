"""The paper's own interface: a patched model and a differentiable optimizer, driven by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from innerloop.eager import refusals
from innerloop.eager.optimizer import DifferentiableOptimizer, GradCallback, Override, as_list
from innerloop.eager.rules import BY_CLASS, class_for, unwrap_optimizer
from innerloop.modules.patched import patch_module, reference_params
from innerloop.modules.tree import parameters_of, survey

Device = torch.device | str | None


def monkeypatch(
    module: nn.Module,
    device: Device = None,
    copy_initial_weights: bool = True,
    track_higher_grads: bool = True,
    in_place: bool = False,
) -> Any:
    """A stand-in for ``module`` whose weights are ordinary tensors that can be replaced.

    With ``copy_initial_weights=True`` it starts from copies, which are leaves of their own; with
    ``False`` its first weights are part of the graph of the module's own, so that gradients reach
    those (MAML). With ``in_place=True`` its first weights are the module's own parameters, neither
    copied nor cloned, as for editing a large model; ``copy_initial_weights`` then has no effect.
    Buffers are copied, and what happens to them stays in the stand-in. With
    ``track_higher_grads=False`` only the latest weights are kept, without a graph.

    >>> net = nn.Linear(2, 1)
    >>> fmodel = monkeypatch(net)
    >>> fmodel.update_params([torch.ones(1, 2), torch.zeros(1)])
    >>> fmodel(torch.tensor([[2.0, 3.0]]))
    tensor([[5.]])
    """
    originals = survey(module)
    own = parameters_of(originals)
    weights = own
    if not in_place:
        weights = [p.detach().clone() if copy_initial_weights else p.clone() for p in own]
    if device is not None:
        weights = [w.to(device) for w in weights]
    if copy_initial_weights and not in_place:
        weights = [w.requires_grad_(p.requires_grad) for w, p in zip(weights, own, strict=True)]
    return patch_module(originals, weights, device, track_higher_grads)


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

    ``reference_params`` are the parameters of the model the optimizer was built for. An optimizer
    wrapped by Accelerate counts as the one inside. Without ``fmodel``, every ``step`` needs
    ``params=``. Further keywords: ``grad_callback``, ``first_order``.

    >>> y = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> opt = get_diff_optim(torch.optim.SGD([y], lr=0.5), [y])
    >>> (z,) = opt.step((y**2).sum(), params=[y])
    >>> z.detach()
    tensor([0., 0.])
    """
    opt = unwrap_optimizer(opt)
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
    if params is None and fmodel is None:
        raise refusals.no_params_to_create_from()
    groups: list[Any] = list(fmodel.parameters() if params is None else params)
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    stand_ins: list[dict[str, Any]] = []
    for group in groups:
        shapes = [
            torch.zeros_like(p).requires_grad_(p.requires_grad) for p in as_list(group["params"])
        ]
        stand_ins.append({**group, "params": shapes})
    return get_diff_optim(
        opt_type(stand_ins, **(opt_kwargs or {})),
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
    is_class = isinstance(diff_optim_type, type)
    if not is_class or not issubclass(diff_optim_type, DifferentiableOptimizer):
        raise refusals.not_a_differentiable_optimizer(diff_optim_type)
    BY_CLASS[optim_type] = diff_optim_type

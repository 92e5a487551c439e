"""Errors of rules: parameters, gradients, states and settings that do not fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError, refusal

# Parameters, gradients and states. --------------------------------------------------------------


def wrong_state(family: str, found: str) -> InnerLoopError:
    return refusal(
        f"The state is not that of these parameters under {family}: {found}.",
        "the state that init made for them, or that the last update returned.",
        "each rule keeps other things, and a parameter without a state could not move.",
        "state = rule.init(params).",
    )


def unnamed_mapping() -> InnerLoopError:
    return refusal(
        "You gave a mapping to a rule that does not know its parameters by name.",
        "names, for an optimizer with several groups or with a state.",
        "which settings and which state belong to a parameter goes by the optimizer's order, "
        "which need not be that of the mapping.",
        "optim.from_torch(optimizer, functional(model).params).",
    )


def other_structure(what: str, found: str) -> InnerLoopError:
    return refusal(
        f"The {what} do not have the structure of the parameters: {found}.",
        "the same nesting with the same names.",
        "a value that went to another parameter would be a silent mistake.",
        "one entry, or None for a gradient, wherever the parameters have one.",
    )


def wrong_count(found: int, needed: int) -> InnerLoopError:
    return refusal(
        f"You gave {found} parameters to a rule for {needed}.",
        "the optimizer's parameters, group after group, and no others.",
        "each has its own settings and state, found by position.",
        "[p for group in optimizer.param_groups for p in group['params']].",
    )


def wrong_shape(position: int, found: torch.Size, needed: torch.Size) -> InnerLoopError:
    return refusal(
        f"Parameter {position} you gave has the shape {tuple(found)}.",
        f"{tuple(needed)}, as in the optimizer the rule was made from.",
        "parameters are matched to settings and state by position.",
        "them in the optimizer's order, or a mapping and optim.from_torch("
        "optimizer, functional(model).params).",
    )


def complex_parameter(name: str) -> InnerLoopError:
    return refusal(
        f"You gave {name} a complex parameter.",
        "real parameters.",
        f"torch.optim.{name} has no rule for complex ones.",
        "another optimizer for them, such as torch.optim.Adam.",
    )


def not_a_matrix(param: Tensor) -> InnerLoopError:
    return refusal(
        f"You gave Muon a parameter of shape {tuple(param.shape)}.",
        "matrices.",
        "Muon orthogonalizes the update, which is defined for a matrix.",
        "torch.optim.AdamW for all other parameters.",
    )


def gradient_shape(grad: Tensor, param: Tensor) -> InnerLoopError:
    return refusal(
        f"A gradient has the shape {tuple(grad.shape)}.",
        f"{tuple(param.shape)}, that of its parameter.",
        "it would be broadcast or shifted into its neighbors.",
        "gradients in the order and the shapes of the parameters.",
    )


def sparse_gradient() -> InnerLoopError:
    return refusal(
        "A parameter has a sparse gradient.",
        "dense gradients.",
        "torch cannot differentiate a sparse gradient again.",
        "torch.nn.Embedding(..., sparse=False).",
    )


def line_search(found: str) -> InnerLoopError:
    return refusal(
        f"You asked LBFGS for line_search_fn={found!r}.",
        "line_search_fn=None.",
        "the search picks its rate by a sequence of comparisons, which has no derivative.",
        "torch.optim.LBFGS(..., lr=0.1, line_search_fn=None) with a rate that suits the problem, "
        "or learn it: rule.update(..., hyper={'lr': lr}, evaluate=...).",
    )


def gradients_alone() -> InnerLoopError:
    return refusal(
        "You called LBFGS with gradients alone.",
        "the loss as a function of the parameters.",
        "LBFGS evaluates it several times in one step.",
        "rule.update(params, grads, state, evaluate=loss_and_gradients), where "
        "loss_and_gradients(params) gives both, with rule = innerloop.optim.lbfgs(...) or "
        "innerloop.optim.from_torch(optimizer).",
    )


# Settings. --------------------------------------------------------------------------------------


def discrete_setting(family: str, name: str, known: Iterable[str]) -> InnerLoopError:
    return refusal(
        f"You gave a value for {name!r}, an option of {family}.",
        f"a continuous setting: {', '.join(known)}.",
        f"{name!r} takes discrete values, so nothing can be differentiated through it.",
        f"torch.optim.{family}(..., {name}=...) when you build the optimizer.",
    )


def unknown_setting(family: str, name: str, known: Iterable[str]) -> InnerLoopError:
    return refusal(
        f"You gave a value for {name!r}.",
        f"a continuous setting of {family}: {', '.join(known)}.",
        f"{family} has no setting of that name, so the value would have no effect.",
        "one of these names.",
    )


def values_for_groups(name: str, found: int, groups: int, arity: int) -> InnerLoopError:
    one = f"({', '.join('abc'[:arity])})" if arity > 1 else "value"
    return refusal(
        f"You gave {found} values for {name!r}, and the optimizer has {groups} parameter groups.",
        f"a list of one value, used for every group, or of {groups}, one for each.",
        "values are matched to groups by position.",
        f"{{{name!r}: [{one}]}} or {{{name!r}: [{one}, ...]}} with {groups} entries.",
    )


def values_in_a_group(name: str, found: int, size: int) -> InnerLoopError:
    return refusal(
        f"You gave {found} values of {name!r} for a group of {size} parameters.",
        f"one value, or {size}, one for each parameter of the group.",
        "values inside a group are matched to its parameters by position.",
        f"{{{name!r}: [[v1, ..., v{size}]]}}.",
    )


def not_a_number(family: str, name: str, found: Any) -> InnerLoopError:
    return refusal(
        f"You gave a {found} as {name!r} of {family}.",
        "a number, or a floating-point tensor.",
        "the setting is continuous.",
        f"{{{name!r}: [torch.tensor(0.1, requires_grad=True)]}}.",
    )


def number_of_components(family: str, name: str, value: Any, arity: int) -> InnerLoopError:
    return refusal(
        f"You gave {value!r} as {name!r} of {family}.",
        f"{arity} values for each parameter group.",
        f"{name!r} of {family} has {arity} components.",
        f"{{{name!r}: [({', '.join('abc'[:arity])})]}}: a list over groups, and in it a tuple.",
    )


def setting_shape(
    family: str, name: str, value: Tensor, shape: torch.Size, size: int
) -> InnerLoopError:
    return refusal(
        f"You gave a tensor of shape {tuple(value.shape)} as {name!r} of {family}, whose "
        f"parameter group holds {size} parameters.",
        f"one value, {size} values (one per parameter), or a shape that fits the parameter's "
        f"{tuple(shape)}.",
        "the setting multiplies a parameter of that shape.",
        f"{{{name!r}: [[v1, v2, ...]]}} with one number or tensor for each parameter.",
    )


def per_element(name: str) -> InnerLoopError:
    return refusal(
        f"You gave {name!r} a value for each element of a parameter.",
        "one value for each parameter or group.",
        f"{name!r} acts on a parameter as a whole.",
        f"{{{name!r}: [torch.tensor(...)]}} with one value.",
    )


# Writing to torch.optim. ------------------------------------------------------------------------


def not_one_number(name: str) -> InnerLoopError:
    return refusal(
        f"The setting {name!r} has a value for each parameter or element.",
        "one number per group.",
        "torch.optim keeps one number per group.",
        "an optimizer with one group per parameter, or a setting with one value per group.",
    )


def state_per_element(name: str) -> InnerLoopError:
    return refusal(
        f"The state {name!r} differs between the elements of a parameter.",
        "one number per parameter.",
        "torch.optim keeps one number; settings per element have made it differ.",
        "settings per parameter or per group where the state is to go back into torch.",
    )


# Reading from torch.optim. ----------------------------------------------------------------------


def sparse_adam() -> InnerLoopError:
    return refusal(
        "You gave a SparseAdam optimizer.",
        "an optimizer with dense gradients.",
        "torch cannot differentiate a sparse gradient again.",
        "torch.optim.Adam, with torch.nn.Embedding(..., sparse=False).",
    )


def unknown_optimizer(kind: type, known: Iterable[str]) -> InnerLoopError:
    return refusal(
        f"You gave an optimizer of type {kind.__name__}.",
        f"one of {', '.join(sorted(known))}, or a subclass that does not override step.",
        "what its step does is not known here, so it cannot be differentiated.",
        f"innerloop.register_optim({kind.__name__}, YourDifferentiableOptimizer).",
    )


def unnamed_parameter(position: int, param: Tensor) -> InnerLoopError:
    return refusal(
        f"Parameter {position} of the optimizer, of shape {tuple(param.shape)}, is not a "
        "parameter of the model.",
        "an optimizer over this model's own parameters; those of a copy are others.",
        "its updates would reach nothing.",
        "torch.optim.SGD(model.parameters(), lr=0.1) with the model that you pass on; or "
        "optim.from_torch(optimizer, functional(model).params).",
    )

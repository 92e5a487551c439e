"""Errors of the eager interface."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from innerloop.errors import InnerLoopError, RequirementError, four_part, refusal


def no_params_to_create_from() -> InnerLoopError:
    return refusal(
        "You gave neither params nor fmodel.",
        "one of them.",
        "the optimizer needs to know what it will update.",
        "create_diff_optim(torch.optim.SGD, {'lr': 0.1}, fmodel=fmodel).",
    )


def not_a_differentiable_optimizer(given: Any) -> InnerLoopError:
    return refusal(
        f"You registered {given!r}.",
        "a subclass of innerloop.DifferentiableOptimizer.",
        "its step, override and state handling are needed.",
        "class Mine(DifferentiableOptimizer): def _update(self, grouped_grads): ...",
    )


def parameter_of_another_model(param: Tensor, group: int, position: int) -> InnerLoopError:
    return refusal(
        f"Parameter {position} of group {group} of the optimizer, of shape {tuple(param.shape)}, "
        "is not a parameter of the model.",
        "an optimizer over parameters of that model.",
        "its updates would reach nothing.",
        "opt = torch.optim.SGD(model.parameters(), ...) with the model given here.",
    )


def parameter_in_two_groups() -> InnerLoopError:
    return refusal(
        "You added a group with a parameter that is in a group already.",
        "each parameter in one group.",
        "it would be updated twice in a step.",
        "add_param_group({'params': other_parameters}).",
    )


def loss_evaluated_again(family: str) -> InnerLoopError:
    return refusal(
        f"You made a differentiable {family} for step(loss).",
        "a loss that can be evaluated again at other weights.",
        f"{family} evaluates it several times in one step.",
        "innerloop.optim.lbfgs() and rule.update(..., evaluate=loss_and_gradients).",
    )


# A step. ----------------------------------------------------------------------------------------


def step_without_params() -> InnerLoopError:
    return refusal(
        "You called step(loss) without params.",
        "the present parameters.",
        "this optimizer has no patched model to take them from.",
        "params = diffopt.step(loss, params=params).",
    )


def wrong_number_of_params(found: int, needed: int) -> InnerLoopError:
    return refusal(
        f"You gave {found} parameters to step.",
        f"{needed}, as when the optimizer was made.",
        "they are matched by position.",
        "all parameters, in the order of reference_params.",
    )


def loss_of_other_weights() -> RequirementError:
    return RequirementError(
        four_part(
            "The loss given to step does not depend on the present weights.",
            "a loss computed with them.",
            "it was computed before an earlier step, or by the original model instead of the "
            "patched one, so nothing would move.",
            "loss = loss_fn(fmodel(x), y) before every diffopt.step(loss).",
        )
    )


def wrong_number_of_gradients(found: int | None, needed: int) -> InnerLoopError:
    return refusal(
        f"The grad_callback returned {'nothing' if found is None else found}.",
        f"{needed} gradients, or None in the place of one.",
        "they are matched to the model's parameters by position.",
        "return [g if g is None else g.clamp(-1, 1) for g in grads].",
    )


def override_not_a_dictionary(override: Any) -> InnerLoopError:
    return refusal(
        f"You gave a {type(override).__name__} as override.",
        "a dictionary of settings.",
        "each value belongs to a setting.",
        "override={'lr': [torch.tensor(0.1, requires_grad=True)]}.",
    )


# State. -----------------------------------------------------------------------------------------


def other_groups(what: str, found: list[int], needed: list[int]) -> InnerLoopError:
    return refusal(
        f"You {what} an optimizer with groups of {found} parameters, of other numbers or shapes.",
        f"groups of {needed} parameters.",
        "state is matched to parameters by position.",
        "an optimizer over the same groups as the one that the differentiable one was made from.",
    )


def target_of_another_kind(family: str, target: Any) -> InnerLoopError:
    return refusal(
        f"You wrote the state of {family} to {type(target).__name__}.",
        f"an optimizer of the kind of torch.optim.{family}.",
        "each kind has a state and settings of its own.",
        "diffopt.write_to(optimizer), with the optimizer it was made from.",
    )

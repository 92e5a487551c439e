"""Errors raised by calls of an ``InnerLoop``."""

from __future__ import annotations

from typing import Any

from innerloop.errors import InnerLoopError, RequirementError, four_part


def other_number_of_tasks(count: int, before: int, backward: Any) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"You called with {count} tasks after a call with {before}.",
            "the same number of tasks as in the last call.",
            f"with {backward} each task goes on where it was.",
            "inner.restart() before a call with other tasks.",
        )
    )


def run_under_way(backward: Any) -> RequirementError:
    return RequirementError(
        four_part(
            f"You learn 'init' with {backward}, and the last call left a state to go on from.",
            "learn without 'init'.",
            "this call starts from the carried state, so no gradient gets back to the "
            "initial weights.",
            "learn=('lr',), say; inner.restart() before the call; or carry=False.",
        )
    )


def truncated_before_start(backward: Any, steps: int) -> RequirementError:
    return RequirementError(
        four_part(
            f"You learn 'init' with {backward} and {steps} steps.",
            f"at most {backward.k} steps, or other meta-parameters.",
            "the truncated gradient never gets back to the initial weights.",
            f"Truncated({steps}), another strategy, or learn without 'init'.",
        )
    )


def replaced_parameters(what: str) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"You replaced {what} after the inner loop was made.",
            "the parameters that the optimizer was built over.",
            "the optimizer still holds the old ones, with their settings and state.",
            "a new optimizer and a new InnerLoop after changing the model.",
        )
    )


# Learned settings written to an optimizer. ------------------------------------------------------


def not_two_optimizers(own: Any, target: Any) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"You wrote the settings of an inner loop with {type(own).__name__} "
            f"to {type(target).__name__}.",
            "two optimizers of torch.optim.",
            "torch.optim has settings by name; a learned optimizer has weights, which are "
            "meta-parameters already.",
            "inner.optimizer.as_torch_optimizer(params), if it is one of "
            "innerloop.learned, or inner.state_dict() to keep its weights.",
        )
    )


def one_value_per_step(name: str) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"You learned {name!r} per step and write it to an optimizer.",
            "one value for all steps.",
            "torch.optim keeps one number per group.",
            "inner.hyper to read the values, and set those you want.",
        )
    )


def other_groups(own: Any, other: Any) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"You wrote settings of {own.family.name} with groups of {own.sizes} "
            f"parameters to {other.family.name} with groups of {other.sizes}.",
            "an optimizer of the same class with the same groups.",
            "settings are matched by name and by group.",
            "inner.write_to(optimizer), with an optimizer built like that of the loop.",
        )
    )


def scheduler_with_own_numbers(schedule: Any) -> InnerLoopError:
    return InnerLoopError(
        four_part(
            f"You write settings learned with a {type(schedule).__name__} to its optimizer.",
            "a scheduler that moves settings in proportion to where they started.",
            "this one holds absolute values, which would overwrite the learned ones.",
            "inner.hyper to read what was learned, and a new scheduler made with it.",
        )
    )

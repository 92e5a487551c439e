"""Errors of this room: modules without a replica, weights and buffers that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from innerloop.errors import InnerLoopError, RequirementError, four_part, refusal


def not_a_module(given: object) -> InnerLoopError:
    return refusal(
        f"You gave a {type(given).__name__}.",
        "a torch.nn.Module.",
        "its weights are found in its module tree.",
        "class Model(torch.nn.Module): ...",
    )


def script_module(path: str) -> InnerLoopError:
    return refusal(
        f"The module {path!r} is a ScriptModule.",
        "a module written in Python.",
        "a compiled script owns its weights and does not take others.",
        "the module as it was before torch.jit.script or torch.jit.trace.",
    )


def lazy_module(path: str, parameter: str) -> InnerLoopError:
    return refusal(
        f"The lazy module {path!r} has no {parameter!r} yet.",
        "a module whose weights have shapes.",
        "a lazy module makes its weights in its first call.",
        "model(example_input) once before.",
    )


def wrong_number(given: int, needed: int) -> InnerLoopError:
    return refusal(
        f"You gave {given} weights.",
        f"{needed}, in the order of module.parameters().",
        "weights given as a sequence are matched by position.",
        "list(module.parameters()) with the tensors you want in their places.",
    )


def wrong_names(kind: str, given: Iterable[str], known: Sequence[str]) -> InnerLoopError:
    """Names that the module does not have or, if there are none, those that were left out."""
    unknown = sorted(set(given) - set(known))
    missing = sorted(set(known) - set(given))
    return refusal(
        f"These {kind} are missing or unknown: {', '.join((unknown or missing)[:5])}.",
        f"exactly the module's own: {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}.",
        "a weight left out would silently be the original's.",
        "f.params as a starting point; a tied weight goes by its first name.",
    )


def buffer_with_gradient(name: str, buffer: Tensor) -> RequirementError:
    return RequirementError(
        four_part(
            f"The buffer {name!r} of shape {tuple(buffer.shape)} requires grad.",
            "buffers without a gradient.",
            "buffers are copied and carried from step to step as numbers; the gradient with "
            "respect to this one would silently be missing.",
            "it as a torch.nn.Parameter, as a part of the batch, or as a plain attribute of the "
            "module; .detach() it where it is registered, or torch.no_grad(), if no gradient is "
            "needed.",
        )
    )

"""Evaluation at perturbed parameters: of a module by replicas, or of a function of tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from innerloop import _tree
from innerloop.backward import Implicit, Truncated
from innerloop.errors import InnerLoopError, refusal
from innerloop.inner_loop import InnerLoop
from innerloop.modules.functional import functional
from innerloop.modules.tree import unwrap

At = Callable[[list[Tensor], Any, Any, Any], tuple[Any, Any]]
"""Maps values of the parameters, a state, args and kwargs to the value and the next state."""


class Perturbed(NamedTuple):
    """A function or module that can be evaluated at other values of its parameters.

    ``now`` is a partial and no closure: copied or saved together with a module, it is about the
    copy.
    """

    name: str
    now: Callable[[], tuple[list[Tensor], At]]
    """Returns the current parameters, and a function that evaluates at others."""
    without_grad: bool = False
    """If true, evaluate under ``no_grad``: an inner loop enables gradients in its own steps."""


def perturb(function: Any, params: Any, persistent: bool) -> Perturbed:
    """Prepare the estimator's first argument; refuse what cannot be evaluated."""
    call = _call_with_state if persistent else _call
    if not isinstance(function, nn.Module):
        return _of_function(function, params, call)
    if params is not None:
        raise wrong_argument(
            f"params together with a {type(function).__name__}",
            "a module alone",
            "its own parameters are perturbed, those that require grad",
            "module.requires_grad_(False) for parts that are to stay as they are.",
        )
    if isinstance(function, nn.parallel.DistributedDataParallel):
        raise wrong_argument(
            "a DistributedDataParallel",
            "the module in it",
            "the wrapper averages gradients that a backward pass makes, and there is none",
            "evolution(wrapper.module, ...), and torch.distributed.all_reduce over the gradients.",
        )
    module = unwrap(function)
    if isinstance(module, InnerLoop):
        return Perturbed(type(module).__name__, partial(_of_loop, module, persistent), True)
    return Perturbed(type(module).__name__, partial(_of_module, module, call))


def _of_loop(inner: InnerLoop, persistent: bool) -> tuple[list[Tensor], At]:
    if not persistent and isinstance(inner.backward, Truncated) and inner.backward.carry:
        raise wrong_argument(
            f"an inner loop with {inner.backward}",
            "one that starts anew in each call, or persistent=True",
            "what earlier calls did would be left out, and the samples need states of their "
            "own to count it",
            "evolution(inner, persistent=True, ...).",
        )
    if persistent and isinstance(inner.backward, Implicit):
        raise wrong_argument(
            f"an inner loop with {inner.backward}, and persistent=True",
            "another strategy, or persistent=False",
            "Implicit is about where training ends, and a persistent run is never at its end",
            "evolution(inner, ...), or InnerLoop(..., backward=innerloop.Remat()).",
        )
    return _of_module(inner, _call_carrying if persistent else _call)


def _of_module(module: nn.Module, call: Callable[..., Any]) -> tuple[list[Tensor], At]:
    template = functional(module).template()
    own = {name: p for name, p in template.params.items() if p.requires_grad}
    _check(own.values())

    def at(values: list[Tensor], state: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        replica = template.bind({**template.params, **dict(zip(own, values, strict=True))})
        return call(replica, state, args, kwargs)

    return list(own.values()), at


def _of_function(function: Any, params: Any, call: Callable[..., Any]) -> Perturbed:
    if not callable(function):
        raise wrong_argument(
            f"a {type(function).__name__}", "a module or a function", "it is called"
        )
    leaves, spec = _tree.flatten(params)
    if params is None or not leaves or not all(isinstance(t, Tensor) for t in leaves):
        raise wrong_argument(
            f"a function and params={type(params).__name__}",
            "tensors, in any nesting of lists, tuples and dictionaries",
            "what a function depends on cannot be seen from outside",
            "evolution(function, params={'w': w}), which calls function({'w': ...}, ...).",
        )
    _check(leaves)
    name = getattr(function, "__name__", type(function).__name__)
    # In containers of its own: what happens to those that were given changes nothing.
    own = _tree.unflatten(leaves, spec)
    return Perturbed(name, partial(_of_tensors, function, own, call))


def _of_tensors(function: Any, params: Any, call: Callable[..., Any]) -> tuple[list[Tensor], At]:
    leaves, spec = _tree.flatten(params)

    def at(values: list[Tensor], state: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return call(partial(function, _tree.unflatten(values, spec)), state, args, kwargs)

    return leaves, at


def _call(function: Any, _: Any, args: Any, kwargs: Any) -> tuple[Any, None]:
    return function(*args, **kwargs), None


def _call_with_state(function: Any, state: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    found = function(state, *args, **kwargs)
    if isinstance(found, tuple) and len(found) == 2:
        return found
    raise wrong_argument(
        f"a function that returned a {type(found).__name__}",
        "a value and a state",
        "with persistent=True each sample goes on from its state",
        "return value, state.",
    )


def _call_carrying(replica: Any, state: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Run one part of a persistent run of an inner loop, from a carried state."""
    replica.backward = Truncated(sys.maxsize, carry=True)
    replica._carried = state
    value = replica(*args, **kwargs)
    if state is not None and replica._carried.keys() != state.keys():
        raise wrong_argument(
            "other tasks than in the call before",
            "the same tasks in all calls of a persistent run",
            "each task goes on from where it was",
            "estimator.restart() before a call with other tasks.",
        )
    return value, replica._carried


def _check(params: Collection[Tensor]) -> None:
    """Refuse parameters that cannot receive the estimate."""
    if not params:
        raise wrong_argument(
            "nothing that requires grad", "at least one parameter", "it gets the estimate"
        )
    for p in params:
        if not p.requires_grad or p.is_complex():
            raise wrong_argument(
                f"a tensor of {p.dtype} with requires_grad={p.requires_grad}",
                "real tensors that require grad",
                "the estimate is given to them by backward()",
                "w.requires_grad_(True).",
            )


def wrong_argument(
    wrote: str,
    needed: str,
    why: str,
    write: str = "evolution(inner, samples=16, sigma=0.01, seed=0).",
) -> InnerLoopError:
    """The refusal of an argument of ``evolution``."""
    return refusal(f"You gave {wrote} to evolution.", f"{needed}.", f"{why}.", write)

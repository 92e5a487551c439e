"""Every optimizer of ``torch.optim`` as a pure rule, with every continuous setting differentiable.

One file per family, always in the same order: state, update, family, builder.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from innerloop.optim.adadelta import adadelta as adadelta
from innerloop.optim.adafactor import adafactor as adafactor
from innerloop.optim.adagrad import adagrad as adagrad
from innerloop.optim.adam import adam as adam
from innerloop.optim.adam import adamw as adamw
from innerloop.optim.adamax import adamax as adamax
from innerloop.optim.asgd import asgd as asgd
from innerloop.optim.blocks import Block as Block
from innerloop.optim.blocks import OptState as OptState
from innerloop.optim.convert import family_of, names_of, read_state
from innerloop.optim.family import Elsewhere as Elsewhere
from innerloop.optim.family import Family
from innerloop.optim.lbfgs import lbfgs as lbfgs
from innerloop.optim.muon import muon as muon
from innerloop.optim.nadam import nadam as nadam
from innerloop.optim.radam import radam as radam
from innerloop.optim.rmsprop import rmsprop as rmsprop
from innerloop.optim.rprop import rprop as rprop
from innerloop.optim.rule import Rule as Rule
from innerloop.optim.sgd import sgd as sgd

_RULES = (
    *(sgd(), adam(), adamw(), adamax(), nadam(), radam(), adagrad(), adadelta(), rmsprop()),
    *(rprop(), asgd(), adafactor(), muon(), lbfgs()),
)
FAMILIES: dict[type[torch.optim.Optimizer], Family] = {
    rule.family.torch_class: rule.family for rule in _RULES
}


def from_torch(
    optimizer: torch.optim.Optimizer, params: Mapping[str, torch.Tensor] | None = None
) -> Rule:
    """The rule of a ``torch.optim`` instance, with its groups and a copy of its current state.

    Its parameters, group after group, are what the rule's functions expect. With ``params``, the
    model's parameters by name, they take mappings by these names instead, and what the optimizer
    does not have passes through. A tensor that sits in the optimizer as a setting is kept, so a
    gradient reaches it.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> rule = from_torch(torch.optim.SGD([weight], lr=0.5))
    >>> params, state = rule.update([weight], [weight], rule.init([weight]))
    >>> params[0].detach()
    tensor([0.5000, 1.0000])

    >>> net = torch.nn.Linear(2, 1)
    >>> rule = from_torch(torch.optim.Adam([net.bias]), dict(net.named_parameters()))
    >>> rule.names
    ('bias',)
    """
    family = family_of(type(optimizer), FAMILIES)
    own = [p for group in optimizer.param_groups for p in group["params"]]
    return Rule(
        family,
        tuple(
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ),
        sizes=tuple(len(group["params"]) for group in optimizer.param_groups),
        warm=tuple(read_state(family, optimizer.state.get(p, {})) for p in own),
        shapes=tuple(p.shape for p in own),
        names=None if params is None else names_of(own, params),
    )

"""Every optimizer of ``torch.optim`` as a pure rule, with every continuous setting differentiable.

One file per family, always in the same order: state, update, family, builder.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from innerloop.optim.adadelta import ADADELTA
from innerloop.optim.adadelta import adadelta as adadelta
from innerloop.optim.adafactor import ADAFACTOR
from innerloop.optim.adafactor import adafactor as adafactor
from innerloop.optim.adagrad import ADAGRAD
from innerloop.optim.adagrad import adagrad as adagrad
from innerloop.optim.adam import ADAM, ADAMW
from innerloop.optim.adam import adam as adam
from innerloop.optim.adam import adamw as adamw
from innerloop.optim.adamax import ADAMAX
from innerloop.optim.adamax import adamax as adamax
from innerloop.optim.asgd import ASGD
from innerloop.optim.asgd import asgd as asgd
from innerloop.optim.blocks import Block as Block
from innerloop.optim.blocks import OptState as OptState
from innerloop.optim.convert import family_of, read
from innerloop.optim.family import Elsewhere as Elsewhere
from innerloop.optim.family import Family
from innerloop.optim.lbfgs import LBFGS
from innerloop.optim.lbfgs import lbfgs as lbfgs
from innerloop.optim.muon import MUON
from innerloop.optim.muon import muon as muon
from innerloop.optim.nadam import NADAM
from innerloop.optim.nadam import nadam as nadam
from innerloop.optim.radam import RADAM
from innerloop.optim.radam import radam as radam
from innerloop.optim.rmsprop import RMSPROP
from innerloop.optim.rmsprop import rmsprop as rmsprop
from innerloop.optim.rprop import RPROP
from innerloop.optim.rprop import rprop as rprop
from innerloop.optim.rule import Rule as Rule
from innerloop.optim.sgd import SGD
from innerloop.optim.sgd import sgd as sgd

FAMILIES: dict[type[torch.optim.Optimizer], Family] = {
    family.torch_class: family
    for family in (
        SGD,
        ADAM,
        ADAMW,
        ADAMAX,
        NADAM,
        RADAM,
        ADAGRAD,
        ADADELTA,
        RMSPROP,
        RPROP,
        ASGD,
        ADAFACTOR,
        MUON,
        LBFGS,
    )
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
    return read(optimizer, family_of(type(optimizer), FAMILIES), params)

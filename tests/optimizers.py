"""The table of optimizers: every class of `torch.optim` with every option of its rule."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import optim

LBFGS_MAXIMIZES = "maximize" in inspect.signature(optim.LBFGS).parameters
"""Since torch 2.15."""


class Row(NamedTuple):
    """A class of `torch.optim` and what it is built with."""

    name: str
    kind: type[optim.Optimizer]
    settings: dict[str, Any]

    @property
    def matrices_only(self) -> bool:
        return self.kind is optim.Muon

    @property
    def one_group(self) -> bool:
        return self.kind is optim.LBFGS

    @property
    def elementwise(self) -> bool:
        return self.kind not in (optim.Muon, optim.Adafactor, optim.LBFGS)

    @property
    def takes_complex(self) -> bool:
        return self.kind not in (optim.Muon, optim.Adafactor)


def _row(kind: type[optim.Optimizer], **settings: Any) -> Row:
    given = ", ".join(f"{name}={value}" for name, value in settings.items())
    return Row(f"{kind.__name__}({given})", kind, settings)


def _adam_like(kind: type[optim.Optimizer]) -> list[Row]:
    return [
        _row(kind, lr=0.05),
        _row(kind, lr=0.05, betas=(0.7, 0.9), eps=0.01, weight_decay=0.1),
        _row(kind, lr=0.05, betas=(0.0, 0.9), weight_decay=0.0),
        _row(kind, lr=0.05, maximize=True, weight_decay=0.05),
    ]


def _with_decoupled(kind: type[optim.Optimizer]) -> list[Row]:
    return [
        _row(kind, lr=0.05, weight_decay=0.2, decoupled_weight_decay=True),
        _row(kind, lr=0.05, weight_decay=0.2, decoupled_weight_decay=True, maximize=True),
        _row(kind, lr=0.05, weight_decay=0.0, decoupled_weight_decay=True),
    ]


ROWS = [
    _row(optim.SGD, lr=0.1),
    _row(optim.SGD, lr=0.0),
    _row(optim.SGD, lr=0.1, weight_decay=0.1),
    _row(optim.SGD, lr=0.1, maximize=True, weight_decay=0.1),
    _row(optim.SGD, lr=0.1, momentum=0.9),
    _row(optim.SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.05),
    _row(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    _row(optim.SGD, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1, maximize=True),
    *_adam_like(optim.Adam),
    *_with_decoupled(optim.Adam),
    _row(optim.Adam, lr=0.05, betas=(0.7, 0.6), amsgrad=True),
    _row(optim.Adam, lr=0.05, betas=(0.7, 0.6), amsgrad=True, maximize=True, weight_decay=0.1),
    *_adam_like(optim.AdamW),
    _row(optim.AdamW, lr=0.05, betas=(0.7, 0.6), amsgrad=True, weight_decay=0.2),
    *_adam_like(optim.Adamax),
    _row(optim.Adamax, lr=0.05, betas=(0.7, 0.6), eps=0.01),
    *_adam_like(optim.NAdam),
    *_with_decoupled(optim.NAdam),
    _row(optim.NAdam, lr=0.05, momentum_decay=0.3),
    _row(optim.NAdam, lr=0.05, momentum_decay=0.0),
    *_adam_like(optim.RAdam),
    *_with_decoupled(optim.RAdam),
    _row(optim.RAdam, lr=0.05, betas=(0.8, 0.5)),
    _row(optim.Adagrad, lr=0.1),
    _row(optim.Adagrad, lr=0.1, lr_decay=0.2, weight_decay=0.1, eps=0.01),
    _row(optim.Adagrad, lr=0.1, initial_accumulator_value=0.3),
    _row(optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3, maximize=True),
    _row(optim.Adadelta, lr=1.0),
    _row(optim.Adadelta, lr=0.5, rho=0.7, eps=0.01, weight_decay=0.1),
    _row(optim.Adadelta, lr=0.5, eps=0.01, maximize=True),
    _row(optim.RMSprop, lr=0.02),
    _row(optim.RMSprop, lr=0.02, alpha=0.8, eps=0.01, weight_decay=0.1),
    _row(optim.RMSprop, lr=0.02, alpha=0.8, momentum=0.8),
    _row(optim.RMSprop, lr=0.02, alpha=0.8, centered=True, eps=0.01),
    _row(optim.RMSprop, lr=0.02, alpha=0.8, centered=True, eps=0.01, momentum=0.8),
    _row(optim.RMSprop, lr=0.02, momentum=0.5, weight_decay=0.1, maximize=True),
    _row(optim.Rprop, lr=0.03),
    _row(optim.Rprop, lr=0.03, etas=(0.4, 1.3), step_sizes=(0.025, 0.045)),
    _row(optim.Rprop, lr=0.03, maximize=True),
    _row(optim.ASGD, lr=0.1),
    _row(optim.ASGD, lr=0.1, lambd=0.2, alpha=0.6, t0=1.5, weight_decay=0.1),
    _row(optim.ASGD, lr=0.1, lambd=0.0, t0=0.5, maximize=True),
    _row(optim.Adafactor, lr=0.1),
    _row(optim.Adafactor, lr=0.1, eps=(1e-8, 1e-3), weight_decay=0.1),
    _row(optim.Adafactor, lr=0.1, beta2_decay=-0.5, eps=(0.7, 2.0), d=1.3),
    _row(optim.Adafactor, lr=0.8, eps=(1e-8, 0.3), weight_decay=0.05),
    _row(optim.Adafactor, lr=0.1, beta2_decay=0.0, d=1.3, maximize=True),
    _row(optim.Muon, lr=0.05),
    _row(optim.Muon, lr=0.05, nesterov=False, momentum=0.8, weight_decay=0.3),
    _row(optim.Muon, lr=0.05, momentum=0.0, weight_decay=0.0, adjust_lr_fn="original"),
    _row(optim.Muon, lr=0.05, ns_coefficients=(2.0, -1.5, 0.5), ns_steps=3, eps=4.0),
    _row(optim.Muon, lr=0.05, adjust_lr_fn="match_rms_adamw"),
    _row(optim.LBFGS, lr=0.1, max_iter=1),
    _row(optim.LBFGS, lr=0.05, max_iter=3),
    _row(optim.LBFGS, lr=0.1, max_iter=6, max_eval=2, history_size=2),
    _row(optim.LBFGS, lr=0.2, max_iter=3, tolerance_grad=0.5, tolerance_change=1e-5),
    *([_row(optim.LBFGS, lr=0.05, max_iter=3, maximize=True)] if LBFGS_MAXIMIZES else []),
]
"""Every class, with every option and settings that make each of its terms act."""


_BRANCHING = ("momentum", "dampening", "max_eval")


def _variant(row: Row) -> Any:
    """What a rule branches by: its class, the options that are on, and settings that add terms."""
    on = [
        name
        for name, value in row.settings.items()
        if value and (isinstance(value, bool | str) or name in _BRANCHING)
    ]
    return row.kind, tuple(on)


ONE_OF_EACH = list({_variant(row): row for row in reversed(ROWS)}.values())
"""The first row of every variant."""

FLAGS = [
    _row(kind, lr=0.05, **{flag: True})
    for kind in dict.fromkeys(row.kind for row in ROWS)
    for flag in ("foreach", "fused", "capturable", "differentiable")
    if flag in inspect.signature(kind).parameters
]
"""Flags that choose how torch computes the same rule; they are accepted and change nothing."""

_IN_SECOND_GROUP: dict[str, Any] = {
    "lr": 0.7,
    "betas": (0.9, 0.98),
    "eps": 1.5,
    "weight_decay": 1.5,
    "momentum": 0.8,
    "dampening": 0.5,
    "momentum_decay": 1.5,
    "lr_decay": 0.5,
    "rho": 0.9,
    "alpha": 0.9,
    "lambd": 2.0,
    "t0": 1.3,
    "etas": (0.9, 1.05),
    "step_sizes": (1.1, 0.9),
    "beta2_decay": 1.2,
    "d": 1.2,
    "ns_coefficients": (0.95, 0.9, 0.9),
}
"""What the settings of the second group are multiplied by, so that the groups differ in all."""


def second_group(row: Row, defaults: dict[str, Any]) -> dict[str, Any]:
    """The settings of the second group, given those of the first."""
    return {
        name: _scaled(defaults[name], factor)
        for name, factor in _IN_SECOND_GROUP.items()
        if name in defaults
    }


def _scaled(value: Any, factor: Any) -> Any:
    if isinstance(value, tuple):
        factors = factor if isinstance(factor, tuple) else (factor,) * len(value)
        return tuple(None if v is None else v * f for v, f in zip(value, factors, strict=True))
    return value * factor


def build(row: Row, params: list[torch.Tensor], split: int, **extra: Any) -> optim.Optimizer:
    """The row's optimizer: the first `split` parameters in one group, the rest in another."""
    if row.one_group:
        return row.kind(params, **row.settings, **extra)
    defaults = row.kind(params[:split], **row.settings).defaults
    second = {"params": params[split:], **second_group(row, defaults), **extra}
    return row.kind([{"params": params[:split], **extra}, second], **row.settings)

"""``higher.patch``: patched modules."""

from __future__ import annotations

import abc as _abc  # noqa: F401
import typing as _typing  # noqa: F401
import warnings as _warnings  # noqa: F401
import weakref as _weakref  # noqa: F401
from collections import OrderedDict as _OrderedDict  # noqa: F401
from collections.abc import Callable as _Callable
from collections.abc import Iterator as _Iterator
from contextlib import contextmanager as _contextmanager
from typing import Any as _Any

import torch as _torch
from torch import Tensor as _Tensor
from torch import nn as _nn

from innerloop.compat.higher import utils as _utils
from innerloop.eager.interface import monkeypatch as monkeypatch
from innerloop.modules.patched import Patched as _Patched
from innerloop.modules.patched import patch_module as _patched_module
from innerloop.modules.tree import survey as _survey
from innerloop.modules.tree import unwrap as _unwrapped

_MonkeyPatchBase = _Patched
_internal_attrs = {
    *("_backend", "_parameters", "_buffers", "_backward_hooks", "_forward_hooks"),
    *("_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_modules"),
}
_BufferType = dict[str, _Tensor | None]
_EncapsulatorType = _Callable[[_Any, _nn.Module], None] | None


def make_functional(module: _nn.Module, encapsulator: _EncapsulatorType = None) -> _Any:
    """A patched module without weights of its own; give them as ``fmodule(x, params=...)``."""
    fmodule = _patched_module(_survey(module), None)
    if encapsulator is not None:
        encapsulator(fmodule, module)
    return fmodule


def buffer_sync(
    module: _nn.Module, fmodule: _nn.Module, device: _torch.device | str | None = None
) -> None:
    """Copy the buffers of ``module`` into ``fmodule``, once."""
    module = _unwrapped(module)
    for name, buffer in module._buffers.items():
        fmodule._buffers[name] = (
            _utils._copy_tensor(buffer, True, device) if isinstance(buffer, _Tensor) else buffer
        )
    for name, child in module._modules.items():
        if name not in fmodule._modules:
            raise KeyError(f"the patched module has no submodule {name!r}: {fmodule}")
        other = fmodule._modules[name]
        if child is not None and other is not None:
            buffer_sync(child, other, device)


def _patched_parameters(
    self: _Any, recurse: bool = True, time: int | None = None
) -> _Iterator[_Any]:
    return self.parameters(recurse, time)


def _update_patched_params(fmodule: _Any, params_box: _Any, params_offset: int) -> int:
    fmodule.update_params(params_box[0][params_offset:])
    return len(params_box[0])


def _make_functional(
    module: _nn.Module, params_box: _Any, params_offset: int, root_patched: _Any = None
) -> tuple[int, _Any, type]:
    fmodule = make_functional(module)
    return params_offset + len(list(module.parameters())), fmodule, type(fmodule)


@_contextmanager
def _modify_internally(fmodule: _nn.Module) -> _Iterator[None]:
    yield


class _ParameterPlaceholder:
    """A name where a weight would stand."""

    def __init__(self, name: str) -> None:
        self._param_name = name

    def __repr__(self) -> str:
        return f'Parameter placeholder ("{self._param_name}")'

"""``higher.patch``: patched modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from innerloop.compat.higher import utils as _utils
from innerloop.eager.interface import monkeypatch as monkeypatch
from innerloop.modules.patched import Patched
from innerloop.modules.patched import patched as _patched_module
from innerloop.modules.tree import survey as _survey
from innerloop.modules.tree import unwrapped as _unwrapped

_MonkeyPatchBase = Patched
_internal_attrs = {
    *("_backend", "_parameters", "_buffers", "_backward_hooks", "_forward_hooks"),
    *("_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_modules"),
}
_BufferType = dict[str, Tensor | None]
_EncapsulatorType = Callable[[Any, nn.Module], None] | None


def make_functional(module: nn.Module, encapsulator: _EncapsulatorType = None) -> Any:
    """A patched module without weights of its own; give them as ``fmodule(x, params=...)``."""
    fmodule = _patched_module(_survey(module), None)
    if encapsulator is not None:
        encapsulator(fmodule, module)
    return fmodule


def buffer_sync(
    module: nn.Module, fmodule: nn.Module, device: torch.device | str | None = None
) -> None:
    """Copy the buffers of ``module`` into ``fmodule``, once."""
    module = _unwrapped(module)
    for name, buffer in module._buffers.items():
        fmodule._buffers[name] = (
            _utils._copy_tensor(buffer, True, device) if isinstance(buffer, Tensor) else buffer
        )
    for name, child in module._modules.items():
        if name not in fmodule._modules:
            raise KeyError(f"the patched module has no submodule {name!r}: {fmodule}")
        other = fmodule._modules[name]
        if child is not None and other is not None:
            buffer_sync(child, other, device)


def _patched_parameters(self: Any, recurse: bool = True, time: int | None = None) -> Iterator[Any]:
    return self.parameters(recurse, time)


def _update_patched_params(fmodule: Any, params_box: Any, params_offset: int) -> int:
    fmodule.update_params(params_box[0][params_offset:])
    return len(params_box[0])


def _make_functional(
    module: nn.Module, params_box: Any, params_offset: int, root_patched: Any = None
) -> tuple[int, Any, type]:
    fmodule = make_functional(module)
    return params_offset + len(list(module.parameters())), fmodule, type(fmodule)


@contextmanager
def _modify_internally(fmodule: nn.Module) -> Iterator[None]:
    yield


class _ParameterPlaceholder:
    """A name where a weight would stand."""

    def __init__(self, name: str) -> None:
        self._param_name = name

    def __repr__(self) -> str:
        return f'Parameter placeholder ("{self._param_name}")'

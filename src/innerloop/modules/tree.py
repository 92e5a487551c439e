"""Module trees: modules, parameters and buffers, each once, the wrappers of torch left out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from innerloop.modules import refusals

_UNINITIALIZED = (UninitializedParameter, UninitializedBuffer)
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside ``torch.compile``, DataParallel or DistributedDataParallel."""
    while True:
        if isinstance(module, _PARALLEL):
            name = "module"
        elif "_orig_mod" in module._modules and _is_compiled(type(module)):
            name = "_orig_mod"
        else:
            return module
        module = module._modules[name]  # type: ignore[assignment]


def _is_compiled(kind: type) -> bool:
    # By name: importing torch._dynamo takes as long as importing torch.
    return any(base.__module__ == "torch._dynamo.eval_frame" for base in kind.__mro__)


def walk(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module once with the prefix of its names, in the order of ``root.modules()``."""
    found: dict[int, tuple[str, nn.Module]] = {}
    waiting = [("", root)]
    while waiting:
        prefix, module = waiting.pop()
        if isinstance(module, _PARALLEL) or "_orig_mod" in module._modules:
            module = unwrap(module)
        if id(module) in found:
            continue
        found[id(module)] = prefix, module
        for name, child in reversed(module._modules.items()):
            if child is not None:
                waiting.append((f"{prefix}{name}.", child))
    return list(found.values())


def named_tensors(root: nn.Module, kind: str) -> dict[str, Tensor]:
    """Each tensor of ``_parameters`` or ``_buffers`` once, by its first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in walk(root):
        for name, tensor in getattr(module, kind).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"{prefix}{name}"] = tensor
    return found


def parameters_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Each parameter of these modules once, in the order of ``root.parameters()``."""
    found = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    return list(found.values())


def survey(root: nn.Module) -> list[nn.Module]:
    """All modules of a tree. Refuses those that cannot have a replica."""
    if not isinstance(root, nn.Module):
        raise refusals.not_a_module(root)
    modules = []
    for prefix, module in walk(root):
        if isinstance(module, torch.jit.ScriptModule):
            raise refusals.script_module(_path(prefix, module))
        for name, parameter in module._parameters.items():
            if isinstance(parameter, _UNINITIALIZED):
                raise refusals.lazy_module(_path(prefix, module), name)
        modules.append(module)
    return modules


def _path(prefix: str, module: nn.Module) -> str:
    return prefix.removesuffix(".") or type(module).__name__

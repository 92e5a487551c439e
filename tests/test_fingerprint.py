"""What a compiled program took for constants: changes are noticed, and nothing else is."""

import array
import enum
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from innerloop.compiled import NotCompilableError, fingerprint


def _scaled(x: Any) -> Any:
    return x


def _regrouped(config: Any) -> None:
    config.value = [[0, 1], [2]]


def _swapped(config: Any) -> None:
    config.value = {"a": [0.5], "b": []}


def _reshaped(config: Any) -> None:
    config.value = config.value.reshape(3, 2)


def _converted(config: Any) -> None:
    config.value = config.value.astype(numpy.int64)


def _renamed(config: Any) -> None:
    config.other = config.value
    del config.value


def _attributed(config: Any) -> None:
    config.value.scale = 2.0


def _rekeyed(config: Any) -> None:
    config.value["new"] = config.value.pop("old")


def _scaled_by_two(config: Any) -> None:
    config.value.scale = 2.0


def _grown(config: Any) -> None:
    config.value().append(1)


def _hooked(config: Any) -> None:
    config.value.register_full_backward_pre_hook(lambda module, grads: grads)


def _written(config: Any) -> None:
    config.value[0] = 1


class Named(list[float]):
    scale = 1.0


class Bound(functools.partial[float]):
    scale = 1.0


_ALIVE = Named()  # A weak reference needs somebody else who holds it.


def _module() -> types.ModuleType:
    module = types.ModuleType("settings")
    module.__dict__["scale"] = 1.0
    return module


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "lists in a list": (lambda: [[0], [1, 2]], _regrouped),
    "lists in a dict": (lambda: {"a": [], "b": [0.5]}, _swapped),
    "shape of an array": (lambda: numpy.zeros((2, 3)), _reshaped),
    "dtype of an array": (lambda: numpy.zeros(2), _converted),
    "values of an array": (lambda: numpy.zeros(2), _written),
    "values of a masked array": (lambda: numpy.ma.array([0.0, 2.0]), _written),
    "name of an attribute": (lambda: 1.0, _renamed),
    "attribute of a function": (
        lambda: types.FunctionType(_scaled.__code__, globals(), "own"),
        _attributed,
    ),
    "name of a module": (lambda: nn.ModuleDict({"old": nn.ReLU()}), _rekeyed),
    "backward hook": (lambda: nn.Linear(1, 1), _hooked),
    "bytes": (lambda: bytearray(2), _written),
    "array": (lambda: array.array("d", [0.0, 2.0]), _written),
    "memory": (lambda: memoryview(bytearray(2)), _written),
    "attribute of a list": (Named, _scaled_by_two),
    "attribute of a partial": (lambda: Bound(float), _scaled_by_two),
    "value of a module": (_module, _scaled_by_two),
    "referent": (lambda: weakref.ref(_ALIVE), _grown),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name: str) -> None:
    make, change = CHANGES[name]
    config = types.SimpleNamespace(value=make())
    before = fingerprint(config)
    assert fingerprint(config) == before
    change(config)
    assert fingerprint(config) != before


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


MEMBERS = {
    "class": (type("Config", (), {"scale": 1.0}), type("Config", (), {"scale": 2.0})),
    "NumPy number": (numpy.float32(1), numpy.float32(2)),
    "namespace": (types.SimpleNamespace(scale=1.0), types.SimpleNamespace(scale=2.0)),
    "enumeration": (Mode.FAST, Mode.SLOW),
    "partial method": (
        functools.partialmethod(_scaled, 1.0),
        functools.partialmethod(_scaled, 2.0),
    ),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_members_of_classes_are_noticed(name: str) -> None:
    class Own:
        member: Any = MEMBERS[name][0]

    value = Own()
    before = fingerprint(value)
    assert fingerprint(value) == before
    Own.member = MEMBERS[name][1]
    assert fingerprint(value) != before


def test_a_number_of_a_nested_class() -> None:
    class Own:
        class Config:
            scale = 1.0

    value = Own()
    before = fingerprint(value)
    assert fingerprint(value) == before
    Own.Config.scale = 2.0
    assert fingerprint(value) != before


def test_an_address_that_is_used_again_is_no_sameness() -> None:
    config = types.SimpleNamespace(value=range(1))
    found = []
    for n in range(1, 50):
        config.value = range(n)
        found.append(fingerprint(config))
    gc.collect()
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_all_modules_are_noticed(kind: str) -> None:
    before = fingerprint(None)
    hook = getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *given: None)
    try:
        assert fingerprint(None) != before
    finally:
        hook.remove()
    assert fingerprint(None) == before


@pytest.mark.parametrize("make", [lambda: iter([1, 2]), lambda: weakref.proxy(_MODULE)])
def test_what_cannot_be_looked_through_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(NotCompilableError, match="may change"):
        fingerprint(types.SimpleNamespace(value=make()))


_MODULE = nn.Linear(1, 1)


def test_arrays_of_objects_are_refused() -> None:
    with pytest.raises(NotCompilableError, match="objects"):
        fingerprint(numpy.array([{}], dtype=object))


def test_tensors_are_known_by_identity() -> None:
    tensor = torch.zeros(2)
    before = fingerprint(tensor)
    tensor.add_(1)  # It is handed to the program, as weights are.
    assert fingerprint(tensor) == before
    assert fingerprint(tensor.clone()) != before

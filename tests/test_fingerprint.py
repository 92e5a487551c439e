"""What a compiled program took for constants: changes are noticed, and nothing else is."""

import array
import collections
import ctypes
import enum
import functools
import gc
import importlib
import logging
import os
import random
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from innerloop.guard.fingerprint import NotCompilableError, fingerprint, reached


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


class Hidden:
    __slots__ = ("__scale",)

    def __init__(self) -> None:
        self.__scale = 1.0

    def change(self) -> None:
        self.__scale = 2.0


class Settings:
    def __init__(self) -> None:
        self.scale = 1.0


def _scaled_in_class(config: Any) -> None:
    config.value.own.scale = 2.0


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
    "number of C": (lambda: ctypes.c_double(1.0), lambda config: setattr(config.value, "value", 2)),
    "array of C": (lambda: (ctypes.c_int * 2)(), _written),
    "hidden slot": (Hidden, lambda config: config.value.change()),
    "object of a class": (
        lambda: type("Shared", (), {"own": Settings()}),
        _scaled_in_class,
    ),
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


def test_attributes_of_modules_that_are_read_by_name_are_noticed() -> None:
    settings = _module()
    names = {"settings": settings}
    code = "def read(name): return getattr(settings, name)"
    exec(code, names)
    before = fingerprint(names["read"])
    settings.__dict__["scale"] = 2.0
    assert fingerprint(names["read"]) != before


def test_parameters_that_change_their_group_are_noticed() -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups)
    before = fingerprint(optimizer)
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]
    assert fingerprint(optimizer) != before


def _anywhere() -> Any:
    return globals()["_MODULE"]


def _evaluated() -> Any:
    return [eval("_MODULE") for _ in range(1)]


@pytest.mark.parametrize("function", [_anywhere, _evaluated])
def test_code_that_may_read_anything_is_refused(function: Callable[[], Any]) -> None:
    with pytest.raises(NotCompilableError, match="may read anything"):
        fingerprint(function)


def test_a_method_with_the_name_of_a_builtin_is_not() -> None:
    fingerprint(lambda model: model.eval())


def test_loggers_are_not_looked_through() -> None:
    logger = logging.getLogger("of a loss")
    before = fingerprint(logger)
    logger.setLevel(logging.DEBUG)
    assert fingerprint(logger) == before


@functools.lru_cache
def _configuration() -> types.SimpleNamespace:
    return types.SimpleNamespace(scale=1.0)


def test_functions_with_a_cache_are_refused() -> None:
    with pytest.raises(NotCompilableError, match="may change"):
        fingerprint(_configuration)


OPAQUE = [
    lambda: iter([1, 2]),
    lambda: weakref.proxy(_MODULE),
    numpy.random.default_rng,
    numpy.random.RandomState,
    random.Random,
]


@pytest.mark.parametrize("make", OPAQUE)
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


class Lazy(collections.OrderedDict[str, Any]):
    """As registries of large packages are: what they hold is made when somebody asks."""

    def keys(self) -> Any:
        raise AssertionError("asked")

    values = __len__ = __iter__ = keys


def test_containers_are_looked_at_without_their_own_methods() -> None:
    held = Lazy()
    dict.__setitem__(held, "weight", 1.0)

    def function() -> Any:
        return held

    before = fingerprint(function)
    dict.__setitem__(held, "weight", 2.0)
    assert fingerprint(function) != before
    assert any(value is held for value in reached(function))


def test_the_code_of_python_itself_is_not_followed() -> None:
    """A path leads by way of ``expanduser`` to all modules there are."""
    held = [Path("a")]
    assert len(reached(lambda: held)) < 50
    assert len(fingerprint(lambda: held)) < 200


def test_the_environment_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> str:
        return os.environ["WEIGHT"]

    monkeypatch.setenv("WEIGHT", "1")
    before = fingerprint(function)
    monkeypatch.setenv("WEIGHT", "2")
    assert fingerprint(function) != before


def test_modules_by_name_are_refused() -> None:
    def function() -> Any:
        return importlib.import_module("os")

    with pytest.raises(NotCompilableError, match="import_module"):
        fingerprint(function)

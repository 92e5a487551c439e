"""`innerloop.compat.higher` has the names of `higher` and takes its place under `import higher`."""

import collections
import importlib
import inspect
import sys

import pytest
import torch
from torch import nn

import innerloop as il
import innerloop.compat.higher
from problems import Net, flat, regression, relative_error, trained

# Every name that the modules of higher 0.2.1 have, the aliases of their imports too.
NAMES = {
    "higher": [
        "__all__", "_contextmanager", "_torch", "_typing", "create_diff_optim", "get_diff_optim",
        "innerloop_ctx", "monkeypatch", "optim", "patch", "register_optim", "utils",
    ],
    "higher.patch": [
        "_OrderedDict", "_abc", "_contextmanager", "_torch", "_typing", "_warnings", "_weakref",
        "_BufferType", "_EncapsulatorType", "_MonkeyPatchBase", "_ParameterPlaceholder",
        "_internal_attrs", "_make_functional", "_modify_internally", "_patched_parameters",
        "_update_patched_params", "_utils", "buffer_sync", "make_functional", "monkeypatch",
    ],
    "higher.optim": [
        "_abc", "_collections", "_copy", "_math", "_torch", "_typing", "_warnings",
        "DifferentiableASGD", "DifferentiableAdadelta", "DifferentiableAdagrad",
        "DifferentiableAdam", "DifferentiableAdamax", "DifferentiableOptimizer",
        "DifferentiableRMSprop", "DifferentiableRprop", "DifferentiableSGD", "_GradCallbackType",
        "_GradClosureType", "_GroupedGradsType", "_OptMappingType", "_OverrideType", "_StateType",
        "_add", "_addcdiv", "_addcmul", "_get_mask_closure", "_maybe_mask", "_opt_mapping",
        "_patch", "_recursive_apply", "_utils", "apply_trainable_opt_params", "create_diff_optim",
        "get_diff_optim", "get_trainable_opt_params", "register_optim",
    ],
    "higher.utils": [
        "_T", "_U", "_torch", "_typing", "_copy_tensor", "_find_param_in_list",
        "_get_param_mapping", "_is_container", "_recursive_copy_and_cast",
        "_recursive_map", "flatten", "get_func_params",
    ],
}  # fmt: skip

# The arguments that callers give by position or by name, in order, with their defaults.
SIGNATURES = {
    "higher.innerloop_ctx": "model opt device=None copy_initial_weights=True override=None"
    " track_higher_grads=True",
    "higher.monkeypatch": "module device=None copy_initial_weights=True track_higher_grads=True"
    " in_place=False",
    "higher.get_diff_optim": "opt reference_params fmodel=None device=None override=None"
    " track_higher_grads=True",
    "higher.create_diff_optim": "opt_type opt_kwargs=None params=None fmodel=None device=None"
    " override=None track_higher_grads=True",
    "higher.register_optim": "optim_type diff_optim_type",
    "higher.patch.make_functional": "module encapsulator=None",
    "higher.patch.buffer_sync": "module fmodule device=None",
    "higher.optim.get_trainable_opt_params": "opt device=None",
    "higher.optim.apply_trainable_opt_params": "opt override",
    "higher.optim.DifferentiableOptimizer.__init__": "self other reference_params fmodel=None"
    " device=None override=None grad_callback=None track_higher_grads=True",
    "higher.optim.DifferentiableOptimizer.step": "self loss params=None override=None"
    " grad_callback=None",
    "higher.utils.flatten": "x",
    "higher.utils.get_func_params": "module device=None safe_copy=True",
    "higher.utils._copy_tensor": "t safe_copy device=None",
    "higher.utils._recursive_map": "target map_fn",
    "higher.utils._recursive_copy_and_cast": "target device",
    "higher.utils._get_param_mapping": "module seen mapping",
}


def forget_higher():
    names = [name for name in sys.modules if name.split(".")[0] == "higher"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def no_higher():
    """`sys.modules` without any `higher`, before and after."""
    kept = forget_higher()
    yield
    forget_higher()
    sys.modules.update(kept)


@pytest.fixture
def higher(no_higher):
    innerloop.compat.higher.install()
    return importlib.import_module("higher")


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_there(higher, module):
    mirror = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(mirror, name)] == []


def test_aliases_are_what_higher_imports_under_them(higher):
    assert higher.optim._torch is higher.patch._torch is higher.utils._torch is torch
    assert higher.patch._OrderedDict is collections.OrderedDict
    assert higher.optim._collections is collections
    names: dict = {}
    exec("from higher import *", names)
    assert [name for name in names if not name.startswith("__")] == ["innerloop_ctx"]


@pytest.mark.parametrize("path", SIGNATURES)
def test_call_shapes(higher, path):
    _, *attributes = path.split(".")
    target = higher
    for name in attributes:
        target = getattr(target, name)
    ordered = [
        p.name if p.default is p.empty else f"{p.name}={p.default}"
        for p in inspect.signature(target).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    expected = SIGNATURES[path].split()
    assert ordered[: len(expected)] == expected
    assert all("=" in extra for extra in ordered[len(expected) :])


def test_install_serves_every_form_of_import(no_higher):
    innerloop.compat.higher.install()
    import higher
    import higher.optim
    import higher.patch
    import higher.utils
    from higher import innerloop_ctx
    from higher.optim import DifferentiableOptimizer
    from higher.patch import monkeypatch as patched

    assert higher.innerloop_ctx is innerloop_ctx
    assert higher.patch.monkeypatch is patched is higher.monkeypatch
    assert higher.optim.DifferentiableOptimizer is DifferentiableOptimizer
    assert higher.patch is sys.modules["higher.patch"]
    assert higher.optim is sys.modules["higher.optim"]
    assert higher.utils is sys.modules["higher.utils"]
    assert "innerloop" in higher.__file__


def test_patched_models_are_instances_of_the_base(higher):
    model = Net()
    fmodel = higher.monkeypatch(model)
    assert isinstance(fmodel, higher.patch._MonkeyPatchBase)
    assert isinstance(fmodel, nn.Module) and isinstance(fmodel, Net)
    assert not isinstance(model, higher.patch._MonkeyPatchBase)
    assert isinstance(il.monkeypatch(model), higher.patch._MonkeyPatchBase)


@pytest.mark.parametrize(
    "name", ["ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "RMSprop", "Rprop", "SGD"]
)
def test_differentiable_optimizers_are_of_their_class(higher, name):
    model, loss = Net(), regression()
    torch_type = getattr(torch.optim, name)
    diff_type = getattr(higher.optim, f"Differentiable{name}")
    assert higher.optim._opt_mapping[torch_type] is diff_type
    assert issubclass(diff_type, higher.optim.DifferentiableOptimizer)
    optimizer = torch_type(model.parameters(), lr=0.1)
    fmodel = higher.monkeypatch(model)
    diffopt = higher.get_diff_optim(optimizer, model.parameters(), fmodel=fmodel)
    assert type(diffopt) is diff_type
    direct = diff_type(optimizer, model.parameters())
    params = [p.detach().requires_grad_() for p in model.parameters()]
    weights = dict(zip(dict(model.named_parameters()), params, strict=True))
    value = loss(lambda x: torch.func.functional_call(model, weights, (x,)))
    new = direct.step(value, params=params)
    diffopt.step(loss(fmodel))
    expected = trained(model, lambda p: torch_type(p, lr=0.1), loss, 1)[1]
    assert relative_error(flat(new), expected) < 1e-12
    assert relative_error(flat(fmodel.parameters()), expected) < 1e-12


# patch


def test_tracking_is_a_boolean(higher):
    fmodel = higher.monkeypatch(Net())
    assert fmodel.track_higher_grads is True
    with pytest.raises(ValueError, match="track_higher_grads"):
        fmodel.track_higher_grads = 1


def test_buffer_sync_copies_the_buffers(higher):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    fmodel = higher.monkeypatch(model)
    model[1].running_mean.fill_(3.0)
    assert torch.equal(fmodel[1].running_mean, torch.zeros(2))
    higher.patch.buffer_sync(model, fmodel)
    assert torch.equal(fmodel[1].running_mean, torch.full((2,), 3.0))
    model[1].running_mean.fill_(4.0)
    assert torch.equal(fmodel[1].running_mean, torch.full((2,), 3.0))
    higher.patch.buffer_sync(model, fmodel, torch.device("cpu"))
    assert torch.equal(fmodel[1].running_mean, torch.full((2,), 4.0))


def test_parameter_placeholder_prints_its_name(higher):
    placeholder = higher.patch._ParameterPlaceholder("weight")
    assert repr(placeholder) == 'Parameter placeholder ("weight")'


def test_parameters_is_the_patched_one(higher):
    model = Net()
    fmodel = higher.monkeypatch(model)
    listed = list(higher.patch._patched_parameters(fmodel))
    assert all(a is b for a, b in zip(listed, fmodel.parameters(), strict=True))
    assert torch.equal(flat(higher.patch._patched_parameters(fmodel, time=0)), flat(listed))


# optim


def test_recursive_apply_keeps_the_types_of_the_target(higher):
    apply = higher.optim._recursive_apply
    one, two = torch.tensor(1.5), torch.tensor(2.5)
    assert apply(one, 0.0) == 1.5 and isinstance(apply(one, 0.0), float)
    assert apply((one, two), (0.0, 0.0)) == (1.5, 2.5)
    assert apply([one], [0]) == [1.5], "a setting that started as the integer 0 is not rounded"
    assert apply({"a": one}, {"a": 0.0}) == {"a": 1.5}
    target = torch.tensor(0.0)
    assert apply(one, target) is target and target.item() == 1.5
    with pytest.raises(ValueError, match="type"):
        apply(one, (0.0, 0.0))


def test_arithmetic_of_optim(higher):
    a, b, c = torch.randn(3, 4)
    assert torch.equal(higher.optim._add(a, b), a + b)
    assert torch.equal(higher.optim._add(a, 3.0, b), a + 3 * b)
    assert torch.equal(higher.optim._addcmul(a, b, c), a + b * c)
    assert torch.equal(higher.optim._addcmul(a, 3.0, b, c), a + 3 * b * c)
    assert torch.equal(higher.optim._addcdiv(a, b, c), a + b / c)
    assert torch.equal(higher.optim._addcdiv(a, 3.0, b, c), a + 3 * (b / c))


def test_masks_take_gradients_away(higher):
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    square = x * 1
    higher.optim._maybe_mask(square, square == 0)
    assert torch.equal(torch.autograd.grad(square.sqrt().sum(), x)[0], torch.tensor([0.0, 0.25]))
    closure = higher.optim._get_mask_closure(torch.tensor([True, False]))
    assert torch.equal(closure(torch.tensor([5.0, 6.0])), torch.tensor([0.0, 6.0]))


# utils


def test_flatten(higher):
    nested = {"a": [1, (2, 3)], "b": {"c": {4}}}
    assert higher.utils.flatten(nested) == [1, 2, 3, 4]
    assert higher.utils.flatten(5) == [5]


def test_recursive_map_keeps_containers(higher):
    nested = collections.OrderedDict(a=[1, (2, 3)], b={4})
    mapped = higher.utils._recursive_map(nested, lambda x: 10 * x)
    assert mapped == {"a": [10, (20, 30)], "b": {40}}
    assert isinstance(mapped, collections.OrderedDict)
    assert higher.utils._recursive_map(2, lambda x: 10 * x) == 20


def test_recursive_copy_and_cast(higher):
    tensor = torch.ones(2, requires_grad=True)
    copied = higher.utils._recursive_copy_and_cast([tensor, (3, "x")], torch.device("cpu"))
    assert copied[1] == (3, "x")
    assert torch.equal(copied[0], tensor) and copied[0] is not tensor
    assert copied[0].requires_grad and copied[0].is_leaf
    assert copied[0].data_ptr() != tensor.data_ptr()


def test_copy_tensor(higher):
    tensor = torch.ones(2, requires_grad=True)
    safe = higher.utils._copy_tensor(tensor, True)
    shared = higher.utils._copy_tensor(tensor, False)
    assert safe.data_ptr() != tensor.data_ptr() and shared.data_ptr() == tensor.data_ptr()
    assert safe.is_leaf and safe.requires_grad and shared.is_leaf and shared.requires_grad
    assert not higher.utils._copy_tensor(tensor.detach(), True).requires_grad


def test_is_container(higher):
    assert all(map(higher.utils._is_container, ([], (), {}, set())))
    assert not any(map(higher.utils._is_container, (1, "x", torch.ones(1), None)))


def test_find_param_in_list_is_by_identity(higher):
    one, same = torch.ones(2), torch.ones(2)
    assert higher.utils._find_param_in_list(same, [one, same]) == 1
    assert higher.utils._find_param_in_list(torch.ones(2), [one, same]) is None


def test_get_param_mapping_sees_tied_weights(higher):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    seen = []
    assert higher.utils._get_param_mapping(model, seen, []) == [0, 1, 0, 2, 3]
    assert [id(p) for p in seen] == [id(p) for p in model.parameters()]


def test_get_func_params_copies(higher):
    model = Net()
    model.last.bias.requires_grad_(False)
    copied = higher.utils.get_func_params(model)
    assert torch.equal(flat(copied), flat(model.parameters()))
    assert [p.requires_grad for p in copied] == [True, True, True, False]
    assert all(p.is_leaf for p in copied)
    assert copied[0].data_ptr() != model.first.weight.data_ptr()
    shared = higher.utils.get_func_params(model, device=torch.device("cpu"), safe_copy=False)
    assert shared[0].data_ptr() == model.first.weight.data_ptr()

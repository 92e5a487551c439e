"""The defects of `higher` in patching a module, each shown right here."""

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import innerloop as il
from modules import KINDS, TwoPlaces
from problems import (
    Net,
    assert_exact_unroll,
    flat,
    regression,
    relative_error,
    sgd,
    trained,
    unrolled,
)
from test_fmodel import fresh_weights


def weights_of(module, flat_list):
    """The list that a patched model holds, by the module's names."""
    return dict(zip(dict(module.named_parameters()), flat_list, strict=True))


class Called:
    """A module as a function of given tensors, in plain torch; buffers among them evolve."""

    def __init__(self, module, params, buffers):
        self.module, self.tensors = module, {**params, **buffers}

    def __call__(self, x):
        return functional_call(self.module, self.tensors, (x,))

    def train(self, mode=True):
        self.module.train(mode)
        return self

    def eval(self):
        return self.train(False)


def assert_exact_unroll_with_buffers(model, loss, steps):
    """As `assert_exact_unroll`, where buffers are functions of the weights but hold no gradient."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    value, weights = unrolled(model, sgd, loss, steps)
    assert all(torch.equal(now, state[name]) for name, now in model.state_dict().items())
    grads = torch.autograd.grad(value, list(model.parameters()))

    start = params = dict(model.named_parameters())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(steps):
        inner = torch.autograd.grad(
            loss(Called(model, params, buffers)), params.values(), create_graph=True
        )
        params = {n: p - 0.1 * g for (n, p), g in zip(params.items(), inner, strict=True)}
    expected = loss(Called(model, params, buffers))
    assert relative_error(value, expected) < 1e-12
    assert relative_error(weights, flat(params.values())) < 1e-12
    expected_grads = torch.autograd.grad(expected, list(start.values()))
    assert relative_error(flat(grads), flat(expected_grads)) < 1e-12


# B1, B2, B6, B9: instance-level forwards, attributes of submodules, hooks, missing modules

KINDS_OF_DEFECTS = {
    "b01": [f"forward_{how}" for how in ("method", "partial", "wrapped_partial", "closure")],
    "b02": ["tied", "multihead", "lists_and_dicts"],
    "b06": [
        *("hooks_bound_methods", "hooks_keywords", "hooks_closure", "hooks_callable_object"),
        *("hook_weight_norm", "hook_spectral_norm_eval"),
    ],
    "b09": ["none_parts", "lazy_after_first_call"],
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, id=f"{b}-{n}") for b, names in KINDS_OF_DEFECTS.items() for n in names],
)
def test_an_unroll_of_a_module_that_higher_has_wrong(name):
    """See test_functional for the values and second derivatives of all kinds of modules."""
    kind = KINDS[name]
    args = kind.args()
    assert_exact_unroll(kind.make(), lambda m: m(*args, **kind.kwargs).square().mean())


# B2: params= and fast_params= reach attributes of submodules


readers = pytest.mark.parametrize("name", KINDS_OF_DEFECTS["b02"])


@readers
def test_b02_params_keyword_reaches_submodule_attributes(name):
    model, (x,) = KINDS[name].make(), KINDS[name].args()
    weights = fresh_weights(model)
    output = il.monkeypatch(model)(x, params=weights)
    expected = functional_call(model, weights_of(model, weights), (x,))
    assert relative_error(output, expected) < 1e-12
    grads, expected_grads = (
        flat(torch.autograd.grad(y.square().sum(), weights)) for y in (output, expected)
    )
    assert relative_error(grads, expected_grads) < 1e-12


@readers
@pytest.mark.parametrize("track", [True, False])
def test_b02_fast_params_setter_reaches_submodule_attributes(name, track):
    model, (x,) = KINDS[name].make(), KINDS[name].args()
    weights = fresh_weights(model)
    fmodel = il.monkeypatch(model, track_higher_grads=track)
    fmodel.fast_params = weights
    expected = functional_call(model, weights_of(model, weights), (x,))
    assert relative_error(fmodel(x), expected) < 1e-12
    assert all(a is b for a, b in zip(fmodel.fast_params, weights, strict=True))


def test_b02_submodule_attributes_are_the_given_tensors():
    model = Net()
    fmodel = il.monkeypatch(model)
    first, second = fresh_weights(model), fresh_weights(model)
    fmodel(torch.randn(1, 2), params=first)
    assert fmodel.first.weight is first[0] and fmodel.last.bias is first[3]
    fmodel.fast_params = second
    assert fmodel.first.weight is second[0] and fmodel.last.bias is second[3]


# B3: direct submodule calls and other methods follow every step


ENTRIES = {
    "submodule": lambda model, x: model.last(torch.tanh(model.first(x))),
    "method": lambda model, x: model.last(model.encode(x)),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_b03_other_entries_use_the_latest_weights(entry):
    model, x = Net(), torch.randn(5, 2)
    fmodel = il.monkeypatch(model)
    for _ in range(3):
        expected = functional_call(model, weights_of(model, fmodel.parameters()), (x,))
        assert torch.equal(ENTRIES[entry](fmodel, x), expected)
        fmodel.update_params(fresh_weights(model))


@pytest.mark.parametrize("entry", ENTRIES)
def test_b03_training_through_another_entry_is_exact(entry):
    loss = regression()
    assert_exact_unroll(Net(), lambda m: loss(lambda x: ENTRIES[entry](m, x)), steps=3)


def test_b03_a_recurrent_submodule_called_directly():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRU(1, 2)

        def forward(self, x):
            return self.cell(x)[0]

    x = torch.randn(3, 1, 1)
    assert_exact_unroll(Wrapper(), lambda m: (m.cell(x)[0] - 1).square().mean(), steps=3)


# B4: an exception in forward


class Fragile(Net):
    def encode(self, x):
        hidden = super().encode(x)
        if x.isnan().any():
            raise RuntimeError("not a number")
        return hidden


def assert_consistent(fmodel, model, x):
    weights = weights_of(model, fmodel.fast_params)
    plain = Fragile()
    plain.load_state_dict(weights)
    assert torch.equal(fmodel(x), plain(x))
    assert torch.equal(fmodel.first(x), plain.first(x))
    assert torch.equal(fmodel.encode(x), plain.encode(x))
    assert fmodel.first.weight is fmodel.fast_params[0]


def test_b04_an_exception_in_forward_leaves_no_stale_weights():
    model, x, bad = Fragile(), torch.randn(5, 2), torch.full((1, 2), torch.nan)
    fmodel = il.monkeypatch(model)
    with pytest.raises(RuntimeError, match="not a number"):
        fmodel(bad)
    fmodel.update_params(fresh_weights(model))
    assert torch.equal(fmodel.first(x), F.linear(x, fmodel.fast_params[0], fmodel.fast_params[1]))
    assert_consistent(fmodel, model, x)


@pytest.mark.parametrize("track", [True, False])
def test_b04_an_exception_under_params_leaves_one_set_of_weights(track):
    model, x, bad = Fragile(), torch.randn(5, 2), torch.full((1, 2), torch.nan)
    fmodel = il.monkeypatch(model, track_higher_grads=track)
    with pytest.raises(RuntimeError, match="not a number"):
        fmodel(bad, params=fresh_weights(model))
    assert torch.equal(
        fmodel.last(torch.ones(1, 3)),
        F.linear(torch.ones(1, 3), fmodel.fast_params[2], fmodel.fast_params[3]),
    )
    assert_consistent(fmodel, model, x)


def test_b04_training_goes_on_after_an_exception():
    model, bad = Fragile(), torch.full((1, 2), torch.nan)
    loss = regression()
    with il.innerloop_ctx(model, sgd(model.parameters())) as (fmodel, diffopt):
        with pytest.raises(RuntimeError, match="not a number"):
            fmodel(bad)
        for _ in range(3):
            diffopt.step(loss(lambda x: fmodel.last(fmodel.encode(x))))
    assert relative_error(flat(fmodel.parameters()), trained(model, sgd, loss, 3)[1]) < 1e-12


# B5: switching track_higher_grads off midway


def steps_with_a_switch(model, loss, before, after, switch):
    with il.innerloop_ctx(model, sgd(model.parameters()), copy_initial_weights=False) as (
        fmodel,
        diffopt,
    ):
        for _ in range(before):
            diffopt.step(loss(fmodel))
        switch(fmodel, diffopt)
        for _ in range(after):
            diffopt.step(loss(fmodel))
    return fmodel, diffopt


def off(fmodel, diffopt):
    fmodel.track_higher_grads = False
    diffopt._track_higher_grads = False


def off_in_the_model_only(fmodel, diffopt):
    fmodel.track_higher_grads = False


def off_in_the_optimizer_only(fmodel, diffopt):
    diffopt._track_higher_grads = False


@pytest.mark.parametrize("switch", [off, off_in_the_model_only, off_in_the_optimizer_only])
@pytest.mark.parametrize("before", [0, 2])
def test_b05_switching_tracking_off_loses_no_update(switch, before):
    model, loss = Net(), regression()
    fmodel, _ = steps_with_a_switch(model, loss, before, 3, switch)
    expected_loss, expected_weights = trained(model, sgd, loss, before + 3)
    assert relative_error(flat(fmodel.parameters()), expected_weights) < 1e-12
    assert relative_error(flat(fmodel.fast_params), expected_weights) < 1e-12
    assert relative_error(loss(fmodel), expected_loss) < 1e-12
    assert torch.equal(fmodel.first.weight, fmodel.fast_params[0])


@pytest.mark.parametrize("before", [0, 2])
def test_b05_after_switching_off_the_weights_are_leaves_that_require_grad(before):
    fmodel, _ = steps_with_a_switch(Net(), regression(), before, 2, off)
    assert all(p.is_leaf and p.requires_grad for p in fmodel.parameters())


def test_b05_switching_on_again_tracks_from_there():
    model, loss = Net(), regression()
    fmodel, diffopt = steps_with_a_switch(model, loss, 1, 2, off)
    middle = fmodel.fast_params
    fmodel.track_higher_grads = True
    diffopt._track_higher_grads = True
    for _ in range(2):
        diffopt.step(loss(fmodel))
    grads = torch.autograd.grad(loss(fmodel), middle)

    twin = Net()
    twin.load_state_dict(weights_of(model, middle))
    expected = torch.autograd.grad(unrolled(twin, sgd, loss)[0], list(twin.parameters()))
    assert relative_error(flat(grads), flat(expected)) < 1e-12
    assert relative_error(flat(fmodel.parameters()), trained(model, sgd, loss, 5)[1]) < 1e-12


# B6: a hook that writes


def test_b06_hook_based_spectral_norm_iterates_in_the_copy_only():
    model = Net()
    nn.utils.spectral_norm(model.first)
    assert_exact_unroll_with_buffers(model, regression(), steps=3)


# B7: a submodule used in two places


def test_b07_a_shared_submodule_stays_one_with_the_statistics_of_plain_torch():
    model, plain, x = TwoPlaces(), TwoPlaces(), torch.randn(6, 2)
    plain.load_state_dict(model.state_dict())
    fmodel = il.monkeypatch(model)
    assert fmodel.left[1] is fmodel.right
    assert len(list(fmodel.parameters())) == 6
    for _ in range(2):
        fmodel(x)
        plain(x)
    for name, buffer in fmodel.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name))
    assert fmodel.right[1].num_batches_tracked.item() == 4
    assert model.right[1].num_batches_tracked.item() == 0
    assert torch.equal(fmodel.eval()(x), plain.eval()(x))


def test_b07_a_shared_norm_has_exact_meta_gradients():
    x = torch.randn(6, 2)

    def loss(model):
        return (model.train()(x) - 1).square().mean() + model.eval()(x).square().mean()

    assert_exact_unroll_with_buffers(TwoPlaces(), loss, steps=3)


# B8: checkpoint inside the model

recomputed = functools.partial(checkpoint, use_reentrant=False)
STYLES = {
    "submodule": lambda m, x: recomputed(m.last, torch.tanh(recomputed(m.first, x))),
    "bound_method": lambda m, x: recomputed(m.body, x),
    "lambda": lambda m, x: recomputed(lambda t: m.last(torch.tanh(m.first(t))), x),
    "attributes": lambda m, x: recomputed(
        lambda t: F.linear(torch.tanh(m.first(t)), m.last.weight) + m.last.bias, x
    ),
}


class Checkpointed(Net):
    def __init__(self, style):
        super().__init__()
        self.style = style

    def body(self, x):
        return self.last(torch.tanh(self.first(x)))

    def forward(self, x):
        return STYLES[self.style](self, x) if self.style else self.body(x)


@pytest.mark.parametrize("style", STYLES)
def test_b08_checkpoint_recomputes_with_the_weights_of_its_own_step(style):
    model, loss = Checkpointed(style), regression()

    def meta_gradient():
        value, _ = unrolled(model, sgd, loss, steps=4)
        return flat(torch.autograd.grad(value, list(model.parameters())))

    actual = meta_gradient()
    model.style = None
    assert relative_error(actual, meta_gradient()) < 1e-12


@pytest.mark.parametrize("style", STYLES)
def test_b08_checkpoint_recomputes_with_the_weights_given_as_params(style):
    model, loss = Checkpointed(style), regression()
    fmodel = il.monkeypatch(model)
    first, second = fresh_weights(model), fresh_weights(model)
    value = loss(functools.partial(fmodel, params=first))
    loss(functools.partial(fmodel, params=second))
    grads = torch.autograd.grad(value, first)
    model.style = None
    plain = loss(lambda x: functional_call(model, weights_of(model, first), (x,)))
    assert relative_error(flat(grads), flat(torch.autograd.grad(plain, first))) < 1e-12


# B9: assignment, Sequential roots, None, lazy, compiled, scripted, deepcopy, pickle


def test_b09_assigning_a_weight_of_a_submodule():
    model, loss, x = Net(), regression(), torch.randn(4, 2)
    weight = torch.randn(3, 2, requires_grad=True)
    with il.innerloop_ctx(model, sgd(model.parameters())) as (fmodel, diffopt):
        fmodel.first.weight = weight
        assert fmodel.fast_params[0] is weight
        plain = weights_of(model, fmodel.fast_params)
        assert torch.equal(fmodel(x), functional_call(model, plain, (x,)))
        diffopt.step(loss(fmodel))
        grad = torch.autograd.grad(loss(fmodel), weight)[0]

    twin = Net()
    twin.load_state_dict({**model.state_dict(), "first.weight": weight.detach()})
    value, weights = unrolled(twin, sgd, loss, steps=1)
    assert relative_error(flat(fmodel.parameters()), weights) < 1e-12
    assert relative_error(grad, torch.autograd.grad(value, twin.first.weight)[0]) < 1e-12


def test_b09_assigning_a_tied_weight_changes_all_its_places():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(2, 2, bias=False)
            self.two = nn.Linear(2, 2, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x))

    fmodel, x = il.monkeypatch(Tied()), torch.randn(3, 2)
    weight = torch.randn(2, 2)
    fmodel.two.weight = weight
    assert torch.equal(fmodel(x), F.linear(F.linear(x, weight), weight))


def test_b09_submodule_calls_under_a_sequential_root():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    loss = regression()
    assert_exact_unroll(model, lambda m: loss(lambda x: m[2](m[1](m[0](x)))), steps=3)


def test_b09_lazy_modules_before_their_first_call_are_refused():
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.Linear(3, 1))
    with pytest.raises(il.InnerLoopError, match=r"(?i)lazy|uninitialized"):
        il.monkeypatch(model)
    loss = regression()
    loss(model)
    assert_exact_unroll(model, loss)


@pytest.mark.parametrize("make", [torch.jit.script, torch.jit.trace])
@pytest.mark.parametrize("where", ["root", "submodule"])
def test_b09_scripted_modules_are_refused(make, where):
    model = Net()
    arguments = () if make is torch.jit.script else (torch.randn(1, 2),)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit")
        if where == "root":
            model = make(model, *arguments)
        else:
            model.first = make(model.first, *arguments)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(il.InnerLoopError, match=r"(?i)script"):
        il.monkeypatch(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

"""The patched model as a module: what users do with one besides calling it."""

import copy
import gc
import pickle
import weakref
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import innerloop as il
from modules import KINDS, TakesParams
from problems import Net, flat, regression, relative_error, restored, sgd, trained, unrolled
from test_functional import assert_untouched, fingerprint, scalar


def fresh_weights(module):
    return [torch.randn_like(p).requires_grad_() for p in module.parameters()]


def stepped(model, loss, steps=2, **settings):
    with il.innerloop_ctx(model, sgd(model.parameters()), **settings) as (fmodel, diffopt):
        for _ in range(steps):
            diffopt.step(loss(fmodel))
    return fmodel, diffopt


# Attributes that a forward writes. --------------------------------------------------------------


class Writes(nn.Module):
    """Its forward changes ``kept``, made by ``make``, in the way ``change`` says."""

    def __init__(self, make, change):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.kept = make()
        self.change = change

    def forward(self, x):
        self.change(self)
        return self.layer(x)


def rebound(module):
    module.kept = module.kept + 1


def added(module):
    module.kept += 1


WRITES = {
    "number": (int, rebound, 3),
    "list": (list, lambda m: m.kept.append(1), [1, 1, 1]),
    "nested": (lambda: {"a": [[]]}, lambda m: m.kept["a"][0].append(1), {"a": [[1, 1, 1]]}),
    "dict": (dict, lambda m: m.kept.update({len(m.kept): 1}), {0: 1, 1: 1, 2: 1}),
    "ordered": (OrderedDict, lambda m: m.kept.update({len(m.kept): 1}), {0: 1, 1: 1, 2: 1}),
    "set": (set, lambda m: m.kept.add(len(m.kept)), {0, 1, 2}),
    "default_dict": (
        lambda: defaultdict(list),
        lambda m: m.kept["new"].append(1),
        {"new": [1, 1, 1]},
    ),
    "counter": (Counter, lambda m: m.kept.update("a"), Counter("aaa")),
    "bounded_deque": (
        lambda: deque(maxlen=2),
        lambda m: m.kept.append(len(m.kept)),
        deque([1, 2]),
    ),
    "plain_tensor": (lambda: torch.zeros(()), added, torch.tensor(3.0)),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("update", [False, True])
def test_what_a_forward_writes_stays_in_the_patched_model(name, update):
    make, change, expected = WRITES[name]
    model, x = Writes(make, change), torch.randn(4, 2)
    before = copy.deepcopy(model.kept)
    fmodel = il.monkeypatch(model)
    for _ in range(3):
        fmodel(x)
        if update:
            fmodel.update_params(fresh_weights(model))
    assert type(fmodel.kept) is type(model.kept)
    assert fmodel.kept == expected
    assert model.kept == before

    il.functional(model)(list(model.parameters()), x)
    assert model.kept == before


def test_a_long_chain_of_objects_in_an_attribute():
    class Link:
        def __init__(self, following):
            self.following = following

    model, x = Net(), torch.randn(4, 2)
    for _ in range(5000):
        model.chain = Link(getattr(model, "chain", None))
    fmodel = il.monkeypatch(model)
    assert torch.equal(fmodel(x), model(x))
    assert torch.equal(il.functional(model)(list(model.parameters()), x), model(x))


class Remembers(Net):
    def encode(self, x):
        self.hidden = super().encode(x)
        self.first.calls = getattr(self.first, "calls", 0) + 1
        return self.hidden


def test_attributes_that_a_forward_sets_are_seen_and_differentiable():
    model, x = Remembers(), torch.randn(4, 2)

    def loss(model):
        return model(x).square().mean() + model.hidden.square().mean()

    fmodel, _ = stepped(model, loss, 3)
    assert relative_error(flat(fmodel.parameters()), trained(model, sgd, loss, 3)[1]) < 1e-12
    assert fmodel.first.calls == 3
    output = fmodel(x)
    assert torch.equal(fmodel.last(fmodel.hidden), output)
    assert fmodel.hidden.requires_grad

    twin = Remembers()
    fmodel, _ = stepped(twin, loss, 2)
    assert "hidden" not in vars(twin) and "calls" not in vars(twin.first)


def test_attributes_set_from_outside_are_seen_by_the_forward():
    class Gated(Net):
        gate = 1.0

        def forward(self, x):
            return super().forward(x) * self.gate

    model, x = Gated(), torch.randn(4, 2)
    fmodel = il.monkeypatch(model)
    expected = fmodel(x)
    fmodel.gate = 2.0
    assert torch.equal(fmodel(x), 2 * expected)
    assert torch.equal(model(x), expected)
    del fmodel.gate
    assert torch.equal(fmodel(x), expected)


def test_an_attribute_that_a_forward_deletes_is_gone():
    class Temporary(Net):
        def forward(self, x):
            assert not hasattr(self, "scratch")
            self.scratch = x
            output = super().forward(self.scratch)
            del self.scratch
            return output

    fmodel = il.monkeypatch(Temporary())
    for _ in range(2):
        fmodel(torch.randn(4, 2))
        assert not hasattr(fmodel, "scratch")
        fmodel.update_params(fresh_weights(fmodel))


# Weights seen from everywhere. ------------------------------------------------------------------


def test_held_references_to_submodules_follow_the_latest_weights():
    model, x, loss = Net(), torch.randn(4, 2), regression()
    with il.innerloop_ctx(model, sgd(model.parameters())) as (fmodel, diffopt):
        first, last, encode = fmodel.first, fmodel.last, fmodel.encode
        modules = list(fmodel.modules())
        for _ in range(3):
            diffopt.step(loss(fmodel))
            assert first is fmodel.first
            assert first.weight is fmodel.fast_params[0]
            assert dict(first.named_parameters())["bias"] is fmodel.fast_params[1]
            assert list(last.parameters())[1] is fmodel.fast_params[3]
            assert torch.equal(last(torch.tanh(first(x))), fmodel(x))
            assert torch.equal(encode(x), fmodel.encode(x))
            assert modules[0] is fmodel and modules[1] is first


@pytest.mark.parametrize("name", ["lstm", "gru", "multihead", "weight_norm", "refers_by_nested"])
def test_held_references_to_modules_with_references_inside(name):
    kind = KINDS[name]
    model, (x,) = nn.ModuleDict({"part": kind.make()}), kind.args()
    fmodel = il.monkeypatch(model)
    part = fmodel["part"]
    for _ in range(2):
        weights = fresh_weights(model)
        fmodel.update_params(weights)
        with restored(model), torch.no_grad():
            for p, weight in zip(model.parameters(), weights, strict=True):
                p.copy_(weight)
            expected = model["part"](x)
        assert relative_error(scalar(part(x)), scalar(expected)) < 1e-12


def test_an_argument_called_params_belongs_to_the_model():
    model, x = TakesParams(), torch.randn(4, 2)
    fmodel = il.monkeypatch(model)
    weights = list(fmodel.fast_params)
    output = fmodel(x, params={"scale": 2.0})
    assert torch.equal(output, model(x, {"scale": 2.0}))
    assert all(a is b for a, b in zip(fmodel.fast_params, weights, strict=True))
    fmodel.update_params(fresh_weights(model))
    assert torch.equal(fmodel(x, params={"scale": 2.0}), 2 * fmodel(x, {"scale": 1.0}))
    fmodel.forward(x, params={"scale": 2.0})


# Modes, dtypes, state. --------------------------------------------------------------------------


def test_train_and_eval():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9), nn.BatchNorm1d(2))
    plain, x = copy.deepcopy(model), torch.randn(6, 2)
    before = fingerprint(model)
    fmodel = il.monkeypatch(model)
    for train in (False, True, False):
        assert fmodel.train(train) is fmodel
        plain.train(train)
        assert [m.training for m in fmodel.modules()] == [train] * 4
        outputs = []
        for module in (fmodel, plain):
            torch.manual_seed(1)
            outputs.append(module(x))
        assert torch.equal(*outputs)
    fmodel[1].train()
    assert not torch.equal(fmodel(x), fmodel(x))
    assert_untouched(model, before)


def test_a_model_that_overrides_train():
    class FrozenNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.layer = nn.Linear(2, 1)

        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x):
            return self.layer(self.norm(x))

    fmodel = il.monkeypatch(FrozenNorm())
    assert fmodel.train() is fmodel
    assert fmodel.training and fmodel.layer.training and not fmodel.norm.training
    fmodel(torch.randn(4, 2))
    assert fmodel.norm.num_batches_tracked.item() == 0


def test_dtypes_change_in_the_patched_model_only():
    model, x = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), torch.randn(5, 2)
    before = fingerprint(model)
    fmodel = il.monkeypatch(model)
    expected = il.monkeypatch(model)(x)
    fmodel.to(torch.float32)
    assert {p.dtype for p in fmodel.parameters()} == {torch.float32}
    assert fmodel[1].running_mean.dtype == torch.float32
    assert fmodel[1].num_batches_tracked.dtype == torch.int64
    assert fmodel(x.float()).dtype == torch.float32
    fmodel.double()
    assert fmodel[0].weight.dtype == torch.float64
    assert relative_error(fmodel(x), expected) < 1e-6
    assert_untouched(model, before)


def test_dtypes_change_inside_the_graph():
    model, x = Net(), torch.randn(5, 2)
    loss = regression()
    with il.innerloop_ctx(model, sgd(model.parameters()), copy_initial_weights=False) as (
        fmodel,
        diffopt,
    ):
        diffopt.step(loss(fmodel))
        fmodel.float()
        value = fmodel(x.float()).square().mean()
    actual = flat(torch.autograd.grad(value, list(model.parameters())))
    again = unrolled(model, sgd, loss, 1)[1]
    sizes = [p.numel() for p in model.parameters()]
    parts = [v.view_as(p) for v, p in zip(again.split(sizes), model.parameters(), strict=True)]
    plain = functional_call(model, dict(zip(model.state_dict(), parts, strict=True)), (x,))
    expected = flat(torch.autograd.grad(plain.square().mean(), list(model.parameters())))
    assert relative_error(actual, expected) < 1e-5


def test_moving_a_patched_model_is_not_an_update():
    model, loss = Net(), regression()
    fmodel = il.monkeypatch(model).to("cpu").double()
    diffopt = il.get_diff_optim(sgd(model.parameters()), model.parameters(), fmodel=fmodel)
    diffopt.step(loss(fmodel))
    start, end = (flat(fmodel.parameters(time=k)) for k in (0, 1))
    assert torch.equal(start, flat(model.parameters()))
    assert torch.equal(end, flat(fmodel.parameters()))
    assert torch.equal(flat(fmodel.init_fast_params), start)


def test_state_dict_has_the_present_weights_and_buffers():
    model = nn.Sequential(Net(), nn.BatchNorm1d(1))
    fmodel, _ = stepped(model, regression(), 3)
    state = fmodel.state_dict()
    assert list(state) == list(model.state_dict())
    assert not any(value.requires_grad for value in state.values())
    model.load_state_dict(state)
    x = torch.randn(6, 2)
    assert torch.equal(model.eval()(x), fmodel.eval()(x))
    assert state["1.num_batches_tracked"].item() == 3


def test_load_state_dict_starts_new_weights():
    model, other = nn.Sequential(Net(), nn.BatchNorm1d(1)), nn.Sequential(Net(), nn.BatchNorm1d(1))
    other(torch.randn(5, 2))
    loss, x = regression(), torch.randn(4, 2)
    before = fingerprint(model)
    fmodel, diffopt = stepped(model, loss, 2, copy_initial_weights=False)
    earlier = [w.detach().clone() for w in fmodel.fast_params]
    held = list(fmodel.fast_params)
    inner = fmodel[0].first
    assert fmodel.load_state_dict(other.state_dict()).missing_keys == []
    assert torch.equal(fmodel.eval()(x), other.eval()(x))
    assert torch.equal(inner(x), other[0].first(x))
    assert all(torch.equal(a, b) for a, b in zip(held, earlier, strict=True))
    fmodel.train()
    other.train()
    diffopt.step(loss(fmodel))
    expected = trained(other, sgd, loss, 1)[1]
    assert relative_error(flat(fmodel.parameters()), expected) < 1e-12
    assert_untouched(model, before)


def test_load_state_dict_of_a_submodule():
    model, other = Net(), nn.Linear(2, 3)
    fmodel = il.monkeypatch(model)
    fmodel.first.load_state_dict(other.state_dict())
    assert torch.equal(fmodel.fast_params[0], other.weight)
    assert torch.equal(fmodel.last.weight, model.last.weight)


def test_a_state_that_does_not_fit_changes_nothing():
    model = Net()
    fmodel = il.monkeypatch(model)
    weights = list(fmodel.fast_params)
    with pytest.raises(RuntimeError, match=r"Missing key.*last"):
        fmodel.load_state_dict({"first.weight": torch.zeros(3, 2)})
    assert all(a is b for a, b in zip(fmodel.fast_params, weights, strict=True))
    assert torch.equal(flat(fmodel.parameters()), flat(model.parameters()))


# Copies. ----------------------------------------------------------------------------------------


def pickled(fmodel):
    return pickle.loads(pickle.dumps(fmodel))


COPIED = [
    *("plain", "tied", "two_places", "multihead", "lstm", "hook_weight_norm"),
    *("hooks_bound_methods", "lists_and_dicts"),
]
# torch refuses to pickle these, patched or not.
ONLY_DEEPCOPIED = ["weight_norm", "spectral_norm_train"]


@pytest.mark.parametrize(
    ("name", "duplicate"),
    [(name, duplicate) for name in COPIED for duplicate in (copy.deepcopy, pickled)]
    + [(name, copy.deepcopy) for name in ONLY_DEEPCOPIED],
)
def test_a_copy_in_the_middle_of_a_loop_goes_on_alone(name, duplicate):
    kind = KINDS[name]
    model, args = kind.make(), kind.args()

    def loss(fmodel):
        return scalar(fmodel(*args)).square()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with il.innerloop_ctx(model, optimizer, copy_initial_weights=False) as (fmodel, diffopt):
        for _ in range(2):
            diffopt.step(loss(fmodel))
    assert not any(w.is_leaf for w in fmodel.fast_params if w.requires_grad)
    twin = duplicate(fmodel)
    assert torch.equal(flat(twin.parameters()), flat(fmodel.parameters()))
    assert all(w.is_leaf for w in twin.fast_params)
    assert all(torch.equal(b, twin.get_buffer(n)) for n, b in fmodel.named_buffers())

    other = il.get_diff_optim(optimizer, model.parameters(), fmodel=twin)
    start = list(twin.fast_params)
    other.step(loss(twin))
    kept = flat(fmodel.parameters()).detach().clone()
    diffopt.step(loss(fmodel))
    assert not torch.equal(flat(fmodel.parameters()), kept)
    assert relative_error(flat(twin.parameters()), flat(fmodel.parameters())) < 1e-12
    grads = torch.autograd.grad(loss(twin), start)
    middle = torch.autograd.grad(loss(fmodel), list(fmodel.parameters(time=2)))
    assert relative_error(flat(grads), flat(middle)) < 1e-12


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
@pytest.mark.parametrize("track", [True, False])
def test_a_copy_before_any_step_writes_buffers_of_its_own(duplicate, track):
    fmodel, x = il.monkeypatch(nn.BatchNorm1d(2), track_higher_grads=track), torch.randn(4, 2)
    twin = duplicate(fmodel)
    assert twin.track_higher_grads == track
    assert torch.equal(twin(x), fmodel(x))
    twin(x)
    assert (twin.num_batches_tracked, fmodel.num_batches_tracked) == (2, 1)


# Recomputation. ---------------------------------------------------------------------------------


def test_checkpoint_around_a_whole_inner_loop():
    model, loss = Net(), regression()

    def task(scale):
        return scale * unrolled(model, sgd, loss, 3)[0]

    def gradient(value):
        return flat(torch.autograd.grad(value, list(model.parameters())))

    one = torch.ones((), requires_grad=True)
    actual = gradient(checkpoint(task, one, use_reentrant=False))
    assert relative_error(actual, gradient(task(one))) < 1e-12


def test_a_patched_model_that_moved_on_is_not_recomputed():
    model, loss = Net(), regression()
    fmodel = il.monkeypatch(model)
    value = loss(lambda x: checkpoint(fmodel, x, use_reentrant=False))
    weights = fmodel.fast_params
    fmodel.update_params(fresh_weights(model))
    with pytest.raises(il.InnerLoopError, match=r"during a backward pass.*Needed:.*Why:.*Write:"):
        torch.autograd.grad(value, weights)


@pytest.mark.parametrize("name", ["checkpointed_attention", "checkpointed_dot_product"])
def test_checkpointed_attention_in_an_inner_loop(name):
    kind = KINDS[name]
    model, args = kind.make(), kind.args()

    def meta_gradient(model):
        value, _ = unrolled(model, sgd, lambda m: scalar(m(*args)).square() / 100)
        return flat(torch.autograd.grad(value, list(model.parameters())))

    actual = meta_gradient(model)
    plain = KINDS[name.removeprefix("checkpointed_").replace("attention", "multihead")].make()
    plain.load_state_dict(model.state_dict())
    assert relative_error(actual, meta_gradient(plain)) < 1e-12


# Freeing. ---------------------------------------------------------------------------------------


@pytest.fixture
def without_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("track", [True, False])
def test_a_patched_model_is_freed_without_the_garbage_collector(without_gc, track):
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 1))
    loss = regression()
    fmodel, diffopt = stepped(model, loss, 3, copy_initial_weights=False, track_higher_grads=track)
    value = loss(fmodel)
    value.backward()
    watched = [
        weakref.ref(thing) for thing in (fmodel, fmodel[0], diffopt, fmodel.fast_params[0], value)
    ]
    del fmodel, diffopt, value
    assert [ref() for ref in watched] == [None] * 5


def test_versions_are_freed_when_the_weights_move_on(without_gc):
    model = Net()
    fmodel = il.monkeypatch(model, track_higher_grads=False)
    fmodel.update_params([w.detach() for w in fresh_weights(model)])
    fmodel(torch.randn(4, 2))
    old = weakref.ref(fmodel.first.weight)
    fmodel.update_params([w.detach() for w in fresh_weights(model)])
    assert old() is None

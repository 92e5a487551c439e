"""What training leaves behind: a model like the one trained, and the way back into torch."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn, optim

import innerloop as il
from references import Net, assert_close, assert_derivative, batches, plain, squares
from test_errors import refuses

STEPS = 3


def built(model=None, make=None, loss=squares, **options):
    model = Net() if model is None else model
    make = make or (lambda params: optim.SGD(params, lr=0.1, momentum=0.8))
    inner = il.InnerLoop(model, make(model.parameters()), loss, **options)
    *train, val = batches(STEPS + 1)
    return inner, train, val


# A model like the one that was trained. ---------------------------------------------------------


def test_it_is_called_like_the_model_and_has_what_the_model_has():
    inner, train, val = built()
    model, optimizer = copy.deepcopy((inner.model, inner.optimizer))
    plain(model, optimizer, squares, train)
    adapted = inner.adapt(train)
    x = val[0]
    assert_close([adapted(x)], [model(x)])
    assert_close([adapted(x=x)], [model(x)])
    assert_close([adapted.features(x)], [model.features(x)])
    assert_close([adapted.body(x), adapted.head.weight], [model.body(x), model.head.weight])
    assert_close(adapted.parameters(), model.parameters())
    assert list(adapted.params) == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in adapted.named_parameters()] == list(adapted.params)
    assert list(adapted.state_dict()) == list(model.state_dict())
    assert isinstance(adapted.module, Net)
    assert adapted.training is True
    assert not hasattr(adapted, "tail")
    with pytest.raises(AttributeError, match="tail"):
        _ = adapted.tail
    assert repr(adapted) == "Adapted(Net, steps=3)"


def test_its_mode_is_its_own():
    inner, train, _ = built(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)))
    adapted = inner.adapt(train)
    adapted.eval()
    assert inner.model.training
    assert not adapted.training
    x = torch.randn(4, 2)
    assert torch.equal(adapted(x), adapted(x))
    inner.eval()
    assert not inner.adapt(train).training


def test_names_of_the_model_win_over_nothing():
    """A model may have attributes called like those of the adapted model: the module has them."""

    class Named(Net):
        losses = "mine"

        def write_to(self):
            return "mine"

    inner, train, _ = built(Named())
    adapted = inner.adapt(train)
    assert adapted.losses.shape == (STEPS,)
    assert adapted.module.losses == "mine"
    assert adapted.module.write_to() == "mine"


def test_losses_are_those_before_each_step_and_differentiable():
    inner, train, _ = built(learn=("init", "lr"))
    model, optimizer = copy.deepcopy((inner.model, inner.optimizer))
    losses = plain(model, optimizer, squares, train)
    assert_close([inner.adapt(train).losses], [torch.stack(losses)])
    weights = torch.rand(STEPS)
    assert_derivative(lambda: inner.adapt(train).losses @ weights, inner.parameters())


AUX = {
    "nothing": (lambda m, v: v, None),
    "a tuple of one": (lambda m, v: (v,), None),
    "a tensor": (lambda m, v: (v, m.head.weight), (STEPS, 1, 3)),
    "a scalar": (lambda m, v: (v, 2 * v), (STEPS,)),
    "a mapping": (lambda m, v: (v, {"a": v, "b": [v * v]}), {"a": (STEPS,), "b": [(STEPS,)]}),
    "two": (lambda m, v: (v, v, m.head.weight), ((STEPS,), (STEPS, 1, 3))),
    "a number": (lambda m, v: (v, 3), [3] * STEPS),
    "a word": (lambda m, v: (v, "word"), ["word"] * STEPS),
    "integers": (lambda m, v: (v, torch.arange(2)), (STEPS, 2)),
}


def shapes(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {key: shapes(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(shapes(v) for v in value)
    return value


@pytest.mark.parametrize("backward", [il.Tape(), il.Remat()], ids=repr)
@pytest.mark.parametrize("case", AUX)
def test_what_the_loss_returns_besides_its_value(case, backward):
    make, expected = AUX[case]
    inner, train, val = built(loss=lambda m, b: make(m, squares(m, b)), backward=backward)
    adapted = inner.adapt(train)
    assert adapted.losses.shape == (STEPS,)
    assert shapes(adapted.aux) == expected
    assert inner(train, val).shape == ()


def test_outputs_that_change_their_shape_are_listed():
    sizes = iter(range(1, 10))
    inner, train, _ = built(loss=lambda m, b: (squares(m, b), torch.zeros(next(sizes))))
    assert shapes(inner.adapt(train).aux) == [(1,), (2,), (3,)]


@pytest.mark.parametrize("backward", [il.Tape(), il.Remat(), il.Binomial(1)], ids=repr)
def test_auxiliary_outputs_are_differentiable(backward):
    inner, train, _ = built(
        loss=lambda m, b: (squares(m, b), {"norm": m.head.weight.square().sum()}),
        learn=("init", "lr"),
        backward=backward,
    )

    def value():
        adapted = inner.adapt(train)
        return adapted.aux["norm"].sum() + adapted(train[0][0]).sum()

    assert_derivative(value, inner.parameters())


def test_a_loss_of_shape_one_is_a_scalar():
    inner, train, val = built(loss=lambda m, b: squares(m, b).reshape(1))
    assert inner.adapt(train).losses.shape == (STEPS,)
    assert inner(train, val).shape == ()


# No graph. --------------------------------------------------------------------------------------


def tensors(adapted):
    kept = [*adapted.params.values(), *adapted.buffers.values(), adapted.losses]
    for block in adapted.opt_state:
        kept += [slot for slot in block.slots.values() if isinstance(slot, torch.Tensor)]
    return [*kept, *adapted.module.parameters()]


class Watching:
    """A loss that remembers, weakly, the activations it made."""

    def __init__(self):
        self.seen = []

    def __call__(self, model, batch):
        hidden = model.features(batch[0])
        self.seen.append(weakref.ref(hidden))
        value = (model.head(hidden) - batch[1]).square().mean()
        return value, hidden.mean()

    def alive(self):
        return sum(ref() is not None for ref in self.seen)


@pytest.mark.parametrize(
    "backward",
    [il.Tape(), il.Remat(), il.Truncated(2), il.Forward(), il.Implicit()],
    ids=repr,
)
@pytest.mark.parametrize("make", [None, lambda p: optim.Adam(p, lr=0.1)])
def test_without_gradients_no_graph_is_kept(make, backward):
    loss = Watching()
    inner, train, _ = built(make=make, loss=loss, learn=("init", "lr"), backward=backward)
    with torch.no_grad():
        adapted = inner.adapt(train)
        assert not torch.is_grad_enabled()
    assert loss.alive() == 0
    assert all(t.grad_fn is None for t in tensors(adapted))
    assert not adapted.losses.requires_grad
    assert not adapted.aux.requires_grad
    assert not any(t.requires_grad for t in adapted.params.values())


def test_with_gradients_the_tape_keeps_activations():
    """So that the test before this one can fail."""
    loss = Watching()
    inner, train, _ = built(loss=loss)
    adapted = inner.adapt(train)
    assert loss.alive() == STEPS
    assert all(t.requires_grad for t in adapted.params.values())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_same_values_without_gradients(mode):
    """As people write it at test time."""
    inner, train, val = built(learn=("init", "lr"))
    value, adapted = inner(train, val), inner.adapt(train)
    with mode():
        found = inner(train, val)
        assert not found.requires_grad
        assert_close([found], [value], 1e-15)
        assert_close(inner.adapt(train).params.values(), adapted.params.values(), 1e-15)
        data = batches(3)
        assert inner(data[:2], data[2]).isfinite()
    with mode(), refuses("one batch for each step"):
        inner.adapt(3)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_later_update_of_the_model_does_not_reach_it(steps):
    """Neither by weights that were trained nor by those that no optimizer has."""
    model = Net()
    inner = il.InnerLoop(model, optim.SGD(model.head.parameters(), lr=0.1), squares)
    x = torch.randn(4, 2)
    with torch.no_grad():
        adapted = inner.adapt(batches(steps))
        before = adapted(x)
        for p in model.parameters():
            p.add_(1.0)
        assert_close([adapted(x)], [before])


# Buffers. ---------------------------------------------------------------------------------------


def normed():
    """No bias before the norm: its gradient is rounding, which some optimizers scale up."""
    return nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.parametrize("steps", [0, STEPS])
def test_buffers_are_those_of_plain_training_and_the_models_stay(steps):
    inner, train, val = built(normed())
    train = train[:steps]
    before = copy.deepcopy(inner.model.state_dict())
    model, optimizer = copy.deepcopy((inner.model, inner.optimizer))
    plain(model, optimizer, squares, train)
    adapted = inner.adapt(train)
    assert list(adapted.buffers) == [name for name, _ in model.named_buffers()]
    assert_close(adapted.buffers.values(), model.buffers())
    adapted(val[0])
    adapted.module(val[0])
    inner(train, val)
    for name, now in inner.model.state_dict().items():
        assert torch.equal(now, before[name]), name


# The way back into torch. -------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": (optim.SGD, dict(lr=0.1, momentum=0.8, nesterov=True)),
    "Adam": (optim.Adam, dict(lr=0.05, amsgrad=True)),
    "AdamW": (optim.AdamW, dict(lr=0.05)),
    "Adamax": (optim.Adamax, dict(lr=0.05)),
    "NAdam": (optim.NAdam, dict(lr=0.05)),
    "RAdam": (optim.RAdam, dict(lr=0.05, betas=(0.8, 0.9))),
    "Adagrad": (optim.Adagrad, dict(lr=0.1, lr_decay=0.1)),
    "Adadelta": (optim.Adadelta, dict(lr=0.5)),
    "RMSprop": (optim.RMSprop, dict(lr=0.02, centered=True, momentum=0.5)),
    "Rprop": (optim.Rprop, dict(lr=0.03)),
    "ASGD": (optim.ASGD, dict(lr=0.1, lambd=0.1, t0=2)),
    "Adafactor": (optim.Adafactor, dict(lr=0.1)),
}


@pytest.mark.parametrize(("warm", "steps"), [(0, 0), (0, 1), (2, 3)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_going_on_with_torch_is_one_longer_run(name, warm, steps):
    make, settings = OPTIMIZERS[name]
    data = batches(8)
    model = normed()
    optimizer = make(
        [
            {"params": model[0].parameters()},
            {"params": [*model[3].parameters(), *model[1].parameters()], "lr": 0.02},
        ],
        **settings,
    )
    whole, whole_optimizer = copy.deepcopy((model, optimizer))
    plain(whole, whole_optimizer, squares, data[: warm + steps + 2])

    plain(model, optimizer, squares, data[:warm])
    inner = il.InnerLoop(model, optimizer, squares)
    identity = [id(p) for p in model.parameters()]
    adapted = inner.adapt(data[warm : warm + steps])
    adapted.write_to(model, optimizer)
    assert [id(p) for p in model.parameters()] == identity
    assert all(p.is_leaf and p.requires_grad for p in model.parameters())
    plain(model, optimizer, squares, data[warm + steps : warm + steps + 2])
    assert_close(model.state_dict().values(), whole.state_dict().values(), 1e-11)


def test_lbfgs_goes_on_too():
    """Norms see every evaluation of it, as many as torch makes."""
    data = batches(4)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    whole = copy.deepcopy(model)
    optimizer, whole_optimizer = (
        optim.LBFGS(m.parameters(), lr=0.1, max_iter=3) for m in (model, whole)
    )

    def run(model, optimizer, train):
        for batch in train:

            def closure(batch=batch):
                optimizer.zero_grad()
                value = squares(model, batch)
                value.backward()
                return value

            optimizer.step(closure)

    run(whole, whole_optimizer, data)
    inner = il.InnerLoop(model, optimizer, squares)
    inner.adapt(data[:2]).write_to(model, optimizer)
    run(model, optimizer, data[2:])
    assert_close(model.state_dict().values(), whole.state_dict().values(), 1e-10)


def test_writing_to_copies_of_model_and_optimizer():
    inner, train, _ = built()
    model, optimizer = copy.deepcopy((inner.model, inner.optimizer))
    before = copy.deepcopy(inner.model.state_dict())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    adapted = inner.adapt(train)
    adapted.write_to(model, optimizer)
    assert_close(model.parameters(), adapted.params.values(), 1e-15)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    for name, now in inner.model.state_dict().items():
        assert torch.equal(now, before[name])
    assert not inner.optimizer.state


def test_writing_without_an_optimizer_leaves_it():
    inner, train, _ = built()
    inner.adapt(train).write_to(inner.model)
    assert not inner.optimizer.state


def test_writing_settings_and_weights_goes_on_with_the_learned_rate():
    inner, train, _ = built(learn=("lr", "momentum"))
    with torch.no_grad():
        inner.settings["lr"].fill_(0.3)
        inner.settings["momentum"].fill_(0.5)
    whole = copy.deepcopy(inner.model)
    plain(whole, optim.SGD(whole.parameters(), lr=0.3, momentum=0.5), squares, train)
    inner.adapt(train[:2]).write_to(inner.model, inner.optimizer)
    inner.write_to()
    plain(inner.model, inner.optimizer, squares, train[2:])
    assert_close(inner.model.parameters(), whole.parameters())


def test_frozen_weights_and_tied_ones_are_written():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(2, 2)
            self.two = nn.Linear(2, 2)
            self.two.weight = self.one.weight
            self.last = nn.Linear(2, 1).requires_grad_(False)

        def forward(self, x):
            return self.last(torch.tanh(self.two(torch.tanh(self.one(x)))))

    inner, train, _ = built(Tied())
    whole, optimizer = copy.deepcopy((inner.model, inner.optimizer))
    plain(whole, optimizer, squares, train)
    adapted = inner.adapt(train)
    assert adapted.one.weight is adapted.two.weight
    target = Tied()
    adapted.write_to(target)
    assert target.one.weight is target.two.weight
    assert_close(target.parameters(), whole.parameters())


# Refusals. --------------------------------------------------------------------------------------


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)


def with_other_buffers():
    model = normed()
    model[1] = nn.BatchNorm1d(3, track_running_stats=False)
    return model


@pytest.mark.parametrize(
    ("trained", "make"),
    [
        *((Net, make) for make in (Wider, lambda: nn.Linear(2, 1), lambda: nn.Sequential(Net()))),
        *((Net, make) for make in (normed, lambda: None, lambda: "model", lambda: Net)),
        (normed, with_other_buffers),
    ],
)
def test_what_is_not_the_model_is_refused(trained, make):
    inner, train, _ = built(trained())
    model = make()
    known = model if isinstance(model, nn.Module) else None
    optimizer = optim.SGD(model.parameters(), lr=0.1) if known is not None else None
    with refuses(*["same parameters"] * (known is not None), model=known, optimizer=optimizer):
        inner.adapt(train).write_to(model, optimizer)


WRONG_OPTIMIZERS = {
    # Its next step would not find what it keeps.
    "another kind": (lambda model, own: optim.Adam(model.parameters(), lr=0.1), "Adam"),
    "another model's": (lambda model, own: own, ""),
    "fewer weights": (
        lambda model, own: optim.SGD(model.head.parameters(), lr=0.1, momentum=0.8),
        "",
    ),
    "a number": (lambda model, own: 3, "int"),
    "a class": (lambda model, own: optim.SGD, "SGD"),
}


@pytest.mark.parametrize("case", WRONG_OPTIMIZERS)
def test_what_is_not_its_optimizer_is_refused(case):
    make, name = WRONG_OPTIMIZERS[case]
    inner, train, _ = built()
    model = copy.deepcopy(inner.model)
    optimizer = make(model, inner.optimizer)
    known = optimizer if isinstance(optimizer, optim.Optimizer) else None
    with refuses(name, model=model, optimizer=known):
        inner.adapt(train).write_to(model, optimizer)


# Copies. ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_copies_of_an_adapted_model(copied):
    inner, train, val = built(normed())
    with torch.no_grad():
        adapted = inner.adapt(train)
    twin = copied(adapted)
    adapted.eval(), twin.eval()
    assert_close([twin(val[0])], [adapted(val[0])], 1e-15)
    assert_close(twin.params.values(), adapted.params.values(), 1e-15)
    assert_close([twin.losses], [adapted.losses], 1e-15)

"""Steps that are computed again without the values of their gradient: the same derivatives."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import innerloop as il
from innerloop import _deferred
from innerloop.step.step import InnerStep
from strategies import assert_same


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_deferred, "_LARGE", 0)
    monkeypatch.setattr(_deferred, "_WORK", 0)


LAYERS = {
    "linear": lambda: nn.Linear(4, 3),
    "no bias": lambda: nn.Linear(4, 3, bias=False),
    "convolution": lambda: nn.Conv2d(4, 6, 3),
    "stride": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=(1, 0)),
    "dilation": lambda: nn.Conv2d(4, 6, 2, dilation=(1, 2), bias=False),
    "groups": lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1),
    "same": lambda: nn.Conv2d(4, 6, 3, padding="same"),
    "circular": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.8, "nesterov": True},
    {"momentum": 0.8, "dampening": 0.3, "maximize": True},
]


class Around(nn.Module):
    """A layer between others, so that its input and its output have derivatives."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale if isinstance(self.layer, nn.Linear) else self.scale.view(-1, 1, 1)
        return self.layer(torch.tanh(x * scale)).sin()


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 0.3).square().mean()


def shape_of(layer: nn.Module) -> tuple[int, ...]:
    return (5, 4) if isinstance(layer, nn.Linear) else (2, 4, 5, 6)


def gradients(layer: str, settings: dict[str, Any], backward: Any, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = Around(LAYERS[layer]())
    data = [torch.randn(shape_of(model.layer)) for _ in range(6)]
    sgd = optim.SGD(model.parameters(), lr=0.2, **settings)
    inner = il.InnerLoop(model, sgd, squares, backward=backward, **options)
    value = inner(data[:5], data[5])
    return [value, *torch.autograd.grad(value, list(inner.parameters()))]


@pytest.mark.parametrize("backward", [il.Remat(), il.Remat(2), il.Binomial(2)], ids=repr)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_derivatives_are_those_of_the_tape(
    layer: str, settings: dict[str, Any], backward: Any
) -> None:
    assert_same(gradients(layer, settings, backward), gradients(layer, settings, il.Tape()))


@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 3, 4)], ids=str)
def test_inputs_of_any_number_of_axes(shape: tuple[int, ...]) -> None:
    found = []
    for backward in (il.Tape(), il.Remat()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        inner = il.InnerLoop(
            model, optim.SGD(model.parameters(), lr=0.3), squares, backward=backward
        )
        data = torch.randn(shape)
        inner([data] * 4, data).backward()
        found.append([p.grad for p in model.parameters()])
    assert_same(found[1], found[0])


def step_of(rule: Any, **options: Any) -> tuple[InnerStep, il.State]:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), Around(LAYERS["convolution"]()))
    f = il.functional(model)
    params = {n: p.detach().clone().requires_grad_() for n, p in f.params.items()}
    step = il.inner_step(squares, rule, model, **options)
    return step, il.State(params, f.buffers, rule.init(params))


def unknown(step: InnerStep, state: il.State, meta: il.Meta) -> set[str]:
    """The new weights that have no values."""
    new, _ = step.replayed(state, meta, torch.randn(2, 4, 5, 6))
    return {name for name, p in new.params.items() if p.isnan().any()}


def test_values_that_nobody_needs_are_left_out() -> None:
    step, state = step_of(il.optim.sgd(0.1, momentum=0.9))
    # That of the lowest layer shows whether the whole backward pass came out the same.
    assert unknown(step, state, il.Meta()) == {"1.layer.weight"}


def test_small_products_are_not_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    step, state = step_of(il.optim.sgd(0.1))
    monkeypatch.setattr(_deferred, "_WORK", 1000)  # Above the lowest, below the other.
    assert unknown(step, state, il.Meta()) == {"1.layer.weight"}
    monkeypatch.setattr(_deferred, "_WORK", 10**6)
    assert not unknown(step, state, il.Meta())
    monkeypatch.setattr(_deferred, "_WORK", 0)
    monkeypatch.setattr(_deferred, "_LARGE", 10**6)
    assert not unknown(step, state, il.Meta())


@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
def test_values_are_there_where_a_setting_is_learned(name: str) -> None:
    step, state = step_of(il.optim.sgd(0.1, momentum=0.9))
    learned = il.Meta(opt={name: torch.tensor(0.1, requires_grad=True)})
    assert not unknown(step, state, learned)


def test_values_are_there_where_a_schedule_is_learned() -> None:
    factor = torch.tensor(0.1, requires_grad=True)
    step, state = step_of(il.optim.sgd(0.1), schedule=lambda opt, time: {**opt, "lr": factor})
    assert not unknown(step, state, il.Meta())


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (il.optim.adam(0.1), {}),
        (il.optim.rmsprop(0.1), {}),
        (il.optim.sgd(0.1), {"grad_transform": il.clip_value(0.1)}),
        (il.optim.sgd(0.1), {"grad_transform": il.clip_norm(0.1)}),
        (il.optim.sgd(0.1), {"first_order": True}),
    ],
    ids=["Adam", "RMSprop", "clip_value", "clip_norm", "first_order"],
)
def test_values_are_there_where_the_update_is_not_linear(rule: Any, options: Any) -> None:
    step, state = step_of(rule, **options)
    assert not unknown(step, state, il.Meta())


def test_what_uses_values_after_all_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By mistake every rule is taken for linear: the NaN is seen, and all is done again."""
    found = []
    for wrong, backward in itertools.product((False, True), (il.Tape(), il.Remat())):
        if wrong:
            monkeypatch.setattr("innerloop.step.step._is_linear", lambda *_: True)
        torch.manual_seed(0)
        model = Around(LAYERS["convolution"]())
        adam = optim.Adam(model.parameters(), lr=0.1)
        inner = il.InnerLoop(model, adam, squares, learn=("init", "lr"), backward=backward)
        data = torch.randn(2, 4, 5, 6)
        found.append(
            torch.autograd.grad(inner([data] * 4, data), [*model.parameters(), inner.settings.lr])
        )
    for other in found[1:]:
        assert_same(other, found[0])


def test_a_gradient_that_is_nan_anyway_stays_so() -> None:
    def measured(model: nn.Module, batch: Tensor) -> Tensor:
        return (0 * model(batch)).sum().sqrt()

    for backward in (il.Tape(), il.Remat()):
        model = nn.Linear(4, 3)
        sgd = optim.SGD(model.parameters(), lr=0.1)
        inner = il.InnerLoop(model, sgd, squares, backward=backward, val_loss=measured)
        data = torch.randn(5, 4)
        (grad,) = torch.autograd.grad(inner([data] * 4, data), [model.weight])
        assert grad.isnan().all()


def test_under_autocast_it_is_the_tape() -> None:
    found = []
    for backward in (il.Tape(), il.Remat()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).float()
        inner = il.InnerLoop(
            model, optim.SGD(model.parameters(), lr=0.1), squares, backward=backward
        )
        data = torch.randn(5, 4, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            value = inner([data] * 4, data)
        value.backward()
        found.append([p.grad for p in model.parameters()])
    assert_same(found[1], found[0], 1e-6)


def test_a_penalty_on_gradients_inside_the_loss_has_its_values() -> None:
    def penalized(model: nn.Module, batch: Tensor) -> Tensor:
        loss = squares(model, batch)
        (grad,) = torch.autograd.grad(loss, [model.layer.weight], create_graph=True)
        return loss + grad.square().sum()

    found = []
    for backward in (il.Tape(), il.Remat()):
        torch.manual_seed(0)
        model = Around(LAYERS["convolution"]())
        sgd = optim.SGD(model.parameters(), lr=0.1)
        inner = il.InnerLoop(model, sgd, penalized, backward=backward, val_loss=squares)
        data = torch.randn(2, 4, 5, 6)
        found.append(torch.autograd.grad(inner([data] * 4, data), list(model.parameters())))
    assert_same(found[1], found[0])


def compared(
    make: Any, loss: Any = squares, shape: tuple[int, ...] = (5, 4), steps: int = 5
) -> None:
    """The same gradients as the tape's, and by one walk."""
    count = 0

    def counted(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return loss(model, batch)

    found = []
    for backward in (il.Tape(), il.Remat(), il.Binomial(steps)):
        torch.manual_seed(0)
        model = make()
        sgd = optim.SGD(model.parameters(), lr=0.1)
        inner = il.InnerLoop(model, sgd, counted, backward=backward, val_loss=squares)
        data = [torch.randn(shape) for _ in range(steps + 1)]
        value = inner(data[:-1], data[-1])
        count = 0
        found.append(torch.autograd.grad(value, list(model.parameters())))
        assert count <= steps
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def two_layers(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Linear(6, 3, bias=bias))


def two_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 2))


IMAGES = (2, 3, 6, 6)


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight.requires_grad:
            self.weight.register_hook(lambda g: g.clamp(-0.05, 0.05))
        return super().forward(x)


def clamping_weights(model: nn.Module, batch: Tensor) -> Tensor:
    if model[0].weight.requires_grad:
        model[0].weight.register_hook(lambda g: g.clamp(-0.05, 0.05))
    return squares(model, batch)


def halving_in_place(model: nn.Module, batch: Tensor) -> Tensor:
    def halved(grad: Tensor) -> None:
        torch._foreach_mul_([grad], 0.5)

    if model[2].weight.requires_grad:
        model[2].weight.register_hook(halved)
    return squares(model, batch)


def clamping_nodes(model: nn.Module, batch: Tensor) -> Tensor:
    y = model(batch)
    if y.grad_fn is not None:
        y.grad_fn.register_hook(
            lambda grads, _: tuple(g if g is None else g.clamp(-0.01, 0.01) for g in grads)
        )
    return (y - 0.3).square().mean()


def hooking_late(model: nn.Module, batch: Tensor) -> Tensor:
    y = model(batch)

    def late(_: Tensor) -> None:
        model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))

    if y.requires_grad:
        y.register_hook(late)
    return (y - 0.3).square().mean()


def comparing(model: nn.Module, batch: Tensor) -> Tensor:
    y, other = model(batch), model(batch).square().mean()

    def scaled(grad: Tensor) -> Tensor:
        (by_weight,) = torch.autograd.grad(other, [model[2].weight], retain_graph=True)
        return grad * (1 + 0.1 * (by_weight > 0).sum())

    if y.requires_grad:
        y.register_hook(scaled)
    return (y - 0.3).square().mean()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "loss", [clamping_weights, halving_in_place, clamping_nodes, hooking_late, comparing]
)
def test_hooks_see_values(loss: Any, bias: bool) -> None:
    compared(lambda: two_layers(bias), loss)


def test_a_layer_that_hooks_its_weight_sees_values() -> None:
    compared(lambda: nn.Sequential(Clamped(4, 4), nn.Tanh(), nn.Linear(4, 2)))


class ClippedGradient(torch.autograd.Function):
    """A layer that takes a gradient of its own in its backward, and clips it."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.y = layer(x)
        ctx.x, ctx.weight = x, weight
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gx, gw = torch.autograd.grad(
            ctx.y, [ctx.x, ctx.weight], grads, create_graph=True, retain_graph=True
        )
        return None, gx, gw.clamp(-0.05, 0.05)


class Clipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(6, 3)
        self.clipped = nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        clipped = ClippedGradient.apply(self.clipped, self.first(x), self.clipped.weight)
        return self.last(torch.tanh(clipped))


def test_a_gradient_taken_within_a_backward_has_values() -> None:
    compared(Clipping)


class Checkpointed(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return checkpoint(lambda h: torch.tanh(self.again(h)), hidden, use_reentrant=False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [4, 6])
def test_checkpointed_layers(width: int, bias: bool) -> None:
    compared(lambda: Checkpointed(width, bias))


class Quantized(TorchFunctionMode):
    """Rounded weights, with a derivative as if they were not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            weight = args[1]
            args = (args[0], weight + ((weight * 4).round() / 4 - weight).detach(), *args[2:])
        return func(*args, **kwargs or {})


def quantized(model: nn.Module, batch: Tensor) -> Tensor:
    with Quantized():
        return squares(model, batch)


@pytest.mark.parametrize("bias", [True, False])
def test_under_a_mode_of_the_user(bias: bool) -> None:
    compared(lambda: two_layers(bias), quantized)


@pytest.mark.parametrize(("make", "shape"), [(two_layers, (5, 4)), (two_convolutions, IMAGES)])
def test_anomaly_mode_finds_nothing(make: Any, shape: tuple[int, ...]) -> None:
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        compared(make, shape=shape)


def dual(model: nn.Module, batch: Tensor) -> Tensor:
    with forward_ad.dual_level():
        seen = forward_ad.unpack_dual(model(forward_ad.make_dual(batch, torch.ones_like(batch))))
    assert seen.tangent is not None
    return seen.primal.square().mean() + seen.tangent.square().mean()


def jacobian(model: nn.Module, batch: Tensor) -> Tensor:
    found: Any = torch.autograd.functional.jacobian(
        lambda x: model(x).sum(0), batch, create_graph=True, vectorize=True
    )
    return squares(model, batch) + found.square().mean()


@pytest.mark.filterwarnings("ignore:.torch.jit")  # of torch's own
@pytest.mark.parametrize("loss", [dual, jacobian])
@pytest.mark.parametrize(("make", "shape"), [(two_layers, (5, 4)), (two_convolutions, IMAGES)])
def test_other_derivatives_inside_the_loss(loss: Any, make: Any, shape: Any) -> None:
    compared(make, loss, shape)


def test_a_sparse_batch() -> None:
    compared(two_layers, lambda model, batch: squares(model, batch.to_sparse()))


def test_layers_that_were_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def standardized(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight - weight.mean((1, 2, 3), keepdim=True), bias, self.stride)

    def strided() -> nn.Module:
        model = two_convolutions()
        model[0].stride = 2
        return model

    compared(strided, shape=IMAGES)
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", standardized)
    compared(two_convolutions, shape=IMAGES)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight.tanh()))
    model, data = two_layers(), torch.randn(5, 4)
    inner = il.InnerLoop(model, optim.SGD(model.parameters(), lr=0.1), squares)
    torch.testing.assert_close(inner([], data), squares(model, data))


class Reversed(torch.autograd.Function):
    """A gradient that is turned round, by more with every call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.by * grads[0], None


@pytest.mark.parametrize(
    "weight", [lambda n: 0.1 * n, lambda n: min(1.0, 0.25 * n)], ids=["growing", "saturated"]
)
def test_a_gradient_that_comes_out_differently_is_noticed(weight: Any) -> None:
    calls = 0

    def adversarial(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        hidden = torch.tanh(model[0](batch))
        return model[2](Reversed.apply(hidden, weight(calls))).square().mean()

    model = two_layers(bias=False)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    inner = il.InnerLoop(model, sgd, adversarial, val_loss=squares, backward=il.Remat())
    data = torch.randn(5, 4)
    with pytest.raises(il.RequirementError, match="second time"):
        inner([data] * 8, data).backward()


def test_a_computed_weight_has_values() -> None:
    class Squashed(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.tanh()

    def made() -> nn.Module:
        model = two_layers()
        nn.utils.parametrize.register_parametrization(model[0], "weight", Squashed())
        return model

    compared(made)


def test_what_needs_memory_has_all_done_again() -> None:
    """A hook in NumPy cannot be handed a tensor that has none."""

    def halved(model: nn.Module, batch: Tensor) -> Tensor:
        weight = model[0].weight
        if weight.requires_grad:
            weight.register_hook(lambda g: g * float(g.detach().numpy().max() > 0))
        return squares(model, batch)

    found = []
    for backward in (il.Tape(), il.Remat()):
        torch.manual_seed(0)
        model, data = two_layers(), torch.randn(5, 4)
        sgd = optim.SGD(model.parameters(), lr=0.1)
        inner = il.InnerLoop(model, sgd, halved, backward=backward, val_loss=squares)
        found.append(torch.autograd.grad(inner([data] * 4, data), list(model.parameters())))
    assert_same(found[1], found[0])


class PutOff:
    """The gradients of two weights, of which the upper one is put off."""

    def __init__(self) -> None:
        upper, lower = torch.randn(3, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
        self.hidden = F.linear(torch.randn(5, 4), lower)
        y, self.upstream = F.linear(self.hidden, upper), torch.randn(5, 3, requires_grad=True)
        with _deferred.deferring([upper, lower]):
            self.upper, self.lower = torch.autograd.grad(
                y, [upper, lower], self.upstream, create_graph=True
            )
        self.value = self.upstream.detach().mT @ self.hidden.detach()


def test_what_was_written_to_is_not_used() -> None:
    made = PutOff()
    made.hidden.detach().mul_(2)
    with pytest.raises(_deferred.StaleError):
        made.upper + 1


def test_written_values_are_seen() -> None:
    made = PutOff()
    with torch.no_grad():
        made.upper.mul_(2)
    found = _deferred.settled({"upper": made.upper, "lower": made.lower}, lambda: True)
    assert_same([found["upper"]], [2 * made.value])
    assert _deferred.left_out() == 0


def test_a_rule_that_is_not_linear_has_values() -> None:
    made = PutOff()
    _deferred.left_out()
    assert _deferred.settled({"upper": made.upper}, lambda: True)["upper"].isnan().all()
    assert _deferred.left_out() == 1
    assert_same([_deferred.settled({"upper": made.upper}, lambda: False)["upper"]], [made.value])


class Seen(torch.autograd.Function):
    """Weights as they are; their gradients must be ordinary tensors."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert type(grads[0]) is Tensor
        return grads[0].clamp(-0.01, 0.01)


def test_what_the_user_sees_of_a_weight_gradient_is_a_tensor() -> None:
    log: list[Tensor] = []

    def seen(model: nn.Module, batch: Tensor) -> Tensor:
        if model[2].weight.requires_grad:
            model[2].weight.register_hook(lambda g: log.append(g.detach()))
        hidden = torch.tanh(F.linear(batch, Seen.apply(model[0].weight)))
        return (model[2](hidden) - 0.3).square().mean()

    compared(two_layers, seen)
    assert log
    assert all(type(grad) is Tensor for grad in log)


def test_a_schedule_with_random_numbers_is_called_as_before() -> None:
    found = []
    for backward in (il.Tape(), il.Remat(), il.Binomial(2)):
        torch.manual_seed(0)
        model, data = two_layers(bias=False), torch.randn(5, 4)
        sgd = optim.SGD(model.parameters(), lr=0.1)
        inner = il.InnerLoop(
            model, sgd, squares, backward=backward, schedule=lambda _: 0.5 + torch.rand(()).item()
        )
        value = inner([data] * 5, data)
        found.append(torch.autograd.grad(value, list(model.parameters())))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_an_error_of_the_user_is_raised_at_once() -> None:
    calls = 0

    def failing(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise TimeoutError
        return squares(model, batch)

    model, data = two_layers(), torch.randn(5, 4)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    value = il.InnerLoop(model, sgd, failing, backward=il.Remat(), val_loss=squares)(
        [data] * 6, data
    )
    with pytest.raises(TimeoutError):
        value.backward()
    assert calls == 9


def test_a_loop_inside_the_loss_has_values() -> None:
    found = []
    for backward in (il.Tape(), il.Remat()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        f = il.functional(model)
        params = {n: p.detach().clone().requires_grad_() for n, p in f.params.items()}
        rule = il.optim.sgd(0.1)

        def loss(weights: Any, batch: Tensor, f: Any = f, model: Any = model) -> Tensor:
            step = il.inner_step(squares, il.optim.sgd(0.1), model)
            state, _ = il.unroll(step, il.State(weights, {}), il.Meta(), [batch] * 2)
            return squares(f.bind(state.params), batch)

        step = il.inner_step(loss, rule)
        data = torch.randn(5, 4)
        state, _ = il.unroll(step, il.State(params, {}), il.Meta(), [data] * 4, backward=backward)
        value = squares(f.bind(state.params), data)
        found.append(torch.autograd.grad(value, list(params.values())))
    assert_same(found[1], found[0])

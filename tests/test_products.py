"""Steps that are computed again without the values of their gradient: the same derivatives."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import innerloop as il
from innerloop.step import InnerStep
from strategies import assert_same

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
    data = [torch.randn(shape_of(model.layer)) for _ in range(4)]
    sgd = optim.SGD(model.parameters(), lr=0.2, **settings)
    inner = il.InnerLoop(model, sgd, squares, backward=backward, **options)
    value = inner(data[:3], data[3])
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
        inner([data] * 3, data).backward()
        found.append([p.grad for p in model.parameters()])
    assert_same(found[1], found[0])


def step_of(rule: Any, **options: Any) -> tuple[InnerStep, il.State]:
    model = Around(LAYERS["convolution"]())
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
    assert unknown(step, state, il.Meta()) == {"layer.weight"}


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
            monkeypatch.setattr(InnerStep, "_is_linear", lambda *_: True)
        torch.manual_seed(0)
        model = Around(LAYERS["convolution"]())
        adam = optim.Adam(model.parameters(), lr=0.1)
        inner = il.InnerLoop(model, adam, squares, learn=("init", "lr"), backward=backward)
        data = torch.randn(2, 4, 5, 6)
        found.append(
            torch.autograd.grad(inner([data] * 3, data), [*model.parameters(), inner.settings.lr])
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
        (grad,) = torch.autograd.grad(inner([data] * 3, data), [model.weight])
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
            value = inner([data] * 3, data)
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
        found.append(torch.autograd.grad(inner([data] * 3, data), list(model.parameters())))
    assert_same(found[1], found[0])


def compared(make: Any, loss: Any, shape: tuple[int, ...] = (5, 4)) -> None:
    """The gradients of both, and whether one walk was enough."""
    found, walks = [], []
    for backward in (il.Tape(), il.Remat()):
        torch.manual_seed(0)
        model = make()
        sgd = optim.SGD(model.parameters(), lr=0.1)
        inner = il.InnerLoop(model, sgd, loss, backward=backward, val_loss=squares)
        data = torch.randn(shape)
        value = inner([data] * 3, data)
        before = COUNTS["steps"]
        found.append(torch.autograd.grad(value, list(model.parameters())))
        walks.append(COUNTS["steps"] - before)
    assert_same(found[1], found[0])
    assert walks[1] <= 2  # The last of the three steps has its graph already.


COUNTS = {"steps": 0}


def counted(model: nn.Module, batch: Tensor) -> Tensor:
    COUNTS["steps"] += 1
    return squares(model, batch)


def test_a_hook_on_a_weight_sees_values() -> None:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.weight.requires_grad:
                self.weight.register_hook(lambda g: g.clamp(-0.05, 0.05))
            return super().forward(x)

    def hooked(model: nn.Module, batch: Tensor) -> Tensor:
        if model[0].weight.requires_grad:
            model[0].weight.register_hook(lambda g: g.clamp(-0.05, 0.05))
        return counted(model, batch)

    compared(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), hooked)
    compared(lambda: nn.Sequential(Clamped(4, 4), nn.Tanh(), nn.Linear(4, 2)), counted)


def test_a_computed_weight_has_values() -> None:
    class Squashed(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.tanh()

    def made() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        nn.utils.parametrize.register_parametrization(model[0], "weight", Squashed())
        return model

    compared(made, counted)


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
        state, _ = il.unroll(step, il.State(params, {}), il.Meta(), [data] * 3, backward=backward)
        value = squares(f.bind(state.params), data)
        found.append(torch.autograd.grad(value, list(params.values())))
    assert_same(found[1], found[0])

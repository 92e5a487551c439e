"""A step that uses a tensor it was not given: right by the walks, refused by name by Forward."""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import innerloop as il
from inner_problems import Training, squares, training
from problems import Net, central_difference, flat
from strategies import EXACT, Tensors, apart, as_tape, as_tape_or_refused, assert_same

Loss = Callable[[nn.Module, Any], Any]

each_exact = pytest.mark.parametrize("backward", EXACT, ids=repr)
each_walk = pytest.mark.parametrize("backward", [il.Remat(every=2), il.Binomial(1)], ids=repr)


# The table: losses, as functions of the leaves they close over. ---------------------------------
# What a loss closes over has `scale` in its name: that is what an error must say.


def numbered(loss: Callable[[nn.Module, int, Any], Any]) -> Loss:
    """For batches whose first part is the number of the step."""
    return lambda model, batch: loss(model, batch[0], batch[1:])


def leaf(scale: Tensor) -> Loss:
    return numbered(lambda model, time, batch: scale * squares(model, batch))


def parameters_of_a_module(weight: Tensor, bias: Tensor) -> Loss:
    scales = nn.Linear(1, 1)
    scales.weight, scales.bias = weight, bias
    return numbered(lambda model, time, batch: F.mse_loss(scales(model(batch[0])), batch[1]))


def computed_before(root: Tensor) -> Loss:
    scale = root.exp()
    return numbered(lambda model, time, batch: scale * squares(model, batch))


def computed_inside(scale: Tensor) -> Loss:
    return numbered(lambda model, time, batch: scale.exp() * squares(model, batch))


def part_of_something_computed_before(*roots: Tensor) -> Loss:
    scales = torch.stack(roots).exp()
    return numbered(lambda model, time, batch: scales[time] * squares(model, batch))


def another_leaf_at_each_step(*scales: Tensor) -> Loss:
    return numbered(lambda model, time, batch: scales[time] * squares(model, batch))


def another_computed_at_each_step(*roots: Tensor) -> Loss:
    scales = [root.exp() for root in roots]
    return numbered(lambda model, time, batch: scales[time] * squares(model, batch))


def at_one_step(used: int, computed: bool) -> Callable[..., Loss]:
    def make(root: Tensor) -> Loss:
        scale = root.exp() if computed else root

        def loss(model: nn.Module, time: int, batch: Any) -> Tensor:
            return squares(model, batch) * (scale if time == used else 1.0)

        return numbered(loss)

    return make


class Teacher:
    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.scale * squares(model, batch[1:])


def attribute(scale: Tensor) -> Loss:
    return Teacher(scale).loss


def keyword_of_a_partial(scale: Tensor) -> Loss:
    def loss(model: nn.Module, batch: Any, *, scale: Tensor) -> Tensor:
        return scale * squares(model, batch[1:])

    return functools.partial(loss, scale=scale)


def default_argument(given: Tensor) -> Loss:
    def loss(model: nn.Module, batch: Any, scale: Tensor = given) -> Tensor:
        return scale * squares(model, batch[1:])

    return loss


def in_a_dictionary(given: Tensor) -> Loss:
    scales = {"all": [given]}
    return numbered(lambda model, time, batch: scales["all"][0] * squares(model, batch))


def only_in_an_output(scale: Tensor) -> Loss:
    return numbered(
        lambda model, time, batch: (squares(model, batch), scale * model(batch[0]).mean())
    )


def only_in_an_output_computed_before(root: Tensor) -> Loss:
    scale = root.exp()
    return numbered(
        lambda model, time, batch: (squares(model, batch), scale * model(batch[0]).mean())
    )


def only_in_the_inner_gradient(scale: Tensor) -> Loss:
    """The value of the loss does not show the tensor, as in a straight-through estimator."""

    def loss(model: nn.Module, time: int, batch: Any) -> Tensor:
        plain = squares(model, batch)
        return plain.detach() + scale * (plain - plain.detach())

    return numbered(loss)


class Doubled(torch.autograd.Function):
    """A function of the user's own, whose arguments torch's function modes do not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def by_a_custom_function(used: int) -> Callable[..., Loss]:
    """Computed before; used by torch's functions and by one of the user's own."""

    def make(root: Tensor) -> Loss:
        scale = root.exp()

        def loss(model: nn.Module, time: int, batch: Any) -> Tensor:
            plain = squares(model, batch)
            return plain * scale + Doubled.apply(scale) * plain**2 if time == used else plain

        return numbered(loss)

    return make


KINDS: dict[str, Callable[..., Loss]] = {
    make.__name__: make
    for make in (
        leaf,
        parameters_of_a_module,
        computed_before,
        computed_inside,
        part_of_something_computed_before,
        another_leaf_at_each_step,
        another_computed_at_each_step,
        only_in_an_output,
        only_in_an_output_computed_before,
        only_in_the_inner_gradient,
    )
}
KINDS |= {f"leaf_at_step_{used}": at_one_step(used, False) for used in range(3)}
KINDS |= {f"computed_at_step_{used}": at_one_step(used, True) for used in range(3)}
KINDS |= {f"by_a_custom_function_{used}": by_a_custom_function(used) for used in (0, 2)}
HELD: dict[str, Callable[..., Loss]] = {
    make.__name__: make
    for make in (attribute, keyword_of_a_partial, default_argument, in_a_dictionary)
}
"""The leaf of the first kind in other places, of which only the name in the error depends."""


def leaves_of(kind: str) -> list[Tensor]:
    if kind == "parameters_of_a_module":
        return [nn.Parameter(torch.tensor([[1.3]])), nn.Parameter(torch.tensor([0.2]))]
    several = "each_step" in kind or "part_of" in kind
    return [nn.Parameter(torch.tensor(0.4 + 0.3 * k)) for k in range(3 if several else 1)]


class Outcome(NamedTuple):
    value: Tensor
    loop: Training


def outcome(kind: str, leaves: list[Tensor], backward: Any, alone: bool = False) -> Outcome:
    """A training with the loss of a row, measured by another one and by all outputs."""
    torch.manual_seed(0)
    plain, train, val = training()
    loop = Training(plain.model, (KINDS | HELD)[kind](*leaves))
    for leaf in loop.leaves:
        leaf.requires_grad_(not alone)
    batches = [(time, *batch) for time, batch in enumerate(train)]
    state, outs = loop.unrolled(batches, backward)
    value = squares(loop.f.bind(state.params), val)
    if kind != "only_in_the_inner_gradient":  # its outputs are not what they are derived as
        value = value + sum(out.sum() for out in (outs if isinstance(outs, tuple) else [outs]))
    return Outcome(value, loop)


def gradients(kind: str, backward: Any) -> list[Tensor]:
    leaves = leaves_of(kind)
    value, loop = outcome(kind, leaves, backward)
    return loop.grads(value, *leaves)


@pytest.mark.parametrize("kind", ["leaf", "computed_before", "only_in_the_inner_gradient"])
def test_tape_is_finite_differences(kind: str) -> None:
    leaves = leaves_of(kind)
    value, _ = outcome(kind, leaves, il.Tape())
    sizes = [leaf.numel() for leaf in leaves]

    def at(point: Tensor) -> Tensor:
        parts = zip(point.split(sizes), leaves, strict=True)
        return outcome(kind, [nn.Parameter(p.view_as(own)) for p, own in parts], il.Tape()).value

    actual = flat(torch.autograd.grad(value, leaves))
    assert apart(actual, central_difference(at, flat(leaves), 1e-4)) < 1e-6


@as_tape_or_refused("scale")
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_closes_over_a_tensor(kind: str, backward: Any) -> Tensors:
    return gradients(kind, backward)


@pytest.mark.parametrize("kind", HELD)
def test_forward_finds_the_name_of_a_tensor(kind: str) -> None:
    with pytest.raises(il.RequirementError, match="scale"):
        gradients(kind, il.Forward())


@pytest.mark.parametrize(
    "kind", ["leaf", "computed_before", "another_leaf_at_each_step", "computed_at_step_2"]
)
@each_exact
def test_a_loss_that_closes_over_the_only_tensor_to_learn(kind: str, backward: Any) -> None:
    """With nothing else to differentiate by, Forward has nothing to carry, and is right too."""
    leaves = leaves_of(kind)
    actual = torch.autograd.grad(outcome(kind, leaves, backward, True).value, leaves)
    assert_same(actual, gradients(kind, il.Tape())[-len(leaves) :])


# The same tensor given and closed over. ---------------------------------------------------------


@as_tape_or_refused("params")
def test_a_loss_that_pulls_to_the_initial_weights(backward: Any) -> Tensors:
    """The leaves are both the first state and closed over, as in iMAML written by hand."""

    plain, train, val = training()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        far = [(p - loop.params[name]).square().sum() for name, p in model.named_parameters()]
        return squares(model, batch) + 0.3 * sum(far)

    loop = Training(plain.model, loss)
    state, losses = loop.unrolled(train, backward)
    return loop.grads(squares(loop.f.bind(state.params), val) + losses.sum())


@as_tape_or_refused("batch")
def test_a_loss_that_closes_over_a_setting_and_a_batch(backward: Any) -> Tensors:
    plain, train, val = training()
    x = train[1][0].requires_grad_()
    loop = Training(
        plain.model,
        lambda model, batch: squares(model, batch) * (loop.lr + model(x).square().mean()),
    )
    state, _ = loop.unrolled(train, backward)
    return loop.grads(squares(loop.f.bind(state.params), val), x)


# Elsewhere than in the loss. --------------------------------------------------------------------


@as_tape_or_refused("scale")
@pytest.mark.parametrize("computed", [False, True], ids=["leaf", "computed"])
@pytest.mark.parametrize("where", ["grad_transform", "schedule"])
def test_a_transform_or_schedule_that_closes_over_a_tensor(
    where: str, computed: bool, backward: Any
) -> Tensors:
    root = torch.tensor(0.4, requires_grad=True)
    scale = root.exp() if computed else root
    options = {
        "grad_transform": lambda grads: {n: g * scale for n, g in grads.items()},
        "schedule": lambda settings, time: {"lr": settings["lr"] * scale / (time + 1)},
    }
    loop, train, val = training(**{where: options[where]})
    return loop.grads(loop.value(train, val, backward), root)


@as_tape_or_refused(r"groups\.0\.lr")
@pytest.mark.parametrize("computed", [False, True], ids=["leaf", "computed"])
def test_a_rule_that_holds_a_tensor(computed: bool, backward: Any) -> Tensors:
    """A learning rate that is a tensor, inside the optimizer that the rule was made from."""

    plain, train, val = training()
    root = torch.tensor(0.1, requires_grad=True)
    scale = root.sin() if computed else root
    rule = il.optim.sgd(lr=scale, momentum=0.9)
    step = il.inner_step(squares, rule, plain.model)
    start = il.State(plain.params, {}, rule.init(plain.params))
    state, _ = il.unroll(step, start, il.Meta(), train, backward=backward)
    value = squares(plain.f.bind(state.params), val)
    return list(torch.autograd.grad(value, [*plain.params.values(), root]))


@as_tape_or_refused("scale")
@pytest.mark.parametrize("computed", [False, True], ids=["leaf", "computed"])
@pytest.mark.parametrize("used", [0, 1, 2, None])
def test_a_step_of_the_users_own_that_closes_over_a_tensor(
    used: int | None, computed: bool, backward: Any
) -> Tensors:
    """At one step only, or at each."""

    root, weight, lr = (torch.tensor(v, requires_grad=True) for v in (0.3, 0.7, 0.2))
    scale = root.exp() if computed else root

    def step(state: il.State, meta: il.Meta, batch: Tensor) -> tuple[il.State, Tensor]:
        w = state.params
        slope = torch.cos(w) * (scale if state.time == used or used is None else 1.0) + batch
        return il.State(w - meta.opt["lr"] * slope, time=state.time + 1), w

    batches = list(torch.tensor([0.1, -0.2, 0.3]))
    state, outs = il.unroll(step, il.State(weight), il.Meta({"lr": lr}), batches, backward=backward)
    value = state.params.square() + outs.sum()
    return list(torch.autograd.grad(value, [weight, lr, root], materialize_grads=True))


@as_tape_or_refused("scale")
def test_a_loss_that_calls_a_model_from_outside(backward: Any) -> Tensors:
    """A learned teacher, as a module with a forward of its own, inside a closure of a closure."""

    plain, train, val = training()
    scale_net = Net()

    def distance(x: Tensor, found: Tensor) -> Tensor:
        return (found - scale_net(x)).square().mean()

    loop = Training(plain.model, lambda model, batch: distance(batch[0], model(batch[0])))
    state, _ = loop.unrolled(train, backward)
    return loop.grads(squares(loop.f.bind(state.params), val), *scale_net.parameters())


@as_tape_or_refused("scale")
def test_random_numbers_are_replayed_beside_a_closed_over_tensor(backward: Any) -> Tensors:
    """What was computed before is followed in another way, also at the last step."""

    plain, train, val = training("dropout")
    root = torch.tensor(0.4, requires_grad=True)
    scale = root.exp()
    loop = Training(plain.model, lambda model, batch: scale * squares(model, batch))
    state, losses = loop.unrolled(train, backward)
    value = squares(loop.f.bind(state.params), val) + losses.sum()
    torch.rand(3)
    return loop.grads(value, root)


# What is closed over and changes. ---------------------------------------------------------------


@each_walk
@pytest.mark.parametrize("kind", ["leaf", "computed_inside", "only_in_the_inner_gradient"])
def test_a_closed_over_tensor_changed_in_place_is_refused(kind: str, backward: Any) -> None:
    leaves = leaves_of(kind)
    value, loop = outcome(kind, leaves, backward)
    with torch.no_grad():
        leaves[0].mul_(2)
    with pytest.raises(il.InnerLoopError, match="in place"):
        loop.grads(value, *leaves)


@each_walk
@pytest.mark.parametrize("what", ["lr", "weight", "batch"])
def test_a_change_in_place_beside_a_computed_tensor_is_refused(what: str, backward: Any) -> None:
    plain, train, val = training()
    scale = torch.tensor(0.4, requires_grad=True).exp()
    loop = Training(plain.model, lambda model, batch: scale * squares(model, batch))
    value = loop.value(train, val, backward)
    changed = {"lr": loop.lr, "weight": next(iter(loop.params.values())), "batch": train[0][0]}
    with torch.no_grad():
        changed[what].mul_(2)
    with pytest.raises((RuntimeError, il.InnerLoopError), match=r"in place|inplace"):
        loop.grads(value)


# Leaves that a loss makes for itself. -----------------------------------------------------------


def slope_at(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a gradient penalty: how steep the model is at its inputs."""
    found = model(x)
    (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return (found - y).square().mean() + slope.square().mean()


def at_a_detached_input(model: nn.Module, batch: Any) -> Tensor:
    return slope_at(model, batch[0].detach().requires_grad_(), batch[1])


def at_the_batch_itself(model: nn.Module, batch: Any) -> Tensor:
    return slope_at(model, batch[0].requires_grad_(), batch[1])


def at_a_new_tensor(model: nn.Module, batch: Any) -> Tensor:
    shift = torch.zeros_like(batch[0], requires_grad=True)
    value = squares(model, (batch[0] + shift, batch[1]))
    (slope,) = torch.autograd.grad(value, shift, create_graph=True)
    return value + slope.square().sum()


def by_a_jacobian(model: nn.Module, batch: Any) -> Tensor:
    slopes = torch.autograd.functional.jacobian(
        lambda x: model(x).sum(0), batch[0], create_graph=True
    )
    return squares(model, batch) + slopes.square().mean()


def with_a_module_of_the_moment(model: nn.Module, batch: Any) -> Tensor:
    return squares(model, batch) + nn.Linear(2, 1)(batch[0]).mul(model(batch[0])).mean()


class Remembers:
    """Keeps the leaves it made, as people do to look at them later."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen.append(batch[0].detach().requires_grad_())
        return slope_at(model, self.seen[-1], batch[1])


OWN: dict[str, Callable[[], Loss]] = {
    loss.__name__: lambda loss=loss: loss
    for loss in (
        at_a_detached_input,
        at_the_batch_itself,
        at_a_new_tensor,
        by_a_jacobian,
        with_a_module_of_the_moment,
    )
}
OWN["remembered"] = Remembers

each_own = pytest.mark.parametrize("kind", OWN)


def trained_with(loss: Loss, backward: Any, steps: int = 3) -> tuple[Training, Tensor]:
    torch.manual_seed(0)
    plain, train, val = training()
    loop = Training(plain.model, loss)
    torch.manual_seed(1)
    state, losses = loop.unrolled([tuple(t.clone() for t in b) for b in train[:steps]], backward)
    return loop, squares(loop.f.bind(state.params), val) + losses.sum()


@as_tape
@each_own
def test_a_leaf_that_the_loss_makes_is_no_stranger(kind: str, backward: Any) -> Tensors:
    loop, value = trained_with(OWN[kind](), backward)
    return loop.grads(value)


@as_tape_or_refused("scale")
@each_own
def test_a_stranger_beside_a_leaf_that_the_loss_makes(kind: str, backward: Any) -> Tensors:
    scale, own = torch.tensor(0.7, requires_grad=True), OWN[kind]()
    loop, value = trained_with(lambda model, batch: scale * own(model, batch), backward)
    return loop.grads(value, scale)


def test_a_batch_keeps_its_flags() -> None:
    """A later call would else find learned data, which not every strategy takes."""
    loop, train, _ = training()
    loop = Training(loop.model, at_the_batch_itself)
    for backward in (il.Forward(), il.Remat(), il.Truncated(1, il.Binomial(1)), il.Forward()):
        loop.unrolled(train, backward)[1].sum().backward()
    assert not any(t.requires_grad for batch in train for t in batch)


def test_a_leaf_of_its_own_costs_no_further_evaluation() -> None:
    """Each step is taken once on the way up and, but for the last, once on the way down."""
    calls = 0

    def counted(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return at_a_detached_input(model, batch)

    loop, value = trained_with(counted, il.Remat())
    loop.grads(value)
    assert calls == 5


@each_walk
@pytest.mark.parametrize("steps", [1, 3])
def test_a_leaf_made_by_the_first_call_and_used_again_gets_its_gradient(
    steps: int, backward: Any
) -> None:
    def gradient(strategy: Any) -> list[Tensor]:
        made: list[Tensor] = []

        def loss(model: nn.Module, batch: Any) -> Tensor:
            made[:] = made or [torch.tensor(0.7, requires_grad=True)]
            return made[0] * squares(model, batch)

        loop, value = trained_with(loss, strategy, steps)
        return loop.grads(value, made[0])

    assert_same(gradient(backward), gradient(il.Tape()))


@as_tape
def test_a_step_of_the_users_own_that_makes_a_leaf(backward: Any) -> Tensors:
    def step(state: Tensor, meta: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        point = batch.detach().requires_grad_()
        with torch.enable_grad():
            value = torch.sin(state * point)
            (slope,) = torch.autograd.grad(value, point, create_graph=True)
        return state - meta * slope, point * state

    state, lr = (torch.tensor(v, requires_grad=True) for v in (0.3, 0.8))
    last, outs = il.unroll(step, state, lr, list(torch.arange(1.0, 4.0)), backward=backward)
    return torch.autograd.grad(last + outs.sum(), [state, lr])


class Weighted(torch.autograd.Function):
    """Its backward uses a tensor that its forward does not."""

    hidden_scale = torch.tensor(0.7, requires_grad=True)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Weighted.hidden_scale * grad


@pytest.mark.parametrize("own", [True, False])
@as_tape_or_refused("requires grad")
def test_a_stranger_in_a_backward_only(own: bool, backward: Any) -> Tensors:
    """Forwards nothing shows it, and a leaf of the loss's own does not hide it."""

    inside = at_a_detached_input if own else squares
    loop, value = trained_with(lambda m, b: Weighted.apply(inside(m, b)), backward)
    return loop.grads(value, Weighted.hidden_scale)


@pytest.mark.parametrize("backward", [il.Forward(), il.Implicit()], ids=repr)
@pytest.mark.parametrize("hidden", ["hook", "attribute"])
def test_a_tensor_deep_in_a_model_is_named(hidden: str, backward: Any) -> None:
    inside = torch.full((3,), 0.3, requires_grad=True)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 1))
            self._kept = {"a": [inside]}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x * self._kept["a"][0] if hidden == "attribute" else x)

    model = Deep()
    if hidden == "hook":
        model.body[0].register_forward_pre_hook(lambda module, args: (args[0] * inside,))
    inner = il.InnerLoop(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda m, b: (m(b[0]) - b[1]).square().mean(),
        learn=("lr",) if isinstance(backward, il.Forward) else ("init",),
        backward=backward,
    )
    batch = torch.randn(4, 3), torch.randn(4, 1)
    with pytest.raises(il.RequirementError, match=r"'inside'|'_kept\.a\.0'"):
        inner([batch] * 2, batch).backward()


# Loops inside the loss of another. --------------------------------------------------------------


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.decay = nn.Linear(2, 2), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def inner_of(head: nn.Module, where: str, features: nn.Module, batch: Any, backward: Any) -> Any:
    """A loop that uses the outer weights without being given them."""
    seen = features(batch[0])

    def loss(head: nn.Module, batch: Any) -> Tensor:
        given = seen if where == "computed" else features(batch[0])
        decay = features.decay * sum(p.square().sum() for p in head.parameters())
        return (head(given) - batch[1]).square().mean() + decay

    def scaled(grads: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: g * (1 + features.decay) for name, g in grads.items()}

    transform = scaled if where == "transform" else None
    sgd = torch.optim.SGD(head.parameters(), lr=0.2)
    return il.InnerLoop(head, sgd, loss, learn=(), backward=backward, grad_transform=transform)


@pytest.mark.parametrize("where", ["called", "computed", "transform"])
@pytest.mark.parametrize("inside", [il.Tape(), il.Remat()], ids=repr)
@pytest.mark.parametrize("outside", [il.Tape(), il.Remat()], ids=repr)
@pytest.mark.parametrize("first_order", [False, True])
def test_outer_weights_in_an_inner_loop(
    where: str, inside: Any, outside: Any, first_order: bool
) -> None:
    torch.manual_seed(0)
    features, head = Features(), nn.Linear(2, 1)
    batch = torch.randn(5, 2), torch.randn(5, 1)

    def trained(features: nn.Module, batch: Any, backward: Any = inside) -> Tensor:
        return inner_of(head, where, features, batch, backward)([batch] * 2, batch)

    twin = copy.deepcopy(features)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        sgd.zero_grad()
        trained(twin, batch, il.Tape()).backward()
        sgd.step()
    options = {"backward": outside, "first_order": first_order}
    outer = il.InnerLoop(
        features, torch.optim.SGD(features.parameters(), lr=0.1), trained, learn=("lr",), **options
    )
    with torch.set_grad_enabled(first_order):
        adapted = outer.adapt([batch] * 2)
    for name, expected in twin.named_parameters():
        torch.testing.assert_close(adapted.params[name].detach(), expected.detach())


@each_walk
def test_a_step_of_ones_own_that_uses_a_computed_tensor(backward: Any) -> None:
    start = torch.tensor(0.3, requires_grad=True)
    factor = start.exp()

    def step(state: Any, meta: Any, batch: Any) -> Any:
        slope = torch.func.grad(lambda w: factor * (w - batch) ** 2)(state["w"])
        return {"w": state["w"] - 0.1 * slope}, None

    found = []
    for each in (backward, il.Tape()):
        state, _ = il.unroll(step, {"w": torch.tensor(1.0)}, None, [3.0, 2.0], each)
        found.append(torch.autograd.grad(state["w"], start, retain_graph=True))
    assert_same(*found)
    assert found[0][0].abs() > 0

"""The implicit gradient against closed forms, and what it refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import innerloop as il
from strategies import SAME, assert_same

SOLVERS = ["cg", "neumann", "gmres"]
each_solver = pytest.mark.parametrize("solver", SOLVERS)


STEPS = 80
"""Enough for gradient descent to converge to rounding on the problems below."""


def implicit(solver: str, **options: Any) -> il.Implicit:
    """To rounding: the series has no other tolerance that it could be held to 1e-10 with."""
    return il.Implicit(solver, tolerance=1e-13, **options)


def converged(
    loss: Any,
    weights: Any,
    meta: il.Meta,
    batches: list[Any],
    backward: Any,
    rule: Any = None,
) -> il.State:
    rule = il.optim.sgd(lr=0.4) if rule is None else rule
    start = il.State(weights, opt=rule.init(weights))
    step = il.inner_step(loss, rule)
    return il.unroll(step, start, meta, batches, backward=backward)[0]


# A quadratic: ½ wᵀ H w - wᵀ C φ with H = S + diag(eᵈ). ------------------------------------------


class Quadratic:
    """Its minimum w = H⁻¹ C φ is measured by ½ ‖w - t‖²; with u = H⁻¹ (w - t) ::

    dL/dφ = Cᵀ u,   dL/dd = -u eᵈ w
    """

    def __init__(self) -> None:
        turned = torch.linalg.qr(torch.randn(4, 4))[0]
        self.fixed = turned @ torch.diag(torch.linspace(0.5, 1.5, 4)) @ turned.T
        self.coupling, self.target = torch.randn(4, 3), torch.randn(4)
        self.phi = torch.randn(3, requires_grad=True)
        self.log = (0.3 * torch.randn(4)).requires_grad_()
        self.meta = il.Meta(loss={"phi": self.phi, "log": self.log})
        self.start = {"w": torch.randn(4)}

    def loss(self, params: Any, scale: float, parts: Any) -> Tensor:
        w = params["w"]
        curved = w @ self.fixed @ w + (parts["log"].exp() * w * w).sum()
        return scale * (curved / 2 - w @ self.coupling @ parts["phi"])

    def measured(self, w: Tensor) -> Tensor:
        return (w - self.target).square().sum() / 2

    def closed_form(self) -> tuple[Tensor, list[Tensor]]:
        with torch.no_grad():
            hessian = self.fixed + torch.diag(self.log.exp())
            w = torch.linalg.solve(hessian, self.coupling @ self.phi)
            u = torch.linalg.solve(hessian, w - self.target)
            return w, [self.coupling.T @ u, -u * self.log.exp() * w]


@each_solver
@pytest.mark.parametrize(
    "rule", [il.optim.sgd(lr=0.4), il.optim.sgd(lr=0.3, momentum=0.2)], ids=["plain", "momentum"]
)
@pytest.mark.parametrize("scales", [[1.0], [0.5, 1.5]], ids=["one_batch", "two_batches"])
def test_quadratic(solver: str, rule: Any, scales: list[float]) -> None:
    """Whatever led to the minimum, and whichever batches have it in common."""
    given = Quadratic()
    batches = scales * (STEPS // len(scales))
    state = converged(given.loss, given.start, given.meta, batches, implicit(solver), rule)
    w, expected = given.closed_form()
    assert_same([state.params["w"]], [w])
    value = given.measured(state.params["w"])
    assert_same(torch.autograd.grad(value, [given.phi, given.log]), expected)


@each_solver
def test_a_long_tape_agrees(solver: str) -> None:
    """Not only the quadratic: a logistic regression with a learned penalty for every weight."""
    x, y = torch.randn(12, 3), (torch.rand(12) > 0.4).double()
    log = torch.ones(3, requires_grad=True)

    def loss(w: Tensor, batch: Any, parts: Any) -> Tensor:
        plain = F.binary_cross_entropy_with_logits(batch[0] @ w, batch[1])
        return plain + (parts["log"].exp() * w * w).sum() / 2

    other, found = torch.randn(5, 3), []
    for backward in (implicit(solver), il.Tape()):
        meta, rule = il.Meta(loss={"log": log}), il.optim.sgd(lr=0.3)
        state = converged(loss, torch.randn(3), meta, [(x, y)] * STEPS, backward, rule)
        value = F.binary_cross_entropy_with_logits(other @ state.params, y[:5])
        found.append(torch.autograd.grad(value, log))
    assert_same(*found)


# Ridge regression: ½ ‖X w - y‖² + ½ Σ eᵖ w². ---------------------------------------------------


class Ridge(nn.Module):
    """A loss module: the penalties are its parameters, in logarithms."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.log_penalty = nn.Parameter(0.5 * torch.randn(count))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        weights = torch.cat([p.reshape(-1) for p in model.parameters()])
        fit = (model(x).squeeze(-1) - y).square().sum()
        return fit / 2 + (self.log_penalty.exp() * weights * weights).sum() / 2


class Regression:
    """A linear model with a bias. Its weights w solve (XᵀX + diag(eᵖ) + λ) w = Xᵀy + λ w₀.

    Measured by ½ ‖X' w - y'‖², with u = (XᵀX + diag(eᵖ) + λ)⁻¹ X'ᵀ(X' w - y') ::

        dL/dp = -u eᵖ w,   dL/dw₀ = λ u
    """

    def __init__(self, proximal: float = 0.0) -> None:
        self.x, self.y = 2.5 * torch.linalg.qr(torch.randn(8, 2))[0], torch.randn(8)
        self.other_x, self.other_y = torch.randn(5, 2), torch.randn(5)
        self.model, self.loss = nn.Linear(2, 1), Ridge(3)
        self.proximal = proximal

    @property
    def batch(self) -> Any:
        return self.x, self.y

    @property
    def val(self) -> Any:
        return self.other_x, self.other_y

    def measured(self, model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]).squeeze(-1) - batch[1]).square().sum() / 2

    def closed_form(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weights with the bias last, and the gradients of penalties and initial weights."""
        with torch.no_grad():
            x, other = (torch.cat([t, torch.ones(len(t), 1)], 1) for t in (self.x, self.other_x))
            start = torch.cat([p.reshape(-1) for p in self.model.parameters()])
            penalty = self.loss.log_penalty.exp()
            matrix = x.T @ x + torch.diag(penalty + self.proximal)
            w = torch.linalg.solve(matrix, x.T @ self.y + self.proximal * start)
            u = torch.linalg.solve(matrix, other.T @ (other @ w - self.other_y))
            return w, -u * penalty * w, self.proximal * u

    def inner(self, backward: Any, learn: Any = ()) -> il.InnerLoop:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return il.InnerLoop(
            self.model, optimizer, self.loss, learn=learn, backward=backward, val_loss=self.measured
        )


def test_ridge_regression_with_a_loss_module() -> None:
    given = Regression()
    inner = given.inner(implicit("cg"))
    value = inner([given.batch] * STEPS, given.val)
    w, by_penalty, _ = given.closed_form()
    adapted = inner.adapt([given.batch] * STEPS)
    assert_same([torch.cat([p.reshape(-1) for p in adapted.params.values()])], [w])
    assert [name for name, _ in inner.named_parameters()] == ["loss.log_penalty"]
    assert_same(torch.autograd.grad(value, list(inner.parameters())), [by_penalty])


def test_a_proximal_term_gives_the_initial_weights_a_gradient() -> None:
    """As in iMAML: dL/dw₀ = λ (H + λ)⁻¹ ∇L, here with H = XᵀX + diag(eᵖ)."""
    given = Regression(proximal=2.0)
    inner = given.inner(implicit("cg", proximal=2.0), learn=("init",))
    value = inner([given.batch] * STEPS, given.val)
    w, by_penalty, by_start = given.closed_form()
    with torch.no_grad():
        adapted = inner.adapt([given.batch] * STEPS)
    assert_same([torch.cat([p.reshape(-1) for p in adapted.params.values()])], [w])
    leaves = [*given.model.parameters(), given.loss.log_penalty]
    *weights, penalty = torch.autograd.grad(value, leaves)
    assert_same([torch.cat([g.reshape(-1) for g in weights]), penalty], [by_start, by_penalty])


# Schedules and transforms. ----------------------------------------------------------------------


def test_a_schedule_is_asked_for_no_more_steps_than_are_taken() -> None:
    given, factors = Regression(), [1.0] * STEPS
    optimizer = torch.optim.SGD(given.model.parameters(), lr=0.1)
    inner = il.InnerLoop(
        given.model,
        optimizer,
        given.loss,
        learn=(),
        backward=implicit("cg"),
        val_loss=given.measured,
        schedule=lambda time: factors[time],
    )
    value = inner([given.batch] * STEPS, given.val)
    assert_same(torch.autograd.grad(value, list(inner.parameters())), given.closed_form()[1:2])


def test_a_weight_decay_for_each_step_counts_by_its_last_value() -> None:
    found = []
    for learn in (il.Learn(per="step", steps=STEPS), il.Learn()):
        torch.manual_seed(0)
        given = Regression()
        optimizer = torch.optim.SGD(given.model.parameters(), lr=0.1, weight_decay=0.3)
        inner = il.InnerLoop(
            given.model,
            optimizer,
            given.measured,
            learn={"weight_decay": learn},
            backward=implicit("cg"),
        )
        value = inner([given.batch] * STEPS, given.val)
        found.append(torch.autograd.grad(value, inner.settings.weight_decay)[0].reshape(-1))
    assert not found[0][:-1].any()
    assert_same([found[0][-1:]], [found[1]])


TRANSFORMS = {
    "doubled": lambda grads: {name: 2 * g for name, g in grads.items()},
    "by name": lambda grads: {n: g * (1 + k) for k, (n, g) in enumerate(grads.items())},
    "saturating": lambda grads: {name: torch.tanh(g) for name, g in grads.items()},
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize(("solver", "tasks"), [("cg", False), ("gmres", True)])
def test_a_transform_of_the_gradients_is_part_of_the_equation(
    solver: str, tasks: bool, transform: Any
) -> None:
    """It rests where the transformed gradient and the decay are in balance."""

    def gradient(backward: Any) -> list[Tensor]:
        torch.manual_seed(0)
        given = Regression()
        batch, val = given.batch, given.val
        if tasks:
            batch, val = ([torch.stack([t, 1.2 * t]) for t in pair] for pair in (batch, val))
        inner = il.InnerLoop(
            given.model,
            torch.optim.SGD(given.model.parameters(), lr=0.05, weight_decay=0.3),
            given.measured,
            learn=("weight_decay",),
            backward=backward,
            grad_transform=transform,
        )
        value = inner([batch] * 300, val, tasks=tasks).sum()
        return list(torch.autograd.grad(value, list(inner.parameters())))

    assert_same(gradient(implicit(solver)), gradient(il.Tape()), 1e-8)


def test_a_loss_that_makes_leaves_of_its_own() -> None:
    """A gradient penalty: of a linear model, that of the squares of its weights."""
    found = []
    for penalized in (True, False):
        torch.manual_seed(0)
        given = Regression()

        def loss(model: nn.Module, batch: Any, given: Any = given, on: bool = penalized) -> Tensor:
            x = batch[0].detach().requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            own = slope.square().sum() if on else len(x) * model.weight.square().sum()
            return given.measured(model, (x, batch[1])) + 0.1 * own

        optimizer = torch.optim.SGD(given.model.parameters(), lr=0.05, weight_decay=0.3)
        inner = il.InnerLoop(given.model, optimizer, loss, ("weight_decay",), implicit("cg"))
        value = inner([given.batch] * 200, given.val)
        found.append(torch.autograd.grad(value, list(inner.parameters())))
    assert_same(*found)


# The series is the walk stopped after k visits. --------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 5])
def test_k_terms_of_the_series_are_the_last_k_steps(k: int) -> None:
    """At the minimum every step has the same derivative: Truncated(k) of gradient descent."""
    given, lr = Quadratic(), 0.4
    leaves, found = [given.phi, given.log], []
    for backward in (il.Implicit("neumann", iterations=k, scale=lr), il.Truncated(k)):
        state = converged(given.loss, given.start, given.meta, [1.0] * STEPS, backward)
        found.append(torch.autograd.grad(given.measured(state.params["w"]), leaves))
    assert_same(*found)
    exact = given.closed_form()[1]
    assert (found[0][0] - exact[0]).norm() > 1e-3 * exact[0].norm()


@each_solver
def test_a_number_of_iterations_is_taken_as_it_comes(solver: str) -> None:
    """Fewer than needed: no error, and closer with every one."""
    given, gaps = Quadratic(), []
    exact = given.closed_form()[1][0]
    for iterations in (1, 2, 4):
        backward = il.Implicit(solver, iterations=iterations)
        state = converged(given.loss, given.start, given.meta, [1.0] * STEPS, backward)
        (grad,) = torch.autograd.grad(given.measured(state.params["w"]), [given.phi])
        gaps.append((grad - exact).norm().item())
    assert gaps[0] > gaps[1] > gaps[2]
    if solver != "neumann":
        assert gaps[2] < SAME  # in exact arithmetic, four unknowns take four iterations


# A step of one's own: a fixed point. ------------------------------------------------------------


@pytest.mark.parametrize("solver", ["neumann", "gmres"])
def test_fixed_point_of_any_step(solver: str) -> None:
    """s = tanh(M s + φ), with M not symmetric: ds/dφ = (I - D M)⁻¹ D, D = diag(1 - s²)."""
    matrix = 0.4 * torch.randn(3, 3)
    phi = torch.randn(3, requires_grad=True)

    def step(state: Tensor, meta: Tensor, batch: None) -> tuple[Tensor, Tensor]:
        new = torch.tanh(matrix @ state + meta)
        return new, new.sum()

    backward = il.Implicit(solver, tolerance=1e-13, scale=1.0)
    state, _ = il.unroll(step, torch.zeros(3), phi, [None] * 400, backward=backward)
    along = torch.randn(3)
    (grad,) = torch.autograd.grad(state @ along, phi)
    with torch.no_grad():
        slope = torch.diag(1 - state**2)
        jacobian = torch.linalg.solve(torch.eye(3) - slope @ matrix, slope)
        assert_same([grad], [jacobian.T @ along])


# What it refuses. -------------------------------------------------------------------------------


def test_settings_of_the_optimizer_have_no_gradient() -> None:
    given = Regression()
    inner = given.inner(il.Implicit(), learn=("lr",))
    with pytest.raises(il.RequirementError, match="the setting 'lr'"):
        inner([given.batch] * STEPS, given.val)


def test_initial_weights_have_no_gradient_without_a_proximal_term() -> None:
    given = Regression()
    inner = given.inner(il.Implicit(), learn=("init",))
    with pytest.raises(il.RequirementError, match="proximal"):
        inner([given.batch] * STEPS, given.val)


def test_training_that_has_not_converged_is_warned_of() -> None:
    given = Regression()
    inner = given.inner(il.Implicit())
    with pytest.warns(UserWarning, match="converged"):
        inner([given.batch] * 3, given.val)
    given.inner(il.Implicit(stationary=1.0))([given.batch] * 3, given.val)


@each_solver
def test_a_singular_system_is_refused(solver: str) -> None:
    """A direction that the loss does not see, but the measurement does."""
    phi, w = torch.tensor(1.0, requires_grad=True), torch.tensor([3.0, 1.0])
    meta = il.Meta(loss={"phi": phi})

    def loss(w: Tensor, batch: None, parts: Any) -> Tensor:
        return (w[0] - parts["phi"]) ** 2 + 0.0 * w[1]

    state = converged(loss, w, meta, [None] * STEPS, il.Implicit(solver))
    with pytest.raises(il.RequirementError, match="singular"):
        state.params.sum().backward()


def test_conjugate_gradients_need_a_step_of_the_library() -> None:
    phi = torch.tensor(0.3, requires_grad=True)
    step = lambda state, meta, batch: (torch.cos(state * meta), state)  # noqa: E731
    with pytest.raises(il.InnerLoopError, match="gmres"):
        il.unroll(step, torch.tensor(0.1), phi, [None] * 50, backward=il.Implicit("cg"))
    with pytest.raises(il.InnerLoopError, match="inner_step"):
        il.unroll(
            step, torch.tensor(0.1), phi, [None] * 50, backward=il.Implicit("gmres", proximal=1.0)
        )


@pytest.mark.parametrize(
    "options",
    [{"solver": "lu"}, {"proximal": -1.0}, {"tolerance": 0.0}, {"iterations": 0}],
    ids=str,
)
def test_wrong_options_are_refused(options: Any) -> None:
    with pytest.raises(il.InnerLoopError, match="Implicit"):
        il.Implicit(**options)


# Never silently wrong. --------------------------------------------------------------------------


def test_learned_data() -> None:
    """w = mean of the data under ‖w - y‖², so dL/dy = ∇L / n."""
    y = torch.randn(5, 3, requires_grad=True)
    state = converged(
        lambda w, y: (w - y).square().mean(0).sum(),
        torch.zeros(3),
        il.Meta(),
        [y] * STEPS,
        implicit("cg"),
    )
    expected = (2 * y.detach().mean(0) / 5).expand(5, 3)
    assert_same(torch.autograd.grad(state.params.square().sum(), y), [expected])


def test_losses_on_the_way_are_refused() -> None:
    """They depend on φ at every step, not only at the last."""
    given, rule = Quadratic(), il.optim.sgd(lr=0.4)
    start = il.State(given.start, opt=rule.init(given.start))
    step = il.inner_step(given.loss, rule)
    state, losses = il.unroll(step, start, given.meta, [1.0] * STEPS, backward=il.Implicit())
    with pytest.raises(il.RequirementError, match="outputs"):
        torch.autograd.grad(given.measured(state.params["w"]) + losses.sum(), given.phi)


@pytest.mark.parametrize("changed", ["batch", "phi"])
def test_a_change_in_place_is_refused(changed: str) -> None:
    phi, batch = torch.tensor(0.5, requires_grad=True), torch.tensor([2.0, 1.0])

    def loss(w: Tensor, batch: Tensor, parts: Any) -> Tensor:
        return (batch * (w - parts["phi"]) ** 2 + w**4 / 4).sum()

    rule, meta = il.optim.sgd(lr=0.1), il.Meta(loss={"phi": phi})
    state = converged(loss, torch.zeros(2), meta, [batch] * STEPS, implicit("cg"), rule)
    with torch.no_grad():
        (batch if changed == "batch" else phi).mul_(3)
    with pytest.raises((RuntimeError, il.InnerLoopError), match=r"in place|inplace"):
        torch.autograd.grad(state.params.sum(), phi)


def test_a_weight_that_no_optimizer_has_gets_its_gradient() -> None:
    """It acts on the training as a parameter of the loss does, and on the measurement itself."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fixed = nn.Parameter(torch.tensor([2.0, 3.0]))
            self.moving = nn.Parameter(torch.tensor([0.3, -0.2]))

    model = Partly()
    leaves = list(model.parameters())

    def fit(model: nn.Module, batch: Tensor) -> Tensor:
        return (model.fixed * model.moving - batch).square().sum()

    def pulled(model: nn.Module, batch: Tensor) -> Tensor:
        return fit(model, batch) + (model.moving - leaves[1]).square().sum()

    def gradient(backward: Any, loss: Any) -> Any:
        inner = il.InnerLoop(
            model,
            torch.optim.SGD([model.moving], lr=0.05),
            loss,
            learn=("init",),
            backward=backward,
            val_loss=lambda model, val: (model.moving**2).sum() + (model.fixed**2).sum(),
        )
        value = inner([torch.tensor([0.5, -1.0])] * STEPS, None)
        return torch.autograd.grad(value, leaves, materialize_grads=True)

    assert_same(gradient(implicit("cg", proximal=2.0), fit), gradient(il.Tape(), pulled))


@pytest.mark.parametrize("computed", [False, True], ids=["leaf", "computed"])
def test_a_closed_over_tensor_is_refused_by_name(computed: bool) -> None:
    root = torch.randn(3, requires_grad=True)
    scale = root * 2 if computed else root

    def loss(w: Tensor, batch: None) -> Tensor:
        return (w - scale).square().sum()

    with pytest.raises(il.RequirementError, match="scale"):
        state = converged(loss, torch.zeros(3), il.Meta(), [None] * STEPS, implicit("cg"))
        state.params.sum().backward()


def test_a_loss_with_frozen_and_unused_weights() -> None:
    """Frozen weights are constants of the equation; those the loss leaves out do not enter it."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fixed = nn.Parameter(torch.tensor([2.0, 3.0]), requires_grad=False)
            self.moving = nn.Parameter(torch.zeros(2))
            self.unused = nn.Parameter(torch.zeros(2))

    class Pull(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.goal = nn.Parameter(torch.tensor([0.5, -1.0]))

        def forward(self, model: nn.Module, batch: None) -> Tensor:
            return (model.fixed * model.moving - self.goal).square().sum()

    model, loss = Partly(), Pull()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inner = il.InnerLoop(
        model,
        optimizer,
        loss,
        learn=(),
        backward=implicit("cg"),
        val_loss=lambda model, val: model.moving.square().sum() + model.unused.sum(),
    )
    (grad,) = torch.autograd.grad(inner([None] * STEPS, None), [loss.goal])
    assert_same([grad], [2 * loss.goal.detach() / model.fixed**2])


# How often a batch comes, what it leaves out, and first order. ------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_batches_count_as_often_as_they_come(shared: bool) -> None:
    """Two losses w²/2 - w φᵢ with the same minimum at φ₁ = φ₂: dw/dφᵢ is the share of loss i."""
    phi = torch.full((2,), 2.0, requires_grad=True)
    one, two = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    batches = [one, one, one, two] * 20
    if not shared:
        batches = [batch.clone() for batch in batches]

    def loss(params: Any, batch: Tensor, parts: Any) -> Tensor:
        return 0.5 * params["w"].square() - params["w"] * (batch @ parts["phi"])

    start = {"w": torch.tensor(0.0)}
    meta = il.Meta(loss={"phi": phi})
    final = converged(loss, start, meta, batches, implicit("cg"))
    (grad,) = torch.autograd.grad(final.params["w"], [phi])
    assert_same([grad], [torch.tensor([0.75, 0.25])])


def _squares(params: Any, target: Tensor) -> Tensor:
    return (params["w"] - target).pow(4).sum() + (params["w"] - target).square().sum()


def test_first_order_leaves_the_proximal_term() -> None:
    """The initial weights then have the gradient of the adapted ones."""
    start = {"w": torch.tensor([1.0, -0.5], requires_grad=True)}
    step = il.inner_step(_squares, il.optim.sgd(lr=0.05), first_order=True)
    batches = [torch.tensor([0.2, 0.3])] * 300
    how = implicit("cg", proximal=1.5)
    final, _ = il.unroll(step, il.State(start), il.Meta(), batches, backward=how)
    (grad,) = torch.autograd.grad(final.params["w"].square().sum(), [start["w"]])
    assert_same([grad], [2 * final.params["w"].detach()])


def test_first_order_without_a_proximal_term_is_refused() -> None:
    target = torch.tensor([0.2, 0.3], requires_grad=True)
    step = il.inner_step(_squares, il.optim.sgd(lr=0.05), first_order=True)
    start = il.State({"w": torch.tensor([1.0, -0.5])})
    final, _ = il.unroll(step, start, il.Meta(), [target] * 300, backward=il.Implicit())
    with pytest.raises(il.RequirementError, match="first_order=True"):
        final.params["w"].sum().backward()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_batches_that_leave_weights_out(order: list[int]) -> None:
    """a = φ by batch 0, b = φ² by batch 1; batch 2 trains both."""
    phi = torch.tensor([1.0, 2.0], requires_grad=True)

    def loss(params: Any, batch: int, parts: Any) -> Tensor:
        first = (params["a"] - parts["phi"]).square().sum()
        second = 1.5 * (params["b"] - parts["phi"] ** 2).square().sum()
        return (first, second, first + second)[batch]

    start = {"a": torch.zeros(2), "b": torch.zeros(2)}
    rule = il.optim.sgd(lr=0.2)
    batches = order * 60
    final = converged(loss, start, il.Meta(loss={"phi": phi}), batches, implicit("cg"), rule)
    (grad,) = torch.autograd.grad(final.params["a"].sum() + final.params["b"].sum(), [phi])
    assert_same([grad], [1 + 2 * phi.detach()])


def test_first_order_where_only_some_weights_decay_is_refused() -> None:
    decay = torch.tensor(0.5, requires_grad=True)
    model = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
    groups = [{"params": [model["a"]], "weight_decay": 0.5}, {"params": [model["b"]]}]

    def loss(model: Any, batch: Tensor) -> Tensor:
        return sum((model[name] - batch).square().sum() for name in ("a", "b"))

    inner = il.InnerLoop(
        model,
        torch.optim.SGD(groups, lr=0.2),
        loss,
        learn=("weight_decay",),
        backward=il.Implicit("gmres", iterations=3),
        first_order=True,
    )
    with pytest.raises(il.RequirementError, match="first_order=True"):
        inner([torch.zeros(2) + decay.detach()] * 100, torch.ones(2)).backward()


def test_truncation_with_a_proximal_term_is_refused() -> None:
    with pytest.raises(il.InnerLoopError, match="proximal"):
        il.Truncated(3, within=il.Implicit(proximal=1.0))

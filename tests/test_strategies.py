"""Problems x optimizers x strategies: all as the tape, which is as differences.

Values, final weights and final buffers of the tape are those of plain torch training, and its
derivatives the differences of that. Remat and Forward are held to the tape on every row, further
orders of visits on three.
"""

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim

import innerloop as il
from inner_problems import NORMS, PROBLEMS, Built, Problem
from optimizers import Row
from strategies import ALL, apart, assert_same
from test_optim import _newton_schulz_in_own_dtype

TO_TORCH = 1e-12
"""Relative distance to plain training: some hundred roundings in float64."""

TO_DIFFERENCES = 1e-6

ON_EVERY_PROBLEM = {
    "SGD": Row("SGD", optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": Row("Adam", optim.Adam, {"lr": 0.05, "betas": (0.8, 0.9)}),
    "RMSprop": Row("RMSprop", optim.RMSprop, {"lr": 0.02, "alpha": 0.8, "momentum": 0.5}),
    "Muon": Row("Muon", optim.Muon, {"lr": 0.05, "momentum": 0.8}),
}
ON_ONE = {
    "AdamW": Row("AdamW", optim.AdamW, {"lr": 0.05, "betas": (0.8, 0.9)}),
    "Adamax": Row("Adamax", optim.Adamax, {"lr": 0.05, "betas": (0.7, 0.6)}),
    "NAdam": Row("NAdam", optim.NAdam, {"lr": 0.05, "betas": (0.8, 0.9)}),
    "RAdam": Row("RAdam", optim.RAdam, {"lr": 0.05, "betas": (0.8, 0.9)}),
    "Adagrad": Row("Adagrad", optim.Adagrad, {"lr": 0.1, "lr_decay": 0.2}),
    "Adadelta": Row("Adadelta", optim.Adadelta, {"lr": 0.5, "rho": 0.7, "eps": 0.01}),
    "Rprop": Row("Rprop", optim.Rprop, {"lr": 0.03, "etas": (0.4, 1.3)}),
    "ASGD": Row("ASGD", optim.ASGD, {"lr": 0.1, "lambd": 0.2, "t0": 1.5}),
    "Adafactor": Row("Adafactor", optim.Adafactor, {"lr": 0.1, "beta2_decay": -0.5}),
    "LBFGS": Row("LBFGS", optim.LBFGS, {"lr": 0.1, "max_iter": 3}),
}
OPTIMIZERS = ON_EVERY_PROBLEM | ON_ONE

MEMORY = {
    "SGD": "momentum",
    "Muon": "momentum",
    "RMSprop": "alpha",
    "Adagrad": "lr_decay",
    "Adadelta": "rho",
    "Rprop": "etas",
    "ASGD": "lambd",
    "Adafactor": "beta2_decay",
    "LBFGS": None,
}
"""The setting, beside the rate, through which a rule weighs its past; betas where not named."""


# A case: one problem with one optimizer, and what is learned. -----------------------------------


class Case(NamedTuple):
    problem: str
    optimizer: str
    learn: str

    def __str__(self) -> str:
        return "-".join(self)


def choices(problem: str, optimizer: str) -> list[str]:
    memory = MEMORY.get(optimizer, "betas")
    return [
        "init",
        "lr",
        *([memory] if memory else []),
        *(["loss"] if problem == "learned_loss" else []),
        "everything",
    ]


ROWS = [(p, o) for p in PROBLEMS for o in ON_EVERY_PROBLEM] + [("mlp", o) for o in ON_ONE]
SHAPED = [Case(p, "SGD", "loss") for p in PROBLEMS if p != "learned_loss"]
CASES = [*(Case(p, o, "everything") for p, o in ROWS), *SHAPED]
PARTS = [Case("mlp", "Adam", "everything"), Case("learned_loss", "SGD", "everything")]
"""Those of which each part is learned alone as well."""


class Shaped(nn.Module):
    """An ordinary loss with parameters of its own around it."""

    def __init__(self, ordinary: Any) -> None:
        super().__init__()
        self.ordinary = ordinary
        self.weight = nn.Parameter(torch.tensor(1.3))
        self.pull = nn.Parameter(torch.tensor(-2.0))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        norm = sum(p.square().sum() for p in model.parameters())
        return self.weight * self.ordinary(model, batch) + self.pull.exp() * norm


each_case = pytest.mark.parametrize("case", CASES, ids=str)


class Ready(NamedTuple):
    """A problem with its optimizer, freshly built, and where the learned leaves start."""

    problem: Problem
    row: Row
    built: Built
    optimizer: optim.Optimizer
    leaves: dict[str, Tensor]

    @property
    def val_loss(self) -> Any:
        return self.problem.val_loss or self.built.loss

    @property
    def train(self) -> list[Any]:
        # LBFGS compares gradients of two steps, which has a meaning only for one and the same loss.
        return [self.built.train[0]] * 2 if self.row.one_group else self.built.train


def ready(case: Case) -> Ready:
    torch.manual_seed(0)
    problem, row = (PROBLEMS | NORMS)[case.problem], OPTIMIZERS[case.optimizer]
    built = problem.build()
    if case.learn == "loss" and not isinstance(built.loss, nn.Module):
        problem = problem._replace(val_loss=built.loss)
        built = built._replace(loss=Shaped(built.loss))
    named = il.functional(built.model).params
    moving = [
        p
        for name, p in named.items()
        if name not in problem.left_out and not (row.matrices_only and p.dim() != 2)
    ]
    extra = {"ns_dtype": torch.float64} if row.matrices_only else {}
    optimizer = row.kind([{"params": moving, **extra}], **row.settings)
    leaves = {f"init {name}": p.detach().clone() for name, p in named.items()}
    for name in (n for n in choices(*case[:2]) if n in optimizer.param_groups[0]):
        leaves[name] = torch.tensor(optimizer.param_groups[0][name], dtype=torch.float64)
    if isinstance(built.loss, nn.Module):
        leaves |= {f"loss {name}": p.detach().clone() for name, p in named_of(built.loss).items()}
    chosen = {
        name: leaf
        for name, leaf in leaves.items()
        if case.learn == "everything" or name.split()[0] == case.learn
    }
    return Ready(problem, row, built, optimizer, chosen)


def named_of(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def part(leaves: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The leaves whose name starts so, under the rest of their names."""
    return {
        name.removeprefix(prefix).strip(): leaf
        for name, leaf in leaves.items()
        if name.startswith(prefix)
    }


def settings(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in leaves.items() if " " not in name}


# The library, and plain torch. ------------------------------------------------------------------


class Outcome(NamedTuple):
    value: Tensor
    losses: Tensor
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    grads: dict[str, Tensor]


def by_strategy(case: Case, backward: Any) -> Outcome:
    """The measured loss, and its gradient with respect to every learned leaf."""
    given = ready(case)
    leaves = {name: leaf.requires_grad_() for name, leaf in given.leaves.items()}
    f = il.functional(given.built.model)
    params = {n: p.detach() for n, p in f.params.items()} | part(leaves, "init ")
    rule = il.optim.from_torch(given.optimizer, f.params)
    step = il.inner_step(given.built.loss, rule, given.built.model)
    start = il.State(params, f.buffers, rule.init(params))
    learned = isinstance(given.built.loss, nn.Module)
    weights = {n: p.detach() for n, p in named_of(given.built.loss).items()} if learned else {}
    meta = il.Meta(opt=settings(leaves), loss=weights | part(leaves, "loss "))
    torch.manual_seed(1)
    state, losses = il.unroll(step, start, meta, given.train, backward=backward)
    value = given.val_loss(f.bind(state.params, state.buffers), given.built.val)
    grads = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return Outcome(
        value, losses, state.params, state.buffers, dict(zip(leaves, grads, strict=True))
    )


@functools.cache
def by_tape(case: Case) -> Outcome:
    return by_strategy(case, il.Tape())


def by_torch(case: Case, leaves: dict[str, Tensor]) -> Outcome:
    """Plain training with the values of `leaves` put where they belong."""
    given = ready(case)
    model, optimizer = given.built.model, given.optimizer
    with torch.no_grad():
        for module, prefix in ((model, "init "), (given.built.loss, "loss ")):
            for name, value in part(leaves, prefix).items():
                module.get_parameter(name).copy_(value)
    for name, value in settings(leaves).items():
        optimizer.param_groups[0][name] = tuple(value.tolist()) if value.dim() else value.item()
    torch.manual_seed(1)
    losses = torch.stack([_torch_step(given, batch) for batch in given.train])
    params = {n: p.detach() for n, p in il.functional(model).params.items()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    value = given.val_loss(model, given.built.val).detach()
    return Outcome(value, losses, params, buffers, {})


def _torch_step(given: Ready, batch: Any) -> Tensor:
    model, optimizer = given.built.model, given.optimizer

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = given.built.loss(model, batch)
        loss.backward()
        return loss

    if given.row.one_group:
        return optimizer.step(closure).detach()
    loss = closure()
    optimizer.step()
    return loss.detach()


@pytest.fixture
def smooth_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Muon without its rounding to bfloat16."""
    monkeypatch.setattr(
        "torch.optim._muon._zeropower_via_newtonschulz", _newton_schulz_in_own_dtype
    )


# The table. -------------------------------------------------------------------------------------


@each_case
def test_tape_is_plain_training(case: Case, smooth_muon: None) -> None:
    tape = by_tape(case)
    plain = by_torch(case, ready(case).leaves)
    assert_same([tape.value, tape.losses], [plain.value, plain.losses], TO_TORCH)
    assert tape.params.keys() == plain.params.keys()
    assert_same(tape.params.values(), plain.params.values(), TO_TORCH)
    assert tape.buffers.keys() == plain.buffers.keys()
    assert_same(tape.buffers.values(), plain.buffers.values(), TO_TORCH)


@each_case
def test_tape_is_finite_differences(case: Case, smooth_muon: None) -> None:
    """Along two random directions, if there is more than one."""
    start, grads = ready(case).leaves, by_tape(case).grads
    for seed in range(min(2, sum(leaf.numel() for leaf in start.values()))):
        torch.manual_seed(seed + 10)
        direction = {name: torch.randn_like(leaf) for name, leaf in start.items()}
        slope = sum((grads[name] * direction[name]).sum() for name in start)
        expected = slope_of_differences(
            lambda t, d=direction: by_torch(case, {n: v + t * d[n] for n, v in start.items()}).value
        )
        assert apart(slope, torch.tensor(expected)) < TO_DIFFERENCES, (slope, expected)


@pytest.mark.parametrize("backward", ALL, ids=repr)
@pytest.mark.parametrize("case", PARTS, ids=str)
def test_learning_each_is_learning_everything(case: Case, backward: Any) -> None:
    together = by_tape(case).grads
    alone: dict[str, Tensor] = {}
    for learn in choices(*case[:2])[:-1]:
        alone |= by_strategy(case._replace(learn=learn), backward).grads
    assert together.keys() == alone.keys()
    assert_same([together[name] for name in alone], alone.values())


def slope_of_differences(f: Any) -> float:
    """The derivative of `f` at 0, to fourth order.

    Of several widths the one that agrees best with the next decides (Ridders, 1982), so that
    neither a sharp bend nor rounding does.
    """
    found = []
    for width in (2e-4, 2e-5, 2e-6):
        one, two = ((f(k * width) - f(-k * width)).item() for k in (1, 2))
        found.append((8 * one - two) / (12 * width))
    gaps = [abs(a - b) for a, b in itertools.pairwise(found)]
    return found[gaps.index(min(gaps)) + 1]


FURTHER = [
    il.Remat(every=2),
    il.Binomial(1),
    il.Binomial(2),
    il.Truncated(1000, within=il.Remat()),
    il.Auto("1GB"),
]
FOR_FURTHER = [
    Case("convolution", "Adam", "everything"),
    Case("dropout", "SGD", "everything"),
    Case("learned_loss", "RMSprop", "everything"),
]
FOLLOWED = [
    *itertools.product(CASES, [il.Remat(), il.Forward()]),
    *itertools.product(FOR_FURTHER, FURTHER),
]


@pytest.mark.parametrize(("case", "backward"), FOLLOWED, ids=str)
def test_strategy_is_the_tape(case: Case, backward: Any) -> None:
    actual, tape = by_strategy(case, backward), by_tape(case)
    assert_same([actual.value, actual.losses], [tape.value, tape.losses])
    assert_same(actual.grads.values(), tape.grads.values())
    assert_same(actual.params.values(), tape.params.values())
    assert actual.buffers.keys() == tape.buffers.keys()
    assert_same(actual.buffers.values(), tape.buffers.values())


@each_case
def test_inner_loop_is_the_tape(case: Case) -> None:
    """The module over the same parts, its meta-parameters in the place of the leaves."""
    given = ready(case)
    learned = [n for n in choices(*case[:2]) if case.learn in (n, "everything")]
    inner = il.InnerLoop(
        given.built.model,
        given.optimizer,
        given.built.loss,
        learn=tuple(n for n in learned if n not in ("loss", "everything")),
        backward=il.Remat(),
        val_loss=given.problem.val_loss,
    )
    torch.manual_seed(1)
    value = inner(given.train, given.built.val)
    tape = by_tape(case)
    assert_same([value], [tape.value])
    owned = phi(inner)
    moving = {name: grad for name, grad in tape.grads.items() if name in owned}
    frozen = {f"init {n}" for n, p in given.built.model.named_parameters() if not p.requires_grad}
    assert tape.grads.keys() - moving.keys() <= frozen
    leaves = [owned[name] for name in moving]
    grads = torch.autograd.grad(value, leaves, materialize_grads=True)
    found = [g.reshape(e.shape) for g, e in zip(grads, moving.values(), strict=True)]
    assert_same(found, moving.values())


def phi(inner: il.InnerLoop) -> dict[str, Tensor]:
    """The meta-parameters of a loop under the names of the table."""
    prefixes = {"model.": "init ", "settings.": "", "loss.": "loss "}
    return {
        prefixes[whole[: len(name)]] + whole.removeprefix(name): p
        for whole, p in inner.named_parameters()
        for name in prefixes
        if whole.startswith(name) and p.requires_grad
    }


# The quadratic by hand. -------------------------------------------------------------------------


@pytest.mark.parametrize("backward", ALL, ids=repr)
def test_quadratic_is_as_derived_by_hand(backward: Any) -> None:
    r"""Two steps of SGD with momentum on ½ c (w - t)², elementwise, measured with c' and t'.

    With g₀ = c₀ (w₀ - t₀), w₁ = w₀ - γ g₀, g₁ = c₁ (w₁ - t₁) and w₂ = w₁ - γ (μ g₀ + g₁)::

        dw₂/dw₀ = (1 - γ c₀) - γ (μ c₀ + c₁ (1 - γ c₀))
        dw₂/dγ  = -g₀ - (μ g₀ + g₁) + γ c₁ g₀
        dw₂/dμ  = -γ g₀
        dL/d·   = Σ c' (w₂ - t') dw₂/d·
    """
    built = PROBLEMS["quadratic"].build()
    lr, momentum = (torch.tensor(v, requires_grad=True) for v in (0.1, 0.9))
    weight = built.model.weight.detach().requires_grad_()
    rule = il.optim.sgd(lr=0.5, momentum=0.5)
    step = il.inner_step(built.loss, rule, built.model)
    start = il.State({"weight": weight}, {}, rule.init({"weight": weight}))
    meta = il.Meta(opt={"lr": lr, "momentum": momentum})
    state, _ = il.unroll(step, start, meta, built.train[:2], backward=backward)
    bound = il.functional(built.model).bind(state.params)
    grads = torch.autograd.grad(built.loss(bound, built.val), [weight, lr, momentum])

    with torch.no_grad():
        (c0, t0), (c1, t1), (c, t) = *built.train[:2], built.val
        g0 = c0 * (weight - t0)
        w1 = weight - lr * g0
        g1 = c1 * (w1 - t1)
        w2 = w1 - lr * (momentum * g0 + g1)
        by_weight = (1 - lr * c0) - lr * (momentum * c0 + c1 * (1 - lr * c0))
        by_lr = -g0 - (momentum * g0 + g1) + lr * c1 * g0
        by_momentum = -lr * g0
        outer = c * (w2 - t)
        expected = [outer * by_weight, (outer * by_lr).sum(), (outer * by_momentum).sum()]
    assert_same([state.params["weight"], *grads], [w2, *expected], 1e-13)

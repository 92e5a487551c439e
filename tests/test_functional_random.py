"""Random small module trees: a replica does what the original would, and leaves it alone.

A tree is drawn as plain data, and built from it twice: once to be replicated, once as the reference
that plain torch runs with the same weights.
"""

import torch
import torch.nn.functional as F
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn

import innerloop as il
from problems import flat
from test_functional import assert_untouched, fingerprint

WIDTH = 6


class Scale(nn.Module):
    """A bare parameter and two buffers, one written in place and one replaced in every call."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x):
        self.calls.add_(1)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x * self.factor + 0.1 * self.calls


class Residual(nn.Module):
    def __init__(self, *children):
        super().__init__()
        self.branches = nn.ModuleList(children)
        self.unused = None

    def forward(self, x):
        return x + sum(branch(x) for branch in self.branches)


class ByName(nn.Module):
    """Submodules as attributes, reached by a list of bound methods that is not part of the tree."""

    def __init__(self, *children):
        super().__init__()
        for i, child in enumerate(children):
            setattr(self, f"part{i}", child)
        self.order = [child.forward for child in reversed(children)]

    def forward(self, x):
        for part in self.order:
            x = torch.tanh(part(x))
        return x


class ReadsWeights(nn.Module):
    """Uses the weights of what is below it, and a hook on its first child."""

    def __init__(self, *children):
        super().__init__()
        self.below = nn.ModuleDict({f"c{i}": child for i, child in enumerate(children)})
        children[0].register_forward_hook(self.shifted)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def shifted(self, module, args, output):
        return output + self.bias

    def forward(self, x):
        for child in self.below.values():
            x = child(x) + 0.1 * sum(p.sum().tanh() for p in child.parameters())
        return x


class Tied(nn.Module):
    """A layer whose weight is that of another one, transposed."""

    def __init__(self, other):
        super().__init__()
        self.weight = other.weight
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return F.linear(x, self.weight.t(), self.bias)


LEAVES = {
    "linear": lambda flag: nn.Linear(WIDTH, WIDTH, bias=flag),
    "batch_norm": lambda flag: nn.BatchNorm1d(WIDTH, affine=flag),
    "batch_norm_without_statistics": lambda flag: nn.BatchNorm1d(
        WIDTH, track_running_stats=False, affine=flag
    ),
    "cumulative_batch_norm": lambda flag: nn.BatchNorm1d(WIDTH, momentum=None, affine=flag),
    "layer_norm": lambda flag: nn.LayerNorm(WIDTH, elementwise_affine=flag),
    "group_norm": lambda flag: nn.GroupNorm(2, WIDTH, affine=flag),
    "scale": lambda flag: Scale(),
    "silu": lambda flag: nn.SiLU(),
    "tanh": lambda flag: nn.Tanh(),
    "dropout": lambda flag: nn.Dropout(0.0),
}
PARENTS = {
    "sequential": nn.Sequential,
    "residual": Residual,
    "by_name": ByName,
    "reads_weights": ReadsWeights,
}

made = st.tuples(st.sampled_from(sorted(LEAVES)), st.booleans())
leaves = st.one_of(
    made,
    made,
    made,
    st.tuples(st.just("reuse"), st.integers(0, 30)),
    st.tuples(st.just("tie"), st.integers(0, 30)),
)
trees = st.recursive(
    leaves,
    lambda children: st.tuples(
        st.sampled_from(sorted(PARENTS)), st.lists(children, min_size=1, max_size=3)
    ),
    max_leaves=8,
)
plans = st.fixed_dictionaries(
    {
        "tree": trees,
        "seed": st.integers(0, 1000),
        "frozen": st.sets(st.integers(0, 15)),
        "training": st.booleans(),
        "flipped": st.sets(st.integers(0, 15), max_size=3),
    }
)


def build(plan):
    torch.manual_seed(plan["seed"])
    built = []

    def make(node):
        kind, detail = node
        if kind == "reuse" and built:
            return built[detail % len(built)]
        if kind in PARENTS:
            module = PARENTS[kind](*[make(child) for child in detail])
        elif kind == "tie" and any(type(m) is nn.Linear for m in built):
            linears = [m for m in built if type(m) is nn.Linear]
            module = Tied(linears[detail % len(linears)])
        else:
            module = LEAVES[kind if kind in LEAVES else "linear"](bool(detail))
        built.append(module)
        return module

    model = nn.Sequential(nn.Linear(3, WIDTH), make(plan["tree"]), nn.Linear(WIDTH, 2))
    model.train(plan["training"])
    inner = list(model[1].modules())
    for i in plan["flipped"]:
        inner[i % len(inner)].training ^= True
    weights = list(model[1].parameters())
    for i in plan["frozen"]:
        if weights:
            weights[i % len(weights)].requires_grad_(False)
    return model


def kinds_in(node):
    kind, detail = node
    return {kind}.union(*map(kinds_in, detail)) if isinstance(detail, list) else {kind}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def value_and_derivatives(outputs, weights, directions):
    """A scalar of some outputs, its gradient, and its Hessian times a direction."""
    value = sum(output.sin().mean() for output in outputs)
    grads = torch.autograd.grad(value, weights, create_graph=True, materialize_grads=True)
    inner = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
    product = torch.autograd.grad(inner, weights, materialize_grads=True)
    return value, flat(grads), flat(product)


class Case:
    """A drawn model, the reference with other weights, and those weights for the replica."""

    def __init__(self, plan):
        for kind in sorted(kinds_in(plan["tree"])):
            event(kind)
        self.model, self.plain = build(plan), build(plan)
        assert torch.equal(flat(self.model.parameters()), flat(self.plain.parameters()))
        self.x = [torch.randn(5, 3) for _ in range(2)]
        with torch.no_grad():
            for p in self.plain.parameters():
                p.add_(0.1 * torch.randn_like(p))
        self.weights = {
            name: p.detach().clone().requires_grad_(p.requires_grad)
            for name, p in self.plain.named_parameters()
        }
        self.directions = [torch.randn_like(p) for p in self.learned(self.weights.values())]
        self.before = fingerprint(self.model)

    @staticmethod
    def learned(weights):
        return [w for w in weights if w.requires_grad]

    def check(self, replica):
        """Two calls, so that buffers have evolved between them."""
        actual = value_and_derivatives(
            [replica(x) for x in self.x], self.learned(self.weights.values()), self.directions
        )
        expected = value_and_derivatives(
            [self.plain(x) for x in self.x], self.learned(self.plain.parameters()), self.directions
        )
        for one, other in zip(actual, expected, strict=True):
            close(one, other)
        self.check_buffers(replica)

    def check_buffers(self, replica):
        actual, expected = (dict(module.named_buffers()) for module in (replica, self.plain))
        assert actual.keys() == expected.keys()
        for name, buffer in expected.items():
            close(actual[name], buffer)
        assert_untouched(self.model, self.before)


@given(plans)
@settings(max_examples=120)
def test_a_bound_replica_of_any_tree(plan):
    case = Case(plan)
    f = il.functional(case.model)
    assert list(f.params) == list(case.weights)
    case.check(f.bind(case.weights))


@given(plans)
@settings(max_examples=120)
def test_a_patched_model_of_any_tree(plan):
    case = Case(plan)
    fmodel = il.monkeypatch(case.model)
    fmodel.update_params(case.weights.values())
    case.check(fmodel)


@given(plans)
@settings(max_examples=80)
def test_an_inner_loop_over_any_tree(plan):
    case = Case(plan)
    case.plain.load_state_dict(case.model.state_dict())
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01, momentum=0.9)
    with il.innerloop_ctx(case.model, optimizer) as (fmodel, diffopt):
        for x in case.x:
            diffopt.step(fmodel(x).sin().mean())
    reference = torch.optim.SGD(case.plain.parameters(), lr=0.01, momentum=0.9)
    for x in case.x:
        reference.zero_grad()
        case.plain(x).sin().mean().backward()
        reference.step()
    close(flat(fmodel.parameters()), flat(case.plain.parameters()))
    case.check_buffers(fmodel)

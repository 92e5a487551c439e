"""Ways to run tasks on random nets, numbers of tasks and steps: always the loop's gradient."""

import collections
import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn, optim

import innerloop as il
from inner_problems import squares
from ways import assert_same, gradients

ACTIVATIONS = [nn.Tanh, nn.Softplus, nn.GELU, nn.SiLU]
OPTIMIZERS = [
    lambda params: optim.SGD(params, lr=0.1, momentum=0.5),
    lambda params: optim.Adam(params, lr=0.05, betas=(0.8, 0.9)),
    lambda params: optim.RMSprop(params, lr=0.02, alpha=0.8),
    lambda params: optim.AdamW(params, lr=0.05, amsgrad=True),
]
STRATEGIES = [il.Tape(), il.Remat(), il.Remat(every=2), il.Binomial(2), il.Truncated(100)]


@st.composite
def nets(draw):
    """An MLP as layers' sizes, with norms after some of them."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    activation = draw(st.sampled_from(ACTIVATIONS))
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise(sizes)):
        normed = i < len(sizes) - 2 and draw(st.booleans())
        layers.append(nn.Linear(before, after, bias=not normed))
        if normed:
            affine, tracked = draw(st.booleans()), draw(st.booleans())
            layers.append(nn.BatchNorm1d(after, affine=affine, track_running_stats=tracked))
        layers.append(activation())
    return nn.Sequential(*layers), sizes[0], sizes[-1]


@st.composite
def situations(draw):
    torch.manual_seed(draw(st.integers(0, 1000)))
    model, inputs, outputs = draw(nets())
    optimizer = draw(st.sampled_from(OPTIMIZERS))(model.parameters())
    learn = draw(st.sampled_from([("init",), ("lr",), ("init", "lr")]))
    backward = draw(st.sampled_from(STRATEGIES))
    inner = il.InnerLoop(model.double(), optimizer, squares, learn=learn, backward=backward)
    tasks, steps = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    examples = draw(st.integers(2, 6))

    def batch():
        return torch.randn(tasks, examples, inputs), torch.randn(tasks, examples, outputs)

    repeated = draw(st.booleans())
    first = batch()
    train = [first if repeated else batch() for _ in range(steps)]
    return inner, train, batch(), torch.randn(tasks)


def outcome(inner, train, val, weights, way):
    losses = inner(train, val, tasks=way)
    return [losses], gradients((losses * weights).sum(), inner)


@pytest.mark.parametrize("name", ["vmap", "threads", "auto"])
def test_any_net_by_any_way(name):
    """A way that falls back to the loop warns, which is an error: every net is accepted."""
    tried = collections.Counter()

    @given(situations())
    @settings(max_examples=10)
    def check(situation):
        *call, weights = situation
        losses, grads = outcome(*call, weights, getattr(il.tasks, name)())
        expected_losses, expected = outcome(*call, weights, il.tasks.loop())
        assert_same(losses, expected_losses)
        assert_same(grads, expected)
        tried[call[0].backward] += 1

    check()
    assert tried.total() >= 10 and len(tried) >= 3, tried


def test_any_net_compiled():
    accepted = collections.Counter()

    @given(situations(), st.sampled_from(["whole", "step"]))
    @settings(max_examples=4)
    def check(situation, unit):
        inner, train, val, weights = situation
        expected_losses, expected = outcome(inner, train[:2], val, weights, il.tasks.loop())
        inner.compile(unit, backend="eager")
        losses, grads = outcome(inner, train[:2], val, weights, True)
        assert inner.compiler.refused is None or isinstance(inner.backward, il.Truncated)
        assert_same(losses, expected_losses)
        assert_same(grads, expected)
        accepted[inner.compiler.refused is None] += 1

    check()
    assert accepted[True] >= 3, accepted

"""Ways to run tasks, and compiled programs, against the plain loop where a loss or a model does
more than compute with its tensors: it must be noticed, never silently different."""

from __future__ import annotations

import collections
import contextvars
import random
import types
import warnings

import numpy
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

import innerloop as il

SHARED = types.ModuleType("shared_settings")


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def drawn(*lead: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*lead, 5, 3), torch.randn(*lead, 5, 2)


def loop_of(model: nn.Module, loss, **options) -> il.InnerLoop:
    return il.InnerLoop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **options)


def found(inner: il.InnerLoop, *args, **options) -> list[Tensor]:
    inner.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = inner(*args, **options)
    losses.sum().backward()
    return [losses.detach(), *(p.grad.clone() for p in inner.parameters() if p.grad is not None)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def compiled_and_not(model, loss, unit="whole", **options) -> tuple[il.InnerLoop, il.InnerLoop]:
    first, second = (loop_of(model, loss, **options) for _ in range(2))
    first.compile(unit, backend="eager")
    return first, second


# Padding of embeddings. -------------------------------------------------------------------------


class Padded(nn.Module):
    def __init__(self, by: str) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, padding_idx=0)
        self.linear = nn.Linear(8, 2)
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        rows = {
            "layer": lambda: self.table(x),
            "function": lambda: F.embedding(x, self.table.weight, -5),
            "torch.embedding": lambda: torch.embedding(self.table.weight, x, 0),
        }[self.by]()
        return self.linear(rows.flatten(1))


@pytest.mark.parametrize("by", ["layer", "function", "torch.embedding"])
@pytest.mark.parametrize("way", [il.tasks.vmap(), il.tasks.threads(2), il.tasks.auto()], ids=str)
def test_padding_does_not_move(by: str, way) -> None:
    torch.manual_seed(0)
    model = Padded(by)
    batch = torch.randint(0, 5, (3, 6, 2)), torch.randn(3, 6, 2)
    inner = loop_of(model, squared)
    expected = found(inner, [batch] * 3, batch, tasks=il.tasks.loop())
    assert model.table.weight.grad[0].abs().sum() == 0
    assert_same(found(inner, [batch] * 3, batch, tasks=way), expected)


@pytest.mark.parametrize(("by", "unit"), [("layer", "whole"), ("torch.embedding", "step")])
def test_padding_compiled(by: str, unit: str) -> None:
    torch.manual_seed(0)
    compiled, plain = compiled_and_not(Padded(by), squared, unit)
    batch = torch.randint(0, 5, (3, 6, 2)), torch.randn(3, 6, 2)
    ours = found(compiled, [batch] * 3, batch, tasks=il.tasks.vmap())
    assert_same(ours, found(plain, [batch] * 3, batch, tasks=il.tasks.loop()))


def test_an_embedding_without_padding_moves_everywhere() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(5, 4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return torch.embedding(model.weight, x).square().mean()

    inner, x = loop_of(table, loss), torch.arange(5).expand(2, 5)
    expected = found(inner, [x] * 2, x, tasks=il.tasks.loop())
    assert table.weight.grad.abs().sum(1).min() > 0
    assert_same(found(inner, [x] * 2, x, tasks=il.tasks.vmap()), expected)


def test_padding_by_forward_mode() -> None:
    torch.manual_seed(0)
    model = Padded("layer")
    batch = torch.randint(0, 5, (6, 2)), torch.randn(6, 2)
    expected = found(loop_of(model, squared), [batch] * 2, batch)
    assert_same(found(loop_of(model, squared, backward=il.Forward()), [batch] * 2, batch), expected)


# Attention. -------------------------------------------------------------------------------------


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.attention(x, x, x, need_weights=False)[0].mean(1))


def test_attention_in_eval_mode_is_batched() -> None:
    torch.manual_seed(0)
    before = torch.backends.mha.get_fastpath_enabled()
    inner = loop_of(Attentive().eval(), squared)
    batch = torch.randn(3, 5, 4, 4), torch.randn(3, 5, 2)
    expected = found(inner, [batch] * 2, batch, tasks=il.tasks.loop())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = inner([batch] * 2, batch, tasks=il.tasks.vmap())
    torch.testing.assert_close(losses.detach(), expected[0])
    assert_same(found(inner, [batch] * 2, batch, tasks=True), expected)
    assert torch.backends.mha.get_fastpath_enabled() == before


# Random numbers that are not torch's own. -------------------------------------------------------

GENERATOR = torch.Generator()
DRAWS = {
    "generator": (
        lambda: torch.rand((), generator=GENERATOR),
        lambda: GENERATOR.manual_seed(0),
    ),
    "numpy": (lambda: float(numpy.random.rand()), lambda: numpy.random.seed(0)),
    "python": (random.random, lambda: random.seed(0)),
}


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("way", ["threads", "vmap", "auto"])
def test_draws_outside_torch_run_in_a_loop(kind: str, way: str) -> None:
    draw, seed = DRAWS[kind]
    inner = loop_of(small(), lambda m, b: squared(m, b) * (1 + draw()))
    batch = drawn(4)
    seed()
    expected = found(inner, [batch] * 2, batch, tasks=il.tasks.loop())
    seed()
    assert_same(found(inner, [batch] * 2, batch, tasks=getattr(il.tasks, way)()), expected)


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_outside_torch_are_not_compiled(kind: str) -> None:
    draw, seed = DRAWS[kind]
    compiled, plain = compiled_and_not(small(), lambda m, b: squared(m, b) * (1 + draw()))
    batch = drawn()
    seed()
    expected = [found(plain, [batch] * 2, batch) for _ in range(2)]
    seed()
    for one in expected:
        assert_same(found(compiled, [batch] * 2, batch), one)
    assert compiled.compiler.refused is not None


# Weights in other memory. -----------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "learn"), [("whole", ("init", "lr")), ("step", ("lr",))])
def test_weights_may_be_put_into_other_memory(unit: str, learn: tuple[str, ...]) -> None:
    model = small()
    compiled, plain = compiled_and_not(model, squared, unit, learn=learn)
    batch = drawn()
    found(compiled, [batch] * 2, batch)
    nn.utils.vector_to_parameters(torch.randn(26), model.parameters())
    expected = found(plain, [batch] * 2, batch)
    assert_same(found(compiled, [batch] * 2, batch), expected)
    model.float()
    single = tuple(t.float() for t in batch)
    again = il.InnerLoop(model, torch.optim.SGD(model.parameters(), lr=0.1), squared, learn=learn)
    ours, theirs = (found(i, [single] * 2, single)[0] for i in (compiled, again))
    torch.testing.assert_close(ours, theirs)


# Values that a loss looks at. -------------------------------------------------------------------

LOOKS = {
    "numpy of a prediction": lambda m, b: (
        float((m(b[0]).detach().numpy() ** 2).sum()) * squared(m, b)
    ),
    "list of data": lambda m, b: sum(b[1][0].tolist()) * squared(m, b),
    "unique": lambda m, b: len((b[1] > 0).unique(dim=0)) * squared(m, b),
    "mask": lambda m, b: m(b[0])[b[1] > 0].square().mean(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_looks_at_values_follow_the_data(look: str) -> None:
    torch.manual_seed(0)
    compiled, plain = compiled_and_not(small(), LOOKS[look])
    for _ in range(3):
        batch = drawn()
        expected = found(plain, [batch] * 2, batch)
        assert_same(found(compiled, [batch] * 2, batch), expected)


# What a loss reads from elsewhere. --------------------------------------------------------------

ARRAY = numpy.ones(3)
QUEUE = collections.deque([1.0])


class Held:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def of_module(m, b):
    return SHARED.factor * squared(m, b)


def of_array(m, b):
    return float(ARRAY[0]) * squared(m, b)


def of_queue(m, b):
    return QUEUE[0] * squared(m, b)


def change_array() -> None:
    ARRAY[0] += 1


def change_module() -> None:
    SHARED.factor += 1


VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)


def of_variable(m, b):
    return VARIABLE.get() * squared(m, b)


CHANGES = {
    "variable": (of_variable, lambda: VARIABLE.set(VARIABLE.get() + 1)),
    "module": (of_module, change_module),
    "array": (of_array, change_array),
    "queue": (of_queue, lambda: QUEUE.appendleft(QUEUE[0] + 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_elsewhere_are_noticed(change: str) -> None:
    SHARED.factor = 1.0
    loss, act = CHANGES[change]
    compiled, plain = compiled_and_not(small(), loss)
    batch = drawn()
    for _ in range(3):
        assert_same(found(compiled, [batch] * 2, batch), found(plain, [batch] * 2, batch))
        assert compiled.compiler.refused is None or change == "variable"
        act()


class Masked(nn.Module):
    """A layer, and at once a loss and an optimizer, with tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.mask, self.more = torch.ones(3), {"first": [torch.ones(3)]}
        self.strided = torch.ones(3, 2)[:, 0]

    @property
    def factor(self) -> Tensor:
        return self.mask * self.more["first"][0] * self.strided

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.factor)


class MaskedLoss(Masked):
    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squared(model, batch) * self.factor.sum()


def other_memory(mask: Masked) -> None:
    mask.mask.data = 2 * mask.mask


WRITES = {
    "written": lambda mask: mask.mask.mul_(2),
    "written by data": lambda mask: mask.mask.data.mul_(2),
    "other memory": other_memory,
    "replaced": lambda mask: setattr(mask, "mask", 2 * mask.mask),
    "in containers": lambda mask: mask.more["first"][0].mul_(2),
    "strided": lambda mask: mask.strided.mul_(2),
}


@pytest.mark.parametrize(("unit", "part"), [("whole", "model"), ("step", "loss")])
def test_tensors_that_are_no_buffers_are_noticed(unit: str, part: str) -> None:
    torch.manual_seed(0)
    model, loss = (Masked(), squared) if part == "model" else (nn.Linear(3, 2), MaskedLoss())
    compiled, plain = compiled_and_not(model, loss, unit, learn=("init",))
    batch = drawn(2)
    options = {"tasks": il.tasks.vmap()}
    for write in (lambda mask: None, *WRITES.values()):
        write(model if part == "model" else loss)
        ours = found(compiled, [batch] * 2, batch, **options)
        assert compiled.compiler.refused is None
        assert_same(ours, found(plain, [batch] * 2, batch, **options))


def test_objects_that_hold_tensors_are_seen() -> None:
    loss = lambda m, b: (m(b.x) - b.y).square().mean()  # noqa: E731
    compiled, plain = compiled_and_not(small(), loss)
    batch = Held(*drawn())
    for _ in range(2):
        assert_same(found(compiled, [batch] * 2, batch), found(plain, [batch] * 2, batch))
        batch.x, batch.y = drawn()


def test_precision_of_autocast_is_seen() -> None:
    compiled, plain = compiled_and_not(small().float(), squared)
    batch = tuple(t.float() for t in drawn())
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            ours, theirs = (found(i, [batch] * 2, batch) for i in (compiled, plain))
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-6)


class Counting:
    """A loss that changes itself."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        return squared(model, batch) * min(1, self.calls / 1000)


def test_a_loss_that_changes_itself_is_not_compiled() -> None:
    loss = Counting()
    inner = loop_of(small(), loss)
    inner.compile("whole", backend="eager")
    batch = drawn()
    with pytest.warns(UserWarning, match="cannot be compiled"):
        inner([batch] * 2, batch)
    assert inner.compiler.refused is not None
    loss.calls = 0
    ours = inner([batch] * 2, batch)
    loss.calls = 0
    assert_same([ours], [loop_of(inner.model, loss)([batch] * 2, batch)])


# What is computed again. ------------------------------------------------------------------------


def checkpointed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    again = torch.utils.checkpoint.checkpoint(model, batch[0], use_reentrant=False)
    return (again - batch[1]).square().mean()


@pytest.mark.parametrize("steps", [0, 2])
def test_checkpoints_run_in_a_loop(steps: int) -> None:
    batch = drawn(3)
    inner = loop_of(small(), checkpointed)
    expected = found(inner, [batch] * steps, batch, tasks=il.tasks.loop())
    assert_same(found(inner, [batch] * steps, batch, tasks=True), expected)
    assert_same(found(inner, [batch] * steps, batch, tasks=il.tasks.threads(2)), expected)
    with pytest.warns(UserWarning, match=r"torch\.utils\.checkpoint"):
        inner([batch] * steps, batch, tasks=il.tasks.vmap())
    assert_same(found(inner, [batch] * steps, batch, tasks=il.tasks.vmap()), expected)


def test_checkpoints_compiled() -> None:
    batch = drawn(3)
    compiled, plain = compiled_and_not(small(), checkpointed)
    ours = found(compiled, [batch] * 2, batch, tasks=il.tasks.vmap())
    assert_same(ours, found(plain, [batch] * 2, batch, tasks=il.tasks.loop()))

"""Learned losses: their meta-gradients, their use as ordinary losses, and the experiment."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import innerloop as il
from commands import flags_of, read, read_records, untimed
from innerloop.__main__ import main
from innerloop.errors import InnerLoopError
from innerloop.experiments.learned_loss import cell as learned_loss_cell
from innerloop.experiments.learned_loss.cell import Cell
from innerloop.experiments.learned_loss.problem import PROBLEMS
from innerloop.experiments.learned_loss.training import Config
from innerloop.learned import LearnedLoss

TASKS, POINTS = 3, 6


def problem(kind: str, extras: int = 0, form: str = "free", moments: int = 0, steps: int = 0):
    """A model, a learned loss, the batch of all tasks, and what the loss is judged by."""
    outputs = 1 if kind == "values" else 4
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs))
    x = torch.randn(TASKS, POINTS, 2)
    numbers = torch.randn(TASKS, POINTS, 1)
    y = numbers if kind == "values" else torch.randint(4, (TASKS, POINTS))
    more = [torch.randn(TASKS, POINTS, 1), 0.5][:extras] + [1] * bool(steps)
    task_loss = mse_loss if kind == "values" else cross_entropy
    told = {"extras": extras, "moments": moments, "steps": steps}
    centered = kind == "classes" and form == "weighted"
    loss = LearnedLoss(kind, form=form, centered=centered, hidden=(6, 6), **told)
    nn.init.normal_(loss.net[-1].weight)  # a weighted one begins at zero
    for part in (loss.factors, loss.center):
        if part is not None:
            nn.init.normal_(part, std=0.5)  # as do these
    return model, loss, (x, y, *more), lambda model, b: task_loss(model(b[0]), b[1])


def loop(kind, extras=0, form="free", moments=0, steps=0, backward=None):
    model, loss, batch, judge = problem(kind, extras, form, moments, steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    return il.InnerLoop(model, optimizer, loss, learn=(), val_loss=judge, backward=backward), batch


def one(batch):
    return tuple(b[0] if isinstance(b, torch.Tensor) else b for b in batch)


def meta_gradient(inner, *args, **how):
    inner.zero_grad()
    value = inner(*args, **how).sum()
    value.backward()
    return value.detach(), [p.grad.clone() for p in inner.parameters()]


KINDS = pytest.mark.parametrize(
    ("kind", "extras", "form", "moments", "steps"),
    [
        ("values", 0, "free", 0, 0),
        ("values", 2, "free", 0, 3),
        ("classes", 1, "free", 0, 0),
        ("values", 1, "weighted", 0, 0),
        ("values", 2, "weighted", 3, 0),
        ("values", 1, "weighted", 3, 2),
        ("classes", 0, "weighted", 0, 0),
        ("classes", 1, "weighted", 0, 2),
    ],
)


@KINDS
def test_the_tape_equals_finite_differences(kind, extras, form, moments, steps):
    inner, batch = loop(kind, extras, form, moments, steps)
    train = [one(batch)] * 3
    _, grads = meta_gradient(inner, train, one(batch))
    directions = [torch.randn_like(g) for g in grads]
    told = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
    values = []
    for sign in (1, -1):
        moved = copy.deepcopy(inner)
        with torch.no_grad():
            for p, d in zip(moved.parameters(), directions, strict=True):
                p += sign * 1e-5 * d
            values.append(moved(train, one(batch)))
    difference = (values[0] - values[1]) / 2e-5
    assert abs(told) > 1e-4
    assert torch.allclose(told, difference, rtol=1e-6)


@KINDS
@pytest.mark.parametrize("backward", [il.Remat(), il.Remat(2), il.Binomial(2)], ids=str)
def test_strategies_agree_with_the_tape(kind, extras, form, moments, steps, backward):
    inner, batch = loop(kind, extras, form, moments, steps)
    train = [one(batch)] * 5
    expected = meta_gradient(inner, train, one(batch))
    inner.backward = backward
    found = meta_gradient(inner, train, one(batch))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@KINDS
def test_tasks_agree_by_loop_and_batched(kind, extras, form, moments, steps):
    inner, batch = loop(kind, extras, form, moments, steps)
    by_loop = meta_gradient(inner, [batch] * 3, batch, tasks=il.tasks.loop())
    batched = meta_gradient(inner, [batch] * 3, batch, tasks=il.tasks.vmap())
    torch.testing.assert_close(batched, by_loop, rtol=1e-10, atol=1e-12)
    alone = inner([one(batch)] * 3, one(batch))
    first = inner([batch] * 3, batch, tasks=True)[0]
    torch.testing.assert_close(first, alone, rtol=1e-10, atol=0)


def test_all_of_its_weights_are_learned_and_nothing_else():
    inner, batch = loop("values")
    _, grads = meta_gradient(inner, [one(batch)] * 2, one(batch))
    assert {id(p) for p in inner.parameters()} == {id(p) for p in inner.loss.parameters()}
    # The last bias shifts the loss, and by the softplus its slope too.
    assert all(g.any() for g in grads)


@KINDS
def test_the_inner_loop_is_an_ordinary_loop_with_it(kind, extras, form, moments, steps):
    """``criterion(model(x), y)`` in anyone's loop ends where the inner loop ends."""
    inner, batch = loop(kind, extras, form, moments, steps)
    x, y, *more = one(batch)
    adapted = inner.adapt([one(batch)] * 4)
    model, criterion = copy.deepcopy(inner.model), inner.loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        criterion(model(x), y, *more).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), adapted.params[name].detach(), rtol=1e-10, atol=0)


def test_state_dict_round_trip(tmp_path):
    loss, other = LearnedLoss("classes", extras=1), LearnedLoss("classes", extras=1)
    logits, y = torch.randn(7, 3), torch.randint(3, (7,))
    assert loss(logits, y, 0.5) != other(logits, y, 0.5)
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    other.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    assert loss(logits, y, 0.5) == other(logits, y, 0.5)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"form": "weighted"}, {}),
        ({}, {"form": "weighted"}),
        ({"targets": "classes"}, {}),
        ({"extras": 3}, {"extras": 1, "steps": 4}),  # as many inputs
        ({"extras": 1}, {"extras": 1, "moments": 2}),
        ({"targets": "classes"}, {"targets": "classes", "centered": True}),
        ({"hidden": (40,)}, {}),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_the_state_of_another_kind_is_refused(one, other, strict):
    """The weights would fit, and mean something else."""
    before = LearnedLoss(**{"steps": 2, **other})
    nn.init.constant_(before.factors, 0.3)
    loaded = copy.deepcopy(before)
    with pytest.raises(InnerLoopError, match="then load_state_dict"):
        loaded.load_state_dict(LearnedLoss(**{"steps": 2, **one}).state_dict(), strict=strict)
    for a, b in zip(before.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_class_numbers_are_vectors_of_probabilities():
    loss = LearnedLoss("classes")
    logits, y = torch.randn(2, 5, 3), torch.randint(3, (2, 5))
    vectors = torch.eye(3)[y]
    assert loss(logits, y) == loss(logits, vectors)
    assert loss(logits, y) != loss(logits, vectors.flip(-1))


def test_classes_have_no_order_and_logits_no_origin():
    loss = LearnedLoss("classes")
    logits, y = torch.randn(5, 3), torch.randint(3, (5,))
    order = torch.tensor([2, 0, 1])
    moved = loss(logits[:, order], order.argsort()[y])
    torch.testing.assert_close(loss(logits, y), moved)
    torch.testing.assert_close(loss(logits + 7, y), loss(logits, y))
    at_most_all = loss.each(logits, y)
    torch.testing.assert_close(loss(logits, y), at_most_all.sum(-1).mean())


def test_it_is_a_mean_of_positive_numbers():
    loss = LearnedLoss(extras=1)
    p, y, e = torch.randn(3, 40, 2)
    each = loss.each(p, y, e)
    assert each.shape == p.shape and (each > 0).all()
    torch.testing.assert_close(loss(p, y, e), each.mean())
    torch.testing.assert_close(loss.each(p, y, e)[3, 1], loss.each(p[3, 1], y[3, 1], e[3, 1]))


@pytest.mark.parametrize(("kind", "ordinary"), [("values", mse_loss), ("classes", cross_entropy)])
def test_a_weighted_loss_begins_as_the_ordinary_one(kind, ordinary):
    model, _, (x, y, *more), _ = problem(kind, 1, "weighted")
    loss, said = LearnedLoss(kind, form="weighted", extras=1), model(x).flatten(0, 1)
    y, extra = y.flatten(0, 1), more[0].flatten(0, 1)
    torch.testing.assert_close(loss(said, y, extra), ordinary(said, y))
    for value, weight in ((100.0, math.e**3), (-100.0, math.e**-3)):
        nn.init.constant_(loss.net[-1].bias, value)
        torch.testing.assert_close(loss(said, y, extra), weight * ordinary(said, y))


@pytest.mark.parametrize("form", ["free", "weighted"])
def test_a_class_that_is_ruled_out_costs_nothing(form):
    logits = torch.randn(4, 3, requires_grad=True)
    mask = torch.tensor([0.0, -math.inf, 0.0])
    labels, loss = torch.tensor([0, 2, 2, 0]), LearnedLoss("classes", form=form)
    value = loss(logits + mask, labels)
    inputs = [logits, *loss.parameters()]
    grads = torch.autograd.grad(value, inputs, create_graph=True)
    again = torch.autograd.grad(grads[0].square().sum(), inputs, allow_unused=True)
    assert value.isfinite()
    assert all(g.isfinite().all() for g in (*grads, *again) if g is not None)
    if form == "weighted":
        torch.testing.assert_close(value, cross_entropy(logits + mask, labels))
        torch.testing.assert_close(
            grads[0], torch.autograd.grad(cross_entropy(logits + mask, labels), logits)[0]
        )
        assert loss(logits + mask, torch.ones(4, dtype=torch.long)) == math.inf


def test_moments_are_squared_means_of_weighted_errors():
    loss = LearnedLoss(form="weighted", extras=1, moments=5)
    p, y, e = torch.randn(3, 8, 2)
    said = loss.moments(e.unsqueeze(-1))  # [8, 2, 5]
    means = (said * (p - y).unsqueeze(-1)).mean((0, 1))
    torch.testing.assert_close(loss(p, y, e), mse_loss(p, y) + means.square().sum())
    assert means.abs().min() > 0
    # So an error counts by those of other examples, which no loss of single ones can do.
    p.requires_grad_()
    (slope,) = torch.autograd.grad(loss(p, y, e), p)
    changed = y.clone()
    changed[7] += 1
    (other,) = torch.autograd.grad(loss(p, changed, e), p)
    assert (slope[:7] != other[:7]).all()


def test_each_step_has_a_factor_and_the_network_reads_which_it_is():
    loss = LearnedLoss(form="weighted", steps=3)
    p, y = torch.randn(2, 8, 1)
    nn.init.constant_(loss.factors, 0.0)
    torch.testing.assert_close(loss(p, y, 2), mse_loss(p, y))
    with torch.no_grad():
        loss.factors.copy_(torch.tensor([1.0, 2.0, 3.0]).log())
    for step, factor in ((0, 1.0), (1, 2.0), (2, 3.0), (3, 3.0), (99, 3.0)):
        for told in (step, torch.tensor(step)):
            torch.testing.assert_close(loss(p, y, told), factor * mse_loss(p, y))
            torch.testing.assert_close(loss.each(p, y, told), factor * (p - y).square())
    nn.init.normal_(loss.net[-1].weight)
    assert len({(loss(p, y, step) / (step + 1)).item() for step in range(3)}) == 3


def test_tasks_may_be_at_different_steps():
    loss = LearnedLoss(extras=1, form="weighted", moments=2, steps=3)
    nn.init.normal_(loss.net[-1].weight)
    nn.init.normal_(loss.factors)
    p, y, e = torch.randn(3, 3, 5, 1)
    batched = torch.vmap(loss)(p, y, e, torch.arange(3))
    alone = [loss(p[k], y[k], e[k], k) for k in range(3)]
    torch.testing.assert_close(batched, torch.stack(alone))


@pytest.mark.parametrize("own", [torch.uint8, torch.int8, torch.int64])
def test_steps_of_every_whole_type(own):
    loss = LearnedLoss(form="weighted", steps=300)
    with torch.no_grad():
        loss.factors.copy_(torch.arange(300) / 100)
    p, y = torch.randn(2, 4)
    for step in (0, 100):
        expected = loss(p, y, step)
        torch.testing.assert_close(loss(p, y, torch.tensor(step, dtype=own)), expected)
    assert loss(p, y, 10**30) == loss(p, y, 299)


@pytest.mark.parametrize("kind", ["values", "classes"])
@pytest.mark.parametrize("own", [torch.float16, torch.bfloat16])
def test_low_precision_is_summed_in_float32_like_the_ordinary_loss(kind, own):
    """Targets near 100 would be rounded to halves, and squares of 500 overflow."""
    if kind == "values":
        loss = LearnedLoss(form="weighted", extras=1, dtype=torch.float32)
        p, y = (500 + torch.randn(6, 1)).to(own), torch.randn(6, 1, dtype=torch.float32)
        expected = mse_loss(p.float(), y)
        found = loss(p, y, y)
    else:
        loss = LearnedLoss("classes", form="weighted", centered=True, dtype=torch.float32)
        p, y = (9 * torch.randn(6, 4)).to(own), torch.randint(4, (6,))
        expected, found = cross_entropy(p.float(), y), loss(p, y)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["values", "classes"])
@pytest.mark.parametrize("form", ["free", "weighted"])
def test_autocast_changes_nothing(kind, form):
    """As with torch's own losses: predictions near each other are not taken for the same."""
    more = {"extras": 1, "moments": 2} if kind == "values" else {"centered": True}
    loss = LearnedLoss(kind, form=form, steps=2, dtype=torch.float32, **more)
    nn.init.normal_(loss.net[-1].weight)
    p = torch.linspace(20, 20.5, 12, dtype=torch.float32).view(4, 3).requires_grad_()
    batch = (p.detach() + 1, p.detach(), 1) if kind == "values" else (torch.arange(4) % 3, 1)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value, each = loss(p, *batch), loss.each(p, *batch)
        found.append((value, *torch.autograd.grad(value, p), each))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_hidden_may_be_any_whole_numbers():
    numpy = pytest.importorskip("numpy")
    for hidden in ((w for w in (3, 4)), numpy.array([3, 4])):
        loss = LearnedLoss(hidden=hidden)
        assert [part.out_features for part in loss.net if isinstance(part, nn.Linear)] == [3, 4, 1]
        file = io.BytesIO()
        torch.save(loss.state_dict(), file)
        file.seek(0)
        loss.load_state_dict(torch.load(file, weights_only=True))


def test_targets_do_not_change_the_precision():
    loss = LearnedLoss(extras=1, moments=2, dtype=torch.float32)
    p = torch.randn(4, dtype=torch.float32)
    assert loss(p, torch.randn(4), p).dtype == torch.float32


@pytest.mark.parametrize("form", ["free", "weighted"])
def test_with_a_class_ruled_out_it_is_the_loss_of_the_others(form):
    loss, y = LearnedLoss("classes", form=form), torch.tensor([0, 2, 2, 0])
    logits = torch.randn(4, 3)
    ruled_out = logits.index_fill(1, torch.tensor([1]), -math.inf)
    torch.testing.assert_close(loss(ruled_out, y), loss(logits[:, [0, 2]], y // 2))


def test_a_free_loss_shows_that_values_diverged():
    assert not LearnedLoss()(torch.tensor([-math.inf]), torch.zeros(1)).isfinite()


def test_extras_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    loss, (p, y) = LearnedLoss(extras=1, steps=2), torch.randn(2, 4)
    assert loss(p, y, numpy.float32(0.5), numpy.int64(1)) == loss(p, y, 0.5, 1)
    state = loss.state_dict()["_extra_state"]
    state["form"] = "weighted"
    assert loss.get_extra_state()["form"] == "free", "a state is a copy"


def test_predictions_without_an_axis_of_examples():
    logits, y = torch.randn(5), torch.tensor(2)
    loss = LearnedLoss("classes", form="weighted", centered=True)
    torch.testing.assert_close(loss(logits, y), cross_entropy(logits, y))
    number = torch.tensor(2.0)
    assert LearnedLoss(extras=1, moments=3)(number, number, number + 1).isfinite()


def test_a_part_of_the_mean_logits_is_left_out():
    loss = LearnedLoss("classes", form="weighted", centered=True)
    logits, y = torch.randn(4, 6, 3), torch.randint(3, (4, 6))
    torch.testing.assert_close(loss(logits, y), cross_entropy(logits.flatten(0, 1), y.flatten()))
    nn.init.constant_(loss.center, 0.7)
    left = logits - 0.7 * logits.mean((0, 1))
    torch.testing.assert_close(loss(logits, y), cross_entropy(left.flatten(0, 1), y.flatten()))


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_class_that_is_ruled_out_does_not_move_the_mean(everywhere):
    loss = LearnedLoss("classes", form="weighted", centered=True)
    nn.init.constant_(loss.center, 0.7)
    logits, y = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 2, 2, 0])
    mask = torch.zeros(4, 3)
    mask[:, 1] = torch.tensor([-math.inf] * 4 if everywhere else [-math.inf, 0, 0, -math.inf])
    mean = torch.where(mask == 0, logits, torch.nan).nanmean(0).nan_to_num(0.0)
    expected = cross_entropy(logits + mask - 0.7 * mean, y)
    torch.testing.assert_close(loss(logits + mask, y), expected)
    (slope,) = torch.autograd.grad(loss(logits + mask, y), logits)
    assert slope.isfinite().all()


def test_weighted_classes_by_number_and_by_probability_are_the_same():
    """By number only the right class is read."""
    loss = LearnedLoss("classes", form="weighted", extras=2)
    nn.init.normal_(loss.net[-1].weight)
    logits, y = torch.randn(4, 5, 3), torch.randint(3, (4, 5))
    extras = torch.randn(4, 1, 3), torch.randn(4, 5, 1)
    vectors = torch.eye(3)[y]
    torch.testing.assert_close(loss(logits, y, *extras), loss(logits, vectors, *extras))
    each = loss.each(logits, y, *extras)
    torch.testing.assert_close(each, loss.each(logits, vectors, *extras))
    assert each.shape == logits.shape and ((each > 0) == (vectors > 0)).all()


FOUR, COLUMN, SQUARE = torch.zeros(4), torch.zeros(4, 1), torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "class"}, "classes"),
        ({"form": "weight"}, "weighted"),
        ({"targets": "classes", "extras": 1, "moments": 2}, "moments=0"),
        ({"moments": 2}, "at least one extra"),
        ({"centered": True}, "centered=False"),
        ({"steps": -1}, "steps=-1 .* 0 or more"),
        ({"steps": True}, "steps=True"),
        ({"extras": 1, "moments": -2}, "moments=-2 .* 0 or more"),
        ({"extras": -1}, "extras=-1 .* 0 or more"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(InnerLoopError, match=message):
        LearnedLoss(**options)


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"steps": 2}, (FOUR, FOUR), "last of them the step"),
        ({"steps": 2}, (FOUR, FOUR, -1), "is -1"),
        ({"steps": 2}, (FOUR, FOUR, 0.5), "is 0.5"),
        ({"steps": 2}, (FOUR, FOUR, True), "is True"),
        ({"steps": 2}, (FOUR, FOUR, torch.tensor(True)), "whole number"),
        ({}, (FOUR, FOUR, 1.0), "0, as it was made"),
        ({"extras": 1}, (FOUR, FOUR), "1, as it was made"),
        ({"extras": 1}, (FOUR, FOUR, torch.zeros(3)), "as long or 1 long"),
        ({"extras": 1}, (FOUR, FOUR, None), "NoneType"),
        ({"extras": 1}, (SQUARE, SQUARE, FOUR), "unsqueeze"),
        ({}, (nn.Linear(1, 1), COLUMN), r"is a Tensor.*\(x, target\)"),
        ({}, (nn.Linear(1, 1), (COLUMN,)), r"tuple of 1.*\(x, target\)"),
        ({}, (COLUMN, FOUR), "same shape"),
        ({}, (FOUR, torch.zeros(1)), "same shape"),
        ({"targets": "classes"}, (torch.zeros(4, 3), torch.zeros(3)), "same shape"),
    ],
)
def test_what_cannot_be_compared_is_refused(options, call, message):
    with pytest.raises(InnerLoopError, match=message):
        LearnedLoss(**options)(*call)


def test_a_state_and_moments_that_are_not_there_are_refused():
    with pytest.raises(InnerLoopError, match="something else"):
        LearnedLoss().set_extra_state({"decays": 3})
    with pytest.raises(InnerLoopError, match="moments=16"):
        LearnedLoss().together(FOUR)


@pytest.mark.parametrize("wrong", [4, -1, -100])
def test_a_label_that_is_no_class_is_an_error(wrong):
    logits, y = torch.zeros(TASKS, POINTS, 4), torch.zeros(TASKS, POINTS, dtype=torch.long)
    y[0, 0] = wrong
    loss = LearnedLoss("classes")
    with pytest.raises(RuntimeError, match="out of bounds"):
        loss(logits, y)
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.vmap(loss)(logits, y)


# The experiment. ---------------------------------------------------------------------------------


flags = flags_of("learned-loss")


@pytest.fixture(scope="module")
def few_rates() -> Iterator[None]:
    """As fast as can be; a rate that diverges is among them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, problem in PROBLEMS.items():
            fewer = dataclasses.replace(problem, rates=(problem.rates[0], 1e9))
            patch.setitem(PROBLEMS, name, fewer)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, few_rates: None) -> Path:
    """Made before any test sets the default dtype, so in float32."""
    folder = tmp_path_factory.mktemp("learned-loss") / "whole"
    assert main(flags(folder)) == 0
    return folder


def test_both_losses_are_measured_on_the_same_nets(whole: Path) -> None:
    records = read_records(whole)
    assert [(r["problem"], r["seed"]) for r in records] == [("sines", 0), ("sines", 1)]
    for record in records:
        assert len(record["learned"]) == len(record["task"]) == 5
        assert record["steps_needed_short"] in (None, *range(5))
        # Both losses begin with the same nets on the same tasks.
        assert record["learned"][0] == record["task"][0]
        assert record["learned"][1] != record["task"][1]
    result = read(whole)["sines"]
    assert result["errors"]["task_long"] == [r["task"][4] for r in records]
    assert result["steps_needed"] == [r["steps_needed"] for r in records]


def test_the_learned_loss_can_be_loaded(whole: Path) -> None:
    criterion = LearnedLoss(form="weighted", extras=9, moments=16, steps=2).float()
    criterion.load_state_dict(torch.load(whole / "loss-sines-1.pt", weights_only=True))
    p = torch.randn(5, 1, dtype=torch.float32, requires_grad=True)
    criterion(p, torch.zeros_like(p), *PROBLEMS["sines"].read(p.detach()), 1).backward()
    assert p.grad is not None and p.grad.any()


def test_the_same_seed_gives_the_same_result(whole: Path, tmp_path: Path) -> None:
    """Whatever the default dtype is: here it is another than when the first run was made."""
    assert main(flags(tmp_path / "again")) == 0
    assert untimed(tmp_path / "again") == untimed(whole)
    first, second = json.loads(untimed(whole))[:2]
    assert first["learned"] != second["learned"] and first["task"] != second["task"]


def test_digits_and_a_rate_that_diverges(tmp_path: Path, few_rates: None) -> None:
    pytest.importorskip("sklearn")
    assert main(flags(tmp_path / "run", problem="both", seeds="1")) == 0
    records = read_records(tmp_path / "run")
    assert [r["problem"] for r in records] == ["sines", "digits"]
    for record in records:
        few = PROBLEMS[record["problem"]]
        tried = {(rate, clip): errors for rate, clip, *errors in record["tuned"]}
        assert [*tried] == few.settings
        if record["problem"] == "sines":
            assert all(tried[1e9, clip] == [None, None] for clip in few.clips)
        best = min(few.clips, key=lambda clip: tried[few.rates[0], clip][1])
        assert record["setting"] == [few.rates[0], best]
    assert all(0 <= error <= 1 for error in records[1]["learned"])
    assert (tmp_path / "run" / "shape-digits.png").exists()


def test_nets_that_diverge_are_left_out_and_counted(
    tmp_path: Path, few_rates: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(tmp_path / "run", inner_lr="1e30", seeds="1")) == 0
    result = read(tmp_path / "run")["sines"]
    assert result["skipped"] == [3]
    assert result["mean"]["learned_long"] is None and result["mean"]["task_long"] > 0
    assert result["steps_needed"] == [None]
    said = capsys.readouterr().out
    assert "diverged" in said and "3 meta-updates were left out" in said


def test_an_update_after_which_nets_diverge_is_undone() -> None:
    cell = Cell(Config(steps=2, horizon=4, tasks=2), "sines", 0)
    cell._update(0)
    good = cell.before
    with torch.no_grad():
        cell.criterion.moments[-1].bias.fill_(1e20)
    cell._update(1)
    assert cell.skipped == 1
    found = cell.criterion.state_dict()
    assert all(torch.equal(found[name], good[name]) for name in good if "extra" not in name)


def test_neither_loss_moves_a_net_further_than_the_longest_gradient() -> None:
    """Whatever the loss is: a weight moves by at most the rate times the norm."""
    cell = Cell(Config(problem="sines", steps=2, tasks=2, inner_clip=0.5), "sines", 0)
    tasks = cell._draw_tasks(torch.Generator().manual_seed(0), 2, 1)
    for loss in (cell.criterion, cell.problem.task_loss):
        watched = learned_loss_cell.Measured(loss, cell.problem.error)
        inner = cell._loop(watched, 0.1, cell.problem.clip)
        for adapted in inner.adapt([(cell._batch(tasks.support, 0), tasks.query)], tasks=True):
            moved = torch.cat([p.flatten() for p in adapted.params.values()]).norm()
            torch.testing.assert_close(moved.item(), 0.05, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["sines", "digits"])
def test_what_came_before_a_net_diverged_counts(name: str) -> None:
    """The loss is good for two steps, then tears the net apart."""
    if name == "digits":
        pytest.importorskip("sklearn")
    cell = Cell(Config(steps=2, horizon=6, held_out=2), name, 0)
    own, steps = cell.problem.task_loss, []

    def late(model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
        steps.append(len(steps))
        loss = own(model, batch[:2])
        return loss if len(steps) < 3 else loss * 1e30

    found = cell._errors(late, cell.problem.rates[0], math.inf, 0)
    plain = cell._errors(own, cell.problem.rates[0], math.inf, 0)
    assert found[:3] == plain[:3]
    assert found[4:] == [math.inf] * 3 and math.isfinite(plain[-1])
    assert learned_loss_cell._steps_to(found, plain[2]) <= 2


def test_a_loss_that_diverges_late_is_drawn_and_told(
    tmp_path: Path, few_rates: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(tmp_path / "run", inner_lr="1e8", seeds="1")) == 0
    (record,) = read_records(tmp_path / "run")
    assert record["learned"][0] == record["task"][0] and record["learned"][-1] is None
    assert "diverged" in capsys.readouterr().out
    assert (tmp_path / "run" / "curves.png").exists()


def test_held_out_digits_are_in_no_training_task() -> None:
    pytest.importorskip("sklearn")
    generator = torch.Generator().manual_seed(0)
    seen, unseen = (PROBLEMS["digits"].draw(generator, 20, held_out) for held_out in (False, True))
    images = [
        {tuple(row) for part in tasks for row in part[0].flatten(0, 1).tolist()}
        for tasks in (seen, unseen)
    ]
    assert all(images) and not images[0] & images[1]
    (x, _), (judged, _) = seen
    for shown, other in zip(x.tolist(), judged.tolist(), strict=True):
        assert not {*map(tuple, shown)} & {*map(tuple, other)}


@pytest.mark.parametrize("own", [torch.float32, torch.float64])
def test_predictions_of_another_precision(own: torch.dtype) -> None:
    other = torch.float64 if own == torch.float32 else torch.float32
    criterion = LearnedLoss(dtype=own)
    prediction = torch.ones(3, 1, dtype=other, requires_grad=True)
    loss = criterion(prediction, torch.zeros(3, 1, dtype=other))
    loss.backward()
    assert loss.dtype == prediction.grad.dtype == other
    alike = criterion(prediction.detach().to(own), torch.zeros(3, 1, dtype=own))
    assert loss.item() == pytest.approx(alike.item(), rel=1e-6)

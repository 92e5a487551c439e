"""The forecast against what is really allocated, and the choice that is made by it."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import innerloop as il
from inner_problems import Training, squares
from innerloop.backward import memory
from strategies import assert_same

STEPS = 12


def wide_training(*, init: bool) -> tuple[Training, list[Any]]:
    """Activations much larger than the weights, as where memory is a question at all."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
    )
    loop = Training(model, squares)
    for p in loop.params.values():
        p.requires_grad_(init)
    return loop, [(torch.randn(128, 2), torch.randn(128, 1)) for _ in range(STEPS)]


def gradients(loop: Training, batches: list[Any], backward: Any) -> list[Tensor]:
    state, losses = loop.unrolled(batches, backward)
    value = loop.measured(state, batches[0]) + losses.sum()
    leaves = [t for t in loop.leaves if t.requires_grad]
    return list(torch.autograd.grad(value, leaves))


def forecast(loop: Training, batches: list[Any]) -> Any:
    auto = il.Auto("8GB")
    loop.unrolled(batches, auto)
    return auto.forecast


@pytest.mark.parametrize("init", [True, False], ids=["init", "lr"])
def test_every_budget_is_kept_and_gives_the_tapes_gradient(init: bool) -> None:
    """As much as each strategy was forecast to need, in bytes of tensors that live at once."""
    loop, batches = wide_training(init=init)
    expected = gradients(loop, batches, il.Tape())
    chosen = set()
    for budget in sorted({row.peak_bytes for row in forecast(loop, batches).rows}):
        auto = il.Auto(budget)
        loop.unrolled(batches[:1], auto)
        with memory.Meter() as meter:
            actual = gradients(loop, batches, auto)
        assert meter.peak <= budget, auto.forecast
        assert_same(actual, expected)
        chosen.add(auto.forecast.chosen)
    assert il.Tape() in chosen
    assert len(chosen) > 2


def test_with_memory_to_spare_it_is_the_tape() -> None:
    loop, batches = wide_training(init=True)
    assert forecast(loop, batches).chosen == il.Tape()


def test_the_forecast_is_a_table() -> None:
    loop, batches = wide_training(init=True)
    auto = il.Auto("8GB")
    assert auto.forecast is None
    loop.unrolled(batches, auto)
    lines = str(auto.forecast).splitlines()
    assert "12 steps" in lines[0]
    assert "8 GB" in lines[0]
    assert len(lines) == 2 + len(auto.forecast.rows)
    (marked,) = [line for line in lines if "chosen" in line]
    assert marked.startswith("Tape()")
    assert all(row.exact for row in auto.forecast.rows)


def test_the_forecast_of_the_tape_grows_with_the_steps_and_others_less() -> None:
    loop, batches = wide_training(init=True)

    def peaks(steps: int) -> dict[Any, int]:
        return {r.strategy: r.peak_bytes for r in forecast(loop, batches[:1] * steps).rows}

    few, many = peaks(10), peaks(100)
    assert many[il.Tape()] > 8 * few[il.Tape()]
    assert many[il.Remat()] < 0.5 * many[il.Tape()]
    assert many[il.Binomial(8)] == few[il.Binomial(8)]


@pytest.mark.parametrize("name", ["Tape", "Remat", "Binomial"])
def test_the_forecast_is_what_is_allocated(name: str) -> None:
    """To a tenth, before its margin for what the allocator adds."""
    loop, batches = wide_training(init=True)
    found = forecast(loop, batches)
    for row in (r for r in found.rows if type(r.strategy).__name__ == name):
        with memory.Meter() as meter:
            gradients(loop, batches, row.strategy)
        assert row.peak_bytes / found.cost.margin == pytest.approx(meter.peak, rel=0.1), row


def test_nothing_fits() -> None:
    loop, batches = wide_training(init=True)
    with pytest.raises(il.InnerLoopError, match=r"(?s)no strategy fits.*Tape\(\).*Needed:.*Write:"):
        loop.unrolled(batches, il.Auto("1kB"))


def test_learned_data_is_not_left_to_forward() -> None:
    """One number to learn and little memory would be its case, but it does not follow batches."""
    loop, batches = wide_training(init=False)
    data = [(x, y.requires_grad_()) for x, y in batches]
    row = min(forecast(loop, data).rows, key=lambda row: row.peak_bytes)
    targets = [loop.lr, *(y for _, y in data)]
    found = []
    for backward in (il.Auto(row.peak_bytes), il.Tape()):
        state, _ = loop.unrolled(data, backward)
        found.append(torch.autograd.grad(loop.measured(state, batches[0]), targets))
    assert_same(*found)


def test_two_losses_are_measured_apart() -> None:
    """The same shapes going in, but ten times the activations."""
    loop, batches = wide_training(init=True)

    def deep(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return squares(model, (x.repeat(10, 1), y.repeat(10, 1)))

    auto = il.Auto("8GB")
    tapes = []
    for one in (loop, Training(loop.model, deep)):
        one.unrolled(batches, auto)
        tapes += [r.peak_bytes for r in auto.forecast.rows if r.strategy == il.Tape()]
    assert tapes[1] > 5 * tapes[0]


def test_a_step_that_has_no_hash() -> None:
    class Step:
        def __eq__(self, other: object) -> bool:
            return True

        def __call__(self, state: Tensor, meta: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
            return torch.sin(state * meta + batch), state

    state, meta = (torch.tensor(v, requires_grad=True) for v in (0.3, 0.8))
    batches = list(torch.randn(4))
    found = []
    for backward in (il.Auto("1GB"), il.Tape()):
        last, _ = il.unroll(Step(), state, meta, batches, backward=backward)
        found.append(torch.autograd.grad(last, [state, meta]))
    assert_same(*found)


@dataclasses.dataclass
class Weighted:
    """A loss that has no hash."""

    weight: float

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.weight * squares(model, batch)


def by_forward_mode(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0]
    return squares(model, batch) + torch.func.jvp(model, (x,), (torch.ones_like(x),))[1].mean()


def by_dual_numbers(model: nn.Module, batch: Any) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(batch[0], torch.ones_like(batch[0]))
        slope = forward_ad.unpack_dual(model(dual)).tangent
    return squares(model, batch) + slope.square().mean()


@pytest.mark.filterwarnings("ignore:.torch.jit")  # by torch itself
@pytest.mark.parametrize("loss", [Weighted(0.7), by_forward_mode, by_dual_numbers])
def test_losses_that_are_hard_to_measure(loss: Any) -> None:
    plain, batches = wide_training(init=True)
    found = []
    for backward in (il.Auto("1GB"), il.Tape()):
        loop = Training(plain.model, loss)
        value = squares(loop.f.bind(loop.unrolled(batches, backward)[0].params), batches[0])
        found.append(loop.grads(value))
    assert_same(*found)


def test_measuring_leaves_the_batches_as_they_are() -> None:
    """A loss may take its batch apart: it gets each one once."""
    plain, batches = wide_training(init=True)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return squares(model, (batch.pop("x"), batch.pop("y")))

    found = []
    for backward in (il.Auto("1GB"), il.Tape()):
        loop = Training(plain.model, loss)
        state, _ = loop.unrolled([{"x": x, "y": y} for x, y in batches], backward)
        found.append(loop.grads(squares(loop.f.bind(state.params), batches[0])))
    assert_same(*found)


@pytest.mark.parametrize("memory", ["2GB", "512 MiB", "1.5g", "100kb", "70000", 10**9, 0.25, 1.0])
def test_sizes(memory: Any) -> None:
    assert il.Auto(memory).memory == memory


@pytest.mark.parametrize(
    "memory", ["", "GB", "two", "-1GB", "0", "1e400", 0, -5, 1, 0.0, 1.5, None, True, "5%"]
)
def test_what_is_no_size_is_refused(memory: Any) -> None:
    with pytest.raises(il.InnerLoopError, match="memory="):
        il.Auto(memory)


def test_a_fraction_of_what_is_free() -> None:
    loop, batches = wide_training(init=True)
    auto = il.Auto(0.5)
    gradients(loop, batches, auto)
    assert auto.forecast.budget > 10**6

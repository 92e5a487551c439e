"""MAML on sinusoid regression, against a net pre-trained without meta-learning.

Run it with ``python -m innerloop.experiments.sine``; ``--help`` lists the settings.

A task is one sine wave, amplitude in [0.1, 5] and phase in [0, pi], seen through ten support
points. Both nets start from the same weights, see the same tasks and take the same number of
outer updates. The first is trained so that a few gradient steps on the support points make it
fit that sine (MAML, Finn et al. 2017), and the learning rate of these steps is learned with it. The
second is trained to predict all sines at once. Then both adapt to sines they have never seen, the
second with the rate that suits it best.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import innerloop as il

try:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table
    from tqdm import tqdm
except ImportError as missing:
    raise ImportError(
        f"innerloop.experiments needs the package {missing.name!r}, which is not installed, to show"
        " its progress and results. Install it with: pip install 'innerloop[demo]'"
    ) from missing

SHOTS = 10
LOW, HIGH = -5.0, 5.0
REPORTED_STEPS = (0, 1, 5, 10)
DRAWN_STEPS = (0, 1, 10)
# The pre-trained net adapts with the best of these, chosen for each number of steps.
RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
CHOICE_SINES = 50
# Keep the held-out sines, and those on which a rate is chosen, apart from each other and from the
# training sines of every seed a person would type.
HELD_OUT_SEED = 1_000_003
CHOICE_SEED = 2_000_003
NAMES = {"maml": "MAML", "pretrained": "pre-trained"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the experiment; each is also a command-line argument."""

    seed: Annotated[int, "random seed: the same seed gives the same result"] = 0
    iterations: Annotated[int, "outer updates of each net"] = 1200
    tasks: Annotated[int, "sines per outer update"] = 4
    steps: Annotated[int, "inner gradient steps while meta-learning"] = 1
    inner_lr: Annotated[float, "learning rate of the inner SGD, before it is learned"] = 0.02
    meta_lr: Annotated[float, "learning rate of the outer Adam"] = 0.005
    held_out: Annotated[int, "unseen sines in the final comparison"] = 200
    out: Annotated[Path, "folder for the picture and the numbers"] = Path("out/sine")

    def __post_init__(self) -> None:
        """Refuse values that cannot work, before any work is done."""
        if not 0 <= self.seed < HELD_OUT_SEED:
            raise ValueError(_refusal("seed", self.seed, f"a number from 0 to {HELD_OUT_SEED - 1}"))
        for name in ("iterations", "tasks", "steps", "held_out"):
            value, least = getattr(self, name), 3 if name == "held_out" else 1
            if value < least:
                raise ValueError(_refusal(name, value, f"at least {least}"))
        for name in ("inner_lr", "meta_lr"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(_refusal(name, value, "a positive, finite number"))


def _refusal(name: str, value: object, need: str) -> str:
    return (
        f"{_flag(name)} {value} cannot work: it must be {need}."
        f" Try {_flag(name)} {getattr(Config, name)}."
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class Sines(NamedTuple):
    """Tasks: points to adapt on, and points to be judged on, as (x, y). [tasks, points, 1] each."""

    support: tuple[Tensor, Tensor]
    query: tuple[Tensor, Tensor]


class Result(NamedTuple):
    """Squared error of one net on the held-out sines: number of steps -> value."""

    mean: dict[int, float]
    interval: dict[int, float]


class Comparison(NamedTuple):
    """What the experiment found."""

    results: dict[str, Result]
    learned_rate: float
    best_rates: dict[int, float]


# The inner loop that adapts a net, for each number of steps it is to take.
Adapter = Callable[[int], il.InnerLoop]


def draw_sines(generator: torch.Generator, tasks: int, *, query: Tensor | None = None) -> Sines:
    """Draw sine waves and their support points; the query points too, unless they are given."""

    def uniform(points: int) -> Tensor:
        return torch.rand(tasks, points, 1, generator=generator, dtype=torch.float32)

    amplitude, phase = 0.1 + 4.9 * uniform(1), math.pi * uniform(1)

    def seen(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, amplitude * torch.sin(x - phase)

    support = LOW + (HIGH - LOW) * uniform(SHOTS)
    if query is None:
        return Sines(seen(support), seen(LOW + (HIGH - LOW) * uniform(SHOTS)))
    return Sines(seen(support), seen(query.expand(tasks, *query.shape)))


def build_net(seed: int) -> nn.Module:
    """Build the regression net 1-40-40-1 of the MAML paper, with the weights of this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(1, 40, dtype=torch.float32),
            nn.ReLU(),
            nn.Linear(40, 40, dtype=torch.float32),
            nn.ReLU(),
            nn.Linear(40, 1, dtype=torch.float32),
        )


def squared_error(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss, in training and in testing."""
    x, y = batch
    return mse_loss(net(x), y)


def train_maml(config: Config) -> il.InnerLoop:
    """Learn initial weights, and a rate, from which ``config.steps`` steps of SGD fit any sine."""
    net = build_net(config.seed)
    inner = il.InnerLoop(
        net,
        torch.optim.SGD(net.parameters(), lr=config.inner_lr),
        squared_error,
        # By its logarithm: the rate stays positive, and Adam's steps are relative to its size.
        learn={"init": True, "lr": il.Learn(transform="log")},
        backward=il.Remat(),
    )
    meta = torch.optim.Adam(inner.parameters(), lr=config.meta_lr)
    for sines, show in _training(config, "MAML"):
        meta.zero_grad()
        meta_loss = inner([sines.support] * config.steps, sines.query, tasks=True).mean()
        meta_loss.backward()
        meta.step()
        show(meta_loss)
    return inner


def train_pretrained(config: Config) -> nn.Module:
    """Train the same net on the same sines, all at once, without an inner loop."""
    net = build_net(config.seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=config.meta_lr)
    for sines, show in _training(config, "pre-training"):
        optimizer.zero_grad()
        x, y = map(torch.cat, zip(sines.support, sines.query, strict=True))
        loss = squared_error(net, (x, y))
        loss.backward()
        optimizer.step()
        show(loss)
    return net


def _training(config: Config, name: str) -> Iterator[tuple[Sines, Callable[[Tensor], None]]]:
    """The sines of each update, and a function that shows its loss in the progress bar."""
    generator = torch.Generator().manual_seed(config.seed)
    running = math.nan

    def show(loss: Tensor) -> None:
        nonlocal running
        value = loss.item()
        running = value if math.isnan(running) else 0.98 * running + 0.02 * value
        bar.set_postfix(loss=f"{running:.3f}", refresh=False)

    with tqdm(total=config.iterations, desc=f"{name:>16}", unit="step") as bar:
        for _ in range(config.iterations):
            yield draw_sines(generator, config.tasks), show
            bar.update()


def predict(adapter: Adapter, sines: Sines, steps: int) -> Tensor:
    """The predictions at the query points after some gradient steps. [tasks, points, 1]"""
    with torch.no_grad():
        # Before the first step all tasks have one model.
        adapted = adapter(steps).adapt([sines.support] * steps, tasks=steps > 0)
        return adapted(sines.query[0])


def errors(adapter: Adapter, sines: Sines, steps: int) -> Tensor:
    """The mean squared error of each sine after some gradient steps. [tasks]"""
    return (predict(adapter, sines, steps) - sines.query[1]).square().mean(dim=(1, 2)).double()


def with_best_rates(net: nn.Module, sines: Sines) -> tuple[Adapter, dict[int, float]]:
    """Adapt a net, for each number of steps, with the rate that is best on these sines."""
    loops = {
        rate: il.InnerLoop(net, torch.optim.SGD(net.parameters(), lr=rate), squared_error, learn=())
        for rate in RATES
    }
    best = {}
    for steps in tqdm([s for s in REPORTED_STEPS if s], desc=f"{'choose rates':>16}"):
        found = {rate: _mean(lambda _, r=rate: loops[r], sines, steps) for rate in RATES}
        best[steps] = min(found, key=found.__getitem__)
    return lambda steps: loops[best.get(steps, RATES[0])], best


def _mean(adapter: Adapter, sines: Sines, steps: int) -> float:
    """The mean error, infinite where adaptation diverges."""
    try:
        mean = errors(adapter, sines, steps).mean().item()
    except il.InnerLoopError:
        return math.inf
    return mean if math.isfinite(mean) else math.inf


def evaluate(adapter: Adapter, sines: Sines, name: str) -> Result:
    """Measure the error over the held-out sines, with the half-width of its 95 % interval."""
    found = [errors(adapter, sines, s) for s in tqdm(REPORTED_STEPS, desc=f"{name:>16}")]
    error = torch.stack(found)
    half_width = 1.96 * error.std(dim=1) / math.sqrt(error.shape[1])
    return Result(
        dict(zip(REPORTED_STEPS, error.mean(dim=1).tolist(), strict=True)),
        dict(zip(REPORTED_STEPS, half_width.tolist(), strict=True)),
    )


def small_middle_large(sines: Sines) -> Sines:
    """Pick sines to draw by their height alone (its quartiles), whatever the nets make of them."""
    count = len(sines.query[1])
    by_height = sines.query[1].abs().amax(dim=(1, 2)).argsort()
    chosen = by_height[[count * quarter // 4 for quarter in (1, 2, 3)]]
    (support_x, support_y), (query_x, query_y) = sines
    return Sines((support_x[chosen], support_y[chosen]), (query_x[chosen], query_y[chosen]))


def draw_fits(adapters: dict[str, Adapter], sines: Sines) -> Figure:
    """Draw each net (row) adapting to each sine (column)."""
    styles = {
        0: {"color": "0.6", "linestyle": ":", "label": "before adaptation"},
        1: {"color": "tab:orange", "linestyle": "--", "label": "after 1 step"},
        10: {"color": "tab:blue", "linestyle": "-", "label": "after 10 steps"},
    }
    (support_x, support_y), (query_x, query_y) = sines
    figure = Figure(figsize=(4 * len(query_x), 6.4), layout="constrained")
    axes = figure.subplots(len(adapters), len(query_x), sharex=True, sharey="col", squeeze=False)
    for row, (name, adapter) in zip(axes, adapters.items(), strict=True):
        fits = {steps: predict(adapter, sines, steps) for steps in DRAWN_STEPS}
        for task, ax in enumerate(row):
            x = query_x[task].flatten().tolist()
            ax.plot(x, query_y[task].flatten().tolist(), color="0.1", lw=1.2, label="true sine")
            for steps, fit in fits.items():
                ax.plot(x, fit[task].flatten().tolist(), lw=2, **styles[steps])
            ax.plot(
                support_x[task].flatten().tolist(),
                support_y[task].flatten().tolist(),
                linestyle="none",
                marker="o",
                color="tab:red",
                markersize=6,
                zorder=3,
                label=f"{SHOTS} support points",
            )
            error = mse_loss(fits[max(DRAWN_STEPS)][task], query_y[task]).item()
            title = f"{NAMES[name]}: squared error {error:.2f} after {max(DRAWN_STEPS)} steps"
            ax.set_title(title, fontsize=10)
            ax.grid(alpha=0.25)
            ax.set_xlim(LOW, HIGH)
        row[0].set_ylabel("y")
    for ax in axes[-1]:
        ax.set_xlabel("x")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle("Adapting to a small, a middling and a large sine never seen in training")
    return figure


def results_table(found: Comparison, config: Config) -> Table:
    """Lay the errors out: one row per number of steps, one column per net."""
    table = Table(
        title=f"Mean squared error on {config.held_out} unseen sines",
        caption="± half the width of the 95 % interval",
    )
    table.add_column("gradient steps")
    for name in found.results:
        table.add_column(NAMES[name], justify="right")
    for step in REPORTED_STEPS:
        cells = [f"{r.mean[step]:.3f} ± {r.interval[step]:.3f}" for r in found.results.values()]
        table.add_row("before adaptation" if step == 0 else f"after {step}", *cells)
    return table


def rates_line(found: Comparison, config: Config) -> str:
    """Say with which learning rates the nets adapted."""
    best = ", ".join(f"{rate:g} (after {steps})" for steps, rate in found.best_rates.items())
    return (
        f"Learning rates: MAML learned {found.learned_rate:.4f}, starting from {config.inner_lr:g}."
        f" The pre-trained net got the best of {len(RATES)} for each number of steps, chosen on"
        f" other sines: {best}."
    )


def run(config: Config) -> Comparison:
    """Train both nets, compare them, and write ``fits.png`` and ``result.json``."""
    config.out.mkdir(parents=True, exist_ok=True)
    # Such small tensors gain nothing from more threads, and one thread makes sums reproducible.
    torch.set_num_threads(1)
    grid = torch.linspace(LOW, HIGH, 100, dtype=torch.float32).unsqueeze(1)
    unseen, others = (
        draw_sines(torch.Generator().manual_seed(config.seed + first), count, query=grid)
        for first, count in ((HELD_OUT_SEED, config.held_out), (CHOICE_SEED, CHOICE_SINES))
    )
    inner = train_maml(config)
    pretrained, best_rates = with_best_rates(train_pretrained(config), others)
    adapters: dict[str, Adapter] = {"maml": lambda steps: inner, "pretrained": pretrained}
    results = {
        name: evaluate(adapter, unseen, f"test {NAMES[name]}") for name, adapter in adapters.items()
    }
    draw_fits(adapters, small_middle_large(unseen)).savefig(config.out / "fits.png", dpi=130)
    found = Comparison(results, inner.hyper["lr"].item(), best_rates)
    record = {
        "config": {**dataclasses.asdict(config), "out": str(config.out)},
        "mean_squared_error": {name: result._asdict() for name, result in results.items()},
        "learning_rate": {"maml": found.learned_rate, "pretrained": found.best_rates},
    }
    (config.out / "result.json").write_text(json.dumps(record, indent=2) + "\n")
    return found


def parse(arguments: Sequence[str] | None = None) -> Config:
    """Read the command line; a bad value ends the program with a message."""
    parser = argparse.ArgumentParser(
        prog="python -m innerloop.experiments.sine",
        description="MAML on sinusoid regression, against a net pre-trained without meta-learning.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, hint in get_type_hints(Config, include_extras=True).items():
        kind, help = get_args(hint)
        parser.add_argument(_flag(name), type=kind, default=getattr(Config, name), help=help)
    values = vars(parser.parse_args(arguments))
    try:
        return Config(**values)
    except ValueError as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line; return the exit code."""
    config = parse(arguments)
    console = Console()
    start = time.perf_counter()
    try:
        found = run(config)
    except KeyboardInterrupt:
        print("\nStopped. Nothing was saved.", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"Cannot write to --out {config.out}: {error}. Choose a folder.", file=sys.stderr)
        return 1
    except il.InnerLoopError as error:
        print(f"{error}\nA smaller --inner-lr or --meta-lr may help.", file=sys.stderr)
        return 1
    console.print()
    console.print(results_table(found, config))
    console.print(rates_line(found, config), highlight=False)
    console.print(f"Picture: {config.out / 'fits.png'}", soft_wrap=True, highlight=False)
    console.print(f"Numbers: {config.out / 'result.json'}", soft_wrap=True, highlight=False)
    console.print(f"Took {time.perf_counter() - start:.0f} s.", highlight=False)
    console.print(
        "Try next: --steps 5 (learn to adapt in five steps; slower), or --seed 1 (other sines).",
        soft_wrap=True,
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""MAML on sinusoid regression, against a net pre-trained without meta-learning.

Run it with ``python -m innerloop.experiments.sine``; ``--help`` lists the settings.

A task is one sine wave, amplitude in [0.1, 5] and phase in [0, pi], seen through ten support
points. Both nets start from the same weights, see the same tasks and take the same number of
outer updates. The first is trained so that a few gradient steps on the support points make it
fit that sine (MAML, Finn et al. 2017). The second is trained to predict all sines at once. Then
both adapt to sines they have never seen.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
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
# Keeps the held-out sines apart from the training sines of every seed a person would type.
HELD_OUT_SEED = 1_000_003
NAMES = {"maml": "MAML", "pretrained": "pre-trained"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the experiment; each is also a command-line argument."""

    seed: Annotated[int, "random seed: the same seed gives the same result"] = 0
    iterations: Annotated[int, "outer updates of each net"] = 1500
    tasks: Annotated[int, "sines per outer update"] = 8
    steps: Annotated[int, "inner gradient steps while meta-learning"] = 1
    inner_lr: Annotated[float, "learning rate of the inner SGD, in training and in testing"] = 0.02
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


class Sine(NamedTuple):
    """One task: points to adapt on, and points to be judged on. All of shape [points, 1]."""

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor


class Result(NamedTuple):
    """Squared error of one net on the held-out sines: number of steps -> value."""

    mean: dict[int, float]
    interval: dict[int, float]


def draw_sine(generator: torch.Generator, *, query: Tensor | None = None) -> Sine:
    """Draw a sine wave and its support points; the query points too, unless they are given."""
    amplitude, phase = torch.rand(2, generator=generator, dtype=torch.float32).tolist()
    amplitude, phase = 0.1 + 4.9 * amplitude, math.pi * phase

    def points() -> Tensor:
        return LOW + (HIGH - LOW) * torch.rand(SHOTS, 1, generator=generator, dtype=torch.float32)

    def wave(x: Tensor) -> Tensor:
        return amplitude * torch.sin(x - phase)

    support_x = points()
    query_x = points() if query is None else query
    return Sine(support_x, wave(support_x), query_x, wave(query_x))


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


def train_maml(config: Config) -> nn.Module:
    """Learn initial weights from which ``config.steps`` steps of SGD fit any sine."""
    net = build_net(config.seed)
    inner = torch.optim.SGD(net.parameters(), lr=config.inner_lr)

    def backward(tasks: Sequence[Sine]) -> float:
        total = 0.0
        for task in tasks:
            # copy_initial_weights=False: the gradient goes back to the weights of `net` itself.
            with il.innerloop_ctx(net, inner, copy_initial_weights=False) as (fnet, diffopt):
                for _ in range(config.steps):
                    diffopt.step(mse_loss(fnet(task.support_x), task.support_y))
                loss = mse_loss(fnet(task.query_x), task.query_y) / len(tasks)
                loss.backward()
            total += loss.item()
        return total

    return _train(config, net, backward, "MAML", "meta-loss")


def train_pretrained(config: Config) -> nn.Module:
    """Train the same net on the same sines, all at once, without an inner loop."""
    net = build_net(config.seed)

    def backward(tasks: Sequence[Sine]) -> float:
        x = torch.cat([torch.cat([task.support_x, task.query_x]) for task in tasks])
        y = torch.cat([torch.cat([task.support_y, task.query_y]) for task in tasks])
        loss = mse_loss(net(x), y)
        loss.backward()
        return loss.item()

    return _train(config, net, backward, "pre-training", "loss")


def _train(
    config: Config,
    net: nn.Module,
    backward: Callable[[Sequence[Sine]], float],
    name: str,
    loss_name: str,
) -> nn.Module:
    """Take ``config.iterations`` steps of Adam along what ``backward(tasks)`` leaves in .grad."""
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=config.meta_lr)
    running = math.nan
    with tqdm(total=config.iterations, desc=f"{name:>16}", unit="step") as bar:
        for _ in range(config.iterations):
            optimizer.zero_grad()
            loss = backward([draw_sine(generator) for _ in range(config.tasks)])
            optimizer.step()
            running = loss if math.isnan(running) else 0.98 * running + 0.02 * loss
            bar.set_postfix({loss_name: f"{running:.3f}"}, refresh=False)
            bar.update()
    return net


def adapt(net: nn.Module, task: Sine, lr: float, steps: int) -> list[Tensor]:
    """Return the predictions at the query points after 0, 1, ..., ``steps`` gradient steps."""
    inner = torch.optim.SGD(net.parameters(), lr=lr)
    predictions = []
    with il.innerloop_ctx(net, inner, track_higher_grads=False) as (fnet, diffopt):
        for step in range(steps + 1):
            with torch.no_grad():
                predictions.append(fnet(task.query_x))
            if step < steps:
                diffopt.step(mse_loss(fnet(task.support_x), task.support_y))
    return predictions


def evaluate(net: nn.Module, tasks: Sequence[Sine], lr: float, name: str) -> Result:
    """Measure the error over the held-out sines, with the half-width of its 95 % interval."""
    errors = []
    for task in tqdm(tasks, desc=f"{name:>16}", unit="sine"):
        predictions = adapt(net, task, lr, max(REPORTED_STEPS))
        errors.append([mse_loss(predictions[step], task.query_y).item() for step in REPORTED_STEPS])
    error = torch.tensor(errors, dtype=torch.float64)
    half_width = 1.96 * error.std(dim=0) / math.sqrt(len(tasks))
    return Result(
        dict(zip(REPORTED_STEPS, error.mean(dim=0).tolist(), strict=True)),
        dict(zip(REPORTED_STEPS, half_width.tolist(), strict=True)),
    )


def small_middle_large(tasks: Sequence[Sine]) -> list[Sine]:
    """Pick sines to draw by their height alone (its quartiles), whatever the nets make of them."""
    by_height = sorted(tasks, key=lambda task: task.query_y.abs().max().item())
    return [by_height[len(tasks) * quarter // 4] for quarter in (1, 2, 3)]


def draw_fits(nets: dict[str, nn.Module], tasks: Sequence[Sine], lr: float) -> Figure:
    """Draw each net (row) adapting to each sine (column)."""
    styles = {
        0: {"color": "0.6", "linestyle": ":", "label": "before adaptation"},
        1: {"color": "tab:orange", "linestyle": "--", "label": "after 1 step"},
        10: {"color": "tab:blue", "linestyle": "-", "label": "after 10 steps"},
    }
    figure = Figure(figsize=(4 * len(tasks), 6.4), layout="constrained")
    axes = figure.subplots(len(nets), len(tasks), sharex=True, sharey="col", squeeze=False)
    for row, (name, net) in zip(axes, nets.items(), strict=True):
        for ax, task in zip(row, tasks, strict=True):
            x = task.query_x.flatten().tolist()
            ax.plot(x, task.query_y.flatten().tolist(), color="0.1", lw=1.2, label="true sine")
            predictions = adapt(net, task, lr, max(DRAWN_STEPS))
            for step in DRAWN_STEPS:
                ax.plot(x, predictions[step].flatten().tolist(), lw=2, **styles[step])
            ax.plot(
                task.support_x.flatten().tolist(),
                task.support_y.flatten().tolist(),
                linestyle="none",
                marker="o",
                color="tab:red",
                markersize=6,
                zorder=3,
                label=f"{SHOTS} support points",
            )
            error = mse_loss(predictions[max(DRAWN_STEPS)], task.query_y).item()
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


def results_table(results: dict[str, Result], held_out: int) -> Table:
    """Lay the errors out: one row per number of steps, one column per net."""
    table = Table(
        title=f"Mean squared error on {held_out} unseen sines",
        caption="± half the width of the 95 % interval",
    )
    table.add_column("gradient steps")
    for name in results:
        table.add_column(NAMES[name], justify="right")
    for step in REPORTED_STEPS:
        cells = [f"{r.mean[step]:.3f} ± {r.interval[step]:.3f}" for r in results.values()]
        table.add_row("before adaptation" if step == 0 else f"after {step}", *cells)
    return table


def run(config: Config) -> dict[str, Result]:
    """Train both nets, compare them, and write ``fits.png`` and ``result.json``."""
    config.out.mkdir(parents=True, exist_ok=True)
    # Such small tensors gain nothing from more threads, and one thread makes sums reproducible.
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(config.seed + HELD_OUT_SEED)
    grid = torch.linspace(LOW, HIGH, 100, dtype=torch.float32).unsqueeze(1)
    unseen = [draw_sine(generator, query=grid) for _ in range(config.held_out)]

    nets = {"maml": train_maml(config), "pretrained": train_pretrained(config)}
    results = {
        name: evaluate(net, unseen, config.inner_lr, f"test {NAMES[name]}")
        for name, net in nets.items()
    }
    draw_fits(nets, small_middle_large(unseen), config.inner_lr).savefig(
        config.out / "fits.png", dpi=130
    )
    record = {
        "config": {**dataclasses.asdict(config), "out": str(config.out)},
        "mean_squared_error": {name: result._asdict() for name, result in results.items()},
    }
    (config.out / "result.json").write_text(json.dumps(record, indent=2) + "\n")
    return results


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
        results = run(config)
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
    console.print(results_table(results, config.held_out))
    console.print(f"Picture: {config.out / 'fits.png'}", soft_wrap=True, highlight=False)
    console.print(f"Numbers: {config.out / 'result.json'}", soft_wrap=True, highlight=False)
    console.print(f"Took {time.perf_counter() - start:.0f} s.", highlight=False)
    console.print(
        "Try next: --steps 5 (learn to adapt in five steps), or --seed 1 (other sines).",
        soft_wrap=True,
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

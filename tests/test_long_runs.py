"""The queue of long runs: its plan, its command lines, and what it says of runs."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

from innerloop.experiments.maml import Config

pytest.importorskip("tomllib", reason="plans are read by Python 3.11 and newer")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
COLUMN = 'column = {{ dataset = "glyphs", way = 5, shot = 1, model = "mlp", inner_optim = "sgd", '
RUN = "[[run]]\npriority = {priority}\nbudget = 0.5\n" + COLUMN + "seed = {seed} }}\n"
PLAN = 'tag = "v1"\n[defaults.glyphs]\nsteps = 2\ntasks = 4\n'
PLAN += RUN.format(priority=7, seed=0) + "flags = { steps = 3, learn_rates = false }\n"
PLAN += RUN.format(priority=1, seed=1)
PLAN += RUN.format(priority=7, seed=2)
FIRST, SECOND, THIRD = (f"glyphs-5w1s-mlp-sgd-{seed}" for seed in (1, 0, 2))
CONFIG = {"dataset": "glyphs", "way": 5, "shot": 1, "model": "mlp", "inner_optim": "sgd", "seed": 1}
CONFIG |= {"tasks": 4, "iterations": 10, "filters": 8, "steps": 2, "query": 5}


@pytest.fixture
def plans(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("long_runs_plan")
    sys.modules.pop("long_runs_plan")


@pytest.fixture
def queue(plans, monkeypatch, tmp_path):
    module = importlib.import_module("long_runs")
    monkeypatch.setattr(module, "PLAN", tmp_path / "long_runs.toml")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results" / "long_runs.json")
    module.PLAN.write_text(PLAN)
    yield module
    sys.modules.pop("long_runs")


def write_run(folder, name, *, accuracies=(), result=None, notes=None):
    where = folder.run(name)
    where.mkdir(parents=True)
    places = {"data": "/data", "out": str(where)}
    (where / "config.json").write_text(json.dumps(CONFIG | places))
    records = [
        {"iteration": 5 * number, "val_accuracy": accuracy}
        for number, accuracy in enumerate(accuracies, start=1)
    ]
    (where / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if result is not None:
        (where / "result.json").write_text(json.dumps(result))
    folder.write_notes(name, notes or {})


def test_runs_are_ordered_by_priority_then_as_written(queue, plans):
    plan = plans.read_plan(queue.PLAN)
    assert plan.tag == "v1"
    assert [run.name for run in plan.runs] == [FIRST, SECOND, THIRD]


def test_the_command_has_the_column_the_defaults_and_the_flags(queue, plans, tmp_path):
    run = plans.read_plan(queue.PLAN).runs[1]
    found = plans.command(plans.Folder(tmp_path), run, Path("/data"))
    expected = "--dataset glyphs --way 5 --shot 1 --model mlp --inner-optim sgd --seed 0"
    expected += f" --steps 3 --tasks 4 --no-learn-rates --data /data --out {tmp_path}/runs/{SECOND}"
    assert found == [f"{tmp_path}/venv/bin/python", "-m", "innerloop", "maml", *expected.split()]


def test_a_run_that_was_started_is_resumed(queue, plans, tmp_path):
    folder = plans.Folder(tmp_path)
    write_run(folder, FIRST)
    found = plans.command(folder, plans.read_plan(queue.PLAN).runs[0], Path("/data"))
    assert found[3:] == ["maml", "--resume", str(folder.run(FIRST)), "--data", "/data"]


def test_runs_with_a_result_or_under_way_do_not_wait(queue, plans, tmp_path):
    folder = plans.Folder(tmp_path)
    write_run(folder, FIRST, result={})
    plan = plans.read_plan(queue.PLAN)
    assert [run.name for run in queue.waiting(folder, plan, set())] == [SECOND, THIRD]
    assert [run.name for run in queue.waiting(folder, plan, {SECOND})] == [THIRD]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('tag = "v1"', 'tag = "v1"\ntags = 1', "unknown key 'tags'"),
        ('tag = "v1"', "", "has no tag"),
        ("budget = 0.5", "budget = 0.5\nhours = 1", "unknown key 'hours'.*flags"),
        ("seed = 1 }", "seed = 1, steps = 5 }", "unknown key 'steps'"),
        ("seed = 1 }", "seed = true }", "seed = True. Needed is a int"),
        ("steps = 3", "seed = 3", "has seed among its flags"),
        ("seed = 1 }", "seed = 2 }", f"two runs called {THIRD}"),
        ('tag = "v1"', "tag =", "cannot be read"),
    ],
)
def test_plans_that_cannot_be_used_are_refused(queue, plans, before, after, message):
    queue.PLAN.write_text(PLAN.replace(before, after))
    with pytest.raises(plans.PlanError, match=message):
        plans.read_plan(queue.PLAN)


def test_status_prints_and_keeps_what_was_reached(queue, plans, tmp_path, capsys):
    folder = plans.Folder(tmp_path)
    done = {"accuracy": 0.875, "interval": 0.0125, "test_tasks": 10}
    notes = {"tag": "v1", "cpu_seconds": 5400}
    write_run(folder, FIRST, accuracies=(0.5, 0.75), result=done, notes=notes)
    write_run(folder, SECOND, accuracies=(0.6,), notes={"exit": 2, "pid": None})
    folder.log(SECOND).parent.mkdir()
    folder.log(SECOND).write_text("| 2/10 [00:05<00:02, 1.2 updates/s]\r| 7/10 [00:05<00:02]")
    other = {"name": "on another machine", "accuracy": 0.9}
    plans.replace_file(queue.RESULTS, json.dumps([other, {"name": FIRST, "tasks_seen": 20}]))

    queue.status(folder)

    head, _, *rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert head == f"Queue in {tmp_path}: stopped."
    assert rows == [
        f"{FIRST} done 40 40 75.00 % 87.50 ± 1.25 % 1.50 0.5",
        f"{SECOND} failed 28 40 60.00 % 0.00 0.5",
        f"{THIRD} waiting 0.5",
    ]
    kept, first, second = json.loads(queue.RESULTS.read_text())
    assert kept == other
    assert first["accuracy"] == 0.875 and first["curve"] == [[20, 0.5], [40, 0.75]]
    assert first["settings"] == {
        key: CONFIG[key] for key in ("tasks", "iterations", "filters", "steps", "query")
    }
    assert second["name"] == SECOND and "accuracy" not in second


def test_a_run_that_got_further_elsewhere_stays(queue, plans, tmp_path):
    folder, further = plans.Folder(tmp_path), {"name": FIRST, "tasks_seen": 10_000}
    write_run(folder, FIRST, accuracies=(0.5,), notes={"tag": "v1"})
    plans.replace_file(queue.RESULTS, json.dumps([further]))
    queue.status(folder)
    assert json.loads(queue.RESULTS.read_text()) == [further]


@pytest.mark.parametrize(
    ("notes", "queue_state", "state"),
    [
        ({"pid": 1}, "running", "running"),
        ({"pid": 1}, "paused", "paused"),
        ({"pid": 1}, "stopped", "stopped"),  # the machine was switched off
        ({"pid": None, "exit": 130}, "running", "stopped"),
        ({"pid": None, "exit": -9}, "running", "stopped"),
        ({"pid": None, "exit": 2}, "running", "failed"),
    ],
)
def test_state_of_a_run_without_a_result(queue, plans, tmp_path, notes, queue_state, state):
    folder = plans.Folder(tmp_path)
    write_run(folder, FIRST, notes=notes)
    found = plans.reached(folder, plans.read_plan(queue.PLAN).runs[0], queue_state)
    assert found["state"] == state


def test_the_lock_has_one_holder(queue, plans, tmp_path):
    folder = plans.Folder(tmp_path)
    handle = queue.take_lock(folder)
    assert handle is not None and queue.take_lock(folder) is None
    folder.lock.write_text(f"{os.getpid()}\n")
    assert queue.queue_state(folder) == "running"
    os.close(handle)
    assert queue.queue_state(folder) == "stopped"


def test_every_run_of_the_plan_is_accepted_by_innerloop_maml(plans):
    for run in plans.read_plan(BENCHMARKS / "long_runs.toml").runs:
        written = run.column | run.flags
        config = Config.configure(written, "quick")  # raises for unknown names and wrong values
        assert written.items() <= vars(config).items()

"""The runs of a sweep on a Ray cluster, each in a worker process of its own.

A run is the worker itself, not a child of it: a worker that is killed leaves no process behind that
writes into the folder when the run is tried again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from innerloop.errors import InnerLoopError
from innerloop.experiments import maml
from innerloop.experiments.framework.experiment import STOPPED
from innerloop.experiments.framework.run import stoppable
from innerloop.experiments.framework.settings import Bounds, refuse

if TYPE_CHECKING:
    from innerloop.experiments.sweep.command import Job

KINDS = {0: "finished", STOPPED: "stopped"}
_GLANCE = 0.5  # seconds between two looks at whether Ctrl-C was pressed
# A worker that is just starting may lose its Ctrl-C. It ends with the connection, after this time;
# the run then goes on from its last checkpoint instead of its last update.
_GRACE = 30.0


class Cluster(NamedTuple):
    """Where to run, what each run has for itself, and how often it is tried again."""

    address: str | None = None
    cpus_per_run: int = 1
    gpus_per_run: float = 0.0
    retries: int = 10


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check(cluster: Cluster) -> None:
    """Refuses what cannot run, before any work."""
    Bounds(1).check("cpus_per_run", cluster.cpus_per_run)
    Bounds(0).check("gpus_per_run", cluster.gpus_per_run)
    Bounds(0).check("retries", cluster.retries)
    if cluster.address is None and cluster.cpus_per_run > cores():
        refuse(
            "cpus_per_run", cluster.cpus_per_run, f"at most {cores()}, the cores of this machine"
        )
    if importlib.util.find_spec("ray") is None:
        raise InnerLoopError(
            "--engine ray needs Ray, which is not installed. Install it with "
            "pip install '.[ray]' in a clone, or use --engine local."
        )


def outcomes(each: Sequence[Job], cluster: Cluster) -> Iterator[tuple[Job, str]]:
    """Each run as it ends: finished, failed or stopped."""
    import ray  # pyright: ignore[reportMissingImports]

    with _connect(ray, cluster), stoppable() as stop:
        waiting = _submit(ray, each, cluster)
        until = None
        while waiting and (until is None or time.monotonic() < until):
            for one in ray.wait(list(waiting), timeout=_GLANCE)[0]:
                job = waiting.pop(one)
                yield job, _outcome(ray, one, job)
            if stop.asked and until is None:
                until = time.monotonic() + _GRACE
                for one in waiting:
                    ray.cancel(one, recursive=False)  # a Ctrl-C in the worker
        for job in waiting.values():
            yield job, "stopped"  # by the end of the connection


def _submit(ray: Any, each: Sequence[Job], cluster: Cluster) -> dict[Any, Job]:
    trial = ray.remote(
        num_cpus=cluster.cpus_per_run,
        num_gpus=cluster.gpus_per_run,
        max_retries=cluster.retries,
        max_calls=1,  # a new process for every run
    )(_trial)
    settings = {name: v for name, v in os.environ.items() if name.startswith("INNERLOOP_")}
    found = {}
    for job in each:
        there = job._replace(folder=job.folder.absolute())
        named = trial.options(name=job.folder.name)
        found[named.remote(there, os.getcwd(), settings)] = job
    return found


def _trial(job: Job, place: str, settings: dict[str, str]) -> int:
    """In a worker: starts the run, or resumes it."""
    os.environ.update(settings)
    os.chdir(place)  # what is named relative to it is found
    job.folder.mkdir(parents=True, exist_ok=True)
    with (
        open(job.log, "a") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        return maml.main(job.words)


def _outcome(ray: Any, one: Any, job: Job) -> str:
    try:
        kind = KINDS.get(ray.get(one), "failed")
    except ray.exceptions.TaskCancelledError:
        return "stopped"
    except ray.exceptions.RayError as error:
        print(error, file=sys.stderr)
        return "failed"
    if kind == "finished" and not job.finished:
        print(f"{job.folder} is not seen here: --out must be on a disk that all machines share.")
        return "failed"
    return kind


@contextlib.contextmanager
def _connect(ray: Any, cluster: Cluster) -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics are sent
    local = {"address": "local", "num_cpus": cores(), "include_dashboard": False}
    where = local if cluster.address is None else {"address": cluster.address}
    try:
        try:
            _check_reached(cluster.address or "")
            ray.init(**where, log_to_driver=False, logging_level="ERROR")
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            raise InnerLoopError(
                f"--address {cluster.address or 'local'} cannot be reached: {error}. Start a "
                "cluster with ray start --head, or leave --address out for one on this machine."
            ) from error
        _warn_if_too_large(ray, cluster)
        yield
    finally:
        ray.shutdown()


def _check_reached(address: str) -> None:
    """Ray tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _warn_if_too_large(ray: Any, cluster: Cluster) -> None:
    """A cluster may grow, so it is no error."""
    need = {"CPU": cluster.cpus_per_run, "GPU": cluster.gpus_per_run}
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(has.get(k, 0) >= v for k, v in need.items()) for has in alive):
        print(f"No machine of the cluster has {need} now: runs wait for one.", file=sys.stderr)

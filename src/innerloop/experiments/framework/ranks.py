"""The processes of a run: one, or as many as ``torchrun`` started."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from innerloop.errors import InnerLoopError

_NOTHING, _FOUND, _ERROR = b"0", b"1", b"2"


class Ranks(NamedTuple):
    """This process among all. All hold the same parameters and the same random state.

    A meta-batch is drawn whole by each and shared by tasks; gradients are summed once per update.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes, prints and shows the bar."""
        return self.rank == 0

    def share(self, total: int) -> slice:
        """This process's own of ``total`` tasks; sizes differ by one at most.

        >>> [Ranks(rank, 3).share(8) for rank in range(3)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None)]
        """
        each, more = divmod(total, self.size)
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))

    def sum_gradients(self, params: Sequence[Tensor]) -> None:
        """Sums ``.grad`` over the processes, in one exchange for each dtype.

        A parameter that no process has a gradient for keeps none.
        """
        if self.size == 1:
            return
        known = torch.tensor([p.grad is not None for p in params], device=params[0].device)
        for p, any_has in zip(params, self.sum(known.to(torch.int32)).tolist(), strict=True):
            if any_has and p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in params if p.grad is not None]
        for dtype in dict.fromkeys(g.dtype for g in grads):
            same = [g for g in grads if g.dtype == dtype]
            flat = self.sum(torch.cat([g.flatten() for g in same]))
            for grad, whole in zip(same, flat.split([g.numel() for g in same]), strict=True):
                grad.copy_(whole.view_as(grad))

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the processes, the same on all of them."""
        if self.size > 1:
            value = value.clone()
            with _explain_lost_peer():
                dist.all_reduce(value)
        return value

    def assemble(self, own: Tensor, total: int) -> Tensor:
        """Concatenates the shares of all processes. [own, …] -> [total, …]"""
        if self.size == 1:
            return own
        whole = own.new_zeros((total, *own.shape[1:]))
        whole[self.share(total)] = own
        return self.sum(whole)

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it holds on at least one process."""
        if self.size == 1:
            return list(flags)
        return self.sum(torch.tensor(flags, dtype=torch.int32)).bool().tolist()

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of each process, on all of them."""
        if self.size == 1:
            return [data]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        sizes = self.sum(lengths).tolist()
        rows = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        if data:
            rows[self.rank] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for rank, row in enumerate(rows):
            if len(row):
                with _explain_lost_peer():
                    dist.broadcast(row, rank)
        return [bytes(row.numpy()) for row in rows]

    def agree(self, what: str, own: Mapping[str, Any]) -> None:
        """Raises if the processes have different values under the same names."""
        first, *others = (json.loads(said) for said in self.gather(json.dumps(own).encode()))
        for rank, other in enumerate(others, 1):
            if names := [name for name in own if first.get(name) != other.get(name)]:
                told = ", ".join(f"{n} {other.get(n)!r}, not {first.get(n)!r}" for n in names)
                raise InnerLoopError(
                    f"Process {rank} of {self.size} has other {what} than the first: {told}. All "
                    "must have the same, since each does a part of one run. Give the same command, "
                    "with the same data, on every machine."
                )

    def broadcast(self, find: Callable[[], bytes | None]) -> bytes | None:
        """Calls ``find`` on the first process; returns its result, or raises its error, on all."""
        if self.size == 1:
            return find()
        found: bytes | None = None
        error = ""
        if self.first:
            try:
                found = find()
            except InnerLoopError as raised:
                error = str(raised)
        tag = _ERROR if error else _FOUND if found is not None else _NOTHING
        said, *_ = self.gather(tag + (error.encode() if error else found or b""))
        if said[:1] == _ERROR:
            raise InnerLoopError(said[1:].decode())
        return said[1:] if said[:1] == _FOUND else None


@contextlib.contextmanager
def _explain_lost_peer() -> Iterator[None]:
    """Explains a failed exchange: another process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise InnerLoopError(
            "The processes cannot reach each other any more: another one has ended, for a reason "
            f"that it told if it could ({str(error).splitlines()[0]}). With --max-restarts, "
            "torchrun goes on from the last checkpoint; otherwise, write --resume."
        ) from error


ALONE = Ranks()
_CONNECT, _GLANCE = 300.0, 0.02  # seconds
_LOST = (
    "WORLD_SIZE is set, but the processes do not find each other. Start them with torchrun, or "
    "unset WORLD_SIZE."
)


@contextlib.contextmanager
def join_group(device: str) -> Iterator[Ranks]:
    """Joins the group that ``torchrun`` started; without it the process is alone."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    if not dist.is_available():
        raise InnerLoopError("This build of torch has no torch.distributed: run without torchrun.")
    # Default arguments of that module are the group there is when it is first imported, which
    # torch._dynamo does in passing. A group that they hold lives on after it is destroyed, and its
    # threads make torch abort the process at the interpreter's exit now and then.
    importlib.import_module("torch.distributed.nn.functional")
    # Small exchanges of numbers and checkpoints stay on the CPU, whatever the device.
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    try:
        with _time_limit():
            store, rank, size = next(rendezvous("env://"))
            own = PrefixStore(agree_on_name(store, rank, size), store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=size)
    except (ValueError, RuntimeError) as error:
        raise InnerLoopError(f"{_LOST} {error}") from error
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def agree_on_name(store: Store, rank: int, size: int) -> str:
    """A name for this group, the same for all of its processes and for no earlier group.

    ``torchrun`` keeps its store when it starts a group again. Addresses of those who died are in
    it; who takes one for another's waits for a connection that nobody makes. And machines count
    restarts each for itself. So the first process announces a name, the others answer to it with
    names of their own, and it holds for those whose names the first one repeats.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("innerloop/first", own)
        answers = [store.get(f"innerloop/{own}/{other}").decode() for other in range(1, size)]
        store.set(f"innerloop/{own}/group", " ".join(answers))
        return own
    answered = None
    while True:
        if store.check(["innerloop/first"]):
            first = store.get("innerloop/first").decode()
            if first != answered:
                store.set(f"innerloop/{first}/{rank}", own)
                answered = first
            group = f"innerloop/{first}/group"
            if store.check([group]) and own in store.get(group).decode().split():
                return first
        time.sleep(_GLANCE)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Ends the process if this takes long, so that torchrun starts the group again."""

    def give_up() -> None:
        print(f"After {_CONNECT:g} seconds: {_LOST}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(_CONNECT, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def refuse_group(name: str) -> None:
    """Refuses torchrun for a command whose own processes would take each other for a group."""
    if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise InnerLoopError(
            f"innerloop {name} was started {size} times, by torchrun (WORLD_SIZE is {size}). "
            "Needed is one process, which starts the runs itself, side by side; theirs would be "
            "mixed up. Start it without torchrun."
        )


def local_device(device: str) -> str:
    """The device of this process: with ``torchrun`` each has an accelerator of its own."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if device == "cuda" and local is not None else device


def launch() -> str:
    """The name of the group, the same when ``torchrun`` starts it again."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def restarted() -> bool:
    """Tests whether ``torchrun`` started the group again after one of its processes died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

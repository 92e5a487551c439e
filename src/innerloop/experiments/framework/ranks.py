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
    """Which of how many processes this is. All hold the same parameters and the same random state.

    A meta-batch is drawn whole by each and shared by tasks; gradients are summed once per update.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this one writes, prints and shows the bar."""
        return self.rank == 0

    def share(self, total: int) -> slice:
        """Which of ``total`` tasks are this process's own; sizes differ by one at most.

        >>> [Ranks(rank, 3).share(8) for rank in range(3)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None)]
        """
        each, more = divmod(total, self.size)
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))

    def sum_gradients(self, params: Sequence[Tensor]) -> None:
        """Sum ``.grad`` over the processes, in one exchange for each dtype.

        A parameter that no process has a gradient for keeps none.
        """
        if self.size == 1:
            return
        known = torch.tensor([p.grad is not None for p in params], device=params[0].device)
        for p, any_has in zip(params, self.summed(known.to(torch.int32)).tolist(), strict=True):
            if any_has and p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in params if p.grad is not None]
        for dtype in dict.fromkeys(g.dtype for g in grads):
            same = [g for g in grads if g.dtype == dtype]
            flat = self.summed(torch.cat([g.flatten() for g in same]))
            for grad, whole in zip(same, flat.split([g.numel() for g in same]), strict=True):
                grad.copy_(whole.view_as(grad))

    def summed(self, value: Tensor) -> Tensor:
        """The sum over the processes, the same on all of them."""
        if self.size > 1:
            value = value.clone()
            with _exchanged():
                dist.all_reduce(value)
        return value

    def assembled(self, own: Tensor, total: int) -> Tensor:
        """The shares of all processes, put together. [own, …] -> [total, …]"""
        if self.size == 1:
            return own
        whole = own.new_zeros((total, *own.shape[1:]))
        whole[self.share(total)] = own
        return self.summed(whole)

    def any(self, *flags: bool) -> list[bool]:
        """Of each flag, whether it holds for one of the processes at least."""
        if self.size == 1:
            return list(flags)
        return self.summed(torch.tensor(flags, dtype=torch.int32)).bool().tolist()

    def gathered(self, data: bytes) -> list[bytes]:
        """What each process has to tell, on all of them."""
        if self.size == 1:
            return [data]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        sizes = self.summed(lengths).tolist()
        rows = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        if data:
            rows[self.rank] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for rank, row in enumerate(rows):
            if len(row):
                with _exchanged():
                    dist.broadcast(row, rank)
        return [bytes(row.numpy()) for row in rows]

    def agree(self, what: str, own: Mapping[str, Any]) -> None:
        """Refuse to go on where the processes have different values under the same names."""
        first, *others = (json.loads(said) for said in self.gathered(json.dumps(own).encode()))
        for rank, other in enumerate(others, 1):
            if names := [name for name in own if first.get(name) != other.get(name)]:
                told = ", ".join(f"{n} {other.get(n)!r}, not {first.get(n)!r}" for n in names)
                raise InnerLoopError(
                    f"Process {rank} of {self.size} has other {what} than the first: {told}. All "
                    "must have the same, since each does a part of one run. Give the same command, "
                    "with the same data, on every machine."
                )

    def told(self, find: Callable[[], bytes | None]) -> bytes | None:
        """What the first process finds, on all of them. Its error is everybody's."""
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
        said, *_ = self.gathered(tag + (error.encode() if error else found or b""))
        if said[:1] == _ERROR:
            raise InnerLoopError(said[1:].decode())
        return said[1:] if said[:1] == _FOUND else None


@contextlib.contextmanager
def _exchanged() -> Iterator[None]:
    """Who is left when another process ends says so; the other one says why."""
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
def joined(device: str) -> Iterator[Ranks]:
    """The group that ``torchrun`` started this process in; alone without it."""
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
        with _soon():
            store, rank, size = next(rendezvous("env://"))
            own = PrefixStore(agreed(store, rank, size), store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=size)
    except (ValueError, RuntimeError) as error:
        raise InnerLoopError(f"{_LOST} {error}") from error
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def agreed(store: Store, rank: int, size: int) -> str:
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
def _soon() -> Iterator[None]:
    """End the process if this takes long, so that torchrun starts the group again."""

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
    """For a command that starts processes of its own: they would take each other for a group."""
    if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise InnerLoopError(
            f"innerloop {name} was started {size} times, by torchrun (WORLD_SIZE is {size}). "
            "Needed is one process, which starts the runs itself, side by side; theirs would be "
            "mixed up. Start it without torchrun."
        )


def local_device(device: str) -> str:
    """With ``torchrun``, every process of a machine has an accelerator of its own."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if device == "cuda" and local is not None else device


def launch() -> str:
    """The name of the group, the same when ``torchrun`` starts it again."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def restarted() -> bool:
    """Whether ``torchrun`` started the group again after one of its processes died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0

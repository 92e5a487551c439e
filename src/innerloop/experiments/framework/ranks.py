"""The processes of a run: one, or as many as ``torchrun`` started."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from innerloop.errors import InnerLoopError


class Ranks(NamedTuple):
    """This process among all. All hold the same parameters and the same random state.

    A meta-batch is drawn whole by each and shared by tasks; gradients are summed once per update.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """True if this process writes, prints and shows the bar."""
        return self.rank == 0

    def share(self, total: int) -> slice:
        """This process's slice of ``total`` tasks; sizes differ by one at most.

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
        """Each flag, true if it is true on at least one process."""
        if self.size == 1:
            return list(flags)
        return self.sum(torch.tensor(flags, dtype=torch.int32)).bool().tolist()

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, on each of them."""
        if self.size == 1:
            return [value]
        found = [None] * self.size
        with _explain_lost_peer():
            dist.all_gather_object(found, value)
        return found

    def agree(self, own: Mapping[str, Any]) -> None:
        """Raises if the processes have different settings."""
        first, *others = self.gather(own)
        for rank, other in enumerate(others, 1):
            different = [
                f"{name} {value!r}, not {first.get(name)!r}"
                for name, value in other.items()
                if value != first.get(name)
            ]
            if different:
                raise InnerLoopError(
                    f"Process {rank} of {self.size} has other settings than the first: "
                    f"{', '.join(different)}. All must have the same, since each does a part of "
                    "one run. Give the same command, with the same data, on every machine."
                )

    def broadcast(self, find: Callable[[], Any]) -> Any:
        """Calls ``find`` on the first process; returns its result, or raises its error, on all."""
        found: list[Any] = [None]
        if self.first:
            try:
                found = [find()]
            except InnerLoopError as error:
                found = [error]
        if self.size > 1:
            with _explain_lost_peer():
                dist.broadcast_object_list(found)
        if isinstance(found[0], InnerLoopError):
            raise found[0]
        return found[0]


ALONE = Ranks()


@contextlib.contextmanager
def _explain_lost_peer() -> Iterator[None]:
    """Explains a failed exchange: another process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise InnerLoopError(
            "The processes cannot reach each other any more: another one has ended; its own "
            f"message says why ({str(error).splitlines()[0]}). With --max-restarts, torchrun goes "
            "on from the last checkpoint; otherwise, write --resume."
        ) from error


@contextlib.contextmanager
def join_group(device: str) -> Iterator[Ranks]:
    """Joins the group that ``torchrun`` started; without it the process is alone."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    # Default arguments of that module are the group there is when it is first imported, which
    # torch._dynamo does in passing. A group that they hold lives on after it is destroyed, and its
    # threads make torch abort the process at the interpreter's exit now and then.
    importlib.import_module("torch.distributed.nn.functional")
    # Small exchanges of numbers and checkpoints stay on the CPU, whatever the device.
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    try:
        store, rank, size = next(rendezvous("env://"))
        # torchrun keeps its store when it starts a group again, with addresses of ended processes.
        store = PrefixStore(f"start-{restarts()}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    except (ValueError, RuntimeError) as error:
        raise InnerLoopError(
            f"WORLD_SIZE is set, but the processes do not find each other ({error}). Start them "
            "with torchrun, or unset WORLD_SIZE."
        ) from error
    try:
        yield Ranks(rank, size)
    finally:
        dist.destroy_process_group()


def local_device(device: str) -> str:
    """The device of this process: with ``torchrun`` each has an accelerator of its own."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if device == "cuda" and local is not None else device


def restarts() -> int:
    """The number of times that ``torchrun`` started the group again, as after a death."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

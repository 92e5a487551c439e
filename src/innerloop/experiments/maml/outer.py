"""The outer step of a run: meta-gradients summed over processes, checked, clipped, applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.ranks import ALONE, Ranks

PRECISIONS = {"float64": None, "float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
NONFINITE = ("stop", "skip")
_LEAST_SCALE = 1.0


class Outer:
    """An outer optimizer that never takes a step along a gradient with infinities or NaNs.

    With ``nonfinite="skip"`` such an update is left out and counted, with ``"stop"`` it is an
    error that says where it comes from. In fp16 the loss is scaled up against underflow; an update
    that overflows while it is scaled up is left out in either case, and the scale lowered.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        precision: str = "float32",
        nonfinite: str = "stop",
        clip: float | None = None,
        device: str = "cpu",
    ) -> None:
        self.optimizer, self.nonfinite, self.clip = optimizer, nonfinite, clip
        self.ranks: Ranks = ALONE
        self.skipped = 0
        self._kind, self._dtype = torch.device(device).type, PRECISIONS[precision]
        self._scaler = torch.amp.GradScaler(self._kind, enabled=precision == "fp16")

    def autocast(self) -> torch.autocast:
        """The precision of the forward pass, inner gradients included."""
        return torch.autocast(self._kind, self._dtype, enabled=self._dtype is not None)

    def step(self, loss: Tensor, blame: Callable[[], str]) -> None:
        """Backward and one update; ``loss`` is this process's part of the sum."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.optimizer.zero_grad()
        self._scaler.scale(loss).backward()
        self.ranks.sum_gradients(params)
        self._scaler.unscale_(self.optimizer)
        grads = [p.grad for p in params if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if not torch.isfinite(norm):  # squares overflow long before the numbers themselves
            largest = torch.stack([grad.abs().max() for grad in grads if grad.numel()]).max()
            norm = largest.double() * torch.nn.utils.get_total_norm([g / largest for g in grads])
        if torch.isfinite(norm):
            if self.clip is not None:
                torch.nn.utils.clip_grads_with_norm_(params, self.clip, norm)
            self._scaler.step(self.optimizer)
        else:
            finite = bool(self.ranks.sum(loss.detach()).isfinite())
            self._leave_out(blame, scaled=finite and self._scaler.get_scale() > _LEAST_SCALE)
        self._scaler.update()
        if self._scaler.is_enabled() and self._scaler.get_scale() < _LEAST_SCALE:
            self._scaler.update(_LEAST_SCALE)

    @property
    def _advice(self) -> str:
        if self._dtype is torch.float16:
            return (
                "--precision fp16 is the likely cause: its numbers end at 65504, and second "
                "derivatives in it are often not finite. Write --precision bf16 or float32"
            )
        return "Try a smaller --inner-lr or --meta-lr, --clip 10"

    def _leave_out(self, blame: Callable[[], str], scaled: bool) -> None:
        if self.nonfinite == "stop" and not scaled:
            raise InnerLoopError(
                f"The meta-gradient is not finite: {blame()}. {self._advice}, or --nonfinite skip "
                "to leave such updates out."
            )
        self.skipped += 1

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]
        self._scaler.load_state_dict(state["scaler"])

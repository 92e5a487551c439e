"""A few-shot learner: a model, the inner loop that adapts it, and the optimizer of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import innerloop as il
from innerloop.data import Episode
from innerloop.errors import InnerLoopError
from innerloop.experiments.framework.ranks import ALONE, Ranks
from innerloop.experiments.framework.state import Resumable
from innerloop.experiments.maml.settings import (
    OPTIMIZERS,
    PRECISIONS,
    STRATEGIES,
    TASK_STRATEGIES,
    Config,
)

_LEAST_SCALE = 1.0


def step_weights(steps: int, epoch: int, epochs: int) -> list[float]:
    """Weights of the losses after each inner step: equal at first, in the end only the last.

    MAML++ anneals them over its first epochs.

    >>> step_weights(2, epoch=0, epochs=10)
    [0.5, 0.5]
    >>> step_weights(2, epoch=10, epochs=10)
    [0.0, 1.0]
    """
    if epoch >= epochs:
        return [0.0] * (steps - 1) + [1.0]
    even, least = 1 / steps, 0.03 / steps
    fallen = epoch * even / epochs
    early = max(even - fallen, least)
    last = min(even + (steps - 1) * fallen, 1 - (steps - 1) * least)
    return [early] * (steps - 1) + [last]


def task_loss(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    """Cross-entropy on the support set; with a query set in the batch, there as well."""
    x, y, *query = batch
    loss = cross_entropy(model(x), y)
    return (loss, cross_entropy(model(query[0]), query[1])) if query else loss


class FewShot(Resumable):
    """MAML++: initial weights and the inner optimizer's settings, learned by Adam."""

    saved = ("inner", "meta_optimizer", "outer")

    def __init__(self, model: nn.Module, config: Config, device: str = "cpu") -> None:
        self.model, self.config = model, config
        self.dtype = next(model.parameters()).dtype
        # A group for each tensor: layers learn at rates of their own.
        groups = [{"params": [p]} for p in model.parameters()]
        self.optimizer = OPTIMIZERS[config.inner_optim](groups, lr=config.inner_lr)
        learn: dict[str, Any] = {"init": True}
        if config.learn_rates:
            # MAML++ has a rate for each layer and step; with Adam the paper has one for each group.
            per_step = il.Learn(("group", "step"), steps=config.steps)
            learn["lr"] = il.Learn() if config.inner_optim == "adam" else per_step
        if config.learn_betas:
            learn["betas"] = il.Learn(transform="logit")
        self.inner = il.InnerLoop(
            model, self.optimizer, task_loss, learn=learn, backward=STRATEGIES[config.backward]()
        )
        self.meta_optimizer = torch.optim.Adam(self.inner.parameters(), lr=config.meta_lr)
        self.outer = OuterStep(
            self.meta_optimizer,
            precision=config.precision,
            nonfinite=config.nonfinite,
            clip=config.clip,
            device=device,
        )
        self.task_strategy = TASK_STRATEGIES[config.tasks_by]()
        self.diverged = 0
        """Tasks whose adaptation ended in NaN, among those that were only measured."""

    def update(self, episode: Episode, weights: Sequence[float], first_order: bool) -> float:
        """One outer step on a meta-batch; returns the loss before it."""
        self.inner.first_order = first_order
        self._copy_moments()
        ranks, total = self.outer.ranks, len(episode.support.y)
        own = episode.tasks(ranks.share(total)).to(self.dtype)
        with self.outer.autocast():
            loss = self.loss(own, weights) * (len(own.support.y) / total)
        self.outer.step(loss, lambda: self.blame(own, ranks.share(total).start))
        return ranks.sum(loss.detach()).item()

    def blame(self, episode: Episode, first: int = 0) -> str:
        """The task, step and tensor in which numbers stop being finite, of all processes."""
        own = self._find_divergence(episode, first)
        verdicts = [v.decode() for v in self.outer.ranks.gather((own or "-").encode())]
        if found := [verdict for verdict in verdicts if verdict != "-"]:
            return found[0]
        grads = {n: p.grad for n, p in self.inner.named_parameters() if p.grad is not None}
        names = [name for name, grad in grads.items() if not grad.norm().isfinite()]
        return f"all inner losses are finite; the gradient is not, for {', '.join(names)}"

    @torch.no_grad()
    def _find_divergence(self, episode: Episode, first: int) -> str | None:
        """The first inner loss that is not finite, and the largest weight before that step."""
        with self.outer.autocast():
            losses = self._adapt(episode, self.config.steps).losses
            broken = (~losses.isfinite()).nonzero()
            if not len(broken):
                return None
            task, step = broken[0].tolist()
            one = episode.tasks(slice(task, task + 1))
            model = self._adapt(one, step).each[0].module if step else self.model
        largest = {
            n: p.abs().max().nan_to_num(math.inf).item() for n, p in model.named_parameters()
        }
        name = max(largest, key=largest.__getitem__)
        return (
            f"the inner loss of task {first + task + 1} is not finite in step {step + 1}, with "
            f"weights as large as {largest[name]:.1e}, in {name}"
        )

    def _adapt(self, episode: Episode, steps: int) -> Any:
        return self.inner.adapt([tuple(episode.support)] * steps, tasks=il.tasks.loop())

    def loss(self, episode: Episode, weights: Sequence[float]) -> Tensor:
        """The weighted query losses after each step, meaned over the tasks."""
        steps = self.config.steps
        if all(w == 0 for w in weights[:-1]):
            train = [tuple(episode.support)] * steps
            return self.inner(train, tuple(episode.query), tasks=self.task_strategy).mean()
        batch = (*episode.support, *episode.query)
        adapted = self.inner.adapt([batch] * steps, tasks=il.tasks.loop())
        logits, labels = adapted(episode.query.x), episode.query.y
        last = cross_entropy(logits.flatten(0, 1), labels.flatten())
        # The query loss in step j is taken before that step: after j of them.
        after = [*adapted.aux.mean(0)[1:], last]
        return sum((w * v for w, v in zip(weights, after, strict=True)), last.new_zeros(()))

    @torch.no_grad()
    def probabilities(self, episode: Episode, measured: int | None = None) -> Tensor:
        """Predictions of the adapted models for the queries. [tasks, queries, way]

        A task that diverges gets equal probabilities; of the first ``measured`` tasks, these are
        counted in ``diverged``.
        """
        self._copy_moments()
        ranks, total = self.outer.ranks, len(episode.support.y)
        own = episode.tasks(ranks.share(total)).to(self.dtype)
        with self.outer.autocast():
            adapted = self.inner.adapt(
                [tuple(own.support)] * self.config.steps, tasks=self.task_strategy
            )
            predicted = adapted(own.query.x).to(self.dtype).softmax(-1)
        predicted = ranks.assemble(predicted, total)
        broken = ~predicted.isfinite().flatten(1).all(1)
        predicted[broken] = 1 / predicted.shape[-1]
        self.diverged += int(broken[:measured].sum())
        return predicted

    @property
    def settings(self) -> dict[str, list[Any]]:
        """The learned settings as numbers."""
        return {
            name: torch.stack(list(v)).tolist() if isinstance(v, tuple) else v.tolist()
            for name, v in self.inner.hyper.items()
        }

    def _copy_moments(self) -> None:
        """Starts inner Adam from the outer Adam's statistics, as the paper does."""
        if self.config.inner_optim != "adam":
            return
        for p in self.model.parameters():
            self.optimizer.state.pop(p, None)  # of another epoch, if this one has none
            if known := self.meta_optimizer.state.get(p):
                self.optimizer.state[p] = {name: value.clone() for name, value in known.items()}


class OuterStep(Resumable):
    """An outer optimizer that never takes a step along a gradient with infinities or NaNs.

    With ``nonfinite="skip"`` such an update is left out and counted, with ``"stop"`` it is an
    error that says where it comes from. In fp16 the loss is scaled up against underflow; an update
    that overflows while it is scaled up is left out in either case, and the scale lowered.
    """

    saved = ("skipped", "scaler")

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
        self.scaler = torch.amp.GradScaler(self._kind, enabled=precision == "fp16")

    def autocast(self) -> torch.autocast:
        """The precision of the forward pass, inner gradients included."""
        return torch.autocast(self._kind, self._dtype, enabled=self._dtype is not None)

    def step(self, loss: Tensor, blame: Callable[[], str]) -> None:
        """Backward and one update; ``loss`` is this process's part of the sum."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.ranks.sum_gradients(params)
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        if torch.isfinite(norm):
            if self.clip is not None:
                torch.nn.utils.clip_grads_with_norm_(params, self.clip, norm)
            self.scaler.step(self.optimizer)
        else:
            finite = bool(self.ranks.sum(loss.detach()).isfinite())
            overflows = finite and self.scaler.get_scale() > _LEAST_SCALE
            if self.nonfinite == "stop" and not overflows:
                raise InnerLoopError(self._explain(blame()))
            self.skipped += 1
        self.scaler.update()
        if self.scaler.is_enabled() and self.scaler.get_scale() < _LEAST_SCALE:
            self.scaler.update(_LEAST_SCALE)

    def _explain(self, where: str) -> str:
        advice = "Try a smaller --inner-lr or --meta-lr, --clip 10"
        if self._dtype is torch.float16:
            advice = (
                "--precision fp16 is the likely cause: its numbers end at 65504, and second "
                "derivatives in it are often not finite. Write --precision bf16 or float32"
            )
        return (
            f"The meta-gradient is not finite: {where}. {advice}, or --nonfinite skip to leave "
            "such updates out."
        )

"""One step and one validation loss under the tracer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from innerloop import _tree
from innerloop.diagnose.measure import as_leaves, measured, replica
from innerloop.diagnose.meta_parameters import MetaParameter
from innerloop.diagnose.tracer import Tracer
from innerloop.guard import closures
from innerloop.guard.second_order import _nodes as nodes
from innerloop.inner_loop import InnerLoop
from innerloop.modules.functional import functional
from innerloop.modules.replica import Template
from innerloop.step.state import State


class _Followed:
    """A template whose replicas are known to the tracer by a name."""

    def __init__(self, template: Template, prefix: str, tracer: Tracer, results: bool) -> None:
        self.template, self.prefix, self.tracer, self.results = template, prefix, tracer, results

    def bind(self, *args: Any) -> Any:
        replica = self.template.bind(*args)
        self.tracer.called(replica, self.prefix)
        return _noting(replica, self.tracer) if self.results else replica

    def __getattr__(self, name: str) -> Any:
        return getattr(self.template, name)


def _noting(loss: Any, tracer: Tracer) -> Any:
    """A loss whose result the tracer is told, whatever becomes of it."""

    def noted(*args: Any) -> Any:
        tracer.stage = "loss"
        out = loss(*args)
        tracer.result("loss", [out[0] if isinstance(out, tuple) and out else out])
        tracer.stage = "update"
        return out

    return noted


class Traced:
    """What the tracer saw of the first step and of the validation loss."""

    def __init__(self, inner: InnerLoop, phi: Sequence[MetaParameter]) -> None:
        self.inner = inner
        loss = inner.loss
        known = {id(p) for p in loss.parameters()} if isinstance(loss, nn.Module) else set()
        own = inner.model.named_parameters()
        outside = {id(p): f"model.{n}" for n, p in own if p.requires_grad and id(p) not in known}
        names = {id(p.tensor): p.name for p in phi if p.part != "init"}
        self.step = Tracer(names, outside)
        self.val = Tracer(names, outside)
        self.val.stage = "val_loss"
        self.strangers: list[str] = []
        """Tensors that the step closes over and that require grad."""
        self.functions: list[str] = []
        """The user's own autograd.Functions in the graph of the loss."""

    def run_step(self, batches: Sequence[Any]) -> None:
        """The first step, with everything that is computed for it."""
        tracer = self.step
        tracer.stage = "update"
        with tracer, torch.enable_grad():
            run = self.inner.prepared(len(batches))
            assert run.step.model is not None
            params = as_leaves(run.step.model, run.state.params)
            self._know(params, tracer)
            step = dataclasses.replace(
                run.step,
                model=_Followed(run.step.model, "model", tracer, False),  # type: ignore[arg-type]
                loss=_noting(run.step.loss, tracer),
                loss_model=_followed(run.step.loss_model, "loss", tracer, True),
                rule_model=_followed(run.step.rule_model, "optimizer", tracer, False),
            )
            new, out = step(run.state._replace(params=params), run.meta, batches[0])
        loss = out[0] if isinstance(out, tuple) else out
        tracer.result("update", _tree.flatten(new.params)[0])
        self.functions = _custom_functions(loss)
        outputs = [t for t in (loss, *_tree.flatten(new.params)[0]) if isinstance(t, Tensor)]
        self._note_strangers(outputs, [*params.values()], run.step.roots)

    def run_val(self, state: State, val: Any) -> None:
        """The validation loss at the weights that training ended with."""
        tracer, inner = self.val, self.inner
        template = functional(inner.model).template()
        params = as_leaves(template, state.params)
        self._know(params, tracer)
        module = replica(template, state, params)
        tracer.called(module, "model")
        measure = inner.loss if inner.val_loss is None else inner.val_loss
        if isinstance(measure, nn.Module):
            tracer.called(measure, "loss" if inner.val_loss is None else "val_loss")
        with tracer, torch.enable_grad():
            out = measured(inner, module, val)
        tracer.result("val_loss", [out])

    def _know(self, params: Mapping[str, Tensor], tracer: Tracer) -> None:
        tracer.names.update({id(p): f"model.{n}" for n, p in params.items() if p.requires_grad})

    def _note_strangers(
        self, outputs: Sequence[Tensor], given: Sequence[Tensor], roots: Any
    ) -> None:
        known = set(self.step.names) | set(self.step.outside)
        leaves, _ = closures.strangers(outputs, given, 0)
        for leaf in leaves:
            named = closures._found(lambda t, leaf=leaf: t is leaf, roots)
            # What has no name was made within the step, and its gradient stays there.
            if id(leaf) not in known and named is not None:
                self.strangers.append(f"{named[0]!r} of shape {tuple(leaf.shape)}")


def _followed(template: Any, prefix: str, tracer: Tracer, results: bool) -> Any:
    return None if template is None else _Followed(template, prefix, tracer, results)


def _custom_functions(loss: Tensor) -> list[str]:
    kinds = {type(node) for node in nodes([loss.grad_fn], set())}
    found = [kind._forward_cls for kind in kinds if hasattr(kind, "_forward_cls")]
    return sorted(c.__name__ for c in found if not c.__module__.startswith("innerloop"))

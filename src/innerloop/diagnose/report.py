"""What a diagnosis says, as data; printed, it is a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from innerloop.backward.auto import Forecast
from innerloop.diagnose.table import printed


class Difference(NamedTuple):
    """How a gradient compares with a finite difference of L_val along one direction."""

    verdict: str
    """``"agrees"``, ``"differs"`` or ``"not judged"``."""
    error: float | None = None
    """The distance between the two, relative to the larger one; ``None`` if both are zero."""
    width: float | None = None
    """How far the parameter was moved to either side, relative to its own size."""
    influence: bool = False
    """Whether moving the parameter changed L_val beyond rounding."""
    why: str = ""
    """What kept it from being judged, or what it was judged together with."""


class Row(NamedTuple):
    """One meta-parameter."""

    name: str
    """As in ``inner.named_parameters()``."""
    shape: tuple[int, ...]
    part: str
    """``"init"``, ``"setting"``, ``"loss"``, ``"optimizer"``, ``"val_loss"`` or ``"other"``."""
    reached: bool
    """Whether it gets a gradient that is finite and not zero."""
    requirement: str
    """The paper's requirement by which the gradient comes, or the one that does not hold."""
    norm: float | None
    """The norm of the gradient; ``None`` if there is none."""
    per_step: tuple[float, ...]
    """For an initial weight, the norm of its part of B_j, the gradient by the weights before
    step j. For any other, the norm of what step j adds to the gradient."""
    direct: float
    """The norm of what L_val adds without the steps, by using the parameter itself."""
    difference: Difference
    problem: str = ""
    """What is wrong, if anything."""
    write: str = ""
    """What to write instead."""


class Finding(NamedTuple):
    """One thing to know, and the meta-parameters that it concerns."""

    kind: str
    """``"broken"``: no gradient, or a wrong one. ``"no influence"``: the gradient is rightly zero.
    ``"by choice"``: an approximation that was asked for. ``"note"``: nothing is wrong."""
    problem: str
    where: tuple[str, ...] = ()
    """Lines and modules that have to do with it."""
    write: str = ""
    rows: tuple[str, ...] = ()
    message: str = ""
    """The error that was raised, in full."""


class Layer(NamedTuple):
    """A layer that does not run as it would in ordinary training."""

    path: str
    kind: str
    instead: str


@dataclass(frozen=True, repr=False)
class Report:
    """What :func:`innerloop.diagnose` found; printed, a table."""

    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    backward: str
    """The strategy the gradient was computed with."""
    steps: int
    val_loss: float | None
    losses: tuple[float, ...]
    """The training loss before each step."""
    grad_norms: tuple[float, ...]
    """The norm of the inner gradient G_j at each step."""
    b_norms: tuple[float, ...]
    """The norm of B_j = ∇L_val by the weights before step j, and after the last step."""
    layers: tuple[Layer, ...] = ()
    memory: Forecast | None = None
    """A forecast of the peak memory of every strategy, if there could be one."""

    @property
    def healthy(self) -> bool:
        """Whether every meta-parameter gets a gradient, and no finite difference contradicts."""
        return all(row.reached for row in self.rows) and not any(
            finding.kind == "broken" for finding in self.findings
        )

    def __getitem__(self, name: str) -> Row:
        """The row of a meta-parameter."""
        return {row.name: row for row in self.rows}[name]

    def __str__(self) -> str:
        return printed(self)

    __repr__ = __str__

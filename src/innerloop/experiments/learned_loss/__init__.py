"""A learned loss that trains nets in few steps (ML³).

``innerloop learned-loss`` learns one on sines and one on handwritten digits. Every task starts from
random weights. Then nets are trained on held-out tasks by SGD with clipped gradients: with the
learned loss, and with the task's own (squared error, cross-entropy) at the best of ten pairs of
learning rate and clip, chosen on other tasks: a constant factor could do no more. It reports how
many steps the learned loss needs for what the task's own reaches. Neither has momentum by default,
which does much for the task's own loss: compare --momentum 0.9.
"""

from collections.abc import Sequence

from innerloop.experiments.framework.experiment import run_command
from innerloop.experiments.learned_loss.settings import Config
from innerloop.experiments.learned_loss.training import LearningLosses

_NEXT = (
    "Next, see what a loss without hints learns: {innerloop} learned-loss --no-read-step "
    "--no-read-input --out out/plain"
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("learned-loss", __doc__, Config, LearningLosses, argv, _NEXT)

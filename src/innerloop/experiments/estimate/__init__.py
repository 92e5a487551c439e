"""Metrics without a gradient: a loss learned by F1 itself, beside one learned by a proxy.

``innerloop estimate`` trains a linear model to find a rare character among others. The weights
that its loss gives to each character, and its learning rate, are learned by the validation set: by
the exact gradient of the cross-entropy (the proxy), by that of the expected F1 (REINFORCE), or by
evolution strategies on F1. All are evaluated by the F1 score on test images.
"""

from collections.abc import Sequence

from innerloop.experiments.estimate.settings import Config
from innerloop.experiments.estimate.training import Comparison
from innerloop.experiments.framework.experiment import run_command

_NEXT = "Next, make the search easier: {innerloop} estimate --noise 0.2 --out out/estimate-easy"


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("estimate", __doc__, Config, Comparison, argv, _NEXT)

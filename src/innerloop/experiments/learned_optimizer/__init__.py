"""Learned optimizers against tuned ones, on quadratics and on a network that learns digits.

``innerloop learned-optimizer`` meta-trains an optimizer for each seed, and lets it train problems
it has not seen, for as many steps as it was trained for and for longer. SGD, Adam and RMSprop do
the same with the rate of a fine grid that is best on problems of meta-training, chosen for each
horizon and each metric by itself.
"""

from collections.abc import Sequence

from innerloop.experiments.framework.experiment import run_command
from innerloop.experiments.learned_optimizer.settings import Config
from innerloop.experiments.learned_optimizer.training import Comparison

_NEXT = "Next, learn a network in the LSTM's place: {innerloop} learned-optimizer --optimizer mlp"


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("learned-optimizer", __doc__, Config, Comparison, argv, _NEXT)

"""Hyperparameters learned by the gradient of the validation loss, against random search.

``innerloop hyperopt`` searches weight decays, label smoothing, augmentations, weights of training
points or of tasks, with the same compute and in the same range each way, over several seeds.
Defaults are those of ``--what weight-decay --dataset digits``; others have others.
"""

from collections.abc import Sequence

from innerloop.experiments.framework.experiment import run_command
from innerloop.experiments.hyperopt.settings import Config
from innerloop.experiments.hyperopt.training import Search

_NEXT = (
    "Next, learn which labels are wrong: {innerloop} hyperopt --what example-weights --out out/w"
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("hyperopt", __doc__, Config, Search, argv, _NEXT)

"""Learning rates that are meta-learned while an ordinary training run goes on (section 5.1).

``innerloop meta-lr`` trains DenseNet-BC in three ways, with some seeds each: at a fixed rate, with
a schedule made by hand, and with a rate for each tensor that is learned after every epoch.
"""

from collections.abc import Sequence

from innerloop.experiments.framework.experiment import run_command
from innerloop.experiments.meta_lr.settings import Config
from innerloop.experiments.meta_lr.training import MetaLr

_NEXT = (
    "Next, learn more of the optimizer: "
    "{innerloop} meta-lr --learn lr,momentum,weight_decay --out out/more"
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("meta-lr", __doc__, Config, MetaLr, argv, _NEXT)

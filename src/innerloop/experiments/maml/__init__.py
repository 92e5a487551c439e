"""Few-shot classification by MAML++, over models and inner optimizers.

``innerloop maml`` trains, keeps everything in a folder, and ends with the accuracy on test tasks.
Defaults are those of ``--dataset glyphs``; other datasets and inner optimizers have others.
"""

from collections.abc import Sequence

from innerloop.experiments.framework.experiment import run_command
from innerloop.experiments.maml.settings import Config
from innerloop.experiments.maml.training import Training

_NEXT = "Next, try another inner optimizer: {innerloop} maml --inner-optim adam --out out/adam"


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("maml", __doc__, Config, Training, argv, _NEXT)

"""MAML for reinforcement learning: policies that adapt to a new goal, or new physics, by a step.

``innerloop maml-rl`` meta-trains a policy for every seed and measures its return on held-out tasks
before adaptation and after 1, 2 and 3 steps. Defaults are those of ``--world navigation``; the
other world has others.
"""

from collections.abc import Sequence

from innerloop.experiments.framework.experiment import run_command
from innerloop.experiments.maml_rl.settings import Config
from innerloop.experiments.maml_rl.training import Training

_NEXT = "Next, balance poles: {innerloop} maml-rl --world cartpole --out out/maml-rl-cartpole"


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("maml-rl", __doc__, Config, Training, argv, _NEXT)

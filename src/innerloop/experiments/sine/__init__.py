"""MAML on sinusoid regression, against a net pre-trained without meta-learning.

A task is one sine wave, amplitude in [0.1, 5] and phase in [0, pi], seen through ten support
points. Both nets start from the same weights, see the same tasks and take the same number of
outer updates. The first is trained so that a few gradient steps on the support points make it
fit that sine (MAML, Finn et al. 2017), and the learning rate of these steps is learned with it. The
second is trained to predict all sines at once. Then both adapt to sines they have never seen, the
second with the rate that suits it best.
"""

from collections.abc import Sequence

import torch

from innerloop.experiments.framework.experiment import run_command
from innerloop.experiments.sine.settings import Config
from innerloop.experiments.sine.training import Comparison

_NEXT = "Next, learn to adapt in five steps: {innerloop} sine --steps 5 --out out/sine-5"


def main(argv: Sequence[str] | None = None) -> int:
    # Such small tensors gain nothing from more threads, and one thread makes sums reproducible.
    torch.set_num_threads(1)
    return run_command("sine", __doc__, Config, Comparison, argv, _NEXT)

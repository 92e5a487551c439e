"""``innerloop maml``."""

from innerloop.experiments.maml.training import main as main

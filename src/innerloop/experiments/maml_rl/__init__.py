"""``innerloop maml-rl``."""

from innerloop.experiments.maml_rl.training import main as main

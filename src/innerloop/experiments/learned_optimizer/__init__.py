"""``innerloop learned-optimizer``."""

from innerloop.experiments.learned_optimizer.training import main as main

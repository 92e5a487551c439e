"""``innerloop learned-loss``."""

from innerloop.experiments.learned_loss.training import main as main

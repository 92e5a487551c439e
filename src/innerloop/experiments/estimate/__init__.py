"""``innerloop estimate``."""

from innerloop.experiments.estimate.training import main as main

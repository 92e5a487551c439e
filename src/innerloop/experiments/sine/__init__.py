"""``innerloop sine``."""

from innerloop.experiments.sine.training import main as main

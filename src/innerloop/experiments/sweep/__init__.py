"""``innerloop sweep``."""

from innerloop.experiments.sweep.command import main as main

"""``innerloop data``."""

from innerloop.experiments.data.command import main as main

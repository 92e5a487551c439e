"""``innerloop report``."""

from innerloop.experiments.report.command import main as main

"""``innerloop meta-lr``."""

from innerloop.experiments.meta_lr.training import main as main

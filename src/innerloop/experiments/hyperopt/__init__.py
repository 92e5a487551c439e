"""``innerloop hyperopt``."""

from innerloop.experiments.hyperopt.training import main as main

"""Optimizers that are learned: modules with parameters, for inner loops and for anyone's loop."""

from innerloop.learned._coordinates import Coordinates as Coordinates
from innerloop.learned._optimizer import LearnedOptimizer as LearnedOptimizer
from innerloop.learned._torch import TorchOptimizer as TorchOptimizer
from innerloop.learned.losses import LearnedLoss as LearnedLoss
from innerloop.learned.lstm import LSTMOptimizer as LSTMOptimizer
from innerloop.learned.mlp import MLPOptimizer as MLPOptimizer
from innerloop.learned.rates import LSLR as LSLR
from innerloop.learned.rates import MetaSGD as MetaSGD

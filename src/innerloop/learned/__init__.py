"""Learned optimizers and losses: modules with parameters, for inner loops and other loops."""

from innerloop.learned.coordinates import Coordinates as Coordinates
from innerloop.learned.losses import LearnedLoss as LearnedLoss
from innerloop.learned.lstm import LSTMOptimizer as LSTMOptimizer
from innerloop.learned.mlp import MLPOptimizer as MLPOptimizer
from innerloop.learned.optimizer import LearnedOptimizer as LearnedOptimizer
from innerloop.learned.rates import LSLR as LSLR
from innerloop.learned.rates import MetaSGD as MetaSGD
from innerloop.learned.torch_optimizer import TorchOptimizer as TorchOptimizer

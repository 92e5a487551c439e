"""Strategies: which states to keep, and in what order to visit the steps again.

One file for each. Schedules are pure Python and know no tensors; a strategy is handed a step and
never asks what is in it.
"""

from innerloop.backward.auto import Auto as Auto
from innerloop.backward.binomial import Binomial as Binomial
from innerloop.backward.forward import Forward as Forward
from innerloop.backward.implicit import Implicit as Implicit
from innerloop.backward.remat import Remat as Remat
from innerloop.backward.strategy import Backward as Backward
from innerloop.backward.tape import Tape as Tape
from innerloop.backward.truncated import Truncated as Truncated

"""Exact gradients through training: inner loops, optimizers and losses you can differentiate."""

from innerloop import compat as compat
from innerloop import optim as optim
from innerloop.backward import Binomial as Binomial
from innerloop.backward import Remat as Remat
from innerloop.backward import Tape as Tape
from innerloop.backward import Truncated as Truncated
from innerloop.clipping import clip_norm as clip_norm
from innerloop.clipping import clip_value as clip_value
from innerloop.diffopt import DifferentiableOptimizer as DifferentiableOptimizer
from innerloop.eager import apply_trainable_opt_params as apply_trainable_opt_params
from innerloop.eager import create_diff_optim as create_diff_optim
from innerloop.eager import get_diff_optim as get_diff_optim
from innerloop.eager import get_trainable_opt_params as get_trainable_opt_params
from innerloop.eager import innerloop_ctx as innerloop_ctx
from innerloop.eager import monkeypatch as monkeypatch
from innerloop.eager import register_optim as register_optim
from innerloop.errors import InnerLoopError as InnerLoopError
from innerloop.errors import RequirementError as RequirementError
from innerloop.functional import Functional as Functional
from innerloop.functional import functional as functional
from innerloop.inner_loop import InnerLoop as InnerLoop
from innerloop.learn import Learn as Learn
from innerloop.step import Meta as Meta
from innerloop.step import State as State
from innerloop.step import inner_step as inner_step
from innerloop.unroll import unroll as unroll

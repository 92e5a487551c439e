"""The interface of the library ``higher``, module by module.

``import innerloop.compat.higher as higher`` runs code written for it; after :func:`install`, that
code's own ``import higher`` finds this package. The modules have the aliases too under which
``higher`` imports its dependencies (``_torch``, ``_typing``, ...): public code uses them.
"""

from __future__ import annotations

import sys
import typing as _typing  # noqa: F401
from contextlib import contextmanager as _contextmanager  # noqa: F401

import torch as _torch  # noqa: F401

from innerloop.compat.higher import optim as optim
from innerloop.compat.higher import patch as patch
from innerloop.compat.higher import utils as utils
from innerloop.compat.higher.optim import apply_trainable_opt_params as apply_trainable_opt_params
from innerloop.compat.higher.optim import create_diff_optim as create_diff_optim
from innerloop.compat.higher.optim import get_diff_optim as get_diff_optim
from innerloop.compat.higher.optim import get_trainable_opt_params as get_trainable_opt_params
from innerloop.compat.higher.optim import register_optim as register_optim
from innerloop.compat.higher.patch import monkeypatch as monkeypatch
from innerloop.eager.interface import innerloop_ctx as innerloop_ctx

__all__ = ["innerloop_ctx"]


def install() -> None:
    """Make ``import higher``, ``import higher.patch`` and so on mean this package.

    >>> install()
    >>> import higher
    >>> higher.innerloop_ctx is innerloop_ctx
    True
    """
    sys.modules["higher"] = sys.modules[__name__]
    for module in (optim, patch, utils):
        sys.modules[f"higher.{module.__name__.rsplit('.', 1)[-1]}"] = module

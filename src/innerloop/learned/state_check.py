"""Modules that check the kind of a state before they load it."""

from __future__ import annotations

from typing import Any

from torch import nn


class StateCheckedModule(nn.Module):
    """A module whose ``set_extra_state`` may refuse a state before any parameter is changed.

    Torch copies the parameters first, and calls ``set_extra_state`` afterwards.
    """

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **more: Any) -> None:
        name = prefix + "_extra_state"
        if name in state_dict:
            self.set_extra_state(state_dict[name])
        super()._load_from_state_dict(state_dict, prefix, *args, **more)

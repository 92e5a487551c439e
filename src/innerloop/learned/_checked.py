"""Modules that look at what kind a state is of before they take it over."""

from __future__ import annotations

from typing import Any

from torch import nn


class Checked(nn.Module):
    """``set_extra_state`` may refuse a state, and the parameters are as they were.

    Torch copies the parameters first, and hands over the rest afterwards.
    """

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **more: Any) -> None:
        name = prefix + "_extra_state"
        if name in state_dict:
            self.set_extra_state(state_dict[name])
        super()._load_from_state_dict(state_dict, prefix, *args, **more)

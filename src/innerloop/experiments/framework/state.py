"""State that a checkpoint keeps, from the names of attributes."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class Stateful(Protocol):
    """A module, an optimizer, a sampler, …"""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class Resumable:
    """Saves the attributes named in ``saved``: states of modules and the like, other values."""

    saved: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        return {name: _state_of(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.saved:
            value = getattr(self, name)
            if isinstance(value, torch.Generator):
                value.set_state(state[name])
            elif isinstance(value, Stateful):
                value.load_state_dict(state[name])
            else:
                setattr(self, name, state[name])


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if isinstance(value, Stateful) else value

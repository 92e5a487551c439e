"""One task after another."""

from __future__ import annotations

import dataclasses
from typing import Any

from innerloop.tasks.way import Ended, Way, one_after_another


@dataclasses.dataclass
class loop(Way):
    """One task after another: for every model, and the measure for the other ways."""

    def attempt(self, tasks: Any) -> Ended:
        return one_after_another(tasks)

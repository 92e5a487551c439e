"""Hostile inputs: a factor for the number that tests make up, and counts of those tried."""

import os
from collections import Counter

TIMES = int(os.environ.get("INNERLOOP_FUZZ", "1"))
TRIED: Counter[str] = Counter()


def summary() -> str:
    each = ", ".join(f"{count} {what}" for what, count in TRIED.items())
    return f"{TRIED.total()} hostile inputs: {each}"

"""How many hostile inputs the tests make up: so many times the usual number, and those tried."""

import os
from collections import Counter

TIMES = int(os.environ.get("INNERLOOP_FUZZ", "1"))
TRIED: Counter[str] = Counter()


def told() -> str:
    each = ", ".join(f"{count} {what}" for what, count in TRIED.items())
    return f"{TRIED.total()} hostile inputs: {each}"

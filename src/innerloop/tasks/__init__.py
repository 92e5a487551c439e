"""Ways to adapt all tasks of a meta-batch: :class:`auto`, :class:`loop`, :class:`threads` and
:class:`vmap`. They differ in time and memory, not in the gradient."""

from innerloop.tasks.auto import auto as auto
from innerloop.tasks.loop import loop as loop
from innerloop.tasks.threads import threads as threads
from innerloop.tasks.vmap import vmap as vmap
from innerloop.tasks.way import Way as Way

"""Ways to adapt all tasks of a meta-batch: :class:`auto`, :class:`loop`, :class:`threads` and
:class:`vmap`. They differ in time and memory, not in the gradient."""

from innerloop.tasks._auto import auto as auto
from innerloop.tasks._loop import loop as loop
from innerloop.tasks._threads import threads as threads
from innerloop.tasks._vmap import vmap as vmap
from innerloop.tasks._way import Way as Way

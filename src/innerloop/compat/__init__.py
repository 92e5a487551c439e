"""Other libraries' interfaces on top of this one."""

from innerloop.compat import higher as higher

"""Memory that the command keeps between meta-steps, in processes of their own."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(os, "confstr_names") or "CS_GNU_LIBC_VERSION" not in os.confstr_names,
    reason="needs glibc",
)

FAULTS = """
import resource
from innerloop.experiments import _allocator
{first}

def fill():
    for _ in range(20):
        bytearray(b"1") * (1 << 26)

fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
ALL = 20 * (1 << 26) // os.sysconf("SC_PAGE_SIZE")


def faults(first, **settings):
    own = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    code = FAULTS.format(first=first)
    how = {"env": kept | settings, "capture_output": True, "text": True, "check": True}
    return int(subprocess.run([sys.executable, "-c", code], **how).stdout)


def test_freed_memory_is_kept():
    assert faults("") > ALL // 600  # pages may be huge ones, of 512
    assert faults("_allocator.keep_freed()") < ALL // 6000


def test_settings_of_the_user_stand():
    assert faults("_allocator.keep_freed()", MALLOC_MMAP_THRESHOLD_="65536") > ALL // 600

"""Memory that is freed and kept: by the command between meta-steps, by a walk between steps."""

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
from innerloop import _allocator
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


def run(code, **settings):
    own = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    how = {"env": kept | settings, "stdout": subprocess.PIPE, "text": True, "check": True}
    found = subprocess.run([sys.executable, "-c", code], timeout=300, **how).stdout.split()
    return int(found[0]) if len(found) == 1 else [int(word) for word in found]


def faults(first, **settings):
    return run(FAULTS.format(first=first), **settings)


def test_freed_memory_is_kept():
    assert faults("") > ALL // 600  # pages may be huge ones, of 512
    assert faults("_allocator.keep_freed()") < ALL // 6000


def test_settings_of_the_user_stand():
    assert faults("_allocator.keep_freed()", MALLOC_MMAP_THRESHOLD_="65536") > ALL // 600


def test_what_is_kept_for_a_while_is_given_back():
    assert faults("kept = _allocator.freed_kept(); kept.__enter__()") < ALL // 6000
    assert faults("with _allocator.freed_kept(): bytearray(1 << 26)") > ALL // 600


def test_the_last_to_leave_gives_it_back():
    first = "kept = [_allocator.freed_kept() for _ in range(2)]\n[k.__enter__() for k in kept]\n"
    assert faults(first + "kept[0].__exit__(None, None, None)") < ALL // 6000
    assert faults(first + "[k.__exit__(None, None, None) for k in kept]") > ALL // 600


def test_what_is_kept_for_good_stays_after_a_while():
    first = "_allocator.keep_freed()\nwith _allocator.freed_kept(): pass"
    assert faults(first) < ALL // 6000


LOOPS = """
import resource, torch
import innerloop as il
from innerloop import _allocator

torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
data = torch.randn(9 << 17, 8)  # 36 MB, as is each activation: glibc returns them at once


def loss(model, x):
    return model(x).tanh().tanh().square().mean()


def counted(function):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    function()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def loop(backward):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return il.InnerLoop(model, optimizer, loss, backward=backward)
"""

WALK = """
def walked(steps):
    return counted(lambda: loop(il.Remat())([data] * steps, data[:8]).backward())

walked(2)
print(walked(5) - walked(2))
"""

AGAIN = """
inner = loop(il.Tape())
for _ in range(3):
    last = counted(lambda: inner([data] * 2, data[:8]).backward())
print(last)
"""

GONE = """
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if "VmRSS" in line)

inner = loop({})
before = resident()
for _ in range(3):
    inner([data] * 2, data[:8]).backward()
during = resident()
del inner
print(during - before, resident() - before)
"""


@pytest.mark.parametrize("code", [WALK, AGAIN], ids=["steps of a walk", "repeated calls"])
def test_they_use_the_memory_of_those_before(code):
    without = run(LOOPS + code, MALLOC_MMAP_THRESHOLD_=str(1 << 25))
    assert run(LOOPS + code) < without // 4


@pytest.mark.parametrize("backward", ["il.Tape()", "il.Remat()"])
def test_a_loop_that_is_gone_keeps_nothing(backward):
    held, left = run(LOOPS + GONE.replace("{}", backward))
    assert held > 100_000  # kB
    assert left < 20_000


HUNG = """
import os, threading
from innerloop import _allocator

entered, leave = threading.Event(), threading.Event()


def busy():
    with _allocator._lock:
        entered.set()
        leave.wait()


threading.Thread(target=busy).start()
entered.wait()
child = os.fork()
if child == 0:
    with _allocator.freed_kept():
        pass
    os._exit(0)
os.waitpid(child, 0)
leave.set()
print(0)
"""


def test_a_fork_while_another_thread_has_the_lock():
    assert run(HUNG) == 0

"""Dependencies between the package's files point one way, and importing it needs only torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import innerloop

PACKAGE = Path(innerloop.__file__).parent

# Each part may import from itself and from those named; `__init__` re-exports and is not ruled.
FOUNDATIONS = {"_tree", "_numerics", "_watch", "errors"}
CORE = FOUNDATIONS | {
    "_tracing",
    "nn",
    "_kernels",
    "_rebind",
    "_second_order",
    "functional",
    "optim",
}
AROUND = {"_allocator", "_ambient", "_captured", "_deferred", "_gradient", "_linear", "_mapped"}
AROUND |= {"_memory", "_fingerprint"}
STEP = {"state", "_evaluation", "_task_evaluation", "_linearized", "_stationary", "step"}
LOOP = CORE | AROUND | STEP | {"backward", "unroll", "learn", "schedules", "adapted", "tasks"}
ALLOWED = {
    "errors": set(),
    "_tree": set(),
    "_numerics": set(),
    "_watch": set(),
    "_fingerprint": set(),
    "_tracing": set(),
    "nn": {"_tracing"},
    "_kernels": {"errors", "nn", "_watch"},
    "_second_order": {"errors"},
    "_rebind": set(),
    "functional": FOUNDATIONS | {"_kernels", "_rebind"},
    "optim": FOUNDATIONS,
    "_allocator": set(),
    "_ambient": {"errors"},
    "_captured": FOUNDATIONS,
    "_deferred": {"errors", "_tree"},
    "_gradient": {"errors", "_tracing"},
    "_linear": set(),
    "_mapped": FOUNDATIONS,
    "_memory": FOUNDATIONS,
    "state": FOUNDATIONS,
    "_evaluation": CORE | AROUND | {"state"},
    "_task_evaluation": CORE | AROUND | {"state", "_evaluation"},
    "_linearized": CORE | AROUND | {"state", "_evaluation"},
    "_stationary": {"errors", "optim"},
    "step": CORE | AROUND | (STEP - {"step"}),
    "backward": FOUNDATIONS | AROUND,
    "unroll": {"_tree", "errors", "backward"},
    "learn": FOUNDATIONS | {"optim"},
    "schedules": {"errors", "learn"},
    "clipping": FOUNDATIONS,
    "adapted": CORE | {"_mapped", "state", "tasks"},
    "tasks": FOUNDATIONS | AROUND,
    "prepared": LOOP,
    "_parts": {"errors", "learn"},
    "compiled": LOOP | {"prepared"},
    "inner_loop": LOOP | {"prepared", "compiled", "_parts"},
    "meta_update": {"errors", "_ambient", "tasks", "inner_loop", "unroll"},
    "diagnose": LOOP | {"prepared", "inner_loop"},
    "plot": LOOP | {"inner_loop", "diagnose"},
    "estimate": LOOP | {"inner_loop"},
    "algorithms": {"errors", "backward", "learn", "inner_loop"},
    "policies": {"errors", "_numerics"},
    "fmodel": FOUNDATIONS | {"_kernels", "_rebind", "functional"},
    "diffopt": CORE | {"_gradient", "fmodel"},
    "eager": CORE | {"fmodel", "diffopt"},
    "compat": CORE | {"fmodel", "diffopt", "eager"},
    "learned": {"errors", "functional", "optim", "_numerics"},
    "data": {"errors"},
    "models": {"errors"},
}
# These use the package as anybody does: by its public names.
OUTSIDE = {"experiments", "__main__"}


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """The parts of the package that a file imports, at its top or anywhere in it."""
    found = set()
    package = ("innerloop", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        split = [name.split(".") for name in names]
        found |= {parts[1] if len(parts) > 1 else "" for parts in split if parts[0] == "innerloop"}
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.name != "__init__.py")


def test_every_part_has_a_rule():
    assert {part_of(path) for path in FILES} == ALLOWED.keys() | OUTSIDE


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_dependencies_point_one_way(path):
    part = part_of(path)
    if part in OUTSIDE:
        public = set(vars(innerloop)) | OUTSIDE | {"", "data", "models"}
        private = {name for name in imported_parts(path) if name.startswith("_")}
        assert private <= {part, "__main__"}
        assert imported_parts(path) <= public
    else:
        assert imported_parts(path) <= ALLOWED[part] | {part}


def test_the_rule_sees_every_way_to_import(tmp_path, monkeypatch):
    source = """
import innerloop
import innerloop.alpha.inner
from innerloop import beta
from innerloop.gamma import name
from . import delta
from .. import epsilon
from ..zeta import name
import torch
def late():
    from innerloop.eta.deep import name
"""
    path = tmp_path / "part" / "file.py"
    path.parent.mkdir()
    path.write_text(source)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    parts = {"", "alpha", "beta", "gamma", "part", "epsilon", "zeta", "eta"}
    assert imported_parts(path) == parts


def test_the_rules_have_no_circle():
    rest = dict(ALLOWED)
    while rest:
        free = [part for part, needs in rest.items() if not needs & rest.keys()]
        assert free, f"a circle among {sorted(rest)}"
        for part in free:
            del rest[part]


def test_only_one_file_knows_torch_pytree():
    using = [path.name for path in FILES if "_pytree" in path.read_text()]
    assert using == ["_tree.py"]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    return set(run.stdout.split())


def test_importing_the_package_needs_torch_and_nothing_else():
    with_torch = modules_after("import torch, torch.nn.utils.parametrizations")
    with_package = modules_after("import innerloop")
    added = with_package - with_torch - set(sys.stdlib_module_names)
    assert added == {"innerloop"}


def test_importing_the_package_does_not_change_torch():
    """Neither the default dtype, nor the attention switches, nor the random state."""
    code = """
import torch
from torch.backends import cuda
def state():
    return (torch.get_default_dtype(), torch.get_num_threads(), cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(), torch.initial_seed(), torch.rand(1).item())
torch.manual_seed(3)
before = state()
torch.manual_seed(3)
import innerloop
assert state() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)

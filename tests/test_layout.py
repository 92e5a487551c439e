"""Rooms of the package: dependencies point one way, and importing it needs only torch."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import innerloop

PACKAGE = Path(innerloop.__file__).parent
LAYERS, ROOT_FILES = 12, 16

# A room is a folder, or a file of the root. Each may import from itself and from those named.
GROUND = {"errors", "_tree", "_numerics"}
BELOW_GUARD = GROUND | {"nn", "modules", "optim"}
BELOW_UNROLL = BELOW_GUARD | {"guard", "step", "backward"}
BELOW_LOOP = BELOW_UNROLL | {"unroll", "tasks"}
LOOP = {"adapted", "settings", "call", "compile", "inner_loop"}
ABOVE = {"meta_update", "diagnose", "plot", "estimate", "algorithms"}
MAY_IMPORT = {
    **{room: set() for room in GROUND},
    "nn": GROUND,
    "modules": GROUND | {"nn"},
    "optim": GROUND,
    "guard": BELOW_GUARD,
    "step": BELOW_GUARD | {"guard"},
    "backward": {"errors", "_tree", "guard", "step"},
    "unroll": BELOW_UNROLL,
    "tasks": BELOW_UNROLL | {"unroll"},
    **dict.fromkeys(LOOP, BELOW_LOOP | LOOP),
    **dict.fromkeys(ABOVE, BELOW_LOOP | LOOP | ABOVE),
    "eager": BELOW_GUARD | {"guard"},
    "compat": BELOW_GUARD | {"guard", "eager"},
    "learned": {"errors", "_numerics", "modules", "optim"},
    "policies": {"errors", "_numerics"},
    "data": {"errors"},
    "models": {"errors"},
}
# These use the package as anybody does: by its public names.
OUTSIDE = {"experiments", "__main__"}
# What a strategy may know of a step.
PROTOCOL = "step.protocol"


def module_of(path: Path) -> str:
    """The dotted name inside the package; the empty string for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return module.partition(".")[0]


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
FILES = {module: path for module, path in MODULES.items() if module}


def imports(path: Path) -> list[tuple[str, str, bool]]:
    """(module, name, at once) of all imports from the package; no name for ``import module``.

    At once: when the file is imported, not in a function or for a type checker only.
    """
    tree = ast.parse(path.read_text())
    package = ("innerloop", *path.relative_to(PACKAGE).parent.parts)
    later = {id(inner) for node in ast.walk(tree) if _is_later(node) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            pairs = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            pairs = [(module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in pairs:
            top, _, inside = module.partition(".")
            if top == "innerloop":
                found.append((inside, name, id(node) not in later))
    return found


def _is_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef)


def joined(module: str, name: str) -> str:
    return ".".join(part for part in (module, name) if part)


def imported_rooms(path: Path) -> set[str]:
    return {room_of(joined(module, name)) for module, name, _ in imports(path)}


def defining_module(module: str, name: str) -> str:
    """The module that a name comes from, through packages that hand it on."""
    if joined(module, name) in MODULES:
        return joined(module, name)
    path = MODULES[module]
    if path.name == "__init__.py":
        for source, handed_on, _ in imports(path):
            if handed_on == name:
                return defining_module(source, name)
    return module


@functools.cache
def longest_chain(module: str) -> tuple[str, ...]:
    """The longest chain of modules, each of which imports the next at once."""
    needs = {defining_module(m, name) for m, name, at_once in imports(MODULES[module]) if at_once}
    below = [longest_chain(other) for other in sorted(needs - {module})]
    return (module, *max(below, key=len, default=()))


def test_every_room_has_a_rule():
    assert {room_of(module) for module in FILES} == MAY_IMPORT.keys() | OUTSIDE


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_dependencies_between_rooms_point_one_way(room):
    for module, path in FILES.items():
        if room_of(module) == room:
            assert imported_rooms(path) <= MAY_IMPORT[room] | {room}, module


def test_strategies_know_only_the_protocol_of_a_step():
    for module, path in FILES.items():
        if room_of(module) == "backward":
            known = {joined(m, name) for m, name, _ in imports(path) if room_of(m) == "step"}
            assert all(name.startswith(PROTOCOL) for name in known), module


def test_commands_use_public_names():
    public = set(vars(innerloop)) | OUTSIDE | {"", "data", "models"}
    for module, path in FILES.items():
        if room_of(module) in OUTSIDE:
            assert imported_rooms(path) <= public, module
            private = {name for name in imported_rooms(path) if name.startswith("_")}
            assert private <= {"__main__"}, module


def test_the_rules_have_no_circle():
    rest = {room: MAY_IMPORT[room] - {room} for room in MAY_IMPORT if room not in LOOP | ABOVE}
    while rest:
        free = [room for room, needs in rest.items() if not needs & rest.keys()]
        assert free, f"a circle among {sorted(rest)}"
        for room in free:
            del rest[room]


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
    path = tmp_path / "room" / "file.py"
    path.parent.mkdir()
    path.write_text(source)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    rooms = {"", "alpha", "beta", "gamma", "room", "epsilon", "zeta", "eta"}
    assert imported_rooms(path) == rooms


def test_few_files_in_the_root():
    assert len(list(PACKAGE.glob("*.py"))) <= ROOT_FILES


def test_the_longest_chain_of_imports():
    """A package that hands names on is no layer. A circle would be a recursion without end."""
    library = [m for m in FILES if room_of(m) not in OUTSIDE]
    library = [m for m in library if MODULES[m].name != "__init__.py"]
    chain = max([longest_chain(module) for module in library], key=len)
    assert len(chain) <= LAYERS, " -> ".join(chain)


def test_only_one_file_knows_torch_pytree():
    using = [module for module, path in FILES.items() if "_pytree" in path.read_text()]
    assert using == ["_tree"]


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

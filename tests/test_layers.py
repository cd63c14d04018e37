"""The order of imports (docs/developers/architecture.md), and a test of that test with planted violations.

    errors < types < geometry < plans < {synth, lower, hlo} < runtime < show < {names, proofs, mpi, doctor}
    < {jax, draw} < {files, dispatch} < reshard < cli

A package imports itself and what stands to the left of it; packages in braces do not import each other. `reshard`
is the package's own `__init__`. Imports are read from the source, late ones included: see `tests/imports.py`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.imports import Module, circles, modules

PACKAGE = Path(__file__).resolve().parent.parent / "reshard"

ROOT = "reshard"
ORDER = [
    {"errors"},
    {"types"},
    {"geometry"},
    {"plans"},
    {"synth", "lower", "hlo"},
    {"runtime"},
    {"show"},
    {"names", "proofs", "mpi", "doctor"},
    {"jax", "draw"},
    {"files", "dispatch"},
    {ROOT},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
ALLOWED = {  # `draw` and HTML of plans and trees: a method of a plan is where users look for its picture
    ("plans.plan", "draw.pictures"),
    ("plans.plan", "draw.plan_page"),
    ("synth.choice.trade_off", "draw.trade_off"),  # and so is that of what memory buys
    ("synth.choice.trade_off", "draw.paint_svg"),
    ("types.layout", "runtime.numpy_tiles"),  # `tiles` and `assemble`: cutting an array is numpy's
}
STANDARD_LIBRARY_ONLY = {"errors", "types", "geometry", "plans"}
JAX = {"lower.to_shard_map", "lower.to_stablehlo", "runtime.on_jax", "jax"}
FILES = {"runtime.on_files"}
ONLY_IN = {"jax": JAX, "jaxlib": JAX, "mpi4py": {"runtime.on_mpi", "mpi"}, "z3": {"proofs"}}
ONLY_IN |= dict.fromkeys(["safetensors", "tensorstore", "zarr", "h5py"], FILES)
FOR_PEOPLE = {"rich": "show", "matplotlib": "show"}  # the lowest package that may import the library
SAME_ON_EVERY_RANK = {"types", "geometry", "plans", "synth"}  # a plan must not depend on the process that makes it
OF_THE_PROCESS = {"socket", "multiprocessing", "platform"}
OF_THE_PROCESS_IN_OS = {"environ", "getenv", "getpid", "cpu_count", "uname"}  # os.PathLike does no harm
LATE = ["jax", "jaxlib", "mpi4py", "z3", "scipy", "rich", "matplotlib", "numpy", *ONLY_IN]
OWN_MODULES = 30  # `import reshard` loads fewer


def violations(root: Path) -> list[str]:
    """Everything in the package at `root` that breaks a rule, as 'file:line: what'."""
    broken = [(module, line, what) for module in modules(root) for line, what in _broken(module)]
    return [f"{module.file}:{line}: {what}" for module, line, what in broken]


def loaded_by_import(root: Path, names: str) -> list[str]:
    """What a fresh interpreter has in `sys.modules` after `import reshard`, filtered by an expression on `m`."""
    code = f"import sys, reshard; print(*sorted(m for m in sys.modules if {names}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=root.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def _broken(module: Module) -> list[tuple[int, str]]:
    return sorted({*_imports(module), *_state(module)})


def _package(name: str) -> str:
    """The package that a module is of: "types" for "types.mesh", `ROOT` for the root's `__init__`."""
    return name.partition(".")[0] or ROOT


def _imports(module: Module) -> Iterator[tuple[int, str]]:
    package = _package(module.name)
    for line, target in module.imports:
        first, _, inside = target.partition(".")
        if first == "reshard":
            yield from ((line, what) for what in _upward(module.name, package, inside))
            continue
        if package in STANDARD_LIBRARY_ONLY and first not in sys.stdlib_module_names:
            yield line, f"{package} may import only the standard library, not {first}"
        if package in SAME_ON_EVERY_RANK and first in OF_THE_PROCESS:
            yield line, f"{package} may not depend on the process: {first}"
        if first in ONLY_IN and not any(f"{module.name}.".startswith(f"{home}.") for home in ONLY_IN[first]):
            yield line, f"{first} belongs only in {', '.join(sorted(ONLY_IN[first]))}"
        if first in FOR_PEOPLE and RANK[package] < RANK[FOR_PEOPLE[first]]:
            yield line, f"{first} belongs in {FOR_PEOPLE[first]} and above, not in {package}"


def _upward(name: str, package: str, inside: str) -> Iterator[str]:
    target = _package(inside)
    late_by_root = name == "" and target != "cli"  # the root's own `__getattr__` loads every package but the command
    if target == package or late_by_root or (name, inside) in ALLOWED:
        return
    if target not in RANK:
        yield f"{package} imports {target}, which has no place in the order"
    elif RANK[target] >= RANK[package]:
        yield f"{package} may not import {target}" + (f" ({inside})" if inside else "")


def _state(module: Module) -> Iterator[tuple[int, str]]:
    package = _package(module.name)
    if package not in RANK:
        yield 1, f"{package} has no place in the order"
    if package not in SAME_ON_EVERY_RANK:
        return
    for node in module.nodes:
        match node:
            case ast.Global(names=names):
                yield node.lineno, f"{package} may not keep global flags: global {', '.join(names)}"
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in OF_THE_PROCESS_IN_OS:
                yield node.lineno, f"{package} may not depend on the process: os.{name}"
            case ast.ImportFrom(module="os", names=names):
                for name in {alias.name for alias in names} & OF_THE_PROCESS_IN_OS:
                    yield node.lineno, f"{package} may not depend on the process: os.{name}"


def test_the_package_keeps_the_order():
    assert violations(PACKAGE) == []


def test_no_files_import_each_other_in_a_circle():
    assert circles(PACKAGE, ALLOWED) == []


def test_every_exception_is_still_needed():
    used = {(module.name, target) for module in modules(PACKAGE) for target in module.own_imports}
    assert used >= ALLOWED


def test_import_reshard_loads_no_foreign_library():
    assert loaded_by_import(PACKAGE, f"m in {LATE}") == []


def test_import_reshard_loads_the_language_alone():
    loaded = loaded_by_import(PACKAGE, "m.partition('.')[0] == 'reshard'")
    assert len(loaded) < OWN_MODULES, loaded
    assert {name.split(".")[1] for name in loaded if "." in name} == {"errors", "types"}


def test_the_map_shows_this_order_and_every_room():
    page = (PACKAGE.parent / "docs" / "developers" / "architecture.md").read_text(encoding="utf-8")
    rooms = page.partition("## The rooms\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^### (\w+)$", rooms, re.MULTILINE)) == {*RANK} - {ROOT, "__main__"}
    (line,) = re.findall(r"^    (errors < .*)$", page, re.MULTILINE)
    assert line in " ".join(__doc__.split())
    shown = [set(re.findall(r"\w+", part)) for part in line.split("<")]
    assert shown == ORDER[:-1]


CLEAN = {
    "__init__.py": "from reshard.types import mesh\nfrom . import errors, proofs\nimport_module('reshard.draw')\n",
    "errors.py": "import os\n",
    "types/__init__.py": "",
    "types/mesh.py": "import math\nfrom reshard import errors\nfrom ..errors import E\nfrom . import layout\n",
    "types/layout.py": "",
    "geometry/__init__.py": "from reshard.types import layout\n",
    "plans/__init__.py": "",
    "plans/plan.py": "import_module('reshard.draw.pictures')\nimport_module('reshard.draw.plan_page')\n",
    "synth/__init__.py": "from reshard.types.mesh import Mesh\nimport numpy\nimport os\nos.PathLike\n",
    "lower/__init__.py": "",
    "lower/program.py": "from . import to_shard_map\nimport reshard.types.mesh\n",
    "lower/to_shard_map.py": "def f():\n    import jax.numpy\n    import jaxlib\n",
    "lower/to_stablehlo.py": "from jax.extend import mlir\n",
    "runtime/__init__.py": "from reshard.lower import program\nfrom reshard.synth import planner\n",
    "runtime/on_jax.py": "import jax\n",
    "runtime/on_mpi.py": "from mpi4py import MPI\n",
    "hlo/__init__.py": "from reshard import plans\n",
    "show/__init__.py": "import rich.table\nfrom reshard import hlo\n",
    "proofs/__init__.py": "import z3\nfrom reshard import show\n",
    "mpi/__init__.py": "from reshard.runtime import on_mpi\n",
    "doctor/__init__.py": "from reshard import show, hlo\n",
    "jax/__init__.py": "import jax\nfrom reshard.runtime.on_jax import run\nfrom reshard import doctor\n",
    "draw/__init__.py": "import matplotlib\nfrom reshard import doctor\n",
    "draw/pictures.py": "from reshard.plans import plan\n",
    "draw/plan_page.py": "",
    "cli/__init__.py": "import reshard\nimport rich.table\nimport matplotlib\nfrom reshard import draw, jax, mpi\n",
    "__main__.py": "from reshard.cli import main\n",
}

PLANTED = [  # file, its text, and what is reported about its last line
    ("errors.py", "from reshard.types import mesh", "errors may not import types (types.mesh)"),
    ("errors.py", "import numpy", "errors may import only the standard library, not numpy"),
    ("types/mesh.py", "from reshard.synth import planner", "types may not import synth"),
    ("types/mesh.py", "from reshard import Mesh", "types may not import reshard"),
    ("types/mesh.py", "from .. import cli", "types may not import cli (cli)"),
    ("types/mesh.py", "import numpy as np", "types may import only the standard library, not numpy"),
    ("types/mesh.py", "from os import environ", "types may not depend on the process: os.environ"),
    ("types/mesh.py", "import_module('reshard.draw.pictures')", "types may not import draw (draw.pictures)"),
    ("plans/plan.py", "import_module('reshard.draw')", "plans may not import draw (draw)"),
    ("types/mesh.py", "from reshard.geometry import refine", "types may not import geometry (geometry)"),
    ("geometry/refine.py", "from reshard.plans import plan", "geometry may not import plans (plans.plan)"),
    ("hlo/text_reader.py", "from reshard.runtime import account", "hlo may not import runtime (runtime)"),
    ("synth/planner.py", "import os\nos.getenv('RANK')", "synth may not depend on the process: os.getenv"),
    ("types/mesh.py", "def f():\n    global flag", "types may not keep global flags: global flag"),
    ("synth/__init__.py", "import reshard.lower.program", "synth may not import lower (lower.program)"),
    ("synth/planner.py", "from multiprocessing import Pool", "synth may not depend on the process: multiprocessing"),
    ("lower/program.py", "def f():\n    from ..synth import planner", "lower may not import synth (synth)"),
    ("lower/program.py", "def f():\n    import jax", "jax belongs only in"),
    ("lower/to_mpi.py", "from mpi4py import MPI", "mpi4py belongs only in mpi, runtime.on_mpi"),
    ("lower/to_shard_mapper.py", "import jax", "jax belongs only in"),
    ("runtime/__init__.py", "from reshard.proofs import prove", "runtime may not import proofs (proofs)"),
    ("runtime/on_numpy.py", "import importlib\nimportlib.import_module('jax.numpy')", "jax belongs only in"),
    ("runtime/on_numpy.py", "__import__('z3')", "z3 belongs only in proofs"),
    ("runtime/account.py", "from rich import print", "rich belongs in show and above, not in runtime"),
    ("hlo/text_reader.py", "from reshard.show import terminal", "hlo may not import show (show)"),
    ("show/html.py", "def f():\n    from reshard.draw import pictures", "show may not import draw (draw.pictures)"),
    ("proofs/refute.py", "import reshard.mpi", "proofs may not import mpi (mpi)"),
    ("mpi/files.py", "if TYPE_CHECKING:\n    from reshard import proofs", "mpi may not import proofs (proofs)"),
    ("proofs/refute.py", "from reshard.doctor import examine", "proofs may not import doctor (doctor)"),
    ("doctor/page.py", "import_module('reshard.draw.pictures')", "doctor may not import draw (draw.pictures)"),
    ("jax/program_report.py", "from ..draw import pictures", "jax may not import draw (draw.pictures)"),
    ("draw/page.py", "def f():\n    from reshard.cli import units", "draw may not import cli (cli)"),
    ("__init__.py", "from reshard import cli", "reshard may not import cli (cli)"),
    ("cli/plan.py", "if TYPE_CHECKING:\n    import jax", "jax belongs only in"),
    ("cli/plan.py", "from reshard import __main__", "cli may not import __main__ (__main__)"),
    ("extra/new.py", "import os", "extra has no place in the order"),
]


def _plant(tmp_path: Path, files: dict[str, str]) -> Path:
    root = tmp_path / "reshard"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_a_clean_package_has_no_violations(tmp_path: Path):
    root = _plant(tmp_path, CLEAN)
    assert violations(root) == []
    assert circles(root, ALLOWED) == []


@pytest.mark.parametrize(("name", "text", "message"), PLANTED, ids=[f"{name}-{text}" for name, text, _ in PLANTED])
def test_a_planted_import_is_reported(tmp_path: Path, name: str, text: str, message: str):
    (broken,) = violations(_plant(tmp_path, {**CLEAN, name: text}))
    assert broken.startswith(f"{name}:{len(text.splitlines())}: {message}")


@pytest.mark.parametrize(
    "late", ["from reshard.cli import b", "def f():\n    from reshard.cli.b import g", "import reshard.cli.b"]
)
def test_a_planted_circle_is_reported(tmp_path: Path, late: str):
    files = {"cli/a.py": late, "cli/b.py": "from reshard.cli.c import h", "cli/c.py": "from . import a"}
    assert circles(_plant(tmp_path, {**CLEAN, **files}), ALLOWED) == [["cli.a", "cli.b", "cli.c"]]


def test_an_exception_that_is_not_allowed_makes_a_circle(tmp_path: Path):
    assert circles(_plant(tmp_path, CLEAN), set()) == [["draw.pictures", "plans.plan"]]


@pytest.mark.parametrize("late", LATE)
def test_a_library_loaded_too_early_is_reported(tmp_path: Path, late: str):
    root = _plant(tmp_path, {"__init__.py": f"from reshard import cli\nimport {late}\n", "cli.py": ""})
    (tmp_path / f"{late}.py").write_text("", encoding="utf-8")  # a stand-in, since it need not be installed
    assert loaded_by_import(root, f"m in {LATE}") == [late]

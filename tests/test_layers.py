"""The order of imports and the sizes of modules and functions (design, section 4), and a test of that test.

    errors <- types <- {synth, lower} <- runtime <- faces

A face is any other top-level module (`prove`, `jax`, `mpi`, `cli`, `__init__`, ...). Imports are read
from the source, those inside functions, under `TYPE_CHECKING` and by name (`import_module`) too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "reshard"

FACE = "faces"
MAY_IMPORT = {
    "errors": set(),
    "types": {"errors", "types"},
    "synth": {"errors", "types", "synth"},
    "lower": {"errors", "types", "lower"},
    "runtime": {"errors", "types", "synth", "lower", "runtime"},
    FACE: {"errors", "types", "synth", "lower", "runtime", FACE},
}
STANDARD_LIBRARY_ONLY = {"errors", "types"}
JAX = {"lower.to_shard_map", "lower.to_stablehlo", "runtime.on_jax", "jax"}
ONLY_IN = {"jax": JAX, "jaxlib": JAX, "mpi4py": {"runtime.on_mpi"}, "z3": {"runtime.on_z3", "prove"}}
FACES_ONLY = {"rich", "matplotlib"}
SAME_ON_EVERY_RANK = {"types", "synth"}  # a plan must not depend on the process that makes it
OF_THE_PROCESS = {"socket", "multiprocessing", "platform"}
OF_THE_PROCESS_IN_OS = {"environ", "getenv", "getpid", "cpu_count", "uname"}  # os.PathLike is no harm
LATE = ["jax", "jaxlib", "mpi4py", "z3", "scipy", "rich", "matplotlib"]
FUNCTION_LINES, MODULE_LINES = 60, 400


def violations(root: Path) -> list[str]:
    """Everything in the package at `root` that breaks a rule, as 'file:line: what'."""
    found: list[str] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, name)
        broken = [*_imports(root, path, tree), *_state(_layer(_dotted(root, path)), tree), *_sizes(text, tree)]
        found += [f"{name}:{line}: {what}" for line, what in sorted(set(broken))]
    return found


def loaded_by_import(root: Path) -> list[str]:
    """Which of the late modules a fresh interpreter has after `import reshard`."""
    code = f"import sys, reshard; print(*[m for m in {LATE} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=root.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def _dotted(root: Path, path: Path) -> str:
    """'lower.program' for lower/program.py, 'lower' for lower/__init__.py, '' for __init__.py."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _layer(module: str) -> str:
    first = module.partition(".")[0]
    return first if first in MAY_IMPORT else FACE


def _imports(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    here = _dotted(root, path)
    layer = _layer(here)
    for line, target in _targets(root, path, tree):
        first, _, inside = target.partition(".")
        if first == "reshard":
            if _layer(inside) not in MAY_IMPORT[layer]:
                yield line, f"{layer} may not import {target} ({_layer(inside)})"
            continue
        if layer in STANDARD_LIBRARY_ONLY and first not in sys.stdlib_module_names:
            yield line, f"{layer} may import only the standard library, not {first}"
        if layer in SAME_ON_EVERY_RANK and first in OF_THE_PROCESS:
            yield line, f"{layer} may not depend on the process: {first}"
        if first in ONLY_IN and not any(f"{here}.".startswith(f"{home}.") for home in ONLY_IN[first]):
            yield line, f"{first} belongs only in {', '.join(sorted(ONLY_IN[first]))}"
        if first in FACES_ONLY and layer != FACE:
            yield line, f"{first} belongs only in {FACE}"


def _targets(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The absolute name of each module imported anywhere in the file, with its line."""
    package = ["reshard", *path.relative_to(root).parts[:-1]]
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package[: len(package) - level + 1] if level else []
                source = ".".join([*above, *([module] if module else [])])
                for alias in names:  # `from reshard import x`: a module where there is one, else a name of __init__
                    is_module = source == "reshard" and _is_module(root, alias.name)
                    yield node.lineno, f"reshard.{alias.name}" if is_module else source
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(target)), *_]
            ):
                if name in {"import_module", "__import__"}:
                    yield node.lineno, target


def _is_module(root: Path, name: str) -> bool:
    return name in MAY_IMPORT or (root / f"{name}.py").exists() or (root / name).is_dir()


def _state(layer: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if layer in SAME_ON_EVERY_RANK:
        for node in ast.walk(tree):
            match node:
                case ast.Global(names=names):
                    yield node.lineno, f"{layer} may not keep global flags: global {', '.join(names)}"
                case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in OF_THE_PROCESS_IN_OS:
                    yield node.lineno, f"{layer} may not depend on the process: os.{name}"
                case ast.ImportFrom(module="os", names=names):
                    for name in {alias.name for alias in names} & OF_THE_PROCESS_IN_OS:
                        yield node.lineno, f"{layer} may not depend on the process: os.{name}"


def _sizes(text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    lines = len(text.splitlines())
    if lines > MODULE_LINES:
        yield 1, f"the module has {lines} lines, more than {MODULE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines, more than {FUNCTION_LINES}"


def test_the_package_keeps_the_rules():
    assert violations(PACKAGE) == []


def test_import_reshard_loads_no_foreign_library():
    assert loaded_by_import(PACKAGE) == []


CLEAN = {
    "__init__.py": "from reshard.types import mesh\nfrom . import errors, prove\n",
    "errors.py": "import os\n",
    "types/__init__.py": "",
    "types/mesh.py": "import math\nfrom reshard import errors\nfrom ..errors import E\nfrom . import layout\n",
    "types/layout.py": "",
    "synth/__init__.py": "from reshard.types.mesh import Mesh\nimport numpy\nimport os\nos.PathLike\n",
    "lower/__init__.py": "",
    "lower/program.py": "from . import to_shard_map\nimport reshard.types.mesh\n",
    "lower/to_shard_map.py": "def f():\n    import jax.numpy\n    import jaxlib\n",
    "lower/to_stablehlo.py": "from jax.extend import mlir\n",
    "runtime/__init__.py": "from reshard.lower import program\nfrom reshard.synth import planner\n",
    "runtime/on_jax.py": "import jax\n",
    "runtime/on_mpi.py": "from mpi4py import MPI\n",
    "runtime/on_z3.py": "import z3\n",
    "prove.py": "import z3\nfrom reshard.runtime import on_z3\n",
    "jax.py": "import jax\nfrom reshard.runtime.on_jax import run\n",
    "cli.py": "import reshard\nimport rich.table\nimport matplotlib\nfrom reshard import prove\n",
    "__main__.py": "from reshard.cli import main\n",
}

PLANTED = [  # file, its text, and what must be said of its last line
    ("errors.py", "from reshard.types import mesh", "errors may not import reshard.types (types)"),
    ("errors.py", "import numpy", "errors may import only the standard library, not numpy"),
    ("types/mesh.py", "from reshard.synth import planner", "types may not import reshard.synth (synth)"),
    ("types/mesh.py", "from reshard import lower", "types may not import reshard.lower (lower)"),
    ("types/mesh.py", "import reshard", "types may not import reshard (faces)"),
    ("types/mesh.py", "from reshard import Mesh", "types may not import reshard (faces)"),
    ("types/mesh.py", "from .. import cli", "types may not import reshard.cli (faces)"),
    ("types/mesh.py", "import numpy as np", "types may import only the standard library, not numpy"),
    ("types/mesh.py", "def f():\n    from numpy import array", "types may import only the standard library, not numpy"),
    ("types/mesh.py", "from os import environ", "types may not depend on the process: os.environ"),
    ("synth/planner.py", "import os\nos.getenv('RANK')", "synth may not depend on the process: os.getenv"),
    ("types/mesh.py", "def f():\n    global flag", "types may not keep global flags: global flag"),
    ("synth/__init__.py", "import reshard.lower.program", "synth may not import reshard.lower.program (lower)"),
    ("synth/planner.py", "from ..runtime import on_numpy", "synth may not import reshard.runtime (runtime)"),
    ("synth/planner.py", "from multiprocessing import Pool", "synth may not depend on the process: multiprocessing"),
    ("synth/planner.py", "def f():\n    global rank", "synth may not keep global flags: global rank"),
    ("lower/program.py", "def f():\n    from ..synth import planner", "lower may not import reshard.synth (synth)"),
    ("lower/program.py", "from reshard.runtime import measure", "lower may not import reshard.runtime (runtime)"),
    ("lower/program.py", "def f():\n    import jax", "jax belongs only in"),
    ("lower/to_mpi.py", "from mpi4py import MPI", "mpi4py belongs only in runtime.on_mpi"),
    ("lower/to_shard_mapper.py", "import jax", "jax belongs only in"),
    ("runtime/__init__.py", "from reshard.prove import prove", "runtime may not import reshard.prove (faces)"),
    ("runtime/on_numpy.py", "from .. import plan", "runtime may not import reshard (faces)"),
    ("runtime/on_numpy.py", "import jaxlib.xla_client", "jaxlib belongs only in"),
    ("runtime/on_numpy.py", "import importlib\nimportlib.import_module('jax.numpy')", "jax belongs only in"),
    ("runtime/on_numpy.py", "__import__('z3')", "z3 belongs only in prove, runtime.on_z3"),
    ("runtime/measure.py", "from rich import print", "rich belongs only in faces"),
    ("runtime/measure.py", "import matplotlib.pyplot", "matplotlib belongs only in faces"),
    ("mpi.py", "from mpi4py import MPI", "mpi4py belongs only in runtime.on_mpi"),
    ("cli.py", "if TYPE_CHECKING:\n    import jax", "jax belongs only in"),
    ("cli.py", "import z3", "z3 belongs only in prove, runtime.on_z3"),
]


def _plant(tmp_path: Path, files: dict[str, str]) -> Path:
    root = tmp_path / "reshard"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def _function(lines: int, head: str = "def f():") -> str:
    return "\n".join([head, *["    pass"] * (lines - 1)]) + "\n"


def test_a_clean_package_has_no_violations(tmp_path: Path):
    assert violations(_plant(tmp_path, CLEAN)) == []


@pytest.mark.parametrize(("name", "text", "said"), PLANTED, ids=[f"{name}-{text}" for name, text, _ in PLANTED])
def test_a_planted_import_is_found(tmp_path: Path, name: str, text: str, said: str):
    (found,) = violations(_plant(tmp_path, {**CLEAN, name: text}))
    assert found.startswith(f"{name}:{len(text.splitlines())}: {said}")


def test_a_long_function_is_found(tmp_path: Path):
    files = {"cli.py": _function(60), "prove.py": _function(61), "mpi.py": _function(61, "async def g():")}
    assert violations(_plant(tmp_path, files)) == [
        "mpi.py:1: g has 61 lines, more than 60",
        "prove.py:1: f has 61 lines, more than 60",
    ]


def test_a_long_method_is_found(tmp_path: Path):
    method = "class C:\n" + "\n".join("    " + line for line in _function(61).splitlines())
    assert violations(_plant(tmp_path, {"cli.py": method})) == ["cli.py:2: f has 61 lines, more than 60"]


def test_a_long_module_is_found(tmp_path: Path):
    files = {"cli.py": "x = 1\n" * 400, "types/mesh.py": "x = 1\n" * 401}
    assert violations(_plant(tmp_path, files)) == ["types/mesh.py:1: the module has 401 lines, more than 400"]


@pytest.mark.parametrize("late", LATE)
def test_a_library_loaded_too_early_is_found(tmp_path: Path, late: str):
    root = _plant(tmp_path, {"__init__.py": f"from reshard import cli\nimport {late}\n", "cli.py": ""})
    (tmp_path / f"{late}.py").write_text("", encoding="utf-8")  # a stand-in: it need not be installed
    assert loaded_by_import(root) == [late]

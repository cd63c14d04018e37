"""The measures that keep the package readable, each with a planted fault that it reports.

Class names that stand in several modules, functions that hide a package, a place on the map for each module, and the
figures of the whole: how long functions are, whether a name leads to one place, how much is explained. A limit here is
what the package has reached; lower it when a change does better. Complexity is the linter's (`make ruff`).
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.imports import Module, modules

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "reshard"

SHARED_CLASS_NAMES = 2


def shared_class_names(root: Path) -> dict[str, list[str]]:
    """Class names that more than one module defines, with these modules."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules(root):
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module.file)
    return {name: files for name, files in homes.items() if len(files) > 1}


def hidden_packages(root: Path) -> list[str]:
    """Packages whose `__init__` defines or imports a function of the package's own name, which would hide it."""
    packages = [module for module in modules(root) if module.path.name == "__init__.py" and module.name]
    return [module.file for module in packages if module.name.rpartition(".")[2] in _defined_names(module)]


def _defined_names(module: Module) -> set[str]:
    functions = {node.name for node in _functions(module)}
    imports = [node for node in module.nodes if isinstance(node, ast.ImportFrom)]
    return functions | {alias.asname or alias.name for node in imports for alias in node.names}


def unmapped(root: Path, guide: str) -> list[str]:
    """Modules that neither their package's docstring nor the guide to the code names."""
    modules_of = [module for module in modules(root) if not module.path.stem.startswith("__")]
    return [module.file for module in modules_of if not _is_named(module.path, guide)]


def _is_named(path: Path, guide: str) -> bool:
    docstring = ast.get_docstring(ast.parse(path.with_name("__init__.py").read_text(encoding="utf-8"))) or ""
    return re.search(rf"\b{path.stem}\b", f"{docstring} {guide}") is not None


def _functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in module.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


class Figures(NamedTuple):
    """What the source of a package measures as a whole. Names are matched by spelling, so counts are approximate."""

    shared_names: float
    """The share of module-level functions whose name another module has, too."""
    one_word_names: float
    """The share of module-level functions whose name is one word, for which nobody can search."""
    half_in_functions_of: int
    """Half of the lines in bodies of functions are in functions of at least so many lines."""
    small_helpers: int
    """Functions of at most 5 lines that are called once: a line with a name, away from where it is read."""
    comments: float
    """Comments, those at the end of a line too, for every 1,000 lines of code."""
    crowded_folders: int
    """Folders with more than 20 modules."""


def figures(root: Path) -> Figures:
    """The figures of the package at `root`."""
    comments = code = 0
    homes: defaultdict[str, list[Module]] = defaultdict(list)
    sizes: list[tuple[str, int]] = []
    uses: Counter[str] = Counter()
    folders: Counter[Path] = Counter()
    for module in modules(root):
        folders[module.path.parent] += module.path.name != "__init__.py"
        lines = module.path.read_text(encoding="utf-8").splitlines()
        prose = _docstring_lines(module)
        written = [line.strip() for number, line in enumerate(lines, 1) if number not in prose and line.strip()]
        comments += sum(line.startswith("#") or re.search(r"\S\s+# \S", line) is not None for line in written)
        code += sum(not line.startswith("#") for line in written)
        for node in module.nodes:
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                uses[node.id if isinstance(node, ast.Name) else node.attr] += 1
        for node in _functions(module):
            statements = node.body[1:] if node.body[0].lineno in prose else node.body
            first = statements[0].lineno if statements else node.end_lineno + 1
            body = lines[first - 1 : node.end_lineno]
            sizes.append((node.name, sum(re.match(r"\s*[^\s#]", line) is not None for line in body)))
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                homes[node.name].append(module)
    total = max(1, sum(map(len, homes.values())))
    named = Counter(name for name, _ in sizes)
    half, so_far, most = sum(size for _, size in sizes) / 2, 0, 0
    for most in sorted((size for _, size in sizes), reverse=True):
        so_far += most
        if so_far >= half:
            break
    return Figures(
        sum(len(where) for where in homes.values() if len(where) > 1) / total,
        sum(len(where) for name, where in homes.items() if re.fullmatch("_?[a-z0-9]+", name)) / total,
        most,
        sum(named[name] == 1 and uses[name] == 1 and size <= 5 for name, size in sizes),
        1000 * comments / max(1, code),
        sum(number > 20 for number in folders.values()),
    )


def _docstring_lines(module: Module) -> set[int]:
    documented = [n for n in module.nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef) and n.body]
    first = [node.body[0] for node in documented]
    texts = [n for n in first if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return {number for node in texts for number in range(node.lineno, (node.end_lineno or 0) + 1)}


def test_few_class_names_stand_in_more_than_one_module():
    shared = shared_class_names(PACKAGE)
    assert len(shared) <= SHARED_CLASS_NAMES, shared


def test_no_package_is_hidden_by_a_function_of_its_own_name():
    assert hidden_packages(PACKAGE) == []


def test_every_module_is_on_the_map():
    """One line in its package's docstring, or in docs/developers/architecture.md, says what a module is for."""
    assert unmapped(PACKAGE, (ROOT / "docs/developers/architecture.md").read_text(encoding="utf-8")) == []


def _plant(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_a_class_name_in_two_modules_is_reported(tmp_path: Path):
    files = {"a.py": "class C:\n    pass\nclass D:\n    pass\n", "b/c.py": "def f():\n    class C:\n        pass\n"}
    assert shared_class_names(_plant(tmp_path, files)) == {"C": ["a.py", "b/c.py"]}


@pytest.mark.parametrize("text", ["def prove(plan):\n    pass\n", "from a.prove.b import prove as prove\n"])
def test_a_hidden_package_is_reported(tmp_path: Path, text: str):
    files = {"prove/__init__.py": text, "other/__init__.py": text, "__init__.py": text}
    assert hidden_packages(_plant(tmp_path, files)) == ["prove/__init__.py"]


def test_a_module_that_no_map_names_is_reported(tmp_path: Path):
    files = {"a/__init__.py": '"""b: what b is for."""\n', "a/b.py": "", "a/guided.py": "", "a/bb.py": ""}
    assert unmapped(_plant(tmp_path, files), "`guided` has a line here") == ["a/bb.py"]


def test_the_figures_of_the_whole():
    """A limit is what the package has reached: whoever lowers it keeps it there."""
    measured = figures(PACKAGE)
    assert measured.shared_names <= 0.05
    assert measured.one_word_names <= 0.10
    assert measured.half_in_functions_of >= 13
    assert measured.small_helpers <= 219
    assert measured.comments >= 58
    assert measured.crowded_folders == 0


def test_figures_count_what_they_say(tmp_path: Path):
    small = "def only_here():\n    return 1  # why\n"
    files = {
        "a.py": f'"""Text."""\n{small}\n\ndef run():\n    # why\n    return only_here()\n',
        "b.py": "def run():\n    pass\n",
    }
    files |= {f"many/m{number}.py": "" for number in range(21)}
    assert figures(_plant(tmp_path, files)) == Figures(2 / 3, 2 / 3, 1, 1, 1000 * 2 / 6, 1)

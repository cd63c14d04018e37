"""Reads which module of a package imports which, from the source: nothing of the package is run.

Imports inside functions, under `TYPE_CHECKING` and by name (`import_module("...")`) count like any other.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Module:
    """One file of the package at `root`: its dotted name without the package's ("lower.program", "" for the root)."""

    root: Path
    path: Path

    @cached_property
    def name(self) -> str:
        parts = self.path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def file(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.file)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """(line, absolute dotted name) of each module that is imported anywhere in the file."""
        return list(self._imports())

    @property
    def own_imports(self) -> list[str]:
        """The modules of the package itself that it imports, "" for the package's root."""
        own = [target for _, target in self.imports if target.partition(".")[0] == "reshard"]
        return [target.partition(".")[2] for target in own]

    def _imports(self) -> Iterator[tuple[int, str]]:
        for node in self.nodes:
            match node:
                case ast.Import(names=names):
                    yield from ((node.lineno, alias.name) for alias in names)
                case ast.ImportFrom(names=names):
                    source = self._source(node)
                    for alias in names:
                        inside = f"{source}.{alias.name}"
                        yield node.lineno, inside if self._is_module(inside) else source
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=target), *_]):
                    if name in {"import_module", "__import__"}:
                        yield node.lineno, str(target)

    def _source(self, node: ast.ImportFrom) -> str:
        """The module after `from`; the dots of a relative import stand for the packages around this file."""
        package = ["reshard", *self.path.relative_to(self.root).parts[:-1]]
        above = package[: len(package) - node.level + 1] if node.level else []
        return ".".join([*above, *([node.module] if node.module else [])])

    def _is_module(self, dotted: str) -> bool:
        """Whether `from a import b` means the module `a.b` rather than a name inside `a`."""
        first, _, inside = dotted.partition(".")
        path = self.root / inside.replace(".", "/")
        return first == "reshard" and (path.with_suffix(".py").exists() or path.is_dir())


@lru_cache(maxsize=1)  # the measures of one package share what is read; a planted one takes its place
def modules(root: Path) -> tuple[Module, ...]:
    """Every file of the package, sorted by path."""
    return tuple(Module(root, path) for path in sorted(root.rglob("*.py")))


def circles(root: Path, ignore: set[tuple[str, str]]) -> list[list[str]]:
    """Groups of files that import each other in a circle, late imports included, except along ignored edges."""
    files = {module.name: module for module in modules(root)}
    edges = {
        name: {to for to in module.own_imports if to in files and to != name and (name, to) not in ignore}
        for name, module in files.items()
    }
    reach = {name: _reachable(name, edges) for name in edges}
    groups = {tuple(sorted(o for o in reach[n] if n in reach[o])) for n in edges if n in reach[n]}
    return [list(group) for group in sorted(groups)]


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(edges[name])
    return seen

"""JAX's partition specs as text, `P('x', None)`, parsed into plain data and never evaluated.

    spec    = name "(" [entry {"," entry}] {"," keyword} ")"     name: P, PS, PartitionSpec
    entry   = None | axis | "(" axis {"," axis} ")"              axes major to minor
    keyword = "unreduced" "=" "{" axis {"," axis} "}" | "unreduced_kind" "=" ("sum" | "max" | "min")

An axis is a string. As an extension of JAX's notation it may be a sub-axis, `'y:(1)2'`.
"""

from __future__ import annotations

import ast
from typing import NoReturn

from reshard.errors import NotationError, quoted, shortened
from reshard.types.notation.sharding import OPS, RawSharding

NAMES = ("P", "PS", "PartitionSpec")


def parse(text: str) -> RawSharding:
    """Reads one spec; raises `NotationError` that names the part it cannot read.

    >>> parse("P(('x', 'y'), None, unreduced={'z'})")[:3]
    ((('x', 'y'), ()), (), ('z',))
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise NotationError(f"partition spec {quoted(text)} is not text; give a str")
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        _fail(text, "it is not a Python expression; write P('x', None)")
    if not isinstance(node, ast.Call) or _name(node.func) not in NAMES:
        _fail(text, f"it is not a call of {', '.join(NAMES)}; write P('x', None)")
    dims = tuple(_entry(entry, text) for entry in node.args)
    unreduced: tuple[str, ...] = ()
    kind = "sum"
    for keyword in node.keywords:
        match keyword.arg:
            case "unreduced":
                unreduced = _axes(keyword.value, text)
            case "unreduced_kind":
                kind = _kind(keyword.value, text)
            case "reduced":
                _fail(text, "reduced axes describe how gradients are summed, not where elements are; leave them out")
            case other:
                _fail(text, f"unknown argument {other or '**'!r}; use unreduced={{'x'}} or unreduced_kind=sum")
    return RawSharding(dims, unreduced=unreduced, reduction=kind)


def _entry(node: ast.expr, text: str) -> tuple[str, ...]:
    """The axes of one dim."""
    match node:
        case ast.Constant(value=None):
            return ()
        case ast.Constant(value=str(axis)):
            return (axis,)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(_axis(part, text) for part in parts)
        case _ if _name(node) == "UNCONSTRAINED":
            _fail(text, "UNCONSTRAINED leaves the choice to the compiler; name the axes of that dim, or None")
        case _:
            _fail(text, f"cannot read {_shown(node, text)!r}; an entry is None, an axis 'x' or a tuple ('x', 'y')")


def _axes(node: ast.expr, text: str) -> tuple[str, ...]:
    """The axes of a set: a set, tuple or list display, or a call of set() or frozenset()."""
    match node:
        case ast.Call(func=ast.Name(id="set" | "frozenset"), args=[], keywords=[]):
            return ()
        case ast.Call(func=ast.Name(id="set" | "frozenset"), args=[inner], keywords=[]):
            return _axes(inner, text)
        case ast.Set(elts=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(_axis(part, text) for part in parts)
        case _:
            _fail(text, f"cannot read {_shown(node, text)!r}; write a set of axes, as in unreduced={{'x'}}")


def _axis(node: ast.expr, text: str) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    _fail(text, f"cannot read {_shown(node, text)!r}; an axis is a string, as in ('x', 'y')")


def _kind(node: ast.expr, text: str) -> str:
    """Reads `sum`, `'sum'`, `UnreducedKind.sum`, or None."""
    given = node.value if isinstance(node, ast.Constant) else _name(node)
    if given is None:
        return "sum"
    if isinstance(given, str) and given in OPS:
        return given
    _fail(text, f"cannot read unreduced_kind {_shown(node, text)!r}; use one of {', '.join(OPS)}")


def _name(node: ast.expr) -> str:
    """The last part of a name: `P` for `P` and for `jax.P`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _shown(node: ast.expr, text: str) -> str:
    return shortened(ast.get_source_segment(text.strip(), node) or "an argument", 80)


def _fail(text: str, why: str) -> NoReturn:
    raise NotationError(f"partition spec {quoted(text)}: {why}")

"""Sizes in a table: whole numbers written with the names of a model's sizes.

    heads * head_dim / tp              / is exact: 10 / 4 is an error, not 2
    max(tp, kv_heads) / kv_heads       max and min
    (rows + block - 1) // block        // rounds down
    l < dense_layers                   1 or 0

They are read as Python reads them, and nothing else of Python is let in.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from reshard.errors import NotationError, PlanError, did_you_mean, quoted
from reshard.types.whole import MOST, whole

_LONGEST = 200
_OPERATORS: Mapping[type, Callable[..., int]] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.FloorDiv: int.__floordiv__,
    ast.Div: int.__floordiv__,
    ast.Lt: int.__lt__,
    ast.USub: int.__neg__,
}
_NODES = (ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, *_OPERATORS)


@dataclass(frozen=True)
class Expression:
    """A whole number as text, and the names of sizes in it.

    Raises `NotationError` for anything that is not such an expression.

    >>> Expression.read("heads * head_dim / tp").names
    ('head_dim', 'heads', 'tp')
    """

    text: str
    names: tuple[str, ...]
    tree: ast.expr

    @classmethod
    def read(cls, given: object) -> Expression:
        """Reads a whole number, or text."""
        text = str(given) if whole(given, -MOST) is not None else given
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise NotationError(f'{quoted(given)} is not a size; give a whole number, or text such as "heads / tp"')
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise NotationError(
                f'size {quoted(text)} cannot be read; write text such as "heads * head_dim / tp"'
            ) from None
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for node in ast.walk(tree):
            fits = isinstance(node, _NODES)
            match node:
                case ast.Constant(value=value):
                    fits = whole(value) is not None
                case ast.Compare(ops=ops):
                    fits = len(ops) == 1
                case ast.Call(func=func, args=args, keywords=keywords):
                    fits = isinstance(func, ast.Name) and func.id in ("max", "min") and bool(args) and not keywords
                case _:
                    pass
            if not fits:
                raise NotationError(
                    f"size {quoted(text)}: write it with whole numbers, names, + - * / // ( ) <, max and min"
                )
        return cls(text, tuple(sorted(names - {"max", "min"})), tree)

    @classmethod
    def total(cls, parts: Sequence[Expression]) -> Expression:
        """The sum of these; 0 of none.

        >>> Expression.total([Expression.read(1), Expression.read("a / b")]).text
        '1 + a / b'
        """
        tree: ast.expr = ast.Constant(0)
        for part in parts:
            tree = ast.BinOp(tree, ast.Add(), part.tree)
        return cls(" + ".join(part.text for part in parts), tuple({n for part in parts for n in part.names}), tree)


class Sizes:
    """The sizes of a model: those that a caller gives, and those that follow from a table's defaults.

    >>> sizes = Sizes({"tp": Expression.read(1), "own": Expression.read("heads / tp")}, {"heads": 8})
    >>> sizes.value(Expression.read("2 * own"))
    16
    """

    def __init__(self, defaults: Mapping[str, Expression], given: Mapping[str, object]) -> None:
        self._defaults = defaults
        self._known: dict[str, int | None] = {}
        for name, size in given.items():
            checked = whole(size)
            if checked is None:
                raise PlanError(f"{name}={quoted(size)}: a size is a whole number from 0 to {MOST}")
            self._known[name] = checked

    def value(self, expression: Expression, values: Mapping[str, int] | None = None) -> int:
        """What an expression is, where names may have further values.

        Raises `PlanError` where a size is missing, or no whole number comes out.
        """
        text = expression.text

        def fold(node: ast.expr) -> int:
            match node:
                case ast.Name(id=name):
                    made = values[name] if values and name in values else self._look_up(name, text)
                case ast.UnaryOp(op=op, operand=operand):
                    made = _OPERATORS[type(op)](fold(operand))
                case ast.Call(func=ast.Name(id=name), args=args):
                    made = (max if name == "max" else min)(map(fold, args))
                case ast.BinOp(op=op, left=left, right=right) | ast.Compare(ops=[op], left=left, comparators=[right]):
                    one, other = fold(left), fold(right)
                    if isinstance(op, ast.Div | ast.FloorDiv) and (
                        not other or (isinstance(op, ast.Div) and one % other)
                    ):
                        raise PlanError(
                            f"size {quoted(text)}: {one} / {other} is no whole number; give sizes that divide"
                        )
                    made = int(_OPERATORS[type(op)](one, other))
                case _:
                    made = cast("int", cast("ast.Constant", node).value)  # `Expression.read` lets no other node in.
            if abs(made) > MOST:
                raise PlanError(f"size {quoted(text)} is more than {MOST}, the largest index")
            return made

        return fold(expression.tree)

    def _look_up(self, name: str, text: str) -> int:
        if name not in self._known:
            if name not in self._defaults:
                known = did_you_mean(name, self._known)
                raise PlanError(f"size {name} of {quoted(text)} is not known{known}; give {name}=...")
            self._known[name] = None  # While its own default is worked out.
            self._known[name] = self.value(self._defaults[name])
        size = self._known[name]
        if size is None:
            raise PlanError(f"size {name} is defined by itself, in {quoted(text)}; give {name}=...")
        return size

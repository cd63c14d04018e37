"""Sizes in a table: whole numbers written with the names of a model's sizes.

    heads * head_dim / tp              / is exact: 10 / 4 is an error, not 2
    max(tp, kv_heads) / kv_heads       max and min
    (rows + block - 1) // block        // rounds down
    l < dense_layers                   1 or 0

They are read as Python reads them, and nothing else of Python is let in.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from reshard.errors import NotationError, PlanError, did_you_mean, quoted
from reshard.types.whole import MOST, whole

_LONGEST = 200


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
        names: dict[str, None] = {}
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and id(node) not in called:
                names[node.id] = None
            _check_node(node, text)
        return cls(text, tuple(sorted(names)), tree)

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


def _check_node(node: ast.AST, text: str) -> None:
    match node:
        case ast.Constant(value=value) if whole(value) is not None:
            return
        case ast.Call(func=ast.Name(id="max" | "min"), keywords=[], args=args) if args:
            return
        case (
            ast.Name()
            | ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.FloorDiv())
            | ast.UnaryOp(op=ast.USub())
            | ast.Compare(ops=[ast.Lt()])
            | ast.Lt()
            | ast.operator()
            | ast.unaryop()
            | ast.expr_context()
        ):
            return
        case _:
            raise NotationError(
                f"size {quoted(text)}: write it with whole numbers, names, + - * / // ( ) <, max and min"
            )


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
        return self._fold(expression.tree, expression.text, values or {})

    def _fold(self, node: ast.expr, text: str, values: Mapping[str, int]) -> int:
        match node:
            case ast.Constant(value=value):
                made = cast("int", value)
            case ast.Name(id=name):
                made = values[name] if name in values else self._look_up(name, text)
            case ast.Compare(left=left, comparators=[right]):
                made = int(self._fold(left, text, values) < self._fold(right, text, values))
            case ast.UnaryOp(operand=operand):
                made = -self._fold(operand, text, values)
            case ast.Call(func=ast.Name(id=name), args=args):
                made = (max if name == "max" else min)(self._fold(each, text, values) for each in args)
            case _:
                pair = cast("ast.BinOp", node)  # `Expression.read` lets no other node in.
                left, right = (self._fold(each, text, values) for each in (pair.left, pair.right))
                made = _combine(pair.op, left, right, text)
        if abs(made) > MOST:
            raise PlanError(f"size {quoted(text)} is more than {MOST}, the largest index")
        return made

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


def _combine(op: ast.operator, left: int, right: int, text: str) -> int:
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case _:
            if not right or (isinstance(op, ast.Div) and left % right):
                raise PlanError(f"size {quoted(text)}: {left} / {right} is no whole number; give sizes that divide")
            return left // right

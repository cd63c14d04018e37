"""A text read token by token, and the pieces of grammar that Shardy's and HLO's shardings share.

    value     = "[" [dim {"," dim}] "]" {"," list}
    dim       = "{" [axis {"," axis}] ["," "?"] "}" ["p" priority]     axes major to minor
    axis      = '"' name '"' [":(" pre ")" size]
    axis-size = '"' name '"' "=" size
    list      = "replicated" "=" axes | "unreduced" "=" [op] axes      and others, by notation
    op        = "sum" | "max" | "min"

A `?` (an open dim) and a priority only guide the compiler's propagation: they are read and dropped.
Quotes may be double, single or left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from reshard.errors import NotationError, quoted, shortened
from reshard.types.mesh import AXIS_NAME
from reshard.types.notation.sharding import OPS, RawSharding

T = TypeVar("T")
_NUMBER = re.compile(r"[0-9]{1,18}(?![0-9])")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(rf"\"({AXIS_NAME})\"|'({AXIS_NAME})'|({AXIS_NAME})")
_SUB_AXIS = re.compile(r":\s*\(\s*([0-9]{1,18})\s*\)\s*([0-9]{1,18})(?![0-9])")
_PRIORITY = re.compile(r"p[0-9]+")
_BRACED = re.compile(r"[^{}\"]+|\"(?:[^\"\\]|\\.)*\"|[{}]")


class Reader:
    """Takes a text token by token from the left, skipping blanks between tokens.

    >>> reader = Reader("list", "[4, 2]")
    >>> reader.take("["), reader.items(lambda: reader.number("write a number"), "]")
    (True, (4, 2))
    """

    def __init__(self, what: str, text: str) -> None:
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise NotationError(f"{what} {quoted(text)} is not text; give a str")
        self.what = what
        self.text = text
        self.at = 0

    def sees(self, token: str) -> bool:
        """Whether the token comes next."""
        self._skip()
        return self.text.startswith(token, self.at)

    def take(self, token: str) -> bool:
        """Takes the token if it comes next, and returns whether it did."""
        if not self.sees(token):
            return False
        self.at += len(token)
        return True

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Takes the text that matches the pattern here, None without taking anything if none does."""
        self._skip()
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match

    def need(self, token: str, advice: str) -> None:
        """Takes the token, or fails."""
        if not self.take(token):
            self.fail(advice)

    def word(self) -> str:
        """Takes the next word; returns an empty one if none comes next."""
        match = self.match(_WORD)
        return match[0] if match else ""

    def number(self, advice: str) -> int:
        """Takes the next whole number, or fails."""
        match = self.match(_NUMBER)
        return int(match[0]) if match else self.fail(advice)

    def items(self, item: Callable[[], T], close: str) -> tuple[T, ...]:
        """Takes items separated by commas, up to and including the closing token."""
        items: list[T] = []
        while not self.take(close):
            if items:
                self.need(",", f"separate items with commas and close the list with {close}")
            items.append(item())
        return tuple(items)

    def skip_braces(self) -> None:
        """Takes a braced block, whatever its content."""
        depth = 0
        while token := self.match(_BRACED):
            depth += {"{": 1, "}": -1}.get(token[0], 0)
            if depth <= 0:
                return
        self.fail("close the block with }")

    def end(self) -> None:
        """Fails unless the whole text is taken."""
        self._skip()
        if self.at < len(self.text):
            self.fail("nothing may follow the sharding")

    def fail(self, advice: str, at: int | None = None) -> NoReturn:
        """Raises `NotationError` with the text, the place `at` (by default the current one), and the advice."""
        rest = self.text[self.at if at is None else at :].strip()
        place = f"cannot read {shortened(rest, 40)!r}" if rest else "it ends too early"
        raise NotationError(f"{self.what} {quoted(self.text)}: {place}; {advice}")

    def _skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1


def value(reader: Reader, keys: tuple[str, ...] = ("replicated", "unreduced")) -> RawSharding:
    """Reads dims and the lists after them, `[{"y"}, {}], replicated={"x"}`; `keys` are the lists allowed.

    >>> value(Reader("sharding", '[{"y"}, {}], replicated={"x"}'))[:2]
    ((('y',), ()), ('x',))
    """
    reader.need("[", 'write one {} per dim in [], as in [{"y"}, {}, {"x"}]')
    dims = reader.items(lambda: _dim(reader), "]")
    lists: dict[str, tuple[str, ...]] = {}
    reduction = "sum"
    while reader.take(","):
        at, key = reader.at, reader.word()
        if key not in keys or key in lists:
            reader.fail(f"each of {', '.join(keys)} may follow the dims once", at)
        reader.take("=")
        if key == "metadata":
            reader.skip_braces()
            lists[key] = ()
            continue
        if key == "unreduced":
            reduction = op(reader)
        reader.need("{", f'write {key}={{"x"}}')
        lists[key] = reader.items(lambda: axis(reader), "}")
    return RawSharding(
        dims, lists.get("replicated", ()), lists.get("unreduced", ()), reduction, lists.get("manual", ())
    )


def op(reader: Reader) -> str:
    """Reads the reduction of unreduced axes, a sum by default."""
    at, name = reader.at, reader.word()
    if name and name not in OPS:
        reader.fail(f"unreduced axes have {', '.join(OPS)}", at)
    return name or "sum"


def axis(reader: Reader) -> str:
    """Reads `"x"` or `"x":(1)2`, and returns `x` or `x:(1)2`."""
    name = reader.match(_NAME)
    if name is None:
        reader.fail('write an axis as "x" or "x":(pre)size; a name is a letter or _, then letters, digits, _ . -')
    factor = reader.match(_SUB_AXIS)
    if factor is None and reader.sees(":"):
        reader.fail('write a sub-axis as "x":(pre)size, with two whole numbers')
    return _unquoted(name) + (f":({factor[1]}){factor[2]}" if factor else "")


def axis_size(reader: Reader) -> tuple[str, int]:
    """Reads `"x"=4`, an axis of a mesh and its size."""
    advice = 'write the axes of a mesh as "x"=4'
    name = reader.match(_NAME)
    if name is None:
        reader.fail(f"{advice}; a name is a letter or _, then letters, digits, _ . -")
    reader.need("=", advice)
    return _unquoted(name), reader.number(advice)


def _unquoted(name: re.Match[str]) -> str:
    return name[1] or name[2] or name[3]


def _dim(reader: Reader) -> tuple[str, ...]:
    reader.need("{", 'write each dim in braces, as in {"x"} or {}')
    axes: list[str] = []
    while not reader.take("}"):
        if axes:
            reader.need(",", "separate the axes of a dim with commas and close it with }")
        if reader.take("?"):
            reader.need("}", "? comes last in a dim")
            break
        axes.append(axis(reader))
    reader.match(_PRIORITY)
    return tuple(axes)

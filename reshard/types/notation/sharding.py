"""A sharding as plain data: what every notation is read into, and how it is placed on a mesh.

    text          P(('x', 'y'), None)         in JAX's notation, or any other
    RawSharding   (('x', 'y'), ())            per dim the axes that split it, major to minor, still text
    Placed        ((x=4, y=2), ())            the same axes looked up on the mesh <x=4, y=2>

The split between reading and placing keeps parsers free of meshes: a typo in the text is a
`NotationError` of the parser, an axis that the mesh does not have is a `MeshError` of `place_sharding`.

A `Reader` takes text token by token, and has the pieces of grammar that Shardy's and HLO's shardings share:

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
from typing import NamedTuple, NoReturn, TypeVar

from reshard.errors import MeshError, NotationError, quoted, shortened
from reshard.types.mesh import AXIS_NAME, Mesh, SubAxis

T = TypeVar("T")
_NUMBER = re.compile(r"[0-9]{1,18}(?![0-9])")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(rf"\"({AXIS_NAME})\"|'({AXIS_NAME})'|({AXIS_NAME})")
_SUB_AXIS = re.compile(r":\s*\(\s*([0-9]{1,18})\s*\)\s*([0-9]{1,18})(?![0-9])")
_PRIORITY = re.compile(r"p[0-9]+")
_BRACED = re.compile(r"[^{}\"]+|\"(?:[^\"\\]|\\.)*\"|[{}]")

NO_TILE = (
    "the whole array is on one device and the others hold nothing, but in a layout every device of the mesh holds "
    "a tile; for an array on that device alone use Layout.from_spec([], Mesh(device_ids=[{device}]), shape, dtype)"
)
"""Why a sharding on one device out of many is refused, with what to write instead."""

OPS = ("sum", "max", "min")
"""The reductions of unreduced axes that JAX's and XLA's notations can express."""


class RawMesh(NamedTuple):
    """A mesh as written inside a sharding."""

    axes: tuple[tuple[str, int], ...]
    device_ids: tuple[int, ...] | None


class RawSharding(NamedTuple):
    """A sharding as written, its axes as text: `x`, or `x:(1)2` for a sub-axis."""

    dims: tuple[tuple[str, ...], ...]
    replicated: tuple[str, ...] = ()
    unreduced: tuple[str, ...] = ()
    reduction: str = "sum"
    manual: tuple[str, ...] = ()
    mesh: RawMesh | None = None

    def padded(self, rank: int) -> RawSharding:
        """Appends dims that are not split, up to `rank`.

        >>> RawSharding((("x",),)).padded(3).dims
        (('x',), (), ())
        """
        return self._replace(dims=self.dims + ((),) * (rank - len(self.dims)))


class Placed(NamedTuple):
    """A sharding on a mesh. `idle` axes are named by the sharding (replicated, manual) but hold no digit."""

    mesh: Mesh
    dims: tuple[tuple[SubAxis, ...], ...]
    partial: tuple[SubAxis, ...] = ()
    reduction: str = "sum"
    idle: tuple[SubAxis, ...] = ()


def place_sharding(raw: RawSharding, mesh: Mesh | None) -> Placed:
    """Looks up the axes of a sharding on the mesh that it writes itself, else on `mesh`.

    Raises `MeshError` if there is no mesh, if `mesh` differs from the written one, or if it lacks an axis.

    >>> place_sharding(RawSharding((("x",), ("y:(1)2",))), Mesh(x=4, y=2)).dims
    ((SubAxis(axis='x', pre=1, size=4),), (SubAxis(axis='y', pre=1, size=2),))
    """
    own = None if raw.mesh is None else Mesh(raw.mesh.axes, device_ids=raw.mesh.device_ids)
    if own is not None and mesh is not None and own != mesh:
        raise MeshError(f"the sharding is on the mesh {own!r} that it writes, not on {mesh!r}; give that one, or none")
    known = mesh or own
    if known is None:
        raise MeshError("the sharding names axes, but no mesh is given; pass the mesh that has them")
    return Placed(
        known,
        tuple(tuple(known.sub_axis(axis) for axis in dim) for dim in raw.dims),
        tuple(known.sub_axis(axis) for axis in raw.unreduced),
        raw.reduction,
        tuple(known.sub_axis(axis) for axis in (*raw.replicated, *raw.manual)),
    )


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

    def value(self, keys: tuple[str, ...] = ("replicated", "unreduced")) -> RawSharding:
        """Takes dims and the lists after them, `[{"y"}, {}], replicated={"x"}`; `keys` are the lists allowed.

        >>> Reader("sharding", '[{"y"}, {}], replicated={"x"}').value()[:2]
        ((('y',), ()), ('x',))
        """
        self.need("[", 'write one {} per dim in [], as in [{"y"}, {}, {"x"}]')
        dims = self.items(self._dim, "]")
        lists: dict[str, tuple[str, ...]] = {}
        reduction = "sum"
        while self.take(","):
            at, key = self.at, self.word()
            if key not in keys or key in lists:
                self.fail(f"each of {', '.join(keys)} may follow the dims once", at)
            self.take("=")
            if key == "metadata":
                self.skip_braces()
                lists[key] = ()
                continue
            if key == "unreduced":
                reduction = self.reduction()
            self.need("{", f'write {key}={{"x"}}')
            lists[key] = self.items(self.axis, "}")
        replicated, unreduced, manual = (lists.get(key, ()) for key in ("replicated", "unreduced", "manual"))
        return RawSharding(dims, replicated, unreduced, reduction, manual)

    def _dim(self) -> tuple[str, ...]:
        self.need("{", 'write each dim in braces, as in {"x"} or {}')
        axes: list[str] = []
        while not self.take("}"):
            if axes:
                self.need(",", "separate the axes of a dim with commas and close it with }")
            if self.take("?"):
                self.need("}", "? comes last in a dim")
                break
            axes.append(self.axis())
        self.match(_PRIORITY)
        return tuple(axes)

    def reduction(self) -> str:
        """Takes the reduction of unreduced axes, a sum by default."""
        at, name = self.at, self.word()
        if name and name not in OPS:
            self.fail(f"unreduced axes have {', '.join(OPS)}", at)
        return name or "sum"

    def axis(self) -> str:
        """Takes `"x"` or `"x":(1)2`, and returns `x` or `x:(1)2`."""
        name = self.match(_NAME)
        if name is None:
            self.fail('write an axis as "x" or "x":(pre)size; a name is a letter or _, then letters, digits, _ . -')
        factor = self.match(_SUB_AXIS)
        if factor is None and self.sees(":"):
            self.fail('write a sub-axis as "x":(pre)size, with two whole numbers')
        return name[name.lastindex or 1] + (f":({factor[1]}){factor[2]}" if factor else "")

    def axis_size(self) -> tuple[str, int]:
        """Takes `"x"=4`, an axis of a mesh and its size."""
        advice = 'write the axes of a mesh as "x"=4'
        name = self.match(_NAME)
        if name is None:
            self.fail(f"{advice}; a name is a letter or _, then letters, digits, _ . -")
        self.need("=", advice)
        return name[name.lastindex or 1], self.number(advice)

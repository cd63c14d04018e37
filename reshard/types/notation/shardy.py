"""Shardy's tensor shardings, read into plain data, and placed on a mesh.

    sharding = ["sdy.sharding ="] ["#sdy.sharding"] "<" mesh "," value ">"
             | "#sdy.sharding_per_value<[<" mesh "," value ">]>"      one value only
             | value
    value    = "[" [dim {"," dim}] "]" {"," list}
    dim      = "{" [axis {"," axis}] ["," "?"] "}" ["p" priority]     axes major to minor
    axis     = '"' name '"' [":(" pre ")" size]
    list     = "replicated" "=" axes | "unreduced" "=" ["sum" | "max" | "min"] axes
    mesh     = "@" symbol | "mesh<[" [axis-size {"," axis-size}] "]" ["," "device_ids" "=" "[" ids "]"] ">"

What only guides the compiler's propagation, a `?` that leaves a dim open or a priority, is read
and dropped. Quotes may be double, single or left out. HLO's `{mesh[...], ...}` shares this grammar.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

from reshard.errors import LayoutError, MeshError, NotationError
from reshard.types.mesh import AXIS_NAME, Mesh, SubAxis

T = TypeVar("T")
NO_TILE = (
    "the whole array is on one device and the others hold nothing, but in a layout every device of the mesh holds "
    "a tile; for an array on that device alone use Layout.from_spec(Mesh(device_ids=[{device}]), shape, dtype, [])"
)
OPS = ("sum", "max", "min")
_NUMBER = re.compile(r"[0-9]{1,18}(?![0-9])")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(rf"\"({AXIS_NAME})\"|'({AXIS_NAME})'|({AXIS_NAME})")
_FACTOR = re.compile(r":\s*\(\s*([0-9]{1,18})\s*\)\s*([0-9]{1,18})(?![0-9])")
_PRIORITY = re.compile(r"p[0-9]+")
_SYMBOL = re.compile(r"@(?:[A-Za-z0-9_$.\-]+|\"[^\"]*\")")
_HEAD = re.compile(r"sdy\.sharding\s*=")
_IDS = re.compile(r",\s*device_ids\s*=")
_BRACED = re.compile(r"[^{}\"]+|\"(?:[^\"\\]|\\.)*\"|[{}]")


class RawMesh(NamedTuple):
    """A mesh as written inside a sharding."""

    axes: tuple[tuple[str, int], ...]
    device_ids: tuple[int, ...] | None


class RawSharding(NamedTuple):
    """A sharding as written, axes as text: `x`, or `x:(1)2` for a sub-axis."""

    dims: tuple[tuple[str, ...], ...]
    replicated: tuple[str, ...] = ()
    unreduced: tuple[str, ...] = ()
    reduction: str = "sum"
    manual: tuple[str, ...] = ()
    mesh: RawMesh | None = None

    def padded(self, rank: int) -> RawSharding:
        """With dims that are not split added at the end, up to `rank`."""
        return self._replace(dims=self.dims + ((),) * (rank - len(self.dims)))


class Placed(NamedTuple):
    """A sharding whose axes are those of a mesh; `idle` axes hold nothing, but are named."""

    mesh: Mesh
    dims: tuple[tuple[SubAxis, ...], ...]
    partial: tuple[SubAxis, ...] = ()
    reduction: str = "sum"
    idle: tuple[SubAxis, ...] = ()


def parse(text: str) -> RawSharding:
    """Reads one sharding; raises `NotationError` with the place that does not parse.

    >>> parse('#sdy.sharding<@mesh, [{"x", "y":(1)2}, {?}], unreduced={"z"}>').dims
    (('x', 'y:(1)2'), ())
    """
    reader = Reader("Shardy sharding", text.replace('\\"', '"'))  # quotes are escaped inside HLO attributes
    reader.match(_HEAD)
    listed = reader.take("#sdy.sharding_per_value")
    if listed:
        reader.need("<", "write #sdy.sharding_per_value<[...]>")
        reader.need("[", "write #sdy.sharding_per_value<[...]>")
        reader.need("<", "a per-value sharding has its values in <>, as in [<@mesh, [{}]>]")
        raw = _framed(reader)
        if reader.take(","):
            reader.fail("it lists several values; give the sharding of one of them")
        reader.need("]", "close the list of values with ]>")
        reader.need(">", "close the list of values with ]>")
    elif reader.take("#sdy.sharding") or reader.sees("<"):
        reader.need("<", 'write #sdy.sharding<@mesh, [{"x"}, {}]>')
        raw = _framed(reader)
    else:
        raw = value(reader)
    reader.end()
    return raw


def place(raw: RawSharding, mesh: Mesh | None) -> Placed:
    """The sharding on its own mesh if it writes one, else on the one given.

    Raises `MeshError` for no mesh, another one than written, or axes that it does not have.
    """
    own = None if raw.mesh is None else Mesh(raw.mesh.axes, device_ids=raw.mesh.device_ids)
    if own is not None and mesh is not None and own != mesh:
        raise MeshError(f"the sharding is on the mesh {own!r} that it writes, not on {mesh!r}; give that one, or none")
    found = mesh or own
    if found is None:
        raise MeshError("the sharding names axes, but no mesh is given; pass the mesh that has them")
    return Placed(
        found,
        tuple(tuple(found.sub_axis(axis) for axis in dim) for dim in raw.dims),
        tuple(found.sub_axis(axis) for axis in raw.unreduced),
        raw.reduction,
        tuple(found.sub_axis(axis) for axis in (*raw.replicated, *raw.manual)),
    )


class Reader:
    """A text, taken token by token from the left; blanks between tokens are skipped."""

    def __init__(self, what: str, text: str) -> None:
        self.what = what
        self.text = text
        self.at = 0

    def sees(self, token: str) -> bool:
        """Whether the token comes next."""
        self._skip()
        return self.text.startswith(token, self.at)

    def take(self, token: str) -> bool:
        """Takes the token if it comes next."""
        if not self.sees(token):
            return False
        self.at += len(token)
        return True

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Takes what the pattern matches next, if it does."""
        self._skip()
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found

    def need(self, token: str, advice: str) -> None:
        """Takes the token, or fails."""
        if not self.take(token):
            self.fail(advice)

    def word(self) -> str:
        """The word that comes next, or an empty one."""
        found = self.match(_WORD)
        return found[0] if found else ""

    def number(self, advice: str) -> int:
        """The whole number that comes next."""
        found = self.match(_NUMBER)
        return int(found[0]) if found else self.fail(advice)

    def items(self, item: Callable[[], T], close: str) -> tuple[T, ...]:
        """Items separated by commas, up to the closing token."""
        found: list[T] = []
        while not self.take(close):
            if found:
                self.need(",", f"separate items with commas and close the list with {close}")
            found.append(item())
        return tuple(found)

    def skip_braces(self) -> None:
        """Takes a braced block, whatever is in it."""
        depth = 0
        while token := self.match(_BRACED):
            depth += {"{": 1, "}": -1}.get(token[0], 0)
            if depth <= 0:
                return
        self.fail("close the block with }")

    def end(self) -> None:
        """Fails unless nothing is left."""
        self._skip()
        if self.at < len(self.text):
            self.fail("nothing may follow the sharding")

    def fail(self, advice: str, at: int | None = None) -> NoReturn:
        """Raises `NotationError`: the text, the place (the current one, if not given), what to do."""
        rest = self.text[self.at if at is None else at :].strip()
        place = f"cannot read {_short(rest, 40)!r}" if rest else "it ends too early"
        raise NotationError(f"{self.what} {_short(self.text, 300)!r}: {place}; {advice}")

    def _skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1


def value(reader: Reader, keys: tuple[str, ...] = ("replicated", "unreduced")) -> RawSharding:
    """Reads `[{"y"}, {}], replicated={"x"}`, with the lists that are named in `keys`."""
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
    """Reads the reduction of unreduced axes; it is a sum if none is written."""
    at, name = reader.at, reader.word()
    if name and name not in OPS:
        reader.fail(f"unreduced axes have {', '.join(OPS)}", at)
    return name or "sum"


def axis(reader: Reader) -> str:
    """Reads `"x"` or `"x":(1)2` into `x` or `x:(1)2`."""
    name = reader.match(_NAME)
    if name is None:
        reader.fail('write an axis as "x" or "x":(pre)size; a name is a letter or _, then letters, digits, _ . -')
    factor = reader.match(_FACTOR)
    if factor is None and reader.sees(":"):
        reader.fail('write a sub-axis as "x":(pre)size, with two whole numbers')
    return _quoted(name) + (f":({factor[1]}){factor[2]}" if factor else "")


def axis_size(reader: Reader) -> tuple[str, int]:
    """Reads `"x"=4`, an axis of a mesh."""
    advice = 'write the axes of a mesh as "x"=4'
    name = reader.match(_NAME)
    if name is None:
        reader.fail(f"{advice}; a name is a letter or _, then letters, digits, _ . -")
    reader.need("=", advice)
    return _quoted(name), reader.number(advice)


def _quoted(name: re.Match[str]) -> str:
    return name[1] or name[2] or name[3]


def _dim(reader: Reader) -> tuple[str, ...]:
    reader.need("{", 'write each dim in braces, as {"x"} or {}')
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


def _framed(reader: Reader) -> RawSharding:
    """The mesh and the value between `<` and `>`."""
    mesh = None if reader.match(_SYMBOL) else _mesh(reader)
    reader.need(",", "a comma follows the mesh, as in <@mesh, [{}]>")
    raw = value(reader)
    reader.need(">", "close the sharding with >")
    return raw._replace(mesh=mesh)


def _mesh(reader: Reader) -> RawMesh:
    advice = 'name the mesh, as in <@mesh, [{}]>, or write it, as in <mesh<["x"=2]>, [{"x"}]>'
    for token in ("mesh", "<", "["):
        reader.need(token, advice)
    axes = reader.items(lambda: axis_size(reader), "]")
    ids = None
    if reader.match(_IDS):
        reader.need("[", "write device_ids=[0, 1]")
        ids = reader.items(lambda: reader.number("device ids are whole numbers"), "]")
    reader.need(">", advice)
    if ids and not axes:
        raise LayoutError(f"Shardy sharding {_short(reader.text, 300)!r}: {NO_TILE.format(device=ids[0])}")
    return RawMesh(axes, ids)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."

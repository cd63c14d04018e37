"""Shardy's tensor shardings, read into plain data.

    sharding = ["sdy.sharding ="] ["#sdy.sharding"] "<" mesh "," value ">"
             | "#sdy.sharding_per_value<[<" mesh "," value ">]>"      one value only
             | value                                                  as in `reader`
    mesh     = "@" symbol | "mesh<[" [axis-size {"," axis-size}] "]" ["," "device_ids" "=" "[" ids "]"] ">"

For example `#sdy.sharding<@mesh, [{"x", "y":(1)2}, {?}], unreduced={"z"}>`: dim 0 is split by x and by
half of y, dim 1 is whole (and open to the compiler), and the array is still a sum over z.
"""

from __future__ import annotations

import re

from reshard.errors import LayoutError, NotationError, quoted
from reshard.types.notation.reader import Reader, axis_size, value
from reshard.types.notation.sharding import NO_TILE, RawMesh, RawSharding

_SYMBOL = re.compile(r"@(?:[A-Za-z0-9_$.\-]+|\"[^\"]*\")")
_HEAD = re.compile(r"sdy\.sharding\s*=")
_IDS = re.compile(r",\s*device_ids\s*=")


def parse(text: str) -> RawSharding:
    """Reads one sharding; raises `NotationError` with the place that does not parse.

    >>> parse('#sdy.sharding<@mesh, [{"x", "y":(1)2}, {?}], unreduced={"z"}>').dims
    (('x', 'y:(1)2'), ())
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise NotationError(f"Shardy sharding {quoted(text)} is not text; give a str")
    reader = Reader("Shardy sharding", text.replace('\\"', '"'))  # quotes are escaped inside HLO attributes
    reader.match(_HEAD)
    if reader.take("#sdy.sharding_per_value"):
        raw = _per_value(reader)
    elif reader.take("#sdy.sharding") or reader.sees("<"):
        reader.need("<", 'write #sdy.sharding<@mesh, [{"x"}, {}]>')
        raw = _framed(reader)
    else:
        raw = value(reader)
    reader.end()
    return raw


def _per_value(reader: Reader) -> RawSharding:
    """Reads a list of exactly one sharding, `<[<@mesh, [{}]>]>`."""
    reader.need("<", "write #sdy.sharding_per_value<[...]>")
    reader.need("[", "write #sdy.sharding_per_value<[...]>")
    reader.need("<", "a per-value sharding has its values in <>, as in [<@mesh, [{}]>]")
    raw = _framed(reader)
    if reader.take(","):
        reader.fail("it lists several values; give the sharding of one of them")
    reader.need("]", "close the list of values with ]>")
    reader.need(">", "close the list of values with ]>")
    return raw


def _framed(reader: Reader) -> RawSharding:
    """Reads the mesh and the value after `<`, and the closing `>`."""
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
        raise LayoutError(f"Shardy sharding {quoted(reader.text)}: {NO_TILE.format(device=ids[0])}")
    return RawMesh(axes, ids)

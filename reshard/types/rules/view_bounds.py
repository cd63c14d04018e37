"""The least bytes that the busiest device receives in a move with a view, a part or a cast.

view "(a b) -> b a": f32[{x}4, ...]    both layouts written on the same units: the bound of these two
no common units                        what each device needs and does not hold, counted through the view
a cast                                 the smaller of the two dtypes
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.pair.view_messages import view_stats
from reshard.types.pair.view_stages import stages
from reshard.types.rules.bounds import endpoint_bound, lower_bound
from reshard.types.view import View


@lru_cache(maxsize=4096)
def view_bound(source: Layout, target: Layout, view: View | None = None) -> int:
    """Bytes that some device must receive in any plan of the move; padding is not counted.

    Of a move that reduces and has no common units, it says 0.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> view_bound(Layout.parse("f32[{x}4]", mesh), Layout.parse("bf16[16]", mesh))
    24
    """
    after = target if target.dtype == source.dtype else replace(target, dtype=source.dtype)
    bits = dtypes.bits(source.dtype)
    return -(-_bound(source, after, view) * min(bits, dtypes.bits(target.dtype)) // bits)


@lru_cache(maxsize=4096)
def view_endpoint_bound(source: Layout, target: Layout, view: View | None = None) -> int:
    """Bytes that some device must send or receive in any plan of the move; what it must receive, at least.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> view_endpoint_bound(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh))
    48
    """
    if source.dtype != target.dtype:
        return view_bound(source, target, view)
    if view is None:
        return endpoint_bound(source, target)
    parts = stages(source, target, view)
    if parts is None:
        return view_bound(source, target, view)
    return endpoint_bound(parts.middle.source, parts.middle.target)


def _bound(source: Layout, target: Layout, view: View | None) -> int:
    """The bound in the source's dtype."""
    if view is None:
        return lower_bound(source, target)
    parts = stages(source, target, view)
    if parts is not None:
        return lower_bound(parts.middle.source, parts.middle.target)
    return source.nbytes(view_stats(source, target, view).received) if source.partial_as(target) else 0

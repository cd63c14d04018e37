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
from reshard.types.pair.lacking import ByDevice
from reshard.types.pair.view_messages import by_device
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
    ends = plain_ends(source, target, view)
    if ends is not None:
        return lower_bound(*ends)
    return view_receipts(source, target, view).most


@lru_cache(maxsize=4096)
def view_endpoint_bound(source: Layout, target: Layout, view: View | None = None) -> int:
    """Bytes that some device must send or receive in any plan of the move; what it must receive, at least.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> view_endpoint_bound(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh))
    48
    """
    ends = plain_ends(source, target, view)
    return view_bound(source, target, view) if ends is None else endpoint_bound(*ends)


@lru_cache(maxsize=4096)
def plain_ends(source: Layout, target: Layout, view: View | None = None) -> tuple[Layout, Layout] | None:
    """Two layouts between which a move without view or cast has the same bounds; None without common units.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> print(*plain_ends(Layout.parse("f32[{x}4]", mesh), Layout.parse("bf16[16]", mesh)))
    bf16[{x}4] bf16[16]
    """
    dtype = _narrower(source, target).dtype
    source, target = replace(source, dtype=dtype), replace(target, dtype=dtype)
    if view is None:
        return source, target
    parts = stages(source, target, view)
    return None if parts is None else (parts.middle.source, parts.middle.target)


@lru_cache(maxsize=4096)
def view_receipts(source: Layout, target: Layout, view: View | None) -> ByDevice:
    """The bytes that each device lacks, counted through a view without common units; nothing of a reduction."""
    if not source.partial_as(target):
        return ByDevice(0)
    received, _ = by_device(source, replace(target, dtype=source.dtype), view or View.identity(source.shape))
    nbytes = _narrower(source, target).nbytes
    return ByDevice(0, {device: nbytes(received[device]) for device in target.mesh.devices})


def _narrower(source: Layout, target: Layout) -> Layout:
    return min(source, target, key=lambda layout: dtypes.bits(layout.dtype))

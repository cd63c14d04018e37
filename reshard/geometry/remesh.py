"""The same placement written on another mesh of the same devices.

    f32[{d}2] on <d=8>   is   f32[{x}{y}2] on <x=4, y=2>

Programs name axes differently, split them differently, and list devices in different orders. If the positions in one
mesh are those in the other with their digits permuted, every sub-axis of the one is a product of sub-axes of the
other, and a layout of the one can be written on the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

from reshard.errors import MeshError, ReshardError
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import Mesh, SubAxis, is_chain
from reshard.types.whole import primes


def remesh(layout: Layout, mesh: Mesh) -> Layout | None:
    """`layout` written on `mesh`, or None if that mesh lacks the devices or the sub-axes.

    >>> flat, grid = Mesh(d=8), Mesh(x=4, y=2)
    >>> str(remesh(Layout.parse("f32[{d}2]", flat), grid))
    'f32[{x}{y}2]'
    """
    if layout.mesh == mesh:
        return layout
    weights = _position_weights(layout.mesh, mesh)
    if weights is None:
        return None
    try:
        dims: list[Dim] = []
        for dim in layout.dims:
            digits: list[Digit] = []
            for digit in dim.digits:
                axes = () if digit.axis is None else _sub_axes(digit.axis, layout.mesh, mesh, weights)
                digits += [digit] if digit.axis is None else [Digit(axis.size, axis) for axis in axes]
            dims.append(Dim(tuple(digits), dim.size, dim.pieces))
        partial = tuple(s for axis in layout.partial for s in _sub_axes(axis, layout.mesh, mesh, weights))
        return Layout(mesh, tuple(dims), layout.dtype, layout.reduction, partial)
    except ReshardError:
        return None


def common_mesh(a: Mesh, b: Mesh) -> Mesh | None:
    """A mesh whose axes multiply to every axis of both meshes, or None if the two do not nest."""
    spans = (mesh.span(SubAxis(name, 1, size)) for mesh in (a, b) for name, size in mesh.axes.items())
    return _cut_spans(a, b, {end for span in spans for end in span})


def mesh_of_used(a: Layout, b: Layout) -> Mesh | None:
    """A mesh on which both layouts can be written though their meshes do not nest, or None if the sub-axes that they
    use do not nest either.

    >>> x, y = Layout.parse("f32[{x:(1)2}6]", Mesh(x=4, w=3)), Layout.parse("f32[{y:(2)2}6]", Mesh(z=3, y=4))
    >>> print(common_mesh(x.mesh, y.mesh), mesh_of_used(x, y))
    None <d0=2, d1=3, d2=2>
    """
    ends = {end for each in (a, b) for axis in (*each.held, *each.partial) for end in each.mesh.span(axis)}
    return _cut_spans(a.mesh, b.mesh, ends)


def _cut_spans(a: Mesh, b: Mesh, ends: set[int]) -> Mesh | None:
    """The mesh whose axes meet at these positions, or None if they do not divide each other or the devices differ."""
    cuts = sorted({1, a.size, *ends})
    if a.device_ids != b.device_ids or a.size != b.size or not is_chain(cuts):
        return None
    sizes = [high // low for low, high in itertools.pairwise(cuts)][::-1]
    return Mesh({f"d{at}": size for at, size in enumerate(sizes)}, device_ids=a.device_ids)


def _sub_axes(axis: SubAxis, old: Mesh, new: Mesh, weights: dict[int, int]) -> Iterator[SubAxis]:
    """The new mesh's sub-axes for one of the old mesh, prime by prime, major first."""
    stride, size = old.stride(axis), axis.size
    if not weights:
        yield from new.sub_axes(stride, size)
        return
    for prime in primes(size):
        size //= prime
        # The new mesh's place value for an old one.
        place = stride * size
        if place not in weights:
            raise MeshError(f"no digit of the device positions has place {place}")
        yield from new.sub_axes(weights[place], prime)


def _position_weights(old: Mesh, new: Mesh) -> dict[int, int] | None:
    """Old place value -> new place value, if positions are a digit permutation; {} for equal positions.

    The positions of the devices at the old place values determine the permutation; `sums` are the positions that all
    devices have under it.
    """
    if old.size != new.size:
        return None
    if old.device_ids == new.device_ids:
        return {}
    if set(old.devices) != set(new.devices):
        return None
    moved = [new.position(device) for device in old.devices]
    weights: dict[int, int] = {}
    sums = [0]
    place = 1
    for size in reversed([p for n in old.axes.values() for p in primes(n)]):
        weights[place] = moved[place]
        sums = [total + value * moved[place] for value in range(size) for total in sums]
        place *= size
    return weights if sums == moved else None


# Whether two meshes have the same devices, some in common, or none.
#
# trainer <fsdp=8>, devices 0-7      server <tp=4>, devices 8-11     disjoint
#                                    server <tp=4>, devices 0-3      some in common: a device may keep what it has


@lru_cache(maxsize=1024)
def one_set(a: Mesh, b: Mesh) -> bool:
    """Whether two meshes have the same devices, in any order.

    >>> one_set(Mesh(x=2, y=2), Mesh({"d": 4}, device_ids=[3, 2, 1, 0])), one_set(Mesh(x=4), Mesh(x=2))
    (True, False)
    """
    return a.size == b.size and (a.device_ids == b.device_ids or set(a.devices) == set(b.devices))


@lru_cache(maxsize=1024)
def disjoint(a: Mesh, b: Mesh) -> bool:
    """Whether no device is in both meshes.

    >>> disjoint(Mesh(x=2), Mesh({"x": 2}, device_ids=[2, 3])), disjoint(Mesh(x=2), Mesh(x=4))
    (True, False)
    """
    if a.device_ids is None and b.device_ids is None:
        return False
    return set(a.devices).isdisjoint(b.devices)

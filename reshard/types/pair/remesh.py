"""The same placement on another mesh of the same devices.

Two layouts from different programs name their axes differently, split them differently, or list
the devices in another order. If the positions of one mesh are a digit permutation of the other's,
every sub-axis of the one is a product of sub-axes of the other, and the layout has a spelling there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from reshard.errors import MeshError, ReshardError
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import Mesh, SubAxis, primes


def remesh(layout: Layout, mesh: Mesh) -> Layout | None:
    """`layout` spelled on `mesh`, or None where that mesh has no sub-axes for it.

    >>> flat, grid = Mesh(d=8), Mesh(x=4, y=2)
    >>> str(remesh(Layout.parse("f32[{d}2]", flat), grid))
    'f32[{x}{y}2]'
    """
    if layout.mesh == mesh:
        return layout
    weights = _weights(layout.mesh, mesh)
    if weights is None:
        return None
    try:
        dims = tuple(Dim(tuple(_digits(dim, layout.mesh, mesh, weights)), dim.size) for dim in layout.dims)
        partial = tuple(s for axis in layout.partial for s in _sub_axes(axis, layout.mesh, mesh, weights))
        return Layout(mesh, dims, layout.dtype, layout.reduction, partial)
    except ReshardError:
        return None


def common_mesh(a: Mesh, b: Mesh) -> Mesh | None:
    """A mesh whose axes both meshes' axes are products of, None if the two do not nest."""
    if a.device_ids != b.device_ids or a.size != b.size:
        return None
    cuts = sorted({1, *_ends(a), *_ends(b)})
    if any(high % low for low, high in itertools.pairwise(cuts)):
        return None
    sizes = [high // low for low, high in itertools.pairwise(cuts)][::-1]
    return Mesh({f"d{at}": size for at, size in enumerate(sizes)}, device_ids=a.device_ids)


def _ends(mesh: Mesh) -> Iterator[int]:
    return (mesh.stride(SubAxis(n, 1, s)) * s for n, s in mesh.axes.items())


def _digits(dim: Dim, old: Mesh, new: Mesh, weights: dict[int, int]) -> Iterator[Digit]:
    for radix, axis in dim.digits:
        if axis is None:
            yield Digit(radix, None)
        else:
            yield from (Digit(s.size, s) for s in _sub_axes(axis, old, new, weights))


def _sub_axes(axis: SubAxis, old: Mesh, new: Mesh, weights: dict[int, int]) -> Iterator[SubAxis]:
    """The new mesh's sub-axes for an old one, prime by prime, major first."""
    stride, size = old.stride(axis), axis.size
    if not weights:
        yield from new.sub_axes(stride, size)
        return
    for prime in primes(size):
        size //= prime
        yield from new.sub_axes(_weight(weights, stride * size), prime)


def _weight(weights: dict[int, int], place: int) -> int:
    """The new stride of an old one; without any reordering they are equal."""
    if not weights:
        return place
    if place not in weights:
        raise MeshError(f"no digit of the device positions has place {place}")
    return weights[place]


def _weights(old: Mesh, new: Mesh) -> dict[int, int] | None:
    """Old place value -> new place value, if positions are a digit permutation; {} for the identity."""
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

"""What a layout means: device coordinate x local index -> global index.

This is the only definition of correctness in the project, computed straight from the digits.
Nothing in `synth` or `lower` is used to compute it.
"""

from __future__ import annotations

from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh


def meaning(layout: Layout, device: int) -> tuple[tuple[int, ...], ...]:
    """For each dim, the global index of each local index on a device (an id of the mesh).

    The element at local index (i, j) is the global one at (m[0][i], m[1][j]). An index at or
    past the dim's true size is padding.

    >>> mesh = Mesh(x=4, y=2)
    >>> meaning(Layout.parse("f32[2{x}2, {y}2]", mesh), 3)
    ((2, 3, 10, 11), (2, 3))
    """
    position = layout.mesh.position(device)
    return tuple(_indices(dim, layout.mesh, position) for dim in layout.dims)


def _indices(dim: Dim, mesh: Mesh, position: int) -> tuple[int, ...]:
    """Appends one digit after another: digit k is the device's coordinate, or runs over the tile."""
    found = [0]
    for radix, axis in dim.digits:
        values = range(radix) if axis is None else (mesh.coordinate(position, axis),)
        found = [index * radix + value for index in found for value in values]
    return tuple(found)

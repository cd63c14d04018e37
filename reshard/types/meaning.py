"""What a layout means: the map from a device's coordinates and a local index to a global index.

This is the project's only definition of correctness. It is computed directly from the digits, without anything from
`synth` or `lower`, so that it can judge them.
"""

from __future__ import annotations

from reshard.types.dims import number_piece
from reshard.types.layout import Layout


def meaning(layout: Layout, device: int) -> tuple[tuple[int, ...], ...]:
    """For each dim, the global indices of the local indices 0, 1, ... on a device, given by its id.

    With m = meaning(layout, device), the element at local index (i, j) has the global index (m[0][i], m[1][j]). An
    index at or past the true size of its dim is padding.

    >>> from reshard.types.mesh import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> meaning(Layout.parse("f32[2{x}2, {y}2]", mesh), 3)
    ((2, 3, 10, 11), (2, 3))

    A piece of a table has the indices of its runs in order; padding is numbered behind the dim, piece after piece:

    >>> [meaning(Layout.parse("f32[{x}(1@0,3@1,2@0)]", Mesh(x=2)), device) for device in (0, 1)]
    [((0, 4, 5),), ((1, 2, 3),)]
    """
    mesh, position = layout.mesh, layout.mesh.position(device)
    dims: list[tuple[int, ...]] = []
    for dim in layout.dims:
        if dim.pieces is not None:
            number = number_piece(dim, mesh, position)
            held = [run.start + at for run in dim.pieces.runs_of(number) for at in range(run.length)]
            padding = dim.size + number * dim.tile
            dims.append((*held, *range(padding + len(held), padding + dim.tile)))
            continue
        indices = [0]
        for radix, axis in dim.digits:
            # A held digit is the device's coordinate, a local one takes all its values.
            values = range(radix) if axis is None else (mesh.coordinate(position, axis),)
            indices = [index * radix + value for index in indices for value in values]
        dims.append(tuple(indices))
    return tuple(dims)

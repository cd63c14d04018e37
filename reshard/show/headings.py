"""The lines above a plan that the terminal, the page and the notebook share."""

from __future__ import annotations

import math

from reshard.types import Layout
from reshard.types.pair.device_sets import one_set
from reshard.types.units import bytes_text, counted


def meshes_text(source: Layout, target: Layout) -> str:
    """The mesh of both layouts, or their two meshes.

    >>> from reshard.types import Mesh
    >>> one, other = Layout.parse("f32[{x}4]", Mesh(x=4)), Layout.parse("f32[{z}4]", Mesh(z=4))
    >>> meshes_text(one, one), meshes_text(one, other)
    ('<x=4>', '<x=4> and <z=4>')
    """
    return str(source.mesh) if source.mesh == target.mesh else f"{source.mesh} and {target.mesh}"


def array_bytes_text(layout: Layout) -> str:
    """The size of the whole array, which no single device need hold.

    >>> from reshard.types import Mesh
    >>> array_bytes_text(Layout.parse("f32[{x}4096, 1024]", Mesh(x=4)))
    '64.0 MiB'
    """
    return bytes_text(layout.nbytes(math.prod(layout.shape)))


def size_text(source: Layout, target: Layout) -> str:
    """The array's size, the number of devices, and the mesh or meshes.

    >>> from reshard.types import Mesh
    >>> layout = Layout.parse("f32[{x}4]", Mesh(x=4))
    >>> size_text(layout, layout)
    '64 B on 4 devices, mesh <x=4>'
    """
    devices = counted(source.mesh.size, "device")
    if not one_set(source.mesh, target.mesh):
        shared = len(set(source.mesh.devices) & set(target.mesh.devices))
        others = f"{target.mesh.size}, of which {shared} are among them" if shared else f"{target.mesh.size} others"
        return f"{array_bytes_text(source)} from {devices} of {source.mesh} to {others}, mesh {target.mesh}"
    return f"{array_bytes_text(source)} on {devices}, mesh {meshes_text(source, target)}"

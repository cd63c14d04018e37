"""jax.Arrays as what is saved: their layouts, and the tiles of this process."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from reshard.errors import LayoutError, quoted
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh


def tiles_of_array(array: jax.Array) -> tuple[Layout, dict[int, NDArray[Any]], dict[int, int]]:
    """The layout of a jax.Array, by ids of devices, this process's tiles, and the process of each device.

    Of devices of this process that hold the same tile, one gives it: all others have a view of that.
    """
    sharding = array.sharding
    dtype = dtypes.canonical(array.dtype)
    devices = {device.id: device.process_index for device in sharding.device_set}
    if isinstance(sharding, NamedSharding):
        layout = Layout.from_jax(sharding, array.shape, dtype)
    else:
        # Other shardings name no axes: most are of one device, or of all devices alike.
        if not sharding.is_fully_replicated:
            raise LayoutError(f"{quoted(sharding)} is not a NamedSharding; put the array on one before it is saved")
        mesh = Mesh({"d": len(devices)}, device_ids=sorted(devices))
        layout = Layout.tiled(mesh, array.shape, dtype, [[] for _ in array.shape])
    copied: dict[str, NDArray[Any]] = {}
    tiles: dict[int, NDArray[Any]] = {}
    for shard in array.addressable_shards:
        # On a GPU each of these is a copy to the host.
        part = str(shard.index)
        if part not in copied:
            copied[part] = np.asarray(shard.data)
        tiles[shard.device.id] = copied[part]
    return layout, tiles, devices

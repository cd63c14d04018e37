"""jax.Arrays as what is saved: their layouts, the tiles of this process, and the processes of `jax.distributed`."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from reshard.errors import AgreementError, LayoutError, quoted
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

_numbers = itertools.count()
"""All processes make the same calls in the same order, so that a number tells calls apart."""


class JaxProcesses:
    """The processes of `jax.distributed`, which tell each other things through its key-value store."""

    def __init__(self, limit: float) -> None:
        self.rank, self.size = jax.process_index(), jax.process_count()
        self._limit = limit
        self._last: str | None = None

    def gather(self, mine: str) -> list[str]:
        """What each process gives."""
        if self.size == 1:
            return [mine]
        # jax has no public name for the store.
        from jax._src.distributed import global_state

        client: Any = global_state.client
        place = f"reshard/save/{next(_numbers)}"
        deadline = time.monotonic() + self._limit
        texts: list[str] = []
        try:
            client.key_value_set(f"{place}/{self.rank}", f"={mine}")
            for process in range(self.size):
                left = max(1, int(1000 * (deadline - time.monotonic())))
                texts.append(str(client.blocking_key_value_get(f"{place}/{process}", left))[1:])
            # All have read what they were told the time before last.
            if self._last is not None:
                client.key_value_delete(self._last)
        except jax.errors.JaxRuntimeError as error:
            raise AgreementError(
                f"process {len(texts)} did not come to the same point of the save within {self._limit:g} s ({error}); "
                f"all processes call save, in the same order; if some are only slow, give limit= more seconds"
            ) from None
        self._last = f"{place}/{self.rank}"
        return texts


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

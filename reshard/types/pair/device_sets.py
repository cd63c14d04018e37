"""Whether two meshes have the same devices, some in common, or none.

trainer <fsdp=8>, devices 0-7      server <tp=4>, devices 8-11     disjoint
                                   server <tp=4>, devices 0-3      some in common: a device may keep what it has
"""

from __future__ import annotations

from functools import lru_cache

from reshard.types.mesh import Mesh


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

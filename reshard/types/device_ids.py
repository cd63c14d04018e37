"""The device ids of a mesh: read from a jax mesh, from a list, or from the number of the first one; checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sized
from typing import Any, cast

from reshard.errors import MeshError, quoted
from reshard.types.whole import MOST, MOST_DEVICES, counted, whole, written


def numbered_from(first: str, size: int, text: str) -> range:
    """The ids of `size` devices from the number that `first` writes; `text` is the mesh as it was given.

    >>> numbered_from("8", 4, "z=4@8")
    range(8, 12)
    """
    start = written(first) if first.isdecimal() and first.isascii() else None
    if start is None or start + size > MOST or size > MOST_DEVICES:
        raise MeshError(
            f"mesh {quoted(text)}: after @ comes the number of the first device, such as 8 in z=4@8; at most "
            f"{MOST_DEVICES} devices are numbered so"
        )
    return range(start, start + size)


def of_jax(jax_mesh: Any, device_ids: Any) -> tuple[list[tuple[str, int]], Any]:
    """The axes of a jax mesh and the ids of its devices; an `AbstractMesh` has none."""
    devices = getattr(jax_mesh, "devices", None) if type(jax_mesh).__name__ == "Mesh" else None
    ids = device_ids if device_ids is not None or devices is None else [device.id for device in devices.flat]
    return [(str(name), int(size)) for name, size in jax_mesh.shape.items()], ids


def checked_ids(device_ids: object, size: int, mesh: str) -> tuple[int, ...]:
    """The device ids of a mesh; their number is checked before any of them is read."""
    if not isinstance(device_ids, Iterable) or isinstance(device_ids, str | bytes):
        raise MeshError(f"device_ids {quoted(device_ids)}: give a list of one id per device, or None")
    given = cast("Iterable[object]", device_ids)
    count = counted(given) if isinstance(given, Sized) else None
    if isinstance(given, Sized) and count is None:
        raise MeshError(f"device_ids {quoted(given)}: give a list of one id per device, or None")
    if size > MOST_DEVICES:
        raise MeshError(f"mesh {mesh} has {size} devices, too many to list ids of; at most {MOST_DEVICES} are listed")
    listed = [] if count is not None and count != size else list(itertools.islice(given, size + 1))
    if (count or len(listed)) != size:
        number = count if count is not None else f"{len(listed)} or more"
        raise MeshError(f"mesh {mesh} has {size} devices, but device_ids lists {number}; list one id per device")
    return _check_distinct(listed, size, mesh)


def _check_distinct(listed: list[object], size: int, mesh: str) -> tuple[int, ...]:
    bad = [each for each in listed if whole(each) is None and whole(each, -MOST, -1) is None]
    if bad:
        like = ", such as the id of a jax device" if hasattr(bad[0], "id") else ""
        raise MeshError(f"device_ids has {quoted(bad[0])}; a device id is a whole number of at least 0{like}")
    ids = tuple(int(cast("int", each)) for each in listed)
    if len(set(ids)) != size or min(ids, default=0) < 0:
        raise MeshError(f"device_ids {quoted(list(ids)[:16])} of mesh {mesh}: ids must be distinct and at least 0")
    return ids

"""Which rank has which device's tile.

    communicator of 4    mesh                    devices of ranks 0, 1, 2, 3
                         <x=4>                   0    1    2    3
                         <x=4>, ids 5 9 7 2      2    5    7    9       every rank has a tile: by ascending id
                         <x=2>                   0    1    -    -       ids are ranks, others have no tile
                         <x=2>, ids 3 1          -    1    -    3

A seat is a tile's number by ascending device id: what the functions here that take a number count.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from reshard.geometry.remesh import one_set
from reshard.types.mesh import Mesh


@lru_cache(maxsize=256)
def devices_by_id(mesh: Mesh) -> tuple[int, ...]:
    """The device of each seat: seat s is the s-th smallest device id. On a mesh without `device_ids`, device s.

    >>> devices_by_id(Mesh({"x": 3}, device_ids=[7, 2, 5]))
    (2, 5, 7)
    """
    return mesh.devices if mesh.device_ids is None else tuple(sorted(mesh.devices))


@lru_cache(maxsize=64)
def seats_by_position(mesh: Mesh) -> tuple[int, ...]:
    """The seat of the device at each position.

    >>> seats_by_position(Mesh({"x": 3}, device_ids=[7, 2, 5]))
    (2, 0, 1)
    """
    seats = _seats_of_devices(mesh)
    return tuple(seats[device] for device in mesh.devices)


@lru_cache(maxsize=256)
def ranks_of_seats(mesh: Mesh, size: int) -> Sequence[int]:
    """The rank of each seat in a communicator of `size`.

    >>> ranks_of_seats(Mesh({"x": 2}, device_ids=[7, 2]), 2), ranks_of_seats(Mesh({"x": 2}, device_ids=[7, 2]), 8)
    (range(0, 2), (2, 7))
    """
    return range(size) if mesh.size == size else devices_by_id(mesh)


def seat_of(mesh: Mesh, rank: int, size: int) -> int | None:
    """The seat of a rank of a communicator of `size`; None if the rank has no tile.

    >>> mesh = Mesh({"x": 2}, device_ids=[7, 2])
    >>> seat_of(mesh, 7, 8), seat_of(mesh, 3, 8), seat_of(mesh, 1, 2)
    (1, None, 1)
    """
    return rank if mesh.size == size else _seats_of_devices(mesh).get(rank)


def device_of(meshes: tuple[Mesh, ...], rank: int, size: int) -> int:
    """The device of a rank of a communicator of `size` in the first of these meshes that has one; else its number.

    >>> device_of((Mesh(x=2), Mesh({"x": 2}, device_ids=[7, 2])), 7, 8)
    7
    """
    seats_there = ((mesh, seat_of(mesh, rank, size)) for mesh in meshes)
    return next((devices_by_id(mesh)[seat] for mesh, seat in seats_there if seat is not None), rank)


@lru_cache(maxsize=256)
def _seats_of_devices(mesh: Mesh) -> dict[int, int]:
    return {device: seat for seat, device in enumerate(devices_by_id(mesh))}


def rank_of_devices(meshes: tuple[Mesh, ...], size: int) -> dict[int, int]:
    """The rank of every device of these meshes in a communicator of `size`.

    >>> rank_of_devices((Mesh({"x": 2}, device_ids=[7, 2]),), 2)
    {2: 0, 7: 1}
    """
    return {
        device: rank
        for mesh in meshes
        for device, rank in zip(devices_by_id(mesh), ranks_of_seats(mesh, size), strict=True)
    }


def is_seated(one: Mesh, other: Mesh, size: int) -> bool:
    """Whether every device of two meshes has a rank in a communicator of `size`: ids are ranks, or all ranks have tiles
    of both.

    >>> far = Mesh({"x": 2}, device_ids=[7, 2])
    >>> is_seated(far, far, 8), is_seated(far, far, 2), is_seated(far, Mesh(x=2), 2), is_seated(far, far, 4)
    (True, True, False, False)
    """
    if one.size == size and one_set(one, other):
        return True
    return all(mesh.size <= size and max(mesh.devices) < size for mesh in (one, other))

"""Which rank has which tile: by device id, or by its order where every rank has one."""

from __future__ import annotations

import pytest

from reshard.lower.to_mpi import devices_by_id, is_seated, rank_of_devices, ranks_of_seats, seat_of
from reshard.types import Mesh

FAR = Mesh({"x": 3}, device_ids=[7, 2, 5])


def test_ranks_number_the_device_ids() -> None:
    assert devices_by_id(FAR) == (2, 5, 7)
    assert devices_by_id(Mesh(x=2, y=2)) == (0, 1, 2, 3)


@pytest.mark.parametrize("mesh", [FAR, Mesh(x=3), Mesh(x=1), Mesh({"x": 2}, device_ids=[7, 0])])
@pytest.mark.parametrize("size", [8, 11])
def test_ids_are_ranks_where_some_ranks_have_no_tile(mesh: Mesh, size: int) -> None:
    assert ranks_of_seats(mesh, size) == tuple(sorted(mesh.devices))
    assert rank_of_devices((mesh,), size) == {device: device for device in mesh.devices}
    for rank in range(size):
        seat = seat_of(mesh, rank, size)
        assert (seat is None) == (rank not in mesh.devices)
        assert seat is None or devices_by_id(mesh)[seat] == rank


def test_any_ids_where_every_rank_has_a_tile() -> None:
    assert ranks_of_seats(FAR, 3) == (0, 1, 2)
    assert [seat_of(FAR, rank, 3) for rank in range(3)] == [0, 1, 2]
    assert rank_of_devices((FAR,), 3) == {2: 0, 5: 1, 7: 2}


@pytest.mark.parametrize(
    ("one", "other", "size", "seated"),
    [
        (FAR, FAR, 3, True),
        (FAR, FAR, 8, True),
        (FAR, FAR, 7, False),
        (FAR, Mesh(x=3), 3, False),
        (FAR, Mesh(x=3), 8, True),
        (Mesh(x=4), Mesh(x=2), 3, False),
        (Mesh(x=1 << 40), Mesh(x=2), 3, False),
    ],
)
def test_devices_without_a_rank(one: Mesh, other: Mesh, size: int, seated: bool) -> None:
    assert is_seated(one, other, size) == is_seated(other, one, size) == seated

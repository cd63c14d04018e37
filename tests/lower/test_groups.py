"""Replica groups and block numbers, against coordinates counted one by one."""

from __future__ import annotations

import itertools

import pytest

from reshard.lower.groups import block_numbers, coordinate, groups_along
from reshard.types import Mesh

MESHES = [
    (Mesh(x=2, y=3, z=5), [(1, 5)]),
    (Mesh(x=2, y=3, z=5), [(5, 3), (15, 2)]),
    (Mesh(x=2, y=3, z=5), [(15, 2), (1, 5), (5, 3)]),
    (Mesh(x=12), [(2, 3)]),  # a part of an axis
    (Mesh(x=7), []),
    (Mesh({"x": 2, "y": 3}, device_ids=[5, 3, 1, 0, 2, 4]), [(3, 2)]),
]


def coordinates(mesh: Mesh, device: int, factors: list[tuple[int, int]]) -> tuple[int, ...]:
    """The device's coordinates, counted: along a factor, they change every `stride` positions."""
    position = mesh.devices.index(device)
    counted = []
    for stride, size in factors:
        values = [value for value in range(size) for _ in range(stride)]
        counted.append(values[position % len(values)])
    return tuple(counted)


@pytest.mark.parametrize(("mesh", "factors"), MESHES)
def test_members_differ_along_the_factors_only(mesh: Mesh, factors: list[tuple[int, int]]):
    groups = groups_along(mesh, factors)
    assert sorted(itertools.chain(*groups)) == sorted(mesh.devices)
    for group in groups:
        values = list(itertools.product(*(range(size) for _, size in factors)))
        assert [coordinates(mesh, device, factors) for device in group] == values  # major to minor
        positions = [mesh.devices.index(device) for device in group]
        offsets = [sum(v * stride for v, (stride, _) in zip(value, factors, strict=True)) for value in values]
        assert [at - positions[0] for at in positions] == offsets


@pytest.mark.parametrize(("mesh", "factors"), MESHES)
def test_block_numbers_are_coordinates_as_one_number(mesh: Mesh, factors: list[tuple[int, int]]):
    """The n-th member of a gather's group has block n."""
    order = list(itertools.product(*(range(size) for _, size in factors)))
    numbers = block_numbers(mesh, factors)
    assert numbers == {device: order.index(coordinates(mesh, device, factors)) for device in mesh.devices}
    for group in groups_along(mesh, factors):
        assert [numbers[device] for device in group] == list(range(len(group)))


def test_a_coordinate_is_that_of_the_mesh():
    mesh = Mesh(x=4, y=3)
    for name in ("x", "y", "x:(1)2", "x:(2)2"):
        axis = mesh.sub_axis(name)
        stride = mesh.stride(axis)
        assert all(coordinate(at, stride, axis.size) == mesh.coordinate(at, axis) for at in range(mesh.size))

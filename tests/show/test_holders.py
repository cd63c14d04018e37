"""Pieces, index ranges and holders, against the meaning of random layouts."""

import itertools
import math
import random

import pytest

import reshard as rs
from reshard.show.holders import count, fixed, free, label, owners, pieces, ranges, set_text
from reshard.types.meaning import meaning
from tests.layouts import random_layout


def test_pieces_and_ranges_follow_the_meaning():
    chance = random.Random(2)
    for mesh in (rs.Mesh(x=4, y=2), rs.Mesh(x=3, y=4, device_ids=range(11, -1, -1))):
        for _ in range(100):
            layout = random_layout(chance, mesh, (24, 10))
            for device in mesh.devices:
                held = meaning(layout, device)
                for dim, indices in zip(layout.dims, held, strict=True):
                    runs = [i for run in ranges(dim, mesh, mesh.position(device)) for i in range(*run)]
                    assert runs == [i for i in indices if i < dim.size]
            for at, dim in enumerate(layout.dims):
                cells = list(pieces(dim))
                assert [i for cell in cells for i in range(cell.start, cell.stop)] == list(range(dim.size))
                for cell in cells:
                    devices, total = owners(mesh, fixed(dim, mesh, cell.number))
                    assert len(devices) == total
                    assert devices == sorted(d for d in mesh.devices if cell.start in meaning(layout, d)[at])


def test_the_devices_of_a_huge_mesh_are_counted_not_listed():
    layout = rs.Layout.parse("f32[4] + sum{y}", rs.Mesh(x=1 << 20, y=1 << 20))
    assert label(layout, []) == "0,1048576,.. (1048576) + 1,1048577,.. (1048576) + .. (1048576)"


def test_piece_counts_are_those_of_the_pieces():
    chance = random.Random(6)
    for _ in range(100):
        for dim in random_layout(chance, rs.Mesh(x=3, y=4), (17, 24)).dims:
            assert count(dim) == len(list(pieces(dim)))


@pytest.mark.parametrize(("sizes", "used"), [((4, 3, 2), 0), ((4, 3, 2), 1), ((5, 7), 2), ((2, 3, 5, 7), 3)])
def test_free_factors_and_those_in_use_make_up_the_mesh(sizes, used):
    mesh = rs.Mesh({f"a{at}": size for at, size in enumerate(sizes)})
    factors = [(mesh.stride(mesh.sub_axis(name)), size) for name, size in mesh.axes.items()]
    chance = random.Random(7)
    for _ in range(20):
        taken = chance.sample(factors, used)
        every = sorted([*taken, *free(mesh, taken)])
        assert every[0][0] == 1 and math.prod(size for _, size in every) == mesh.size
        assert all(stride * size == after for (stride, size), (after, _) in itertools.pairwise(every))


def named(text: str) -> list[int]:
    """The devices that a short text of a whole set stands for."""
    devices: list[int] = []
    parts = text.split(",")
    for at, part in enumerate(parts):
        if part == "..":
            last, step = int(parts[at + 1]), devices[-1] - devices[-2]
            devices += range(devices[-1] + step, last, step)
        else:
            low, _, high = part.partition("-")
            devices += range(int(low), int(high or low) + 1)
    return devices


def test_a_short_text_of_a_set_is_exact_unless_it_counts():
    chance = random.Random(8)
    for _ in range(300):
        devices = sorted(chance.sample(range(12), chance.randint(1, 8)))
        text = set_text(devices, len(devices))
        if text.endswith(f"({len(devices)})"):
            assert text.count(",") == 2 and len(devices) > 3
        else:
            assert named(text) == devices


def test_a_longer_set_is_counted():
    assert set_text([0, 1], 64) == "0-1,.. (64)"
    assert set_text([0, 3, 6, 9], 4) == "0,3,..,9"

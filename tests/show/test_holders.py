"""Pieces, index ranges and holders, against the meaning of random layouts."""

import random

import reshard as rs
from reshard.show.holders import fixed, label, owners, pieces, ranges
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
                    devices, count = owners(mesh, fixed(dim, mesh, cell.number))
                    assert len(devices) == count
                    assert devices == sorted(d for d in mesh.devices if cell.start in meaning(layout, d)[at])


def test_the_devices_of_a_huge_mesh_are_counted_not_listed():
    layout = rs.Layout.parse("f32[4] + sum{y}", rs.Mesh(x=1 << 20, y=1 << 20))
    assert label(layout, []) == "0,1048576,.. (1048576) + 1,1048577,.. (1048576) + .. (1048576)"

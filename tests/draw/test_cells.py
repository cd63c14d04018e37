"""The cells of a layout, element by element, against its meaning."""

import random
from itertools import product
from math import prod

import pytest

from reshard.draw.vector_tiles import MOST_CELLS, LayoutCells, bounded, counts
from reshard.errors import ReshardError
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import random_pair

KINDS = [
    (Mesh(x=4), "f32[]"),
    (Mesh(x=4, y=2), "f32[{x}4]"),
    (Mesh(x=4, y=2), "f32[{y}8, 16, {x}4]"),
    (Mesh(x=2, y=2, z=2), "f32[{x}2, {y}2, 3, {z}2]"),
    (Mesh(x=4), "f32[{x}3/10, 2]"),
    (Mesh(x=4), "f32[{x}1/2]"),
    (Mesh(x=2, y=2), "f32[3{x}2/11, 2{y}3]"),
    (Mesh(x=4), "f32[1{x}4/10]"),
    (Mesh(x=2, y=2), "f32[2{x}2{y}2]"),
    (Mesh(x=4, y=2), "f32[8, 4]"),
    (Mesh(x=4, y=2), "f32[{y}4, 4] + sum{x}"),
    (Mesh(x=6), "f32[6{x:(1)2}3]"),
    (Mesh({"x": 4}, device_ids=[10, 3, 7, 20]), "f32[{x}4]"),
    (Mesh(), "f32[4]"),
]


def whole(layout):
    return LayoutCells(layout, counts(layout))


def by_meaning(layout):
    """The devices that hold each element of the padded array, by the layout's meaning."""
    held = {}
    for device in layout.mesh.devices:
        for element in product(*meaning(layout, device)):
            held.setdefault(element, []).append(device)
    return {element: tuple(sorted(devices)) for element, devices in held.items()}


def by_cells(cells):
    """The devices that hold each element, by the cells."""
    held = {}
    for cell in cells.cells:
        for element in product(*(range(*span) for span in cell.spans)):
            assert element not in held, f"{element} is in two cells"
            held[element] = cell.devices
    return held


@pytest.mark.parametrize(("mesh", "text"), KINDS, ids=[text for _, text in KINDS])
def test_cells_follow_the_meaning(mesh, text):
    layout = Layout.parse(text, mesh)
    assert by_cells(whole(layout)) == by_meaning(layout)


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", range(60))
def test_cells_of_random_layouts(seed):
    choose = random.Random(seed)
    for layout in random_pair(choose, partial=seed % 3 == 0):
        if 0 not in layout.shape:
            assert by_cells(whole(layout)) == by_meaning(layout), str(layout)


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", range(40))
def test_a_part_of_the_runs_is_the_same_part_of_the_layout(seed):
    choose = random.Random(seed)
    for layout in random_pair(choose):
        drawn = tuple(choose.randint(min(1, count), count) for count in counts(layout))
        every = by_meaning(layout)
        part = by_cells(LayoutCells(layout, drawn))
        assert part == {element: every[element] for element in part}, f"{drawn} of {layout}"
        if 0 not in layout.shape:
            assert len(LayoutCells(layout, drawn).cells) == prod(drawn)


def test_an_empty_array_has_no_cells():
    assert whole(Layout.parse("f32[0, {x}2]", Mesh(x=2))).cells == ()


def test_summands_are_apart_and_replicas_together():
    (cell, _) = whole(Layout.parse("f32[{z}4] + sum{x}", Mesh(x=2, y=2, z=2))).cells
    assert cell.holders == ((0, 2), (4, 6))


def test_cells_are_few_however_large_the_array():
    layout = Layout.parse("f32[1048576{x}64, {y}8388608]", Mesh(x=4, y=8))
    cells = LayoutCells(layout, bounded(counts(layout)))
    assert len(cells.cells) <= MOST_CELLS
    assert [cell.devices for cell in cells.cells[::8][:5]] == [(0,), (8,), (16,), (24,), (0,)]


@pytest.mark.parametrize("sizes", [(), (1,), (5000,), (64, 64), (100, 100), (3, 3, 3000), (40, 40, 40), (0, 9)])
def test_bounded_keeps_within_the_bound_and_the_sizes(sizes):
    some = bounded(sizes)
    assert prod(some) <= MOST_CELLS and all(n <= size and (n or not size) for n, size in zip(some, sizes, strict=True))
    if prod(sizes) <= 1000:
        assert some == sizes


def test_too_many_devices_or_runs_are_refused():
    layout = Layout.parse("f32[{x}2, 4]", Mesh(x=8192))
    with pytest.raises(ReshardError, match=r"8192 devices .*at most 4096"):
        assert LayoutCells(layout, (16, 1)).cells
    fine = Layout.parse("f32[{x:(1)2}2097152{x:(2)2}]", Mesh(x=4))
    with pytest.raises(ReshardError, match="too finely"):
        assert LayoutCells(fine, (16,)).cells

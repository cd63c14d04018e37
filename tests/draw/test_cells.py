"""The cells of a layout say of every element which devices hold it, as its meaning does."""

import random
from itertools import product
from math import prod

import pytest

from reshard.draw.cells import MOST_CELLS, Cut, bounded, counts
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
    return Cut(layout, counts(layout))


def wanted(layout):
    """Per element of the padded array, the devices that hold it, by its meaning."""
    held = {}
    for device in layout.mesh.devices:
        for element in product(*meaning(layout, device)):
            held.setdefault(element, []).append(device)
    return {element: tuple(sorted(devices)) for element, devices in held.items()}


def found(cut):
    """The same, by the cells."""
    held = {}
    for cell in cut.cells:
        for element in product(*(range(*span) for span in cell.spans)):
            assert element not in held, f"{element} is in two cells"
            held[element] = cell.devices
    return held


@pytest.mark.parametrize(("mesh", "text"), KINDS, ids=[text for _, text in KINDS])
def test_cells_hold_what_the_meaning_says(mesh, text):
    layout = Layout.parse(text, mesh)
    assert found(whole(layout)) == wanted(layout)


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts_too(seed):
    choose = random.Random(seed)
    for layout in random_pair(choose, partial=seed % 3 == 0):
        if 0 not in layout.shape:
            assert found(whole(layout)) == wanted(layout), str(layout)


@pytest.mark.parametrize("seed", range(40))
def test_a_part_of_the_runs_is_that_part_of_the_whole(seed):
    choose = random.Random(seed)
    for layout in random_pair(choose):
        drawn = tuple(choose.randint(min(1, count), count) for count in counts(layout))
        every = wanted(layout)
        part = found(Cut(layout, drawn))
        assert part == {element: every[element] for element in part}, f"{drawn} of {layout}"
        if 0 not in layout.shape:
            assert len(Cut(layout, drawn).cells) == prod(drawn)


def test_an_empty_array_has_no_cells():
    assert whole(Layout.parse("f32[0, {x}2]", Mesh(x=2))).cells == ()


def test_summands_are_apart_and_replicas_together():
    (cell, _) = whole(Layout.parse("f32[{z}4] + sum{x}", Mesh(x=2, y=2, z=2))).cells
    assert cell.holders == ((0, 2), (4, 6))


def test_cells_are_few_however_large_the_array():
    layout = Layout.parse("f32[1048576{x}64, {y}8388608]", Mesh(x=4, y=8))
    cut = Cut(layout, bounded(counts(layout)))
    assert len(cut.cells) <= MOST_CELLS
    assert [cell.devices for cell in cut.cells[::8][:5]] == [(0,), (8,), (16,), (24,), (0,)]


@pytest.mark.parametrize("sizes", [(), (1,), (5000,), (64, 64), (100, 100), (3, 3, 3000), (40, 40, 40), (0, 9)])
def test_bounded_keeps_to_the_bound_and_to_the_sizes(sizes):
    some = bounded(sizes)
    assert prod(some) <= MOST_CELLS and all(n <= size and (n or not size) for n, size in zip(some, sizes, strict=True))
    if prod(sizes) <= 1000:
        assert some == sizes


def test_too_many_devices_or_runs_are_refused():
    layout = Layout.parse("f32[{x}2, 4]", Mesh(x=8192))
    with pytest.raises(ReshardError, match=r"8192 devices .*at most 4096"):
        assert Cut(layout, (16, 1)).cells
    fine = Layout.parse("f32[{x:(1)2}2097152{x:(2)2}]", Mesh(x=4))
    with pytest.raises(ReshardError, match="too finely"):
        assert Cut(fine, (16,)).cells

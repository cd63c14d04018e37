"""The cells of a layout, element by element, against its meaning; which dims of a plan are drawn, and the captions."""

import random
from itertools import product
from math import prod

import pytest

import reshard as rs
from reshard.draw.scene import PALE
from reshard.draw.tile_panels import (
    MOST_CELLS,
    MOST_SLICES,
    MOST_STRIPES,
    Cell,
    LayoutCells,
    choose_panels,
    count_runs,
    label_cell,
    limit_runs,
)
from reshard.errors import ReshardError
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.draw.cases import M222, planned
from tests.layouts import random_pair
from tests.sampling import for_each


def whole(layout):
    return LayoutCells(layout, count_runs(layout))


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


@for_each(range(20))
def test_cells_of_random_layouts(seed):
    choose = random.Random(seed)
    for layout in random_pair(choose, partial=seed % 3 == 0):
        if 0 not in layout.shape:
            assert by_cells(whole(layout)) == by_meaning(layout), str(layout)


@for_each(range(20))
def test_a_part_of_the_runs_is_the_same_part_of_the_layout(seed):
    choose = random.Random(seed)
    for layout in random_pair(choose):
        drawn = tuple(choose.randint(min(1, count), count) for count in count_runs(layout))
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
    cells = LayoutCells(layout, limit_runs(count_runs(layout)))
    assert len(cells.cells) <= MOST_CELLS
    assert [cell.devices for cell in cells.cells[::8][:5]] == [(0,), (8,), (16,), (24,), (0,)]
    fine = LayoutCells(Layout.parse("f32[{x:(1)2}2097152{x:(2)2}]", Mesh(x=4)), (4,))
    assert [cell.devices for cell in fine.cells] == [(0,), (1,), (0,), (1,)]


@pytest.mark.parametrize("sizes", [(), (1,), (5000,), (64, 64), (100, 100), (3, 3, 3000), (40, 40, 40), (0, 9)])
def test_limits_keep_within_the_bound_and_the_sizes(sizes):
    some = limit_runs(sizes)
    assert prod(some) <= MOST_CELLS and all(n <= size and (n or not size) for n, size in zip(some, sizes, strict=True))
    if prod(sizes) <= 1000:
        assert some == sizes


def test_too_many_devices_are_refused():
    layout = Layout.parse("f32[{x}2, 4]", Mesh(x=8192))
    with pytest.raises(ReshardError, match=r"8192 devices .*at most 4096"):
        assert LayoutCells(layout, (16, 1)).cells


@for_each(range(20))
def test_dims_that_are_not_drawn_are_never_split(seed):
    source, target = random_pair(random.Random(seed), most_rank=5)
    plan = rs.plan(source, target)
    drawn = choose_panels(plan)
    rest = [dim for dim in range(len(source.shape)) if dim not in (*drawn.grid, *drawn.slices)]
    for layout in drawn.layouts:
        for dim in rest:
            assert len({meaning(layout, device)[dim] for device in layout.mesh.devices}) == 1
    assert len(drawn.grid) == min(2, len(source.shape) - len(rest))
    assert not set(drawn.grid) & set(drawn.slices) and list(drawn.grid) == sorted(drawn.grid)
    runs = [max(of_dim) for of_dim in zip(*map(count_runs, drawn.layouts), strict=True)]
    assert all(runs[dim] >= runs[other] for dim in drawn.grid for other in drawn.slices)
    _, named, note = drawn.describe().partition("Not drawn: ")
    assert all(f"dim {dim} ({source.shape[dim]})" in note for dim in rest) and bool(named) == bool(rest)


@pytest.mark.parametrize("seed", range(10))
def test_slices_and_cells_are_limit_runs(seed):
    choose = random.Random(seed)
    mesh = Mesh(x=4, y=3, z=2)
    shape = [12 * choose.randint(1, 50) for _ in range(4)]
    layouts = [Layout.from_spec(mesh, shape, "int8", [[a] for a in choose.sample("xyz", 3)]) for _ in range(2)]
    fine = Layout.parse("s8[{x:(1)2}64{x:(2)2}2, {y}100{z}1, {w}5]", Mesh(w=2, x=4, y=3, z=2))
    cyclic = Layout.parse("s8[24{x}2, 300{y}1, 600{z}3, 2]", mesh)
    for source, target in (layouts, [cyclic, cyclic], [fine, fine]):
        for panel in choose_panels(rs.plan(source, target)).panels:
            drawn = choose_panels(rs.plan(source, target))
            assert prod(panel.drawn) <= MOST_CELLS
            assert prod(panel.drawn[dim] for dim in drawn.slices) <= MOST_SLICES
            assert all(1 <= some <= every for some, every in zip(panel.drawn, count_runs(panel.layout), strict=True))


def test_slices_are_named_by_their_indices():
    drawn = choose_panels(planned("slices of padding"))
    assert len(drawn.slices) == 1
    names = [name for name, _ in drawn.list_slices(0)]
    assert all(name.startswith(f"dim {drawn.slices[0]}: ") for name in names)
    cells = [cell for _, cells in drawn.list_slices(0) for cell in cells]
    assert len(cells) == len(drawn.panels[0].cells) and set(cells) == set(drawn.panels[0].cells)


def test_panels_have_one_scale_unless_some_are_cropped():
    even = choose_panels(planned("two dims"))
    assert [even.extent(at, 0) for at in range(len(even.panels))] == [16] * len(even.panels)
    mesh = Mesh(x=2, y=2)
    source, target = Layout.parse("f64[64{x}64]", mesh), Layout.parse("f64[{x}{y}2048]", mesh)
    cropped = choose_panels(rs.plan(source, target))
    assert cropped.cropped(0, 0) and not cropped.cropped(len(cropped.panels) - 1, 0)
    assert cropped.extent(0, 0) == 16 * 64 and cropped.extent(len(cropped.panels) - 1, 0) == 8192
    assert cropped.describe().endswith("Source: the first 16 of 128 runs of dim 0.")


NOTES = [
    (Mesh(x=5), "f32[{x}1]", "f32[{x}1]", ["Numbers and colours are the 5 devices."]),
    (Mesh(x=1), "f32[7]", "f32[7]", ["Numbers and colours are the 1 device."]),
    (M222, "f32[{x}3/5]", "f32[{x}3/5]", ["0,1 or 0-1: each of these devices holds it.", "Hatched: padding."]),
    (Mesh(x=2), "f32[2] + mean{x}", "f32[2] + mean{x}", ["0 + 1: each holds a summand, and the array is their mean."]),
]


@pytest.mark.parametrize(("mesh", "source", "target", "notes"), NOTES)
def test_notes(mesh, source, target, notes):
    plan = rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh))
    assert choose_panels(plan).describe().endswith(" ".join(notes))


def test_labels_of_many_summands_are_counted():
    cell = Cell((), tuple((device,) for device in range(7)))
    assert label_cell(cell, Mesh(x=8)) == "0 + 1 + .. (7)"
    assert label_cell(Cell((), ((0, 1, 2, 5), (3, 4))), Mesh(x=8)) == "0-2,5 + 3,4"


def test_devices_with_a_coordinate_in_common_are_labelled_by_it_and_others_are_not():
    mesh = Mesh({"a": 1, "x": 2, "y": 4, "z": 2}, device_ids=range(12, 28))
    assert label_cell(Cell((), ((13, 15, 17, 19),)), mesh) == "x=0,z=1"
    assert label_cell(Cell((), ((12, 14, 16, 18, 20, 22, 24, 26),)), mesh) == "z=0"
    assert label_cell(Cell((), ((12, 14, 20, 22),)), mesh) == "12,14,.. (4)"


def test_cells_of_many_devices_are_pale():
    mesh = Mesh(x=MOST_STRIPES, y=2)
    drawn = choose_panels(rs.plan(Layout.parse("f32[{y}2]", mesh), Layout.parse("f32[4]", mesh)))
    (half, _), (whole_array,) = (panel.cells for panel in drawn.panels)
    assert len(drawn.fills(0, half)) == MOST_STRIPES == len(set(drawn.fills(0, half)))
    assert drawn.fills(1, whole_array) == (PALE,)

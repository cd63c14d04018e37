"""Which dims are drawn and how much of them, and the captions."""

import random
from math import prod

import pytest

import reshard as rs
from reshard.draw.vector_tiles import MOST_CELLS, MOST_SLICES, MOST_STRIPES, Cell, counts, fills, label, scene
from reshard.errors import ReshardError
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.draw.cases import CASES, M222, planned
from tests.layouts import random_pair


@pytest.mark.parametrize("name", list(CASES))
def test_names_and_layouts_are_those_of_the_plan(name):
    plan, drawn = planned(name), scene(planned(name))
    assert drawn.layouts == [plan.source, *(step.result for step in plan.steps)]
    assert len(drawn.names) == len(drawn.panels)
    ends = (drawn.names[0], drawn.names[-1])
    assert ends == (("source", "target") if plan.steps else ("source and target",) * 2)


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", range(60))
def test_dims_that_are_not_drawn_are_never_split(seed):
    source, target = random_pair(random.Random(seed), most_rank=5)
    plan = rs.plan(source, target)
    drawn = scene(plan)
    rest = [dim for dim in range(len(source.shape)) if dim not in (*drawn.grid, *drawn.slices)]
    for layout in drawn.layouts:
        for dim in rest:
            assert len({meaning(layout, device)[dim] for device in layout.mesh.devices}) == 1
    assert len(drawn.grid) == min(2, len(source.shape) - len(rest))
    assert not set(drawn.grid) & set(drawn.slices) and list(drawn.grid) == sorted(drawn.grid)
    runs = [max(of_dim) for of_dim in zip(*map(counts, drawn.layouts), strict=True)]
    assert all(runs[dim] >= runs[other] for dim in drawn.grid for other in drawn.slices)
    note = [words for words in drawn.notes() if words.startswith("Not drawn")]
    assert all(f"dim {dim} ({source.shape[dim]})" in note[0] for dim in rest) and bool(note) == bool(rest)


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", range(30))
def test_slices_and_cells_are_bounded(seed):
    choose = random.Random(seed)
    mesh = Mesh(x=4, y=3, z=2)
    shape = [12 * choose.randint(1, 50) for _ in range(4)]
    layouts = [Layout.from_spec(mesh, shape, "int8", [[a] for a in choose.sample("xyz", 3)]) for _ in range(2)]
    fine = Layout.parse("s8[{x:(1)2}64{x:(2)2}2, {y}100{z}1, {w}5]", Mesh(w=2, x=4, y=3, z=2))
    cyclic = Layout.parse("s8[24{x}2, 300{y}1, 600{z}3, 2]", mesh)
    for source, target in (layouts, [cyclic, cyclic], [fine, fine]):
        for panel in scene(rs.plan(source, target)).panels:
            drawn = scene(rs.plan(source, target))
            assert prod(panel.drawn) <= MOST_CELLS
            assert prod(panel.drawn[dim] for dim in drawn.slices) <= MOST_SLICES
            assert all(1 <= some <= every for some, every in zip(panel.drawn, counts(panel.layout), strict=True))


def test_slices_are_named_by_their_indices():
    drawn = scene(planned("slices of padding"))
    assert len(drawn.slices) == 1
    names = [name for name, _ in drawn.slices_of(0)]
    assert all(name.startswith(f"dim {drawn.slices[0]}: ") for name in names)
    cells = [cell for _, cells in drawn.slices_of(0) for cell in cells]
    assert len(cells) == len(drawn.panels[0].cells) and set(cells) == set(drawn.panels[0].cells)


def test_panels_have_one_scale_unless_some_are_cropped():
    even = scene(planned("two dims"))
    assert [even.extent(at, 0) for at in range(len(even.panels))] == [16] * len(even.panels)
    mesh = Mesh(x=2, y=2)
    source, target = Layout.parse("f64[64{x}64]", mesh), Layout.parse("f64[{x}{y}2048]", mesh)
    cropped = scene(rs.plan(source, target))
    assert cropped.cropped(0, 0) and not cropped.cropped(len(cropped.panels) - 1, 0)
    assert cropped.extent(0, 0) == 16 * 64 and cropped.extent(len(cropped.panels) - 1, 0) == 8192
    assert cropped.notes()[-1] == "Source: the first 16 of 128 runs of dim 0."


NOTES = [
    (Mesh(x=5), "f32[{x}1]", "f32[{x}1]", ["Numbers and colours are the 5 devices."]),
    (Mesh(x=1), "f32[7]", "f32[7]", ["Numbers and colours are the 1 device."]),
    (M222, "f32[{x}3/5]", "f32[{x}3/5]", ["0,1 or 0-1: each of these devices holds it.", "Hatched: padding."]),
    (Mesh(x=2), "f32[2] + mean{x}", "f32[2] + mean{x}", ["0 + 1: each holds a summand, and the array is their mean."]),
]


@pytest.mark.parametrize(("mesh", "source", "target", "notes"), NOTES)
def test_notes(mesh, source, target, notes):
    plan = rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh))
    assert scene(plan).notes()[-len(notes) :] == notes


def test_too_many_devices_are_refused():
    layout = Layout.parse("f32[{x}1]", Mesh(x=4099))
    with pytest.raises(ReshardError, match="4099 devices"):
        scene(rs.plan(layout, layout))


def test_labels_of_many_summands_are_counted():
    cell = Cell((), tuple((device,) for device in range(7)))
    assert label(cell, Mesh(x=8)) == "0 + 1 + .. (7)"
    assert label(Cell((), ((0, 1, 2, 5), (3, 4))), Mesh(x=8)) == "0-2,5 + 3,4"


def test_devices_with_a_coordinate_in_common_are_labelled_by_it_and_others_are_not():
    mesh = Mesh({"a": 1, "x": 2, "y": 4, "z": 2}, device_ids=range(12, 28))
    assert label(Cell((), ((13, 15, 17, 19),)), mesh) == "x=0,z=1"
    assert label(Cell((), ((12, 14, 16, 18, 20, 22, 24, 26),)), mesh) == "z=0"
    assert label(Cell((), ((12, 14, 20, 22),)), mesh) == "12,14,.. (4)"


def test_cells_of_many_devices_are_pale():
    colour = {device: f"#{device:06x}" for device in range(9)}
    few, many = (Cell((), (tuple(range(count)),)) for count in (MOST_STRIPES, MOST_STRIPES + 1))
    assert fills(few, colour, "pale") == [colour[device] for device in range(MOST_STRIPES)]
    assert fills(many, colour, "pale") == ["pale"]

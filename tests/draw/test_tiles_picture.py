"""The picture of the tiles, element by element, against the meaning of the plan's layouts."""

import numpy as np
import pytest

import reshard as rs
from reshard.draw import canvas
from reshard.draw.shapes import by_coordinate
from reshard.plans.plan import Plan
from reshard.types import Layout, Mesh
from tests.draw.cases import CASES, M222, picture, planned
from tests.draw.reading import holders, layouts, listed, panels, words


def colour_of(plan: Plan) -> dict[int, str]:
    return by_coordinate(plan.source.mesh)


FULL = [name for name in CASES if name != "empty"]

STEPS = [(n + 0.5) / 16 for n in range(16)]

PARTS = [*((0.5, step) for step in STEPS), *((step, 0.5) for step in STEPS)]
"""The points of an element whose colours are looked up."""


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", FULL)
def test_every_element_has_the_colours_of_its_devices(name):
    plan = planned(name)
    colour = colour_of(plan)
    for seen, layout in panels(plan, picture(name)):
        held = holders(layout)
        some = PARTS if len(held) < 4096 else PARTS[7:10]
        every = [(element, part) for element in seen.drawn(layout) for part in some]
        places = [seen.place(element, part) for element, part in every]
        assert places and None not in places, f"an element of {layout} is nowhere"
        points, colours = np.array(places), dict[frozenset, set]()
        for path, fill in seen.fills:
            for at in np.flatnonzero(path.contains_points(points)):
                colours.setdefault(frozenset(held[every[at][0]]), set()).add(fill)
        assert set(colours) == {frozenset(held[element]) for element, _ in every}
        for devices, shown in colours.items():
            pale = len(devices) > 8
            assert shown == ({canvas.PALE} if pale else {colour[d] for d in devices}), f"{devices}: {layout}"


@pytest.mark.fast(6)
@pytest.mark.parametrize("name", FULL)
def test_labels_name_the_devices_of_their_elements(name):
    plan = planned(name)
    for seen, layout in panels(plan, picture(name)):
        held, named = holders(layout), set()
        for label, place in seen.labels:
            element = seen.under(place, len(layout.shape))
            assert listed(label, layout.mesh) == held[element], f"{label} at {element} of {layout}"
            named |= listed(label, layout.mesh)
        fit = layout.mesh.size < 64 or layout.tile_shape != (64, 1)
        assert named == (set(layout.mesh.devices) if fit else set()), f"{layout} is labelled {seen.labels}"


def test_summands_are_joined_by_a_plus_and_replicas_by_a_comma():
    (seen, _), *_ = panels(rs.plan(Layout.parse("f32[{z}4] + sum{x}", M222), Layout.parse("f32[8]", M222)))
    assert [label for label, _ in seen.labels] == ["0,2 + 4,6", "1,3 + 5,7"]


@pytest.mark.slow
def test_padding_is_hatched_and_nothing_else():
    for name in FULL:
        plan = planned(name)
        for seen, layout in panels(plan, picture(name)):
            points = [seen.place(element) for element in seen.drawn(layout)]
            assert not any(path.contains_points(points).any() for path in seen.hatched), name
            along = [layout.dims[dim] for dim in (seen.across, seen.down) if dim is not None]
            past = [start >= layout.shape[dim] for _, spans in seen.slices for dim, (start, _) in spans.items()]
            assert bool(seen.hatched) == (any(past) or any(dim.padded > dim.size for dim in along)), name


def test_an_empty_array():
    assert words(picture("empty")).count("no elements") == 1 + len(planned("empty").steps)


def test_steps_and_bytes_stand_between_the_panels():
    for name in CASES:
        plan = planned(name)
        written = words(picture(name))
        for step in plan.steps:
            assert step.kind in written and canvas.bytes_text(step.received_bytes) in written
        for layout in layouts(plan):
            assert str(layout) in written.replace("\n", " ")


LARGE = [
    ("f64[64{x}64, 64{y}64]", "the first 16 of 128 runs of dim 0 and 16 of 128 runs of dim 1"),
    ("f64[{x}4096, 4096{y}64]", "the first 16 of 8192 runs of dim 1"),
    ("f64[{x}64{y}64]", ""),
    ("f64[{x}2048{y}64]", "the first 1024 of 8192 runs of dim 0"),
    pytest.param(
        "f64[{x:(1)2}64{x:(2)2}2, {y:(1)2}64{y:(2)2}2]",
        "the first 64 of 256 runs of dim 0 and 64 of 256 runs of dim 1",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.fast(1)
@pytest.mark.parametrize(("source", "note"), LARGE)
def test_large_arrays_are_cropped_with_a_note(source, note):
    mesh = Mesh(x=4, y=4) if "(" in source else Mesh(x=2, y=2)
    layout = Layout.parse(source, mesh)
    plan = rs.plan(layout, Layout.from_spec(mesh, layout.shape, "float64", [["x", "y"]]))
    figure = plan.draw("tiles")
    written = words(figure).replace("\n", " ")
    assert f"Source: {note}" in written if note else "the first" not in written
    (seen, _), *_ = panels(plan, figure)
    assert len(seen.fills) <= 4096


def test_a_tile_has_its_first_colour_where_there_is_no_room_for_all():
    mesh = Mesh(x=4, y=4, z=8)
    layout = Layout.parse("f32[{x:(1)2}8{x:(2)2}, {y:(1)2}8{y:(2)2}]", mesh)
    plan = rs.plan(layout, Layout.from_spec(mesh, layout.shape, "float32", [["x"], ["y"]]))
    figure = plan.draw("tiles")
    assert "its colour is that of the first one" in words(figure).replace("\n", " ")
    (seen, _), (target, _) = panels(plan, figure)
    assert len(seen.fills) == 1024 and len(target.fills) == 128


@pytest.mark.slow
def test_512_devices_have_colours_and_no_labels():
    mesh = Mesh(x=8, y=8, z=8)
    plan = rs.plan(Layout.parse("bf16[{x}{y}{z}8, 4096]", mesh), Layout.parse("bf16[4096, {x}{y}{z}8]", mesh))
    (source, _), *_ = panels(plan)
    assert len({fill for _, fill in source.fills}) > 200 and len(source.fills) == 512 and not source.labels
    assert "device 511" in words(plan.draw("tiles"))

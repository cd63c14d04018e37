"""The cells of a picture name the devices that hold their elements, by the layout's meaning."""

import random
import re

import pytest

from reshard.show.layout_picture import show_picture
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import random_layout
from tests.show.printing import printed

MESHES = [Mesh(x=4, y=2), Mesh(x=3, y=2), Mesh({"x": 2, "y": 3}, device_ids=[5, 3, 1, 0, 2, 4]), Mesh(x=5)]


def named(label: str) -> set[int]:
    """The devices of a label such as 0,2,..,6 or 0-1,4."""
    if match := re.fullmatch(r"(\d+),(\d+),\.\.,(\d+)", label):
        first, second, last = map(int, match.groups())
        return set(range(first, last + 1, second - first))
    runs = [run.partition("-") for run in label.split(",")]
    return {device for first, _, last in runs for device in range(int(first), int(last or first) + 1)}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")[1:-1]]


def holders(layout: Layout, *element: int) -> set[int]:
    indices = {device: meaning(layout, device) for device in layout.mesh.devices}
    return {
        device for device, held in indices.items() if all(i in of_dim for i, of_dim in zip(element, held, strict=True))
    }


def first(span: str) -> int:
    return int(span.partition(":")[0])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_grid_of_two_dims(mesh):
    chance = random.Random(4)
    for _ in range(12):
        layout = random_layout(chance, mesh, (12, 30))
        lines = [line for line in printed(show_picture, layout, 200, width=200).splitlines() if line.startswith("│")]
        spans = cells(lines[0])[1:]
        assert spans and len(lines) > 1
        for line in lines[1:]:
            row, *labels = cells(line)
            for span, label in zip(spans, labels, strict=True):
                assert named(label) == holders(layout, first(row), first(span)), f"{layout} at {row}, {span}"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_strips_of_one_dim(mesh):
    chance = random.Random(5)
    for _ in range(12):
        layout = random_layout(chance, mesh, (60,))
        lines = [line for line in printed(show_picture, layout, 400, width=70).splitlines() if line.startswith("│")]
        drawn = []
        for spans, labels in zip(lines[::2], lines[1::2], strict=True):
            for span, label in zip(cells(spans), cells(labels), strict=True):
                assert named(label) == holders(layout, first(span)), f"{layout} at {span}"
                drawn += range(*map(int, span.split(":")))
        assert drawn == list(range(60))


def test_cells_left_out_are_counted():
    layout = Layout.parse("f32[8{x}2, 40{y}2]", Mesh(x=4, y=2))
    text = printed(show_picture, layout, 12, width=80)
    lines = [line for line in text.splitlines() if line.startswith("│")]
    rows, columns = len(lines) - 1, len(cells(lines[0])) - 1
    assert f"... and {32 - rows} more pieces of dim 0, up to 64" in text
    assert f"... and {80 - columns} more pieces of dim 1, up to 160" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_table_of_devices():
    mesh = Mesh({"x": 2, "y": 3}, device_ids=[5, 3, 1, 0, 2, 4])
    layout = Layout.parse("f32[2{x}2, 4, {y}1/2]", mesh)
    rows = [line.split("  ") for line in printed(show_picture, layout, 100).splitlines() if re.match(r" +\d", line)]
    for row, device in zip(rows, mesh.devices, strict=True):
        name, x, y, *ranges = [cell.strip() for cell in row if cell.strip()]
        position = mesh.position(device)
        assert (int(name), int(x), int(y)) == (device, *divmod(position, 3))
        for text, indices, size in zip(ranges, meaning(layout, device), layout.shape, strict=True):
            runs = [] if text == "only padding" else [range(*map(int, run.split(":"))) for run in text.split(", ")]
            assert [i for run in runs for i in run] == [i for i in indices if i < size]


@pytest.mark.parametrize(("text", "label"), [("f32[]", "0-7"), ("f32[] + sum{y}", "0,2,..,6 + 1,3,..,7")])
def test_a_scalar_is_one_cell(text, label):
    lines = printed(show_picture, Layout.parse(text, Mesh(x=4, y=2)), 10).splitlines()
    assert cells(lines[1]) == [label] and len(lines) == 3


def test_an_empty_array():
    assert "nothing to draw" in printed(show_picture, Layout.parse("f32[0, {x}2]", Mesh(x=2)), 10)

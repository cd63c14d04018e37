"""A layout on a terminal: which device holds which piece, and its facts."""

import random
import re
from collections import Counter

import pytest

import reshard as rs
from reshard.show.layout_picture import list_facts, show_picture
from reshard.show.layout_pieces import fix_coordinates, label_piece, list_owners, list_pieces, list_ranges, set_text
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.draw.reading import holders, listed
from tests.layouts import random_layout
from tests.show.printing import printed


def test_pieces_and_ranges_follow_the_meaning():
    chance = random.Random(2)
    for mesh in (rs.Mesh(x=4, y=2), rs.Mesh(x=3, y=4, device_ids=range(11, -1, -1))):
        for _ in range(100):
            layout = random_layout(chance, mesh, (24, 10))
            for device in mesh.devices:
                held = meaning(layout, device)
                for dim, indices in zip(layout.dims, held, strict=True):
                    runs = [i for run in list_ranges(dim, mesh, mesh.position(device)) for i in range(*run)]
                    assert runs == [i for i in indices if i < dim.size]
            for at, dim in enumerate(layout.dims):
                cells = list(list_pieces(dim))
                assert [i for cell in cells for i in range(cell.start, cell.stop)] == list(range(dim.size))
                for cell in cells:
                    devices, total = list_owners(mesh, fix_coordinates(dim, mesh, cell.number))
                    assert len(devices) == total
                    assert devices == sorted(d for d in mesh.devices if cell.start in meaning(layout, d)[at])


def test_the_devices_of_a_huge_mesh_are_counted_not_listed():
    layout = rs.Layout.parse("f32[4] + sum{y}", rs.Mesh(x=1 << 20, y=1 << 20))
    assert label_piece(layout, []) == "0,1048576,.. (1048576) + 1,1048577,.. (1048576) + .. (1048576)"


def test_a_short_text_of_a_set_is_exact_unless_it_counts():
    chance = random.Random(8)
    for _ in range(300):
        devices = sorted(chance.sample(range(12), chance.randint(1, 8)))
        text = set_text(devices, len(devices))
        if text.endswith(f"({len(devices)})"):
            assert text.count(",") == 2 and len(devices) > 3
        else:
            assert sorted(listed(text, Mesh())) == devices


MESHES = [Mesh(x=4, y=2), Mesh(x=3, y=2), Mesh({"x": 2, "y": 3}, device_ids=[5, 3, 1, 0, 2, 4]), Mesh(x=5)]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")[1:-1]]


def first(span: str) -> int:
    return int(span.partition(":")[0])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_grid_of_two_dims(mesh):
    chance = random.Random(4)
    for _ in range(12):
        layout = random_layout(chance, mesh, (12, 30))
        lines = [line for line in printed(show_picture, layout, 200, width=200).splitlines() if line.startswith("│")]
        spans, held = cells(lines[0])[1:], holders(layout)
        assert spans and len(lines) > 1
        for line in lines[1:]:
            row, *labels = cells(line)
            for span, label in zip(spans, labels, strict=True):
                assert listed(label, mesh) == held[first(row), first(span)], f"{layout} at {row}, {span}"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_strips_of_one_dim(mesh):
    chance = random.Random(5)
    for _ in range(12):
        layout = random_layout(chance, mesh, (60,))
        lines = [line for line in printed(show_picture, layout, 400, width=70).splitlines() if line.startswith("│")]
        drawn, held = [], holders(layout)
        for spans, labels in zip(lines[::2], lines[1::2], strict=True):
            for span, label in zip(cells(spans), cells(labels), strict=True):
                assert listed(label, mesh) == held[(first(span),)], f"{layout} at {span}"
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


FACT_MESHES = [Mesh(x=4, y=2), Mesh(x=3, y=5), Mesh({"x": 2, "y": 3}, device_ids=[5, 3, 1, 0, 2, 4]), Mesh()]


def copies(layout: Layout) -> int:
    """How many devices hold the first element, or the same summand of it."""
    position = [layout.mesh.position(device) for device in layout.mesh.devices]
    holders = Counter(
        layout.mesh.coordinates(at, layout.partial)
        for device, at in zip(layout.mesh.devices, position, strict=True)
        if all(0 in indices for indices in meaning(layout, device))
    )
    return min(holders.values())


@pytest.mark.parametrize("mesh", FACT_MESHES, ids=str)
def test_copies_and_splits_follow_the_meaning(mesh):
    chance = random.Random(3)
    for _ in range(60):
        layout = random_layout(chance, mesh, (30, 8))
        described = dict(list_facts(layout))
        assert described["copies"].startswith(f"{copies(layout)} of every element")
        split = {int(at) for at in re.findall(r"dim (\d+) over", described["split"])}
        whole = [{meaning(layout, device)[at] for device in mesh.devices} for at in range(2)]
        assert split == {at for at, indices in enumerate(whole) if len(indices) > 1}


@pytest.mark.parametrize("text", ["f32[{x}{y}2/9]", "f32[{x}3/10]", "f32[{y}5/9]", "f32[{x}{y}3/17]", "f32[{x}5/19]"])
def test_padded_pieces_are_counted_by_the_meaning(text):
    layout = Layout.parse(text, Mesh(x=4, y=2))
    (dim,), (run,) = layout.dims, layout.tile_shape
    pieces = {meaning(layout, device)[0] for device in layout.mesh.devices}
    data = [sum(index < dim.size for index in piece) for piece in pieces]
    empty = data.count(0)
    words = [f"dim 0 from {dim.size} to {dim.padded}, the last piece is {min(n for n in data if n)} of {run}"]
    words += [f"{empty} piece{'s' if empty > 1 else ''} without data"] if empty else []
    assert dict(list_facts(layout))["padding"] == ", ".join(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("f32[{x}{y}1/7]", "dim 0 from 7 to 8"),  # Pieces of one element hold it or nothing.
        ("f32[2{x}1/7, {y}3/5]", "dim 0 from 7 to 8; dim 1 from 5 to 6, the last piece is 2 of 3"),
        ("f32[{x}4, 16]", "none"),
    ],
)
def test_padding_in_words(text, words):
    assert dict(list_facts(Layout.parse(text, Mesh(x=4, y=2))))["padding"] == words


def test_the_last_of_very_many_pieces_is_described():
    layout = Layout.parse("f32[{x}2/2097151]", Mesh(x=1 << 20))
    assert dict(list_facts(layout))["padding"] == "dim 0 from 2097151 to 2097152, the last piece is 1 of 2"


def test_a_partial_sum_and_a_device_order():
    described = dict(list_facts(Layout.parse("f32[4] + mean{y}", Mesh({"x": 5, "y": 2}, device_ids=range(9, -1, -1)))))
    assert described["partial"] == "the true array is the mean of 2 arrays of this shape, along y"
    assert described["copies"] == "5 of every summand: the same along x"
    assert described["mesh"].endswith("10 devices in the order 9, 8, 7, 6, 5, 4, 3, 2, ...")
    assert described["split"] == "no dim: every device holds the whole array"

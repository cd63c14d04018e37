"""The facts about a layout, counted anew by its meaning."""

import random
import re
from collections import Counter

import pytest

from reshard.show.layout_picture import facts
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import random_layout

MESHES = [Mesh(x=4, y=2), Mesh(x=3, y=5), Mesh({"x": 2, "y": 3}, device_ids=[5, 3, 1, 0, 2, 4]), Mesh()]


def copies(layout: Layout) -> int:
    """How many devices hold the first element, or the same summand of it."""
    position = [layout.mesh.position(device) for device in layout.mesh.devices]
    holders = Counter(
        layout.mesh.coordinates(at, layout.partial)
        for device, at in zip(layout.mesh.devices, position, strict=True)
        if all(0 in indices for indices in meaning(layout, device))
    )
    return min(holders.values())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_copies_and_splits_follow_the_meaning(mesh):
    chance = random.Random(3)
    for _ in range(60):
        layout = random_layout(chance, mesh, (30, 8))
        described = dict(facts(layout))
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
    assert dict(facts(layout))["padding"] == ", ".join(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("f32[{x}{y}1/7]", "dim 0 from 7 to 8"),  # Pieces of one element hold it or nothing.
        ("f32[2{x}1/7, {y}3/5]", "dim 0 from 7 to 8; dim 1 from 5 to 6, the last piece is 2 of 3"),
        ("f32[{x}4, 16]", "none"),
    ],
)
def test_padding_in_words(text, words):
    assert dict(facts(Layout.parse(text, Mesh(x=4, y=2))))["padding"] == words


def test_the_last_of_very_many_pieces_is_described():
    layout = Layout.parse("f32[{x}2/2097151]", Mesh(x=1 << 20))
    assert dict(facts(layout))["padding"] == "dim 0 from 2097151 to 2097152, the last piece is 1 of 2"


def test_a_partial_sum_and_a_device_order():
    described = dict(facts(Layout.parse("f32[4] + mean{y}", Mesh({"x": 5, "y": 2}, device_ids=range(9, -1, -1)))))
    assert described["partial"] == "the true array is the mean of 2 arrays of this shape, along y"
    assert described["copies"] == "5 of every summand: the same along x"
    assert described["mesh"].endswith("10 devices in the order 9, 8, 7, 6, 5, 4, 3, 2, ...")
    assert described["split"] == "no dim: every device holds the whole array"


def test_sizes():
    described = dict(facts(Layout.parse("f32[{x}3/10, 7]", Mesh(x=4, y=2))))
    assert described["global"] == "10 x 7, 280 B" and described["tile"] == "3 x 7, 84 B a device"

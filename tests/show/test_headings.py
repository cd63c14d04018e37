"""The line on the array's size and the meshes."""

import pytest

from reshard.show.plan_table import array_bytes_text, meshes_text, size_text
from reshard.types import Layout, Mesh


@pytest.mark.parametrize(
    ("text", "size"),
    [("f32[{x}3/7, 5]", "140 B"), ("s4[{x}5/9]", "5 B"), ("f64[]", "8 B"), ("bf16[0, {x}4]", "0 B")],
)
def test_the_size_is_that_of_the_true_array(text, size):
    """Neither padding nor copies count: 7 x 5 elements of 4 bytes are 140 bytes."""
    assert array_bytes_text(Layout.parse(text, Mesh(x=3 if "3/7" in text else 2))) == size


def test_one_mesh_or_two():
    here, there = Layout.parse("f32[{x}4]", Mesh(x=4)), Layout.parse("f32[{z}4]", Mesh(z=4))
    assert meshes_text(here, here) == "<x=4>"
    assert size_text(here, there) == "64 B on 4 devices, mesh <x=4> and <z=4>"
    single = Layout.parse("f32[4]", Mesh(x=1))
    assert size_text(single, single) == "16 B on 1 device, mesh <x=1>"

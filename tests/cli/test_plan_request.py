"""Layouts in every notation, and what one of two lends to the other."""

import itertools
import json

import pytest

from reshard.cli.options import ArrayOptions
from reshard.cli.plan import LayoutText
from reshard.errors import ReshardError
from reshard.types import Layout, Mesh
from tests.cli.cases import ARRAY, MESH, SOURCE, TARGET

WRITTEN = [
    (SOURCE, TARGET, MESH),
    (SOURCE, "P(None, ('x', 'y'))", MESH),
    ("P('y', None, 'x')", TARGET, MESH),
    ("P('y', None, 'x')", "PartitionSpec(None, ('x', 'y'), None)", (*MESH, *ARRAY)),
    ('[{"y"}, {}, {"x"}]', '[{}, {"x", "y"}, {}]', (*MESH, *ARRAY)),
    ('[{"y"}, {}, {"x"}]', TARGET, MESH),
    ('<mesh<["x"=4, "y"=2]>, [{"y"}, {}, {"x"}]>', '[{}, {"x", "y"}, {}]', ARRAY),
    ("{devices=[2,1,4]<=[4,2]T(1,0)}", "{devices=[1,8,1]<=[8]}", ARRAY),
    ("{devices=[2,1,4]<=[4,2]T(1,0)}", TARGET, MESH),
    (SOURCE, "{devices=[1,8,1]<=[8]}", MESH),
    (SOURCE, "{devices=[1,8,1]<=[8]}", (*MESH, *ARRAY)),
    ("{devices=[2,1,4]<=[4,2]T(1,0)}", "P(None, ('d0', 'd1'))", ARRAY),
    ("P('d1', None, 'd0')", "{devices=[1,8,1]0,1,2,3,4,5,6,7}", ("--mesh", "d0=4,d1=2", *ARRAY)),
    (SOURCE, "f32[16, {z}2, 16]", (*MESH, "--target-mesh", "z=8")),
]


@pytest.mark.parametrize(("source", "target", "given"), WRITTEN)
def test_every_notation_means_the_same(call, source, target, given):
    ran = call("plan", source, target, *given, "--json")
    assert ran.err == ""
    data = json.loads(ran.out)
    assert [step["kind"] for step in data["steps"]] == ["all_to_all"]
    assert data["received_bytes"] == 1792


@pytest.mark.parametrize("pair", list(itertools.permutations(["{replicated}", "{devices=[8,1,1]<=[8]}"])))
def test_hlo_replicated_is_over_the_devices_of_the_other(call, pair):
    ran = call("plan", *pair, *ARRAY, "--json")
    kinds = [step["kind"] for step in json.loads(ran.out)["steps"]]
    assert kinds == (["slice"] if pair[0] == "{replicated}" else ["all_gather"])


def test_a_mesh_of_the_target_serves_the_source(call):
    ran = call("plan", "P('d1')", "{devices=[1,8,1]<=[4,2]T(1,0)}", *ARRAY, "--json")
    assert ran.code == 0, ran.err


M42 = Mesh(x=4, y=2)
NOTHING_GIVEN = ArrayOptions(mesh=None, shape=None, dtype=None)


@pytest.mark.parametrize(
    ("text", "ours"), [(SOURCE, True), ("P('x')", False), ("[{}]", False), ("{replicated}", False)]
)
def test_only_our_notation_has_a_shape(text, ours):
    assert LayoutText.of(text, None, NOTHING_GIVEN).ours == ours


def test_a_text_takes_the_array_of_another_layout():
    other = Layout.parse("bf16[{x}3/10, 7]", M42)
    text = LayoutText.of("P(None, 'y')", M42, NOTHING_GIVEN).of_the_array_of(other)
    assert text.read().shape == (10, 7) and text.read().dtype == "bfloat16"


def test_a_given_mesh_wins_over_the_other_layouts_mesh():
    given, other = Mesh(x=2, y=4), Layout.parse("f32[{x}4, 16]", M42)
    assert LayoutText("P('x')", given, (16, 16), "f32").read_beside(other).mesh == given
    assert LayoutText("P('x')", None, (16, 16), "f32").read_beside(other).mesh == M42


def test_the_missing_options_are_named():
    for text, mesh, message in [("P('x')", M42, "--shape 16,16 --dtype f32"), (SOURCE, None, "--mesh x=4,y=2")]:
        with pytest.raises(ReshardError, match=f": {message}$"):
            LayoutText.of(text, mesh, NOTHING_GIVEN).read()

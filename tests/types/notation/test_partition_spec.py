"""JAX's partition specs as text, and what is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError, NotationError
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

MESH = Mesh(x=4, y=2, z=2)
GRID = (16, 16, 16)


def read(text, shape=GRID):
    return Layout.from_jax_text(text, MESH, shape, "float32")


TEXTS = [
    ("P()", "f32[16, 16, 16]"),
    ("P('x')", "f32[{x}4, 16, 16]"),
    ("P('x', None)", "f32[{x}4, 16, 16]"),
    ("P(None, 'x')", "f32[16, {x}4, 16]"),
    ("P('y', None, 'x')", "f32[{y}8, 16, {x}4]"),
    ("P(('x', 'y'), None, 'z')", "f32[{x}{y}2, 16, {z}8]"),
    ("P(('y', 'x'), None, 'z')", "f32[{y}{x}2, 16, {z}8]"),
    ("P(['x', 'y'])", "f32[{x}{y}2, 16, 16]"),
    ("P(('x',), (), None)", "f32[{x}4, 16, 16]"),
    ("PartitionSpec(('x', 'y'), None, 'z')", "f32[{x}{y}2, 16, {z}8]"),
    ("jax.sharding.PartitionSpec('x')", "f32[{x}4, 16, 16]"),
    ("  P( 'x' ,\n None )  ", "f32[{x}4, 16, 16]"),
    ("P('x:(1)2', 'x:(2)2')", "f32[{x:(1)2}8, {x:(2)2}8, 16]"),
    ("P(None, 'x', unreduced={'y'})", "f32[16, {x}4, 16] + sum{y}"),
    ("P(None, 'x', unreduced={'z', 'y'})", "f32[16, {x}4, 16] + sum{y}{z}"),
    ("P(unreduced={'x', 'y', 'z'})", "f32[16, 16, 16] + sum{x}{y}{z}"),
    ("P('x', unreduced=frozenset({'y'}))", "f32[{x}4, 16, 16] + sum{y}"),
    ("P('x', unreduced=set())", "f32[{x}4, 16, 16]"),
    ("P('x', unreduced={'y'}, unreduced_kind=sum)", "f32[{x}4, 16, 16] + sum{y}"),
    ("P('x', unreduced={'y'}, unreduced_kind=max)", "f32[{x}4, 16, 16] + max{y}"),
    ("P('x', unreduced={'y'}, unreduced_kind=UnreducedKind.min)", "f32[{x}4, 16, 16] + min{y}"),
    ("P('x', unreduced={'y'}, unreduced_kind=None)", "f32[{x}4, 16, 16] + sum{y}"),
]


@pytest.mark.parametrize(("text", "layout"), TEXTS)
def test_text(text, layout):
    assert read(text) == Layout.parse(layout, MESH)


@given(st.permutations("xyz"), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_a_spec_is_its_axes(axes, places):
    spec = [[a for a, place in zip(axes, places, strict=True) if place == dim] for dim in range(3)]
    text = f"P({', '.join(repr(tuple(dim)) for dim in spec)})"
    assert read(text) == Layout.from_spec(MESH, GRID, "float32", spec)


REFUSED = [
    ("", NotationError, "it is not a Python expression; write P('x', None)"),
    ("P('x'", NotationError, "it is not a Python expression"),
    ("P('x') + P('y')", NotationError, "it is not a call of P, PS, PartitionSpec"),
    ("'x', None", NotationError, "it is not a call of"),
    ("NamedSharding(mesh, P('x'))", NotationError, "it is not a call of"),
    ("P", NotationError, "it is not a call of"),
    ("P(x)", NotationError, "cannot read 'x'; an entry is None, an axis 'x' or a tuple ('x', 'y')"),
    ("P(True)", NotationError, "cannot read 'True'"),
    ("P(*axes)", NotationError, "cannot read '*axes'"),
    ("P(('x', None))", NotationError, "an axis is a string"),
    ("P((('x', 'y'), 'z'))", NotationError, "an axis is a string"),
    ("P(__import__('os').system('true'))", NotationError, "cannot read \"__import__('os').system('true')\""),
    ("P(UNCONSTRAINED, 'x')", NotationError, "UNCONSTRAINED leaves the choice to the compiler; name the axes"),
    ("P('x', reduced={'y'})", NotationError, "reduced axes describe how gradients are summed"),
    ("P('x', unreduced='y')", NotationError, "write a set of axes, as in unreduced={'x'}"),
    ("P('x', unreduced={1})", NotationError, "cannot read '1'; an axis is a string"),
    ("P('x', unreduced={'y'}, unreduced_kind=mean)", NotationError, "use one of sum, max, min"),
    ("P('x', partial={'y'})", NotationError, "unknown argument 'partial'"),
    ("P('x', **more)", NotationError, "unknown argument '**'"),
    ("P('x\0')", NotationError, "it is not a Python expression"),
    ("P(" + "(" * 5000 + ")" * 5000 + ")", NotationError, "it is not a Python expression"),
    ("P(" + "-" * 900 + "1)", NotationError, "cannot read '------"),
    ("P('')", NotationError, "cannot read axis ''"),
    ("P('x', 'x')", LayoutError, "is used as x and as x, which overlap"),
    ("P('x', unreduced={'x'})", LayoutError, "partial axes included (single use)"),
    ("P(None, None, None, None)", LayoutError, "4 dims of axes for global shape (16, 16, 16) of rank 3"),
]


@pytest.mark.parametrize(("text", "error", "message"), REFUSED)
def test_refused(text, error, message):
    with pytest.raises(error, match=re.escape(message)):
        read(text)

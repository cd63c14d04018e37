"""Paths and specs that a caller fixes: which array has which, and what is refused."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import LayoutError, MeshError
from reshard.jax.layout_choice.fixed_specs import read_fixed
from reshard.jax.layout_choice.trace_step import trace_step

MESH = rs.Mesh(x=4, y=2)


@pytest.fixture(scope="module")
def step():
    def update(params, batch):
        loss = jnp.sum(params["layers"][0] @ batch) + jnp.sum(params["layers"][1])
        return loss, jax.tree.map(lambda p: p * loss, params)

    shape = jax.ShapeDtypeStruct((8, 6), "f")
    return trace_step(update, [{"layers": [shape, shape]}, jax.ShapeDtypeStruct((6, 16), "f")])


def read(step, given):
    fixed = read_fixed(given, step, MESH)
    return dict(fixed.arguments), dict(fixed.results)


def test_the_longest_path_counts(step):
    assert read(step, None) == ({}, {})
    assert read(step, {"params": P("x")}) == ({0: P("x"), 1: P("x")}, {})
    assert read(step, {"params": P("x"), "params/layers/1": None}) == ({0: P("x")}, {})
    assert read(step, {"params": P("x"), "params/layers/1": P.UNCONSTRAINED}) == ({0: P("x")}, {})
    assert read(step, {"params/layers/1": P("y"), "params": P("x")}) == ({0: P("x"), 1: P("y")}, {})
    assert read(step, {"params/layers/*": P("x"), "params/layers/1": P("y")}) == ({0: P("x"), 1: P("y")}, {})
    assert read(step, {"params/layers/1": P("y"), "0/layers/*": P("x")}) == ({0: P("x"), 1: P("y")}, {})
    assert read(step, {"*/layers": P("y"), "result/*/layers/0": P("x")}) == ({0: P("y"), 1: P("y")}, {1: P("x")})
    assert read(step, {"/params/": P("x"), "0/layers/1": P("y")}) == ({0: P("x"), 1: P("y")}, {})


def test_arguments_go_by_number_and_results_by_theirs(step):
    assert read(step, {"1": P(None, "x")}) == ({2: P(None, "x")}, {})
    assert read(step, {"batch": P("y", P.UNCONSTRAINED)}) == ({2: P("y", P.UNCONSTRAINED)}, {})
    assert read(step, {"result/1": P("x")}) == ({}, {1: P("x"), 2: P("x")})
    assert read(step, {"result": P()}) == ({}, {0: P(), 1: P(), 2: P()})
    sharding = NamedSharding(AbstractMesh((4, 2), ("x", "y")), P("x"))
    assert read(step, {"result/1/layers/0": sharding}) == ({}, {1: P("x")})
    alone = trace_step(lambda x: 2 * x, [jax.ShapeDtypeStruct((8,), "f")])
    assert read(alone, {"result": P("x")}) == ({}, {0: P("x")})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"parms/layers": P("x")}, "no argument or result.*; did you mean 'params/layers'"),
        ({"params/layer": P("x")}, "no argument or result.* are 'params/layers/., batch' and 'result/0, result/1/lay"),
        ({"result/layers": P("x")}, "did you mean 'result/1/layers'"),
        ({"params/*/w": P("x")}, "no argument or result"),
        ({"par*/lay*": P("q")}, "unknown axis 'q'"),
        ({"batch": "x"}, "'batch': 'x' is a str; give a jax.sharding.PartitionSpec"),
        ({"batch": P("z")}, "of batch.*unknown axis 'z'"),
        ({"batch": P("x")}, "of batch.*do not divide"),
        ({"batch": P("y", "y")}, "of batch"),
        ({"batch": P(None, None, "y")}, "of batch.*3 entries"),
        ({"batch": P(unreduced={"x"})}, "of a sum that is not finished"),
        ([P("x")], "give a dict of paths and specs"),
    ],
)
def test_what_no_array_can_have_is_refused(step, given, words):
    with pytest.raises((LayoutError, MeshError), match=words):
        read(step, given)

"""Experts: a step that is made of what everyone knows is split as everyone does, and compiles to the same traffic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard import hlo
from reshard.jax.layout_choice.experts import OWN, list_experts, write_expert
from reshard.jax.layout_choice.op_rules import read_op_rules
from reshard.jax.layout_choice.trace_step import trace_step
from reshard.jax.program_report import compile_module, optimized_text
from reshard.types.mesh import Mesh

AXES = ("x", "y")
SIZES = (2, 4)
MESH = Mesh(x=2, y=4)
WIDTH, HIDDEN, HEADS, BATCH, LENGTH = 32, 128, 8, 16, 64


def jax_mesh():
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(SIZES), AXES)


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def block(w, x):
    """Attention and an MLP, each a pair of products."""
    q, k, v = (jnp.einsum("bld,dhk->blhk", x, w[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("blhk,bmhk->bhlm", q, k))
    x = x + jnp.einsum("bhlm,bmhk,hkd->bld", scores, v, w["o"])
    return x + jax.nn.gelu(x @ w["up"] + w["bias"]) @ w["down"]


WEIGHTS = {
    **{name: shape(WIDTH, HEADS, 16) for name in "qkv"},
    "o": shape(HEADS, 16, WIDTH),
    "up": shape(WIDTH, HIDDEN),
    "bias": shape(HIDDEN),
    "down": shape(HIDDEN, WIDTH),
}


def train(w, momentum, x):
    gradient = jax.grad(lambda w: jnp.mean(block(w, x) ** 2))(w)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    return jax.tree.map(lambda w, m: w - m, w, momentum), momentum


def experts_of(f, *shapes, donate=(), **fixed):
    step = trace_step(f, shapes, donate=donate)
    found = list_experts(step, read_op_rules(step), MESH, **fixed)
    return step, {one.name: one for one in found}


def spec_of(step, expert, name):
    return dict(zip([one.name for one in step.arguments], expert.in_shardings, strict=True))[name]


def test_columns_then_rows():
    step, experts = experts_of(train, WEIGHTS, WEIGHTS, shape(BATCH, LENGTH, WIDTH))
    one = experts["data and tensor parallel over y"]
    wanted = {
        "q": P(None, "y", None), "o": P("y", None, None), "up": P(None, "y"), "bias": P("y"), "down": P("y", None),
    }  # fmt: skip
    assert {name: spec_of(step, one, f"w/{name}") for name in wanted} == wanted
    assert {name: spec_of(step, one, f"momentum/{name}") for name in wanted} == wanted
    assert spec_of(step, one, "x") == P("x", None, None)
    assert one.out_shardings == one.in_shardings[:-1]


def test_the_largest_dim_that_is_left():
    step, experts = experts_of(train, WEIGHTS, WEIGHTS, shape(BATCH, LENGTH, WIDTH))
    both = ("x", "y")
    assert spec_of(step, experts["FSDP"], "w/up") == P(None, both)
    assert spec_of(step, experts["FSDP and tensor parallel over y"], "w/up") == P("x", "y")
    assert spec_of(step, experts["ZeRO-1"], "w/up") == P(None, None)
    assert spec_of(step, experts["ZeRO-1"], "momentum/up") == P(None, both)
    assert spec_of(step, experts["FSDP"], "w/bias") == P(None)  # small


def recur(w, x, key):
    """A step of a recurrent network, whose first dim is time, or of the same layers over positions."""

    def loss(w):
        x_in = x + 0.1 * jax.random.normal(jax.random.wrap_key_data(key), x.shape)
        h = jax.lax.scan(lambda h, x: (jnp.tanh(x @ w["in"] + h @ w["own"]), h), jnp.zeros((BATCH, HIDDEN)), x_in)[1]
        return jnp.mean((h @ w["out"] - x) ** 2)

    return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))


def orthogonalize(w, x, key):
    """A step whose gradient is worked on for longer than its data."""
    x = x + jax.random.normal(jax.random.wrap_key_data(key), x.shape)
    slope = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    for _ in range(5):
        slope = 1.5 * slope - slope @ (slope.T @ slope)
    return w - slope


def test_a_batch_behind_time_and_beside_a_key():
    w = {"in": shape(WIDTH, HIDDEN), "own": shape(HIDDEN, HIDDEN), "out": shape(HIDDEN, WIDTH)}
    step, experts = experts_of(recur, w, shape(LENGTH, BATCH, WIDTH), shape(2, dtype="uint32"))
    assert spec_of(step, experts["data parallel"], "x") == P(None, ("x", "y"), None)
    assert spec_of(step, experts["data parallel"], "key") == P(None)
    assert spec_of(step, experts["data and tensor parallel over y"], "w/in") == P(None, "y")
    # Features reach the weights, and positions no more than examples do.
    step, experts = experts_of(train, WEIGHTS, WEIGHTS, shape(BATCH, LENGTH, WIDTH))
    assert spec_of(step, experts["data parallel"], "x") == P(("x", "y"), None, None)
    step, experts = experts_of(orthogonalize, shape(WIDTH, HIDDEN), shape(BATCH, WIDTH), shape(2, dtype="uint32"))
    assert spec_of(step, experts["data parallel"], "x") == P(("x", "y"), None)


def read_tokens(w, tokens):
    """A step of a language model, of a single example here."""

    def loss(w):
        x = w["embed"][tokens]
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        slopes = jax.nn.log_softmax(x[:, :-1] @ w["embed"].T)
        return -jnp.mean(jnp.take_along_axis(slopes, tokens[:, 1:, None], -1))

    return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))


def test_positions_of_a_single_example_are_no_batch():
    w = {"embed": shape(4 * LENGTH, WIDTH), "up": shape(WIDTH, HIDDEN), "down": shape(HIDDEN, WIDTH)}
    step, experts = experts_of(read_tokens, w, shape(1, LENGTH, dtype="int32"))
    assert spec_of(step, experts["data parallel"], "tokens") == P(None, None)
    assert "sequence parallel" in experts


def test_positions_between_pairs_alone():
    _, experts = experts_of(train, WEIGHTS, WEIGHTS, shape(BATCH, LENGTH, WIDTH))
    found = set(experts["data, sequence and tensor parallel over y"].constraints.values())
    assert P("x", "y", None) in found  # what the last product of a pair makes
    assert P("x", None, "y") in found  # the hidden features of the MLP: all positions


def written_by_hand(constrained):
    mesh = jax_mesh()

    def place(*spec):
        return NamedSharding(mesh, P(*spec))

    def hidden(x):
        return jax.lax.with_sharding_constraint(x, place("x", "y")) if constrained else x

    def step(w, x):
        def loss(w):
            y = hidden(jnp.tanh(hidden(x @ w["up"]))) @ w["down"]
            return jnp.mean(jax.lax.with_sharding_constraint(y, place("x", None)) ** 2)

        return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))

    w = {"up": place(None, "y"), "down": place("y", None)}
    return jax.jit(step, in_shardings=(w, place("x", None)), out_shardings=w)


def test_compiled_as_written_by_hand():
    shapes = {"up": WEIGHTS["up"], "down": WEIGHTS["down"]}, shape(BATCH, WIDTH)

    def step(w, x):
        gradient = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2))(w)
        return jax.tree.map(lambda w, g: w - g, w, gradient)

    traced, experts = experts_of(step, *shapes, donate=0)
    module = write_expert(traced, experts["data and tensor parallel over y"], MESH)
    compiled = compile_module(list(jax.devices()), module)
    ours = hlo.traffic(hlo.parse(compiled.hlo_modules()[0].to_string()))
    theirs = hlo.traffic(hlo.parse(optimized_text(written_by_hand(True).lower(*shapes).compile())))
    assert ours.received_bytes == theirs.received_bytes > 0
    assert compiled.get_compiled_memory_stats().alias_size_in_bytes == 2 * WIDTH * HIDDEN  # donated: a quarter of both


def test_what_is_fixed_and_what_is_given():
    mesh = jax_mesh()
    given = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), "float32", sharding=NamedSharding(mesh, P("y", None, "x")))
    step, experts = experts_of(train, WEIGHTS, WEIGHTS, given, fixed_arguments={0: P("y")})
    assert next(iter(experts)) == OWN
    assert spec_of(step, experts[OWN], "x") == P("y", None, "x")
    assert all(one.in_shardings[0] == P("y") for one in experts.values())
    # What is fixed in part is otherwise as each has it: jax takes no open dims of what comes in or out.
    free = P.UNCONSTRAINED
    fixed = {"fixed_arguments": {14: P(free, "x", free)}, "fixed_results": {0: P(free, free), 1: P("x", free)}}
    step, experts = experts_of(train, WEIGHTS, WEIGHTS, given, **fixed)
    assert spec_of(step, experts[OWN], "x") == P("y", "x", None)
    assert experts[OWN].out_shardings[:2] == (None, P("x", None))


def test_a_loop_over_layers_splits_its_stacked_weights():
    stacked = jax.tree.map(lambda leaf: shape(3, *leaf.shape), WEIGHTS)

    def step(w, x):
        def loss(w):
            layer = jax.checkpoint(lambda x, one: (block(one, x), None))
            return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

        return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))

    traced, experts = experts_of(step, stacked, shape(BATCH, LENGTH, WIDTH))
    one = experts["tensor parallel"]
    assert spec_of(traced, one, "w/up") == P(None, None, AXES)
    assert spec_of(traced, one, "w/down") == P(None, AXES, None)


def test_fields_are_split_by_domain():
    def advance(u, v):
        return u + 0.1 * (jnp.roll(u, 1, 0) - u), v

    _, experts = experts_of(advance, shape(64, 32), shape(64, 32))
    assert {name: one.in_shardings[0] for name, one in experts.items()} == {
        "domain parallel": P(AXES, None),
        "domain parallel over two dims": P("x", "y"),
    }


def test_a_server_splits_what_it_answers():
    def answer(w, cache, tokens):
        x = w["table"][tokens]
        cache = jax.lax.dynamic_update_slice(cache, x[:, None], (0, 0, 0))
        return (x @ w["up"]).argmax(-1), cache

    weights = {"table": shape(512, WIDTH), "up": shape(WIDTH, 512)}
    step, experts = experts_of(answer, weights, shape(BATCH, 4, WIDTH), shape(BATCH, dtype="int32"))
    one = experts["data parallel"]
    assert spec_of(step, one, "cache") == P(AXES, None, None)
    assert spec_of(step, one, "tokens") == P(AXES)
    assert spec_of(step, one, "w/table") == P(None, None)
    # A state as large as the data's features is split by them or not at all.
    step, experts = experts_of(lambda x, mean: 0.9 * mean + x.mean(0), shape(64, 32), shape(32))
    assert spec_of(step, experts["data parallel"], "x") == P(AXES, None)


def test_a_single_example_is_split_by_features_and_positions():
    def answer(w, tokens):
        return jax.nn.gelu(w["table"][tokens] @ w["up"]) @ w["down"]

    weights = {"table": shape(512, WIDTH), "up": WEIGHTS["up"], "down": WEIGHTS["down"]}
    step, experts = experts_of(answer, weights, shape(1, LENGTH, dtype="int32"))
    assert spec_of(step, experts["tensor parallel"], "w/down") == P(AXES, None)
    assert P(None, AXES, None) in experts["sequence parallel"].constraints.values()
    assert spec_of(step, experts["data parallel"], "tokens") == P(None, None)

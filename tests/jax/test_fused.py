"""Trees whose targets name their sources: q, k, v to one array and back, tied weights, casts of parts, and refusals."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import NotationError, PlanError, ReshardError
from reshard.jax import Part, Target, named_targets, redistribute, reshard_pytree
from reshard.jax.request import UNLIMITED, plan_request
from reshard.jax.view_moves import read_parts
from tests.jax.fused import MESHES, check_case, draw_case
from tests.jax.oracle import assert_exact, executed, filled, mesh_of, promised
from tests.names import test_tables


@settings(max_examples=15)
@given(st.randoms(use_true_random=False), st.booleans(), st.sampled_from([None, "1MiB"]))
def test_random_trees(choose: random.Random, donate: bool, budget: str | None):
    check_case(draw_case(choose), donate=donate, budget=budget)


@pytest.mark.slow
@settings(max_examples=2)
@given(st.randoms(use_true_random=False))
def test_traced(choose: random.Random):
    where = choose.choice(MESHES[:2])
    case = draw_case(choose, where, where)
    sources = {name: x.sharding for name, x in case.arrays.items()}
    moved = jax.jit(lambda arrays: redistribute(arrays, case.targets, source=sources))(case.arrays)
    for name, target in case.targets.items():
        assert_exact(moved[name], target.sharding, case.values[name])


MESH = mesh_of({"x": 4, "y": 2})
ROWS, COLUMNS = NamedSharding(MESH, P("x")), NamedSharding(MESH, P(None, "x"))


def rows(start: int, stop: int) -> dict[int, slice]:
    return {0: slice(start, stop)}


def layer() -> dict[str, Any]:
    """Query, key and value of 16 + 8 + 8 rows, and a norm in another dtype."""
    sizes = {"q": 16, "k": 8, "v": 8}
    attn = {name: jax.device_put(filled((size, 8)), ROWS) for name, size in sizes.items()}
    return {"attn": attn, "norm": jax.device_put(filled((8, 8)).astype(jnp.bfloat16), ROWS)}


PARTS = [Part("attn.q", into=rows(0, 16)), Part("attn.k", into=rows(16, 24)), Part("attn.v", into=rows(24, 32))]
FUSED = np.concatenate([filled((16, 8)), filled((8, 8)), filled((8, 8))])


def test_one_program_with_the_collectives_of_the_plans():
    """Source, target and the messages that the plans say are all that lives."""
    target = Target(COLUMNS, shape=FUSED.shape, parts=PARTS)
    fuse = jax.jit(lambda tree: redistribute(tree, {"qkv": target}, source={"attn": ROWS, "norm": ROWS})["qkv"])
    assert_exact(fuse(layer()), COLUMNS, FUSED)
    compiled = fuse.lower(layer()).compile()
    moves = read_parts("qkv", [*layer()["attn"].values()], target, [None] * 3, [UNLIMITED] * 3)
    plans = [plan_request(move.request, move.x.shape, "float32") for move in moves]
    assert executed(compiled) == promised(*plans) and promised(*plans)
    memory = compiled.memory_analysis()
    sent = sum(step.received_bytes for plan in plans for step in plan.steps)
    assert memory.temp_size_in_bytes <= 2 * sent + 1024


def test_every_move_takes_targets_with_names():
    targets = {"qkv": Target(COLUMNS, shape=FUSED.shape, parts=PARTS), "norm": COLUMNS}
    for move in (redistribute, reshard_pytree):
        for budget in (None, "1MiB"):
            moved = move(layer(), targets, budget=budget)
            assert_exact(moved["qkv"], COLUMNS, FUSED)
            assert_exact(moved["norm"], COLUMNS, filled((8, 8)).astype(jnp.bfloat16))
    alone = redistribute(moved["qkv"], [Target(ROWS, source="", take=rows(0, 16))])
    assert_exact(alone[0], ROWS, FUSED[:16])


def test_the_rest_of_an_array_stays():
    out = jax.device_put(np.full((40, 8), -1, "float32"), COLUMNS)
    moved = redistribute(layer(), [Target(COLUMNS, parts=PARTS, out=out)])[0]
    assert_exact(moved, COLUMNS, np.concatenate([FUSED, np.full((8, 8), -1, "float32")]))
    assert_exact(out, COLUMNS, np.full((40, 8), -1, "float32"))


@pytest.mark.parametrize("budget", [None, "1MiB"])
@pytest.mark.parametrize("donate", [False, True])
def test_arrays_of_the_host_and_of_one_device(budget: str | None, donate: bool):
    """What JAX places, and what plans move, read the same arrays: these are deleted by the last."""
    values = [filled((8, 8)) + at for at in range(3)]
    tree = {"q": values[0], "k": jnp.asarray(values[1]), "v": jax.device_put(values[2], jax.devices()[5])}
    parts = [Part(name, into=rows(8 * at, 8 * at + 8)) for at, name in enumerate("qkv")]
    targets = {
        "all": Target(COLUMNS, shape=(24, 8), parts=parts),
        "q": COLUMNS,
        "turned": Target(ROWS, source="k", view="a b -> b a"),
        "alone": Target(jax.devices()[2], source="v"),
    }
    moved = redistribute(tree, targets, budget=budget, donate=donate)
    assert_exact(moved["all"], COLUMNS, np.concatenate(values))
    assert_exact(moved["q"], COLUMNS, values[0])
    assert_exact(moved["turned"], ROWS, np.ascontiguousarray(values[1].T))
    assert np.array_equal(moved["alone"], values[2])
    assert all(x.is_deleted() == donate for x in (tree["k"], tree["v"]))
    assert np.array_equal(tree["q"], filled((8, 8)))


@pytest.mark.fast(2, slow=2)
@pytest.mark.parametrize("name", ["vllm", "megatron"])
@pytest.mark.parametrize("family", test_tables.FAMILIES)
@pytest.mark.parametrize("apart", [True, False], ids=["other devices", "one set"])
def test_tables_of_names(family: str, name: str, apart: bool):
    """A trainer's tree becomes the server's, bit for bit, and goes back."""
    table = rs.names.read(f"{family}-to-{name}")
    arrays = {each: array.astype("int32") for each, array in test_tables.model(family).items()}
    if name == "megatron":  # It has no scales of blocks.
        arrays = {each: array for each, array in arrays.items() if not each.endswith("_scale_inv")}
    sizes = test_tables.sizes_of(f"{family}-to-{name}", family, 2, False)
    wanted = test_tables.vllm(arrays, 2, False) if name == "vllm" else test_tables.megatron(arrays, 2, False, family)
    near, far = (mesh_of({"x": 4}), mesh_of({"tp": 2, "rep": 2}, order=[4, 5, 6, 7])) if apart else (MESH, MESH)

    def shard(mesh: Any, shape: tuple[int, ...]) -> NamedSharding:
        axis = mesh.axis_names[0]
        at = next((at for at, size in enumerate(shape) if size % mesh.shape[axis] == 0), len(shape))
        return NamedSharding(mesh, P(*[None] * at, axis) if at < len(shape) else P())

    tree = {each: jax.device_put(array, shard(near, array.shape)) for each, array in arrays.items()}
    targets = named_targets(table, tree, lambda _, shape: shard(far, shape), **sizes)
    served = redistribute(tree, targets)
    assert served.keys() == wanted.keys()
    for each, array in wanted.items():
        assert_exact(served[each], targets[each].sharding, array.astype("int32"))
    back = redistribute(
        served,
        named_targets(table.inverse(), served, {each: x.sharding for each, x in tree.items()}, **sizes),
        donate=True,
    )
    for each, array in arrays.items():
        assert_exact(back[each], tree[each].sharding, array)


def test_what_named_targets_refuse():
    table = rs.names.read('[[rule]]\nsource = "w"\ntarget = "v"\nview = "a -> a"')
    arrays = {"w": jax.device_put(filled((8,)), ROWS)}
    for options, message in (
        ({"shardings": {"u": ROWS}}, "shardings names 'u', which no array fills"),
        ({"shardings": {}}, "'v' is filled and has no sharding"),
        ({"shardings": ROWS, "dtype": {"w": "int32"}}, "dtype names 'w'"),
        ({"shardings": ROWS, "out": {"w": arrays["w"]}}, "out names 'w'"),
    ):
        with pytest.raises(PlanError, match=message):
            named_targets(table, arrays, **options)
    moved = redistribute(arrays, named_targets(table, arrays, ROWS, dtype={"v": "int32"}))
    assert_exact(moved["v"], ROWS, filled((8,)).astype("int32"))


def fused(*parts: Part, shape: Any = (32, 8), **options: Any) -> Callable[[], Any]:
    return lambda: redistribute(layer(), {"qkv": Target(ROWS, shape=shape, parts=parts, **options)})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (fused(Part("attn.kk", into=rows(0, 8))), PlanError, "'qkv' reads 'attn.kk', .* there are 'attn.k'"),
        (fused(*PARTS[:1], *PARTS[2:]), PlanError, r"no part fills element \[16, 0\]; its parts fill 192 of 256"),
        (fused(*PARTS[:2], Part("attn.v", into=rows(20, 28))), PlanError, r"1 \('attn.k'\) and 2 .* element \[20, 0\]"),
        (fused(PARTS[0], Part("attn.q")), PlanError, "its parts lead to"),
        (fused(*PARTS, shape=None), NotationError, "'attn.q': .*give shape="),
        (
            fused(*PARTS[:2], Part("norm", into=rows(24, 32))),
            PlanError,
            "'attn.k' has dtype float32 and 'norm' bfloat16",
        ),
        (fused(*PARTS, dtype="float64"), PlanError, "jax_enable_x64"),
        (
            lambda: redistribute(layer(), {"attn": ROWS, "w": Target(ROWS, source="norm")}),
            PlanError,
            "there are 'attn.k'",
        ),
        (lambda: redistribute(layer(), Target(ROWS, source="norm", shape=(8,))), PlanError, "has shape"),
        (lambda: redistribute(layer()["norm"], Target(ROWS, source="norm")), PlanError, "the empty path"),
        (
            lambda: redistribute({"a.b": FUSED, "a": {"b": FUSED}}, [Target(ROWS, source="a.b")]),
            PlanError,
            "the name of 2 arrays",
        ),
        (
            lambda: redistribute(
                layer()["attn"], {part.source[-1]: Target(ROWS, into=part.options.into, out=FUSED) for part in PARTS}
            ),
            PlanError,
            "parts of one out= of shape",
        ),
        (lambda: redistribute(FUSED, Target(ROWS, into=rows(0, 32))), PlanError, "one jax array"),
        (lambda: Target(ROWS, parts=PARTS, take=rows(0, 1)), PlanError, "beside parts: give it to each Part"),
        (lambda: Target(ROWS, parts=["attn.q"]), PlanError, r"list of reshard.jax.Part\(name, into"),
        (lambda: Target(ROWS, parts=[]), PlanError, r"parts: \[\]"),
        (lambda: Target(ROWS, source=3), PlanError, "source 3 is a int"),
        (lambda: Target(ROWS, shape="ab"), PlanError, "give one size for each dim"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], error: type[ReshardError], message: str):
    with pytest.raises(error, match=message):
        call()

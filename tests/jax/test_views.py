"""`redistribute` with a view, a part or a cast: eager, under jit and grad, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import LayoutError, NotationError, PlanError
from reshard.jax import redistribute

MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
SPLIT = "l (three h) d -> l three h d"


def on(*spec: object) -> NamedSharding:
    return NamedSharding(MESH, P(*spec))


QKV = np.arange(2 * 96 * 8, dtype="float32").reshape(2, 96, 8)


def fused() -> jax.Array:
    return jax.device_put(QKV, on(None, ("a", "b")))


def check(moved: jax.Array, wanted: np.ndarray, sharding: NamedSharding) -> None:
    assert moved.sharding.is_equivalent_to(sharding, moved.ndim)
    assert np.array_equal(np.asarray(moved), wanted)


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize(
    ("spec", "options", "wanted"),
    [
        ((None, None, ("a", "b")), {"view": SPLIT, "three": 3}, QKV.reshape(2, 3, 32, 8)),
        (
            (None, None, "b"),
            {"view": "l (h three) d -> three l h d", "three": 3},
            QKV.reshape(2, 32, 3, 8).transpose(2, 0, 1, 3),
        ),
        ((None, "b"), {"view": SPLIT, "take": {"three": 1}, "three": 3}, QKV.reshape(2, 3, 32, 8)[:, 1]),
        (
            ("b",),
            {"view": "l (t h) d -> (h t l) d", "t": 3},
            QKV.reshape(2, 3, 32, 8).transpose(2, 1, 0, 3).reshape(192, 8),
        ),
        ((None, "b"), {"take": {1: slice(8, 72)}}, QKV[:, 8:72]),
        (("b",), {"take": {0: 1}}, QKV[1]),
        ((None, None, "b"), {"dtype": "bfloat16"}, QKV.astype(jnp.bfloat16)),
        ((None, "b"), {"view": "l ... -> ... l", "dtype": jnp.bfloat16}, QKV.transpose(1, 2, 0).astype(jnp.bfloat16)),
    ],
)
def test_eager_and_jitted(spec, options, wanted):
    target = on(*spec)
    check(redistribute(fused(), target, **options), wanted, target)
    move = jax.jit(lambda x: redistribute(x + 0, target, source=on(None, ("a", "b")), **options))
    check(move(fused()), wanted, target)


def test_into_a_part_of_an_array():
    part = jax.device_put(QKV[:, :32], on(None, "b"))
    for spec in (on(None, "b"), on("a"), on(None, ("b", "a"))):
        out = jax.device_put(np.ones_like(QKV), spec)
        wanted = np.ones_like(QKV)
        wanted[:, 32:64] = QKV[:, :32]
        options = {"view": "l h d -> l (three h) d", "into": {"three": 1}, "three": 3}
        check(redistribute(part, spec, out=out, **options), wanted, spec)
        assert np.array_equal(np.asarray(out), np.ones_like(QKV))


def test_a_donated_array_of_one_device_is_deleted():
    x = jnp.asarray(QKV)
    moved = redistribute(x, on(None, None, "b"), source=on(), view="l t d -> d l t", donate=True)
    assert x.is_deleted() and np.array_equal(moved, QKV.transpose(2, 0, 1))


def test_a_source_on_an_abstract_mesh_is_on_the_devices_of_the_array():
    source = NamedSharding(MESH.abstract_mesh, P(None, ("a", "b")))
    check(redistribute(fused(), on(None, None, "b"), source=source), QKV, on(None, None, "b"))
    check(redistribute(fused(), on("b"), source=source, take={0: 1}), QKV[1], on("b"))
    with pytest.raises(PlanError, match="not as the source that is given"):
        redistribute(fused(), on("b"), source=NamedSharding(MESH.abstract_mesh, P("a")), take={0: 1})


@pytest.mark.slow
def test_derivatives():
    for target in (on(None, None, "b"), on("a", None, "b")):

        def loss(x, target=target):
            moved = redistribute(x, target, source=on(None, ("a", "b")), view=SPLIT, three=3)
            return (moved**2).sum()

        assert np.array_equal(np.asarray(jax.jit(jax.grad(loss))(fused())), 2 * QKV)


def test_uneven_under_jit():
    rows = jax.device_put(np.arange(120.0, dtype="float32").reshape(24, 5), on("b"))
    move = jax.jit(lambda x: redistribute(x, on(None, "b"), source=on("b"), view="(t h) d -> t h d", t=4))
    assert np.array_equal(np.asarray(move(rows)), np.asarray(rows).reshape(4, 6, 5))


def test_a_reshape_along_atoms_compiles_to_no_collective():
    def split(x):
        return redistribute(x, on(None, "b"), source=on("b"), view="(h t) d -> t h d", t=2)

    shape = jax.ShapeDtypeStruct((16, 8), "float32", sharding=on("b"))
    text = jax.jit(split).lower(shape).compile().as_text()
    assert not any(name in text for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce"))


@pytest.mark.fast(2, slow=1)
@pytest.mark.parametrize(
    ("source", "target", "view", "shape"),
    [
        (on("b"), on("b"), {"take": {0: slice(8, 40)}}, (96, 64)),
        (on("b"), on("a"), {"view": "(three h) d -> three h d", "three": 3}, (96, 64)),
        # Of few elements tables would have the places, on CPU in as little time.
        (on("b"), on("b"), {"view": "(three h) d -> d h", "three": 3, "take": {"three": 1}}, (3072, 2048)),
        (on("b"), on("b", "a"), {"into": {0: slice(8, 40)}}, (32, 64)),
        (on("b"), on(None, "a"), {"view": "h d -> (e h) d", "into": {"e": 1}, "e": 3}, (32, 64)),
        (on("b"), on("b"), {"view": "h d -> e h d", "into": {"e": 1}, "e": 4}, (32, 64)),
    ],
)
def test_slices_of_tiles_are_no_elements_at_computed_places(source, target, view, shape):
    """XLA would hold an index for each element, and read and write them one by one."""
    filled = (4, 32, 64) if "e h d" in view.get("view", "") else (96, 64)
    out = {"out": jnp.zeros(filled, "float32")} if "into" in view else {}

    def move(x):
        return redistribute(x, target, source=source, **view, **out)

    compiled = jax.jit(move).lower(jax.ShapeDtypeStruct(shape, "float32", sharding=source)).compile()
    assert " gather(" not in compiled.as_text() and "scatter(" not in compiled.as_text()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: redistribute([fused()], on(), view=SPLIT, three=3), PlanError, "one jax array"),
        (lambda: redistribute(fused(), on(), view=SPLIT), NotationError, "give three="),
        (lambda: redistribute(fused(), on(), view=SPLIT, three=5), NotationError, "not a multiple of 5"),
        (lambda: redistribute(fused(), on(None, "b"), view=SPLIT, three=3), LayoutError, "does not divide"),
        (lambda: redistribute(fused(), on(), take={"three": 1}), NotationError, "not an atom"),
        (lambda: redistribute(fused(), on(), take={0: 1}, into={0: 1}, out=fused()), NotationError, "two moves"),
        (lambda: redistribute(fused(), on(), take={0: 1}, out=fused()), PlanError, "give no out="),
        (lambda: redistribute(fused(), on(), into={0: slice(0, 2)}), PlanError, "its array with out="),
        (lambda: redistribute(fused(), on(), three=3), PlanError, "unknown argument 'three'"),
        (lambda: redistribute(fused(), on(), take=3), PlanError, "give a dict"),
        (lambda: redistribute(fused(), on(), into={0: 1}, out=3), PlanError, "jax array to fill"),
        (lambda: redistribute(fused(), on(), view=3), NotationError, "give text"),
        (lambda: redistribute(fused(), 3, take={0: 1}), LayoutError, "NamedSharding"),
        (lambda: redistribute(fused(), on(), dtype="complex128x"), LayoutError, "unknown dtype"),
        (lambda: jax.jit(lambda x: redistribute(x, on(), view=SPLIT, three=3))(fused()), PlanError, "give source="),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.fast(1)
@pytest.mark.parametrize("run", [lambda move: move, jax.jit], ids=["eager", "traced"])
def test_scales_bit_for_bit(run):
    """A scale a channel where the dtype narrows, one a block where it widens."""
    channels = np.arange(1, 97, dtype="float32").reshape(1, 96, 1)
    blocks = np.arange(1, 4, dtype="float32").reshape(1, 3, 1)
    near, far = on(None, "b"), on(None, None, "b")
    narrow = run(lambda x: redistribute(x, far, source=near, dtype="bfloat16", scale=channels))(fused_on(near))
    wanted = (QKV / channels).astype(jnp.bfloat16)
    assert np.array_equal(np.asarray(narrow).view("u2"), wanted.view("u2"))
    wide = run(lambda x: redistribute(x, near, source=far, dtype="float32", scale=blocks))(narrow)
    assert np.array_equal(wide, wanted.astype("float32") * np.repeat(blocks, 32, 1))


def test_a_scale_follows_an_array_out_of_the_hosts_memory():
    """Its collectives run in the devices' memory: the scale must not be lost on the way there."""
    x = jax.device_put(QKV, on(None, "b").with_memory_kind("pinned_host"))
    moved = redistribute(x, on(None, None, "b"), dtype="bfloat16", scale=2.0)
    assert np.array_equal(np.asarray(moved).view("u2"), (QKV / 2).astype(jnp.bfloat16).view("u2"))


def fused_on(sharding: NamedSharding) -> jax.Array:
    return jax.device_put(QKV, sharding)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": 2.0}, PlanError, "casts nothing"),
        ({"dtype": "bfloat16", "scale": np.ones((1, 5, 1))}, LayoutError, "do not divide"),
        ({"dtype": "bfloat16", "scale": [[1, 2], [3]]}, PlanError, "give a number or an array"),
    ],
)
def test_scales_that_do_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        redistribute(fused(), on(), **options)

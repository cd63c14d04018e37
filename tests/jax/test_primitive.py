"""The primitive under the transformations of JAX.

Each result equals, bit by bit, that of the same function without the move on one device; the collectives of derivatives
and batches are those of the plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import LayoutError, ReshardError
from reshard.jax import redistribute
from reshard.jax.request import ReshardRequest
from reshard.jax.traced import check_platforms, move_by_partitioner
from tests.jax.oracle import AUTO, EXPLICIT, as_plan, assert_exact, executed, filled, mesh_of, on, promised
from tests.layouts import sample_pairs
from tests.sampling import sampled

SIZES = {"x": 4, "y": 2}
SHAPE = (8, 8)
VALUES = filled(SHAPE) % 5 - 2
WEIGHTS = filled(SHAPE) % 3
BEFORE, AFTER = P("x", "y"), P(None, ("y", "x"))


Move = Callable[[Any], Any]


Made = Callable[..., Any]


def ends(kind: AxisType = AUTO) -> tuple[NamedSharding, NamedSharding]:
    mesh = mesh_of(SIZES, kind)
    return NamedSharding(mesh, BEFORE), NamedSharding(mesh, AFTER)


def moves(given: str) -> tuple[Move, Move]:
    """The moves there and back, with the source as an option, in the type, or unknown."""
    before, after = ends(EXPLICIT if given == "explicit" else AUTO)
    known = given == "source="
    return (
        lambda x: redistribute(x, after, source=before if known else None),
        lambda x: redistribute(x, before, source=after if known else None),
    )


def put(sharding: NamedSharding, values: np.ndarray = VALUES) -> jax.Array:
    return jax.device_put(values, sharding)


# ---- the functions ---------------------------------------------------------------------------------


def cubes(there: Move, back: Move) -> Made:
    """A function whose first three derivatives differ from element to element."""
    return lambda x: (there(x) ** 3).sum()


def pushed(f: Made) -> Made:
    return lambda x: jax.jvp(f, (x,), (x + 1,))


def hessian_vector(f: Made) -> Made:
    return lambda x: jax.jvp(jax.grad(f), (x,), (x + 1,))[1]


def reverse_over_reverse(f: Made) -> Made:
    return lambda x: jax.grad(lambda x: (jax.grad(f)(x) * (x + 1)).sum())(x)


def scanned(there: Move, back: Move) -> Made:
    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        carry = back(there(carry) + x)
        return carry, carry[0]

    return lambda x: jax.lax.scan(body, x, jnp.arange(3.0))


def scanned_remat(there: Move, back: Move) -> Made:
    @jax.checkpoint
    def body(carry: Any, x: Any) -> tuple[Any, None]:
        return back(there(carry) ** 2 - x), None

    return jax.grad(lambda x: jax.lax.scan(body, x, jnp.arange(2.0))[0].sum())


def while_loop(there: Move, back: Move) -> Made:
    return lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, back(there(c[1]) + c[0])), (0, x))[1]


def conditional(there: Move, back: Move) -> Made:
    return lambda x: [jax.lax.cond(p, lambda x: there(x) + 1, lambda x: there(x) * 2, x) for p in (x[0, 0] > 0, True)]


def remat(there: Move, back: Move) -> Made:
    policy = jax.checkpoint_policies.nothing_saveable
    return jax.grad(lambda x: (jax.checkpoint(lambda x: there(x * 2) ** 3, policy=policy)(x) * 2).sum())


def custom(there: Move, back: Move) -> Made:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return there(x)

    f.defvjp(lambda x: (there(x), None), lambda _, ct: (back(ct) * 3,))
    return jax.grad(lambda x: (f(x) ** 2).sum())


def linearized(there: Move, back: Move) -> Made:
    def f(x: Any) -> Any:
        y, tangent = jax.linearize(lambda x: there(x) ** 2, x)
        return y, tangent(x + 1)

    return f


def transposed(there: Move, back: Move) -> Made:
    return lambda x: jax.linear_transpose(there, x)(there(x))


def checked(there: Move, back: Move) -> Made:
    return lambda x: checkify.checkify(there)(x)[1]


MADE: dict[str, Callable[[Move, Move], Made]] = {
    "grad": lambda there, back: jax.grad(lambda x: (there(x) ** 2 * WEIGHTS).sum()),
    "value_and_grad": lambda there, back: jax.value_and_grad(lambda x: (back(there(x) ** 2) * x).sum()),
    "jvp": lambda there, back: pushed(lambda x: there(x) ** 2),
    "hessian-vector": lambda there, back: hessian_vector(cubes(there, back)),
    "reverse over reverse": lambda there, back: reverse_over_reverse(cubes(there, back)),
    "jacfwd": lambda there, back: jax.jacfwd(lambda x: there(x)[:2, :2]),
    "jacrev": lambda there, back: jax.jacrev(lambda x: there(x)[:2, :2]),
    "hessian": lambda there, back: jax.hessian(lambda x: (there(x * 2)[:, :1] ** 3).sum()),
    "scan": scanned,
    "scan of remat": scanned_remat,
    "while": while_loop,
    "cond": conditional,
    "remat": remat,
    "custom_vjp": custom,
    "linearize": linearized,
    "linear_transpose": transposed,
    "checkify": checked,
}


def same(actual: Any, wanted: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert_exact(a, None, np.asarray(b))


def reference(name: str) -> Any:
    return MADE[name](lambda x: x, lambda x: x)(jnp.asarray(VALUES))


GIVEN = ["source=", "unknown"]


def alternating(first: int) -> list[tuple[str, str]]:
    """Each derivative once: every other one of a known source, the rest of an unknown one."""
    return [(name, GIVEN[(number + first) % 2]) for number, name in enumerate(MADE)]


FAST = {("grad", "source="), ("scan", "unknown"), ("remat", "source="), ("custom_vjp", "unknown")}


@pytest.mark.fast(2, slow=3)
@pytest.mark.parametrize(("name", "given"), sampled(sorted({*alternating(1)} | FAST), *sorted(FAST)))
def test_under_jit(name: str, given: str):
    same(jax.jit(MADE[name](*moves(given)))(put(ends()[0])), reference(name))


# JAX refuses to slice a dim that is sharded over an explicit axis.
SLICING = ("jacfwd", "jacrev", "hessian", "scan", "cond")


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("name", sampled([name for name in MADE if name not in SLICING], "grad", "jvp"))
def test_explicit_axes(name: str):
    before, _ = ends(EXPLICIT)
    with jax.set_mesh(before.mesh):
        f = MADE[name](*moves("explicit"))
        if name == "grad":  # its weights have a type of their own
            weights = jax.device_put(WEIGHTS, ends(EXPLICIT)[1])
            f = jax.grad(lambda x: (moves("explicit")[0](x) ** 2 * weights).sum())
        same(jax.jit(f)(put(before)), reference(name))
        same(f(put(before)), reference(name))


def test_a_scan_on_explicit_axes():
    (before, _), (there, back) = ends(EXPLICIT), moves("explicit")

    def f(x: Any) -> Any:
        return jax.lax.scan(lambda c, x: (back(there(c) + x), None), x, np.arange(3, dtype=np.float32))[0]

    assert_exact(jax.jit(f)(put(before)), before, VALUES + 3)
    assert_exact(jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))(put(before)), before, 2 * (VALUES + 3))


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize(("name", "given"), sampled(alternating(0), alternating(0)[0]))
def test_eagerly(name: str, given: str):
    same(MADE[name](*moves(given))(put(ends()[0])), reference(name))


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "uncommitted"])
@pytest.mark.parametrize("name", ["grad", "jvp", "hessian-vector"])
def test_eagerly_of_what_is_not_sharded_yet(name: str, make: Callable[[Any], Any]):
    same(MADE[name](*moves("unknown"))(make(VALUES)), reference(name))


# ---- values and cost of derivatives ----------------------------------------------------------------


@pytest.mark.parametrize("given", ["source=", "explicit"])
def test_the_transpose_is_the_plan_back(given: str):
    """No collectives besides the plans', such as an all-reduce or a gather of a cotangent."""
    before, after = ends(EXPLICIT if given == "explicit" else AUTO)
    there, _ = moves(given)
    f = jax.jit(jax.grad(lambda x: (there(x) ** 2).sum()), out_shardings=before)
    one, other = (as_plan(*pair, SHAPE, "float32") for pair in ((before, after), (after, before)))
    assert executed(f.lower(put(before)).compile()) == promised(one, other)


def test_a_gather_transposes_to_a_slice():
    mesh = mesh_of(SIZES)
    before, after = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    f = jax.jit(jax.grad(lambda x: (redistribute(x, after, source=before) ** 2).sum()), out_shardings=before)
    compiled = f.lower(put(before)).compile()
    assert set(executed(compiled)) == {("all_gather", 3 * 2 * 8 * 4)}
    assert_exact(f(put(before)), before, 2 * VALUES)


def test_a_scan_moves_at_every_turn():
    before, after = ends()
    there, back = moves("source=")
    f = jax.jit(lambda x: jax.lax.scan(lambda c, _: (back(there(c) + 1), None), x, length=5)[0], out_shardings=before)
    both = promised(as_plan(before, after, SHAPE, "float32"), as_plan(after, before, SHAPE, "float32"))
    five_times = Counter({key: 5 * count for key, count in both.items()})
    assert executed(f.lower(put(before)).compile()) == five_times


# ---- unreduced -------------------------------------------------------------------------------------

LEFT, RIGHT = filled((8, 16)) % 5, filled((16, 8)) % 7


def product_moved(target: P) -> Made:
    def f(left: jax.Array, right: jax.Array) -> jax.Array:
        return redistribute(jnp.einsum("ij,jk->ik", left, right, out_sharding=P(unreduced={"x"})), target)

    return f


def plain_product(left: Any, right: Any) -> Any:
    return left @ right


SECOND: dict[str, Callable[[Made], Made]] = {
    "grad": lambda f: jax.grad(lambda a, b: (f(a, b) ** 2).sum()),
    "grad of the other": lambda f: jax.grad(lambda a, b: (f(a, b) ** 2).sum(), argnums=1),
    "jvp": lambda f: lambda a, b: jax.jvp(lambda a: f(a, b), (a,), (a,)),
    "hessian-vector": lambda f: lambda a, b: hessian_vector(lambda a: (f(a, b) ** 2).sum())(a),
    "reverse over reverse": lambda f: lambda a, b: reverse_over_reverse(lambda a: (f(a, b) ** 2).sum())(a),
    "remat": lambda f: jax.grad(lambda a, b: (jax.checkpoint(f)(a, b) ** 2).sum()),
}


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("target", [P("x"), P(), P(None, "y")], ids=str)
@pytest.mark.parametrize("name", SECOND)
def test_derivatives_of_an_unreduced_source(name: str, target: P):
    """Each summand has the cotangent of the sum."""
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        left, right = jax.device_put(LEFT, P(None, "x")), jax.device_put(RIGHT, P("x"))
        result = jax.jit(SECOND[name](product_moved(target)))(left, right)
    same(result, SECOND[name](plain_product)(jnp.asarray(LEFT), jnp.asarray(RIGHT)))


@pytest.mark.parametrize("derive", [lambda f: f, SECOND["grad"]], ids=["value", "grad"])
def test_batches_of_an_unreduced_source(derive: Callable[[Made], Made]):
    batch = np.stack([LEFT, LEFT + 1])
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        left, right = jax.device_put(batch, P(None, None, "x")), jax.device_put(RIGHT, P("x"))
        result = jax.jit(jax.vmap(derive(product_moved(P("x"))), in_axes=(0, None)))(left, right)
    same(result, jax.vmap(derive(plain_product), in_axes=(0, None))(jnp.asarray(batch), jnp.asarray(RIGHT)))


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "jit"])
@pytest.mark.parametrize("target", [P("x"), P(None, "x"), P(None, "y")], ids=str)
def test_the_gradient_of_a_reduced_source_is_unreduced(target: P, eager: bool):
    """The cotangent of `reduced` axes is a sum that is started: each device has its own part of it."""
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        x = jax.sharding.reshard(jax.device_put(LEFT, P()), P(reduced={"x"}))
        weights = jax.device_put(RIGHT.T, target)
        derive = jax.grad(lambda v: (redistribute(v, target) * weights).sum())
        gradient = derive(x) if eager else jax.jit(derive)(x)
        assert gradient.sharding.spec.unreduced == {"x"}
        same(redistribute(gradient, P()), RIGHT.T)


@pytest.mark.fast(1)
@pytest.mark.parametrize("source", [P(), P("x"), P("y")], ids=str)
def test_the_gradient_through_an_unreduced_target(source: P):
    with jax.set_mesh(mesh_of(SIZES, EXPLICIT)):
        x, weights = jax.device_put(LEFT, source), jax.device_put(RIGHT.T, P("x"))

        def loss(v: jax.Array) -> jax.Array:
            return (redistribute(redistribute(v, P(unreduced={"x"})), P("x")) * weights).sum()

        for derive in (jax.grad(loss), jax.jit(jax.grad(loss))):
            same(derive(x), RIGHT.T)


# ---- vmap ------------------------------------------------------------------------------------------

BATCH = filled((3, *SHAPE))


def with_dim(spec: P, at: int, held: str | None = None) -> P:
    entries = list(spec)
    entries.insert(at, held)
    return P(*entries)


@pytest.mark.fast(2, slow=2)
@pytest.mark.parametrize("given", ["source=", "unknown"])
@pytest.mark.parametrize(("takes", "gives"), [(0, 0), (1, 2), (2, 1), (-1, 0), (0, -1)])
def test_vmap(takes: int, gives: int, given: str):
    before, after = ends()
    at, to = takes % 3, gives % 3
    values = np.moveaxis(BATCH, 0, at)
    x = put(NamedSharding(before.mesh, with_dim(BEFORE, at)), values)
    f = jax.vmap(moves(given)[0], in_axes=takes, out_axes=gives)
    wanted = NamedSharding(after.mesh, with_dim(AFTER, to))
    assert_exact(jax.jit(f)(x), wanted, np.moveaxis(BATCH, 0, to))
    if (at, to) == (0, 0):
        assert_exact(f(x), wanted, BATCH)


def test_a_batch_moves_in_one_collective():
    before, after = ends()
    shape = (3, *SHAPE)
    lifted = [NamedSharding(end.mesh, with_dim(end.spec, 0)) for end in (before, after)]
    f = jax.jit(jax.vmap(moves("source=")[0]), in_shardings=lifted[0], out_shardings=lifted[1])
    compiled = f.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile()
    assert executed(compiled) == promised(as_plan(before, after, SHAPE, "float32"), batch=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled([AUTO, EXPLICIT], EXPLICIT), ids=str)
def test_vmap_of_a_dim_that_is_sharded(kind: AxisType):
    """The batch stays on its axis, which is `spmd_axis_name` or in the type."""
    mesh = mesh_of({"x": 2, "y": 2, "z": 2}, kind)
    before, after = NamedSharding(mesh, BEFORE), NamedSharding(mesh, AFTER)
    values = filled((4, *SHAPE))
    wanted = NamedSharding(mesh, with_dim(AFTER, 0, "z"))
    name = "z" if kind == AUTO else None

    def over(f: Made, at: int) -> Made:
        return jax.jit(jax.vmap(f, in_axes=at, spmd_axis_name=name))

    for at in range(3):
        x = put(NamedSharding(mesh, with_dim(BEFORE, at, "z")), np.moveaxis(values, 0, at))
        for source in (before, None) if kind == AUTO else (None,):
            there = partial(redistribute, sharding=after, source=source)
            assert_exact(over(there, at)(x), wanted, values)
            square = jax.grad(lambda x, there=there: (there(x) ** 2).sum())
            assert_exact(over(square, at)(x), None, 2 * values)
    x = put(NamedSharding(mesh, with_dim(BEFORE, 0, "z")), values)
    with jax.set_mesh(mesh):
        assert_exact(jax.vmap(lambda x: redistribute(x, after), spmd_axis_name=name)(x), wanted, values)
    held = promised(as_plan(before, after, SHAPE, "float32"), batch=2)
    f = jax.jit(jax.vmap(lambda x: redistribute(x, after, source=before), spmd_axis_name=name), out_shardings=wanted)
    assert executed(f.lower(x).compile()) == held


@pytest.mark.parametrize("given", ["source=", "unknown"])
def test_vmap_of_vmap(given: str):
    before, after = ends()
    values = filled((2, 3, *SHAPE))
    x = put(NamedSharding(before.mesh, P(None, None, *BEFORE)), values)
    f = jax.jit(jax.vmap(jax.vmap(moves(given)[0]), in_axes=1, out_axes=3))
    wanted = NamedSharding(after.mesh, P(None, *AFTER, None))
    assert_exact(f(x), wanted, np.transpose(values, (0, 2, 3, 1)))


@pytest.mark.parametrize("given", ["source=", "unknown"])
def test_vmap_over_another_argument(given: str):
    """The moved array itself has no batch dim."""
    before, _ = ends()
    f = jax.vmap(lambda x, y: moves(given)[0](x) + y, in_axes=(None, 0))
    wanted = np.stack([VALUES, VALUES + 1])
    assert_exact(jax.jit(f)(put(before), jnp.arange(2.0)), None, wanted)
    assert_exact(f(put(before), jnp.arange(2.0)), None, wanted)


@pytest.mark.parametrize("given", ["source=", "unknown"])
def test_vmap_of_derivatives(given: str):
    before, _ = ends()
    x = put(NamedSharding(before.mesh, with_dim(BEFORE, 0)), BATCH)
    there, _ = moves(given)
    assert_exact(jax.jit(jax.vmap(jax.grad(lambda x: (there(x) ** 2).sum())))(x), None, 2 * BATCH)
    assert_exact(jax.jit(jax.grad(lambda x: (jax.vmap(there)(x) ** 2).sum()))(x), None, 2 * BATCH)


def test_vmap_of_a_collective_over_the_batch():
    before, _ = ends()
    x = put(NamedSharding(before.mesh, with_dim(BEFORE, 0)), BATCH)
    there, _ = moves("source=")
    f = jax.jit(jax.vmap(lambda x: jax.lax.psum(there(x), "batch"), axis_name="batch"))
    assert_exact(f(x), None, np.stack([BATCH.sum(axis=0)] * 3))


# ---- inside shard_map ------------------------------------------------------------------------------

CUBE = {"x": 2, "y": 2, "z": 2}
INSIDE = filled((4, *SHAPE))


def manual_over_z(kind: AxisType, body: Made) -> tuple[NamedSharding, Made]:
    """A function that is manual over z, and the sharding of its argument."""
    mesh = mesh_of(CUBE, kind)
    f = jax.shard_map(body, mesh=mesh, in_specs=P("z"), out_specs=P("z"), axis_names={"z"})
    return NamedSharding(mesh, P("z", "x", "y")), f


def test_inside_a_shard_map_that_is_manual_over_another_axis():
    mesh = mesh_of(CUBE)
    here, there = P(None, "x", "y"), P(None, "y", "x")
    for source, target in (
        (here, there),
        (NamedSharding(mesh, here), NamedSharding(mesh, there)),
    ):
        before, f = manual_over_z(AUTO, lambda x, s=source, t=target: redistribute(x, t, source=s) * 2)
        wanted = NamedSharding(mesh, P("z", "y", "x"))
        assert_exact(jax.jit(f)(put(before, INSIDE)), wanted, INSIDE * 2)
        grad = jax.jit(jax.grad(lambda x, f=f: (f(x) ** 2).sum()))
        assert_exact(grad(put(before, INSIDE)), None, 8 * INSIDE)


def test_inside_a_manual_shard_map_with_explicit_axes():
    before, f = manual_over_z(EXPLICIT, lambda x: redistribute(redistribute(x, P(None, "y", "x")), P(None, ("x", "y"))))
    wanted = NamedSharding(before.mesh, P("z", ("x", "y")))
    assert_exact(jax.jit(f)(put(before, INSIDE)), wanted, INSIDE)
    grad = jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))
    assert_exact(grad(put(before, INSIDE)), before, 2 * INSIDE)


def test_inside_a_manual_shard_map_in_a_scan():
    def body(x: jax.Array) -> jax.Array:
        def turn(c: Any, _: Any) -> tuple[Any, None]:
            there = redistribute(c, P(None, "y", "x"), source=P(None, "x", "y"))
            return redistribute(there * 2, P(None, "x", "y"), source=P(None, "y", "x")), None

        return jax.lax.scan(turn, x, length=2)[0]

    before, f = manual_over_z(AUTO, body)
    assert_exact(jax.jit(f)(put(before, INSIDE)), before, INSIDE * 4)


def test_inside_a_manual_shard_map_uneven():
    values = filled((4, 7, 5))
    before, f = manual_over_z(AUTO, lambda x: redistribute(x, P(None, "y", "x"), source=P(None, "x", "y")))
    everywhere = NamedSharding(before.mesh, P())
    result = jax.jit(f, out_shardings=everywhere)(put(everywhere, values))
    assert_exact(result, everywhere, values)


def test_inside_a_manual_shard_map_the_collectives_are_the_plans():
    before, f = manual_over_z(AUTO, lambda x: redistribute(x, P(None, "y", "x"), source=P(None, "x", "y")))
    after = NamedSharding(before.mesh, P("z", "y", "x"))
    compiled = jax.jit(f, in_shardings=before, out_shardings=after).lower(put(before, INSIDE)).compile()
    square = mesh_of({"x": 2, "y": 2})
    plan = as_plan(NamedSharding(square, P("x", "y")), NamedSharding(square, P("y", "x")), SHAPE, "float32")
    assert executed(compiled) == promised(plan, batch=2)


# ---- a source that only the partitioner knows


@pytest.mark.slow
def test_a_source_known_at_compile_time_gives_the_same_collectives():
    """The collectives are those of a move whose source is known when it is traced."""
    pairs = [*sample_pairs(rs.Mesh(SIZES), 2, 5, seed=1), *sample_pairs(rs.Mesh(x=2, y=3), 2, 5, seed=2)]
    for pair in pairs:
        mesh = mesh_of(dict(pair[0].mesh.axes))
        source, target = on(mesh, pair[0]), on(mesh, pair[1])
        f = jax.jit(lambda x, t=target: redistribute(x, t), in_shardings=source, out_shardings=target)
        compiled = f.lower(jax.ShapeDtypeStruct(pair[0].shape, jnp.float32)).compile()
        assert executed(compiled) == promised(rs.plan(*pair)), rs.plan(*pair)


def test_on_tpu_an_unknown_source_is_refused_when_lowered(tpu_mesh: jax.sharding.Mesh):
    target = NamedSharding(tpu_mesh, AFTER)
    before = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(tpu_mesh, BEFORE))
    with pytest.raises(LayoutError) as caught:
        jax.jit(lambda x: redistribute(x, target)).lower(before)
    for word in ("(8, 8)", "'x'", "4", "TPU", "source=", "explicit axes", "reshard.jax.jit"):
        assert word in str(caught.value)


def test_a_hook_alone_moves_exactly() -> None:
    source, target = NamedSharding(mesh_of(SIZES), BEFORE), NamedSharding(mesh_of(SIZES), AFTER)
    request = ReshardRequest(target)
    f = jax.jit(lambda x: move_by_partitioner(x, request), in_shardings=source, out_shardings=target)
    assert_exact(f(jax.device_put(VALUES, source)), target, VALUES)


def test_the_hook_does_not_pass_the_operands_sharding_on() -> None:
    """Left to itself, propagation must not conclude that the result is sharded as the operand is."""
    source = NamedSharding(mesh_of(SIZES), BEFORE)
    request = ReshardRequest(NamedSharding(mesh_of(SIZES), AFTER))
    out = jax.jit(lambda x: move_by_partitioner(x, request), in_shardings=source)(jax.device_put(VALUES, source))
    assert not out.sharding.is_equivalent_to(source, 2)
    assert_exact(out, None, VALUES)


def test_uneven_arrays_are_left_to_xla() -> None:
    """7 x 5 in 8 pieces: the result is right, and the program has no permute or all-to-all of ours."""
    mesh, values = mesh_of(SIZES), filled((7, 5))
    source, target, everywhere = (NamedSharding(mesh, spec) for spec in (P("x"), P(None, "y"), P()))
    pin = jax.lax.with_sharding_constraint
    f = jax.jit(lambda x: pin(redistribute(pin(x, source), target), everywhere), in_shardings=everywhere)
    assert_exact(f(jax.device_put(values, everywhere)), everywhere, values)


def test_platforms_without_the_hook() -> None:
    request = ReshardRequest(NamedSharding(mesh_of(SIZES), AFTER))
    check_platforms(["cpu", "cuda"], request, (8, 8))
    with pytest.raises(LayoutError, match=r"array of shape \(8, 8\).*XLA on TPU .*give source="):
        check_platforms(["cpu", "tpu"], request, (8, 8))


@pytest.fixture
def tpu_mesh() -> jax.sharding.Mesh:
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("v5p:2x2x2", platform="tpu").devices
    return jax.sharding.Mesh(np.array(devices).reshape(4, 2), tuple(SIZES))


# ---- between sets of devices -----------------------------------------------------------------------


def device_sets(kind: AxisType) -> list[NamedSharding]:
    """Other devices, more of them, some of them, and the same ones in another order."""
    return [
        NamedSharding(mesh_of({"x": 2, "y": 2}, kind, order=range(4)), P("x", "y")),
        NamedSharding(mesh_of({"x": 2, "y": 2}, kind, order=range(4, 8)), P("y", "x")),
        NamedSharding(mesh_of({"z": 8}, kind), P("z")),
        NamedSharding(mesh_of({"z": 4}, kind, order=range(2, 6)), P(None, "z")),
        NamedSharding(mesh_of({"x": 2, "y": 2}, kind, order=range(3, -1, -1)), P("y", "x")),
    ]


@pytest.mark.fast(3, slow=3)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("there", range(1, 5))
@pytest.mark.parametrize("here", [0, 2])
def test_derivatives_through_moves_to_other_devices(here: int, there: int, kind: AxisType) -> None:
    """Outside of jit they move each time, and the transpose is the move back: gradients are where their arrays are."""
    ends = device_sets(kind)
    x, target = put(ends[here]), ends[there]
    move = lambda v: redistribute(v, target)  # noqa: E731
    moved, tangent = jax.jvp(move, (x,), (x + 1,))
    assert_exact(moved, target, VALUES)
    assert_exact(tangent, target, VALUES + 1)
    (back,) = jax.vjp(move, x)[1](tangent)
    assert_exact(back, x.sharding, VALUES + 1)
    assert back.sharding == x.sharding
    if kind == EXPLICIT:
        return  # JAX has no scalars on an explicit mesh that is not set.
    loss, plain = cubes(move, lambda v: v), cubes(lambda v: v, lambda v: v)
    for derive in (jax.grad, reverse_over_reverse):
        gradient = derive(loss)(x)
        assert_exact(gradient, x.sharding, np.asarray(derive(plain)(VALUES)))
        assert gradient.sharding == x.sharding
    batch = jax.device_put(np.stack([VALUES, VALUES + 1]), x.sharding.update(spec=P(None, *x.sharding.spec.partitions)))
    assert_exact(jax.vmap(jax.grad(loss))(batch), batch.sharding, 3 * np.asarray(batch) ** 2)


def test_a_program_with_a_move_to_other_devices_is_refused() -> None:
    here, there, *_ = device_sets(AUTO)
    with pytest.raises(ReshardError, match="different devices"):
        jax.jit(jax.grad(cubes(lambda v: redistribute(v, there, source=here), lambda v: v)))(put(here))


# ---- axes of size 1 --------------------------------------------------------------------------------

ONES = [P("o", "x"), P(("o", "x"), "y"), P("y", ("x", "o")), P("o", unreduced={"y"}), P("y", reduced={"o"})]


@pytest.mark.fast(2, slow=2)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("before", ONES, ids=str)
def test_axes_of_size_one_in_explicit_types(before: P, jitted: bool) -> None:
    """They are in types and in no layout."""
    with jax.set_mesh(mesh_of({"o": 1, "x": 2, "y": 2}, EXPLICIT)):
        x = jax.sharding.reshard(jax.device_put(VALUES, P()), before)
        for after in (P("x"), P("o", "y"), P("y", reduced={"o"})):
            wanted = jax.sharding.reshard(x, after)
            moved = (jax.jit(redistribute, static_argnums=1) if jitted else redistribute)(x, after)
            assert moved.sharding == wanted.sharding and jax.typeof(moved) == jax.typeof(wanted)
            assert np.array_equal(moved, VALUES)

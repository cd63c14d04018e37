"""Strict mode: refuses programs that still rebuild an array or need too much memory, and names the user's line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import PlanError, StrictError
from reshard.jax.jit import Limits, check_limits, effective_limits, jit, strict
from reshard.jax.pass_report import PassReport
from reshard.jax.program_report import optimized_text
from tests.jax.moving import lowered_twice

SIZE = 16
NOTHING_FITS = 10
"""A budget in bytes that no plan meets, so that all moves are left to XLA."""


def mesh(*sizes: int) -> JaxMesh:
    return JaxMesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), tuple("xyz"[: len(sizes)]))


def move(after: NamedSharding) -> Any:
    return lambda v: jax.lax.with_sharding_constraint(v, after) + 1


GRID = mesh(4, 2)


def constrained(v: jax.Array, spec: P) -> jax.Array:
    return jax.lax.with_sharding_constraint(v, NamedSharding(GRID, spec))


def fsdp(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return constrained(jax.nn.relu(constrained(x @ a, P("x"))) @ b, P("x"))


def attention(x: jax.Array, *weights: jax.Array) -> jax.Array:
    q, k, v = (constrained(jnp.einsum("btd,dhk->bthk", x, w), P("x", None, "y")) for w in weights)
    scores = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), jnp.einsum("bthk,bshk->bhts", q, k), -1e9)
    return constrained(jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v), P("x", None, "y"))


def scanned(x: jax.Array, layers: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, w: (constrained(jnp.tanh(c @ w), P("x")), None), x, layers)[0]


def in_shard_map(x: jax.Array) -> jax.Array:
    """A user's own gather, of which each device keeps a part."""

    def columns(tile: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(tile, "x", axis=0, tiled=True)
        return jax.lax.dynamic_slice_in_dim(whole, 8 * jax.lax.axis_index("x"), 8, 1)

    return jax.shard_map(columns, mesh=GRID, in_specs=P("x"), out_specs=P(None, "x"))(x) + 1


def gradient(f: Any) -> Any:
    return jax.grad(lambda weights, x: jnp.sum(jax.checkpoint(f)(x, *weights) ** 2))


LAYERS = ((3, 32, 32), P(None, "x", "y"))
HEADS = ((32, 4, 8), P("x", "y"))
INNOCENT: dict[str, tuple[Any, list[tuple[tuple[int, ...], P]]]] = {
    "its own FSDP gather": (
        lambda x, e: constrained(x, P("x", "y")) @ e.T, [((512, 256), P("x")), ((2048, 256), P("y", "x"))]
    ),
    "fsdp": (fsdp, [((16, 32), P("x")), ((32, 64), P("x")), ((64, 32), P("x"))]),
    "sequence parallel mlp": (
        lambda x, a, b: constrained(jax.nn.gelu(constrained(constrained(x, P("x")) @ a, P("x", None, "y"))) @ b,
                                    P("x", "y")),
        [((16, 16, 32), P("x", "y")), ((32, 64), P(None, "y")), ((64, 32), P("y"))],
    ),
    "attention": (attention, [((8, 16, 32), P("x")), HEADS, HEADS, HEADS]),
    "attention, its gradient, rematerialized": (
        lambda x, *weights: gradient(attention)(weights, x), [((8, 16, 32), P("x")), HEADS, HEADS, HEADS]
    ),
    "scan": (scanned, [((16, 32), P("x")), LAYERS]),
    "scan, its gradient": (lambda x, w: gradient(scanned)((w,), x), [((16, 32), P("x")), LAYERS]),
    "a user's shard_map": (in_shard_map, [((16, 32), P("x"))]),
    "cumsum": (lambda x: jnp.cumsum(x, 0), [((16, 32), P(("x", "y")))]),
    "uneven": (lambda x: jnp.tanh(constrained(jnp.tanh(constrained(x, P("x"))), P())), [((10, 17), P())]),
}  # fmt: skip
PLANTED = [
    ((16, 16, 16), P("y", None, "x"), P(None, ("x", "y"))),  # jax-ml/jax#21562
    ((16, 24), P("x"), P(None, "y")),
    ((10, 17), P("x"), P(None, ("x", "y"))),
]
BEFORE, AFTER = NamedSharding(GRID, P("y", None, "x")), NamedSharding(GRID, P(None, ("x", "y")))
LINE = f"{__file__}:{move.__code__.co_firstlineno + 1}"


def left_alone(report: PassReport, why: str) -> PassReport:
    """The report if XLA had been left all reshards."""
    return replace(report, reshards=tuple(replace(each, taken=False, why=why) for each in report.reshards))


def numbered(place: NamedSharding) -> jax.Array:
    return jax.device_put(np.arange(SIZE**3, dtype=np.float32).reshape(SIZE, SIZE, SIZE), place)


def test_a_program_that_rebuilds_an_array_is_refused_and_its_line_named() -> None:
    with pytest.raises(StrictError) as caught:
        jit(move(AFTER), strict=True, budget=NOTHING_FITS)(numbered(BEFORE))
    message = str(caught.value)
    assert message.startswith(f"{LINE}: the whole array of global shape (16, 16, 16) is rebuilt on every device by")
    assert "f32[{y}8, 16, {x}4]" in message and "f32[16, {x}{y}2, 16]" in message and "budget" in message
    jit(move(AFTER), budget=NOTHING_FITS)(numbered(BEFORE))


def test_a_gather_that_the_user_wrote_is_not_a_rebuilding() -> None:
    everywhere = NamedSharding(GRID, P())
    compiled = jit(move(everywhere), strict=True).lower(numbered(BEFORE)).compile()
    assert "all-gather" in compiled.as_text()


def test_memory() -> None:
    f = move(AFTER)
    needs = jit(f).lower(numbered(BEFORE)).compile().memory_analysis().temp_size_in_bytes
    jit(f, max_bytes=needs)(numbered(BEFORE))
    advice = r"advise\(\) looks for the shardings to change; reshards taken: \d of \d"
    with pytest.raises(StrictError, match=f"max_bytes allows {needs - 1} B.*{advice}"):
        jit(f, max_bytes=needs - 1)(numbered(BEFORE))


def test_the_context() -> None:
    """The context applies when a program is called, also to programs compiled outside of it."""
    f, x = jit(move(AFTER), budget=NOTHING_FITS), numbered(BEFORE)
    f(x)
    with strict(), pytest.raises(StrictError, match="rebuilt"):
        f(x)
    f(x)
    with strict(max_bytes=1), pytest.raises(StrictError, match="max_bytes allows 1 B"):
        jit(move(AFTER))(x)


def test_limits_that_are_none() -> None:
    with pytest.raises(PlanError, match="max_bytes 'much'"), strict(max_bytes="much"):
        pass
    with pytest.raises(PlanError, match="max_bytes -1: give bytes a device"):
        jit(move(AFTER), max_bytes=-1)
    with pytest.raises(PlanError, match="strict 'no': give True or False"):
        jit(move(AFTER), strict="no")  # pyright: ignore[reportArgumentType]


def test_the_tighter_limit_holds() -> None:
    assert effective_limits(Limits()) == Limits(True, None)
    with strict(max_bytes=5):
        assert effective_limits(Limits()) == Limits(False, 5)
        assert effective_limits(Limits(max_bytes=3)) == Limits(False, 3)
        with strict(max_bytes=9):
            assert effective_limits(Limits()).max_bytes == 5


def test_strict_mode_takes_a_slower_program() -> None:
    """XLA's program rebuilds the array in fewer collectives than ours, which receives fewer bytes."""
    cube = mesh(2, 2, 2)
    before, after = NamedSharding(cube, P("y", "x", "z")), NamedSharding(cube, P(("z", "y", "x")))
    f = move(after)
    compiled = jit(f, strict=True).lower(numbered(before)).compile()
    assert compiled.decision.chosen == "reshard" and compiled.report.taken
    np.testing.assert_array_equal(compiled(numbered(before)), np.asarray(numbered(before)) + 1)


def test_the_text_of_a_module_is_enough() -> None:
    """For example of a dump: the compiled text, and the report of the same program."""
    lowered = lowered_twice(move(AFTER), numbered(BEFORE))
    text, report = lowered.plain.compile().as_text(), left_alone(lowered.report, "it was not")
    with pytest.raises(StrictError, match=f"{LINE}: .* is rebuilt .*; it was left to XLA: it was not"):
        check_limits(text, report, Limits(rebuild=False))
    with pytest.raises(StrictError, match="is rebuilt"):  # whatever a report says, the text counts
        check_limits(text, PassReport(), Limits(rebuild=False))
    check_limits(text, report, Limits(rebuild=True))


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("name", INNOCENT)
def test_gathers_that_are_used_as_a_whole_are_not_blamed(name: str) -> None:
    f, specs = INNOCENT[name]
    args = [jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(GRID, spec)) for shape, spec in specs]
    lowered = lowered_twice(f, *args)
    text = optimized_text(lowered.plain.compile())
    assert " all-gather" in text
    check_limits(text, left_alone(lowered.report, "nothing is taken"), Limits(rebuild=False))


@pytest.mark.fast(1)
@pytest.mark.parametrize(("shape", "before", "after"), PLANTED)
def test_planted_rebuilds_are_refused(shape: tuple[int, ...], before: P, after: P) -> None:
    """The line is the constraint's own, between others that move data, and gather as well."""
    target = NamedSharding(GRID, after)

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        h = constrained(jnp.tanh(x), before)
        h = jax.lax.with_sharding_constraint(h, target)  # this line
        return jnp.tanh(h), constrained(w, P()) @ constrained(w, P()).T

    sizes = ((shape, P()), ((16, 24), P("x", "y")))
    args = [jax.ShapeDtypeStruct(size, "float32", sharding=NamedSharding(GRID, spec)) for size, spec in sizes]
    with pytest.raises(StrictError) as caught:
        jit(f, strict=True, budget=NOTHING_FITS).lower(*args).compile()
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# this line"))
    assert str(caught.value).startswith(f"{__file__}:{line}: the whole array of global shape {shape} is rebuilt")
    if any(size % 8 for size in shape):  # XLA has padded the tiles, and no layout describes them
        with pytest.raises(StrictError, match="is rebuilt"):
            jit(f, strict=True).lower(*args).compile()
    else:
        jit(f, strict=True).lower(*args).compile()  # ours does not

"""Views, parts, casts and scales on the way to other devices, by both ways that one process has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import BudgetError, PlanError
from reshard.jax import redistribute
from reshard.jax.request import ReshardRequest, plan_across
from reshard.types.view import Atom, View, Window
from tests.jax.crossing.cases import by_messages, check_views, mesh
from tests.jax.oracle import assert_exact, filled

X = filled((12, 24))
HALVES = np.full((24, 24), 0.5, "float32")
SOURCES = [P("a", "b"), P(None, "a")]
HERE = mesh(range(4), a=2, b=2)
TARGETS = [
    NamedSharding(mesh([4, 5, 6], t=3), P("t")),
    NamedSharding(mesh([2, 3, 5, 4], u=2, v=2), P("u", "v")),
    NamedSharding(mesh([7], w=1), P()),
]
FP8 = jnp.float8_e4m3fn


def put(values: Any, spec: P) -> jax.Array:
    return jax.device_put(values, NamedSharding(HERE, spec))


@pytest.mark.parametrize("spec", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_views_and_parts_on_the_host(spec: P, target: NamedSharding) -> None:
    check_views(put(X, spec), target, put(HALVES, P("a")))


@pytest.mark.slow
@pytest.mark.fast(0, slow=2)
@pytest.mark.parametrize("spec", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_views_and_parts_by_messages(spec: P, target: NamedSharding, monkeypatch: pytest.MonkeyPatch) -> None:
    with by_messages(monkeypatch):
        check_views(put(X, spec), target, put(HALVES, P("a")))


@pytest.mark.fast(2)
@pytest.mark.parametrize("target", TARGETS[1:])
def test_casts_and_scales(way: str, target: NamedSharding) -> None:
    """Narrowed by one scale a row, widened by one a block, bit for bit as numpy has it."""
    rows = np.arange(1, 13, dtype="float32").reshape(12, 1)
    narrow = redistribute(put(X, SOURCES[0]), target, dtype=FP8, scale=rows)
    assert_exact(narrow, target, (X / rows).astype(FP8))
    blocks = np.array([[1, 2, 4], [8, 16, 32]], "float32")
    home = NamedSharding(HERE, P("a", "b"))
    wide = redistribute(narrow, home, dtype="float32", scale=blocks, donate=True)
    assert_exact(wide, home, (X / rows).astype(FP8).astype("float32") * np.repeat(np.repeat(blocks, 6, 0), 8, 1))
    assert narrow.is_deleted()


@pytest.mark.parametrize("spec", [P("u", "v"), P("u"), P()])
def test_what_a_part_does_not_fill_is_not_scaled(way: str, spec: P) -> None:
    """Where the target replicates, the narrow values are passed on before they are written into it."""
    out, target = put(np.full((24, 24), 0.1, "float32"), P()), NamedSharding(TARGETS[1].mesh, spec)
    x = jax.device_put(X.astype(jnp.bfloat16), NamedSharding(mesh([0, 1], a=2), P("a")))
    view = View((Atom("rows", 12, None, Window(6, 24)), Atom("d", 24)), ((0,), (1,)), ((0,), (1,)))
    whole = plan_across(ReshardRequest(target, x.sharding, view=view, dtype="float32"), (12, 24), "bfloat16")
    assert [step.mode.fresh for step in whole.steps] == [True, False] or spec != P("u")
    wanted = np.full((24, 24), 0.1, "float32")
    wanted[6:18] = X.astype(jnp.bfloat16).astype("float32") * 2
    moved = redistribute(x, target, into={0: slice(6, 18)}, out=out, dtype="float32", scale=2.0)
    assert_exact(moved, target, wanted)


@pytest.mark.fast(1)
def test_a_dim_across_atoms_goes_in_strided_boxes(way: str) -> None:
    """Neither side's pieces end where the other's do: an exchange through the view crosses."""
    values = filled((12, 5))
    source, target = NamedSharding(mesh(range(4), a=4), P("a")), NamedSharding(mesh([4, 5], t=2), P(None, "t"))
    x = jax.device_put(values, source)
    moved = redistribute(x, target, view="(three h) d -> three h d", three=3)
    assert_exact(moved, target, values.reshape(3, 4, 5))
    back = redistribute(moved, source, view="three h d -> (three h) d", budget=2000)
    assert_exact(back, source, values)


def test_budgets_are_kept_or_refused(way: str) -> None:
    with pytest.raises(BudgetError):
        redistribute(put(X, SOURCES[0]), TARGETS[1], view="a b -> b a", budget=300)
    moved = redistribute(put(X, SOURCES[0]), TARGETS[1], view="a b -> b a", budget=3000)
    assert_exact(moved, TARGETS[1], X.T)


def test_traced_views_to_other_devices_are_refused() -> None:
    x = put(X, SOURCES[0])
    move = jax.jit(lambda v: redistribute(v, TARGETS[1], source=x.sharding, view="a b -> b a"))
    with pytest.raises(PlanError, match="different devices"):
        move(x)

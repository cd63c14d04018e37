"""`reshard.jax.jit` in place of `jax.jit`: arguments, results, transformations, and programs that it leaves alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import NetworkError
from reshard.jax.jit import jit
from reshard.jax.redistribute import redistribute
from tests.jax.moving import AFTER, BEFORE, SIZE, kept, mesh, numbered, program

# ---- in the place of jax.jit -----------------------------------------------------------------------


def test_it_computes_the_same_with_our_collectives() -> None:
    f, x = jit(program), numbered()
    out = f(x)
    np.testing.assert_array_equal(out, np.asarray(x) * 2 + 1)
    assert kept(f) == ["reshard"] and out.sharding.is_equivalent_to(AFTER, 3)
    text = f.lower(x).compile().as_text()
    assert "all-to-all" in text and "all-gather" not in text


def test_trees_keywords_and_static_arguments() -> None:
    @partial(jit, static_argnames=("times", "name"), donate_argnums=())
    def f(tree: dict[str, Any], times: int, *, shift: Any, name: str = "a") -> tuple[jax.Array, dict[str, Any]]:
        moved = jax.lax.with_sharding_constraint(tree[name] * times, AFTER)
        return moved + shift, {"kept": tree["b"], "none": None}

    x = numbered()
    for times, name in ((2, "a"), (3, "a"), (3, "b"), (2, "a")):
        out, rest = f({"a": x, "b": x + 1}, times, shift=1.5, name=name)
        np.testing.assert_array_equal(out, (np.asarray(x) + (name == "b")) * times + 1.5)
        assert set(rest) == {"kept", "none"} and rest["none"] is None
    assert kept(f) == ["reshard"] * 3
    compiled = f.lower({"a": x, "b": x}, times=5, shift=0.0).compile()
    np.testing.assert_array_equal(compiled({"a": x, "b": x}, shift=0.5)[0], np.asarray(x) * 5 + 0.5)


def test_a_kind_of_arguments_is_compiled_once() -> None:
    traces: list[None] = []

    def counted(v: jax.Array) -> jax.Array:
        traces.append(None)
        return program(v)

    f = jit(counted)
    for _ in range(3):
        f(numbered())
    assert len(traces) == 1 and len(kept(f)) == 1
    f(numbered().astype(jnp.bfloat16))
    assert len(kept(f)) == 2


def test_python_numbers_do_not_make_programs() -> None:
    f = jit(lambda v, rate: program(v) * rate)
    for rate in (1.0, 2.0, 3.0):
        np.testing.assert_array_equal(f(numbered(), rate), (np.asarray(numbered()) * 2 + 1) * rate)
    assert len(kept(f)) == 1


def test_donation() -> None:
    f = jit(lambda v: program(v), donate_argnums=0)
    x = numbered()
    compiled = f.lower(x).compile()
    assert compiled.decision.chosen == "reshard" and compiled.memory_analysis().alias_size_in_bytes > 0
    f(x)
    assert x.is_deleted()


def test_in_and_out_shardings() -> None:
    f = jit(lambda v: jnp.cos(v) * 2, in_shardings=BEFORE, out_shardings=AFTER)
    x = np.arange(SIZE**3, dtype=np.float32).reshape(SIZE, SIZE, SIZE)
    out = f(x)
    np.testing.assert_allclose(out, np.cos(x) * 2, rtol=1e-6, atol=1e-6)
    assert out.sharding.is_equivalent_to(AFTER, 3) and kept(f) == ["reshard"]


def test_from_shapes_alone() -> None:
    f = jit(program)
    compiled = f.lower(jax.ShapeDtypeStruct((SIZE,) * 3, np.float32, sharding=BEFORE)).compile()
    np.testing.assert_array_equal(compiled(numbered()), np.asarray(numbered()) * 2 + 1)
    assert compiled.input_shardings[0][0].is_equivalent_to(BEFORE, 3)
    assert compiled.output_shardings.is_equivalent_to(AFTER, 3)
    assert compiled.cost_analysis() is not None


def test_methods_and_decorators() -> None:
    class Model:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        @partial(jit, static_argnums=0)
        def __call__(self, v: jax.Array) -> jax.Array:
            """Moves."""
            return program(v) * self.scale

    np.testing.assert_array_equal(Model(3.0)(numbered()), (np.asarray(numbered()) * 2 + 1) * 3)
    assert Model.__call__.__doc__ == "Moves." and Model.__call__.__name__ == "__call__"


def test_what_it_does_not_have_is_that_of_jax_jit() -> None:
    f = jit(program)
    assert f.eval_shape(numbered()).shape == (SIZE,) * 3
    assert f.trace(numbered()).out_info.shape == (SIZE,) * 3
    with pytest.raises(AttributeError):
        _ = f.nothing


@pytest.mark.slow
def test_under_other_transformations_it_is_jax_jit() -> None:
    f, x = jit(program), numbered()
    np.testing.assert_array_equal(jax.jit(f)(x), np.asarray(x) * 2 + 1)
    np.testing.assert_array_equal(jax.grad(lambda v: f(v).sum())(x), np.full((SIZE,) * 3, 2.0))
    np.testing.assert_array_equal(jax.vmap(jit(lambda v: v * 2))(x), np.asarray(x) * 2)
    with jax.disable_jit():
        np.testing.assert_array_equal(jit(lambda v: v * 2)(x), np.asarray(x) * 2)
    g = jit(jax.grad(lambda v: (program(v) ** 2).sum()))
    np.testing.assert_allclose(g(x), 4 * (2 * np.asarray(x) + 1))


def test_errors_of_the_function_are_its_own() -> None:
    def wrong(v: jax.Array) -> jax.Array:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jit(wrong)(numbered())


def test_one_device_and_nothing_to_do() -> None:
    assert jit(lambda v: v + 1).lower(1.0).compile().decision.why == "it runs on one device"
    f = jit(lambda v: v + 1)
    assert f.lower(numbered()).compile().decision.why == "it has no collectives"
    np.testing.assert_array_equal(f(numbered()), np.asarray(numbered()) + 1)


def test_the_current_mesh_and_types() -> None:
    """A function is traced anew in another context, as `jax.jit` does; with explicit axes, shardings are types."""
    explicit = mesh(AxisType.Explicit)
    before, after = NamedSharding(explicit, P("y", None, "x")), NamedSharding(explicit, P(None, ("x", "y")))

    def typed(v: jax.Array) -> jax.Array:
        return jax.sharding.reshard(v * 2, after) + 1

    f = jit(typed)
    with jax.set_mesh(explicit):
        out = f(numbered(before))
    np.testing.assert_array_equal(out, np.asarray(numbered()) * 2 + 1)
    assert kept(f) == ["reshard"]
    g = jit(lambda v: jax.lax.with_sharding_constraint(v * 2, P(None, ("x", "y"))) + 1)
    with jax.set_mesh(mesh()):
        np.testing.assert_array_equal(g(numbered()), np.asarray(numbered()) * 2 + 1)
    assert kept(g) == ["reshard"]


@pytest.mark.slow
def test_random_keys_and_callbacks() -> None:
    seen: list[Any] = []

    def noisy(key: jax.Array, v: jax.Array) -> jax.Array:
        jax.debug.callback(lambda total: seen.append(float(total)), v[0, 0, 0])
        return program(v) + jax.random.normal(key, v.shape)

    x, key = numbered(), jax.random.key(0)
    f = jit(noisy)
    np.testing.assert_allclose(f(key, x), jax.jit(noisy)(key, x), rtol=1e-5)
    jax.effects_barrier()
    assert seen == [0.0, 0.0] and kept(f) == ["reshard"]


def test_redistribute_inside_without_a_source() -> None:
    """XLA's partitioner finds the source, and the pass leaves the collectives of the plan as they are."""
    f = jit(lambda v: redistribute(v * 2, AFTER) + 1)
    compiled = f.lower(numbered()).compile()
    assert "all-to-all" in compiled.as_text() and "all-gather" not in compiled.as_text()
    np.testing.assert_array_equal(f(numbered()), np.asarray(numbered()) * 2 + 1)


def test_a_program_that_the_pass_cannot_do_is_compiled_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such pass")

    monkeypatch.setattr("reshard.jax.xla_pass.xla_hook.improve_module", fail)
    f = jit(program)
    np.testing.assert_array_equal(f(numbered()), np.asarray(numbered()) * 2 + 1)
    compiled = f.lower(numbered()).compile()
    assert compiled.decision.chosen == "plain" and compiled.decision.failed
    assert compiled.decision.why == "the pass cannot do it: RuntimeError: no such pass"


def test_a_network_without_a_link() -> None:
    """The hook never fails a compilation: the program is plain there, and the decision has the error."""
    f = jit(program, network=rs.Network("short", inner=(1e-6, 1e9), domain=2))
    np.testing.assert_array_equal(f(numbered()), np.asarray(numbered()) * 2 + 1)
    assert "no link for axis" in f.lower(numbered()).compile().decision.why
    with pytest.raises(NetworkError):
        jit(program, network="no-such-network")

"""`reshard.jax.jit`: its calls, its one compilation, what was decided, and compiled programs as bytes."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
import reshard.jax
from reshard import hlo
from reshard.errors import NetworkError, ProgramError, StrictError
from reshard.jax.jit import Jitted, deserialize, jit
from reshard.jax.redistribute import redistribute
from tests.jax.moving import AFTER, BEFORE, SIZE, kept, mesh, numbered, program, sharding


@functools.cache
def compiled_program() -> Any:
    """`program` with our collectives, for the tests that only look at it."""
    return jit(program).lower(numbered()).compile()


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


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the modules that jax compiles from now on; fragments are compiled in other threads."""
    from jax._src import compiler

    names: list[str] = []
    plain = compiler.compile_or_get_cached

    def count(backend: Any, module: Any, *rest: Any, **named: Any) -> Any:
        names.append(str(module.operation.attributes["sym_name"]).strip('"'))
        return plain(backend, module, *rest, **named)

    monkeypatch.setattr(compiler, "compile_or_get_cached", count)
    return names


def counted(names: list[str]) -> int:
    return sum("step" in name for name in names)


def step_of_its_own() -> Any:
    def step(v: jax.Array) -> jax.Array:
        return program(v)

    return step


def test_a_call_compiles_once(compilations: list[str]) -> None:
    f = jit(step_of_its_own())
    assert isinstance(f, Jitted)
    for _ in range(3):
        f(numbered())
    assert counted(compilations) == 1 and kept(f) == ["reshard"]


def test_a_compiled_program_is_that_of_the_next_call(compilations: list[str]) -> None:
    f = jit(step_of_its_own())
    first, second = f.lower(numbered()).compile(), f.lower(numbered()).compile()
    f(numbered())
    assert counted(compilations) == 1
    assert first.decision is second.decision and first.decision.chosen == "reshard"


@pytest.mark.slow
def test_a_program_that_was_called_first_has_its_decision_too(compilations: list[str]) -> None:
    """It is compiled once more, because jax does not hand out what the pass did before."""
    f = jit(step_of_its_own())
    f(numbered())
    decisions = [f.lower(numbered()).compile().decision for _ in range(2)]
    assert decisions[0].chosen == decisions[1].chosen == "reshard" and decisions[0].plain is not None


@pytest.mark.slow
def test_programs_with_and_without_it_do_not_mix() -> None:
    step = step_of_its_own()
    plain, ours = jax.jit(step), jit(step)
    plain(numbered())
    ours(numbered())
    assert kept(ours) == ["reshard"]
    assert "all-gather" in plain.lower(numbered()).compile().as_text()
    assert "all-gather" not in ours.lower(numbered()).compile().as_text()
    narrow = jit(step, budget=10)
    narrow(numbered())
    assert kept(narrow) == ["plain"] and "all-gather" in narrow.lower(numbered()).compile().as_text()


def test_the_pass_is_off_after_a_call_and_after_an_error() -> None:
    from reshard.jax.xla_pass import xla_hook

    f = jit(lambda v: v + 1)
    f(numbered())
    assert not xla_hook.is_on()
    with pytest.raises(TypeError):
        f(numbered(), 1)
    assert not xla_hook.is_on()
    with reshard.jax.enabled():
        f(numbered())
        assert xla_hook.is_on()


def test_strict_mode_refuses_at_the_call_and_checks_once(compilations: list[str]) -> None:
    refused = jit(step_of_its_own(), strict=True, budget=10)
    with pytest.raises(
        StrictError, match=r"moving\.py:\d+: the whole array .* is rebuilt .*; it was left to XLA: budget"
    ):
        refused(numbered())
    compilations.clear()
    f = jit(step_of_its_own(), strict=True)
    for _ in range(3):
        np.testing.assert_array_equal(f(numbered()), np.asarray(numbered()) * 2 + 1)
    assert counted(compilations) == 1
    with reshard.jax.strict(max_bytes=1), pytest.raises(StrictError, match="max_bytes allows 1 B"):
        f(numbered())


def test_it_is_a_function_like_that_of_jax_jit() -> None:
    f = jit(program)
    assert f.__name__ == "program" and f.__wrapped__ is program
    assert copy.copy(f)(numbered()).sharding.is_equivalent_to(AFTER, 3)
    shape = jax.ShapeDtypeStruct((SIZE,) * 3, np.float32, sharding=BEFORE)
    assert f.lower(shape).out_info.shape == (SIZE,) * 3


def received(compiled: Any) -> int:
    return hlo.traffic(hlo.parse(compiled.as_text())).received_bytes


def test_the_figures_are_those_of_both_programs() -> None:
    plain, ours = jax.jit(program).lower(numbered()).compile(), compiled_program()
    decision = ours.decision
    assert decision.plain is not None and decision.ours is not None
    assert decision.plain.received_bytes == received(plain) and decision.ours.received_bytes == received(ours) == 1792
    assert decision.ours.temp_bytes == ours.memory_analysis().temp_size_in_bytes and decision.plain.temp_bytes is None
    assert re.fullmatch(
        r"reshard: 1792 B received instead of 14336 B, in 1 collectives instead of 2; \d+ B of temporary memory "
        r"\(XLA's own program was not compiled\)",
        str(decision),
    )
    assert decision.to_dict()["plain"]["received_bytes"] == 14336


def test_the_report_has_a_line_for_each_place() -> None:
    def both(v: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return program(v), jnp.sin(jax.lax.with_sharding_constraint(w, sharding()))  # gathered, and used as a whole

    report = jit(both).lower(numbered(), numbered(sharding("x"))).compile().report
    (taken,), (left,) = report.taken, report.left
    assert taken.plan is not None and taken.does == "2 all_gather, 14336 B received"
    assert "moving.py" in str(taken) and str(taken).endswith("f32[16, {x}{y}2, 16]: all_to_all")
    assert left.where.split(":")[0] == __file__
    needed = "it receives no more than is needed between these layouts"
    assert str(left).endswith(f"all_gather, 12288 B received: left, {needed}")
    assert report.to_dict()["reshards"][0]["does"] and str(report).startswith("reshards taken: 1 of 2\n")


def test_why_nothing_could_be_gained() -> None:
    def why(f: Any, *args: Any, **options: Any) -> str:
        decision = jit(f, **options).lower(*args).compile().decision
        assert decision.chosen == "plain"
        return decision.why

    assert why(lambda v: v + 1, 1.0) == "it runs on one device"
    assert why(lambda v: v + 1, numbered()) == "it has no collectives"
    why_not = "it receives no more than is needed between these layouts"
    needed = f"none of its chains of collectives can be replaced: 1 of 1: {why_not}"
    assert why(lambda v: jax.lax.with_sharding_constraint(v, sharding()) + 1, numbered(sharding("x"))) == needed
    assert "1 of 1: budget 10 B is too small" in why(program, numbered(), budget=10)


def test_the_lowered_program_is_that_of_jax_jit() -> None:
    lowered = jit(program).lower(numbered())
    assert lowered.as_text() == jax.jit(program).lower(numbered()).as_text()
    assert lowered.out_info.shape == (16, 16, 16) and "stablehlo" in str(lowered.compiler_ir())
    with pytest.raises(AttributeError):
        _ = lowered.nothing


def test_options_of_the_compiler_pass_through() -> None:
    compiled = jit(program).lower(numbered()).compile({"xla_embed_ir_in_executable": True})
    assert compiled.output_shardings.is_equivalent_to(AFTER, 3)
    assert compiled.decision.chosen == "reshard"


READER = """
import sys, jax, numpy as np
from reshard.jax.jit import deserialize
compiled = deserialize(open(sys.argv[1], "rb").read())
place = compiled.input_shardings[0][0]
x = jax.device_put(np.arange(16**3, dtype="f").reshape(16, 16, 16), place)
assert np.array_equal(compiled(x), np.asarray(x) * 2 + 1)
print(compiled.decision.chosen, len(compiled.report.taken), "all-to-all" in compiled.as_text())
"""


@pytest.mark.slow
def test_a_compiled_program_is_read_back(tmp_path: Path) -> None:
    data = compiled_program().serialize()
    np.testing.assert_array_equal(deserialize(data)(numbered()), np.asarray(numbered()) * 2 + 1)
    path = tmp_path / "program"
    path.write_bytes(data)
    run = subprocess.run([sys.executable, "-c", READER, path], capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["reshard", "1", "True"], run.stderr


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [7, 6, 5, 4], [3]], ids=str)
def test_a_program_on_some_of_the_devices_is_read_back(ids: list[int]) -> None:
    """JAX by itself loads it for all devices of the process, and aborts the process."""
    mesh = jax.sharding.Mesh([jax.devices()[number] for number in ids], ("x",))
    before, after = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)) for spec in (["x"], [None, "x"])
    )
    x = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), before)
    compiled = jit(lambda x: jax.lax.with_sharding_constraint(x * 2, after) + 1).lower(x).compile()
    y = deserialize(compiled.serialize())(x)
    np.testing.assert_array_equal(y, 2 * np.asarray(x) + 1)
    assert y.sharding.is_equivalent_to(after, 2)


def test_a_program_for_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = [SimpleNamespace(id=0), SimpleNamespace(id=64)]
    monkeypatch.setattr(sys.modules["reshard.jax.jit"], "devices_of_program", lambda _: elsewhere)
    with pytest.raises(ProgramError, match=r"compiled for devices \[0, 64\].* no \[64\] among its 8.*same ids"):
        deserialize(compiled_program().serialize())


@pytest.mark.parametrize("data", [b"", b"not a program", pickle.dumps(3), 3, None], ids=str)
def test_bytes_that_are_no_program(data: Any) -> None:
    with pytest.raises(ProgramError, match="are not those of a compiled program"):
        deserialize(data)


def test_damaged_bytes_are_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA ends the process on machine code that is damaged, and a pickle can do anything."""
    data = compiled_program().serialize()
    other = data.replace(jax.__version__.encode(), b"0.11.99", 1)
    monkeypatch.setattr(pickle, "loads", None)
    for at in (0, 20, 40, 90, 200, len(data) // 2, len(data) - 1):
        with pytest.raises(ProgramError):
            deserialize(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(ProgramError):
            deserialize(data[:at])
    with pytest.raises(ProgramError, match=r"compiled by jax 0\.11\.99, and this is"):
        deserialize(other)

"""The stages of `jit`: the compiled candidates, the decision between them, and compiled programs as bytes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import reshard as rs
from reshard.errors import ProgramError
from reshard.jax import stages
from reshard.jax.stages import Compiled, deserialize
from reshard.jax.strict import Limits
from tests.jax.moving import AFTER, BEFORE, chosen, numbered, program, sharding
from tests.jax.moving import jit_without_hook as jit


def test_the_decision_has_the_figures() -> None:
    compiled = jit(program).lower(numbered()).compile()
    decision = compiled.decision
    assert decision.plain is not None and decision.ours is not None
    assert decision.ours.received_bytes == 1792 == compiled.report.taken[0].plan.received_bytes
    assert decision.plain.received_bytes > 1792 and decision.ours.launches == 1
    assert decision.ours.temp_bytes < decision.plain.temp_bytes
    assert str(decision).startswith("reshard: 1792 B received instead of ")
    assert decision.to_dict()["ours"]["received_bytes"] == 1792


def test_what_would_be_worse_is_not_kept() -> None:
    """Fewer bytes in more collectives are not kept; the report says that the move was possible, and why it was not."""
    f = jit(lambda v: jax.lax.with_sharding_constraint(v, sharding("x", "y")) + 1)
    lowered = f.lower(numbered(sharding(None, "x", "y")))
    assert len(lowered.report.taken) == 1
    compiled = lowered.compile()
    assert compiled.decision.chosen == "plain" and "collectives instead of" in compiled.decision.why
    (left,) = compiled.report.left
    assert not compiled.report.taken and compiled.decision.why in left.why
    fast = rs.Network("wire", inner=(1e-9, 1e9), domain=8)  # where starting a collective costs next to nothing
    assert chosen(jit(f.__wrapped__, network=fast), numbered(sharding(None, "x", "y"))) == "reshard"


def test_what_is_no_better_is_not_kept() -> None:
    compiled = jit(lambda v: jax.lax.with_sharding_constraint(v, sharding(None, "x")) + 1).lower(
        numbered(sharding("x"))
    )
    assert compiled.compile().decision.why == "it would receive as much, in as many collectives"


def test_a_program_that_does_not_compile_after_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    figures, calls = stages.figures, []

    def fail(compiled: Any) -> Any:
        calls.append(compiled)
        if len(calls) > 1:
            raise RuntimeError("XLA")
        return figures(compiled)

    monkeypatch.setattr(stages, "figures", fail)
    compiled = jit(program).lower(numbered()).compile()
    assert compiled.decision.failed and "does not compile" in compiled.decision.why
    np.testing.assert_array_equal(compiled(numbered()), np.asarray(numbered()) * 2 + 1)


def test_lines_that_do_not_gain_are_left() -> None:
    """A move of small tiles in many collectives, beside one that gains: only that line is taken."""

    def both(v: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = jax.lax.with_sharding_constraint(v, sharding("x", "y"))
        second = jax.lax.with_sharding_constraint(w, AFTER)
        return first + 1, second + 1

    v, w = numbered(sharding(None, "x", "y")), numbered()
    compiled = jit(both).lower(v, w).compile()
    lines = {reshard.where.rsplit(":")[-1] for reshard in compiled.report.taken}
    assert lines == {str(both.__code__.co_firstlineno + 2)}
    for out, given in zip(compiled(v, w), (v, w), strict=True):
        np.testing.assert_array_equal(out, np.asarray(given) + 1)


READER = """
import sys, jax, numpy as np
from reshard.jax.stages import deserialize
compiled = deserialize(open(sys.argv[1], "rb").read())
place = compiled.input_shardings[0][0]
x = jax.device_put(np.arange(16**3, dtype="f").reshape(16, 16, 16), place)
assert np.array_equal(compiled(x), np.asarray(x) * 2 + 1)
print(compiled.decision.chosen, len(compiled.report.taken), "all-to-all" in compiled.as_text())
"""


@pytest.mark.slow
def test_a_compiled_program_is_read_back(tmp_path: Path) -> None:
    data = jit(program).lower(numbered()).compile().serialize()
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


def test_a_program_for_devices_that_are_not_there() -> None:
    data = jit(program).lower(numbered()).compile().serialize()
    ids, *rest = pickle.loads(data)
    assert ids == list(range(8))
    with pytest.raises(ProgramError, match=r"compiled for devices \[0, 64\].* no \[64\] among its 8.*same ids"):
        deserialize(pickle.dumps(([0, 64], *rest)))


@pytest.mark.parametrize("data", [b"", b"not a pickle", pickle.dumps(3), None], ids=str)
def test_bytes_that_are_no_program(data: Any) -> None:
    with pytest.raises(ProgramError, match="are not those of a compiled program"):
        deserialize(data)


def test_the_candidates_are_the_program_before_and_after_the_pass() -> None:
    best, other = jit(program).lower(numbered()).candidates()
    assert (best.decision.chosen, other.decision.chosen) == ("reshard", "plain")
    assert "all-to-all" in best.as_text() and "all-gather" in other.as_text()
    for candidate in (best, other):
        np.testing.assert_array_equal(candidate(numbered()), np.asarray(numbered()) * 2 + 1)


def test_lines_can_be_left_to_xla() -> None:
    lowered = jit(program).lower(numbered())
    (reshard,) = lowered.report.taken
    left = lowered.retry(frozenset({reshard.where}))
    assert not left.report.taken and left.report.left[0].why == "this line would gain nothing from it"
    assert "all-gather" in left.lowered.compile().as_text()


def test_the_text_is_that_after_the_pass() -> None:
    lowered = jit(program).lower(numbered())
    assert "sdy.manual_computation" in lowered.as_text() and "sdy.manual_computation" in str(lowered.compiler_ir())
    assert "sdy.manual_computation" not in lowered.plain.as_text()


def test_the_limits_of_strict_mode() -> None:
    """Checked on a compiled program: its own memory is within them, a byte less is not."""
    compiled = jit(program).lower(numbered()).compile()
    needs = int(compiled.memory_analysis().temp_size_in_bytes)
    compiled.check(Limits())
    compiled.check(Limits(rebuild=False, max_bytes=needs))
    with pytest.raises(rs.errors.StrictError, match=f"needs {needs} B"):
        compiled.check(Limits(max_bytes=needs - 1))


def test_shardings_and_analyses_are_those_of_the_executable() -> None:
    compiled = jit(program).lower(numbered()).compile()
    assert isinstance(compiled, Compiled)
    assert compiled.input_shardings[0][0].is_equivalent_to(BEFORE, 3)
    assert compiled.output_shardings.is_equivalent_to(AFTER, 3)
    assert compiled.cost_analysis() == compiled.executable.cost_analysis()


def test_results_that_would_be_sharded_otherwise_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_same_shardings", lambda plain, ours: False)
    compiled = jit(program).lower(numbered()).compile()
    assert str(compiled.decision) == "plain: its results would be sharded in another way"

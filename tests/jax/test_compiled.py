"""Compiled programs: their limits, their figures, and their bytes, which are read back."""

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
from reshard.jax.compiled import Compiled, deserialize
from reshard.jax.jit import jit
from reshard.jax.strict import Limits
from tests.jax.moving import AFTER, BEFORE, numbered, program

READER = """
import sys, jax, numpy as np
from reshard.jax.compiled import deserialize
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

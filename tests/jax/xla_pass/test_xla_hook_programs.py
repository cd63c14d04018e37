"""Random programs of `benchmarks/programs.py`: equal bits, never more bytes, never a higher peak as compiled."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.real_programs.random_programs import measure_programs

PROGRAMS = Path(__file__).resolve().parents[3] / "benchmarks" / "programs.py"


@pytest.mark.slow
def test_a_few_random_programs():
    """The last one has other bits without `same_bits`, where products and sums are contracted."""
    rows = list(measure_programs([4, 8, 51], 0, 1, 0))
    assert not any(row["violations"] for row in rows) and all(row["replaced"] for row in rows), rows


@pytest.mark.slow
def test_a_sum_between_processes():
    """Both have sums that a reduce-scatter would add up in another order."""
    command = [sys.executable, str(PROGRAMS), "--random", "2", "--first", "5", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "0 violate" in done.stdout, done.stdout + done.stderr


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(300))
def test_many_random_programs(seed):
    (row,) = measure_programs([seed], 0, 1, 0)
    assert not row["violations"], row

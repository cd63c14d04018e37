"""The faults of `tests/faults` can be planted: what each replaces stands once in the code as it is now.

Whether the tests find them is measured by `python tests/plant_faults.py`, which runs them once for each fault.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from tests.plant_faults import Fault, read_faults, replace_text
from tests.sampling import for_each

ROOT = Path(__file__).resolve().parent.parent
FAULTS = list(read_faults())
read = cache(Path.read_text)


def test_every_fault_has_a_name_of_its_own():
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


@for_each(FAULTS)
def test_a_fault_can_be_planted(fault: Fault):
    planted = replace_text(fault, read(ROOT / fault.file))
    if fault.file.endswith(".py"):
        ast.parse(planted)
    assert fault.tests.split()
    for path, _, name in (path.partition("::") for path in fault.tests.split()):
        assert (ROOT / path).exists()
        assert not name or f"def {name.partition('[')[0]}(" in read(ROOT / path)


def test_each_case_that_a_fault_names_exists():
    """Otherwise pytest runs none, and whether the fault is found is not known."""
    named = {path for fault in FAULTS for path in fault.tests.split() if "[" in path}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *sorted(named)]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert named and collected.returncode == 0, collected.stderr

"""The faults of `tests/faults` can be planted: what each replaces stands once in the code as it is now.

Whether the tests find them is measured by `python tests/plant_faults.py`, which runs them once for each fault.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.plant_faults import Fault, plant, read_faults

ROOT = Path(__file__).resolve().parent.parent
FAULTS = list(read_faults())


def test_every_fault_has_a_name_of_its_own():
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_can_be_planted(tmp_path: Path, fault: Fault):
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / fault.file).read_text(encoding="utf-8"), encoding="utf-8")
    plant(fault, tmp_path)
    if copy.suffix == ".py":
        ast.parse(copy.read_text(encoding="utf-8"))
    assert fault.tests.split()
    assert all((ROOT / path.partition("::")[0]).exists() for path in fault.tests.split())

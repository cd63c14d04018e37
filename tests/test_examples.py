"""The examples run as they are printed, and what they post is right."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

import reshard as rs
from examples import nixl_reads
from tests.layouts import random_crossing

FOLDER = Path(__file__).resolve().parent.parent / "examples"


def run_example(name: str) -> str:
    done = subprocess.run(
        [sys.executable, FOLDER / name], cwd=FOLDER.parent, capture_output=True, text=True, timeout=240, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_carries_a_plan_on_four_processes() -> None:
    assert sorted(run_example("torch_gloo.py").splitlines()) == [
        f"rank {rank} has its 16 rows of qkv" for rank in (2, 3)
    ]


def test_reads_are_those_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    nixl_reads.main()
    assert "read 6 B at 0x1006 of device 0 into 0x4000" in capsys.readouterr().out
    proved = 0
    for seed in range(40):
        source, target = random_crossing(random.Random(seed))
        plan = rs.plan(source, target)
        if (
            source.partial
            or not set(source.mesh.devices).isdisjoint(target.mesh.devices)
            or len(plan.schedule_for(source.mesh.devices[0])) > 1
        ):
            continue
        size = source.nbytes(1)
        bases = {device: 1 << 20 for device in (*source.mesh.devices, *target.mesh.devices)}
        reads = [
            (peer, device, (there - bases[peer]) // size, (here - bases[device]) // size, length // size)
            for device in target.mesh.devices
            for peer, there, here, length in nixl_reads.list_reads(plan, device, bases)
        ]
        assert rs.verify(reads, source, target).transfers == len(reads)
        proved += 1
    assert proved > 5

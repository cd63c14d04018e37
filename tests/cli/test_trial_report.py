"""The limits of a simulation, the promises of a plan, and the verdict."""

import pytest

import reshard as rs
from reshard.cli import trial_report
from reshard.cli.trial import Fault, Trial
from reshard.cli.trial_report import check_size, promises, show_promises, show_verdict
from reshard.errors import ReshardError
from reshard.runtime import Account, simulate
from reshard.types import Layout, Mesh
from tests.draw.cases import CASES, planned
from tests.show.printing import printed


def measured(plan):
    account = Account(plan.source.dtype)
    simulate(plan, Trial(plan.source, plan.target, 0).source_tiles(), account)
    return account


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("64 devices", "empty")])
def test_the_reference_runtime_keeps_every_promise(name):
    plan = planned(name)
    rows = promises(plan, measured(plan))
    assert [row.kept for row in rows] == [True] * 3
    assert [row.promised for row in rows] == [plan.received_bytes, plan.launches, plan.peak_bytes]


def test_more_bytes_than_planned_break_a_promise():
    plan = planned("two dims")
    account = measured(plan)
    account.receive(0, 1 + max(account.elements.values()))
    received, launches, peak = promises(plan, account)
    assert not received.kept and launches.kept and peak.kept
    lines = printed(show_promises, [received, launches, peak]).splitlines()
    assert [line.split()[-1] for line in lines if "  " in line.strip()][-3:] == ["BROKEN", "kept", "kept"]


def test_the_limits_are_exact(monkeypatch):
    plan = planned("two dims")
    needed = trial_report._needed_bytes(plan)
    assert needed == 8 * plan.peak_bytes + 16 * 16 * 4
    for name, limit, message in [
        ("MOST_BYTES", needed, "give a shape with 2 times fewer elements"),
        ("MOST_DEVICES", 8, "8 devices on mesh <x=4, y=2> are too many"),
        ("MOST_ROUNDS", plan.launches, "launches are too many to simulate"),
    ]:
        with monkeypatch.context() as changed:
            changed.setattr(trial_report, name, limit)
            check_size(plan)
            changed.setattr(trial_report, name, limit - 1)
            with pytest.raises(ReshardError, match=message):
                check_size(plan)


def test_numpy_needs_a_byte_for_each_int4():
    mesh = Mesh(x=3)
    small, byte = (Layout.parse(f"{dtype}[{{x}}6]", mesh) for dtype in ("s4", "s8"))
    needed = [trial_report._needed_bytes(rs.plan(source, source)) for source in (small, byte)]
    assert needed[0] == needed[1]


def test_the_verdict_counts_devices_and_elements():
    plan = planned("partial")
    assert "right: each of the 8 devices holds what the target says, within rounding" in printed(
        show_verdict, plan, [], True
    )
    assert "rounding" not in printed(show_verdict, planned("one dim"), [], True)
    faults = [Fault(device, 3, (0,), "1", "2") for device in range(10)]
    lines = printed(show_verdict, plan, faults, True).splitlines()
    assert lines[0] == "WRONG: 30 elements on 10 of 8 devices"
    assert lines[1:] == [f"  device {device}: 3 wrong, first at global (0,): 1, not 2" for device in range(8)]

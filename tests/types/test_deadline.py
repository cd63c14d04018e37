"""The deadline of planning: an error once it has passed, the same plan before, and no trace of it afterwards."""

from __future__ import annotations

import threading
import time

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.synth.routes import normal
from reshard.types.whole import check_deadline, planning_until


def ends(size: int) -> tuple[rs.Layout, rs.Layout]:
    mesh = rs.Mesh(x=4, y=2)
    return tuple(rs.Layout.parse(f"f32[{text}]", mesh) for text in (f"{{x}}{size}, 8", f"{4 * size}, {{y}}4"))


def test_a_plan_ends_at_its_deadline_and_is_made_the_next_time():
    source, target = ends(101)
    with pytest.raises(PlanError, match="planning took longer"), planning_until(time.monotonic() - 1):
        rs.plan(source, target)
    assert rs.plan(source, target).received_bytes > 0
    with planning_until(time.monotonic() - 1):
        rs.plan(source, target)  # A plan that is ready takes no time.


def test_routes_that_never_end(monkeypatch: pytest.MonkeyPatch):
    def endless(pair: object, links: object):
        while True:
            time.sleep(0.001)
            yield ()

    monkeypatch.setattr(normal, "routes", endless)
    start = time.monotonic()
    with pytest.raises(PlanError, match="planning took longer"), planning_until(start + 0.05):
        rs.plan(*ends(103))
    assert time.monotonic() - start < 5


def test_the_earlier_deadline_holds_in_its_own_context_and_thread_only():
    late: list[bool] = []

    def passed() -> bool:
        try:
            check_deadline()
        except PlanError:
            return True
        return False

    with planning_until(time.monotonic() - 1), planning_until(time.monotonic() + 60):
        assert passed()
        other = threading.Thread(target=lambda: late.append(passed()))
        other.start()
        other.join()
    assert late == [False]
    assert not passed()

"""Memory of trees: kinds of devices, and the fold over batches."""

from __future__ import annotations

import reshard as rs
from reshard.plans.memory import DeviceKinds, Footprint, find_peaks
from reshard.plans.plan import Batch

MESH = rs.Mesh(x=4)


def test_one_set_of_devices_is_one_kind():
    kinds = DeviceKinds([MESH, rs.Mesh(a=2, b=2), rs.Mesh({"x": 4}, device_ids=[3, 2, 1, 0])])
    assert kinds.count == 1
    assert kinds.of(MESH) == (1,)


def test_devices_count_what_they_hold_themselves():
    other = rs.Mesh({"x": 4}, device_ids=[4, 5, 6, 7])
    plans = [rs.plan(rs.Layout.parse("f32[{x}4]", m), rs.Layout.parse("f32[16]", m)) for m in (MESH, other)]
    kinds = DeviceKinds([MESH, other])
    first, second = (Batch((str(n),), (plan,)).footprint(kinds) for n, plan in enumerate(plans))
    assert (first.before, second.before) == ((16, 0), (0, 16))
    assert max(find_peaks([first, second])) == plans[0].peak_bytes


def test_the_last_batch_sees_all_targets():
    steps = [Footprint((1,), (12,), (3,)), Footprint((2,), (9,), (8,))]
    assert find_peaks(steps) == (14,)
    assert find_peaks(steps[::-1]) == (20,)
    assert find_peaks(steps, (100,)) == (114,)


def test_what_stays_where_it_is_counts_once():
    same = rs.Layout.parse("f32[{x}4]", MESH)
    kinds = DeviceKinds([MESH])
    assert Batch(("a",), (rs.plan(same, same),)).footprint(kinds) == Footprint((16,), (16,), (16,))

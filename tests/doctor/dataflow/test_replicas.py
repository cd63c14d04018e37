import numpy as np
import pytest

from reshard import hlo
from reshard.doctor.dataflow.flow import HloValue
from reshard.doctor.dataflow.replicas import Replicas, sharding_classes
from reshard.doctor.equivalence import Traced

TEXT = """HloModule m, num_partitions=4

%body (q: f32[2]) -> f32[2] {
  %q = f32[2]{0} parameter(0)
  ROOT %n = f32[2]{0} negate(%q)
}

ENTRY %main {
  %p = f32[2]{0} parameter(0)
  %s = f32[2]{0} parameter(1)
  %i = u32[] partition-id()
  %two = u32[] constant(2)
  %parity = u32[] remainder(%i, %two)
  %half = u32[] divide(%i, %two)
  %c = f32[2]{0} constant({1, 2})
  %all = f32[8]{0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  %pairs = f32[4]{0} all-gather(%p), channel_id=2, replica_groups={{0,1},{2,3}}, dimensions={0}
  %sum = f32[2]{0} all-reduce(%p), channel_id=3, replica_groups={{0,2},{1,3}}, to_apply=%body
  %cut = f32[2]{0} dynamic-slice(%all, %half), dynamic_slice_sizes={2}
  %own = f32[2]{0} dynamic-slice(%all, %i), dynamic_slice_sizes={2}
  %f = f32[2]{0} fusion(%cut), kind=kLoop, calls=%body
  %both = f32[2]{0} add(%f, %sum)
  %moved = f32[2]{0} collective-permute(%cut), channel_id=4, source_target_pairs={{0,3},{1,2},{2,1}}
  %unknown = f32[2]{0} custom-call(%c), custom_call_target="anything"
  %swapped = f32[4]{0} all-to-all(%pairs), channel_id=5, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %r = (f32[2], f32[2], f32[2], f32[2]) tuple(%both, %moved, %unknown, %s)
}
"""


def same(name, shardings=(), text=TEXT, region="main"):
    """The devices in groups of equal ones."""
    traced = Traced(hlo.parse(text), 4)
    numbers = Replicas(traced.maps, lambda: shardings).of(HloValue(traced.region(region), name)).tolist()
    return sorted([[at for at, one in enumerate(numbers) if one == number] for number in set(numbers)])


APART = [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("c", [[0, 1, 2, 3]]),
        ("i", APART),
        ("parity", [[0, 2], [1, 3]]),
        ("half", [[0, 1], [2, 3]]),
        ("p", APART),
        ("all", [[0, 1, 2, 3]]),
        ("pairs", [[0, 1], [2, 3]]),
        ("sum", [[0, 2], [1, 3]]),
        ("cut", [[0, 1], [2, 3]]),
        ("own", APART),
        ("f", [[0, 1], [2, 3]]),
        ("both", APART),
        ("moved", [[0], [1], [2, 3]]),  # 3 and 2 get what 0 and 1 have; 1 what 2 has, 0 nothing
        ("unknown", APART),
        ("swapped", APART),
    ],
)
def test_devices_that_are_equal(name, groups):
    assert same(name) == groups


def test_parameters_by_their_shardings():
    shardings = ("{devices=[2,2]<=[4] last_tile_dim_replicate}", "{replicated}")
    assert same("p", shardings) == [[0, 1], [2, 3]]
    assert same("s", shardings) == [[0, 1, 2, 3]]
    assert same("pairs", shardings) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("sharding", "rank", "expected"),
    [
        ("{replicated}", 2, [0] * 8),
        ("{mesh[], replicated}", 2, [0] * 8),
        ("{mesh['y'=2,'x'=4], [{'y'}, {}]}", 2, [0, 0, 0, 0, 1, 1, 1, 1]),
        ("{mesh['y'=2,'x'=4], [{}, {'x'}]}", 2, [0, 1, 2, 3, 0, 1, 2, 3]),
        ("{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}", 2, [0, 1, 2, 3, 0, 1, 2, 3]),
        ("{maximal device=3}", 2, list(range(8))),
        ("nonsense", 1, list(range(8))),
    ],
)
def test_classes_of_a_sharding(sharding, rank, expected):
    assert sharding_classes(sharding, rank, 8).tolist() == expected


def test_a_long_module_is_no_deep_recursion():
    lines = ["  %v0 = f32[2]{0} parameter(0)"]
    lines += [f"  %v{at} = f32[2]{{0}} negate(%v{at - 1})" for at in range(1, 3000)]
    lines.append("  ROOT %r = f32[2]{0} negate(%v2999)")
    text = "HloModule m, num_partitions=4\n\nENTRY %main {\n" + "\n".join(lines) + "\n}\n"
    traced = Traced(hlo.parse(text), 4)
    value = HloValue(traced.flow.regions[0], "r")
    assert np.unique(Replicas(traced.maps, lambda: ("{replicated}",)).of(value)).size == 1


LOOP = """HloModule m, num_partitions=4

%body (b: (s32[], f32[2], f32[2], f32[2])) -> (s32[], f32[2], f32[2], f32[2]) {
  %b = (s32[], f32[2]{0}, f32[2]{0}, f32[2]{0}) parameter(0)
  %n = s32[] get-tuple-element(%b), index=0
  %u = f32[2]{0} get-tuple-element(%b), index=1
  %v = f32[2]{0} get-tuple-element(%b), index=2
  %w = f32[2]{0} get-tuple-element(%b), index=3
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  %inside = f32[2]{0} negate(%u)
  %taken = f32[2]{0} add(%v, %w)
  ROOT %t = (s32[], f32[2]{0}, f32[2]{0}, f32[2]{0}) tuple(%next, %inside, %taken, %w)
}

%going (c: (s32[], f32[2], f32[2], f32[2])) -> pred[] {
  %c = (s32[], f32[2]{0}, f32[2]{0}, f32[2]{0}) parameter(0)
  %m = s32[] get-tuple-element(%c), index=0
  %last = s32[] constant(3)
  ROOT %lt = pred[] compare(%m, %last), direction=LT
}

%kept (k: f32[2]) -> f32[2] {
  %k = f32[2]{0} parameter(0)
  ROOT %kc = f32[2]{0} copy(%k)
}

%turned (l: f32[2]) -> f32[2] {
  %l = f32[2]{0} parameter(0)
  ROOT %ln = f32[2]{0} negate(%l)
}

ENTRY %main {
  %p = f32[2]{0} parameter(0)
  %q = f32[2]{0} parameter(1)
  %i = s32[] partition-id()
  %two = s32[] constant(2)
  %zero = s32[] constant(0)
  %half = s32[] divide(%i, %two)
  %first = s32[] START
  %init = (s32[], f32[2]{0}, f32[2]{0}, f32[2]{0}) tuple(%first, %p, %p, %q)
  %loop = (s32[], f32[2]{0}, f32[2]{0}, f32[2]{0}) while(%init), condition=%going, body=%body
  %x = f32[2]{0} get-tuple-element(%loop), index=1
  %y = f32[2]{0} get-tuple-element(%loop), index=2
  %z = f32[2]{0} get-tuple-element(%loop), index=3
  %choice = f32[2]{0} conditional(%half, %p, %p), branch_computations={%kept, %turned}
  ROOT %r = (f32[2], f32[2], f32[2], f32[2]) tuple(%x, %y, %z, %choice)
}
"""
WHOLE, PARITY, HALVES = [[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]
BY_PARITY = "{devices=[2,2]<=[2,2]T(1,0) last_tile_dim_replicate}"


@pytest.mark.parametrize(
    ("name", "start", "groups"),
    [
        ("x", "copy(%zero)", WHOLE),
        ("y", "copy(%zero)", PARITY),  # From the second turn on it has a summand of each parity.
        ("z", "copy(%zero)", PARITY),
        ("x", "copy(%half)", HALVES),  # The halves make other numbers of turns.
        ("y", "copy(%half)", APART),
        ("choice", "copy(%zero)", HALVES),
    ],
)
def test_what_loops_and_branches_yield(name, start, groups):
    assert same(name, ("{replicated}", BY_PARITY), LOOP.replace("START", start)) == groups


@pytest.mark.parametrize(
    ("region", "name", "groups"), [("body", "u", WHOLE), ("body", "v", PARITY), ("turned", "l", WHOLE)]
)
def test_what_enters_loops_and_branches(region, name, groups):
    assert same(name, ("{replicated}", BY_PARITY), LOOP.replace("START", "copy(%zero)"), region) == groups


def test_a_loop_whose_classes_are_not_found_is_different_everywhere(monkeypatch):
    monkeypatch.setattr("reshard.doctor.dataflow.replicas._TURNS", 1)
    assert same("y", ("{replicated}", BY_PARITY), LOOP.replace("START", "copy(%zero)")) == APART

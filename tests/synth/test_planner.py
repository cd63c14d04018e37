"""Plans without a network: each runs, is at the bound or within the slack, and has no tile above the larger end."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import reshard as rs
from benchmarks.against_shardy import MESHES, RANKS, Data, compared, explained, failures, named, scaled, summed
from reshard.errors import PlanError
from reshard.plans.plan import StepSpec, chain
from reshard.synth import plan
from reshard.synth.network import PRESETS
from reshard.synth.options import PlanOptions
from reshard.synth.planner import message_count, short_plans
from reshard.types import Layout, Mesh
from tests import oracle
from tests.layouts import contiguous_layouts, divisible_shape, random_crossing, random_pair, sample_pairs
from tests.oracle import check
from tests.sampling import few_or_all

MOST = 1500
PARTS = 4
SMALL = (Mesh(x=2, y=2), Mesh(x=2, y=3), Mesh(x=2, y=4), Mesh(x=2, y=2, z=2), Mesh(x=3, y=5))


def hold(source: Layout, target: Layout) -> rs.Plan:
    """Plans and runs one pair, and asserts what every plan without a network keeps."""
    plan = rs.plan(source, target, slack=0)
    check(plan)
    largest = max(source.tile_bytes, target.tile_bytes)
    for step in plan.steps:
        assert step.result.tile_bytes <= largest, f"a tile of {step.result.tile_bytes} B on the way: {plan}"
    assert plan.received_bytes == plan.lower_bound_bytes, str(plan)
    return plan


def contiguous_pairs(mesh: Mesh) -> list[tuple[Layout, Layout]]:
    """All pairs of ranks 1 to 3 if they are at most `MOST`, else a sample with the low ranks whole."""
    sample: list[tuple[Layout, Layout]] = []
    for rank in (1, 2, 3):
        sample += sample_pairs(mesh, rank, (MOST - len(sample)) // (4 - rank), seed=rank)
    return sample


@pytest.mark.fast(2)
@pytest.mark.parametrize("part", [pytest.param(n, marks=pytest.mark.slow) if n else n for n in range(PARTS)])
@pytest.mark.parametrize("mesh", SMALL, ids=str)
def test_contiguous_pairs_meet_the_bound(mesh: Mesh, part: int):
    sample = contiguous_pairs(mesh)[part::PARTS]
    assert sample
    for source, target in sample:
        hold(source, target)


def test_meshes_that_do_not_nest_meet_the_bound():
    """The sub-axes that two layouts use may nest all the same: then they are written on a mesh of those."""
    before, after, others = Mesh(a=4, b=3), Mesh(c=3, d=4), 0
    ends = itertools.product(("a", "a:(1)2", "a:(2)2", "b"), ("c", "d", "d:(1)2", "d:(2)2"), range(2), range(2))
    for old, new, at, to in ends:
        source = Layout.from_spec(before, (12, 24), "int32", [[old] if dim == at else [] for dim in range(2)])
        target = Layout.from_spec(after, (12, 24), "int32", [[new] if dim == to else [] for dim in range(2)])
        others += hold(source, target).source.mesh not in (before, after)
    assert others == 4  # a:(1)2 is positions 6 to 12, d:(2)2 is 1 to 2


@pytest.mark.parametrize("mesh", SMALL, ids=str)
def test_a_layout_is_moved_to_itself_by_nothing(mesh: Mesh):
    for layout in contiguous_layouts(mesh, divisible_shape(mesh, 2)):
        plan = hold(layout, layout)
        assert (plan.steps, plan.received_bytes, plan.peak_bytes) == ((), 0, layout.tile_bytes)


UNEVEN = (0, 1, 2, 3, 5, 7, 10, 11, 13)


@pytest.mark.fast(2, slow=2)
@pytest.mark.parametrize(
    ("mesh", "sizes", "ranks", "count"),
    [
        *((mesh, UNEVEN, (1, 2), 60) for mesh in SMALL[:3]),
        *(pytest.param(mesh, UNEVEN, (1, 2), 400, marks=pytest.mark.slow) for mesh in SMALL),
        (Mesh(x=8, y=10), (80,), (1, 1), 40),
        (Mesh(x=4, y=6, z=2), (8, 12, 24), (3, 3), 40),
        pytest.param(Mesh(x=8, y=10), (80,), (2, 2), 80, marks=pytest.mark.slow),
        pytest.param(Mesh(x=16, y=16, z=2), (32,), (2, 2), 30, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_uneven_pairs_and_those_of_larger_meshes_meet_the_bound(
    mesh: Mesh, sizes: tuple[int, ...], ranks: tuple[int, int], count: int
):
    choose = random.Random(11)
    while count > 0:
        every = list(contiguous_layouts(mesh, tuple(choose.choice(sizes) for _ in range(choose.randint(*ranks)))))
        for _ in range(min(count, 10)):
            hold(choose.choice(every), choose.choice(every))
        count -= 10


@pytest.mark.parametrize("count", few_or_all(250, 2500))
def test_random_digit_layouts_meet_the_bound(count: int):
    choose = random.Random(0)
    for _ in range(count):
        hold(*random_pair(choose))


@pytest.mark.parametrize(
    ("source", "target", "mesh", "kinds"),
    [
        ("f32[{x}8]", "f32[{x}{y}4]", Mesh(x=4, y=2), ["slice"]),
        ("f32[{x}{y}4]", "f32[{x}8]", Mesh(x=4, y=2), ["all_gather"]),
        ("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]", Mesh(x=4, y=2), ["all_to_all"]),
        ("f32[{x}{y}4]", "f32[{y}{x}4]", Mesh(x=4, y=2), ["permute"]),
        ("f32[{x}4, {z}4, 8, 8]", "f32[8, 8, {z}4, {y}4]", Mesh(x=2, y=2, z=2), ["slice", "all_to_all", "all_gather"]),
        ("f32[3{x}2, 4]", "f32[{x}6, 4]", Mesh(x=2), ["exchange"]),
        ("f32[{x}3/10]", "f32[{x}{y}2/10]", Mesh(x=4, y=2), ["exchange"]),
        ("f32[6{x:(1)2}3]", "f32[{x:(2)3}12]", Mesh(x=6), ["exchange"]),
    ],
)
def test_routes_of_known_pairs(source: str, target: str, mesh: Mesh, kinds: list[str]):
    plan = hold(Layout.parse(source, mesh), Layout.parse(target, mesh))
    assert [s.kind for s in plan.steps] == kinds


def test_a_collective_wins_a_tie_in_bytes_launches_and_the_memory_of_messages():
    """XLA stages the messages of an exchange, so that what the exchange seems to save is not saved there."""
    mesh = rs.Mesh(x=4, y=2)
    plan = rs.plan(rs.Layout.parse("f32[{y}{x}8, 64]", mesh), rs.Layout.parse("f32[{x}16, 64]", mesh))
    assert [step.kind for step in plan.steps] == ["permute", "all_gather"]
    assert (plan.received_bytes, plan.launches) == (plan.lower_bound_bytes, 2)


# ---- slack ---------------------------------------------------------------------------------------

EIGHTS = Mesh(x=8, y=8, z=8)


def relaxed(source: Layout, target: Layout, slack: float = 0.05) -> tuple[rs.Plan, rs.Plan]:
    """The plans with some slack and with none, after a check of what they promise each other."""
    plan, exact = rs.plan(source, target, slack=slack), rs.plan(source, target, slack=0)
    assert exact.received_bytes == plan.lower_bound_bytes
    assert plan.received_bytes <= exact.received_bytes * (1 + slack)
    assert plan.launches <= exact.launches
    assert all(step.result.tile_bytes <= max(source.tile_bytes, target.tile_bytes) for step in plan.steps)
    return plan, exact


def test_a_little_padding_saves_hundreds_of_launches():
    plan, exact = relaxed(
        Layout.parse("f32[{y}{z}{x}2/1021, 513]", EIGHTS), Layout.parse("f32[1021, 513]", EIGHTS), slack=0.05
    )
    assert [step.kind for step in plan.steps] == ["all_gather"]
    assert exact.launches > 100
    assert plan == rs.plan(plan.source, plan.target)


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", [*SMALL, Mesh(x=12, y=2)], ids=str)
def test_slack_takes_launches_and_gives_at_most_its_bytes(mesh: Mesh):
    choose = random.Random(23)
    for _ in range(60):
        shape = tuple(choose.choice((5, 31, 61, 97)) for _ in range(choose.randint(1, 2)))
        every = list(contiguous_layouts(mesh, shape))
        plan, _ = relaxed(choose.choice(every), choose.choice(every), choose.choice((0.01, 0.05, 0.3)))
        check(plan)


@pytest.mark.slow
def test_gathers_stop_before_the_padding_is_worth_an_exchange():
    """A gather of all 144 pieces receives 12% of padding; a gather of 48 of them leaves 2 rounds for the others."""
    mesh = Mesh(x=12, y=12)
    plan, exact = relaxed(Layout.parse("f32[{x}{y}8/1021]", mesh), Layout.parse("f32[1021]", mesh))
    check(plan)
    assert [step.kind for step in plan.steps] == ["all_gather", "exchange"]
    assert (plan.launches, exact.launches) == (3, 36)


def test_more_slack_never_takes_more_launches():
    mesh = Mesh(x=8, y=8)
    source, target = Layout.parse("f32[{y}63/500, {x}128/1021]", mesh), Layout.parse("f32[500, {y}128/1021]", mesh)
    launches = [rs.plan(source, target, slack=slack).launches for slack in (0, 1e-3, 0.01, 0.05, 1, 1e300)]
    assert launches == sorted(launches, reverse=True)


def test_slack_between_two_sets_of_devices_is_counted_once():
    """Where a gather is within the slack of the bound, no relay is tried, and the slack counts from the bound."""
    for seed in range(770, 800):
        ends = random_crossing(random.Random(f"cross{seed}"))
        exact, loose = (rs.plan(*ends, slack=slack) for slack in (0, 0.3))
        busiest = [max(plan.sent_bytes, plan.received_bytes) for plan in (exact, loose)]
        assert not exact.crosses or busiest[1] <= 1.3 * busiest[0], str(loose)


def test_slack_leaves_even_layouts_and_networks_alone():
    mesh = Mesh(x=4, y=2)
    even = Layout.parse("f32[{x}3, {y}2]", mesh), Layout.parse("f32[{y}6, {x}]", mesh)
    uneven = Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[{y}5]", mesh)
    assert rs.plan(*even, slack=9) is rs.plan(*even, slack=0)
    assert rs.plan(*uneven, network="h100", slack=9) is rs.plan(*uneven, network="h100", slack=0)


@pytest.mark.parametrize(
    "slack", [-0.1, True, None, "0.05", float("nan"), float("inf"), 10**400, 1j, [0]], ids=lambda slack: str(slack)[:8]
)
def test_refused_slack(slack: object):
    layout = Layout.parse("f32[{x}3/10]", Mesh(x=4))
    with pytest.raises(PlanError, match=r"slack .*: give the share of bytes .* finite number of at least 0"):
        rs.plan(layout, layout, slack=slack)  # type: ignore[arg-type]


@pytest.mark.parametrize("slack", [0, 0.0, 1, Fraction(1, 20), np.float32(0.05)])
def test_slack_is_any_real_number(slack: float):
    layout = Layout.parse("f32[{x}3/10]", Mesh(x=4))
    assert rs.plan(layout, layout, slack=slack).steps == ()


# ---- ties ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"),
    [("f32[{y}6, {x}4]", "f32[24, 24]"), ("f32[24, {x}{y}]", "f32[{x}4, 24]"), ("f32[{y}{x}, 24]", "f32[24, {y}{x}]")],
)
def test_seconds_that_differ_in_the_last_digit_are_equal(source: str, target: str):
    """Staged and fused, the gather of equal links takes as long; summed, the staged one is faster by 1 in 10^16."""
    mesh = Mesh(x=6, y=4)
    plan = rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), network="tpu-v5p")
    assert plan.launches == 1


# ---- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        ("f32[{x}4]", "f32[8]", {}, r"source f32\[\{x\}4\] has global shape \(16,\), target f32\[8\] has \(8,\)"),
        ("f32[{x}4]", "f64[16]", {}, "is float32, target .* is float64; .* cast before or after it"),
        ("f32[{x}4]", None, {}, "the target None is a NoneType, not a Layout; write plan"),
        (
            "f32[{x}4]",
            "f32[16]",
            {"network": 3},
            "network 3 is not a Network; give one, such as",
        ),
    ],
)
def test_refused_requests(source: str, target: str | None, options: dict[str, object], message: str):
    mesh = Mesh(x=4, y=2)
    ends = [None if text is None else Layout.parse(text, mesh) for text in (source, target)]
    with pytest.raises(PlanError, match=message):
        rs.plan(*ends, **options)  # type: ignore[arg-type]


# ---- Plans whose permutes and exchanges list few messages ----

NETWORK = PRESETS["tpu-v5p"]
WITHIN = PlanOptions(network=NETWORK)
LARGE = Mesh(x=8, y=8, z=16)
MOVES = [
    ("bf16[{z}{y}32, {x}512, 4096]", "bf16[{x}512, {z}{y}32, 4096]"),
    ("bf16[4096, 4096, {z}{x}{y}4]", "bf16[4096, {z}256, {x}{y}64]"),
    ("bf16[{z}{y}{x}4, 4096, 4096]", "bf16[{x}{z}32, {y}512, 4096]"),
    ("bf16[{y}512, {x}512, {z}256]", "bf16[4096, 4096, {y}{z}{x}4]"),
]


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_many_rounds_on_many_devices_have_a_plan_of_few_messages(source: str, target: str):
    """In at most 1.6 times the time, in tiles no larger than those at the ends."""
    before, after = (Layout.parse(text, LARGE) for text in (source, target))
    fast, plans = plan(before, after, network=NETWORK), short_plans(before, after, 4096, WITHIN)
    assert message_count(fast) > 4096 and fast.seconds is not None
    assert min(short.seconds or 0 for short in plans) <= 1.6 * fast.seconds
    most = max(before.tile_bytes, after.tile_bytes)
    for short in plans:
        assert message_count(short) <= 4096
        assert all(step.result.tile_bytes <= most for step in short.steps)


def test_limits_are_kept():
    before, after = (Layout.parse(text, Mesh(x=4, y=4)) for text in ("f32[{x}4, {y}4]", "f32[{y}4, {x}4]"))
    whole = short_plans(before, after, 16, WITHIN)
    assert {message_count(each) for each in whole} >= {16}
    least = min(each.peak_bytes for each in whole)
    assert {each.peak_bytes for each in short_plans(before, after, 16, WITHIN._replace(budget=least))} == {least}
    assert short_plans(before, after, 16, WITHIN._replace(budget=least - 1)) == []
    assert all(message_count(each) == 0 for each in short_plans(before, after, 15, WITHIN))


# ---- What libraries that transfer weights refuse ----


@pytest.mark.parametrize(
    ("source", "target", "first"),
    [
        ("s32[{x}4, 2, {y}4, 8]", "s32[16, {a}1, 8, {b}2]", 8),  # rank above 3, two sharded dims a side
        ("s32[{x}{y}2, 8]", "s32[{b}4, {a}4]", 8),  # two axes in one dim
        ("s32[{x}4/13, 7]", "s32[13, {b}2/7]", 8),  # uneven
        ("s32[{x}4, 8]", "s32[16, {b}2]", 4),  # overlapping
        ("s32[16, 8] + sum{x}", "s32[16, {b}2]", 8),  # partial
        ("s32[2{x}2, 8]", "s32[{b}2{a}, 8]", 8),  # block-cyclic
    ],
)
def test_what_others_refuse_is_moved(source: str, target: str, first: int):
    there = rs.Mesh({"a": 2, "b": 4}, device_ids=range(first, first + 8))
    plan = rs.plan(rs.Layout.parse(source, rs.Mesh(x=4, y=2)), rs.Layout.parse(target, there))
    oracle.check(plan)
    assert plan.received_bytes <= (3 if plan.source.partial else 1.05) * plan.lower_bound_bytes


# ---- On every pair that Shardy's own pass can do: never more bytes than it, never more launches for the same ----

KINDS = ("one fabric", "slow outer axis", "sums")
FAST = ("3x5",)
"""The meshes of the fast tier."""

MEASURES = ("refused", "more bytes", "more launches", "more seconds")
AGAINST_SHARDY_LARGE = 64
"""Times the dims of the large arrays are those of the small ones: seconds there are bytes, not messages."""


def data(sizes: str, kind: str) -> tuple[Data, ...]:
    """Small and large arrays of every rank: plain moves, moves with a slow outer axis, or sums to finish."""
    mesh = named(sizes, slow=kind == "slow outer axis")
    comparisons: list[Data] = []
    for rank in RANKS:
        small, large = sample_pairs(mesh, rank, 8, seed=rank), sample_pairs(mesh, rank, 4, seed=10 + rank)
        if kind == "sums":
            small, large = summed(small), summed(large)
        comparisons.append(compared(mesh, [*small, *scaled(large, AGAINST_SHARDY_LARGE)]))
    return tuple(comparisons)


def worse(measure: str, *data: Data) -> str:
    """The pairs on which we are worse in this, with both plans; empty if there are none."""
    worse_pairs = [explained(m, preset, c) for d in data for m, preset, c in failures(d) if m == measure]
    return "\n".join([f"{len(worse_pairs)} pairs have {measure}:", *worse_pairs[:5]]) if worse_pairs else ""


@pytest.mark.fast(3, slow=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [s if s in FAST else pytest.param(s, marks=pytest.mark.slow) for s in MESHES])
def test_never_worse(sizes: str, kind: str) -> None:
    """Our rules derive all its steps, and our plans are in no measure worse."""
    comparisons = data(sizes, kind)
    assert all(d.pairs and d.presets for d in comparisons)
    assert [text for measure in MEASURES if (text := worse(measure, *comparisons))] == []


def test_a_worse_plan_is_seen() -> None:
    """The comparison itself: gathers one by one for one gather, and all of an array for a slice of it."""
    mesh = named("2x4")
    held, whole, half = (Layout.parse(text, mesh) for text in ("f32[{x}{y}2]", "f32[16]", "f32[{x}8]"))
    (once,) = compared(mesh, [(held, whole)]).pairs
    staged = chain(held, whole, [StepSpec("all_gather", half), StepSpec("all_gather", whole)])
    assert not list(failures(Data(mesh, 1, (once,))))
    assert worse("more launches", Data(mesh, 1, (replace(once, ours=staged),)))
    wasted = chain(held, whole, [StepSpec("permute", Layout.parse("f32[{y}{x}2]", mesh)), StepSpec("exchange", whole)])
    assert worse("more bytes", Data(mesh, 1, (replace(once, ours=wasted),)))
    slow = {preset: (replace(ours, seconds=theirs * 1.001), theirs) for preset, (ours, theirs) in once.timed.items()}
    assert len(list(failures(Data(mesh, 1, (replace(once, timed=slow),))))) == len(PRESETS)
    assert worse("refused", Data(mesh, 1, (replace(once, theirs=None, refusal="no such step", timed={}),)))

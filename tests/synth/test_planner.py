"""Plans without a network: every one runs, has no tile larger than the larger end, and receives the bound, or at most
`slack` times more between uneven layouts.

On every pair of contiguous layouts of small meshes, on samples of larger ones, and on random digit layouts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings

import reshard as rs
from reshard.errors import PlanError, ReshardError
from reshard.synth.network import PRESETS
from reshard.types import Layout, Mesh
from tests.layouts import contiguous_layouts, divisible_shape, pairs, random_layout, random_pair, sample_pairs
from tests.oracle import check
from tests.sampling import few_or_all, sampled

MOST = 3000
PARTS = 8
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


def test_all_pairs_of_2x2_are_taken_and_samples_are_full():
    counts = {str(mesh): len(set(contiguous_pairs(mesh))) for mesh in SMALL}
    # Two axes over r dims: 1 + 2 r + r (r + 1) layouts, that is 5, 11, 19 at ranks 1 to 3.
    every = 5 * 4 + 11 * 10 + 19 * 18
    assert counts == {
        "<x=2, y=2>": every,
        "<x=2, y=3>": every,
        "<x=2, y=4>": every,
        "<x=2, y=2, z=2>": MOST,
        "<x=3, y=5>": every,
    }


@pytest.mark.parametrize("mesh", SMALL, ids=str)
def test_a_layout_is_moved_to_itself_by_nothing(mesh: Mesh):
    for layout in contiguous_layouts(mesh, divisible_shape(mesh, 2)):
        plan = hold(layout, layout)
        assert (plan.steps, plan.received_bytes, plan.peak_bytes) == ((), 0, layout.tile_bytes)


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", sampled(SMALL, *SMALL[:3]), ids=str)
@pytest.mark.parametrize("count", few_or_all(100, 400))
def test_uneven_contiguous_pairs_meet_the_bound(mesh: Mesh, count: int):
    choose = random.Random(11)
    for _ in range(count):
        shape = tuple(choose.choice((0, 1, 2, 3, 5, 7, 10, 11, 13)) for _ in range(choose.randint(1, 2)))
        every = list(contiguous_layouts(mesh, shape))
        hold(choose.choice(every), choose.choice(every))


def sampled_pairs(mesh: Mesh, shape: tuple[int, ...], count: int) -> Iterable[tuple[Layout, Layout]]:
    every = list(contiguous_layouts(mesh, shape))
    choose = random.Random(mesh.size)
    return [(choose.choice(every), choose.choice(every)) for _ in range(count)]


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("mesh", "shape", "count"),
    [
        (Mesh(x=8, y=10), (80,), 40),
        (Mesh(x=4, y=6, z=2), (12, 24, 8), 40),
        pytest.param(Mesh(x=8, y=10), (80, 80), 150, marks=pytest.mark.slow),
        pytest.param(Mesh(x=8, y=10), (40, 20, 16), 100, marks=pytest.mark.slow),
        pytest.param(Mesh(x=4, y=6, z=2), (48, 48), 300, marks=pytest.mark.slow),
        pytest.param(Mesh(x=4, y=6, z=2), (12, 24, 8), 200, marks=pytest.mark.slow),
        pytest.param(Mesh(x=16, y=16, z=2), (512, 4), 30, marks=pytest.mark.slow),
        pytest.param(Mesh(x=16, y=16, z=2), (32, 32), 30, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sampled_pairs_of_larger_meshes_meet_the_bound(mesh: Mesh, shape: tuple[int, ...], count: int):
    for source, target in sampled_pairs(mesh, shape, count):
        hold(source, target)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 1000), *(pytest.param(seed, 4000, marks=pytest.mark.slow) for seed in range(4))]
)
def test_random_digit_layouts_meet_the_bound(seed: int, count: int):
    choose = random.Random(seed)
    for _ in range(count):
        hold(*random_pair(choose))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "shape"), [(Mesh(x=4, y=6, z=2), (48, 16)), (Mesh(x=8, y=10), (20, 40)), (Mesh(x=64), (256,))], ids=str
)
def test_random_digit_layouts_of_larger_meshes_meet_the_bound(mesh: Mesh, shape: tuple[int, ...]):
    choose = random.Random(mesh.size)
    for _ in range(80):
        hold(random_layout(choose, mesh, shape), random_layout(choose, mesh, shape))


@settings(max_examples=300)
@given(pairs())
def test_any_pair_meets_the_bound(pair: tuple[Layout, Layout]):
    hold(*pair)


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


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_slack_on_random_digit_layouts(seed: int):
    choose = random.Random(seed)
    for _ in range(300):
        check(relaxed(*random_pair(choose))[0])


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


def test_slack_leaves_even_layouts_and_networks_alone():
    mesh = Mesh(x=4, y=2)
    even = Layout.parse("f32[{x}3, {y}2]", mesh), Layout.parse("f32[{y}6, {x}]", mesh)
    uneven = Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[{y}5]", mesh)
    assert rs.plan(*even, slack=9) is rs.plan(*even, slack=0)
    assert rs.plan(*uneven, network="h100", slack=9) is rs.plan(*uneven, network="h100", slack=0)


@pytest.mark.slow
def test_slack_within_a_budget():
    source, target = Layout.parse("f32[{y}{z}{x}2/1021, 513]", EIGHTS), Layout.parse("f32[1021, 513]", EIGHTS)
    floor = rs.plan(source, target).floor_bytes
    tight, wide = (rs.plan(source, target, budget=budget) for budget in (floor, 3 * floor))
    assert tight.peak_bytes <= floor and tight.launches > wide.launches == 1


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


def test_presets_by_name_and_unknown_ones():
    mesh = Mesh(dcn=2, x=4)
    source, target = Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh)
    assert rs.plan(source, target, network="tpu-v5p") == rs.plan(source, target, network=PRESETS["tpu-v5p"])
    with pytest.raises(ReshardError, match="tpu-v9"):
        rs.plan(source, target, network="tpu-v9")
    with pytest.raises(ReshardError, match=r"no link for axis 'dcn'"):
        rs.plan(source, target, network=rs.Network.of({"x": (1e-6, 1e11)}))


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        ("f32[{x}4]", "f32[8]", {}, r"source f32\[\{x\}4\] has global shape \(16,\), target f32\[8\] has \(8,\)"),
        ("f32[{x}4]", "f64[16]", {}, "is float32, target .* is float64; .* cast before or after it"),
        ("f32[{x}4]", None, {}, "the target None is a NoneType, not a Layout; read it with Layout.parse"),
        (
            "f32[{x}4]",
            "f32[16]",
            {"network": 3},
            "network 3 is not a Network; give one, a preset or a file by its name",
        ),
    ],
)
def test_refused_requests(source: str, target: str | None, options: dict[str, object], message: str):
    mesh = Mesh(x=4, y=2)
    ends = [None if text is None else Layout.parse(text, mesh) for text in (source, target)]
    with pytest.raises(PlanError, match=message):
        rs.plan(*ends, **options)  # type: ignore[arg-type]

"""The table of a plan, its totals, its heading, and what is live in it, of one array and of many."""

import re

import pytest

import reshard as rs
from reshard.plans.plan import TreePlan
from reshard.show.plan_table import (
    IN_PLACE,
    OPERAND,
    RESULT,
    SOURCE,
    array_bytes_text,
    build_timeline,
    list_totals,
    live_parts,
    show_heading,
    show_steps,
    show_totals,
    tabulate_plan,
)
from reshard.types import Layout, Mesh
from reshard.types.units import bytes_text, seconds_text
from tests.draw.cases import CASES, planned
from tests.show.printing import printed


@pytest.mark.parametrize("name", list(CASES))
def test_a_row_for_each_step_with_its_numbers(name):
    plan = planned(name)
    rows = printed(show_steps, plan, width=400).splitlines()[2:-1]
    if not plan.steps:
        assert "nothing to do" in printed(show_steps, plan)
        return
    assert len(rows) == len(plan.steps)
    for number, (row, step) in enumerate(zip(rows, plan.steps, strict=True), 1):
        cells = re.split(r" {2,}", row.strip())
        assert cells[:3] == [str(number), step.kind, str(step.result)]
        assert cells[-2:] == [bytes_text(step.received_bytes), bytes_text(step.live_bytes)]
        assert len(cells) == 5 or cells[3] == str(step.launches)


def test_seconds_have_a_column_of_their_own():
    mesh = Mesh(x=3, y=5)
    plan = rs.plan(Layout.parse("f32[{x}5, 15]", mesh), Layout.parse("f32[15, {y}3]", mesh), network="h100")
    text = printed(show_steps, plan)
    assert "seconds" in text.splitlines()[0]
    for step in plan.steps:
        assert seconds_text(step.seconds) in text


def test_launches_have_a_column_only_where_a_step_has_several():
    mesh = Mesh(x=4, y=2)
    several = rs.plan(Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[{y}5]", mesh))
    one = rs.plan(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh))
    assert "launches" in printed(show_steps, several) and "launches" not in printed(show_steps, one)


def test_the_heading_wraps_long_layouts_and_keeps_them_apart():
    mesh = Mesh(x=4)
    long = [Layout.parse(f"f32[{first}, {', '.join(['16'] * 40)}]", mesh) for first in ("{x}4", "16")]
    lines = printed(show_heading, *long, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith("-> ") for line in lines) == 1
    assert "".join(lines).replace(" ", "").startswith(str(long[0]).replace(" ", ""))


def test_totals_are_those_of_the_plan():
    plan = planned("budget")
    facts = dict(list_totals(plan, None))
    assert facts["received"] == f"{plan.received_bytes} B on the worst device, the lower bound"
    assert facts["launches"] == str(plan.launches)
    sizes = [int(size) for size in re.findall(r"(\d+) B(?= \+|;)", facts["peak"])]
    assert facts["peak"].startswith(f"{plan.peak_bytes} B live") and sum(sizes) == plan.peak_bytes
    assert facts["peak"].endswith(f"floor {plan.floor_bytes} B") and "predicted" not in facts


def test_more_than_the_bound_is_a_multiple_of_it():
    mesh = Mesh(dcn=2, x=4)
    pair = Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[{dcn}8, {x}4]", mesh)
    plan = rs.plan(*pair, network="tpu-v5p")
    assert plan.received_bytes > plan.lower_bound_bytes
    facts = dict(list_totals(plan, "tpu-v5p"))
    times = f"{plan.received_bytes / plan.lower_bound_bytes:.2f} times the lower bound of {plan.lower_bound_bytes} B"
    assert facts["received"].endswith(times)
    assert facts["predicted"] == f"{seconds_text(plan.seconds)} on tpu-v5p"


def test_totals_of_no_steps():
    assert (
        dict(list_totals(planned("identity"), None))["peak"] == f"{planned('identity').peak_bytes} B live on a device"
    )
    assert printed(show_totals, planned("identity"), None).count("\n") == 3


@pytest.mark.parametrize("name", list(CASES))
def test_the_step_of_the_peak_is_named_if_there_are_several(name):
    plan = planned(name)
    peak = dict(list_totals(plan, None))["peak"]
    named = re.findall(r" in step (\d+);", peak)
    assert len(named) == (len(plan.steps) > 1)
    for number in named:
        assert plan.steps[int(number) - 1].live_bytes == plan.peak_bytes


@pytest.mark.parametrize(
    ("text", "size"), [("f32[{x}3/7, 5]", "140 B"), ("s4[{x}5/9]", "5 B"), ("f64[]", "8 B"), ("bf16[0, {x}4]", "0 B")]
)
def test_the_size_is_that_of_the_true_array(text, size):
    """Neither padding nor copies count: 7 x 5 elements of 4 bytes are 140 bytes."""
    assert array_bytes_text(Layout.parse(text, Mesh(x=3 if "3/7" in text else 2))) == size


@pytest.mark.parametrize("name", list(CASES))
def test_moments_are_the_source_the_steps_and_what_remains(name):
    plan = planned(name)
    first, *during = build_timeline(plan).moments
    assert (first.name, first.live_bytes) == ("before", plan.source.tile_bytes)
    assert [moment.live_bytes for moment in during[:-1]] == [step.live_bytes for step in plan.steps]
    if plan.steps:
        assert max(moment.live_bytes for moment in during) == plan.peak_bytes
        kept = 0 if plan.donate else plan.source.tile_bytes
        assert (during[-1].name, during[-1].live_bytes) == ("after", kept + plan.target.tile_bytes)


def test_the_source_is_kept_while_later_steps_run_unless_it_is_donated():
    mesh = Mesh(x=4, y=2)
    source, target = Layout.parse("f32[{x}5, 16]", mesh), Layout.parse("f32[20, {y}8]", mesh)
    for donate, kept in ((False, source.tile_bytes), (True, 0)):
        steps = rs.plan(source, target, donate=donate).steps
        assert len(steps) == 2
        assert [dict(live_parts(step))[SOURCE] for step in steps] == [0, kept]
        for step in steps:
            parts = dict(live_parts(step))
            assert (parts[OPERAND], parts[RESULT]) == (step.operand.tile_bytes, step.result.tile_bytes)


def test_in_place_operand_and_result_share_their_bytes():
    (step,) = planned("donated").steps
    assert step.mode.in_place
    assert dict(live_parts(step))[IN_PLACE] == max(step.operand.tile_bytes, step.result.tile_bytes)


MESH, SERVER = rs.Mesh(x=4), rs.Mesh({"y": 2}, device_ids=[3, 4])


def tree(count: int, **options: object) -> TreePlan:
    """Arrays of different sizes: every third one stays, every fourth one goes to other devices."""
    pairs: dict[str, tuple[rs.Layout, rs.Layout]] = {}
    for number in range(1, count + 1):
        rows = rs.Layout.parse(f"f32[{{x}}{4 * number}, 8]", MESH)
        far = rs.Layout.parse(f"f32[{16 * number}, {{y}}4]", SERVER)
        near = rows if number % 3 == 0 else rs.Layout.parse(f"f32[{16 * number}, {{x}}2]", MESH)
        pairs[f"w{number}"] = (rows, far if number % 4 == 0 else near)
    return rs.plan_tree(pairs, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("count", [1, 3, 4, 30])
def test_the_most_live_is_the_peak_of_the_tree(count: int, donate: bool):
    planned = tree(count, donate=donate)
    shown = build_timeline(planned)
    assert max(moment.live_bytes for moment in shown.moments) == shown.peak_bytes == planned.peak_bytes
    assert len(shown.moments) <= 12 and all(size >= 0 for moment in shown.moments for _, size in moment.parts)
    assert shown.floor_bytes <= shown.peak_bytes


def test_a_tree_starts_with_its_sources_and_ends_with_its_targets():
    kept, given = (build_timeline(tree(2, donate=donate)) for donate in (False, True))
    sources, targets = 4 * 8 * 4 * 3, 16 * 2 * 4 * 3
    assert kept.moments[0].parts == given.moments[0].parts == (("source", sources),)
    assert kept.moments[-1].parts == (("source", sources), ("result", targets))
    assert given.moments[-1].parts == (("source", 0), ("result", targets))


def test_many_batches_share_a_bar():
    few = rs.Layout.parse("f32[{x}4, 8]", MESH)
    batch = tree(1).batches[0]
    many = TreePlan(
        tuple(f"a{at}" for at in range(25)), tuple(type(batch)((f"a{at}",), batch.plans) for at in range(25))
    )
    names = [moment.name for moment in build_timeline(many).moments]
    assert names[:2] == ["before", "batches 1-3"] and names[-2:] == ["batch 25", "after"]
    assert build_timeline(many).moments[0].live_bytes == 25 * few.tile_bytes


def test_a_plan_of_many_arrays_has_a_row_for_each_batch():
    planned = tree(5)
    shown = tabulate_plan(planned)
    assert shown.heads[:3] == ("", "arrays", "steps") and len(shown.rows) == len(planned.batches)
    received = shown.heads.index("received")
    for row, live, batch in zip(shown.rows, shown.live, planned.batches, strict=True):
        assert row[1].startswith(batch.names[0]) and row[received] == bytes_text(batch.received_bytes)
        assert row[received + 1] == bytes_text(live)
    assert max(shown.live) == planned.peak_bytes

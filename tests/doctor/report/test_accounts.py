"""The accounts of a report: whatever a program does, its places, reductions and others add up to what it receives."""

import json

import pytest

from reshard import hlo
from reshard.doctor import examine
from tests.doctor.fragments import GATHER, OFFSET, RECORDED, SLICE, ZERO, text
from tests.doctor.report.reports import NOTHING, report_of_all_kinds

BRANCH = """%{name} {{
  %p = f32[2,8]{{1,0}} parameter(0)
  {lines}
  ROOT %r{at} = f32[2,8]{{1,0}} reshape(%d{at})
}}
"""
LOOP = """%condition {
  %c = (s32[], f32[2,8]{1,0}) parameter(0)
  ROOT %less = pred[] custom-call(%c)
}

%body {
  %b = (s32[], f32[2,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %v = f32[2,8]{1,0} get-tuple-element(%b), index=1
  %sine = f32[2,8]{1,0} sine(%v)
  %chosen = f32[2,8]{1,0} conditional(%i, %sine, %sine), branch_computations={%one, %two}
  ROOT %next = (s32[], f32[2,8]{1,0}) tuple(%i, %chosen)
}
"""


def branch(name, at, twice):
    """A branch that gathers everything and uses a slice; if `twice`, of two arrays."""
    lines = [*OFFSET, ZERO, GATHER, SLICE]
    lines += ["%f = f32[2,8]{1,0} cosine(%p)", GATHER.replace("%g", "%h").replace("%p", "%f")] if twice else []
    lines += ["%e = f32[8,2]{1,0} dynamic-slice(%h, %zero, %at), dynamic_slice_sizes={8,2}"] if twice else []
    lines += [f"%d{at} = f32[8,2]{{1,0}} {'add(%d, %e)' if twice else 'add(%d, %d)'}"]
    return BRANCH.format(name=name, at=at, lines="\n  ".join(lines))


def conditional_in_a_loop(turns=5):
    """A loop whose body runs one of two branches, which waste 144 and 288 B."""
    known = f'backend_config={{"known_trip_count":{{"n":"{turns}"}}}}'
    loop = f"%w = (s32[], f32[2,8]{{1,0}}) while(%start), condition=%condition, body=%body, {known}"
    lines = ["%zero = s32[] constant(0)", "%start = (s32[], f32[2,8]{1,0}) tuple(%zero, %p)", loop]
    before = branch("one", 1, False) + branch("two", 2, True) + LOOP
    return text(*lines, "ROOT %r = f32[2,8]{1,0} get-tuple-element(%w), index=1", before=before)


def check_sum(data, received):
    """The lists of a report's JSON add up, and no more is wasted than is received."""
    places = sum(place["total_bytes"] for place in data["places"] if place["counted"])
    rest = sum(line["received_bytes"] for line in (*data["reductions"], *data["others"]))
    assert places + rest == data["received_bytes"] == received
    assert data["saved_bytes"] >= 0 and 0 <= data["wasted_bytes"] <= received


@pytest.mark.fast(20)
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_the_lists_of_recorded_programs_add_up(file, every):
    module = file.read_text()
    check_sum(json.loads(examine(module).to_json(every=every)), hlo.traffic(hlo.parse(module)).received_bytes)


def test_a_branch_that_receives_less_is_shown_but_not_counted():
    report = examine(conditional_in_a_loop())
    assert sorted(place.counted for place in report.places) == [False, True, True]
    assert [place.total_bytes for place in report.places] == [960, 960, 960]
    assert (report.received_bytes, report.wasted_bytes, report.saved_bytes) == (1920, 1440, 1440)
    check_sum(report.to_dict(), 1920)
    assert str(report).count("not part of the totals") == 1 == report.to_html().count("not part of the totals")


def test_what_is_not_shown_is_summed_by_line_and_kind():
    report = report_of_all_kinds()
    sums = report.accounts()
    assert [(line.kind, line.does, line.launches, line.received_bytes) for line in sums.reductions] == [
        ("reduction", "all_reduce", 1, 96)
    ]
    assert [(line.kind, line.does, line.launches, line.received_bytes) for line in sums.others] == [
        ("manual", "all_gather", 1, 192),
        ("shift", "permute", 1, 4),
    ]
    assert sums.received_bytes == report.received_bytes


def test_permutes_of_one_line_share_a_sum():
    lines = ["%one = f32[1,1]{1,0} slice(%p), slice={[0:1], [0:1]}"]
    for at in range(7):
        where = f'metadata={{op_name="f{at}" source_file="a.py" source_line={1 + at // 5}}}'
        lines.append(f"%m{at} = f32[1,1]{{1,0}} collective-permute(%one), source_target_pairs={{{{0,1}}}}, {where}")
    used = ", ".join(f"%m{at}" for at in range(7))
    big = GATHER.replace("%p)", "%q)").replace("8,8", "800,8")
    lines = ["%q = f32[200,8]{1,0} parameter(1)", big, *lines, f"ROOT %r = f32[] custom-call(%g, {used})"]
    report = examine(text(*lines))
    assert [(line.where.line, line.launches, line.received_bytes) for line in report.accounts().others] == [
        (1, 5, 20),
        (2, 2, 8),
    ]


def test_nothing_adds_up_to_nothing():
    assert examine(NOTHING).accounts() == ((), (), ())

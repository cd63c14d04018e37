"""The data of a report, and its JSON."""

import json

import pytest

from reshard import hlo
from reshard.doctor import CompiledMemory, examine
from reshard.errors import PlanError
from tests.doctor.report.reports import TRAIN, report_of_all_kinds


def test_json_is_plain_data_and_round_trips():
    report = examine(TRAIN, compiled=CompiledMemory(8, 4, 20, 3))
    data = json.loads(report.to_json(indent=2))
    assert data == report.to_dict() == json.loads(report.to_json())
    assert (data["program"], data["devices"], data["rebuilt"], data["launches"]) == ("jit_step", 8, 1, 3)
    assert data["compiled"] == {"argument_bytes": 8, "output_bytes": 4, "temp_bytes": 20, "alias_bytes": 3}
    first = data["places"][0]
    assert first["where"]["file"] == "train.py" and first["where"]["line"] == 17
    assert (first["received_bytes"], first["needed_bytes"], first["planned_bytes"]) == (7 << 25, 7 << 22, 7 << 22)
    assert first["moves"][0]["plan"]["steps"][0]["kind"] == "all_to_all"
    every = json.loads(report.to_json(every=True))
    assert every == report.to_dict(every=True) and every["reductions"] == every["others"] == []
    names = [one["name"] for place in every["places"] for one in place["collectives"]]
    assert sorted(names) == sorted(one.name for one in hlo.collectives(hlo.parse(TRAIN)))


def test_options_of_other_kinds_are_refused():
    report = report_of_all_kinds()
    with pytest.raises(PlanError, match="every 'no': give True or False"):
        report.to_dict(every="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="indent -1: give a whole number"):
        report.to_json(indent=-1)


def test_totals_are_sums_over_the_places():
    report = report_of_all_kinds()
    assert report.wasted_bytes == sum(place.wasted_bytes for place in report.places) == 288
    assert report.saved_bytes == 288 and len(report.rebuilt) == 2
    assert report.received_bytes == sum(place.received_bytes for place in report.places) == 3 * 192 + 96 + 4


def test_bytes_that_arguments_and_outputs_share_count_once():
    assert CompiledMemory(100, 50, 7, 50).peak_bytes == 107

"""The report that `examine` returns: data, a table and a page in one."""

from dataclasses import FrozenInstanceError

import pytest

from reshard.doctor import Report, examine
from reshard.doctor.report import page, table
from tests.doctor.report.reports import NOTHING, TRAIN


@pytest.mark.parametrize("program", [TRAIN, NOTHING], ids=["train", "nothing"])
def test_a_report_prints_as_its_table_and_its_page(program):
    report = examine(program)
    assert isinstance(report, Report)
    assert str(report) == f"{report}" == table.text(report)
    assert report.to_html() == page.page(report)


def test_a_report_cannot_change():
    report = examine(TRAIN)
    with pytest.raises(FrozenInstanceError):
        report.devices = 3

"""A report as plain text: no colours, no trailing spaces, 100 columns."""

from reshard.doctor.report.table import plain_text
from reshard.show import terminal


def test_plain_text_has_no_colours_and_no_trailing_spaces():
    assert plain_text(lambda out: out.print("bad  \nworse", style=terminal.BAD)) == "bad\nworse"


def test_plain_text_is_100_columns_wide():
    widths = []
    plain_text(lambda out: widths.append(out.width))
    assert widths == [100]

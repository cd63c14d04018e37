"""The lines around an origin."""

import pytest

from reshard.doctor.report.page import snippet
from reshard.hlo import Source


@pytest.mark.parametrize(("line", "numbers"), [(1, [1, 2, 3]), (2, [1, 2, 3, 4]), (4, [2, 3, 4, 5, 6]), (7, [5, 6, 7])])
def test_two_lines_before_and_after(tmp_path, line, numbers):
    file = tmp_path / "train.py"
    file.write_text("".join(f"x{at} = <{at}>\n" for at in range(1, 8)))
    lines = snippet(Source("f", str(file), line))
    assert [one.number for one in lines] == numbers
    assert [one.text for one in lines] == [f"x{at} = <{at}>" for at in numbers]
    assert [one.number for one in lines if one.here] == [line]


def test_a_line_that_is_not_there_has_no_snippet(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("x = 1\n")
    sources = [Source("f", str(file), 2), Source("f", str(file), 0), Source("f", str(tmp_path), 1), Source("f")]
    sources += [Source("f", "bad\0name", 1), Source("f", "<stdin>", 1)]
    assert [snippet(source) for source in sources] == [()] * 6


def test_large_files_are_not_read(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("x = 1\n" * 200_000)
    assert snippet(Source("f", str(file), 2)) == ()

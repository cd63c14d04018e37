"""A word on stderr for what takes long, and none for what does not."""

import time

import pytest

from reshard.cli.progress import progress


def test_what_takes_long_says_so(capsys):
    with progress("compiling", patience=0.05):
        time.sleep(0.5)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and 2 <= len(lines) <= 4  # after 0.05, 0.1, 0.2 and 0.4 s
    assert all(line.startswith("reshard: compiling, ") and line.endswith(" s so far") for line in lines)


def test_what_is_quick_says_nothing(capsys):
    with progress("compiling"):
        pass
    assert capsys.readouterr() == ("", "")


def test_an_error_ends_it(capsys):
    with pytest.raises(ValueError, match="no program"), progress("reading", patience=0.05):
        raise ValueError("no program")
    time.sleep(0.1)
    assert capsys.readouterr() == ("", "")

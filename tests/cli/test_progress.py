"""A word on stderr for what takes long, and none for what does not."""

import threading
import time
from types import SimpleNamespace

import pytest

from reshard.cli import progress as module
from reshard.cli.progress import progress


class Waits(list[float]):
    """An event that is set during the fifth wait for it."""

    def wait(self, seconds: float) -> bool:
        self.append(seconds)
        return len(self) == 5

    def set(self) -> None: ...


def test_what_takes_long_says_so(capsys, monkeypatch: pytest.MonkeyPatch):
    waits = Waits()
    monkeypatch.setattr(module, "threading", SimpleNamespace(Event=lambda: waits, Thread=threading.Thread))
    with progress("compiling", patience=3):
        pass
    assert waits == [3, 3, 6, 12, 24]
    assert capsys.readouterr() == ("", "".join(f"reshard: compiling, {n} s so far\n" for n in (3, 6, 12, 24)))


def test_what_is_quick_says_nothing(capsys):
    with progress("compiling", patience=60):
        pass
    assert capsys.readouterr() == ("", "")


def test_an_error_ends_it(capsys):
    with pytest.raises(ValueError, match="no program"), progress("reading", patience=0.05):
        raise ValueError("no program")
    capsys.readouterr()  # A busy machine may take longer than that to raise it.
    time.sleep(0.1)
    assert capsys.readouterr() == ("", "")

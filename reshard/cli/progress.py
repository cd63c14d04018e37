"""What a command prints on stderr while it works, if it takes longer than people wait in silence."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds


@contextmanager
def progress(what: str, patience: float = PATIENCE) -> Generator[None]:
    """Prints `what` is being done after `patience` seconds, and again whenever the time taken has doubled.

    >>> with progress("reading"):
    ...     pass
    """
    done = threading.Event()
    speaker = threading.Thread(target=_speak, args=(what, patience, done), daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()


def _speak(what: str, patience: float, done: threading.Event) -> None:
    seconds = patience
    wait = patience
    while not done.wait(wait):
        print(f"reshard: {what}, {seconds:.0f} s so far", file=sys.stderr, flush=True)
        wait, seconds = seconds, 2 * seconds

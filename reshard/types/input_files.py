"""Files that callers name: what has no end, and what nobody writes to, is refused instead of waited for."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import IO

PATIENCE = 5.0
"""Seconds that a named pipe may stay without a process that writes to it."""


def open_input(path: str | Path) -> IO[bytes]:
    """Opens a file to read; raises `OSError`, also for a named pipe that no process opens to write within `PATIENCE`.

    A pipe whose writer is there but silent is waited for, as `cat` does: a program may run for hours before it prints.
    """
    if not Path(path).is_fifo():
        return Path(path).open("rb")
    opened: list[IO[bytes] | OSError] = []

    def wait_for_writer() -> None:
        try:
            opened.append(Path(path).open("rb"))  # noqa: SIM115
        except OSError as error:
            opened.append(error)

    # The system's own open waits for a writer, and no other call can tell a silent writer from none.
    waiting = threading.Thread(target=wait_for_writer, daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    if not opened:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # A writer for a moment: the thread's open returns.
        waiting.join()
        raise TimeoutError(errno.ETIMEDOUT, "it is a pipe that no process writes to", str(path))
    if isinstance(opened[0], OSError):
        raise opened[0]
    return opened[0]


def read_input(path: str | Path, most: int, *, regular: bool = False) -> bytes:
    """What a file holds; raises `OSError` as `open_input` does, and `ValueError` if that is more than `most` bytes.

    With `regular`, only a file on disk is read: no pipe, no device.

    >>> read_input("/dev/zero", 1 << 20)
    Traceback (most recent call last):
    ValueError: it has more than 1048576 bytes
    """
    if regular and not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is not a regular file")
    with open_input(path) as file:
        # A device's size is 0, whatever it gives.
        content = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None
    if content is None or len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return content

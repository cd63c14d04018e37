"""A bar for what has been read of a load, where `rich` is installed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def show_load_progress(wanted: bool, total: int) -> Generator[Callable[[int], object]]:
    """A function that is told how many of `total` bytes have been read, and shows it while the block runs, if wanted.

    >>> with show_load_progress(False, 8) as progress:
    ...     progress(4)
    """
    if not wanted:
        yield lambda _: None
        return
    try:
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
    except ImportError:  # A bar is a convenience: the load goes on without it.
        yield lambda _: None
        return
    columns = "load", BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("load", total=total)
        yield lambda done: bar.update(task, completed=min(done, total))

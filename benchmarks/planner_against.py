"""Planning times of this tree beside those of another commit: `python benchmarks/planner.py --against main~5`.

Each commit runs its own `benchmarks/planner.py` on the same pairs, in turns (before, now, now, before, ...), so that a
machine that grows slower meets both alike. A row's ratio is the median over the rounds of now / before, its spread the
least and the greatest.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]

Times = Mapping[tuple[str, str], float]
"""The median seconds of each row, by its kind and what it plans."""


@dataclass(frozen=True)
class Ratio:
    """How long a row takes now over how long it took before; below 1 is faster."""

    kind: str
    what: str
    before: float
    now: float
    median: float
    least: float
    most: float


def compared(rounds: Sequence[tuple[Times, Times]]) -> list[Ratio]:
    """The ratios of the rows that every run of both commits has; a round is (before, now).

    >>> row = ("even", "<x=4>")
    >>> compared([({row: 2.0}, {row: 1.0}), ({row: 4.0}, {row: 3.0}), ({row: 4.0, ("new", ""): 1.0}, {row: 2.0})])
    [Ratio(kind='even', what='<x=4>', before=4.0, now=2.0, median=0.5, least=0.5, most=0.75)]
    """
    shared = [row for row in rounds[0][1] if all(times.get(row) for both in rounds for times in both)]
    return [_ratio(row, [(before[row], now[row]) for before, now in rounds]) for row in shared]


def _ratio(row: tuple[str, str], rounds: Sequence[tuple[float, float]]) -> Ratio:
    ratios = [now / before for before, now in rounds]
    before, now = (median(times) for times in zip(*rounds, strict=True))
    return Ratio(*row, before, now, median(ratios), min(ratios), max(ratios))


def measure_against(revision: str, rounds: int, arguments: Sequence[str]) -> list[Ratio]:
    """Runs the benchmark of a commit and of this tree in turns, with the same arguments."""
    with worktree(revision) as other:
        measured: list[tuple[Times, Times]] = []
        for number in range(rounds):
            order = (other, ROOT) if number % 2 == 0 else (ROOT, other)
            times = {tree: _times(tree, arguments) for tree in order}
            measured.append((times[other], times[ROOT]))
    return compared(measured)


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """A checkout of the commit in a folder of its own, which is removed in the end."""
    with TemporaryDirectory(prefix="reshard-against-") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")


def _times(tree: Path, arguments: Sequence[str]) -> Times:
    line = [sys.executable, str(tree / "benchmarks" / "planner.py"), "--json", *arguments]
    done = subprocess.run(line, cwd=tree, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"the benchmark of {tree} failed")
    return {(row["kind"], row["what"]): row["median"] for row in json.loads(done.stdout)}


def table(revision: str, ratios: Sequence[Ratio]) -> Table:
    """The ratios; a row whose rounds are all on one side of 1 is in red where it is slower, in green where faster."""
    shown = Table(title=f"planning time against {revision}, medians", title_justify="left")
    for column in ("kind", "pairs of", "before", "now", "now / before", "rounds"):
        shown.add_column(column, justify="left" if column in ("kind", "pairs of") else "right")
    for row in ratios:
        style = "red" if row.least > 1 else "green" if row.most < 1 else None
        times = [f"{1e3 * seconds:.3g} ms" for seconds in (row.before, row.now)]
        shown.add_row(row.kind, row.what, *times, f"{row.median:.2f}", f"{row.least:.2f}-{row.most:.2f}", style=style)
    return shown

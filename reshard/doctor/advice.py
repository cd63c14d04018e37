"""What to change in a program so that it moves and holds less: changes of shardings, each with what it was measured to
gain. The search, which compiles the program with each change, is `reshard.jax.advise`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from rich.console import Console

from reshard.doctor.places import shorten_line
from reshard.show import terminal
from reshard.types.units import bytes_text, counted

REMOVED = "removed"
_OF_ENDS = ("in_sharding", "out_sharding")


class Figures(NamedTuple):
    """What a device receives in one run of a compiled program, its temporary memory, and its peak; in bytes."""

    received_bytes: int
    temp_bytes: int
    peak_bytes: int


_NOTHING = Figures(0, 0, 0)


def measure_noise(start: Figures, first: Figures) -> float:
    """The bytes that are too few to speak of beside what the first change saves."""
    return 0.01 * max(0, *(old - new for old, new in zip(start, first, strict=True)))


@dataclass(frozen=True)
class Change:
    """A change of what the program says, at a `line` of it (`file:line`), or of an argument or a result by its name.

    `kind` is `constraint`, `in_sharding` or `out_sharding`; `what` is the call that says it. `before` and `after` are
    shardings as JAX writes them, or `removed`. The bytes are those of the program with this change and those before
    it, as compiled.
    """

    line: str
    what: str
    kind: str
    before: str
    after: str
    received_bytes: int
    temp_bytes: int
    peak_bytes: int

    @property
    def figures(self) -> Figures:
        """The program with this change and those before it."""
        return Figures(self.received_bytes, self.temp_bytes, self.peak_bytes)

    @property
    def where(self) -> str:
        """The line with its path shortened, or the name."""
        return self.line if self.kind in _OF_ENDS else shorten_line(self.line)

    @property
    def edit(self) -> str:
        """What becomes what."""
        return f"{self.what}({self.before}) -> {self.after}"

    def __str__(self) -> str:
        return f"{self.where}  {self.edit}"


@dataclass(frozen=True)
class Advice:
    """Changes to make one after another, each measured with those before it, those that gain most first.

    `start` has the figures of the program as it is. `compiles` counts the programs that were compiled, `failed` those
    of them that XLA refused. `stopped` says which limit ended the search before everything was tried, if one did.

    >>> change = Change("train.py:42", "with_sharding_constraint", "constraint", "P('tp')", "P('dp')", 10, 30, 40)
    >>> advice = Advice((change,), Figures(1034, 2078, 2088), compiles=9)
    >>> print(advice)
    1 change, found in 9 compiles
      received   1034 B -> 10 B a device
      temporary  2078 B -> 30 B
      peak       2088 B -> 40 B
    <BLANKLINE>
    train.py:42  with_sharding_constraint(P('tp')) -> P('dp')
                 saves 1024 B received, 2048 B of temporaries
    """

    changes: tuple[Change, ...]
    start: Figures = _NOTHING
    compiles: int = 0
    failed: int = 0
    stopped: str = ""

    @property
    def figures(self) -> Figures:
        """The program with all changes."""
        return self.changes[-1].figures if self.changes else self.start

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """The line, the edit and the gain of each change, in words."""
        return [(change.where, change.edit, gain) for change, gain in zip(self.changes, self.gains, strict=True)]

    @property
    def gains(self) -> tuple[str, ...]:
        """What each change saves, in words, and what it costs where that is more."""
        gains: list[str] = []
        noise = measure_noise(self.start, self.changes[0].figures) if self.changes else 0.0
        for before, after in pairwise([self.start, *(change.figures for change in self.changes)]):
            saved = [old - new for old, new in zip(before, after, strict=True)]
            # The peak is temporaries, arguments and results: it is named where these say another thing.
            names = ["received", "of temporaries"] + ["at the peak"] * (saved[1] != saved[2])
            less = ", ".join(f"{bytes_text(by)} {name}" for by, name in zip(saved, names, strict=False) if by > noise)
            more = ", ".join(f"{bytes_text(-by)} {name}" for by, name in zip(saved, names, strict=False) if by < -noise)
            gains.append("; ".join(filter(None, [f"saves {less}" if less else "", f"adds {more}" if more else ""])))
        return tuple(gains)

    @property
    def summary(self) -> str:
        """How many changes there are, and what it took to find them."""
        tried = f"found in {counted(self.compiles, 'compile')}"
        if not self.changes:
            tried = f"{counted(self.compiles, 'compile')} tried"
        failed = f", {self.failed} of which XLA refused" if self.failed else ""
        stopped = f"; stopped after {self.stopped}" if self.stopped else ""
        what = counted(len(self.changes), "change") if self.changes else "no change of a sharding that saves bytes"
        what += ", each measured with those above it" if len(self.changes) > 1 else ""
        return f"{what}, {tried}{failed}{stopped}"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The figures before and after, by name."""
        names, ends = ("received", "temporary", "peak"), (self.start, self.figures)
        rows = [(name, *map(bytes_text, pair)) for name, *pair in zip(names, *ends, strict=True)]
        widths = [max(len(row[at]) for row in rows) for at in (1, 2)]
        facts = [(name, f"{old:>{widths[0]}} -> {new:>{widths[1]}}") for name, old, new in rows]
        return [(name, text + " a device" * (name == "received")) for name, text in facts]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "start": self.start._asdict(),
            "changes": [asdict(change) for change in self.changes],
            "compiles": self.compiles,
            "failed": self.failed,
            "stopped": self.stopped,
        }

    def __str__(self) -> str:
        return terminal.print_plain(lambda out: show_advice(out, self))


def show_advice(out: Console, advice: Advice) -> None:
    """Prints the changes, as a diff says them, and what each of them saves."""
    terminal.print_paragraph(out, advice.summary, style=terminal.NAME)
    if advice.changes:
        terminal.print_facts(out, advice.facts)
    for where, edit, gain in advice.rows:
        out.print()
        mark = terminal.print_name(out, f"{where}  ")
        terminal.print_paragraph(out, edit, mark)
        terminal.print_paragraph(out, gain, " " * len(mark), terminal.GOOD)

"""A place where a program moves data between devices, and what the pass inside XLA does with it: plain data.

The report and the pass have the same `Place`. The report describes it (its moves, its memory, what it rebuilds), and
the pass decides its `outcome`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from reshard.hlo import Array, Collective, Source
from reshard.plans.plan import Plan
from reshard.types.layout import Layout

RESHARD, SHIFT, MANUAL, REDUCTION = "reshard", "shift", "manual", "reduction"


class Known(NamedTuple):
    """A move that the program is known to need: the user's `file:line`, and its layouts.

    `near` has the lines that make and that use the data: XLA gives collectives one of these.

    >>> from reshard import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> Known("train.py:26", Layout.parse("f32[{x}2, 8]", mesh), Layout.parse("f32[8, {x}2]", mesh)).where
    'train.py:26'
    """

    where: str
    source: Layout
    target: Layout
    near: frozenset[str] = frozenset()


class Cause(NamedTuple):
    """A sharding of the user's program that a place stands beside: its `file:line`, or the name of an argument or a
    result.

    `kind` is `constraint`, `in_sharding` or `out_sharding`; or `operation`, if no sharding is near.

    >>> print(Cause("train.py:42", "constraint", "with_sharding_constraint(P('dp'))"))
    with_sharding_constraint(P('dp')) at train.py:42
    """

    line: str
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.what} {'of' if self.kind.endswith('sharding') else 'at'} {self.line}"


@dataclass(frozen=True)
class ArrayMove:
    """An array that a place moves.

    `before` and `after` are the tiles of one device. `source` and `target` are the layouts, if they are known: those of
    the `whole` array, or of the part that a group of devices has. If `exact`, `needed_bytes` is what some device must
    receive; otherwise it is an upper bound of that. `plan` is what `reshard` would do. `arrays` is the number of arrays
    that move alike.
    """

    before: Array | None
    after: Array
    needed_bytes: int
    exact: bool
    source: Layout | None = None
    target: Layout | None = None
    whole: bool = False
    plan: Plan | None = None
    arrays: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "before": None if self.before is None else format_array(self.before),
            "after": format_array(self.after),
            "source": None if self.source is None else str(self.source),
            "target": None if self.target is None else str(self.target),
            "mesh": None if self.source is None else str(self.source.mesh),
            "whole": self.whole,
            "needed_bytes": self.needed_bytes,
            "exact": self.exact,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "arrays": self.arrays,
        }


@dataclass(frozen=True)
class PassOutcome:
    """What the pass does with the collectives of a place.

    `plans` take their place, `permutes` counts the launches of shifts, which have no plan, and `planned_bytes` is what
    a device receives in both, as compiled; None without either. `why` is the reason why all stays as it was, empty if
    it does not. `op` is the operation on rows that is run on each device's own rows, instead of on gathered ones.
    `reorder_bytes` are those that `sums="any order"` would save in one run, where only the order of addition forbids a
    plan.
    """

    planned_bytes: int | None = None
    plans: tuple[Plan, ...] = ()
    why: str = ""
    permutes: int = 0
    op: str = ""
    reorder_bytes: int = 0

    @property
    def replaced(self) -> bool:
        """Whether plans take the place of the collectives."""
        return not self.why

    @property
    def steps(self) -> tuple[str, ...]:
        """What runs instead, in short."""
        return (*(step.kind for plan in self.plans for step in plan.steps), *("permute",) * self.permutes)


@dataclass(frozen=True)
class Place:
    """A place where a program moves data between devices: collectives, and the local moves between them.

    `kind` is one of

    - `reshard`: an array gets another layout;
    - `shift`: parts of tiles go to neighbours (a halo, a roll);
    - `manual`: a collective that the user wrote in a `shard_map`;
    - `reduction`: partial sums are added up.

    All bytes are those of one device in one run of the place, which runs `times` times (None if that depends on
    data). `largest` is the largest array on the way. `rebuilds` is `whole` if every device comes to have all of an
    array, `rebuilt`, of which it uses a part; `group` if it comes to have all that a group of devices has of it;
    otherwise it is empty. `rebuilt_move` is the one of the moves that it is for. What a user's `shard_map` does is not
    judged. `counted_bytes` are those that arrive and are used in several moves together, if that was counted.

    `outcome` is what the pass inside XLA does with it; None for what is not offered to it. The report has it by the
    figures of the plans, the pass by what the compiler makes of them.
    `planned_temp_bytes` is the temporary memory of these plans.

    `causes` are the user's shardings that it stands between, by data flow: not measured. They are known only where the
    program was given as StableHLO or as a function.
    """

    kind: str
    where: Source
    computation: str
    collectives: tuple[Collective, ...]
    moves: tuple[ArrayMove, ...] = ()
    peak_bytes: int = 0
    temp_bytes: int = 0
    largest: Array | None = None
    rebuilds: str = ""
    rebuilt: Array | None = None
    rebuilt_move: ArrayMove | None = None
    counted_bytes: int | None = None
    outcome: PassOutcome | None = None
    planned_temp_bytes: int | None = None
    causes: tuple[Cause, ...] = ()

    @property
    def rebuilds_whole(self) -> bool:
        """Whether the whole array is made on every device, although each needs only a part."""
        return self.rebuilds == "whole"

    @property
    def times(self) -> int | None:
        """How often the place runs in one run of the program; None if that depends on data."""
        return self.collectives[0].times

    @property
    def runs(self) -> int:
        """How often the place runs, counted as once if that depends on data."""
        return 1 if self.times is None else self.times

    @property
    def counted(self) -> bool:
        """Whether the place is part of the program's totals.

        It is not in a branch of a conditional other than the one that receives most: only one of them runs.
        """
        return all(collective.counted for collective in self.collectives)

    @property
    def received_bytes(self) -> int:
        """The bytes that a device receives."""
        return sum(collective.received_bytes for collective in self.collectives)

    @property
    def total_bytes(self) -> int:
        """The bytes that a device receives in a whole run of the program."""
        return sum((1 if one.times is None else one.times) * one.received_bytes for one in self.collectives)

    @property
    def needed_bytes(self) -> int:
        """The bytes that some device must receive in any case, or an upper bound of them if not `exact`.

        A sum that plans take the place of needs what they receive, and any other what it receives. Several moves need
        at most what all of them need together; less if they bring the same elements, which is counted where there are
        not too many.
        """
        # Plans that take the place bring all that is used, so no more than they receive is needed.
        most = min(self.received_bytes, self.planned_bytes or 0) if self.replaced else self.received_bytes
        if not self.moves:
            return most
        largest = max(move.needed_bytes for move in self.moves)
        if self._is_one_array:
            return min(most, largest)
        all_needs = sum(move.arrays * move.needed_bytes for move in self.moves)
        return min(most, all_needs if self.counted_bytes is None else max(largest, self.counted_bytes))

    @property
    def exact(self) -> bool:
        """Whether `needed_bytes` is the lower bound itself, rather than an upper bound of it."""
        if not self.moves or not all(move.exact for move in self.moves):
            return False
        return self._is_one_array or self.needed_bytes == max(move.needed_bytes for move in self.moves)

    @property
    def _is_one_array(self) -> bool:
        return sum(move.arrays for move in self.moves) == 1

    @property
    def wasted_bytes(self) -> int:
        """The bytes received beyond those needed, in a whole run of the program."""
        # `runs` is that of the first collective; another one of the place may be in a loop of fewer iterations.
        return min(self.total_bytes, self.runs * (self.received_bytes - self.needed_bytes))

    @property
    def replaced(self) -> bool:
        """Whether plans take its place."""
        return self.outcome is not None and self.outcome.replaced

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that take its place; if it stays, those between the layouts of each move, if every one has one."""
        if self.outcome is not None and self.outcome.replaced:
            return self.outcome.plans
        plans = tuple(move.plan for move in self.moves if move.plan is not None)
        return plans if len(plans) == len(self.moves) else ()

    @property
    def planned_bytes(self) -> int | None:
        """The bytes that a device would receive in these plans, or in what shifts its tiles; None without any."""
        if self.outcome is not None and self.outcome.replaced:
            return self.outcome.planned_bytes
        if not self.plans:
            return None
        return sum(move.arrays * plan.received_bytes for move, plan in zip(self.moves, self.plans, strict=True))

    @property
    def planned_peak_bytes(self) -> int | None:
        """The most bytes live at once in these plans, apart from arrays that they do not move."""
        return max((plan.peak_bytes for plan in self.plans), default=None)

    @property
    def saved_bytes(self) -> int:
        """The received bytes that the pass saves in a whole run of the program."""
        if self.planned_bytes is None or not self.replaced:
            return 0
        return max(0, self.runs * (self.received_bytes - self.planned_bytes))

    @property
    def reorder_bytes(self) -> int:
        """The received bytes that the pass would save besides in a whole run, if sums might take any order."""
        return 0 if self.outcome is None else self.runs * self.outcome.reorder_bytes

    @property
    def saved_temp_bytes(self) -> int:
        """The bytes of temporary memory that the pass saves."""
        return 0 if self.planned_temp_bytes is None else max(0, self.temp_bytes - self.planned_temp_bytes)

    def left(self, why: str) -> Place:
        """The same place, left as it is because of `why`."""
        return replace(self, outcome=replace(self.outcome or PassOutcome(), why=why))

    @property
    def why_left(self) -> str:
        """Why it stays as XLA made it; empty if it does not, or is not offered to the pass."""
        return "" if self.outcome is None else self.outcome.why

    @property
    def does(self) -> str:
        """The collectives in short, counted by kind: `2 all_gather, permute`."""
        counts = Counter(collective.kind for collective in self.collectives)
        return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in counts.items())

    @property
    def does_with_op(self) -> str:
        """The same, with the operation that they bring rows for: `all_gather, fft`."""
        return self.does if self.outcome is None or not self.outcome.op else f"{self.does}, {self.outcome.op}"

    @property
    def line(self) -> str:
        """The user's `file:line`, else the name of the operation."""
        return f"{self.where.file}:{self.where.line}" if self.where.file else self.where.op_name or ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "kind": self.kind,
            "where": describe_source(self.where),
            "causes": [cause._asdict() for cause in self.causes],
            "computation": self.computation,
            "times": self.times,
            "counted": self.counted,
            "collectives": [
                {
                    "kind": one.kind,
                    "name": one.name,
                    "dtype": one.dtype,
                    "operands": [list(array.dims) for array in one.operands],
                    "results": [list(array.dims) for array in one.results],
                    "group_size": one.group_size,
                    "combined": one.is_combined,
                    "received_bytes": one.received_bytes,
                    "times": one.times,
                }
                for one in self.collectives
            ],
            "moves": [move.to_dict() for move in self.moves],
            "received_bytes": self.received_bytes,
            "total_bytes": self.total_bytes,
            "needed_bytes": self.needed_bytes,
            "exact": self.exact,
            "wasted_bytes": self.wasted_bytes,
            "peak_bytes": self.peak_bytes,
            "temp_bytes": self.temp_bytes,
            "largest": None if self.largest is None else format_array(self.largest),
            "rebuilds": self.rebuilds,
            "rebuilt": None if self.rebuilt is None else format_array(self.rebuilt),
            "replaced": self.replaced,
            "why_left": self.why_left,
            "planned_bytes": self.planned_bytes,
            "planned_peak_bytes": self.planned_peak_bytes,
            "saved_bytes": self.saved_bytes,
            "reorder_bytes": self.reorder_bytes,
            "saved_temp_bytes": self.saved_temp_bytes,
        }

    def to_pass_dict(self) -> dict[str, Any]:
        """Plain data for the pass's reports: what it found, and what it did."""
        outcome = self.outcome or PassOutcome()
        return {
            "where": self.line,
            "computation": self.computation,
            "does": self.does_with_op,
            "received_bytes": self.received_bytes,
            "planned_bytes": outcome.planned_bytes,
            "plans": [plan.to_dict() for plan in outcome.plans],
            "permutes": outcome.permutes,
            "reorder_bytes": outcome.reorder_bytes,
            "replaced": self.replaced,
            "why": outcome.why,
        }

    def __str__(self) -> str:
        what = f"{self.line or self.computation}: {self.does_with_op}, {self.received_bytes} B received"
        if self.outcome is None:
            return what
        if self.outcome.why:
            return f"{what}: left, {self.outcome.why}"
        return f"{what}: replaced by {', '.join(self.outcome.steps) or 'nothing'}, {self.outcome.planned_bytes} B"


def format_array(array: Array) -> str:
    """An array as HLO writes it, without its memory layout.

    >>> format_array(Array("bf16", (8, 4), "1,0"))
    'bf16[8,4]'
    """
    return f"{array.dtype}[{','.join(map(str, array.dims))}]"


def sort_by_waste(places: Sequence[Place]) -> tuple[Place, ...]:
    """The places by wasted bytes, then by received bytes, the largest first."""
    return tuple(sorted(places, key=lambda place: (-place.wasted_bytes, -place.total_bytes)))


def describe_source(source: Source) -> dict[str, Any]:
    """The origin of an instruction as plain data."""
    return {
        "file": source.file,
        "line": source.line,
        "function": source.function,
        "op_name": source.op_name,
        "exact": source.exact,
    }


def shorten_line(line: str) -> str:
    """A `file:line` with its path shortened; the name of an argument or a result as it is.

    >>> shorten_line("train.py:42"), shorten_line("params['w']")
    ('train.py:42', "params['w']")
    """
    file, _, number = line.rpartition(":")
    return f"{shorten_path(file)}:{number}" if file and number.isdigit() else line


def shorten_path(file: str) -> str:
    """A path relative to the working directory if it is inside; else its last two parts."""
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return relative if not relative.startswith("..") else os.path.join(*file.split(os.sep)[-2:])

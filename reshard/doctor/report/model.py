"""What the doctor finds: places where a program moves data between devices, and a report of all of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from reshard.hlo import Array, Collective, Source, Traffic
from reshard.types.layout import Layout
from reshard.types.plan import Plan

RESHARD, SHIFT, MANUAL, REDUCTION = "reshard", "shift", "manual", "reduction"


class Known(NamedTuple):
    """A move that the program is known to need: the user's `file:line`, and its layouts.

    `near` are the lines of what makes and what takes the data: XLA gives collectives one of these.
    """

    where: str
    source: Layout
    target: Layout
    near: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Move:
    """An array that a place moves.

    `before` and `after` are the tiles of one device; `source` and `target` the layouts, where they are known: of the
    `whole` array, or of what groups of devices have of it. `needed_bytes` is what some device must receive, or, if
    not `exact`, at most that. `plan` is what reshard would do.
    """

    before: Array | None
    after: Array
    needed_bytes: int
    exact: bool
    source: Layout | None = None
    target: Layout | None = None
    whole: bool = False
    plan: Plan | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "before": None if self.before is None else array_text(self.before),
            "after": array_text(self.after),
            "source": None if self.source is None else str(self.source),
            "target": None if self.target is None else str(self.target),
            "mesh": None if self.source is None else str(self.source.mesh),
            "whole": self.whole,
            "needed_bytes": self.needed_bytes,
            "exact": self.exact,
            "plan": None if self.plan is None else self.plan.to_dict(),
        }


@dataclass(frozen=True)
class Place:
    """Where a program moves data between devices: collectives, and the local moves between them.

    `kind`: `reshard`, an array gets another layout; `shift`, parts of tiles go to neighbours (a halo, a roll);
    `manual`, a collective that the user wrote in a `shard_map`; `reduction`, partial sums are added up. All bytes are
    those of one device, in one run of the place; it runs `times` (None: that depends on data). `rebuilds` is `whole`
    if it makes all of the array on every device, larger than the tiles before and after, `group` if it makes all that
    its groups of devices have of it, else empty.
    """

    kind: str
    where: Source
    computation: str
    collectives: tuple[Collective, ...]
    moves: tuple[Move, ...] = ()
    peak_bytes: int = 0
    temp_bytes: int = 0
    largest: Array | None = None
    rebuilds: str = ""

    @property
    def rebuilds_whole(self) -> bool:
        """Whether the whole array is made on every device, though each needs only a part."""
        return self.rebuilds == "whole"

    @property
    def times(self) -> int | None:
        """How often it runs in one run of the program."""
        return self.collectives[0].times

    @property
    def runs(self) -> int:
        """The same, once where it depends on data."""
        return 1 if self.times is None else self.times

    @property
    def received_bytes(self) -> int:
        """What a device receives."""
        return sum(collective.received_bytes for collective in self.collectives)

    @property
    def needed_bytes(self) -> int:
        """What some device must receive, whatever is done; at most, if not `exact`. Reductions are not judged."""
        if not self.moves:
            return self.received_bytes
        return min(self.received_bytes, max(move.needed_bytes for move in self.moves))

    @property
    def exact(self) -> bool:
        """Whether `needed_bytes` is a lower bound, and not only an upper bound of it."""
        return bool(self.moves) and all(move.exact for move in self.moves)

    @property
    def wasted_bytes(self) -> int:
        """What is received in a whole run of the program beyond what is needed."""
        return self.runs * (self.received_bytes - self.needed_bytes)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """What reshard would do, if it is known for each move."""
        found = tuple(move.plan for move in self.moves if move.plan is not None)
        return found if len(found) == len(self.moves) else ()

    @property
    def planned_bytes(self) -> int | None:
        """What a device would receive in these plans."""
        return sum(plan.received_bytes for plan in self.plans) if self.plans else None

    @property
    def planned_peak_bytes(self) -> int | None:
        """The most that would be live at once in these plans, beside what they do not move."""
        return max(plan.peak_bytes for plan in self.plans) if self.plans else None

    @property
    def planned_temp_bytes(self) -> int | None:
        """The same without source and result."""
        return max(map(_temp_bytes, self.plans)) if self.plans else None

    @property
    def saved_bytes(self) -> int:
        """What these plans would save of what is received in a whole run of the program."""
        return 0 if self.planned_bytes is None else max(0, self.runs * (self.received_bytes - self.planned_bytes))

    @property
    def saved_temp_bytes(self) -> int:
        """What these plans would save of the temporary memory."""
        return 0 if self.planned_temp_bytes is None else max(0, self.temp_bytes - self.planned_temp_bytes)

    @property
    def does(self) -> str:
        """The collectives in short: `2 all_gather`.

        Equal ones in a row are counted, as they run.
        """
        counts = Counter(collective.kind for collective in self.collectives)
        return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in counts.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "kind": self.kind,
            "where": _source_data(self.where),
            "computation": self.computation,
            "times": self.times,
            "collectives": [_collective_data(collective) for collective in self.collectives],
            "moves": [move.to_dict() for move in self.moves],
            "received_bytes": self.received_bytes,
            "needed_bytes": self.needed_bytes,
            "exact": self.exact,
            "wasted_bytes": self.wasted_bytes,
            "peak_bytes": self.peak_bytes,
            "temp_bytes": self.temp_bytes,
            "largest": None if self.largest is None else array_text(self.largest),
            "rebuilds": self.rebuilds,
            "planned_bytes": self.planned_bytes,
            "planned_peak_bytes": self.planned_peak_bytes,
            "saved_bytes": self.saved_bytes,
            "saved_temp_bytes": self.saved_temp_bytes,
        }


class Compiled(NamedTuple):
    """The compiler's own account of a program's memory, in bytes on a device."""

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it, what is aliased counted once."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


@dataclass(frozen=True)
class Report:
    """Every place where a program moves data between devices, those that waste most first.

    Each collective of the compiled program is in one place. `traffic` is what one run receives, of the branches of a
    conditional the one that receives most; `compiled` is there where the compiler was at hand.
    """

    program: str
    devices: int
    places: tuple[Place, ...]
    traffic: Traffic = field(repr=False)
    compiled: Compiled | None = None

    @property
    def received_bytes(self) -> int:
        """What a device receives in one run."""
        return self.traffic.received_bytes

    @cached_property
    def wasted_bytes(self) -> int:
        """What a device receives in all places beyond what is needed; with every branch of a conditional."""
        return sum(place.wasted_bytes for place in self.places)

    @cached_property
    def saved_bytes(self) -> int:
        """What reshard's plans would save of it."""
        return sum(place.saved_bytes for place in self.places)

    @property
    def rebuilt(self) -> tuple[Place, ...]:
        """The places that make all of an array on every device, though each needs only a part."""
        return tuple(place for place in self.places if place.rebuilds_whole)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; bytes are those of one device."""
        return {
            "program": self.program,
            "devices": self.devices,
            "received_bytes": self.received_bytes,
            "launches": self.traffic.launches,
            "exact": self.traffic.exact,
            "wasted_bytes": self.wasted_bytes,
            "saved_bytes": self.saved_bytes,
            "rebuilt": len(self.rebuilt),
            "compiled": None if self.compiled is None else self.compiled._asdict(),
            "places": [place.to_dict() for place in self.places],
        }

    def to_json(self, indent: int | None = None) -> str:
        """One JSON object."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_html(self) -> str:
        """One page that needs nothing else."""
        from reshard.doctor.report.page import page

        return page(self)

    def __str__(self) -> str:
        from reshard.doctor.report.table import text

        return text(self)


def array_text(array: Array) -> str:
    """An array as HLO writes it, without its memory layout.

    >>> array_text(Array("bf16", (8, 4), "1,0"))
    'bf16[8,4]'
    """
    return f"{array.dtype}[{','.join(map(str, array.dims))}]"


def order(places: Sequence[Place]) -> tuple[Place, ...]:
    """Those that waste most first, then those that receive most."""
    return tuple(sorted(places, key=lambda place: (-place.wasted_bytes, -place.runs * place.received_bytes)))


def _temp_bytes(plan: Plan) -> int:
    """The most that is live at once beside source and target."""
    return plan.peak_bytes - plan.floor_bytes


def _source_data(source: Source) -> dict[str, Any]:
    return {
        "file": source.file,
        "line": source.line,
        "function": source.function,
        "op_name": source.op_name,
        "exact": source.exact,
    }


def _collective_data(collective: Collective) -> dict[str, Any]:
    return {
        "kind": collective.kind,
        "name": collective.name,
        "dtype": collective.dtype,
        "operands": [list(array.dims) for array in collective.operands],
        "results": [list(array.dims) for array in collective.results],
        "group_size": collective.group_size,
        "received_bytes": collective.received_bytes,
        "times": collective.times,
    }

"""Every byte of a report in one of three lists: places shown one by one, and the rest summed by line and kind.

places      total_bytes of each, where it is counted
reductions  received_bytes of each line        } together the program's received_bytes
others      received_bytes of each line
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from reshard.doctor.places import MANUAL, REDUCTION, Place, source_data
from reshard.hlo import Collective, Source

SMALL = 100  # a place is small if it receives less than 1 in 100 of the program's bytes


@dataclass(frozen=True)
class LineSum:
    """What the places of one kind at one line receive in collectives of one kind.

    `kind` is that of the places, `does` that of the collectives. `launches` and `received_bytes` are those of a whole
    run of the program.
    """

    where: Source
    kind: str
    does: str
    launches: int
    received_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "where": source_data(self.where),
            "kind": self.kind,
            "does": self.does,
            "launches": self.launches,
            "received_bytes": self.received_bytes,
        }


class Accounts(NamedTuple):
    """The places that are shown one by one, and the sums of all others, the largest first."""

    places: tuple[Place, ...]
    reductions: tuple[LineSum, ...]
    others: tuple[LineSum, ...]

    @property
    def received_bytes(self) -> int:
        """What a device receives in all of them in a whole run of the program."""
        counted = sum(place.total_bytes for place in self.places if place.counted)
        return counted + sum(line.received_bytes for line in (*self.reductions, *self.others))


def accounts(places: Sequence[Place], received_bytes: int, every: bool = False) -> Accounts:
    """The accounts of a program that receives `received_bytes` in total; with `every`, each place is shown.

    Reductions, the user's own `shard_map`s and places that receive little are summed, unless they rebuild an array.
    """
    shown = tuple(place for place in places if every or _is_shown(place, received_bytes))
    ids = {id(place) for place in shown}
    rest = [place for place in places if id(place) not in ids and place.counted]
    return Accounts(
        shown,
        by_line(place for place in rest if place.kind == REDUCTION),
        by_line(place for place in rest if place.kind != REDUCTION),
    )


def by_line(places: Iterable[Place]) -> tuple[LineSum, ...]:
    """The sums of these places by line and kind, the largest first."""
    sums: dict[tuple[object, ...], LineSum] = {}
    for place in places:
        for collective in place.collectives:
            line = _line_sum(place, collective)
            key = (line.kind, line.does, *_line(line.where))
            before = sums.get(key, replace(line, launches=0, received_bytes=0))
            sums[key] = replace(
                before,
                launches=before.launches + line.launches,
                received_bytes=before.received_bytes + line.received_bytes,
            )
    return tuple(sorted(sums.values(), key=lambda line: -line.received_bytes))


def _is_shown(place: Place, received_bytes: int) -> bool:
    if place.kind in (REDUCTION, MANUAL) and not place.replaced:
        return False
    return place.rebuilds_whole or SMALL * place.total_bytes >= received_bytes


def _line_sum(place: Place, collective: Collective) -> LineSum:
    runs = 1 if collective.times is None else collective.times
    return LineSum(place.where, place.kind, collective.kind, runs, runs * collective.received_bytes)


def _line(where: Source) -> tuple[object, ...]:
    """What two sums must agree on to be of one line: the file and line, or else the name of the operation."""
    return (where.op_name,) if where.file is None else (where.file, where.line)

"""What a report says: its places and totals, which of them are shown, and the words for each.

    places -> accounts   every received byte in one of three lists
           -> findings   the places that are shown one by one, those that look the same as one, with their words
    to_dict              the same figures as plain data

`table` and `page` write these in a terminal and as HTML, and have no words of their own for a place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.doctor.live_bytes import ProgramMemory
from reshard.doctor.places import (
    MANUAL,
    REDUCTION,
    SHIFT,
    ArrayMove,
    Place,
    describe_source,
    format_array,
    shorten_line,
    shorten_path,
)
from reshard.hlo import Source, Traffic
from reshard.plans.plan import Plan
from reshard.plans.plan_data import checked_indent
from reshard.types.units import bytes_text, counted, seconds_text
from reshard.types.whole import checked_flag

if TYPE_CHECKING:
    from reshard.doctor.advice import Advice

SMALL = 100  # a place is small if it receives less than 1 in 100 of the program's bytes
OTHER_BRANCH = "in a branch that receives less than another one does: not part of the totals"


class CompiledMemory(NamedTuple):
    """The compiler's own account of a program's memory, in bytes on one device.

    >>> CompiledMemory(argument_bytes=8, output_bytes=4, temp_bytes=20, alias_bytes=3).peak_bytes
    29
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it; bytes that an output shares with an argument count once."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


@dataclass(frozen=True)
class Findings:
    """The data of a `Report`, which adds the ways to print it.

    Each collective of the program is in exactly one of the places. `traffic` is what a device receives in one run:
    of the branches of a conditional, only the one that receives most counts. `compiled` is None if only the text of
    the program was given; `memory` is that of the text in its order.
    """

    program: str
    devices: int
    places: tuple[Place, ...]
    traffic: Traffic = field(repr=False)
    compiled: CompiledMemory | None = None
    memory: ProgramMemory = field(default=ProgramMemory(0, ()), repr=False)

    @property
    def received_bytes(self) -> int:
        """The bytes that a device receives in one run."""
        return self.traffic.received_bytes

    @cached_property
    def wasted_bytes(self) -> int:
        """The bytes of these that are not needed, at most all of them."""
        return sum(place.wasted_bytes for place in self.places if place.counted)

    @cached_property
    def saved_bytes(self) -> int:
        """The bytes of these that the plans of `reshard` would save."""
        return sum(place.saved_bytes for place in self.places if place.counted)

    @property
    def needed_bytes(self) -> int:
        """The bytes that the same operations need in the same layouts: what is received less what is wasted."""
        return self.received_bytes - self.wasted_bytes

    @property
    def reached_bytes(self) -> int:
        """The bytes that a device receives where the plans of `reshard` take the place of what they can."""
        return self.received_bytes - self.saved_bytes

    @cached_property
    def reorder_bytes(self) -> int:
        """The bytes that the plans would save besides with `sums="any order"`."""
        return sum(place.reorder_bytes for place in self.places if place.counted)

    @property
    def rebuilt(self) -> tuple[Place, ...]:
        """The places that make a whole array on every device, although each needs only a part."""
        return tuple(place for place in self.places if place.rebuilds_whole)

    def accounts(self, every: bool = False) -> Accounts:
        """All received bytes in three lists: places, reductions and others; with `every`, all are places.

        Reductions, the user's own `shard_map`s and places that receive little are summed, unless they rebuild an array.
        """
        checked_flag(every, "every")
        large = [
            place for place in self.places if place.rebuilds_whole or SMALL * place.total_bytes >= self.received_bytes
        ]
        own = (place for place in large if place.replaced or place.kind not in (REDUCTION, MANUAL))
        shown = self.places if every else tuple(own)
        ids = {id(place) for place in shown}  # two places may be equal, and each of them counts
        rest = [place for place in self.places if id(place) not in ids and place.counted]
        return Accounts(
            shown,
            sum_lines(place for place in rest if place.kind == REDUCTION),
            sum_lines(place for place in rest if place.kind != REDUCTION),
        )

    def shown(self, every: bool = False) -> list[Finding]:
        """The places that are shown one by one; those that look the same are one finding."""
        return join_alike(self.accounts(every).places)

    @property
    def title(self) -> str:
        """The program and its number of devices."""
        return f"{self.program} on {counted(self.devices, 'device')}"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The totals of the program in words, by name."""
        traffic, memory, compiled = self.traffic, self.memory, self.compiled
        loops = "" if traffic.exact else "; loops of unknown length are counted once"
        received = f"{bytes_text(self.received_bytes)} a device, {counted(traffic.launches, 'collective')}{loops}"
        facts = [("received", received)]
        if self.wasted_bytes or self.saved_bytes:
            facts.append(("needed", f"{bytes_text(self.needed_bytes)} by the same operations in the same layouts"))
            facts.append(("reached", f"{bytes_text(self.reached_bytes)} with reshard"))
        if self.wasted_bytes:
            saved = f", {bytes_text(self.saved_bytes)} of it saved by reshard" if self.saved_bytes else ""
            facts.append(("not needed", f"{bytes_text(self.wasted_bytes)}{saved}"))
        if self.reorder_bytes:
            facts.append(("sums", f"{bytes_text(self.reorder_bytes)} more would be saved with sums in any order"))
        if self.rebuilt:
            facts.append(("rebuilt", f"{counted(len(self.rebuilt), 'array')}, whole on every device"))
        if memory.moved_bytes:
            saved = f", {bytes_text(memory.saved_bytes)} saved by reshard in this order" if memory.saved_bytes else ""
            moved = f"{bytes_text(memory.moved_bytes)} made by moves{saved}"
            facts.append(("live", f"{bytes_text(memory.peak_bytes)} a device at the peak: {moved}"))
        timed = [(one.runs * move.arrays, move.plan) for one in self.places if one.counted for move in one.moves]
        seconds = [times * plan.seconds for times, plan in timed if plan is not None and plan.seconds is not None]
        if seconds:
            words = f"{seconds_text(sum(seconds))} in reshard's plans by the network's figures"
            facts.append(("time", f"{words}, for {len(seconds)} of {counted(len(timed), 'move')}"))
        if compiled is not None:
            whole, *parts = map(bytes_text, (compiled.peak_bytes, *compiled[:3]))
            words = "{} a device: arguments {}, outputs {}, temporary {}".format(whole, *parts)
            facts.append(("memory", words))
        return facts

    @property
    def hint(self) -> str:
        """What to do where most of what is received is needed in these layouts; empty if no data moves, or else."""
        wasted = max(self.wasted_bytes, self.saved_bytes)
        if not self.shown() or 2 * wasted > self.received_bytes:
            return ""
        why = "Most of what is received is needed in these layouts" if wasted else "No detour here"
        return f"{why}: `report.advise()`, or `--advise`, finds the constraint that costs this."

    def to_dict(self, every: bool = False, advice: Advice | None = None) -> dict[str, Any]:
        """The report as plain data, with `advice` if there is any; bytes are those of one device.

        The `total_bytes` of the `counted` places and the `received_bytes` of `reductions` and `others` add up to the
        program's `received_bytes`. With `every`, each place is one of `places`, and nothing is summed.
        """
        accounts = self.accounts(every)
        return {
            "program": self.program,
            "devices": self.devices,
            "received_bytes": self.received_bytes,
            "launches": self.traffic.launches,
            "exact": self.traffic.exact,
            "needed_bytes": self.needed_bytes,
            "reached_bytes": self.reached_bytes,
            "reorder_bytes": self.reorder_bytes,
            "wasted_bytes": self.wasted_bytes,
            "saved_bytes": self.saved_bytes,
            "rebuilt": len(self.rebuilt),
            "compiled": None if self.compiled is None else self.compiled._asdict(),
            "memory": self.memory.to_dict(),
            "places": [place.to_dict() for place in accounts.places],
            "reductions": [line.to_dict() for line in accounts.reductions],
            "others": [line.to_dict() for line in accounts.others],
            **({} if advice is None else {"advice": advice.to_dict()}),
        }

    def to_json(self, indent: int | None = None, every: bool = False, advice: Advice | None = None) -> str:
        """The report as one JSON object, that of `to_dict`."""
        return json.dumps(self.to_dict(every, advice), indent=checked_indent(indent))


# Every byte of a report in one of three lists: places shown one by one, and the rest summed by line and kind.
#
# places      total_bytes of each, where it is counted
# reductions  received_bytes of each line        } together the program's received_bytes
# others      received_bytes of each line


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

    @property
    def why(self) -> str:
        """Why the places are summed rather than shown: they are reductions, the user's own, or small."""
        if self.kind == REDUCTION:
            return "reduction"
        return "your shard_map" if self.kind == MANUAL else "receives little"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "where": describe_source(self.where),
            "kind": self.kind,
            "does": self.does,
            "launches": self.launches,
            "received_bytes": self.received_bytes,
        }


def sum_lines(places: Iterable[Place]) -> tuple[LineSum, ...]:
    """The sums of these places by line and kind, the largest first."""
    sums: dict[tuple[object, ...], LineSum] = {}
    for place in places:
        where = place.where
        line = (where.op_name,) if where.file is None else (where.file, where.line)
        for one in place.collectives:
            runs, key = 1 if one.times is None else one.times, (place.kind, one.kind, *line)
            before = sums.get(key, LineSum(where, place.kind, one.kind, 0, 0))
            received = before.received_bytes + runs * one.received_bytes
            sums[key] = replace(before, launches=before.launches + runs * one.launches, received_bytes=received)
    return tuple(sorted(sums.values(), key=lambda line: -line.received_bytes))


# The words for a place, the same in the table and on the page.


class Finding(NamedTuple):
    """A place that is shown, with the words for it; `alike` is the number of places that look the same."""

    place: Place
    alike: int = 1

    @property
    def is_wasteful(self) -> bool:
        """Whether there is more to say than its row does."""
        return bool(self.place.wasted_bytes or self.place.rebuilds)

    @property
    def where(self) -> str:
        """The user's line, without its folder: `near train.py:26`."""
        return format_short_line(self.place.where)

    @property
    def does(self) -> str:
        """The collectives of XLA, and how often they run: `5 x (all_to_all, permute)`."""
        place = self.place
        if place.times == 1:
            return place.does
        times = "n" if place.times is None else str(place.times)
        return f"{times} x {f'({place.does})' if ' ' in place.does else place.does}"

    @property
    def received(self) -> str:
        """The bytes received in a whole run of the program."""
        return bytes_text(self.place.total_bytes)

    @property
    def needed(self) -> str:
        """The bytes needed in a whole run of the program, with `<=` if only an upper bound is known."""
        if not self.place.moves:
            return "-"
        return f"{'' if self.place.exact else '<= '}{bytes_text(self.place.runs * self.place.needed_bytes)}"

    @property
    def saved(self) -> str:
        """The bytes that the pass saves in a whole run of the program; empty if it saves none."""
        return bytes_text(self.place.saved_bytes) if self.place.saved_bytes > 0 else ""

    @property
    def instead(self) -> str:
        """The steps of reshard's plans, `the same` if they save no bytes, or `-` if there are none."""
        place = self.place
        if not self.saved:
            # Sums and what a user wrote by hand are not judged. Of the rest, only what wastes no byte is "the same": a
            # waste without a known plan is nothing that a plan would do as well.
            if place.kind in (REDUCTION, MANUAL):
                return "-"
            if not self._is_better_by_hand:
                return "-" if place.kind == SHIFT or place.wasted_bytes else "the same"
        moving = [format_steps(plan) for plan in place.plans if plan.launches or len(place.plans) == 1]
        return "; ".join([*moving, *["permute"] * self._permutes]) or "nothing"

    @property
    def moves(self) -> tuple[tuple[str, str], ...]:
        """The layouts before and after each of its moves, or only the tiles if the layouts are unknown."""
        return tuple(map(format_move, self.place.moves))

    @property
    def rebuilt(self) -> str:
        """The array that is rebuilt although a device needs only a part, in words; empty if none is."""
        place = self.place
        if place.rebuilt is None:
            return ""
        what = "the whole array on every device" if place.rebuilds_whole else "all that its group of devices has"
        return f"rebuilds {what}: {format_array(place.rebuilt)}, {bytes_text(place.rebuilt.nbytes)}"

    @property
    def plan(self) -> str:
        """The plans of reshard with their cost and savings; empty if they save nothing."""
        place = self.place
        if not self.saved or place.planned_bytes is None:
            return ""
        launches = sum(plan.launches for plan in place.plans) + self._permutes
        launched = f" in {counted(launches, 'launch')}" if launches > 1 else ""
        temp = f", {bytes_text(place.planned_temp_bytes or 0)} of temporary memory"
        memory = f" and {bytes_text(place.saved_temp_bytes)} of memory" if place.saved_temp_bytes else ""
        received = bytes_text(place.runs * place.planned_bytes)
        return f"{self.instead}{launched}, {received} received{temp}; saves {self.saved}{memory}"

    @property
    def causes(self) -> str:
        """The shardings of the user's that it stands between, in words; empty if none is known."""
        words = [cause._replace(line=shorten_line(cause.line)) for cause in self.place.causes if cause.what]
        return f"near {' and '.join(map(str, words))} (not measured)" if words else ""

    @property
    def left(self) -> str:
        """Why the pass leaves a place that wastes bytes, and what would be received by hand; empty if it does not."""
        place = self.place
        if not place.wasted_bytes or place.replaced or place.outcome is None:
            return ""
        hand = ""
        if self._is_better_by_hand and place.planned_bytes is not None:
            hand = f"; reshard.jax.redistribute would receive {bytes_text(place.runs * place.planned_bytes)}"
        return f"the pass leaves it: {place.why_left}{hand}"

    @property
    def _is_better_by_hand(self) -> bool:
        """Whether plans between the layouts of a place that the pass leaves would receive less."""
        planned = self.place.planned_bytes
        return not self.place.replaced and planned is not None and planned < self.place.received_bytes

    @property
    def _permutes(self) -> int:
        outcome = self.place.outcome
        return outcome.permutes if outcome is not None and outcome.replaced else 0


def join_alike(places: Sequence[Place]) -> list[Finding]:
    """The places in their order; those that look the same are one finding."""
    findings: dict[tuple[object, ...], Finding] = {}
    for place in places:
        one = Finding(place)
        outcome = place.planned_bytes if place.replaced else place.why_left
        line = format_line(place.where)
        key = (place.kind, line, one.does, place.received_bytes, place.temp_bytes, one.moves, outcome)
        findings[key] = findings[key]._replace(alike=findings[key].alike + 1) if key in findings else one
    return list(findings.values())


def format_move(move: ArrayMove) -> tuple[str, str]:
    """The layouts before and after, or only the tiles if the layouts are unknown."""
    if move.source is not None and move.target is not None:
        return str(move.source), str(move.target)
    before = "several arrays" if move.before is None else f"tiles {format_array(move.before)}"
    return before, f"tiles {format_array(move.after)}"


def format_steps(plan: Plan) -> str:
    """The kinds of a plan's steps; slices are left out if there is any other step, since they move nothing."""
    kinds = [step.kind for step in plan.steps]
    return ", ".join([kind for kind in kinds if kind != "slice"] or kinds) or "nothing"


def format_line(source: Source) -> str:
    """The user's line, relative to the working directory: `train.py:26`; without one, JAX's name for the operation."""
    if source.file is None:
        return source.op_name.rpartition("/")[2] or "unknown"
    return f"{shorten_path(source.file)}:{source.line}"


def format_short_line(source: Source) -> str:
    """The user's line, without its folder: `near train.py:26`."""
    near = "" if source.exact or source.file is None else "near "
    return f"{near}{format_line(source).rpartition(os.sep)[2]}"


def format_origin(source: Source) -> str:
    """The user's line, its function, and JAX's name for the operation."""
    line = format_line(source) if source.exact else f"near {format_line(source)}"
    return ", ".join(dict.fromkeys(filter(None, (line, source.function or "", source.op_name))))

"""What the table and the page say of a place, in the same words."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reshard.doctor.report.model import MANUAL, REDUCTION, SHIFT, Move, Place, Report, array_text
from reshard.hlo import Source
from reshard.types.plan import Plan
from reshard.types.units import bytes_text, counted

_SMALL = 100  # A place is small that receives less than 1 in so many bytes, and wastes less than that.


def shown(report: Report) -> tuple[Place, ...]:
    """The places to show where not all are wanted: reshards and shifts that are not small beside the rest."""
    least = report.received_bytes / _SMALL
    return tuple(
        place
        for place in report.places
        if place.kind not in (REDUCTION, MANUAL)
        and (place.rebuilds_whole or place.runs * place.received_bytes >= least)
    )


class Row(NamedTuple):
    """Places that differ in nothing that is shown, and how many there are."""

    place: Place
    places: int

    @property
    def where(self) -> str:
        """The user's line, without folders."""
        near = "" if self.place.where.exact or self.place.where.file is None else "near "
        return f"{near}{where(self.place.where).rpartition(os.sep)[2]}"


def rows(places: Iterable[Place]) -> list[Row]:
    """The places in their order, alike ones as one row."""
    found: dict[tuple[object, ...], Row] = {}
    for place in places:
        layouts = tuple(move_text(move) for move in place.moves)
        key = (place.kind, where(place.where), does(place), place.received_bytes, place.temp_bytes, layouts)
        found[key] = Row(found[key].place, found[key].places + 1) if key in found else Row(place, 1)
    return list(found.values())


def hidden(report: Report, places: Sequence[Place]) -> str:
    """What is not among these places, in words; empty if nothing is."""
    left = [place for place in report.places if place not in places]
    reductions = [place for place in left if place.kind == REDUCTION]
    manual = [place for place in left if place.kind == MANUAL]
    small = len(left) - len(reductions) - len(manual)
    parts = [
        counted(len(reductions), "reduction") if reductions else "",
        f"{counted(len(manual), 'place')} of the program's own shard_map" if manual else "",
        f"{counted(small, 'place')} that {'receives' if small == 1 else 'receive'} little" if small else "",
    ]
    return ", ".join(filter(None, parts))


def where(source: Source) -> str:
    """The user's line, its file as seen from here: `train.py:26`; without one, JAX's name for the operation."""
    if source.file is None:
        return source.op_name.rpartition("/")[2] or "unknown"
    return f"{_short(source.file)}:{source.line}"


def origin(source: Source) -> str:
    """The line in full: its function, and JAX's name for the operation."""
    parts = [where(source) if source.exact else f"near {where(source)}", source.function or "", source.op_name]
    return ", ".join(dict.fromkeys(filter(None, parts)))


def does(place: Place) -> str:
    """What XLA does, and how often: `5 x (all_to_all, permute)`."""
    if place.times == 1:
        return place.does
    often = "n" if place.times is None else str(place.times)
    return f"{often} x {f'({place.does})' if ' ' in place.does else place.does}"


def received(place: Place) -> str:
    """What is received in a whole run of the program."""
    return bytes_text(place.runs * place.received_bytes)


def needed(place: Place) -> str:
    """What is needed of it; `<=` where only a bound of that is known."""
    if not place.moves:
        return "-"
    return f"{'' if place.exact else '<= '}{bytes_text(place.runs * place.needed_bytes)}"


def instead(place: Place) -> str:
    """What reshard would do."""
    if place.kind in (REDUCTION, MANUAL):
        return "-"
    if not place.plans:
        return "-" if place.kind == SHIFT or place.wasted_bytes else "the same"
    if not saves(place):
        return "the same"
    return "; ".join(steps(plan) for plan in place.plans)


def steps(plan: Plan) -> str:
    """A plan's steps in short.

    Slices, which move nothing, are left out where something else is there.
    """
    kinds = [step.kind for step in plan.steps]
    moving = [kind for kind in kinds if kind != "slice"]
    return ", ".join(moving or kinds) or "nothing"


def saves(place: Place) -> bool:
    """Whether reshard's plans would receive less."""
    return place.saved_bytes > 0


def rebuilt(place: Place) -> str:
    """That it makes more than a device needs, in words; empty if it does not."""
    if not place.rebuilds or place.largest is None:
        return ""
    what = "the whole array on every device" if place.rebuilds_whole else "all that its group of devices has"
    return f"rebuilds {what}: {array_text(place.largest)}, {bytes_text(place.largest.nbytes)}"


def move_text(move: Move) -> tuple[str, str]:
    """Before and after: layouts where they are known, else tiles."""
    if move.source is not None and move.target is not None:
        return str(move.source), str(move.target)
    return "" if move.before is None else f"tiles {array_text(move.before)}", f"tiles {array_text(move.after)}"


def plan_text(place: Place) -> str:
    """What reshard would do, with what it costs; empty if that saves nothing."""
    if not saves(place) or place.planned_bytes is None:
        return ""
    launches = sum(plan.launches for plan in place.plans)
    calls = f" in {counted(launches, 'launch')}" if launches > 1 else ""
    temp = f", {bytes_text(place.planned_temp_bytes or 0)} of temporary memory"
    memory = f" and {bytes_text(place.saved_temp_bytes)} of memory" if place.saved_temp_bytes else ""
    received = bytes_text(place.runs * place.planned_bytes)
    return f"{instead(place)}{calls}, {received} received{temp}; saves {bytes_text(place.saved_bytes)}{memory}"


def facts(report: Report) -> list[tuple[str, str]]:
    """The totals of a program."""
    traffic = report.traffic
    loops = "" if traffic.exact else "; loops of unknown length are counted once"
    rows = [
        ("received", f"{bytes_text(traffic.received_bytes)} a device, {counted(traffic.launches, 'collective')}{loops}")
    ]
    if report.wasted_bytes:
        can = f", {bytes_text(report.saved_bytes)} of it saved by reshard" if report.saved_bytes else ""
        rows.append(("not needed", f"{bytes_text(report.wasted_bytes)}{can}"))
    if report.rebuilt:
        number = len(report.rebuilt)
        rows.append(("rebuilt", f"{number} {'array' if number == 1 else 'arrays'}, whole on every device"))
    if report.compiled is not None:
        found = report.compiled
        rows.append(
            (
                "memory",
                f"{bytes_text(found.peak_bytes)} a device: arguments {bytes_text(found.argument_bytes)}, outputs "
                f"{bytes_text(found.output_bytes)}, temporary {bytes_text(found.temp_bytes)}",
            )
        )
    return rows


def title(report: Report) -> str:
    """The program, and what it runs on."""
    return f"{report.program} on {counted(report.devices, 'device')}"


def _short(file: str) -> str:
    """A path from the working directory, if it is in there; else its last two parts."""
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return relative if not relative.startswith("..") else os.path.join(*file.split(os.sep)[-2:])

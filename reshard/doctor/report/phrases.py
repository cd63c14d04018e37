"""The words for a place, the same in the table and on the page."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from reshard.doctor.places import MANUAL, REDUCTION, SHIFT, ArrayMove, LineSum, Place, array_text
from reshard.doctor.report.data import ReportData
from reshard.hlo import Frame, Source
from reshard.plans.plan import Plan
from reshard.types.units import bytes_text, counted

OTHER_BRANCH = "in a branch that receives less than another one does: not part of the totals"


def shown(report: ReportData) -> tuple[Place, ...]:
    """The places to show by default: reshards and shifts that are not small compared with the program."""
    return report.accounts().places


class Row(NamedTuple):
    """A place, and the number of places that look the same."""

    place: Place
    places: int

    @property
    def where(self) -> str:
        """The user's line, without its folder: `near train.py:26`."""
        return short_where(self.place.where)


def rows(places: Iterable[Place]) -> list[Row]:
    """The places in their order; places that look the same share a row."""
    rows: dict[tuple[object, ...], Row] = {}
    for place in places:
        layouts = tuple(move_text(move) for move in place.moves)
        outcome = place.planned_bytes if place.replaced else place.why_left
        key = (place.kind, where(place.where), does(place), place.received_bytes, place.temp_bytes, layouts, outcome)
        rows[key] = Row(rows[key].place, rows[key].places + 1) if key in rows else Row(place, 1)
    return list(rows.values())


def why_summed(line: LineSum) -> str:
    """Why the places of a line are summed rather than shown: they are reductions, the user's own, or small."""
    if line.kind == REDUCTION:
        return "reduction"
    return "your shard_map" if line.kind == MANUAL else "receives little"


def short_where(source: Source) -> str:
    """The user's line, without its folder: `near train.py:26`."""
    near = "" if source.exact or source.file is None else "near "
    return f"{near}{where(source).rpartition(os.sep)[2]}"


def where(source: Source) -> str:
    """The user's line, relative to the working directory: `train.py:26`; without one, JAX's name for the operation."""
    if source.file is None:
        return source.op_name.rpartition("/")[2] or "unknown"
    return f"{_short(source.file)}:{source.line}"


def frame_text(frame: Frame) -> str:
    """A line of a stack: `lib/model.py:3, forward`."""
    return ", ".join(filter(None, (f"{_short(frame.file)}:{frame.line}", frame.function)))


def origin(source: Source) -> str:
    """The user's line, its function, and JAX's name for the operation."""
    parts = [where(source) if source.exact else f"near {where(source)}", source.function or "", source.op_name]
    return ", ".join(dict.fromkeys(filter(None, parts)))


def does(place: Place) -> str:
    """The collectives of XLA, and how often they run: `5 x (all_to_all, permute)`."""
    if place.times == 1:
        return place.does
    times = "n" if place.times is None else str(place.times)
    return f"{times} x {f'({place.does})' if ' ' in place.does else place.does}"


def received(place: Place) -> str:
    """The bytes received in a whole run of the program."""
    return bytes_text(place.total_bytes)


def needed(place: Place) -> str:
    """The bytes needed in a whole run of the program, with `<=` if only an upper bound is known."""
    if not place.moves:
        return "-"
    return f"{'' if place.exact else '<= '}{bytes_text(place.runs * place.needed_bytes)}"


def instead(place: Place) -> str:
    """The steps of reshard's plans, `the same` if they save no bytes, or `-` if there are none."""
    if saves(place):
        return _steps_of(place)
    if place.kind in (REDUCTION, MANUAL):
        return "-"
    if by_hand(place):
        return _steps_of(place)
    return "-" if place.kind == SHIFT or place.wasted_bytes else "the same"


def by_hand(place: Place) -> bool:
    """Whether plans between the layouts of a place that the pass leaves would receive less."""
    return not place.replaced and place.planned_bytes is not None and place.planned_bytes < place.received_bytes


def _steps_of(place: Place) -> str:
    moving = [steps(plan) for plan in place.plans if plan.launches or len(place.plans) == 1]
    return "; ".join([*moving, *["permute"] * _permutes(place)]) or "nothing"


def _permutes(place: Place) -> int:
    return place.outcome.permutes if place.outcome is not None and place.replaced else 0


def steps(plan: Plan) -> str:
    """The kinds of a plan's steps; slices are left out if there is any other step, since they move nothing."""
    kinds = [step.kind for step in plan.steps]
    moving = [kind for kind in kinds if kind != "slice"]
    return ", ".join(moving or kinds) or "nothing"


def saves(place: Place) -> bool:
    """Whether reshard's plans would receive less."""
    return place.saved_bytes > 0


def rebuilt(place: Place) -> str:
    """The array that is rebuilt although a device needs only a part, in words; empty if none is."""
    if place.rebuilt is None:
        return ""
    what = "the whole array on every device" if place.rebuilds_whole else "all that its group of devices has"
    return f"rebuilds {what}: {array_text(place.rebuilt)}, {bytes_text(place.rebuilt.nbytes)}"


def move_text(move: ArrayMove) -> tuple[str, str]:
    """The layouts before and after, or only the tiles if the layouts are unknown."""
    if move.source is not None and move.target is not None:
        return str(move.source), str(move.target)
    before = "several arrays" if move.before is None else f"tiles {array_text(move.before)}"
    return before, f"tiles {array_text(move.after)}"


def plan_text(place: Place) -> str:
    """The plans of reshard with their cost and savings; empty if they save nothing."""
    if not saves(place) or place.planned_bytes is None:
        return ""
    launches = sum(plan.launches for plan in place.plans) + _permutes(place)
    launched = f" in {counted(launches, 'launch')}" if launches > 1 else ""
    temp = f", {bytes_text(place.planned_temp_bytes or 0)} of temporary memory"
    memory = f" and {bytes_text(place.saved_temp_bytes)} of memory" if place.saved_temp_bytes else ""
    received = bytes_text(place.runs * place.planned_bytes)
    return f"{instead(place)}{launched}, {received} received{temp}; saves {bytes_text(place.saved_bytes)}{memory}"


def left_text(place: Place) -> str:
    """Why the pass leaves a place that wastes bytes, and what would be received by hand; empty if it does not."""
    if not place.wasted_bytes or place.replaced or place.outcome is None:
        return ""
    hand = ""
    if by_hand(place) and place.planned_bytes is not None:
        hand = f"; reshard.jax.redistribute would receive {bytes_text(place.runs * place.planned_bytes)}"
    return f"the pass leaves it: {place.why_left}{hand}"


def facts(report: ReportData) -> list[tuple[str, str]]:
    """The totals of a program, by name."""
    traffic = report.traffic
    loops = "" if traffic.exact else "; loops of unknown length are counted once"
    rows = [
        ("received", f"{bytes_text(traffic.received_bytes)} a device, {counted(traffic.launches, 'collective')}{loops}")
    ]
    if report.wasted_bytes:
        saved = f", {bytes_text(report.saved_bytes)} of it saved by reshard" if report.saved_bytes else ""
        rows.append(("not needed", f"{bytes_text(report.wasted_bytes)}{saved}"))
    if report.rebuilt:
        rows.append(("rebuilt", f"{counted(len(report.rebuilt), 'array')}, whole on every device"))
    if report.memory.moved_bytes:
        live, moved = (bytes_text(size) for size in (report.memory.peak_bytes, report.memory.moved_bytes))
        saved = f", {bytes_text(report.memory.saved_bytes)} saved by reshard" if report.memory.saved_bytes else ""
        rows.append(("live", f"{live} a device at the peak: {moved} made by moves{saved}"))
    if report.compiled is not None:
        memory = report.compiled
        rows.append(
            (
                "memory",
                f"{bytes_text(memory.peak_bytes)} a device: arguments {bytes_text(memory.argument_bytes)}, outputs "
                f"{bytes_text(memory.output_bytes)}, temporary {bytes_text(memory.temp_bytes)}",
            )
        )
    return rows


def title(report: ReportData) -> str:
    """The program and its number of devices."""
    return f"{report.program} on {counted(report.devices, 'device')}"


def _short(file: str) -> str:
    """A path relative to the working directory if it is inside; else its last two parts."""
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return relative if not relative.startswith("..") else os.path.join(*file.split(os.sep)[-2:])

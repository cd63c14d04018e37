"""XLA's own warnings in a log, each with the move that it means, what it cost and what it could be; and their report.

    ... spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding
    {devices=[2,1,4]<=[4,2]T(1,0)} to {devices=[1,8,1]<=[8]} efficiently for HLO operation %add = f32[256,512,64]{2,1,0}
    add(%param, %param), ..., metadata={op_name="jit(step)/add" source_file="train.py" source_line=17}. As the last ...

The warning is one line. Its shape is that of one device's tile: the partitioner has already cut the operation. The
whole array is that tile times the tiles of the sharding before, so padding counts where sizes do not divide. XLA then
gathers all of it on every device and slices it. Newer compilers name `stack_frame_id` only, which is an index into the
module and says nothing in a log; then the name of the operation is all that there is.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from reshard.doctor.places import describe_source
from reshard.doctor.report.findings import format_origin, format_short_line, format_steps
from reshard.doctor.report.table import print_rows
from reshard.errors import NotationError, ReshardError
from reshard.geometry.remesh import common_mesh, remesh
from reshard.hlo import Source
from reshard.hlo.instruction import ARRAY, flatten_shape, read_shape
from reshard.hlo.module import metadata_fields
from reshard.plans.plan import Plan
from reshard.plans.plan_data import checked_indent
from reshard.show import terminal
from reshard.synth import Network, PlanOptions, find_plan
from reshard.types.layout import Layout
from reshard.types.units import bytes_text, counted
from reshard.types.whole import check_kind

MARK = "Involuntary full rematerialization."  # With XLA's full stop: texts about the warning are no logs.
_SHARDINGS = re.compile(r" from sharding (?P<source>\{.+?\}) to (?P<target>\{.+?\}) (?:efficiently|without) ")
_OPERATION = re.compile(rf"HLO operation:? (?:%?[\w.\-]+ = )?(?P<shape>{ARRAY.pattern})")
_METADATA = re.compile(r'metadata=(\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\})')


class WarningText(NamedTuple):
    """What a warning says: the shardings before and after, the tile of one device, and the line of the program.

    The texts are empty where the warning is cut off.
    """

    source: str
    target: str
    tile: str
    where: Source


@dataclass(frozen=True)
class Rematerialization:
    """A move that XLA could only make by gathering the whole array on every device.

    `times` is how often the log warns of it. `source` and `target` are the layouts, and `plan` is what `reshard` would
    do; both are None if the shardings cannot be read, and `problem` says why.
    """

    text: WarningText
    times: int
    source: Layout | None = None
    target: Layout | None = None
    plan: Plan | None = None
    problem: str = ""

    @property
    def where(self) -> Source:
        """The user's line, or the name of the operation."""
        return self.text.where

    @cached_property
    def whole_bytes(self) -> int:
        """The bytes of the whole array, which every device comes to have."""
        return 0 if self.source is None else self.source.nbytes(math.prod(self.source.shape))

    @property
    def received_bytes(self) -> int:
        """The bytes that a device receives in XLA's way: all of the array but its own tile."""
        return 0 if self.source is None else self.whole_bytes - self.source.tile_bytes

    @property
    def planned_bytes(self) -> int:
        """The bytes that a device would receive in the plan; without one, the bytes that it receives now."""
        return self.received_bytes if self.plan is None else self.plan.received_bytes

    @property
    def saved_bytes(self) -> int:
        """The received bytes that the plan would save in one run of the move."""
        return max(0, self.received_bytes - self.planned_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "where": describe_source(self.where),
            "times": self.times,
            "tile": self.text.tile,
            "shardings": [self.text.source, self.text.target],
            "source": None if self.source is None else str(self.source),
            "target": None if self.target is None else str(self.target),
            "mesh": None if self.source is None else str(self.source.mesh),
            "whole_bytes": self.whole_bytes,
            "received_bytes": self.received_bytes,
            "planned_bytes": self.planned_bytes,
            "saved_bytes": self.saved_bytes,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "problem": self.problem,
        }


def read_warnings(log: str, network: Network | str | None = None) -> tuple[Rematerialization, ...]:
    """The moves that a log warns of, equal ones once, those that cost most first.

    >>> line = ("W0 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go from "
    ...         "sharding {mesh['x'=4,'y'=2], [{'y'}, {'x'}]} to {mesh['x'=4,'y'=2], [{}, {'x', 'y'}]} efficiently for "
    ...         'HLO operation %add = f32[8,4]{1,0} add(%a, %b), metadata={op_name="jit(f)/add" stack_frame_id=2}. As')
    >>> (move,) = read_warnings(line)
    >>> print(move.where, move.source, "->", move.target, move.received_bytes, move.planned_bytes)
    jit(f)/add f32[{y}8, {x}4] -> f32[16, {x}{y}2] 896 64
    """
    check_kind(log, str, "log", "its text", NotationError)
    options = PlanOptions.read(network=network)
    moves: list[Rematerialization] = []
    texts: Counter[WarningText] = Counter()
    for warning in [part for line in log.splitlines() for part in line.split(MARK)[1:]]:
        shardings, operation = _SHARDINGS.search(warning), _OPERATION.search(warning)
        metadata = _METADATA.search(warning)
        fields = {} if metadata is None else metadata_fields(metadata[1])
        number = fields.get("source_line", "")
        where = Source(fields.get("op_name", ""), fields.get("source_file"), int(number) if number.isdigit() else None)
        source, target = ("", "") if shardings is None else shardings.group("source", "target")
        tile = "" if operation is None else operation["shape"].partition("{")[0]
        texts[WarningText(source, target, tile, where)] += 1
    for text, times in texts.items():
        if not (text.source and text.tile):
            moves.append(Rematerialization(text, times, problem="the warning is cut off"))
            continue
        try:
            source, target = _read_layouts(text)
            moves.append(Rematerialization(text, times, source, target, find_plan(source, target, options)))
        except ReshardError as error:
            moves.append(Rematerialization(text, times, problem=str(error)))
    return tuple(sorted(moves, key=lambda move: -move.received_bytes))


def _read_layouts(text: WarningText) -> tuple[Layout, Layout]:
    """The layouts before and after, on one mesh if there is one that has the axes of both."""
    (tile,) = flatten_shape(read_shape(text.tile))
    # The warning has one device's tile, so the whole array follows from how often the sharding before divides each dim,
    # which the sharding of an array of ones tells.
    probes = [Layout.from_hlo(sharding, (1,) * len(tile.dims), tile.dtype) for sharding in (text.source, text.target)]
    pieces = [math.prod(digit.radix for digit in dim.digits if digit.axis is not None) for dim in probes[0].dims]
    shape = [size * count for size, count in zip(tile.dims, pieces, strict=True)]
    devices = max(probe.mesh.size for probe in probes)  # {replicated} does not say how many
    source, target = (
        Layout.from_hlo(sharding, shape, tile.dtype, num_devices=devices) for sharding in (text.source, text.target)
    )
    joint = common_mesh(source.mesh, target.mesh)
    if joint is None:
        return source, target
    named = (mesh for mesh in (source.mesh, target.mesh) if len(mesh.axes) == len(joint.axes))
    mesh = next(named, joint)
    before, after = remesh(source, mesh), remesh(target, mesh)
    return (source, target) if before is None or after is None else (before, after)


# The report on a log: a table or JSON.


_DETAILS = ("times", "array", "reshard would", "receive")
_WHOLE = 76  # columns of a terminal that take the whole table


@dataclass(frozen=True)
class LogReport:
    """What XLA warns of in a log, those that cost most first; bytes are those of one device in one run of a move.

    >>> line = ("[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {devices=[4,1]<=[4]} "
    ...         "to {devices=[1,4]<=[4]} efficiently for HLO operation %add = f32[2,8]{1,0} add(%a, %b), "
    ...         'metadata={op_name="f/add" source_file="train.py" source_line=3}. As the last resort')
    >>> report = LogReport.of(line)
    >>> print(report)
    1 array that XLA rebuilds whole on every device
      received    192 B a device
      not needed  144 B
    <BLANKLINE>
          where        times   array   received   reshard would   receive   saves
      ───────────────────────────────────────────────────────────────────────────
      1   train.py:3       1   256 B      192 B   all_to_all         48 B   144 B
    <BLANKLINE>
      1  train.py:3, f/add
         f32[{d0}2, 8] -> f32[8, {d0}2] on <d0=4>
    >>> report.saved_bytes, report.to_dict()["moves"][0]["planned_bytes"]
    (144, 48)
    """

    moves: tuple[Rematerialization, ...]

    @classmethod
    def of(cls, log: str, network: Network | str | None = None) -> LogReport:
        """The report on the text of a log; `network` is that of `reshard.plan`."""
        return cls(read_warnings(log, network))

    @property
    def received_bytes(self) -> int:
        """The bytes that a device receives in XLA's way, each move once."""
        return sum(move.received_bytes for move in self.moves)

    @property
    def saved_bytes(self) -> int:
        """The bytes of these that the plans would save."""
        return sum(move.saved_bytes for move in self.moves)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "warning": MARK,
            "received_bytes": self.received_bytes,
            "saved_bytes": self.saved_bytes,
            "moves": [move.to_dict() for move in self.moves],
        }

    def to_json(self, indent: int | None = None) -> str:
        """The report as one JSON object."""
        return json.dumps(self.to_dict(), indent=checked_indent(indent))

    def __str__(self) -> str:
        return terminal.print_plain(lambda out: show_log(out, self))


def show_log(out: Console, report: LogReport) -> None:
    """Prints the report in a terminal: a row for each move, then its origin and layouts, or why these are not known."""
    title = f"{counted(len(report.moves), 'array')} that XLA rebuilds whole on every device"
    terminal.print_paragraph(out, title, style=terminal.NAME)
    facts = [("received", f"{bytes_text(report.received_bytes)} a device")]
    facts += [("not needed", bytes_text(report.saved_bytes))] if report.saved_bytes else []
    terminal.print_facts(out, facts)
    out.print()
    rows: list[dict[str, str | Text]] = []
    for at, move in enumerate(report.moves, 1):
        figures = (move.whole_bytes, move.received_bytes, move.planned_bytes, move.saved_bytes)
        whole, received, planned, saved = map(bytes_text, figures) if move.plan else ("-",) * 4
        rows.append({
            "": str(at),
            "where": format_short_line(move.where),
            "times": str(move.times),
            "array": whole,
            "received": Text(received, terminal.BAD),
            "reshard would": Text("-" if move.plan is None else format_steps(move.plan), terminal.STEP),
            "receive": planned,
            "saves": Text(saved, terminal.GOOD),
        })  # fmt: skip
    if rows:
        print_rows(out, rows, () if out.width >= _WHOLE else _DETAILS, whole="where", right=("array",))
    for at, move in enumerate(report.moves, 1):
        out.print()
        mark = f"  {at}  "
        terminal.print_paragraph(out, format_origin(move.where), mark)
        mark = " " * len(mark)
        if move.source is None or move.target is None:
            terminal.print_paragraph(out, f"not planned: {move.problem}", mark, terminal.FAINT)
            continue
        meshes = f" on {move.source.mesh}"
        if move.target.mesh != move.source.mesh:
            meshes += f" and {move.target.mesh}"
        terminal.print_paragraph(out, f"{move.source} -> {move.target}{meshes}", mark, terminal.NAME)

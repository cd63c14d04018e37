"""XLA's own warnings in a log, each with the move that it means, what it cost and what it could be.

    ... spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding
    {devices=[2,1,4]<=[4,2]T(1,0)} to {devices=[1,8,1]<=[8]} efficiently for HLO operation %add = f32[256,512,64]{2,1,0}
    add(%param, %param), ..., metadata={op_name="jit(step)/add" source_file="train.py" source_line=17}. As the last ...

The warning is one line. Its shape is that of one device's tile: the partitioner has already cut the operation. The
whole array is that tile times the tiles of the sharding before, so padding counts where sizes do not divide. XLA then
gathers all of it on every device and slices it. Newer compilers name `stack_frame_id` only, which is an index into the
module and says nothing in a log; then the name of the operation is all that there is.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from reshard.doctor.places import describe_source
from reshard.errors import ReshardError
from reshard.geometry.remesh import common_mesh, remesh
from reshard.hlo import Source
from reshard.hlo.module import metadata_fields
from reshard.hlo.text_reader import ARRAY, read_arrays
from reshard.plans.plan import Plan
from reshard.synth import Network, PlanOptions, find_plan
from reshard.types.layout import Layout

MARK = "Involuntary full rematerialization"
_SHARDINGS = re.compile(r" from sharding (?P<source>\{.+?\}) to (?P<target>\{.+?\}) (?:efficiently|without) ")
_OPERATION = re.compile(rf"HLO operation:? (?:%?[\w.\-]+ = )?(?P<shape>{ARRAY.pattern})")
_METADATA = re.compile(r'metadata=(\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\})')


class WarningText(NamedTuple):
    """What a warning says: the shardings before and after, the tile of one device, and the line of the program."""

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
        layouts = (self.source, self.target)
        source, target = (None if layout is None else str(layout) for layout in layouts)
        return {
            "where": describe_source(self.where),
            "times": self.times,
            "tile": self.text.tile,
            "shardings": [self.text.source, self.text.target],
            "source": source,
            "target": target,
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
    options = PlanOptions.read(network=network)
    moves: list[Rematerialization] = []
    for text, times in Counter(_read_texts(log)).items():
        if not (text.source and text.tile):
            moves.append(Rematerialization(text, times, problem="the warning is cut off"))
            continue
        try:
            source, target = _read_layouts(text)
            moves.append(Rematerialization(text, times, source, target, find_plan(source, target, options)))
        except ReshardError as error:
            moves.append(Rematerialization(text, times, problem=str(error)))
    return tuple(sorted(moves, key=lambda move: -move.received_bytes))


def _read_texts(log: str) -> Iterator[WarningText]:
    """What each warning of a log says; one whose shardings or tile are cut off has empty texts."""
    for text in log.splitlines():
        for warning in text.split(MARK)[1:]:
            shardings, operation = _SHARDINGS.search(warning), _OPERATION.search(warning)
            source, target = ("", "") if shardings is None else shardings.group("source", "target")
            tile = "" if operation is None else operation["shape"].partition("{")[0]
            metadata = _METADATA.search(warning)
            fields = {} if metadata is None else metadata_fields(metadata[1])
            number = fields.get("source_line", "")
            line = int(number) if number.isdigit() else None
            where = Source(fields.get("op_name", ""), fields.get("source_file"), line)
            yield WarningText(source, target, tile, where)


def _read_layouts(text: WarningText) -> tuple[Layout, Layout]:
    """The layouts before and after, on one mesh if there is one that has the axes of both."""
    (tile,) = read_arrays(text.tile)
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

"""Plans of loads: who reads what of stored tensors, in which waves, and how it moves from there.

    reading   an array as it is read: a stored tensor, a slab of a large one, or small ones packed together
    direct    what is read straight into a target, since whoever reads it is who needs it
    tree      moves of the rest, an ordinary `TreePlan`
    wave      readings that are in memory together; while one wave moves, the next is read

A slab is a part of each reader's own run of rows, so that its elements are wanted where those of the whole are. Of 12
rows for 2 readers, in 3 slabs:

    row              0  1  2  3  4  5  6  7  8  9 10 11
    reader           0  0  0  0  0  0  1  1  1  1  1  1
    slab             0  0  1  1  2  2  0  0  1  1  2  2

Slab k is the box [0:2, 2k:2k+2] of the tensor seen as (2, 6): `split` is 2.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any, NamedTuple

from reshard.errors import PlanError, quoted
from reshard.plans.plan import ShownPlan, TreePlan, device_kinds
from reshard.plans.plan_data import FORMAT, check_format, compare_figures
from reshard.plans.rules.bounds import busiest_bytes, joint_lower_bound
from reshard.plans.rules.collectives import received_in_step
from reshard.plans.stored import Box
from reshard.types.json_fields import Fields
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.units import bytes_text, counted, seconds_text

DECODED = 2 << 20
"""Bytes of elements that are decoded at once for a wave, or two chunks where chunks are larger."""

READ_BANDWIDTH = 2e9
"""Bytes/second that a process is taken to read, for the seconds of a plan that has a network."""


class PackedPart(NamedTuple):
    """A stored tensor in a pack: its elements, in C order, from `start` of the pack on."""

    stored: str
    start: int


@dataclass(frozen=True)
class Reading:
    """An array as it is read: `layout` says which device has which part, and is of the shape of what is read.

    That is the stored tensor `stored`, a `box` of it, or where `packed` lists parts these tensors, as one array of one
    dim; what lies between parts is padding, which is not read. Where `split` is not 1, the tensor's first dim is seen
    as two, of `split` equal parts, and `box` is of that. `name` is unique in its plan.
    """

    name: str
    stored: str
    box: Box | None
    layout: Layout
    split: int = 1
    packed: tuple[PackedPart, ...] = ()

    def __post_init__(self) -> None:
        extents = None if self.box is None else tuple(stop - start for start, stop in self.box)
        if extents not in (None, self.layout.shape) or (self.split > 1 and extents is None):
            raise PlanError(
                f"reading {quoted(self.name)}: its layout {self.layout} is not of the shape of its box {self.box}"
            )
        if self.packed and (self.stored or self.box or len(self.layout.shape) != 1):
            raise PlanError(
                f"reading {quoted(self.name)} packs {len(self.packed)} tensors; a pack has one dim, and no tensor or "
                f"box of its own"
            )

    @property
    def tensors(self) -> tuple[str, ...]:
        """The stored tensors that it reads, or reads part of."""
        return tuple(part.stored for part in self.packed) or (self.stored,)


class DirectRead(NamedTuple):
    """A reading that is read straight into `target`: into `box` of each tile, None for all of it.

    Where the target has dims more, the box has one index in them; elements are in the same order.
    """

    reading: str
    target: str
    box: Box | None = None


@dataclass(frozen=True)
class Wave:
    """What is read together: straight into targets (`direct`), or to be moved by `tree`.

    Packs are gathered by `tree`, as targets of their own names. The sources of `split_tree` are the tensors in them, by
    their stored names: parts of what was gathered, whole on each device, so that its moves send nothing.
    `staging_bytes` is what readings, gathered packs and chunks that are being decoded take beside targets, in the
    process where that is most.
    """

    readings: tuple[Reading, ...]
    direct: tuple[DirectRead, ...] = ()
    tree: TreePlan | None = None
    split_tree: TreePlan | None = None
    staging_bytes: int = 0

    def __post_init__(self) -> None:
        layouts = {reading.name: reading.layout for reading in self.readings}
        if len(layouts) != len(self.readings):
            raise PlanError("two readings of a wave have one name; give each its own")
        # A tree whose sources are not what was read could not be run; that its moves are right, its own plans check.
        there = () if self.tree is None else self.tree.source_layouts.items()
        wrong = [name for name, layout in there if layouts.get(name) != layout]
        if wrong:
            raise PlanError(f"the tree of a wave reads {quoted(wrong[:4])}, which are no readings of it as they are")
        packed = {part.stored for reading in self.readings for part in reading.packed}
        sources = set[str]() if self.split_tree is None else {*self.split_tree.source_layouts}
        if not sources <= packed or (self.split_tree is not None and self.split_tree.received_bytes):
            raise PlanError(f"{quoted(sorted(sources - packed)[:4])} are split from packs that do not have them")

    @property
    def trees(self) -> tuple[TreePlan, ...]:
        """The trees that there are, in the order in which they run."""
        return tuple(tree for tree in (self.tree, self.split_tree) if tree is not None)

    @cached_property
    def scratch_bytes(self) -> int:
        """What the trees take beside their sources and targets, on the device where that is most."""
        # One tree runs after the other, so that the larger need is that of both.
        most = 0
        for tree in self.trees:
            kinds = device_kinds(tree.plans.values())
            filled = set(tree.filled)
            new = [kinds.tile(layout) for name, layout in tree.target_layouts.items() if name not in filled]
            # Sources, and targets once: what is live at the peak beyond these is buffers and tiles on the way.
            ends = kinds.total([tree.arrays.live_bytes(kinds), *new])
            most = max(most, *(peak - live for peak, live in zip(tree.peaks, ends, strict=True)))
        return most


class ReaderFigures(NamedTuple):
    """What a process reads: bytes, runs of neighbours in files, and of how many files."""

    nbytes: int
    reads: int
    files: int


@dataclass(frozen=True)
class LoadPlan(ShownPlan):
    """Who reads what in which wave, and the moves of each wave, for all `targets`.

    `process_of` gives the process of each device, None where each is its own. `readers` has the figures of each
    process that reads, `stored_bytes` are those of the tensors that are read, as stored, `files` in how many files,
    and `asked_bytes` what a loader would read that reads in each process what its devices need.
    """

    targets: Mapping[str, Layout]
    waves: tuple[Wave, ...]
    process_of: Mapping[int, int] | None
    readers: Mapping[int, ReaderFigures]
    stored_bytes: int
    asked_bytes: int
    files: int
    format: str = ""

    def __post_init__(self) -> None:
        names = Counter(reading.name for wave in self.waves for reading in wave.readings)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise PlanError(f"readings of a load are called {quoted(twice[:4])} more than once")
        # What waves fill, layout by layout, must be the targets: no more, no less, and as they are.
        filled = dict[str, Layout]()
        for wave in self.waves:
            layouts = {reading.name: reading.layout for reading in wave.readings}
            packs = {reading.name for reading in wave.readings if reading.packed}
            for tree in wave.trees:
                filled.update((name, layout) for name, layout in tree.target_layouts.items() if name not in packs)
            for reading, target, box in wave.direct:
                # C order is kept, so that equal counts of elements are enough where a box has dims of one index.
                layout = self.targets.get(target)
                if layout is None or reading not in layouts or layouts[reading].dtype != layout.dtype:
                    raise PlanError(f"reading {quoted(reading)} does not fit the target {quoted(target)} as it is")
                tile = layouts[reading].tile_shape
                room = layout.tile_shape if box is None else tuple(stop - start for start, stop in box)
                if math.prod(room) != math.prod(tile) or (box is None and layouts[reading] != layout):
                    raise PlanError(f"reading {quoted(reading)} fills {room} of {quoted(target)} with tiles of {tile}")
                filled[target] = layout
        if filled != dict(self.targets):
            odd = sorted(name for name in {*filled, *self.targets} if filled.get(name) != self.targets.get(name))
            raise PlanError(f"nothing fills the targets {quoted(odd[:4])} of a load, or something else than they are")

    @property
    def read_bytes(self) -> dict[int, int]:
        """The bytes that each process reads."""
        return {process: each.nbytes for process, each in self.readers.items()}

    @property
    def reads(self) -> dict[int, int]:
        """The runs of neighbouring bytes, or the coded chunks, that each process reads."""
        return {process: each.reads for process, each in self.readers.items()}

    @cached_property
    def received_bytes(self) -> int:
        """Bytes that the busiest device receives in all waves together."""
        # The sum over waves of their busiest devices would be more: which device that is differs from wave to wave.
        steps = Counter(step for tree in self._trees for plan in tree.plans.values() for step in plan.steps)
        return busiest_bytes(
            (step.result.mesh, received_in_step(*step.judgement), count) for step, count in steps.items()
        )

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Bytes that some device receives whatever the moves, from what is read as it is read."""
        return joint_lower_bound(itertools.chain.from_iterable(tree.ends for tree in self._trees))

    @property
    def launches(self) -> int:
        """Collective calls of all waves."""
        return sum(tree.launches for tree in self._trees)

    @property
    def staging_bytes(self) -> int:
        """What readings take beside targets, in the process where that is most: two waves of them, if there are two."""
        return min(2, len(self.waves)) * max((wave.staging_bytes for wave in self.waves), default=0)

    @cached_property
    def result_bytes(self) -> int:
        """The bytes of all targets in the process that has the most of them."""
        return max(sum_by_process(self.targets.values(), self.process_of).values(), default=0)

    @cached_property
    def scratch_bytes(self) -> int:
        """What moves take beside readings and targets, in the process with the most devices.

        That is never more than a wave again: what is read moves at once from where it lies to where it is wanted, and
        what is on its way in messages is part of it.
        """
        devices = max(Counter((self.process_of or {}).values()).values(), default=1)
        return max((min(devices * wave.scratch_bytes, wave.staging_bytes) for wave in self.waves), default=0)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of arrays in a process at any time: results, two waves of readings, and buffers of moves."""
        return self.result_bytes + self.staging_bytes + self.scratch_bytes

    @property
    def read_seconds(self) -> float:
        """Predicted seconds of the busiest reader, by `READ_BANDWIDTH`."""
        return max((each.nbytes for each in self.readers.values()), default=0) / READ_BANDWIDTH

    @property
    def seconds(self) -> float | None:
        """Predicted seconds: each wave but the first is read while another moves. None without a network."""
        # The longer of the two is hidden by nothing, and of the shorter one wave is: the first read, or the last move.
        moved = self.moved_seconds
        if moved is None or not self.waves:
            return moved
        read = self.read_seconds
        return max(read, moved) + min(read, moved) / len(self.waves)

    @property
    def moved_seconds(self) -> float | None:
        """Predicted seconds of all moves, one after another; None without a network."""
        times = [tree.seconds for tree in self._trees if tree.launches]
        return None if any(each is None for each in times) else sum(each or 0.0 for each in times)

    @property
    def _trees(self) -> list[TreePlan]:
        return [tree for wave in self.waves for tree in wave.trees]

    def to_dict(self) -> dict[str, Any]:
        """The plan as the plain data of `to_json`."""
        # Thousands of layouts are on few meshes, whose device ids are long: each is written once, and named by number.
        meshes = dict[Mesh, int]()

        def write_layout(layout: Layout) -> dict[str, Any]:
            return {"layout": str(layout), "mesh": meshes.setdefault(layout.mesh, len(meshes))}

        def write_box(box: Box | None) -> list[int] | None:
            return None if box is None else [*itertools.chain(*box)]

        waves = [
            {
                "readings": [
                    {
                        "name": each.name,
                        "stored": each.stored,
                        "box": write_box(each.box),
                        "split": each.split,
                        "packed": [part._asdict() for part in each.packed],
                        **write_layout(each.layout),
                    }
                    for each in wave.readings
                ],
                "direct": [{**each._asdict(), "box": write_box(each.box)} for each in wave.direct],
                "tree": None if wave.tree is None else wave.tree.to_dict(),
                "split_tree": None if wave.split_tree is None else wave.split_tree.to_dict(),
                "staging_bytes": wave.staging_bytes,
            }
            for wave in self.waves
        ]
        targets = {name: write_layout(layout) for name, layout in self.targets.items()}
        processes = self.process_of
        return {
            "format": FORMAT,
            "stored_as": self.format,
            "stored_bytes": self.stored_bytes,
            "asked_bytes": self.asked_bytes,
            "files": self.files,
            "devices": None if processes is None else [*processes],
            "processes": None if processes is None else [*processes.values()],
            "readers": [{"process": process, **each._asdict()} for process, each in self.readers.items()],
            "meshes": [mesh.to_dict() for mesh in meshes],
            "targets": targets,
            "waves": waves,
            **self._figures,
        }

    @property
    def _figures(self) -> dict[str, Any]:
        return {
            "received_bytes": self.received_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "launches": self.launches,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, text: str) -> LoadPlan:
        """Reads the text of `to_json`, and checks readings, trees and figures again.

        Raises `PlanError` if it is not such a text, or if a figure is not what the waves make.
        """
        fields = Fields.read(text, "a plan of a load")
        check_format(fields.get("format", int))
        meshes = [Mesh.from_dict(each.data) for each in fields.objects("meshes", "mesh")]

        def read_layout(of: Fields) -> Layout:
            number = of.get("mesh", int)
            if not 0 <= number < len(meshes):
                raise of.error(f"mesh is {number}, but there are {len(meshes)}, counted from 0")
            return Layout.parse(of.get("layout", str), meshes[number])

        def read_box(of: Fields) -> Box | None:
            if of.get("box", list, NoneType, default=None) is None:
                return None
            ends = of.listed("box", int)
            return tuple(zip(ends[::2], ends[1::2], strict=False))

        def read_wave(of: Fields) -> Wave:
            direct = [
                DirectRead(each.get("reading", str), each.get("target", str), read_box(each))
                for each in of.objects("direct", "direct")
            ]
            trees = [
                None if of.get(name, dict, NoneType) is None else TreePlan.from_json(json.dumps(of.data[name]))
                for name in ("tree", "split_tree")
            ]
            readings: list[Reading] = []
            for each in of.objects("readings", "reading"):
                parts = [PackedPart(p.get("stored", str), p.get("start", int)) for p in each.objects("packed", "part")]
                names, split = (each.get("name", str), each.get("stored", str)), each.get("split", int)
                readings.append(Reading(*names, read_box(each), read_layout(each), split, tuple(parts)))
            return Wave(tuple(readings), tuple(direct), trees[0], trees[1], of.get("staging_bytes", int))

        targets = {
            name: read_layout(Fields.of(each, fields.what, f"target {quoted(name)}"))
            for name, each in fields.object("targets").items()
        }
        process_of = None
        if fields.get("devices", list, NoneType, default=None) is not None:
            process_of = dict(zip(fields.listed("devices", int), fields.listed("processes", int), strict=False))
        figures = ("process", *ReaderFigures._fields)
        readers = [[each.get(name, int) for name in figures] for each in fields.objects("readers", "reader")]
        plan = cls(
            targets,
            tuple(read_wave(wave) for wave in fields.objects("waves", "wave")),
            process_of,
            {each[0]: ReaderFigures(*each[1:]) for each in readers},
            fields.get("stored_bytes", int),
            fields.get("asked_bytes", int),
            fields.get("files", int),
            fields.get("stored_as", str),
        )
        compare_figures(fields.data, plan._figures, "the load")
        return plan

    def __str__(self) -> str:
        # Slabs of one tensor are several readings, and a pack is one reading of several tensors.
        tensors = {name for wave in self.waves for reading in wave.readings for name in reading.tensors}
        total = sum(each.nbytes for each in self.readers.values())
        share = f"{total / self.stored_bytes:.2f} of them read, " if self.stored_bytes else ""
        files = f" in {counted(self.files, 'file')}" if self.files else ""
        lines = [
            f"{counted(len(tensors), 'tensor')}, {bytes_text(self.stored_bytes)}{files}"
            f"{f' ({self.format})' if self.format else ''}, {share}"
            f"{counted(sum(each.reads for each in self.readers.values()), 'read')}"
        ]
        # Readers with equal figures share a line; where more than four differ, one line has the ranges.
        alike: defaultdict[ReaderFigures, list[int]] = defaultdict(list)
        for process in sorted(self.readers):
            alike[self.readers[process]].append(process)
        groups = [([each], who) for each, who in alike.items()]
        if len(groups) > 4:
            groups = [([*alike], sorted(self.readers))]
        moved = f"{bytes_text(self.received_bytes)}", f"{bytes_text(self.lower_bound_bytes)}"
        waves = max((wave.staging_bytes for wave in self.waves), default=0)
        peak = (
            f"{bytes_text(self.peak_bytes)} = results {bytes_text(self.result_bytes)} + {min(2, len(self.waves))} x "
            f"{bytes_text(waves)} staging + {bytes_text(self.scratch_bytes)} buffers"
        )
        rows = [("reader", "bytes", "reads", "files", "received", "bound", "peak")]
        for figures, who in groups:
            name = f"{who[0]}" if len(who) == 1 else f"{who[0]}..{who[-1]}"
            if len(who) != who[-1] - who[0] + 1:
                name = f"{len(who)} of {name}"
            ends = [(min(each), max(each)) for each in zip(*figures, strict=True)]
            size, reads, held = (
                write(low) if low == high else f"{write(low)}..{write(high)}"
                for write, (low, high) in zip((bytes_text, str, str), ends, strict=True)
            )
            rows.append((name, size, reads, f"{held} of {self.files}", *moved, peak))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        times = (
            ""
            if self.seconds is None
            else f", {seconds_text(self.read_seconds)} read + {seconds_text(self.moved_seconds or 0.0)} moved, "
            f"overlapped {seconds_text(self.seconds)}"
        )
        others = f"; a target-driven loader reads {self.asked_bytes / self.stored_bytes:.2f}x" * bool(self.stored_bytes)
        lines.append(f"{counted(len(self.waves), 'wave')}, {counted(self.launches, 'launch')}{times}{others}")
        return "\n".join(lines)


def sum_by_process(layouts: Iterable[Layout], process_of: Mapping[int, int] | None) -> dict[int, int]:
    """The bytes of tiles in each process: hundreds of arrays are on few meshes, whose devices are counted once."""
    # Tiles are counted with their padding, as runtimes allocate them.
    on_mesh = Counter[Mesh]()
    for layout in layouts:
        on_mesh[layout.mesh] += layout.tile_bytes
    totals = Counter[int]()
    for mesh, size in on_mesh.items():
        for device in mesh.devices:
            totals[device if process_of is None else process_of[device]] += size
    return dict(totals)

"""What other chunks of a stored array cost, as plain data: which blocks are read, what stays in memory, what spills.

    shape (8, 8), chunks (1, 8) -> (8, 1), 1 B an element

    memory    method                                                                        read + written
    64 B      direct: one region of all target chunks                                       64 + 64
    48 B      spill: 5 target columns are assembled while rows are read, 3 go through       88 + 88
              a file in which each block of target chunks is one run

Bytes are those of whole chunks without compression: last chunks of a grid count in full, as most formats store them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from reshard.types.units import bytes_text, seconds_text

BANDWIDTH = 1.0e9
"""Bytes a second that plans assume for files, as a disk of a server or a share of a parallel file system has them."""

LATENCY = 50e-6
"""Seconds that plans assume for a request: a chunk that is read or written, or a run of a spill file."""


@dataclass(frozen=True)
class RechunkTask:
    """An array, its chunks before and after, and what may be used. Sizes of memory are in bytes, for each process.

    `read_buffer` is what one source chunk needs beside its elements while it is read (0 if it is not coded),
    `write_buffer` one target chunk while it is written. A run of a spill file that is shorter than `least_run` bytes
    costs as much as `least_run`: file systems move whole pages, and requests take their time.
    """

    shape: tuple[int, ...]
    source_chunks: tuple[int, ...]
    target_chunks: tuple[int, ...]
    itemsize: int
    memory: int
    processes: int = 1
    read_buffer: int = 0
    write_buffer: int = 0
    least_run: int = 4096

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Spill:
    """What goes through files: each pass writes runs, one for each block, that the next pass reads in one piece.

    In a region, elements from `start` on along dim `dim` are spilled; those before are assembled as they are read.
    `reads` is the shape of the blocks that are read from the source, `runs` that of the blocks of each file in turn;
    those of the last file are whole target chunks.
    """

    dim: int
    start: int
    reads: tuple[int, ...]
    runs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ArrayRechunk:
    """How an array gets other chunks within memory.

    The array is cut into regions of shape `region`, whole target chunks each. A region is read along dim `along`,
    `step` rows at a time, into a window of `window` rows; target chunks are written as soon as their rows are there.
    A source chunk that regions share is read for each of them. With a `spill`, the window takes part of a region only.
    Several processes share the windows along dim `dealt`, each reading some of the chunks for all; if it is -1, each
    has regions (with a spill: blocks) of its own. `priced_bytes` are those read and written, with short runs of spill
    files as `least_run` bytes each.
    """

    task: RechunkTask
    region: tuple[int, ...]
    along: int
    dealt: int
    step: int
    window: int
    spill: Spill | None
    read_bytes: int
    written_bytes: int
    priced_bytes: int
    requests: int
    peak_bytes: int

    @property
    def method(self) -> Literal["direct", "sweep", "spill"]:
        """`direct`: whole blocks of target chunks; `sweep`: rows that straddle are carried; `spill`: through files."""
        if self.spill is not None:
            return "spill"
        return "direct" if self.window >= self.region[self.along] else "sweep"

    @property
    def traffic_bytes(self) -> int:
        """Bytes read and written, files between included."""
        return self.read_bytes + self.written_bytes

    @property
    def passes(self) -> int:
        """How often an element is read at most."""
        return 1 if self.spill is None else 1 + len(self.spill.runs)

    @property
    def seconds(self) -> float:
        """Time that it takes at `BANDWIDTH` and `LATENCY`, if all processes read and write at once."""
        return (self.traffic_bytes / BANDWIDTH + self.requests * LATENCY) / self.task.processes

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, totals included."""
        return {**asdict(self), "method": self.method, "passes": self.passes, "seconds": self.seconds}

    def __str__(self) -> str:
        task = self.task
        sizes = [" x ".join(map(str, each)) or "()" for each in (task.shape, task.source_chunks, task.target_chunks)]
        # In arrays, as those who compare tools count.
        units = self.traffic_bytes / max(1, task.nbytes)
        lines = [
            f"{sizes[0]} ({bytes_text(task.nbytes)}), chunks {sizes[1]} -> {sizes[2]}: {self.method}, "
            f"{self.passes} {'pass' if self.passes == 1 else 'passes'}",
            f"  read     {bytes_text(self.read_bytes)}",
            f"  written  {bytes_text(self.written_bytes)}",
            f"  traffic  {units:.2f} of the array, in {self.requests:,} requests",
            f"  peak     {bytes_text(self.peak_bytes)} of {bytes_text(task.memory)}"
            + ("" if task.processes == 1 else f" in each of {task.processes} processes"),
            f"  time     about {seconds_text(self.seconds)} at 1 GB/s",
        ]
        # How memory is used, for those who look closer.
        regions = math.prod(-(-size // block) for size, block in zip(task.shape, self.region, strict=True))
        block = " x ".join(map(str, self.region)) or "()"
        lines.append(f"  {regions} region{'s' if regions != 1 else ''} of {block}, along dim {self.along}")
        if self.spill is not None:
            runs = ", then ".join(" x ".join(map(str, run)) for run in self.spill.runs)
            kept = 100 * self.spill.start / max(1, self.region[self.spill.dim])
            lines.append(f"  {kept:.0f}% assembled as it is read, the rest through a file in runs of {runs}")
        return "\n".join(lines)


@dataclass(frozen=True)
class RechunkPlan:
    """How the arrays of a store get other chunks: each by its own plan, one after the other."""

    arrays: Mapping[str, ArrayRechunk]

    @property
    def read_bytes(self) -> int:
        """Bytes read, spill files included."""
        return sum(each.read_bytes for each in self.arrays.values())

    @property
    def written_bytes(self) -> int:
        """Bytes written, spill files included."""
        return sum(each.written_bytes for each in self.arrays.values())

    @property
    def traffic_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    @property
    def passes(self) -> int:
        """How often an element is read at most."""
        return max((each.passes for each in self.arrays.values()), default=1)

    @property
    def peak_bytes(self) -> int:
        """The most memory that a process takes beside what it has: windows, blocks, and chunks that are coded."""
        return max((each.peak_bytes for each in self.arrays.values()), default=0)

    @property
    def seconds(self) -> float:
        """Time that it takes at `BANDWIDTH` and `LATENCY`."""
        return sum(each.seconds for each in self.arrays.values())

    def to_json(self, indent: int | None = None) -> str:
        """The plan as a JSON object, with the plan of each array and totals."""
        totals = ("read_bytes", "written_bytes", "passes", "peak_bytes", "seconds")
        arrays = {name: each.to_dict() for name, each in self.arrays.items()}
        return json.dumps(
            {"format": 1, "arrays": arrays} | {name: getattr(self, name) for name in totals}, indent=indent
        )

    def __str__(self) -> str:
        parts = [f"{name}: {each}" if name else str(each) for name, each in self.arrays.items()]
        if len(parts) != 1:
            parts.append(
                f"{len(parts)} arrays: read {bytes_text(self.read_bytes)}, written {bytes_text(self.written_bytes)}, "
                f"peak {bytes_text(self.peak_bytes)}, about {seconds_text(self.seconds)}"
            )
        return "\n".join(parts)

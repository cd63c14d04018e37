"""Local memory traffic, peaks, and sizes of what the TPU compiler makes of moves, ahead of time: no TPU is needed.

    python benchmarks/tpu_traffic.py                      # 20 pairs each of rank 2, 3 and 4 on v5p 2x2x2
    python benchmarks/tpu_traffic.py --rank 3 --pairs 60
    python benchmarks/tpu_traffic.py --large              # long exchanges on 256 chips, a swap with a permute on 4,096

For each pair, `redistribute` and XLA's own identity are compiled side by side. Local bytes are what the compiled
instructions read and write in HBM, collectives left out: a loop's body counts as often as it runs, a slice or an
update in place counts the slice, tiles count with their padding, and values in on-chip memory count nothing. Modelled
time is received bytes over 180 GB/s plus local bytes over 2,765 GB/s, one after the other; `scheduled` is by the
compiled schedule, where copies run beside a permute between its start and its done. Peaks are the compiler's.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from rich.console import Console
from rich.table import Table

from benchmarks import aot  # first: it sets what libtpu reads
from benchmarks.schedule import clock
from reshard import hlo
from reshard.hlo.module import Computation, Instruction, Module
from reshard.lower.to_shard_map import count_padded_bytes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

WIRE, HBM = 180e9, 2.765e12
"""Bytes a second of a v5p chip."""
SHAPES = {2: (16384, 8192), 3: (512, 512, 512), 4: (64, 128, 128, 64)}
"""By rank; bfloat16. Those of rank 4 have minor dims below 128, which a TPU pads."""
NO_TRAFFIC = frozenset(
    [
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "partition-id",
        "replica-id",
        "after-all",
        "opt-barrier",
        "iota",
    ]
)
_ARRAY = re.compile(r"([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}


# ---- local bytes of a module ---------------------------------------------------------------------------


def local_bytes(module: Module, computation: Computation | None = None) -> int:
    """The HBM bytes that a run of the module reads and writes outside of collectives."""
    inside = computation or module.entry
    return sum(instruction_bytes(module, inside, instruction) for instruction in inside.instructions)


def _text(one: Instruction) -> str:
    """The text of the shape of what an instruction yields."""
    return one.source.shape_text


def instruction_bytes(module: Module, inside: Computation, one: Instruction) -> int:
    """The HBM bytes that an instruction reads and writes, 0 for a collective."""
    if one.opcode in NO_TRAFFIC or one.opcode.endswith("-done") or one.opcode in hlo.KINDS:
        return 0
    called = [module.computation(name) for name in one.called]
    if one.opcode == "while":
        body = module.computation(one.attributes["body"].lstrip("%"))
        return (hlo.trip_count(module, inside, one) or 1) * local_bytes(module, body)
    if one.opcode == "conditional":
        return max(local_bytes(module, branch) for branch in called)
    if one.opcode.removesuffix("-start") in hlo.KINDS or one.opcode == "custom-call":
        return 0
    if one.opcode in ("fusion", "fusion-start"):  # GPUs start some.
        if any(each.opcode.removesuffix("-start") in hlo.KINDS for each in called[0].instructions):
            return 0
        return _fusion(inside, one, called[0])
    if one.opcode == "dynamic-slice":
        read = 0 if _on_chip(_text(inside.by_name[one.operands[0]])) else _logical(_text(one))
        return read + _size(_text(one))
    if one.opcode == "dynamic-update-slice":
        update = _text(inside.by_name[one.operands[1]])
        return _size(update) + (0 if _on_chip(_text(one)) else _logical(update))
    if one.opcode == "copy-start":
        return _size(_text(inside.by_name[one.operands[0]])) + _size(_first(_text(one)))
    return _size(_text(one)) + sum(_size(_text(inside.by_name[name])) for name in one.operands)


def _fusion(inside: Computation, one: Instruction, fused: Computation) -> int:
    """What a fusion reads of each operand, and what it writes."""
    total = 0
    root = fused.root
    assert root is not None
    for each in fused.instructions:
        if each.opcode == "parameter":
            outer = inside.by_name[one.operands[int(each.literal)]]
            total += 0 if _on_chip(_text(outer)) else _read(fused, each)
    results = [fused.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    shapes = [part[0] for part in _ARRAY.finditer(_text(one))]
    for result, shape in zip(results, shapes, strict=True):
        made = _behind_bitcasts(fused, result)
        if _on_chip(shape):
            continue
        updated = made.opcode == "dynamic-update-slice"
        total += _logical(_text(fused.by_name[made.operands[1]])) if updated else _size(_text(result))
    return total


def _read(fused: Computation, parameter: Instruction) -> int:
    """The bytes that a fused computation reads of a parameter: slices of it, nothing of what is updated, or all."""
    users = list(fused.users.get(parameter.name, ()))
    total = 0
    for user in users:
        if user.opcode in ("bitcast", "reshape"):
            total += _read(fused, user)
        elif user.opcode in ("dynamic-slice", "slice"):
            total += _logical(_text(user))
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
            total += 0
        else:
            return _size(_text(parameter))
    return min(total, _size(_text(parameter)))


def _behind_bitcasts(fused: Computation, result: Instruction) -> Instruction:
    while result.opcode == "bitcast":
        result = fused.by_name[result.operands[0]]
    return result


def _first(shape: str) -> str:
    array = _ARRAY.search(shape)
    return array[0] if array else ""


def _on_chip(shape: str) -> bool:
    """Whether a value lives in on-chip memory."""
    return re.search(r"S\(\d+\)", shape) is not None


def _size(shape: str) -> int:
    """The bytes of a shape in HBM, padding included."""
    return sum(0 if _on_chip(part[0]) else _padded(part) for part in _ARRAY.finditer(shape))


def _logical(shape: str) -> int:
    """The bytes of a shape wherever it lives, padding included."""
    return sum(_padded(part) for part in _ARRAY.finditer(shape))


def _padded(part: re.Match[str]) -> int:
    dims = [int(size) for size in part[2].split(",") if size]
    order = [int(dim) for dim in (part[3] or "").split(",") if dim]
    tile = re.match(r"T\(([\d,]+)\)", part[4] or "")
    if tile and order:
        for size, dim in zip(reversed(tile[1].split(",")), order, strict=False):
            dims[dim] = -(-dims[dim] // int(size)) * int(size)
    digits = re.search(r"\d+", part[1])
    bits = _BITS.get(part[1]) or (int(digits[0]) if digits else 8)
    return math.prod(dims) * bits // 8


# ---- a pair ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One compiled module: local and received bytes, peak, permutes, compile seconds, bytes of HLO text, and seconds by
    its schedule."""

    local: int
    received: int
    peak: int
    permutes: int
    launches: int
    compile_s: float
    text: int
    stablehlo: int
    scheduled: float

    @classmethod
    def of(cls, lowered: Any, lower_s: float) -> Side:
        """Compiles a lowered function."""
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds = lower_s + time.perf_counter() - start
        text = compiled.as_text()
        module = hlo.parse(text)
        traffic = hlo.traffic(module)
        permutes = traffic.by_kind.get("permute")
        memory = aot.Memory.of(compiled)
        return cls(
            local_bytes(module),
            traffic.received_bytes,
            memory.peak,
            permutes.launches if permutes else 0,
            traffic.launches,
            seconds,
            len(text),
            len(lowered.as_text()),
            clock(module, WIRE, lambda *instruction: instruction_bytes(*instruction) / HBM).now,
        )

    @property
    def seconds(self) -> float:
        """Modelled seconds."""
        return self.received / WIRE + self.local / HBM


@dataclass(frozen=True)
class Row:
    """A move: ours, donated, and XLA's, with the bytes of its tiles.

    `reused` are the bytes of both tiles if XLA reuses the memory of a donated source as far as it can, which is where
    both are equally large, with their padding.
    """

    name: str
    steps: str
    tiles: int
    larger: int
    reused: int
    ours: Side
    donated: Side | None
    xla: Side | None


def compiled(compilation: aot.Compilation, way: str) -> Side:
    """The move by `ours`, `donated` or `xla`."""
    shape, dtype = compilation.array
    argument = jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype), sharding=compilation.before)

    def move(v: jax.Array) -> jax.Array:
        if way == "xla":
            return v
        return aot.redistribute(v, compilation.after, source=compilation.before, donate=way == "donated")

    start = time.perf_counter()
    donated = (0,) if way.startswith("donated") else ()
    lowered = jax.jit(move, out_shardings=compilation.after, donate_argnums=donated).lower(argument)
    return Side.of(lowered, time.perf_counter() - start)


def row(pair: aot.Pair, on: Any, ways: Mapping[str, bool]) -> Row:
    """Both compilers on one pair; `ways` says whether `donated` and `xla` are compiled, too."""
    compilation = aot.Compilation.of(pair, on)
    source, target = pair
    plan = compilation.plan
    steps = " ".join(f"{step.kind}/{step.mode.parts}" if step.mode.parts > 1 else step.kind for step in plan.steps)
    sides = {way: compiled(compilation, way) for way in ("donated", "xla") if ways.get(way)}
    tiles = source.tile_bytes, target.tile_bytes
    ours = compiled(compilation, "ours")
    padded = [count_padded_bytes(end.tile_shape, end.dtype) for end in pair]
    reused = padded[0] if padded[0] == padded[1] and tiles[0] == tiles[1] else sum(padded)
    name = f"{source} -> {target}"
    return Row(name, steps, sum(tiles), max(tiles), reused, ours, sides.get("donated"), sides.get("xla"))


def summary(rows: list[Row]) -> dict[str, float]:
    """The figures that have targets."""
    both = [(row, row.xla) for row in rows if row.xla]
    speed = [xla.seconds / row.ours.seconds for row, xla in both if row.ours.seconds]
    scheduled = [xla.scheduled / row.ours.scheduled for row, xla in both if row.ours.scheduled]
    donated = [row.donated.peak / row.larger for row in rows if row.donated]
    figures = {
        "pairs": len(rows),
        "local / (in + out)": geometric_mean(max(row.ours.local / row.tiles, 0.01) for row in rows),
        "  most": max(row.ours.local / row.tiles for row in rows),
        "local sum / sum": sum(row.ours.local for row in rows) / sum(row.tiles for row in rows),
        "peak / (in + out)": geometric_mean(row.ours.peak / row.tiles for row in rows),
        "  most ": max(row.ours.peak / row.tiles for row in rows),
    }
    if donated:
        figures |= {"donated peak / max(in, out)": geometric_mean(donated), "  most  ": max(donated)}
        figures["  if all was reused"] = geometric_mean(row.reused / row.larger for row in rows)
    if both:
        figures |= {
            "XLA local / (in + out)": geometric_mean(max(xla.local / row.tiles, 0.01) for row, xla in both),
            "XLA local sum / sum": sum(xla.local for _, xla in both) / sum(row.tiles for row in rows),
            "XLA peak / (in + out)": geometric_mean(xla.peak / row.tiles for row, xla in both),
            "peaks above XLA's": sum(row.ours.peak > 1.01 * xla.peak for row, xla in both),
            "modelled speed over XLA": geometric_mean(speed),
            "  least": min(speed),
            "  below 0.95": sum(ratio < 0.95 for ratio in speed),
            "scheduled speed over XLA": geometric_mean(scheduled),
            "  least ": min(scheduled),
            "  below 0.95 ": sum(ratio < 0.95 for ratio in scheduled),
        }
    return figures


def table(rows: list[Row]) -> Table:
    """A line for each move."""
    shown = Table()
    for column in (
        "move",
        "plan",
        "local",
        "XLA",
        "peak",
        "XLA",
        "donated",
        "speed",
        "scheduled",
        "permutes",
        "s",
        "XLA s",
        "HLO",
        "StableHLO",
    ):
        shown.add_column(column, justify="left" if column in ("move", "plan") else "right")
    for one in sorted(rows, key=lambda row: -row.ours.local / row.tiles):
        xla, donated = one.xla, one.donated
        shown.add_row(
            one.name,
            one.steps,
            f"{one.ours.local / one.tiles:.2f}",
            f"{xla.local / one.tiles:.2f}" if xla else "",
            f"{one.ours.peak / one.tiles:.2f}",
            f"{xla.peak / one.tiles:.2f}" if xla else "",
            f"{donated.peak / one.larger:.2f}" if donated else "",
            f"{xla.seconds / one.ours.seconds:.2f}" if xla and one.ours.seconds else "",
            f"{xla.scheduled / one.ours.scheduled:.2f}" if xla and one.ours.scheduled else "",
            str(one.ours.permutes),
            f"{one.ours.compile_s:.1f}",
            f"{xla.compile_s:.1f}" if xla else "",
            f"{one.ours.text / 1e3:.0f} K",
            f"{one.ours.stablehlo / 1e3:.0f} K",
        )
    return shown


def random_rows(topology: str, rank: int, count: int, seed: int, ways: Mapping[str, bool]) -> Iterator[Row]:
    """Random pairs of one rank."""
    on = aot.devices(topology)
    for pair in aot.pairs(aot.MESHES[len(on)], count, seed, (SHAPES[rank], "bfloat16")):
        yield row(pair, on, ways)


LARGE = (
    ("v5p:4x8x8", {"x": 4, "y": 8, "z": 8}, "bf16[{z}128,{y}{x}32,1024]", "bf16[1024,{z}128,{y}{x}32]"),
    ("v5p:4x8x8", {"x": 4, "y": 8, "z": 8}, "bf16[1024,{x}256,{y}{z}16]", "bf16[{x}256,{z}{y}16,1024]"),
    ("v5p:8x8x16", {"a": 8, "b": 8, "c": 16}, "bf16[{c}256,{b}{a}64,4096]", "bf16[4096,{c}256,{a}{b}64]"),
    ("v5p:16x16x16", {"a": 16, "b": 16, "c": 16}, "bf16[{c}256,{b}{a}16,4096]", "bf16[4096,{c}256,{a}{b}16]"),
)
"""Topologies, mesh axes and moves that are long exchanges, or swap axes and permute devices at once."""


def large_rows(most: int, ways: Mapping[str, bool]) -> Iterator[Row]:
    """The moves of `LARGE` on at most so many chips."""
    for topology, axes, before, after in LARGE:
        mesh = Mesh(axes)
        if mesh.size <= most:
            yield row((Layout.parse(before, mesh), Layout.parse(after, mesh)), aot.devices(topology), ways)


def main(arguments: list[str] | None = None) -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--rank", type=int, action="append", choices=SHAPES, help="of the arrays; repeatable")
    parser.add_argument("--pairs", type=int, default=20, help="random pairs of each rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--large", action="store_true", help="the moves on many chips, instead of random ones")
    parser.add_argument("--most", type=int, default=4096, help="chips, with --large")
    parser.add_argument("--no-xla", action="store_true", help="leave XLA's own identity out")
    parser.add_argument("--no-donated", action="store_true", help="leave donated sources out")
    options = parser.parse_args(arguments)
    ways = {"xla": not options.no_xla, "donated": not options.no_donated and not options.large}
    console = Console(highlight=False, width=230)
    groups = {f"rank {rank}": rank for rank in options.rank or SHAPES} if not options.large else {"large": 0}
    for name, rank in groups.items():
        moves = (
            random_rows(options.topology, rank, options.pairs, options.seed, ways)
            if rank
            else large_rows(options.most, ways)
        )
        rows: list[Row] = []
        for one in moves:
            rows.append(one)
            print(len(rows), end=" ", file=sys.stderr, flush=True)
        console.print(name, table(rows))
        for label, figure in summary(rows).items():
            console.print(f"{label:30}{figure:10.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

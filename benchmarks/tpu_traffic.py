"""What compilers make of moves that nobody chose, ahead of time: seconds by the compiler's own clock, bytes, and peaks.

    python benchmarks/tpu_traffic.py                              # 120 pairs, ranks 2 to 4, on v5p 2x2x2
    python benchmarks/tpu_traffic.py --seed 7 --worst 20          # the same pairs again, and the worst 20 of them
    python benchmarks/tpu_traffic.py --topology v5p:4x4x4 --pairs 20
    python benchmarks/tpu_traffic.py --topology v5e:2x4           # v5e:4x4
    python benchmarks/tpu_traffic.py --gpu 1x1x8                  # 8 H100s; aot.py says what to install
    python benchmarks/tpu_traffic.py --large                      # long exchanges on 256 chips, a swap on 4,096

Pairs are drawn by a seed that changes with every run and is printed; `--seed` repeats it. Sizes are 192 to 768 and
powers of two, meshes those of `aot.MESHES`. For each pair, `redistribute` and XLA's own identity are compiled side by
side.

Seconds are those of the wires and, after them, of the chip:

- wires: for each collective what crosses the worst cut of the topology, by its groups or pairs (`schedule.Fabric`).
  v5p 2x2x2 has lines of 90 GB/s, no rings.
- the chip: libtpu's own `estimated_cycles`, loops times their trips (`hlo.compiled_cycles`). A GPU's compiler gives
  none: there it is local bytes over the bandwidth of memory.

`whole clock` adds, at the bandwidth of HBM, the bytes of kernels for which libtpu has no estimate; `scheduled` is by
the compiled schedule, where copies run beside a permute between its start and its done. Local bytes are what
instructions read and write in HBM, collectives left out: a loop's body counts as often as it runs, a slice or an update
in place counts the slice, tiles count with their padding, and values in on-chip memory count nothing. Peaks are the
compiler's.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from rich.console import Console
from rich.table import Table

from benchmarks import aot  # first: it sets what libtpu reads
from benchmarks.against_shardy import named
from benchmarks.schedule import Fabric, clock, wire_seconds
from reshard import hlo
from reshard.hlo.compiled_cycles import count_cycles, estimates_cycles, instruction_cycles
from reshard.hlo.instruction import Instruction
from reshard.hlo.module import Computation, Module
from reshard.lower.to_shard_map import count_padded_bytes
from reshard.synth.network import Network
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from tests.layouts import contiguous_layouts


class Chip(NamedTuple):
    """The network preset of a chip, the bytes a second of its memory, and the clock of its TensorCores, in Hz."""

    network: str
    hbm: float
    hertz: float


CHIPS = {
    # Cloud TPU docs: 2,765 and 819 GB/s. The clock is peak bf16 FLOP/s over 2 x 128 x 128 for each matrix unit: 459e12
    # for 2 x 4 units, 197e12 for 4 (Cloud TPU docs, v5p and v5e, system architecture).
    "TPU v5": Chip("tpu-v5p", 2.765e12, 1.75e9),
    "TPU v5 lite": Chip("tpu-v5e", 8.19e11, 1.5e9),
    # NVIDIA H100 SXM data sheet.
    "NVIDIA H100 80GB HBM3": Chip("h100", 3.35e12, 0.0),
}
SIZES = {2: (768, 1536, 3072, 4096, 6144, 8192), 3: (192, 256, 384, 512, 768), 4: (32, 48, 64, 128, 192, 384)}
"""Of dims, by rank; bfloat16."""
LEAST, MOST = 1 << 18, 1 << 27
"""Bytes of an array for each device."""
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


Skip = Callable[[Instruction], bool]


def local_bytes(module: Module, computation: Computation | None = None, skip: Skip = lambda _: False) -> int:
    """The HBM bytes that a run of the module reads and writes outside of collectives, without what is to be skipped."""
    inside = computation or module.entry
    return sum(instruction_bytes(module, inside, one, skip) for one in inside.instructions if not skip(one))


def _text(one: Instruction) -> str:
    """The text of the shape of what an instruction yields."""
    return one.shape_text


def instruction_bytes(module: Module, inside: Computation, one: Instruction, skip: Skip = lambda _: False) -> int:
    """The HBM bytes that an instruction reads and writes, 0 for a collective."""
    if one.opcode in NO_TRAFFIC or one.opcode.endswith("-done") or one.opcode in hlo.KINDS:
        return 0
    called = [module.computation(name) for name in one.called]
    if one.opcode == "while":
        body = module.computation(one.attributes["body"].lstrip("%"))
        return (hlo.trip_count(module, inside, one) or 1) * local_bytes(module, body, skip)
    if one.opcode == "conditional":
        return max(local_bytes(module, branch, skip) for branch in called)
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
    if one.opcode == "slice-start":  # ((operand), result, context)
        result = list(_ARRAY.finditer(_text(one)))[len(one.operands)][0]
        return _size(result) + (0 if _on_chip(_text(inside.by_name[one.operands[0]])) else _logical(result))
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
    # What starts yields its operands and a context, too.
    shapes = [part[0] for part in _ARRAY.finditer(_text(one))] if one.opcode == "fusion" else map(_text, results)
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
    """One compiled module: seconds of wires, chip, kernels without an estimate, and by the schedule; bytes and peak."""

    wires: float
    chip: float
    unknown: float
    scheduled: float
    local: int
    received: int
    peak: int
    launches: int
    cycles: int
    compile_s: float
    text: int

    @classmethod
    def of(cls, lowered: Any, lower_s: float, on: Sequence[Any]) -> Side:
        """Compiles a lowered function for these devices."""
        start = time.perf_counter()
        compiled = lowered.compile()
        compile_s = lower_s + time.perf_counter() - start
        chip = CHIPS[on[0].device_kind]
        fabric = Fabric.of(on, Network.preset(chip.network))
        text = compiled.as_text()
        module = hlo.parse(text)
        traffic, local = hlo.traffic(module), local_bytes(module)

        def copying(module: Module, inside: Computation, one: Instruction) -> float:
            counted = instruction_cycles(module, inside, one) if chip.hertz else 0
            return counted / chip.hertz if counted else instruction_bytes(module, inside, one) / chip.hbm

        executed = hlo.collectives(module)
        wires = dict(wire_seconds(executed, fabric))
        cycles = count_cycles(module) if chip.hertz else 0
        unknown = local_bytes(module, skip=estimates_cycles) / chip.hbm if chip.hertz else 0.0
        return cls(
            sum((one.times or 1) * wires[f"{one.computation}/{one.name}"] for one in executed),
            cycles / chip.hertz if chip.hertz else local / chip.hbm,
            unknown,
            clock(module, fabric, copying).now,
            local,
            traffic.received_bytes,
            aot.Memory.of(compiled).peak,
            traffic.launches,
            cycles,
            compile_s,
            len(text),
        )

    @property
    def seconds(self) -> float:
        """Wires, then the chip."""
        return self.wires + self.chip

    @property
    def whole(self) -> float:
        """With the kernels that the compiler has no estimate for."""
        return self.seconds + self.unknown


CLOCKS: Mapping[str, Callable[[Side], float]] = {
    "seconds": lambda side: side.seconds,
    "whole clock": lambda side: side.whole,
    "scheduled": lambda side: side.scheduled,
}


@dataclass(frozen=True)
class Row:
    """A move: ours, donated, and XLA's, with the bytes of its tiles.

    `reused` are the bytes of both tiles if XLA reuses the memory of a donated source as far as it can, which is where
    both are equally large, with their padding.
    """

    name: str
    mesh: str
    rank: int
    kind: str
    steps: str
    tiles: int
    larger: int
    reused: int
    ours: Side
    donated: Side | None
    xla: Side | None

    def over_xla(self, seconds: Callable[[Side], float]) -> float:
        """XLA's seconds over ours; 1 where both do nothing."""
        assert self.xla is not None
        return max(seconds(self.xla), 1e-9) / max(seconds(self.ours), 1e-9)


def compile_side(compilation: aot.Compilation, way: str, on: Sequence[Any]) -> Side:
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
    return Side.of(lowered, time.perf_counter() - start, on)


def order_devices(devices: Sequence[Any]) -> tuple[Any, ...]:
    """Devices by their places on the torus, which the axes of a mesh are to follow: libtpu lists them host by host."""
    return tuple(sorted(devices, key=lambda device: tuple(reversed(getattr(device, "coords", ())))))


def compile_row(pair: aot.Pair, on: Sequence[Any], ways: Mapping[str, bool]) -> Row:
    """Both compilers on one pair; `ways` says whether `donated` and `xla` are compiled, too."""
    compilation = aot.Compilation.of(pair, on)
    source, target = pair
    plan = compilation.plan
    steps = " ".join(f"{step.kind}/{step.mode.parts}" if step.mode.parts > 1 else step.kind for step in plan.steps)
    kinds = {step.kind for step in plan.steps}
    sides = {way: compile_side(compilation, way, on) for way in ("donated", "xla") if ways.get(way)}
    padded = [count_padded_bytes(end.tile_shape, end.dtype) for end in pair]
    tiles = source.tile_bytes, target.tile_bytes
    return Row(
        f"{source} -> {target}",
        str(source.mesh),
        len(source.shape),
        next(kind for kind in ("all_gather", "all_to_all", "exchange", "permute", "slice", "") if kind in {*kinds, ""}),
        steps,
        sum(tiles),
        max(tiles),
        padded[0] if padded[0] == padded[1] and tiles[0] == tiles[1] else sum(padded),
        compile_side(compilation, "ours", on),
        sides.get("donated"),
        sides.get("xla"),
    )


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that have targets."""
    donated = [row for row in rows if row.donated]
    figures: dict[str, float] = {"pairs": len(rows)}
    both = [(row, row.xla) for row in rows if row.xla]
    for name, seconds in CLOCKS.items() if both else ():
        speed = [row.over_xla(seconds) for row, _ in both]
        figures |= {
            f"speed over XLA, {name}": geometric_mean(speed),
            f"  least, {name}": min(speed),
            f"  below 0.95, {name}": sum(ratio < 0.95 for ratio in speed),
        }
    figures |= {
        "peak / (in + out)": geometric_mean(row.ours.peak / row.tiles for row in rows),
        "  most": max(row.ours.peak / row.tiles for row in rows),
    }
    if both:
        figures["peaks above XLA's"] = sum(row.ours.peak > 1.01 * xla.peak for row, xla in both)
        figures["XLA peak / (in + out)"] = geometric_mean(xla.peak / row.tiles for row, xla in both)
    figures["local / (in + out)"] = geometric_mean(max(row.ours.local / row.tiles, 0.01) for row in rows)
    figures["local sum / sum"] = sum(row.ours.local for row in rows) / sum(row.tiles for row in rows)
    if both:
        figures |= {
            "XLA local / (in + out)": geometric_mean(max(xla.local / row.tiles, 0.01) for row, xla in both),
            "XLA local sum / sum": sum(xla.local for _, xla in both) / sum(row.tiles for row in rows),
            "local above XLA's": sum(row.ours.local > 1.01 * xla.local for row, xla in both),
            "received above XLA's": sum(row.ours.received > xla.received for row, xla in both),
        }
    if donated:
        slower = [row.donated.seconds / max(row.ours.seconds, 1e-9) for row in donated if row.donated]
        peaks = [row.donated.peak / row.larger for row in donated if row.donated]
        figures |= {
            "donated seconds / undonated": geometric_mean(slower),
            "  most, donated": max(slower),
            "donated peak / max(in, out)": geometric_mean(peaks),
            "  most, peak": max(peaks),
            "  if all was reused": geometric_mean(row.reused / row.larger for row in donated),
        }
    return figures


def tabulate(rows: Sequence[Row]) -> Table:
    """A line for each move, those that lose most against XLA first."""
    shown = Table()
    for column in ("move", "plan"):
        shown.add_column(column)
    for column in ("speed", "whole", "sched.", "us", "XLA us", "wires", "XLA wires", "peak", "XLA peak", "local"):
        shown.add_column(column, justify="right")
    for column in ("XLA local", "donated", "launches", "s", "XLA s"):
        shown.add_column(column, justify="right")
    for one in rows:
        xla, donated = one.xla, one.donated
        ratios = [one.over_xla(of) for of in CLOCKS.values()] if xla else []
        shown.add_row(
            f"{one.name} {one.mesh}",
            one.steps,
            *([f"{ratio:.2f}" for ratio in ratios] or ("", "", "")),
            f"{one.ours.seconds * 1e6:.0f}",
            f"{xla.seconds * 1e6:.0f}" if xla else "",
            f"{one.ours.wires * 1e6:.0f}",
            f"{xla.wires * 1e6:.0f}" if xla else "",
            f"{one.ours.peak / one.tiles:.2f}",
            f"{xla.peak / one.tiles:.2f}" if xla else "",
            f"{one.ours.local / one.tiles:.2f}",
            f"{xla.local / one.tiles:.2f}" if xla else "",
            f"{donated.seconds / max(one.ours.seconds, 1e-9):.2f}" if donated else "",
            str(one.ours.launches),
            f"{one.ours.compile_s:.1f}",
            f"{xla.compile_s:.1f}" if xla else "",
        )
    return shown


def group_by_kind(rows: Sequence[Row]) -> Table:
    """Speed and peaks by what a move's plan is made of, the heaviest kind of step, and by rank."""
    shown = Table("plans with", "pairs", "speed", "least", "below 0.95", "us", "XLA us", "peak", "most", "XLA's peak")
    groups: dict[str, list[Row]] = {}
    for row in rows:
        for name in (row.kind or "nothing", f"rank {row.rank}"):
            groups.setdefault(name, []).append(row)
    for name, of in sorted(groups.items()):
        speed = [row.over_xla(lambda side: side.seconds) for row in of]
        peaks, theirs = [row.ours.peak / row.tiles for row in of], [row.xla.peak / row.tiles for row in of if row.xla]
        figures = [geometric_mean(speed), min(speed), sum(ratio < 0.95 for ratio in speed)]
        times = [sum(row.ours.seconds for row in of) * 1e6, sum(row.xla.seconds for row in of if row.xla) * 1e6]
        last = [geometric_mean(peaks), max(peaks), geometric_mean(theirs)]
        shown.add_row(name, *(f"{each:.4g}" for each in (len(of), *figures, *times, *last)))
    return shown


def draw_pairs(meshes: Sequence[str], ranks: Sequence[int], count: int, seed: int) -> Iterator[aot.Pair]:
    """Random pairs of different contiguous layouts, the ranks in turn."""
    choose = random.Random(seed)
    for at in range(count):
        rank, mesh = ranks[at % len(ranks)], named(choose.choice(meshes))
        shape: tuple[int, ...] = ()
        while not LEAST <= 2 * math.prod(shape) / mesh.size <= MOST:
            shape = tuple(choose.choice(SIZES[rank]) for _ in range(rank))
        layouts = [each for each in contiguous_layouts(mesh, shape, "bfloat16") if each.even]
        source, target = choose.sample(layouts, 2)
        yield source, target


LARGE = (
    ("v5p:4x8x8", {"x": 4, "y": 8, "z": 8}, "bf16[{z}128,{y}{x}32,1024]", "bf16[1024,{z}128,{y}{x}32]"),
    ("v5p:4x8x8", {"x": 4, "y": 8, "z": 8}, "bf16[1024,{x}256,{y}{z}16]", "bf16[{x}256,{z}{y}16,1024]"),
    ("v5p:8x8x16", {"a": 8, "b": 8, "c": 16}, "bf16[{c}256,{b}{a}64,4096]", "bf16[4096,{c}256,{a}{b}64]"),
    ("v5p:16x16x16", {"a": 16, "b": 16, "c": 16}, "bf16[{c}256,{b}{a}16,4096]", "bf16[4096,{c}256,{a}{b}16]"),
)
"""Topologies, mesh axes and moves that are long exchanges, or swap axes and permute devices at once."""


def main(arguments: list[str] | None = None) -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--gpu", metavar="SxHxG", help="H100s instead: slices x hosts x GPUs of a host")
    parser.add_argument("--rank", type=int, action="append", choices=SIZES, help="of the arrays; repeatable")
    parser.add_argument("--pairs", type=int, default=120, help="random pairs of all ranks together")
    parser.add_argument("--seed", type=int, help="of the pairs; by default another in every run")
    parser.add_argument("--worst", type=int, default=12, help="lines of the table")
    parser.add_argument("--large", action="store_true", help="the moves on many chips, instead of random ones")
    parser.add_argument("--most", type=int, default=4096, help="chips, with --large")
    parser.add_argument("--no-xla", action="store_true", help="leave XLA's own identity out")
    parser.add_argument("--donated", action="store_true", help="compile the moves of donated sources, too")
    options = parser.parse_args(arguments)
    ways = {"xla": not options.no_xla, "donated": options.donated}
    seed = random.SystemRandom().randrange(1 << 20) if options.seed is None else options.seed
    console = Console(highlight=False, width=250)
    if options.large:
        chosen = [(topology, Mesh(axes), pair) for topology, axes, *pair in LARGE]
        moves = [
            (tuple(Layout.parse(text, mesh) for text in pair), order_devices(aot.devices(topology)))
            for topology, mesh, pair in chosen
            if mesh.size <= options.most
        ]
    else:
        on = order_devices(aot.devices(options.gpu or options.topology, options.gpu is not None))
        drawn = draw_pairs(aot.MESHES[len(on)], options.rank or list(SIZES), options.pairs, seed)
        moves = [(pair, on) for pair in drawn]
        console.print(f"{on[0].device_kind}, {options.gpu or options.topology}, seed {seed}")
    rows: list[Row] = []
    for (source, target), devices in moves:
        rows.append(compile_row((source, target), devices, ways))
        print(len(rows), end=" ", file=sys.stderr, flush=True)
    if not options.no_xla:
        rows.sort(key=lambda row: row.over_xla(lambda side: side.seconds))
    console.print(tabulate(rows if options.large else rows[: options.worst]))
    for label, figure in summarize(rows).items():
        console.print(f"{label:34}{figure:10.4g}")
    if ways["xla"]:
        console.print(group_by_kind(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a compiled program takes, by one measure for every program: chosen, written by experts, or the user's own.

    received_bytes   what a device receives, by the collectives of the optimized module
    move_seconds     these one after another, by the model that plans are timed by
    flops            products and convolutions on one device, loops as often as they run
    touched_bytes    what the kernels on one device read and write in memory, loops as often as they run
    work_seconds     one kernel after another, collectives left out, each as long as its products or its memory take, as
                     the model has it
    peak_bytes       what a device's main memory must have room for, by the compiler's own account: arguments, results
                     and temporaries, with the gaps between them

A program is not run for that, so that its devices need not exist here.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from reshard import hlo
from reshard.hlo import Collective, Computation, Instruction, Module
from reshard.hlo.text_reader import compiled_platform
from reshard.jax.layout_choice.op_work import count_taps
from reshard.jax.xla_pass.fragments import print_module
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.cost import Links, predict_collective
from reshard.synth.cuts import bound_round
from reshard.synth.wires import Wires
from reshard.types.mesh import Mesh
from reshard.types.whole import primes

_CONTRACTED = re.compile(r"\d+")
_CALLING = ("while", "conditional", "call", "async-start", "call-start")
_WAITING = ("-start", "-done", "async-update", "call-update")
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
_SLICING = ("dynamic-slice", "slice", "gather")
_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"(\w+)=(-?\d[\dx_-]*)")


@dataclass(frozen=True)
class ExecutableFigures:
    """The figures of a compiled program; `exact` is False if a loop's trips depend on data, which count as one."""

    received_bytes: int
    launches: int
    move_seconds: float
    flops: float
    touched_bytes: float
    peak_bytes: int
    exact: bool = True
    work_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The modelled seconds of the program: its work and its collectives."""
        return self.move_seconds + self.work_seconds


def measure_executable(executable: Any, mesh: Mesh, links: Links, speed: DeviceSpeed) -> ExecutableFigures:
    """The figures of what `program_report.compile_module` returns, or of `compiled.runtime_executable()`."""
    text = print_module(executable.hlo_modules()[0])
    module = hlo.parse(text)
    collectives = hlo.collectives(module)
    traffic = hlo.traffic(collectives)
    seconds = sum((one.times or 1) * time_compiled(one, mesh, links) for one in collectives if one.counted)
    memory = executable.get_compiled_memory_stats()
    peak = int(getattr(memory, "peak_memory_in_bytes", 0))
    if (platform := compiled_platform(text)) != "gpu" or not peak:
        # XLA:CPU leaves the temporaries out of its peak. That of TPUs has what lies in the memory on the chip as well:
        # of a step whose pairs of particles all lie there it is 16.9 MB, and 2.4 MB in main memory.
        ends = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        peak = ends + memory.temp_size_in_bytes
        # jax 0.11 does not tell what the main memory of a TPU holds, and counts some results among the temporaries.
        if platform == "tpu":
            peak = getattr(memory, "total_allocation_bytes", 0) or min(peak, memory.peak_memory_in_bytes)
    work = count_work(module, module.entry, speed)
    return ExecutableFigures(
        traffic.received_bytes, traffic.launches, seconds, work.flops, work.touched, int(peak), traffic.exact,
        work.seconds,
    )  # fmt: skip


def time_compiled(one: Collective, mesh: Mesh, links: Links) -> float:
    """Predicted seconds of one run of a collective, among the devices in the order of the mesh."""
    if not one.received_bytes:
        return 0.0
    # A group is told by its first device and each other one; a message by its ends.
    if one.kind == "permute":
        pairs = [(source, target) for source, target in one.pairs if source != target]
        senders = np.arange(mesh.size)
        senders[[target for _, target in pairs]] = [source for source, _ in pairs]
        wires = Wires.of(links, mesh)
        if (bound := bound_round(wires, mesh, senders)) is not None:
            # What crosses the worst cut of the wires: which way each message goes is not known here.
            return wires.slowest.wait(1) + bound * one.received_bytes
    else:
        groups = one.groups.lists if one.groups is not None else (tuple(range(mesh.size)),)
        pairs = [(group[0], member) for group in groups for member in group]
    # Of the operand, as the model of steps has it; arrays that are combined are one message.
    nbytes = sum(array.nbytes for array in one.results)
    if one.kind == "all_gather":
        nbytes //= one.group_size
    elif one.kind == "reduce_scatter":
        nbytes *= one.group_size
    return predict_collective(one.kind, _find_factors(pairs, mesh), nbytes, mesh, links)


def _find_factors(pairs: list[tuple[int, int]], mesh: Mesh) -> list[tuple[int, int]]:
    """The prime (stride, size) factors of the positions in which the devices of any pair differ."""
    factors: list[tuple[int, int]] = []
    # The last axis varies fastest, as in the order of the devices that the program is compiled for.
    stride = 1
    for size in reversed(list(mesh.axes.values())):
        for prime in primes(size):
            if any(one // stride % prime != other // stride % prime for one, other in pairs):
                factors.append((stride, prime))
            stride *= prime
    return factors


class _Work(NamedTuple):
    """Seconds, operations of products and convolutions, an addition and a multiplication each, and bytes that kernels
    read and write."""

    seconds: float = 0.0
    flops: float = 0.0
    touched: float = 0.0


def count_work(module: Module, inside: Computation, speed: DeviceSpeed) -> _Work:
    """What a run of a computation takes of a device. A loop counts as often as it runs, of a conditional the branch
    that takes longest.

    >>> count_work(module := hlo.parse('''HloModule m
    ...
    ... ENTRY %main {
    ...   %a = f32[8,16]{1,0} parameter(0)
    ...   %b = f32[16,4]{1,0} parameter(1)
    ...   ROOT %d = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }'''), module.entry, DeviceSpeed("one a second", {"f32": 1}, 1))
    _Work(seconds=1024.0, flops=1024.0, touched=896.0)
    """
    found: list[_Work] = []
    for one in inside.instructions:
        if one.opcode in _CALLING:
            # The condition of a loop is called besides, and computes next to nothing.
            runs = (hlo.trip_count(module, inside, one) or 1) if one.opcode == "while" else 1
            each = [_Work(*(runs * n for n in count_work(module, module.computation(at), speed))) for at in one.called]
            found += [max(each, default=_Work())] if one.opcode == "conditional" else each
            continue
        # The end of an asynchronous operation takes nothing. Collectives are counted in `move_seconds`, those that
        # libtpu puts into a fusion with the slices around them as well.
        moved = (each.opcode for at in one.called for each in module.computation(at).instructions)
        kinds = {each.removesuffix("-start") for each in (one.opcode, *moved)}
        if one.opcode in _FREE or one.opcode.endswith(_WAITING) or not kinds.isdisjoint(hlo.KINDS):
            continue
        # Of a large operand a slice is read, and an update is written in place.
        sizes = [sum(array.nbytes for array in inside.by_name[name].arrays) for name in one.operands]
        made = sum(array.nbytes for array in one.arrays)
        match one.opcode:
            case "fusion":
                touched = _count_fused_bytes(module.computation(one.called[0]))
            case opcode if opcode in _SLICING:
                touched = 2.0 * made
            case "dynamic-update-slice" | "scatter":
                touched = 2.0 * sum(sizes[1:])
            case _:
                touched = float(made + sum(sizes))
        products = list(_list_products(module, inside, [one]))
        flops = sum(each for each, _ in products)
        found.append(_Work(speed.work_seconds(flops, touched, products[0][1] if products else ""), flops, touched))
    return _Work(*map(sum, zip(_Work(), *found, strict=True)))


def _list_products(module: Module, inside: Computation, among: Sequence[Instruction]) -> Iterator[tuple[float, str]]:
    """The operations of each product and convolution among instructions and what they fuse, and the dtype of what it
    multiplies."""
    for one in among:
        if one.opcode == "fusion":
            fused = module.computation(one.called[0])
            yield from _list_products(module, fused, fused.instructions)
        elif one.opcode in ("dot", "convolution"):
            yield _count_product(inside, one), inside.by_name[one.operands[0]].arrays[0].dtype


def _count_fused_bytes(fused: Computation) -> float:
    """What a fusion reads of its operands and writes of its results: of slices of a sum it reads as much of each
    summand; what it updates in place it leaves, and writes the updates."""
    root = fused.root
    ends = [] if root is None else [fused.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    touched, needed = 0.0, Counter[str]()  # The elements that are needed of each instruction.
    for end in ends:
        while end.opcode == "bitcast":
            end = fused.by_name[end.operands[0]]
        # Of an update in place nothing is needed but the update: its first operand stays where it is.
        made = fused.by_name[end.operands[1]] if end.opcode == "dynamic-update-slice" else end
        touched += sum(array.nbytes for array in made.arrays)
        needed[made.name] += sum(array.elements for array in made.arrays)
    for one in reversed(fused.instructions):
        made = sum(array.elements for array in one.arrays)
        used = min(needed[one.name], made)
        if one.opcode == "parameter" and made:
            touched += sum(array.nbytes for array in one.arrays) * used / made
        for at, name in enumerate(one.operands):
            whole = sum(array.elements for array in fused.by_name[name].arrays)
            # Larger operands are summed up over what is made, unless it is a part of them.
            part = whole <= made or (at == 0 and one.opcode in _SLICING)
            needed[name] += min(whole, used) if part else whole * used // max(1, made)
    return touched


def _count_product(inside: Computation, one: Instruction) -> float:
    made = math.prod(one.arrays[0].dims)
    first, second = (inside.by_name[name].arrays[0].dims for name in one.operands[:2])
    if one.opcode == "dot":
        contracted = map(int, _CONTRACTED.findall(one.attributes.get("lhs_contracting_dims", "")))
        return 2.0 * made * math.prod(first[dim] for dim in contracted)
    # The spatial dims of both operands and of the result are numbered, `0b1f_1oi0->0b1f`, as are those of the window.
    labels = _LABELS.search(one.attributes.get("dim_labels", ""))
    if labels is None:
        return 2.0 * made * math.prod(second)
    of_image, of_kernel, of_result = labels.groups()
    window = {key: each.split("x") for key, each in _WINDOW.findall(one.attributes.get("window", ""))}
    sums = float(second[of_kernel.index("i")])
    for dim in range(len(of_result) - 2):
        at = str(dim)
        stride, spread, dilated = (
            int(window[key][dim]) if key in window else 1 for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        before = int(window["pad"][dim].split("_")[0]) if "pad" in window else 0
        size = one.arrays[0].dims[of_result.index(at)]
        taps = dilated * np.arange(second[of_kernel.index(at)]) - before
        sums *= count_taps(first[of_image.index(at)], size, taps, stride, spread) / size
    return 2.0 * made * sums

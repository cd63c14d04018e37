"""Bytes received, counted from HLO text alone: shares no code with `reshard.hlo`, so that the two check each other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_BYTES = {
    "pred": 1, "s4": 1, "u4": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
    "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?<=[\s)}\]]) ?([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_KINDS = ("all-gather", "all-to-all", "all-reduce", "reduce-scatter", "collective-permute", "ragged-all-to-all")


def received_bytes(text: str) -> int:
    """The bytes that a device receives in one run; of branches, those of the one that receives most.

    >>> received_bytes('''HloModule m
    ...
    ... ENTRY %main (p: f32[2,8]) -> f32[8,8] {
    ...   %p = f32[2,8]{1,0} parameter(0)
    ...   ROOT %g = f32[8,8]{1,0} all-gather(%p), replica_groups=[1,4]<=[4], dimensions={0}
    ... }''')
    192
    """
    bodies, entry = _computations(text)
    return _of(entry, bodies, {})


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head and not line.startswith("HloModule"):
            name = head[2]
            entry = name if head[1] else entry
            bodies[name] = []
        elif name and _LINE.match(line):
            bodies[name].append(line)
    return bodies, entry


def _of(name: str, bodies: dict[str, list[str]], known: dict[str, int]) -> int:
    if name not in known:
        known[name] = 0
        known[name] = sum(_of_line(line, bodies, known) for line in bodies.get(name, ()))
    return known[name]


def _of_line(line: str, bodies: dict[str, list[str]], known: dict[str, int]) -> int:
    match = _LINE.match(line)
    if match is None:
        return 0
    rest = match[2].split(", metadata=")[0]
    opcode = _OPCODE.search(rest)
    kind = "" if opcode is None else opcode[1]
    base = kind.removesuffix("-start")
    if base in _KINDS:
        return _collective(base, kind != base, rest, opcode.start() if opcode else 0)
    if kind == "conditional":
        names = [
            one for found in _BRANCHES.findall(line) for part in found for one in part.replace("%", "").split(", ")
        ]
        return max((_of(one, bodies, known) for one in names if one), default=0)
    if kind == "while":
        times, condition = _trips(line, bodies), _CONDITION.search(line)
        body = (1 if times is None else times) * sum(_of(one, bodies, known) for one in _CALLED.findall(line))
        return body + (1 if times is None else times + 1) * (_of(condition[1], bodies, known) if condition else 0)
    if kind in ("fusion", "call", "async-start", "custom-call"):
        received = sum(_of(one, bodies, known) for one in _CALLED.findall(line))
        return received // 2 if "calls=%all-reduce-scatter" in line else received  # TPU's form of a reduce-scatter
    return 0


def _trips(line: str, bodies: dict[str, list[str]]) -> int | None:
    """How often a loop turns: as XLA says, else what its counter is compared with; None if neither is known."""
    if known := _TRIPS.search(line):
        return int(known[1])
    condition = _CONDITION.search(line)
    lines = bodies.get(condition[1], []) if condition else []
    bounds = [int(one[1]) for each in lines if (one := re.search(r" s32\[\][^ ]* constant\((\d+)\)", each))]
    return bounds[0] if len(bounds) == 1 and "direction=LT" in lines[-1] else None


def _collective(kind: str, started: bool, rest: str, at: int) -> int:
    shapes = [_nbytes(*one) for one in _SHAPE.findall(rest[:at])]
    if started and kind == "collective-permute":
        shapes = shapes[1:2]
    elif started and (kind != "all-reduce" or rest.startswith("((")):  # what it takes, then what it yields
        shapes = shapes[len(shapes) // 2 :]
    size = sum(shapes)
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
        moved = [] if pairs is None else re.findall(r"\{?(\d+),(\d+)", pairs[1])
        return size if any(one != other for one, other in moved) else 0
    group = _group_size(rest)
    match kind:
        case "all-reduce":
            return -(-2 * size * (group - 1) // group)  # a sum of one byte takes a whole one each way
        case "reduce-scatter":
            return size * (group - 1)
        case _:
            return size * (group - 1) // group


def _group_size(rest: str) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    if listed:
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]", rest)
    if counted:
        return int(counted[2])
    named = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        return math.prod(_axis_sizes(named[2], sizes))
    raise ValueError(f"no groups in {rest[:300]}")


def _axis_sizes(text: str, sizes: dict[str, int]) -> Iterable[int]:
    """The sizes of axes `'x','y':(2)4`; a part of an axis says its own."""
    for name, part in re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", text):
        yield int(part) if part else sizes[name]


def _nbytes(dtype: str, dims: str) -> int:
    return _BYTES.get(dtype, 0) * math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)

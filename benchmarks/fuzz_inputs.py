"""Damaged inputs of every kind: only `ReshardError` leaves the package, or an answer that is right by itself.

    python benchmarks/fuzz_inputs.py --seed 1 --inputs 1000
    python benchmarks/fuzz_inputs.py --seed 1 --inputs 10000 --kind "HLO text" --kind tiles

A kind (`KINDS`) has whole inputs, one way to damage them, and a door that takes them and checks what it makes of those
it accepts. Text, bytes and words are damaged by `OPERATORS`, JSON by those and by other values in its places, arrays
by `ARRAYS`. Input number n of a kind and a seed is the same in every run.

Each kind runs in a process of its own, which may take 1 GiB of addresses more than it has once it is set up, and each
input has 2 seconds of processor time. A process that dies is a failure, and the next one goes on behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import reshard as rs
from benchmarks.fuzz_faults import mutated_json
from benchmarks.fuzz_oracle import must
from reshard.errors import ReshardError

ROOT = Path(__file__).resolve().parent.parent
MOST_SECONDS = 2.0
MOST_BYTES = 1 << 30
MOST_WAIT = 60.0  # Seconds of the clock, for an input that waits or that no signal reaches.

Damage = Callable[[random.Random, Any, Any], Any]


# Text: each operator takes a text and another whole one.

_LISTED = """0 -1 1 2 007 2147483648 4294967296 16777216 9223372036854775807 9223372036854775808
99999999999999999999 1e308 1e999 nan inf 0.5 0x10 1_000 True \u0664 \u00b2 \uff14"""
NUMBERS = (*_LISTED.split(), "9" * 5000)
ODD = (*"\x00\n\r\t\\\"'\ufeff\u00e9\u202e\U0001f600\ud800%{}[]()<>,;:=/@*+-~|.#", "\x1b[31m")
_NUMBER, _WORD = re.compile(r"\d+"), re.compile(r"[A-Za-z_][\w.\-]*")


def _span(choose: random.Random, text: str, most: int = 40) -> tuple[int, int]:
    at = choose.randint(0, len(text))
    return at, min(len(text), at + choose.randint(1, most))


def flip_bit(choose: random.Random, text: str, _: str) -> str:
    at = choose.randrange(max(1, len(text)))
    return text[:at] + "".join(chr(ord(each) ^ 1 << choose.randrange(8)) for each in text[at : at + 1]) + text[at + 1 :]


def drop_span(choose: random.Random, text: str, _: str) -> str:
    at, end = _span(choose, text)
    return text[:at] + text[end:]


def double_span(choose: random.Random, text: str, _: str) -> str:
    at, end = _span(choose, text)
    return text[:end] + text[at:end] + text[end:]


def swap_spans(choose: random.Random, text: str, _: str) -> str:
    (a, b), (c, d) = sorted((_span(choose, text), _span(choose, text)))
    return text if b > c else text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]


def splice_texts(choose: random.Random, text: str, other: str) -> str:
    return text[: choose.randint(0, len(text))] + other[choose.randint(0, len(other)) :]


def cut_text(choose: random.Random, text: str, _: str) -> str:
    return text[: choose.randint(0, len(text))]


def change_number(choose: random.Random, text: str, _: str) -> str:
    found = list(_NUMBER.finditer(text))
    if not found:
        return text
    at = choose.choice(found)
    near = [str(int(at[0][:18]) + choose.choice((-1, 1, 7)))] * 10
    return text[: at.start()] + choose.choice([*NUMBERS, *near]) + text[at.end() :]


def change_word(choose: random.Random, text: str, other: str) -> str:
    found, words = list(_WORD.finditer(text)), _WORD.findall(choose.choice((text, other)))
    if not (found and words):
        return text
    at = choose.choice(found)
    return text[: at.start()] + choose.choice(words) + text[at.end() :]


def insert_odd(choose: random.Random, text: str, _: str) -> str:
    at = choose.randint(0, len(text))
    return text[:at] + choose.choice(ODD) + text[at:]


def nest_deeply(choose: random.Random, text: str, _: str) -> str:
    at, deep = choose.randint(0, len(text)), choose.choice((2, 50, 3_000, 100_000))
    opened, closed = choose.choice(("{}", "[]", "()", ('{"a":', "}"), ("(f32[", ")")))
    return text[:at] + opened * deep + (closed * deep if choose.random() < 0.5 else "") + text[at:]


def repeat_span(choose: random.Random, text: str, _: str) -> str:
    at, end = _span(choose, text)
    return text[:end] + text[at:end] * choose.choice((20, 1_000, 20_000)) + text[end:]


def move_line(choose: random.Random, text: str, other: str) -> str:
    lines, more = text.split("\n"), other.split("\n")
    line = choose.choice((choose.choice(lines), choose.choice(more)))
    at = choose.randrange(len(lines))
    lines[at : at + choose.randint(0, 1)] = choose.choice(([], [line], [line, line]))
    return "\n".join(lines)


OPERATORS: tuple[Damage, ...] = (
    flip_bit,
    drop_span,
    double_span,
    swap_spans,
    splice_texts,
    cut_text,
    change_number,
    change_number,
    change_word,
    change_word,
    insert_odd,
    move_line,
    nest_deeply,
    repeat_span,
)


def damage_text(choose: random.Random, text: str, other: str) -> str:
    """One to three operators, one after another."""
    for _ in range(choose.choice((1, 1, 1, 2, 3))):
        text = choose.choice(OPERATORS)(choose, text, other)
    return text


def damage_bytes(choose: random.Random, data: bytes, other: bytes) -> bytes:
    if choose.random() < 0.3:  # One byte, or one field's length or number.
        at = choose.randrange(max(1, len(data)))
        return data[:at] + bytes((choose.choice((0, 1, 127, 128, 255)),)) + data[at + 1 :]
    text = damage_text(choose, data.decode("latin-1"), other.decode("latin-1"))
    return text.encode("latin-1", "replace")


VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    10**9,
    2**31,
    2**63,
    10**30,
    0.5,
    1e308,
    -1e308,
    math.inf,
    math.nan,
    "",
    "x",
    "sum",
    "9" * 5000,
    [],
    [[]],
    {},
    {"x": 1},
    [None],
    [0] * 5000,
)


def damage_json(choose: random.Random, text: str, other: str) -> str:
    """The text damaged; or a value replaced, left out, doubled, or taken from another place."""
    if choose.random() < 0.25:
        return damage_text(choose, text, other)
    if choose.random() < 0.3:
        return mutated_json(choose, text)
    data = json.loads(text)
    places = list(_places(data)) or [([data], 0)]
    for _ in range(choose.choice((1, 1, 2))):
        at, key = choose.choice(places)
        kind = choose.random()
        if kind < 0.4:
            at[key] = copy.deepcopy(choose.choice(VALUES))
        elif kind < 0.6:
            held, other_key = choose.choice([*places, *_places(json.loads(other))])
            with contextlib.suppress(LookupError):
                at[key] = json.loads(json.dumps(held[other_key]))
        elif kind < 0.75 and isinstance(at[key], str):
            at[key] = damage_text(choose, at[key], other)
        elif kind < 0.85 and isinstance(at, list):
            at.insert(key, at[key])
        elif isinstance(at[key], int):
            at[key] = at[key] + choose.choice((-1, 1, 1 << 20))
        else:
            at[key] = [at[key]]
        if isinstance(at, dict) and choose.random() < 0.2:
            del at[key]
        places = list(_places(data)) or [([data], 0)]
    return json.dumps(data)


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in list(items):
        yield data, key
        yield from _places(value)


# Kinds: seeds, damage, door. A door gets one damaged input, and raises `WrongError` if what it accepts is wrong.


class Kind(NamedTuple):
    """Whole inputs, the way they are damaged, and what takes them."""

    seeds: Callable[[], Sequence[Any]]
    damage: Damage
    take: Callable[[Any], None]


MESH = rs.Mesh(x=4, y=2)
SHAPE = (16, 8)
LAYOUTS = """\
f32[{x}4, 8]
f32[16, {x}{y}1]
f32[{y}8, {x}2]
f32[2{x}2, 8]
f32[{x}4, 8] + sum{y}
f32[{x}5/17, 8]
s4[{x:(2)2}8, {y}4]
bf16[{y}{x}2, 8]
f32[{x}{y}3/17, 8]
f32[{x}(3,5,0,8), {y}~8]
f32[{y}{x}~17, 8]
s8[{x}(3@0,2@2,5@0,6@1), 8] + sum{y}
""".splitlines()


def taken_layout(layout: rs.Layout) -> None:
    """A layout that was accepted is written as itself, and has its elements exactly once for each set of replicas."""
    must(rs.Layout.parse(str(layout), layout.mesh) == layout, "{} is not read back as itself", layout)
    must(layout.nbytes(0) == 0 and layout.tile_bytes >= 0, "{} has tiles of {} B", layout, layout.tile_bytes)
    if layout.mesh.size > 64 or max(math.prod(layout.shape), *layout.tile_shape, 0) > 4096 or not layout.shape:
        return
    from reshard.types.meaning import meaning

    seen: Counter[tuple[int, ...]] = Counter()
    for device in layout.mesh.devices:
        held = [
            [at for at in along if 0 <= at < n] for along, n in zip(meaning(layout, device), layout.shape, strict=True)
        ]
        for index in np.ndindex(*map(len, held)):
            seen[tuple(held[dim][at] for dim, at in enumerate(index))] += 1
    must(len(seen) == math.prod(layout.shape), "{} has {} elements", layout, len(seen))
    must(len(set(seen.values())) <= 1, "{} has some elements more often than others", layout)


def _read_move(text: str) -> None:
    view, _, sizes = text.partition("#")
    source, target = rs.Layout.parse("f32[{x}24, 6]", MESH), rs.Layout.parse("f32[3, {x}8, 6]", MESH)
    named = dict(
        pair.split("=", 1) for pair in sizes.split(",") if pair.count("=") == 1 and pair.split("=")[0].isidentifier()
    )
    given: dict[str, Any] = {
        name: int(size) if re.fullmatch("-?[0-9]{1,20}", size) else size for name, size in named.items()
    }
    for name in ("self", "source", "target", "view", "take", "into", "cast"):
        given.pop(name, None)
    move = rs.Move(source, target, view, **given)
    must(rs.Move.from_json(move.to_json()).to_json() == move.to_json(), "{} is another move after JSON", view)
    tiles = {device: np.zeros(source.tile_shape, np.float32) for device in MESH.devices}
    must(
        all(tile.shape == target.tile_shape for tile in rs.simulate(rs.plan(move), tiles).values()), "tiles of {}", view
    )


def _read_dtensor(text: str) -> None:
    words = [each.strip() for each in re.findall(r"(?:[^,(]|\([^)]*\)?)+", text.strip("[]"))]
    taken_layout(rs.Layout.from_dtensor(words, (4, 2), SHAPE, "f32"))


def _read_scalapack(text: str) -> None:
    numbers: list[Any] = [int(each) if re.fullmatch(r"\s*-?[0-9]{1,25}\s*", each) else each for each in text.split(",")]
    taken_layout(rs.Layout.from_scalapack(numbers[:-2], (*numbers[-2:],), "f64"))  # type: ignore[arg-type]


def _read_mesh(text: str) -> None:
    mesh = rs.Mesh.parse(text)
    must(rs.Mesh.parse(str(mesh), mesh.device_ids) == mesh, "{} is not read back as itself", mesh)
    must(rs.Mesh.from_dict(json.loads(json.dumps(mesh.to_dict()))) == mesh, "{} is another after JSON", mesh)


def _read_units(text: str) -> None:
    from reshard.types.units import parse_bytes, parse_shape

    what, _, rest = text.partition("|")
    read: Any = (parse_bytes if what == "bytes" else parse_shape)(rest)
    must(all(each >= 0 for each in (read if isinstance(read, tuple) else (read,))), "{} is {}", text, read)


def _read_detected(text: str) -> None:
    from reshard.geometry.detect import read

    taken_layout(read(text, MESH, SHAPE, "f32"))


def _read_jaxtyping(text: str) -> None:
    class Annotation:
        dims, dim_str, dtype = None, text, np.float32

    rs.from_jaxtyping(Annotation, MESH, {"a": "x"}, dtype="f32", a=16, b=8)


NOTATIONS: Mapping[str, tuple[Callable[[str], None], str]] = {
    "ours": (lambda text: taken_layout(rs.Layout.parse(text, MESH)), "\n".join(LAYOUTS)),
    "HLO": (
        lambda text: taken_layout(rs.Layout.from_hlo(text, SHAPE, "f32", num_devices=8)),
        """{replicated}
{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}
{devices=[4,2]0,1,2,3,4,5,6,7}
{devices=[4,1,2]<=[8] last_tile_dims={replicated}}
{devices=[2,2,2]<=[2,2,2]T(2,1,0) last_tile_dims={unreduced}}""",
    ),
    "Shardy": (
        lambda text: taken_layout(rs.Layout.from_shardy(text, MESH, SHAPE, "f32")),
        """[{"x"}, {"y"}]
[{"x":(1)2, "y"}, {}]
<@mesh, [{"x", ?}, {}], replicated={"y"}>
[{"x"}, {}], unreduced={"y"}
[{"y"}p0, {"x"}p1]""",
    ),
    "JAX": (
        lambda text: taken_layout(rs.Layout.from_jax_text(text, MESH, SHAPE, "f32")),
        """P(('x', 'y'), None)
P('x')
PartitionSpec(None, 'y', unreduced={'x'})
P(None, ('y', 'x'))""",
    ),
    "DTensor": (
        _read_dtensor,
        """S(0), S(1)
Shard(dim=0), Replicate()
_S(0, 2), S(0)
P(sum), R
_S(0, 3), S(0)
RaggedShard((0,), (1, 2, 1, 0)), Owned(1)
Partial(avg), Shard(1)""",
    ),
    "ScaLAPACK": (_read_scalapack, "1, 0, 100, 80, 8, 16, 0, 0, 50, 2, 3\n1, 0, 7, 9, 2, 2, 1, 0, 7, 3, 1"),
    "any": (_read_detected, "f32[{x}4, 8]\nP('x')\n[{\"x\"}, {}]\n{devices=[4,2]<=[8]}\n[Shard(0), Replicate()]"),
    "mesh": (_read_mesh, "x=4,y=2\n<x=4, y=2>\nz=4@8\ndata=16,model=8"),
    "view": (_read_move, "(three h) d -> three h d#three=3\n(a b) c -> a b c#a=3\n(a b) (c d) -> a b (c d)#a=3,c=2"),
    "units": (_read_units, "bytes|64MiB\nbytes|0.5GiB\nbytes|4096\nshape|16,16\nshape|4096,"),
}


def _notation_seeds() -> list[tuple[str, str]]:
    return [(name, text) for name, (_, texts) in NOTATIONS.items() for text in texts.splitlines()]


def damage_notation(choose: random.Random, seed: tuple[str, str], other: tuple[str, str]) -> tuple[str, str]:
    return seed[0], damage_text(choose, seed[1], other[1])


# Compiled programs.


def _hlo_texts() -> list[str]:
    paths = sorted((ROOT / "tests").glob("*/data/*.hlo"))
    return [path.read_text(encoding="utf-8") for path in paths]


def take_hlo(text: str) -> None:
    from reshard.doctor import examine

    _check_report(examine(text, platform="cpu"))


def _check_report(report: Any) -> None:
    data = json.loads(report.to_json(every=True))
    must(isinstance(data, dict) and len(str(report)) > 0, "a report without text")
    must(report.traffic.received_bytes >= 0, "{} B are received", report.traffic.received_bytes)
    for place in report.places:
        must(place.received_bytes >= 0 and place.peak_bytes >= 0, "a place with {} B", place.received_bytes)


def _protos() -> list[bytes]:
    from tests.hlo.splices import NAMES, recorded

    return [recorded(name).module for name in NAMES]


def damage_proto(choose: random.Random, data: bytes, other: bytes) -> bytes:
    """The bytes damaged; or one field of one instruction or computation, so that the rest still decodes."""
    from reshard.hlo.proto import ModuleProto
    from reshard.hlo.wire import Field

    if choose.random() < 0.5:
        return damage_bytes(choose, data, other)
    made = ModuleProto.decode(data)
    held = choose.choice(made.computations)
    fields = choose.choice(held.instructions).message.fields
    at = choose.randrange(len(fields))
    number, wire_type, value = fields[at]
    if isinstance(value, int):
        value = choose.choice((0, 1, value + 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))
    else:
        value = damage_bytes(choose, value, value)
    number = choose.choice((number, number, *range(1, 100)))
    fields[at : at + 1] = choose.choice(([], [Field(number, wire_type, value)], [Field(number, wire_type, value)] * 2))
    held.is_changed = True
    return made.encode()


def take_proto(data: bytes) -> None:
    from reshard.hlo.proto import ModuleProto

    made = ModuleProto.decode(data)
    for held in made.computations:
        _ = held.instructions
    again = ModuleProto.decode(made.encode()).encode()
    must(again == made.encode(), "a module is another one once it is written and read")


def _logs() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests/doctor/data").glob("*.log"))]


def take_log(text: str) -> None:
    from reshard.doctor.xla_log import LogReport

    report = LogReport.of(text)
    must(bool(json.loads(report.to_json())) and len(str(report)) > 0, "a report without text")
    must(min([report.received_bytes, report.saved_bytes]) >= 0, "negative bytes")


def _stablehlo() -> list[str]:
    return [(ROOT / "tests/doctor/data/train.mlir").read_text(encoding="utf-8")]


def take_stablehlo(text: str) -> None:
    import reshard.jax

    must(len(reshard.jax.transform(text).text) > 0, "no program")


def take_hlo_pass(text: str) -> None:
    from reshard.jax.xla_pass.hlo_files import improve_hlo

    improved = improve_hlo(text, devices=None)
    must(len(improved.proto) > 0, "no program")


def _serialized() -> list[bytes]:
    import reshard.jax

    return [reshard.jax.jit(lambda x: 2 * x).lower(4.0).compile().serialize()]


def take_serialized(data: bytes) -> None:
    import reshard.jax

    must(float(reshard.jax.deserialize(data)(4.0)) == 8.0, "another program")


# JSON of the package.


def _pairs() -> list[tuple[rs.Layout, rs.Layout]]:
    texts = [
        ("f32[{x}4, 8]", "f32[16, {x}2]"),
        ("f32[{x}4, {y}4]", "f32[{y}8, {x}2]"),
        ("f32[{x}4, 8] + sum{y}", "f32[{x}{y}2, 8]"),
        ("f32[{x}5/17, 8]", "f32[17, {y}4]"),
        ("f32[16, 8]", "f32[{x}4, 8]"),
    ]
    return [(rs.Layout.parse(one, MESH), rs.Layout.parse(other, MESH)) for one, other in texts]


def _plans() -> list[str]:
    plans = [rs.plan(*pair) for pair in _pairs()]
    third = rs.Layout.parse("f32[{z}6, 8]", rs.Mesh({"z": 3}, device_ids=[7, 8, 9]))
    plans += [
        rs.plan(rs.Layout.parse("f32[{x}5/18, 8]", MESH), third),
        rs.plan(*_pairs()[0], network="h100", budget=600),
    ]
    plans += [
        rs.plan(
            rs.Move(
                rs.Layout.parse("f32[{x}24, 6]", MESH),
                rs.Layout.parse("f32[3, {x}8, 6]", MESH),
                "(a b) c -> a b c",
                a=3,
            )
        )
    ]
    return [plan.to_json() for plan in plans]


def take_plan(text: str) -> None:
    plan = rs.Plan.from_json(text)
    must(rs.Plan.from_json(plan.to_json()) == plan, "a plan is not written as itself")
    must(
        len(str(plan)) > 0 and plan.peak_bytes >= 0 and plan.received_bytes >= 0, "a plan of {} B", plan.received_bytes
    )
    must(plan.seconds is None or 0 <= plan.seconds < math.inf, "a plan of {} s", plan.seconds)
    meshes = (plan.source.mesh.size, plan.target.mesh.size)
    if plan.view is not None or max(*meshes, *(math.prod(e.shape) for e in (plan.source, plan.target))) > 4096:
        return
    from benchmarks.fuzz_oracle import check_tiles, marks, own, source_tiles
    from reshard.runtime.numpy_tiles import numpy_dtype

    if plan.source.reduction == "mean" or plan.source.dtype != plan.target.dtype:
        return
    whole = marks(plan.source.shape, numpy_dtype(plan.source.dtype))
    tiles = source_tiles(random.Random(0), own(plan.source), plan.source.tile_shape, whole)
    check_tiles(own(plan.target), plan.target.tile_shape, whole, rs.simulate(plan, tiles))


def _trees() -> list[str]:
    moves = {f"w{number}": pair for number, pair in enumerate(_pairs())}
    return [rs.plan_tree(moves).to_json(), rs.plan_tree(moves, budget=4000, network="tpu-v5p").to_json()]


def take_tree(text: str) -> None:
    tree = rs.TreePlan.from_json(text)
    must(rs.TreePlan.from_json(tree.to_json()) == tree, "a tree is not written as itself")
    must(len(str(tree)) > 0 and tree.peak_bytes >= 0, "a tree of {} B", tree.peak_bytes)


def _networks() -> list[str]:
    return [rs.Network.preset(name).to_json() for name in ("h100", "tpu-v5p", "ethernet-100g")]


def take_network(text: str) -> None:
    network = rs.Network.from_json(text)
    must(rs.Network.from_json(network.to_json()) == network, "a network is not written as itself")
    for pair in _pairs()[:2]:
        seconds = rs.plan(*pair, network=network).seconds
        must(seconds is not None and 0 <= seconds < math.inf, "a plan of {} s", seconds)


def take_network_file(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        must(rs.Network.load(path).to_json() == rs.Network.from_json(text).to_json(), "another network in a file")


def _manifests() -> list[str]:
    return [rs.Manifest.of({"w": _pairs()[0][0], "b": _pairs()[1][0]}, 3).to_json()]


def take_manifest(text: str) -> None:
    manifest = rs.Manifest.from_json(text)
    must(rs.Manifest.from_json(manifest.to_json()) == manifest, "a manifest is not written as itself")
    manifest.check(manifest)


def _moves() -> list[str]:
    source, target = rs.Layout.parse("f32[{x}24, 6]", MESH), rs.Layout.parse("f32[3, {x}8, 6]", MESH)
    return [
        rs.Move(source, target, "(a b) c -> a b c", a=3).to_json(),
        rs.Move(source, rs.Layout.parse("bf16[48, 6]", MESH), take={0: slice(0, 48)}, cast=True).to_json(),
    ]


def take_move(text: str) -> None:
    move = rs.Move.from_json(text)
    must(rs.Move.from_json(move.to_json()).to_json() == move.to_json(), "a move is not written as itself")
    if max(move.source.mesh.size, move.target.mesh.size) <= 64:
        must(len(str(rs.plan(move))) > 0, "a plan without text")


# Tiles.

PLAN = rs.plan(rs.Layout.parse("f32[{x}4, 8]", MESH), rs.Layout.parse("f32[16, {x}2]", MESH))
DATA = np.arange(128, dtype=np.float32).reshape(16, 8)


class Subclass(np.ndarray):
    """A subclass that changes what its elements are called."""

    def __array_finalize__(self, given: Any) -> None:
        self.unit = "m"


ARRAYS: tuple[Callable[[random.Random, Any], Any], ...] = (
    lambda choose, tile: tile.astype(
        choose.choice(("f8", ">f4", "<f4", "i4", "c8", "?", "O", "U8", "S4", "f2", "m8[s]", "u1"))
    ),
    lambda choose, tile: tile.reshape(choose.choice(((8, 4), (32,), (4, 8, 1), (1, 4, 8), (2, 2, 8)))),
    lambda choose, tile: np.asfortranarray(tile),
    lambda choose, tile: tile[::-1][::-1] if choose.random() < 0.5 else np.repeat(tile, 2, 1)[:, ::2],
    lambda choose, tile: np.ma.masked_array(tile, choose.choice((False, tile > 3, True))),
    lambda choose, tile: tile.view(Subclass),
    lambda choose, tile: tile.view(choose.choice(("V4", "i4", "u4", [("a", "f4")], np.recarray))),
    lambda choose, tile: choose.choice(
        (tile.tolist(), tuple(map(tuple, tile.tolist())), tile.tobytes(), memoryview(tile))
    ),
    lambda choose, tile: choose.choice(
        (None, 3, "tile", object(), np.float32(1), np.zeros(()), [], {}, [[1], [2, 3]], np.nan)
    ),
    lambda choose, tile: np.broadcast_to(
        np.float32(7), choose.choice((tile.shape, (1 << 40, 1 << 20), (0, 8), (4, 0)))
    ),
    lambda choose, tile: np.lib.stride_tricks.as_strided(tile, tile.shape, choose.choice(((0, 4), (4, 4), (32, 0)))),
    lambda choose, tile: Lying(tile, choose),
    lambda choose, tile: tile,
)


class Lying:
    """What says that it is an array, and gives another one, or an error."""

    def __init__(self, tile: Any, choose: random.Random) -> None:
        self.shape = choose.choice((tile.shape, (1 << 62,), None, "shape", (-1, 8)))
        self.dtype = choose.choice((tile.dtype, "f4", None, object()))
        self.given = choose.choice((tile, tile[:2], None, "error"))

    def __array__(self, *given: Any, **options: Any) -> Any:
        if isinstance(self.given, str):
            raise RuntimeError("no array")
        return self.given

    def __len__(self) -> int:
        return 1 << 60


def damage_tiles(choose: random.Random, seed: dict[int, Any], _: Any) -> Any:
    tiles: dict[Any, Any] = {device: tile.copy() for device, tile in seed.items()}
    for _ in range(choose.choice((1, 1, 2, 8))):
        device = choose.randrange(8)
        with contextlib.suppress(Exception):  # numpy refuses some of these itself.
            tiles[device] = choose.choice(ARRAYS)(choose, tiles[device])
    kind = choose.random()
    if kind < 0.05:
        del tiles[choose.randrange(8)]
    elif kind < 0.1:
        tiles[choose.choice((8, -1, "0", None, 0.0, True, np.int64(3), (1,)))] = tiles[0]
    elif kind < 0.13:
        return choose.choice((list(tiles.values()), tuple(tiles.items()), None, DATA, iter(tiles)))
    return tiles


def take_tiles(tiles: Any) -> None:
    given = dict(tiles) if isinstance(tiles, dict) else tiles
    moved = rs.simulate(PLAN, tiles)
    whole = np.zeros((16, 8), np.float32)
    for device in range(0, 8, 2):  # Those with y = 0 have each row once.
        must(
            not (isinstance(given[device], np.ma.MaskedArray) and np.ma.is_masked(given[device])),
            "masked elements are taken for data",
        )
        whole[device * 2 : device * 2 + 4] = np.asarray(given[device])
    for device in range(0, 8, 2):
        got = moved[device]
        must(type(got) is np.ndarray and got.dtype == np.float32, "a tile of {}", type(got))
        must(np.array_equal(got, whole[:, device : device + 2]), "device {} has {}", device, got)


# Files of arrays, and the command line.


def _folders() -> list[tuple[bytes, bytes]]:
    """The files of a saved array, on one rank: layout.json and its tile."""
    from reshard.mpi import DistArray, world

    with tempfile.TemporaryDirectory() as folder:
        layout = rs.Layout.parse("f32[16, 8]", rs.Mesh(x=1))
        DistArray(layout, DATA.copy(), world()).save(folder)
        (tile,) = Path(folder).glob("tile-*.npy")
        return [((Path(folder) / "layout.json").read_bytes(), tile.read_bytes())]


HEADERS = (
    *r"""
{'descr': '|O', 'fortran_order': False, 'shape': (16, 8), }
{'descr': '<f4', 'fortran_order': True, 'shape': (16, 8), }
{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999999999999, 8), }
{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -128), }
{'descr': '>f4', 'fortran_order': False, 'shape': (16, 8), }
{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (16, 8), }
{'descr': '<f4', 'shape': (16, 8)
{'descr': ('<f4', (1 << 40,)), 'fortran_order': False, 'shape': (16, 8), }
{'descr': ('<f4', (99999999, 99999)), 'fortran_order': False, 'shape': (16, 8), }
{'descr': 'V4', 'fortran_order': 0, 'shape': [16, 8]}
{'descr': '<f4', 'fortran_order': False, 'shape': (16, 8), 'more': 1}
{'descr': '<M8[s', 'fortran_order': False, 'shape': ()}
lambda: 0
'''
""".strip().splitlines(),
    "{'descr': '<f4',\\\n",
    "[" * 9000,
    "9" * 5000,
)


def damage_folder(choose: random.Random, seed: tuple[bytes, bytes], other: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    head, tile = seed
    kind = choose.random()
    if kind < 0.3:
        return damage_json(choose, head.decode(), head.decode()).encode("utf-8", "surrogatepass"), tile
    if kind < 0.5:  # The header alone, so that its length fits.
        text = choose.choice((choose.choice(HEADERS), damage_text(choose, tile[10:128].decode(), HEADERS[0])))
        raw = text.encode("utf-8", "surrogatepass")
        version = choose.choice(((1, 0), (1, 0), (2, 0), (3, 0), (9, 9)))
        size = len(raw).to_bytes(2 if version == (1, 0) and len(raw) < 1 << 16 else 4, "little")
        return head, b"\x93NUMPY" + bytes(version) + size + raw + tile[128:]
    if kind < 0.8:
        return head, damage_bytes(choose, tile[:128], tile) + tile[128:]
    return head, damage_bytes(choose, tile, tile)


def take_folder(files: tuple[bytes, bytes]) -> None:
    from reshard.mpi import DistArray, world

    layout = rs.Layout.parse("f32[16, 8]", rs.Mesh(x=1))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "layout.json").write_bytes(files[0])
        names = re.findall(rb'"save": "([A-Za-z0-9]{1,64})"', files[0]) or [b"0"]
        (Path(folder) / f"tile-0-{names[0].decode()}.npy").write_bytes(files[1])
        read = DistArray.load(folder, layout, world())
        must(read.dtype == np.float32 and read.tile.shape == (16, 8), "an array of {}", read.dtype)


# Checkpoints: folders as their files by name, of which one is damaged.

Files = Mapping[str, bytes]


def _checkpoints(kind: str) -> list[Files]:
    """Whole checkpoints of a format, made without the library that usually writes them."""
    from tests.files.bad_files import MAP, V, W, file_of
    from tests.files.dcp_maker import rows_tensor, write_dcp

    if kind == "safetensors":
        half = {
            "__metadata__": {"format": "pt", "reshard.save": "a1"},
            "w": {**W, "dtype": "F16", "data_offsets": [0, 12]},
        }
        return [{"m.safetensors": file_of({"w": W, "v": V})}, {"m.safetensors": file_of(half, 12)}]
    if kind == "index":
        index = json.dumps({"metadata": {"total_size": 40}, "weight_map": MAP}).encode()
        shards = {
            "a.safetensors": file_of({"w": W}, 24),
            "b.safetensors": file_of({"v": {**V, "data_offsets": [0, 16]}}, 16),
        }
        return [{"model.safetensors.index.json": index, **shards}]
    folders = [ROOT / "tests/files/data/dcp"]
    with tempfile.TemporaryDirectory() as folder:
        write_dcp(Path(folder), {"w": rows_tensor(2)[1], "lr": 0.1})
        return [{path.name: path.read_bytes() for path in sorted(each.iterdir())} for each in [*folders, Path(folder)]]


def damage_header(choose: random.Random, files: Files, _: Files) -> Files:
    """The JSON of a safetensors file damaged, with its length in front or without; or any of its bytes."""
    ((name, content),) = files.items()
    size = 8 + int.from_bytes(content[:8], "little")
    if choose.random() < 0.2:
        return {name: damage_bytes(choose, content, content)}
    text = damage_json(choose, content[8:size].decode(), content[8:size].decode()).encode("utf-8", "surrogatepass")
    length = len(text) if choose.random() < 0.9 else choose.choice((0, 1, size, 1 << 40, 1 << 63, (1 << 64) - 1))
    return {name: length.to_bytes(8, "little") + text + content[size:]}


def damage_index(choose: random.Random, files: Files, _: Files) -> Files:
    name, index = next(iter(files.items()))
    if choose.random() < 0.1:
        shard = choose.choice(list(files)[1:])
        return {
            key: damage_bytes(choose, content, index) if key == shard else content for key, content in files.items()
        }
    text = damage_json(choose, index.decode(), index.decode())
    return {**files, name: text.encode("utf-8", "surrogatepass")}


OPCODES = bytes(range(0x28, 0x86)) + bytes(range(0x80, 0x99))


def damage_pickle(choose: random.Random, files: Files, _: Files) -> Files:
    """One opcode, number or run of `.metadata`, or of an archive."""
    name = ".metadata" if choose.random() < 0.6 else choose.choice([each for each in files if each != ".metadata"])
    content = files[name]
    kind, at = choose.random(), choose.randrange(len(content))
    if kind < 0.4:
        content = content[:at] + bytes((choose.choice(OPCODES),)) + content[at + choose.randint(0, 1) :]
    elif kind < 0.5:
        run = bytes(choose.choice(OPCODES) for _ in range(choose.choice((2, 8, 2000))))
        content = content[:at] + run + content[at:]
    elif kind < 0.6:
        content = content[:at] + choose.choice((b"\xff" * 4, b"\xff" * 8, bytes(8))) + content[at + 8 :]
    else:
        content = damage_bytes(choose, content, content)
    return {**files, name: content}


def take_checkpoint(files: Files) -> None:
    """Opens what is there: it must be whole, the same after JSON, and what the safetensors library says it is."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        lone = Path(folder) / next(iter(files)) if len(files) == 1 else None
        judged = None if lone is None else _judge_safetensors(lone)
        try:
            ckpt = rs.files.open(folder)
        except ReshardError as error:
            stricter = (
                "twice",
                "less than a byte",
                "2^63",
                "more elements than any array",
                "is not JSON",
                "not with '{'",
            )
            must(judged is None or any(word in str(error) for word in stricter), "refused alone: {}", error)
            raise
        must(type(ckpt).from_json(ckpt.to_json()) == ckpt and len(str(ckpt)) > 0, "another checkpoint after JSON")
        if lone is not None:
            said = {name: ckpt[name].shape for name in ckpt}
            must(said == judged, "{} where the library says {}", said, judged)
        for stored in ckpt.tensors.values():
            for piece in stored.pieces:
                end = piece.offset + piece.nbytes
                must(0 <= piece.offset <= end <= ckpt.files[piece.file].size, "a piece outside its file: {}", piece)
            if math.prod(stored.shape) <= 4096:
                covered = np.zeros(stored.shape, np.int64)
                for piece in stored.pieces:
                    covered[tuple(slice(*span) for span in piece.box)] += 1
                must(bool((covered == 1).all()), "pieces of {} do not cover it once", stored.name)


def _judge_safetensors(path: Path) -> dict[str, tuple[int, ...]] | None:
    import safetensors

    try:
        with safetensors.safe_open(path, "numpy") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except Exception:
        return None


def _checkpoint_texts() -> list[str]:
    from tests.files.test_checkpoint import every_kind_of_piece

    return [every_kind_of_piece().to_json(), rs.files.open(ROOT / "tests/files/data/dcp").to_json()]


def take_checkpoint_text(text: str) -> None:
    from reshard.plans.stored import Checkpoint

    ckpt = Checkpoint.from_json(text)
    must(Checkpoint.from_json(ckpt.to_json()) == ckpt, "a checkpoint is not written as itself")
    must(len(str(ckpt)) > 0 and all(len(stored.pieces) >= 0 for stored in ckpt.tensors.values()), "no text")


COMMANDS = [
    shlex.split(line)
    for line in r"""
plan --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' 'f32[16, {x}{y}2, 16]' --json
plan --mesh x=4,y=2 '[{"x"}, {}]' "P(None, ('x', 'y'))" --shape 16,16 --dtype bf16 --budget 64MiB
plan --mesh x=4 'f32[{x}24, 5]' 'f32[3, {x}8, 5]' --view '(three h) d -> three h d' --size three=3
plan --mesh x=4 'f32[{x}4, 8]' 'bf16[16, {x}2]' --cast --network h100 --slack 0.1 --explain --donate
plan --mesh x=4,y=2 --target-mesh z=4@8 'f32[{x}{y}2]' 'f32[{z}2]' --take 0=0:8
show --mesh x=4,y=2 'f32[{x}4, {y}8]' --limit 20
simulate --mesh x=4,y=2 'f32[{x}4, {y}8]' 'f32[16, {x}4]' --seed 3
prove --mesh x=4 'f32[{x}4]' 'f32[16]' --limit 1 --launches
doctor tests/hlo/data/gather_cpu_0.10.2.hlo --json --all --frames all
doctor tests/doctor/data/train_0.10.2.log --network h100 --fail-on-rebuild
completion bash
""".strip().splitlines()
]


def damage_words(choose: random.Random, seed: tuple[str, ...], other: tuple[str, ...]) -> list[str]:
    words = list(seed)
    for _ in range(choose.choice((1, 1, 2, 3))):
        at = choose.randrange(max(1, len(words)))
        kind = choose.random()
        if kind < 0.6 and words:
            words[at] = damage_text(choose, words[at % len(words)], choose.choice(other))[:100_000]
        elif kind < 0.7:
            words[at : at + 1] = []
        elif kind < 0.8:
            words.insert(at, choose.choice(other))
        elif kind < 0.9:
            words[at : at + 1] = choose.choice((["--"], ["-"], [""], ["@"], ["--x=" + "y" * 1000], ["-vv"], ["\x00"]))
        else:
            words = [*words[:at], *other[at:]]
    # What writes files or starts processes is not run.
    return [word for word in words if not word.startswith(("-o", "--o", "--h", "run", "calib", "pass"))]


def take_words(words: Sequence[str]) -> None:
    from reshard.cli import main

    out, errors = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    given = io.TextIOWrapper(io.BytesIO(b'{"source": "f32[8]", "target": "f32[8]"}\n'), "utf-8")
    kept = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, sys.stdout, sys.stderr = given, out, errors
    try:
        code: Any = main(list(words))
    except SystemExit as stop:
        code = stop.code
    finally:
        out.flush()
        errors.flush()
        sys.stdin, sys.stdout, sys.stderr = kept
        import logging

        logging.getLogger("reshard").setLevel(logging.NOTSET)
        logging.getLogger().handlers.clear()
    said = errors.buffer.getvalue().decode("utf-8", "replace")
    must(code in (0, 1, 2) and "Traceback" not in said, "code {}, {}", code, said[-500:])
    if code == 2:
        must(
            said.rstrip("\n").rpartition("\n")[2].startswith("reshard") and len(said) < 200_000, "says {}", said[-500:]
        )


LINES = (
    '{"name": "w", "mesh": "x=4,y=2", "source": "f32[{x}4, 8]", "target": "f32[16, {y}4]"}\n'
    '{"name": "b", "mesh": {"x": 4}, "source": "P(\'x\')", "target": "P()", "shape": [8], "dtype": "f32"}\n',
    '{"mesh": "x=4", "target_mesh": "z=4@8", "source": "f32[{x}4]", "target": "f32[{z}4]", "name": 3}\n',
)


def take_lines(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "moves.jsonl"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        take_words(["plan", "--batch", str(path), *(["--tree", "--json"] if len(text) % 2 else [])])


def damage_lines(choose: random.Random, seed: str, other: str) -> str:
    if choose.random() < 0.5:
        return damage_text(choose, seed, other)
    lines = seed.splitlines()
    at = choose.randrange(len(lines))
    lines[at] = damage_json(choose, lines[at], other.splitlines()[0])
    return "\n".join(lines)


KINDS: dict[str, Kind] = {
    "notations": Kind(_notation_seeds, damage_notation, lambda seed: NOTATIONS[seed[0]][0](seed[1])),
    "plans": Kind(_plans, damage_json, take_plan),
    "trees": Kind(_trees, damage_json, take_tree),
    "networks": Kind(_networks, damage_json, take_network),
    "network files": Kind(_networks, damage_json, take_network_file),
    "manifests": Kind(_manifests, damage_json, take_manifest),
    "moves": Kind(_moves, damage_json, take_move),
    "tiles": Kind(lambda: [{d: DATA[d // 2 * 4 : d // 2 * 4 + 4] for d in range(8)}], damage_tiles, take_tiles),
    "batch files": Kind(lambda: LINES, damage_lines, take_lines),
    "command lines": Kind(lambda: COMMANDS, damage_words, take_words),
    "HLO texts": Kind(_hlo_texts, damage_text, take_hlo),
    "HLO protos": Kind(_protos, damage_proto, take_proto),
    "XLA logs": Kind(_logs, damage_text, take_log),
    "array files": Kind(_folders, damage_folder, take_folder),
    "checkpoints in JSON": Kind(_checkpoint_texts, damage_json, take_checkpoint_text),
    "safetensors": Kind(lambda: _checkpoints("safetensors"), damage_header, take_checkpoint),
    "indexes": Kind(lambda: _checkpoints("index"), damage_index, take_checkpoint),
    "torch checkpoints": Kind(lambda: _checkpoints("dcp"), damage_pickle, take_checkpoint),
    "serialized": Kind(_serialized, damage_bytes, take_serialized),
    "StableHLO": Kind(_stablehlo, damage_text, take_stablehlo),
    "HLO for the pass": Kind(_hlo_texts, damage_text, take_hlo_pass),
}


class OverTimeError(BaseException):
    """Not an `Exception`, so that no handler of the package takes it for the input's."""


class Outcome(NamedTuple):
    """What became of an input: refused, taken, or what is wrong; its seconds and bytes."""

    number: int
    what: str
    seconds: float
    mebibytes: float


def make_input(kind: str, seed: int, number: int, seeds: Sequence[Any]) -> Any:
    """Input number `number` of a kind and a seed."""
    choose = random.Random(f"{seed}/{kind}/{number}")
    return KINDS[kind].damage(choose, choose.choice(seeds), choose.choice(seeds))


def try_input(kind: str, given: Any) -> str:
    """Gives an input to its door: "taken", "refused", or what is wrong."""

    def stop(*_: Any) -> None:
        raise OverTimeError

    try:
        before = signal.signal(signal.SIGVTALRM, stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
        try:
            KINDS[kind].take(given)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
    except ReshardError as error:
        return "refused" if 0 < len(str(error)) < 5000 else f"wrong: a message of {len(str(error))} characters"
    except OverTimeError:
        return f"wrong: more than {MOST_SECONDS} s\n{''.join(traceback.format_exc(limit=-4))}"
    except BaseException as error:
        return f"wrong: {type(error).__name__}: {str(error)[:300]}\n{traceback.format_exc(limit=-4)[-1500:]}"
    return "taken"


def _peak(start: bool) -> float:
    """The most memory of this process since the last start, in MiB; Linux alone says."""
    with contextlib.suppress(OSError):
        if start:
            Path("/proc/self/clear_refs").write_text("5")
        found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        return int(found[1]) / 1024 if found else 0.0
    return 0.0


def _run_child(kind: str, seed: int, start: int, end: int) -> None:
    """Takes the inputs one after another, and prints an `Outcome` for each."""
    seeds = KINDS[kind].seeds()
    for given in seeds:
        if (what := try_input(kind, given)) != "taken":
            raise RuntimeError(f"{kind}: a whole input is {what}: {str(given)[:200]}")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))
    for number in range(start, end):
        given = make_input(kind, seed, number, seeds)
        before, begun = _peak(start=True), time.process_time()
        what = try_input(kind, given)
        spent = time.process_time() - begun
        print(json.dumps([number, what, round(spent, 4), round(_peak(start=False) - before, 1)]), flush=True)


def fuzz_kind(kind: str, seed: int, start: int, inputs: int) -> Iterator[Outcome]:
    """The outcomes of a kind's inputs, from processes of their own."""
    number, end = start, start + inputs
    environment = {
        **os.environ,
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    while number < end:
        words = [
            sys.executable,
            __file__,
            "--child",
            kind,
            "--seed",
            str(seed),
            "--start",
            str(number),
            "--inputs",
            str(end - number),
        ]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True, cwd=ROOT
        ) as child:
            assert child.stdout is not None and child.stderr is not None
            said: list[str] = []
            reader = threading.Thread(
                target=lambda c=child, s=said: s.append((c.stderr or io.StringIO()).read()[-800:]), daemon=True
            )
            reader.start()
            watch = threading.Timer(MOST_WAIT * 2, child.kill)
            watch.start()
            for line in child.stdout:
                watch.cancel()
                watch = threading.Timer(MOST_WAIT, child.kill)
                watch.start()
                with contextlib.suppress(ValueError):
                    outcome = Outcome(*json.loads(line))
                    number = outcome.number + 1
                    yield outcome
            watch.cancel()
            child.wait()
            reader.join(5)
        if number < end:
            yield Outcome(number, f"wrong: the process ended with {child.returncode}: {''.join(said)[-800:]}", 0.0, 0.0)
            number += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=1000, help="of each kind")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--show", action="store_true", help="print the input of --start of each kind instead")
    options = parser.parse_args()
    if options.child:
        _run_child(options.child, options.seed, options.start, options.start + options.inputs)
        return 0
    wrong = 0
    for kind in options.kind or KINDS:
        if options.show:
            print(repr(make_input(kind, options.seed, options.start, KINDS[kind].seeds())))
            continue
        kinds: Counter[str] = Counter()
        begun, slowest, largest = time.monotonic(), (0.0, -1), (0.0, -1)
        for number, what, seconds, mebibytes in fuzz_kind(kind, options.seed, options.start, options.inputs):
            kinds[what.split(":")[0]] += 1
            slowest, largest = max(slowest, (seconds, number)), max(largest, (mebibytes, number))
            if what.startswith("wrong"):
                again = f'--seed {options.seed} --kind "{kind}" --start {number} --inputs 1'
                print(f"{kind} {number}: {what}\n  again: python benchmarks/fuzz_inputs.py {again}\n", flush=True)
        wrong += kinds["wrong"]
        print(
            f"{kind}: {kinds.total()} inputs in {time.monotonic() - begun:.0f} s, {kinds['wrong']} wrong, "
            f"{kinds['refused']} refused, {kinds['taken']} taken; slowest {slowest[0]:.2f} s ({slowest[1]}), "
            f"largest {largest[0]:.0f} MiB ({largest[1]})",
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

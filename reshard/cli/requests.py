"""From the arguments of a call, or the lines of a file, to layouts, and to the plan between them.

    reshard plan --mesh x=4,y=2 'f32[{x}4, 16]' "P(None, 'x')"

The target has neither shape nor dtype and takes those of the source. In the same way, a sharding that brings a mesh
(HLO's, or Shardy's with its mesh written out) lends it to a layout that has none. A file has a move in each line, and
what a line leaves out, the options of the call give: `--mesh`, `--target-mesh`, `--shape` and `--dtype`.

    {"name": "w", "mesh": "x=4,y=2", "source": "f32[{x}4, 8]", "target": "f32[16, 8]"}
    {"name": "b", "mesh": "x=4,y=2", "source": "P('x')", "target": "P()", "shape": [8], "dtype": "f32"}
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import re
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

from reshard.cli.option_groups import ArrayOptions, MoveOptions
from reshard.errors import NotationError, ReshardError, did_you_mean, quoted, shortened
from reshard.geometry.detect import as_layouts, read
from reshard.plans.plan import Plan
from reshard.synth import find_plan
from reshard.synth.options import SLACK, PlanOptions
from reshard.types import Layout, Mesh
from reshard.types.input_files import open_input
from reshard.types.move import Move
from reshard.types.notation.einops import read_part
from reshard.types.units import counted, parse_shape
from reshard.types.whole import whole, written

_log = logging.getLogger("reshard")

_GIVE = re.compile(r"; (?:give|pass) (the mesh|shape and dtype|shape|dtype)(?: that has them)?$")
_MISSING = {"mesh": "--mesh x=4,y=2", "shape": "--shape 16,16", "dtype": "--dtype f32"}
_NOT_ATOMS = frozenset(("self", "source", "target", "view", "take", "into", "cast", "have", "changed"))
"""The arguments of `Move`, whose names no size can have."""
_MOST_LINE = 1 << 20  # Characters.
_KEYS = {"name", "source", "target", "mesh", "target_mesh", "shape", "dtype"}


class PlanRequest(NamedTuple):
    """The two layouts of a call, and the plan between them, which may spell the same layouts on another mesh."""

    source: Layout
    target: Layout
    plan: Plan


class NamedPair(NamedTuple):
    """The layouts of one line, and its array's name: its number if it gives none."""

    name: str
    source: Layout
    target: Layout
    line: int


def plan_for_options(options: MoveOptions) -> PlanRequest:
    """The layouts of a call, and the plan of the move between them."""
    start = time.perf_counter()
    source, target = read_layouts(options)
    move = _read_move(source, target, options)
    asked = read_plan_options(options)
    plan = find_plan(source, target, asked) if move is None else find_plan(move, None, asked)
    steps = counted(len(plan.steps), "step")
    _log.info("planned %s -> %s in %.3f s, %s", source, target, time.perf_counter() - start, steps)
    return PlanRequest(source, target, plan)


def read_plan_options(options: MoveOptions) -> PlanOptions:
    """What a call asks of the planner."""
    try:
        slack = SLACK if options.slack is None else float(options.slack)
    except ValueError:
        raise ReshardError(
            f"cannot read the slack {options.slack!r}; write a number of at least 0, e.g. 0.05"
        ) from None
    return PlanOptions.read(options.budget, options.network, options.donate, slack)


def _read_move(source: Layout, target: Layout, options: MoveOptions) -> Move | None:
    """The move of a call that has a view, a part or a cast; None for two layouts of one array."""
    if options.view is None and not (options.size or options.take or options.into or options.cast):
        return None
    sizes = {name: int(text) for name, text in read_pairs("size", options.size)}
    if taken := sorted(_NOT_ATOMS.intersection(sizes)):
        raise NotationError(f"--size {taken[0]}: no atom can have this name; call it otherwise in --view")
    take, into = (
        {
            # Without a view, a dim is named by its number.
            int(name) if options.view is None and re.fullmatch("[0-9]{1,4}", name) else name: read_part(text)
            for name, text in read_pairs(what, given)
        }
        for what, given in (("take", options.take), ("into", options.into))
    )
    given: dict[str, Any] = dict(sizes)  # None of the names is an option of Move, as is checked above.
    return Move(source, target, options.view, take=take, into=into, cast=options.cast, **given)


def read_pairs(what: str, given: Sequence[str] | None) -> list[tuple[str, str]]:
    """NAME=VALUE texts as pairs."""
    pairs: list[tuple[str, str]] = []
    for text in given or ():
        name, equals, value = text.partition("=")
        # int() refuses numbers of more than 4300 digits with a ValueError, too.
        wrong = what == "size" and (not value.isdecimal() or written(value) is None)
        if wrong or not (equals and name and value):
            form = "N" if what == "size" else "INDEX or NAME=START:STOP"
            raise NotationError(f"--{what} {quoted(text)}: write NAME={form}")
        pairs.append((name, value))
    return pairs


# Layouts: text in any notation, with what the call or the other layout gives for it.


def read_only_layout(text: str, options: ArrayOptions) -> Layout:
    """The layout of a call that has only one."""
    shape = None if options.shape is None else parse_shape(options.shape)
    with _naming_options():
        return read(text, None if options.mesh is None else Mesh.parse(options.mesh), shape, options.dtype)


def read_layouts(options: MoveOptions) -> tuple[Layout, Layout]:
    """Source and target; the shape, dtype or mesh that only one of them has serves for the other."""
    mesh, target_mesh = (None if text is None else Mesh.parse(text) for text in (options.mesh, options.target_mesh))
    shape = None if options.shape is None else parse_shape(options.shape)
    with _naming_options():
        return as_layouts(options.source, options.target, mesh, target_mesh, shape, options.dtype)


@contextmanager
def _naming_options() -> Generator[None]:
    """A context in which an error that asks for a mesh, a shape or a dtype names the options that give them."""
    try:
        yield
    except ReshardError as error:
        missing = _GIVE.search(str(error))
        if missing is None:
            raise
        options = " ".join(option for word, option in _MISSING.items() if word in missing[1])
        raise type(error)(f"{error}: {options}") from None


# Files of moves, one in a line.


def read_batch(path: str, options: MoveOptions) -> Iterator[NamedPair]:
    """The layouts of each line, as soon as it is read; `-` reads standard input. Errors name the line."""
    try:
        file = sys.stdin if path == "-" else io.TextIOWrapper(open_input(path), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ReshardError(f"--batch {quoted(path)} cannot be read: {error}; give a file of JSON lines, or -") from None
    with file:
        for number in itertools.count(1):
            try:
                line = file.readline(_MOST_LINE)
            except (OSError, ValueError) as error:
                raise ReshardError(f"--batch {quoted(path)} cannot be read: {error}") from None
            if not line:
                return
            if len(line) == _MOST_LINE:  # such as /dev/zero, which has no line at all
                raise ReshardError(f"--batch {quoted(path)} has a line above {_MOST_LINE} characters; give JSON lines")
            if line.strip():
                yield _read_move_line(line, number, options)


def _read_move_line(line: str, number: int, options: MoveOptions) -> NamedPair:
    """A line, whose entries are written as the text of options: both are read, and refused, in one place."""
    try:
        try:
            given: object = json.loads(line)
        except (ValueError, RecursionError) as error:  # "[" * 100000 is too deep for the reader
            raise ReshardError(f"{quoted(line.strip())} is not JSON ({shortened(str(error))})") from None
        data = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        if unknown := sorted(set(data) - _KEYS):
            cure = f"; give --{unknown[0]}" if unknown[0] in ("network", "budget", "donate", "slack") else ""
            raise ReshardError(f"unknown key {quoted(unknown[0])}{cure or did_you_mean(unknown[0], _KEYS)}")
        texts = all(isinstance(data.get(key), str) for key in ("source", "target"))
        if not texts or not isinstance(data.get("dtype"), str | None):
            raise ReshardError(
                f"{quoted(data or line.strip())} is not a move; give an object with the texts source and target, and "
                f"perhaps name, mesh, target_mesh, shape and dtype"
            )
        here = replace(
            options,
            source=data["source"],
            target=data["target"],
            mesh=_write_mesh_text(data.get("mesh"), options.mesh),
            target_mesh=_write_mesh_text(data.get("target_mesh"), options.target_mesh),
            shape=_write_shape_text(data.get("shape"), options.shape),
            dtype=options.dtype if data.get("dtype") is None else data["dtype"],
        )
        name = data.get("name", number)
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise ReshardError(f"the name {quoted(name)}: give text or a number, or leave it out for the line's number")
        return NamedPair(str(name), *read_layouts(here), number)
    except ReshardError as error:
        raise type(error)(f"line {number}: {error}") from None


def _write_mesh_text(given: object, otherwise: str | None) -> str | None:
    """A mesh as text such as x=4,y=2; also from an object of axes."""
    if isinstance(given, dict):
        return str(Mesh(cast("dict[str, Any]", given)))
    if given is None or isinstance(given, str):
        return otherwise if given is None else given
    raise ReshardError(f"the mesh {quoted(given)}: give text such as x=4,y=2, or an object of axes and sizes")


def _write_shape_text(given: object, otherwise: str | None) -> str | None:
    if given is None or isinstance(given, str):
        return otherwise if given is None else given
    sizes = cast("list[object] | None", given if isinstance(given, list) else None)
    if sizes is None or any(whole(size) is None for size in sizes):
        raise ReshardError(f"the shape {quoted(cast('object', given))}: give a list of sizes, or text such as 16,16")
    return "".join(f"{size}," for size in sizes)

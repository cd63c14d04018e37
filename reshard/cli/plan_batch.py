"""`reshard plan --batch`: many moves from a file of JSON lines, planned one by one or as one tree.

    {"name": "w", "mesh": "x=4,y=2", "source": "f32[{x}4, 8]", "target": "f32[16, 8]"}
    {"name": "b", "mesh": "x=4,y=2", "source": "P('x')", "target": "P()", "shape": [8], "dtype": "f32"}

What a line leaves out, the options of the call give: `--mesh`, `--target-mesh`, `--shape` and `--dtype`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from reshard.cli.options import PairOptions
from reshard.cli.plan_request import share, two_layouts
from reshard.errors import PlanError, ReshardError, quoted, shortened
from reshard.synth import plan, plan_tree
from reshard.synth.planner import SLACK
from reshard.types import Layout, Mesh
from reshard.types.whole import whole

_MOST_LINE = 1 << 20  # Characters.
_KEYS = {"name", "source", "target", "mesh", "target_mesh", "shape", "dtype"}


class NamedPair(NamedTuple):
    """The layouts of one line, and its array's name: its number if it gives none."""

    name: str
    source: Layout
    target: Layout
    line: int


def stream(path: str, options: PairOptions) -> None:
    """Prints the plan of each line as JSON, as soon as the line is read."""
    for pair in pairs(path, options):
        try:
            made = plan(pair.source, pair.target, **_planner(options))
        except ReshardError as error:
            raise ReshardError(f"line {pair.line}: {error}") from None
        print(json.dumps({"name": pair.name, **made.to_dict()}), flush=True)


def show_tree(path: str, options: PairOptions, as_json: bool) -> None:
    """Prints the plan of all lines together, as a table or as JSON."""
    moves: dict[str, tuple[Layout, Layout]] = {}
    for pair in pairs(path, options):
        if pair.name in moves:
            raise PlanError(f"two lines are called {quoted(pair.name)}; give each array a name of its own")
        moves[pair.name] = (pair.source, pair.target)
    tree = plan_tree(moves, **_planner(options))
    print(tree.to_json() if as_json else tree)


def _planner(options: PairOptions) -> dict[str, Any]:
    slack = SLACK if options.slack is None else share(options.slack)
    return {"budget": options.budget, "network": options.network, "donate": options.donate, "slack": slack}


def pairs(path: str, options: PairOptions) -> Iterator[NamedPair]:
    """The layouts of each line; `-` reads standard input. Errors name the line."""
    try:
        file = sys.stdin if path == "-" else Path(path).open(encoding="utf-8")  # noqa: SIM115
    except (OSError, ValueError) as error:
        raise ReshardError(f"--batch {quoted(path)} cannot be read: {error}; give a file of JSON lines, or -") from None
    with file:
        for number, line in enumerate(_lines(file, path), 1):
            if line.strip():
                yield _pair(line, number, options)


def _lines(file: Any, path: str) -> Iterator[str]:
    try:
        while line := file.readline(_MOST_LINE):
            if len(line) == _MOST_LINE:
                raise ReshardError(f"--batch {quoted(path)} has a line above {_MOST_LINE} characters; give JSON lines")
            yield line
    except ReshardError:
        raise
    except (OSError, ValueError) as error:
        raise ReshardError(f"--batch {quoted(path)} cannot be read: {error}") from None


def _pair(line: str, number: int, options: PairOptions) -> NamedPair:
    try:
        data = _read(line)
        here = replace(
            options,
            source=data["source"],
            target=data["target"],
            mesh=_mesh(data.get("mesh"), options.mesh),
            target_mesh=_mesh(data.get("target_mesh"), options.target_mesh),
            shape=_shape(data.get("shape"), options.shape),
            dtype=options.dtype if data.get("dtype") is None else data["dtype"],
        )
        name = data.get("name", number)
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise ReshardError(f"the name {quoted(name)}: give text or a number, or leave it out for the line's number")
        return NamedPair(str(name), *two_layouts(here), number)
    except ReshardError as error:
        raise type(error)(f"line {number}: {error}") from None


def _read(line: str) -> dict[str, Any]:
    try:
        given: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ReshardError(f"{quoted(line.strip())} is not JSON ({shortened(str(error))})") from None
    data = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    texts = all(isinstance(data.get(key), str) for key in ("source", "target"))
    if not texts or not set(data) <= _KEYS or not isinstance(data.get("dtype"), str | None):
        raise ReshardError(
            f"{quoted(data or line.strip())} is not a move; give an object with the texts source and target, and "
            f"perhaps name, mesh, target_mesh, shape and dtype"
        )
    return data


def _mesh(given: object, otherwise: str | None) -> str | None:
    """A mesh as text such as x=4,y=2; also from an object of axes."""
    if isinstance(given, dict):
        return str(Mesh(cast("dict[str, Any]", given)))
    if given is None or isinstance(given, str):
        return otherwise if given is None else given
    raise ReshardError(f"the mesh {quoted(given)}: give text such as x=4,y=2, or an object of axes and sizes")


def _shape(given: object, otherwise: str | None) -> str | None:
    if given is None or isinstance(given, str):
        return otherwise if given is None else given
    sizes = cast("list[object] | None", given if isinstance(given, list) else None)
    if sizes is None or any(whole(size) is None for size in sizes):
        raise ReshardError(f"the shape {quoted(cast('object', given))}: give a list of sizes, or text such as 16,16")
    return "".join(f"{size}," for size in sizes)

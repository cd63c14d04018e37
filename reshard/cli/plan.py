"""`reshard plan`: the steps between two layouts as a table, JSON or a page, and why they are there."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from reshard.cli.options import NOTATIONS, Commands, MoveOptions, add_command
from reshard.errors import ReshardError
from reshard.plans.plan import Plan

if TYPE_CHECKING:
    pass  # dropped import

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from reshard.cli.options import ArrayOptions, PairOptions
from reshard.errors import NotationError, PlanError, quoted, shortened
from reshard.geometry.detect import read
from reshard.synth import plan, plan_tree
from reshard.synth.planner import SLACK
from reshard.types import Layout, Mesh
from reshard.types.move import Move
from reshard.types.notation.einops import read_part
from reshard.types.units import counted, parse_shape
from reshard.types.whole import whole, written

_EXAMPLES = """\
examples:
  reshard plan --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' \\
      'f32[16, {x}{y}2, 16]'
  reshard plan --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' \\
      "P(None, ('x', 'y'))" --explain
  reshard plan --mesh x=4,y=2 '[{"x"}, {}]' \\
      '[{}, {"x", "y"}]' \\
      --shape 4096,4096 --dtype bf16 \\
      --budget 64MiB --network tpu-v5p
  reshard plan '{devices=[2,1,4]<=[4,2]T(1,0)}' \\
      '{devices=[1,8,1]<=[8]}' \\
      --shape 16,16,16 --dtype f32 --json
  reshard plan --mesh x=4,y=2 'f32[8, 16] + sum{x}' \\
      'f32[{x}2, 16]' --donate
  reshard plan --mesh p=2,q=3 --target-mesh r=6 \\
      'f32[{p}{q}7/40]' 'f32[{r}7/40]'
  reshard plan --mesh x=4 'f32[{x}24, 5]' \\
      'f32[3, {x}8, 5]' \\
      --view '(three h) d -> three h d' --size three=3
  reshard plan --mesh x=4 'f64[16{x}64, 1024]' \\
      'f64[4096, {x}256]' \\
      --html plan.html
  reshard plan --batch moves.jsonl --tree --budget 4GiB
"""


@dataclass(frozen=True)
class PlanCommand(MoveOptions):
    """The options of `reshard plan`."""

    from_file = True
    batch: str | None
    tree: bool
    json: bool
    html: str | None
    explain: bool

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds those of a move, and the forms of output."""
        super().add_to(parser)
        batch = 'plan each line of a file of JSON lines instead, e.g. {"name", "source", "target"}; - for stdin'
        parser.add_argument("--batch", metavar="FILE", help=batch)
        parser.add_argument("--tree", action="store_true", help="with --batch: one plan for all of them together")
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
        parser.add_argument("--html", metavar="FILE", help="write one self-contained page, with pictures, instead")
        parser.add_argument("--explain", action="store_true", help="say in plain words why each step is there")


def add(commands: Commands) -> None:
    """Adds `reshard plan`."""
    summary = "the steps from one layout to another, with bytes, memory and time"
    add_command(commands, "plan", summary, f"{NOTATIONS}\n{_EXAMPLES}", PlanCommand, run)


def run(options: PlanCommand) -> int:
    """Plans, and prints or writes the plan in the form asked for."""
    pass  # dropped import

    if options.batch is not None:
        return _run_batch(options.batch, options)
    if options.source is None or options.target is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise ReshardError("give SOURCE and TARGET, or moves in a file: --batch FILE, with --tree as one")
    if options.tree:
        raise ReshardError("--tree is one plan for many moves, from a file: give --batch FILE, or leave --tree out")
    if options.json and options.explain:
        raise ReshardError("--explain is in words, which --json has no place for: leave one of them out")
    request = planned(options)
    if options.html is not None:
        _write_page(options.html, request.plan, options.network)
    if options.json:
        print(request.plan.to_json(indent=2))
    if not options.json and options.html is None:
        _print(request, options)
    return 0


def _run_batch(path: str, options: PlanCommand) -> int:
    from reshard.cli import plan as plan_batch

    if options.source is not None or options.html is not None or options.explain:  # pyright: ignore
        raise ReshardError("--batch reads layouts from its file; leave out SOURCE, TARGET, --html and --explain")
    if options.tree:
        plan_batch.show_tree(path, options, options.json)
    else:
        plan_batch.stream(path, options)
    return 0


def _write_page(path: str, plan: Plan, network: str | None) -> None:
    from reshard.cli.programs import write
    from reshard.draw.plan_page import page

    write(path, page(plan, network))


def _print(request: PlanRequest, options: PlanCommand) -> None:
    if find_spec("rich") is None:  # As in a browser: the plan as plain text.
        print(request.plan)
        return
    from reshard.show import terminal
    from reshard.show.explain import explain
    from reshard.show.plan_table import show_heading, show_steps, show_totals

    out = terminal.console()
    show_heading(out, request.source, request.target)
    show_steps(out, request.plan)
    show_totals(out, request.plan, options.network)
    if options.explain:
        out.print()
        explain(out, request.plan, options.network)


# `reshard plan --batch`: many moves from a file of JSON lines, planned one by one or as one tree.
#
#     {"name": "w", "mesh": "x=4,y=2", "source": "f32[{x}4, 8]", "target": "f32[16, 8]"}
#     {"name": "b", "mesh": "x=4,y=2", "source": "P('x')", "target": "P()", "shape": [8], "dtype": "f32"}
#
# What a line leaves out, the options of the call give: `--mesh`, `--target-mesh`, `--shape` and `--dtype`.


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


# From the text of a call to layouts and the plan between them.
#
#     reshard plan --mesh x=4,y=2 'f32[{x}4, 16]' "P(None, 'x')"
#
# The target has neither shape nor dtype and takes those of the source. In the same way, a sharding that brings a mesh
# (HLO's, or Shardy's with its mesh written out) lends it to a layout that has none.


_log = logging.getLogger("reshard")

_OURS = re.compile(r"\s*[A-Za-z_]\w*\s*\[")
_GIVE = re.compile(r"; (?:give|pass) (the mesh|shape and dtype|shape|dtype)(?: that has them)?$")
_NOT_ATOMS = frozenset(("self", "source", "target", "view", "take", "into", "cast"))
"""The arguments of `Move`, whose names no size can have."""
_OPTIONS = {"mesh": "--mesh x=4,y=2", "shape": "--shape 16,16", "dtype": "--dtype f32"}


class PlanRequest(NamedTuple):
    """The two layouts of a call, and the plan between them, which may spell the same layouts on another mesh."""

    source: Layout
    target: Layout
    plan: Plan


def planned(options: PairOptions) -> PlanRequest:
    """The layouts of a call, and the plan between them."""
    start = time.perf_counter()
    source, target = two_layouts(options)
    request = _planned(source, target, options)
    plan = request.plan
    steps = counted(len(plan.steps), "step")
    _log.info("planned %s -> %s in %.3f s, %s", source, target, time.perf_counter() - start, steps)
    return request


def _planned(source: Layout, target: Layout, options: PairOptions) -> PlanRequest:
    slack = SLACK if options.slack is None else share(options.slack)
    move = _move(source, target, options) if isinstance(options, MoveOptions) else None
    if move is None:
        return PlanRequest(source, target, plan(source, target, options.budget, options.network, options.donate, slack))
    return PlanRequest(source, target, plan(move, None, options.budget, options.network, options.donate, slack))


def _move(source: Layout, target: Layout, options: MoveOptions) -> Move | None:
    """The move of a call that has a view, a part or a cast; None for two layouts of one array."""
    if options.view is None and not (options.size or options.take or options.into or options.cast):
        return None
    sizes = {name: size if (size := written(text)) is not None else -1 for name, text in _pairs("size", options.size)}
    if taken := sorted(_NOT_ATOMS.intersection(sizes)):
        raise NotationError(f"--size {taken[0]}: no atom can have this name; call it otherwise in --view")
    take, into = (
        {_key(name, options.view): read_part(text) for name, text in _pairs(what, given)}
        for what, given in (("take", options.take), ("into", options.into))
    )
    return Move(source, target, options.view, take=take, into=into, cast=options.cast, **sizes)


def _pairs(what: str, given: list[str] | None) -> list[tuple[str, str]]:
    """NAME=VALUE texts as pairs."""
    pairs: list[tuple[str, str]] = []
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (equals and name and value) or (what == "size" and not value.isdecimal()):
            raise NotationError(
                f"--{what} {text!r}: write NAME={'N' if what == 'size' else 'INDEX or NAME=START:STOP'}"
            )
        pairs.append((name, value))
    return pairs


def _key(name: str, view: str | None) -> str | int:
    """An atom by name; without a view, a dim by number."""
    return int(name) if view is None and re.fullmatch("[0-9]{1,4}", name) else name


def one_layout(text: str, options: ArrayOptions) -> Layout:
    """The layout of a call that has only one."""
    return LayoutText.of(text, _requested_mesh(options.mesh), options).read()


def two_layouts(options: PairOptions) -> tuple[Layout, Layout]:
    """Source and target; the shape, dtype or mesh that only one of them has serves for the other."""
    mesh = _requested_mesh(options.mesh)
    target_mesh = mesh if options.target_mesh is None else _requested_mesh(options.target_mesh)
    source = LayoutText.of(options.source, mesh, options)
    target = LayoutText.of(options.target, target_mesh, options)
    if source.ours:
        layout = source.read()
        # A target in our notation keeps its own shape, so that the planner can say what differs.
        return layout, target.read() if target.ours else target.of_the_array_of(layout).read_beside(layout)
    if target.ours:
        layout = target.read()
        return source.of_the_array_of(layout).read_beside(layout), layout
    return _two_shardings(source, target)


@dataclass(frozen=True)
class LayoutText:
    """The text of a layout, with the mesh, shape and dtype that the call gives for it."""

    text: str
    mesh: Mesh | None
    shape: tuple[int, ...] | None
    dtype: str | None

    @classmethod
    def of(cls, text: str, mesh: Mesh | None, options: ArrayOptions) -> LayoutText:
        """A text with the shape and dtype of a call."""
        return cls(text, mesh, None if options.shape is None else parse_shape(options.shape), options.dtype)

    @property
    def ours(self) -> bool:
        """Whether it is in our own notation, the only one with shape and dtype."""
        return _OURS.match(self.text) is not None

    def of_the_array_of(self, layout: Layout) -> LayoutText:
        """The same text for another layout's shape and dtype."""
        return replace(self, shape=layout.shape, dtype=layout.dtype)

    def read(self) -> Layout:
        """Reads the layout; an error names the options that would give what is missing."""
        try:
            return read(self.text, self.mesh, self.shape, self.dtype)
        except ReshardError as error:
            missing = _GIVE.search(str(error))
            if missing is None:
                raise
            options = " ".join(option for word, option in _OPTIONS.items() if word in missing[1])
            raise type(error)(f"{error}: {options}") from None

    def read_beside(self, other: Layout) -> Layout:
        """Reads the layout on the mesh that it is given or brings, else on the other layout's mesh."""
        if self.mesh is not None:
            return self.read()
        on_other = replace(self, mesh=other.mesh)
        try:
            layout = self.read()
        except ReshardError:
            return on_other.read()
        # HLO's `{replicated}` reads as one device: the number of devices is not in its text.
        return on_other.read() if layout.mesh.size == 1 < other.mesh.size else layout


def _two_shardings(source: LayoutText, target: LayoutText) -> tuple[Layout, Layout]:
    """Two layouts that are not in our notation; a mesh that one of them brings serves for the other."""
    try:
        layout = source.read()
    except ReshardError as error:
        if source.mesh is not None:
            raise
        try:  # The source may lack only a mesh, and the target may bring one.
            layout = target.read()
        except ReshardError:
            raise error from None
        return replace(source, mesh=layout.mesh).read(), layout
    second = target.read_beside(layout)
    return source.read_beside(second), second


def _requested_mesh(text: str | None) -> Mesh | None:
    return None if text is None else Mesh.parse(text)


def share(text: str) -> float:
    """The number that `--slack` gives."""
    try:
        return float(text)
    except ValueError:
        raise ReshardError(f"cannot read the slack {text!r}; write a number of at least 0, e.g. 0.05") from None

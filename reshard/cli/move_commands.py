"""The commands about layouts and the moves between them: `reshard plan`, `show`, `simulate` and `prove`.

Each loads what it needs when it runs, so that `--help` and `reshard plan --json` load no library of others.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from reshard.cli.option_groups import NOTATIONS, ArrayOptions, Command, MoveOptions, argument
from reshard.errors import PlanError, ProofError, ReshardError, quoted
from reshard.plans.plan import Plan
from reshard.runtime import Account, oracle
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.show import terminal
from reshard.types import Layout, dtypes
from reshard.types.units import bytes_text, counted
from reshard.types.view import View

# A simulation: what it may cost, its random data, the check of its result by `runtime.oracle`, and what is printed.
#
# A tile whose elements only moved must hold them exactly. A combined one, such as a sum over x, is compared with the
# same combination in double precision, within the rounding of its dtype. Padding holds noise and is never compared.


Array = NDArray[Any]

MOST_BYTES = 1 << 30
MOST_DEVICES = 4096
MOST_ROUNDS = 100_000
_MOST_FAULTS = 8  # Lines printed, one for each device with wrong elements.


def check_simulated_size(plan: Plan) -> None:
    """Raises `ReshardError` for a plan that would not fit this machine, before anything is allocated."""
    mesh = max(plan.source.mesh, plan.target.mesh, key=lambda mesh: mesh.size)
    if mesh.size > MOST_DEVICES:
        raise ReshardError(
            f"{mesh.size} devices on mesh {mesh} are too many to simulate in one process (at most {MOST_DEVICES}); "
            f"use smaller axes, or `reshard plan`, which takes any size"
        )
    if plan.launches > MOST_ROUNDS:
        raise ReshardError(
            f"{plan.launches} launches are too many to simulate (at most {MOST_ROUNDS}); give a larger --budget"
        )
    # The bytes of all tiles at the peak, and of the global arrays that they are cut from.
    summands = math.prod(axis.size for axis in plan.source.partial)
    whole = plan.source.nbytes(math.prod(plan.source.shape))
    unpacked = max(1, 8 // dtypes.bits(plan.source.dtype))  # numpy stores an int4 in a byte.
    needed = unpacked * (max(plan.source.mesh.size, plan.target.mesh.size) * plan.peak_bytes + summands * whole)
    if needed > MOST_BYTES:
        fewer = -(-needed // MOST_BYTES)
        raise ReshardError(
            f"an array of global shape {plan.source.shape} needs {bytes_text(needed)} on "
            f"{counted(mesh.size, 'device')} of mesh {mesh}, and at most {bytes_text(MOST_BYTES)} are simulated; "
            f"give a shape with {fewer} times fewer elements, or use `reshard plan`, which takes any size"
        )


@dataclass(frozen=True)
class Fault:
    """A device with wrong elements: how many, and the first of them."""

    device: int
    count: int
    at: tuple[int, ...]
    got: str
    wanted: str

    def __str__(self) -> str:
        return f"device {self.device}: {self.count} wrong, first at global {self.at}: {self.got}, not {self.wanted}"


class Trial:
    """Random data for one run from a source to a target, and the check of its result.

    >>> from reshard.types import Mesh
    >>> layout = Layout.parse("float32[{x}3/5]", Mesh(x=2))
    >>> trial = Trial(layout, layout, seed=0)
    >>> tiles = trial.source_tiles()
    >>> trial.faults(tiles)
    []
    >>> tiles[1][1] = 7  # Element 4 of the array; the one after it is padding.
    >>> print(trial.faults(tiles)[0])  # doctest: +ELLIPSIS
    device 1: 1 wrong, first at global (4,): 7.0, not ...
    """

    def __init__(self, source: Layout, target: Layout, seed: int, view: View | None = None) -> None:
        self.source, self.target, self.view = source, target, view
        self.random = np.random.default_rng(seed)
        self.dtype = numpy_dtype(source.dtype)
        summands = oracle.summands(source)
        self.summands = {at: self._numbers(source.shape, len(summands)) for at in summands}

    def _numbers(self, shape: tuple[int, ...], summands: int) -> Array:
        """Random numbers of the dtype; several summands neither cancel out nor overflow."""
        name = self.source.dtype
        if name == "bool":
            return self.random.integers(0, 2, shape).astype(self.dtype)
        if name.startswith(("int", "uint")):
            # All values of the dtype for a single summand, else 0 to 3, as far as the dtype has them.
            signed, bits = name.startswith("int"), dtypes.bits(name)
            low = -(1 << bits - 1) if signed and summands == 1 else 0
            high = 4 if summands > 1 else 1 << (bits - 1 if signed else bits)
            kind = np.int64 if signed else np.uint64
            return self.random.integers(low, min(high, 1 << bits), shape, dtype=kind).astype(self.dtype)
        if summands == 1:
            numbers = self.random.standard_normal(shape)
        else:  # Positive ones; those of a sum add up to about 1.
            numbers = self.random.uniform(0.5, 1.5, shape) / (summands if self.source.reduction == "sum" else 1)
        if name.startswith("complex"):
            numbers = numbers + 1j * self.random.uniform(0, 0.1, shape)
        return (np.abs(numbers) if name == "float8_e8m0fnu" else numbers).astype(self.dtype)

    def source_tiles(self) -> dict[int, Array]:
        """The source's tiles, cut from the global arrays, with noise as padding."""
        return oracle.cut_tiles(self.source, self.summands, lambda: self._numbers(self.source.tile_shape, 1))

    def target_tiles(self) -> dict[int, Array] | None:
        """The target's tiles before a move that fills part of them: zeros; None for other moves."""
        if self.view is None or not self.view.into:
            return None
        zeros = {(): np.zeros(self.target.shape, numpy_dtype(self.target.dtype))}
        return oracle.cut_tiles(
            self.target, zeros, lambda: np.zeros(self.target.tile_shape, numpy_dtype(self.target.dtype))
        )

    def faults(self, tiles: Mapping[int, Array]) -> list[Fault]:
        """The devices whose tiles differ from what the target demands."""
        target = self.target
        if all(device in tiles and tiles[device].shape == target.tile_shape for device in target.mesh.devices):
            target, tiles = oracle.finished(self.source, target, tiles)
        summands = self.summands
        # Integers wrap around, so their sums are exact; numpy counts int2 and int4 of ml_dtypes as no kind of integer.
        exact = self.dtype.kind in "biu" or self.dtype.name.startswith(("int", "uint"))
        if len(summands) > len(oracle.summands(target)) and not exact:
            wide = np.complex128 if self.dtype.kind == "c" else np.float64
            summands = {at: array.astype(wide) for at, array in summands.items()}
        wanted = oracle.combine_summands(self.source, target, summands)
        casts = self.source.dtype != self.target.dtype and len(self.summands) == 1
        if casts:
            wanted = {at: array.astype(numpy_dtype(self.target.dtype)) for at, array in wanted.items()}
        if casts or self.view is not None:
            view = View.identity(self.source.shape) if self.view is None else self.view
            shape = self.target.shape
            wanted = {at: oracle.view_marks(view, each, np.zeros(shape, each.dtype)) for at, each in wanted.items()}
        faults: list[Fault] = []
        for device in target.mesh.devices:
            tile = tiles.get(device)
            if tile is None or tile.shape != target.tile_shape:
                got = "no tile" if tile is None else f"shape {tile.shape}"
                faults.append(Fault(device, 1, (), got, str(target.tile_shape)))
            elif wrong := oracle.first_mismatch(target, device, tile, wanted, self._close):
                faults.append(Fault(device, wrong.total, wrong.element, str(wrong.got), str(wrong.wanted)))
        return faults

    def _close(self, got: Array, right: Array) -> Array:
        if got.dtype == right.dtype:
            return np.asarray(got == right)
        wide = got.astype(right.dtype)
        # numpy knows the spacing of its own dtypes only. Each of n summands may be rounded twice on the way.
        finfo = np.finfo if hasattr(np, self.source.dtype) else importlib.import_module("ml_dtypes").finfo
        rounding = 2 * len(self.summands) * float(finfo(self.dtype).eps)
        return np.asarray(np.abs(wide - right) <= rounding * np.abs(right))


class Promise(NamedTuple):
    """A figure of a plan on its worst device, and what was measured."""

    name: str
    measured: int
    promised: int
    text: Callable[[int], str]

    @property
    def kept(self) -> bool:
        """Whether no more was measured than promised."""
        return self.measured <= self.promised


def list_promises(plan: Plan, account: Account) -> list[Promise]:
    """Bytes received, launches and peak: each as promised and as measured."""
    return [
        Promise("bytes received", account.received_bytes, plan.received_bytes, bytes_text),
        Promise("launches", account.launches, plan.launches, str),
        Promise("peak", account.peak_bytes, plan.peak_bytes, bytes_text),
    ]


def show_promises(out: Console, rows: Sequence[Promise]) -> None:
    """Prints what was measured beside what the plan promised."""
    table = terminal.make_table("a device, at worst", "measured", "promised", "", right=["measured", "promised"])
    for row in rows:
        mark = Text("kept", terminal.GOOD) if row.kept else Text("BROKEN", terminal.BAD)
        table.add_row(Text(row.name), Text(row.text(row.measured)), Text(row.text(row.promised)), mark)
    terminal.print_table(out, table, indent=2)
    out.print()


def show_verdict(out: Console, plan: Plan, faults: Sequence[Fault], kept: bool) -> None:
    """Prints that all devices hold what the target says, or which do not."""
    devices = counted(plan.target.mesh.size, "device")
    if not faults:
        exact = "" if plan.source.partial_as(plan.target) else ", within rounding"
        line = f"right: each of the {devices} holds what the target says{exact}"
        terminal.print_paragraph(out, line, style=terminal.GOOD if kept else terminal.BAD)
        return
    wrong = sum(fault.count for fault in faults)
    line = f"WRONG: {counted(wrong, 'element')} on {len(faults)} of {devices}"
    terminal.print_paragraph(out, line, style=terminal.BAD)
    for fault in faults[:_MOST_FAULTS]:
        terminal.print_paragraph(out, str(fault), "  ")


_PLAN_EXAMPLES = """\
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


@dataclass(frozen=True, kw_only=True)
class PlanCommand(MoveOptions):
    """The options of `reshard plan`, whose layouts may come from a file."""

    source: str | None = argument(  # pyright: ignore[reportIncompatibleVariableOverride]
        "source", metavar="SOURCE", nargs="?", help="the layout now, in any of the notations below"
    )
    target: str | None = argument(  # pyright: ignore[reportIncompatibleVariableOverride]
        "target", metavar="TARGET", nargs="?", help="the layout wanted, in any of them"
    )
    batch: str | None = argument(
        "--batch",
        metavar="FILE",
        help='plan each line of a file of JSON lines instead, e.g. {"name", "source", "target"}; - for stdin',
    )
    csv: bool = argument(
        "--csv", action="store_true", help="with --batch: a table of comma-separated values, with errors"
    )
    tree: bool = argument("--tree", action="store_true", help="with --batch: one plan for all of them together")
    json: bool = argument("--json", action="store_true", help="print one JSON object instead of the table")
    html: str | None = argument("--html", metavar="FILE", help="write one self-contained page, with pictures, instead")
    explain: bool = argument("--explain", action="store_true", help="say in plain words why each step is there")


def run_plan_command(options: PlanCommand) -> int:
    """Plans, and prints or writes the plan in the form asked for."""
    from reshard.cli.requests import plan_for_options

    if options.batch is not None:
        _plan_batch(options.batch, options)
        return 0
    if options.source is None or options.target is None:
        raise ReshardError("give SOURCE and TARGET, or moves in a file: --batch FILE, with --tree as one")
    if options.csv:
        raise ReshardError("--csv is a table of many moves, from a file: give --batch FILE, or leave --csv out")
    if options.tree:
        raise ReshardError("--tree is one plan for many moves, from a file: give --batch FILE, or leave --tree out")
    if options.json and options.explain:
        raise ReshardError("--explain is in words, which --json has no place for: leave one of them out")
    source, target, plan = plan_for_options(options)
    if options.html is not None:
        from reshard.cli.programs import write_output
        from reshard.draw.plan_page import write_page

        write_output(options.html, write_page(plan, options.network))
    if options.json:
        print(plan.to_json(indent=2))
    if options.json or options.html is not None:
        return 0
    if find_spec("rich") is None:  # As in a browser: the plan as plain text.
        print(plan)
        return 0
    from reshard.show import terminal
    from reshard.show.explain import show_reasons
    from reshard.show.plan_table import show_heading, show_steps, show_totals

    out = terminal.open_console()
    show_heading(out, source, target)
    show_steps(out, plan)
    show_totals(out, plan, options.network)
    if options.explain:
        out.print()
        show_reasons(out, plan, options.network)
    return 0


def _plan_batch(path: str, options: PlanCommand) -> None:
    """Plans the moves of a file: each as its line is read, or all as one tree."""
    from reshard.cli.requests import read_batch, read_plan_options
    from reshard.synth import find_plan, find_tree_plan
    from reshard.synth.sweeps import SweepTable, plan_row

    if options.source is not None or options.html is not None or options.explain:
        raise ReshardError("--batch reads layouts from its file; leave out SOURCE, TARGET, --html and --explain")
    if options.view is not None or options.size or options.take or options.into or options.cast:
        # An atom or a dim of one array need not be there in another one, and a line has no place for its own.
        raise ReshardError(
            "--batch plans whole arrays; leave out --view, --size, --take, --into and --cast, which are of one move"
        )
    if options.csv and (options.tree or options.json):
        raise ReshardError("--csv has a row for each move: leave out --tree and --json")
    asked = read_plan_options(options)
    if options.csv:
        rows = ({"name": pair.name, **plan_row(pair.source, pair.target, asked)} for pair in read_batch(path, options))
        print(SweepTable(rows).to_csv(), end="")
        return
    moves: dict[str, Any] = {}
    for pair in read_batch(path, options):
        if not options.tree:
            try:
                plan = find_plan(pair.source, pair.target, asked)
            except ReshardError as error:
                raise ReshardError(f"line {pair.line}: {error}") from None
            print(json.dumps({"name": pair.name, **plan.to_dict()}), flush=True)
        elif pair.name in moves:
            raise PlanError(f"two lines are called {quoted(pair.name)}; give each array a name of its own")
        else:
            moves[pair.name] = pair.source, pair.target
    if options.tree:
        tree = find_tree_plan(moves, asked)
        print(tree.to_json() if options.json else tree)


_MOST_ROWS = 1 << 20

_SHOW_EXAMPLES = """\
examples:
  reshard show --mesh x=4 'f32[2{x}64]'
  reshard show --mesh x=4,y=2 'f32[{x}4, {y}8]'
  reshard show --mesh x=4,y=2 'f32[{y}8, 16, {x}4]'
  reshard show --mesh x=4,y=2 'f32[{y}8, 16] + sum{x}'
  reshard show --mesh x=4,y=2 "P(('x', 'y'))" --shape \\
      100,8 --dtype bf16
  reshard show \\
      '{devices=[2,2,2]<=[8] last_tile_dim_replicate}' \\
      --shape 8,8 --dtype f32
"""


@dataclass(frozen=True, kw_only=True)
class ShowOptions(ArrayOptions):
    """The options of `reshard show`."""

    layout: str = argument("layout", metavar="LAYOUT", help="a layout in any of the notations below")
    limit: int = argument("--limit", type=int, default=32, metavar="N", help="lines of the picture, about (default 32)")


def run_show(options: ShowOptions) -> int:
    """Prints the layout, its sizes, and a picture of which device holds what."""
    from reshard.cli.requests import read_only_layout
    from reshard.show.layout_picture import show_layout

    if not 1 <= options.limit <= _MOST_ROWS:
        raise ReshardError(f"--limit {quoted(options.limit)}: show at least 1 row, and at most {_MOST_ROWS}")
    show_layout(read_only_layout(options.layout, options), options.limit)
    return 0


_SIMULATE_EXAMPLES = """\
examples:
  reshard simulate --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' \\
      'f32[16, {x}{y}2, 16]'
  reshard simulate --mesh x=4,y=2 'f32[{x}2{y}4]' \\
      'f32[{y}{x}8]' --seed 7
  reshard simulate --mesh x=4,y=2 'f32[8, 16] + sum{x}' \\
      'f32[{x}2, 16]'
  reshard simulate --mesh x=8 'f32[{x}8, 64]' \\
      'f32[64, {x}8]' --budget 4100
"""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(MoveOptions):
    """The options of `reshard simulate`."""

    seed: int = argument("--seed", type=int, default=0, metavar="N", help="seed of the random data (default 0)")


def run_simulate(options: SimulateOptions) -> int:
    """Runs a plan on random data and checks every element against the target's meaning; returns 0 if the result and
    the plan's promises hold, else 1.
    """
    from reshard.cli.move_commands import Trial, check_simulated_size, list_promises, show_promises, show_verdict
    from reshard.cli.requests import plan_for_options
    from reshard.runtime import Account, simulate
    from reshard.show import terminal
    from reshard.show.plan_table import show_heading, show_steps

    if options.seed < 0:
        raise ReshardError(f"--seed {options.seed}: give a whole number of at least 0")
    source, target, plan = plan_for_options(options)
    check_simulated_size(plan)
    trial, account = Trial(source, target, options.seed, plan.view), Account(plan.source.dtype)
    fills: dict[str, Any] = {} if (into := trial.target_tiles()) is None else {"into": into}
    faults = trial.faults(simulate(plan, trial.source_tiles(), account, **fills))
    measured = list_promises(plan, account)
    kept = all(promise.kept for promise in measured)
    out = terminal.open_console()
    show_heading(out, source, target)
    show_steps(out, plan)
    show_promises(out, measured)
    show_verdict(out, plan, faults, kept)
    return 0 if kept and not faults else 1


_PROVE_EXAMPLES = """\
examples:
  reshard prove --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' \\
      'f32[16, {x}{y}2, 16]'
  reshard prove --mesh x=4,y=2 'f32[{x}3/10, 8]' \\
      'f32[{y}5, 8]'
  reshard prove --mesh x=8 'f32[{x}8, 64]' 'f32[64, {x}8]' \\
      -o queries.smt2
  reshard prove --mesh x=2,y=2,z=2 'f32[{x}4, {y}4]' \\
      'f32[{y}4, 8]' --launches
"""


@dataclass(frozen=True, kw_only=True)
class ProveOptions(MoveOptions):
    """The options of `reshard prove`."""

    output: str | None = argument(
        "-o", "--output", metavar="FILE", help="write its queries as SMT-LIB, for another solver"
    )
    launches: bool = argument(
        "--launches", action="store_true", help="also seek a plan of fewer launches that is as good"
    )
    limit: float = argument(
        "--limit", type=float, default=30.0, metavar="SECONDS", help="how long to seek it (default 30)"
    )


def run_prove(options: ProveOptions) -> int:
    """Prints the proof and writes its queries if `--output` names a file; returns 1 for a wrong plan.

    A counterexample goes to stderr.
    """
    from reshard.cli.programs import write_output
    from reshard.cli.requests import plan_for_options
    from reshard.proofs import prove
    from reshard.proofs.proof import WIDTH
    from reshard.show import terminal

    if not options.limit >= 0:  # Refuses nan, too.
        raise ReshardError(f"--limit {options.limit}: give a number of seconds, 0 or more")
    try:
        proof = prove(plan_for_options(options).plan, launches=options.launches, limit=options.limit)
    except ProofError as error:
        print(f"reshard: {error}", file=sys.stderr)
        return 1
    print(proof.explain(min(WIDTH, terminal.open_console().width)))
    if options.output is not None:
        write_output(options.output, proof.to_smt2())
    return 0


COMMANDS = (
    Command(
        "plan",
        "the steps from one layout to another, with bytes, memory and time",
        f"{NOTATIONS}\n{_PLAN_EXAMPLES}",
        PlanCommand,
        run_plan_command,
    ),
    Command("show", "a picture of which device holds what", f"{NOTATIONS}\n{_SHOW_EXAMPLES}", ShowOptions, run_show),
    Command(
        "simulate",
        "run a plan on random data, on all devices in this process, and check the result",
        f"{NOTATIONS}\n{_SIMULATE_EXAMPLES}",
        SimulateOptions,
        run_simulate,
    ),
    Command(
        "prove",
        "prove that a plan is right and within its memory, for all sizes of its form",
        f"{NOTATIONS}\n{_PROVE_EXAMPLES}",
        ProveOptions,
        run_prove,
    ),
)

"""The commands about layouts and the moves between them: `reshard plan`, `show`, `simulate` and `prove`.

Each loads what it needs when it runs, so that `--help` and `reshard plan --json` load no library of others.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from reshard.cli.option_groups import NOTATIONS, ArrayOptions, Command, MoveOptions, argument
from reshard.errors import PlanError, ProofError, ReshardError, quoted

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
    from reshard.cli.requests import plan_for_options
    from reshard.cli.trial import Promise, Trial, check_simulated_size, show_promises, show_verdict
    from reshard.runtime import Account, simulate
    from reshard.show import terminal
    from reshard.show.plan_table import show_heading, show_steps
    from reshard.types.units import bytes_text

    if options.seed < 0:
        raise ReshardError(f"--seed {options.seed}: give a whole number of at least 0")
    source, target, plan = plan_for_options(options)
    check_simulated_size(plan)
    trial, account = Trial(source, target, options.seed, plan.view), Account(plan.source.dtype)
    fills: dict[str, Any] = {} if (into := trial.target_tiles()) is None else {"into": into}
    faults = trial.faults(simulate(plan, trial.source_tiles(), account, **fills))
    measured = [
        Promise("bytes received", account.received_bytes, plan.received_bytes, bytes_text),
        Promise("launches", account.launches, plan.launches, str),
        Promise("peak", account.peak_bytes, plan.peak_bytes, bytes_text),
    ]
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

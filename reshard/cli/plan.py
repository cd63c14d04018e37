"""`reshard plan`: the steps between two layouts as a table, JSON or a page, and why they are there."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from importlib.util import find_spec

from reshard.cli.options import NOTATIONS, Command, MoveOptions
from reshard.errors import PlanError, ReshardError, quoted

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


@dataclass(frozen=True, kw_only=True)
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


def run_plan(options: PlanCommand) -> int:
    """Plans, and prints or writes the plan in the form asked for."""
    from reshard.cli.requests import plan_for_options

    if options.batch is not None:
        _run_batch(options.batch, options)
        return 0
    if options.source is None or options.target is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise ReshardError("give SOURCE and TARGET, or moves in a file: --batch FILE, with --tree as one")
    if options.tree:
        raise ReshardError("--tree is one plan for many moves, from a file: give --batch FILE, or leave --tree out")
    if options.json and options.explain:
        raise ReshardError("--explain is in words, which --json has no place for: leave one of them out")
    request = plan_for_options(options)
    if options.html is not None:
        from reshard.cli.programs import write_output
        from reshard.draw.plan_page import write_page

        write_output(options.html, write_page(request.plan, options.network))
    if options.json:
        print(request.plan.to_json(indent=2))
    if options.json or options.html is not None:
        return 0
    if find_spec("rich") is None:  # As in a browser: the plan as plain text.
        print(request.plan)
        return 0
    from reshard.show import terminal
    from reshard.show.explain import show_reasons
    from reshard.show.plan_table import show_heading, show_steps, show_totals

    out = terminal.open_console()
    show_heading(out, request.source, request.target)
    show_steps(out, request.plan)
    show_totals(out, request.plan, options.network)
    if options.explain:
        out.print()
        show_reasons(out, request.plan, options.network)
    return 0


def _run_batch(path: str, options: PlanCommand) -> None:
    """Plans the moves of a file: each as its line is read, or all as one tree."""
    from reshard.cli.requests import read_batch, read_plan_options
    from reshard.synth import find_plan, find_tree_plan

    if options.source is not None or options.html is not None or options.explain:  # pyright: ignore
        raise ReshardError("--batch reads layouts from its file; leave out SOURCE, TARGET, --html and --explain")
    asked = read_plan_options(options)
    moves = {}
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


COMMAND = Command(
    "plan",
    "the steps from one layout to another, with bytes, memory and time",
    f"{NOTATIONS}\n{_EXAMPLES}",
    PlanCommand,
    run_plan,
)

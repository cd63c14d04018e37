"""`reshard prove`: the argument that a plan is right and within its memory, for all sizes of its form."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from reshard.cli.options import NOTATIONS, Command, MoveOptions
from reshard.errors import ProofError, ReshardError

_EXAMPLES = """\
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

    output: str | None
    launches: bool
    limit: float

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds those of a move, the file for the queries, and the search for fewer launches."""
        super().add_to(parser)
        what = "write its queries as SMT-LIB, for another solver"
        parser.add_argument("-o", "--output", metavar="FILE", help=what)
        what = "also seek a plan of fewer launches that is as good"
        parser.add_argument("--launches", action="store_true", help=what)
        what = "how long to seek it (default 30)"
        parser.add_argument("--limit", type=float, default=30.0, metavar="SECONDS", help=what)


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


COMMAND = Command(
    "prove",
    "prove that a plan is right and within its memory, for all sizes of its form",
    f"{NOTATIONS}\n{_EXAMPLES}",
    ProveOptions,
    run_prove,
)

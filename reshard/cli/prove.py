"""`reshard prove`: the argument that a plan is right and within its memory, for all sizes of its form."""

from __future__ import annotations

import sys

from reshard.cli import files
from reshard.cli.arguments import Options
from reshard.cli.request import planned
from reshard.errors import ProofError, ReshardError
from reshard.proofs import prove
from reshard.proofs.proof import WIDTH
from reshard.show import terminal


def run(options: Options) -> int:
    """Prints the proof of a call's plan, and writes its queries if asked to; 1 with a counterexample if it is wrong."""
    if not options.seconds >= 0:
        raise ReshardError(f"--limit {options.seconds}: give a number of seconds, 0 or more")
    try:
        proof = prove(planned(options).plan, launches=options.launches, limit=options.seconds)
    except ProofError as error:
        print(f"reshard: {error}", file=sys.stderr)
        return 1
    print(proof.explain(min(WIDTH, terminal.console().width)))
    if options.output is not None:
        files.write(options.output, proof.to_smt2())
    return 0

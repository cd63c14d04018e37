"""The `reshard` command: plans, layouts and simulations, what a compiled program moves, and MPI ranks.

    parser            all commands together
    options           what they share: groups of arguments, each a dataclass, and how a command is added
    plan, show, simulate, prove, doctor, compiler_pass, run, calibrate, completion
                      one command each: its options, `add` for its arguments and help, and `run`
    plan_request      the layouts and the plan that the arguments ask for
    playground        what the page in docs/playground.py asks, in a browser
    programs          compiled programs in files, and files to write

Exit codes: 0 done, 1 a simulation or a proof that failed (or a rebuilt array, with --fail-on-rebuild), 2 a request that
cannot be met, with a message on stderr. Errors of the package are messages, never tracebacks; any other exception is a
bug, and is shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from reshard.cli.parser import parse
from reshard.errors import ReshardError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default the process's own, and returns the exit code.

    >>> main(["plan", "--mesh", "x=2", "f32[{x}4]", "f32[{x}4]", "--json"])  # doctest: +ELLIPSIS
    {
      "format": 1,
      "source": "f32[{x}4]",
      ...
    }
    0
    """
    call = parse(argv)
    try:
        code = call()
        sys.stdout.flush()
        return code
    except ReshardError as error:
        sys.stdout.flush()
        print(f"reshard: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Python flushes stdout once more at exit, so point it to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130

"""The `reshard` command: plans, layouts and simulations; what a compiled program does; MPI ranks.

Exit codes: 0 done, 1 a simulation that went wrong (or an array that is rebuilt, with --fail-on-rebuild), 2 a
request that cannot be met (the message is on stderr). Errors of the package are messages, never tracebacks; any other
exception is a bug and is shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from reshard.cli.arguments import parse
from reshard.errors import ReshardError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments (those of the process if None); the exit code.

    >>> main(["plan", "--mesh", "x=2", "f32[{x}4]", "f32[{x}4]", "--json"])  # doctest: +ELLIPSIS
    {
      "source": "f32[{x}4]",
      ...
    }
    0
    """
    options = parse(argv)
    try:
        code = options.handler(options)
        sys.stdout.flush()
        return code
    except ReshardError as error:
        sys.stdout.flush()
        print(f"reshard: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python flushes stdout once more at exit: to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130

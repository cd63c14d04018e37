"""The `reshard` command: plans, layouts and simulations, what a compiled program moves, and MPI ranks.

    parser            all commands together, and `completion`, which prints the scripts of shells for them
    option_groups     what they share: options as dataclasses whose fields are arguments, and what a command is
    move_commands     plan, show, simulate, prove: each its options, what it runs, and both in `COMMANDS`
    program_commands  doctor, pass
    rank_commands     run, calibrate
    load_command      load: the plan of one, by rules of layouts
    file_commands     files show, files check
    requests          the layouts and the plan that arguments ask for, or the lines of a file
    trial             random data for `simulate`, the check of its result, and what it prints
    playground        what the page in docs/playground.py asks, in a browser
    programs          compiled programs in files, and files to write

Exit codes: 0 done, 1 a simulation, a proof or a check of files that failed (or a rebuilt array, with
--fail-on-rebuild), 2 a request that cannot be met, with a message on stderr, 141 an answer whose reader closed the pipe
early. Errors of the package are messages, never tracebacks; any other exception is a bug, and is shown.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from reshard.cli.parser import parse_command
from reshard.errors import ReshardError

_UNWRITTEN = frozenset(getattr(errno, name, None) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO"))
"""What the system says if stdout takes no more bytes; Windows does not have all of them."""

_SIGPIPE = 141
"""What a shell says of a command that a closed pipe has ended."""


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
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # A shell has closed it (`>&-`).
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # Escapes what an encoding cannot write.
    try:
        try:
            code = parse_command(argv)()
        except ReshardError as error:
            sys.stdout.flush()
            return _print_error(str(error))
        # Here, so that a full disk is an error of the call, and not of the process's end.
        sys.stdout.flush()
        return code
    except (
        BrokenPipeError
    ):  # The reader (head, less) has closed the pipe; what it did not read may have been a rebuild.
        _discard_output()
        return _SIGPIPE
    except OSError as error:
        if error.errno not in _UNWRITTEN or error.filename is not None:
            raise
        _discard_output()
        return _print_error(f"the answer cannot be written ({error.strerror}); free some space")
    except KeyboardInterrupt:
        return 130


def _print_error(message: str) -> int:
    """Prints an error and returns the exit code, which is all that is left where stderr takes nothing either."""
    with suppress(OSError):
        print(f"reshard: error: {message}", file=sys.stderr, flush=True)
    return 2


def _discard_output() -> None:
    """Points stdout to nowhere: Python flushes it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""The `reshard` command: plans, layouts and simulations, what a compiled program moves, and MPI ranks.

    parser            all commands together, and `completion`, which prints the scripts of shells for them
    options           what they share: groups of arguments, each a dataclass, and how a command is added
    plan, show, simulate, prove, doctor, compiler_pass, run, calibrate
                      one command each: its options with their arguments, what it runs, and both as `COMMAND`
    requests          the layouts and the plan that arguments ask for, or the lines of a file
    trial             random data for `simulate`, the check of its result, and what it prints
    playground        what the page in docs/playground.py asks, in a browser
    programs          compiled programs in files, and files to write

Exit codes: 0 done, 1 a simulation or a proof that failed (or a rebuilt array, with --fail-on-rebuild), 2 a request that
cannot be met, with a message on stderr. Errors of the package are messages, never tracebacks; any other exception is a
bug, and is shown.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from reshard.cli.parser import parse_command
from reshard.errors import ReshardError

_UNWRITTEN = frozenset(getattr(errno, name, None) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO"))
"""What the system says if stdout takes no more bytes; Windows does not have all of them."""


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
    _prepare_streams()
    try:
        return _run_command(argv)
    except BrokenPipeError:  # The reader (head, less) has closed the pipe.
        _discard_output()
        return 0
    except OSError as error:
        if error.errno not in _UNWRITTEN or error.filename is not None:
            raise
        _discard_output()
        print(f"reshard: error: the answer cannot be written ({error.strerror}); free some space", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run_command(argv: Sequence[str] | None) -> int:
    """Runs the command, and writes out what it printed: a full disk is an error of the call, and not of its end."""
    try:
        code = parse_command(argv)()
    except ReshardError as error:
        sys.stdout.flush()
        print(f"reshard: error: {error}", file=sys.stderr)
        return 2
    sys.stdout.flush()
    return code


def _prepare_streams() -> None:
    """Makes up for streams that a shell has closed (`>&-`), and escapes what an encoding cannot write."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Points stdout to nowhere: Python flushes it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

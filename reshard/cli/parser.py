"""The parser of the whole command: its own help, and every command in the order in which the help lists them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from reshard import __version__
from reshard.cli import calibrate, compiler_pass, doctor, plan, prove, run, show, simulate
from reshard.cli.options import NOTATIONS, CommandCall

_EXAMPLES = """\
examples:
  reshard plan --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' 'f32[16, {x}{y}2, 16]'
  reshard show --mesh x=4,y=2 'f32[{x}4, {y}8]'
  reshard simulate --mesh x=4,y=2 'f32[{y}8, 16, {x}4]' 'f32[16, {x}{y}2, 16]'
  reshard doctor step.mlir

reshard COMMAND --help has more of them.
"""


def parse(argv: Sequence[str] | None) -> CommandCall:
    """The command that these arguments name, with its options.

    Prints and exits for `--help`, `--version` and arguments that do not parse.
    """
    parsed = parser().parse_args(argv)
    return parsed.call(parsed)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. Reads no layout and loads no library but the standard one."""
    top = argparse.ArgumentParser(
        prog="reshard",
        description="The cheapest collectives that move an array from one sharded layout to another.",
        epilog=f"{NOTATIONS}\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"reshard {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (plan, show, simulate, prove, doctor, compiler_pass, run, calibrate):
        command.add(commands)
    return top

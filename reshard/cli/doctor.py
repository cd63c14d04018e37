"""`reshard doctor`: where a program moves its data between devices, as a table, JSON or a page."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.cli.options import Commands, Options, add_command, add_network
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from reshard.cli.programs import ProgramText
    from reshard.doctor import Report

_EXAMPLES = """\
examples:
  reshard doctor step.mlir
  reshard doctor step.hlo.txt --all
  reshard doctor step.mlir --html report.html
  reshard doctor step.mlir --json --fail-on-rebuild
  reshard doctor step.mlir --platform tpu --topology v5p:2x2x2

what to put into such a file, with lowered = jax.jit(f).lower(*args):
  lowered.as_text(debug_info=True)   StableHLO; it is compiled here
  lowered.compile().as_text()        optimized HLO; it is read as it is
"""


@dataclass(frozen=True)
class DoctorOptions(Options):
    """The options of `reshard doctor`."""

    file: str
    json: bool
    html: str | None
    all: bool
    network: str | None
    platform: str
    topology: str | None
    fail_on_rebuild: bool

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the file, the forms of output, and what to compile for."""
        what = "StableHLO (text or artifact) or optimized HLO; - is stdin"
        parser.add_argument("file", metavar="FILE", help=what)
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
        parser.add_argument("--html", metavar="FILE", help="write one self-contained page instead of the table")
        parser.add_argument("--all", action="store_true", help="also reductions, shard_maps and small moves")
        add_network(parser)
        what = "compile StableHLO for this (default cpu)"
        parser.add_argument("--platform", default="cpu", metavar="NAME", help=what)
        parser.add_argument("--topology", metavar="NAME", help="ahead of time for a topology: v5p:2x2x2")
        what = "exit with 1 if a whole array is rebuilt"
        parser.add_argument("--fail-on-rebuild", action="store_true", help=what)


def add(commands: Commands) -> None:
    """Adds `reshard doctor`."""
    summary = "where a program moves its data between devices, and what it wastes"
    add_command(commands, "doctor", summary, _EXAMPLES, DoctorOptions, run)


def run(options: DoctorOptions) -> int:
    """Prints or writes the report of a program; returns 1 with `--fail-on-rebuild` if an array is rebuilt."""
    from reshard.cli.programs import read, write
    from reshard.doctor.report.table import show
    from reshard.show import terminal

    report = _report(read(options.file), options)
    if options.html is not None:
        write(options.html, report.to_html())
    if options.json:
        print(report.to_json(indent=2, every=options.all))
    elif options.html is None:
        show(terminal.console(), report, options.all)
    return int(options.fail_on_rebuild and bool(report.rebuilt))


def _report(program: ProgramText, options: DoctorOptions) -> Report:
    """Reads optimized HLO as it is, and has jax compile StableHLO first."""
    from reshard.cli.programs import quiet_jax
    from reshard.doctor import examine

    if program.is_hlo:
        return examine(program.text, network=options.network)
    quiet_jax()
    try:
        from reshard.jax.doctor import report_program
    except ImportError:
        raise ReshardError(
            f"{options.file} is StableHLO, which jax has to compile first, and jax is not installed: install "
            f"'reshard[jax]', or give the optimized HLO (compiled.as_text())"
        ) from None
    return report_program(
        program.content, network=options.network, platform=options.platform, topology=options.topology
    )

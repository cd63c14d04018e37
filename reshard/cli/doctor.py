"""`reshard doctor`: where a program moves its data between devices, or what XLA warns of in a log."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.cli.options import Command, Options, add_network
from reshard.errors import ReshardError, quoted

if TYPE_CHECKING:
    from reshard.cli.programs import ProgramText
    from reshard.doctor import Report

_PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")
PATIENCE = 2.0  # seconds that people wait in silence

_EXAMPLES = """\
examples:
  reshard doctor step.mlir
  reshard doctor step.hlo.txt --all
  reshard doctor step.mlir --html report.html
  reshard doctor step.mlir --json --fail-on-rebuild
  reshard doctor step.mlir --topology v5p:2x2x2
  reshard doctor job.log
  python train.py 2>&1 | reshard doctor -

what to put into such a file,
with lowered = jax.jit(f).lower(*args):
  lowered.as_text(debug_info=True)  StableHLO: compiled here
  lowered.compile().as_text()       optimized HLO: as it is
"""


@dataclass(frozen=True)
class DoctorOptions(Options):
    """The options of `reshard doctor`."""

    file: str
    json: bool
    html: str | None
    all: bool
    frames: str
    network: str | None
    platform: str | None
    topology: str | None
    fail_on_rebuild: bool

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the file, the forms of output, and what to compile for."""
        what = "StableHLO (text or artifact), optimized HLO, or a log with XLA's warnings; - is stdin"
        parser.add_argument("file", metavar="FILE", help=what)
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
        parser.add_argument("--html", metavar="FILE", help="write one self-contained page instead of the table")
        parser.add_argument("--all", action="store_true", help="also reductions, shard_maps and small moves")
        what = "the lines of a place: the program's own (user), or its whole stack with those of frameworks (all)"
        parser.add_argument("--frames", choices=["user", "all"], default="user", help=what)
        add_network(parser)
        what = "compile StableHLO for this (default cpu; tpu with --topology)"
        parser.add_argument("--platform", metavar="NAME", help=what)
        parser.add_argument("--topology", metavar="NAME", help="ahead of time for a topology: v5p:2x2x2")
        what = "exit with 1 if a whole array is rebuilt"
        parser.add_argument("--fail-on-rebuild", action="store_true", help=what)


def run_doctor(options: DoctorOptions) -> int:
    """Prints or writes the report of a program; returns 1 with `--fail-on-rebuild` if an array is rebuilt."""
    from reshard.cli.programs import read_program, write_output
    from reshard.doctor.report.table import show_report
    from reshard.doctor.xla_log import MARK
    from reshard.show import terminal

    program = read_program(options.file, log_mark=MARK)
    if program.is_log:
        return _report_log(program.text, options)
    with report_progress(f"{'reading' if program.is_hlo else 'compiling and reading'} the program"):
        report = _report_program(program, options)
    if options.html is not None:
        write_output(options.html, report.to_html())
    if options.json:
        print(report.to_json(indent=2, every=options.all))
    elif options.html is None:
        show_report(terminal.open_console(), report, options.all, options.frames == "all")
    return int(options.fail_on_rebuild and bool(report.rebuilt))


def _report_log(log: str, options: DoctorOptions) -> int:
    """Prints the moves that XLA warns of in a log; returns 1 with `--fail-on-rebuild`, since each is a rebuild."""
    from reshard.doctor.report.log import LogReport, show_log
    from reshard.show import terminal

    if options.html is not None:
        raise ReshardError("a log has no page: its warnings name one move each; leave --html out, or use --json")
    report = LogReport.of(log, options.network)
    if options.json:
        print(report.to_json(indent=2))
    else:
        show_log(terminal.open_console(), report)
    return int(options.fail_on_rebuild)


def _report_program(program: ProgramText, options: DoctorOptions) -> Report:
    """Reads optimized HLO as it is, and has jax compile StableHLO first."""
    from reshard.cli.programs import set_up_jax
    from reshard.doctor import examine

    if program.is_hlo:
        platform = options.platform or (None if options.topology is None else "tpu")
        if platform not in (None, *_PLATFORMS):
            raise ReshardError(f"--platform {quoted(platform)}: give one of {', '.join(_PLATFORMS)} for HLO")
        return examine(program.text, network=options.network, platform=platform)
    set_up_jax()
    try:
        from reshard.jax.doctor import report_program
    except ImportError:
        raise ReshardError(
            f"{options.file} is StableHLO, which jax has to compile first, and jax is not installed: install "
            f"'reshard[jax]', or give the optimized HLO (compiled.as_text())"
        ) from None
    return report_program(
        program.content,
        network=options.network,
        platform=options.platform or ("cpu" if options.topology is None else "tpu"),
        topology=options.topology,
    )


@contextmanager
def report_progress(what: str, patience: float = PATIENCE) -> Generator[None]:
    """Says on stderr that `what` is being done after `patience` seconds, and again whenever the time has doubled.

    >>> with report_progress("reading"):
    ...     pass
    """
    done = threading.Event()

    def speak() -> None:
        seconds = wait = patience
        while not done.wait(wait):
            print(f"reshard: {what}, {seconds:.0f} s so far", file=sys.stderr, flush=True)
            wait, seconds = seconds, 2 * seconds

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()


COMMAND = Command(
    "doctor", "where a program moves its data between devices, and what it wastes", _EXAMPLES, DoctorOptions, run_doctor
)

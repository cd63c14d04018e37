"""`reshard pass`: the compiler pass on a program in a file, StableHLO or HLO after partitioning."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.cli.options import Command, Options, add_network
from reshard.errors import ReshardError
from reshard.types.units import bytes_text, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.doctor.places import Place
    from reshard.jax.pass_report import PassReport

_TEXT = (".mlir", ".txt", ".stablehlo")  # Names of files that are to hold text rather than an artifact.

_PROTO = (".pb", ".binpb", ".hlo_proto")
_NO_JAX = "the pass needs jax, which is not installed: install 'reshard[jax]'"
_MOST_LEFT = 8  # Reshards that are listed where no report is wanted.

_EXAMPLES = """\
examples:
  reshard pass step.mlir -o ours.mlir
  reshard pass step.mlir -o ours.mlirbc --report
  reshard pass step.mlir --report --network tpu-v5p
  reshard pass step.mlir --json --budget 1GiB
  reshard pass step.hlo -o better.hlo --report
  reshard pass step.hlo -o better.hlo --prefer memory
  reshard pass step.hlo -o better.pb --topology v5p:2x2x2
"""


@dataclass(frozen=True)
class CompilerPassOptions(Options):
    """The options of `reshard pass`."""

    file: str
    output: str | None
    report: bool
    json: bool
    network: str | None
    budget: str | None
    prefer: str | None
    devices: int | None
    platform: str | None
    topology: str | None

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the two files, the forms of the report, and those of the planner."""
        what = "StableHLO with Shardy shardings, text or artifact, or HLO, text or proto; - is stdin"
        parser.add_argument("file", metavar="FILE", help=what)
        what = "text if it ends in .mlir, else a portable artifact; of HLO, a proto if it ends in .pb, else text"
        parser.add_argument("-o", "--output", metavar="FILE", help=what)
        parser.add_argument("--report", action="store_true", help="print what became of each reshard")
        parser.add_argument("--json", action="store_true", help="print that as one JSON object")
        add_network(parser)
        what = "most bytes live on a device in one move, e.g. 64MiB"
        parser.add_argument("--budget", metavar="SIZE", help=what)
        what = "of HLO: what plans make better, and nothing else worse: bytes (default), memory or time"
        parser.add_argument("--prefer", choices=["bytes", "memory", "time"], help=what)
        what = "of HLO: its number of partitions, where it does not say"
        parser.add_argument("--devices", type=int, metavar="COUNT", help=what)
        what = "of HLO: the devices that it was compiled for, e.g. cpu (default; tpu with --topology)"
        parser.add_argument("--platform", metavar="NAME", help=what)
        what = "of HLO: ahead of time for a topology: v5p:2x2x2"
        parser.add_argument("--topology", metavar="NAME", help=what)


def run_pass(options: CompilerPassOptions) -> int:
    """Writes or prints the transformed program, and prints the report, or on stderr what was left if none is wanted."""
    from reshard.cli.programs import read_program, set_up_jax, write_output

    program = read_program(options.file, protos=True)
    set_up_jax()
    if program.is_hlo:
        return _run_on_hlo(options, program.content)
    if options.prefer is not None:
        raise ReshardError(
            f"{options.file} is StableHLO, where XLA's own collectives are not known yet, so nothing can be preferred "
            f"to them: leave --prefer out, or give the optimized HLO (compiled.as_text())"
        )
    try:
        from reshard.jax.stablehlo_pass.module_pass import transform
    except ImportError:
        raise ReshardError(_NO_JAX) from None
    transformed = transform(program.content, network=options.network, budget=options.budget)
    if options.output is not None:
        is_text = options.output == "-" or options.output.endswith(_TEXT)
        write_output(options.output, transformed.text if is_text else transformed.to_bytes())
    elif not (options.report or options.json):
        print(transformed.text)
    if options.json:
        print(json.dumps(transformed.report.to_dict(), indent=2))
    elif options.report:
        _show_reshards(transformed.report)
    else:
        warn_of_left(transformed.report)
    return 0


def _run_on_hlo(options: CompilerPassOptions, content: str | bytes) -> int:
    """The same for HLO, by the pass that works inside XLA."""
    from reshard.cli.programs import write_output

    try:
        from reshard.jax.xla_pass.hlo_files import improve_hlo
    except ImportError:
        raise ReshardError(_NO_JAX) from None
    improved = improve_hlo(
        content,
        devices=options.devices,
        platform=options.platform or ("cpu" if options.topology is None else "tpu"),
        topology=options.topology,
        network=options.network,
        budget=options.budget,
        prefer=options.prefer or "bytes",
    )
    if options.output is not None:
        write_output(options.output, improved.proto if options.output.endswith(_PROTO) else improved.text)
    elif not (options.report or options.json):
        print(improved.text)
    if options.json:
        print(json.dumps(improved.to_dict(), indent=2))
    elif options.report:
        _show_chains(improved.places)
    if improved.unscheduled:
        print("reshard: the schedule is left out; the compiler makes another", file=sys.stderr)
    return 0


def _show_chains(places: Sequence[Place]) -> None:
    """Prints a row for each chain of collectives: what XLA does, and what the pass did with it."""
    from reshard.doctor.places import PassOutcome

    replaced = sum(place.replaced for place in places)
    rows: list[list[str]] = []
    for place in places:
        where = place.line.rpartition(os.sep)[2] or place.computation
        outcome = place.outcome or PassOutcome()
        does = ", ".join(outcome.steps) if outcome.replaced else f"left: {outcome.why}"
        received = "" if outcome.planned_bytes is None else bytes_text(outcome.planned_bytes)
        rows.append([where, place.does_with_op, bytes_text(place.received_bytes), does, received])
    heads = ["where", "XLA does", "received", "reshard does", "received"]
    _show_rows(f"{counted(replaced, 'chain')} of {len(places)} replaced", heads, rows)


def _show_reshards(report: PassReport) -> None:
    """Prints a row for each reshard of the program: those that were replaced, then those left to XLA."""
    rows: list[list[str]] = []
    for reshard in (*report.taken, *report.left):
        steps = "" if reshard.plan is None else ", ".join(step.kind for step in reshard.plan.steps)
        by = steps if reshard.taken else f"left: {reshard.why}"
        received = bytes_text(reshard.plan.received_bytes) if reshard.plan is not None and reshard.taken else ""
        where = reshard.where.rpartition(os.sep)[2] or reshard.operation
        rows.append([where, str(reshard.source or ""), str(reshard.target or ""), by, received])
    summary = f"{counted(len(report.taken), 'reshard')} taken, {len(report.left)} left"
    _show_rows(summary, ["where", "from", "to", "by", "received"], rows)


def _show_rows(summary: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a line, and below it a numbered table if there are any rows."""
    from reshard.show import terminal

    out = terminal.open_console()
    terminal.print_paragraph(out, summary, style=terminal.NAME)
    if not rows:
        return
    out.print()
    table = terminal.make_table("", *heads, right=["", "received"])
    for number, row in enumerate(rows, 1):
        table.add_row(str(number), *row)
    terminal.print_table(out, table, indent=2)


def warn_of_left(report: PassReport) -> None:
    """Says on stderr which reshards are left to XLA, and why: the program alone does not show it."""
    for reshard in report.left[:_MOST_LEFT]:
        print(f"reshard: left to XLA: {reshard}", file=sys.stderr)
    if len(report.left) > _MOST_LEFT:
        more = len(report.left) - _MOST_LEFT
        print(f"reshard: left to XLA: {more} more; --report lists them all", file=sys.stderr)


COMMAND = Command(
    "pass", "put reshard's collectives into a StableHLO program", _EXAMPLES, CompilerPassOptions, run_pass
)

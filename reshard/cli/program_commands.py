"""The commands about compiled programs: `reshard doctor`, which reports what they move, `reshard pass`, which puts
reshard's collectives into them, and `reshard autoshard`, which chooses the shardings of one.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.cli.option_groups import Command, argument, network_argument
from reshard.errors import ReshardError, quoted
from reshard.types.units import bytes_text, counted

if TYPE_CHECKING:
    from reshard.cli.programs import ProgramText
    from reshard.doctor import Report
    from reshard.doctor.places import Place
    from reshard.jax.pass_report import PassReport

# `reshard doctor`: where a program moves its data between devices, or what XLA warns of in a log.

_PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")
PATIENCE = 2.0  # seconds that people wait in silence

_SUMS = ("exact", "any-order")


def sums_argument(of: str = "") -> Any:
    """The option that says in which order floats may be added up."""
    return argument(
        "--sums",
        choices=list(_SUMS),
        help=f"{of}in which order plans may add up floats: the program's (exact, default), or any-order",
    )


def _spell_sums(option: str | None) -> str:
    return (option or _SUMS[0]).replace("-", " ")


_DOCTOR_EXAMPLES = """\
examples:
  reshard doctor step.mlir
  reshard doctor step.hlo.txt --all
  reshard doctor step.mlir --html report.html
  reshard doctor step.mlir --json --fail-on-rebuild
  reshard doctor step.mlir --max-received 64MiB
  reshard doctor dump/
  reshard doctor step.mlir --advise
  reshard doctor step.mlir --topology v5p:2x2x2
  reshard doctor job.log
  python train.py 2>&1 | reshard doctor -

what to put into such a file,
with lowered = jax.jit(f).lower(*args):
  lowered.as_text(debug_info=True)  StableHLO: compiled here
  lowered.compile().as_text()       optimized HLO: as it is
"""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options of `reshard doctor`."""

    files: Sequence[str] = argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="StableHLO (text or artifact), optimized HLO, a folder of --xla_dump_to, or a log with XLA's warnings; "
        "- is stdin. Of a folder, or of several files of HLO, the one that receives most is reported",
    )
    json: bool = argument("--json", action="store_true", help="print one JSON object instead of the table")
    html: str | None = argument("--html", metavar="FILE", help="write one self-contained page instead of the table")
    all: bool = argument("--all", action="store_true", help="also reductions, shard_maps and small moves")
    frames: str = argument(
        "--frames",
        choices=["user", "all"],
        default="user",
        help="the lines of a place: the program's own (user), or its whole stack with those of frameworks (all)",
    )
    network: str | None = network_argument()
    platform: str | None = argument(
        "--platform", metavar="NAME", help="compile StableHLO for this (default cpu; tpu with --topology)"
    )
    topology: str | None = argument("--topology", metavar="NAME", help="ahead of time for a topology: v5p:2x2x2")
    sums: str | None = sums_argument()
    advise: bool = argument(
        "--advise",
        action="store_true",
        help="of StableHLO, not of a dump: also which shardings to change, each measured by compiling the program",
    )
    fail_on_rebuild: bool = argument(
        "--fail-on-rebuild", action="store_true", help="exit with 1 if a whole array is rebuilt"
    )
    max_received: str | None = argument(
        "--max-received", metavar="SIZE", help="exit with 1 if a device receives more than this in one run: 64MiB"
    )


def run_doctor(options: DoctorOptions) -> int:
    """Prints or writes the report of a program or a log; returns 1 if it exceeds what the options allow."""
    from reshard.cli.programs import find_heaviest_program, read_program, write_output
    from reshard.doctor.advice import show_advice
    from reshard.doctor.report.table import show_report
    from reshard.doctor.xla_log import MARK, LogReport, show_log
    from reshard.show import terminal
    from reshard.synth.options import read_budget

    most = read_budget(options.max_received, "--max-received")
    file = find_heaviest_program(options.files)
    program = read_program(file, log_mark=MARK)
    if program.is_log:
        if most is not None:
            raise ReshardError("a log does not say what a program receives in all: give the program for --max-received")
        if options.html is not None:
            raise ReshardError("a log has no page: its warnings name one move each; leave --html out, or use --json")
        if options.advise:
            raise ReshardError("a log has no program whose shardings could be changed: give its StableHLO for --advise")
        log = LogReport.of(program.text, options.network)
        if options.json:
            print(log.to_json(indent=2))
        else:
            show_log(terminal.open_console(), log)
        return int(options.fail_on_rebuild)  # Each of its warnings is a rebuild.
    with report_progress(f"{'reading' if program.is_hlo else 'compiling and reading'} the program"):
        report = _report_program(file, program, options)
    advice = None
    if options.advise:
        with report_progress("compiling the program with changed shardings"):
            advice = report.advise()
    if options.html is not None:
        write_output(options.html, report.to_html(advice))
    if options.json:
        print(report.to_json(indent=2, every=options.all, advice=advice))
    elif options.html is None:
        out = terminal.open_console()
        show_report(out, report, options.all, options.frames == "all", hint=advice is None)
        if advice is not None:
            out.print()
            show_advice(out, advice)
    exceeds = most is not None and report.received_bytes > most
    if exceeds:
        received = f"{report.received_bytes} B received a device"
        print(f"reshard: {received}, more than --max-received {options.max_received}", file=sys.stderr)
    return int(exceeds or (options.fail_on_rebuild and bool(report.rebuilt)))


def _report_program(file: str, program: ProgramText, options: DoctorOptions) -> Report:
    """Reads optimized HLO as it is, and has jax compile StableHLO first."""
    from reshard.cli.programs import set_up_jax
    from reshard.doctor import examine

    if program.is_hlo:
        platform = options.platform or (None if options.topology is None else "tpu")
        if platform not in (None, *_PLATFORMS):
            raise ReshardError(f"--platform {quoted(platform)}: give one of {', '.join(_PLATFORMS)} for HLO")
        return examine(program.text, network=options.network, platform=platform, sums=_spell_sums(options.sums))
    set_up_jax()
    try:
        from reshard.jax.program_report import report_program
    except ImportError:
        raise ReshardError(
            f"{file} is StableHLO, which jax has to compile first, and jax is not installed: pip "
            f"install jax, or give the optimized HLO (compiled.as_text())"
        ) from None
    return report_program(
        program.content,
        network=options.network,
        platform=options.platform or ("cpu" if options.topology is None else "tpu"),
        topology=options.topology,
        sums=_spell_sums(options.sums),
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


# `reshard pass`: the compiler pass on a program in a file, StableHLO or HLO after partitioning.

_TEXT = (".mlir", ".txt", ".stablehlo")  # Names of files that are to hold text rather than an artifact.
_PROTO = (".pb", ".binpb", ".hlo_proto")
_NO_JAX = "the pass needs jax, which is not installed: pip install jax"
_MOST_LEFT = 8  # Reshards that are listed where no report is wanted.
_REASON = 90  # Columns of a reason in a table; --json has all of it.

_PASS_EXAMPLES = """\
examples:
  reshard pass step.mlir -o better.mlir
  reshard pass step.mlir -o better.mlirbc --report
  reshard pass step.mlir --report --network tpu-v5p
  reshard pass step.mlir --json --budget 1GiB
  reshard pass step.hlo -o better.hlo --report
  reshard pass dump/ -o better.hlo --report
  reshard pass step.hlo -o better.hlo --prefer memory
  reshard pass step.hlo -o better.pb --topology v5p:2x2x2
"""


@dataclass(frozen=True, kw_only=True)
class CompilerPassOptions:
    """The options of `reshard pass`."""

    file: str = argument(
        "file",
        metavar="FILE",
        help="StableHLO with Shardy shardings, text or artifact, HLO, text or proto, or a folder of --xla_dump_to, of "
        "which the program that receives most is taken; - is stdin",
    )
    output: str | None = argument(
        "-o",
        "--output",
        metavar="FILE",
        help="text if it ends in .mlir, else a portable artifact; of HLO, a proto if it ends in .pb, else text",
    )
    report: bool = argument("--report", action="store_true", help="print what became of each reshard")
    json: bool = argument("--json", action="store_true", help="print that as one JSON object")
    network: str | None = network_argument()
    budget: str | None = argument(
        "--budget", metavar="SIZE", help="most bytes live on a device in one move, e.g. 64MiB"
    )
    prefer: str | None = argument(
        "--prefer",
        choices=["bytes", "memory", "time"],
        help="of HLO: what plans make better, and nothing else worse: bytes (default), memory or time",
    )
    sums: str | None = sums_argument("of HLO: ")
    devices: int | None = argument(
        "--devices", type=int, metavar="COUNT", help="of HLO: its number of partitions, where it does not say"
    )
    platform: str | None = argument(
        "--platform",
        metavar="NAME",
        help="of HLO: the devices that it was compiled for, e.g. cpu (default; tpu with --topology)",
    )
    topology: str | None = argument(
        "--topology", metavar="NAME", help="of HLO: ahead of time for a topology: v5p:2x2x2"
    )


def run_pass_command(options: CompilerPassOptions) -> int:
    """Writes or prints the transformed program, and prints the report, or on stderr what was left if none is wanted."""
    from reshard.cli.programs import read_program, set_up_jax, write_output

    program = read_program(options.file, protos=True)
    set_up_jax()
    if program.is_hlo:
        return _improve_hlo(options, program.content)
    for option, given in (("--prefer", options.prefer), ("--sums", options.sums)):
        if given is not None:
            raise ReshardError(
                f"{options.file} is StableHLO, where XLA's own collectives are not known yet, so {option} says nothing "
                f"of it: leave {option} out, or give the optimized HLO (compiled.as_text())"
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


def _improve_hlo(options: CompilerPassOptions, content: str | bytes) -> int:
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
        sums=_spell_sums(options.sums),
    )
    if options.output is not None:
        write_output(options.output, improved.proto if options.output.endswith(_PROTO) else improved.text)
    elif not (options.report or options.json):
        print(improved.text)
    if options.json:
        print(json.dumps(improved.to_dict(), indent=2))
    elif options.report:
        _show_chains(improved.places, options.prefer or "bytes")
    if improved.unscheduled:
        print("reshard: the schedule is left out; the compiler makes another", file=sys.stderr)
    return 0


def _show_chains(places: Sequence[Place], prefer: str) -> None:
    """Prints a row for each chain of collectives: what XLA does, and what the pass did with it."""
    from reshard.doctor.places import PassOutcome

    rows: list[list[str]] = []
    for place in places:
        where = place.line.rpartition(os.sep)[2] or place.computation
        outcome = place.outcome or PassOutcome()
        does = ", ".join(outcome.steps) if outcome.replaced else f"left: {textwrap.shorten(outcome.why, _REASON)}"
        received = "" if outcome.planned_bytes is None else bytes_text(outcome.planned_bytes)
        rows.append([where, place.does_with_op, bytes_text(place.received_bytes), does, received])
    replaced = [place for place in places if place.replaced]
    fewer = sum(place.saved_bytes > 0 for place in replaced)
    summary = f"{counted(len(replaced), 'chain')} of {len(places)} replaced"
    if fewer < len(replaced):
        summary += f": {fewer} to receive less, {len(replaced) - fewer} to need less {prefer} for the same bytes"
    _show_rows(summary, ["where", "XLA does", "received", "reshard does", "received"], rows)


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


# `reshard autoshard`: the shardings that a StableHLO program should have, and the program that moves as planned.

_AUTOSHARD_EXAMPLES = """\
examples:
  reshard autoshard step.mlir --mesh x=4,y=2
  reshard autoshard step.mlir -m x=4,y=2 --budget 16GiB
  reshard autoshard step.mlir -m x=8 -o chosen.mlir
  reshard autoshard step.mlir -m x=8 --fix 'params/w=P("x")'
  reshard autoshard step.mlir -m x=8 --topology v5p:2x2x2

the program, with lowered = jax.jit(f).lower(*shapes):
  lowered.as_text(debug_info=True)
"""


@dataclass(frozen=True, kw_only=True)
class AutoshardOptions:
    """The options of `reshard autoshard`."""

    file: str = argument("file", metavar="FILE", help="StableHLO, text or artifact; - is stdin")
    mesh: str | None = argument("-m", "--mesh", metavar="AXES", help="axes of the mesh, first one major, e.g. x=4,y=2")
    budget: str | None = argument("--budget", metavar="SIZE", help="most bytes that a device may hold, e.g. 16GiB")
    network: str | None = network_argument()
    fix: Sequence[str] | None = argument(
        "--fix", metavar="PATH=SPEC", action="append", help="a spec that stays: params/w=P('x'), or result/0=P()"
    )
    compare: str = argument(
        "--compare",
        choices=["none", "best", "all"],
        default="best",
        help="what experts write, compiled as well: the best by the model (default), all, or none",
    )
    output: str | None = argument(
        "-o", "--output", metavar="FILE", help="text if it ends in .mlir, else a portable artifact"
    )
    json: bool = argument("--json", action="store_true", help="print one JSON object instead of the report")
    svg: str | None = argument("--svg", metavar="FILE", help="write a picture: the least time under each budget")
    platform: str | None = argument(
        "--platform", metavar="NAME", help="compile for this (default cpu; tpu with --topology)"
    )
    topology: str | None = argument("--topology", metavar="NAME", help="ahead of time for a topology: v5p:2x2x2")


def run_autoshard(options: AutoshardOptions) -> int:
    """Prints what was chosen, and writes the program."""
    from reshard.cli.programs import check_output, divert_library_output, read_program, set_up_jax, write_output
    from reshard.types.mesh import Mesh

    if options.mesh is None:
        raise ReshardError("the mesh is missing: give --mesh x=4,y=2, with as many devices as the program is to run on")
    axes = Mesh.parse(options.mesh)
    program = read_program(options.file)
    if program.is_hlo:
        raise ReshardError(f"{options.file} is HLO, which is partitioned already; give StableHLO: lowered.as_text()")
    check_output(options.output)
    check_output(options.svg)
    set_up_jax()
    try:
        from reshard.jax.layout_choice.autoshard import autoshard_program
        from reshard.jax.stablehlo_pass.module_pass import write_artifact
    except ImportError:
        raise ReshardError(_NO_JAX) from None
    with report_progress("choosing the shardings of the program"), divert_library_output():
        choice = autoshard_program(
            program.content,
            axes,
            fixed=options.fix or (),
            budget=options.budget,
            network=options.network,
            compare=options.compare,
            platform=options.platform or ("cpu" if options.topology is None else "tpu"),
            topology=options.topology,
        )
        # Its explanation solves again, for what a larger budget would buy.
        told = choice.to_json(indent=2) if options.json else choice.report()
    if options.output is not None:
        is_text = options.output == "-" or options.output.endswith(_TEXT)
        module = choice.module()
        text = module.operation.get_asm(enable_debug_info=True) if is_text else write_artifact(module)
        write_output(options.output, text)
        if options.output != "-":
            print(f"wrote {options.output}; reshard.jax.load_step runs it", file=sys.stderr)
    if options.svg is not None:
        with report_progress("choosing under other budgets"), divert_library_output():
            picture = choice.trade_off().to_svg()
        write_output(options.svg, picture)
        print(f"wrote {options.svg}", file=sys.stderr)
    if options.output != "-":
        print(told)
    return 0


COMMANDS = (
    Command(
        "doctor",
        "where a program moves its data between devices, and what it wastes",
        _DOCTOR_EXAMPLES,
        DoctorOptions,
        run_doctor,
    ),
    Command(
        "pass",
        "put reshard's collectives into a StableHLO program",
        _PASS_EXAMPLES,
        CompilerPassOptions,
        run_pass_command,
    ),
    Command(
        "autoshard",
        "choose the shardings of a StableHLO program, and write it with its moves",
        _AUTOSHARD_EXAMPLES,
        AutoshardOptions,
        run_autoshard,
    ),
)

"""`reshard doctor`: where a program moves its data between devices, as a table, JSON or a page."""

from __future__ import annotations

from reshard.cli import files
from reshard.cli.arguments import Options
from reshard.cli.files import Program, quiet_jax, read
from reshard.doctor import Report, examine
from reshard.doctor.report.table import show
from reshard.errors import ReshardError
from reshard.show import terminal


def run(options: Options) -> int:
    """Prints the report of a file; 1 if it was to fail where an array is rebuilt, and one is."""
    report = _report(read(options.file), options)
    if options.html is not None:
        files.write(options.html, report.to_html())
    if options.json:
        print(report.to_json(indent=2))
    elif options.html is None:
        show(terminal.console(), report, options.all)
    return int(options.fail_on_rebuild and bool(report.rebuilt))


def _report(program: Program, options: Options) -> Report:
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

"""`reshard pass`: the compiler pass on a StableHLO program in a file."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from reshard.cli import files
from reshard.cli.arguments import Options
from reshard.cli.files import quiet_jax, read
from reshard.errors import NotationError, ReshardError
from reshard.show import terminal
from reshard.types.units import bytes_text, counted, parse_bytes

if TYPE_CHECKING:
    from reshard.jax.module_pass import Transformed
    from reshard.jax.pass_report import Report, Reshard

_TEXT = (".mlir", ".txt", ".stablehlo")


def run(options: Options) -> int:
    """Writes the program after the pass; prints what became of its reshards, if that was asked for."""
    found = _transformed(options)
    if options.output is not None:
        # Text for a name that says so, else a portable artifact.
        as_text = options.output == "-" or options.output.endswith(_TEXT)
        files.write(options.output, found.text if as_text else found.to_bytes())
    elif not (options.report or options.json):
        print(found.text)
    if options.json:
        print(json.dumps(found.report.to_dict(), indent=2))
    elif options.report:
        _show(found.report)
    return 0


def _transformed(options: Options) -> Transformed:
    program = read(options.file)
    if program.is_hlo:
        raise NotationError(
            f"{options.file} is HLO, which is partitioned already; give the StableHLO that it was compiled from"
        )
    quiet_jax()
    try:
        from reshard.jax.module_pass import transform
    except ImportError:
        raise ReshardError("the pass needs jax, which is not installed: install 'reshard[jax]'") from None
    budget = None if options.budget is None else parse_bytes(options.budget)
    return transform(program.content, network=options.network, budget=budget)


def _show(report: Report) -> None:
    out = terminal.console()
    terminal.paragraph(
        out, f"{counted(len(report.taken), 'reshard')} taken, {len(report.left)} left", style=terminal.NAME
    )
    rows = [*report.taken, *report.left]
    if not rows:
        return
    out.print()
    table = terminal.table("", "where", "from", "to", "by", "received", right=["", "received"])
    for at, found in enumerate(rows, 1):
        table.add_row(str(at), *_cells(found))
    terminal.show(out, table, indent=2)


def _cells(found: Reshard) -> list[str]:
    steps = "" if found.plan is None else ", ".join(step.kind for step in found.plan.steps)
    by = steps if found.taken else f"left: {found.why}"
    received = bytes_text(found.plan.received_bytes) if found.plan is not None and found.taken else ""
    where = found.where.rpartition(os.sep)[2] or found.operation
    return [where, str(found.source or ""), str(found.target or ""), by, received]

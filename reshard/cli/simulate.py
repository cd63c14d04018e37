"""`reshard simulate`: runs a plan on random data and checks every element by `types.meaning`."""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text

from reshard.cli.arguments import Options
from reshard.cli.plan import head, steps
from reshard.cli.request import planned
from reshard.cli.trial import Fault, Trial
from reshard.errors import ReshardError
from reshard.runtime import Account, simulate
from reshard.show import terminal
from reshard.types import dtypes
from reshard.types.plan import Plan
from reshard.types.units import bytes_text, counted

MOST_BYTES = 1 << 30
MOST_DEVICES = 4096
MOST_ROUNDS = 100_000


def run(options: Options) -> int:
    """Plans, runs and checks; 0 if all is as promised, else 1."""
    if options.seed < 0:
        raise ReshardError(f"--seed {options.seed}: give a whole number of at least 0")
    request = planned(options)
    plan = request.plan
    _check_size(plan)
    trial = Trial(request.source, request.target, options.seed)
    tiles, memory = trial.source_tiles(), Account(plan.source.dtype)
    result = simulate(plan, tiles, memory)
    faults = trial.faults(result)
    out = terminal.console()
    head(out, request)
    steps(out, plan)
    kept = _promises(out, plan, memory)
    _verdict(out, plan, faults, kept)
    return 0 if kept and not faults else 1


def _check_size(plan: Plan) -> None:
    """Refuses what would not fit this machine, before anything is allocated."""
    mesh = plan.source.mesh
    if mesh.size > MOST_DEVICES:
        raise ReshardError(
            f"{mesh.size} devices on mesh {mesh} are too many to simulate in one process (at most {MOST_DEVICES}); "
            f"use smaller axes, or `reshard plan`, which takes any size"
        )
    if plan.launches > MOST_ROUNDS:
        raise ReshardError(
            f"{plan.launches} launches are too many to simulate (at most {MOST_ROUNDS}); give a larger --budget"
        )
    summands = math.prod(axis.size for axis in plan.source.partial)
    packed = max(1, 8 // dtypes.bits(plan.source.dtype))  # numpy has a byte for each int4.
    whole = plan.source.nbytes(math.prod(plan.source.shape))
    needed = packed * (mesh.size * plan.peak_bytes + summands * whole)
    if needed > MOST_BYTES:
        fewer = -(-needed // MOST_BYTES)
        raise ReshardError(
            f"an array of global shape {plan.source.shape} needs {bytes_text(needed)} on "
            f"{counted(mesh.size, 'device')} of mesh {mesh}, and at most {bytes_text(MOST_BYTES)} are simulated; "
            f"give a shape with {fewer} times fewer elements, or use `reshard plan`, which takes any size"
        )


def _promises(out: Console, plan: Plan, memory: Account) -> bool:
    """What was measured beside what the plan promised; whether all of it was kept."""
    rows = [
        ("bytes received", memory.received_bytes, plan.received_bytes, bytes_text),
        ("launches", memory.launches, plan.launches, str),
        ("peak", memory.peak_bytes, plan.peak_bytes, bytes_text),
    ]
    table = terminal.table("a device, at worst", "measured", "promised", "", right=["measured", "promised"])
    for name, measured, promised, text in rows:
        kept = measured <= promised
        mark = Text("kept", terminal.GOOD) if kept else Text("BROKEN", terminal.BAD)
        table.add_row(Text(name), Text(text(measured)), Text(text(promised)), mark)
    terminal.show(out, table, indent=2)
    out.print()
    return all(measured <= promised for _, measured, promised, _ in rows)


def _verdict(out: Console, plan: Plan, faults: list[Fault], kept: bool) -> None:
    devices = counted(plan.target.mesh.size, "device")
    if not faults:
        exact = "" if plan.source.partial == plan.target.partial else ", within rounding"
        line = f"right: each of the {devices} holds what the target says{exact}"
        terminal.paragraph(out, line, style=terminal.GOOD if kept else terminal.BAD)
        return
    wrong = sum(fault.count for fault in faults)
    line = f"WRONG: {counted(wrong, 'element')} on {len(faults)} of {devices}"
    terminal.paragraph(out, line, style=terminal.BAD)
    for fault in faults[:8]:
        terminal.paragraph(out, str(fault), "  ")

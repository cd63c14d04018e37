"""What a simulation may cost, and what it prints: the plan's promises beside what was measured, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from reshard.cli.trial import Fault
from reshard.errors import ReshardError
from reshard.plans.plan import Plan
from reshard.runtime import Account
from reshard.show import terminal
from reshard.types import dtypes
from reshard.types.units import bytes_text, counted

MOST_BYTES = 1 << 30
MOST_DEVICES = 4096
MOST_ROUNDS = 100_000
_MOST_FAULTS = 8  # Lines printed, one for each device with wrong elements.


def check_size(plan: Plan) -> None:
    """Raises `ReshardError` for a plan that would not fit this machine, before anything is allocated."""
    mesh = max(plan.source.mesh, plan.target.mesh, key=lambda mesh: mesh.size)
    if mesh.size > MOST_DEVICES:
        raise ReshardError(
            f"{mesh.size} devices on mesh {mesh} are too many to simulate in one process (at most {MOST_DEVICES}); "
            f"use smaller axes, or `reshard plan`, which takes any size"
        )
    if plan.launches > MOST_ROUNDS:
        raise ReshardError(
            f"{plan.launches} launches are too many to simulate (at most {MOST_ROUNDS}); give a larger --budget"
        )
    needed = _needed_bytes(plan)
    if needed > MOST_BYTES:
        fewer = -(-needed // MOST_BYTES)
        raise ReshardError(
            f"an array of global shape {plan.source.shape} needs {bytes_text(needed)} on "
            f"{counted(mesh.size, 'device')} of mesh {mesh}, and at most {bytes_text(MOST_BYTES)} are simulated; "
            f"give a shape with {fewer} times fewer elements, or use `reshard plan`, which takes any size"
        )


def _needed_bytes(plan: Plan) -> int:
    """The bytes of all tiles at the peak, and of the global arrays that they are cut from."""
    summands = math.prod(axis.size for axis in plan.source.partial)
    whole = plan.source.nbytes(math.prod(plan.source.shape))
    unpacked = max(1, 8 // dtypes.bits(plan.source.dtype))  # numpy stores an int4 in a byte.
    return unpacked * (max(plan.source.mesh.size, plan.target.mesh.size) * plan.peak_bytes + summands * whole)


class Promise(NamedTuple):
    """A figure of a plan on its worst device, and what was measured."""

    name: str
    measured: int
    promised: int
    text: Callable[[int], str]

    @property
    def kept(self) -> bool:
        """Whether no more was measured than promised."""
        return self.measured <= self.promised


def promises(plan: Plan, account: Account) -> list[Promise]:
    """Bytes received, launches and peak: each as promised and as measured."""
    return [
        Promise("bytes received", account.received_bytes, plan.received_bytes, bytes_text),
        Promise("launches", account.launches, plan.launches, str),
        Promise("peak", account.peak_bytes, plan.peak_bytes, bytes_text),
    ]


def show_promises(out: Console, rows: Sequence[Promise]) -> None:
    """Prints what was measured beside what the plan promised."""
    table = terminal.table("a device, at worst", "measured", "promised", "", right=["measured", "promised"])
    for row in rows:
        mark = Text("kept", terminal.GOOD) if row.kept else Text("BROKEN", terminal.BAD)
        table.add_row(Text(row.name), Text(row.text(row.measured)), Text(row.text(row.promised)), mark)
    terminal.show(out, table, indent=2)
    out.print()


def show_verdict(out: Console, plan: Plan, faults: Sequence[Fault], kept: bool) -> None:
    """Prints that all devices hold what the target says, or which do not."""
    devices = counted(plan.target.mesh.size, "device")
    if not faults:
        exact = "" if plan.source.partial_as(plan.target) else ", within rounding"
        line = f"right: each of the {devices} holds what the target says{exact}"
        terminal.paragraph(out, line, style=terminal.GOOD if kept else terminal.BAD)
        return
    wrong = sum(fault.count for fault in faults)
    line = f"WRONG: {counted(wrong, 'element')} on {len(faults)} of {devices}"
    terminal.paragraph(out, line, style=terminal.BAD)
    for fault in faults[:_MOST_FAULTS]:
        terminal.paragraph(out, str(fault), "  ")

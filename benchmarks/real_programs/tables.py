"""The tables of the rows of `benchmarks/programs.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def line_of(row: Row) -> str:
    """One row on one line, as it is printed while the others run."""
    if "error" in row:
        return f"{row['program']}: {row['error']}"
    plain, ours = row["plain"], row["pass"]
    took = sum(fate["replaced"] for fate in row["fates"])
    return (
        f"{row['program']} ({row['target']}): {_bytes(plain['received'])} -> {_bytes(ours['received'])} received, "
        f"{_bytes(row['not_needed'])} not needed, {_bytes(saved(row))} saved; peak {_bytes(plain['peak'])} -> "
        f"{_bytes(ours['peak'])}; compiled in {plain['seconds']} s, {ours['seconds']} cold, {ours['cached_seconds']} "
        f"cached; {took} of {len(row['fates'])} chains replaced"
        + (f"; VIOLATES: {'; '.join(row['violations'])}" if row["violations"] else "")
    )


def saved(row: Row) -> int:
    """The bytes that a device receives less with the pass."""
    return row["plain"]["received"] - row["pass"]["received"]


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= 10 * size or (count >= size and unit != "KiB"):
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"

"""The tables of the rows of `benchmarks/programs.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]
_HEAD = (
    "program", "of", "received", "with the pass", "not needed", "still not needed", "peak", "with the pass",
    "compiled in", "first time", "again", "chains",
)  # fmt: skip
_TITLES = {
    "cpu": "8 CPU devices, compiled and run",
    "v5p": "8 chips of TPU v5p (2x2x2), ahead of time",
    "v5p-256": "256 chips of TPU v5p (4x8x8), ahead of time",
    "h100": "8 H100s, ahead of time",
}


def line_of(row: Row) -> str:
    """One row on one line, as it is printed while the others run."""
    if "error" in row:
        return f"{row['program']}: {row['error']}"
    plain, ours = row["plain"], row["pass"]
    took = sum(fate["replaced"] for fate in row["fates"])
    return (
        f"{row['program']} ({row['target']}): {_bytes(plain['received'])} -> {_bytes(ours['received'])} received, "
        f"{_bytes(row['not_needed'])} -> {_bytes(row['still_not_needed'])} not needed, "
        f"{_bytes(row['could_save'])} saved by the doctor's word; peak {_bytes(plain['peak'])} -> "
        f"{_bytes(ours['peak'])}; compiled in {plain['seconds']} s, {ours['seconds']} cold, {ours['cached_seconds']} "
        f"cached; {took} of {len(row['fates'])} chains replaced"
        + (f"; VIOLATES: {'; '.join(row['violations'])}" if row["violations"] else "")
    )


def compare_by_hand(row: Row) -> str:
    """What a program receives, over what the same one written by hand does."""
    if "error" in row:
        return f"{row['program']}: {row['error']}"
    *ours, (_, least) = row["received"].items()
    shown = ", ".join(f"{kind} {count:,} B ({count / least:.2f})" for kind, count in ours)
    return (
        f"{row['program']} ({row['target']}): by hand {least:,} B; {shown}; results differ by {row['difference']:.1e}"
    )


def tables(rows: Sequence[Row]) -> str:
    """A table in Markdown for each target, with its totals; the last row of a program and target counts."""
    latest = {(row["target"], row["program"]): row for row in rows}
    targets = [target for target in _TITLES if any(key[0] == target for key in latest)]
    return "\n".join(_table(target, [row for key, row in latest.items() if key[0] == target]) for target in targets)


def _table(target: str, rows: list[Row]) -> str:
    done = sorted((row for row in rows if "error" not in row), key=lambda row: (row["library"], row["program"]))
    lines = [f"## {_TITLES[target]}", "", _cells(_HEAD), _cells("---" for _ in _HEAD)]
    lines += [_cells(_row(row)) for row in done]
    lines += ["", *_totals(done), ""]
    lines += [f"- {row['program']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join(lines)


def _cells(texts: Any) -> str:
    return f"| {' | '.join(texts)} |"


def _row(row: Row) -> Iterator[str]:
    plain, ours = row["plain"], row["pass"]
    yield row["program"] + ("" if not row["violations"] else " (!)")
    yield row["library"]
    yield _bytes(plain["received"])
    yield _percent(ours["received"], plain["received"])
    yield _bytes(row["not_needed"])
    yield _bytes(row["still_not_needed"])
    yield _bytes(plain["peak"])
    yield _percent(ours["peak"], plain["peak"])
    yield f"{plain['seconds']:.1f} s"
    yield f"{ours['seconds'] / plain['seconds']:.2f}"
    yield f"{ours['cached_seconds'] / plain['seconds']:.2f}"
    yield f"{sum(fate['replaced'] for fate in row['fates'])} of {len(row['fates'])}"


def _totals(rows: list[Row]) -> Iterator[str]:
    needless, still = (sum(row[key] for row in rows) for key in ("not_needed", "still_not_needed"))
    plain, ours = (sum(row[key]["received"] for row in rows) for key in ("plain", "pass"))
    libraries = len({row["library"] for row in rows})
    yield f"{len(rows)} programs of {libraries} libraries."
    yield f"Received in all: {_bytes(plain)}, with the pass {_bytes(ours)}."
    share = f" ({100 * (1 - still / needless):.0f}% less)" if needless else ""
    yield f"Not needed: {_bytes(needless)}, with the pass {_bytes(still)}{share}."
    kinds = ("plain", "pass")
    differing = [row["program"] for row in rows if any(row[one]["received"] != row[one]["counted"] for one in kinds)]
    yield "The two counts of bytes agree in " + ("all." if not differing else f"all but {', '.join(differing)}.")
    words = [(row, row["could_save"], row["plain"]["received"] - row["pass"]["received"]) for row in rows]
    wrong = [(row["program"], said, saved) for row, said, saved in words if not doctor_is_right(said, saved)]
    yield f"The doctor says what the pass saves, within 5%, in {len(rows) - len(wrong)} of {len(rows)}."
    yield from (f"- {name}: it says {_bytes(said)}, and {_bytes(saved)} are saved" for name, said, saved in wrong)
    if rows and "same_bits" in rows[0]:
        yield f"Results have the same bits in {sum(row['same_bits'] for row in rows)} of {len(rows)}."
    yield from (f"- {row['program']}: {'; '.join(row['violations'])}" for row in rows if row["violations"])
    reasons = Counter(_reason(why) for row in rows for fate in row["fates"] if (why := fate["why"]))
    yield "\nChains left: " + "; ".join(f"{count} {why}" for why, count in reasons.most_common(8)) + "."


def doctor_is_right(said: int, saved: int) -> bool:
    """Whether what the doctor says can be saved is what the pass saves, within 5% of the larger.

    >>> doctor_is_right(100, 96), doctor_is_right(0, 10)
    (True, False)
    """
    return 20 * abs(said - saved) <= max(said, saved)


def _reason(why: str) -> str:
    """A reason without its figures and names."""
    return " ".join("..." if any(each.isdigit() for each in word) else word for word in why.split())


def _percent(ours: int, plain: int) -> str:
    if ours == plain:
        return "same"
    return f"{100 * (ours / plain - 1):+.1f}%"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.1f} KiB" if count else "0"

"""Who sends how many bytes to whom, over all steps of a plan: a row for each sender, a column for each receiver.

    receiver  0   1   2   3
    sender 0      ■   ■   ■      A square has the colour that its sender has in the picture of the tiles; the larger it
           1  ■       ■   ■      is, the more bytes it stands for. A pointer that rests on it shows them.
           2  ■   ■       ■
           3  ■   ■   ■

f32[{x}4, 4] -> f32[16, {x}1] on <x=4>: each square is 16 B, and 48 B go to every device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from reshard.draw.scene import (
    LEGIBLE,
    NORMAL,
    SMALL,
    Lines,
    Mark,
    Point,
    Scene,
    Words,
    box_area,
    colour_devices,
    fit_words,
    ink_on,
)
from reshard.errors import ReshardError
from reshard.lower import lower_plan
from reshard.lower.program_traffic import program_traffic
from reshard.plans.plan import Plan
from reshard.show.plan_table import meshes_text
from reshard.types.units import bytes_text

MOST_DEVICES = 512
MOST_TRANSFERS = 1 << 18
MOST_ROWS = 64  # Smaller squares cannot be told apart.
_SIDE, _LEFT, _TOP, _EDGE = 300.0, 62.0, 58.0, 8.0  # Of the matrix; before and above it; at the right and below.
_STRIP, _APART = 8.0, 4.0  # The colours along the edges, and their distance from the matrix.
_LABELLED, _RULED = 16, 32  # The most rows that all have their numbers, and lines between them.
_LEAST = 0.3  # The side of the smallest square over that of its cell.


def draw_traffic(plan: Plan) -> Scene:
    """The bytes that each device sends to each other one.

    Raises `ReshardError` for more devices or transfers than can be counted one by one.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> scene = draw_traffic(plan(Layout.parse("f32[{x}4, 4]", mesh), Layout.parse("f32[16, {x}1]", mesh)))
    >>> scene.caption[-71:]
    'Worst device: 0 receives 48 B, as planned; all devices together: 192 B.'
    """
    cells = group_traffic(plan, MOST_ROWS)
    colour = colour_devices([plan.source.mesh, *(step.result.mesh for step in plan.steps)])
    fills = [colour[group[0]] for group in cells.groups]
    names = [f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in cells.groups]
    count, each = len(fills), _SIDE / len(fills)
    marks: list[Mark] = [box_area(_LEFT, _TOP, _LEFT + _SIDE, _TOP + _SIDE, "#888888")._replace(opacity=0.1)]
    for row, fill in enumerate(fills):
        at = row * each
        marks.append(box_area(_LEFT - _APART - _STRIP, _TOP + at, _LEFT - _APART, _TOP + at + each, fill))
        marks.append(box_area(_LEFT + at, _TOP - _APART - _STRIP, _LEFT + at + each, _TOP - _APART, fill))
    every = 1 if count <= _RULED else -(-count // 8)
    rules: list[tuple[Point, Point]] = []
    for at in (row * each for row in range(every, count, every)):
        rules.append(((_LEFT + at, _TOP), (_LEFT + at, _TOP + _SIDE)))
        rules.append(((_LEFT, _TOP + at), (_LEFT + _SIDE, _TOP + at)))
    marks.append(Lines(tuple(rules), opacity=0.14))
    most = max((size for row in cells.rows for size in row), default=0)
    longest = max((bytes_text(size) for row in cells.rows for size in row if size), key=len, default="")
    # Where all numbers fit, squares fill their cells and say their bytes; where not, they say them by their size.
    written = fit_words(longest, each, each)
    numbers: list[Mark] = []
    for row, sizes in enumerate(cells.rows):
        for column, size in enumerate(sizes):
            if size:
                half = (1.0 if written else max(_LEAST, math.sqrt(size / most))) * (each - min(1.0, each / 12)) / 2
                x, y, words = _LEFT + (column + 0.5) * each, _TOP + (row + 0.5) * each, bytes_text(size)
                title = f"{names[row]} to {names[column]}: {words}"
                marks.append(box_area(x - half, y - half, x + half, y + half, fills[row], title))
                if written >= LEGIBLE:
                    numbers.append(Words(x, y, words, min(written, SMALL), colour=ink_on(fills[row])))
    marks += numbers
    marks.append(Words(_LEFT + _SIDE / 2, 10, "receiver", NORMAL - 1))
    marks.append(Words(12, _TOP + _SIDE / 2, "sender", NORMAL - 1, turned=True))
    every = 1 if count <= _LABELLED else -(-count // 8)
    for row in range(0, count, every):
        first, middle = names[row].partition("-")[0], (row + 0.5) * each
        marks.append(Words(_LEFT + middle, _TOP - _APART - _STRIP - 9, names[row] if every == 1 else first))
        marks.append(Words(_LEFT - _APART - _STRIP - 5, _TOP + middle, first, anchor="end"))
    sums = "; ".join(cells.notes)
    caption = f"{sums[0].upper()}{sums[1:]}."
    if most:
        larger = "" if written else " The larger a square, the more bytes."
        caption = f"Rows send, columns receive; the colours are those of the tiles.{larger} {caption}"
    size = _LEFT + _SIDE + _EDGE, _TOP + _SIDE + _EDGE
    spoken = f"bytes that each device sends to each other one; {sums}"
    return Scene(*size, tuple(marks), "bytes from device to device", caption, spoken)


class TrafficCells(NamedTuple):
    """Bytes by sender (down) and receiver (across), the devices that share each row, and the sums in words."""

    groups: list[list[int]]
    rows: list[list[int]]
    notes: list[str]


def group_traffic(plan: Plan, most: int) -> TrafficCells:
    """The traffic of all steps of a plan together, in at most `most` rows, which equally many devices share.

    Raises `ReshardError` for more devices or transfers than can be counted one by one.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2)
    >>> cells = group_traffic(plan(Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)), 64)
    >>> cells.rows, cells.notes
    ([[0, 16], [16, 0]], ['worst device: 0 receives 16 B, as planned', 'all devices together: 32 B'])
    """
    size = plan.source.mesh.size + (plan.target.mesh.size if plan.crosses else 0)
    if size > MOST_DEVICES:
        raise ReshardError(
            f"{size} devices on mesh {meshes_text(plan.source, plan.target)} are too many for a matrix of who sends to "
            f"whom (at most {MOST_DEVICES}); draw the same plan on smaller axes, or use draw('memory')"
        )
    if size * plan.launches > MOST_TRANSFERS:
        raise ReshardError(
            f"{plan.launches} launches on {size} devices are too many to count one by one (at most "
            f"{MOST_TRANSFERS // size} on that many devices); plan with a larger budget, or use draw('memory')"
        )
    traffic = program_traffic(lower_plan(plan))
    devices = sorted(traffic.devices)
    together = next(n for n in range(1, len(devices) + 1) if len(devices) % n == 0 and len(devices) // n <= most)
    groups = [devices[at : at + together] for at in range(0, len(devices), together)]
    row_of = {device: row for row, group in enumerate(groups) for device in group}
    counts = [[0] * len(groups) for _ in groups]
    for (sender, receiver), count in traffic.elements.items():
        counts[row_of[sender]][row_of[receiver]] += count
    rows = [[traffic.nbytes(count) for count in row] for row in counts]
    if not traffic.elements:
        return TrafficCells(groups, rows, ["nothing moves"])
    worst, planned = traffic.busiest_receiver, plan.received_bytes
    received = traffic.received[worst]
    beside = ", as planned" if received == planned else f" of the {bytes_text(planned)} planned"
    notes = [
        f"worst device: {worst} receives {bytes_text(received)}{beside}",
        f"all devices together: {bytes_text(traffic.nbytes(sum(traffic.elements.values())))}",
    ]
    if together > 1:
        notes.append(f"each cell: {together} x {together} devices, their sum")
    return TrafficCells(groups, rows, notes)

"""Who sends how many bytes to whom in all steps of a plan, as the rows and columns that every picture of it has.

f32[{x}4, 4] -> f32[16, {x}1] on <x=4>      receiver   0   1   2   3
                                   sender 0                16  16  16      bytes; 16 B each, 48 B to every device
                                          1            16      16  16
                                          ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from reshard.errors import ReshardError
from reshard.lower import lower_plan
from reshard.lower.traffic import TrafficMatrix, traffic
from reshard.show.headings import meshes_text
from reshard.types.plan import Plan
from reshard.types.units import bytes_text

MOST_DEVICES = 512
MOST_TRANSFERS = 1 << 18


@dataclass(frozen=True)
class TrafficCells:
    """Bytes by sender (down) and receiver (across), in at most `most` rows, which neighbouring devices share.

    Raises `ReshardError` for more devices or transfers than can be counted one by one.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2)
    >>> cells = TrafficCells(plan(Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)), 64)
    >>> cells.rows, cells.notes
    ([[0, 16], [16, 0]], ['worst device: 0 receives 16 B, as planned', 'all devices together: 32 B'])
    """

    plan: Plan
    most: int

    @cached_property
    def traffic(self) -> TrafficMatrix:
        """The traffic of all steps together."""
        return traffic_of(self.plan)

    @cached_property
    def devices(self) -> list[int]:
        """All device ids, ascending."""
        return sorted(self.traffic.devices)

    @cached_property
    def together(self) -> int:
        """The devices that share a row."""
        return together(len(self.devices), self.most)

    @cached_property
    def groups(self) -> list[list[int]]:
        """The devices of each row, which are also those of the column of the same number."""
        return [self.devices[at : at + self.together] for at in range(0, len(self.devices), self.together)]

    @cached_property
    def rows(self) -> list[list[int]]:
        """The bytes, row by row."""
        place = {device: row for row, group in enumerate(self.groups) for device in group}
        cells = [[0] * len(self.groups) for _ in self.groups]
        for (sender, receiver), count in self.traffic.elements.items():
            cells[place[sender]][place[receiver]] += count
        return [[self.traffic.nbytes(count) for count in row] for row in cells]

    @property
    def notes(self) -> list[str]:
        """The sums, beside what the plan predicts."""
        return list(self._notes())

    def _notes(self) -> Iterator[str]:
        received = self.traffic.received
        if not self.traffic.elements:
            yield "nothing moves"
            return
        worst = self.traffic.busiest_receiver
        yield f"worst device: {worst} receives {bytes_text(received[worst])}{self._predicted(received[worst])}"
        yield f"all devices together: {bytes_text(self.traffic.nbytes(sum(self.traffic.elements.values())))}"
        if self.together > 1:
            yield f"each cell: {self.together} x {self.together} devices, their sum"

    def _predicted(self, worst: int) -> str:
        planned = self.plan.received_bytes
        return ", as planned" if worst == planned else f" of the {bytes_text(planned)} planned"


def traffic_of(plan: Plan) -> TrafficMatrix:
    """The traffic of all steps of a plan together.

    Raises `ReshardError` for more devices or transfers than can be counted one by one.
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
    return traffic(lower_plan(plan))


def together(devices: int, most: int) -> int:
    """The smallest number of devices that have to share a row, so that there are at most `most` rows.

    >>> together(256, 256), together(512, 256), together(2 * 257, 256)
    (1, 2, 257)
    """
    return next(size for size in range(1, devices + 1) if devices % size == 0 and devices // size <= most)


def span(devices: Sequence[int]) -> str:
    """The devices of a row in words.

    >>> span([3]), span([4, 5, 6, 7])
    ('3', '4-7')
    """
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"

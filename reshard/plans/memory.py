"""What is live on each device while the batches of a plan run one after another.

    w: f32[{x}4, 8] -> f32[16, 8]      source 128 B, target 512 B      b: f32[{x}2] -> f32[8]      8 B and 32 B

    at first           w's and b's sources                             136 B
    batch 1, w         both sources, w's target                        648 B
    batch 2, b         both sources, both targets                      680 B      with donation 512 + 8 + 32 B

Sources and targets may be on different devices, so the figures are kept for each kind of device: those that belong to
the same meshes. On one set of devices there is one kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

Bytes = tuple[int, ...]
"""Bytes on a device of each kind."""


class Footprint(NamedTuple):
    """What a batch needs of a device's memory: its sources at first, the most while it runs, and what it leaves."""

    before: Bytes
    during: Bytes
    after: Bytes


class DeviceKinds:
    """The kinds of devices among some meshes, by the meshes that they belong to.

    >>> trainer, server = Mesh(x=4), Mesh({"y": 4}, device_ids=[2, 3, 4, 5])
    >>> kinds = DeviceKinds([trainer, server])
    >>> kinds.count, kinds.of(trainer), kinds.of(server)
    (3, (1, 1, 0), (0, 1, 1))
    """

    def __init__(self, meshes: Iterable[Mesh]) -> None:
        sets = dict.fromkeys(map(_set_of, meshes))
        # On one set of devices there is one kind, and no device is listed.
        several = sets if len(sets) > 1 else ()
        self._members = {each: frozenset(range(each) if isinstance(each, int) else each) for each in several}
        kinds = dict.fromkeys(
            tuple(device in members for members in self._members.values())
            for device in sorted(frozenset[int]().union(*self._members.values()))
        )
        self._in = {each: tuple(int(kind[at]) for kind in kinds) for at, each in enumerate(sets)}

    @cached_property
    def count(self) -> int:
        """How many kinds there are."""
        return len(next(iter(self._in.values()), ())) or 1

    def of(self, mesh: Mesh) -> Bytes:
        """For each kind, 1 if its devices belong to a mesh, else 0."""
        return self._in.get(_set_of(mesh)) or (1,)

    def tile(self, layout: Layout) -> Bytes:
        """The bytes of a layout's tile on the devices of each kind."""
        return tuple(layout.tile_bytes * held for held in self.of(layout.mesh))

    def total(self, each: Iterable[Bytes]) -> Bytes:
        """The sum, kind by kind."""
        return tuple(map(sum, zip((0,) * self.count, *each, strict=True)))


def _set_of(mesh: Mesh) -> tuple[int, ...] | int:
    """What meshes with the same devices have in common."""
    ids = mesh.device_ids
    if ids is None or set(ids) == set(range(mesh.size)):
        return mesh.size
    return tuple(sorted(ids))


def find_peaks(footprints: Sequence[Footprint], beside: Bytes | None = None) -> Bytes:
    """The most bytes live on a device of each kind while batches with these footprints run in this order.

    `beside` is what else is live all the time.

    >>> find_peaks([Footprint((8,), (40,), (40,)), Footprint((128,), (640,), (640,))])
    (680,)
    """
    live = [sum(each) for each in zip(*(footprint.before for footprint in footprints), strict=True)] or [0]
    if beside is not None:
        live = [one + other for one, other in zip(live, beside, strict=True)]
    most = list(live)
    for before, during, after in footprints:
        for kind in range(len(live)):
            live[kind] -= before[kind]
            most[kind] = max(most[kind], live[kind] + during[kind])
            live[kind] += after[kind]
    return tuple(most)

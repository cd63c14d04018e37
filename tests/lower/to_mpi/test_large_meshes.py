"""Schedules of single ranks among thousands: sampled elements, from the definition of both layouts.

The owners and places of an element are worked out here from the digits alone, one element at a time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

import reshard as rs
from reshard.geometry.blocks import Block
from reshard.lower.to_mpi import StepMessages, list_fetches, list_served, schedule_device
from reshard.types import Layout, Mesh
from reshard.types.layout import Dim
from reshard.types.mesh import SubAxis

LINE, GRID, CYCLIC = Mesh(x=4096), Mesh(x=64, y=64), Mesh(a=64, b=2, c=32)
PAIRS = {
    "slabs": (LINE, "[{x}1, 4096, 64]", "[4096, {x}1, 64]"),
    "slabs, of prime sizes": (LINE, "[{x}2/5003, 97]", "[5003, {x}1/97]"),
    "pencils": (GRID, "[{x}64, {y}64, 4096]", "[{x}64, 4096, {y}64]"),
    "another grid": (GRID, "[{x}1024, {y}1024]", "[{x}{y}16, 65536]"),
    "another grid, of prime sizes": (GRID, "[{x}{y}3/10007, 4099]", "[{x}157/10007, {y}65/4099]"),
    "other blocks": (CYCLIC, "[16{a}64/65536, 16{b}{c}64/65536]", "[6{a}{b}96/65536, 22{c}96/65536]"),
    "copies on half the axes": (GRID, "[{x}3/131, 64]", "[2{y}2/131, {x}1]"),
}


def coordinate(mesh: Mesh, device: int, axis: SubAxis) -> int:
    names = list(mesh.axes)
    below = math.prod(mesh.axes[name] for name in names[names.index(axis.axis) + 1 :])
    along = device // below % mesh.axes[axis.axis]
    return along // (mesh.axes[axis.axis] // (axis.pre * axis.size)) % axis.size


def global_index(dim: Dim, mesh: Mesh, device: int, local: int) -> int:
    index, place = 0, 1
    for radix, axis in reversed(dim.digits):
        local, digit = divmod(local, radix) if axis is None else (local, coordinate(mesh, device, axis))
        index, place = index + digit * place, place * radix
    return index


def global_indices(layout: Layout, device: int, local: Sequence[int]) -> tuple[int, ...]:
    return tuple(global_index(dim, layout.mesh, device, at) for dim, at in zip(layout.dims, local, strict=True))


def source_of(block: Block, source: Layout, target: Layout, wanted: Sequence[int]) -> tuple[int, ...] | None:
    """The place at the source of the element at a place of the target; None if the block does not have it."""
    src, rest = block.src, int(np.ravel_multi_index(wanted, target.tile_shape)) - block.dst
    for axis in sorted(block.axes, key=lambda a: -a.dst):
        steps = min(max(rest, 0) // axis.dst, axis.extent - 1)
        rest, src = rest - steps * axis.dst, src + steps * axis.src
    return tuple(map(int, np.unravel_index(src, source.tile_shape))) if rest == 0 else None


def samples(target: Layout, device: int, choose: random.Random) -> Iterator[tuple[int, ...]]:
    """Places of true elements in a device's tile."""
    for _ in range(8):
        local = tuple(choose.randrange(extent) for extent in target.tile_shape)
        if all(at < size for at, size in zip(global_indices(target, device, local), target.shape, strict=True)):
            yield local


Listed = Mapping[int, tuple[Block, ...]]
"""The blocks by the device at the other end."""


def by_fetches(source: Layout, target: Layout, device: int) -> tuple[Listed, Listed]:
    """What a device receives, and what it sends, if it all goes straight."""
    nodes = [rank // 64 for rank in range(source.mesh.size)]
    return list_fetches(source, target, device, nodes), list_served(source, target, device, nodes)


def by_plan(source: Layout, target: Layout, device: int) -> tuple[Listed, Listed]:
    (step,) = schedule_device(rs.plan(source, target), device).steps
    assert isinstance(step, StepMessages)
    received = {turn.receive.peer: turn.receive.blocks for turn in step.turns if turn.receive}
    sent = {turn.send.peer: turn.send.blocks for turn in step.turns if turn.send}
    return received | {device: step.local}, sent | {device: step.local}


@pytest.mark.fast(2)
@pytest.mark.parametrize("listing", [by_fetches, by_plan], ids=["straight", "the plan's step"])
@pytest.mark.parametrize("name", PAIRS)
def test_sampled_elements_come_from_a_device_that_has_them(name: str, listing) -> None:
    mesh, before, after = PAIRS[name]
    source, target = Layout.parse(f"f32{before}", mesh), Layout.parse(f"f32{after}", mesh)
    choose = random.Random(name)
    for device in (4095 // 7, choose.randrange(4096)):
        received, _ = listing(source, target, device)
        givers: dict[int, tuple[Block, ...]] = {}
        for local in samples(target, device, choose):
            places = [
                (peer, at)
                for peer, blocks in received.items()
                for block in blocks
                if (at := source_of(block, source, target, local)) is not None
            ]
            ((giver, at),) = places
            assert global_indices(source, giver, at) == global_indices(target, device, local)
            givers[giver] = received[giver]
        for giver in list(givers)[:2]:
            assert listing(source, target, giver)[1][device] == givers[giver]

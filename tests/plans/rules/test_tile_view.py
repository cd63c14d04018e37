"""Views of a tile: their blocks are what each member of the group sends or receives, in its order."""

from __future__ import annotations

import numpy as np
import pytest

from reshard.geometry.refine import Refinement, refine
from reshard.plans.rules.tile_view import TileView, after, before, gather_order, scatter_order
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from tests.oracle import tiles_of
from tests.plans.rules.steps import derived


def refined(operand: Layout, result: Layout) -> Refinement:
    refinement = refine(operand, result)
    assert refinement is not None
    return refinement


def blocks(view: TileView, tile: np.ndarray) -> np.ndarray:
    """The blocks of an unpadded tile, flat, in group order."""
    digits = tile.reshape(view.digits)
    rest = [axis for axis in range(digits.ndim) if axis not in view.blocks]
    return digits.transpose([*view.blocks, *rest]).reshape(view.count, -1)


def member(layout: Layout, device: int, order: tuple[int, ...], sizes: list[int]) -> int:
    """The number of a device in its group, counted in the order of the strides."""
    number, position = 0, layout.mesh.position(device)
    for stride, size in zip(order, sizes, strict=True):
        number = number * size + position // stride % size
    return number


@pytest.mark.parametrize(("kind", "leaves"), [("all_gather", False), ("all_to_all", False), ("all_to_all", True)])
def test_what_a_member_is_sent_or_sends_is_its_block(kind: str, leaves: bool):
    """For even pairs: of the elements that it shares with member m, a device has exactly those of block m: of the
    result as they arrive, of the operand as they leave."""
    seen = 0
    for operand, result in derived(kind, count=40):
        if not (operand.even and result.even and operand.tile_bytes) or operand.partial:
            continue
        seen += 1
        r = refined(operand, result)
        order = gather_order(r) if kind == "all_gather" else scatter_order(r)
        here, there = (operand, result) if leaves else (result, operand)
        view = before(operand, r, order) if leaves else after(result, r, order)
        radices = {digit.dst: digit.radix for digit in r.sliced} if leaves else {d.src: d.radix for d in r.gathered}
        sizes = [radices[stride] for stride in order]
        others = tiles_of(there)
        for device, tile in tiles_of(here).items():
            own = blocks(view, tile)
            for other, held in others.items():
                common = set(held.reshape(-1).tolist()) & set(tile.reshape(-1).tolist())
                if common:
                    number = member(there, other, order, sizes)
                    assert set(own[number].tolist()) == common, f"{other}, {device} of {operand} -> {result}"
    assert seen > 10


def test_a_padded_view_is_never_in_place():
    mesh = Mesh(x=4)
    operand, result = Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[10]", mesh)
    view = after(result, refined(operand, result), (1,))
    assert (view.tile, view.padded, view.digits, view.blocks) == ((10,), (12,), (4, 3), (0,))
    assert (view.elements, view.count, view.block_shape, view.in_place) == (12, 4, (3,), False)


def test_a_block_is_a_range_in_every_run():
    seen = 0
    for operand, result in derived("all_to_all", seed=4, count=30):
        r = refined(operand, result)
        view = before(operand, r, scatter_order(r))
        if not view.elements:
            continue
        for run in view.runs:
            radices = [view.digits[axis] for axis in run]
            flat = np.arange(int(np.prod(radices))).reshape(radices)
            here = tuple(0 if axis in view.blocks else slice(None) for axis in run)
            indices = flat[here].reshape(-1)
            assert indices.tolist() == list(range(indices[0], indices[0] + len(indices)))
            seen += len(run) > 1
    assert seen > 5

"""An exchange of tiles whose dims are in another order, as where another dim is minor in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from reshard.geometry.blocks import Axis, Block
from reshard.lower.exchange import Exchange, Transfer
from reshard.plans.rules.tile_view import TileView


def find_box_extents(step: Exchange) -> list[int] | None:
    """The extents by dim of the slices of all messages, or None if they differ."""
    sliced = step.sliced
    boxes = (box for turn in (sliced.local, *sliced.rounds) for t in turn for box in t.boxes)
    forms = {_dim_extents(step.send, extents) for extents in {box.form[0] for box in boxes}}
    return list(forms.pop()) if len(forms) == 1 else None


def _dim_extents(view: TileView, extents: Sequence[int]) -> tuple[int, ...]:
    by_axis = list(zip(view.dims, extents, strict=True))
    return tuple(math.prod(extent for dim, extent in by_axis if dim == of) for of in range(len(view.tile)))


def reorder_exchange(step: Exchange, order: Sequence[int]) -> Exchange:
    """The exchange of tiles of which dim n is dim `order[n]`.

    >>> from reshard.lower import lower_plan
    >>> from reshard.types import Layout, Mesh
    >>> from reshard.plans.plan import StepSpec, chain
    >>> ends = [Layout.parse(text, Mesh(x=2, y=2)) for text in ("f32[{x}2, 6]", "f32[4, {y}3]")]
    >>> step = lower_plan(chain(*ends, [StepSpec("exchange", ends[1])])).instructions[0]
    >>> step.receive.tile, reorder_exchange(step, (1, 0)).receive.tile
    ((4, 3), (3, 4))
    """
    send, receive = _DigitsInOrder(step.send, order), _DigitsInOrder(step.receive, order)

    def moved(turn: Sequence[Transfer]) -> tuple[Transfer, ...]:
        return tuple(
            t._replace(blocks=tuple(_reorder_block(each, receive if t.relayed else send, receive) for each in t.blocks))
            for t in turn
        )

    return replace(
        step, send=send.view, receive=receive.view, local=moved(step.local), rounds=tuple(map(moved, step.rounds))
    )


class _DigitsInOrder:
    """A tile before and after its dims change places: how far apart values of each digit are in either."""

    def __init__(self, view: TileView, order: Sequence[int]) -> None:
        axes = sorted(range(len(view.digits)), key=lambda axis: order.index(view.dims[axis]))
        self.view = TileView(
            tuple(view.tile[dim] for dim in order),
            tuple(view.padded[dim] for dim in order),
            tuple(view.digits[axis] for axis in axes),
            tuple(order.index(view.dims[axis]) for axis in axes),
            tuple(axes.index(axis) for axis in view.blocks),
        )
        self._digits = view.digits
        self._old = [math.prod(view.digits[at + 1 :]) for at in range(len(view.digits))]
        new = {axis: math.prod(self.view.digits[at + 1 :]) for at, axis in enumerate(axes)}
        self._new = [new[axis] for axis in range(len(axes))]

    def offset(self, offset: int) -> int:
        """Where an element of the tile comes to lie."""
        each = zip(self._old, self._new, self._digits, strict=True)
        return sum(offset // old % radix * new for old, new, radix in each)

    def stride(self, stride: int) -> int:
        """How far apart elements come to lie that were so far apart along one digit."""
        each = zip(self._old, self._new, self._digits, strict=True)
        return next(stride // old * new for old, new, radix in each if old <= stride and radix != 1)


def _reorder_block(block: Block, send: _DigitsInOrder, receive: _DigitsInOrder) -> Block:
    axes = [Axis(n, send.stride(src), receive.stride(dst)) for n, src, dst in block.axes if n != 1]
    # Slices are read and written in the order of the dims.
    axes.sort(key=lambda axis: axis.src, reverse=True)
    return Block(send.offset(block.src), receive.offset(block.dst), tuple(axes))

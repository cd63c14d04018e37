"""An exchange of tiles whose dims are in another order, as where another dim is minor in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from reshard.lower.exchange import Box, Transfer
from reshard.lower.program import Exchange
from reshard.plans.rules.tile_view import TileView


def box_extents(step: Exchange) -> list[int] | None:
    """The extents by dim of the boxes of all messages, or None if they differ."""
    boxes = (box for turn in (step.local, *step.rounds) for t in turn for box in t.boxes)
    forms = {_extents(step.send, extents) for extents in {box.form[0] for box in boxes}}
    return list(forms.pop()) if len(forms) == 1 else None


def _extents(view: TileView, extents: Sequence[int]) -> tuple[int, ...]:
    by_axis = list(zip(view.dims, extents, strict=True))
    return tuple(math.prod(extent for dim, extent in by_axis if dim == of) for of in range(len(view.tile)))


def in_order(step: Exchange, order: Sequence[int]) -> Exchange:
    """The exchange of tiles of which dim n is dim `order[n]`.

    >>> from reshard.lower import lower_plan
    >>> from reshard.types import Layout, Mesh
    >>> from reshard.plans.plan import StepSpec, chain
    >>> ends = [Layout.parse(text, Mesh(x=2, y=2)) for text in ("f32[{x}2, 6]", "f32[4, {y}3]")]
    >>> step = lower_plan(chain(*ends, [StepSpec("exchange", ends[1])])).instructions[0]
    >>> step.receive.tile, in_order(step, (1, 0)).receive.tile
    ((4, 3), (3, 4))
    """
    send, receive = _axes(step.send, order), _axes(step.receive, order)

    def moved(turn: Sequence[Transfer]) -> tuple[Transfer, ...]:
        return tuple(t._replace(boxes=tuple(_box(box, send, receive) for box in t.boxes)) for t in turn)

    return replace(
        step,
        send=_view(step.send, order, send),
        receive=_view(step.receive, order, receive),
        local=moved(step.local),
        rounds=tuple(map(moved, step.rounds)),
    )


def _axes(view: TileView, order: Sequence[int]) -> list[int]:
    """The digit axes of a view, those of the first dim in order first."""
    return sorted(range(len(view.digits)), key=lambda axis: order.index(view.dims[axis]))


def _box(box: Box, send: Sequence[int], receive: Sequence[int]) -> Box:
    return Box(tuple(box.src[axis] for axis in send), tuple(box.dst[axis] for axis in receive))


def _view(view: TileView, order: Sequence[int], axes: Sequence[int]) -> TileView:
    return TileView(
        tuple(view.tile[dim] for dim in order),
        tuple(view.padded[dim] for dim in order),
        tuple(view.digits[axis] for axis in axes),
        tuple(order.index(view.dims[axis]) for axis in axes),
        tuple(axes.index(axis) for axis in view.blocks),
    )

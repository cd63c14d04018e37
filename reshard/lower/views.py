"""The steps of a move with a view, as plain data.

    reorder          every tile reshaped, transposed, reshaped: the same elements in another order; often no copy at all
    take, put        part of every tile; a part written into the tile that is there
    cast             every tile in another dtype
    view_exchange    local copies, then rounds of messages made of strided boxes

A strided box has a place in both flat tiles, and for each atom an extent and a stride in either, so that a runtime
needs no view: the elements are those of two nested loops over the same extents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from reshard.geometry.blocks import Axis, Block
from reshard.geometry.view_boxes import StridedBox
from reshard.geometry.view_messages import ViewMessage, chunk_cap, view_messages
from reshard.lower.colouring import colouring
from reshard.plans.plan import Step
from reshard.plans.rules.view import TileOrder, tile_order
from reshard.types.layout import Layout
from reshard.types.view import View

Spans = tuple[tuple[int, int], ...]
"""(start, extent) along every axis of a tile."""


@dataclass(frozen=True)
class Reorder:
    """Every tile is reshaped to digits, transposed and reshaped to the result's shape."""

    order: TileOrder


@dataclass(frozen=True)
class TakePart:
    """Every device keeps these spans of its tile."""

    spans: Spans


@dataclass(frozen=True)
class PutPart:
    """Every device writes its tile over these spans of the target's tile that is there."""

    spans: Spans


@dataclass(frozen=True)
class CastTiles:
    """Every tile is cast."""

    dtype: str


@dataclass(frozen=True)
class StridedTransfer:
    """What one device sends to another in one message."""

    sender: int
    receiver: int
    boxes: tuple[StridedBox, ...]
    relayed: ClassVar[bool] = False

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The same elements as blocks."""
        return tuple(
            Block(box.src, box.dst, tuple(map(Axis, box.extents, box.src_strides, box.dst_strides)))
            for box in self.boxes
        )

    @cached_property
    def elements(self) -> int:
        """Elements in the message."""
        return sum(box.elements for box in self.boxes)

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """The extents of its boxes, whatever their places and strides."""
        return tuple(box.extents for box in self.boxes)


@dataclass(frozen=True)
class ViewExchange:
    """Boxes go from flat tiles to flat tiles on `receivers`; `staged` if messages need buffers, `fills` if the target's
    tile is there already and only part of it is written."""

    receivers: tuple[int, ...]
    local: tuple[StridedTransfer, ...]
    rounds: tuple[tuple[StridedTransfer, ...], ...]
    staged: bool
    fills: bool


ViewInstruction = Reorder | TakePart | PutPart | CastTiles | ViewExchange

VIEW_INSTRUCTIONS = (Reorder, TakePart, PutPart, CastTiles, ViewExchange)


def view_instruction(step: Step, device: int | None = None) -> ViewInstruction:
    """The instruction of a step that changes indices or the dtype.

    Given a `device`, an exchange lists only the messages of that one.

    >>> from reshard.types import Mesh
    >>> layouts = [Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}4]", "bf16[{x}4]")]
    >>> view_instruction(Step("cast", *layouts))
    CastTiles(dtype='bfloat16')
    """
    if step.kind == "cast":
        return CastTiles(step.result.dtype)
    view = step.mode.view or View.identity(step.operand.shape)
    if step.kind == "view":
        return Reorder(tile_order(step.operand, step.result, view))
    if step.kind == "take":
        return TakePart(_spans(step.operand, view))
    if step.kind == "put":
        return PutPart(_spans(step.result, view))
    return _exchange(step, view, device)


def aliases(instruction: object) -> bool:
    """Whether an instruction leaves every tile's memory as it is."""
    return isinstance(instruction, Reorder) and instruction.order.aliases


def fills(instruction: object) -> bool:
    """Whether an instruction writes into the target's tile that is there already."""
    return isinstance(instruction, PutPart) or (isinstance(instruction, ViewExchange) and instruction.fills)


def last_dtype(instructions: Sequence[object]) -> str | None:
    """The dtype of the last cast; None without one.

    >>> last_dtype([CastTiles("bfloat16")])
    'bfloat16'
    """
    return next((each.dtype for each in reversed(instructions) if isinstance(each, CastTiles)), None)


def _spans(layout: Layout, view: View) -> Spans:
    """The windows of the dims of which part moves, the whole tile along the others."""
    starts = [window.start if window is not None else 0 for window in (a.taken or a.into for a in view.atoms)]
    whole = [atom.taken is None and atom.into is None for atom in view.atoms]
    extents = [
        tile if all_of else atom.size for tile, all_of, atom in zip(layout.tile_shape, whole, view.atoms, strict=True)
    ]
    return tuple(zip(starts, extents, strict=True))


def _exchange(step: Step, view: View, device: int | None) -> ViewExchange:
    messages = [m for m in view_messages(step.operand, step.result, view) if m.elements]
    crossing = [m for m in messages if m.sender != m.receiver]
    kept = [m for m in messages if m.sender == m.receiver]
    cap = chunk_cap(crossing, step.mode.chunk)
    pieces = [piece for message in crossing for piece in _pieces(message, cap, device)]
    turns = colouring([(sender, receiver) for sender, receiver, _ in pieces])
    return ViewExchange(
        step.result.mesh.devices,
        _listed((piece for message in kept for piece in _pieces(message, None, device)), device),
        tuple(_listed((pieces[at] for at in turn), device) for turn in turns),
        step.cost.scratch > 0,
        view.into,
    )


_Piece = tuple[int, int, tuple[StridedBox, ...]]


def _pieces(message: ViewMessage, cap: int | None, device: int | None) -> Iterator[_Piece]:
    """A message whole, or box by box in boxes of at most `cap` elements; without boxes for other ranks'."""
    mine = device is None or device in (message.sender, message.receiver)
    ends = message.sender, message.receiver
    if cap is not None:
        yield from ((*ends, (piece,)) for box in message.boxes for piece in box.cut(cap))
    else:
        yield (*ends, tuple(message.boxes) if mine else ())


def _listed(pieces: Iterable[_Piece], device: int | None) -> tuple[StridedTransfer, ...]:
    return tuple(StridedTransfer(*piece) for piece in pieces if device is None or device in piece[:2])

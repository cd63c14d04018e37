"""The steps of a move with a view that send nothing, as plain data; an exchange through a view is one like others.

reorder          every tile reshaped, transposed, reshaped: the same elements in another order; often no copy at all
take, put        part of every tile; a part written into the tile that is there
cast             every tile in another dtype
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reshard.lower.exchange import Exchange
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


ViewInstruction = Reorder | TakePart | PutPart | CastTiles

VIEW_INSTRUCTIONS = (Reorder, TakePart, PutPart, CastTiles)


def view_instruction(step: Step) -> ViewInstruction:
    """The instruction of a step that changes indices or the dtype, and sends nothing.

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
        return TakePart(_part_spans(step.operand, view))
    return PutPart(_part_spans(step.result, view))


def is_alias(instruction: object) -> bool:
    """Whether an instruction leaves every tile's memory as it is."""
    return isinstance(instruction, Reorder) and instruction.order.aliases


def is_filling(instruction: object) -> bool:
    """Whether an instruction writes into the target's tile that is there already."""
    return isinstance(instruction, PutPart) or (isinstance(instruction, Exchange) and instruction.fills)


def last_dtype(instructions: Sequence[object]) -> str | None:
    """The dtype of the last cast; None without one.

    >>> last_dtype([CastTiles("bfloat16")])
    'bfloat16'
    """
    return next((each.dtype for each in reversed(instructions) if isinstance(each, CastTiles)), None)


def _part_spans(layout: Layout, view: View) -> Spans:
    """The windows of the dims of which part moves, the whole tile along the others."""
    starts = [window.start if window is not None else 0 for window in (a.taken or a.into for a in view.atoms)]
    whole = [atom.taken is None and atom.into is None for atom in view.atoms]
    extents = [
        tile if all_of else atom.size for tile, all_of, atom in zip(layout.tile_shape, whole, view.atoms, strict=True)
    ]
    return tuple(zip(starts, extents, strict=True))

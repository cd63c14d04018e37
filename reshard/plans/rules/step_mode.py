"""What a step costs, the mode it runs in, and what the rules share: the refusal and two requirements."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from reshard.errors import StepError
from reshard.geometry.refine import Refinement, refine
from reshard.types import dtypes
from reshard.types.index_set import Holding
from reshard.types.layout import Layout
from reshard.types.view import View


class Cost(NamedTuple):
    """The cost of a step on the busiest device: bytes received, collective calls, bytes of scratch memory."""

    received: int
    launches: int
    scratch: int


class StepMode(NamedTuple):
    """How a step runs: at once, or in `parts` parts, one after the other; with `overlap`, each is copied into the
    result while the next one is on its way, which takes the memory of two.

    For an exchange, `chunk` limits the elements of one message (None: no limit), `in_place` writes the result over the
    operand, and `relay` sends elements to other devices in two turns, the second between devices of the result; if it
    `gathers`, the second is one launch, in which the devices that need the same gather it.
    `view` is that of the steps that change indices (`rules.view_steps`); a part that it fills is of the tile that is
    there, or, if `fresh`, of a new one of which nothing else is read. Beside a `holding`, an exchange writes into tiles
    of the result that are there, and leaves what they hold and is not stale.
    """

    chunk: int | None = None
    in_place: bool = False
    parts: int = 1
    relay: bool = False
    view: View | None = None
    overlap: bool = False
    holding: Holding | None = None
    fresh: bool = False
    gathers: bool = False

    @property
    def fills(self) -> bool:
        """Whether the step writes into tiles of the result that are there already, and whose other elements stay."""
        return self.holding is not None or (self.view is not None and self.view.into and not self.fresh)

    def __repr__(self) -> str:
        """The options; relays, a view and an overlap only where there are some."""
        more = ", relay=True" if self.relay else ""
        more += "" if self.view is None else f", view={self.view!r}"
        more += ", overlap=True" if self.overlap else ""
        more += "" if self.holding is None else f", holding={self.holding!r}"
        more += ", fresh=True" if self.fresh else ""
        more += ", gathers=True" if self.gathers else ""
        return f"StepMode(chunk={self.chunk!r}, in_place={self.in_place!r}, parts={self.parts!r}{more})"


FREE = Cost(0, 0, 0)
PLAIN = StepMode()


def wire_layout(operand: Layout, result: Layout) -> Layout:
    """The operand with the dtype in which its elements travel to a result: the narrower of both dtypes.

    What narrows is cast before it is sent, all else after it has arrived, also between dtypes of one size.

    >>> from reshard.types import Mesh
    >>> wide, narrow, whole = (Layout.parse(f"{dtype}[{{x}}4]", Mesh(x=2)) for dtype in ("f32", "bf16", "s32"))
    >>> [wire_layout(*ends).dtype for ends in ((wide, narrow), (narrow, wide), (wide, whole))]
    ['bfloat16', 'bfloat16', 'float32']
    """
    return replace(operand, dtype=result.dtype) if dtypes.bits(result.dtype) < dtypes.bits(operand.dtype) else operand


def refuse_step(kind: str, operand: Layout, result: Layout, why: str) -> StepError:
    """The error for a step that is not well typed, with global and local shapes and the meshes."""
    meshes = str(operand.mesh) if operand.mesh == result.mesh else f"{operand.mesh} to {result.mesh}"
    return StepError(
        f"{kind}: {operand} -> {result} (global {operand.shape}, tile {operand.tile_shape} -> {result.tile_shape}, "
        f"mesh {meshes}): {why}"
    )


def require_refinement(kind: str, operand: Layout, result: Layout) -> Refinement:
    """The common refinement of the two layouts; without one, only an exchange leads from one to the other."""
    refinement = refine(operand, result)
    if refinement is None:
        raise refuse_step(kind, operand, result, "the two have no common refinement; use an exchange")
    return refinement


def require_same_partial(kind: str, operand: Layout, result: Layout) -> None:
    """Refuses a step that would finish or start a reduction but is not a reduction."""
    if not operand.partial_as(result):
        raise refuse_step(kind, operand, result, "this step reduces nothing; partial sub-axes must stay")

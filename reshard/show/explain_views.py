"""Why the steps of a move with a view are there, in plain words."""

from __future__ import annotations

from reshard.types import dtypes
from reshard.types.move import Move
from reshard.types.plan import Plan, Step
from reshard.types.rules.view import aliases
from reshard.types.units import counted
from reshard.types.view import View


def move_of(plan: Plan) -> Move:
    """The move that a plan makes.

    >>> from reshard.types import Layout, Mesh
    >>> layout = Layout.parse("f32[{x}4]", Mesh(x=2))
    >>> move_of(Plan(layout, layout, ())) == Move(layout, layout)
    True
    """
    casts = plan.source.dtype != plan.target.dtype
    return Move(plan.source, plan.target, plan.view or View.identity(plan.source.shape), cast=casts)


def why_view(step: Step) -> str:
    """Why a view, a part, a cast or an exchange through a view is there.

    >>> from reshard.types import Layout, Mesh
    >>> layouts = [Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}4]", "bf16[{x}4]")]
    >>> why_view(Step("cast", *layouts))
    'every device casts its tile from float32 to bfloat16: what moves after it has 2 times fewer bytes.'
    """
    view = step.mode.view
    match step.kind:
        case "cast":
            return _cast(step)
        case "take":
            return f"only part of the array is wanted ({_parts(view)}), and each tile has all of that dim: it keeps it."
        case "put":
            return f"the elements go into the target's tile that is there ({_parts(view)}); its other parts stay."
        case "view_exchange":
            return (
                f"{view}: digits lie across the view's atoms on both sides, or a part is of a dim that is spread over "
                f"devices, so no collective fits. Boxes go straight to their places, in "
                f"{counted(step.launches, 'round')}, and no device receives more than it needs and lacks."
            )
        case _:
            kept = aliases(step.kind, step.operand, step.result, step.mode)
            cost = "the tile's memory stays as it is" if kept else "the tile is transposed into a new one"
            return f"{view}: every element stays on its device under another index, and {cost}. Nothing is sent."


def _cast(step: Step) -> str:
    before, after = dtypes.bits(step.operand.dtype), dtypes.bits(step.result.dtype)
    what = f"every device casts its tile from {step.operand.dtype} to {step.result.dtype}"
    if after < before:
        return f"{what}: what moves after it has {before // after} times fewer bytes."
    return f"{what}, after all that moves has moved in fewer bytes." if after > before else f"{what}."


def _parts(view: View | None) -> str:
    return "" if view is None else str(view).partition(", ")[2]

"""Why each step of a plan is there, in plain words, and how close the plan comes to its bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from reshard.errors import BudgetError
from reshard.geometry.refine import Refinement, refine
from reshard.geometry.remesh import one_set
from reshard.plans.idle import idle_text
from reshard.plans.plan import Plan, Step
from reshard.plans.rules.collectives import VIEW_RULES
from reshard.plans.rules.cost import PLAIN
from reshard.synth import plan as make_plan
from reshard.types import Dim, Layout, Mesh
from reshard.types.units import bytes_text, counted, listed, seconds_text

if TYPE_CHECKING:
    from rich.console import Console

from reshard.plans.rules.view import aliases
from reshard.types import dtypes
from reshard.types.move import Move
from reshard.types.view import View

_Factor = tuple[int, int]  # (stride, size) of the device positions
_PERMUTE = "the tiles stay whole and only change devices, because before and after deal them out in different orders."


def explain(out: Console, plan: Plan, network: str | None) -> None:
    """Prints a paragraph per step, then one each on bytes, memory and time (for a plan made for `network`)."""
    from reshard.show import terminal  # It needs rich, and the sentences alone do not.

    terminal.paragraph(out, "why these steps", style=terminal.NAME)
    for number, step in enumerate(plan.steps, 1):
        terminal.paragraph(out, f"{step.kind}: {why(step, number == len(plan.steps))}", f"  {number}  ")
    if not plan.steps:
        terminal.paragraph(out, "Source and target have one meaning, so no step is needed.", "  ")
        return
    out.print()
    terminal.paragraph(out, "how good it is", style=terminal.NAME)
    for words in assessed(plan, network):
        terminal.paragraph(out, words, "  -  ")


def assessed(plan: Plan, network: str | None) -> list[str]:
    """How close a plan comes to its bounds: a sentence each on bytes, memory and, for a network, time.

    >>> from reshard.synth import plan
    >>> mesh = Mesh(x=4)
    >>> for words in assessed(plan(Layout.parse("f32[16]", mesh), Layout.parse("f32[{x}4]", mesh)), None):
    ...     print(words)
    Bytes: every device holds all that it needs already, and receives nothing.
    Memory: the peak is 80 B a device, counting source, target and all between. No plan gets by with less.
    """
    sentences = (_bytes(plan, network), _memory(plan, network), _time(plan, network))
    return [words for words in sentences if words]


def why(step: Step, last: bool = True) -> str:
    """Why a step is there, and what it does to which dims; `last` is False for a step that others follow.

    >>> mesh = Mesh(x=4, y=2)
    >>> why(Step("all_gather", Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh)))
    'each device collects the 4 tiles along x, and dim 0 is no longer split over x. It comes last, because ...'
    """
    if step.kind in VIEW_RULES:
        return why_view(step)
    r = refine(step.operand, step.result)
    if step.kind == "exchange":
        return _exchange(step, r)
    if r is None:
        return _PERMUTE
    mesh = step.operand.mesh
    match step.kind:
        case "slice":
            return _slice(r, mesh)
        case "all_gather":
            return _gather(r, mesh, last)
        case "all_to_all":
            return _all_to_all(r, mesh)
        case "split_sum":
            return _split_sum(step, r, mesh)
        case "permute":
            return f"{_PERMUTE} Here, {_changing_hands(step, r)}." if r.swapped else _PERMUTE
        case _:
            return _reduction(step, r, mesh)


def _slice(r: Refinement, mesh: Mesh) -> str:
    axes, times = _axes(mesh, _after(r)), math.prod(d.radix for d in r.sliced)
    return (
        f"each device keeps only its own part of what it already holds, and {_split(r, mesh)}. Nothing is sent: no "
        f"dim was split over {axes} before, so all devices along {axes} hold the same. The tile is {times} times "
        f"smaller from here on."
    )


def _gather(r: Refinement, mesh: Mesh, last: bool) -> str:
    tiles = math.prod(d.radix for d in r.gathered)
    end = (
        f"It comes last, because only here does the tile grow ({tiles} times), to what the target needs."
        if last
        else "It comes before other moves, because few large messages take less time here than many small ones."
    )
    return f"each device collects the {tiles} tiles along {_axes(mesh, _before(r))}, and {_whole(r, mesh)}. {end}"


def _all_to_all(r: Refinement, mesh: Mesh) -> str:
    group = math.prod(d.radix for d in r.gathered)
    return (
        f"{_whole(r, mesh)}; in its place, {_split(r, mesh)}. The pieces stay among the same devices, so one "
        f"collective in groups of {group} does it all: each device keeps 1/{group} of its tile and sends each of "
        f"the others 1/{group}."
    )


def _split_sum(step: Step, r: Refinement, mesh: Mesh) -> str:
    axes = _axes(mesh, sorted(((f.stride, f.size) for f in r.started), reverse=True))
    released = f" and {_whole(r, mesh)}" if r.gathered else ""
    fill = {"sum": "zeros", "product": "ones", "max": "the least value", "min": "the greatest value"}
    return (
        f"the array becomes a {step.result.reduction} along {axes}{released}: each element stays on one device along "
        f"{axes}, and the others have {fill[str(step.result.reduction)]} in its place. Nothing is sent: what a device "
        f"keeps, it holds already."
    )


def _reduction(step: Step, r: Refinement, mesh: Mesh) -> str:
    axes = _axes(mesh, [(f.stride, f.size) for f in r.reduced])
    what = f"the array is still the {step.operand.reduction} of what the devices along {axes} hold."
    if step.kind == "all_reduce":
        return f"{what} They combine it, and each keeps the whole, because no dim is to be split over {axes}."
    return (
        f"{what} They combine it piece by piece, and each keeps only one piece: {_split(r, mesh)}. It comes before "
        f"any move, because afterwards there is less to move; and it receives half of what an all_reduce does."
    )


def _exchange(step: Step, r: Refinement | None) -> str:
    """Why no collective makes this move, and in how many rounds an exchange of boxes does."""
    if not step.launches:
        return "every device holds all that it needs already, and only copies it into place; nothing is sent."
    chunk = step.mode.chunk
    size = "" if chunk is None else f" with messages of at most {counted(chunk, 'element')}, to keep the scratch small"
    relay = " What several devices lack is sent to them in shares, which they pass on to each other." * step.mode.relay
    place = " The result overwrites the source, which is donated." if step.mode.in_place else ""
    return (
        f"{_reason(step, r)} Each device sends every other one just the boxes that it needs, in "
        f"{counted(step.launches, 'round')}{size}; in a round, a device sends to at most one other and receives from "
        f"at most one.{relay}{place}"
    )


def _reason(step: Step, r: Refinement | None) -> str:
    operand, result = step.operand, step.result
    if not one_set(operand.mesh, result.mesh):
        return _elsewhere(operand, result)
    if r is None or not r.exact:
        return _no_refinement(operand, result)
    if r.swapped:
        others = ", while other digits change between held and local" if r.gathered or r.sliced else ""
        return f"{_changing_hands(step, r)}{others}: no single collective does that without receiving more."
    if step.mode != PLAIN:
        return "a collective would do, but what it needs beside operand and result does not fit the budget."
    return "a collective would do in as many launches, but boxes that go straight to their places need less memory."


def _elsewhere(operand: Layout, result: Layout) -> str:
    devices = f"the tiles go from {counted(operand.mesh.size, 'device')} to {result.mesh.size}"
    shared = len(set(operand.mesh.devices) & set(result.mesh.devices))
    kept = f", {shared} of which were among them and keep what they need" if shared else ""
    return f"{devices}{kept}. The holders of a tile share evenly what is asked of them."


def _no_refinement(operand: Layout, result: Layout) -> str:
    if operand.mesh != result.mesh and operand.mesh.devices != result.mesh.devices:
        return f"the meshes {operand.mesh} and {result.mesh} list the devices in different orders."
    if operand.mesh != result.mesh:
        return f"the axes of {operand.mesh} and {result.mesh} do not nest, so no collective runs along them."
    uneven = [at for at, (a, b) in enumerate(zip(operand.dims, result.dims, strict=True)) if _uneven(a, b)]
    if uneven:
        dims = [f"dim {at} ({_piece(operand, at)} before, {_piece(result, at)} after)" for at in uneven]
        return f"the pieces of {listed(dims)} are uneven, and their borders do not fall together."
    return "the pieces before and after do not nest, as 2 then 3 and 3 then 2 do not: no collective moves between them."


def _uneven(before: Dim, after: Dim) -> bool:
    return before != after and (before.padded != before.size or after.padded != after.size)


def _piece(layout: Layout, at: int) -> str:
    digits = layout.dims[at].digits
    if all(axis is None for _, axis in digits):
        return "whole"
    return f"pieces of {digits[-1].radix if digits[-1].axis is None else 1}"


# ---- how digits change, in words -------------------------------------------------------------------


def _before(r: Refinement) -> list[_Factor]:
    """The factors of the positions that held the gathered digits."""
    return [(d.src, d.radix) for d in r.gathered if d.src is not None]


def _after(r: Refinement) -> list[_Factor]:
    """The factors of the positions that come to hold the sliced digits."""
    return [(d.dst, d.radix) for d in r.sliced if d.dst is not None]


def _axes(mesh: Mesh, factors: Iterable[_Factor]) -> str:
    """Spells factors of the positions as axes; neighbours are joined, so that {x:(1)2} and {x:(2)2} read as x."""
    joined: list[_Factor] = []
    for stride, size in factors:
        if joined and joined[-1][0] == stride * size:
            joined[-1] = (stride, joined[-1][1] * size)
        else:
            joined.append((stride, size))
    return listed([mesh.spell(axis) for factor in joined for axis in mesh.sub_axes(*factor)])


def _by_dim(mesh: Mesh, digits: Sequence[tuple[int, _Factor]]) -> list[tuple[int, str]]:
    dims = dict.fromkeys(dim for dim, _ in digits)
    return [(dim, _axes(mesh, [factor for at, factor in digits if at == dim])) for dim in dims]


def _whole(r: Refinement, mesh: Mesh) -> str:
    digits = [(d.dim, (d.src, d.radix)) for d in r.gathered if d.src is not None]
    return listed([f"dim {dim} is no longer split over {axes}" for dim, axes in _by_dim(mesh, digits)])


def _split(r: Refinement, mesh: Mesh) -> str:
    digits = [(d.dim, (d.dst, d.radix)) for d in r.sliced if d.dst is not None]
    return listed([f"dim {dim} becomes split over {axes}" for dim, axes in _by_dim(mesh, digits)])


def _changing_hands(step: Step, r: Refinement) -> str:
    """The dims whose digits pass from some axes to others."""
    dims = dict.fromkeys(d.dim for d in r.swapped)
    before, after = step.operand, step.result
    return listed([f"dim {at} passes from {_holders(before, at)} to {_holders(after, at)}" for at in dims])


def _holders(layout: Layout, at: int) -> str:
    return " then ".join(layout.mesh.spell(axis) for _, axis in layout.dims[at].digits if axis is not None)


# ---- the totals ------------------------------------------------------------------------------------


def _bytes(plan: Plan, network: str | None) -> str:
    bound, received = plan.lower_bound_bytes, plan.received_bytes
    if received == 0:
        return "Bytes: every device holds all that it needs already, and receives nothing."
    what = f"some device must receive at least {bytes_text(bound)} of the target that it does not hold"
    if plan.crosses:
        ends = f"some device must send or receive at least {bytes_text(plan.endpoint_bound_bytes)} in all"
        busiest = bytes_text(max(plan.sent_bytes, received))
        return f"Bytes: {what}, and {ends}; here the busiest one sends or receives {busiest}."
    if received == bound:
        return f"Bytes: {what}, and no device receives more: no plan can beat that."
    over = f"{received / bound:.2f} times the bound" if bound else "more than the bound"
    if network is None:
        return f"Bytes: {what}; here the worst one receives {bytes_text(received)}, {over}.{_exact(plan)}"
    least = make_plan(move_of(plan), donate=plan.donate)
    idle = idle_text(plan.idle_axes, ", to take less time over ")
    return (
        f"Bytes: {what}; here the worst one receives {bytes_text(received)}, {over}{idle}. Without --network the plan "
        f"would receive {bytes_text(least.received_bytes)} in {counted(least.launches, 'launch')}."
    )


def _exact(plan: Plan) -> str:
    """What the fewest bytes would take, where the plan receives more to save launches."""
    least = make_plan(move_of(plan), donate=plan.donate, slack=0)
    if least.received_bytes >= plan.received_bytes or least.launches <= plan.launches:
        return ""
    return (
        f" With --slack 0 it would receive {bytes_text(least.received_bytes)} in {counted(least.launches, 'launch')}."
    )


def _memory(plan: Plan, network: str | None) -> str:
    smallest = _smallest(plan, network)
    peak = f"Memory: the peak is {bytes_text(plan.peak_bytes)} a device, counting source, target and all between."
    if smallest >= plan.peak_bytes:
        return f"{peak} No plan gets by with less."
    least = make_plan(move_of(plan), None, smallest, network, plan.donate)
    exact = "" if smallest < 10240 else f" ({bytes_text(smallest)})"
    return f"{peak} Every --budget from {smallest} B{exact} up can be met; the smallest takes {_summary(least)}."


def _smallest(plan: Plan, network: str | None) -> int:
    """The smallest budget that can be met, which the planner names when it refuses a budget of 0."""
    try:
        return make_plan(move_of(plan), None, 0, network, plan.donate).peak_bytes
    except BudgetError as error:
        return error.smallest


def _summary(plan: Plan) -> str:
    kinds = listed([step.kind for step in plan.steps])
    time = "" if plan.seconds is None else f" and {seconds_text(plan.seconds)}"
    return f"{counted(plan.launches, 'launch')} ({kinds}), {bytes_text(plan.received_bytes)} received{time}"


def _time(plan: Plan, network: str | None) -> str:
    if plan.seconds is None or network is None:
        return ""
    slow = max(plan.steps, key=lambda step: step.seconds or 0.0)
    share = f", most of it ({seconds_text(slow.seconds or 0.0)}) in the {slow.kind}" if len(plan.steps) > 1 else ""
    return f"Time: {seconds_text(plan.seconds)} are predicted on {network}{share}; no plan tried takes less."


# Why the steps of a move with a view are there, in plain words.


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

"""Why each step of a plan is there, in plain words, and how close the plan comes to its bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from reshard.errors import BudgetError
from reshard.geometry.refine import Refinement, refine
from reshard.geometry.remesh import one_set
from reshard.plans.plan import Plan, Step, describe_idle_axes
from reshard.plans.rules.collectives import VIEW_RULES
from reshard.plans.rules.step_mode import PLAIN
from reshard.plans.rules.view_steps import keeps_memory
from reshard.synth import plan as make_plan
from reshard.synth.options import SLACK
from reshard.types import Layout, Mesh, dtypes
from reshard.types.move import Move
from reshard.types.units import bytes_text, counted, listed, seconds_text
from reshard.types.view import View

if TYPE_CHECKING:
    from rich.console import Console

_Factor = tuple[int, int]  # (stride, size) of the device positions
_PERMUTE = "the tiles stay whole and only change devices, because before and after deal them out in different orders."
_FILL = {"sum": "zeros", "product": "ones", "max": "the least value", "min": "the greatest value"}


def show_reasons(out: Console, plan: Plan, network: str | None) -> None:
    """Prints a paragraph per step, then one each on bytes, memory and time (for a plan made for `network`)."""
    from reshard.show import terminal  # It needs rich, and the sentences alone do not.

    terminal.print_paragraph(out, "why these steps", style=terminal.NAME)
    for number, step in enumerate(plan.steps, 1):
        terminal.print_paragraph(out, f"{step.kind}: {explain_step(step, number == len(plan.steps))}", f"  {number}  ")
    if not plan.steps:
        terminal.print_paragraph(out, "Source and target have one meaning, so no step is needed.", "  ")
        return
    out.print()
    terminal.print_paragraph(out, "how good it is", style=terminal.NAME)
    for words in assess_plan(plan, network):
        terminal.print_paragraph(out, words, "  -  ")


def explain_step(step: Step, last: bool = True) -> str:
    """Why a step is there, and what it does to which dims; `last` is False for a step that others follow.

    >>> mesh = Mesh(x=4, y=2)
    >>> explain_step(Step("all_gather", Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh)))
    'each device collects the 4 tiles along x, and dim 0 is no longer split over x. It comes last, because ...'
    """
    if step.kind in VIEW_RULES or (step.mode.view is not None and step.mode.holding is None):
        return _explain_view(step)
    r, mesh = refine(step.operand, step.result), step.operand.mesh
    if step.kind == "exchange":
        return _explain_exchange(step, r)
    # A permute between meshes whose digits have no common refinement moves whole tiles.
    if r is None:
        return _PERMUTE
    gathered = [(d.dim, (d.src, d.radix)) for d in r.gathered if d.src is not None]
    sliced = [(d.dim, (d.dst, d.radix)) for d in r.sliced if d.dst is not None]
    whole, split = _say_dims(mesh, gathered, "is no longer split over"), _say_dims(mesh, sliced, "becomes split over")
    before, after = (_spell_axes(mesh, (factor for _, factor in digits)) for digits in (gathered, sliced))
    group = math.prod(d.radix for d in r.gathered)
    match step.kind:
        case "slice":
            return (
                f"each device keeps only its own part of what it already holds, and {split}. Nothing is "
                f"sent: no dim was split over {after} before, so all devices along {after} hold the same. The tile is "
                f"{math.prod(d.radix for d in r.sliced)} times smaller from here on."
            )
        case "all_gather":
            place = (
                f"It comes last, because only here does the tile grow ({group} times), to what the target needs."
                if last
                else "It comes before other moves, because few large messages take less time here than many small ones."
            )
            return f"each device collects the {group} tiles along {before}, and {whole}. {place}"
        case "all_to_all":
            return (
                f"{whole}; in its place, {split}. The pieces stay among the same devices, "
                f"so one collective in groups of {group} does it all: each device keeps 1/{group} of its tile and "
                f"sends each of the others 1/{group}."
            )
        case "split_sum":
            axes = _spell_axes(mesh, sorted(((f.stride, f.size) for f in r.started), reverse=True))
            released, reduction = f" and {whole}" if r.gathered else "", step.result.reduction
            return (
                f"the array becomes a {reduction} along {axes}{released}: each element stays on one device along "
                f"{axes}, and the others have {_FILL[str(reduction)]} in its place. Nothing is sent: what a device "
                f"keeps, it holds already."
            )
        case "permute":
            return f"{_PERMUTE} Here, {_say_swapped(step, r)}." if r.swapped else _PERMUTE
        case _:
            axes = _spell_axes(mesh, [(f.stride, f.size) for f in r.reduced])
            what = f"the array is still the {step.operand.reduction} of what the devices along {axes} hold."
            if step.kind == "all_reduce":
                return f"{what} They combine it, and each keeps the whole, because no dim is to be split over {axes}."
            return (
                f"{what} They combine it piece by piece, and each keeps only one piece: {split}. It "
                f"comes before any move, because afterwards there is less to move; and it receives half of what an "
                f"all_reduce does."
            )


def _explain_exchange(step: Step, r: Refinement | None) -> str:
    """Why no collective makes this move, and in how many rounds an exchange of boxes does."""
    if step.operand.dtype != step.result.dtype:
        return (
            f"elements are cast from {step.operand.dtype} to {step.result.dtype} as messages are packed or unpacked, "
            f"and travel as {step.wire.dtype}, so that no tile is there in both dtypes."
        )
    if not step.launches:
        return "every device holds all that it needs already, and only copies it into place; nothing is sent."
    operand, result, chunk = step.operand, step.result, step.mode.chunk
    if step.mode.holding is not None:
        reason = (
            f"devices hold {step.mode.holding.layout} already, so that only what they lack moves, and what has "
            f"changed: {step.mode.holding.stale}."
        )
    elif not one_set(operand.mesh, result.mesh):
        shared = len(set(operand.mesh.devices) & set(result.mesh.devices))
        overlap = f", {shared} of which were among them and keep what they need" if shared else ""
        reason = (
            f"the tiles go from {counted(operand.mesh.size, 'device')} to {result.mesh.size}{overlap}. The holders of "
            f"a tile share evenly what is asked of them."
        )
    elif r is None or not r.exact:
        reason = _explain_no_refinement(operand, result)
    elif r.swapped:
        others = ", while other digits change between held and local" if r.gathered or r.sliced else ""
        reason = f"{_say_swapped(step, r)}{others}: no single collective does that without receiving more."
    # A chunk, a relay or one place for both: what only a budget asks for.
    elif step.mode != PLAIN:
        reason = "a collective would do, but what it needs beside operand and result does not fit the budget."
    else:
        reason = (
            "a collective would do in as many launches, but boxes that go straight to their places need less memory."
        )
    size = "" if chunk is None else f" with messages of at most {counted(chunk, 'element')}, to keep the scratch small"
    relay = " What several devices lack is sent to them in shares, which they pass on to each other." * step.mode.relay
    if step.mode.gathers:
        relay = " What several devices lack is sent to one of them, and they gather it."
    place = " The result overwrites the source, which is donated." if step.mode.in_place else ""
    return (
        f"{reason} Each device sends every other one just the boxes that it needs, in "
        f"{counted(step.launches, 'round')}{size}; in a round, a device sends to at most one other and receives from "
        f"at most one.{relay}{place}"
    )


def _explain_no_refinement(operand: Layout, result: Layout) -> str:
    """Why the digits of two layouts have no common refinement."""
    if operand.mesh != result.mesh and operand.mesh.devices != result.mesh.devices:
        return f"the meshes {operand.mesh} and {result.mesh} list the devices in different orders."
    if operand.mesh != result.mesh:
        return f"the axes of {operand.mesh} and {result.mesh} do not nest, so no collective runs along them."
    if operand.ragged or result.ragged:
        return "a dim in pieces of any size changes, and no collective moves between these."
    uneven: list[str] = []
    for at, ends in enumerate(zip(operand.dims, result.dims, strict=True)):
        if ends[0] != ends[1] and any(end.padded != end.size for end in ends):
            pieces: list[str] = []
            for digits in (end.digits for end in ends):
                run = digits[-1].radix if digits and digits[-1].axis is None else 1
                pieces.append("whole" if all(axis is None for _, axis in digits) else f"pieces of {run}")
            uneven.append(f"dim {at} ({pieces[0]} before, {pieces[1]} after)")
    if uneven:
        return f"the pieces of {listed(uneven)} are uneven, and their borders do not fall together."
    return "the pieces before and after do not nest, as 2 then 3 and 3 then 2 do not: no collective moves between them."


def _explain_view(step: Step) -> str:
    """Why a view, a part, a cast or an exchange through a view is there."""
    view = step.mode.view
    part = "" if view is None else str(view).partition(", ")[2]
    match step.kind:
        case "cast":
            before, after = dtypes.bits(step.operand.dtype), dtypes.bits(step.result.dtype)
            what = f"every device casts its tile from {step.operand.dtype} to {step.result.dtype}"
            if after < before:
                return f"{what}: what moves after it has {before // after} times fewer bytes."
            return f"{what}, after all that moves has moved in fewer bytes." if after > before else f"{what}."
        case "take":
            return f"only part of the array is wanted ({part}), and each tile has all of that dim: it keeps it."
        case "put":
            return f"the elements go into the target's tile that is there ({part}); its other parts stay."
        case "exchange":
            return (
                f"{view}: digits lie across the view's atoms on both sides, or a part is of a dim that is spread over "
                f"devices, so no collective fits. Boxes go straight to their places, in "
                f"{counted(step.launches, 'round')}, and no device receives more than it needs and lacks."
            )
        case _:
            same = keeps_memory(step.kind, step.operand, step.result, step.mode)
            cost = "the tile's memory stays as it is" if same else "the tile is transposed into a new one"
            return f"{view}: every element stays on its device under another index, and {cost}. Nothing is sent."


# ---- how digits change, in words -------------------------------------------------------------------


def _spell_axes(mesh: Mesh, factors: Iterable[_Factor]) -> str:
    """Spells factors of the positions as axes; neighbours are joined, so that {x:(1)2} and {x:(2)2} read as x."""
    joined: list[_Factor] = []
    # Factors come major first: the next one continues the last if that is as far apart as this one is long.
    for stride, size in factors:
        if joined and joined[-1][0] == stride * size:
            joined[-1] = (stride, joined[-1][1] * size)
        else:
            joined.append((stride, size))
    return listed([mesh.spell(axis) for factor in joined for axis in mesh.sub_axes(*factor)])


def _say_dims(mesh: Mesh, digits: Sequence[tuple[int, _Factor]], what: str) -> str:
    """What happens to each dim, over the axes of its digits."""
    dims = dict.fromkeys(dim for dim, _ in digits)
    axes = {dim: _spell_axes(mesh, [factor for at, factor in digits if at == dim]) for dim in dims}
    return listed([f"dim {dim} {what} {axes[dim]}" for dim in dims])


def _say_swapped(step: Step, r: Refinement) -> str:
    """The dims whose digits pass from some axes to others."""
    words: list[str] = []
    for at in dict.fromkeys(d.dim for d in r.swapped):
        before, after = (
            " then ".join(end.mesh.spell(axis) for _, axis in end.dims[at].digits if axis is not None)
            for end in (step.operand, step.result)
        )
        words.append(f"dim {at} passes from {before} to {after}")
    return listed(words)


# ---- the totals ------------------------------------------------------------------------------------


def assess_plan(plan: Plan, network: str | None) -> list[str]:
    """How close a plan comes to its bounds: a sentence each on bytes, memory and, for a network, time.

    >>> from reshard.synth import plan
    >>> mesh = Mesh(x=4)
    >>> for words in assess_plan(plan(Layout.parse("f32[16]", mesh), Layout.parse("f32[{x}4]", mesh)), None):
    ...     print(words)
    Bytes: every device holds all that it needs already, and receives nothing.
    Memory: the peak is 80 B a device, counting source, target and all between. No plan gets by with less.
    """
    move = move_of(plan)
    # A budget of 0 is refused with the smallest that can be met.
    try:
        smallest = make_plan(move, None, 0, network, plan.donate).peak_bytes
    except BudgetError as error:
        smallest = error.smallest
    memory = f"Memory: the peak is {bytes_text(plan.peak_bytes)} a device, counting source, target and all between."
    if smallest >= plan.peak_bytes:
        memory += " No plan gets by with less."
    else:
        least = make_plan(move, None, smallest, network, plan.donate)
        exact = "" if smallest < 10240 else f" ({bytes_text(smallest)})"
        time = "" if least.seconds is None else f" and {seconds_text(least.seconds)}"
        memory += (
            f" Every --budget from {smallest} B{exact} up can be met; the smallest takes "
            f"{counted(least.launches, 'launch')} ({listed([step.kind for step in least.steps])}), "
            f"{bytes_text(least.received_bytes)} received{time}."
        )
    sentences = [_assess_bytes(plan, network), memory]
    if plan.seconds is not None and network is not None:
        slow = max(plan.steps, key=lambda step: step.seconds or 0.0)
        share = f", most of it ({seconds_text(slow.seconds or 0.0)}) in the {slow.kind}" if len(plan.steps) > 1 else ""
        sentences.append(
            f"Time: {seconds_text(plan.seconds)} are predicted on {network}{share}; no plan tried takes less."
        )
    return sentences


def _assess_bytes(plan: Plan, network: str | None) -> str:
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
    here = f"Bytes: {what}; here the worst one receives {bytes_text(received)}, {over}"
    # The plan may receive more than another one, to take less time or to save launches: then that one is named.
    other = make_plan(move_of(plan), donate=plan.donate, slack=0 if network is None else SLACK)
    least = f"receive {bytes_text(other.received_bytes)} in {counted(other.launches, 'launch')}"
    if network is not None:
        idle = describe_idle_axes(plan.idle_axes, ", to take less time over ")
        return f"{here}{idle}. Without --network the plan would {least}."
    if other.received_bytes >= received or other.launches <= plan.launches:
        return f"{here}."
    return f"{here}. With --slack 0 it would {least}."


def move_of(plan: Plan) -> Move:
    """The move that a plan makes.

    >>> from reshard.types import Layout, Mesh
    >>> layout = Layout.parse("f32[{x}4]", Mesh(x=2))
    >>> move_of(Plan(layout, layout, ())) == Move(layout, layout)
    True
    """
    casts = plan.source.dtype != plan.target.dtype
    view = plan.view or View.identity(plan.source.shape)
    return Move(plan.source, plan.target, view, cast=casts, have=plan.have, changed=plan.changed)

"""A plan on a terminal: what is moved, a table with a row for each step, and the totals beside their bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from reshard.geometry.remesh import disjoint, one_set
from reshard.plans.idle import idle_text
from reshard.plans.plan import Batch, Plan, Step, TreePlan, device_kinds
from reshard.show import terminal
from reshard.types import Layout
from reshard.types.units import bytes_text, counted, seconds_text


def show_heading(out: Console, source: Layout, target: Layout) -> None:
    """Prints the two layouts, the array's size, and the mesh."""
    terminal.paragraph(out, str(source), style=terminal.NAME)
    terminal.paragraph(out, str(target), "-> ", style=terminal.NAME)
    terminal.paragraph(out, size_text(source, target), "   ", terminal.FAINT)
    out.print()


def show_steps(out: Console, plan: Plan) -> None:
    """Prints one row per step, with launches where a step has several and seconds where the plan has a network.

    A terminal that is narrower than the table gets a paragraph for each step.
    """
    if not plan.steps:
        terminal.paragraph(out, "nothing to do: the two are the same layout", "  ")
        out.print()
        return
    timed = [] if plan.seconds is None else ["seconds"]
    rounds = ["launches"] if any(step.launches > 1 for step in plan.steps) else []
    sent = ["sent"] if plan.crosses else []
    numbers = [*rounds, *sent, "received", "live", *timed]
    table = terminal.table("", "step", "type after it", *numbers, right=["", "step", *numbers])
    table.columns[1].justify = "left"
    for number, step in enumerate(plan.steps, 1):
        figures = _figures(step)
        cells = [str(number), step.kind, str(step.result), *(figures[name] for name in numbers)]
        table.add_row(*(Text(cell, terminal.STEP if cell == step.kind else "") for cell in cells))
    if terminal.fits(out, table, indent=2):
        terminal.show(out, table, indent=2)
    else:
        _show_as_paragraphs(out, plan, numbers)
    out.print()


def _show_as_paragraphs(out: Console, plan: Plan, numbers: list[str]) -> None:
    """Prints two short paragraphs per step, for a terminal on which the table's rows would be broken."""
    for number, step in enumerate(plan.steps, 1):
        figures = _figures(step)
        terminal.paragraph(out, f"{step.kind} -> {step.result}", f"  {number}  ", terminal.STEP)
        terminal.paragraph(out, ", ".join(f"{name} {figures[name]}" for name in numbers), "     ")


def _figures(step: Step) -> dict[str, str]:
    """A step's numbers as text, by the heads of their columns."""
    return {
        "launches": str(step.launches),
        "sent": bytes_text(step.sent_bytes),
        "received": bytes_text(step.received_bytes),
        "live": bytes_text(step.live_bytes),
        "seconds": seconds_text(step.seconds or 0.0),
    }


def show_totals(out: Console, plan: Plan, network: str | None) -> None:
    """Prints the totals; the received bytes are green where they equal the lower bound."""
    good = ["received"] if plan.received_bytes == plan.lower_bound_bytes else []
    terminal.facts(out, totals(plan, network), good)


def totals(plan: Plan, network: str | None) -> list[tuple[str, str]]:
    """The sums over the steps, each beside its bound; `network` is the name that the seconds are predicted for.

    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> for name, words in totals(plan(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh)), None):
    ...     print(f"{name}: {words}")
    received: 48 B on the worst device, the lower bound
    launches: 1
    peak: 80 B live on a device: operand 16 B + result 64 B; floor 80 B
    """
    rows = [
        ("received", f"{bytes_text(plan.received_bytes)} on the worst device, {_against_bound(plan)}"),
        *_sent(plan),
        ("launches", str(plan.launches)),
        ("peak", f"{bytes_text(plan.peak_bytes)} live on a device{_peak(plan)}"),
    ]
    if plan.seconds is not None:
        rows.append(("predicted", f"{seconds_text(plan.seconds)} on {network}"))
    return rows


def _sent(plan: Plan) -> list[tuple[str, str]]:
    """What the busiest sender sends, for a plan to other devices; among the same ones it is what devices receive."""
    if not plan.crosses:
        return []
    bound = f"no plan's busiest device sends or receives less than {bytes_text(plan.endpoint_bound_bytes)}"
    return [("sent", f"{bytes_text(plan.sent_bytes)} by the worst device; {bound}")]


def _against_bound(plan: Plan) -> str:
    bound = plan.lower_bound_bytes
    if plan.received_bytes == bound:
        return "the lower bound"
    over = f"{plan.received_bytes / bound:.2f} times " if bound else ""
    idle = idle_text(plan.idle_axes, ", to take less time over ")
    return f"{over}the lower bound of {bytes_text(bound)}{idle}"


def _peak(plan: Plan) -> str:
    """What the live bytes consist of in the step that reaches the peak."""
    worst = max(plan.steps, key=lambda step: step.live_bytes, default=None)
    if worst is None:
        return ""
    number = plan.steps.index(worst) + 1
    made_of = " + ".join(f"{name} {bytes_text(size)}" for name, size in live_parts(worst) if size)
    return f": {made_of}{f' in step {number}' if len(plan.steps) > 1 else ''}; floor {bytes_text(plan.floor_bytes)}"


# The lines above a plan that the terminal, the page and the notebook share.


def meshes_text(source: Layout, target: Layout) -> str:
    """The mesh of both layouts, or their two meshes.

    >>> from reshard.types import Mesh
    >>> one, other = Layout.parse("f32[{x}4]", Mesh(x=4)), Layout.parse("f32[{z}4]", Mesh(z=4))
    >>> meshes_text(one, one), meshes_text(one, other)
    ('<x=4>', '<x=4> and <z=4>')
    """
    return str(source.mesh) if source.mesh == target.mesh else f"{source.mesh} and {target.mesh}"


def array_bytes_text(layout: Layout) -> str:
    """The size of the whole array, which no single device need hold.

    >>> from reshard.types import Mesh
    >>> array_bytes_text(Layout.parse("f32[{x}4096, 1024]", Mesh(x=4)))
    '64.0 MiB'
    """
    return bytes_text(layout.nbytes(math.prod(layout.shape)))


def size_text(source: Layout, target: Layout) -> str:
    """The array's size, the number of devices, and the mesh or meshes.

    >>> from reshard.types import Mesh
    >>> layout = Layout.parse("f32[{x}4]", Mesh(x=4))
    >>> size_text(layout, layout)
    '64 B on 4 devices, mesh <x=4>'
    """
    devices = counted(source.mesh.size, "device")
    if not one_set(source.mesh, target.mesh):
        shared = len(set(source.mesh.devices) & set(target.mesh.devices))
        others = f"{target.mesh.size}, of which {shared} are among them" if shared else f"{target.mesh.size} others"
        return f"{array_bytes_text(source)} from {devices} of {source.mesh} to {others}, mesh {target.mesh}"
    return f"{array_bytes_text(source)} on {devices}, mesh {meshes_text(source, target)}"


# What a device's live bytes consist of before, during and after each step of a plan.


SOURCE, OPERAND, RESULT, SCRATCH = "source", "operand", "result", "scratch"
IN_PLACE = "operand and result in one place"
RUNNING = "running batch"


class Moment(NamedTuple):
    """A point of a plan, such as "1 all_gather", and the bytes live on a device at it, by what they are."""

    name: str
    parts: tuple[tuple[str, int], ...]

    @property
    def live_bytes(self) -> int:
        """The sum of the parts."""
        return sum(size for _, size in self.parts)


class Timeline(NamedTuple):
    """What is live on a device from the first moment to the last, its peak, and the floor, which no plan goes below."""

    moments: tuple[Moment, ...]
    peak_bytes: int
    floor_bytes: int


def live_parts(step: Step) -> tuple[tuple[str, int], ...]:
    """The bytes live on a device while a step runs, by what they are; they add up to `step.live_bytes`.

    The source is a part of its own where it is neither donated nor the operand. Between disjoint sets of devices they
    are those of a sender or of a receiver, whichever has more.

    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> live_parts(Step("all_gather", Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh)))
    (('source', 0), ('operand', 16), ('result', 64), ('scratch', 0))
    """
    scratch = (SCRATCH, step.cost.scratch)
    if step.mode.in_place:
        return (IN_PLACE, max(step.operand.tile_bytes, step.result.tile_bytes)), scratch
    source, operand = (SOURCE, step.retained_bytes), (OPERAND, step.operand.tile_bytes)
    result = (RESULT, step.result.tile_bytes)
    if not disjoint(step.operand.mesh, step.result.mesh):
        return source, operand, result, scratch
    sends = source[1] + operand[1] >= result[1]
    return (source, operand, scratch) if sends else (result, scratch)


def moments(plan: Plan) -> list[Moment]:
    """The moments of a plan: the source before the first step, each step, and what remains after the last.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> gather = plan(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh))
    >>> [(moment.name, moment.live_bytes) for moment in moments(gather)]
    [('before', 16), ('1 all_gather', 80), ('after', 80)]
    """
    before = Moment("before", ((SOURCE, plan.source.tile_bytes),))
    if not plan.steps:
        return [before]
    elsewhere = disjoint(plan.source.mesh, plan.target.mesh)
    kept = () if plan.donate or elsewhere else ((SOURCE, plan.source.tile_bytes),)
    after = Moment("after", (*kept, (RESULT, plan.target.tile_bytes)))
    during = (Moment(f"{number} {step.kind}", live_parts(step)) for number, step in enumerate(plan.steps, 1))
    return [before, *during, after]


# What a device's live bytes consist of before, during and after each batch of a tree.
#
#     w: f32[{x}4, 8] -> f32[16, 8]      b: f32[{x}2] -> f32[8]      on <x=4>, in two batches
#
#     before      sources 136 B
#     batch 1     sources   8 B                   w's source and target  640 B      648 B
#     batch 2     sources 128 B, results 512 B    b's source and target   40 B      680 B
#     after       sources 136 B, results 544 B                                      680 B
#
# Where the arrays lie on several sets of devices, these are the devices whose peak is highest.


_MOST = 10  # Bars of batches that a picture has room for.


def tree_timeline(tree: TreePlan) -> Timeline:
    """The moments of a tree. Neighbours among many batches share the moment with the most bytes live.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=4)
    >>> rows, whole = rs.Layout.parse("f32[{x}4, 8]", mesh), rs.Layout.parse("f32[16, 8]", mesh)
    >>> tree = rs.plan_tree({"w": (rows, whole), "v": (rows, rows)})
    >>> shown = tree_timeline(tree)
    >>> [moment.name for moment in shown.moments], shown.peak_bytes == tree.peak_bytes
    (['before', 'batch 1', 'batch 2', 'after'], True)
    """
    every = _moments(tree)
    before, *batches, after = every
    each = -(-len(batches) // _MOST) or 1
    groups = [batches[start : start + each] for start in range(0, len(batches), each)]
    floor = max(before.live_bytes, after.live_bytes)
    return Timeline((before, *map(_shared, groups), after), max(moment.live_bytes for moment in every), floor)


def _moments(tree: TreePlan) -> list[Moment]:
    """The moments before, during each batch, and after, on the kind of device that has the peak."""
    kinds, worst = device_kinds(tree.plans.values()), tree.peaks.index(tree.peak_bytes)
    prints = [batch.footprint(kinds) for batch in tree.batches]
    source, result = sum(each.before[worst] for each in prints), 0
    moments = [Moment("before", ((SOURCE, source),))]
    for number, (batch, (before, during, after)) in enumerate(zip(tree.batches, prints, strict=True), 1):
        source -= before[worst]
        parts = ((SOURCE, source), (RESULT, result), (RUNNING, during[worst]))
        moments.append(Moment(f"batch {number}", parts))
        made = kinds.total(kinds.tile(plan.target) for plan in batch.plans)[worst] if _moves(batch) else 0
        source, result = source + after[worst] - made, result + made
    return [*moments, Moment("after", ((SOURCE, source), (RESULT, result)))]


def _moves(batch: Batch) -> bool:
    """Whether the batch has steps; if not, its sources are its results and stay what they are."""
    return bool(batch.plans[0].steps)


def _shared(group: Sequence[Moment]) -> Moment:
    most = max(group, key=lambda moment: moment.live_bytes)
    first, last = (moment.name.removeprefix("batch ") for moment in (group[0], group[-1]))
    return most if len(group) == 1 else Moment(f"batches {first}-{last}", most.parts)

"""A plan of one or many arrays as a table with a row for each step or batch, its totals, and what is live meanwhile.

The terminal, the page and the notebook lay out the same rows; pictures draw the same moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import join_first
from reshard.geometry.remesh import disjoint, one_set
from reshard.plans.plan import AnyPlan, Plan, Step, TreePlan, describe_idle_axes, device_kinds, list_kinds
from reshard.types import Layout
from reshard.types.units import bytes_text, counted, seconds_text

if TYPE_CHECKING:
    from rich.console import Console


class PlanTable(NamedTuple):
    """The rows of a plan as text: the first three columns are words, the others numbers; `live` has bytes."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    live: tuple[int, ...]

    @property
    def numbers(self) -> tuple[str, ...]:
        """The heads of the columns of numbers."""
        return self.heads[3:]


def tabulate_plan(plan: AnyPlan) -> PlanTable:
    """A row for each step of a plan of one array, or for each batch of one of many.

    There are launches where a row has several, sent bytes where tiles go to other devices, and seconds with a network.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=4)
    >>> pair = rs.Layout.parse("f32[{x}4]", mesh), rs.Layout.parse("f32[16]", mesh)
    >>> tabulate_plan(rs.plan(*pair)).rows
    (('1', 'all_gather', 'f32[16]', '48 B', '80 B'),)
    >>> tabulate_plan(rs.plan_tree({"w": pair, "v": pair})).rows
    (('1', 'w and 1 more', 'all_gather', '96 B', '320 B'),)
    """
    rows: list[tuple[tuple[str, str], int, int, int, int, float | None]] = []
    if isinstance(plan, TreePlan):
        words, crosses = ("", "arrays", "steps"), False
        for batch, moment in zip(plan.batches, _list_moments(plan)[1:-1], strict=True):
            names = join_first(batch.names, 1)
            figures = batch.launches, 0, batch.received_bytes, moment.live_bytes, batch.seconds
            rows.append(((names, list_kinds(batch.plans[0])), *figures))
    else:
        words, crosses = ("", "step", "type after it"), plan.crosses
        for step in plan.steps:
            figures = step.launches, step.sent_bytes, step.received_bytes, step.live_bytes, step.seconds
            rows.append(((step.kind, str(step.result)), *figures))
    several, timed = any(launches > 1 for _, launches, *_ in rows), plan.seconds is not None
    columns = [("launches", several), ("sent", crosses), ("received", True), ("live", True), ("seconds", timed)]
    lines: list[tuple[str, ...]] = []
    for number, (names, launches, sent, received, live, seconds) in enumerate(rows, 1):
        cells = str(launches), bytes_text(sent), bytes_text(received), bytes_text(live), seconds_text(seconds or 0.0)
        shown = (cell for cell, (_, has) in zip(cells, columns, strict=True) if has)
        lines.append((str(number), *names, *shown))
    heads = (*words, *(name for name, has in columns if has))
    return PlanTable(heads, tuple(lines), tuple(live for *_, live, _ in rows))


# On a terminal, which needs rich: the page in a browser has the rows without it.


def show_heading(out: Console, source: Layout, target: Layout) -> None:
    """Prints the two layouts, the array's size, and the mesh."""
    from reshard.show import terminal

    terminal.print_paragraph(out, str(source), style=terminal.NAME)
    terminal.print_paragraph(out, str(target), "-> ", style=terminal.NAME)
    terminal.print_paragraph(out, size_text(source, target), "   ", terminal.FAINT)
    out.print()


def show_steps(out: Console, plan: Plan) -> None:
    """Prints the table of a plan; a terminal that is narrower than it gets a paragraph for each step."""
    from rich.text import Text

    from reshard.show import terminal

    if not plan.steps:
        terminal.print_paragraph(out, "nothing to do: the two are the same layout", "  ")
        out.print()
        return
    shown = tabulate_plan(plan)
    table = terminal.make_table(*shown.heads, right=["", "step", *shown.numbers])
    table.columns[1].justify = "left"
    for row in shown.rows:
        table.add_row(*(Text(cell, terminal.STEP if at == 1 else "") for at, cell in enumerate(row)))
    if terminal.least_width(table, indent=2) <= out.width:
        terminal.print_table(out, table, indent=2)
    else:
        for number, kind, result, *figures in shown.rows:
            terminal.print_paragraph(out, f"{kind} -> {result}", f"  {number}  ", terminal.STEP)
            pairs = zip(shown.numbers, figures, strict=True)
            terminal.print_paragraph(out, ", ".join(f"{name} {figure}" for name, figure in pairs), "     ")
    out.print()


def show_totals(out: Console, plan: Plan, network: str | None) -> None:
    """Prints the totals; the received bytes are green where they equal the lower bound."""
    from reshard.show import terminal

    good = ["received"] if plan.received_bytes == plan.lower_bound_bytes else []
    terminal.print_facts(out, list_totals(plan, network), good)


def list_totals(plan: Plan, network: str | None) -> list[tuple[str, str]]:
    """The sums over the steps, each beside its bound; `network` is the name that the seconds are predicted for.

    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> for name, words in list_totals(plan(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh)), None):
    ...     print(f"{name}: {words}")
    received: 48 B on the worst device, the lower bound
    launches: 1
    peak: 80 B live on a device: operand 16 B + result 64 B; floor 80 B
    """
    bound, beside = plan.lower_bound_bytes, "the lower bound"
    if plan.received_bytes != bound:
        over = f"{plan.received_bytes / bound:.2f} times " if bound else ""
        idle = describe_idle_axes(plan.idle_axes, ", to take less time over ")
        beside = f"{over}the lower bound of {bytes_text(bound)}{idle}"
    rows = [("received", f"{bytes_text(plan.received_bytes)} on the worst device, {beside}")]
    if plan.crosses:  # Among the same devices, what the busiest one sends is what it receives.
        ends = f"no plan's busiest device sends or receives less than {bytes_text(plan.endpoint_bound_bytes)}"
        rows.append(("sent", f"{bytes_text(plan.sent_bytes)} by the worst device; {ends}"))
    rows.append(("launches", str(plan.launches)))
    worst = max(plan.steps, key=lambda step: step.live_bytes, default=None)
    made_of = ""
    if worst is not None:
        parts = " + ".join(f"{name} {bytes_text(size)}" for name, size in live_parts(worst) if size)
        where = f" in step {plan.steps.index(worst) + 1}" if len(plan.steps) > 1 else ""
        made_of = f": {parts}{where}; floor {bytes_text(plan.floor_bytes)}"
    rows.append(("peak", f"{bytes_text(plan.peak_bytes)} live on a device{made_of}"))
    if plan.seconds is not None:
        rows.append(("predicted", f"{seconds_text(plan.seconds)} on {network}"))
    return rows


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
_MOST = 10  # Bars of batches that a picture has room for.


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
    result = (RESULT, step.result.tile_bytes + step.held_bytes)
    if not disjoint(step.operand.mesh, step.result.mesh):
        return source, operand, result, scratch
    # A device is at one end alone: the peak is that of a sender or of a receiver.
    sends = source[1] + operand[1] >= result[1]
    return (source, operand, scratch) if sends else (result, scratch)


def build_timeline(plan: AnyPlan) -> Timeline:
    """What is live before, during and after each step of a plan, or each batch of a plan of many arrays.

    Neighbours among many batches share the moment with the most bytes live. Where the arrays lie on several sets of
    devices, these are the devices whose peak is highest.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=4)
    >>> rows, whole = rs.Layout.parse("f32[{x}4, 8]", mesh), rs.Layout.parse("f32[16, 8]", mesh)
    >>> [(moment.name, moment.live_bytes) for moment in build_timeline(rs.plan(rows, whole)).moments]
    [('before', 128), ('1 all_gather', 640), ('after', 640)]
    >>> shown = build_timeline(rs.plan_tree({"w": (rows, whole), "v": (rows, rows)}))
    >>> [moment.name for moment in shown.moments]
    ['before', 'batch 1', 'batch 2', 'after']
    """
    every = _list_moments(plan)
    if isinstance(plan, Plan):
        return Timeline(tuple(every), plan.peak_bytes, plan.floor_bytes)
    before, *batches, after = every
    # Bars of hundreds of batches would be a pixel high: each stands for several, with the most of them.
    each = -(-len(batches) // _MOST) or 1
    shared: list[Moment] = []
    for start in range(0, len(batches), each):
        group = batches[start : start + each]
        most = max(group, key=lambda moment: moment.live_bytes)
        first, last = (moment.name.removeprefix("batch ") for moment in (group[0], group[-1]))
        shared.append(most if len(group) == 1 else Moment(f"batches {first}-{last}", most.parts))
    floor = max(before.live_bytes, after.live_bytes)
    return Timeline((before, *shared, after), max(moment.live_bytes for moment in every), floor)


def _list_moments(plan: AnyPlan) -> list[Moment]:
    """The moments before, during each step or batch, and after; of many arrays on the kind of device that has the peak.

    w: f32[{x}4, 8] -> f32[16, 8]      b: f32[{x}2] -> f32[8]      on <x=4>, in two batches

    before      sources 136 B
    batch 1     sources   8 B                   w's source and target  640 B      648 B
    batch 2     sources 128 B, results 512 B    b's source and target   40 B      680 B
    after       sources 136 B, results 544 B                                      680 B
    """
    if isinstance(plan, Plan):
        before = Moment("before", ((SOURCE, plan.source.tile_bytes),))
        if not plan.steps:
            return [before]
        elsewhere = disjoint(plan.source.mesh, plan.target.mesh)
        retained = () if plan.donate or elsewhere else ((SOURCE, plan.source.tile_bytes),)
        during = (Moment(f"{number} {step.kind}", live_parts(step)) for number, step in enumerate(plan.steps, 1))
        return [before, *during, Moment("after", (*retained, (RESULT, plan.target.tile_bytes)))]
    # Devices with the same tiles at all times are one kind; the picture is that of the kind with the peak.
    kinds, worst = device_kinds(plan.plans.values()), plan.peaks.index(plan.peak_bytes)
    there = set(plan.filled)

    def add_up(layouts: Mapping[str, Layout], names: Iterable[str]) -> int:
        return kinds.total(kinds.tile(layouts[name]) for name in names)[worst]

    result = add_up(plan.target_layouts, there)
    source = plan.arrays.live_bytes(kinds)[worst] - result
    moments = [Moment("before", ((SOURCE, source), *(((RESULT, result),) if result else ())))]
    for number, (batch, (before, during, after)) in enumerate(
        zip(plan.batches, plan.footprints(kinds), strict=True), 1
    ):
        reads, fills = ({of[name] for name in batch.names} for of in (plan.source_of, plan.target_of))
        used = add_up(plan.target_layouts, fills & there)
        beside = source - add_up(plan.source_layouts, reads), result - used
        moments.append(Moment(f"batch {number}", ((SOURCE, beside[0]), (RESULT, beside[1]), (RUNNING, during[worst]))))
        live = source + result - before[worst] + after[worst]
        # A batch without steps leaves its sources, which are its results, what they are.
        if batch.plans[0].steps:
            result += add_up(plan.target_layouts, fills - there)
            there |= fills
        source = live - result
    return [*moments, Moment("after", ((SOURCE, source), (RESULT, result)))]

"""Many plans at once: a table of pairs of layouts on meshes and networks, and the cheapest way through alternatives."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import import_module
from itertools import product
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

from reshard.errors import CallError, PlanError, ReshardError, name_arguments, quoted, shortened
from reshard.geometry.detect import LayoutLike, as_layout, as_layouts
from reshard.plans.plan import Plan, align_columns
from reshard.synth.network import Network
from reshard.synth.options import PlanOptions
from reshard.synth.planner import find_plan
from reshard.types.layout import Layout, checked_mesh
from reshard.types.mesh import MeshLike
from reshard.types.units import bytes_text, counted, seconds_text
from reshard.types.whole import read_items

Row = dict[str, Any]
"""What a table says of one plan, or of a pair that has none."""

FIGURES = ("steps", "launches", "received_bytes", "bound_bytes", "peak_bytes", "seconds")
COLUMNS = ("source", "target", "mesh", "network", "budget", *FIGURES, "error")


MOST_SHOWN = 20
"""The most rows of a table that are printed, half of them the first ones and half the last."""


class SweepTable(Sequence[Row]):
    """Plans as rows, each a dict of `COLUMNS`: figures are numbers, those of a pair without a plan are None.

    It prints as a table, in a notebook too, the first and the last rows of a long one. Bytes are those of a device,
    seconds are predicted for the network.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = list(rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> SweepTable: ...

    def __getitem__(self, index: int | slice) -> Row | SweepTable:
        if isinstance(index, str):
            raise CallError(
                f"a SweepTable has rows, not a column {quoted(index)}; take [row[{index!r}] for row in table], or "
                f"table.to_pandas()"
            )
        return SweepTable(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            cure = "; its rows are dicts: list(table), or json.dumps(list(table)), to_csv and to_pandas"
            raise AttributeError(f"a SweepTable has no {name!r}{cure}")

    def to_csv(self, path: str | PathLike[str] | None = None) -> str:
        """The table as text of comma-separated values, which is written to a file if `path` names one."""
        out = io.StringIO()
        # The names of whoever made the rows, such as those of a file's lines, come along.
        table = csv.DictWriter(out, [*self._rows[0]] if self._rows else COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(self._rows)
        if path is not None:
            try:
                with open(path, "w", encoding="utf-8", newline="") as file:
                    file.write(out.getvalue())
            except OSError as error:
                raise ReshardError(
                    f"cannot write the table to {quoted(path)}: {error}; give a path in a folder"
                ) from None
        return out.getvalue()

    def to_pandas(self) -> Any:
        """The table as a `pandas.DataFrame`; raises `ReshardError` where pandas is not installed."""
        try:
            return import_module("pandas").DataFrame(self._rows, columns=[*self._rows[0]] if self._rows else COLUMNS)
        except ImportError:
            raise ReshardError("to_pandas needs pandas: pip install pandas, or take to_csv(path)") from None

    def _show_cells(self) -> list[list[str]]:
        """Heads and cells as text, without columns in which no row says anything."""
        names = [name for name in COLUMNS if any(row[name] not in (None, "none") for row in self._rows)]

        def show(name: str, value: Any) -> str:
            if value is None:
                return ""
            if name in ("budget", "received_bytes", "bound_bytes", "peak_bytes"):
                return bytes_text(value)
            return seconds_text(value) if name == "seconds" else shortened(str(value), 60)

        rows = [[show(name, row[name]) for name in names] for row in self._rows]
        if len(rows) > MOST_SHOWN:
            more = [f"... {len(rows) - MOST_SHOWN} more", *[""] * (len(names) - 1)]
            rows[MOST_SHOWN // 2 : -MOST_SHOWN // 2] = [more]
        return [[name.removesuffix("_bytes") for name in names], *rows]

    def __str__(self) -> str:
        cells = self._show_cells()
        # Words come first, but for the error, which is last.
        lines = (
            align_columns(cells, cells[0].index("steps") + 1 if "steps" in cells[0] else len(cells[0]))
            if cells[0]
            else []
        )
        return "\n".join([line.removeprefix("  ").rstrip() for line in lines] or ["no rows"])

    def __repr__(self) -> str:
        lacking = sum(row["error"] is not None for row in self._rows)
        return f"<SweepTable of {counted(len(self), 'row')}{f', {lacking} without a plan' if lacking else ''}>"

    def _repr_html_(self) -> str:
        head, *rows = self._show_cells()
        lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
        return f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{''.join(lines)}</table>"


@name_arguments
def sweep(
    layouts: Iterable[tuple[LayoutLike, LayoutLike]],
    meshes: MeshLike | Sequence[MeshLike] | None = None,
    networks: Sequence[Network | str | None] | Network | str | None = None,
    budgets: Sequence[int | str | None] | int | str | None = None,
    *,
    shape: Sequence[int] | None = None,
    dtype: object = None,
) -> SweepTable:
    """Plans every pair of layouts on every mesh, for every network and budget, as a table with a row for each.

    `layouts` are pairs of source and target, in any form that `reshard.as_layout` reads; those that have meshes of
    their own need none. `shape` and `dtype` are those of the array, where layouts do not say them. A pair that has no
    plan, such as one whose axes a mesh lacks, or that no plan brings within a budget, has its error in its row.

    >>> table = sweep([("f32[{x}4, 8]", "P()")], ["x=2", "x=4", "y=2"], ["h100", None])
    >>> [(row["mesh"], row["network"], row["received_bytes"]) for row in table[:3]]
    [('<x=2>', 'h100', 128), ('<x=2>', 'none', 128), ('<x=4>', 'h100', 384)]
    >>> table[4]["error"][:16]
    "unknown axis 'x'"
    """
    options = [
        PlanOptions.read(budget, network) for network, budget in product(_list_values(networks), _list_values(budgets))
    ]
    every = [None if mesh is None else checked_mesh(mesh) for mesh in _list_values(meshes)]
    rows: list[Row] = []
    every_pair: Any = cast("Any", layouts).values() if isinstance(layouts, Mapping) else layouts
    for pair in every_pair:
        ends = read_items(pair)
        if ends is None or len(ends) != 2:
            raise PlanError(f"{quoted(pair)} is not a pair; give a list of (source, target) pairs of layouts")
        for mesh in every:
            # A pair that a mesh cannot hold is a row as well: a sweep that ended there would say nothing of others.
            try:
                source, target = as_layouts(*ends, mesh, None, shape, dtype)
            except ReshardError as error:
                shown = [f"{end}" if isinstance(end, str | Layout) else quoted(end) for end in ends]
                rows += [_make_row(shown, str(mesh or ""), asked, error) for asked in options]
                continue
            rows += [plan_row(source, target, asked) for asked in options]
    return SweepTable(rows)


def plan_row(source: Layout, target: Layout, options: PlanOptions) -> Row:
    """The row of a table with the figures of a plan, or with the error of a pair that has none."""
    meshes = str(source.mesh) if source.mesh == target.mesh else f"{source.mesh} to {target.mesh}"
    try:
        found: Plan | ReshardError = find_plan(source, target, options)
    except ReshardError as error:
        found = error
    return _make_row([str(source), str(target)], meshes, options, found)


def _make_row(ends: Sequence[str], mesh: str, options: PlanOptions, found: Plan | ReshardError) -> Row:
    network = "none" if options.network is None else options.network.name
    row: Row = dict.fromkeys(COLUMNS) | {
        "source": ends[0], "target": ends[1], "mesh": mesh, "network": network, "budget": options.budget
    }  # fmt: skip
    if isinstance(found, ReshardError):
        return row | {"error": str(found)}
    steps = ", ".join(step.kind for step in found.steps)
    figures = (steps, found.launches, found.received_bytes, found.lower_bound_bytes, found.peak_bytes, found.seconds)
    return row | dict(zip(FIGURES, figures, strict=True))


def _list_values(given: Any) -> list[Any]:
    return list(cast("Sequence[Any]", given)) if isinstance(given, list | tuple) else [given]


class Path(NamedTuple):
    """The cheapest way through stages: one layout of each, and the plans from one to the next."""

    layouts: tuple[Layout, ...]
    plans: tuple[Plan, ...]

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of all plans together, None without a network."""
        each = [plan.seconds for plan in self.plans]
        return sum(cast("list[float]", each)) if each and None not in each else None

    @property
    def received_bytes(self) -> int:
        """What the busiest devices of all plans receive."""
        return sum(plan.received_bytes for plan in self.plans)

    @property
    def launches(self) -> int:
        """The launches of all plans."""
        return sum(plan.launches for plan in self.plans)

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", {seconds_text(self.seconds)} predicted"
        total = f"received {bytes_text(self.received_bytes)}, {counted(self.launches, 'launch')}{time}"
        return "\n".join([*map(str, self.layouts), total])


@name_arguments
def path(
    stages: Sequence[LayoutLike | Sequence[LayoutLike]],
    budget: int | str | None = None,
    network: Network | str | None = None,
    *,
    mesh: MeshLike | None = None,
) -> Path:
    """The cheapest way of an array through stages, each a layout or a list of alternatives, of which one is taken.

    Least are the predicted seconds of all plans together, with a `network`, then their bytes, launches and peak. No
    other choice has less: every plan between alternatives of neighbouring stages is made. `budget` holds for each of
    the plans; layouts are in any form that `reshard.as_layout` reads, on `mesh` where they have none.

    Raises the errors of `plan` where no way leads from some stage to the next.

    >>> slabs = ["f32[16, {x}4, 16]", "f32[16, 16, {x}4]"]
    >>> way = path(["f32[{x}4, 16, 16]", slabs, "f32[16, 16, {x}4]"], mesh="x=4")
    >>> print(way)
    f32[{x}4, 16, 16]
    f32[16, 16, {x}4]
    f32[16, 16, {x}4]
    received 3072 B, 1 launch
    """
    options = PlanOptions.read(budget, network)
    listed = [list(cast("Sequence[Any]", stage)) if isinstance(stage, list | tuple) else [stage] for stage in stages]
    if not listed or not all(listed):
        raise PlanError(f"stages {quoted(list(stages))}: give a list of layouts, or of lists of at least one layout")
    # Later layouts may be specs: the first one lends them mesh, shape and dtype.
    first = as_layout(listed[0][0], mesh)
    read = [[as_layouts(first, each, mesh)[1] for each in stage] for stage in listed]
    # The cheapest to each layout of a stage; of ways to one layout, only that can go on to be the cheapest.
    best = {at: _Way((0.0, 0, 0, 0), Path((at,), ())) for at in read[0]}
    for after in read[1:]:
        there: dict[Layout, _Way] = {}
        refused: ReshardError | None = None
        for source, target in product(best, after):
            try:
                plan = find_plan(source, target, options)
            except ReshardError as error:
                refused = error
                continue
            (seconds, received, launches, peak), (layouts, plans) = best[source]
            cost = seconds + (plan.seconds or 0.0), received + plan.received_bytes, launches + plan.launches
            way = _Way((*cost, max(peak, plan.peak_bytes)), Path((*layouts, target), (*plans, plan)))
            if target not in there or way.cost < there[target].cost:
                there[target] = way
        if refused is not None and not there:
            raise refused
        best = there
    return min(best.values(), key=lambda way: way.cost).path


class _Way(NamedTuple):
    """A path, with its seconds, bytes, launches and peak."""

    cost: tuple[float, int, int, int]
    path: Path

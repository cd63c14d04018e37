"""Plans of many arrays as one: which arrays move together, in which order, and what lives on the devices meanwhile.

    {"w": f32[{x}4, 8] -> f32[16, 8], "layers": [{"b": f32[{x}2] -> f32[8]}]}

    names      w, layers.0.b: the keys on the way to an array, joined by dots
    batches    arrays whose steps share launches (`types.batch`), in the order in which they run
    figures    sums over batches, and maxima over devices of sums: the busiest device of all arrays together

As with `Plan`, the constructor checks and the figures are folds over what it was given, so it does not matter who made
a `TreePlan`, the planner or a JSON file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, cast

from reshard.errors import PlanError, quoted
from reshard.plans.plan import Batch, Plan
from reshard.plans.plan_data import FORMAT, check_format, checked_indent, compare, read_seconds
from reshard.plans.rules.bounds import busiest, joint_endpoint_bound, joint_lower_bound
from reshard.plans.rules.loads import Loads, loads
from reshard.plans.step import Step
from reshard.plans.tree_memory import DeviceKinds, peaks
from reshard.types.json_fields import Fields
from reshard.types.layout import Layout
from reshard.types.units import bytes_text, counted, seconds_text
from reshard.types.view import View
from reshard.types.whole import whole


@dataclass(frozen=True)
class TreePlan:
    """Checked plans of many arrays, in batches; `names` lists the arrays in the order in which they were given.

    Bytes are those of the busiest device. Raises `PlanError` for names that are not those of the batches.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=4)
    >>> rows, whole = rs.Layout.parse("f32[{x}4, 8]", mesh), rs.Layout.parse("f32[16, 8]", mesh)
    >>> tree = rs.plan_tree({"w": (rows, whole), "v": (rows, whole)})
    >>> tree.names, len(tree.batches), tree.launches, tree.received_bytes, tree.plans["w"].received_bytes
    (('w', 'v'), 1, 1, 768, 384)
    """

    names: tuple[str, ...]
    batches: tuple[Batch, ...]

    def __post_init__(self) -> None:
        for what, given, kind in (("names", self.names, str), ("batches", self.batches, Batch)):
            listed = cast("tuple[object, ...]", given) if isinstance(given, tuple) else None  # pyright: ignore
            if listed is None or not all(isinstance(each, kind) for each in listed):
                raise PlanError(f"the {what} {quoted(given)} of a tree are not a tuple of {kind.__name__}")
        moved = Counter(name for batch in self.batches for name in batch.names)
        wanted = Counter(self.names)
        if moved != wanted or any(count > 1 for count in wanted.values()):
            wrong = sorted({*(moved - wanted), *(wanted - moved), *(n for n, count in wanted.items() if count > 1)})
            raise PlanError(f"each array of a tree is in one batch; {quoted(wrong[:4])} are in none, or in several")

    @cached_property
    def plans(self) -> Mapping[str, Plan]:
        """The plan of each array, by name."""
        plans = {name: plan for batch in self.batches for name, plan in zip(batch.names, batch.plans, strict=True)}
        return {name: plans[name] for name in self.names}

    @cached_property
    def received_bytes(self) -> int:
        """Bytes that the busiest device receives of all arrays together."""
        return busiest((step.result.mesh, _loads(step).received, count) for step, count in self._steps)

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that the busiest device sends of all arrays together."""
        return busiest((step.operand.mesh, _loads(step).sent, count) for step, count in self._steps)

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Bytes that some device receives, whatever the plans: the maximum over devices of the sum over arrays."""
        return joint_lower_bound(self._moves)

    @cached_property
    def endpoint_bound_bytes(self) -> int:
        """Bytes that some device sends or receives, whatever the plans: together, and of each array."""
        return max(self.lower_bound_bytes, joint_endpoint_bound(self._moves))

    @property
    def _moves(self) -> Iterator[tuple[Layout, Layout, View | None]]:
        return ((plan.source, plan.target, plan.view) for plan in self.plans.values())

    @property
    def launches(self) -> int:
        """Collective calls in total."""
        return sum(batch.launches for batch in self.batches)

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes live on one device at any time: all sources and all targets, and the buffers of a batch."""
        return max(self.peaks)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The most bytes live on a device of each kind; see `types.tree_memory`."""
        kinds = device_kinds(self.plans.values())
        return peaks([kinds.footprint(batch) for batch in self.batches])

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of all batches, one after another; None without a network."""
        times = [batch.seconds for batch in self.batches if batch.seconds is not None]
        return sum(times) if times and len(times) == len(self.batches) else None

    @cached_property
    def _steps(self) -> Sequence[tuple[Step, int]]:
        """The different steps, and how often each occurs."""
        return list(Counter(step for plan in self.plans.values() for step in plan.steps).items())

    def to_json(self, indent: int | None = None) -> str:
        """The tree as a JSON object; equal plans are written once. `from_json` reads it back.

        >>> from reshard.types import Layout, Mesh
        >>> same = Layout.parse("f32[{x}4]", Mesh(x=2))
        >>> tree = TreePlan(("w",), (Batch(("w",), (Plan(same, same, ()),)),))
        >>> TreePlan.from_json(tree.to_json()) == tree
        True
        """
        return json.dumps(self.to_dict(), indent=checked_indent(indent))

    def to_dict(self) -> dict[str, Any]:
        """The tree as the plain data of `to_json`."""
        numbers = {plan: number for number, plan in enumerate(dict.fromkeys(self.plans.values()))}
        batches = [
            {"names": list(batch.names), "plans": [numbers[plan] for plan in batch.plans], "seconds": batch.seconds}
            for batch in self.batches
        ]
        plans = [plan.to_dict() for plan in numbers]
        return {"format": FORMAT, "names": list(self.names), "plans": plans, "batches": batches, **self._figures}

    @property
    def _figures(self) -> dict[str, Any]:
        return {
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "endpoint_bound_bytes": self.endpoint_bound_bytes,
            "launches": self.launches,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, text: str) -> TreePlan:
        """Reads the text of `to_json`, and checks plans, batches and figures again.

        Raises `PlanError` if it is not such a text, or if a figure is not what the batches make.
        """
        fields = Fields.read(text, "a tree of plans")
        check_format(fields.get("format", int))
        plans = [Plan.from_dict(plan.data) for plan in fields.objects("plans", "plan")]
        batches = tuple(_batch(batch, plans) for batch in fields.objects("batches", "batch"))
        tree = cls(tuple(fields.listed("names", str)), batches)
        compare(fields.data, tree._figures, "the tree")
        return tree

    def draw(self, what: str | None = None) -> Any:
        """The tree as a matplotlib `Figure`; see `Plan.draw`.

        "memory" shows what is live while the batches run, of all arrays together; "tiles" and "traffic" show the plan
        of the largest array.
        """
        return import_module("reshard.draw.pictures").draw(self, what)

    def _repr_html_(self) -> str:
        return import_module("reshard.draw.plan_page").tree_fragment(self)

    def __str__(self) -> str:
        head = f"{counted(len(self.names), 'array')} in {counted(len(self.batches), 'batch')}"
        rows = [("batch", "arrays", "steps", "received", "launches"), *_rows(self.batches)]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        left, right = widths[:3], widths[3:]
        table = [
            "  ".join(
                [*(cell.ljust(w) for cell, w in zip(row, left, strict=False))]
                + [cell.rjust(w) for cell, w in zip(row[3:], right, strict=True)]
            )
            for row in rows
        ]
        return "\n".join([head, *(f"  {line}" for line in table), *_totals(self)])


def device_kinds(plans: Iterable[Plan]) -> DeviceKinds:
    """The kinds of devices that the steps of some plans run on."""
    layouts = [layout for plan in dict.fromkeys(plans) for layout in (plan.source, *(s.result for s in plan.steps))]
    return DeviceKinds(layout.mesh for layout in layouts)


def _loads(step: Step) -> Loads:
    return loads(step.kind, step.operand, step.result, step.mode)


def _batch(batch: Fields, plans: Sequence[Plan]) -> Batch:
    numbers = batch.listed("plans", int)
    if any(whole(number, 0, len(plans) - 1) is None for number in numbers):
        raise batch.error(f"plans are {quoted(numbers)}, but there are {len(plans)}, counted from 0")
    names = tuple(batch.listed("names", str))
    return Batch(names, tuple(plans[number] for number in numbers), read_seconds(batch))


def _rows(batches: Sequence[Batch]) -> Iterator[tuple[str, ...]]:
    for number, batch in enumerate(batches, 1):
        first, *others = batch.names
        arrays = first if not others else f"{first} and {len(others)} more"
        steps = ", ".join(step.kind for step in batch.plans[0].steps) or "nothing to do"
        yield str(number), arrays, steps, bytes_text(batch.received_bytes), str(batch.launches)


def _totals(tree: TreePlan) -> list[str]:
    time = "" if tree.seconds is None else f", {seconds_text(tree.seconds)} predicted"
    load = tree.received_bytes + tree.sent_bytes
    return [
        f"received {bytes_text(tree.received_bytes)} (bound {bytes_text(tree.lower_bound_bytes)}), "
        f"{counted(tree.launches, 'launch')}, peak {bytes_text(tree.peak_bytes)} a device{time}",
        f"largest load of a device: memory {bytes_text(tree.peak_bytes)} + network {bytes_text(load)}",
    ]

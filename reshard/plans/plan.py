"""Plans: steps that lead one array, or many, from their source layouts to their targets, checked as they are built.

    Plan        one array: a chain of steps
    Batch       arrays whose steps are alike, so that each step is one launch for all of them
    TreePlan    many arrays: batches, one after another

Whoever reads plans can read all of them in one form: `names`, `plans` by name, `batches` in the order in which they
run, and the figures. A plan of one array has one name, "", and one batch.

The constructor of `Step` calls the typing rule of its kind, and the constructor of `Plan` checks that its steps lead
from source to target and count all live bytes; `Batch` and `TreePlan` check what is joined. An unchecked plan therefore
cannot exist, and what makes plans (the planner, a JSON file) need not be trusted. Lowering takes nothing but plans.

`chain` makes a plan of several `StepSpec`s. A later kind of step needs a rule in `plans.rules`, a field of `StepMode`
for its options, and their lines of JSON in `plan_data`.

A plan with a view leads from one index space to another: the views of its steps, one after another, must be its own.

Source and target may be on different sets of devices. Then some steps are among the devices of one set, and the source
counts as kept beside a step only where some device of the step may hold it.
"""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple, cast

from reshard.errors import NamedErrors, PlanError, join_first, quoted
from reshard.geometry.cover import find_overlap, find_uncovered
from reshard.geometry.figures import MOST_LISTED, ByDevice, received_by_device, sent_by_device
from reshard.geometry.relay import count_gathering_buffers, gathering_figures
from reshard.geometry.remesh import disjoint, one_set
from reshard.geometry.view_layouts import invert_view
from reshard.plans.descriptors import Descriptors, DeviceStep, describe_steps, split_by_role
from reshard.plans.plan_data import (
    FORMAT,
    check_format,
    checked_indent,
    compare_figures,
    read_layout_field,
    read_seconds,
    read_step,
    read_view,
    step_data,
    view_data,
)
from reshard.plans.plan_data import flatten_tree as flatten_tree
from reshard.plans.rules.bounds import (
    Ends,
    busiest_bytes,
    endpoint_bound,
    joint_endpoint_bound,
    joint_lower_bound,
    lower_bound,
)
from reshard.plans.rules.collectives import received_in_step, step_loads
from reshard.plans.rules.lane import count_joint_rounds, step_lane
from reshard.plans.rules.step_mode import StepMode
from reshard.plans.rules.view_steps import keeps_memory
from reshard.plans.step import Bytes, DeviceKinds, Footprint, checked_seconds, find_peaks
from reshard.plans.step import Step as Step
from reshard.plans.step import StepSpec as StepSpec
from reshard.types.index_set import Holding, IndexSet
from reshard.types.json_fields import Fields
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, prime_places
from reshard.types.units import bytes_text, counted, seconds_text
from reshard.types.units import listed as sentence
from reshard.types.view import View, ViewMap, compose_maps
from reshard.types.whole import checked_flag, read_items, whole


class ShownPlan:
    """What users do with a plan, of one array or of many: write it, draw it, show it in a notebook."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The plan as the plain data of `to_json`."""

    def to_json(self, indent: int | None = None) -> str:
        """The plan as a JSON object, with all steps and totals; `from_json` reads it back. Equal plans of several
        arrays are written once.

        >>> from reshard.types import Mesh
        >>> a = Layout.parse("f32[{x}4]", Mesh(x=2))
        >>> plan = Plan(a, a, ())
        >>> tree = TreePlan(("w", "v"), (Batch(("w", "v"), (plan, plan)),))
        >>> Plan.from_json(plan.to_json()) == plan, TreePlan.from_json(tree.to_json()) == tree
        (True, True)
        """
        return json.dumps(self.to_dict(), indent=checked_indent(indent))

    def draw(self, what: str | None = None) -> Any:
        """The plan as a matplotlib `Figure`, for example in a notebook. Needs `reshard[draw]`.

        `what` selects the picture: "tiles" shows the array before, between and after the steps, coloured by device;
        "memory" the live bytes of each step against the promise and the floor; "traffic" the bytes from device to
        device; None all three. Of many arrays, "memory" shows what is live of all together while the batches run, and
        the others show the plan of the largest one. Raises `ReshardError` for another name, without matplotlib, and for
        meshes too large to draw.
        """
        pictures = import_module("reshard.draw.pictures")  # the one upward import, so that users find the method here
        return pictures.draw(self, what)

    def _repr_html_(self) -> str:
        return import_module("reshard.draw.plan_page").fragment(self)


class Phase(NamedTuple):
    """A step of a plan: whether its operand lies in the source's memory, its result in that of a target of which a part
    is filled, and whether that target waits for it."""

    step: Step
    of_source: bool
    in_target: bool
    waits: bool


@dataclass(frozen=True, repr=False)
class Plan(ShownPlan):
    """A checked redistribution: `steps` lead from `source` to `target`.

    Bytes are per device. `seconds` is the time predicted for the network that the plan was made for, None without one.
    Raises `PlanError` for a broken chain.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=4)
    >>> plan = rs.plan(rs.Layout.parse("f32[{x}4, 8]", mesh), rs.Layout.parse("f32[16, {x}2]", mesh))
    >>> [step.kind for step in plan.steps], plan.received_bytes, plan.lower_bound_bytes, plan.launches
    (['all_to_all'], 96, 96, 1)
    """

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    donate: bool = False
    seconds: float | None = None
    view: View | None = None
    holding: Holding | None = None

    def __post_init__(self) -> None:
        _check_parts(self.source, self.target, self.steps)
        checked_seconds(self.seconds)
        if not isinstance(self.view, View | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f"the view {quoted(self.view)} of a plan is not a View; give that of a Move, or None")
        object.__setattr__(self, "donate", checked_flag(self.donate, "donate"))
        at = self.source
        retained = _list_retained_bytes(self.source, self.target, [step.spec for step in self.steps], self.donate)
        for number, (step, kept) in enumerate(zip(self.steps, retained, strict=True), 1):
            if step.operand != at:
                raise PlanError(
                    f"step {number} ({step.kind}) starts from {step.operand}, but the data is {at}; fix the chain"
                )
            if step.retained_bytes != kept:
                raise PlanError(
                    f"step {number} ({step.kind}) leaves the source beside it out of its live bytes; use chain()"
                )
            if step.mode.in_place and not self.donate:
                raise PlanError(
                    f"step {number} ({step.kind}) overwrites the source, which was not donated; plan with donate=True"
                )
            at = step.result
        if at != self.target:
            raise PlanError(
                f"the steps end in {at}, not in the target {self.target} (global {self.target.shape}); fix the chain"
            )
        held = [step.mode.holding for step in self.steps]
        before = () if self.holding is None else ("cast",) * (len(held) - 1)
        if held != [None] * (len(held) - 1) + [self.holding] * bool(held or self.holding) or (
            self.holding is not None and tuple(step.kind for step in self.steps[:-1]) != before
        ):
            raise PlanError(
                f"what the devices of {self.target} hold already is what the last exchange of a plan leaves, before "
                f"which only a cast may come; plan it again, with have= and changed="
            )
        views = [step.mode.view for step in self.steps if step.mode.view is not None]
        if self.view is None and not views and self.source.shape == self.target.shape:
            return
        # The views of the steps, one after another, are the plan's.
        wanted = View.identity(self.source.shape) if self.view is None else self.view
        made: ViewMap | None = View.identity(self.source.shape).map
        for view in views:
            made = None if made is None else compose_maps(made, view.map)
        if (wanted.source_shape, wanted.target_shape) != (self.source.shape, self.target.shape) or made != wanted.map:
            raise PlanError(
                f"the views of the steps do not lead from {self.source} to {self.target} as {wanted} does; plan it "
                f"again"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays: one, without letters."""
        return ("",)

    @property
    def plans(self) -> Mapping[str, Plan]:
        """The plan of each array, by name: this one."""
        return {"": self}

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The batches in which the arrays move: one, of this plan."""
        return (Batch(("",), (self,), self.seconds),)

    def to_descriptors(self) -> Descriptors:
        """The plan as transfers that others can run: in each turn, which elements of a flat tile go where in another.

        A turn reads the tiles that the turn before it wrote; a relay takes two. `reshard.verify` proves such a list.
        Raises `PlanError` for a plan that adds or casts, which transfers cannot.

        >>> from reshard.types import Mesh
        >>> import reshard as rs
        >>> before, after = (Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}2]", "f32[4]"))
        >>> for each in rs.plan(before, after).to_descriptors():
        ...     print(*each)
        0 0 0 0 (2,) (1,) (1,) 0
        0 1 0 0 (2,) (1,) (1,) 0
        1 1 0 2 (2,) (1,) (1,) 0
        1 0 0 2 (2,) (1,) (1,) 0
        """
        ends = self.source, self.target, self.view
        return Descriptors(each for turn in describe_steps(ends, self.steps) for each in turn)

    def schedule_for(self, device: int) -> tuple[DeviceStep, ...]:
        """What one device sends, receives and copies in each turn, of the transfers of `to_descriptors`.

        >>> from reshard.types import Mesh
        >>> import reshard as rs
        >>> before, after = (Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}2]", "f32[4]"))
        >>> [(len(turn.sends), len(turn.receives), len(turn.copies)) for turn in rs.plan(before, after).schedule_for(1)]
        [(1, 1, 1)]
        """
        number = whole(device)
        if number is None or number not in {*self.source.mesh.devices, *self.target.mesh.devices}:
            raise PlanError(
                f"device {quoted(device)} is neither in {self.source.mesh} nor in {self.target.mesh}; give the id of a "
                f"device of source or target"
            )
        ends = self.source, self.target, self.view
        return tuple(split_by_role(describe_steps(ends, self.steps, number), number))

    @property
    def have(self) -> Layout | None:
        """The layout in which devices of the target hold its array already, None for a plan that counts on nothing."""
        return None if self.holding is None else self.holding.layout

    @property
    def changed(self) -> IndexSet | None:
        """The elements of the source that are stale in what devices hold; None for a plan that counts on nothing."""
        return None if self.holding is None else self.holding.stale

    @property
    def spreads(self) -> bool:
        """Whether what devices hold is in other tiles than the target's, into which it is copied first."""
        return self.holding is not None and self.holding.layout != self.target

    @property
    def fills(self) -> bool:
        """Whether it fills a part of a target that is there, or leaves what devices hold of it."""
        return self.holding is not None or (self.view is not None and self.view.into)

    @cached_property
    def stays(self) -> bool:
        """Whether the result lies in the memory of the source."""
        return all(keeps_memory(*step.judgement) for step in self.steps)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Its steps, with the memory that each has its operand and its result in."""
        phases: list[Phase] = []
        in_source, in_target, waits = True, False, self.fills
        for step in self.steps:
            stays = keeps_memory(*step.judgement)
            begins = waits and step.mode.fills
            in_target, waits = begins or (in_target and stays), waits and not begins
            phases.append(Phase(step, in_source, in_target, waits))
            # A view that leaves every tile's memory as it is makes no copy: the source is still the operand after it.
            in_source = in_source and stays
        return tuple(phases)

    @property
    def crosses(self) -> bool:
        """Whether the target is on another set of devices than the source."""
        return not one_set(self.source.mesh, self.target.mesh)

    @property
    def received_bytes(self) -> int:
        """What the busiest device receives in all steps.

        Among the same devices, it is the sum over steps of what the busiest one receives: none receives more in total.
        """
        return self._traffic[0] if self.crosses else sum(step.received_bytes for step in self.steps)

    @property
    def sent_bytes(self) -> int:
        """What the busiest device sends in all steps, in the same sense."""
        return self._traffic[1] if self.crosses else sum(step.sent_bytes for step in self.steps)

    @property
    def endpoint_bytes(self) -> int:
        """The sum over steps of what the busiest device sends or receives, whichever is more."""
        return sum(step.endpoint_bytes for step in self.steps)

    @cached_property
    def _traffic(self) -> tuple[int, int]:
        """What the busiest device receives and sends in all steps together, where some lead to other devices.

        trainer <fsdp=4> -> server <tp=2, rep=4>, f32[{fsdp}4, 8] -> f32[16, {tp}4]

        step         sent by a trainer's device     received, sent by a server's device
        exchange     128 B                          64 B     0 B
        all_gather                                  192 B    192 B
        in all       128 B                          256 B    192 B
        """
        received, sent = Counter[int](), Counter[int]()
        meshes = [(step.operand.mesh, step.result.mesh) for step in self.steps]
        if all(one_set(*both) or disjoint(*both) for both in meshes):
            # What a step loads each device of a side with adds up, and no device is listed.
            crossed = False
            for step, both in zip(self.steps, meshes, strict=True):
                for side in {crossed, crossed or step.mode.relay}:  # A relay's second turn is on the other side.
                    sent[side] += step.sent_bytes
                crossed = crossed or not one_set(*both)
                received[crossed] += step.received_bytes
        else:
            for step, (before, after) in zip(self.steps, meshes, strict=True):
                into, out = dict.fromkeys(after.devices, step.received_bytes), before.devices
                given = dict.fromkeys({*out, *after.devices} if step.mode.relay else out, step.sent_bytes)
                # All devices of a collective count as the busiest one, and of an exchange among too many to list.
                if step.kind == "exchange" and (before.size <= MOST_LISTED or not one_set(before, after)):
                    ends = step.operand, step.result, step.mode.view, step.mode.holding
                    into = received_by_device(*ends).scaled(step.wire).on(after.devices)
                    if not step.mode.relay:
                        given = sent_by_device(*ends).scaled(step.wire).on(before.devices)
                received.update(into)
                sent.update(given)
        return max(received.values(), default=0), max(sent.values(), default=0)

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes that some device receives in every plan.

        If a sum stays unfinished, in every plan that keeps its summands; if one is finished, in every plan without
        idle axes.
        """
        return lower_bound(self.source, self.target, self.view, self.holding)

    @cached_property
    def idle_axes(self) -> tuple[str, ...]:
        """The sub-axes that neither source nor target uses and the plan goes over, to take less time.

        Such a plan may receive more than `lower_bound_bytes`, on purpose, and less where it finishes a sum. Only plans
        for a network have any.
        """
        if self.crosses or self.view is not None or self.holding is not None:
            return ()
        return find_idle_axes(self.source, self.target, (step.result for step in self.steps))

    @property
    def endpoint_bound_bytes(self) -> int:
        """Bytes that some device sends or receives, in total, in every plan."""
        return endpoint_bound(self.source, self.target, self.view, self.holding)

    @property
    def launches(self) -> int:
        """Collective calls in total; an exchange of r rounds counts r."""
        return sum(step.launches for step in self.steps)

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes live on one device at any time, source and target included."""
        return max((step.live_bytes for step in self.steps), default=self.source.tile_bytes)

    @property
    def peaks(self) -> tuple[int, ...]:
        """The most bytes live on a device of each kind; see `plans.step`."""
        kinds = device_kinds(plan for batch in self.batches for plan in batch.plans)
        return find_peaks([batch.footprint(kinds) for batch in self.batches])

    @property
    def floor_bytes(self) -> int:
        """The least peak memory of any plan; see the function. A view that keeps every tile's memory needs one tile."""
        return min(floor_bytes(self.source, self.target, self.donate), self.peak_bytes)

    def to_dict(self) -> dict[str, Any]:
        """The plan as the plain data of `to_json`."""
        return {
            "format": FORMAT,
            "source": str(self.source),
            "target": str(self.target),
            "mesh": self.source.mesh.to_dict(),
            "target_mesh": self.target.mesh.to_dict(),
            "steps": [step_data(step) for step in self.steps],
            "received_bytes": self.received_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            **({"idle_axes": list(self.idle_axes)} if self.idle_axes else {}),
            # Among the same devices these are left out: to find them, messages are listed, which may take long.
            **({"sent_bytes": self.sent_bytes} if self.crosses else {}),
            **({"endpoint_bound_bytes": self.endpoint_bound_bytes} if self.crosses else {}),
            "launches": self.launches,
            "peak_bytes": self.peak_bytes,
            "donate": self.donate,
            "seconds": self.seconds,
            **view_data(self.view),
            **({} if self.holding is None else self.holding.to_dict()),
        }

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads the text of `to_json` and checks the plan again.

        Raises `PlanError` if the steps are not a plan, a figure is not what they make, or `format` is not the one of
        this version. A text without `format` is read as this one.
        """
        return cls.from_dict(Fields.read(text, "a plan").data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Reads the plain data of `to_dict`, as `from_json` does."""
        fields = Fields.of(data, "a plan")
        check_format(fields.data.get("format", FORMAT))
        source, target = read_layout_field(fields, "source", "mesh"), read_layout_field(fields, "target", "target_mesh")
        steps = fields.objects("steps", "step")
        donate = fields.get("donate", bool, default=False)
        holding = Holding.read_fields(fields)
        given = [read_step(step, holding) for step in steps]
        seconds, view = read_seconds(fields), read_view(fields)
        plan = chain(source, target, [spec for spec, _ in given], donate, [time for _, time in given], view)
        if not steps:
            plan = replace(plan, seconds=seconds)
        # Where nothing is sent no time is predicted; any other time may be that of some network.
        for what, timed in (("the plan", plan), *((f"step {at}", step) for at, step in enumerate(plan.steps, 1))):
            if timed.seconds and not timed.launches:
                raise PlanError(f"the JSON says seconds {timed.seconds} of {what}, which sends nothing; plan it again")
        made = plan.to_dict()
        compare_figures(data, made, "the plan")
        for number, (step, again) in enumerate(zip(data["steps"], made["steps"], strict=True), 1):
            compare_figures(step, again, f"step {number}")
        return plan

    def __repr__(self) -> str:
        """One line, in which long tables of pieces are shortened; `str` is the table of the steps."""
        moved = f"received {bytes_text(self.received_bytes)}, {counted(self.launches, 'launch')}"
        return f"<Plan {self.source} -> {self.target}: {list_kinds(self)}; {moved}>"

    def __str__(self) -> str:
        meshes = f"{self.source.mesh} to {self.target.mesh}" if self.crosses else str(self.source.mesh)
        view = "" if self.view is None or self.view.plain else f", view {self.view}"
        held = "" if self.holding is None else f", have {self.holding.layout}, changed {self.holding.stale}"
        head = f"{self.source} -> {self.target} on {meshes}{view}{held}"
        rows = [["step", "type after it", *(["sent"] if self.crosses else []), "received", "live"]]
        for step in self.steps:
            figures = [*([step.sent_bytes] if self.crosses else []), step.received_bytes, step.live_bytes]
            rows.append([step.kind, str(step.result), *map(bytes_text, figures)])
        sent = f"sent {bytes_text(self.sent_bytes)}, " if self.crosses else ""
        busiest_end = f" and {bytes_text(self.endpoint_bound_bytes)} for the busiest end" if self.crosses else ""
        bound = (
            f"bound {bytes_text(self.lower_bound_bytes)}{busiest_end}{describe_idle_axes(self.idle_axes, '; over ')}"
        )
        total = (
            f"{sent}received {bytes_text(self.received_bytes)} ({bound}), "
            f"{counted(self.launches, 'launch')}, peak {bytes_text(self.peak_bytes)} a device"
        )
        time = "" if self.seconds is None else f", {seconds_text(self.seconds)} predicted"
        return "\n".join([head, *(align_columns(rows, 2) if self.steps else ["  nothing to do"]), total + time])


def chain(
    source: Layout,
    target: Layout,
    specs: Sequence[StepSpec],
    donate: bool = False,
    seconds: Sequence[float | None] | None = None,
    view: View | None = None,
) -> Plan:
    """Builds the plan of these steps; each starts from the result of the one before.

    The source is kept until the last step is done, or with `donate` until the first one is.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> source, target = Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh)
    >>> chain(source, target, [StepSpec("all_gather", target)]).received_bytes
    48
    """
    _check_parts(source, target, ())
    if not isinstance(specs, Sequence) or not all(isinstance(spec, StepSpec) for spec in specs):  # pyright: ignore
        raise PlanError(f"{quoted(specs)} is not a list of StepSpec; give one for each step")
    donate = checked_flag(donate, "donate")
    times = read_items([None] * len(specs) if seconds is None else seconds)
    if times is None or len(times) != len(specs):
        raise PlanError(f"seconds {quoted(seconds)} of {len(specs)} steps: give a list of one time for each, or None")
    for kind, result, mode in cast("Sequence[tuple[Any, Any, Any]]", specs):
        whole_spec = isinstance(kind, str) and isinstance(result, Layout) and isinstance(mode, StepMode)
        if not whole_spec or not isinstance(mode.view, View | None):
            Step(kind, source, result, mode)  # Its constructor says what is wrong.
    steps: list[Step] = []
    at = source
    retained = _list_retained_bytes(source, target, specs, donate)
    for spec, time, kept in zip(specs, times, retained, strict=True):
        steps.append(Step(spec.kind, at, spec.result, spec.mode, kept, time))
        at = spec.result
    known = [step.seconds for step in steps if step.seconds is not None]
    total = sum(known) if known and len(known) == len(steps) else None
    holding = next((step.mode.holding for step in steps if step.mode.holding is not None), None)
    return Plan(source, target, tuple(steps), donate, total, view, holding)


def floor_bytes(source: Layout, target: Layout, donate: bool = False) -> int:
    """The least peak memory of any plan, in bytes: source and target, or the larger of the two.

    It is the larger one with `donate`, or where no device has both.

    The planner meets every budget from here on, with one exception: with a donated source, layouts that are uneven or
    have no common refinement may need more, since their exchange cannot overwrite the source.

    >>> from reshard.types import Mesh
    >>> source, target = (Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4]", "f32[16]"))
    >>> floor_bytes(source, target), floor_bytes(source, target, donate=True)
    (80, 64)
    """
    if source == target:
        return source.tile_bytes
    if donate or disjoint(source.mesh, target.mesh):
        return max(source.tile_bytes, target.tile_bytes)
    return source.tile_bytes + target.tile_bytes


def _list_retained_bytes(source: Layout, target: Layout, specs: Sequence[StepSpec], donate: bool) -> list[int]:
    """The bytes beside each step, of what is kept that is on some of the step's devices."""
    retained: list[int] = []
    at = source
    for spec, (keeps_source, waits) in zip(specs, _list_kept(source, specs, donate), strict=True):
        result, kept = spec.result, 0
        if keeps_source and not (disjoint(source.mesh, at.mesh) and disjoint(source.mesh, result.mesh)):
            kept = source.tile_bytes
        if waits and not (disjoint(target.mesh, at.mesh) and disjoint(target.mesh, result.mesh)):
            # `Step.live_bytes` takes the larger of two tiles that no device has together. A device of the target has
            # that target beside its tile of the result, so what the result is larger by is added.
            larger = max(0, result.tile_bytes - at.tile_bytes) if at.mesh != result.mesh else 0
            kept += target.tile_bytes + larger
            holding = specs[-1].mode.holding
            if holding is not None and holding.layout != target:  # What is held in other tiles stays beside these.
                kept += holding.layout.tile_bytes
        retained.append(kept)
        at = result
    return retained


def _list_kept(source: Layout, specs: Sequence[StepSpec], donate: bool) -> list[tuple[bool, bool]]:
    """Whether each step has the source beside it, unless that is donated or the operand itself; and, before a step that
    fills part of the target, whether the target waits."""
    fills = next((n for n, spec in enumerate(specs) if spec.mode.fills), 0)
    kept: list[tuple[bool, bool]] = []
    at, is_source = source, True
    for number, spec in enumerate(specs):
        kept.append((not donate and not is_source, number < fills))
        # A view that leaves every tile's memory as it is makes no copy: the source is still the operand after it.
        is_source = is_source and spec.mode.view is not None and keeps_memory(spec.kind, at, spec.result, spec.mode)
        at = spec.result
    return kept


def _check_parts(source: object, target: object, steps: object) -> None:
    """Refuses what is not a plan's source, target and steps at all."""
    for what, layout in (("source", source), ("target", target)):
        if not isinstance(layout, Layout):
            raise PlanError(f"the {what} {quoted(layout)} of a plan is not a Layout; read it with Layout.parse")
    given = cast("tuple[object, ...]", steps) if isinstance(steps, tuple) else None
    if given is None or not all(isinstance(step, Step) for step in given):
        raise PlanError(f"the steps {quoted(cast('object', steps))} of a plan are not a tuple of Step; use chain()")


# Batches: plans that run together, so that each of their steps is one launch for all of their arrays.
#
#     mesh <x=4>      w: all_gather f32[{x}4, 8] -> f32[16, 8]      packed: 32 elements, arrived: 128
#                     b: all_gather f32[{x}2]    -> f32[8]          packed:  2 elements, arrived:   8
#                     one all_gather of 34 elements for both: 1 launch, 408 bytes received
#
# The arrays may differ in shape and size. What must agree, step by step, is the lane: the kind, the devices that
# exchange blocks, their order, and the dtype (`rules.lane`). A batch of several arrays packs their blocks into one
# buffer, and unpacks them from another; `Batch.scratch_bytes` counts both.


@dataclass(frozen=True)
class Batch:
    """Plans that run together, under the names of their arrays; one plan alone is a batch as well.

    `seconds` is the predicted time of the whole batch, None without a network. Raises `PlanError` for plans whose steps
    cannot share launches.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=4)
    >>> w = rs.plan(rs.Layout.parse("f32[{x}4, 8]", mesh), rs.Layout.parse("f32[16, 8]", mesh))
    >>> b = rs.plan(rs.Layout.parse("f32[{x}2]", mesh), rs.Layout.parse("f32[8]", mesh))
    >>> batch = Batch(("w", "b"), (w, b))
    >>> batch.launches, batch.received_bytes == w.received_bytes + b.received_bytes
    (1, True)
    """

    names: tuple[str, ...]
    plans: tuple[Plan, ...]
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = cast("tuple[object, object]", (self.names, self.plans))
        names, plans = (cast("tuple[object, ...]", each) if isinstance(each, tuple) else () for each in given)
        if not plans or not all(isinstance(plan, Plan) for plan in plans):
            raise PlanError(f"the plans {quoted(plans)} of a batch are not a tuple of at least one Plan")
        if len(names) != len(plans) or not all(isinstance(name, str) for name in names):
            raise PlanError(
                f"the names {quoted(names)} of {len(plans)} plans of a batch: give a tuple of one text for each"
            )
        object.__setattr__(self, "seconds", checked_seconds(self.seconds))
        first = self.plans[0]
        for name, plan in zip(self.names[1:], self.plans[1:], strict=True):
            if plan != first and list_lanes(plan) != list_lanes(first):
                raise PlanError(
                    f"{self.names[0]} ({list_kinds(first)}) and {name} ({list_kinds(plan)}) cannot share launches: "
                    f"their steps are not of the same kinds, in the same groups of devices, on the same dtype; put "
                    f"them in two batches"
                )
        if len(self.plans) > 1 and list_lanes(first) is None:
            raise PlanError(f"the plan of {self.names[0]} ({list_kinds(first)}) shares its launches with no other plan")

    @property
    def steps(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of the batch, one after another: for each, the steps of its plans."""
        return tuple(zip(*(plan.steps for plan in self.plans), strict=True))

    @cached_property
    def launches(self) -> int:
        """Collective calls: those of one plan; where senders and receivers differ, as many as all of them take."""
        if len(self.plans) == 1:
            return self.plans[0].launches
        return sum(count_joint_rounds([step.judgement for step in steps]) for steps in self.steps)

    @property
    def received_bytes(self) -> int:
        """The sum of what the busiest device receives of each plan."""
        return sum(plan.received_bytes for plan in self.plans)

    @cached_property
    def scratch_bytes(self) -> tuple[int, ...]:
        """For each step, the bytes of buffers beside operands and results: each plan's own where it is alone or stays
        on its device, else the shared ones."""
        return tuple(
            sum(step.cost.scratch for step in steps)
            if len(steps) == 1 or not steps[0].cost.launches
            else _count_buffers(steps)
            for steps in self.steps
        )

    def footprint(self, kinds: DeviceKinds, arrays: LiveArrays | None = None) -> Footprint:
        """What the batch needs of the memory of each kind of device, if it runs when these arrays are there.

        For one array on one set of devices, the most while it runs is `Plan.peak_bytes`, which has a closed form.
        """
        arrays = LiveArrays(self.names, self.plans) if arrays is None else arrays
        # Of plans that share no array, equal ones need the same, and those on the same sets of devices add up.
        alone, together = Counter[Plan](), list[tuple[str, Plan]]()
        for name, plan in zip(self.names, self.plans, strict=True):
            if name in arrays.together:
                together.append((name, plan))
            else:
                alone[plan] += 1
        groups: dict[int, tuple[Sequence[int], list[tuple[_Needs, int]]]] = {}
        for plan, count in alone.items():
            few, numbers = kinds.among(_list_meshes(plan))
            needs = few.known.get(plan)
            if needs is None:
                batch = Batch(("",), (plan,))
                needs = few.known[plan] = _list_needs([("", plan)], LiveArrays(("",), (plan,)), batch, few)
            groups.setdefault(id(few), (numbers, []))[1].append((needs, count))
        each = [*groups.values()]
        if together:
            each.append((range(kinds.count), [(_list_needs(together, arrays, self, kinds), 1)]))

        def add_up(bytes_of: Callable[[_Needs], Bytes]) -> Bytes:
            totals: list[Iterable[int]] = []
            for numbers, needs in each:
                sums = [*map(sum, zip(*([n * count for n in bytes_of(one)] for one, count in needs), strict=True))]
                totals.append([sums[number] for number in numbers])
            return tuple(map(sum, zip(*totals, strict=True)))

        before, after = add_up(lambda needs: needs.before), add_up(lambda needs: needs.after)
        live = [before, add_up(lambda needs: needs.last)]
        for number, scratch in enumerate(self.scratch_bytes):
            held: Bytes = (0,) * kinds.count
            for numbers, needs in each:
                there = [*map(max, zip(*(one.buffers[number] for one, _ in needs), strict=True))]
                held = tuple([max(one, there[at]) for one, at in zip(held, numbers, strict=True)])
            step = add_up(lambda needs: needs.steps[number])  # noqa: B023
            live.append(tuple(nbytes + scratch * one for nbytes, one in zip(step, held, strict=True)))
        return Footprint(before, tuple(map(max, zip(*live, strict=True))), after)

    def __str__(self) -> str:
        return f"{list_kinds(self.plans[0])} of {', '.join(self.names)}"


class _Needs(NamedTuple):
    """What some plans need together: before, after, and at the moment between when what others read has been copied;
    in each step without its buffers, and on which kinds of devices it has these."""

    before: Bytes
    after: Bytes
    last: Bytes
    steps: tuple[Bytes, ...]
    buffers: tuple[Bytes, ...]


def _list_needs(named: Sequence[tuple[str, Plan]], arrays: LiveArrays, batch: Batch, kinds: DeviceKinds) -> _Needs:
    """What some of a batch's plans need, each array counted once."""
    freed = arrays.freed_by(batch)
    before, after, copied = (dict[str, Bytes]() for _ in range(3))
    ends = [arrays.ends_of(name) for name, _ in named]
    for (_, plan), (source, target) in zip(named, ends, strict=True):
        before[source] = kinds.tile(plan.source)
        if source not in freed:
            after[source] = before[source]
        if target in arrays.there:
            before[target] = kinds.tile(plan.target)
        if plan.steps or arrays.is_shared(source):
            after[target] = kinds.tile(plan.target)
        if plan.spreads and plan.have is not None:  # What is held in other tiles stays as it is.
            before[f"held {target}"] = after[f"held {target}"] = kinds.tile(plan.have)
        if plan.stays and arrays.is_shared(source):  # What lies in an array that others read is copied at the end.
            copied[source] = before[source]
    steps, buffers = list[Bytes](), list[Bytes]()
    for each in zip(*(plan.phases for _, plan in named), strict=True):
        there, own = dict[str, Bytes](), list[Bytes]()
        held: Bytes = (0,) * kinds.count  # The kinds that have an operand or a result, and so the step's buffers.
        for (_, plan), phase, (source, target) in zip(named, each, ends, strict=True):
            step, operand, result = phase.step, kinds.tile(phase.step.operand), kinds.tile(phase.step.result)
            both: Bytes = tuple(map(step.join_tiles, operand, result))
            if phase.of_source or source not in freed:
                there[source] = before[source]
            if plan.spreads and plan.have is not None:
                there[f"held {target}"] = kinds.tile(plan.have)
            if phase.of_source:
                both = _subtract_bytes(both, operand)
            if phase.in_target or phase.waits:  # Runtimes make a new target before the first step of the batch.
                there[target] = kinds.tile(plan.target)
            if phase.in_target:
                both = _subtract_bytes(both, result)
            own.append(both)
            held = tuple(map(max, held, kinds.of(step.operand.mesh), kinds.of(step.result.mesh)))
        steps.append(kinds.total([*own, *there.values()]))
        buffers.append(held)
    ends_of_batch = [kinds.total(each.values()) for each in (before, after, {**after, **copied})]
    return _Needs(ends_of_batch[0], ends_of_batch[1], ends_of_batch[2], tuple(steps), tuple(buffers))


def device_kinds(plans: Iterable[Plan]) -> DeviceKinds:
    """The kinds of devices that the steps of some plans run on."""
    return DeviceKinds(dict.fromkeys(itertools.chain.from_iterable(map(_list_meshes, dict.fromkeys(plans)))))


def _list_meshes(plan: Plan) -> list[Mesh]:
    held = [] if plan.have is None else [plan.have.mesh]
    return [plan.source.mesh, *(step.result.mesh for step in plan.steps), *held]


def _subtract_bytes(one: Bytes, other: Bytes) -> Bytes:
    return tuple(here - there for here, there in zip(one, other, strict=True))


class LiveArrays:
    """Which arrays of a tree are there while its batches run, one after another.

        q, k, v -> qkv, donated       at first q k v        after q's batch k v qkv      after all qkv
        qkv -> q, k, v, donated       at first qkv          after q's batch qkv q        after all q k v

    An array counts once, whatever number of moves read or fill it. A donated source is freed after the last of those
    that read it, and a target is made by the first that fills a part of it, unless it is one of those that are `given`.
    """

    def __init__(
        self,
        names: Sequence[str],
        plans: Sequence[Plan],
        ends: tuple[Sequence[str], Sequence[str]] | None = None,
        given: Iterable[str] | None = None,
    ) -> None:
        sources, targets = (names, names) if ends is None else ends
        self._ends = {
            name: (f"<{source}", f">{target}") for name, source, target in zip(names, sources, targets, strict=True)
        }
        self._layouts: dict[str, Layout] = {}
        self._readers = Counter[str]()
        self._freed = set[str]()
        self.there = set[str]() if given is None else {f">{target}" for target in given}
        for plan, (source, target) in zip(plans, self._ends.values(), strict=True):
            self._readers[source] += 1
            self._layouts[source], self._layouts[target] = plan.source, plan.target
            if given is None and plan.fills:
                self.there.add(target)
        self._shared = frozenset(source for source, count in self._readers.items() if count > 1)
        self.any_shared = len(self._layouts) < 2 * len(self._ends)
        # The moves that share an array with another, or may, since they fill a part of one.
        self.together = {name for name, plan in zip(names, plans, strict=True) if plan.fills}
        if self._shared:
            self.together.update(name for name, (source, _) in self._ends.items() if source in self._shared)

    def ends_of(self, name: str) -> tuple[str, str]:
        """What stands for the arrays that a move reads and fills."""
        return self._ends[name]

    def is_shared(self, source: str) -> bool:
        """Whether several moves read a source."""
        return source in self._shared

    def freed_by(self, batch: Batch) -> set[str]:
        """The donated sources that no later batch reads."""
        reads = Counter(self._ends[name][0] for name in batch.names)
        return {
            source
            for name, plan in zip(batch.names, batch.plans, strict=True)
            if plan.donate
            and reads[source := self._ends[name][0]] == self._readers[source]
            and (plan.steps or source in self._shared)
        }

    def run(self, batch: Batch, kinds: DeviceKinds) -> Footprint:
        """What a batch needs that runs next; goes on to what is there after it."""
        needs = batch.footprint(kinds, self)
        self._freed |= self.freed_by(batch)
        for name, plan in zip(batch.names, batch.plans, strict=True):
            source, target = self._ends[name]
            self._readers[source] -= 1
            if plan.steps or source in self._shared:  # Else the source is the target.
                self.there.add(target)
        return needs

    def within(self, batches: Iterable[Batch]) -> LiveArrays:
        """The arrays of some batches, whose arrays no others have; also a copy, to look ahead."""
        ends = {end for batch in batches for name in batch.names for end in self._ends[name]}
        other = copy(self)
        other._readers = Counter({source: count for source, count in self._readers.items() if source in ends})
        other._freed, other.there = self._freed & ends, self.there & ends
        return other

    @property
    def tile_bytes(self) -> int:
        """The bytes of one tile of each array."""
        return sum(layout.tile_bytes for layout in self._layouts.values())

    def live_bytes(self, kinds: DeviceKinds) -> Bytes:
        """The bytes of the arrays that are there, on a device of each kind."""
        live = (*(self._readers.keys() - self._freed), *self.there)
        return kinds.total(kinds.tile(self._layouts[each]) for each in live)


def list_lanes(plan: Plan) -> tuple[object, ...] | None:
    """What two plans must have in common to be of one batch; None for a plan that shares its launches with no other."""
    keys: list[object] = [plan.donate]
    for step in plan.steps:
        lane = step_lane(*step.judgement)
        if lane is None:
            return None
        # Between sets of devices, where a step is that sends nothing does not matter.
        local = plan.crosses and not step.launches
        keys.append(("here", step.kind, step.operand.dtype, step.result.dtype) if local else lane.key)
    return tuple(keys)


def buffer_bytes(plan: Plan) -> int:
    """The most bytes of shared buffers that a plan needs to share its launches with others, in any of its steps.

    Of a relay that gathers it is what groups gather: what devices send and are sent first, others do for other arrays.
    """
    most = 0
    for step in plan.steps:
        if step.mode.gathers:
            figures = gathering_figures(step.operand, step.result, step.mode.view)
            most = max(most, step.wire.nbytes(figures.gathered))
        elif step.cost.launches:
            most = max(most, _count_buffers((step,)))
    return most


def _count_buffers(steps: Sequence[Step]) -> int:
    """The buffers in which the blocks of one step leave and arrive, both live at once, beside operands and results."""
    if len(steps) > 1 and steps[0].mode.gathers:
        return steps[0].wire.nbytes(count_gathering_buffers((s.operand, s.result, s.mode.view) for s in steps))
    lanes = [lane for step in steps if (lane := step_lane(*step.judgement)) is not None]
    return steps[0].wire.nbytes(sum(lane.packed + lane.arrived for lane in lanes))


def list_kinds(plan: Plan) -> str:
    """The kinds of a plan's steps, one after another."""
    return ", ".join(step.kind for step in plan.steps) or "nothing to do"


# Plans of many arrays as one: which arrays move together, in which order, and what lives on the devices meanwhile.
#
#     {"w": f32[{x}4, 8] -> f32[16, 8], "layers": [{"b": f32[{x}2] -> f32[8]}]}
#
#     names      w, layers.0.b: the keys on the way to a move, joined by dots
#     sources    the array that each move reads, by default one of the move's own name; targets likewise
#     batches    moves whose steps share launches, in the order in which they run
#     figures    sums over batches, and maxima over devices of sums: the busiest device of all arrays together
#
# Moves that fill parts of one target may not overlap. Where they cover it, it is made new, by the first of them.
# Otherwise it must be given, and what they leave out stays as it is.


@dataclass(frozen=True, repr=False)
class TreePlan(ShownPlan):
    """Checked plans of many moves, in batches; `names` lists the moves in the order in which they were given.

    `sources` and `targets` say, for each of `names`, which array it reads and which it fills: those of its own name,
    unless several moves read one array, or fill parts of one. Bytes are those of the busiest device. Raises `PlanError`
    for names that are not those of the batches, for one array in two layouts, and for parts that overlap.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=4)
    >>> rows, whole = rs.Layout.parse("f32[{x}4, 8]", mesh), rs.Layout.parse("f32[16, 8]", mesh)
    >>> tree = rs.plan_tree({"w": (rows, whole), "v": (rows, whole)})
    >>> tree.names, len(tree.batches), tree.launches, tree.received_bytes, tree.plans["w"].received_bytes
    (('w', 'v'), 1, 1, 768, 384)
    """

    names: tuple[str, ...]
    batches: tuple[Batch, ...]
    sources: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fields = {"names": str, "batches": Batch, "sources": str, "targets": str}
        for what, kind in fields.items():
            listed = cast("object", getattr(self, what))
            listed = cast("tuple[object, ...]", listed) if isinstance(listed, tuple) else None
            if listed is None or not all(isinstance(each, kind) for each in listed):
                given = cast("object", getattr(self, what))
                raise PlanError(f"the {what} {quoted(given)} of a tree are not a tuple of {kind.__name__}")
        moved = Counter(name for batch in self.batches for name in batch.names)
        wanted = Counter(self.names)
        if moved != wanted or any(count > 1 for count in wanted.values()):
            wrong = sorted({*(moved - wanted), *(wanted - moved), *(n for n, count in wanted.items() if count > 1)})
            raise PlanError(f"each array of a tree is in one batch; {quoted(wrong[:4])} are in none, or in several")
        for what, arrays in (("sources", self.sources), ("targets", self.targets)):
            arrays = arrays or self.names
            if len(arrays) != len(self.names):
                raise PlanError(
                    f"{len(arrays)} {what} of a tree of {len(self.names)} moves: give the name of one array for each, "
                    f"or () for arrays of the moves' own names"
                )
            object.__setattr__(self, what, arrays)
        if self.sources != self.names:
            self._check_sources()
        if self.targets != self.names:
            self._check_targets()

    def _check_sources(self) -> None:
        for source, moves in group_moves(self.names, self.sources).items():
            first = self.plans[moves[0]]
            for name in moves[1:]:
                plan = self.plans[name]
                if plan.source != first.source:
                    raise PlanError(
                        f"{moves[0]} reads {quoted(source)} as {first.source} on {first.source.mesh}, and {name} as "
                        f"{plan.source} on {plan.source.mesh}; an array has one layout"
                    )
                if plan.donate != first.donate:
                    raise PlanError(f"one of {moves[0]} and {name} donates {quoted(source)}, and both read it")
            for name in moves if len(moves) > 1 else ():
                if any(phase.of_source and phase.step.mode.in_place for phase in self.plans[name].phases):
                    raise PlanError(
                        f"{name} overwrites {quoted(source)}, which {len(moves)} moves read; plan them anew"
                    )

    def _check_targets(self) -> None:
        for target, moves in self.parts.items():
            plans = [self.plans[name] for name in moves]
            for name, plan in zip(moves, plans, strict=True):
                if plan.target != plans[0].target:
                    raise PlanError(
                        f"{moves[0]} fills {quoted(target)} as {plans[0].target} on {plans[0].target.mesh}, and {name} "
                        f"as {plan.target} on {plan.target.mesh}; an array has one layout"
                    )
                if plan.fills and not all(phase.in_target for phase in plan.phases[-1:]):
                    raise PlanError(
                        f"{name} moves on what it has written to its part of {quoted(target)}; plan it anew"
                    )
            overlap = find_overlap(tuple(map(_view_of, plans))) if len(moves) > 1 else None
            if overlap is not None:
                one, other, index = overlap
                raise PlanError(
                    f"{moves[one]} and {moves[other]} both fill element {list(index)} of {quoted(target)} "
                    f"({plans[0].target}); give parts of one target that do not overlap"
                )

    def to_descriptors(self) -> dict[str, Descriptors]:
        """The transfers of each move by its name, as `Plan.to_descriptors` lists them; `source_of` and `target_of` say
        between which arrays.

        A turn of a move waits for the turn before it of the same move, and for no other. `reshard.verify` proves them
        all together. Plans that are equal have one list.

        >>> import reshard as rs
        >>> half, both = (rs.Layout.parse(text, rs.Mesh(x=2)) for text in ("f32[{x}4]", "f32[2, {x}4]"))
        >>> parts = {name: rs.Move(half, both, into={0: at}) for at, name in enumerate("ab")}
        >>> tree = rs.plan_tree(parts, targets={"a": "both", "b": "both"})
        >>> [tuple(each) for each in tree.to_descriptors()["b"]]
        [(0, 0, 0, 4, (4,), (1,), (1,), 0), (1, 1, 0, 4, (4,), (1,), (1,), 0)]
        """
        made: dict[Plan, Descriptors] = {}
        for name, plan in self.plans.items():
            if plan not in made:
                with NamedErrors(name):
                    made[plan] = plan.to_descriptors()
        return {name: made[plan] for name, plan in self.plans.items()}

    def schedule_for(self, device: int) -> tuple[dict[str, DeviceStep], ...]:
        """What one device sends, receives and copies in each turn, by the names of the moves in which it does any.

        >>> import reshard as rs
        >>> before, after = (rs.Layout.parse(text, rs.Mesh(x=2)) for text in ("f32[{x}4]", "f32[8]"))
        >>> tree = rs.plan_tree({"w": (before, after), "v": (before, after)})
        >>> [{name: len(step.sends) for name, step in turn.items()} for turn in tree.schedule_for(1)]
        [{'w': 1, 'v': 1}]
        """
        turns: list[dict[str, DeviceStep]] = []
        made: dict[Plan, tuple[DeviceStep, ...]] = {}
        number = whole(device)
        for name, plan in self.plans.items():
            if plan not in made and number in {*plan.source.mesh.devices, *plan.target.mesh.devices}:
                with NamedErrors(name):
                    made[plan] = plan.schedule_for(device)
            for at, step in enumerate(made.get(plan, ())):
                turns += [{}] * (at + 1 - len(turns))
                if step.sends or step.receives or step.copies:
                    turns[at] = {**turns[at], name: step}
        if not made and self.plans:
            raise PlanError(
                f"device {quoted(device)} is in no source or target of the tree; give the id of one that is"
            )
        return tuple(turns)

    @cached_property
    def source_of(self) -> Mapping[str, str]:
        """The array that each move reads."""
        return dict(zip(self.names, self.sources, strict=True))

    @cached_property
    def target_of(self) -> Mapping[str, str]:
        """The array that each move fills, or fills a part of."""
        return dict(zip(self.names, self.targets, strict=True))

    @cached_property
    def source_layouts(self) -> Mapping[str, Layout]:
        """The layouts of the arrays that are read, by name."""
        return {source: self.plans[name].source for name, source in self.source_of.items()}

    @cached_property
    def target_layouts(self) -> Mapping[str, Layout]:
        """The layouts of the arrays that are filled, by name."""
        return {target: self.plans[name].target for name, target in self.target_of.items()}

    @cached_property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """The moves that fill each target."""
        return group_moves(self.names, self.targets)

    @cached_property
    def filled(self) -> tuple[str, ...]:
        """The targets of which something is left as it is, so that whoever runs the tree must give them: parts that no
        move fills, or what devices hold already."""
        filled: list[str] = []
        for target, moves in self.parts.items():
            plans = [self.plans[name] for name in moves]
            held = any(plan.holding is not None for plan in plans)
            if held or (plans[0].fills and find_uncovered(tuple(map(_view_of, plans))) is not None):
                filled.append(target)
        return tuple(filled)

    @cached_property
    def arrays(self) -> LiveArrays:
        """The arrays that are there at first."""
        plans = [self.plans[name] for name in self.names]
        return LiveArrays(self.names, plans, (self.sources, self.targets), self.filled)

    def footprints(self, kinds: DeviceKinds) -> list[Footprint]:
        """What each batch needs of the memory of each kind of device, in its turn."""
        arrays = self.arrays.within(self.batches)
        return [arrays.run(batch, kinds) for batch in self.batches]

    @cached_property
    def plans(self) -> Mapping[str, Plan]:
        """The plan of each array, by name."""
        plans = {name: plan for batch in self.batches for name, plan in zip(batch.names, batch.plans, strict=True)}
        return {name: plans[name] for name in self.names}

    @cached_property
    def received_bytes(self) -> int:
        """Bytes that the busiest device receives of all arrays together."""
        loads = ((step, received_in_step(*step.judgement), count) for step, count in self._steps.items())
        return busiest_bytes((step.result.mesh, received, count) for step, received, count in loads)

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that the busiest device sends of all arrays together."""
        loads: list[tuple[Mesh, ByDevice, int]] = []
        for step, count in self._steps.items():
            sent = step_loads(*step.judgement).sent
            if step.mode.relay:  # Its second turn is sent by devices of the result, which may be others.
                sent = ByDevice(0, dict.fromkeys({*step.operand.mesh.devices, *step.result.mesh.devices}, sent.most))
            loads.append((step.operand.mesh, sent, count))
        return busiest_bytes(loads)

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Bytes that some device receives, whatever the plans: the maximum over devices of the sum over arrays."""
        return joint_lower_bound(self.ends)

    @cached_property
    def endpoint_bound_bytes(self) -> int:
        """Bytes that some device sends or receives, whatever the plans: together, and of each array."""
        return max(self.lower_bound_bytes, joint_endpoint_bound(self.ends))

    @property
    def ends(self) -> Iterator[Ends]:
        """The moves that the joint bounds add up: of those that read the same elements of one array, the largest.

        What two moves need of one element may reach a device together, and leave its holder once.
        """
        for moves in group_moves(self.names, self.sources).values():
            counted_views: list[View] = []
            plans = [self.plans[name] for name in moves]
            if len(plans) == 1:
                yield plans[0].source, plans[0].target, plans[0].view, plans[0].holding
                continue
            for plan in sorted(plans, key=lambda plan: -plan.lower_bound_bytes):
                taken = invert_view(_view_of(plan))
                if all(find_overlap((other, taken)) is None for other in counted_views):
                    counted_views.append(taken)
                    yield plan.source, plan.target, plan.view, plan.holding

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
        """The most bytes live on a device of each kind; see `plans.step`."""
        kinds = device_kinds(self.plans.values())
        return find_peaks(self.footprints(kinds), live=self.arrays.live_bytes(kinds))

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of all batches, one after another; None without a network."""
        times = [batch.seconds for batch in self.batches if batch.seconds is not None]
        return sum(times) if times and len(times) == len(self.batches) else None

    @cached_property
    def _steps(self) -> Counter[Step]:
        """The different steps, and how often each occurs: many arrays take the same ones."""
        return Counter(step for plan in self.plans.values() for step in plan.steps)

    def to_dict(self) -> dict[str, Any]:
        """The tree as the plain data of `to_json`."""
        numbers = {plan: number for number, plan in enumerate(dict.fromkeys(self.plans.values()))}
        batches = [
            {"names": list(batch.names), "plans": [numbers[plan] for plan in batch.plans], "seconds": batch.seconds}
            for batch in self.batches
        ]
        plans = [plan.to_dict() for plan in numbers]
        shared = {
            what: list(arrays)
            for what, arrays in (("sources", self.sources), ("targets", self.targets))
            if arrays != self.names
        }
        names = {"format": FORMAT, "names": list(self.names), **shared}
        return {**names, "plans": plans, "batches": batches, **self._figures}

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
        batches: list[Batch] = []
        for batch in fields.objects("batches", "batch"):
            numbers = batch.listed("plans", int)
            if any(whole(number, 0, len(plans) - 1) is None for number in numbers):
                raise batch.error(f"plans are {quoted(numbers)}, but there are {len(plans)}, counted from 0")
            named = tuple(batch.listed("names", str))
            batches.append(Batch(named, tuple(plans[number] for number in numbers), read_seconds(batch)))
            _check_batch_seconds(batches[-1])
        shared = (tuple(fields.listed(what, str)) if what in fields.data else () for what in ("sources", "targets"))
        tree = cls(tuple(fields.listed("names", str)), tuple(batches), *shared)
        compare_figures(fields.data, tree._figures, "the tree")
        return tree

    def __repr__(self) -> str:
        made = f"{counted(len(self.names), 'move')} in {counted(len(self.batches), 'batch')}"
        return f"<TreePlan {made}: received {bytes_text(self.received_bytes)}, {counted(self.launches, 'launch')}>"

    def __str__(self) -> str:
        rows = [("batch", "arrays", "steps", "received", "launches")]
        for number, batch in enumerate(self.batches, 1):
            members = join_first(batch.names, 1)
            steps = list_kinds(batch.plans[0])
            rows.append((str(number), members, steps, bytes_text(batch.received_bytes), str(batch.launches)))
        time = "" if self.seconds is None else f", {seconds_text(self.seconds)} predicted"
        ends = counted(len(self.source_layouts), "source"), counted(len(self.target_layouts), "target")
        shared = (self.sources, self.targets) != (self.names, self.names)
        arrays = (
            f"{counted(len(self.names), 'move')}, {' to '.join(ends)}," if shared else counted(len(self.names), "array")
        )
        return "\n".join(
            [
                f"{arrays} in {counted(len(self.batches), 'batch')}",
                *align_columns(rows, 3),
                f"received {bytes_text(self.received_bytes)} (bound {bytes_text(self.lower_bound_bytes)}), "
                f"{counted(self.launches, 'launch')}, peak {bytes_text(self.peak_bytes)} a device{time}",
                f"largest load of a device: memory {bytes_text(self.peak_bytes)} + network "
                f"{bytes_text(self.received_bytes + self.sent_bytes)}",
            ]
        )


def group_moves(names: Sequence[str], arrays: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The moves of each array.

    >>> group_moves(("q", "k", "o"), ("qkv", "qkv", "o"))
    {'qkv': ('q', 'k'), 'o': ('o',)}
    """
    groups: dict[str, list[str]] = {}
    for name, array in zip(names, arrays, strict=True):
        groups.setdefault(array, []).append(name)
    return {array: tuple(moves) for array, moves in groups.items()}


def _view_of(plan: Plan) -> View:
    return View.identity(plan.target.shape) if plan.view is None else plan.view


def _check_batch_seconds(batch: Batch) -> None:
    """Refuses predicted seconds of a batch that those of its plans cannot make: what does not depend on bytes is spent
    once, by the first of them."""
    times = [plan.seconds for plan in batch.plans if plan.seconds is not None]
    known = len(times) == len(batch.plans)
    first, total = (times[0], sum(times)) if known else (0.0, 0.0)
    least, most = (each * (1 + slack) for each, slack in ((first, -1e-9), (total, 1e-9)))
    if known != (batch.seconds is not None) or not least <= (batch.seconds or 0.0) <= most:
        of = f"those of its plans make {first} to {total}" if known else "not all of its plans have seconds"
        raise PlanError(
            f"the JSON says seconds {quoted(batch.seconds)} of the batch of {quoted(batch.names[:4])}, but {of}; plan "
            f"it again"
        )


AnyPlan = Plan | TreePlan
"""A plan of one array or of many: readers find `names`, `plans`, `batches` and the figures in both."""


def find_idle_axes(source: Layout, target: Layout, between: Iterable[Layout]) -> tuple[str, ...]:
    """The sub-axes that layouts on the way use and neither end does, major first: it is replicated along them."""
    mesh = source.mesh
    if target.mesh != mesh:
        return ()

    def used(layout: Layout) -> set[tuple[int, int]]:
        """The (stride, prime) factors of the device positions that hold digits or are partial."""
        return {prime for axis in (*layout.held, *layout.partial) for prime in prime_places(mesh, axis)}

    way = set[tuple[int, int]]().union(*(used(layout) for layout in between if layout.mesh == mesh))
    joined: list[tuple[int, int]] = []
    for stride, size in sorted(way - used(source) - used(target)):
        axis = mesh.axis_at(stride)
        if joined and joined[-1][0] * joined[-1][1] == stride and mesh.axis_at(joined[-1][0]) == axis:
            stride, size = joined[-1][0], joined.pop()[1] * size
        joined.append((stride, size))
    return tuple(mesh.spell(sub) for stride, size in reversed(joined) for sub in mesh.sub_axes(stride, size))


def describe_idle_axes(axes: Sequence[str], before: str = "") -> str:
    """The idle axes in a sentence, after what goes before them; nothing if there are none."""
    return f"{before}the idle {'axis' if len(axes) == 1 else 'axes'} {sentence(axes)}" if axes else ""


def align_columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The lines of a table, of whose columns the first `left` are aligned to the left, and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]

"""Batches: plans that run together, so that each of their steps is one launch for all of their arrays.

    mesh <x=4>      w: all_gather f32[{x}4, 8] -> f32[16, 8]      packed: 32 elements, arrived: 128
                    b: all_gather f32[{x}2]    -> f32[8]          packed:  2 elements, arrived:   8
                    one all_gather of 34 elements for both: 1 launch, 408 bytes received

The arrays may differ in shape and size. What must agree, step by step, is the lane: the kind, the devices that exchange
blocks, their order, and the dtype (`rules.lane`). A batch of several arrays packs their blocks into one buffer, and
unpacks them from another; `Batch.live_bytes` counts both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from reshard.errors import PlanError, quoted
from reshard.types.plan import Plan, Step
from reshard.types.rules.lane import Lane, lane
from reshard.types.step import checked_seconds


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
        _check_members(self.names, self.plans)
        object.__setattr__(self, "seconds", checked_seconds(self.seconds))
        first = self.plans[0]
        for name, plan in zip(self.names[1:], self.plans[1:], strict=True):
            if plan != first and lanes(plan) != lanes(first):
                raise PlanError(
                    f"{self.names[0]} ({_way(first)}) and {name} ({_way(plan)}) cannot share launches: their steps are "
                    f"not of the same kinds, in the same groups of devices, on the same dtype; put them in two batches"
                )
        if len(self.plans) > 1 and lanes(first) is None:
            raise PlanError(f"the plan of {self.names[0]} ({_way(first)}) shares its launches with no other plan")

    @property
    def steps(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of the batch, one after another: for each, the steps of its plans."""
        return tuple(zip(*(plan.steps for plan in self.plans), strict=True))

    @property
    def donate(self) -> bool:
        """Whether the sources are freed once their data have moved."""
        return self.plans[0].donate

    @property
    def launches(self) -> int:
        """Collective calls: those of one plan."""
        return self.plans[0].launches

    @property
    def received_bytes(self) -> int:
        """The sum of what the busiest device receives of each plan."""
        return sum(plan.received_bytes for plan in self.plans)

    @cached_property
    def scratch_bytes(self) -> tuple[int, ...]:
        """For each step, the bytes of buffers beside operands and results."""
        return tuple(_scratch(steps) for steps in self.steps)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """For each step, the bytes that its plans need on a device: kept sources, operands, results and buffers."""
        live = (sum(step.live_bytes - step.cost.scratch for step in steps) for steps in self.steps)
        return tuple(tiles + scratch for tiles, scratch in zip(live, self.scratch_bytes, strict=True))

    def __str__(self) -> str:
        return f"{_way(self.plans[0])} of {', '.join(self.names)}"


def lanes(plan: Plan) -> tuple[object, ...] | None:
    """What two plans must have in common to be of one batch; None for a plan that shares its launches with no other.

    >>> import reshard as rs
    >>> rows, whole = (rs.Layout.parse(text, rs.Mesh(x=4)) for text in ("f32[{x}4]", "f32[16]"))
    >>> lanes(rs.plan(rows, whole)) == lanes(rs.plan(rows, whole, donate=True))
    False
    """
    each = [_lane(step) for step in plan.steps]
    if any(one is None for one in each):
        return None
    return (plan.donate, *(one.key for one in each if one is not None))


def _lane(step: Step) -> Lane | None:
    return lane(step.kind, step.operand, step.result, step.mode)


def buffer_bytes(plan: Plan) -> int:
    """The most bytes of shared buffers that a plan needs to share its launches with others, in any of its steps.

    >>> import reshard as rs
    >>> rows, whole = (rs.Layout.parse(text, rs.Mesh(x=4)) for text in ("f32[{x}4]", "f32[16]"))
    >>> buffer_bytes(rs.plan(rows, whole))
    80
    """
    return max((_buffers((step,)) for step in plan.steps if step.cost.launches), default=0)


def _scratch(steps: Sequence[Step]) -> int:
    """The buffers of one step: each plan's own where it is alone or stays on its device, else the shared ones."""
    if len(steps) == 1 or not steps[0].cost.launches:
        return sum(step.cost.scratch for step in steps)
    return _buffers(steps)


def _buffers(steps: Sequence[Step]) -> int:
    """The buffers in which the blocks of one step leave and arrive, both live at once, beside operands and results."""
    each = [one for one in map(_lane, steps) if one is not None]
    return steps[0].operand.nbytes(sum(one.packed + one.arrived for one in each))


def _way(plan: Plan) -> str:
    return ", ".join(step.kind for step in plan.steps) or "nothing to do"


def _check_members(names: object, plans: object) -> None:
    """Refuses what is not a tuple of names and one of as many plans."""
    given = _listed(plans)
    if not given or not all(isinstance(plan, Plan) for plan in given):
        raise PlanError(f"the plans {quoted(given)} of a batch are not a tuple of at least one Plan")
    called = _listed(names)
    if len(called) != len(given) or not all(isinstance(name, str) for name in called):
        raise PlanError(
            f"the names {quoted(called)} of {len(given)} plans of a batch: give a tuple of one text for each"
        )


def _listed(given: object) -> tuple[object, ...]:
    return cast("tuple[object, ...]", given) if isinstance(given, tuple) else ()

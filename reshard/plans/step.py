"""A step: one collective from an operand to a result, checked by the typing rule of its kind as it is built.

The constructor of `Step` calls the rule, so an unchecked step cannot exist. A `StepSpec` is one before it is checked.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from reshard.errors import PlanError, StepError, quoted
from reshard.geometry.figures import most_sent
from reshard.geometry.relay import relay_figures
from reshard.geometry.remesh import disjoint
from reshard.plans.rules.collectives import RULES, VIEW_RULES, check_step
from reshard.plans.rules.cost import PLAIN, Cost, StepMode
from reshard.plans.rules.view import keeps_memory
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh as Mesh
from reshard.types.view import View
from reshard.types.whole import checked_flag, whole


@dataclass(frozen=True)
class Step:
    """One collective from `operand` to `result`, derived by the rule of its `kind`.

    `mode` splits the step into parts, cuts the messages of an exchange, or runs it in place. `retained_bytes` are those
    of a source that is kept beside the operand. Raises `StepError` if the rule refuses.

    >>> mesh = Mesh(x=4)
    >>> step = Step("all_gather", Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh))
    >>> step.received_bytes, step.launches, step.live_bytes
    (48, 1, 80)
    """

    kind: str
    operand: Layout
    result: Layout
    mode: StepMode = PLAIN
    retained_bytes: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        for what, layout in (("operand", self.operand), ("result", self.result)):
            if not isinstance(layout, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise StepError(f"the {what} {quoted(layout)} of a step is not a Layout; read it with Layout.parse")
        if not isinstance(self.kind, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            steps = ", ".join((*RULES, *VIEW_RULES))
            raise StepError(f"the kind {quoted(self.kind)} of a step is not text; the steps are {steps}")
        object.__setattr__(self, "mode", _checked_mode(self.mode))
        if whole(self.retained_bytes) is None:
            raise StepError(f"retained_bytes {quoted(self.retained_bytes)} of a step: give bytes, an int of at least 0")
        checked_seconds(self.seconds)
        object.__setattr__(self, "_cost", self.cost)

    @cached_property
    def cost(self) -> Cost:
        """The cost of the step, by its typing rule."""
        return check_step(self.kind, self.operand, self.result, self.mode)

    @property
    def received_bytes(self) -> int:
        """Bytes that the busiest device receives in this step."""
        return self.cost.received

    @property
    def sent_bytes(self) -> int:
        """Bytes that the busiest device sends in this step; a reduction's are those that it receives."""
        if self.kind != "exchange":
            return self.received_bytes
        sent = most_sent(self.operand, self.result, self.mode.view, relayed=self.mode.relay)
        return self.operand.nbytes(sent)

    @property
    def endpoint_bytes(self) -> int:
        """What the busiest device sends or receives, whichever is more; of a relay, the sum of both turns."""
        if not self.mode.relay:
            return max(self.received_bytes, self.sent_bytes)
        turns = relay_figures(self.operand, self.result).turns
        return sum(self.operand.nbytes(max(turn.received, turn.sent)) for turn in turns)

    @property
    def spec(self) -> StepSpec:
        """The step before it was checked."""
        return StepSpec(self.kind, self.result, self.mode)

    @property
    def launches(self) -> int:
        """Collective calls: one, or the rounds of an exchange."""
        return self.cost.launches

    @property
    def live_bytes(self) -> int:
        """Bytes on one device while the step runs: source if kept, operand, result and scratch.

        Between disjoint sets of devices, no device has both operand and result.
        """
        before, after = self.operand.tile_bytes, self.result.tile_bytes
        view = self.mode.view is not None and keeps_memory(self.kind, self.operand, self.result, self.mode)
        if self.mode.in_place or view:
            tiles = self.retained_bytes + max(before, after)
        elif disjoint(self.operand.mesh, self.result.mesh):
            tiles = max(self.retained_bytes + before, after)
        else:
            tiles = self.retained_bytes + before + after
        return tiles + self.cost.scratch


class StepSpec(NamedTuple):
    """A step before it is checked: its kind, its result, and the mode it runs in."""

    kind: str
    result: Layout
    mode: StepMode = PLAIN


def checked_seconds(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
        return value
    raise PlanError(f"seconds {quoted(value)}: give a number of at least 0, or None (null in JSON) without a network")


def _checked_mode(mode: object) -> StepMode:
    """Returns the mode with ints of Python's own; refuses one whose chunk or parts are not ints of at least 1."""
    if not isinstance(mode, StepMode):
        raise StepError(f"the mode {quoted(mode)} of a step is not a StepMode; give StepMode(chunk, in_place, parts)")
    if whole(mode.parts, 1) is None or not (mode.chunk is None or whole(mode.chunk, 1)):
        raise StepError(f"{quoted(mode)}: chunk and parts of a step are ints of at least 1, chunk None for no limit")
    in_place, relay, overlap = (
        checked_flag(flag, name, StepError)
        for name, flag in (("in_place", mode.in_place), ("relay", mode.relay), ("overlap", mode.overlap))
    )
    if mode.view is not None and not isinstance(mode.view, View):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StepError(f"{quoted(mode)}: view is a View, or None")
    chunk = None if mode.chunk is None else whole(mode.chunk)
    return StepMode(chunk, in_place, whole(mode.parts) or 1, relay, mode.view, overlap)

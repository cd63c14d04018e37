"""The judgement `kind : operand -> result`, and the table of the rules that make it.

Checking a plan, its bytes, launches and peak memory are folds over `check_step`; nothing else knows what a
collective does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from reshard.errors import StepError, quoted
from reshard.types.deadline import check_deadline
from reshard.types.layout import Layout
from reshard.types.pair.device_sets import one_set
from reshard.types.rules.all_gather import check_all_gather
from reshard.types.rules.all_to_all import check_all_to_all
from reshard.types.rules.cost import PLAIN, Cost, StepMode, refusal
from reshard.types.rules.exchange import check_exchange
from reshard.types.rules.parts import split_step
from reshard.types.rules.permute import check_permute
from reshard.types.rules.reduce import check_all_reduce, check_reduce_scatter
from reshard.types.rules.slice import check_slice
from reshard.types.rules.split_sum import check_split_sum
from reshard.types.rules.view import check_cast, check_put, check_take, check_view
from reshard.types.rules.view_exchange import check_view_exchange

Rule = Callable[[Layout, Layout, StepMode], Cost]

RULES: dict[str, Rule] = {
    "slice": check_slice,
    "all_gather": check_all_gather,
    "all_to_all": check_all_to_all,
    "permute": check_permute,
    "exchange": check_exchange,
    "reduce_scatter": check_reduce_scatter,
    "all_reduce": check_all_reduce,
    "split_sum": check_split_sum,
}
"""The steps of one array, which keep its shape and its dtype."""

VIEW_RULES: dict[str, Rule] = {
    "view": check_view,
    "take": check_take,
    "put": check_put,
    "cast": check_cast,
    "view_exchange": check_view_exchange,
}
"""The steps of a move with a view or a cast, which change the array's shape or its dtype."""

OVERLAPPING = ("all_gather", "all_to_all", "permute", "reduce_scatter")
"""The kinds of which a part can be copied into the result while the next one is on its way."""

CROSSING = ("permute", "exchange", "view_exchange")
"""The kinds whose result may be on other devices than their operand."""


@lru_cache(maxsize=8192)
def check_step(kind: str, operand: Layout, result: Layout, mode: StepMode = PLAIN) -> Cost:
    """The cost of a well-typed step.

    Raises `StepError` for a step that the rule of its kind does not derive.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> check_step("all_gather", Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh))
    Cost(received=48, launches=1, scratch=0)
    """
    check_deadline()
    if isinstance(kind, str) and kind in VIEW_RULES:  # pyright: ignore[reportUnnecessaryIsInstance]
        return _viewed(kind, operand, result, mode)
    rule = RULES.get(kind) if isinstance(kind, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if rule is None:
        raise StepError(f"unknown step {quoted(kind)}; the steps are {', '.join((*RULES, *VIEW_RULES))}")
    _check_array(kind, operand, result)
    if mode == PLAIN:
        return rule(operand, result, mode)
    if mode.parts != 1 or mode.overlap:
        return _in_parts(kind, operand, result, mode)
    if mode.view is not None or kind != "exchange" or (mode.chunk is not None and mode.chunk < 1):
        why = f"{mode}: only an exchange is chunked, by at least 1 element, in place, or relayed"
        raise refusal(kind, operand, result, why)
    return rule(operand, result, mode)


def _check_array(kind: str, operand: Layout, result: Layout) -> None:
    """Refuses a step between different arrays, devices or reductions."""
    if operand.shape != result.shape or operand.dtype != result.dtype:
        raise refusal(kind, operand, result, "a step keeps the global shape and the dtype")
    _check_devices(kind, operand, result)
    if operand.partial and result.partial and operand.reduction != result.reduction:
        raise refusal(kind, operand, result, "a step keeps the reduction of what stays partial")


def _check_devices(kind: str, operand: Layout, result: Layout) -> None:
    if kind not in CROSSING and not one_set(operand.mesh, result.mesh):
        raise refusal(kind, operand, result, f"only {', '.join(CROSSING)} lead to other devices")


def _viewed(kind: str, operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """A step that changes the shape or the dtype."""
    _check_devices(kind, operand, result)
    return VIEW_RULES[kind](operand, result, mode)


def _in_parts(kind: str, operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Each part is a step on a smaller array, copied out of the operand before and into the result after.

    If parts overlap, there are two at a time; parts in place of each other do not.
    """
    overlap = mode.overlap and kind in OVERLAPPING and not mode.in_place
    only_parts = mode.parts > 1 and mode == StepMode(parts=mode.parts, in_place=mode.in_place, overlap=overlap)
    part = split_step(operand, result, mode.parts, in_place=mode.in_place) if only_parts else None
    if part is None:
        why = "it does not split so; parts.counts() lists the possible numbers of parts"
        in_place = "; in place, tiles are even and equally large, on the same devices" if mode.in_place else ""
        raise refusal(kind, operand, result, f"{mode}: {why}{in_place}")
    one = check_step(kind, part.operand, part.result)
    copies = part.operand.tile_bytes + part.result.tile_bytes
    return Cost(one.received * mode.parts, one.launches * mode.parts, one.scratch + copies * (1 + mode.overlap))

"""The plan of a move to other devices, and its legs.

    trainer <fsdp=4>, devices 0-3 -> server <tp=2, rep=2>, devices 4-7, f32[{fsdp}4, 8] -> f32[16, {tp}4]

    before    nothing to do, a sum would be finished    on devices 0-3
    across    exchange to f32[{rep}8, {tp}4]            0-3 to 4-7
    after     all_gather to f32[16, {tp}4]              on devices 4-7

A device is known by its number among those of both meshes, the source's first, since the ids of two platforms, such as
GPUs and the host's CPU, may coincide.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from jax.sharding import NamedSharding

from reshard.errors import BudgetError
from reshard.jax import placement
from reshard.jax.placement import devices_of
from reshard.jax.platform_network import best_plan
from reshard.jax.request import PlanArguments
from reshard.runtime import on_jax
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.pair.device_sets import disjoint, one_set
from reshard.types.pair.relay import relay_figures
from reshard.types.pair.view_messages import view_stats
from reshard.types.plan import Plan, Step, StepSpec, chain
from reshard.types.rules.cost import StepMode
from reshard.types.rules.exchange import exchange_size
from reshard.types.view import View


class Leg(NamedTuple):
    """Steps on the devices of one side, and what they start from."""

    source: Layout
    steps: tuple[Step, ...] = ()

    @property
    def target(self) -> Layout:
        """What the steps lead to."""
        return self.steps[-1].result if self.steps else self.source

    @property
    def casts(self) -> bool:
        """Whether a step casts."""
        return any(step.kind == "cast" for step in self.steps)


class Legs(NamedTuple):
    """A plan to other devices in three; `before` and `after` may have no steps, `across` has one."""

    before: Leg
    across: Plan
    after: Leg


def numbered(*meshes: placement.AnyMesh) -> dict[Any, int]:
    """The devices of some meshes with their numbers, those of the first mesh first."""
    return {device: at for at, device in enumerate(dict.fromkeys(d for mesh in meshes for d in devices_of(mesh)))}


@lru_cache(maxsize=4096)
def plan_across(
    source: NamedSharding,
    target: NamedSharding,
    shape: tuple[int, ...],
    dtype: str,
    arguments: PlanArguments,
    view: View | None = None,
    target_dtype: str | None = None,
) -> Plan:
    """The best plan, by a view to another dtype if these are given; `BudgetError` if none keeps to the budget."""
    numbers = numbered(source.mesh, target.mesh)
    near = layout_on(numbers, source, shape, dtype)
    far = layout_on(numbers, target, shape if view is None else view.target_shape, target_dtype or dtype)
    budget, network, donate = arguments
    return best_plan(Move(near, far, view, cast=True), devices_of(target.mesh), network, budget, donate)


def layout_on(numbers: dict[Any, int], sharding: NamedSharding, shape: tuple[int, ...], dtype: str) -> Layout:
    """The layout of an array whose devices are known by these numbers."""
    own = tuple(numbers[device] for device in devices_of(sharding.mesh))
    return placement.layout_of(sharding, shape, dtype, numbers=own)


def legs(whole: Plan) -> Legs:
    """The plan in its three legs; what a leg starts from is deleted unless it is the caller's array."""
    at = next(number for number, step in enumerate(whole.steps) if _crosses(step))
    step = whole.steps[at]
    return Legs(
        Leg(whole.source, whole.steps[:at]),
        _alone(step, whole.donate),
        Leg(step.result, whole.steps[at + 1 :]),
    )


def _alone(step: Step, donate: bool) -> Plan:
    """The step that crosses as a plan."""
    return chain(step.operand, step.result, [StepSpec(step.kind, step.result, step.mode)], donate, None, step.mode.view)


def pulled(whole: Plan) -> Legs:
    """The legs with the target's tiles read from the source's at once, where no sum is started.

    Where all devices share one memory, gathers among the target's devices would copy data a second time, and so would
    reshapes and transposes.
    """
    parts = legs(whole)
    target = whole.target
    if target.partial:
        return parts
    if whole.view is None or (whole.view.plain and not parts.before.casts and not parts.after.casts):
        return Legs(parts.before, _alone(Step("exchange", parts.across.source, target), whole.donate), Leg(target))
    return parts if whole.source.partial else _at_once(whole, parts)


def _at_once(whole: Plan, parts: Legs) -> Legs:
    """The legs of a move with a view or a cast: the whole view in the exchange, between its casts."""
    first, last = whole.steps[:1], whole.steps[-1:]
    before = Leg(whole.source, first if first[0].kind == "cast" else ())
    after = Leg(whole.target) if last[0].kind != "cast" else Leg(last[0].operand, last)
    if (before.casts, after.casts) != (parts.before.casts, parts.after.casts) or whole.view is None:
        return parts  # A cast in between, before a part of the target is filled.
    kind, mode = ("exchange", StepMode()) if whole.view.plain else ("view_exchange", StepMode(view=whole.view))
    return Legs(before, _alone(Step(kind, before.target, after.source, mode), whole.donate), after)


def in_messages(parts: Legs, budget: int | None, buffers: int, pieces: bool) -> Legs:
    """The legs as accelerators and several processes run them: messages that are small beside the tiles.

    A device has `buffers` buffers of a message's size beside its tiles, and two if it may send and receive at once.
    Large moves are cut so that these are small, and with a budget they are cut to fit; `BudgetError` if not even single
    elements do. With `pieces`, tiles that go to other devices as they are become messages, too.
    """
    step = parts.across.steps[0]
    if step.kind == "permute" and not pieces:
        return parts
    operand, result = step.operand, step.result
    kind = "view_exchange" if step.kind == "view_exchange" else "exchange"
    mode = StepMode(relay=step.mode.relay, view=step.mode.view)
    kept = parts.before.source.tile_bytes if parts.before.steps and not parts.across.donate else 0
    plain = Step(kind, operand, result, mode, kept)
    message = _message(plain)
    given = step.mode.chunk or message
    tiles = plain.live_bytes - plain.cost.scratch
    buffers = 2 if mode.relay or not disjoint(operand.mesh, result.mesh) else buffers
    chunk = given
    if budget is not None:
        chunk = min(given, (budget - tiles) // (buffers * operand.nbytes(1)))
        if chunk < 1 <= message:
            least = tiles + buffers * operand.nbytes(1)
            raise BudgetError(
                f"budget {budget} B is too small for {operand} -> {result} (global {operand.shape}, {operand.mesh} to "
                f"{result.mesh}): beside tiles of {tiles} B a device needs {buffers} times the smallest message; "
                f"the smallest that works is {least} B",
                least,
            )
    elif operand.tile_bytes + result.tile_bytes >= on_jax.LEAST:
        chunk = -(-message // on_jax.PARTS)
    cut = mode if chunk >= message else mode._replace(chunk=chunk)
    return Legs(parts.before, _alone(Step(kind, operand, result, cut), parts.across.donate), parts.after)


def _message(step: Step) -> int:
    """The elements of the largest message."""
    operand, result, view = step.operand, step.result, step.mode.view
    if step.mode.relay:
        return relay_figures(operand, result).message
    return exchange_size(operand, result).message if view is None else view_stats(operand, result, view).message


def _crosses(step: Step) -> bool:
    return not one_set(step.operand.mesh, step.result.mesh)

"""The plan of a move to other devices, and its legs.

    trainer <fsdp=4>, devices 0-3 -> server <tp=2, rep=2>, devices 4-7, f32[{fsdp}4, 8] -> f32[16, {tp}4]

    before    nothing to do, a sum would be finished    on devices 0-3
    across    exchange to f32[{rep}8, {tp}4]            0-3 to 4-7
    after     all_gather to f32[16, {tp}4]              on devices 4-7

A device is known by its number among those of both meshes, the source's first, since the ids of two platforms, such as
GPUs and the host's CPU, may coincide.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding

from reshard.errors import BudgetError
from reshard.jax import placement
from reshard.jax.platform_network import network_on
from reshard.runtime import on_jax
from reshard.synth import Network, plan
from reshard.types.layout import Layout
from reshard.types.pair.device_sets import one_set
from reshard.types.plan import Plan, Step, StepSpec, chain
from reshard.types.rules.cost import PLAIN, StepMode
from reshard.types.rules.exchange import exchange_size


class Legs(NamedTuple):
    """A plan to other devices in three; `before` and `after` may have no steps, `across` has one."""

    before: Plan
    across: Plan
    after: Plan


def devices_of(mesh: placement.AnyMesh) -> list[Any]:
    """The devices of a mesh by position; none of an abstract one."""
    return list(mesh.devices.flat) if isinstance(mesh, JaxMesh) else []


def numbered(source: placement.AnyMesh, target: placement.AnyMesh) -> dict[Any, int]:
    """The devices of both meshes with their numbers, the source's first."""
    return {device: at for at, device in enumerate(dict.fromkeys([*devices_of(source), *devices_of(target)]))}


@lru_cache(maxsize=4096)
def plan_across(
    source: NamedSharding,
    target: NamedSharding,
    shape: tuple[int, ...],
    dtype: str,
    budget: int | None,
    network: Network | str | None,
    donate: bool,
) -> Plan:
    """The best plan; `BudgetError` if none keeps to the budget."""
    used = network_on(devices_of(target.mesh), network)
    return plan(*_layouts(source, target, shape, dtype), budget, used, donate, relays=False)


def _layouts(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], dtype: str) -> tuple[Layout, Layout]:
    numbers = numbered(source.mesh, target.mesh)

    def layout(sharding: NamedSharding) -> Layout:
        own = tuple(numbers[device] for device in devices_of(sharding.mesh))
        return placement.layout_of(sharding, shape, dtype, numbers=own)

    return layout(source), layout(target)


def legs(whole: Plan) -> Legs:
    """The plan in its three legs; what a leg starts from is deleted unless it is the caller's array."""
    at = next(number for number, step in enumerate(whole.steps) if _crosses(step))
    near, far = whole.steps[at].operand, whole.steps[at].result
    return Legs(
        chain(whole.source, near, _specs(whole.steps[:at]), whole.donate),
        chain(near, far, _specs(whole.steps[at : at + 1]), whole.donate),
        chain(far, whole.target, _specs(whole.steps[at + 1 :]), donate=True),
    )


def pulled(parts: Legs) -> Legs:
    """The legs with the target's tiles read from the source's at once, where no sum is started.

    In one memory, gathers among the target's devices would copy again what is there.
    """
    target = parts.after.target
    if target.partial:
        return parts
    across = chain(parts.across.source, target, [StepSpec("exchange", target)], parts.across.donate)
    return Legs(parts.before, across, chain(target, target, []))


def in_messages(parts: Legs, budget: int | None, buffers: int, pieces: bool) -> Legs:
    """The legs as accelerators and several processes run them: messages that are small beside the tiles.

    A device has `buffers` buffers of a message's size beside its tiles. Large moves are cut so that these are small,
    and with a budget they are cut to fit; `BudgetError` if not even single elements do. With `pieces`, tiles that go
    to other devices as they are become messages, too.
    """
    step = parts.across.steps[0]
    if step.kind == "permute" and not pieces:
        return parts
    operand, result = step.operand, step.result
    size = exchange_size(operand, result)
    given = step.mode.chunk or size.message
    tiles = Step("exchange", operand, result).live_bytes - Step("exchange", operand, result).cost.scratch
    chunk = given
    if budget is not None:
        chunk = min(given, (budget - tiles) // (buffers * operand.nbytes(1)))
        if chunk < 1 <= size.message:
            least = tiles + buffers * operand.nbytes(1)
            raise BudgetError(
                f"budget {budget} B is too small for {operand} -> {result} (global {operand.shape}, {operand.mesh} to "
                f"{result.mesh}): beside tiles of {tiles} B a device needs {buffers} times the smallest message; "
                f"the smallest that works is {least} B",
                least,
            )
    elif operand.tile_bytes + result.tile_bytes >= on_jax.LEAST:
        chunk = -(-size.message // on_jax.PARTS)
    mode = PLAIN if chunk >= size.message else StepMode(chunk=chunk)
    across = chain(operand, result, [StepSpec("exchange", result, mode)], parts.across.donate)
    return Legs(parts.before, across, parts.after)


def _specs(steps: tuple[Step, ...]) -> list[StepSpec]:
    return [StepSpec(step.kind, step.result, step.mode) for step in steps]


def _crosses(step: Step) -> bool:
    return not one_set(step.operand.mesh, step.result.mesh)

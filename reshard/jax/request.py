"""A move as its caller asks for it, and the plan that answers."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import dataclass, replace

from jax.sharding import NamedSharding

from reshard.errors import PlanError
from reshard.jax import placement
from reshard.runtime import on_jax
from reshard.synth import Network, plan
from reshard.types.layout import Layout
from reshard.types.plan import Plan


@dataclass(frozen=True)
class Request:
    """Everything about a move but the array: hashable, the parameter of the primitive."""

    target: NamedSharding
    source: NamedSharding | None = None
    budget: int | None = None
    network: Network | str | None = None
    donate: bool = False


def plan_of(request: Request, shape: tuple[int, ...], dtype: str) -> Plan:
    """The plan of a move whose source is known, devices by position; on an accelerator in parts, if they fit."""
    if request.source is None:
        raise PlanError(f"the source of the move to {request.target} is not known")
    ids = orders_differ(request.source, request.target)
    before = placement.layout(request.source, shape, dtype, ids=ids)
    after = placement.layout(request.target, shape, dtype, ids=ids)
    if placement.platform(request.target.mesh) == "cpu":
        return _plan(request, before, after)
    found = _plan(replace(request, budget=None), before, after)
    if request.budget is None:
        return on_jax.in_parts(found)
    parted = _within(request.budget, found)
    if parted is not None:
        return parted
    found = _plan(request, before, after)
    return _within(request.budget, found) or found


def _within(budget: int, found: Plan) -> Plan | None:
    """The plan in as few parts as fit, for a collective in one piece takes more memory on an accelerator."""
    parted = (on_jax.in_parts(found, count=times * on_jax.PARTS) for times in (1, 2, 4))
    return next((one for one in parted if on_jax.peak_bytes(one) <= budget), None)


def _plan(request: Request, before: Layout, after: Layout) -> Plan:
    found = plan(before, after, request.budget, request.network, request.donate)
    if not on_jax.overwrites(found):  # XLA would copy the source first, so it is kept in the account.
        found = plan(before, after, request.budget, request.network, donate=False)
    return found


def orders_differ(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether two meshes list their devices in different orders."""
    orders = placement.device_order(source.mesh), placement.device_order(target.mesh)
    return None not in orders and orders[0] != orders[1]


def reordered(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether two meshes list the same devices in different orders."""
    orders = [placement.device_order(sharding.mesh) or () for sharding in (source, target)]
    return orders_differ(source, target) and sorted(orders[0]) == sorted(orders[1])

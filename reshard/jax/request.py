"""A move as its caller asks for it, and the plan that answers."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import NamedSharding

from reshard.errors import PlanError
from reshard.jax import placement
from reshard.runtime import on_jax
from reshard.synth import Network, plan
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
    """The plan of a move whose source is known, devices by position; without a budget, in slabs on an accelerator."""
    if request.source is None:
        raise PlanError(f"the source of the move to {request.target} is not known")
    ids = orders_differ(request.source, request.target)
    before = placement.layout(request.source, shape, dtype, ids=ids)
    after = placement.layout(request.target, shape, dtype, ids=ids)
    found = plan(before, after, request.budget, request.network, request.donate)
    if not on_jax.overwrites(found):  # XLA would copy the source first, so it is kept in the account.
        found = plan(before, after, request.budget, request.network, donate=False)
    if request.budget is None and placement.platform(request.target.mesh) != "cpu":
        return on_jax.in_slabs(found)
    return found


def orders_differ(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether two meshes list their devices in different orders."""
    orders = placement.device_order(source.mesh), placement.device_order(target.mesh)
    return None not in orders and orders[0] != orders[1]


def reordered(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether two meshes list the same devices in different orders."""
    orders = [placement.device_order(sharding.mesh) or () for sharding in (source, target)]
    return orders_differ(source, target) and sorted(orders[0]) == sorted(orders[1])

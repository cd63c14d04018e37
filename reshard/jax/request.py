"""`ReshardRequest`, a move as its caller asks for it, `PlanArguments`, what the planner gets of it, and the plan."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

from jax.sharding import NamedSharding

from reshard.errors import PlanError
from reshard.geometry.remesh import one_set
from reshard.jax import placement
from reshard.jax.platform_network import best_plan_on, network_of_mesh
from reshard.plans.plan import Plan
from reshard.runtime import on_jax
from reshard.synth import Network, cost
from reshard.types.layout import Layout
from reshard.types.move import Move


class PlanArguments(NamedTuple):
    """What a caller gives the planner beside source and target, checked: `budget` is in bytes per device."""

    budget: int | None = None
    network: Network | str | None = None
    donate: bool = False


@dataclass(frozen=True)
class ReshardRequest:
    """All of a move except the array; hashable, because it is the parameter of a JAX primitive.

    `source` is None while it is unknown; `budget` is in bytes per device.
    """

    target: NamedSharding
    source: NamedSharding | None = None
    budget: int | None = None
    network: Network | str | None = None
    donate: bool = False

    @property
    def arguments(self) -> PlanArguments:
        """What the planner is given beside source and target."""
        return PlanArguments(self.budget, self.network, self.donate)


def plan_of(request: ReshardRequest, shape: tuple[int, ...], dtype: str) -> Plan:
    """The plan of a move with a known source, with devices numbered by their position in the mesh.

    On accelerators large steps are split into parts, in as few parts as keep within the budget. On CPUs large
    all-to-alls are rounds of permutes, unless a network or a budget says what matters, or the source is donated.
    """
    if request.source is None:
        raise PlanError(f"the source of the move to {request.target} is not known")
    ids = orders_differ(request.source, request.target)
    before = placement.layout_of(request.source, shape, dtype, ids=ids)
    after = placement.layout_of(request.target, shape, dtype, ids=ids)
    platform = placement.platform_of(request.target.mesh)
    if platform == "cpu":
        return _on_cpu(request, _plan(request, before, after))
    unbounded = _plan(replace(request, budget=None), before, after)
    overlap = platform == "gpu"
    if request.budget is None:
        return (
            _on_tpu(request, unbounded)
            if platform == "tpu"
            else on_jax.in_parts(unbounded, overlap=overlap, lanes=False)
        )
    within = partial(_within, request.budget, padded=platform == "tpu", overlap=overlap)
    parted = within(unbounded)
    if parted is not None:
        return parted
    bounded = _plan(request, before, after)
    return within(bounded) or bounded


def _on_cpu(request: ReshardRequest, best: Plan) -> Plan:
    """The best plan as CPUs run it."""
    free = request.budget is None and best.seconds is None and not best.donate
    return on_jax.in_rounds(best) if free else best


def _on_tpu(request: ReshardRequest, plan: Plan) -> Plan:
    """The plan in parts; by other steps if nobody named the network and these need far less of a TPU's memory."""
    if request.network is not None:
        return on_jax.in_parts(plan)
    parted, network = on_jax.in_parts_on_tpu(plan), network_of_mesh(request.target.mesh, None)
    same = [step.kind for step in parted.steps] == [step.kind for step in plan.steps]
    return parted if same or network is None else cost.timed(parted, network.links(parted.source.mesh))


def _within(budget: int, whole: Plan, padded: bool, overlap: bool) -> Plan | None:
    """The plan in as few parts as fit the budget: an accelerator needs more memory for a collective in one piece.

    Parts overlap where some number of them that do fits the budget.
    """
    ways = product((True, False) if overlap else (False,), (1, 2, 4))
    parted = (
        on_jax.in_parts(whole, count=times * on_jax.PARTS, overlap=overlaps, lanes=padded) for overlaps, times in ways
    )
    return next((candidate for candidate in parted if on_jax.peak_bytes(candidate, padded) <= budget), None)


def _plan(request: ReshardRequest, before: Layout, after: Layout) -> Plan:
    if not one_set(before.mesh, after.mesh):
        raise PlanError(
            f"mesh {before.mesh} of the source and mesh {after.mesh} of the target have different devices "
            f"({before.mesh.size} and {after.mesh.size}), and a traced program (jit, grad, vmap, scan) runs on one set "
            f"of devices: move the array of shape {before.shape} outside of it, by redistribute of a concrete array"
        )
    of_network = partial(best_plan_on, request.target.mesh, Move(before, after), request.network, request.budget)
    best = of_network(request.donate)
    # XLA would copy the source before it overwrites it: plan with the source counted as live throughout.
    return best if on_jax.overwrites(best) else of_network(False)


def orders_differ(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether two meshes list their devices in different orders."""
    orders = placement.device_order(source.mesh), placement.device_order(target.mesh)
    return None not in orders and orders[0] != orders[1]


def reordered(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether two meshes list the same devices in different orders."""
    orders = [placement.device_order(sharding.mesh) or () for sharding in (source, target)]
    return orders_differ(source, target) and sorted(orders[0]) == sorted(orders[1])

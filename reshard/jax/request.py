"""`ReshardRequest`, a move as its caller asks for it, and the plan that answers it.

plan_request   on one set of devices, in the parts or rounds that suit their platform
plan_across    to other devices, which are known by their numbers among those of both meshes
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding

from reshard.errors import LayoutError, PlanError
from reshard.geometry.remesh import one_set
from reshard.jax import placement
from reshard.jax.platform_network import best_plan, best_plan_on, options_on
from reshard.plans.plan import Plan
from reshard.runtime import on_jax
from reshard.synth import cost
from reshard.synth.options import PlanOptions
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.view import View

UNLIMITED = PlanOptions()
"""The options of a move of which the caller asks nothing."""


@dataclass(frozen=True)
class ReshardRequest:
    """All of a move except the array; hashable, because it is the parameter of a JAX primitive.

    `source` is None while it is unknown. `view` is None where the dims stay, and `dtype` where the dtype stays.
    """

    target: NamedSharding
    source: NamedSharding | None = None
    options: PlanOptions = UNLIMITED
    view: View | None = None
    dtype: str | None = None

    @property
    def plain(self) -> bool:
        """Whether the array, its dims and its dtype stay as they are."""
        return self.view is None and self.dtype is None

    @property
    def crosses(self) -> bool:
        """Whether its ends are on different sets of devices; those of abstract meshes are the same."""
        source, target = self.ends
        known = isinstance(source.mesh, JaxMesh) and isinstance(target.mesh, JaxMesh)
        return known and source.device_set != target.device_set

    @property
    def reorders(self) -> bool:
        """Whether its ends are on the same devices, which their meshes list in different orders."""
        return not self.crosses and orders_differ(*self.ends)

    @property
    def ends(self) -> tuple[NamedSharding, NamedSharding]:
        """Source and target. Raises `PlanError` while the source is unknown."""
        if self.source is None:
            raise PlanError(f"the source of the move to {self.target} is not known")
        return self.source, self.target

    def target_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the result, from that of the array."""
        return shape if self.view is None else self.view.target_shape

    def target_dtype(self, dtype: str) -> str:
        """The dtype of the result, from that of the array."""
        return self.dtype or dtype

    def narrows(self, dtype: str) -> bool:
        """Whether elements of this dtype are cast to fewer bits, before they move."""
        return dtypes.bits(self.target_dtype(dtype)) < dtypes.bits(dtype)


def plan_request(request: ReshardRequest, shape: tuple[int, ...], dtype: str) -> Plan:
    """The plan of a move with a known source, with devices numbered by their position in the mesh.

    On accelerators large steps are split into parts, in as few parts as keep within the budget. On CPUs large
    all-to-alls are rounds of permutes, unless a network or a budget says what matters, or the source is donated.
    """
    source, target = request.ends
    options, platform = request.options, placement.platform_of(target.mesh)
    ids = orders_differ(source, target)
    move = Move(
        placement.layout_of(source, shape, dtype, ids=ids),
        placement.layout_of(target, request.target_shape(shape), request.target_dtype(dtype), ids=ids),
        request.view,
        cast=True,
    )
    if not request.plain:
        # The source of a view or a cast counts as live throughout, since XLA reuses no buffer of other dims.
        made = best_plan_on(request.target.mesh, move, request.options._replace(donate=False))
        if platform == "cpu" or request.options.budget is not None:
            return made
        return on_jax.in_parts(made, overlap=platform == "gpu", lanes=platform == "tpu")
    if platform == "cpu":
        best = _best_on_one_set(request, move)
        free = options.budget is None and best.seconds is None and not best.donate
        return on_jax.in_rounds(best) if free else best
    unbounded = _best_on_one_set(replace(request, options=options._replace(budget=None)), move)
    overlap = platform == "gpu"
    if options.budget is None and platform == "tpu":
        return _plan_on_tpu(request, unbounded)
    if options.budget is None:
        return on_jax.in_parts(unbounded, overlap=overlap, lanes=False)
    within = partial(_fit_parts, options.budget, padded=platform == "tpu", overlap=overlap)
    parted = within(unbounded)
    if parted is not None:
        return parted
    bounded = _best_on_one_set(request, move)
    return within(bounded) or bounded


def _plan_on_tpu(request: ReshardRequest, plan: Plan) -> Plan:
    """The plan in parts; by other steps if nobody named the network and these need far less of a TPU's memory."""
    if request.options.network_named:
        return on_jax.in_parts(plan)
    devices = placement.devices_of(request.target.mesh)
    parted, network = on_jax.in_parts_on_tpu(plan), options_on(devices, request.options).network
    same = [step.kind for step in parted.steps] == [step.kind for step in plan.steps]
    return parted if same or network is None else cost.time_plan(parted, network.links(parted.source.mesh))


def _fit_parts(budget: int, whole: Plan, padded: bool, overlap: bool) -> Plan | None:
    """The plan in as few parts as fit the budget: an accelerator needs more memory for a collective in one piece.

    Parts overlap where some number of them that do fits the budget.
    """
    for overlaps, times in product((True, False) if overlap else (False,), (1, 2, 4)):
        parted = on_jax.in_parts(whole, count=times * on_jax.PARTS, overlap=overlaps, lanes=padded)
        if on_jax.peak_bytes(parted, padded) <= budget:
            return parted
    return None


def _best_on_one_set(request: ReshardRequest, move: Move) -> Plan:
    before, after = move.source, move.target
    if not one_set(before.mesh, after.mesh):
        raise PlanError(
            f"mesh {before.mesh} of the source and mesh {after.mesh} of the target have different devices "
            f"({before.mesh.size} and {after.mesh.size}), and a traced program (jit, grad, vmap, scan) runs on one set "
            f"of devices: move the array of shape {before.shape} outside of it, by redistribute of a concrete array"
        )
    mesh = request.target.mesh
    best = best_plan_on(mesh, move, request.options)
    # XLA would copy the source before it overwrites it: plan with the source counted as live throughout.
    return best if on_jax.overwrites_source(best) else best_plan_on(mesh, move, request.options._replace(donate=False))


@lru_cache(maxsize=4096)
def plan_across(request: ReshardRequest, shape: tuple[int, ...], dtype: str) -> Plan:
    """The best plan to other devices; `BudgetError` if none keeps to the budget.

    A device is known by its number among those of both meshes, the source's first, since the ids of two platforms,
    such as GPUs and the host's CPU, may coincide.
    """
    source, target = request.ends
    move = numbered_move(request, number_devices(source.mesh, target.mesh), shape, dtype)
    return best_plan(move, placement.devices_of(target.mesh), request.options)


def number_devices(*meshes: placement.AnyMesh) -> dict[Any, int]:
    """The devices of some meshes with their numbers, those of the first mesh first."""
    each = dict.fromkeys(device for mesh in meshes for device in placement.devices_of(mesh))
    return {device: at for at, device in enumerate(each)}


def numbered_move(request: ReshardRequest, numbers: dict[Any, int], shape: tuple[int, ...], dtype: str) -> Move:
    """What the planner is asked, the devices known by these numbers."""
    source, target = request.ends
    after, cast = request.target_shape(shape), request.target_dtype(dtype)
    near, far = (
        placement.layout_of(end, size, kind, numbers=tuple(numbers[each] for each in placement.devices_of(end.mesh)))
        for end, size, kind in ((source, shape, dtype), (target, after, cast))
    )
    return Move(near, far, request.view, cast=True)


def check_even(layout: Layout, request: ReshardRequest) -> None:
    """Raises `LayoutError` for a target that does not divide its array, which JAX has inside programs only."""
    if not layout.even:
        target, else_ = request.target, "" if request.crosses else ", or move it under jit"
        raise LayoutError(
            f"the target {target.spec} on mesh {dict(target.mesh.shape)} does not divide the shape {layout.shape}; "
            f"outside of jit JAX shards only what divides evenly: pad the array{else_}"
        )


def orders_differ(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether two meshes list their devices in different orders."""
    orders = placement.device_order(source.mesh), placement.device_order(target.mesh)
    return None not in orders and orders[0] != orders[1]


def lists_devices_anew(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether two meshes list the same devices in different orders."""
    orders = [placement.device_order(sharding.mesh) or () for sharding in (source, target)]
    return orders_differ(source, target) and sorted(orders[0]) == sorted(orders[1])

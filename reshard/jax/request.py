"""`ReshardRequest`, a move as its caller asks for it, and the plan that answers it.

plan_request      on one set of devices, in the parts or rounds that suit their platform
plan_across       to other devices, which are known by their numbers among those of both meshes
platform_network  the network that plans are made for, where the caller names none

    $RESHARD_NETWORK              a preset, a file as `reshard calibrate` writes it, or "none"; else by the devices:
    TPU v4 ... 7x, H100 ... B200  the preset of their kind
    CPUs and others               none: plans have the fewest bytes

What `reshard.jax.calibrate` measured on the machine goes before the presets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import jax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding

from reshard.errors import BudgetError, LayoutError, PlanError
from reshard.geometry.remesh import one_set
from reshard.jax import compiled_forms, placement
from reshard.plans.plan import Plan
from reshard.runtime import on_jax
from reshard.runtime.platform_network import find_calibration, name_network, plan_within_fewest
from reshard.synth import Network, cost
from reshard.synth.network import PRESETS
from reshard.synth.options import MEASURED, PlanOptions, read_network
from reshard.synth.planner import find_plan, message_count, short_plans
from reshard.types import dtypes
from reshard.types.index_set import IndexSet
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.view import View

UNLIMITED = PlanOptions()
"""The options of a move of which the caller asks nothing."""
LONG = 8192
"""The most messages that permutes and exchanges may list, 270 kB of text: two permutes on 4,096 devices, or 32 rounds
of an exchange on 256, which need less memory and fewer bytes than two all-to-alls."""
SLOWER = 2.0
"""How many times as long a plan of few messages may take as one of many: two all-to-alls in place of an exchange."""

_KINDS = (
    (r"TPU v4\b", "tpu-v4"),
    (r"TPU v5( lite|e)\b", "tpu-v5e"),
    (r"TPU v5p?\b", "tpu-v5p"),
    (r"TPU v6( lite|e)\b", "tpu-v6e"),
    (r"TPU ?v?7x?\b", "tpu-7x"),
    (r"\bH100\b", "h100"),
    (r"\bH200\b", "h200"),
    (r"\bGB200\b", "gb200-nvl72"),
    (r"\bB200\b", "b200"),
)


@dataclass(frozen=True)
class ReshardRequest:
    """All of a move except the array; hashable, because it is the parameter of a JAX primitive.

    `source` is None while it is unknown. `view` is None where the dims stay, and `dtype` where the dtype stays.
    `changed` are the elements that are stale in the target, which its devices hold already.
    """

    target: NamedSharding
    source: NamedSharding | None = None
    options: PlanOptions = UNLIMITED
    view: View | None = None
    dtype: str | None = None
    changed: IndexSet | None = None

    @property
    def plain(self) -> bool:
        """Whether the array, its dims and its dtype stay as they are, and all that devices need moves."""
        return self.view is None and self.dtype is None and self.changed is None

    @property
    def fills(self) -> bool:
        """Whether the result is made of an array that is there: a part of it is filled, or what has changed."""
        return self.changed is not None or (self.view is not None and self.view.into)

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

    @property
    def compiled_ends(self) -> compiled_forms.MoveEnds:
        """What the compiled program of a plan depends on. Raises `PlanError` while the source is unknown."""
        return compiled_forms.MoveEnds(*self.ends, self.options.donate and self.plain, self.plain, self.fills)

    def describe(self, shape: tuple[int, ...], dtype: str) -> str:
        """All that decides the plan of an array, as text, which processes compare."""
        source, target = self.ends
        options = options_on(placement.devices_of(target.mesh), self.options)
        ends = f"{_spell_sharding(source)} to {_spell_sharding(target)}"
        changed = "" if self.changed is None else f", changed {self.changed.to_json()}"
        return f"{dtype}{list(shape)} from {ends}, view {self.view}, dtype {self.dtype}{changed}, {options}"

    def target_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the result, from that of the array."""
        return shape if self.view is None else self.view.target_shape

    def target_dtype(self, dtype: str) -> str:
        """The dtype of the result, from that of the array."""
        return self.dtype or dtype

    def narrows(self, dtype: str) -> bool:
        """Whether elements of this dtype are cast to fewer bits, before they move."""
        return dtypes.bits(self.target_dtype(dtype)) < dtypes.bits(dtype)


@lru_cache(maxsize=4096)
def _spell_sharding(sharding: NamedSharding) -> str:
    """The spec, the mesh with the ids of its devices, and the memory."""
    ids = [device.id for device in placement.devices_of(sharding.mesh)]
    return f"{sharding.spec} on {dict(sharding.mesh.shape)} of devices {ids} ({sharding.memory_kind})"


def plan_request(request: ReshardRequest, shape: tuple[int, ...], dtype: str) -> Plan:
    """The plan of a move with a known source, with devices numbered by their position in the mesh.

    On accelerators large steps are split into parts, in as few parts as keep within the budget. On CPUs large
    all-to-alls are rounds of permutes, unless a network or a budget says what matters, or the source is donated.
    """
    source, target = request.ends
    options, budget, platform = request.options, request.options.budget, placement.platform_of(target.mesh)
    overlap, padded = platform == "gpu", platform == "tpu"
    ids = orders_differ(source, target)
    move = Move(
        placement.layout_of(source, shape, dtype, ids=ids),
        placement.layout_of(target, request.target_shape(shape), request.target_dtype(dtype), ids=ids),
        request.view,
        cast=True,
        changed=request.changed,
    )
    before, after = move.source.mesh, move.target.mesh
    if request.plain and not one_set(before, after):
        raise PlanError(
            f"mesh {before} of the source and mesh {after} of the target have different devices "
            f"({before.size} and {after.size}), and a traced program (jit, grad, vmap, scan) runs on one set "
            f"of devices: move the array of shape {shape} outside of it, by redistribute of a concrete array"
        )

    # The source of a view or a cast counts as live throughout, since XLA reuses no buffer of other dims.
    kept = options if request.plain else options._replace(donate=False)

    def within(limit: int | None) -> Plan:
        made = best_plan_on(target.mesh, move, kept._replace(budget=limit))
        if on_jax.overwrites_source(made):
            return made
        # XLA would copy the source before it overwrites it: plan with the source counted as live throughout.
        return best_plan_on(target.mesh, move, kept._replace(budget=limit, donate=False))

    whole = within(None)
    if platform == "cpu":
        rounds = request.plain and whole.seconds is None and not whole.donate
        free = on_jax.in_rounds(whole) if rounds else whole
    elif platform == "gpu":
        free = on_jax.in_parts_on_gpu(whole)
    elif not padded or not request.plain or (options.network_named and not whole.donate):
        free = on_jax.in_parts(whole, lanes=padded)
    else:
        # By other steps, where nobody named the network: the copies of a step count as much as what it receives.
        used = options_on(placement.devices_of(target.mesh), options)
        known = not whole.donate and used.network is not None
        routes = short_plans(whole.source, whole.target, LONG, used._replace(budget=None)) if known else []
        others = [each for each in routes if each.received_bytes <= whole.received_bytes]
        free = on_jax.in_parts_on_tpu(whole, others=others, network=used.network if known else None)
        if [step.kind for step in free.steps] != [step.kind for step in whole.steps]:
            free = cost.time_on_network(free, used.network)
    asked = budget is not None or (options.prefer == MEASURED and request.plain)
    if asked and compiled_forms.asks_compiler(request.compiled_ends, whole):
        return _plan_as_compiled(request, whole, free, within)
    if budget is None:
        return free
    if platform == "cpu" or not request.plain:
        return within(budget)
    # An accelerator needs more memory for a collective in one piece: as few parts as fit, that overlap if those do. The
    # plan without a budget may keep to it in parts; only then is one planned that keeps to it in one piece.
    if on_jax.peak_bytes(free, padded) <= budget:
        return free
    for overlaps, times in product((True, False) if overlap else (False,), (1, 2, 4)):
        parted = on_jax.in_parts(whole, count=times * on_jax.PARTS, overlap=overlaps, lanes=padded)
        if on_jax.peak_bytes(parted, padded) <= budget:
            return parted
    return within(budget)


def _plan_as_compiled(request: ReshardRequest, whole: Plan, free: Plan, within: Callable[[int], Plan]) -> Plan:
    """The form of a move that keeps to the budget as the compiler says, or that is fastest as measured.

    `whole` and `free` are the plan and the form without a budget, and `within` is the planner under one.
    """
    options, platform, bounded = request.options, placement.platform_of(request.target.mesh), list[Plan]()
    budget, ends = options.budget, request.compiled_ends
    # The planner counts no tables of indices and the like.
    for limit in () if budget is None else (budget, budget - budget // 64):
        with suppress(BudgetError):
            bounded.append(within(limit))
    network = options_on(placement.devices_of(request.target.mesh), options).network
    forms = [free, *compiled_forms.list_forms_of(whole, within, platform, network)]
    order = [*bounded, *forms] if platform == "cpu" else [*forms, *bounded]
    if budget is not None:
        fitting = compiled_forms.fit_compiled(order, forms, budget, ends)
        if options.prefer != MEASURED or not request.plain:
            return fitting
    every = tuple(compiled_forms.drop_repeats([*forms, *bounded]))
    return compiled_forms.choose_measured(every, budget, ends, network)


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
    return Move(near, far, request.view, cast=True, changed=request.changed)


def check_even(layout: Layout, request: ReshardRequest) -> None:
    """Raises `LayoutError` for a target that does not divide its array, which JAX has inside programs only."""
    if not layout.even:
        target, else_ = request.target, "" if request.crosses else ", or move it under jit"
        raise LayoutError(
            f"the target {target.spec} on mesh {dict(target.mesh.shape)} does not divide the shape {layout.shape}; "
            f"outside of jit JAX shards only what divides evenly: pad the array{else_}"
        )


def orders_differ(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether two meshes list their devices in different orders; abstract ones list none."""
    orders = [[device.id for device in placement.devices_of(end.mesh)] for end in (source, target)]
    return [] not in orders and orders[0] != orders[1]


def platform_network(kind: str) -> Network | None:
    """The network of devices of a kind, as jax names it: as measured here, or a preset; None if there is neither.

    Raises `NetworkError` if `RESHARD_NETWORK` names neither a preset nor a file.

    >>> str(platform_network("TPU v5 lite")), str(platform_network("NVIDIA H100 80GB HBM3")), platform_network("cpu")
    ('tpu-v5e', 'h100', None)
    """
    chosen = name_network(None)
    if chosen is not None:
        return read_network(chosen)
    # Processes must plan alike, and each has files of its own.
    measured = find_calibration(kind) if jax.process_count() == 1 else None
    if measured is not None:
        return measured.network
    return next((PRESETS[name] for pattern, name in _KINDS if re.search(pattern, kind)), None)


def options_on(devices: Sequence[Any], options: PlanOptions) -> PlanOptions:
    """The options with the network of the devices, where the caller named none."""
    if options.network_named or not devices:
        return options
    return options._replace(network=platform_network(str(devices[0].device_kind)))


def best_plan(move: Move, devices: Sequence[Any], options: PlanOptions) -> Plan:
    """The best plan on the network that a caller names, else on that of the devices.

    A platform network that nobody asked for may not cost memory: the fastest plan on it is taken only if it needs no
    more memory than the plan of fewest bytes, both with their large steps in parts.
    """

    def needs(plan: Plan) -> int:
        return on_jax.peak_bytes(on_jax.in_parts(plan))

    return plan_within_fewest(options_on(devices, options), lambda used: find_plan(move, None, used), needs)


def best_plan_on(mesh: placement.AnyMesh, move: Move, options: PlanOptions) -> Plan:
    """`best_plan` on the devices of a mesh, on no network where these are not known and none is named.

    Where nobody named the network, exchanges that are too long to compile give way to a few collectives: to the plan
    of few messages that needs the least memory, of those that take at most `SLOWER` times as long.
    """
    devices = placement.devices_of(mesh)
    best, used = best_plan(move, devices, options), options_on(devices, options)
    # Short plans are found between two layouts alone: a view or a part would be lost.
    if options.network_named or used.network is None or not move.plain or message_count(best) <= LONG:
        return best
    timed = cost.time_plan(best, used.network.links(best.source.mesh))
    plans = short_plans(best.source, best.target, LONG, used)
    quick = [plan for plan in plans if (plan.seconds or 0.0) <= SLOWER * (timed.seconds or 0.0)]
    padded = placement.platform_of(mesh) == "tpu"

    def needs(plan: Plan) -> tuple[int, float]:
        return on_jax.peak_bytes(on_jax.in_parts(plan), padded), plan.seconds or 0.0

    return min(quick, key=needs, default=best)

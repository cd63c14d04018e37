"""What a rank works out before a call: the plan, its own part of it, and the transport of the elements.

Everything here is computed alike on every rank, without a message; results are cached, so a repeated call costs a
look-up. `transports` lists them and runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, cast

from reshard.errors import BudgetError, NetworkError, PlanError, TileError
from reshard.geometry.remesh import disjoint
from reshard.lower import to_mpi
from reshard.lower.to_mpi import device_of, is_seated, is_worth_staging, ranks_of_seats
from reshard.plans.manifest import Update, Version
from reshard.plans.plan import Plan
from reshard.runtime.on_mpi.copies.strided_copy import Array
from reshard.runtime.on_mpi.direct_moves import (
    SCRATCH,
    STAGING,
    STRAIGHT,
    Direct,
    RunBytes,
    list_pushes,
    node_load,
    passes_on,
    plan_direct,
    run_bytes,
)
from reshard.runtime.on_mpi.node.cma import WORTHWHILE
from reshard.runtime.on_mpi.run_plan import RankPlan, rank_plan
from reshard.runtime.on_mpi.team import Facts, Team
from reshard.runtime.on_mpi.wire.by_node import FREE, JoinedPart, is_aggregated, plan_joined, table_bytes
from reshard.runtime.on_mpi.wire.chunks import SMALL
from reshard.runtime.platform_network import name_network, plan_within_fewest, spell_network
from reshard.synth import find_plan
from reshard.synth.options import PlanOptions
from reshard.types import Layout
from reshard.types.move import Move

UNSTAGED = 2 << 10
"""Length of a run, in bytes, above which a node without room to stage tiles reads them through the kernel instead of
sending messages: runs of 2.5 and 5 KiB take a third to a half of the time of messages.
"""

Transport = Literal["node-aggregated", "pull", "push", "read", "stage", "pack", "messages", "plan", "overwrite"]


Ends = tuple[Layout, Layout]
Leaf = Move | Ends
"""What one array is to do: a move, or its layouts before and after."""


def read_options(
    budget: object = None, network: object = None, donate: object = False, team: Team | None = None
) -> PlanOptions:
    """What a caller asks of the planner; where the call names no network, with the one that the environment names, else
    the one that all ranks of a team have measured."""
    options = PlanOptions.read(budget, name_network(cast("Any", network)), donate)
    if options.network_named or team is None or team.measured is None:
        return options
    if isinstance(team.measured, NetworkError):
        raise team.measured
    return options._replace(network=team.measured)


class Request(NamedTuple):
    """What all ranks must request alike: moves by name, and the options of the call.

    A single tile has the name "", and two more facts: `into`, the caller gave `out` for the result, on the ranks that
    have one; and `shared`, this rank's tile lies in the arena of its node, which counts if all do.
    """

    moves: tuple[tuple[str, Leaf], ...]
    options: PlanOptions = PlanOptions()
    into: bool = False
    shared: bool = False
    version: Version | Update | tuple[tuple[str, Version | Update], ...] = None
    verify: str | None = None
    arrays: tuple[tuple[tuple[str, str], ...], ...] = ((), ())
    """The arrays that moves read, and those that they fill, by the names of moves, where they are of other names."""

    @classmethod
    def of_tile(
        cls,
        source: Layout,
        target: Layout,
        options: PlanOptions = PlanOptions(),  # noqa: B008
        into: bool = False,
        shared: bool = False,
    ) -> Request:
        """The request to move a single tile."""
        return cls((("", (source, target)),), options, into, shared)

    @property
    def source(self) -> Layout:
        """The layout of a single tile before its move."""
        return ends_of(self.moves[0][1])[0]

    @property
    def target(self) -> Layout:
        """The layout of a single tile after its move."""
        return ends_of(self.moves[0][1])[1]

    @property
    def careful(self) -> bool:
        """Whether the result goes to an array that must stay unchanged if the call fails."""
        return self.into and not self.options.donate

    def __str__(self) -> str:
        (source, target), options = ends_of(self.moves[0][1]), self.options
        ends = f"{source} -> {target} on {source.mesh!r}"
        if target.mesh != source.mesh:
            ends += f" and {target.mesh!r}"
        chosen = {"budget": options.budget, "network": spell_network(options.network), "donate": options.donate}
        return ", ".join([ends, *(f"{name}={value}" for name, value in chosen.items() if value)])


def ends_of(leaf: Leaf) -> Ends:
    """The layouts of an array before and after its move."""
    return (leaf.source, leaf.target) if isinstance(leaf, Move) else leaf


class _DirectMove(NamedTuple):
    """The arguments of `plan_direct` for one rank."""

    source: Layout
    target: Layout
    rank: int
    nodes: tuple[int, ...]
    itemsize: int
    staging: int
    held: bool


class _JoinedMove(NamedTuple):
    """A move whose messages between nodes are joined by node, in `room` bytes that the promise has left, or in `free`
    ones that no account counts.
    """

    room: int
    free: int


@dataclass(frozen=True, eq=False)
class TilePlan:
    """One rank's part of the move of a single tile: the launch that chooses a transport.

    `transport` is the one that all ranks take, `otherwise` the one they take instead of `read` if some tile is not
    C-ordered. `joined` is not None if messages are joined by node instead, unless some node has no memory for that.
    `moves` is None if the plan's steps must be run. `device` is this rank's device id, or its rank if it has no tile on
    either side. `spare` are the bytes for buffers, and `buffered` says whether reads of short runs go through a
    buffer.

    `steps` and `plan_direct` are compiled when they are first used, so that a rank compiles only what is taken.
    """

    request: Request
    transport: Transport
    otherwise: Transport
    plan: Plan
    device: int
    rank: int
    nodes: tuple[int, ...]
    itemsize: int
    spare: int
    moves: _DirectMove | None = None
    buffered: bool = False
    joined: _JoinedMove | None = None

    @property
    def stays(self) -> bool:
        """Whether every element is where the target wants it."""
        return not self.plan.steps

    @property
    def planned(self) -> bool:
        """Whether the plan's steps are run, rather than a direct move."""
        return self.joined is None and self.transport in ("plan", "overwrite")

    def compile(self) -> None:
        """Compiles what is taken: steps only where new results do not lie in the memory of one node, into which all
        ranks write. They are compiled later if that has no room.
        """
        pushes = self.transport == "plan" and len(set(self.nodes)) == 1 and not self.request.into
        if self.by_node is not None:
            return
        if not pushes or self.moves is None or self.stays:
            _ = self.steps if self.planned else self.direct
        else:
            source, target, rank, nodes, itemsize, *_ = self.moves
            _ = self.direct, list_pushes(source, target, rank, nodes, itemsize)

    @cached_property
    def by_node(self) -> JoinedPart | None:
        """This rank's part of a move whose messages are joined by node; None if they are not."""
        ends = self.request.source, self.request.target
        return None if self.joined is None else plan_joined(*ends, self.rank, self.nodes)

    @cached_property
    def steps(self) -> RankPlan:
        """The plan's steps as this rank runs them."""
        return rank_plan(self.plan, self.rank, len(self.nodes), self.itemsize)

    @cached_property
    def direct(self) -> Direct | None:
        """This rank's part of a direct move; None if the plan's steps must be run."""
        return None if self.moves is None else plan_direct(*self.moves)

    @property
    def crowded(self) -> int:
        """How many more ranks give than take: negative if more of them can copy when they pull."""
        return self.plan.source.mesh.size - self.plan.target.mesh.size

    @cached_property
    def push(self) -> bool:
        """Whether writing into the peers' results is faster than reading from their tiles: with more ranks that copy at
        once, or, if they are equally many, along longer runs.

        From 2 ranks to 6 in runs of 5 KiB, the 6 pull in three quarters of the time in which the 2 push.
        """
        if self.moves is None:
            return False
        if self.crowded:
            return self.crowded > 0
        return _sample_runs(self.moves).prefers_push


def _sample_runs(moves: _DirectMove) -> RunBytes:
    """The runs of one rank if all ranks were on one node: all ranks must choose alike, so each looks at the same."""
    source, target, _, nodes, itemsize, *_ = moves
    return run_bytes(source, target, ranks_of_seats(target.mesh, len(nodes))[0], len(nodes), itemsize)


def prepare_tile(team: Team, request: Request, tile: Array) -> TilePlan:
    """This rank's part of the request to move a single tile.

    Raises the errors of `reshard.plan`, `PlanError` if the meshes have devices that are not ranks, and `TileError` if
    the budget requires that the tile be overwritten and it cannot be.
    """
    check_seats(request.source, request.target, team.size)
    ready = _plan_tile(request, team.rank, team.facts, tile.itemsize)
    ready.compile()  # A failure here is one on all ranks.
    if ready.transport == "overwrite" and not (tile.flags.c_contiguous and tile.flags.writeable):
        raise TileError(
            f"the budget of {request.options.budget} B is met only by overwriting the donated tile, which is not "
            f"C-ordered or not writeable; give one that is, or a higher budget"
        )
    return ready


def check_seats(source: Layout, target: Layout, size: int) -> None:
    """Raises `PlanError` unless every device of both layouts has a rank in a communicator of `size`."""
    if is_seated(source.mesh, target.mesh, size):
        return
    named: list[str] = []
    for mesh in dict.fromkeys((source.mesh, target.mesh)):
        ids = [mesh.device_ids[at] if mesh.device_ids else at for at in range(min(mesh.size, 9))]
        named.append(f"{mesh} (devices {', '.join(map(str, ids[:8]))}{', ...' if mesh.size > 8 else ''})")
    on = " and ".join(named)
    layouts = " and ".join(str(layout) for layout in dict.fromkeys((source, target)))
    raise PlanError(
        f"{layouts} on {on}: not every device is one of the {size} ranks of the communicator; device ids are ranks, 0 "
        f"to {size - 1}, or, where every rank has a tile of one set of {size} devices, any ids"
    )


@lru_cache(maxsize=512)
def _plan_tile(request: Request, rank: int, facts: Facts, itemsize: int) -> TilePlan:
    source, target, nodes, options = request.source, request.target, facts.nodes, request.options
    chosen = _find_plan(request)
    device = device_of((source.mesh, target.mesh), rank, len(nodes))
    # No rank is on both sides of a move to other devices, so none has both tiles.
    before, after = source.tile_bytes, target.tile_bytes
    spare = chosen.peak_bytes - (max(before, after) if disjoint(source.mesh, target.mesh) else before + after)
    mine = (chosen, device, rank, nodes, itemsize)
    if chosen.donate:
        return TilePlan(request, "overwrite", "overwrite", *mine, 0)
    across = 0 if len(set(nodes)) == 1 else 2 * itemsize  # Messages between nodes need at least this much staging.
    summed = bool(source.partial or target.partial) if chosen.crosses else not source.partial_as(target)
    if summed or (len(set(nodes)) > 1 and passes_on(chosen)):
        return TilePlan(request, "plan", "plan", *mine, chosen.peak_bytes - source.tile_bytes)
    moves = _DirectMove(source, target, rank, nodes, itemsize, 0, False)
    joined: _JoinedMove | None = None
    if len(set(nodes)) not in (1, len(nodes)):
        load, free = node_load(source, target, nodes, itemsize), FREE if options.budget is None else 0
        if is_aggregated(load, nodes, max(spare, free) - table_bytes(nodes), options.network):
            joined = _JoinedMove(spare, free)
    if spare < across:
        return TilePlan(request, "plan", "plan", *mine, chosen.peak_bytes - source.tile_bytes, joined=joined)
    transport = _choose_transport(request, facts, spare - across, moves)
    otherwise = _choose_staging(request, spare - across)
    buffered = transport == "read" and spare - across >= SCRATCH and _sample_runs(moves).run < STRAIGHT <= SCRATCH
    room = spare - (source.tile_bytes if "stage" in (transport, otherwise) else SCRATCH if buffered else 0)
    # All that arrives must fit beside what messages stage if the result is the caller's `out`, which no message may
    # touch before all ranks have sent theirs.
    rest = room - chosen.received_bytes
    least = min(SMALL, max(itemsize, chosen.received_bytes // source.mesh.size))
    held = request.careful and rest >= least
    staging = min(STAGING, rest if held else room // 2)
    staging = staging if is_worth_staging(staging, chosen.received_bytes) else 0
    moves = moves._replace(staging=staging, held=held)
    return TilePlan(request, transport, otherwise, *mine, spare, moves, buffered, joined)


def plan_uncached(request: Request, rank: int, facts: Facts, itemsize: int) -> TilePlan:
    """A rank's part of a request, compiled, on a machine that may be another one."""
    ready = _plan_tile.__wrapped__(request, rank, facts, itemsize)
    ready.compile()
    return ready


def clear_caches() -> None:
    """Gives up what is cached of schedules, so that the next is compiled as the first one was."""
    for cached in (_plan_tile, plan_direct, plan_joined, rank_plan, run_bytes, node_load, *to_mpi.CACHES):
        cached.cache_clear()


def _find_plan(request: Request) -> Plan:
    """The plan, which overwrites a donated tile only if the budget leaves no room for a second one.

    A caller's array stays alive for the whole call, so overwriting it is the only way to save its memory.
    """
    source, target, options = request.source, request.target, request.options
    try:
        kept = options._replace(donate=False)
        return plan_within_fewest(kept, lambda used: find_plan(source, target, used), lambda plan: plan.peak_bytes)
    except BudgetError:
        if not options.donate or request.into:
            raise
        donating = find_plan(source, target, options._replace(donate=True))
        # Only a single step in place overwrites the tile, and a numpy array cannot grow where it is.
        fits = donating.target.tile_bytes <= donating.source.tile_bytes
        if not (len(donating.steps) == 1 and donating.steps[0].mode.in_place and fits):
            raise
        return donating


def _choose_transport(request: Request, facts: Facts, spare: int, moves: _DirectMove) -> Transport:
    """The fastest transport that fits into `spare` bytes."""
    if request.shared or len(set(facts.nodes)) == len(facts.nodes):
        return "pull"
    staging = _choose_staging(request, spare)
    if facts.reads:
        sample = _sample_runs(moves)
        if staging == "plan":
            reads = sample.reach >= UNSTAGED and (sample.run >= STRAIGHT or spare >= SCRATCH)
        else:  # What is staged is copied past the caches: runs of 16 KiB take as long as through the kernel.
            reads = sample.run >= WORTHWHILE
        if reads:
            return "read"
    return staging


def _choose_staging(request: Request, spare: int) -> Transport:
    return "stage" if request.source.tile_bytes <= spare else "plan"

"""One move of one array: which way it goes, and the call that all ranks make together.

    pull    tiles in shared windows: each rank copies what it needs out of them
    read    private tiles, long runs: the same, through the kernel (`remote`)
    stage   private tiles, copied into a window first, then pulled
    plan    the plan's steps, message by message: reductions, and tight budgets
    overwrite   the plan's one step, in a donated tile: the tightest budgets

Between nodes, the first three send each piece in one message. They take what lies in windows from
there, whichever was chosen: a result of an earlier call often does. Results in windows, as new ones are, are
written to by those who have their elements, if tiles are private, or better read in their own order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np

from reshard.errors import BudgetError, PlanError, TileError
from reshard.lower.to_mpi import Overwrite, ranks, sole
from reshard.runtime.account import Account, begin_account
from reshard.runtime.on_mpi.agreement import agree, digest_of
from reshard.runtime.on_mpi.direct import (
    STAGING,
    Direct,
    Fill,
    direct,
    gives,
    move_directly,
    pack,
    pulling,
    pushes,
    pushing,
    unpacking,
)
from reshard.runtime.on_mpi.indices import clear_padding
from reshard.runtime.on_mpi.node.cma import WORTHWHILE
from reshard.runtime.on_mpi.node.cma_read import SCRATCH, STRAIGHT, reading
from reshard.runtime.on_mpi.node.node_sync import WORDS
from reshard.runtime.on_mpi.node.windows import Window
from reshard.runtime.on_mpi.run_plan import Compiled, Ready, compiled, run
from reshard.runtime.on_mpi.strided_copy import Array, copy, raw
from reshard.runtime.on_mpi.team import Facts, Team, Watch, moving
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.runtime.on_mpi.wire.messages import SMALL
from reshard.runtime.on_mpi.wire.overwrite import overwrite
from reshard.synth import Network, plan
from reshard.types import Layout
from reshard.types.plan import Plan

T = TypeVar("T")
Way = Literal["pull", "read", "stage", "plan", "overwrite"]


@dataclass(frozen=True)
class Request:
    """What every rank must ask for alike; `into` says that the result has a place already, `shared` that the
    source's tiles lie in shared windows.
    """

    source: Layout
    target: Layout
    budget: int | None = None
    network: Network | str | None = None
    donate: bool = False
    into: bool = False
    shared: bool = False

    @property
    def careful(self) -> bool:
        """Whether the result goes to an array that is to stay as it is if the call fails."""
        return self.into and not self.donate

    def __str__(self) -> str:
        ends = f"{self.source} -> {self.target} on {self.source.mesh!r}"
        if self.target.mesh != self.source.mesh:
            ends += f" and {self.target.mesh!r}"
        options = {"budget": self.budget, "network": self.network, "donate": self.donate}
        options |= {"out": self.into, "shared": self.shared}
        return ", ".join([ends, *(f"{name}={value}" for name, value in options.items() if value)])


class Held(NamedTuple):
    """A tile, and the window that it lies at the start of, if it does."""

    tile: Array
    window: Window | None = None


@dataclass(frozen=True, eq=False)
class Prepared:
    """How a rank answers a request: the way, another one where a tile that others read is not C-ordered, what it
    does directly, its steps of the plan, and the bytes of its buffers; `gives` as in `Direct`, of all ranks alike.
    """

    way: Way
    otherwise: Way
    direct: Direct | None
    steps: Compiled
    device: int
    spare: int
    buffered: bool = False
    gives: bool = False


def prepared(team: Team, request: Request, tile: Array) -> Prepared:
    """The rank's part of a request; raises what `plan` raises, `PlanError` for another number of ranks, and
    `TileError` for a tile that must be overwritten and cannot be.
    """
    check_mesh(request.source, team.size)
    found = _prepared(request, team.rank, team.facts, tile.itemsize)
    if found.way == "overwrite" and not (tile.flags.c_contiguous and tile.flags.writeable):
        raise TileError(
            f"the budget of {request.budget} B is met only by overwriting the donated tile, which is not C-ordered or "
            f"not writeable; give one that is, or a higher budget"
        )
    return found


def check_mesh(layout: Layout, size: int) -> None:
    """Raises `PlanError` unless a layout has one device a rank."""
    if layout.mesh.size != size:
        raise PlanError(
            f"mesh {layout.mesh} of {layout} has {layout.mesh.size} devices, the communicator {size} ranks; give a "
            f"layout on a mesh of as many devices, one a rank"
        )


@lru_cache(maxsize=512)
def _prepared(request: Request, rank: int, facts: Facts, itemsize: int) -> Prepared:
    source, target, nodes = request.source, request.target, facts.nodes
    found = _planned(request)
    steps = compiled(found, rank, itemsize)
    device = ranks(source.mesh)[rank]
    spare = found.peak_bytes - source.tile_bytes - target.tile_bytes
    if found.donate:
        return Prepared("overwrite", "overwrite", None, steps, device, 0)
    across = 0 if len(set(nodes)) == 1 else 2 * itemsize  # The least that messages between nodes are staged in.
    if source.partial != target.partial or spare < across:
        return Prepared("plan", "plan", None, steps, device, found.peak_bytes - source.tile_bytes)
    # Judged by what rank 0 would read if all were on one node, so that all ranks judge alike.
    judged = direct(source, target, 0, (0,) * len(nodes), itemsize, 0)
    way = _way(request, facts, spare - across, judged)
    otherwise = _staging_way(request, facts, spare - across)
    buffered = way == "read" and judged.run < STRAIGHT <= SCRATCH <= spare - across
    used = source.tile_bytes if "stage" in (way, otherwise) else SCRATCH if buffered else 0
    staging, held = _staging(request, spare - used, found.received_bytes, itemsize)
    near = direct(source, target, rank, nodes, itemsize, staging, held)
    return Prepared(way, otherwise, near, steps, device, spare, buffered, judged.gives)


def _planned(request: Request) -> Plan:
    """The plan, one that overwrites a donated tile only where the budget leaves no room for another one.

    A caller's array cannot be freed while the call lasts, so giving it up saves memory in no other case.
    """
    source, target, budget, network = request.source, request.target, request.budget, request.network
    try:
        return plan(source, target, budget, network)
    except BudgetError:
        if not request.donate or request.into:
            raise
        found = plan(source, target, budget, network, donate=True)
        if not _overwrites(found):
            raise
        return found


def _overwrites(found: Plan) -> bool:
    """Whether a plan is one step in place, whose result is no larger: an array of numpy cannot grow where it is."""
    return len(found.steps) == 1 and found.steps[0].mode.in_place and found.target.tile_bytes <= found.source.tile_bytes


def _way(request: Request, facts: Facts, spare: int, judged: Direct) -> Way:
    """The fastest way that there is room for."""
    if request.shared or len(set(facts.nodes)) == len(facts.nodes):
        return "pull"
    if facts.reads and judged.reach >= WORTHWHILE and (judged.run >= STRAIGHT or spare >= SCRATCH):
        return "read"
    return _staging_way(request, facts, spare)


def _staging_way(request: Request, facts: Facts, spare: int) -> Way:
    return "stage" if request.source.tile_bytes <= min(spare, facts.room) else "plan"


def _staging(request: Request, room: int, received: int, itemsize: int) -> tuple[int, bool]:
    """Bytes that a side of messages may stage at once, and whether all that arrives has room beside them, if it is to
    be held back from an array that is not the call's own.
    """
    rest = room - received
    least = min(SMALL, max(itemsize, received // request.source.mesh.size))
    if request.careful and rest >= least:
        return min(STAGING, rest), True
    return min(STAGING, room // 2), False


def begin(
    team: Team,
    limit: float,
    request: str,
    prepare: Callable[[], T],
    posting: Callable[[T], Sequence[int]] | None = None,
) -> tuple[Watch, T]:
    """Prepares, and agrees with the other ranks on `request`: all go on, or all raise, and nothing has moved.

    `posting` gives the words that the other ranks of the node are to see, see `where`.
    """
    watch = Watch(team, limit)
    found: T | None = None
    words: Sequence[int] = _NOWHERE
    error: Exception | None = None
    try:
        found = prepare()
        words = words if posting is None else posting(found)
    except Exception as caught:  # Other ranks wait to be told; it is raised once they have been.
        error = caught
    agree(team, watch, request, digest_of(request), error, (*words, *team.windows.words()), words[1] > 0)
    return watch, cast(T, found)


_NOWHERE = (0, 0, 0)


def where(held: Held, out: Held | None = None) -> tuple[int, int, int]:
    """The words that say where a tile and `out` are: the tile's window (slots count from 1), its address, the other."""
    address = held.tile.__array_interface__["data"][0] if held.tile.flags.c_contiguous else 0
    slots = [0 if at is None or at.window is None else at.window.slot + 1 for at in (held, out)]
    return slots[0], address, slots[1]


def new_tile(team: Team, layout: Layout, dtype: np.dtype[Any]) -> Held:
    """This rank's tile in a shared window, of anything; all ranks call it, after the same agreement."""
    nbytes = int(np.prod(layout.tile_shape)) * dtype.itemsize
    if nbytes > team.facts.room:
        return Held(np.empty(layout.tile_shape, dtype))
    window = team.windows.take(nbytes, _idle(team))
    return Held(team.windows.hold(window, layout.tile_shape, dtype), window)


def _idle(team: Team) -> list[list[int]]:
    return [words[len(_NOWHERE) :] for words in team.posted()]


def move(
    team: Team, watch: Watch, ready: Prepared, request: Request, held: Held, out: Held | None, memory: Account | None
) -> Held:
    """The target's tile, after agreement: in `out` if given, else new, or in the memory of a donated tile.

    Where there is nothing to do, it is the tile itself.
    """
    call = Call(team, watch, team.pool, begin_account(request.source.dtype, memory), ready.device)
    call.memory.take(call.device, held.tile.size)
    team.pool.limit(ready.spare)
    with moving(team):
        if not ready.steps.steps and out is None and held.tile.flags.c_contiguous:
            place = held
        elif ready.way == "overwrite":
            step, shape = cast(Overwrite, ready.steps.steps[0]), request.target.tile_shape
            place = Held(overwrite(call, step, ready.steps.ranks, held.tile, shape), held.window)
        else:
            place = _moved(call, ready, request, held, out)
            if out is None and not request.target.even:
                clear_padding(request.target, team.rank, place.tile)
        team.settle(watch)
    return place


def _moved(call: Call, ready: Prepared, request: Request, held: Held, out: Held | None) -> Held:
    team = call.team
    found: list[Held] = []

    def place() -> Array:
        found.append(new_tile(team, request.target, held.tile.dtype) if out is None else out)
        return found[0].tile

    posted = team.posted()
    shared = all(slot for slot, *_ in posted)
    settled = (lambda: team.settle(call.watch)) if request.careful else None
    way = ready.way if team.plain or ready.way != "read" else ready.otherwise
    push = (ready.gives or not shared) and _lands(team, request, held.tile, posted)
    if ready.direct is None or (way == "plan" and not ((shared or push) and team.one_node)):
        run(call, ready.steps, held.tile, place, settled)
        return found[0]
    target = place()
    call.memory.take(call.device, target.size)
    settled = None if team.one_node else settled  # After agreement and staging, only copies are left.
    others = {team.members[m]: words for m, words in enumerate(posted) if m != team.board.me}
    if others and push:
        new = found[0].window if out is None else None
        slots = {rank: slot - 1 if new is None else new.slot for rank, (_, _, slot, *_) in others.items()}
        move_directly(call, ready.direct, _pushed(call, request, slots, target), held.tile, target, settled)
    elif shared or not others:
        slots = {rank: slot - 1 for rank, (slot, *_) in others.items()}
        move_directly(call, ready.direct, pulling(_tiles(team, slots, held.tile)), held.tile, target, settled)
    elif way == "read":
        addresses = {rank: address for rank, (_, address, *_) in others.items()}
        read = reading(addresses, held.tile.shape, ready.buffered)
        move_directly(call, ready.direct, read, held.tile, target, settled)
    else:
        packed = len(team.members) <= WORDS and sole(request.target)
        staged = partial(_packed, request) if packed else _staged
        staged(call, ready.direct, held, target, settled)
    return found[0]


def _lands(team: Team, request: Request, tile: Array, posted: Sequence[Sequence[int]]) -> bool:
    """Whether the results of all ranks of the node lie in shared windows, or will."""
    if request.into:
        return all(slot for _, _, slot, *_ in posted)
    return math.prod(request.target.tile_shape) * tile.itemsize <= team.facts.room


def _pushed(call: Call, request: Request, slots: dict[int, int], target: Array) -> Fill:
    team = call.team
    give = pushes(request.source, request.target, team.rank, team.facts.nodes, target.itemsize)
    return pushing(give, _tiles(team, slots, target))


def _tiles(team: Team, slots: dict[int, int], like: Array) -> dict[int, Array]:
    """The tiles of other ranks in these windows, of one rank's shape and dtype."""
    members = {rank: member for member, rank in enumerate(team.members)}
    return {rank: team.windows[slot].tile(members[rank], like.shape, like.dtype) for rank, slot in slots.items()}


def _staged(call: Call, pulls: Direct, held: Held, target: Array, settled: Ready | None) -> None:
    """All tiles of the node go to one window, from where they are pulled."""
    team, tile = call.team, held.tile
    window = team.windows.take(tile.nbytes, _idle(team))
    call.memory.take(call.device, tile.size)
    copy(raw(window.tile(team.board.me, tile.shape, tile.dtype)), raw(tile))
    team.gather(call.watch)
    tiles = _tiles(team, dict.fromkeys(team.members, window.slot), tile)
    move_directly(call, pulls, pulling(tiles), tile, target, settled)
    # Others may still read from it: it is free once all have said so, in their next call.
    team.windows.release(window)
    call.memory.free(call.device, tile.size)


def _packed(request: Request, call: Call, pulls: Direct, held: Held, target: Array, settled: Ready | None) -> None:
    """What leaves a tile goes to one window, packed by receiver; no more than the tile, as nothing is sent twice."""
    team, tile = call.team, raw(held.tile)
    give = gives(request.source, request.target, team.rank, team.facts.nodes, tile.itemsize)
    window = team.windows.take(tile.nbytes, _idle(team))
    call.memory.take(call.device, tile.size)
    pack(give, tile, window.tile(team.board.me, (tile.size,), tile.dtype))
    starts = team.gather(call.watch, [give.starts.get(rank, 0) for rank in team.members])
    members = {rank: member for member, rank in enumerate(team.members)}
    packed = {
        rank: window.tile(members[rank], (tile.size,), tile.dtype)[starts[members[rank]][team.board.me] :]
        for rank, _ in pulls.pulls
    }
    move_directly(call, pulls, unpacking(packed), held.tile, target, settled)
    team.windows.release(window)  # Others may still read from it, see `_staged`.
    call.memory.free(call.device, tile.size)

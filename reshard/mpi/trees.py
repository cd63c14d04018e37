"""`redistribute` for a tree of tiles: one agreement on names, layouts and versions, and few messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from reshard.errors import AgreementError, PlanError, ReshardError, TileError, quoted
from reshard.lower.to_mpi import seat_of
from reshard.mpi.tiles import check_filled, check_options, check_source, true_part
from reshard.mpi.tree_leaves import (
    Ends,
    Leaf,
    NamedErrors,
    Tree,
    distinct,
    ends_of,
    flat_or_none,
    leaves_of,
    mapped,
    moves_of,
    unflattened,
)
from reshard.runtime.account import Account, begin_account
from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.runtime.on_mpi.agreement import MANIFEST_END
from reshard.runtime.on_mpi.checksum import checksum, total
from reshard.runtime.on_mpi.collective import collective
from reshard.runtime.on_mpi.intercomm import MergedGroups, groups_of
from reshard.runtime.on_mpi.prepare import check_seats
from reshard.runtime.on_mpi.repeated import seconds
from reshard.runtime.on_mpi.run_view import ViewPlan
from reshard.runtime.on_mpi.strided_copy import copy, raw
from reshard.runtime.on_mpi.team import Comm, Facts, Team, Watch
from reshard.runtime.on_mpi.tree_run import TreeTiles, check_parts, run_tree, steps_of
from reshard.runtime.on_mpi.tree_schedule import Part, schedule_of
from reshard.runtime.on_mpi.window_tiles import ABSENT, NOWHERE, Posted
from reshard.runtime.platform_network import named, network_text
from reshard.synth import Network, plan_tree
from reshard.synth.planner import bytes_of, network_of
from reshard.types import Layout
from reshard.types.flags import checked_flag
from reshard.types.manifest import Manifest, Version, checked_version
from reshard.types.move import Move
from reshard.types.plan import Plan
from reshard.types.plan_tree import TreePlan

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class TreeMove:
    """The arguments of one rank's call for a tree of tiles, as they were given."""

    tiles: Tree
    source: object
    target: object
    budget: int | str | None
    network: Network | str | None
    memory: Account | None
    padded: bool
    version: Version | Mapping[str, Version]
    verify: str | None
    out: object = None
    scale: object = None
    of_one: Mapping[str, object] = field(default_factory=dict[str, object])
    """The options that are for one tile, and whether each is given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", named(self.network))

    def run(self, comm: Comm | MPI.Intercomm, limit: float) -> dict[str, Any]:
        """Moves all tiles; returns those of the targets, None where this rank has none, in the tree's structure."""
        if not isinstance(comm, MPI.Intercomm):
            return self._run(comm, limit, self._prepare)
        groups, giving = groups_of(comm, seconds(limit)), list[int]()

        def ahead(team: Team, watch: Watch) -> None:
            giving.extend(groups.giving(team, watch, self._gives))

        def prepare(team: Team) -> _ReadyTree:
            return self._seated(groups, groups.one_giving(giving))._prepare(team)

        return self._run(groups.comm, limit, prepare, ahead)

    @property
    def _gives(self) -> bool:
        """Whether this rank gives a tile; what is not a tree gives none, and is refused later."""
        with suppress(ReshardError):
            return any(tile is not None for _, tile in leaves_of(self.tiles, ""))
        return False

    def _seated(self, groups: MergedGroups, giving: int) -> TreeMove:
        """The same on the merged communicator of two groups."""

        def seated(leaf: Any, group: int) -> Any:
            if isinstance(leaf, Move):
                ends = groups.seated(leaf.source, group), groups.seated(leaf.target, 1 - group)
                return Move(*ends, leaf.view, cast=leaf.cast)
            return groups.seated(leaf, group) if isinstance(leaf, Layout) else leaf

        source = mapped(self.source, lambda leaf: seated(leaf, giving))
        return replace(self, source=source, target=mapped(self.target, lambda leaf: seated(leaf, 1 - giving)))

    def _run(
        self,
        comm: Comm,
        limit: float,
        prepare: Callable[[Team], _ReadyTree],
        ahead: Callable[[Team, Watch], None] | None = None,
    ) -> dict[str, Any]:
        def request(given: _ReadyTree) -> str:
            network = None if self.network is None else network_text(self.network)
            options = {"budget": self.budget, "network": network, "verify": self.verify}
            options["scale"] = ", ".join(sorted(given.arrays.scales))
            chosen = {name: value for name, value in options.items() if value}
            return f"{given.planned.manifest}{MANIFEST_END}{chosen or ''}"

        with collective(comm, limit, prepare, request, _ReadyTree.posting, ahead) as (team, watch, given):
            before = given.sums(given.arrays.tiles, team, after=False)
            moved = {**given.arrays.tiles, **self._moved(team, watch, given)}
            team.settle(watch)
            after = given.sums(moved, team, after=True)
            sums = total(team, watch, before), total(team, watch, after)
        _compare(given, *sums)  # All ranks have the same sums, so all raise, and the communicator stays usable.
        plans = given.planned.tree.plans
        results = {name: _result(tile, plans[name], comm, self.padded) for name, tile in moved.items()}
        return cast("dict[str, Any]", unflattened(self.tiles, results, ""))

    def _moved(self, team: Team, watch: Watch, given: _ReadyTree) -> dict[str, Array]:
        sources = [plan.source for plan in given.planned.tree.plans.values()]
        held = sum(end.tile_bytes for end in sources if seat_of(end.mesh, team.rank, team.size) is not None)
        given.memory.take(team.rank, held, "uint8")
        team.pool.limit(max(0, given.planned.tree.peak_bytes - held))
        arrays = given.arrays
        if not team.into:  # This rank has no result, and no rank that has one gave an array for it.
            arrays = replace(arrays, outs={name: arrays.outs[name] for name in given.filled})
        parts = given.planned.single_parts if team.into else given.planned.parts
        moved = run_tree(team, watch, parts, arrays, given.memory)
        return {**_copied(given, arrays, team), **moved}

    def _prepare(self, team: Team) -> _ReadyTree:
        self._check_options()
        flat = dict(leaves_of(self.tiles, ""))
        leaves = moves_of(self.source, self.target, flat)
        ends = {name: ends_of(leaf) for name, leaf in leaves.items()}
        with NamedErrors() as at:
            for at.name, pair in distinct(ends):
                check_seats(*pair, team.size)
        budget = bytes_of(self.budget)
        if not isinstance(self.network, str):
            network_of(self.network)
        planned = _planned(tuple(leaves.items()), _frozen(self.version), budget, self.network, team.rank, team.facts)
        tiles: dict[str, Array] = {}
        with NamedErrors() as at:
            for at.name, (source, _) in ends.items():
                tiles[at.name] = check_source(flat[at.name], source, team.rank, team.size, self.budget)
        filled = [name for name, leaf in leaves.items() if isinstance(leaf, Move) and leaf.view.into]
        outs, gave = self._outs(ends, filled, tiles, team)
        scales = _scales(flat_or_none(self.scale, "scale"), planned.tree.plans, team)
        if scales and self.verify is not None:
            raise PlanError(f"verify compares no scaled values: move {quoted(sorted(scales)[:4])} in a call without it")
        memory = begin_account("uint8", self.memory)
        memory.cast("uint8")
        return _ReadyTree(planned, TreeTiles(tiles, outs, scales), filled, gave, memory, self.verify is not None)

    def _check_options(self) -> None:
        given = [name for name, value in self.of_one.items() if checked_flag(value, name)]
        if given:
            raise PlanError(f"{', '.join(given)}: for one tile, and a tree of {len(self.tiles)} is given; leave it out")
        if not (self.verify is None or (isinstance(self.verify, str) and self.verify == "hash")):  # pyright: ignore
            raise PlanError(f'verify {quoted(self.verify)}: give "hash", which compares the values, or None')
        check_options(False, False, self.memory, None, self.padded)

    def _outs(
        self, ends: Mapping[str, Ends], filled: Sequence[str], tiles: Mapping[str, Array], team: Team
    ) -> tuple[dict[str, Array], int]:
        """The arrays for results, empty where this rank has none, and what to post of them: whether all are given."""
        given = flat_or_none(self.out, "out")
        results = {name for name, (_, end) in ends.items() if seat_of(end.mesh, team.rank, team.size) is not None}
        rest = [name for name in ends if name in results and name not in filled]
        gave = any(given.get(name) is not None for name in rest)
        _check_given(given, ends, [name for name in filled if name in results], rest if gave else [])
        outs: dict[str, Array] = {}
        with NamedErrors() as at:
            for at.name, (_, end) in ends.items():
                name = at.name
                if gave or name in filled or name not in results:
                    outs[name] = check_filled(given.get(name), end, tiles[name], team.rank, team.size)
        return outs, (int(gave) if rest else ABSENT)


def _check_given(
    given: Mapping[str, Any], names: Collection[str], filled: Collection[str], others: Collection[str]
) -> None:
    """Refuses arrays for results that are not in the tree, and missing ones."""
    unknown = [name for name in given if name not in names]
    if unknown:
        raise TileError(f"out: {quoted(unknown[:4])} are not arrays of the tree")
    missing = [name for name in filled if given.get(name) is None]
    if missing:
        raise TileError(f"{quoted(missing[:4])} fill part of their targets: give their tiles with out=")
    without = [name for name in others if given.get(name) is None]
    if without:
        raise TileError(f"out: {quoted(without[:4])} have none; give one for all, or none")


@dataclass(frozen=True, eq=False)
class _Planned:
    """What all ranks work out alike; `parts` are those of a call that gives no `out` for all results."""

    manifest: str
    tree: TreePlan
    parts: Sequence[Part]
    facts: Facts

    @cached_property
    def single_parts(self) -> Sequence[Part]:
        """The parts of a call that gives arrays for all results."""
        return schedule_of(self.tree, self.facts, apart=True)


class _ReadyTree(NamedTuple):
    """One rank's part of a tree: what all agree on, this rank's arrays, and whether it gave `out` for all results."""

    planned: _Planned
    arrays: TreeTiles
    filled: list[str]
    gave: int
    memory: Account
    verified: bool

    def posting(self) -> Posted:
        """What the other ranks of the node can read."""
        return NOWHERE._replace(given=self.gave)

    def sums(self, tiles: Mapping[str, Array], team: Team, *, after: bool) -> list[int]:
        """This rank's parts of the sums of all arrays that are compared, none unless they are verified."""
        plans = self.planned.tree.plans.items() if self.verified else ()
        return [_sum_of(plan, tiles[name], team, after) for name, plan in plans if _comparable(plan)]


def _sum_of(plan: Plan, tile: Array, team: Team, after: bool) -> int:
    """This rank's part of an array's sum, of its values in the dtype that they have after the move."""
    layout = plan.target if after else plan.source
    seat = seat_of(layout.mesh, team.rank, team.size)
    if seat is None:
        return 0
    return checksum(layout, seat, tile.astype(numpy_dtype(plan.target.dtype), copy=False), plan.view, after=after)


def _copied(given: _ReadyTree, arrays: TreeTiles, team: Team) -> dict[str, Array]:
    """The arrays for results of tiles that stay where they are, filled with these."""
    still = [name for name, plan in given.planned.tree.plans.items() if not plan.steps and name in arrays.outs]
    for name in still:
        given.memory.take(team.rank, arrays.outs[name].nbytes, "uint8")
        copy(raw(arrays.outs[name]), raw(arrays.tiles[name]))
    return {name: arrays.outs[name] for name in still}


def _comparable(plan: Plan) -> bool:
    """Whether an array has its values before the move: a sum that is not finished has none."""
    return not plan.source.partial and not plan.target.partial


def _compare(given: _ReadyTree, before: list[int], after: list[int]) -> None:
    """Raises `AgreementError` on all ranks if the values of an array are not what they were."""
    names = [name for name, plan in given.planned.tree.plans.items() if _comparable(plan)]
    wrong = [name for name, one, other in zip(names, before, after, strict=False) if one != other]
    if wrong:
        raise AgreementError(
            f"the values of {quoted(wrong[:4])} are not what they were before the move, of {len(names)} arrays compared"
        )


def _result(tile: Array, plan: Plan, comm: Comm, padded: bool) -> Array | None:
    seat = seat_of(plan.target.mesh, comm.rank, comm.size)
    if seat is None:
        return None
    return tile if padded else true_part(tile, plan.target, seat)


def _scales(given: dict[str, Any], plans: Mapping[str, Plan], team: Team) -> dict[str, Any]:
    """The scales of casts, checked against the tiles that are cast."""
    unknown = [name for name in given if name not in plans]
    if unknown:
        raise TileError(f"scale: {quoted(unknown[:4])} are not arrays of the tree")
    with NamedErrors() as at:
        for at.name, scale in given.items():
            _check_scale(plans[at.name], scale, team)
    return {name: scale for name, scale in given.items() if scale is not None}


def _check_scale(plan: Plan, scale: Any, team: Team) -> None:
    if scale is None:
        return
    steps = steps_of(plan, team.rank, team.size)
    casts = [step.before for step in steps.steps if step.step is None] if isinstance(steps, ViewPlan) else []
    if not casts:
        raise TileError(f"scale {quoted(scale)}: {plan.source} to {plan.target} casts nothing; leave it out")
    try:
        np.broadcast_to(np.asarray(scale, "float64"), casts[0] if math.prod(casts[0]) else np.shape(scale))
    except (ValueError, TypeError) as error:
        raise TileError(
            f"scale {quoted(scale)} does not fit the tile of shape {casts[0]} that is cast: {error}; give a number, or "
            f"an array that broadcasts to the tile"
        ) from None


def _frozen(version: object) -> object:
    """The version of all arrays, or of each by its name, as a cache takes it; raises `PlanError` for anything else."""
    if not isinstance(version, Mapping):
        return checked_version(version, "all arrays")
    each = cast("Mapping[object, object]", version)
    return tuple(sorted((str(name), checked_version(one, quoted(name))) for name, one in each.items()))


@lru_cache(maxsize=64)
def _planned(
    leaves: tuple[tuple[str, Leaf], ...], version: Any, budget: Any, network: Any, rank: int, facts: Facts
) -> _Planned:
    versions = dict(cast("Mapping[str, Version]", version)) if isinstance(version, tuple) else version
    manifest = Manifest.of(dict(leaves), versions).to_json()
    tree = plan_tree(dict(leaves), budget, network)
    parts = schedule_of(tree, facts)
    check_parts(parts, rank, len(facts.nodes))
    return _Planned(manifest, tree, parts, facts)

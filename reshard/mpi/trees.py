"""`redistribute` for a tree of tiles: one agreement on names, layouts and versions, and few messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from reshard.errors import AgreementError, LayoutError, PlanError, ReshardError, TileError, quoted
from reshard.mpi.tiles import check_given_tile, true_part
from reshard.runtime.account import Account, begin_account
from reshard.runtime.on_mpi.agreement import MANIFEST_END
from reshard.runtime.on_mpi.checksum import checksum, total
from reshard.runtime.on_mpi.collective import collective
from reshard.runtime.on_mpi.gpu.device_arrays import on_gpu
from reshard.runtime.on_mpi.move_stack import Stack, move_stack, stacks_of
from reshard.runtime.on_mpi.prepare import check_mesh
from reshard.runtime.on_mpi.team import Comm, Team
from reshard.runtime.platform_network import named
from reshard.synth import Network, plan_tree
from reshard.synth.planner import bytes_of, network_of
from reshard.types import Layout
from reshard.types.manifest import Manifest, Version
from reshard.types.plan_tree import TreePlan

Array = NDArray[Any]
Tree = Mapping[str, Any]


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
    of_one: Mapping[str, object]
    """The options that are for one tile, and whether each is given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", named(self.network))

    def run(self, comm: Comm, limit: float) -> dict[str, Any]:
        """Moves all tiles; returns those of the targets, in the tree's structure."""

        def request(given: _ReadyTree) -> str:
            options = {"budget": self.budget, "network": self.network, "verify": self.verify}
            chosen = {name: value for name, value in options.items() if value}
            return f"{_text(given.manifest)}{MANIFEST_END}{chosen or ''}"

        with collective(comm, limit, self._prepare, request) as (team, watch, given):
            before = self._sums(given, given.tiles, "source", team)
            moved = dict(given.tiles)
            given.memory.take(team.rank, sum(plan.source.tile_bytes for plan in given.tree.plans.values()))
            for stack in given.stacks:
                tiles = move_stack(team, watch, stack, [moved[name] for name in stack.names], given.memory)
                moved.update(zip(stack.names, tiles, strict=True))
            team.settle(watch)
            after = self._sums(given, moved, "target", team)
            sums = total(team, watch, before), total(team, watch, after)
        _compare(given, *sums)  # All ranks have the same sums, so all raise, and the communicator stays usable.
        if not self.padded:
            targets = {name: plan.target for name, plan in given.tree.plans.items()}
            moved = {name: true_part(tile, targets[name], comm.rank) for name, tile in moved.items()}
        return cast("dict[str, Any]", _unflattened(self.tiles, moved, ""))

    def _prepare(self, team: Team) -> _ReadyTree:
        given = [name for name, value in self.of_one.items() if value]
        if given:
            raise PlanError(f"{', '.join(given)}: for one tile, and a tree of {len(self.tiles)} is given; leave it out")
        if self.verify not in (None, "hash"):
            raise PlanError(f'verify {quoted(self.verify)}: give "hash", which compares the values, or None')
        flat = dict(_leaves(self.tiles, ""))
        sources, targets = _layouts(self.source, flat, "source"), _layouts(self.target, flat, "target")
        ends = {name: (sources[name], targets[name]) for name in flat}
        for layout in dict.fromkeys([*sources.values(), *targets.values()]):
            check_mesh(layout, team.size)
        bytes_of(self.budget)
        if not isinstance(self.network, str):
            network_of(self.network)
        manifest = _manifest(tuple(ends.items()), _frozen(self.version))
        tree = _tree(tuple(ends.items()), self.budget, self.network)
        tiles = {name: _tile(name, tile, ends[name][0], team.rank, self.budget) for name, tile in flat.items()}
        stacks = stacks_of(team, tree, tiles, self.budget is not None)
        return _ReadyTree(manifest, tree, tiles, stacks, begin_account("uint8", self.memory))

    def _sums(self, given: _ReadyTree, tiles: Mapping[str, Array], end: str, team: Team) -> list[int]:
        if self.verify is None:
            return []
        plans = given.tree.plans.items()
        return [checksum(getattr(plan, end), team.rank, tiles[name]) for name, plan in plans if _comparable(plan)]


class _ReadyTree(NamedTuple):
    """One rank's part of a tree: what all agree on, the plan, and this rank's tiles."""

    manifest: Manifest
    tree: TreePlan
    tiles: dict[str, Array]
    stacks: list[Stack]
    memory: Account


def _comparable(plan: Any) -> bool:
    return not plan.source.partial and not plan.target.partial


def _compare(given: _ReadyTree, before: list[int], after: list[int]) -> None:
    """Raises `AgreementError` on all ranks if the values of an array are not what they were."""
    names = [name for name, plan in given.tree.plans.items() if _comparable(plan)]
    wrong = [name for name, one, other in zip(names, before, after, strict=False) if one != other]
    if wrong:
        raise AgreementError(
            f"the values of {quoted(wrong[:4])} are not what they were before the move, of {len(names)} arrays compared"
        )


def _leaves(tree: Tree, path: str) -> list[tuple[str, Any]]:
    """The tiles by name, as `types.tree_names` names them; only dicts are nested, since lists may be tiles."""
    leaves: list[tuple[str, Any]] = []
    for key, below in tree.items():
        if not isinstance(key, str | int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f"the key {quoted(key)} of the tree of tiles: give text or an int")
        name = f"{path}{key}"
        leaves += _leaves(cast("Tree", below), f"{name}.") if isinstance(below, Mapping) else [(name, below)]
    names = [name for name, _ in leaves]
    if len(set(names)) < len(names):
        raise PlanError(f"two tiles of the tree have one name, of {quoted(names)}; give each its own")
    return leaves


def _unflattened(tree: Tree, moved: Mapping[str, Array], path: str) -> dict[Any, Any]:
    return {
        key: _unflattened(cast("Tree", below), moved, f"{path}{key}.")
        if isinstance(below, Mapping)
        else moved[f"{path}{key}"]
        for key, below in tree.items()
    }


def _layouts(given: object, flat: Mapping[str, Any], what: str) -> dict[str, Layout]:
    """The layout of each tile, by its name: its own, or the one for all."""
    if isinstance(given, Layout):
        return dict.fromkeys(flat, given)
    if not isinstance(given, Mapping):
        raise LayoutError(f"the {what} of a tree of tiles is a {type(given).__name__}; give a dict of layouts")
    layouts = dict(_leaves(cast("Tree", given), ""))
    wrong = [*(name for name in flat if name not in layouts), *(name for name in layouts if name not in flat)]
    if wrong:
        raise LayoutError(f"the {what} and the tiles have not the same names: {quoted(wrong[:4])} are in one of them")
    other = next((name for name, layout in layouts.items() if not isinstance(layout, Layout)), None)
    if other is not None:
        raise LayoutError(
            f"the {what} of {other!r} is {quoted(layouts[other])}, not a Layout; read it with Layout.parse"
        )

    return layouts


def _tile(name: str, tile: Any, layout: Layout, rank: int, budget: object) -> Array:
    if on_gpu(tile):
        raise TileError(f"{name}: a tile of a tree is in a GPU's memory; move it by a call of its own")
    try:
        return np.ascontiguousarray(check_given_tile(tile, layout, rank, budget)).reshape(layout.tile_shape)
    except ReshardError as error:
        raise type(error)(f"{name}: {error}") from None


def _frozen(version: object) -> object:
    return tuple(sorted(cast("Mapping[str, Any]", version).items())) if isinstance(version, Mapping) else version


_Ends = tuple[tuple[str, tuple[Layout, Layout]], ...]


@lru_cache(maxsize=64)
def _manifest(ends: _Ends, version: Any) -> Manifest:
    versions = dict(cast("Mapping[str, Version]", version)) if isinstance(version, tuple) else version
    return Manifest.of(dict(ends), versions)


@lru_cache(maxsize=64)
def _text(manifest: Manifest) -> str:
    return manifest.to_json()


@lru_cache(maxsize=64)
def _tree(ends: _Ends, budget: Any, network: Any) -> TreePlan:
    return plan_tree(dict(ends), budget, network)

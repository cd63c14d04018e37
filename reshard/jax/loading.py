"""Loads into shardings: tiles are read and put together in the memory of a process, and put on its devices from there.

    read        each stored byte once, by one process, where it belongs if it is wanted in one tile as it is
    fill        by copies, with views, parts and casts on the way: one tile for all devices that hold the same
    exchange    what processes of other hosts have read: one program a wave (`process_exchange`)
    place       on the devices, a target as soon as it is complete

Between the devices of a host nothing moves: its processes share the memory of what one of them reads for others
(`share_host_memory`), and what several devices hold has been read, received and put together once. While a wave is
exchanged and filled, a thread reads the next one; programs are compiled while it reads the first.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import threading
import uuid
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from reshard.errors import (
    AgreementError,
    FileError,
    LayoutError,
    MissingTensorError,
    NamedErrors,
    PlanError,
    ReshardError,
    did_you_mean,
    quote_first,
    quoted,
    shortened,
)
from reshard.geometry.holders import tile_of
from reshard.jax import placement
from reshard.jax.agreement import JaxProcesses, agree_between, find_store, read_time_limit
from reshard.jax.crossing.host import count_cores as count_cores
from reshard.jax.placement import Part, Target, ViewOptions
from reshard.jax.process_exchange import LAST, ByteLaunch, ProcessExchange, exchange_on, plan_launches
from reshard.jax.request import number_devices
from reshard.jax.view_moves import check_parts_cover, resolve_given_view
from reshard.plans.load_plan import LoadPlan, Reading, Wave
from reshard.plans.plan import Plan
from reshard.runtime.on_files.host_moves import (
    TileCopy,
    copy_tile,
    list_process_copies,
    pack_tile,
    unpack_tile,
    view_whole_tile,
)
from reshard.runtime.on_files.reader_thread import view_direct_tile
from reshard.runtime.on_mpi.node.arena import HUGE, PAGE, UNNAMED, call_libc, share_segment
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.units import bytes_text
from reshard.types.view import View

Array = NDArray[Any]
Tiles = Mapping[int, Array]
"""A tile for each device, by its number."""
ReadWave = Callable[[Sequence[tuple[Reading, Tiles]]], None]
"""Fills the tiles of some readings."""
_PIECE = 2 << 20
"""Bytes of memory that are taken at once for small tiles."""
_AT_ONCE = 256 << 20
"""About the bytes of a device's targets that are made at once: processes of a host have to meet to share memory."""
_ALIGNMENT = 64
"""XLA's CPU devices take memory as it is from this alignment on."""


# ---- targets ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ShardedTargets:
    """What a tree of shardings asks for: layouts over the numbered devices of all of them, as plans have them.

    `targets` has a layout for what is loaded as it is stored, a move for each view, part and cast; `sources` and
    `fills` say what these read and fill where that is not of their own name. `shardings` are by the targets' names, in
    the order of the leaves of `structure`.
    """

    targets: dict[str, Layout | Move]
    sources: dict[str, str]
    fills: dict[str, str]
    shardings: dict[str, NamedSharding]
    devices: tuple[Any, ...]
    structure: Any

    @property
    def process_of(self) -> dict[int, int]:
        """The process of each device."""
        return {number: device.process_index for number, device in enumerate(self.devices)}


def read_target_shardings(
    targets: Any, types: Mapping[str, tuple[tuple[int, ...], str]], as_stored: Mapping[str, Layout] | None = None
) -> ShardedTargets:
    """The targets of a load that a tree of `NamedSharding`s, specs and `Target`s asks for.

    `types` has the shape and dtype of each array that can be loaded, by its name: the path in the tree, joined by
    dots. `as_stored` has the layouts in which moves find tensors; None where a table of names makes the moves, and
    targets say only where arrays go, and their dtype. Raises `MissingTensorError` for names that are not there,
    `LayoutError` for shardings that do not fit.
    """
    placement.check_tree(targets, "the tree of targets")
    leaves, structure = jax.tree.flatten(targets, is_leaf=placement.is_target)
    names = placement.name_leaves(targets, placement.is_target)
    # Paths of different nodes may be joined to one text, such as those of {"a.b": x, "a": {"b": y}}.
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise PlanError(f"two targets have the name {quoted(twice[0])}, the path to them joined by dots; rename one")
    goals = [
        _Goal(name, *_split_target(name, leaf, as_stored is None)) for name, leaf in zip(names, leaves, strict=True)
    ]
    # Shapes are needed to make layouts, so that names which are not there end it here, all of them at once.
    missing = [read for goal in goals for read in goal.reads if read not in types]
    if missing:
        raise MissingTensorError(
            f"there is no tensor {quote_first(missing)}{did_you_mean(missing[0], types)}; name "
            f"stored tensors, by the paths in the tree or by source="
        )
    shardings: dict[str, NamedSharding] = {}
    views: dict[str, list[View]] = {}
    aims: dict[str, tuple[tuple[int, ...], str]] = {}
    for goal in goals:
        shapes = [types[read][0] for read in goal.reads]
        views[goal.name] = [
            resolve_given_view(part, shape, goal.shape) for part, shape in zip(goal.parts, shapes, strict=True)
        ]
        # Which of several dtypes should win is not ours to say.
        kinds = {types[read][1] for read in goal.reads}
        if goal.dtype is None and len(kinds) > 1:
            raise PlanError(
                f"the target {goal.name!r} is filled by tensors of {' and '.join(sorted(kinds))}; give dtype="
            )
        dtype = dtypes.canonical(goal.dtype) if goal.dtype is not None else kinds.pop()
        shape = views[goal.name][0].target_shape
        aims[goal.name] = shape, dtype
        # A load starts from nothing, so that a part which is missing would be whatever was in memory.
        check_parts_cover(goal.name, goal.reads, views[goal.name], complete=True)
        shardings[goal.name] = _resolve_load_sharding(goal, shape, dtype)
    # By numbers, since the ids of devices of two platforms may coincide; all processes count alike.
    numbers = number_devices(*dict.fromkeys(sharding.mesh for sharding in shardings.values()))
    made = ShardedTargets({}, {}, {}, shardings, tuple(numbers), structure)
    for goal in goals:
        sharding = shardings[goal.name]
        of_mesh = tuple(numbers[device] for device in placement.devices_of(sharding.mesh))
        layout = placement.layout_of(sharding, *aims[goal.name], numbers=of_mesh)
        if not layout.even:
            raise LayoutError(
                f"the target {goal.name!r}: {sharding.spec} on mesh {dict(sharding.mesh.shape)} does not divide the "
                f"shape {layout.shape}, and JAX holds only arrays that it divides; give another sharding"
            )
        if as_stored is None or goal.plain:
            made.targets[goal.name] = layout
            continue
        for number, (read, view) in enumerate(zip(goal.reads, views[goal.name], strict=True)):
            name = goal.name if len(goal.reads) == 1 else f"{goal.name}, part {number}, of {read}"
            source = as_stored[read]
            made.targets[name] = Move(source, layout, view, cast=source.dtype != layout.dtype)
            made.sources[name], made.fills[name] = read, goal.name
    return made


class _Goal(NamedTuple):
    """An array to load: where it goes, and the tensors that it reads with the view of each."""

    name: str
    sharding: Any
    reads: tuple[str, ...]
    parts: tuple[ViewOptions, ...]
    shape: tuple[int, ...] | None
    dtype: Any

    @property
    def plain(self) -> bool:
        """Whether it is the tensor of its own name as it is stored."""
        return self.reads == (self.name,) and self.dtype is None and self.parts[0].plain


def _split_target(
    name: str, leaf: Any, by_table: bool
) -> tuple[Any, tuple[str, ...], tuple[ViewOptions, ...], tuple[int, ...] | None, Any]:
    """What a leaf of the tree of targets says, as the fields of a goal."""
    if not isinstance(leaf, Target):
        return leaf, (name,), (ViewOptions(),), None, None
    options = leaf.options
    parts: Sequence[Part | None] = leaf.parts or [None]
    given = tuple(options if part is None else part.options for part in parts)
    if options.out is not None or any(each.scale is not None for each in given):
        raise PlanError(
            f"the target {name!r}: a load takes no out= and no scale=; use them with redistribute, after it"
        )
    reads = tuple(part.source for part in parts if part is not None) or (leaf.source or name,)
    if by_table and (leaf.named or any(each.view is not None or each.take or each.into for each in given)):
        raise PlanError(f"the target {name!r} has a view of its own beside a table of names; give one of the two")
    views = tuple(ViewOptions(each.view, each.take, each.into, sizes=each.sizes) for each in given)
    return leaf.sharding, reads, views, options.shape, options.dtype


def _resolve_load_sharding(goal: _Goal, shape: tuple[int, ...], dtype: str) -> NamedSharding:
    """The sharding of a target on a mesh of devices; the array is known by its shape and dtype alone."""
    kind = jnp.dtype(dtype)
    if jax.dtypes.canonicalize_dtype(kind) != kind:
        raise LayoutError(
            f"the target {goal.name!r} is {dtype}, which JAX has with jax.config.update('jax_enable_x64', True) alone; "
            f"set that, or give reshard.jax.Target(sharding, dtype=...)"
        )
    with NamedErrors(f"the target {goal.name!r}"):
        sharding = placement.resolve_sharding(goal.sharding, jax.ShapeDtypeStruct(shape, kind), "target")
    if not isinstance(sharding.mesh, JaxMesh) or sharding.spec.unreduced:
        raise LayoutError(
            f"the target {goal.name!r}: {sharding.spec} on mesh {dict(sharding.mesh.shape)} is abstract, or a sum; "
            f"give a sharding of whole values on a mesh of devices"
        )
    return sharding


# ---- what is copied, and what is sent --------------------------------------------------------------


class TileStep(NamedTuple):
    """A copy of a wave: of which array into which one, the dtype in which it is sent, and whether both have it."""

    source: str
    target: str
    copy: TileCopy
    wire: np.dtype[Any]
    same: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its message, rounded so that the next one is aligned."""
        return -(-self.copy.elements * self.wire.itemsize // 16) * 16


@dataclass
class WaveSteps:
    """What a process does for a wave: messages by the process at the other end, and copies; `straight` has those of
    whole tiles, by the reading and the device that reads it.
    """

    sends: dict[int, list[TileStep]] = field(default_factory=lambda: defaultdict(list[TileStep]))
    takes: dict[int, list[TileStep]] = field(default_factory=lambda: defaultdict(list[TileStep]))
    copies: list[TileStep] = field(default_factory=list[TileStep])
    splits: list[TileStep] = field(default_factory=list[TileStep])
    straight: dict[tuple[str, int], TileStep] = field(default_factory=dict[tuple[str, int], TileStep])


def list_wave_steps(
    wave: Wave, process_of: Mapping[int, int], exchange: tuple[int, ...], hosts: Mapping[int, int], mine: int
) -> tuple[WaveSteps, NDArray[np.int64]]:
    """The steps of the process `mine`, and the bytes that each process of an exchange sends to each.

    `hosts` has a number for the host of each process: what its processes read is copied, and each tile filled once.
    """
    numbers = {process: at for at, process in enumerate(exchange)}
    host_of = tuple(sorted((device, hosts[process]) for device, process in process_of.items()))
    steps, amounts = WaveSteps(), np.zeros((len(numbers), len(numbers)), np.int64)
    for tree in wave.trees:
        for name, source, target in zip(tree.names, tree.sources, tree.targets, strict=True):
            plan: Plan = tree.plans[name]
            kinds = [jnp.dtype(end.dtype) for end in (plan.source, plan.target)]
            # Casts that narrow are made before the wire, and those that widen after it.
            wire = min(kinds, key=lambda kind: kind.itemsize)
            for copy in list_process_copies(plan.source, plan.target, plan.view, host_of):
                sender, receiver = process_of[copy.sender], process_of[copy.receiver]
                step = TileStep(source, target, copy, wire, kinds[0] == kinds[1])
                # Both ends list all messages between them in this order, and so agree on where each one lies.
                if tree is wave.split_tree:
                    steps.splits += [step] * (receiver == mine)
                elif hosts[sender] == hosts[receiver]:
                    # By who has read it, into a tile that both have.
                    steps.copies += [step] * (sender == mine)
                else:
                    amounts[numbers[sender], numbers[receiver]] += step.nbytes
                    if sender == mine:
                        steps.sends[receiver].append(step)
                    elif receiver == mine:
                        steps.takes[sender].append(step)
    # A tile of which one copy is made, and nothing sent, is read where that is to be.
    uses = Counter((step.source, step.copy.sender) for step in itertools.chain(steps.copies, *steps.sends.values()))
    plain = [step for step in steps.copies if step.same and len(step.copy.blocks) == 1]
    steps.straight = {at: step for step in plain if uses[at := (step.source, step.copy.sender)] == 1}
    return steps, amounts


# ---- the load --------------------------------------------------------------------------------------


class PartChecks(Protocol):
    """Checksums of blocks of files of which a process has read only a part."""

    def partials(self) -> list[Any]: ...
    def merge(self, others: Iterable[Any]) -> None: ...


class PreparedLoad(NamedTuple):
    """A plan and what it is for; what reads its waves, what ends that, and the checksums of what is read."""

    plan: LoadPlan
    goals: ShardedTargets
    read: ReadWave
    close: Callable[[], object] = list
    checks: PartChecks | None = None


class ShardedLoad:
    """A load into shardings under way, in one process: its steps, and the tiles that are not placed yet."""

    def __init__(self, prepared: PreparedLoad) -> None:
        plan, goals = prepared.plan, prepared.goals
        self.plan, self.goals, self.mine = plan, goals, jax.process_index()
        self._prepared = prepared
        # Processes without devices of the targets take part as well: they must hear of what goes wrong elsewhere.
        self.exchange = exchange_on(tuple(jax.devices())) if jax.process_count() > 1 else None
        groups = group_by_host(self.exchange) if self.exchange else {self.mine: (self.mine,)}
        self._near = groups[self.mine]
        self._together = any(len(group) > 1 for group in groups.values())
        hosts = {process: group[0] for process, group in groups.items()}
        listed = [list_wave_steps(wave, goals.process_of, tuple(groups), hosts, self.mine) for wave in plan.waves]
        self._steps = [steps for steps, _ in listed]
        self._launches = plan_launches([amounts for _, amounts in listed])
        self._memory = TilePool()
        self._tiles: dict[str, dict[int, Array]] = {}
        # A target is placed after the last wave that fills some of it.
        self._last: dict[str, int] = {}
        self._made = 0  # Waves whose targets have memory.
        self._moved: set[str] = set()
        """Targets into which one process may copy for another."""
        for at, wave in enumerate(plan.waves):
            moved = [name for tree in wave.trees for name in tree.targets]
            self._moved.update(moved)
            self._last |= {
                name: at for name in [*(each.target for each in wave.direct), *moved] if name in plan.targets
            }

    def run(self) -> dict[str, jax.Array]:
        """Reads wave by wave and makes the arrays; all processes raise together."""
        arrays: dict[str, jax.Array] = {}
        waves = self.plan.waves
        with ThreadPoolExecutor(1, thread_name_prefix="reshard-read") as pool:

            def begin(at: int, failed: BaseException | None) -> tuple[Any, BaseException | None]:
                """Starts to read a wave, unless something has failed, and says what has."""
                if at == len(waves):
                    return None, failed
                # Here and not in the thread that reads: processes of a host make tiles together, whatever failed.
                try:
                    self._make_targets(at)
                except Exception as error:
                    failed = failed or error
                return (None if failed else pool.submit(self._read_wave, at)), failed

            ahead, failed = begin(0, None)
            # Compiled while the first wave is read: a load is always a first call.
            if self.exchange is not None:
                for launch in dict.fromkeys([*self._launches, LAST]):
                    self.exchange.compile_launch(launch)
            for at in range(len(waves)):
                if ahead is not None:
                    failed = ahead.exception()
                staged: dict[str, Tiles] = {} if failed or ahead is None else ahead.result()
                # The next wave is read into memory of its own, so that it need not wait for this one to be moved.
                ahead, failed = begin(at + 1, failed)
                # What goes wrong here stops this process, and the others hear of it at the next exchange.
                failed = self._move_wave(at, staged, failed)
                if failed is not None and self.exchange is None:
                    raise failed
                # What the last wave has filled is placed when all are done.
                placed = [name for name, last in self._last.items() if last == at < len(waves) - 1]
                if placed and self._together:
                    self._meet(failed)
                arrays |= {name: self._place_target(name) for name in placed if failed is None}
        failed = self._finish_reads(failed)
        if failed is not None:
            raise failed
        return arrays | {name: self._place_target(name) for name in self.goals.shardings if name not in arrays}

    def _meet(self, failed: BaseException | None) -> None:
        """Waits for all processes; raises in all if one has failed."""
        if self.exchange is not None:
            _, states = self.exchange.run(LAST, {}, 0 if failed is None else _ILL)
            raise_if_any_failed(states, failed)

    def _read_wave(self, at: int) -> dict[str, dict[int, Array]]:
        """Reads a wave: into targets, and into new tiles for what then moves, which are returned."""
        wave, straight = self.plan.waves[at], self._steps[at].straight
        direct = {each.reading: each for each in wave.direct}
        staged: defaultdict[str, dict[int, Array]] = defaultdict(dict)
        wanted: list[tuple[Reading, Tiles]] = []
        for reading in wave.readings:
            shape, kind, tiles = reading.layout.tile_shape, jnp.dtype(reading.layout.dtype), dict[int, Array]()
            found = direct.get(reading.name)
            for device in self._list_holders(reading.layout, (self.mine,)):
                if found is not None:
                    tiles[device] = view_direct_tile(self._tiles[found.target][device], found.box, shape)
                    continue
                step = straight.get((reading.name, device))
                whole = None if step is None else view_whole_tile(step.copy, shape, self._target_tile(step))
                if whole is None:
                    straight.pop((reading.name, device), None)
                    whole = staged[reading.name][device] = self._memory.make_tile(shape, kind)
                tiles[device] = whole
            wanted.append((reading, tiles))
        self._prepared.read(wanted)
        return staged

    def _list_holders(self, layout: Layout, processes: Sequence[int]) -> list[int]:
        """The first device of these processes with each tile that they hold: others of them share its memory."""
        # Replicas in one process are one tile here, and on CPU devices stay one: XLA copies it before it writes.
        first: dict[object, int] = {}
        for device in layout.mesh.devices:
            if self.goals.process_of[device] in processes:
                first.setdefault(tile_of(layout, device), device)
        return [*first.values()]

    def _make_targets(self, at: int) -> None:
        """New memory for the targets and whole packs of a wave, and of some after it."""
        layouts: dict[str, Layout] = {}
        nbytes = 0
        for number in range(max(at, self._made), len(self.plan.waves)):
            if number > at and nbytes > _AT_ONCE:
                break
            new = {name: layout for name, layout in self._list_filled(number).items() if name not in self._tiles}
            layouts |= new
            nbytes += sum(layout.tile_bytes for layout in new.values())
            self._made = number + 1
        # Where others may fill a tile, or hold it, it is one for all of this host.
        shared = {name: len(self._near) > 1 and name in self._moved for name in layouts}
        places = [
            (name, at) for name in layouts if shared[name] for at in self._list_holders(layouts[name], self._near)
        ]
        memory = share_host_memory([layouts[name].tile_bytes for name, _ in places], self._near) if places else []
        self._tiles |= {name: {} for name in layouts}
        for (name, device), tile in zip(places, memory, strict=True):
            layout = layouts[name]
            self._tiles[name][device] = tile.view(jnp.dtype(layout.dtype)).reshape(layout.tile_shape)
        for name, layout in layouts.items():
            for device in () if shared[name] else self._list_holders(layout, (self.mine,)):
                self._tiles[name][device] = self._memory.make_tile(layout.tile_shape, jnp.dtype(layout.dtype))

    def _list_filled(self, at: int) -> dict[str, Layout]:
        """The targets and whole packs that a wave fills; with the first, those without elements, which none does."""
        wave, made = self.plan.waves[at], dict[str, Layout]()
        for tree in wave.trees:
            made |= tree.target_layouts
        empty = [] if at else [name for name in self.plan.targets if name not in self._last]
        names = dict.fromkeys([*(each.target for each in wave.direct), *made, *empty])
        return {name: self.plan.targets.get(name) or made[name] for name in names}

    def _move_wave(self, at: int, staged: Mapping[str, Tiles], failed: BaseException | None) -> BaseException | None:
        """Fills targets with what this process has read, and what others have; what went wrong in this process."""
        wave, steps, launch, exchange = self.plan.waves[at], self._steps[at], self._launches[at], self.exchange
        messages = {
            far: np.empty(nbytes, np.uint8) for far, nbytes in zip(launch.distances, launch.lengths, strict=True)
        }
        arrived: dict[int, Array] = {}

        def write() -> None:
            for step in steps.copies:
                if (step.source, step.copy.sender) not in steps.straight:
                    copy_tile(step.copy, staged[step.source][step.copy.sender], self._target_tile(step))
            for receiver, its in steps.sends.items():
                assert exchange is not None
                for step, part in _cut_tile_bytes(messages[exchange.distance(self.mine, receiver)], its):
                    pack_tile(step.copy, staged[step.source][step.copy.sender], part)

        def take() -> None:
            for sender, its in steps.takes.items():
                assert exchange is not None
                for step, part in _cut_tile_bytes(arrived[exchange.distance(sender, self.mine)], its):
                    unpack_tile(step.copy, part, self._target_tile(step))

        # The others wait in the exchange, which is run whatever happened here.
        failed = failed or _find_failure(write)
        if exchange is not None and launch.distances:
            arrived, states = exchange.run(launch, messages, 0 if failed is None else _ILL)
            raise_if_any_failed(states, failed)
            failed = failed or _find_failure(take)
        if wave.split_tree is not None:
            # A pack is gathered whole on each host before tensors are taken out of it.
            if self._together:
                self._meet(failed)
            failed = failed or _find_failure(lambda: self._split_packs(wave, steps, staged))
        for pack in (reading.name for reading in wave.readings if reading.packed):
            self._tiles.pop(pack, None)
        return failed

    def _target_tile(self, step: TileStep) -> Array:
        return self._tiles[step.target][step.copy.receiver]

    def _split_packs(self, wave: Wave, steps: WaveSteps, staged: Mapping[str, Tiles]) -> None:
        """Takes tensors out of packs."""
        assert wave.split_tree is not None
        starts = {part.stored: (each.name, part.start) for each in wave.readings for part in each.packed}
        for step in steps.splits:
            name, start = starts[step.source]
            shape = wave.split_tree.source_layouts[step.source].shape
            pack = next(iter((self._tiles.get(name) or staged[name]).values()))
            copy_tile(step.copy, pack[start : start + math.prod(shape)].reshape(shape), self._target_tile(step))

    def _place_target(self, name: str) -> jax.Array:
        """The array of a target, whose tiles are given to its devices."""
        sharding, layout = self.goals.shardings[name], self.plan.targets[name]
        # JAX asks by indices; popped here, memory of the host is freed once accelerators have a copy.
        tiles = {tile_of(layout, device): tile for device, tile in self._tiles.pop(name).items()}
        numbers = {device: number for number, device in enumerate(self.goals.devices)}
        by_index = {
            index: tiles[tile_of(layout, numbers[device])]
            for device, index in sharding.addressable_devices_indices_map(layout.shape).items()
        }
        return jax.make_array_from_callback(
            layout.shape, sharding, lambda index: by_index[index], dtype=jnp.dtype(layout.dtype)
        )

    def _finish_reads(self, failed: BaseException | None) -> BaseException | None:
        """Closes files and compares checksums of what several processes have read; raises with all others."""
        sums: list[Any] = []
        if failed is None:
            try:
                self._prepared.close()
                sums = [] if self._prepared.checks is None else self._prepared.checks.partials()
            except Exception as error:
                failed = error
        # Waves of which nothing crosses tell nobody anything, so that all meet once more at the end.
        exchange = self.exchange
        if exchange is None:
            return failed
        mine = json.dumps(sums).encode() if sums else b""
        _, states = exchange.run(LAST, {}, len(mine) if failed is None else _ILL)
        raise_if_any_failed(states, failed)
        longest = max(states.values())
        if not longest:
            return None
        distances = tuple(range(1, len(exchange.processes)))
        launch = ByteLaunch(distances, (-(-longest // 4) * 4,) * len(distances))
        message = np.frombuffer(mine.ljust(-(-longest // 4) * 4), np.uint8)
        arrived, _ = exchange.run(launch, dict.fromkeys(launch.distances, message))
        try:
            if self._prepared.checks is not None:
                texts = [each.tobytes().strip() for each in arrived.values()]
                self._prepared.checks.merge(json.loads(text) for text in texts if text)
        except Exception as error:
            failed = error
        _, states = exchange.run(LAST, {}, 0 if failed is None else _ILL)
        raise_if_any_failed(states, failed)
        return failed


def _find_failure(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def raise_if_any_failed(states: Mapping[int, int], failed: BaseException | None) -> None:
    """Raises in all processes if one is ill, as its state says: there what went wrong, elsewhere a `FileError` that has
    what the first of them says. All call it with the same states.
    """
    ill = [process for process, state in states.items() if state == _ILL]
    store = find_store()
    if not ill or store is None:
        return
    # All count the failures that all have seen, so that each has a key of its own.
    key = f"reshard/load/{next(_failures)}"
    if jax.process_index() == ill[0]:
        store.key_value_set(key, f"{type(failed).__name__}: {failed}", allow_overwrite=True)
    if failed is not None:
        raise failed
    try:
        said = store.blocking_key_value_get(key, int(1000 * read_time_limit()))
    except jax.errors.JaxRuntimeError as error:
        said = shortened(str(error))
    raise FileError(f"nothing was loaded: failed in process {ill[0]}: {said}")


_failures = itertools.count()
_ILL = -1
"""What a process says that could not go on."""


def _cut_tile_bytes(message: Array, steps: Sequence[TileStep]) -> Iterator[tuple[TileStep, Array]]:
    """The part of a message that each step has, as elements of the dtype in which they are sent."""
    # As `list_wave_steps` counts: each begins where the one before it ends, rounded to 16 bytes.
    at = 0
    for step in steps:
        end = at + step.copy.elements * step.wire.itemsize
        yield step, message[at:end].view(step.wire)
        at += step.nbytes


class TilePool:
    """Memory for tiles, taken for several small ones at once.

    In pieces below those from which numpy asks for huge pages: with these, first loads of 260 MiB on a machine of two
    cores took 0.15 s or 0.42, as the kernel found such pages or had to make them, and 0.19 every time without.
    """

    def __init__(self) -> None:
        self._piece = np.empty(0, np.uint8)
        self._at = 0
        self._lock = threading.Lock()

    def make_tile(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """A new tile, which XLA's CPU devices take as it is."""
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            if self._at + nbytes > len(self._piece):
                self._piece = np.empty(max(_PIECE, nbytes) + _ALIGNMENT, np.uint8)
                self._at = -self._piece.__array_interface__["data"][0] % _ALIGNMENT
            tile = self._piece[self._at : self._at + nbytes].view(dtype).reshape(shape)
            self._at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return tile


def load_shardings(prepare: Callable[[], PreparedLoad], about: str) -> Any:
    """Runs a load: arrays in the structure of its targets.

    All processes call it, and what one of them raises while it prepares or reads ends the load in all. `about` says
    which load it is, such as the path, and the size and time of each file.
    """
    several, failed = jax.process_count() > 1, None
    prepared: PreparedLoad | None = None
    # A process that cannot open its files says so to the others, which wait for it.
    try:
        prepared = prepare()
    except ReshardError as error:
        if not several:
            raise
        failed = error
    if several:
        # Within a time limit: what follows waits for all processes, however long that is.
        agree_between(set(range(jax.process_count())), about, once=False)
        # Plans are equal where targets and files are, and unequal ones would exchange bytes for others.
        plan = 0 if prepared is None else zlib.crc32(prepared.plan.to_json().encode()) >> 1
        _, states = exchange_on(tuple(jax.devices())).run(LAST, {}, plan if failed is None else _ILL)
        raise_if_any_failed(states, failed)
        if len(set(states.values())) > 1:
            listed = "; ".join(f"process {process} by plan {state:08x}" for process, state in states.items())
            raise AgreementError(f"{about}: processes give different targets or files, so nothing was loaded: {listed}")
    assert prepared is not None
    arrays = ShardedLoad(prepared).run()
    return jax.tree.unflatten(prepared.goals.structure, [arrays[name] for name in prepared.goals.shardings])


# Memory that the processes of a host share, in which a load puts together what several of them read or hold.
#
#     f32[4, 4] on all of <x=4>, processes 0 and 1 on one host, 2 and 3 on another: one tile on each host
#
#     process    0                  1                  2                  3
#     reads      row 0 into it      row 1 into it      row 2 into it      row 3 into it
#     receives   row 2              row 3              row 0              row 1        by `process_exchange`
#
# Between processes of a host nothing is sent: bytes go from a file to where they are wanted, and results of several
# processes are one memory. Through the loopback device, 140 MiB of 279 took 4 processes 0.4 s on 2 cores; copies 0.08.


_LARGE = 256 << 10
"""Bytes of a tile from which its pages are given back when no process has it any more."""
_LINE = 64
_REMOVE = 9  # MADV_REMOVE


@lru_cache(maxsize=4)
def group_by_host(exchange: ProcessExchange) -> dict[int, tuple[int, ...]]:
    """For each process, those that it shares memory with, itself among them; all processes find the same."""
    _, said = exchange.run(LAST, {}, zlib.crc32(describe_host().encode()) >> 1)
    groups = {process: tuple(each for each in said if said[each] == said[process]) for process in said}
    mine = groups[exchange.process]
    # Of equal sums, or of containers that may not open each other's memory, one page tells.
    shared = len(mine) == 1 or _share_pages(mine, PAGE) is not None
    _, well = exchange.run(LAST, {}, int(shared))
    return {process: group if all(well[each] for each in group) else (process,) for process, group in groups.items()}


def describe_host() -> str:
    """Equal in processes that may be able to share memory, different in others."""
    with suppress(OSError):
        if sys.platform == "linux":
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    return uuid.uuid4().hex


def share_host_memory(sizes: Sequence[int], members: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Memory for tiles of these bytes, shared by processes of a host, which call this alike.

    It is given back when no process has any of it, and that of a large tile when none has this tile. Raises `FileError`
    in all of them if there is no room.
    """
    me = members.index(JaxProcesses(0).rank)
    # In front a byte for each tile and process, which says that the process no longer has it.
    at = flags = len(sizes) * len(members)
    spans: list[slice] = []
    for size in sizes:
        unit = PAGE if size >= _LARGE else _LINE
        spans.append(slice(-(-at // unit) * unit, -(-at // unit) * unit + -(-size // unit) * unit))
        at = spans[-1].stop
    memory = _share_pages(members, at)
    if memory is None:
        raise FileError(
            f"this host has no {bytes_text(at)} of memory for what its processes load together; free some, or run "
            f"fewer processes on it"
        )
    gone = memory[:flags].reshape(len(sizes), len(members))

    def leave_tile(gone: NDArray[np.uint8], pages: NDArray[np.uint8]) -> None:
        gone[me] = 1
        if gone.all():
            call_libc("madvise", pages.ctypes.data, pages.size, _REMOVE)

    tiles: list[NDArray[np.uint8]] = []
    for number, (size, span) in enumerate(zip(sizes, spans, strict=True)):
        # An array of its own, which every view of it keeps alive.
        tile = np.frombuffer(memory.data, np.uint8, size, span.start) if size else np.empty(0, np.uint8)
        if size >= _LARGE:
            weakref.finalize(tile, leave_tile, gone[number], memory[span]).atexit = False
        tiles.append(tile)
    return tiles


def _share_pages(members: Sequence[int], nbytes: int) -> NDArray[np.uint8] | None:
    """Zeroed memory of at least so many bytes, None in all of these processes if they cannot have it."""
    processes = JaxProcesses(read_time_limit(), members)
    each = -(-nbytes // len(members))
    unit = HUGE if each >= HUGE else PAGE

    def gather(words: Sequence[int]) -> list[list[int]]:
        return [[int(word) for word in text.split()] for text in processes.gather(" ".join(map(str, map(int, words))))]

    # Without a name: a folder for shared memory may be small, and then have no room where private memory has.
    return share_segment(len(members), processes.rank, -(-each // unit) * unit, gather, kinds=(UNNAMED,))

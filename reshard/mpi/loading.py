"""This rank's part of a load: all ranks read their shares, and move what others need from there, wave by wave.

    open     rank 0 reads the metadata, and all have it from there
    agree    each rank checks what it asks for against that, and all ask for the same
    plan     rank 0, and all have it from there: on ranks that share cores, each for itself would take as often as long
    read     a thread reads the next wave into one of two buffers in the node's memory, or straight into results
    move     ranks of a node copy out of each other's buffers, what comes from other nodes arrives in messages

Before each wave moves, the ranks tell each other whether they have read it. Whatever goes wrong on one of them, a bad
argument, a file that is damaged, cut or gone, is an error on all, the same one, and the communicator stays usable.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from reshard.errors import RankError, ReshardError
from reshard.lower.to_mpi import device_of, seat_of
from reshard.plans.load_plan import LoadPlan, Wave
from reshard.plans.plan import TreePlan
from reshard.plans.stored import Checkpoint
from reshard.runtime.account import Account
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_files.drivers import Missing
from reshard.runtime.on_files.engine import CheckpointReader, ReadCounts, WantedTiles
from reshard.runtime.on_files.reader_thread import (
    Progress,
    ReaderThread,
    gathered_name,
    list_staged_layouts,
    longest_buffers,
    place_staged,
    view_direct_tile,
    view_staged_tile,
)
from reshard.runtime.on_files.result_memory import ResultMemory
from reshard.runtime.on_files.sidecar import BlockChecks
from reshard.runtime.on_mpi.collective import collective, gather_contents, gather_texts, prepare_together
from reshard.runtime.on_mpi.copies.strided_copy import copy_view, view_as_words
from reshard.runtime.on_mpi.launches import Bundle, GivenTiles, Launch, clear_new, list_launches, run_launches
from reshard.runtime.on_mpi.team import TIME_LIMIT, Facts, Team, Watch
from reshard.runtime.on_mpi.window_tiles import WindowTile, absent_tile
from reshard.show.load_progress import show_load_progress
from reshard.types.layout import Layout

Array = NDArray[Any]
T = TypeVar("T")


class _RaisedByAll(Exception):
    """An error that all ranks raise together, on its way to where they do."""

    def __init__(self, error: ReshardError) -> None:
        super().__init__(str(error))
        self.error = error


def load_on_ranks(
    comm: MPI.Intracomm,
    request: str,
    open_checkpoint: Callable[[], Checkpoint],
    describe_load: Callable[[Checkpoint], str],
    plan_load: Callable[[Checkpoint], LoadPlan],
    find_checks: Callable[[Checkpoint], BlockChecks | None],
    limit: float = TIME_LIMIT,
    missing: Missing = "refuse",
    counts: ReadCounts | None = None,
    progress: bool = False,
) -> dict[str, Array | None]:
    """This rank's tile of each target, None where it has none.

    All ranks give the same `request`, what the call asks for as text. `open_checkpoint` and `plan_load` are called on
    rank 0 alone; `describe_load` checks the request against what is stored, and says as text all that the plan depends
    on. `limit` are the seconds that ranks wait for each other at each wave. `progress` shows a bar on rank 0.
    """
    failed: ReshardError | None = None
    tiles: dict[str, Array | None] = {}

    def prepare(team: Team) -> Checkpoint | None:
        return open_checkpoint() if team.rank == 0 else None

    with collective(comm, limit, prepare, lambda _: request) as (team, watch, opened):
        try:
            # Thousands of headers, each opened by a thousand ranks, would take a file system longer than the load.
            ckpt = opened
            texts = gather_texts(team, watch, "" if opened is None else opened.to_json())
            ckpt = Checkpoint.from_json(texts[0]) if ckpt is None else ckpt

            def plan_on_first() -> tuple[str, BlockChecks | None, LoadPlan | None]:
                asked, checks = describe_load(ckpt), find_checks(ckpt)
                made = plan_load(ckpt) if team.rank == 0 else None
                # Worked out here, it is part of what the others are sent.
                _ = made and made.scratch_bytes
                return f"{asked}, checks {checks is None}", checks, made

            _, checks, plan = run_together_or_raise(team, watch, plan_on_first, lambda made: made[0])
            contents = gather_contents(team, watch, b"" if plan is None else pickle.dumps(plan))
            sent = _open_sent_plan(contents[0])
            load = _RankLoad(team, watch, sent, CheckpointReader(ckpt, counts, checks, missing))
            with show_load_progress(progress and team.rank == 0, sum(sent.plan.read_bytes.values())) as shown:
                tiles = load.run(shown)
            if checks is not None:
                # Blocks of which several ranks have read a part: all add up what all have.
                parts = [json.loads(text) for text in gather_texts(team, watch, json.dumps(checks.partials()))]
                others = [part for rank, part in enumerate(parts) if rank != team.rank]
                run_together_or_raise(team, watch, partial(checks.merge, others), lambda _: "sums")
            watch.renew()
        except _RaisedByAll as error:
            failed = error.error
    if failed is not None:
        raise failed
    return tiles


def run_together_or_raise(team: Team, watch: Watch, do: Callable[[], T], text: Callable[[T], str]) -> T:
    """What `do` returns, once all ranks have done it and have the same text for it; all raise the error of any."""
    watch.renew()
    try:
        return prepare_together(team, watch, do, text)
    except RankError:  # A rank is gone, or too late: the others cannot know of each other.
        raise
    except ReshardError as error:
        raise _RaisedByAll(error) from None


class _SentPlan(NamedTuple):
    """A plan from rank 0, and the launches of its trees, by wave, tree and machine: a load that is made again has them.

    Checked where it was made: what a rank is sent by another of its job is as good as its own.
    """

    plan: LoadPlan
    launches: dict[tuple[int, int, Facts], list[Launch]]


@lru_cache(maxsize=4)
def _open_sent_plan(content: bytes) -> _SentPlan:
    return _SentPlan(pickle.loads(content), {})


class _RankLoad:
    """The waves of a load, as one rank reads and moves them."""

    def __init__(self, team: Team, watch: Watch, sent: _SentPlan, reader: CheckpointReader) -> None:
        self._team, self._watch, self._reader = team, watch, reader
        self._plan, self._launches = sent
        plan = self._plan
        self._results: dict[str, WindowTile] = {}
        self._memory = ResultMemory({n: of for n, of in plan.targets.items() if self._seat(of) is not None})
        self._length = longest_buffers(plan)
        # Buffers in the node's memory, so that its ranks read in each other's; in private memory where it has no room.
        # While ranks read in one, the next wave is read to the other.
        nbytes = min(2, len(plan.waves)) * self._length
        self._place = team.arena.take(nbytes, partial(team.gather, watch)) if nbytes else 0
        shape, dtype = (nbytes,), np.dtype(np.uint8)
        self._buffer = team.arena.hold(self._place, shape, dtype) if self._place else np.empty(shape, dtype)

    def run(self, progress: Progress) -> dict[str, Array | None]:
        """Reads and moves all waves; this rank's tiles."""
        team, watch, waves = self._team, self._watch, self._plan.waves
        with self._reader as reader, ReaderThread(reader) as thread:
            started = 0
            for number, wave in enumerate(waves):
                # A buffer is read to again as soon as its wave has moved, on all ranks of the node.
                for ahead in range(started, min(number + 2, len(waves))):
                    thread.start(self._place_readings(ahead))
                    started = ahead + 1
                # While it is read: what moves it.
                launches = [self._prepare_launches(tree, (number, at)) for at, tree in enumerate(wave.trees)]
                run_together_or_raise(team, watch, thread.wait, lambda _: f"wave {number}")  # noqa: B023
                self._move_wave(number, launches)
                progress(reader.counts.bytes * team.size)  # Shares are even.
            run_together_or_raise(team, watch, reader.close, lambda _: "files")
        # Steps move whole tiles, and what a reused buffer has in the padding of its own.
        for name, result in self._results.items():
            clear_new(team, self._plan.targets[name], result.tile)
        names = self._plan.targets
        return {name: None if self._seat(names[name]) is None else self._result(name).tile for name in names}

    def _seat(self, layout: Layout) -> int | None:
        return seat_of(layout.mesh, self._team.rank, self._team.size)

    def _result(self, name: str) -> WindowTile:
        """This rank's tile of a target, made when it is first asked for, in private memory: no other rank needs it."""
        if name not in self._results:
            layout = self._plan.targets[name]
            if self._seat(layout) is None:
                self._results[name] = absent_tile(layout, numpy_dtype(layout.dtype))._replace(place=0)
            else:
                self._results[name] = WindowTile(self._memory.make_tile(name), counted=True)
        return self._results[name]

    def _staged_tiles(self, number: int) -> dict[str, WindowTile]:
        """The tiles of a wave that lie in its buffer, by name."""
        staged = list_staged_layouts(self._plan.waves[number])
        places, _ = place_staged(staged)
        tiles: dict[str, WindowTile] = {}
        for name, layout in staged.items():
            at = places[name] + number % 2 * self._length
            place = self._place + at if self._place else 0
            if self._seat(layout) is None:
                tiles[name] = absent_tile(layout, numpy_dtype(layout.dtype))._replace(place=place)
            else:
                tiles[name] = WindowTile(view_staged_tile(self._buffer, at, layout), place)
        return tiles

    def _place_readings(self, number: int) -> list[WantedTiles]:
        """Where this rank's tiles of a wave's readings are read to."""
        wave, staged = self._plan.waves[number], self._staged_tiles(number)
        straight = {direct.reading: direct for direct in wave.direct}
        wanted: list[WantedTiles] = []
        for reading in wave.readings:
            if self._seat(reading.layout) is None:
                continue
            device = device_of((reading.layout.mesh,), self._team.rank, self._team.size)
            if (direct := straight.get(reading.name)) is not None:
                tile = view_direct_tile(self._result(direct.target).tile, direct.box, reading.layout.tile_shape)
            else:
                tile = staged[reading.name].tile
            # One device a rank, by the number that its layout has for it.
            wanted.append((reading, {device: tile}))
        return wanted

    def _prepare_launches(self, tree: TreePlan, number: tuple[int, int]) -> list[Launch]:
        """The launches of a tree into results that are there, compiled."""
        team = self._team
        if (key := (*number, team.facts)) not in self._launches:
            self._launches[key] = list_launches(tree, team.facts, apart=True)
        launches = self._launches[key]
        # Most of a first call's time: it passes while files are read.
        for launch in launches:
            if isinstance(launch, Bundle):
                for hop in range(len(launch.routes[0])):
                    launch.part(hop, (not self._place,) * len(launch.stacks), team.rank, team.facts)
        return launches

    def _move_wave(self, number: int, launches: list[list[Launch]]) -> None:
        """Moves what is read from where it lies to all ranks that want it."""
        wave, staged = self._plan.waves[number], self._staged_tiles(number)
        packs = {reading.name for reading in wave.readings if reading.packed}
        for tree, each in zip(wave.trees, launches, strict=True):
            sources = self._split_packs(wave, staged) if tree is wave.split_tree else staged
            outs: dict[str, WindowTile] = {}
            for name, target in tree.target_of.items():
                gathered = target in packs and tree is wave.tree
                outs[name] = staged[gathered_name(target)]._replace(place=0) if gathered else self._result(target)
            given = GivenTiles({name: sources[of] for name, of in tree.source_of.items()}, outs)
            # What the plan promises beside results and waves is what buffers may take.
            self._team.pool.limit(self._plan.scratch_bytes)
            run_launches(self._team, self._watch, each, given, Account("uint8"), private=True)
            # Launches leave out what stays on its rank.
            for name, plan in tree.plans.items():
                if not plan.steps and outs[name].tile.size:
                    copy_view(view_as_words(outs[name].tile), view_as_words(given.tiles[name].tile))
        # Nobody reads in this rank's buffer any more.
        self._team.settle(self._watch)

    def _split_packs(self, wave: Wave, staged: Mapping[str, WindowTile]) -> dict[str, WindowTile]:
        """The tensors of gathered packs, whole on each rank, by their stored names."""
        layouts = dict[str, Layout]() if wave.split_tree is None else wave.split_tree.source_layouts
        tiles: dict[str, WindowTile] = {}
        for reading in wave.readings:
            for name, start in reading.packed:
                whole = staged[gathered_name(reading.name)].tile
                if name in layouts and whole.size:
                    shape = layouts[name].tile_shape
                    tiles[name] = WindowTile(whole[start : start + int(np.prod(shape))].reshape(shape))
                elif name in layouts:
                    tiles[name] = absent_tile(layouts[name], whole.dtype)._replace(place=0)
        return tiles

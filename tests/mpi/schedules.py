"""Random schedules of one thread: moves that begin, calls, waits, requests that are dropped, on several communicators.

All ranks follow the same schedule, each in its own time: some are late at random. Ranks pretend to have more cores than
their node has ranks, or fewer, so that started moves are made by threads, by the next call, or, on nodes of different
sizes, by both. Every result is compared with the oracle. One rank's mistake in the middle is raised by all.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.errors import RankError, TileError
from reshard.mpi import DistArray, handles, prepare, redistribute
from reshard.mpi import move as move_tile
from reshard.runtime.on_mpi import repeated, transports
from reshard.runtime.on_mpi.team import Team, team_of
from reshard.types import Layout, Mesh
from tests.mpi.moving import caught_by
from tests.mpi.worker import Case
from tests.oracle import PADDING, tiles_of

LIMIT = 20.0
SMALL = 1024
"""Bytes of a tile up to which moves are staged here; larger ones need other ranks at once."""

LATE = 0.002
"""Seconds that a rank is late, at most."""

MOST_BEGUN = 4


class Odd(Exception):
    """What one rank raises in the middle of a move."""


@dataclass
class Begun:
    """A move that has begun on some ranks: what is to come of it."""

    at: Place
    request: Any
    target: Layout
    salt: int
    out: np.ndarray | None
    kept: list[np.ndarray | None]
    error: type[Exception] | None = None


@dataclass
class Place:
    """A communicator, its layouts by name, and what is kept on it."""

    comm: MPI.Intracomm
    layouts: dict[str, Layout] = field(default_factory=dict)
    handles: dict[tuple[str, str], Any] = field(default_factory=dict)
    arrays: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = self.comm.size
        mesh, side = Mesh(x=n), 4 * n
        for size, shape in (("small", (side, 2)), ("large", (side, 16 * n))):
            for name, held in (("rows", [["x"]]), ("columns", [[], ["x"]]), ("whole", [])):
                if name != "columns" or shape[1] % n == 0:
                    self.layouts[f"{size} {name}"] = Layout.from_spec(mesh, shape, "int64", held)
        self.layouts["small ranks"] = Layout.parse("s64[2{x}2, 2]", mesh)
        self.layouts["large uneven"] = Layout.parse(f"s64[2{{x}}3/{side}, {16 * n}]", mesh)
        if n > 2:
            two = Mesh({"x": 2}, device_ids=[n - 1, 0])
            self.layouts["small two"] = Layout.from_spec(two, (side, 2), "int64", [["x"]])
            self.layouts["large two"] = Layout.from_spec(two, (side, 16 * n), "int64", [[], ["x"]])

    def tile(self, name: str, salt: int) -> np.ndarray | None:
        tile = tiles_of(self.layouts[name]).get(self.comm.rank)
        return None if tile is None else np.where(tile == PADDING, PADDING, 7 * tile + salt)

    def check(self, name: str, salt: int, result: np.ndarray | None) -> None:
        wanted = self.tile(name, salt)
        assert (wanted is None) == (result is None), (name, wanted, result)
        if wanted is not None:
            wrong = (result != wanted) & (wanted != PADDING)
            assert not wrong.any(), f"{wrong.sum()} of {wrong.size} elements of {name} are wrong"


class Schedule:
    """One schedule: all ranks construct it alike, on the same communicators, and run it."""

    def __init__(self, comms: list[MPI.Intracomm], seed: int, places: list[Place] | None = None) -> None:
        self.choose, self.own = random.Random(seed), random.Random(1000 * seed + comms[0].rank)
        self.places = [Place(comm) for comm in comms] if places is None else places
        self.seed, self.salt = seed, 0
        self.begun: list[Begun] = []
        self.done: list[str] = []
        self.making = 0.0
        self.spans: list[tuple[int, float, float, float]] = []
        sizes = comms[0].size
        cores = self.choose.choice((1, 2, sizes, sizes + 1, None))
        self.cores = self.own.choice((1, sizes + 1)) if cores is None else cores
        self.hidden = self.own.choice((0, handles.HIDDEN))

    def run(self, length: int) -> None:
        """Makes `length` operations, and then waits for what has begun."""
        small, make_team = mock.patch.multiple(repeated, STAGED=SMALL, _LARGEST=4 * SMALL), Team.__init__

        def timed(*given: Any) -> None:
            start = time.monotonic()
            make_team(*given)
            self.making += time.monotonic() - start

        cores = mock.patch.multiple(handles, CORES=self.cores, HIDDEN=self.hidden)
        teams = mock.patch.object(Team, "__init__", timed)
        with small, cores, teams:
            operations = [each for each, weight in self._operations() for _ in range(weight)]
            for _ in range(length):
                self._do(self.choose.choice(operations))
            while self.begun:
                self._do(self.wait if self.choose.random() < 0.8 else self.drop)
            for place in self.places:
                self._timed(place, lambda place=place: self._redistribute(place, "small rows", "small whole"))

    def _operations(self) -> list[tuple[Callable[[Place], None], int]]:
        return [
            (self.start, 12), (self.wait, 6), (self.drop, 2), (self.call, 6), (self.again, 4), (self.redistribute, 3),
            (self.create, 3), (self.move_array, 2), (self.gather, 1), (self.add, 1), (self.tree, 2), (self.view, 2),
            (self.wrong_tile, 2), (self.free, 1), (self.fail, 1),
        ]  # fmt: skip

    def _do(self, operation: Callable[[Place], None]) -> None:
        place = self.choose.choice(self.places)
        self.salt += 1
        if self.own.random() < 0.2:
            time.sleep(self.own.random() * LATE)
        self.done.append(f"{operation.__name__} on {self.places.index(place)}")
        operation(place)

    def _timed(self, place: Place, call: Callable[[], Any]) -> Any:
        """Notes when this rank came to an operation, when it was done, but for making a new team, and how long it
        had a core meanwhile.
        """
        start, cpu, made = time.monotonic(), time.process_time(), self.making
        try:
            return call()
        finally:
            end = time.monotonic() - (self.making - made)
            self.spans.append((self.places.index(place), start, end, time.process_time() - cpu))

    def _ends(self, place: Place) -> tuple[str, str]:
        size = self.choose.choice(("small", "large"))
        names = [name for name in place.layouts if name.startswith(size)]
        return tuple(self.choose.sample(names, 2))

    def _handle(self, place: Place) -> tuple[Any, tuple[str, str]]:
        """A handle, one that is there if possible."""
        if len(place.handles) < 5 or self.choose.random() < 0.1:
            ends = self._ends(place)
            budget = self.choose.choice((None, None, None, "1 MiB"))
            made = self._timed(
                place, lambda: prepare(*(place.layouts[end] for end in ends), place.comm, budget=budget, limit=LIMIT)
            )
            place.handles[ends] = made
            return made, ends
        ends = self.choose.choice(list(place.handles))
        return place.handles[ends], ends

    def _out(self, place: Place, name: str) -> np.ndarray | None:
        gives = self.choose.random() < 0.4
        tile = place.tile(name, 0)
        return np.full_like(tile, -1) if gives and tile is not None else None

    def start(self, place: Place) -> None:
        if len(self.begun) >= MOST_BEGUN:
            return self.wait(place)
        handle, ends = self._handle(place)
        tile, out = place.tile(ends[0], self.salt), self._out(place, ends[1])
        request = self._timed(place, lambda: handle.start(tile, out=out))
        self.begun.append(Begun(place, request, ends[1], self.salt, out, [tile]))

    def wait(self, _: Place) -> None:
        if not self.begun:
            return
        each = self.begun.pop(self.choose.randrange(len(self.begun)))
        self._finish(each)
        if self.choose.random() < 0.2:
            self._finish(each)  # Once more.

    def _finish(self, each: Begun) -> None:
        if each.error is not None:
            caught = caught_by(lambda: self._timed(each.at, each.request.wait))
            assert isinstance(caught, each.error), repr(caught)
            return
        result = self._timed(each.at, each.request.wait)
        assert each.out is None or result is each.out
        each.at.check(each.target, each.salt, result)

    def drop(self, _: Place) -> None:
        """Nobody waits; the arrays stay as they are until the next call has finished it."""
        if self.begun:
            each = self.begun.pop(self.choose.randrange(len(self.begun)))
            each.at.arrays[:] = [*each.at.arrays[-2:], each.kept]

    def call(self, place: Place) -> None:
        handle, ends = self._handle(place)
        tile, out = place.tile(ends[0], self.salt), self._out(place, ends[1])
        result = self._timed(place, lambda: handle(tile, out=out))
        place.check(ends[1], self.salt, result)

    def _redistribute(self, place: Place, one: str, other: str, **options: Any) -> None:
        tile = place.tile(one, self.salt)
        layouts = place.layouts[one], place.layouts[other]
        place.check(other, self.salt, redistribute(tile, *layouts, place.comm, limit=LIMIT, **options))

    def redistribute(self, place: Place) -> None:
        ends = self._ends(place)
        options = self.choose.choice(({}, {}, {"budget": "1 MiB"}))
        self._timed(place, lambda: self._redistribute(place, *ends, **options))

    def again(self, place: Place) -> None:
        """What is made again and again is staged."""
        self._timed(place, lambda: self._redistribute(place, "small rows", "small ranks"))

    def create(self, place: Place) -> None:
        name, value = self.choose.choice(sorted(place.layouts)), self.salt
        array = self._timed(place, lambda: DistArray.full(place.layouts[name], value, place.comm, limit=LIMIT))
        assert not array.has_tile or (array.tile == value).all()

    def move_array(self, place: Place) -> None:
        one, other = self._ends(place)
        layouts = place.layouts[one], place.layouts[other]

        def made() -> DistArray:
            array = DistArray.empty(layouts[0], place.comm, limit=LIMIT)
            if array.has_tile:
                array.tile[...] = place.tile(one, self.salt)
            return array.redistribute(layouts[1], limit=LIMIT)

        array = self._timed(place, made)
        place.check(other, self.salt, array.tile if array.has_tile else None)

    def gather(self, place: Place) -> None:
        layout, root = place.layouts["large rows"], self.choose.choice((0, place.comm.size - 1, None))
        array = DistArray(layout, place.tile("large rows", self.salt), place.comm)
        whole = self._timed(place, lambda: array.to_global(root, limit=LIMIT))
        if root in (None, place.comm.rank):
            assert np.array_equal(whole.reshape(-1), 7 * np.arange(whole.size) + self.salt)

    def add(self, place: Place) -> None:
        layout = place.layouts["small rows"]
        array = DistArray(layout, place.tile("small rows", self.salt), place.comm)
        total = self._timed(place, lambda: np.sum(array + array))
        count = layout.shape[0] * layout.shape[1]
        assert int(total) == 2 * (7 * (count * (count - 1) // 2) + self.salt * count), total

    def tree(self, place: Place) -> None:
        names = [name for name in place.layouts if "two" not in name]
        sizes = {"a": "small", "b": "small", "c": "large"}
        ends = {key: self.choose.sample([n for n in names if n.startswith(size)], 2) for key, size in sizes.items()}
        tiles = {key: place.tile(one, self.salt + at) for at, (key, (one, _)) in enumerate(ends.items())}
        layouts = [{key: place.layouts[pair[side]] for key, pair in ends.items()} for side in (0, 1)]
        moved = self._timed(place, lambda: redistribute(tiles, *layouts, place.comm, limit=LIMIT))
        for at, (key, (_, other)) in enumerate(ends.items()):
            place.check(other, self.salt + at, moved[key])

    def view(self, place: Place) -> None:
        rows, n = place.layouts["large rows"], place.comm.size
        flat = Layout.from_spec(Mesh(x=n), (rows.shape[0] * rows.shape[1],), "int64", [["x"]])
        move, tile = rs.Move(rows, flat, view="a b -> (a b)"), place.tile("large rows", self.salt)
        result = self._timed(place, lambda: move_tile(tile, move, place.comm, limit=LIMIT))
        assert np.array_equal(result, tile.reshape(-1))

    def wrong_tile(self, place: Place) -> None:
        """One rank's tile is wrong: all raise that, now or when they wait, and the next call works."""
        handle, ends = self._handle(place)
        odd = self.choose.randrange(place.comm.size)
        if tiles_of(place.layouts[ends[0]]).get(odd) is None:
            return
        tile = np.zeros((1, 1)) if place.comm.rank == odd else place.tile(ends[0], self.salt)
        if self.choose.random() < 0.5 and len(self.begun) < MOST_BEGUN:
            request = self._timed(place, lambda: handle.start(tile))
            self.begun.append(Begun(place, request, ends[1], self.salt, None, [tile], TileError))
            return
        caught = caught_by(lambda: self._timed(place, lambda: handle(tile)))
        assert isinstance(caught, TileError), repr(caught)

    def free(self, place: Place) -> None:
        """What has begun goes on although the handle is free."""
        if place.handles:
            place.handles.pop(self.choose.choice(list(place.handles))).free()

    def fail(self, place: Place) -> None:
        """One rank raises while it moves: all raise, and the next call works."""
        odd = place.comm.rank == self.choose.randrange(place.comm.size)
        if place.comm.size == 1:
            return

        mine, right = threading.get_ident(), transports.run_transport

        def wrong(*given: Any) -> Any:
            if threading.get_ident() != mine:  # A move that has begun on another communicator.
                return right(*given)
            raise Odd("no memory left")

        rows, columns = place.layouts["large rows"], place.layouts["large columns"]
        tile = place.tile("large rows", self.salt)
        # What has begun here is finished by the call itself, and must not be the one that fails.
        team = team_of(place.comm)
        team.join_started()
        team.finish_started()
        with ExitStack() as patches:
            if odd:
                patches.enter_context(mock.patch.object(transports, "run_transport", wrong))
            options = {"budget": "1 MiB", "limit": LIMIT}
            call = partial(redistribute, tile, rows, columns, place.comm, **options)
            caught = caught_by(lambda: self._timed(place, call))
        assert isinstance(caught, Odd if odd else RankError), repr(caught)


def times_after_arrival(
    comms: list[MPI.Intracomm], spans: list[tuple[int, float, float, float]]
) -> list[tuple[float, float]]:
    """For each operation, the seconds from when the last rank of its communicator has come to when all are done, and
    how much of them a rank had a core, at most: nothing sleeps, so this is all that is not due to other processes.
    """
    times: list[tuple[float, float]] = []
    for at, comm in enumerate(comms):
        for same in zip(*comm.allgather([span[1:] for span in spans if span[0] == at]), strict=True):
            last = max(start for start, _, _ in same)
            beyond = [(end - last, min(cpu, end - last)) for _, end, cpu in same]
            times.append((max(each[0] for each in beyond), max(each[1] for each in beyond)))
    return times


def run_schedule(comms: list[MPI.Intracomm], seed: int, length: int = 20) -> Schedule:
    """One schedule, chosen by its seed; the first communicator has all ranks."""
    schedule = Schedule(comms, seed)
    try:
        schedule.run(length)
    except Exception as error:
        what = f"schedule {seed}, cores {schedule.cores}: {type(error).__name__}: {error}"
        raise AssertionError(f"{what}; after {', '.join(schedule.done[-8:])}") from error
    return schedule


def split_communicator(comm: MPI.Intracomm) -> list[MPI.Intracomm]:
    """A duplicate, and a communicator of every other rank, or of all from last to first: all of one size."""
    return [comm.Dup(), comm.Split(0 if comm.size % 2 else comm.rank % 2, -comm.rank)]


def sampled(comm: MPI.Intracomm) -> Iterator[Case]:
    """Some of them, on one node, on uneven ones, and on one node per rank."""
    comms = [comm, *split_communicator(comm)]
    for nodes in sorted({1, 2, comm.size}):
        yield f"{nodes} nodes", partial(team_of, comm, nodes=nodes)
        for seed in range(10 * nodes, 10 * nodes + 3):
            yield f"seed {seed}, {nodes} nodes", partial(run_schedule, comms, seed)

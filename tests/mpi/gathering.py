"""The topics of rows and halos that ranks name for themselves, beside numpy's indexing of the whole array."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

from reshard.errors import AgreementError, LayoutError, RankError, TileError
from reshard.mpi import DistArray
from reshard.runtime import measure
from reshard.runtime.on_mpi import fetch
from reshard.runtime.on_mpi.team import Watch, team_of
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.mpi.moving import LIMIT, caught_by, check_refused
from tests.mpi.worker import Case
from tests.owners import Owned


def _layouts(comm: MPI.Intracomm) -> Iterator[Layout]:
    """Even, uneven, cyclic and ragged layouts, replicated ones, and one on some of the ranks only."""
    size = comm.size
    line, grid = Mesh(x=size), Mesh(x=2, y=size // 2) if size % 2 == 0 else Mesh(x=1, y=size)
    yield Layout.from_spec(line, (13, 3), "float32", [["x"]])
    yield Layout.from_spec(line, (2, 3), "float32", [["x"]])
    yield Layout.from_spec(line, (7, 5), "float32", [[], ["x"]])
    yield Layout.from_spec(grid, (11, 6), "float32", [["y"]])
    yield Layout.from_spec(grid, (11, 6, 2), "float32", [["x"], ["y"]])
    yield Layout.parse(f"f32[{-(-23 // (2 * size))}{{x}}2/23]", line)
    choose = random.Random(size)
    yield Layout.from_owners([choose.randrange(size) for _ in range(13)], line, (13, 3), "float32")
    sizes = [5, *([0, 2] * size)][: size - 1]
    yield Layout.from_sizes([*sizes, 12 - sum(sizes)], line, (4, 12), "float32", dim=1)
    yield Owned.random(choose, grid, (9, 7), "float32").layout
    yield Layout.from_spec(Mesh({"x": 1}, device_ids=[size - 1]), (5, 2), "float32", [["x"]])


def _array(comm: MPI.Intracomm, layout: Layout, private: bool) -> tuple[DistArray, np.ndarray]:
    """An array, in memory that the node shares or not, and the whole of it; padding is not as it should be."""
    whole = np.arange(np.prod(layout.shape), dtype=layout.dtype).reshape(layout.shape)
    array = DistArray.from_global(whole, layout, comm, None, limit=LIMIT)
    if array.has_tile:
        padding = np.ones(layout.tile_shape, bool)
        padding[tuple(map(slice, array.unpadded.shape))] = False
        array.tile[padding] = -7
        if private:
            array = DistArray(layout, np.array(array.tile, order="F"), comm)
    return array, whole


def _on_nodes(comm: MPI.Intracomm, case: Any) -> Iterator[Case]:
    """Each layout in two of four kinds of memory, others on one more rank."""
    kinds = ((1, False), (1, True), (min(2, comm.size), False), (comm.size, True))
    for turn, (nodes, private) in enumerate(kinds):
        for number, layout in itertools.islice(enumerate(_layouts(comm)), (turn + comm.size) % 2, None, 2):
            name = f"{layout} on {layout.mesh}, {nodes} nodes, {'private' if private else 'shared'}"
            pushed = fetch.PUSHED if number & 2 else 0
            yield name, partial(_in_node, partial(case, comm, layout, private, nodes), pushed)


def _in_node(case: Callable[[], None], pushed: int) -> None:
    with mock.patch.multiple(fetch, PUSHED=pushed, WORTHWHILE=pushed):  # Larger boxes are read where they lie.
        case()


def _held(layout: Layout, comm: MPI.Intracomm, dim: int) -> set[int]:
    """The indices of a dim that this rank has."""
    if layout.mesh.size != comm.size and comm.rank not in layout.mesh.devices:
        return set()
    return {at for at in meaning(layout, comm.rank)[dim] if at < layout.shape[dim]}


def rows(comm: MPI.Intracomm) -> Iterator[Case]:
    """Any rows on any rank, with a cache and without, once and again; each that is missing comes once."""
    yield from _on_nodes(comm, _gathered)


def _gathered(comm: MPI.Intracomm, layout: Layout, private: bool, nodes: int) -> None:
    team_of(comm, nodes=nodes)
    array, whole = _array(comm, layout, private)
    choose = np.random.default_rng(comm.rank)
    for most in (4, 40):
        count = int(choose.integers(0, most + 1))
        wanted, cached = (choose.integers(0, layout.shape[0], n) for n in (count, int(choose.integers(0, 6))))
        stale = -whole[cached] - 1  # So that what is taken from the cache shows.
        own = _held(layout, comm, 0)
        whole_rows = all(len(_held(layout, comm, dim)) == n for dim, n in enumerate(layout.shape) if dim)
        kept = own if whole_rows else set[int]()
        expected = whole[wanted]
        for at, row in enumerate(wanted.tolist()):
            if row in cached.tolist() and row not in kept:
                expected[at] = -whole[row] - 1
        with measure() as measured:
            assert np.array_equal(array.gather_rows(wanted, limit=LIMIT), whole[wanted])
            assert np.array_equal(array.gather_rows(wanted.tolist(), (cached, stale), limit=LIMIT), expected)
        received = [0, 0]
        row_bytes = 4 * int(np.prod(layout.shape[1:]))
        if whole_rows or not own:
            missing = set(wanted.tolist()) - own
            received = [call.received_bytes for call in measured.calls]
            assert received == [row_bytes * len(missing), row_bytes * len(missing - set(cached.tolist()))]
        with (
            array.prepare_gather(wanted, limit=LIMIT) as gather,
            array.prepare_gather(wanted, cached, limit=LIMIT) as misses,
        ):
            for step in range(3):
                begun = misses.start(stale)
                out = np.empty_like(expected)
                assert gather.gather(out=out) is out
                assert np.array_equal(out, whole[wanted] + step)
                result = begun.wait()
                moved = np.isin(wanted, cached) & ~np.isin(wanted, [*kept])
                assert np.array_equal(result, np.where(_tall(moved, result), expected, whole[wanted] + step))
                if array.has_tile:
                    array.tile[...] += 1
                team_of(comm)  # Nothing is left behind that a team would look at.
            whole = whole + 3
            if whole_rows or not own:
                assert gather.received_rows * row_bytes == gather.received_bytes == received[0]
            assert comm.rank not in gather.neighbours


def _tall(flags: np.ndarray, like: np.ndarray) -> np.ndarray:
    return flags.reshape(-1, *[1] * (like.ndim - 1))


def sampled(comm: MPI.Intracomm) -> Iterator[Case]:
    """Every other of the cases of `rows` and `halos`."""
    yield from itertools.islice(itertools.chain(rows(comm), halos(comm)), 0, None, 2)


def halos(comm: MPI.Intracomm) -> Iterator[Case]:
    """Boxes of any width, cut at the ends or wrapped, corners included."""
    yield from _on_nodes(comm, _widened)


def _widened(comm: MPI.Intracomm, layout: Layout, private: bool, nodes: int) -> None:
    team_of(comm, nodes=nodes)
    array, whole = _array(comm, layout, private)
    choose, ndim = random.Random(7), len(layout.shape)
    boxes = comm.allgather(array.local_index_ranges())
    if any(len(runs) > 1 for box in boxes for runs in box):
        check_refused(comm, LayoutError, partial(array.halo, 1, limit=LIMIT), "runs on rank")
        return
    for _ in range(4):
        pairs = [(choose.randint(0, 3), choose.choice([0, 1, 9])) for _ in range(ndim)]
        wraps = [choose.random() < 0.5 for _ in range(ndim)]
        pairs = [
            (min(before, size), min(after, size)) if wrap and size else (before, after)
            for (before, after), wrap, size in zip(pairs, wraps, layout.shape, strict=True)
        ]
        indices: list[Any] = []
        for runs, (before, after), wrap, size in zip(boxes[comm.rank], pairs, wraps, layout.shape, strict=True):
            index = range(runs[0].start - before, runs[0].stop + after) if runs else range(0)
            indices.append([at % size for at in index if wrap or 0 <= at < size])
        expected = whole[np.ix_(*[np.array(index, int) for index in indices])]
        assert np.array_equal(array.halo(pairs, wraps, limit=LIMIT), expected)
        with array.prepare_halo(tuple(pairs), tuple(wraps), limit=LIMIT) as halo:
            begun = halo.start()
            assert np.array_equal(begun.wait(), expected)
            assert np.array_equal(halo.gather(), expected)
    width = choose.randint(1, 2)
    alike = array.halo(width, limit=LIMIT)
    assert np.array_equal(alike, array.halo([width] * ndim, [False] * ndim, limit=LIMIT))
    # The box is cut at the ends of the array before its indices are listed.
    assert np.array_equal(array.halo(10**15, limit=LIMIT), whole) or not all(boxes[comm.rank])


def _refused(array: DistArray, whole: np.ndarray, nodes: int, given: tuple[Any, Any], text: str) -> None:
    team_of(array.comm, nodes=nodes)
    check_refused(array.comm, TileError, partial(array.gather_rows, *given, limit=LIMIT), text)
    assert np.array_equal(array.gather_rows([1], limit=LIMIT), whole[[1]])


def _refuses(comm: MPI.Intracomm, call: Callable[[], Any], text: str) -> None:
    check_refused(comm, LayoutError, call, text)


def mistakes(comm: MPI.Intracomm) -> Iterator[Case]:
    """What is wrong on one rank is the same error on all; a handle goes on after a failure."""
    layout = Layout.from_spec(Mesh(x=comm.size), (2 * comm.size, 3), "float32", [["x"]])
    array, whole = _array(comm, layout, False)
    odd = comm.rank == comm.size - 1
    rows = np.zeros((1, 3), "f4")
    for name, indices, have, text in (
        ("an index that no row has", [0, 2 * comm.size], None, f"have {2 * comm.size} at 1"),
        ("an index below 0", [-1], None, "have -1 at 0"),
        ("indices that are floats", [0.5], None, "dtype float64"),
        ("indices of two dims", [[0]], None, "2 dims"),
        ("flags", [True], None, "dtype bool"),
        ("ragged indices", [[0], [1, 2]], None, "numpy cannot take"),
        ("held rows of another shape", [0], ([0], rows[:, :2]), "the held rows have shape (1, 2)"),
        ("held rows of another dtype", [0], ([0], rows.astype("f8")), "float64"),
        ("held indices without rows", [0], ([0], None), "the held rows"),
        ("a held index that no row has", [0], ([-3], rows), "indices of held rows have -3"),
        ("have that is no pair", [0], [0], "held rows"),
    ):
        for nodes in sorted({1, comm.size}):
            given = (indices, have) if odd else ([0], None)
            yield f"{name}, {nodes} nodes", partial(_refused, array, whole, nodes, given, text)
    for name, width, periodic, text in (
        ("a width below 0", -1, False, "width -1"),
        ("widths for other dims", (1, 1, 1), False, "the 2 dims"),
        ("three ends", ((1, 1, 1), 0), False, "pair (before, after)"),
        ("a width that is text", "1", False, "width '1'"),
        ("periodic that is a number", 1, 2, "periodic 2"),
        ("more than once around", 10**15, True, "width of at most"),
    ):
        call = partial(array.halo, width, periodic, limit=LIMIT)
        yield name, partial(_refuses, comm, call, text)

    def different() -> None:
        call = array.halo if odd else array.gather_rows
        check_refused(comm, AgreementError, partial(call, [1, 1] if odd else [1], limit=LIMIT), "halo of width")

    def failed() -> None:
        for nodes in sorted({1, comm.size}):
            team_of(comm, nodes=nodes)
            gather = array.prepare_gather([0, 2 * comm.size - 1], limit=LIMIT)
            gather.gather()
            error = caught_by(partial(gather.gather, out=np.empty(3) if odd else None))
            assert (type(error) is TileError) == odd, error
            assert np.array_equal(gather.gather(), whole[[0, -1]])
            comm.Barrier()  # Neighbours alone wait for each other: without it, some would fail in the call before.
            with mock.patch.object(fetch.BoxCopy, "run", side_effect=MemoryError("no room")) if odd else nullcontext():
                error = caught_by(gather.gather)
            assert type(error) is (MemoryError if odd else RankError), error
            comm.Barrier()
            time.sleep(0.2)  # By now all ranks know.
            assert np.array_equal(gather.gather(), whole[[0, -1]])
            gather.free()

    def absent() -> None:
        for nodes in sorted({1, comm.size}):
            team_of(comm, nodes=nodes)
            with array.prepare_gather([0, 2 * comm.size - 1], limit=1.0) as gather:
                start = time.monotonic()
                error = None if odd else caught_by(gather.gather)
                assert odd or type(error) is RankError, error
                assert time.monotonic() - start < LIMIT / 2
                comm.Barrier()
                time.sleep(0.2)
                assert np.array_equal(gather.gather(), whole[[0, -1]])

    def no_room() -> None:
        # The node has no memory left: for the words of its ranks, or only for what owners write.
        for last in (0, 1):
            team = team_of(comm, nodes=1)
            words = team.arena.take(1 << 10, partial(team.gather, Watch(team, LIMIT)))
            with mock.patch.object(team.arena, "take", side_effect=[words, 0] if last else [0]):
                gather = array.prepare_gather([0, 2 * comm.size - 1], limit=LIMIT)
            for _ in range(3):
                assert np.array_equal(gather.gather(), whole[[0, -1]])
            gather.free()

    def scalars() -> None:
        scalar = DistArray.zeros(Layout.parse("f32[]", Mesh(x=comm.size)), comm)
        check_refused(comm, LayoutError, partial(scalar.gather_rows, [0]), "has no rows")
        assert scalar.halo(3).shape == ()
        if comm.size == 1:
            return
        partial_sum = DistArray.zeros(Layout.parse("f32[4] + sum{x}", Mesh(x=comm.size)), comm)
        check_refused(comm, LayoutError, partial(partial_sum.gather_rows, [0]))

    if comm.size > 1:
        yield "different calls", different
        yield "failures in calls of a handle", failed
        yield "a rank that does not make a call", absent
        yield "no more memory of the node", no_room
    yield "scalars and sums", scalars

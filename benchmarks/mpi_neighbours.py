"""A gather of neighbours' rows, or a move to few, beside the same by hand: packing, `Ineighbor_alltoallv` on a graph of
ranks, `Wait`.

    reshard run -n 4 benchmarks/mpi_neighbours.py [--seed N] [--nodes 4] [--repeats 15] [--cases 6] [--moves]
    python benchmarks/mpi_neighbours.py --sizes 16 1024 16384

The first case is the mesh of examples/neighbour_averaging.py. Each other one is a random graph whose vertices lie in
pieces of random sizes, or by random owner; features are of 8 B to 2 KiB. Each rank needs the rows of its vertices'
neighbours that other ranks have. Ways, in turns, each after a barrier:

    prepared    `x.prepare_gather(needed)`, then `gather(out=)`
    once        `x.gather_rows(needed)`, which makes out anew who has what
    by hand     rows packed by `np.take`, `Ineighbor_alltoallv` to ranks that are known, in the order of owners

Seconds are medians of the slowest rank; what is printed are ratios to `by hand`, and what a rank receives. With
`--nodes` the ranks are on as many pretended nodes, and rows go in messages in place of shared memory. The seed is
printed; `--seed` repeats one.

With `--moves`, rows by owner move to a table in which some are the next rank's, or, on more than 4 ranks, that of the
one before last: `to = prepare(source, target, comm)`, then `to(tile, out=out)`, beside `redistribute(tile, source,
target, comm, out=out)` and by hand, which copies the rows that stay, too.

With `--sizes`, in one process: what one rank takes to make out whom to ask for what, in jobs of so many ranks, where it
has 1,000 rows and needs 100 of each of ten others; and the same of a move of as many rows, whom it takes them from and
gives them to. Seconds are medians, with nothing cached but the layouts' tables.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.geometry.overlap import list_alike
from reshard.lower.to_mpi import Picks, pick_boxes
from reshard.lower.to_mpi.peer_table import share_tiles
from reshard.mpi import DistArray, prepare, redistribute
from reshard.runtime.on_mpi.fetch import parts_of_move
from reshard.runtime.on_mpi.team import team_of

COMM = MPI.COMM_WORLD


def draw_case(choose: random.Random) -> tuple[rs.Layout, np.ndarray, np.ndarray]:
    """A layout of rows, the owner of each, and a neighbour list of ten for each vertex."""
    vertices, width = choose.choice([400, 4_000, 40_000]), choose.choice([1, 8, 32, 256])
    if vertices * width > 4_000_000:
        vertices = 4_000
    seeded = np.random.default_rng(choose.randrange(1 << 30))
    mesh = rs.Mesh(x=COMM.size)
    near = seeded.integers(-40, 41, (vertices, 10))
    graph = (np.arange(vertices)[:, None] + near) % vertices
    if choose.random() < 0.5:
        cuts = np.sort(seeded.integers(0, vertices + 1, COMM.size - 1))
        sizes = np.diff([0, *cuts.tolist(), vertices])
        owners = np.repeat(np.arange(COMM.size), sizes)
        return rs.Layout.from_sizes(sizes, mesh, (vertices, width), "f64"), owners, graph
    owners = np.minimum(np.arange(vertices) * COMM.size // vertices, COMM.size - 1)
    moved = seeded.integers(0, vertices, vertices // 10)
    owners[moved] = seeded.integers(0, COMM.size, len(moved))
    return rs.Layout.from_owners(owners, mesh, (vertices, width), "f64"), owners, graph


def take_example() -> tuple[rs.Layout, np.ndarray, np.ndarray]:
    """The same of the example, with the longest list for every vertex: a vertex with fewer neighbours has its own."""
    from examples.neighbour_averaging import POINTS, VALUES, make_mesh  # It needs scipy, which moves do not.

    averages, owners = make_mesh()
    degrees = np.diff(averages.indptr)
    graph = np.repeat(np.arange(POINTS)[:, None], degrees.max(), axis=1)
    graph[np.arange(degrees.max()) < degrees[:, None]] = averages.indices
    return rs.Layout.from_owners(owners, rs.Mesh(x=COMM.size), (POINTS, VALUES), "f64"), owners, graph


def prepare_by_hand(tile: np.ndarray, owners: np.ndarray, needed: np.ndarray) -> Callable[[], np.ndarray]:
    """What a program with a neighbour collective does: the lists of its neighbours, made once, and an exchange."""
    width = tile.shape[1]
    locals_ = np.empty(len(owners), np.int64)
    for rank in range(COMM.size):
        locals_[owners == rank] = np.arange(np.count_nonzero(owners == rank))
    by_owner = [needed[owners[needed] == rank] for rank in range(COMM.size)]
    asked = COMM.alltoall([locals_[rows] for rows in by_owner])
    sources = [rank for rank, rows in enumerate(by_owner) if len(rows)]
    sinks = [rank for rank, rows in enumerate(asked) if len(rows)]
    graph = COMM.Create_dist_graph_adjacent(sources, sinks)
    packed = np.concatenate([np.empty(0, np.int64), *[asked[rank] for rank in sinks]])
    sent, ghosts = np.empty((len(packed), width)), np.empty((len(needed), width))
    counts = [len(asked[rank]) * width for rank in sinks], [len(by_owner[rank]) * width for rank in sources]
    starts = [np.cumsum([0, *count])[:-1].tolist() for count in counts]

    def exchange() -> np.ndarray:
        np.take(tile, packed, axis=0, out=sent, mode="clip")
        send: Any = [sent, (counts[0], starts[0]), MPI.DOUBLE]
        receive: Any = [ghosts, (counts[1], starts[1]), MPI.DOUBLE]
        graph.Ineighbor_alltoallv(send, receive).Wait()
        return ghosts

    return exchange


def draw_move(choose: random.Random) -> tuple[rs.Layout, rs.Layout, np.ndarray, np.ndarray]:
    """Two layouts of rows by owner, and who owns each: a few rows go to ranks that are near."""
    vertices, width = choose.choice([400, 4_000, 40_000]), choose.choice([1, 8, 32, 256])
    vertices = 4_000 if vertices * width > 4_000_000 else vertices
    seeded, mesh = np.random.default_rng(choose.randrange(1 << 30)), rs.Mesh(x=COMM.size)
    before = np.minimum(np.arange(vertices) * COMM.size // vertices, COMM.size - 1)
    if choose.random() < 0.5:
        before = seeded.integers(0, COMM.size, vertices)
    steps = [1, COMM.size - 2] if COMM.size > 4 else [1]
    moved = seeded.random(vertices) < choose.choice([0.02, 0.2, 0.5])
    after = np.where(moved, (before + seeded.choice(steps, vertices)) % COMM.size, before)
    source, target = (rs.Layout.from_owners(each, mesh, (vertices, width), "f64") for each in (before, after))
    return source, target, before, after


def prepare_move_by_hand(before: np.ndarray, after: np.ndarray, out: np.ndarray) -> Callable[[np.ndarray], object]:
    """What a program with a neighbour collective does for a move between two tables of owners."""
    rank, width = COMM.rank, out.shape[1]
    mine, theirs = np.flatnonzero(before == rank), np.flatnonzero(after == rank)
    to, by = after[mine], before[theirs]
    sinks, sources = ([int(r) for r in np.unique(each) if r != rank] for each in (to, by))
    graph = COMM.Create_dist_graph_adjacent(sources, sinks)
    stays = np.flatnonzero(to == rank), np.flatnonzero(by == rank)
    none = np.empty(0, np.int64)
    packed = np.concatenate([none, *[np.flatnonzero(to == r) for r in sinks]])
    put = np.concatenate([none, *[np.flatnonzero(by == r) for r in sources]])
    sent, got = np.empty((len(packed), width)), np.empty((len(put), width))
    counts = [[int(np.count_nonzero(of == r)) * width for r in ranks] for of, ranks in ((to, sinks), (by, sources))]
    starts = [np.cumsum([0, *count])[:-1].tolist() for count in counts]

    def exchange(tile: np.ndarray) -> None:
        np.take(tile, packed, axis=0, out=sent, mode="clip")
        send: Any = [sent, (counts[0], starts[0]), MPI.DOUBLE]
        receive: Any = [got, (counts[1], starts[1]), MPI.DOUBLE]
        request = graph.Ineighbor_alltoallv(send, receive)
        out[stays[1]] = tile[stays[0]]
        request.Wait()
        out[put] = got

    return exchange


def time_moves(choose: random.Random, options: argparse.Namespace) -> None:
    """Prints the ratios of the moves of all cases."""
    ratios: list[tuple[float, float]] = []
    if COMM.rank == 0:
        print("rows received   bytes a row   by hand us   handle   redistribute")
    for _ in range(options.cases):
        source, target, before, after = draw_move(choose)
        whole = np.random.default_rng(1).normal(size=source.shape)
        tile, out, by_hand = (np.zeros(end.tile_shape) for end in (source, target, target))
        tile[: np.count_nonzero(before == COMM.rank)] = whole[before == COMM.rank]
        exchange, count = prepare_move_by_hand(before, after, by_hand), np.count_nonzero(after == COMM.rank)
        with prepare(source, target, COMM) as handle:
            handle(tile, out=out)
            exchange(tile)
            assert np.array_equal(out[:count], whole[after == COMM.rank]) and np.array_equal(
                out[:count], by_hand[:count]
            )
            ways: dict[str, Callable[[], object]] = {
                "by hand": partial(exchange, tile),
                "handle": partial(handle, tile, out=out),
                "redistribute": partial(redistribute, tile, source, target, COMM, out=out),
            }
            taken = time_ways(ways, options.repeats)
        most = COMM.allreduce(int(np.count_nonzero((after == COMM.rank) & (before != COMM.rank))), MPI.MAX)
        ratios.append((taken["handle"] / taken["by hand"], taken["redistribute"] / taken["by hand"]))
        if COMM.rank == 0:
            row = 8 * source.shape[1]
            print(f"{most:13,}{row:14,}{taken['by hand'] * 1e6:13.1f}{ratios[-1][0]:9.2f}{ratios[-1][1]:15.2f}")
    if COMM.rank == 0:
        one, other = (statistics.median(each) for each in zip(*ratios, strict=True))
        print(f"median ratio to by hand: handle {one:.2f}, redistribute {other:.2f}")


def time_ways(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each way, of the slowest rank, in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 2):
        for name, way in ways.items():
            COMM.Barrier()
            start = time.perf_counter()
            for _ in range(5):
                way()
            times[name].append(COMM.allreduce((time.perf_counter() - start) / 5, MPI.MAX))
    return {name: statistics.median(taken[2:]) for name, taken in times.items()}


def list_figures(size: int, seed: int) -> str:
    """The messages, rows and seconds of one rank of a job of this size, by sizes of pieces and by owner."""
    seeded = np.random.default_rng(seed)
    mesh, rank, shown = rs.Mesh(x=size), size // 2, [f"{size:8,}"]
    sizes, owners = [1_000] * size, np.repeat(np.arange(size), 1_000)
    sizes[0], sizes[1] = 500, 1_500
    order = seeded.permutation(size * 1_000).reshape(size, 1_000)
    owners[order.ravel()] = np.repeat(np.arange(size), 1_000)
    others = (rank + np.array([-5, -4, -3, -2, -1, 1, 2, 3, 4, 5])) % size
    runs = (others[:, None] * 1_000 + 600 + seeded.permutation(400)[:100]).ravel()
    nodes, picks = tuple(range(size)), Picks([], [])
    for layout, needed in (
        (rs.Layout.from_sizes(sizes, mesh, (size * 1_000, 16), "f64"), runs),
        (rs.Layout.from_owners(owners, mesh, (size * 1_000, 16), "f64"), order[others, :100].ravel()),
    ):
        taken: list[float] = []
        columns = np.arange(16)
        for _ in range(20):
            start = time.perf_counter()
            picks = pick_boxes(layout, [needed, columns], rank, nodes)
            taken.append(time.perf_counter() - start)
        rows = sum(box.elements for box in picks.boxes) // 16
        shown.append(f"{len(picks.boxes):11}{rows:8,}{statistics.median(taken) * 1e3:9.3f}")
    # A move in which each rank gives ten others 50 of its thousand rows.
    near = (np.arange(size)[:, None] + np.array([-5, -4, -3, -2, -1, 1, 2, 3, 4, 5])) % size
    after = np.repeat(np.arange(size), 1_000).reshape(size, 1_000)
    after[:, 500:] = np.repeat(near, 50, axis=1)
    target, taken = rs.Layout.from_owners(after.ravel(), mesh, (size * 1_000, 16), "f64"), []
    source = rs.Layout.from_sizes([1_000] * size, mesh, target.shape, "f64")
    parts = parts_of_move(source, target, rank, nodes, 8)
    for _ in range(20):
        for cached in (share_tiles, list_alike):
            cached.cache_clear()
        start = time.perf_counter()
        parts = parts_of_move(source, target, rank, nodes, 8)
        taken.append(time.perf_counter() - start)
    rows = sum(part.elements for part in parts.received) // 16
    return (
        "".join(shown)
        + f"{len(parts.received) + len(parts.sent or ()):11}{rows:8,}{statistics.median(taken) * 1e3:9.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cases", type=int, default=6)
    parser.add_argument("--moves", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="*")
    options = parser.parse_args()
    seed = COMM.bcast(random.randrange(10**6) if options.seed is None else options.seed)
    choose = random.Random(seed)
    if options.sizes:
        print(
            f"seed {seed}\n   ranks   messages    rows       ms   by owner    rows       ms      moved    rows       ms"
        )
        for size in options.sizes:
            print(list_figures(size, seed))
        return
    team_of(COMM, nodes=options.nodes)
    if COMM.rank == 0:
        print(f"seed {seed}, {COMM.size} ranks, {options.nodes} nodes, {MPI.Get_library_version().split(',')[0][:24]}")
    if options.moves:
        time_moves(choose, options)
        return
    if COMM.rank == 0:
        print("rows received   bytes a row   by hand us   prepared   once")
    ratios: list[tuple[float, float]] = []
    for case in range(options.cases):
        layout, owners, graph = draw_case(choose) if case else take_example()
        mine = np.flatnonzero(owners == COMM.rank)
        needed = np.unique(graph[mine])
        needed = needed[owners[needed] != COMM.rank]
        whole = np.random.default_rng(seed).normal(size=layout.shape)
        x = DistArray.zeros(layout, COMM)
        x.unpadded[...] = whole[mine]
        by_hand = prepare_by_hand(x.tile, owners, needed)
        out = np.empty((len(needed), layout.shape[1]))
        with x.prepare_gather(needed) as gather:
            assert np.array_equal(gather.gather(out=out), whole[needed])
            assert np.array_equal(np.sort(by_hand(), axis=None), np.sort(whole[needed], axis=None))
            ways: dict[str, Callable[[], object]] = {
                "by hand": by_hand,
                "prepared": lambda gather=gather, out=out: gather.gather(out=out),
                "once": lambda x=x, needed=needed: x.gather_rows(needed),
            }
            taken = time_ways(ways, options.repeats)
        most = COMM.allreduce(len(needed), MPI.MAX)
        one, other = taken["prepared"] / taken["by hand"], taken["once"] / taken["by hand"]
        ratios.append((one, other))
        if COMM.rank == 0:
            row = 8 * layout.shape[1]
            print(f"{most:13,}{row:14,}{taken['by hand'] * 1e6:13.1f}{one:11.2f}{other:7.2f}")
    if COMM.rank == 0:
        prepared, once = (statistics.median(each) for each in zip(*ratios, strict=True))
        print(f"median ratio to by hand: prepared {prepared:.2f}, once {once:.2f}")


if __name__ == "__main__":
    main()

"""Moves over MPI against its peers, on the MPI of this Python: time over a plain copy of the same bytes.

    python benchmarks/mpi.py                       # 4 and 8 ranks
    python benchmarks/mpi.py --ranks 4 --repeats 15 --problem pencil --json

In one run, ways take turns, buffers are warm, and a figure is the median of the slowest rank's times over the median of
`memcpy`: every rank copies as many bytes as its tile has, at once. Every way's result is checked once. Peers:

    pack + Alltoall    numpy packs what goes to each rank, one Alltoallv, numpy unpacks
    Alltoallw          datatypes committed beforehand, from tile to tile: what mpi4py-fft does, for any layouts
    mpi4py-fft         its own Transfer, where it is installed (slabs and pencils)
    heat               its resplit, where it is installed (slabs)
    pdgemr2d           ScaLAPACK's, where this MPI has a shared library of it (matrices)

Packing alone, of what a rank sends to each of the others, is set against numpy's own strided copy and one that goes
block by block through a core's cache, in times of the best of the two.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reshard.geometry.blocks import Block
from reshard.lower.to_mpi import list_fetches
from reshard.mpi import launch
from reshard.types import Layout, Mesh

Run = Callable[[], Any]


@dataclass(frozen=True)
class Problem:
    """A move, by name."""

    name: str
    source: Layout
    target: Layout


def problems(ranks: int, scale: int) -> list[Problem]:
    """Sizes are divided by `scale`."""
    down = 1 << (ranks.bit_length() - 1) // 2
    line, grid = Mesh(x=ranks), Mesh(x=down, y=ranks // down)
    cube, side = (512 // scale,) * 3, (8192 // scale,) * 2

    def spec(mesh: Mesh, shape: tuple[int, ...], dtype: str, *held: list[str]) -> Layout:
        return Layout.from_spec(mesh, shape, dtype, held)

    def cyclic(mesh: Mesh, block: int) -> Layout:
        dims = [f"{-(-side[0] // (axis * block))}{{{name}}}{block}/{side[0]}" for name, axis in mesh.axes.items()]
        return Layout.parse(f"f64[{', '.join(dims)}]", mesh)

    def dealt(one: int, other: int) -> tuple[Layout, Layout]:
        return cyclic(grid, one), cyclic(Mesh(x=ranks, y=1), other)

    return [
        Problem("slab", spec(line, cube, "f32", ["x"], []), spec(line, cube, "f32", [], ["x"])),
        Problem("pencil", spec(grid, cube, "f32", ["x"], ["y"], []), spec(grid, cube, "f32", ["x"], [], ["y"])),
        Problem("block-cyclic", *dealt(64 // scale, 256 // scale)),
        *(Problem(f"blocks {one} to {other}", *dealt(one, other)) for one, other in ((64, 96), (50, 75), (33, 100))),
        Problem("columns to rows", spec(line, side, "f64", [], ["x"]), spec(line, side, "f64", ["x"], [])),
    ]


# ---- on a rank -----------------------------------------------------------------------------------


class Bench:
    """One problem on this rank: its tiles, and every way to fill `out`."""

    def __init__(self, problem: Problem, comm: Any) -> None:
        self.problem, self.comm = problem, comm
        self.source, self.target = problem.source, problem.target
        self.tile = filled(self.source, comm.rank)
        self.wanted = filled(self.target, comm.rank)
        self.out = np.zeros_like(self.wanted)
        self.missing: dict[str, str] = {}

    def ways(self) -> Iterator[tuple[str, Run, Callable[[], np.ndarray]]]:
        """(name, what is timed, its result)."""
        other = np.empty_like(self.tile)
        yield "memcpy", lambda: np.copyto(other, self.tile), lambda: self.wanted
        yield from self.windows()
        yield from self.plain()
        yield "pack + Alltoall", self.packed(), lambda: self.out
        yield "Alltoallw", self.typed(), lambda: self.out
        for name, make in (("mpi4py-fft", self.fft), ("heat", self.heat), ("pdgemr2d", self.scalapack)):
            try:
                run, result = make()
            except (ImportError, OSError, NotImplementedError) as error:
                self.missing[name] = str(error)
                continue
            yield name, run, result

    def windows(self) -> Iterator[tuple[str, Run, Callable[[], np.ndarray]]]:
        from reshard.mpi import DistArray

        array, out = DistArray.empty(self.source, self.comm), DistArray.empty(self.target, self.comm)
        array.tile[...] = self.tile
        yield "windows", lambda: array.redistribute(self.target, out=out), lambda: out.tile
        yield "windows, new", (lambda: array.redistribute(self.target)), lambda: array.redistribute(self.target).tile

    def plain(self) -> Iterator[tuple[str, Run, Callable[[], np.ndarray]]]:
        from reshard.mpi import redistribute
        from reshard.runtime.on_mpi.team import team_of

        ends = self.tile, self.source, self.target
        yield "plain", lambda: redistribute(*ends, self.comm, out=self.out), lambda: self.out
        yield "plain, new", lambda: redistribute(*ends, self.comm), lambda: redistribute(*ends, self.comm)
        apart = self.comm.Dup()
        team_of(apart, nodes=apart.size)
        yield "messages", lambda: redistribute(*ends, apart, out=self.out), lambda: self.out

    def blocks(self, receiver: int) -> dict[int, tuple[Block, ...]]:
        """What a rank needs, by the rank that has it."""
        return list_fetches(self.source, self.target, receiver, lambda one, other: True)

    def views(self, tile: np.ndarray, blocks: tuple[Block, ...], end: str) -> list[np.ndarray]:
        return [strided(tile, block, end) for block in blocks]

    def packed(self) -> Run:
        """One buffer a side, in the order of ranks."""
        comm, size = self.comm, self.comm.size
        gives = [self.views(self.tile, self.blocks(to).get(comm.rank, ()), "src") for to in range(size)]
        mine = self.blocks(comm.rank)
        takes = [self.views(self.out, mine.get(giver, ()), "dst") for giver in range(size)]
        send, receive = np.empty(self.tile.size, self.tile.dtype), np.empty(self.out.size, self.out.dtype)
        send_counts, receive_counts = ([sum(v.nbytes for v in of) for of in side] for side in (gives, takes))

        def run() -> None:
            at = 0
            for view in (view for of in gives for view in of):
                send[at : at + view.size].reshape(view.shape)[...] = view
                at += view.size
            comm.Alltoallv([send.view(np.uint8), send_counts], [receive.view(np.uint8), receive_counts])
            at = 0
            for view in (view for of in takes for view in of):
                view[...] = receive[at : at + view.size].reshape(view.shape)
                at += view.size

        return run

    def typed(self) -> Run:
        comm, size = self.comm, self.comm.size
        mine = self.blocks(comm.rank)
        gives = [datatype(self.tile, self.blocks(to).get(comm.rank, ()), "src") for to in range(size)]
        takes = [datatype(self.out, mine.get(giver, ()), "dst") for giver in range(size)]
        counts = ([1] * size, [0] * size)
        return lambda: comm.Alltoallw([self.tile, counts, gives], [self.out, counts, takes])

    def fft(self) -> tuple[Run, Callable[[], np.ndarray]]:
        if len(self.source.shape) != 3:
            raise NotImplementedError("slabs and pencils only")
        from mpi4py_fft.pencil import Pencil, Subcomm

        held = [[d.axis.size for d in dim.digits if d.axis is not None] for dim in self.source.dims]
        local = [{at for at, dim in enumerate(end.dims) if dim.tile == dim.size} for end in (self.source, self.target)]
        (before,), (after,) = local[0] - local[1], local[1] - local[0]
        pencil = Pencil(Subcomm(self.comm, [(*of, 1)[0] for of in held]), self.source.shape, before)
        transfer = pencil.transfer(pencil.pencil(after), self.tile.dtype)
        return (lambda: transfer.forward(self.tile, self.out)), lambda: self.out

    def heat(self) -> tuple[Run, Callable[[], np.ndarray]]:
        if len(self.source.mesh.axes) != 1:
            raise NotImplementedError("slabs only")
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of heat's import
        import heat

        split, to = (
            next(at for at, dim in enumerate(end.dims) if dim.tile != dim.size) for end in (self.source, self.target)
        )
        array = heat.array(self.tile, is_split=split)
        return (lambda: heat.resplit(array, to)), lambda: heat.resplit(array, to).larray.numpy()

    def scalapack(self) -> tuple[Run, Callable[[], np.ndarray]]:
        if len(self.source.shape) != 2 or not (self.source.even and self.target.even):
            raise NotImplementedError("matrices without padding only")
        vendor = "openmpi" if "Open MPI" in _library() else "mpich"
        library = ctypes.util.find_library(f"scalapack-{vendor}") or f"libscalapack-{vendor}.so.2.2"
        return _pdgemr2d(ctypes.CDLL(library), self)


def _library() -> str:
    from mpi4py import MPI

    return MPI.Get_library_version()


def _pdgemr2d(library: ctypes.CDLL, bench: Bench) -> tuple[Run, Callable[[], np.ndarray]]:
    """The transposed matrix, of which our C-ordered tiles are ScaLAPACK's column-ordered ones."""
    number = ctypes.c_int
    context = number()
    library.Cblacs_get(-1, 0, ctypes.byref(context))
    contexts = [_grid(library, context.value, end) for end in (bench.source, bench.target)]
    ends = zip((bench.source, bench.target), contexts, strict=True)
    descriptors = [(number * 9)(*_descriptor(end, grid)) for end, grid in ends]
    rows, columns = bench.source.shape

    def run() -> None:
        tile, out = (array.ctypes.data_as(ctypes.c_void_p) for array in (bench.tile, bench.out))
        one = number(1)
        library.Cpdgemr2d(columns, rows, tile, one, one, descriptors[0], out, one, one, descriptors[1], contexts[0])

    return run, lambda: bench.out


def _grid(library: ctypes.CDLL, context: int, layout: Layout) -> int:
    made = ctypes.c_int(context)
    rows, columns = (dim.size // dim.tile for dim in layout.dims)
    # Our rows are the transposed matrix's columns; ranks go along the last axis first.
    library.Cblacs_gridinit(ctypes.byref(made), b"C", columns, rows)
    return made.value


def _descriptor(layout: Layout, context: int) -> list[int]:
    rows, columns = layout.shape
    blocks = [dim.digits[-1].radix for dim in layout.dims]
    return [1, context, columns, rows, blocks[1], blocks[0], 0, 0, layout.tile_shape[1]]


def filled(layout: Layout, rank: int) -> np.ndarray:
    """The tile of the array of its own global indices."""
    from reshard.runtime.on_mpi.global_array import global_indices

    tile = np.zeros(layout.tile_shape, layout.dtype)
    for dim, size in enumerate(layout.shape):
        along = global_indices(layout, dim, rank).reshape([-1 if at == dim else 1 for at in range(tile.ndim)])
        tile = tile * size % 16381 + along
    return tile.astype(layout.dtype)


def strided(tile: np.ndarray, block: Block, end: str) -> np.ndarray:
    """One end of a block as a view."""
    from reshard.runtime.on_mpi.copies.strided_copy import view_block

    return view_block(tile, block, end)


def datatype(tile: np.ndarray, blocks: tuple[Block, ...], end: str) -> Any:
    """All blocks as one committed type."""
    from mpi4py import MPI

    types, base = [], tile.ctypes.data
    for view in (strided(tile, block, end) for block in blocks):
        made, run, axes = MPI.BYTE, view.itemsize, list(zip(view.shape, view.strides, strict=True))
        while axes and axes[-1][1] == run:
            run *= axes.pop()[0]
        made = MPI.BYTE.Create_contiguous(run)
        for extent, stride in reversed(axes):
            made = made.Create_hvector(extent, 1, stride)
        types.append((view.ctypes.data - base, made))
    return MPI.Datatype.Create_struct([1] * len(types), [at for at, _ in types], [made for _, made in types]).Commit()


BLOCK = 128 << 10


def in_blocks(into: np.ndarray, given: np.ndarray) -> None:
    """Numpy's copy, block by block: what a core's cache holds of both, square along both's fastest axes."""
    ends = {int(np.argmin(view.strides)) for view in (into, given)}
    side = int((BLOCK // into.itemsize) ** (1 / len(ends)))
    blocks = [min(n, side) if axis in ends else 1 for axis, n in enumerate(into.shape)]
    for axis in reversed(range(into.ndim)):
        spare = BLOCK // (into.itemsize * int(np.prod(blocks)))
        blocks[axis] = max(1, min(into.shape[axis], blocks[axis] * spare))
    for corner in itertools.product(*(range(0, n, by) for n, by in zip(into.shape, blocks, strict=True))):
        block = tuple(slice(at, at + by) for at, by in zip(corner, blocks, strict=True))
        np.copyto(into[block], given[block])


def packing(bench: Bench, order: str, repeats: int) -> dict[str, float]:
    """Median processor seconds of packing all that leaves a tile of this order, of the slowest rank."""
    from reshard.runtime.on_mpi.copies.strided_copy import view_as_words, view_block
    from reshard.runtime.on_mpi.direct_moves import node_packing, pack_for_node

    comm, tile = bench.comm, np.asarray(bench.tile, order=order)
    plan = node_packing(bench.source, bench.target, comm.rank, (0,) * comm.size, tile.itemsize)
    views = [view_block(tile, block, "src") for block in plan.blocks]
    packed = np.zeros(sum(view.size for view in views), tile.dtype)
    starts = np.cumsum([0, *(view.size for view in views)])
    into = [packed[at : at + view.size].reshape(view.shape) for at, view in zip(starts, views, strict=False)]

    def each(copy: Callable[[np.ndarray, np.ndarray], None]) -> None:
        for one, other in zip(into, views, strict=True):
            copy(one, other)

    ways = {
        "numpy": lambda: each(np.copyto),
        "blocks": lambda: each(in_blocks),
        "reshard": lambda: pack_for_node(plan, view_as_words(tile), view_as_words(packed)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, run in ways.items():
            comm.Barrier()
            start = time.thread_time()
            run()
            times[name] += [comm.allreduce(time.thread_time() - start, max)] if turn else []
    return {name: median(of) for name, of in times.items()}


def measure(bench: Bench, repeats: int) -> dict[str, list[float]]:
    """Seconds of every way, in turns."""
    from reshard.lower.to_mpi import seat_of
    from reshard.mpi.tile_checks import true_part

    def true(tile: np.ndarray) -> np.ndarray:
        return true_part(tile, bench.target, seat_of(bench.target.mesh, bench.comm.rank, bench.comm.size))

    ways = list(bench.ways())
    for name, run, result in ways:
        bench.out[...] = 0
        run()
        if name != "memcpy" and not np.array_equal(true(result()), true(bench.wanted)):
            raise AssertionError(f"{bench.problem.name}: {name} is wrong on rank {bench.comm.rank}")
    times: dict[str, list[float]] = {name: [] for name, *_ in ways}
    for _ in range(repeats):
        for name, run, _ in ways:
            bench.comm.Barrier()
            start = time.perf_counter()
            run()
            times[name].append(max(bench.comm.allgather(time.perf_counter() - start)))
    return times


def rank_main(options: argparse.Namespace) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    results = {}
    for problem in problems(comm.size, options.scale):
        if options.problem in (None, problem.name):
            bench = Bench(problem, comm)
            times = measure(bench, options.repeats)
            results[problem.name] = {
                "seconds": {name: median(of) for name, of in times.items()},
                "missing": bench.missing,
                "packing": {order: packing(bench, order, options.repeats) for order in "CF"},
            }
    if comm.rank == 0:
        show(_library(), comm.size, results, options.json)


def show(library: str, ranks: int, results: dict[str, Any], as_json: bool) -> None:
    name = " ".join(library.split()[:3]).rstrip(",")
    if as_json:
        print(json.dumps({"mpi": name, "ranks": ranks, "problems": results}), flush=True)
        return
    print(f"{name}, {ranks} ranks")
    for problem, of in results.items():
        seconds = of["seconds"]
        copy = seconds.pop("memcpy")
        ratios = ", ".join(f"{way} {took / copy:.2f}" for way, took in seconds.items())
        print(f"  {problem}: memcpy {copy * 1e3:.1f} ms; {ratios}")
        for order, took in of["packing"].items():
            best = min(took["numpy"], took["blocks"])
            packed = ", ".join(f"{way} {seconds / best:.2f}" for way, seconds in took.items())
            print(f"    packing a tile in {order} order: {packed}")
        print("".join(f"    {peer}: {why}\n" for peer, why in of["missing"].items()), end="", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes by this, for a quick look")
    parser.add_argument("--problem", help="one of: slab, pencil, block-cyclic, blocks 50 to 75, columns to rows, ...")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--on-a-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_a_rank:
        rank_main(options)
        return 0
    return max(launch(n, [__file__, *sys.argv[1:], "--on-a-rank"]) for n in options.ranks)


if __name__ == "__main__":
    sys.exit(main())

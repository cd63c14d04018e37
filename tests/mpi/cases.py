"""The topics of the MPI tests: each a list of named cases, the same ones in the same order on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import numpy as np
from mpi4py import MPI

from reshard.runtime.on_mpi.copies import stream_copy
from reshard.runtime.on_mpi.copies.stream_copy import find_kernel
from reshard.runtime.on_mpi.team import Team, team_of
from reshard.types import Layout, Mesh
from tests.layouts import SIZES, random_layout, sample_pairs
from tests.mpi.moving import MoveOptions, any_options, check_move
from tests.mpi.worker import Case

MESHES = {
    1: [Mesh(), Mesh(x=1)],
    2: [Mesh(x=2), Mesh({"x": 2}, device_ids=[5, 3])],
    3: [Mesh(x=3), Mesh({"x": 3}, device_ids=[2, 0, 1])],
    4: [Mesh(x=2, y=2), Mesh(x=4), Mesh({"x": 4}, device_ids=[10, 3, 7, 20])],
    6: [Mesh(x=2, y=3), Mesh(x=6), Mesh({"x": 2, "y": 3}, device_ids=[5, 3, 1, 0, 2, 4])],
    8: [Mesh(x=2, y=2, z=2), Mesh(x=4, y=2), Mesh({"x": 4, "y": 2}, device_ids=[0, 4, 2, 6, 1, 5, 3, 7])],
}


def moves(comm: MPI.Intracomm) -> Iterator[Case]:
    """Pairs of layouts of every kind, each moved in some way, on one node, on two, and on one node per rank."""
    pairs = list(_pairs(comm.size))
    for nodes in sorted({1, min(2, comm.size), comm.size}):
        team = team_of(comm, nodes=nodes)
        choose = random.Random(nodes)
        for at, (source, target) in enumerate(pairs):
            if at % min(3, comm.size) == nodes % min(3, comm.size):
                move = any_options(choose, source, target)
                name = f"{at}: {source} -> {target} on {source.mesh!r}, {target.mesh}, {nodes} nodes, {move}"
                yield name, partial(check_move, comm, team, source, target, move)


def moves_sampled(comm: MPI.Intracomm) -> Iterator[Case]:
    """A sample of these cases, for the fast tier."""
    yield from islice(moves(comm), None, None, 7)


def _pairs(size: int) -> Iterator[tuple[Layout, Layout]]:
    choose = random.Random(size)
    for mesh in MESHES[size]:
        for rank in (1, 2, 3):
            yield from sample_pairs(mesh, rank, 6, seed=size)
    for at in range(90):
        shape = [choose.choice(SIZES) for _ in range(choose.randint(0, 3))]
        partial_too = at % 4 == 3
        mesh = choose.choice(MESHES[size])
        same = [other for other in MESHES[size] if set(other.devices) == set(mesh.devices)]
        other = mesh if partial_too else choose.choice(same)
        dtype = choose.choice(["int32", "int32", "float64"])
        yield random_layout(choose, mesh, shape, dtype, partial_too), random_layout(choose, other, shape, dtype)
    yield from _block_cyclic(size)


def _block_cyclic(size: int) -> Iterator[tuple[Layout, Layout]]:
    """Block-cyclic layouts, uneven ones included, to other blocks, grids and slabs."""
    down = next(k for k in range(int(size**0.5), 0, -1) if size % k == 0)
    grid, column = Mesh(r=down, c=size // down), Mesh(r=size, c=1)
    for rows, columns, before, after in ((40, 50, (4, 3), (5, 2)), (37, 41, (3, 5), (8, 4)), (64, 64, (4, 4), (2, 8))):
        one, other = _cyclic(grid, rows, columns, *before), _cyclic(column, rows, columns, *after)
        slab = Layout.from_spec(grid, (rows, columns), "int32", [[], ["r", "c"]])
        yield from ((one, other), (other, one), (one, slab), (slab, one), (one, _cyclic(grid, rows, columns, *after)))


def _cyclic(mesh: Mesh, rows: int, columns: int, down: int, right: int) -> Layout:
    def dim(size: int, axis: str, block: int) -> str:
        rounds = -(-size // (mesh.axes[axis] * block))
        return f"{rounds}{{{axis}}}{block}/{size}"

    return Layout.parse(f"s32[{dim(rows, 'r', down)}, {dim(columns, 'c', right)}]", mesh)


DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "complex128"]
STRUCTURES = {
    "uint8": np.dtype([("a", "i1")]),
    "uint32": np.dtype([("a", "<i2"), ("b", "<u2")]),
    "uint64": np.dtype("M8[s]"),
    "complex128": np.dtype([("at", "<f4", (3,)), ("n", "<i4")]),
}
MOVES = [
    ("[{x}4, 16]", "[16, {x}4]"),
    ("[4, {x}4]", "[4, 16]"),
    ("[{x}{y}2]", "[{y}{x}2]"),
    ("[16]", "[{x}4]"),
    ("[{x}3/10, 3]", "[{x}{y}2/10, 3]"),
    ("[2{x}2, 3]", "[{x}{y}2, 3]"),
]


def dtypes(comm: MPI.Intracomm) -> Iterator[Case]:
    """Every dtype in every way; dtypes without a name in layouts are moved as plain words of their size."""
    mesh = Mesh(x=4, y=2)
    kinds = [(name, np.dtype(name)) for name in DTYPES] + list(STRUCTURES.items())
    kinds += [(name, np.dtype(name)) for name in _small()]
    every_move = [
        MoveOptions(),
        MoveOptions("stage"),
        MoveOptions("read"),
        MoveOptions("plan", order="F"),
        MoveOptions(shared=True),
    ]
    for nodes in (1, 2):
        team = team_of(comm, nodes=nodes)
        for at, (name, dtype) in enumerate(kinds):
            for turn, (before, after) in enumerate(MOVES):
                if (at + turn + nodes) % 2:  # Each pair on one node or on two.
                    continue
                source, target = (Layout.parse(f"f32{text}", mesh) for text in (before, after))
                source, target = (Layout(mesh, end.dims, name) for end in (source, target))
                move = every_move[(at + turn) % len(every_move)]
                case = partial(check_move, comm, team, source, target, move, dtype)
                yield f"{dtype} as {name} {before} -> {after}, {nodes} nodes, {move}", case


def streamed(comm: MPI.Intracomm) -> Iterator[Case]:
    """Moves of runs of whole cache lines, small as they are, past the caches: in windows, staged, and in messages."""
    mesh = Mesh(x=2, y=comm.size // 2)
    used: list[int] = []

    def check(team: Team, source: Layout, target: Layout, move: MoveOptions) -> None:
        listed = stream_copy.CopyTable.list_steps

        def steps(table: stream_copy.CopyTable, *arguments: Any, **options: Any) -> list[Callable[[], object]] | None:
            made = listed(table, *arguments, **options)
            used.append(made is not None)
            return made

        small = patch.multiple(stream_copy, LARGE=0, _LEAST=0, _PART=4096)
        with patch.object(stream_copy.CopyTable, "list_steps", steps), small:
            check_move(comm, team, source, target, move)

    every_move = [MoveOptions(), MoveOptions("stage"), MoveOptions(shared=True)]
    for nodes in sorted({1, 2, comm.size}):
        team = team_of(comm, nodes=nodes)
        for shape, before, after in (
            ((6, 32, 256), [["x"], ["y"], []], [["x"], [], ["y"]]),
            ((64, 256), [["x", "y"], []], [[], ["y", "x"]]),
        ):
            source, target = (Layout.from_spec(mesh, shape, "float32", held) for held in (before, after))
            for move in every_move:
                name = f"{source} -> {target}, {nodes} nodes, {move}"
                yield name, partial(check, team, source, target, move)
                yield f"back: {name}", partial(check, team, target, source, move)

    def some() -> None:
        assert any(used) or find_kernel() is None

    yield "some have gone past the caches", some


def _small() -> list[str]:
    import ml_dtypes

    return [np.dtype(getattr(ml_dtypes, name)).name for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")]

"""Random moves of tiles in any memory: reversed, transposed, with gaps, unaligned, broadcast, next to guard pages.

    PROT_NONE | canary bytes, the view's elements among them | PROT_NONE

A view is flush with one of the two pages that nobody may touch, or lies at an odd offset between them. After a move,
the result has the oracle's elements, the source is as it was, and so is every byte around the views.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

from reshard.lower.to_mpi import devices_by_id
from reshard.mpi import DistArray, prepare, redistribute
from reshard.runtime.on_mpi import prepare as preparing
from reshard.runtime.on_mpi import transports
from reshard.runtime.on_mpi.copies import stream_copy, strided_copy
from reshard.runtime.on_mpi.team import Team, team_of
from reshard.types import Layout, Mesh
from tests.layouts import random_layout
from tests.mpi.cases import MESHES
from tests.mpi.moving import LIMIT, any_budget, forced, overwriting_budget, taking_runs
from tests.mpi.worker import Case
from tests.oracle import PADDING, summands_of, tiles_of

PAGE = mmap.PAGESIZE
DTYPES = ("uint8", "int8", "float16", "uint16", "float32", "int32", "float64", "int64", "complex64", "complex128")
WAYS = ("natural", "read", "stage", "plan", "overwrite", "handle", "tree", "global", "wrapped")
BETWEEN_NODES = ("messages", "joined")
SIZES = (0, 1, 2, 3, 4, 5, 6, 8, 12, 15, 16, 24, 33)

_libc = ctypes.CDLL(None, use_errno=True)


class GuardedArray:
    """A view of bytes between two pages that nobody may touch, and what those bytes were."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any], choose: random.Random, order: str) -> None:
        size, axes = dtype.itemsize, list(range(len(shape)))
        strides = [0] * len(shape)
        if order != "C":
            choose.shuffle(axes)
        span = size
        for axis in reversed(axes):
            gap = choose.choice((0, 0, size, 3 * size, 1, 7)) if order == "any" else 0
            strides[axis] = span + gap
            span = (span + gap) * max(1, shape[axis])
            if order in ("any", "reversed") and choose.random() < 0.5:
                strides[axis] *= -1
        if order == "reversed" and shape and all(stride > 0 for stride in strides):
            strides[-1] *= -1
        reach = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)] if 0 not in shape else []
        span, below = size + sum(map(abs, reach)), sum(-each for each in reach if each < 0)
        pages = -(-(span + 32) // PAGE)
        self._map = mmap.mmap(-1, (pages + 2) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(self._map, np.uint8)
        for page in (0, pages + 1):
            address = whole.ctypes.data + page * PAGE
            assert _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0) == 0
        self._memory = whole[PAGE:-PAGE]
        self._memory[...] = np.frombuffer(choose.randbytes(self._memory.size), np.uint8)
        at = choose.choice((0, self._memory.size - span, choose.randint(1, 15))) + below
        self.view = np.ndarray(shape, dtype, self._memory, at, strides)
        inside = np.zeros(self._memory.size, bool)
        np.ndarray((*shape, size), bool, inside, at, (*strides, 1))[...] = True
        self._outside = ~inside
        self._before = self._memory.copy()

    def check_outside(self) -> None:
        changed = np.flatnonzero((self._memory != self._before) & self._outside)
        assert not changed.size, f"{changed.size} bytes outside the view were written to, from {changed[0]} on"

    def keep(self) -> None:
        """From now on, all bytes must stay."""
        self._before = self._memory.copy()

    def check_all(self) -> None:
        assert np.array_equal(self._memory, self._before), "the source was written to"


def words_of(array: np.ndarray) -> np.ndarray:
    """An array's bytes, element by element, of any dtype and in any memory order."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, array.itemsize)


class StridedMove:
    """What all ranks choose alike: layouts, options, the array's values."""

    def __init__(self, comm: MPI.Intracomm, seed: int, nodes: int) -> None:
        self.comm, self.seed = comm, seed
        self.choose = choose = random.Random(seed)
        self.own = random.Random(1000 * seed + comm.rank)
        several = nodes not in (1, comm.size)
        self.way = choose.choice(WAYS + 3 * BETWEEN_NODES if several else WAYS)
        mesh, name = choose.choice(MESHES[comm.size]), choose.choice(DTYPES)
        other = choose.choice([each for each in MESHES[comm.size] if set(each.devices) == set(mesh.devices)])
        unit = choose.choice((1, comm.size))  # Even layouts, and mostly uneven ones.
        shape = [unit * choose.choice(SIZES[: 9 if unit > 1 else None]) for _ in range(choose.randint(1, 3))]
        partial_too = choose.random() < 0.15 and name in ("int32", "int64", "float64", "float32")
        partial_too = partial_too and self.way in ("natural", "plan", "handle", "messages")
        even = unit > 1 and choose.random() < 0.7
        make = _even_layout if even else random_layout
        self.source = make(choose, mesh, shape, name)
        if partial_too:
            self.source = random_layout(choose, mesh, shape, name, True)
        self.target = make(choose, mesh if partial_too else other, shape, name)
        self.dtype, self.nodes = np.dtype(name), nodes
        self.donates = self.budget = None
        if self.way == "overwrite":
            self.budget = overwriting_budget(self.source, self.target)
            self.donates = self.budget is not None
        elif choose.random() < 0.5 and self.way not in ("tree", "global", "wrapped", "handle"):
            self.budget = any_budget(choose, self.source, self.target)
        self.into = choose.random() < 0.7 and not self.donates
        self.plain = self.way == "read" or choose.random() < 0.2  # All ranks' tiles are C-ordered.
        self.long, self.small = choose.choice([None, 16, 64]), choose.random() < 0.5
        count = int(np.prod(shape))
        raw = np.random.default_rng(seed).integers(0, 256, count * self.dtype.itemsize, np.uint8)
        whole = raw.view(self.dtype).reshape(shape)
        self.spread = choose.random() < 0.3 and count and not partial_too
        if self.spread:  # Equal along a dim, so that tiles can be broadcast.
            self.dim = choose.randrange(len(shape))
            whole = np.repeat(whole.take([0], self.dim), shape[self.dim], self.dim)
        self.whole = np.ascontiguousarray(whole)

    def __str__(self) -> str:
        options = f"{self.way}, budget={self.budget}, into={self.into}, long={self.long}, small={self.small}"
        ends = f"{self.source} -> {self.target} on {self.source.mesh!r}"
        return f"seed {self.seed}, {self.nodes} nodes: {ends}, {options}"

    def elements(self, index: np.ndarray, layout: Layout) -> np.ndarray:
        if self.source.partial:
            return index.astype(self.dtype)
        flat = self.whole.reshape(-1)
        return flat[np.where(index == PADDING, 0, index)] if flat.size else np.zeros(index.shape, self.dtype)

    def given(self) -> tuple[np.ndarray, GuardedArray | None]:
        """This rank's tile, in any memory."""
        layout = self.source
        tiles = summands_of(layout) if layout.partial else tiles_of(layout)
        tile = self.elements(tiles[devices_by_id(layout.mesh)[self.comm.rank]], layout)
        plain = self.donates or self.plain
        order = "C" if plain else self.own.choice(("C", "reversed", "transposed", "any", "any"))
        if self.spread and not plain and layout.even and self.own.random() < 0.7 and tile.size:
            # A stride of 0, of memory that has one index of the dim.
            guarded = GuardedArray(tile.take([0], self.dim).shape, self.dtype, self.own, order)
            guarded.view[...] = tile.take([0], self.dim)
            tile = np.broadcast_to(guarded.view, tile.shape)
        else:
            guarded = GuardedArray(tile.shape, self.dtype, self.own, order)
            guarded.view[...] = tile
            tile = guarded.view
            if self.own.random() < 0.3 and not self.donates:
                tile.flags.writeable = False
        guarded.keep()
        return tile, guarded

    def run(self, team: Team) -> None:
        comm, source, target = self.comm, self.source, self.target
        device = devices_by_id(target.mesh)[comm.rank]
        tile, guarded = self.given()
        c_ordered = self.way == "tree"
        order = "C" if c_ordered else self.own.choice(("C", "reversed", "transposed", "any", "any"))
        into = GuardedArray(target.tile_shape, self.dtype, self.own, order) if self.into else None
        out, keep = None if into is None else into.view, not self.donates
        with self._patched():
            if self.way == "handle":
                with prepare(source, target, comm, limit=LIMIT) as handle:
                    handle(tile, out=out)
                    result = handle.start(tile, out=out).wait()
            elif self.way == "tree":
                outs = None if out is None else {"a": out, "b": np.empty_like(out)}
                tiles = {"a": tile, "b": np.array(tile)}
                result = redistribute(tiles, source, target, comm, out=outs, limit=LIMIT)["a"]
            elif self.way == "global":
                whole = GuardedArray(self.whole.shape, self.dtype, self.own, "any")
                whole.view[...] = self.whole
                whole.keep()
                root = self.choose.choice((0, comm.size - 1, None))
                array = DistArray.from_global(whole.view, target, comm, root, limit=LIMIT)
                whole.check_all()
                result, back = array.tile, array.to_global(0, limit=LIMIT)
                assert comm.rank or np.array_equal(words_of(back), words_of(self.whole)), "gathered"
                into = None
            elif self.way == "wrapped":
                array = DistArray(source, tile, comm)
                given = None if out is None else DistArray(target, out, comm)
                result = array.redistribute(target, out=given, limit=LIMIT).tile
            else:
                options = {"budget": self.budget, "donate": bool(self.donates), "limit": LIMIT}
                result = redistribute(tile, source, target, comm, out=out, **options)
        wanted = tiles_of(target)[device]
        real = wanted != PADDING
        expected = self.elements(wanted, target)
        if target.partial:  # Every element of a sum that stays one.
            return
        assert result.shape == target.tile_shape
        wrong = (words_of(result) != words_of(expected)).any(-1) & real
        assert not wrong.any(), f"{wrong.sum()} of {wrong.size} elements, {result.strides}, source {tile.strides}"
        if into is not None:
            into.check_outside()
        if keep:
            guarded.check_all()
        else:
            guarded.check_outside()

    @contextmanager
    def _patched(self) -> Iterator[None]:
        with ExitStack() as patches:
            if self.way in ("read", "stage", "plan"):
                patches.enter_context(forced(self.way, self.choose.choice((None, 64))))
            if self.way == "messages":
                patches.enter_context(forced("stage"))
                patches.enter_context(mock.patch.object(transports, "new_place", lambda *_: 0))
                patches.enter_context(mock.patch.object(transports, "new_tile", _new_private))
            if self.way == "joined":
                preparing._plan_tile.cache_clear()
                patches.callback(preparing._plan_tile.cache_clear)
                patches.enter_context(mock.patch.object(preparing, "is_aggregated", lambda *_: True))
            patches.enter_context(taking_runs(self.long))
            if self.small:  # All ways to copy, which only large tiles take otherwise.
                patches.enter_context(mock.patch.multiple(strided_copy, _SMALL=64, _LARGE=256, _BLOCK=8))
                patches.enter_context(mock.patch.multiple(stream_copy, LARGE=0, _LEAST=0, _PART=4096, _SHORTEST=0))
            yield


def _even_layout(choose: random.Random, mesh: Mesh, shape: Sequence[int], dtype: str) -> Layout:
    axes: list[list[str]] = [[] for _ in shape]
    for axis in choose.sample(sorted(mesh.axes), len(mesh.axes)):
        choose.choice([*axes, []]).append(axis)
    return Layout.from_spec(mesh, shape, dtype, axes)


def _new_private(team: Team, watch: Any, layout: Layout, dtype: np.dtype[Any]) -> Any:
    return transports.WindowTile(np.empty(layout.tile_shape, dtype))


def run_move(comm: MPI.Intracomm, team: Team, seed: int, nodes: int) -> None:
    """One move, chosen by its seed."""
    move = StridedMove(comm, seed, nodes)
    try:
        move.run(team)
    except Exception as error:
        raise AssertionError(f"{move}: {type(error).__name__}: {error}") from error


def sampled(comm: MPI.Intracomm) -> Iterator[Case]:
    """Some of them, on one node, on two, and on one node per rank; and one that Open MPI packed wrongly."""
    for nodes in sorted({1, min(2, comm.size), comm.size}):
        team = team_of(comm, nodes=nodes)
        yield f"bytes, {nodes} nodes", partial(_reverse_bytes, comm)
        for seed in range(100 * nodes, 100 * nodes + 15):
            yield f"seed {seed}, {nodes} nodes", partial(run_move, comm, team, seed, nodes)


def _reverse_bytes(comm: MPI.Intracomm) -> None:
    """A reversed result, and a reversed tile, of one byte an element, without room for buffers."""
    mesh, values = Mesh(x=comm.size), np.arange(15 * comm.size, dtype="int8")
    rows, whole = Layout.parse("s8[{x}15]", mesh), Layout.from_spec(mesh, values.shape, "int8", [])
    tile = GuardedArray((15,), values.dtype, random.Random(comm.rank), "reversed")
    tile.view[...] = values[15 * comm.rank :][:15]
    tile.keep()
    for budget in (None, rows.tile_bytes + whole.tile_bytes):
        out = GuardedArray(values.shape, values.dtype, random.Random(-comm.rank), "reversed")
        redistribute(tile.view, rows, whole, comm, out=out.view, budget=budget, limit=LIMIT)
        assert np.array_equal(out.view, values), out.view
        out.check_outside()
        tile.check_all()

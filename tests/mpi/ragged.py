"""The topics of distributed arrays in pieces of any size, beside numpy and tables of owners (`tests.owners`)."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from reshard.errors import LayoutError
from reshard.mpi import DistArray
from reshard.runtime.on_mpi.team import team_of
from tests.mpi.cases import MESHES
from tests.mpi.worker import Case
from tests.owners import Owned


def arrays(comm: MPI.Intracomm) -> Iterator[Case]:
    """Made, moved, cut, joined and saved in random pieces, on one node and on a node for each rank."""
    folder = Path(comm.bcast(tempfile.mkdtemp()))
    for nodes in sorted({1, comm.size}):
        team_of(comm, nodes=nodes)
        choose = random.Random(90 + comm.size + nodes)
        for at in range(12):
            shape = (choose.choice([1, 5, 7, 13, 31]), choose.choice([1, 2, 3]), choose.choice([2, 5]))
            meshes = [choose.choice([mesh for mesh in MESHES[comm.size] if mesh.device_ids is None]) for _ in range(2)]
            one, other = (Owned.random(choose, mesh, shape[: 1 + at % 3]) for mesh in meshes)
            name = f"{at}: {one.layout} and {other.layout} on {one.layout.mesh}, {other.layout.mesh}, {nodes} nodes"
            yield f"{name}, made and moved", partial(_made_and_moved, comm, one, other)
            yield f"{name}, cut and joined", partial(_cut_and_joined, comm, one, choose.randrange(1 << 30))
            yield f"{name}, saved", partial(_saved, comm, one, other, folder / str(at))


def arrays_sampled(comm: MPI.Intracomm) -> Iterator[Case]:
    """A sample of these cases, for the fast tier."""
    yield from islice(arrays(comm), None, None, 11)


def _whole(owned: Owned) -> np.ndarray:
    return np.arange(np.prod(owned.layout.shape), dtype=np.int32).reshape(owned.layout.shape)


def _soiled(owned: Owned, comm: MPI.Intracomm) -> DistArray:
    """The array of `_whole`, with padding that would show wherever it is read."""
    array = DistArray.empty(owned.layout, comm)
    array.tile[...] = owned.tiles(_whole(owned))[comm.rank]
    return array


def _check(array: DistArray, owned: Owned) -> None:
    wanted = _whole(owned)[np.ix_(*owned.indices(array.comm.rank))]
    assert array.tile.shape == owned.layout.tile_shape
    assert np.array_equal(array.unpadded, wanted)


def _made_and_moved(comm: MPI.Intracomm, one: Owned, other: Owned) -> None:
    whole, layout, last = _whole(one), one.layout, comm.size - 1
    true_part = whole[np.ix_(*one.indices(comm.rank))]

    def index(*at: np.ndarray) -> Any:
        assert all(each.size for each in at)
        return np.ravel_multi_index(np.broadcast_arrays(*at), layout.shape)

    made = [
        DistArray.from_function(index, layout, comm),
        DistArray.from_global(whole if comm.rank == last else None, layout, comm, root=last),
        DistArray.from_global(whole, layout, comm, root=None),
        DistArray(layout, true_part.copy(), comm),
        _soiled(one, comm),
        _soiled(other, comm).redistribute(layout),
    ]
    for array in made:
        _check(array, one)
        every = array.to_global(None)
        assert every is not None
        assert np.array_equal(every, whole)
        assert [[at for run in runs for at in run] for runs in array.local_index_ranges()] == [
            each.tolist() for each in one.indices(comm.rank)
        ]
    for array in (made[0], made[2], made[3]):
        assert array.tile.sum() == true_part.sum()  # Padding is zero.
    array = made[4]
    assert (array.to_global(last) is None) == (comm.rank != last)
    assert np.array_equal(np.sum(array), whole.sum())
    assert np.array_equal((array * 2 + made[2]).to_global(None), whole * 3)
    out = DistArray.zeros(other.layout, comm)
    assert array.redistribute(other.layout, out=out) is out
    _check(out, other)
    if find_spec("scipy"):
        relabelled = array.redistribute(other.layout, relabel=True)
        assert np.array_equal(relabelled.to_global(None), whole)
    for dim in range(len(layout.shape)):
        local = array.redistribute(dim)
        assert local.layout.tile_shape[dim] == layout.shape[dim]
        assert np.array_equal(local.to_global(None), whole)
        free = [at for at, owners in enumerate(one.axes) if not owners and at != dim]
        ragged = [at for at, each in enumerate(layout.dims) if each.pieces is not None and at != dim]
        assert not (free and one.axes[dim]) or all(local.layout.dims[at] == layout.dims[at] for at in ragged)


def _cut_and_joined(comm: MPI.Intracomm, owned: Owned, seed: int) -> None:
    choose, whole, array = random.Random(seed), _whole(owned), _soiled(owned, comm)
    for _ in range(6):
        key = tuple(_any_index(choose, size) for size in whole.shape)
        wanted, cut = whole[key], array[key]
        given = cut.to_global(None) if isinstance(cut, DistArray) else cut
        assert np.array_equal(given, wanted), key
        if isinstance(cut, DistArray):
            for at, (item, dim) in enumerate(zip(key, owned.layout.dims, strict=True)):
                # A slice of a dim in pieces leaves every row where it is.
                if dim.pieces is not None and all(isinstance(each, slice) for each in key):
                    rows = [row for run in cut.local_index_ranges()[at] for row in run]
                    mine = np.isin(np.arange(whole.shape[at])[item], owned.indices(comm.rank)[at])
                    assert rows == np.flatnonzero(mine).tolist(), key
    for at in range(whole.ndim):
        key = (slice(None),) * at + (slice(choose.randint(0, 3), None, choose.choice([1, 2, -1])),)
        joined = np.concatenate([array, array[key], array], axis=at)
        assert np.array_equal(joined.to_global(None), np.concatenate([whole, whole[key], whole], axis=at))
    for shape in ((-1,), (1, *whole.shape), (whole.shape[0], -1), (-1, *whole.shape[-1:]), (*whole.shape, 1)):
        try:
            reshaped = array.reshape(shape)
        except LayoutError:
            assert shape != (whole.shape[0], -1) or any(owned.axes[1:]) or 1 in whole.shape, shape
            continue
        assert np.array_equal(reshaped.to_global(None), whole.reshape(shape)), shape


def _any_index(choose: random.Random, size: int) -> Any:
    if choose.randrange(3) == 0:
        return choose.randrange(-size, size)
    first, last = (choose.choice([None, choose.randint(-size - 1, size + 1)]) for _ in range(2))
    return slice(first, last, choose.choice([None, 1, 2, 3, -1, -2]))


def _saved(comm: MPI.Intracomm, one: Owned, other: Owned, folder: Path) -> None:
    _soiled(one, comm).save(folder)
    for owned in (one, other):
        _check(DistArray.load(folder, owned.layout, comm), owned)

"""Random moves of arrays in pieces of any size between all ranks or some, against tables of owners (`tests.owners`).

One call in each of `WAYS`: tiles of true extent, tiles with room for the largest piece, into `out`, by a handle that is
called twice, started and awaited, a tree of both directions, and any transport with its accounts (`check_move`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.mpi import prepare, redistribute
from reshard.runtime.on_mpi.team import Team, team_of
from reshard.types import Mesh
from tests.mpi.moving import LIMIT, any_options, check_move
from tests.mpi.worker import Case
from tests.owners import PADDING, Owned

WAYS = ("true", "padded", "out", "handle", "started", "tree", "any")
SIZES = (0, 1, 2, 5, 7, 12, 30)


def sampled(comm: MPI.Intracomm) -> Iterator[Case]:
    """A sample of what `benchmarks/mpi_soak.py pieces` makes, on one node and with every rank alone."""
    for nodes in (1, comm.size):
        team = team_of(comm, nodes=nodes)
        for seed in range(100 * nodes, 100 * nodes + 20):
            yield f"seed {seed}, {nodes} nodes", partial(check_seed, comm, team, seed, nodes)


def check_seed(comm: MPI.Intracomm, team: Team, seed: int, nodes: int) -> None:
    """Makes one random move, the same on all ranks, and checks this rank's result."""
    choose = random.Random(f"pieces {seed} on {comm.size}")
    shape = tuple(choose.choice(SIZES) for _ in range(choose.choice((1, 1, 2, 2, 3))))
    across = comm.size > 1 and choose.random() < 0.3
    counts = [choose.randint(1, comm.size) if across else comm.size for _ in range(2)]
    source, target = (Owned.random(choose, _random_mesh(choose, comm.size, count), shape) for count in counts)
    way = choose.choice(WAYS)
    what = f"seed {seed} on {comm.size} ranks and {nodes} nodes, {way}: "
    what += f"{source.layout} on {source.layout.mesh!r} -> {target.layout} on {target.layout.mesh!r}"
    try:
        if way == "any" and not across:
            options = any_options(choose, source.layout, target.layout)
            check_move(comm, team, source.layout, target.layout, options)
        else:
            _check_way(comm, way, source, target)
    except Exception as error:
        raise AssertionError(f"{what}: {error}") from error


def _random_mesh(choose: random.Random, size: int, count: int) -> Mesh:
    first = choose.choice([k for k in range(1, count + 1) if count % k == 0])
    second = choose.choice([k for k in range(1, count // first + 1) if count // first % k == 0])
    ids = choose.sample(range(size), count) if count < size or choose.random() < 0.3 else None
    return Mesh({"x": first, "y": second, "z": count // first // second}, device_ids=ids)


def _check_way(comm: MPI.Intracomm, way: str, source: Owned, target: Owned) -> None:
    whole = np.arange(1, 1 + np.prod(source.layout.shape), dtype=np.int32).reshape(source.layout.shape)
    before, after = (end.tiles(whole).get(comm.rank) for end in (source, target))
    given, wanted = (_true_part(end, tile, comm.rank) for end, tile in ((source, before), (target, after)))
    ends: Any = (source.layout, target.layout, comm)
    if way in ("handle", "started"):
        with prepare(*ends, limit=LIMIT) as handle:
            for scale in (1, 3):
                tile = None if before is None else before * scale
                result = handle(tile) if way == "handle" else handle.start(tile).wait()
                _assert_true_part(target, result, None if wanted is None else wanted * scale, comm.rank)
    elif way == "padded":
        _assert_true_part(target, redistribute(before, *ends, limit=LIMIT), wanted, comm.rank)
    elif way == "tree":
        pairs = {"to": (source.layout, target.layout), "back": (target.layout, source.layout)}
        moves = {name: rs.Move(*pair) for name, pair in pairs.items()}
        results = redistribute({"to": given, "back": wanted}, moves, None, comm, limit=LIMIT, padded=False)
        for name, expected in (("to", wanted), ("back", given)):
            assert (results[name] is None) == (expected is None) and np.array_equal(results[name], expected), name
    else:
        out = None if way != "out" or wanted is None else np.full(wanted.shape, PADDING, np.int32, order="F")
        kept = None if given is None else given.copy()
        result = redistribute(given, *ends, out=out, limit=LIMIT, padded=False)
        assert (result is None) == (wanted is None) and (out is None or result is out)
        assert np.array_equal(result, wanted) and np.array_equal(given, kept), f"{result}, not {wanted}"


def _true_part(end: Owned, tile: np.ndarray | None, rank: int) -> np.ndarray | None:
    return None if tile is None else tile[tuple(map(slice, map(len, end.indices(rank))))]


def _assert_true_part(end: Owned, result: np.ndarray | None, wanted: np.ndarray | None, rank: int) -> None:
    assert (result is None) == (wanted is None)
    assert result is None or result.shape == end.layout.tile_shape
    assert np.array_equal(_true_part(end, result, rank), wanted), f"{result}, not {wanted}"

"""Arrays for the tests of numpy's functions, on the one rank of this process or on all ranks of a job."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from mpi4py import MPI

from reshard.mpi import DistArray
from reshard.types import Layout, Mesh

COMM = MPI.COMM_SELF
MESH = Mesh(x=1)


def array(values: Any, mesh: Mesh = MESH) -> DistArray:
    """A whole array as a distributed one on one rank."""
    whole = np.asarray(values)
    layout = Layout.from_spec(mesh, whole.shape, whole.dtype.name, [])
    return DistArray.from_global(whole, layout, COMM)


def as_rank(mesh: Mesh, rank: int = 0) -> Any:
    """A stand-in for a communicator with one rank for each device of a mesh, as one of these sees it."""
    return _stand_in(rank, mesh.size)


@lru_cache
def _stand_in(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, size=size)


def whole(given: Any) -> np.ndarray:
    """The whole array of a distributed one."""
    assert isinstance(given, DistArray), given
    gathered = given.to_global(None)
    assert gathered is not None
    return gathered

"""Arrays in tiles on the ranks of an MPI communicator, moved from one layout to another.

    reshard.mpi.redistribute(tile, source, target, comm)     plain numpy arrays, one tile a rank
    reshard.mpi.DistArray                                    layout, tile and communicator in one
    reshard.mpi.relabelled(source, target)                   the target, its tiles where most of them are already
    reshard.mpi.calibrate(comm)                              the communicator as a `Network` to plan for
    reshard.mpi.launch(ranks, ["script.py"])                 starts ranks

Rank r is the r-th smallest device id of a layout's mesh: on a mesh without `device_ids`, device r. Importing
this package loads mpi4py only once something needs it, so that a process that starts ranks is none itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.mpi.launch import launch as launch

if TYPE_CHECKING:
    from reshard.mpi.calibration import calibrate as calibrate
    from reshard.mpi.distarray import DistArray as DistArray
    from reshard.mpi.redistribute import redistribute as redistribute
    from reshard.mpi.relabel import relabelled as relabelled
    from reshard.mpi.tiles import RAW as RAW
    from reshard.runtime.on_mpi.team import world as world

_HOME = {
    "DistArray": "reshard.mpi.distarray",
    "RAW": "reshard.mpi.tiles",
    "calibrate": "reshard.mpi.calibration",
    "redistribute": "reshard.mpi.redistribute",
    "relabelled": "reshard.mpi.relabel",
    "world": "reshard.runtime.on_mpi.team",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        raise ImportError(f"reshard.mpi.{name} needs mpi4py and an MPI: pip install 'reshard[mpi]'") from None


def __dir__() -> list[str]:
    return sorted([*_HOME, "launch"])

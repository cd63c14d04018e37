"""Spells out a plan as plain data (groups, pairs, blocks), then in each target's own terms.

Program            a plan as instructions, one a step, that name devices and blocks
lower_plan         the program of a checked plan
program_traffic    who sends how much to whom in a program
to_shard_map       a program as a function inside `jax.shard_map`
to_stablehlo       a plan as StableHLO
to_mpi             a plan as one rank's schedule of messages
"""

from reshard.lower.program import Program as Program
from reshard.lower.program import lower_plan as lower_plan

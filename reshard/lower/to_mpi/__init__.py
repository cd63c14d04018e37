"""Plans as MPI ranks see them: what one device sends, receives, copies and reduces, as strided blocks.

    Block       the same elements in a sender's tile and in a receiver's
    Part        the blocks that go to or come from one peer
    Turn        at most one part sent and one received, so that turns in order never deadlock
    Move        local copies and turns: slices, gathers, all-to-alls, permutes, exchanges
    Reduce      a reduce-scatter or an all-reduce of packed blocks
    Overwrite   an exchange that overwrites a donated source

Nothing here knows of MPI: `schedule` follows a checked plan step by step, `fetches` goes from source to
target in one stride, and both are plain data, the same on every rank that computes them.
"""

from reshard.lower.to_mpi.blocks import Axis as Axis
from reshard.lower.to_mpi.blocks import Block as Block
from reshard.lower.to_mpi.direct import Fetch as Fetch
from reshard.lower.to_mpi.direct import fetches as fetches
from reshard.lower.to_mpi.direct import ranks as ranks
from reshard.lower.to_mpi.direct import sole as sole
from reshard.lower.to_mpi.schedule import Move as Move
from reshard.lower.to_mpi.schedule import Overwrite as Overwrite
from reshard.lower.to_mpi.schedule import Part as Part
from reshard.lower.to_mpi.schedule import Reduce as Reduce
from reshard.lower.to_mpi.schedule import Schedule as Schedule
from reshard.lower.to_mpi.schedule import Slot as Slot
from reshard.lower.to_mpi.schedule import Turn as Turn
from reshard.lower.to_mpi.schedule import schedule as schedule

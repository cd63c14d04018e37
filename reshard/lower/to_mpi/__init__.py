"""Plans as MPI ranks see them: what one device sends, receives, copies and reduces, as strided blocks.

    schedule_device(plan, device)     a checked plan as one device runs it, step by step:
        StepMessages                    local copies, then rounds; for slices, gathers, all-to-alls, permutes, exchanges
        SendReceive                     one round: at most one message sent and one received
        PeerBlocks                      one message: its peer and its blocks
        Reduce                          a reduce-scatter or an all-reduce of packed blocks
        NewSummand                      a tile of zeros with blocks of the operand in it; starts a sum
        Overwrite, SlotMessage          an exchange that overwrites a donated source, and its messages
    list_fetches(source, target, ...) all that a rank copies from the tiles of others to go straight to the target
    list_served(source, target, ...)  all that others copy from its tile
    Block, Axis                       the same elements in a sender's tile and in a receiver's, as strided axes
    fetched_across(source, ...)       the same between two sets of devices: what a device copies from others' tiles
    served_across(source, ...)        what others copy from its tile
    fetched_as, served_as             the same in a turn of a relay, or through a view
    lay_stripes(nodes, rank, ...)     messages between nodes joined by node: what a rank carries, and where its part is
    devices_by_id(mesh)               the device of every seat, that is, by ascending id
    ranks_of_seats(mesh, size)        the rank of every seat in a communicator; seat_of(...) the other way round
    is_unreplicated(layout)           whether each tile is on one rank only

`schedule` has the steps of a plan, and `boxes` the boxes of one device without those of others. `direct` has what a
rank fetches straight to the target, `listed` the same in turns of a relay and through a view, and `stripes` who carries
what between nodes. `blocks` makes and joins blocks for all of them.

Nothing here imports MPI. Schedules and fetches are plain data, and the same on every rank that computes them.
"""

from reshard.geometry.holders import holders
from reshard.geometry.overlap import shares_from, shares_of
from reshard.lower.to_mpi import direct
from reshard.lower.to_mpi.blocks import Axis as Axis
from reshard.lower.to_mpi.blocks import Block as Block
from reshard.lower.to_mpi.blocks import fold_dim
from reshard.lower.to_mpi.boxes import number_devices
from reshard.lower.to_mpi.direct import Fetch as Fetch
from reshard.lower.to_mpi.direct import Near as Near
from reshard.lower.to_mpi.direct import device_of as device_of
from reshard.lower.to_mpi.direct import devices_by_id as devices_by_id
from reshard.lower.to_mpi.direct import fetched_across as fetched_across
from reshard.lower.to_mpi.direct import is_seated as is_seated
from reshard.lower.to_mpi.direct import is_unreplicated as is_unreplicated
from reshard.lower.to_mpi.direct import list_fetches as list_fetches
from reshard.lower.to_mpi.direct import list_served as list_served
from reshard.lower.to_mpi.direct import rank_of_devices as rank_of_devices
from reshard.lower.to_mpi.direct import ranks_of_seats as ranks_of_seats
from reshard.lower.to_mpi.direct import seat_of as seat_of
from reshard.lower.to_mpi.direct import seats_by_position
from reshard.lower.to_mpi.direct import served_across as served_across
from reshard.lower.to_mpi.listed import FIRST as FIRST
from reshard.lower.to_mpi.listed import SECOND as SECOND
from reshard.lower.to_mpi.listed import Form as Form
from reshard.lower.to_mpi.listed import fetched_as as fetched_as
from reshard.lower.to_mpi.listed import served_as as served_as
from reshard.lower.to_mpi.listed import tile_shapes as tile_shapes
from reshard.lower.to_mpi.schedule import NewSummand as NewSummand
from reshard.lower.to_mpi.schedule import Overwrite as Overwrite
from reshard.lower.to_mpi.schedule import PeerBlocks as PeerBlocks
from reshard.lower.to_mpi.schedule import Reduce as Reduce
from reshard.lower.to_mpi.schedule import Schedule as Schedule
from reshard.lower.to_mpi.schedule import SendReceive as SendReceive
from reshard.lower.to_mpi.schedule import SlotMessage as SlotMessage
from reshard.lower.to_mpi.schedule import StepMessages as StepMessages
from reshard.lower.to_mpi.schedule import schedule_device as schedule_device
from reshard.lower.to_mpi.stripes import NodePlace as NodePlace
from reshard.lower.to_mpi.stripes import Stripes as Stripes
from reshard.lower.to_mpi.stripes import lay_stripes as lay_stripes
from reshard.lower.to_mpi.stripes import most_stripes as most_stripes
from reshard.lower.to_mpi.stripes import number_of_groups as number_of_groups
from reshard.lower.to_mpi.stripes import ranks_of_nodes as ranks_of_nodes
from reshard.lower.to_mpi.stripes import stripes_received as stripes_received
from reshard.lower.to_mpi.stripes import stripes_sent as stripes_sent

CACHES = (
    devices_by_id,
    ranks_of_seats,
    seats_by_position,
    fold_dim,
    number_devices,
    *direct.CACHES,
    holders,
    shares_from,
    shares_of,
)
"""What is cached here, for those who measure without."""

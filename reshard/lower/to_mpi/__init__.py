"""Plans as MPI ranks see them: what one device sends, receives, copies and reduces, as blocks of flat tiles.

    schedule_device(plan, device)     a checked plan as one device runs it, step by step:
        StepMessages                    local copies, then rounds; for slices, gathers, all-to-alls, permutes, exchanges
        TableTurns                      rounds with as many peers as there are ranks, as columns
        SendReceive                     one round: at most one message sent and one received
        PeerBlocks                      one message: its peer and its blocks
        Reduce                          a reduce-scatter or an all-reduce of packed blocks
        NewSummand                      a tile of zeros with blocks of the operand in it; starts a sum
        Overwrite, SlotMessage          an exchange that overwrites a donated source, and its messages
    fetches_by_rank(source, ...)      all that a rank copies from the tiles of others to go straight to the target
    served_by_rank(source, ...)       all that others copy from its tile
    list_fetches, list_served         the same by seat, on one set of devices
    list_across, list_in_form         the same by device: between two sets of devices; in a turn of a relay or a view
    PeerTable                         the blocks of thousands of peers, as columns
    pick_boxes(layout, indices, ...)  who gives a rank the elements at some global indices, and where they lie
    lay_stripes(nodes, rank, ...)     messages between nodes joined by node: what a rank carries, and where its part is
    devices_by_id(mesh)               the device of every seat, that is, by ascending id
    ranks_of_seats(mesh, size)        the rank of every seat in a communicator; seat_of(...) the other way round
    is_unreplicated(layout)           whether each tile is on one rank only

`rank_schedule` has the steps of a plan, `fetches` what a rank fetches straight to the target, in a `peer_table`,
`picks` what it names by global indices,
`seats` which rank has which tile, and `stripes` who carries what between nodes. `tile_blocks` makes their blocks, which
are those of `geometry.blocks`.

Nothing here imports MPI. Schedules and fetches are plain data, and the same on every rank that computes them.
"""

from reshard.geometry.holders import holders
from reshard.geometry.overlap import shares_from, shares_of
from reshard.lower.to_mpi import fetches
from reshard.lower.to_mpi.fetches import FIRST as FIRST
from reshard.lower.to_mpi.fetches import SECOND as SECOND
from reshard.lower.to_mpi.fetches import Fetches as Fetches
from reshard.lower.to_mpi.fetches import MoveForm as MoveForm
from reshard.lower.to_mpi.fetches import fetches_by_rank as fetches_by_rank
from reshard.lower.to_mpi.fetches import is_unreplicated as is_unreplicated
from reshard.lower.to_mpi.fetches import list_across as list_across
from reshard.lower.to_mpi.fetches import list_fetches as list_fetches
from reshard.lower.to_mpi.fetches import list_in_form as list_in_form
from reshard.lower.to_mpi.fetches import list_served as list_served
from reshard.lower.to_mpi.fetches import served_by_rank as served_by_rank
from reshard.lower.to_mpi.peer_table import PeerTable as PeerTable
from reshard.lower.to_mpi.picks import Along as Along
from reshard.lower.to_mpi.picks import Box as Box
from reshard.lower.to_mpi.picks import PickedBox as PickedBox
from reshard.lower.to_mpi.picks import Picks as Picks
from reshard.lower.to_mpi.picks import join_neighbours as join_neighbours
from reshard.lower.to_mpi.picks import locate_indices as locate_indices
from reshard.lower.to_mpi.picks import measure_along as measure_along
from reshard.lower.to_mpi.picks import pick_boxes as pick_boxes
from reshard.lower.to_mpi.picks import read_request as read_request
from reshard.lower.to_mpi.picks import write_request as write_request
from reshard.lower.to_mpi.rank_schedule import NewSummand as NewSummand
from reshard.lower.to_mpi.rank_schedule import Overwrite as Overwrite
from reshard.lower.to_mpi.rank_schedule import PeerBlocks as PeerBlocks
from reshard.lower.to_mpi.rank_schedule import Reduce as Reduce
from reshard.lower.to_mpi.rank_schedule import Schedule as Schedule
from reshard.lower.to_mpi.rank_schedule import SendReceive as SendReceive
from reshard.lower.to_mpi.rank_schedule import SlotMessage as SlotMessage
from reshard.lower.to_mpi.rank_schedule import StepMessages as StepMessages
from reshard.lower.to_mpi.rank_schedule import TableTurns as TableTurns
from reshard.lower.to_mpi.rank_schedule import is_worth_staging as is_worth_staging
from reshard.lower.to_mpi.rank_schedule import number_both_ends
from reshard.lower.to_mpi.rank_schedule import schedule_device as schedule_device
from reshard.lower.to_mpi.seats import device_of as device_of
from reshard.lower.to_mpi.seats import devices_by_id as devices_by_id
from reshard.lower.to_mpi.seats import is_seated as is_seated
from reshard.lower.to_mpi.seats import rank_of_devices as rank_of_devices
from reshard.lower.to_mpi.seats import ranks_of_seats as ranks_of_seats
from reshard.lower.to_mpi.seats import seat_of as seat_of
from reshard.lower.to_mpi.seats import seats_by_position
from reshard.lower.to_mpi.stripes import NodePlaces as NodePlaces
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
    number_both_ends,
    *fetches.CACHES,
    holders,
    shares_from,
    shares_of,
)
"""What is cached here, for those who measure without."""

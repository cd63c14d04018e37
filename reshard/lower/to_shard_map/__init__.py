"""A program as the function that every device of a JAX mesh runs on its own tile.

tile_function              the function, for the inside of a `jax.shard_map` that is manual over all mesh axes
Beside                     what some programs take beside the source's tile
batch_function             the same for the tiles of several arrays whose steps share launches
shares_lie_in_order        whether XLA can run a program's in-place exchanges without copying the tile
lie_in_turn                whether the blocks of a tile lie in a TPU's memory as they travel
choose_part_form           how the parts of a step travel on a TPU
sent_as_it_lies            whether a TPU copies neither what an all-to-all sends nor its result more than once
writes_parts_over          whether a TPU writes the parts of a step in place straight into the tile
find_regions_on_tpu        where the parts of a step in place lie in a TPU's memory
choose_memory_order        the order of dims in a TPU's memory
make_unfilled              an array of which every element is written later
is_cut_in_place            whether a TPU cuts boxes out of a tile as it lies
count_padded_bytes         the bytes that an array takes there
measure_padding            how many times its own bytes these are
LANES, SUBLANES            what a TPU pads the minor dim of an array to a multiple of, and the dim before

Each instruction becomes one `jax.lax` collective, an exchange one `ppermute` a round, between local slices and
transposes. Whatever differs from device to device (the block, the box) is looked up by the device's position in a
small table, so that all devices run one program.

`run_program` goes through the launches, of one array or of several; `run_collectives` has a function for each
collective, `run_exchange` reads blocks and runs rounds, or slots in one buffer, and `run_rows` moves rows that lie
anywhere. `part_loops` runs the loop over parts, and the one that overwrites the tile; `part_writers` has the ways in
which parts are sent and written. `place` is a device's position on the mesh, and `tile_memory` has the digits of tiles
and how they lie in memory.
"""

from reshard.lower.to_shard_map.part_loops import find_regions_on_tpu as find_regions_on_tpu
from reshard.lower.to_shard_map.part_loops import writes_parts_over as writes_parts_over
from reshard.lower.to_shard_map.part_writers import choose_part_form as choose_part_form
from reshard.lower.to_shard_map.part_writers import lie_in_turn as lie_in_turn
from reshard.lower.to_shard_map.part_writers import sent_as_it_lies as sent_as_it_lies
from reshard.lower.to_shard_map.run_exchange import shares_lie_in_order as shares_lie_in_order
from reshard.lower.to_shard_map.run_program import Beside as Beside
from reshard.lower.to_shard_map.run_program import batch_function as batch_function
from reshard.lower.to_shard_map.run_program import check_scale as check_scale
from reshard.lower.to_shard_map.run_program import spread_scale as spread_scale
from reshard.lower.to_shard_map.run_program import tile_function as tile_function
from reshard.lower.to_shard_map.tile_memory import LANES as LANES
from reshard.lower.to_shard_map.tile_memory import SUBLANES as SUBLANES
from reshard.lower.to_shard_map.tile_memory import choose_memory_order as choose_memory_order
from reshard.lower.to_shard_map.tile_memory import count_padded_bytes as count_padded_bytes
from reshard.lower.to_shard_map.tile_memory import is_cut_in_place as is_cut_in_place
from reshard.lower.to_shard_map.tile_memory import make_unfilled as make_unfilled
from reshard.lower.to_shard_map.tile_memory import measure_padding as measure_padding

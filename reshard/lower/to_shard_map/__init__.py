"""A program as the function that every device of a JAX mesh runs on its own tile.

tile_function          the function, for the inside of a `jax.shard_map` that is manual over all mesh axes
Beside                 what some programs take beside the source's tile
batch_function         the same for the tiles of several arrays whose steps share launches
shares_lie_in_order    whether XLA can run a program's in-place exchanges without copying the tile
joins_in_one_copy      whether XLA:CPU joins the messages of an exchange in one copy
sent_as_it_lies        whether a TPU copies neither what an all-to-all sends nor its result more than once
regions_on_tpu         where the parts of a step in place lie in a TPU's memory
memory_order           the order of dims in a TPU's memory
in_place_of            whether a TPU cuts boxes out of a tile as it lies
padded_elements        the elements that an array takes there
LANES, SUBLANES        what a TPU pads the minor dim of an array to a multiple of, and the dim before

Each instruction becomes one `jax.lax` collective, an exchange one `ppermute` a round, between local slices and
transposes. Whatever differs from device to device (the block, the box) is looked up by the device's position in a
small table, so that all devices run one program.

`tpu_layout` says how arrays lie in a TPU's memory, `collectives` has a function for each collective, `exchange` the
rounds, `boxes` and `block_writes` what a message takes and where it is written, `lane_pairs` blocks of half a row of
lanes that travel in pairs, `joining` exchanges joined at their
end, `messages` the two halves of a crossing, `parts` the loop over parts, `overlap` the one in which a part is written
while the next one is on its way, `parts_in_place` the one that overwrites the tile, `scales` those of casts;
`run_program` goes through the steps, `run_batch` through those of several arrays.
"""

from reshard.lower.to_shard_map.block_writes import sent_as_it_lies as sent_as_it_lies
from reshard.lower.to_shard_map.exchange import joins_in_one_copy as joins_in_one_copy
from reshard.lower.to_shard_map.exchange_in_place import shares_lie_in_order as shares_lie_in_order
from reshard.lower.to_shard_map.parts_in_place import regions_on_tpu as regions_on_tpu
from reshard.lower.to_shard_map.run_program import Beside as Beside
from reshard.lower.to_shard_map.run_program import batch_function as batch_function
from reshard.lower.to_shard_map.run_program import tile_function as tile_function
from reshard.lower.to_shard_map.tpu_layout import LANES as LANES
from reshard.lower.to_shard_map.tpu_layout import SUBLANES as SUBLANES
from reshard.lower.to_shard_map.tpu_layout import in_place_of as in_place_of
from reshard.lower.to_shard_map.tpu_layout import memory_order as memory_order
from reshard.lower.to_shard_map.tpu_layout import padded_elements as padded_elements

"""Who reads what of stored tensors: `plan_reading`, which makes a `LoadPlan`.

as_read     the layout in which one tensor is read: near where it is wanted, in few runs, coded chunks whole
taken_parts the box of a tensor that moves take, outside of which nothing is read
packs       small tensors as one array
slabs       a large tensor in parts that a wave has room for
waves       all of a load: who reads what, in which wave, and the tree of moves of each
"""

from reshard.synth.reading.as_read import ReadOptions as ReadOptions
from reshard.synth.reading.as_read import choose_as_read as choose_as_read
from reshard.synth.reading.waves import plan_reading as plan_reading

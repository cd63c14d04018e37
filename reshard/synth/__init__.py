"""Which steps: the planner and the networks it plans for. Its plans are checked by their types."""

from reshard.synth.network import Link as Link
from reshard.synth.network import Network as Network
from reshard.synth.planner import plan as plan

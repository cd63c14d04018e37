"""`all_gather`: the devices of a group collect each other's tiles.

    mesh <x=4>, f32[{x}4, 4] -> f32[16, 4]

    dim   radix   before   after
     0      4     x        local    each device receives the other three values
     0      4     local    local
     1      4     local    local

Blocks arrive one after another. If the gathered digits lead the result's tile, as here, they arrive where they
belong; otherwise they arrive in a buffer as large as the result and are copied into place.
"""

from __future__ import annotations

from reshard.types.layout import Layout
from reshard.types.rules import tile_view
from reshard.types.rules.cost import Cost, StepMode, refusal, require_refinement, require_same_partial


def check_all_gather(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Held digits become local: with f devices in a group, each receives f - 1 tiles."""
    r = require_refinement("all_gather", operand, result)
    if r.sliced or r.swapped:
        raise refusal("all_gather", operand, result, "only held digits may change, and only to local")
    require_same_partial("all_gather", operand, result)
    tile = tile_view.before(operand, r).elements
    received = tile_view.after(result, r, tile_view.gather_order(r))
    scratch = 0 if received.in_place else operand.nbytes(received.elements)
    return Cost(operand.nbytes((r.pieces - 1) * tile), 1, scratch)

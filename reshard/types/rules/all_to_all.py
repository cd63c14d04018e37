"""`all_to_all`: sub-axes release digits and hold local ones instead; each device sends one block to each other one.

    mesh <x=4>, f32[{x}4, 16] -> f32[16, {x}4]

    dim   radix   before   after
     0      4     x        local    released
     0      4     local    local
     1      4     local    x        taken by the same sub-axis
     1      4     local    local

Each device keeps 1 of its 4 blocks and receives 3 of the same size. Here the blocks that leave are columns of the
tile, so they are packed before; the blocks that arrive are rows, so they arrive in place.
"""

from __future__ import annotations

from reshard.types.layout import Layout
from reshard.types.rules import tile_view
from reshard.types.rules.cost import Cost, StepMode, refusal, require_refinement, require_same_partial


def check_all_to_all(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Held digits become local, and local digits become held by the same sub-axes."""
    r = require_refinement("all_to_all", operand, result)
    order = tile_view.scatter_order(r)
    if r.swapped or set(order) != {digit.src for digit in r.gathered}:
        raise refusal(
            "all_to_all", operand, result, "the sub-axes that release digits must be those that take local ones"
        )
    require_same_partial("all_to_all", operand, result)
    sent, received = tile_view.before(operand, r, order), tile_view.after(result, r, order)
    block = sent.elements // sent.count
    packed = 0 if sent.in_place else sent.elements
    unpacked = 0 if received.in_place else received.elements
    scratch = _scratch(operand.nbytes(packed), operand.nbytes(unpacked), result.tile_bytes)
    return Cost(operand.nbytes(sent.elements - block), 1, scratch)


def _scratch(packed: int, unpacked: int, result: int) -> int:
    """Bytes beside operand and result while a tile is packed, sent, received and unpacked.

    Without unpacking, blocks arrive in the result itself, and only the packed operand is extra. With unpacking, the
    packed operand is freed before the result is made.
    """
    return max(packed + unpacked - result, unpacked) if unpacked else packed

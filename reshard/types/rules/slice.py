"""`slice`: each device keeps its share of a local digit. Nothing is sent.

    mesh <x=4>, f32[16, 4] -> f32[{x}4, 4]

    dim   radix   before   after
     0      4     local    x        each device keeps one of the four values
     0      4     local    local
     1      4     local    local

The sub-axes that take digits must be unused before: along a used one, devices hold different elements already.
"""

from __future__ import annotations

from reshard.types.layout import Layout
from reshard.types.rules.cost import FREE, Cost, StepMode, refusal, require_refinement, require_same_partial
from reshard.types.rules.tile_view import scatter_order


def check_slice(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Local digits become held by sub-axes that are not in use."""
    r = require_refinement("slice", operand, result)
    if r.gathered or r.swapped or set(scatter_order(r)) & r.used_before:
        raise refusal("slice", operand, result, "only local digits may change, and only to sub-axes not in use")
    require_same_partial("slice", operand, result)
    return FREE

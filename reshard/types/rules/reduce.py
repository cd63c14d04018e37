"""`reduce_scatter` and `all_reduce`: the devices along partial sub-axes combine their summands.

    mesh <x=4>, f32[16, 4] + sum{x} -> f32[{x}4, 4]           reduce_scatter

    dim   radix   before   after
     0      4     local    x        each device combines the summands of its own four rows
     0      4     local    local
     1      4     local    local

    mesh <x=4>, f32[16, 4] + sum{x} -> f32[16, 4]             all_reduce: no digit changes

An all-reduce costs a reduce-scatter followed by an all-gather.
"""

from __future__ import annotations

import math

from reshard.types.layout import Layout
from reshard.types.reductions import all_reduce_elements
from reshard.types.rules import tile_view
from reshard.types.rules.cost import Cost, StepMode, refusal, require_refinement


def check_reduce_scatter(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Partial sub-axes come to hold local digits: with f devices in a group, each receives (f - 1) / f of a tile."""
    r = require_refinement("reduce_scatter", operand, result)
    order = tile_view.scatter_order(r)
    scattered = set(order) == {factor.stride for factor in r.reduced}
    if r.gathered or r.swapped or r.started or not order or not scattered:
        raise refusal(
            "reduce_scatter", operand, result, "partial sub-axes must come to hold local digits, and nothing else"
        )
    sent = tile_view.before(operand, r, order)
    block = sent.elements // sent.count
    return Cost(operand.nbytes(sent.elements - block), 1, 0 if sent.in_place else operand.nbytes(sent.elements))


def check_all_reduce(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Partial sub-axes become replicated."""
    r = require_refinement("all_reduce", operand, result)
    if r.sliced or r.gathered or r.swapped or r.started or not r.reduced:
        raise refusal("all_reduce", operand, result, "partial sub-axes must become replicated, and nothing else")
    members = math.prod(factor.size for factor in r.reduced)
    elements = math.prod(operand.tile_shape)
    return Cost(operand.nbytes(all_reduce_elements(elements, members)), 1, 0)

"""`split_sum`: an array becomes partial; one summand keeps the data, the others are zero. Nothing is sent.

    mesh <x=4, y=2>, f32[{x}4] -> f32[16] + sum{x}{y}

    dim   radix   before   after
     0      4     x        local    the summand at x=2 has the elements 8 to 11, those at other x have zeros there
     0      4     local    local
                  -        y        y held nothing: the summand at y=0 keeps the data, the one at y=1 is all zeros

It undoes a reduction: all_reduce(split_sum(a)) = a where the sub-axes held nothing, as Shardy's
`replicated_to_unreduced`, and all_reduce(split_sum(a)) = all_gather(a) where they held digits, as its
`sharded_to_unreduced`. For a maximum, a minimum or a product, the identity of the operation stands for the zeros.

    digit before -> after    who has data                                      with x becoming partial
    x     -> local           the device whose coordinate is the digit's value
    x     -> z               devices with equal coordinates along x and z      z held nothing before
    local -> z               every device, its own part, as in a slice         z held nothing before
"""

from __future__ import annotations

from reshard.types.layout import Layout
from reshard.types.reductions import identity
from reshard.types.rules.cost import FREE, Cost, StepMode, refusal, require_refinement


def check_split_sum(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Sub-axes become partial; digits that change were held by these, or local."""
    r = require_refinement("split_sum", operand, result)
    started = {factor.stride for factor in r.started}
    moved = {d.src for d in r.digits if d.src != d.dst and d.src is not None}
    if not started or r.reduced or not moved <= started:
        why = "sub-axes must become partial, and only digits that they held, or local ones, may change"
        raise refusal("split_sum", operand, result, why)
    if identity(result.dtype, str(result.reduction)) is None:
        raise refusal(
            "split_sum",
            operand,
            result,
            f"no value of {result.dtype} leaves a {result.reduction} as it is, so nothing can fill the other summands",
        )
    return FREE

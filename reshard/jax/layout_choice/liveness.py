"""Which values of a step lie in memory, and until when: XLA fuses cheap operations into those that read them.

A cheap value that one fusion alone reads is in no memory, and what it is made of is needed until that fusion runs. One
that several read is stored, unless it is as cheap as a broadcast, which each repeats. Reshapes and transposes are
another reading of what they are made of.

    a = x * y      stored: the products below read it            (x * y) * 2, (x * y) + 1
    b = a * 2      in no memory: one fusion, that of c, reads it
    c = exp(b)
    d = a + 1
"""

from __future__ import annotations

from reshard.jax.layout_choice.step_flow import RETURN, StepFlow, name_operations

_REPEATED = name_operations("bitcast_convert broadcast_in_dim compare convert dynamic_slice iota slice")
_FUSED = _REPEATED | name_operations(
    "abs add and atan2 cbrt ceil clamp complex cosine divide exponential exponential_minus_one floor imag is_finite "
    "log log_plus_one logistic maximum minimum multiply negate not or popcnt power real reduce_precision remainder "
    "reverse round_nearest_afz round_nearest_even rsqrt select shift_left shift_right_arithmetic shift_right_logical "
    "sign sine sqrt subtract tan tanh xor"
)
_RELAID = name_operations("reshape transpose")
_FUSING = _FUSED | _RELAID | name_operations("reduce pad concatenate")


def find_stored(flow: StepFlow) -> frozenset[int]:
    """The values that lie in memory of their own."""
    stored = set[int]()
    # For a value that is not stored, the stored ones that it is fused into; -1 is an operation that fuses nothing.
    ends: dict[int, frozenset[int]] = {}
    # From the last on: what a value is fused into is known before it.
    for value in sorted(range(len(flow.values)), key=lambda each: flow.values[each].maker, reverse=True):
        maker = flow.values[value].maker
        name = flow.ops[maker].name if maker >= 0 else ""
        fused = set[int]()
        for reader, _ in flow.readers[value]:
            for made in flow.ops[reader].results if flow.ops[reader].name in _FUSING else ():
                fused |= {made} if made in stored else ends[made]
            if flow.ops[reader].name not in _FUSING:
                fused.add(-1)
        ends[value] = frozenset(fused)
        if name in _RELAID:  # What it is made of is stored for those who read it, but for what leaves a region.
            leaves = any(flow.ops[reader].name in RETURN for reader, _ in flow.readers[value])
        else:
            leaves = -1 in fused or name not in _FUSED or (len(fused) > 1 and name not in _REPEATED)
        if leaves:
            stored.add(value)
    return frozenset(stored)


def list_needs(flow: StepFlow, stored: frozenset[int]) -> dict[int, int]:
    """Until which position each operation needs its operands."""
    needs: dict[int, int] = {}
    # From the last on, as what is fused runs where its readers do.
    for at, op in sorted(flow.ops.items(), reverse=True):
        late = [needs[reader] for value in op.results if value not in stored for reader, _ in flow.readers[value]]
        needs[at] = max([at, *late])
    return needs

"""Which values of a step lie in memory, and until when: XLA fuses cheap operations into those that read them.

A cheap value whose readers can all make it for themselves is in no memory, and what it is made of is needed until the
last of them runs. Reshapes and transposes are another reading of what they are made of.
"""

from __future__ import annotations

from reshard.jax.layout_choice.step_flow import RETURN, StepFlow, name_operations

_COSTLY = name_operations(
    "atan2 cbrt cosine divide exponential exponential_minus_one log log_plus_one logistic power remainder rsqrt "
    "sine sqrt tan tanh"
)
_FUSED = name_operations(
    "abs add and bitcast_convert broadcast_in_dim ceil clamp compare complex convert dynamic_slice floor imag iota "
    "is_finite maximum minimum multiply negate not or popcnt real reduce_precision reverse round_nearest_afz "
    "round_nearest_even select shift_left shift_right_arithmetic shift_right_logical sign slice subtract xor"
)
_RELAID = name_operations("reshape transpose")
_FUSING_COPIES = _FUSED | _RELAID
_FUSING = _COSTLY | _FUSING_COPIES | name_operations("reduce pad concatenate")


def find_stored(flow: StepFlow) -> frozenset[int]:
    """The values that lie in memory of their own."""
    stored = set[int]()
    for value, each in enumerate(flow.values):
        name = flow.ops[each.maker].name if each.maker >= 0 else ""
        readers = {reader for reader, _ in flow.readers[value]}
        fusing = all(flow.ops[reader].name in _FUSING for reader in readers)
        relaid = name in _RELAID and flow.ops[each.maker].operands[0] in stored
        if relaid and not any(flow.ops[reader].name in RETURN for reader in readers):
            continue
        # XLA makes what is costly once, for one reader or for memory.
        if not fusing or (name not in _FUSING_COPIES and (name not in _COSTLY or len(readers) > 1)):
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

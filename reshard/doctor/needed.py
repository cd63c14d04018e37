"""Chains that surely receive no more than is needed, seen without inferring layouts.

Most collectives of a large program are such, as the gathers of weights in FSDP: one collective, whose result is used
as it is. Inferring the layouts of each would take most of the time of the pass.
"""

from __future__ import annotations

from collections.abc import Iterable

from reshard.doctor.chains import Chain
from reshard.doctor.dataflow.flow import Flow, HloValue

_FORMS = ("copy", "bitcast", "reshape", "transpose")
_MOVES = ("all_gather", "all_to_all")


def is_needed(chain: Chain, flow: Flow) -> bool:
    """Whether one collective makes the whole of what is used, from data of the same dtype.

    Where the data has another dtype before or after, a plan could move that, so layouts have to say.
    """
    if len(chain.collectives) != 1 or chain.collectives[0].kind not in _MOVES or len(chain.leaves) != 1:
        return False
    made = next((one for one in chain.values if one.name == chain.collectives[0].name), None)
    if made is None or made.array is None or not chain.results or _is_converted(made, flow):
        return False
    used = [form for value, forms in chain.results.items() for form in forms or (value,)]
    return _have_dtype(chain.values, made.array.dtype) and _are_as_large(used, made.array.elements)


def _is_converted(made: HloValue, flow: Flow) -> bool:
    """Whether a conversion makes what the collective takes."""
    operands = flow.operands(made)
    while len(operands) == 1 and operands[0].opcode in _FORMS:  # ends: each step goes back to an operand
        operands = flow.operands(operands[0])
    return len(operands) != 1 or operands[0].opcode == "convert"


def _have_dtype(values: Iterable[HloValue], dtype: str) -> bool:
    return all(value.array is not None and value.array.dtype == dtype for value in values)


def _are_as_large(values: Iterable[HloValue], elements: int) -> bool:
    return all(value.array is not None and value.array.elements >= elements for value in values)

"""The fragments that a proposal asks for: its plans, shifts and operations, with what each is used for."""

from __future__ import annotations

from dataclasses import replace

from reshard.doctor.op_layouts import OpReplacement
from reshard.doctor.proposals import Proposal
from reshard.doctor.replacements import Replacement
from reshard.hlo.splice import Use
from reshard.jax.xla_pass.fragments import FragmentKey, Key
from reshard.jax.xla_pass.op_fragments import OpFragmentKey, OutputKey
from reshard.jax.xla_pass.shift_fragments import ShiftKey


def asked_fragments(one: Proposal) -> list[tuple[Key, tuple[Use, ...]]]:
    """The fragments that a proposal asks for, and what each is used for: all shifts of a dtype are one fragment."""
    if one.moves is not None:
        return [_op_key(one, each) for each in one.replacements if isinstance(each, OpReplacement)]
    replacements = [each for each in one.replacements if isinstance(each, Replacement)]
    keys: list[tuple[Key, tuple[Use, ...]]] = []
    plans = iter(one.fate.plans)
    for each in replacements:
        if each.move is not None:
            keys.append((FragmentKey(next(plans), each.before, each.after, each.move.places, each.pick), each.uses))
    return keys + _shift_keys(replacements)


def _shift_keys(replacements: list[Replacement]) -> list[tuple[Key, tuple[Use, ...]]]:
    """The fragments that shift, one for each dtype."""
    keys: list[tuple[Key, tuple[Use, ...]]] = []
    for dtype in dict.fromkeys(each.dtype for each in replacements if each.shift is not None):
        alike = [(each, each.shift) for each in replacements if each.shift is not None and each.dtype == dtype]
        afters = tuple(each.after for each, _ in alike)
        key = ShiftKey(tuple(shift for _, shift in alike), alike[0][0].before, afters, dtype)
        uses = (replace(use, output=at) for at, (each, _) in enumerate(alike) for use in each.uses)
        keys.append((key, tuple(uses)))
    return keys


def _op_key(one: Proposal, each: OpReplacement) -> tuple[Key, tuple[Use, ...]]:
    """The fragment that runs an operation on rows, and what it is used for."""
    gather, *moves = one.fate.plans
    outputs = tuple(
        OutputKey(output.number, plan, output.order, output.after)
        for output, plan in zip(each.outputs, moves, strict=True)
    )
    indices = tuple(operand.index_dim for operand in each.inputs)
    uses = tuple(replace(use, output=at) for at, output in enumerate(each.outputs) for use in output.uses)
    return OpFragmentKey(each.op, indices, gather, each.before, each.places, outputs), uses

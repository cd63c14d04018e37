"""What the TPU compiler itself expects a module to take, outside of collectives: cycles of a TensorCore.

libtpu writes an estimate beside most kernels of an optimized module, in the backend configuration:

    copy(%p), backend_config={..., "window_config":{..., "estimated_cycles":"395157", ...}}

It shows what counts of bytes hide: loops of small slots, rearrangements within tiles of 8 x 128 elements, offsets that
are read from HBM (2,123 cycles each). It leaves out what runs beside a collective, and a few kernels have none: tiled
reshapes, and updates and asynchronous copies between HBM and on-chip memory (`estimates_cycles` tells).
"""

from __future__ import annotations

import re

from reshard.errors import NotationError
from reshard.hlo.executed_collectives import KINDS, trip_count
from reshard.hlo.instruction import Instruction
from reshard.hlo.module import Computation, Module
from reshard.types.whole import check_kind

_ESTIMATE = re.compile(r'"estimated_cycles":"?(\d+)')


def count_cycles(module: Module, computation: Computation | None = None) -> int:
    """The cycles that libtpu estimates for a run of the module, or of one of its computations, without collectives.

    A loop's body counts as often as it runs, once if that depends on data, and of a conditional its longest branch.

    >>> from reshard.hlo import parse
    >>> count_cycles(parse('''HloModule m
    ...
    ... ENTRY %main {
    ...   %p = f32[8,128]{1,0:T(8,128)} parameter(0)
    ...   %c = f32[8,128]{0,1:T(8,128)} copy(%p), backend_config={"window_config":{"estimated_cycles":"1200"}}
    ...   ROOT %d = f32[8,128]{1,0:T(8,128)} copy(%c), backend_config={"window_config":{"estimated_cycles":"300"}}
    ... }'''))
    1500
    """
    check_kind(module, Module, "module", "what hlo.parse returns", NotationError)
    inside = computation or module.entry
    return sum(instruction_cycles(module, inside, instruction) for instruction in inside.instructions)


def instruction_cycles(module: Module, inside: Computation, one: Instruction) -> int:
    """The estimated cycles of an instruction of the computation `inside` and of what it calls; 0 for a collective."""
    if one.opcode.removesuffix("-start").removesuffix("-done") in KINDS or one.opcode in ("parameter", "constant"):
        return 0
    if one.opcode == "while":
        body = module.computation(one.attributes.get("body", "").lstrip("%"))
        trips = trip_count(module, inside, one)
        return (1 if trips is None else trips) * count_cycles(module, body)
    called = [module.computation(name) for name in one.called]
    if one.opcode == "conditional":
        return max((count_cycles(module, branch) for branch in called), default=0)
    if one.opcode in ("call", "async-start"):
        return sum(count_cycles(module, computation) for computation in called)
    if any(each.opcode.removesuffix("-start") in KINDS for fused in called for each in fused.instructions):
        return 0  # A collective with the slices or the copies that it runs with.
    return sum(map(int, _ESTIMATE.findall(one.attributes.get("backend_config", ""))))


def estimates_cycles(one: Instruction) -> bool:
    """Whether the compiler has an estimate for the instruction itself."""
    return _ESTIMATE.search(one.attributes.get("backend_config", "")) is not None

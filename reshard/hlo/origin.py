"""The user's line for an instruction that may have none of its own.

XLA's partitioner and its later passes insert collectives without metadata, or with the name of an argument. What
such a collective moves was made for, or by, an instruction near to it that has a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from reshard.hlo.frames import Source
from reshard.hlo.text import Computation, Instruction, Module

_NEAR = 200  # Instructions looked at: in the programs tried, a line is within 10.
_THROUGH_NO_DATA = ("tuple", "parameter", "constant")
_WRAPS = ("fusion", "call", "async")


class Site(NamedTuple):
    """An instruction in its computation."""

    computation: Computation
    instruction: Instruction


def source_of(module: Module, sites: tuple[Site, ...]) -> Source:
    """The origin of the first site's instruction; the others are the instructions that call it, innermost first.

    First what it says itself, then what those say that only wrap it (a fusion, an asynchronous call), then what the
    nearest instructions say: users before operands, since a collective serves what uses it.
    """
    wrapped = list(_wrapping(sites))
    own = [found for site in wrapped if (found := _stated(module, site.instruction))]
    if placed := next((found for found in own if found.file), None):
        return replace(placed, op_name=own[0].op_name or placed.op_name)
    near = next(_near(module, wrapped), None)
    if near is None:
        return own[0] if own else Source("")
    return replace(near, op_name=own[0].op_name if own else near.op_name, exact=False)


def _wrapping(sites: tuple[Site, ...]) -> Iterator[Site]:
    yield sites[0]
    for site in sites[1:]:
        if not site.instruction.opcode.startswith(_WRAPS):
            return
        yield site


def _stated(module: Module, instruction: Instruction) -> Source | None:
    metadata = instruction.attributes.get("metadata") if "metadata=" in instruction.rest else None
    return module.frames.source(metadata) if metadata else None


def _near(module: Module, sites: Iterable[Site]) -> Iterator[Source]:
    """The origins with a line near to the sites, the nearest first."""
    for site in sites:
        seen, queue = {site.instruction.name}, [site.instruction]
        for instruction in queue:  # it grows: breadth first
            fresh = [near for near in _neighbours(site.computation, instruction) if near.name not in seen]
            seen.update(near.name for near in fresh)
            queue += fresh[: max(0, _NEAR - len(queue))]
            yield from (found for near in fresh for found in _lines(module, near))


def _neighbours(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    operands = (computation.by_name.get(name) for name in instruction.operands)
    for near in (*computation.users.get(instruction.name, ()), *operands):
        if near is not None and near.opcode not in _THROUGH_NO_DATA:
            yield near


def _lines(module: Module, instruction: Instruction) -> Iterator[Source]:
    """The lines that an instruction names, itself or, if it is a fusion, inside."""
    inside = [module.computation(name) for name in instruction.called] if instruction.opcode == "fusion" else []
    for one in (instruction, *(inner for computation in inside for inner in computation.instructions)):
        found = _stated(module, one)
        if found and found.file:
            yield found

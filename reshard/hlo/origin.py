"""Finds a line of the user's program for an instruction, even if it has none of its own.

XLA's partitioner and its later passes insert collectives without metadata, or with the name of an argument alone.
Such a collective serves a nearby instruction that has a line: one that uses its result, or made its operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from reshard.hlo.frames import Source
from reshard.hlo.module import Computation, Instruction, Module

_MOST_LOOKED_AT = 200  # instructions; in the programs tried, the nearest line is at most 10 away
_THROUGH_NO_DATA = ("tuple", "parameter", "constant")
_WRAPS = ("fusion", "call", "async")


class CallSite(NamedTuple):
    """An instruction in its computation."""

    computation: Computation
    instruction: Instruction


def source_of(module: Module, sites: tuple[CallSite, ...]) -> Source:
    """The origin of the first site's instruction; the other sites are its callers, innermost first.

    In this order: the instruction's own metadata; that of the callers that only wrap it (a fusion, an asynchronous
    call); that of the nearest instructions, users before operands, since a collective serves its users.
    """
    wrapped = list(_list_wrapping(sites))
    own = [source for site in wrapped if (source := _stated_source(module, site.instruction))]
    if with_line := next((source for source in own if source.file), None):
        return replace(with_line, op_name=own[0].op_name or with_line.op_name)
    near = next(_sources_nearby(module, wrapped), None)
    if near is None:
        return own[0] if own else Source("")
    return replace(near, op_name=own[0].op_name if own else near.op_name, exact=False)


def _list_wrapping(sites: tuple[CallSite, ...]) -> Iterator[CallSite]:
    """The first site, and the callers that do nothing but wrap it."""
    yield sites[0]
    for site in sites[1:]:
        if not site.instruction.opcode.startswith(_WRAPS):
            return
        yield site


def _stated_source(module: Module, instruction: Instruction) -> Source | None:
    """The origin in the instruction's own metadata."""
    metadata = instruction.metadata
    return module.frames.source(metadata) if metadata else None


def _sources_nearby(module: Module, sites: Iterable[CallSite]) -> Iterator[Source]:
    """The origins of nearby instructions that have a line, the nearest first."""
    for site in sites:
        seen, queue = {site.instruction.name}, [site.instruction]
        for instruction in queue:  # breadth first: the queue grows while it is walked
            fresh = [near for near in _list_neighbours(site.computation, instruction) if near.name not in seen]
            seen.update(near.name for near in fresh)
            queue += fresh[: max(0, _MOST_LOOKED_AT - len(queue))]
            yield from (source for near in fresh for source in _sources_with_line(module, near))


def _list_neighbours(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """The users of an instruction, then its operands."""
    operands = (computation.by_name.get(name) for name in instruction.operands)
    for near in (*computation.users.get(instruction.name, ()), *operands):
        if near is not None and near.opcode not in _THROUGH_NO_DATA:
            yield near


def _sources_with_line(module: Module, instruction: Instruction) -> Iterator[Source]:
    """The origins with a line of an instruction and, if it is a fusion, of the instructions inside."""
    fused = [module.computation(name) for name in instruction.called] if instruction.opcode == "fusion" else []
    for one in (instruction, *(inner for computation in fused for inner in computation.instructions)):
        source = _stated_source(module, one)
        if source and source.file:
            yield source

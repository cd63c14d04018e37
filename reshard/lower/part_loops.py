"""Which steps in parts share a loop: those that follow each other, the parts of each being those of the next.

    mesh <x=4, y=2>, f32[{x}{y}8, 3, 5] -> f32[{y}{x}8, 3, 5] -> f32[{y}32, 3, 5]     a permute and a gather, in 2 parts

    part 0   rows 0-3 of the tile   permuted, gathered, and written to rows 0-3, 8-11, ... of the result
    part 1   rows 4-7               rows 4-7, 12-15, ...

The tile between the two is never whole. Parts in place of each other share no loop: they lie in one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from reshard.lower.program import InParts, Instruction, part_of
from reshard.types.rules.parts import Part
from reshard.types.step import Step


def joined(instructions: Sequence[Instruction]) -> list[range]:
    """The numbers of all instructions, those that share a loop together."""
    return _runs([_follows(before, after) for before, after in pairwise(instructions)], len(instructions))


def _follows(before: Instruction, after: Instruction) -> bool:
    if not isinstance(before, InParts) or not isinstance(after, InParts) or before.in_place or after.in_place:
        return False
    return before.put == after.take


def loops(steps: Sequence[Step]) -> list[tuple[Step, ...]]:
    """All steps, those that share a loop together.

    >>> from reshard.types import Layout, Mesh
    >>> from reshard.types.rules.cost import StepMode
    >>> texts = ("f32[{x}{y}8, 3, 5]", "f32[{y}{x}8, 3, 5]", "f32[{y}32, 3, 5]")
    >>> ends = [Layout.parse(text, Mesh(x=4, y=2)) for text in texts]
    >>> two = [Step("permute", *ends[:2], StepMode(parts=2)), Step("all_gather", *ends[1:], StepMode(parts=2))]
    >>> [len(loop) for loop in loops(two)]
    [2]
    """
    parts = [None if step.mode.in_place else part_of(step) for step in steps]
    runs = _runs([share_loop(before, after) for before, after in pairwise(parts)], len(steps))
    return [tuple(steps[at] for at in run) for run in runs]


def share_loop(before: Part | None, after: Part | None) -> bool:
    """Whether the parts of a step are those of the next."""
    return before is not None and after is not None and before.put == after.take


def _runs(joins: Sequence[bool], count: int) -> list[range]:
    """All numbers up to a count; number n and n + 1 are together if entry n says so."""
    runs: list[range] = []
    for at in range(count):
        runs.append(range(runs.pop().start if at and joins[at - 1] else at, at + 1))
    return runs

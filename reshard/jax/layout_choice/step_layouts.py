"""The layouts in which the operations of a program read and write, as the choice hands them to whoever emits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.types.layout import Layout


@dataclass(frozen=True)
class OpLayouts:
    """In which layout an operation reads each operand and writes each result.

    For a loop, one layout for each value that it carries: operands, arguments of its blocks, what its body returns and
    results. For a conditional, `results` are also what its branches return. `anew` has the numbers of the operands
    that are moved for this operation alone.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    anew: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StepLayouts:
    """The layouts of a program's arguments and results, and those of each operation by its number in the program."""

    arguments: tuple[Layout, ...]
    results: tuple[Layout, ...]
    operations: Mapping[int, OpLayouts]

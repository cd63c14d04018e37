"""Index maps of compiled plans, which also move data by instructions that make new data in a user's program.

dynamic-update-slice    a received box is written to its place
conditional             devices that receive nothing skip the writing
reduce                  over dims of size 1: TPU's spelling of a reshape
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from reshard.doctor.dataflow.flow import HloValue, Scope
from reshard.doctor.dataflow.index_maps import IndexMaps, Points, Preimage, Untraceable, array_of, attribute_ints
from reshard.doctor.dataflow.scalars import Numbers


class FragmentMaps(IndexMaps):
    """The index maps of a module into which fragments were spliced."""

    moves: ClassVar[frozenset[str]] = IndexMaps.moves | {"dynamic-update-slice", "reduce", "conditional", "parameter"}

    def sources(self, value: HloValue) -> list[HloValue] | None:
        """The values whose elements a value has; see `IndexMaps.sources`."""
        operands = self.flow.operands(value)
        match value.opcode:
            case "dynamic-update-slice":
                known = all(self.scalars.at(offset) is not None for offset in operands[2:])
                return operands[:2] if known else None
            case "reduce":
                return operands[:1] if array_of(operands[0]).elements == array_of(value).elements else None
            case "conditional":
                return self._results(value)
            case "parameter":
                argument = self._argument(value)
                return None if argument is None else [argument]
            case _:
                return super().sources(value)

    def preimages(self, value: HloValue, points: Points) -> list[Preimage]:
        """Where points of a value were before its instruction; see `IndexMaps.preimages`."""
        match value.opcode:
            case "dynamic-update-slice":
                return list(self._of_update(value, points))
            case "reduce":
                return [self._of_reduction(value, points)]
            case "conditional":
                return list(self._of_conditional(value, points))
            case "parameter":
                return [Preimage(None, argument, points) for argument in self.sources(value) or []]
            case _:
                return super().preimages(value, points)

    def _results(self, value: HloValue) -> list[HloValue] | None:
        """What each branch of a conditional yields, if its predicate depends on the device alone."""
        if not isinstance(self.scalars.at(self.flow.operands(value)[0]), np.ndarray):
            return None
        branches = [self._branch(value, name) for name in value.instruction.called]
        roots = [None if branch is None else branch.computation.root for branch in branches]
        return [
            self.flow.origin(HloValue(branch, root.name, value.path))
            for branch, root in zip(branches, roots, strict=True)
            if branch is not None and root is not None
        ]

    def _branch(self, value: HloValue, name: str) -> Scope | None:
        """The region that a conditional runs."""
        named = (region for region in self.flow.regions if region.computation.name == name)
        return next((region for region in named if region.caller == value.site), None)

    def _argument(self, value: HloValue) -> HloValue | None:
        """The operand of a conditional that a parameter of one of its branches is."""
        caller = value.scope.caller
        if caller is None or caller.instruction.opcode != "conditional":
            return None
        branch = caller.instruction.called.index(value.scope.computation.name)
        return self.flow.origin(HloValue(caller.scope, caller.instruction.operands[branch + 1], value.path))

    def _of_update(self, value: HloValue, points: Points) -> Iterator[Preimage]:
        base, update, *offsets = self.flow.operands(value)
        before, part = array_of(base), array_of(update)
        index = points.indices.copy()
        for dim, offset in enumerate(offsets):
            starts = np.clip(self._known(value, offset).reshape(-1), 0, before.dims[dim] - part.dims[dim])
            index[dim] -= starts[points.device]
        sizes = np.array(part.dims, np.int64).reshape(-1, 1)
        inside = np.logical_and.reduce((index >= 0) & (index < sizes), axis=0)
        yield Preimage(inside, update, Points(points.device, index).at(inside))
        if not self.is_constant(base):
            yield Preimage(~inside, base, points.at(~inside))

    def _of_reduction(self, value: HloValue, points: Points) -> Preimage:
        operand = self.flow.operands(value)[0]
        rank, reduced = len(array_of(operand).dims), attribute_ints(value, "dimensions")
        index = np.zeros((rank, points.device.size), np.int64)
        index[[dim for dim in range(rank) if dim not in reduced]] = points.indices
        return Preimage(None, operand, points._replace(indices=index))

    def _of_conditional(self, value: HloValue, points: Points) -> Iterator[Preimage]:
        predicate, results = self.flow.operands(value)[0], self.sources(value) or []
        picked = self._known(value, predicate).reshape(-1)[points.device]
        if array_of(predicate).dtype == "pred":
            picked = 1 - picked  # The first branch is that of true.
        picked = np.where((picked < 0) | (picked >= len(results)), len(results) - 1, picked)
        for number, result in enumerate(results):
            where = picked == number
            yield Preimage(where, result, points.at(where))

    def _known(self, value: HloValue, scalar: HloValue) -> Numbers:
        numbers = self.scalars.at(scalar)
        if not isinstance(numbers, np.ndarray):
            raise Untraceable(f"{value.name}: {scalar.name} is not in the text")
        return numbers

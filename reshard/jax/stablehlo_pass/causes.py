"""Which of the user's shardings a place of the compiled program stands between: by data flow, without compiling.

A place has the line of an operation. From the operations of that line, values are followed both ways, through loops and
calls, up to the nearest constraint, argument or result that has a sharding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.doctor.places import Cause, Place
from reshard.doctor.report import Report
from reshard.hlo import Source
from reshard.jax.stablehlo_pass.shardy import CONSTRAINT
from reshard.jax.stablehlo_pass.user_shardings import (
    CONSTRAINTS,
    IN,
    OPERATION,
    UserSharding,
    find_entry,
    format_spec,
    read_frames,
    read_shardings,
)
from reshard.lower.to_stablehlo import Module, Operation, Value, ir, list_operations

_FARTHEST = 2000  # values: what is farther off hardly decides how an array is split


class SiteFlow:
    """The data flow of a module between the user's shardings.

    `after` has the values that are made of a value, `before` those that it is made of: a loop's arguments come of what
    enters it and of what its body yields, a function's of every call.
    """

    def __init__(self, module: Module) -> None:
        self.after: dict[object, list[object]] = defaultdict(list)
        self.before: dict[object, list[object]] = defaultdict(list)
        self.sites: dict[object, UserSharding] = {}
        self.made_at: dict[str, list[tuple[str, Operation]]] = defaultdict(list)
        operations = list_operations(module.operation)
        functions = {op.attributes["sym_name"].value: op for op in operations if op.name == "func.func"}
        for op in operations:
            self._link(op, functions)
            location: Any = op.location
            name = location.name_str if isinstance(location, ir.NameLoc) else ""
            for frame in read_frames(location)[:1]:
                self.made_at[f"{frame.file}:{frame.line}"].append((name, op))
        entry, constraints = find_entry(module), [op for op in operations if op.name == CONSTRAINT]
        block = entry.regions[0].blocks[0]
        for site in read_shardings(module):
            if site.derived or site.spec is None or not site.shape:
                continue
            kind, number = site.key
            if kind == CONSTRAINTS:
                self.sites[constraints[number].results[0]] = site
            elif kind == IN:
                self.sites[block.arguments[number]] = site
            else:
                self.sites[site.key] = site
                self._join([block.operations[len(block.operations) - 1].operands[number]], [site.key])

    def _join(self, sources: Iterable[object], targets: Sequence[object]) -> None:
        for source in sources:
            self.after[source] += targets
            for target in targets:
                self.before[target].append(source)

    def _link(self, op: Operation, functions: Mapping[str, Operation]) -> None:
        """Adds what an operation makes of its operands."""
        if op.name == "func.func":
            return
        called = functions.get(op.attributes["callee"].value) if op.name == "func.call" else None
        blocks = [block for holder in (called or op,) for region in holder.regions for block in region.blocks]
        for block in blocks:
            ends: list[Value] = list(block.operations[len(block.operations) - 1].operands)
            if len(block.arguments) == len(op.operands):
                for operand, argument in zip(op.operands, block.arguments, strict=True):
                    self._join([operand], [argument])
            if len(ends) == len(op.results):
                for number, (end, result) in enumerate(zip(ends, op.results, strict=True)):
                    self._join([end], [result])
                    if op.name == "stablehlo.while":
                        self._join([end], [block.arguments[number]])
        if not blocks or op.name == "stablehlo.reduce":
            self._join(op.operands, list(op.results))

    def find_causes(self, where: Source) -> tuple[Cause, ...]:
        """The nearest shardings on either side of what a line does, else its operation."""
        ops = self.made_at.get(f"{where.file}:{where.line}", [])
        named = [op for name, op in ops if name == where.op_name]
        starts = [result for op in named or [op for _, op in ops] for result in op.results]
        if not starts:
            return ()
        found = [site for links in (self.before, self.after) if (site := self._find_nearest(starts, links))]
        causes = [Cause(site.line, site.kind, f"{site.what}({format_spec(site.spec)})") for site in found]
        return tuple(dict.fromkeys(causes)) or (Cause(f"{where.file}:{where.line}", OPERATION, where.op_name),)

    def _find_nearest(self, starts: Sequence[object], links: Mapping[object, list[object]]) -> UserSharding | None:
        """The first sharding on the way from some values, breadth first."""
        queue, seen = list(starts), set(starts)
        for value in queue:
            if value in self.sites:
                return self.sites[value]
            if len(seen) < _FARTHEST:
                fresh = [one for one in dict.fromkeys(links.get(value, ())) if one not in seen]
                seen.update(fresh)
                queue += fresh
        return None


def name_causes(report: Report, module: Module) -> Report:
    """The report with the causes of its places, and of the arrays that are live at the peak."""
    flow = SiteFlow(module)
    known: dict[tuple[object, ...], tuple[Cause, ...]] = {}

    def find(where: Source) -> tuple[Cause, ...]:
        key = where.file, where.line, where.op_name
        if key not in known:
            known[key] = flow.find_causes(where)
        return known[key]

    places: list[Place] = [replace(place, causes=find(place.where)) for place in report.places]
    buffers = tuple(replace(buffer, causes=find(buffer.where)) for buffer in report.memory.buffers)
    return replace(report, places=tuple(places), memory=replace(report.memory, buffers=buffers))

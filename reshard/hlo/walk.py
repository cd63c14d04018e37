"""The collectives that a module executes, and the bytes that a device receives in each.

The bytes are those of the busiest device in one execution, in groups of f devices:

    all-gather           (f-1)/f of the result
    all-to-all           (f-1)/f of the operand, either one array or one operand per device
    reduce-scatter       (f-1)/f of the operand
    all-reduce           2 (f-1)/f of the operand, rounded up
    collective-permute   the result; 0 if every device sends only to itself
    collective-broadcast, ragged-all-to-all    the result, which is an upper bound
    several arrays combined in one collective  their sum

`forms` has the ways in which compilers spell a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from reshard.errors import NotationError
from reshard.hlo.forms import CollectiveForm, collective_form, permute_pairs
from reshard.hlo.frames import Source
from reshard.hlo.loops import trip_count
from reshard.hlo.module import Computation, Instruction, Module
from reshard.hlo.origin import CallSite, source_of
from reshard.hlo.replica_groups import Groups, parse_groups
from reshard.hlo.shapes import Array
from reshard.types.reductions import all_reduce_elements

_JOINS_PARTITIONS = ("all-gather", "all-reduce", "reduce-scatter")  # without global ids, over all partitions


@dataclass(frozen=True)
class Collective:
    """One collective of a module.

    `kind` is this project's name for it and `opcode` HLO's; `computation` is the name of the computation it is in.
    `times` is how often it executes in one run of the module, None if that depends on data. `group_size` devices
    exchange with one another; `groups` lists them, and is None for a permute (see `pairs`) and between slices.
    `received_bytes` counts one execution.
    `counted` is False in a branch of a conditional other than the one that receives most: only one of them runs.
    """

    kind: str
    opcode: str
    name: str
    computation: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    group_size: int
    groups: Groups | None
    received_bytes: int
    times: int | None
    source: Source
    instruction: Instruction = field(repr=False)
    counted: bool = True

    @property
    def dtype(self) -> str:
        """HLO's name of the element type (`bf16`): that of the first array, if several are combined."""
        return self.results[0].dtype

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The (source, target) pairs of a permute; empty for other kinds."""
        return permute_pairs(self.instruction)


class Total(NamedTuple):
    """How many collectives are executed, and the bytes that a device receives in them."""

    launches: int
    received_bytes: int


@dataclass(frozen=True)
class Traffic:
    """What a device receives in one run of a module, in all and by kind of collective.

    `exact` is False if a collective is in a loop whose trip count depends on data: it is then counted once.
    """

    launches: int
    received_bytes: int
    by_kind: Mapping[str, Total]
    exact: bool


def collectives(module: Module, every_branch: bool = False) -> tuple[Collective, ...]:
    """The collectives that a module executes, in program order, each once however it is spelled.

    Only the branch of a conditional that receives most counts, since only one of them runs. With `every_branch`, the
    collectives of the others are listed too, but not `counted`. Raises `NotationError` if replica
    groups or called computations cannot be read.

    >>> from reshard.hlo import parse
    >>> (gather,) = collectives(parse('''HloModule m
    ...
    ... ENTRY %main {
    ...   %p = f32[2]{0} parameter(0), metadata={op_name="v"}
    ...   ROOT %g = f32[8]{0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
    ... }'''))
    >>> gather.kind, gather.received_bytes, gather.group_size, gather.times
    ('all_gather', 24, 4, 1)
    """
    return tuple(_Walk(module, every_branch).run(module.entry, 1, ()))


def traffic(of: Module | Iterable[Collective]) -> Traffic:
    """Adds up the collectives of a module, or some that were read before.

    >>> from reshard.hlo import parse
    >>> traffic(parse('''HloModule m
    ...
    ... ENTRY %main {
    ...   %p = f32[2]{0} parameter(0)
    ...   %g = f32[8]{0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
    ...   ROOT %s = f32[8]{0} all-reduce(%g), channel_id=2, replica_groups=[1,4]<=[4], use_global_device_ids=true
    ... }''')).by_kind["all_reduce"]
    Total(launches=1, received_bytes=48)
    """
    executed = collectives(of) if isinstance(of, Module) else tuple(one for one in of if one.counted)
    by_kind: dict[str, Total] = {}
    for one in executed:
        before, times = by_kind.get(one.kind, Total(0, 0)), _or_once(one.times)
        by_kind[one.kind] = Total(before.launches + times, before.received_bytes + times * one.received_bytes)
    return Traffic(
        sum(total.launches for total in by_kind.values()),
        sum(total.received_bytes for total in by_kind.values()),
        MappingProxyType(by_kind),
        all(one.times is not None for one in executed),
    )


def _or_once(times: int | None) -> int:
    return 1 if times is None else times


class _Walk:
    """A walk through the computations that a module runs, starting at its entry."""

    def __init__(self, module: Module, every_branch: bool) -> None:
        self.module = module
        self.every_branch = every_branch
        self.communicates: dict[str, bool] = {}

    def run(self, computation: Computation, times: int | None, callers: tuple[CallSite, ...]) -> Iterator[Collective]:
        """The collectives of a computation that executes `times` times; `callers` go from the innermost outwards."""
        if any(site.computation is computation for site in callers):
            raise NotationError(f"HLO module {self.module.name}: computation {computation.name} calls itself")
        fused = bool(callers) and callers[0].instruction.opcode == "fusion"
        for instruction in computation.instructions:
            site = CallSite(computation, instruction)
            if form := collective_form(computation, instruction, fused):
                yield self._collective(form, site, times, callers)
            elif called := self._called(instruction):
                yield from self._inside(called, site, times, callers)

    def _called(self, instruction: Instruction) -> list[Computation]:
        """The called computations that have collectives; empty for a -done, which repeats what its -start calls."""
        if instruction.opcode.endswith(("-done", "-update")) or instruction.opcode == "constant":
            return []
        called = [self.module.computation(name) for name in instruction.called]
        return [computation for computation in called if self._has_collectives(computation)]

    def _has_collectives(self, computation: Computation) -> bool:
        if computation.name not in self.communicates:
            self.communicates[computation.name] = False  # ends the recursion; `run` refuses such a computation
            self.communicates[computation.name] = any(
                collective_form(computation, instruction, fused=False) or self._called(instruction)
                for instruction in computation.instructions
            )
        return self.communicates[computation.name]

    def _inside(
        self, called: list[Computation], site: CallSite, times: int | None, callers: tuple[CallSite, ...]
    ) -> Iterator[Collective]:
        """The collectives of the computations that an instruction calls."""
        opcode, outer = site.instruction.opcode, (site, *callers)
        if opcode == "while":
            yield from self._loop(called, site, times, outer)
        elif opcode == "conditional":
            branches = [list(self.run(computation, times, outer)) for computation in called]
            heaviest = max(branches, key=_weight)
            for branch in branches if self.every_branch else [heaviest]:
                yield from branch if branch is heaviest else (replace(one, counted=False) for one in branch)
        else:
            for computation in called:
                yield from self.run(computation, times, outer)

    def _loop(
        self, called: list[Computation], site: CallSite, times: int | None, outer: tuple[CallSite, ...]
    ) -> Iterator[Collective]:
        """The collectives of a loop's condition and body."""
        count = trip_count(self.module, site.computation, site.instruction)
        condition = site.instruction.attributes.get("condition", "").lstrip("%")
        for computation in called:
            last_check = int(computation.name == condition)  # the condition runs once more than the body
            runs = None if times is None or count is None else times * (count + last_check)
            yield from self.run(computation, runs, outer)

    def _collective(
        self, form: CollectiveForm, site: CallSite, times: int | None, callers: tuple[CallSite, ...]
    ) -> Collective:
        computation, instruction = site
        operands = (computation.by_name.get(name) for name in instruction.operands)
        groups = self._groups(instruction, form.opcode) if form.group_size is None else None
        size = groups.size if groups else form.group_size or 1
        return Collective(
            form.kind,
            instruction.opcode,
            instruction.name,
            computation.name,
            tuple(array for operand in operands if operand for array in operand.arrays if array.dtype != "token"),
            form.results,
            size,
            groups,
            _received(form.kind, sum(array.nbytes for array in form.results), size),
            times,
            source_of(self.module, (site, *callers)),
            instruction,
        )

    def _groups(self, instruction: Instruction, opcode: str) -> Groups:
        attributes, module = instruction.attributes, self.module
        if "replica_groups" not in attributes:
            raise NotationError(
                f"HLO module {module.name}: {instruction.opcode} {instruction.name} has no replica_groups; "
                "give the text of a whole, optimized module"
            )
        text = attributes["replica_groups"]
        if "device_ids" in attributes:  # part of a mesh's groups, but after a comma
            text = f"{text}, device_ids={attributes['device_ids']}"
        replicas = module.replica_count or (None if module.devices is None else 1)
        if "channel_id" not in attributes:
            return parse_groups(text, replicas)
        if opcode in _JOINS_PARTITIONS and attributes.get("use_global_device_ids") != "true":
            groups = parse_groups(text, replicas)
            if groups.count * groups.size <= (replicas or 1):  # if there are more ids than replicas, they are devices'
                return _with_partitions(groups, module.num_partitions or 1)
        return parse_groups(text, module.devices)


def _with_partitions(replicas: Groups, partitions: int) -> Groups:
    """Groups of devices from groups of replicas: every replica stands for all of its partitions."""

    def expand() -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(r * partitions + p for r in group for p in range(partitions)) for group in replicas.lists)

    return Groups(replicas.count, replicas.size * partitions, expand)


def _received(kind: str, result: int, size: int) -> int:
    """The bytes that a device receives in a collective with `result` bytes in groups of `size` devices."""
    match kind:
        case "all_gather" | "all_to_all":
            return result * (size - 1) // size
        case "reduce_scatter":
            return result * (size - 1)
        case "all_reduce":
            return all_reduce_elements(result, size)
        case _:
            return result if size > 1 else 0


def _weight(branch: list[Collective]) -> tuple[int, int]:
    total = traffic(branch)
    return total.received_bytes, total.launches

"""The collectives that a module executes, and the bytes that a device receives in each.

The bytes are those of the busiest device in one execution, in groups of f devices:

    all-gather           (f-1)/f of the result
    all-to-all           (f-1)/f of the operand, either one array or one operand per device
    reduce-scatter       (f-1)/f of the operand
    all-reduce           2 (f-1)/f of the operand, rounded up
    collective-permute   the result; 0 if every device sends only to itself
    collective-broadcast, ragged-all-to-all    the result, which is an upper bound
    several arrays combined in one collective  their sum

Compilers spell a collective in several ways. However it is spelled, it counts once.

    all-gather                                           synchronous: CPU, TPU
    all-gather-start ... all-gather-done                 GPU; on TPU only collective-permute
    async-start(...), calls=%wrapped ... async-done      an asynchronous collective inside a computation (GPU)
    all-to-all-start = ((operands), result, ...) ...     short for the same
    call-start ... call-update ... call-done             offloaded to a SparseCore (TPU v7)
    fusion(...), calls=%all-reduce-scatter               TPU: an all-reduce of which only slices are used, which is a
                                                         reduce-scatter
    fusion(...), with a custom-call AsyncCollectiveStart TPU v5e: each fusion that the collective overlaps with, and
                                                         AsyncCollectiveDone, repeats it with the same chain_id
    recv, with _xla_send_recv_source_target_pairs        GPU: a permute split into send and recv for pipelining
    recv, with _xla_megascale_transfer_type              TPU: a collective between slices, over the network; its
                                                         target is {1,2}x{0:3} (slices x chips of each), or {{a,b},...}
                                                         or {{a->b},...} with ids 100000 * slice + chip

The synchronous spellings and those of TPU (v5e, v5p, v6e, v7; one, two and four slices) are copied from the output of
jax 0.10.2 and 0.12.0.1. Those of GPU follow XLA's parser and documentation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from reshard.errors import NotationError, quoted, shortened
from reshard.geometry.blocks import list_strides
from reshard.hlo.instruction import Array, Instruction
from reshard.hlo.module import CallSite, Computation, Module, Source, source_of
from reshard.types.notation.hlo import IdRun, list_iota_runs, list_run_ids
from reshard.types.reductions import all_reduce_elements
from reshard.types.whole import check_kind, read_items, whole, written

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "all-gather": "all_gather",
        "all-to-all": "all_to_all",
        "collective-permute": "permute",
        "reduce-scatter": "reduce_scatter",
        "all-reduce": "all_reduce",
        "ragged-all-to-all": "ragged_all_to_all",
        "collective-broadcast": "broadcast",
    }
)
"""HLO's opcode of each collective, and this project's name for it."""

_BETWEEN_SLICES = {kind.upper(): kind for kind in KINDS.values()} | {"ONE_TO_ONE": "permute"}
_LOOKED_THROUGH = ("bitcast", "reshape", "copy", "convert", "get-tuple-element")
_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_SLICES = re.compile(r'_xla_megascale_target="?\{\{?([^}]*)\}')
_SENT = re.compile(r'_xla_send_recv_source_target_pairs="?(\{\{.*?\}\})')
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_ELSEWHERE = re.compile(r"\{(\d+),(?!\1\})\d+\}")


class CollectiveForm(NamedTuple):
    """A collective as one instruction spells it; `group_size` is None if `replica_groups` have to be read for it."""

    kind: str
    opcode: str
    results: tuple[Array, ...]
    group_size: int | None = None


def collective_form(computation: Computation, instruction: Instruction, fused: bool) -> CollectiveForm | None:
    """The collective that an instruction performs or starts; None for any other, such as the end of an async pair.

    `fused` says whether the computation is the body of a fusion.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "recv":
        return _recv_form(instruction)
    kind = KINDS.get(opcode)
    if kind is None:
        return None
    results = instruction.results
    if "chain_id=" in instruction.attributes.get("frontend_attributes", ""):
        # All but the first fusion of a chain repeat the collective that the first one has started.
        users = _users_through_views(computation, instruction)
        if not any(user.attributes.get("custom_call_target") == '"AsyncCollectiveStart"' for user in users):
            return None
    if kind == "permute":
        return CollectiveForm(kind, opcode, results, _count_partners(_pairs_text(instruction)))
    if kind == "all_reduce" and fused and not instruction.root:  # Of which nothing but slices is used.
        users = _users_through_views(computation, instruction)
        slices = tuple(array for user in users for array in user.arrays)
        if slices and all(user.opcode == "dynamic-slice" for user in users):
            return CollectiveForm("reduce_scatter", opcode, slices)
    return CollectiveForm(kind, opcode, results)


def read_permute_pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """The (source, target) pairs of a permute."""
    return tuple((int(source), int(target)) for source, target in _PAIR.findall(_pairs_text(instruction)))


def _pairs_text(instruction: Instruction) -> str:
    pairs = _SENT.search(instruction.attributes.get("frontend_attributes", ""))
    return pairs[1] if pairs else instruction.attributes.get("source_target_pairs", "")


def _count_partners(pairs: str) -> int:
    """2 if any device sends to another device, else 1."""
    return 2 if _ELSEWHERE.search(pairs) else 1


def _users_through_views(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """The users of an instruction, directly or through views; a view that is the computation's root counts as one."""
    users: list[Instruction] = []
    queue, seen = [instruction], {instruction.name}
    while queue:  # ends: each user is looked through once
        for user in computation.users.get(queue.pop().name, ()):
            if user.opcode not in _LOOKED_THROUGH or user.root:
                users.append(user)
            elif user.name not in seen:
                seen.add(user.name)
                queue.append(user)
    return users


def _recv_form(instruction: Instruction) -> CollectiveForm | None:
    """The collective that a recv is the receiving half of; None if it receives from the host."""
    results, said = instruction.results, instruction.attributes.get("frontend_attributes", "")
    if transfer := _MEGASCALE.search(said):
        if transfer[1] not in _BETWEEN_SLICES:
            raise NotationError(
                f"HLO instruction {instruction.name}: a transfer between slices of type {transfer[1]} is not known; "
                f"known are {', '.join(_BETWEEN_SLICES)}"
            )
        # How many slices it joins: 2 for the target `1,2`, 4 for `0:3`, 2 for `100000,300000` or a pair.
        target, slices = _SLICES.search(said), 2
        if target is not None and "->" not in target[1]:
            ends = [part.partition(":") for part in target[1].split(",")]
            if not all(first.strip().isdigit() and (last or first).strip().isdigit() for first, _, last in ends):
                raise NotationError(f"HLO instruction {instruction.name}: its slices {target[1][:80]!r} are no numbers")
            slices = sum(int(last or first) - int(first) + 1 for first, _, last in ends)
        return CollectiveForm(_BETWEEN_SLICES[transfer[1]], "recv", results, slices)
    if pairs := _SENT.search(said):
        return CollectiveForm("permute", "recv", results, _count_partners(pairs[1]))
    return None


# Replica groups: the devices that exchange data in a collective, in each of XLA's spellings.
#
#     groups = "{{" id {"," id} "}" {"," "{" ... "}"} "}"                    an explicit list
#            | "{}"                                                          one group of all devices
#            | "[" count "," size "]" ids                                    the rows of an iota
#            | "mesh[" 'axis' "=" size {...} "]" [", device_ids=(" ids ")"] "{" used {"," used} "}"
#     ids    = ["<="] "[" sizes "]" ["T(" permutation ")"] | id {"," id}
#     used   = 'axis' [":(" before ")" size]
#
# `{'y','x'}` joins the devices that differ along y or x, y major; `'x':(2)4` is the factor of 4 of axis x that
# follows a prefix of 2. A pod has thousands of devices, so groups are kept as digits (sizes and strides) and are listed
# on first use.


_LISTED = re.compile(r"\{\s*(?:\{[\d,\s]*\}\s*,?\s*)*\}")
_GROUP = re.compile(r"\{([\d,\s]+)\}")
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=(.*)")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:\s*,\s*device_ids=\((.*)\))?\s*\{(.*)\}")
_AXIS = re.compile(r"['\"]?([^'\"=,:\s]+)['\"]?=(\d+)")
_USED = re.compile(r"['\"]?([^'\"=,:\s]+)['\"]?(?::\((\d+)\)(\d+))?(?:,\s*|$)")
_IOTA_IDS = re.compile(r"(?:<=)?\[([\d,\s]+)\](?:T\(([\d,\s]+)\))?$")


_MOST_LISTED = 1 << 22
"""Devices of the largest groups, as in `Layout.from_hlo`: the ids of 16 million take 5 s and 1.5 GB to list."""


@dataclass(frozen=True, eq=False)
class Groups:
    """`count` groups, the largest of `size` devices; `lists` has the device ids of each, made on first use."""

    count: int
    size: int
    expand: Callable[[], tuple[tuple[int, ...], ...]] = field(repr=False)

    @cached_property
    def lists(self) -> tuple[tuple[int, ...], ...]:
        """The device ids of each group."""
        return self.expand()


def parse_groups(text: str, devices: int | None) -> Groups:
    """Reads the value of a `replica_groups` attribute.

    `devices` is the number of devices that `{}` stands for, None if it is unknown. Raises `NotationError` for text in
    none of the spellings, for more devices than can be listed, and for `{}` if `devices` is None.

    >>> parse_groups("[2,4]<=[4,2]T(1,0)", None).lists
    ((0, 2, 4, 6), (1, 3, 5, 7))
    >>> parse_groups("mesh['x'=4,'y'=2] {'x':(1)2,'y'}", None).lists
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise NotationError(f"HLO replica groups {quoted(text)} are not text; give a str")
    if devices is not None and whole(devices, 1) is None:
        raise NotationError(f"the number of devices {quoted(devices)}: give a whole number of at least 1, or None")
    if any(written(number) is None for number in re.findall(r"\d+", text)):
        raise _too_many_devices(text)
    if _LISTED.fullmatch(text):
        lists = tuple(_read_ints(group) for group in _GROUP.findall(text))
        if any(not group for group in lists):
            raise _unreadable_groups(text)
        if lists:
            return Groups(len(lists), max(map(len, lists)), lambda: lists)
        if devices is None:
            raise NotationError(
                f"HLO replica groups {shortened(text)}: they mean all devices, and the header does not say how many; "
                "keep num_partitions=8 (or replica_count=8) in the HloModule line"
            )
        if devices > _MOST_LISTED:
            raise _too_many_devices(text)
        return Groups(1, devices, lambda: (tuple(range(devices)),))
    if iota := _IOTA.fullmatch(text):
        count, size = int(iota[1]), int(iota[2])
        return _regular_groups(text, iota[3], [IdRun(size, count)], [IdRun(1, size)])
    if mesh := _MESH.fullmatch(text):
        return _mesh_groups(text, *mesh.groups())
    raise _unreadable_groups(text)


def _mesh_groups(text: str, axes: str, order: str | None, used: str) -> Groups:
    """Groups along factors of mesh axes: the used factors number the members, all others the groups."""
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    if 0 in sizes.values():
        raise _unreadable_groups(text)
    strides = dict(zip(sizes, list_strides(tuple(sizes.values())), strict=True))
    cuts = {name: {1, size} for name, size in sizes.items()}  # where used factors begin and end, as prefixes
    inner: list[tuple[str, int, int]] = []
    for name, before, size in _USED.findall(used):
        low = int(before or 1)
        high = low * int(size or sizes.get(name, 0))
        if not high or sizes.get(name, 0) % high:
            raise _unreadable_groups(text)
        cuts[name].update((low, high))
        inner.append((name, low, high))
    taken = {(name, low) for name, low, _ in inner}
    every = [(name, low, high) for name, ends in cuts.items() for low, high in pairwise(sorted(ends))]
    # The factor of an axis between two prefixes is a digit of the positions.
    outer, members = (
        [IdRun(strides[name] * (sizes[name] // high), high // low) for name, low, high in factors]
        for factors in ([one for one in every if one[:2] not in taken], inner)
    )
    return _regular_groups(text, order or f"[{math.prod(sizes.values())}]", outer, members)


def _regular_groups(text: str, order: str, outer: Sequence[IdRun], inner: Sequence[IdRun]) -> Groups:
    """Groups of positions in an order of device ids, which is a list or a transposed iota.

    The `outer` digits number the groups, the `inner` ones the members of each.
    """
    listed: Sequence[int] | None = None
    runs: Sequence[IdRun] = ()
    if iota := _IOTA_IDS.fullmatch(order):
        sizes = _read_ints(iota[1])
        permutation = _read_ints(iota[2]) if iota[2] else tuple(range(len(sizes)))
        if sorted(permutation) != list(range(len(sizes))):
            raise _unreadable_groups(text)
        runs = list_iota_runs(sizes, permutation)
        total = math.prod(sizes)
    elif re.fullmatch(r"[\d,\s]+", order):
        listed = _read_ints(order)
        total = len(listed)
    else:
        raise _unreadable_groups(text)
    count, size = (math.prod(run.size for run in side) for side in (outer, inner))
    if total != count * size:
        raise _unreadable_groups(text)
    if total > _MOST_LISTED:
        raise _too_many_devices(text)

    def expand() -> tuple[tuple[int, ...], ...]:
        ids, members = list_run_ids(runs) if listed is None else listed, list_run_ids(inner)
        return tuple(tuple(ids[first + at] for at in members) for first in list_run_ids(outer))

    return Groups(count, size, expand)


def _read_ints(text: str) -> tuple[int, ...]:
    """The numbers between commas; raises `NotationError` for numbers that none separates."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise _unreadable_groups(text) from None


def _too_many_devices(text: str) -> NotationError:
    return NotationError(
        f"HLO replica groups {quoted(text)}: they are over more devices than the {_MOST_LISTED} that can be listed; "
        "give the module of a real machine"
    )


def _unreadable_groups(text: str) -> NotationError:
    return NotationError(
        f"HLO replica groups {text[:120]!r}: write {{{{0,1}},{{2,3}}}}, [2,4]<=[4,2]T(1,0) "
        "or mesh['x'=4,'y'=2] {'x'}, over each device once"
    )


# The walk through what a module executes.


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
        if not self.results:
            raise NotationError(f"HLO instruction {self.name}: it yields no array; give a module as XLA prints it")
        return self.results[0].dtype

    @property
    def is_combined(self) -> bool:
        """Whether it is one array of a sum of several, which are launched together; see `hlo.combined`."""
        return self.instruction.part is not None

    @property
    def launches(self) -> int:
        """1; 0 for an array of a combined sum that is not its first."""
        part = self.instruction.part
        return 0 if part is not None and part.at else 1

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The (source, target) pairs of a permute; empty for other kinds."""
        return read_permute_pairs(self.instruction)


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
    check_kind(module, Module, "module", "what hlo.parse returns", NotationError)
    return _list_executed(module, every_branch, with_sources=True)


def _list_executed(module: Module, every_branch: bool = False, with_sources: bool = False) -> tuple[Collective, ...]:
    """The collectives of a module; to find their lines takes most of the time, so who only counts does without."""
    try:
        return tuple(_Walk(module, every_branch, with_sources).run(module.entry, 1, ()))
    except RecursionError:
        raise NotationError(
            f"HLO module {module.name}: its computations call each other hundreds of levels deep; give a module as XLA "
            "prints it"
        ) from None


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
    if isinstance(of, Module):
        of = _list_executed(of)
    given = tuple(of) if isinstance(of, list | tuple) else read_items(of)
    if given is None or not all(isinstance(one, Collective) for one in given):
        raise NotationError(f"{quoted(of)} is no module; give what hlo.parse returns, or a list of its collectives")
    executed = tuple(one for one in given if one.counted)
    by_kind: dict[str, Total] = {}
    for one in executed:
        before, times = by_kind.get(one.kind, Total(0, 0)), (1 if one.times is None else one.times)
        by_kind[one.kind] = Total(
            before.launches + times * one.launches, before.received_bytes + times * one.received_bytes
        )
    return Traffic(
        sum(total.launches for total in by_kind.values()),
        sum(total.received_bytes for total in by_kind.values()),
        MappingProxyType(by_kind),
        all(one.times is not None for one in executed),
    )


class _Walk:
    """A walk through the computations that a module runs, starting at its entry."""

    def __init__(self, module: Module, every_branch: bool, with_sources: bool) -> None:
        self.module = module
        self.every_branch = every_branch
        self.with_sources = with_sources
        self.communicates: dict[str, bool] = {}

    def run(self, computation: Computation, times: int | None, callers: tuple[CallSite, ...]) -> Iterator[Collective]:
        """The collectives of a computation that executes `times` times; `callers` go from the innermost outwards."""
        if any(site.computation is computation for site in callers):
            raise NotationError(f"HLO module {self.module.name}: computation {computation.name} calls itself")
        fused = bool(callers) and callers[0].instruction.opcode == "fusion"
        for instruction in computation.instructions:
            outer = (CallSite(computation, instruction), *callers)
            if form := collective_form(computation, instruction, fused):
                yield self._collective(form, outer, times)
            elif called := self._called(instruction):
                yield from self._inside(called, outer, times)

    def _called(self, instruction: Instruction) -> list[Computation]:
        """The called computations that have collectives; empty for a -done, which repeats what its -start calls."""
        if instruction.opcode.endswith(("-done", "-update")) or instruction.opcode == "constant":
            return []
        with_collectives: list[Computation] = []
        for computation in map(self.module.computation, instruction.called):
            name = computation.name
            if name not in self.communicates:
                self.communicates[name] = False  # ends the recursion; `run` refuses such a computation
                self.communicates[name] = any(
                    collective_form(computation, one, fused=False) or self._called(one)
                    for one in computation.instructions
                )
            if self.communicates[name]:
                with_collectives.append(computation)
        return with_collectives

    def _inside(
        self, called: list[Computation], outer: tuple[CallSite, ...], times: int | None
    ) -> Iterator[Collective]:
        """The collectives of the computations that the innermost site calls."""
        inside, caller = outer[0]
        if caller.opcode == "conditional":
            branches = [list(self.run(computation, times, outer)) for computation in called]
            totals = [traffic(branch) for branch in branches]
            heaviest = max(range(len(branches)), key=lambda at: (totals[at].received_bytes, totals[at].launches))
            for at, branch in enumerate(branches):
                if at == heaviest:
                    yield from branch
                elif self.every_branch:
                    yield from (replace(one, counted=False) for one in branch)
            return
        count = trip_count(self.module, inside, caller) if caller.opcode == "while" else 1
        condition = caller.attributes.get("condition", "").lstrip("%") if caller.opcode == "while" else None
        for computation in called:
            last_check = int(computation.name == condition)  # the condition runs once more than the body
            runs = None if times is None or count is None else times * (count + last_check)
            yield from self.run(computation, runs, outer)

    def _collective(self, form: CollectiveForm, outer: tuple[CallSite, ...], times: int | None) -> Collective:
        computation, instruction = outer[0]
        made = (computation.by_name.get(name) for name in instruction.operands)
        operands = tuple(array for operand in made if operand for array in operand.arrays if array.dtype != "token")
        groups = self._groups(instruction, form, operands) if form.group_size is None else None
        size = groups.size if groups else form.group_size or 1
        result = sum(array.nbytes for array in form.results)
        match form.kind:
            case "all_gather" | "all_to_all":
                received = result * (size - 1) // size
            case "reduce_scatter":
                received = result * (size - 1)
            case "all_reduce":
                before = 0 if instruction.part is None else instruction.part.bytes_before
                received = all_reduce_elements(before + result, size) - all_reduce_elements(before, size)
            case _:
                received = result if size > 1 else 0
        return Collective(
            form.kind,
            instruction.opcode,
            instruction.name,
            computation.name,
            operands,
            form.results,
            size,
            groups,
            received,
            times,
            source_of(self.module, outer) if self.with_sources else Source(""),
            instruction,
        )

    def _groups(self, instruction: Instruction, form: CollectiveForm, operands: tuple[Array, ...]) -> Groups:
        attributes, module = instruction.attributes, self.module
        text = attributes.get("replica_groups", "{}")
        if "device_ids" in attributes:  # part of a mesh's groups, but after a comma
            text = f"{text}, device_ids={attributes['device_ids']}"
        count = module.devices
        if count is None:
            # XLA leaves the counts out of a header where they are 1. People leave out any, and the groups as well: then
            # the shapes of a gather or a scatter say how many devices there are.
            sides = sorted(sum(array.elements for array in side) for side in (operands, form.results))
            count = 1
            if form.kind in ("all_gather", "reduce_scatter") and sides[0] and sides[1] % sides[0] == 0:
                count = sides[1] // sides[0]
        replicas = module.replica_count or (count if module.devices is None else 1)
        if "channel_id" not in attributes:
            return parse_groups(text, replicas)
        if form.opcode in _JOINS_PARTITIONS and attributes.get("use_global_device_ids") != "true":
            groups, partitions = parse_groups(text, replicas), module.num_partitions or 1
            if groups.count * groups.size <= (replicas or 1):  # if there are more ids than replicas, they are devices'
                if groups.count * groups.size * partitions > _MOST_LISTED:
                    raise _too_many_devices(text)
                # Every replica stands for all of its partitions.
                return Groups(
                    groups.count,
                    groups.size * partitions,
                    lambda: tuple(
                        tuple(replica * partitions + at for replica in group for at in range(partitions))
                        for group in groups.lists
                    ),
                )
        return parse_groups(text, count)


# The trip counts of while loops.
#
# On CPU and GPU, XLA writes the trip count into `backend_config`. On TPU it does not; there it is inferred for loops of
# the form
#
#     start     %t = (s32[], f32[8]) tuple(%zero, %v)                                 counter: element 0, from 0
#     condition %i = get-tuple-element(%p), index=0; compare(%i, %twelve), direction=LT       while it is below 12
#     body      %next = add(%i, %one); tuple(%next, ...)                              by 1: 12 iterations
#
# The three constants may have been copied, or be carried along as another element of the tuple.


_KNOWN = re.compile(r'known_trip_count"?\s*[:=]\s*\{"?n"?\s*[:=]\s*"?(\d+)')
_INTEGER = re.compile(r"-?\d+")
_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")
_INCLUSIVE = {"LT": 0, "LE": 1, "GT": 0, "GE": 1}


def trip_count(module: Module, inside: Computation, loop: Instruction) -> int | None:
    """How often the body of `loop`, a while in the computation `inside`, runs; None if that is not known.

    >>> from reshard.hlo import parse
    >>> module = parse('''HloModule m
    ...
    ... %condition {
    ...   %p = (s32[], f32[8]) parameter(0)
    ...   %i = s32[] get-tuple-element(%p), index=0
    ...   %twelve = s32[] constant(12)
    ...   ROOT %less = pred[] compare(%i, %twelve), direction=LT
    ... }
    ...
    ... %body {
    ...   %q = (s32[], f32[8]) parameter(0)
    ...   %j = s32[] get-tuple-element(%q), index=0
    ...   %v = f32[8] get-tuple-element(%q), index=1
    ...   %five = s32[] constant(5)
    ...   %next = s32[] add(%j, %five)
    ...   ROOT %t = (s32[], f32[8]) tuple(%next, %v)
    ... }
    ...
    ... ENTRY %main {
    ...   %zero = s32[] constant(0)
    ...   %v = f32[8] parameter(0)
    ...   %start = (s32[], f32[8]) tuple(%zero, %v)
    ...   ROOT %loop = (s32[], f32[8]) while(%start), condition=%condition, body=%body
    ... }''')
    >>> trip_count(module, module.entry, module.entry.by_name["loop"])
    3
    """
    for each, kind in ((module, Module), (inside, Computation), (loop, Instruction)):
        check_kind(each, kind, "loop", "a module of hlo.parse, one of its computations, and its loop", NotationError)
    if known := _KNOWN.search(loop.attributes.get("backend_config", "")):
        return int(known[1])
    return _Loop(module, inside, loop).count()


class _Loop:
    """A while loop: the tuple that it starts with, its condition and its body."""

    def __init__(self, module: Module, inside: Computation, loop: Instruction) -> None:
        self.inside = inside
        self.condition, self.body = (
            module.computation(loop.attributes.get(key, "").lstrip("%")) for key in ("condition", "body")
        )
        self.start = inside.by_name.get(loop.operands[0]) if loop.operands else None

    def count(self) -> int | None:
        """How often the counter steps until the condition, `compare(counter, bound)`, fails."""
        root = _behind_copies(self.condition, self.condition.root)
        if root is None or root.opcode != "compare" or len(root.operands) != 2:
            return None
        direction = root.attributes.get("direction", "")
        counter, bound = (_behind_copies(self.condition, self.condition.by_name.get(name)) for name in root.operands)
        if direction not in _INCLUSIVE or counter is None or bound is None:
            return None
        at, limit = _element_read(self.condition, counter), self._constant(self.condition, bound)
        if at is None or limit is None:
            return None
        first, step = self._initial(at), self._step(at)
        if first is None or not step or (step > 0) != (direction in ("LT", "LE")):
            return None
        distance = (limit - first if step > 0 else first - limit) + _INCLUSIVE[direction]
        return max(0, -(-distance // abs(step)))

    def _constant(self, computation: Computation, instruction: Instruction | None) -> int | None:
        """The integer that an instruction of the condition or the body yields in every iteration."""
        origin = _behind_copies(computation, instruction)
        value, at = _integer_of(origin), _element_read(computation, origin)
        # What the body passes on unchanged has the value that the loop starts with.
        invariant = value is None and at is not None and _element_read(self.body, self._next(at)) == at
        return self._initial(at) if invariant and at is not None else value

    def _initial(self, at: int) -> int | None:
        """The integer in element `at` of the tuple that the loop starts with."""
        return _integer_of(_behind_copies(self.inside, self._element(self.inside, self.start, at)))

    def _next(self, at: int) -> Instruction | None:
        """The instruction that computes element `at` for the next iteration."""
        return _behind_copies(self.body, self._element(self.body, self.body.root, at))

    def _step(self, at: int) -> int | None:
        """The constant that the body adds to the element."""
        update = self._next(at)
        if update is None or update.opcode not in ("add", "subtract") or len(update.operands) != 2:
            return None
        left, right = (_behind_copies(self.body, self.body.by_name.get(name)) for name in update.operands)
        if _element_read(self.body, left) != at:
            left, right = right, left if update.opcode == "add" else None
        step = self._constant(self.body, right)
        if _element_read(self.body, left) != at or step is None:
            return None
        return step if update.opcode == "add" else -step

    @staticmethod
    def _element(computation: Computation, made: Instruction | None, at: int) -> Instruction | None:
        """The instruction that a tuple has as its element `at`."""
        if made is None or made.opcode != "tuple" or at >= len(made.operands):
            return None
        return computation.by_name.get(made.operands[at])


def _behind_copies(computation: Computation, instruction: Instruction | None) -> Instruction | None:
    """The instruction that made the value, behind any copies."""
    for _ in computation.instructions:  # ends: copies that copy each other, in damaged text, are not followed for ever
        if instruction is None or instruction.opcode not in _SAME or not instruction.operands:
            break
        instruction = computation.by_name.get(instruction.operands[0])
    return instruction


def _integer_of(instruction: Instruction | None) -> int | None:
    """The value of an integer constant; None for any other instruction."""
    if instruction is None or instruction.opcode != "constant":
        return None
    literal = _INTEGER.fullmatch(instruction.literal)
    return int(literal[0]) if literal else None


def _element_read(computation: Computation, instruction: Instruction | None) -> int | None:
    """The element of the computation's parameter that an instruction reads; None if it reads none."""
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    source = computation.by_name.get(instruction.operands[0]) if instruction.operands else None
    index = _INTEGER.fullmatch(instruction.attributes.get("index", ""))
    return int(index[0]) if index and source is not None and source.opcode == "parameter" else None

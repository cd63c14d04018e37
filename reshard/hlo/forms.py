"""The spellings of one collective in HLO text. However it is spelled, a collective counts once.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from reshard.errors import NotationError, quoted, shortened
from reshard.hlo.module import Array, Computation, Instruction
from reshard.types.whole import MOST_DEVICES, whole, written

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
_VIEWS = ("bitcast", "reshape", "copy", "convert", "get-tuple-element")
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
    if kind is None or _continues_chain(computation, instruction):
        return None
    results = instruction.results
    if kind == "permute":
        return CollectiveForm(kind, opcode, results, _partners(_pairs_text(instruction)))
    if kind == "all_reduce" and fused and (slices := _only_slices(computation, instruction)):
        return CollectiveForm("reduce_scatter", opcode, slices)
    return CollectiveForm(kind, opcode, results)


def permute_pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """The (source, target) pairs of a permute."""
    return tuple((int(source), int(target)) for source, target in _PAIR.findall(_pairs_text(instruction)))


def _pairs_text(instruction: Instruction) -> str:
    pairs = _SENT.search(instruction.rest)
    return pairs[1] if pairs else instruction.attributes.get("source_target_pairs", "")


def _partners(pairs: str) -> int:
    """2 if any device sends to another device, else 1."""
    return 2 if _ELSEWHERE.search(pairs) else 1


def _continues_chain(computation: Computation, instruction: Instruction) -> bool:
    """Whether the instruction repeats a collective that an earlier fusion of its chain has started."""
    if "chain_id=" not in instruction.attributes.get("frontend_attributes", ""):
        return False
    return not any('"AsyncCollectiveStart"' in user.rest for user in _users_through_views(computation, instruction))


def _only_slices(computation: Computation, instruction: Instruction) -> tuple[Array, ...]:
    """The slices of the result, if nothing else uses it; else none."""
    users = _users_through_views(computation, instruction)
    sliced = not instruction.root and all(user.opcode == "dynamic-slice" for user in users)
    return tuple(array for user in users for array in user.arrays) if sliced else ()


def _users_through_views(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """The users of an instruction, directly or through views; a view that is the computation's root counts as one."""
    users: list[Instruction] = []
    queue = [instruction]
    while queue:  # ends: the uses form an acyclic graph
        for user in computation.users.get(queue.pop().name, ()):
            (queue if user.opcode in _VIEWS and not user.root else users).append(user)
    return users


def _recv_form(instruction: Instruction) -> CollectiveForm | None:
    """The collective that a recv is the receiving half of; None if it receives from the host."""
    results = instruction.results
    if transfer := _MEGASCALE.search(instruction.rest):
        if transfer[1] not in _BETWEEN_SLICES:
            raise NotationError(
                f"HLO instruction {instruction.name}: a transfer between slices of type {transfer[1]} is not known; "
                f"known are {', '.join(_BETWEEN_SLICES)}"
            )
        slices = _slice_count(_SLICES.search(instruction.rest))
        return CollectiveForm(_BETWEEN_SLICES[transfer[1]], "recv", results, slices)
    if pairs := _SENT.search(instruction.rest):
        return CollectiveForm("permute", "recv", results, _partners(pairs[1]))
    return None


def _slice_count(target: re.Match[str] | None) -> int:
    """How many slices a transfer joins: 2 for the target `1,2`, 4 for `0:3`, 2 for `100000,300000` or a pair."""
    if target is None or "->" in target[1]:
        return 2
    ends = (part.partition(":") for part in target[1].split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


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


class StridedDigit(NamedTuple):
    """The `size` numbers 0, `stride`, 2 `stride`, ..."""

    size: int
    stride: int


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
        raise _too_many(text)
    if _LISTED.fullmatch(text):
        return _listed(text, devices)
    if iota := _IOTA.fullmatch(text):
        count, size = int(iota[1]), int(iota[2])
        return _regular(text, _ids(text, iota[3]), [StridedDigit(count, size)], [StridedDigit(size, 1)])
    if mesh := _MESH.fullmatch(text):
        return _mesh(text, mesh[1], mesh[2], mesh[3])
    raise _unreadable(text)


def _listed(text: str, devices: int | None) -> Groups:
    lists = tuple(tuple(map(int, group.split(","))) for group in _GROUP.findall(text))
    if lists:
        return Groups(len(lists), max(map(len, lists)), lambda: lists)
    if devices is None:
        raise NotationError(
            f"HLO replica groups {shortened(text)}: they mean all devices, and the header does not say how many; "
            "keep num_partitions=8 (or replica_count=8) in the HloModule line"
        )
    if devices > MOST_DEVICES:
        raise _too_many(text)
    return Groups(1, devices, lambda: (tuple(range(devices)),))


def _mesh(text: str, axes: str, order: str | None, used: str) -> Groups:
    """Groups along factors of mesh axes: the used factors number the members, all others the groups."""
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    strides = _strides(tuple(sizes.values()))
    factored = {
        name: _FactoredAxis(size, stride, {1, size})
        for (name, size), stride in zip(sizes.items(), strides, strict=True)
    }
    inner: list[StridedDigit] = []
    taken: set[tuple[str, int]] = set()
    for name, before, size in _USED.findall(used):
        low = int(before or 1)
        high = low * int(size or sizes.get(name, 0))
        if not high or sizes.get(name, 0) % high:
            raise _unreadable(text)
        factored[name].cuts.update((low, high))
        taken.add((name, low))
        inner.append(factored[name].digit(low, high))
    outer = [
        axis.digit(low, high)
        for name, axis in factored.items()
        for low, high in pairwise(sorted(axis.cuts))
        if (name, low) not in taken
    ]
    total = math.prod(sizes.values())
    return _regular(text, _ids(text, order) if order else _Ids(total, lambda: range(total)), outer, inner)


class _FactoredAxis(NamedTuple):
    """A mesh axis, the stride of its coordinate, and the prefixes at which its used factors begin and end."""

    size: int
    stride: int
    cuts: set[int]

    def digit(self, low: int, high: int) -> StridedDigit:
        """The factor of the axis between two prefixes."""
        return StridedDigit(high // low, self.stride * (self.size // high))


class _Ids(NamedTuple):
    """`size` device ids in a given order, listed on demand."""

    size: int
    expand: Callable[[], Sequence[int]]


def _regular(text: str, ids: _Ids, outer: Sequence[StridedDigit], inner: Sequence[StridedDigit]) -> Groups:
    """Groups of positions in `ids`: the `outer` digits number the groups, the `inner` ones the members of each."""
    count, size = (math.prod(digit.size for digit in digits) for digits in (outer, inner))
    if ids.size != count * size:
        raise _unreadable(text)
    if ids.size > MOST_DEVICES:
        raise _too_many(text)

    def expand() -> tuple[tuple[int, ...], ...]:
        order, members = ids.expand(), _numbers(inner)
        return tuple(tuple(order[first + at] for at in members) for first in _numbers(outer))

    return Groups(count, size, expand)


def _ids(text: str, order: str) -> _Ids:
    """Reads device ids: a list, or a transposed iota."""
    if iota := _IOTA_IDS.fullmatch(order):
        sizes = _ints(iota[1])
        permutation = _ints(iota[2]) if iota[2] else tuple(range(len(sizes)))
        if sorted(permutation) != list(range(len(sizes))):
            raise _unreadable(text)
        strides = _strides(sizes)
        digits = [StridedDigit(sizes[at], strides[at]) for at in permutation]
        return _Ids(math.prod(sizes), lambda: _numbers(digits))
    if re.fullmatch(r"[\d,\s]+", order):
        listed = _ints(order)
        return _Ids(len(listed), lambda: listed)
    raise _unreadable(text)


def _strides(sizes: Sequence[int]) -> list[int]:
    """The stride of each dim, the last varying fastest."""
    return [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]


def _numbers(digits: Sequence[StridedDigit]) -> list[int]:
    """All numbers with these digits, major to minor."""
    numbers = [0]
    for size, stride in digits:
        numbers = [number + step * stride for number in numbers for step in range(size)]
    return numbers


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _too_many(text: str) -> NotationError:
    return NotationError(
        f"HLO replica groups {quoted(text)}: they are over more devices than the {MOST_DEVICES} that can be listed; "
        "give the module of a real machine"
    )


def _unreadable(text: str) -> NotationError:
    return NotationError(
        f"HLO replica groups {text[:120]!r}: write {{{{0,1}},{{2,3}}}}, [2,4]<=[4,2]T(1,0) "
        "or mesh['x'=4,'y'=2] {'x'}, over each device once"
    )

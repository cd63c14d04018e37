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

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from reshard.errors import NotationError
from reshard.hlo.module import Computation, Instruction
from reshard.hlo.shapes import Array

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

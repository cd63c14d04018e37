"""The forms in which compilers spell one collective, each of which counts once.

    all-gather                                           synchronous: CPU, TPU
    all-gather-start ... all-gather-done                 GPU; on TPU collective-permute
    async-start(...), calls=%wrapped ... async-done      an asynchronous collective inside a computation (GPU)
    all-to-all-start = ((operands), result, ...) ...     the same, abbreviated
    call-start ... call-update ... call-done             offloaded to a sparse core (TPU v7)
    fusion(...), calls=%all-reduce-scatter               TPU: an all-reduce of which only slices are used is a
                                                         reduce-scatter
    fusion(...), with a custom-call AsyncCollectiveStart TPU v5e: the collective stands again, with its chain_id, in
                                                         each fusion that it overlaps with and in AsyncCollectiveDone
    recv, with _xla_send_recv_source_target_pairs        GPU: a permute taken apart for pipelining
    recv, with _xla_megascale_transfer_type              TPU: a collective between slices, over the network; its
                                                         target is {1,2}x{0:3} (slices x chips in each), or {{a,b},...}
                                                         or {{a->b},...} with ids 100000 * slice + chip

The synchronous forms and those of TPU (v5e, v5p, v6e, v7; one slice, two, four) are as jax 0.10.2 and 0.12.0.1 print
them. Those of GPU follow XLA's parser and documents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from reshard.errors import NotationError
from reshard.hlo.text import Array, Computation, Instruction

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
"""The project's name of each of HLO's collectives."""

_BETWEEN_SLICES = {kind.upper(): kind for kind in KINDS.values()} | {"ONE_TO_ONE": "permute"}
_VIEWS = ("bitcast", "reshape", "copy", "convert", "get-tuple-element")
_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_SLICES = re.compile(r'_xla_megascale_target="?\{\{?([^}]*)\}')
_SENT = re.compile(r'_xla_send_recv_source_target_pairs="?(\{\{.*?\}\})')
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_ELSEWHERE = re.compile(r"\{(\d+),(?!\1\})\d+\}")


class Spelled(NamedTuple):
    """A collective as an instruction spells it; `group_size` is None where `replica_groups` say it."""

    kind: str
    opcode: str
    results: tuple[Array, ...]
    group_size: int | None = None


def spelled(computation: Computation, instruction: Instruction, fused: bool) -> Spelled | None:
    """What collective an instruction is or starts, inside a fusion or not; None for one that only goes on with it."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "recv":
        return _received_apart(instruction)
    kind = KINDS.get(opcode)
    if kind is None or _goes_on(computation, instruction):
        return None
    results = instruction.results
    if kind == "permute":
        return Spelled(kind, opcode, results, _partners(_pairs(instruction)))
    if kind == "all_reduce" and fused and (slices := _slices(computation, instruction)):
        return Spelled("reduce_scatter", opcode, slices)
    return Spelled(kind, opcode, results)


def pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """Sources and targets of a permute."""
    return tuple((int(source), int(target)) for source, target in _PAIR.findall(_pairs(instruction)))


def _pairs(instruction: Instruction) -> str:
    sent = _SENT.search(instruction.rest)
    return sent[1] if sent else instruction.attributes.get("source_target_pairs", "")


def _partners(pairs: str) -> int:
    """2 if any device sends to another, else 1."""
    return 2 if _ELSEWHERE.search(pairs) else 1


def _goes_on(computation: Computation, instruction: Instruction) -> bool:
    """Whether it continues or ends a chain of fusions that one collective overlaps with."""
    if "chain_id=" not in instruction.attributes.get("frontend_attributes", ""):
        return False
    return not any('"AsyncCollectiveStart"' in user.rest for user in _used_by(computation, instruction))


def _slices(computation: Computation, instruction: Instruction) -> tuple[Array, ...]:
    """The slices that are all that is used of it; none if anything else is used."""
    users = _used_by(computation, instruction)
    sliced = not instruction.root and all(user.opcode == "dynamic-slice" for user in users)
    return tuple(array for user in users for array in user.arrays) if sliced else ()


def _used_by(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """What uses an instruction, through views of it; a view that is the result of the computation uses it too."""
    found: list[Instruction] = []
    queue = [instruction]
    while queue:  # ends: no instruction uses itself, even through others
        for user in computation.users.get(queue.pop().name, ()):
            (queue if user.opcode in _VIEWS and not user.root else found).append(user)
    return found


def _received_apart(instruction: Instruction) -> Spelled | None:
    """The collective whose receiving half a recv is; one that receives from the host is none."""
    results = instruction.results
    if between := _MEGASCALE.search(instruction.rest):
        if between[1] not in _BETWEEN_SLICES:
            raise NotationError(
                f"HLO instruction {instruction.name}: a transfer between slices of type {between[1]} is not known; "
                f"known are {', '.join(_BETWEEN_SLICES)}"
            )
        return Spelled(_BETWEEN_SLICES[between[1]], "recv", results, _joined(_SLICES.search(instruction.rest)))
    if sent := _SENT.search(instruction.rest):
        return Spelled("permute", "recv", results, _partners(sent[1]))
    return None


def _joined(target: re.Match[str] | None) -> int:
    """How many slices a transfer joins: those of `1,2` or `0:3`, the devices of `100000,300000`, or a pair."""
    if target is None or "->" in target[1]:
        return 2
    ends = (part.partition(":") for part in target[1].split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)

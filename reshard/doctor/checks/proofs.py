"""What was proved once: how values are made of a leaf, as digests, and the pairs of them that have the same elements.

    %c = f32[8,4] copy(%leaf)
    %g = f32[32,4] all-gather(%c), dimensions={0}       a digest of opcode, shape, attributes and the operand's digest

A program often has the same chain many times, and many programs have it. Two values of the same digest take the same
elements of their leaves, on every device, by the same instructions. So what is proved of a pair of them holds for every
pair of the same digests, in this program and in others: it need not be traced again.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from reshard.doctor.batch_ops import batch_op
from reshard.doctor.dataflow.flow import HloValue, Numbering
from reshard.doctor.dataflow.index_maps import FRAGMENT_MOVES, IndexMaps
from reshard.doctor.dataflow.replicas import Replicas
from reshard.doctor.dataflow.scalars import Numbers
from reshard.hlo import Instruction

_CALLS = ("parameter", "conditional")
_REDUCTIONS = ("all-reduce", "reduce-scatter")
_FOLLOWED = FRAGMENT_MOVES.difference(_CALLS).union(("constant", "iota", *_REDUCTIONS))
_OPS = ("fft", "sort", "custom-call")
_FIRST_SCALAR = {"dynamic-slice": (1, None), "dynamic-update-slice": (2, None), "select": (0, 1), "conditional": (0, 1)}
_NOT_SAID = frozenset((
    "metadata", "sharding", "calls", "channel_id", "control-predecessors", "to_apply", "called_computations",
    "true_computation", "false_computation", "branch_computations",
))  # fmt: skip


Key = tuple[bytes, bytes, int]
"""The digests of the old and the new value, and the number of devices."""


class _Made(NamedTuple):
    """How a value is made: a description of the instruction, and the values that it is made of."""

    description: tuple[object, ...]
    inputs: tuple[HloValue, ...] = ()


class Signatures:
    """Digests of how the values of a module are made of one leaf."""

    def __init__(self, maps: IndexMaps, numbering: Numbering, leaf: HloValue) -> None:
        self.maps = maps
        self.numbering = numbering
        self.leaf = leaf
        self._known: dict[HloValue, bytes | None] = {}

    def of(self, value: HloValue) -> bytes | None:
        """The digest of a value; None if anything but the leaf goes into it, or an instruction is unknown."""
        value = self.maps.flow.origin(value)
        waiting: dict[HloValue, _Made | None] = {}
        stack = [value]
        while stack:  # ends: each value is put aside once, and known afterwards
            one = stack[-1]
            if one in self._known:
                stack.pop()
                continue
            if one not in waiting:
                made = waiting[one] = self._made(one)
                stack += () if made is None else (each for each in made.inputs if each not in self._known)
                continue
            self._known[one] = self._digest(waiting[one])
        return self._known[value]

    def _digest(self, made: _Made | None) -> bytes | None:
        parts = [] if made is None else [self._known.get(one) for one in made.inputs]
        if made is None or None in parts:
            return None
        return hashlib.blake2b(repr((made.description, parts)).encode(), digest_size=16).digest()

    def _made(self, value: HloValue) -> _Made | None:
        """How a value is made; None if that is not known."""
        sources = self.maps.sources(value)
        is_leaf = value == self.leaf or (sources is None and self.numbering.of(value) == self.numbering.of(self.leaf))
        if is_leaf:
            return _Made(("leaf", repr(self.leaf.array), self.maps.is_constant(self.leaf)))
        instruction = value.instruction
        if value.opcode == "parameter":
            return None if sources is None else _Made(("argument",), tuple(sources))
        if value.opcode not in (*_FOLLOWED, *_OPS, "conditional"):
            return None
        if value.opcode in _OPS and batch_op(self.maps.flow.module, value.scope, instruction) is None:
            return None
        operands = self.maps.flow.operands(value)
        first, last = _FIRST_SCALAR.get(value.opcode, (0, 0))
        numbers = [self._numbers(one) for one in operands[first:last]]
        if None in numbers:
            return None
        description = (value.opcode, value.path, instruction.shape, self._said(instruction), numbers)
        if value.opcode == "conditional":
            return None if sources is None else _Made(description, tuple(sources))
        return _Made(description, (*operands[:first], *(() if last is None else operands[last:])))

    def _numbers(self, value: HloValue) -> object:
        """The numbers of an offset or a predicate, on every device; None if they are not known."""
        numbers = self.maps.scalars.at(value)
        if not isinstance(numbers, np.ndarray):
            return None
        return numbers.shape, hashlib.blake2b(numbers.tobytes(), digest_size=16).digest(), repr(value.array)

    def _said(self, instruction: Instruction) -> tuple[object, ...]:
        """What an instruction says beside its name and its operands, and what the computations say that it calls."""
        literal = instruction.literal if instruction.opcode == "constant" else ""
        attributes = {key: text for key, text in instruction.attributes.items() if key not in _NOT_SAID}
        if instruction.opcode != "custom-call":
            attributes.pop("backend_config", None)
        if instruction.opcode == "conditional":  # What its branches yield is followed.
            return literal, tuple(sorted(attributes.items()))
        computations = self.maps.flow.module.computations
        lines = tuple(
            (one.name, one.root, one.opcode, one.shape, one.operands, one.literal, *_without_metadata(one))
            for name in instruction.called
            for one in (computations[name].instructions if name in computations else ())
        )
        return literal, tuple(sorted(attributes.items())), lines or instruction.called


def _without_metadata(instruction: Instruction) -> list[tuple[str, str]]:
    return [(key, text) for key, text in instruction.attributes.items() if key != "metadata"]


class Proofs:
    """What was proved of pairs of values, by their digests: which devices must have equal tiles of the leaf."""

    def __init__(self) -> None:
        self._pairs: dict[Key, Numbers] = {}

    def hold(self, key: Key | None, leaf: HloValue, replicas: Replicas) -> bool:
        """Whether it was proved that two values have the same elements, and what it took of the leaf holds here too."""
        pairs = None if key is None else self._pairs.get(key)
        return pairs is not None and not replicas.differ(leaf, *np.divmod(pairs, replicas.devices)).any()

    def add(self, key: Key | None, one: Numbers, other: Numbers, devices: int) -> None:
        """Records that two values have the same elements if each device of `one` has the same tile as that of
        `other`.
        """
        if key is not None:
            pairs = (one * devices + other)[one != other]
            self._pairs[key] = np.flatnonzero(np.bincount(pairs, minlength=1))

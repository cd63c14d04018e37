"""An HloInstructionProto as something that can be edited, and what is read of many without decoding them.

The numbers of the fields are those of XLA's `hlo.proto` and `xla_data.proto`. Everything that has no name here is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from reshard.hlo import wire
from reshard.hlo.wire import ProtoMessage

_STARTERS = ("while", "conditional", "call")
_ENCODED_STARTERS = tuple(opcode.encode() for opcode in _STARTERS)


class _Shape:
    LAYOUT = 5


class _Instruction:
    NAME, OPCODE, SHAPE, METADATA, PARAMETER, CHANNEL, SIDE_EFFECT = 1, 2, 3, 7, 9, 26, 65
    ID, OPERANDS, CONTROL, CALLED = 35, 36, 37, 38


_SUMMARIZED = frozenset({
    _Instruction.NAME, _Instruction.OPCODE, _Instruction.ID, _Instruction.CHANNEL, _Instruction.CALLED,
})  # fmt: skip


@dataclass(eq=False)
class InstructionProto:
    """One instruction; what its proto says beside the fields named here is kept as it is.

    Lists of ids are decoded once: they are not to be changed in place.
    """

    message: ProtoMessage
    _name: str | None = field(default=None, repr=False)
    _ids: dict[int, list[int]] = field(default_factory=dict[int, list[int]], repr=False)

    @classmethod
    def decode(cls, data: bytes) -> InstructionProto:
        """Decodes an instruction."""
        return cls(wire.decode(data))

    def copy(self) -> InstructionProto:
        """An instruction of its own with the same fields."""
        return InstructionProto(ProtoMessage(list(self.message.fields)), self._name, dict(self._ids))

    @property
    def name(self) -> str:
        """Its name, unique in the module."""
        if self._name is None:
            self._name = self.message.text(_Instruction.NAME)
        return self._name

    @name.setter
    def name(self, value: str) -> None:
        self._name = value
        self.message.set_data(_Instruction.NAME, value.encode())

    @cached_property
    def opcode(self) -> str:
        """HLO's opcode."""
        return self.message.text(_Instruction.OPCODE)

    @cached_property
    def id(self) -> int:
        """Its id, unique in the module."""
        return self.message.number(_Instruction.ID)

    def renumber(self, value: int) -> None:
        """Gives the instruction another id."""
        self.message.set_number(_Instruction.ID, value)
        self.__dict__["id"] = value

    @property
    def shape(self) -> bytes:
        """The ShapeProto of its result, layout included."""
        return self.message.data(_Instruction.SHAPE) or b""

    @property
    def operands(self) -> list[int]:
        """The ids of its operands."""
        return self._listed(_Instruction.OPERANDS)

    @operands.setter
    def operands(self, ids: Iterable[int]) -> None:
        self._list(_Instruction.OPERANDS, ids)

    @property
    def control(self) -> list[int]:
        """The ids of its control predecessors."""
        return self._listed(_Instruction.CONTROL)

    @control.setter
    def control(self, ids: Iterable[int]) -> None:
        self._list(_Instruction.CONTROL, ids)

    @property
    def called(self) -> list[int]:
        """The ids of the computations that it calls."""
        return self._listed(_Instruction.CALLED)

    @called.setter
    def called(self, ids: Iterable[int]) -> None:
        self._list(_Instruction.CALLED, ids)

    def _listed(self, number: int) -> list[int]:
        ids = self._ids.get(number)
        if ids is None:
            ids = self._ids[number] = self.message.numbers(number)
        return ids

    def _list(self, number: int, ids: Iterable[int]) -> None:
        self._ids[number] = listed = list(ids)
        self.message.set_numbers(number, listed)

    @property
    def channel(self) -> int:
        """Its channel id, 0 without one."""
        return self.message.number(_Instruction.CHANNEL)

    @channel.setter
    def channel(self, value: int) -> None:
        self.message.set_number(_Instruction.CHANNEL, value)

    @property
    def has_side_effect(self) -> bool:
        """Whether a call of foreign code does more than to yield its result."""
        return bool(self.message.number(_Instruction.SIDE_EFFECT))

    @property
    def parameter(self) -> int:
        """The number of a parameter."""
        return self.message.number(_Instruction.PARAMETER)

    @parameter.setter
    def parameter(self, value: int) -> None:
        if value:
            self.message.set_number(_Instruction.PARAMETER, value)
        else:
            self.message.remove(_Instruction.PARAMETER)

    @property
    def metadata(self) -> bytes:
        """Its OpMetadata: the operation's name and source line."""
        return self.message.data(_Instruction.METADATA) or b""

    @metadata.setter
    def metadata(self, value: bytes) -> None:
        self.message.set_data(_Instruction.METADATA, value)


def without_layout(shape: bytes) -> bytes:
    """The ShapeProto of an array without its memory layout."""
    message = wire.decode(shape)
    message.remove(_Shape.LAYOUT)
    return wire.encode(message)


def parameter_instruction(name: str, number: int, shape: bytes) -> InstructionProto:
    """A new parameter of that name, number and shape.

    >>> made = parameter_instruction("p.1", 1, b"")
    >>> made.name, made.opcode, made.parameter
    ('p.1', 'parameter', 1)
    """
    made = InstructionProto(ProtoMessage([]))
    made.name = name
    made.message.set_data(_Instruction.OPCODE, b"parameter")
    made.message.set_data(_Instruction.SHAPE, shape)
    made.parameter = number
    return made


class Summary(NamedTuple):
    """The names, ids and channels of a computation's instructions, and the ids of the computations that they call.

    `started` are those that loops, branches and calls run.
    """

    names: tuple[str, ...]
    ids: tuple[int, ...]
    channels: tuple[int, ...]
    called: tuple[int, ...]
    started: tuple[int, ...]


def summary_of(instructions: Iterable[InstructionProto]) -> Summary:
    """What other computations need to know of these instructions."""
    listed = [(one.opcode, one.called, one) for one in instructions]
    return Summary(
        tuple(one.name for _, _, one in listed),
        tuple(one.id for _, _, one in listed),
        tuple(channel for _, _, one in listed if (channel := one.channel)),
        tuple(number for _, called, _ in listed for number in called),
        tuple(number for opcode, called, _ in listed if opcode in _STARTERS for number in called),
    )


def summary_of_encoded(instructions: Iterable[bytes]) -> Summary:
    """The same for instructions that have not been decoded, and need not be for this."""
    names, ids, channels = list[str](), list[int](), list[int]()
    called, started = list[int](), list[int]()
    for data in instructions:
        values = wire.scan(data, _SUMMARIZED)
        names += [str(one, "utf-8", "replace") for one in values[_Instruction.NAME] if isinstance(one, bytes)][-1:]
        ids += wire.unpacked(values[_Instruction.ID])[-1:]
        channels += wire.unpacked(values[_Instruction.CHANNEL])[-1:]
        if callees := wire.unpacked(values[_Instruction.CALLED]):
            called += callees
            started += callees if values[_Instruction.OPCODE][-1] in _ENCODED_STARTERS else []
    return Summary(tuple(names), tuple(ids), tuple(channels), tuple(called), tuple(started))

"""An HloModuleProto as something that can be edited: computations, instructions, operands, and the schedule.

    module = ModuleProto.decode(data)
    gather = module.entry.named("all-gather")
    gather.operands                           ids, `computation << 32 | n`, as in the proto
    module.encode() == data                   byte for byte, as long as nothing is changed

The numbers of the fields are those of XLA's `hlo.proto` and `xla_data.proto`. Everything that has no name here is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from reshard.errors import NotationError
from reshard.hlo import wire
from reshard.hlo.module import Computation
from reshard.hlo.wire import ProtoMessage


class _Module:
    COMPUTATIONS, PROGRAM_SHAPE, ENTRY_ID, SCHEDULE = 3, 4, 6, 7


class _Computation:
    NAME, INSTRUCTIONS, PROGRAM_SHAPE, ID, ROOT_ID = 1, 2, 4, 5, 6


class _ProgramShape:
    PARAMETERS, RESULT, NAMES = 1, 2, 3


class ComputationProto:
    """A computation; its instructions stand in an order in which operands come first.

    They are decoded when they are first looked at: most computations of a fragment never are. `data` is what it was
    decoded from, None if it was not, and `read` what `proto_reader` has made of it: what is changed is a fresh one.
    """

    def __init__(
        self, message: ProtoMessage, instructions: list[InstructionProto] | None = None, data: bytes | None = None
    ) -> None:
        self.message = message
        self.data = data
        self._instructions = instructions
        self._summary: Summary | None = None
        self._is_renamed = False
        self._highest_id = 0
        self.read: Computation | None = None

    @classmethod
    def decode(cls, data: bytes) -> ComputationProto:
        """Decodes a computation."""
        return cls(wire.decode(data), None, data)

    def encode(self) -> bytes:
        """The bytes of the computation."""
        if self._instructions is None and self.data is not None and not self._is_renamed:
            return self.data
        if self._instructions is not None:
            self.message.set_all_data(
                _Computation.INSTRUCTIONS, [wire.encode(instruction.message) for instruction in self._instructions]
            )
        return wire.encode(self.message)

    def fresh(self) -> ComputationProto:
        """The same computation as it was decoded, to be changed; what is known of it is kept."""
        if self.data is None:
            raise NotationError(f"HLO computation {self.name}: it was not decoded from bytes")
        made = ComputationProto.decode(self.data)
        made._summary = self._as_decoded() if self.read is not None or not self.is_opened else None
        return made

    def copy(self) -> ComputationProto:
        """A computation of its own with the same fields and instructions."""
        return ComputationProto(ProtoMessage(list(self.message.fields)), [one.copy() for one in self.instructions])

    @property
    def is_opened(self) -> bool:
        """Whether its instructions have been looked at, and may have been changed."""
        return self._instructions is not None

    @property
    def instructions(self) -> list[InstructionProto]:
        """Its instructions, operands before their users."""
        if self._instructions is None:
            self._instructions = self._decoded()
        return self._instructions

    @instructions.setter
    def instructions(self, instructions: list[InstructionProto]) -> None:
        self._instructions = instructions

    def _decoded(self) -> list[InstructionProto]:
        return [InstructionProto.decode(one) for one in self.message.all_data(_Computation.INSTRUCTIONS)]

    @property
    def summary(self) -> Summary:
        """What other computations need to know of it."""
        if self._instructions is not None and self.read is None:
            return summary_of(self._instructions)
        return self._as_decoded()  # What was read is not changed, so its summary is that of its bytes.

    def _as_decoded(self) -> Summary:
        if self._summary is None:
            self._summary = summary_of_encoded(self.message.all_data(_Computation.INSTRUCTIONS))
        return self._summary

    @property
    def name(self) -> str:
        """Its name, unique in the module."""
        return self.message.text(_Computation.NAME)

    @name.setter
    def name(self, value: str) -> None:
        self.message.set_data(_Computation.NAME, value.encode())
        self._is_renamed = True

    @cached_property
    def id(self) -> int:
        """Its id, unique in the module."""
        return self.message.number(_Computation.ID)

    def renumber(self, value: int) -> None:
        """Gives the computation another id."""
        self.message.set_number(_Computation.ID, value)
        self.__dict__["id"] = value
        self._is_renamed = True

    @property
    def root_id(self) -> int:
        """The id of the instruction that yields its result."""
        return self.message.number(_Computation.ROOT_ID)

    @root_id.setter
    def root_id(self, value: int) -> None:
        self.message.set_number(_Computation.ROOT_ID, value)
        self._is_renamed = True

    @property
    def root(self) -> InstructionProto:
        """That instruction."""
        return self.by_id(self.root_id)

    @property
    def parameters(self) -> list[InstructionProto]:
        """The parameters, by number."""
        return sorted((one for one in self.instructions if one.opcode == "parameter"), key=lambda one: one.parameter)

    def by_id(self, number: int) -> InstructionProto:
        """The instruction of an id; raises `NotationError` if there is none."""
        for instruction in self.instructions:
            if instruction.id == number:
                return instruction
        raise NotationError(f"HLO computation {self.name}: it has no instruction with the id {number}")

    def named(self, name: str) -> InstructionProto:
        """The instruction of a name; raises `NotationError` if there is none."""
        for instruction in self.instructions:
            if instruction.name == name:
                return instruction
        raise NotationError(f"HLO computation {self.name}: it has no instruction named {name}")

    def users(self, number: int) -> list[InstructionProto]:
        """The instructions that have an id among their operands."""
        return [instruction for instruction in self.instructions if number in instruction.operands]

    def new_ids(self, count: int) -> range:
        """Ids that no instruction of the computation has or had: those of removed ones are not given again."""
        present = max((instruction.id for instruction in self.instructions), default=self.id << 32)
        first = max(self._highest_id, present) + 1
        self._highest_id = first + count - 1
        return range(first, first + count)

    def describe_parameters(self) -> None:
        """Writes the shapes of its parameters and of its result into its program shape."""
        shape = wire.decode(self.message.data(_Computation.PROGRAM_SHAPE) or b"")
        parameters = self.parameters
        shape.set_all_data(_ProgramShape.PARAMETERS, [one.shape for one in parameters])
        shape.set_data(_ProgramShape.RESULT, self.root.shape)
        shape.set_all_data(_ProgramShape.NAMES, [one.name.encode() for one in parameters])
        self.message.set_data(_Computation.PROGRAM_SHAPE, wire.encode(shape))
        self._is_renamed = True


@dataclass(eq=False)
class ModuleProto:
    """A module; `schedule` has the ids of each computation's instructions in order, None if it is not scheduled.

    `highest_id` is the highest id that any of its computations has ever had: ids of removed ones are not reused.
    """

    message: ProtoMessage
    computations: list[ComputationProto]
    schedule: dict[int, list[int]] | None = field(default=None)
    highest_id: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.highest_id = max(one.id for one in self.computations)
        self._by_id = {one.id: one for one in self.computations}

    def __contains__(self, computation: ComputationProto) -> bool:
        """Whether it is one of the module's computations, not only an equal one."""
        return self._by_id.get(computation.id) is computation

    def new_ids(self, count: int) -> list[int]:
        """Ids that no computation of the module has or had."""
        first = max(self.highest_id, *(one.id for one in self.computations)) + 1
        self.highest_id = first + count - 1
        return list(range(first, first + count))

    @classmethod
    def decode(cls, data: bytes, like: ModuleProto | None = None) -> ModuleProto:
        """Decodes a serialized HloModuleProto; raises `NotationError` for other bytes.

        Computations of equal bytes are those of `like`, if it is given: neither module may then be changed.
        """
        message = wire.decode(data)
        known = {} if like is None else {one.data: one for one in like.computations}
        listed = message.all_data(_Module.COMPUTATIONS)
        computations = [known.get(one) or ComputationProto.decode(one) for one in listed]
        if not computations:
            raise NotationError(f"serialized HLO of {len(data)} bytes: it has no computation; give an HloModuleProto")
        schedule = message.data(_Module.SCHEDULE)
        return cls(message, computations, None if schedule is None else _decode_schedule(schedule))

    def fresh(self) -> ModuleProto:
        """The same module as it was decoded, to be changed."""
        message = ProtoMessage(list(self.message.fields))
        return ModuleProto(message, [one.fresh() for one in self.computations], _copied(self.schedule))

    def copy(self) -> ModuleProto:
        """A module of its own with the same computations."""
        message = ProtoMessage(list(self.message.fields))
        return ModuleProto(message, [one.copy() for one in self.computations], _copied(self.schedule))

    def encode(self) -> bytes:
        """The bytes of the module."""
        self.message.set_all_data(_Module.COMPUTATIONS, [one.encode() for one in self.computations])
        data = self.message.data(_Module.SCHEDULE)
        if self.schedule is not None and data is not None and _decode_schedule(data) != self.schedule:
            self.message.set_data(_Module.SCHEDULE, _encode_schedule(self.schedule))
        return wire.encode(self.message)

    @property
    def entry(self) -> ComputationProto:
        """The computation that runs first."""
        return self.computation(self.message.number(_Module.ENTRY_ID))

    @property
    def is_laid_out(self) -> bool:
        """Whether the compiler has chosen memory layouts: those of the entry are then those that the caller asked for.

        The GPU compiler hands modules over before that. A module that is scheduled has its layouts.
        """
        if self.schedule is not None:
            return True
        program = wire.decode(self.message.data(_Module.PROGRAM_SHAPE) or b"")
        given = [one.shape for one in self.entry.parameters]
        return program.all_data(_ProgramShape.PARAMETERS) == given and (
            program.data(_ProgramShape.RESULT) == self.entry.root.shape
        )

    def computation(self, number: int) -> ComputationProto:
        """The computation of an id; raises `NotationError` if there is none."""
        computation = self._by_id.get(number)
        if computation is None or computation.id != number or len(self._by_id) != len(self.computations):
            self._by_id = {one.id: one for one in self.computations}
            computation = self._by_id.get(number)
        if computation is None:
            raise NotationError(f"HLO module: it has no computation with the id {number}")
        return computation

    def computation_named(self, name: str) -> ComputationProto:
        """The computation of a name; raises `NotationError` if there is none."""
        for computation in self.computations:
            if computation.name == name:
                return computation
        raise NotationError(f"HLO module: it has no computation named {name}")

    def remove_schedule(self) -> None:
        """Makes it a module whose order of execution the compiler has yet to choose."""
        self.schedule = None
        self.message.remove(_Module.SCHEDULE)

    def instructions(self) -> Iterator[InstructionProto]:
        """Every instruction of the module."""
        for computation in self.computations:
            yield from computation.instructions


def _copied(schedule: dict[int, list[int]] | None) -> dict[int, list[int]] | None:
    return None if schedule is None else {number: list(ids) for number, ids in schedule.items()}


def _decode_schedule(data: bytes) -> dict[int, list[int]]:
    """HloScheduleProto: a map from a computation's id to the ids of its instructions in order."""
    entries = [wire.decode(entry) for entry in wire.decode(data).all_data(1)]
    return {entry.number(1): wire.decode(entry.data(2) or b"").numbers(1) for entry in entries}


def _encode_schedule(schedule: dict[int, list[int]]) -> bytes:
    entries: list[bytes] = []
    for computation, ids in schedule.items():
        sequence, entry = ProtoMessage([]), ProtoMessage([])
        sequence.set_numbers(1, ids)
        entry.set_number(1, computation)
        entry.set_data(2, wire.encode(sequence))
        entries.append(wire.encode(entry))
    made = ProtoMessage([])
    made.set_all_data(1, entries)
    return wire.encode(made)


# An HloInstructionProto as something that can be edited, and what is read of many without decoding them.
#
# The numbers of the fields are those of XLA's `hlo.proto` and `xla_data.proto`. Everything that has no name here is
# kept.


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

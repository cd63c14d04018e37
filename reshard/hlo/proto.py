"""An HloModuleProto as something that can be edited: computations, instructions, operands, and the schedule.

    module = ModuleProto.decode(data)
    gather = module.entry.named("all-gather")
    gather.operands                           ids, `computation << 32 | n`, as in the proto
    module.encode() == data                   byte for byte, as long as nothing is changed

The numbers of the fields are those of XLA's `hlo.proto` and `xla_data.proto`. Everything that has no name here is kept:
edited text would lose constants, the sign of zero, ids and the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, overload

from reshard.errors import NotationError
from reshard.hlo import wire
from reshard.hlo.wire import ProtoMessage

T = TypeVar("T")
_COMPUTATIONS, _PROGRAM_SHAPE, _ENTRY_ID, _SCHEDULE = 3, 4, 6, 7  # of a module
INSTRUCTIONS, _PARAMETERS, _RESULT, _NAMES = 2, 1, 2, 3  # of a computation, and of its program shape
_NAME, _OPCODE, _SHAPE, _TUPLE_SHAPES, _LAYOUT = 1, 2, 3, 4, 5
_ID, _OPERANDS = 35, 36
FUSION_KIND = 11
_STARTERS = ("while", "conditional", "call")


class _Edited:
    """What has a message, whose fields are read once; `is_changed` once one of them was written."""

    __slots__ = ("is_changed", "known", "message")

    def __init__(self, message: ProtoMessage, known: dict[int, Any] | None = None) -> None:
        self.message = message
        self.known: dict[int, Any] = {} if known is None else known
        self.is_changed = False


class _Field(Generic[T]):
    """A field of a message as an attribute. Lists of ids are not to be changed in place."""

    def __init__(
        self, number: int, read: Callable[[ProtoMessage, int], T], write: Callable[[ProtoMessage, int, T], None]
    ) -> None:
        self.number, self.read, self.write = number, read, write

    @overload
    def __get__(self, one: None, owner: type) -> _Field[T]: ...
    @overload
    def __get__(self, one: _Edited, owner: type) -> T: ...
    def __get__(self, one: _Edited | None, owner: type) -> T | _Field[T]:
        if one is None:
            return self
        value = one.known.get(self.number)
        if value is None:
            value = one.known[self.number] = self.read(one.message, self.number)
        return value

    def __set__(self, one: _Edited, value: T) -> None:
        one.known[self.number] = value
        one.is_changed = True
        self.write(one.message, self.number, value)


def _write_number(message: ProtoMessage, number: int, value: int) -> None:
    if value:
        message.set_number(number, value)
    else:
        message.remove(number)  # A proto leaves zeros out.


def _text_field(number: int) -> _Field[str]:
    return _Field(number, ProtoMessage.text, lambda message, at, value: message.set_data(at, value.encode()))


def _number_field(number: int) -> _Field[int]:
    return _Field(number, ProtoMessage.number, _write_number)


class InstructionProto(_Edited):
    """One instruction; what its proto says beside the fields named here is kept as it is.

    `shape` is the ShapeProto of its result, layout included, `metadata` its OpMetadata, `channel` 0 without one.
    `index` is the element that it takes of a tuple.
    `operands`, `control` and `called` are ids: of operands, of control predecessors, and of computations.
    """

    name, opcode = _text_field(_NAME), _text_field(_OPCODE)
    id, parameter, channel, side_effect = _number_field(_ID), _number_field(9), _number_field(26), _number_field(65)
    index = _number_field(13)
    shape, metadata = (
        _Field[bytes](number, lambda message, at: message.data(at) or b"", ProtoMessage.set_data)
        for number in (_SHAPE, 7)
    )
    operands, control, called = (
        _Field[list[int]](number, ProtoMessage.numbers, ProtoMessage.set_numbers) for number in (_OPERANDS, 37, 38)
    )

    @classmethod
    def decode(cls, data: bytes) -> InstructionProto:
        """Decodes an instruction."""
        return cls(wire.decode_message(data))

    def copy(self) -> InstructionProto:
        """An instruction of its own with the same fields."""
        return InstructionProto(ProtoMessage(list(self.message.fields)), dict(self.known))


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
    listed = list(instructions)
    return Summary(
        tuple([one.name for one in listed]),
        tuple([one.id for one in listed]),
        tuple([channel for one in listed if (channel := one.channel)]),
        tuple([number for one in listed for number in one.called]),
        tuple([number for one in listed if one.opcode in _STARTERS for number in one.called]),
    )


class ComputationProto(_Edited):
    """A computation; its instructions stand in an order in which operands come first.

    They are decoded when they are first looked at: most computations of a fragment never are. `data` is what it was
    decoded from, None if it was not. One that `is_kept` is not changed any more: what is changed is a fresh one.
    """

    __slots__ = ("_highest_id", "_instructions", "_summary", "data", "is_kept")

    name, id, root_id = _text_field(1), _number_field(5), _number_field(6)

    def __init__(
        self, message: ProtoMessage, instructions: list[InstructionProto] | None = None, data: bytes | None = None
    ) -> None:
        super().__init__(message)
        self.data = data
        self.is_kept = False
        self._instructions = instructions
        self._summary: Summary | None = None
        self._highest_id = 0

    @classmethod
    def decode(cls, data: bytes) -> ComputationProto:
        """Decodes a computation."""
        return cls(wire.decode_message(data), None, data)

    def encode(self) -> bytes:
        """The bytes of the computation."""
        if self._instructions is None and self.data is not None and not self.is_changed:
            return self.data
        if self._instructions is not None:
            self.message.set_all_data(INSTRUCTIONS, [wire.encode_message(one.message) for one in self._instructions])
        return wire.encode_message(self.message)

    def fresh(self) -> ComputationProto:
        """The same computation as it was decoded, to be changed; what is known of it is kept."""
        if self.data is None:
            raise NotationError(f"HLO computation {self.name}: it was not decoded from bytes")
        made = ComputationProto.decode(self.data)
        if self.is_kept or not self.is_opened:
            made._summary = self.summary
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
            self._instructions = list(map(InstructionProto.decode, self.message.all_data(INSTRUCTIONS)))
        return self._instructions

    @instructions.setter
    def instructions(self, instructions: list[InstructionProto]) -> None:
        self._instructions = instructions

    @property
    def summary(self) -> Summary:
        """What other computations need to know of it."""
        if self._instructions is not None and not self.is_kept:
            return summary_of(self._instructions)  # They may have been changed since.
        if self._summary is None:
            decoded = self._instructions or map(InstructionProto.decode, self.message.all_data(INSTRUCTIONS))
            self._summary = summary_of(decoded)
        return self._summary

    @property
    def root(self) -> InstructionProto:
        """The instruction that yields its result."""
        return self.by_id(self.root_id)

    @property
    def parameters(self) -> list[InstructionProto]:
        """The parameters, by number."""
        return sorted((one for one in self.instructions if one.opcode == "parameter"), key=lambda one: one.parameter)

    def by_id(self, number: int) -> InstructionProto:
        """The instruction of an id; raises `NotationError` if there is none."""
        for instruction in self.instructions:  # What is known is asked first: a field is read four times slower.
            if (instruction.known.get(_ID) or instruction.id) == number:
                return instruction
        raise NotationError(f"HLO computation {self.name}: it has no instruction with the id {number}")

    def named(self, name: str) -> InstructionProto:
        """The instruction of a name; raises `NotationError` if there is none."""
        for instruction in self.instructions:
            if (instruction.known.get(_NAME) or instruction.name) == name:
                return instruction
        raise NotationError(f"HLO computation {self.name}: it has no instruction named {name}")

    def users(self, number: int) -> list[InstructionProto]:
        """The instructions that have an id among their operands."""
        return [one for one in self.instructions if number in (one.known.get(_OPERANDS) or one.operands)]

    def new_ids(self, count: int) -> range:
        """Ids that no instruction of the computation has or had: those of removed ones are not given again."""
        present = max((instruction.id for instruction in self.instructions), default=self.id << 32)
        first = max(self._highest_id, present) + 1
        self._highest_id = first + count - 1
        return range(first, first + count)

    def describe_parameters(self) -> None:
        """Writes the shapes of its parameters and of its result into its program shape."""
        shape = wire.decode_message(self.message.data(_PROGRAM_SHAPE) or b"")
        parameters = self.parameters
        shape.set_all_data(_PARAMETERS, [one.shape for one in parameters])
        shape.set_data(_RESULT, self.root.shape)
        shape.set_all_data(_NAMES, [one.name.encode() for one in parameters])
        self.message.set_data(_PROGRAM_SHAPE, wire.encode_message(shape))
        self.is_changed = True


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
        message = wire.decode_message(data)
        known = {} if like is None else {one.data: one for one in like.computations}
        listed = message.all_data(_COMPUTATIONS)
        computations = [known.get(one) or ComputationProto.decode(one) for one in listed]
        if not computations:
            raise NotationError(f"serialized HLO of {len(data)} bytes: it has no computation; give an HloModuleProto")
        schedule = message.data(_SCHEDULE)
        return cls(message, computations, None if schedule is None else _decode_schedule(schedule))

    def fresh(self) -> ModuleProto:
        """The same module as it was decoded, to be changed."""
        message = ProtoMessage(list(self.message.fields))
        return ModuleProto(message, [one.fresh() for one in self.computations], _copy_schedule(self.schedule))

    def keep(self) -> None:
        """Says that its computations are not changed any more, so that what is asked of them is worked out once."""
        for computation in self.computations:
            computation.is_kept = True

    def copy(self) -> ModuleProto:
        """A module of its own with the same computations."""
        message = ProtoMessage(list(self.message.fields))
        return ModuleProto(message, [one.copy() for one in self.computations], _copy_schedule(self.schedule))

    def encode(self) -> bytes:
        """The bytes of the module."""
        self.message.set_all_data(_COMPUTATIONS, [one.encode() for one in self.computations])
        data = self.message.data(_SCHEDULE)
        if self.schedule is not None and data is not None and _decode_schedule(data) != self.schedule:
            self.message.set_data(_SCHEDULE, _encode_schedule(self.schedule))
        return wire.encode_message(self.message)

    @property
    def entry(self) -> ComputationProto:
        """The computation that runs first."""
        return self.computation(self.message.number(_ENTRY_ID))

    @property
    def is_laid_out(self) -> bool:
        """Whether the compiler has chosen memory layouts: those of the entry are then those that the caller asked for.

        The GPU compiler hands modules over before that. A module that is scheduled has its layouts.
        """
        if self.schedule is not None:
            return True
        program = wire.decode_message(self.message.data(_PROGRAM_SHAPE) or b"")
        given = [one.shape for one in self.entry.parameters]
        return program.all_data(_PARAMETERS) == given and (program.data(_RESULT) == self.entry.root.shape)

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
        self.message.remove(_SCHEDULE)

    def instructions(self) -> Iterator[InstructionProto]:
        """Every instruction of the module."""
        for computation in self.computations:
            yield from computation.instructions


def _copy_schedule(schedule: dict[int, list[int]] | None) -> dict[int, list[int]] | None:
    return None if schedule is None else {number: list(ids) for number, ids in schedule.items()}


def _decode_schedule(data: bytes) -> dict[int, list[int]]:
    """HloScheduleProto: a map from a computation's id to the ids of its instructions in order."""
    entries = [wire.decode_message(entry) for entry in wire.decode_message(data).all_data(1)]
    return {entry.number(1): wire.decode_message(entry.data(2) or b"").numbers(1) for entry in entries}


def _encode_schedule(schedule: dict[int, list[int]]) -> bytes:
    entries: list[bytes] = []
    for computation, ids in schedule.items():
        sequence, entry = ProtoMessage([]), ProtoMessage([])
        sequence.set_numbers(1, ids)
        entry.set_number(1, computation)
        entry.set_data(2, wire.encode_message(sequence))
        entries.append(wire.encode_message(entry))
    made = ProtoMessage([])
    made.set_all_data(1, entries)
    return wire.encode_message(made)


def without_layout(shape: bytes) -> bytes:
    """The ShapeProto of an array without its memory layout."""
    message = wire.decode_message(shape)
    message.remove(_LAYOUT)
    return wire.encode_message(message)


def pick_shapes(shape: bytes, elements: Sequence[int]) -> bytes:
    """The ShapeProto of a tuple of some elements of another."""
    message = wire.decode_message(shape)
    parts = message.all_data(_TUPLE_SHAPES)
    message.set_all_data(_TUPLE_SHAPES, [parts[at] for at in elements])
    return wire.encode_message(message)


def make_parameter(name: str, number: int, shape: bytes) -> InstructionProto:
    """A new parameter of that name, number and shape.

    >>> made = make_parameter("p.1", 1, b"")
    >>> made.name, made.opcode, made.parameter
    ('p.1', 'parameter', 1)
    """
    made = InstructionProto(ProtoMessage([]))
    made.name, made.opcode, made.shape, made.parameter = name, "parameter", shape, number
    return made


def fusion_kind(instruction: InstructionProto) -> str:
    """The kind of a fusion, as HLO's text has it; empty for any other instruction."""
    return instruction.message.text(FUSION_KIND)

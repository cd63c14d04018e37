"""The wire format of protocol buffers: messages as lists of fields, decoded and encoded without a schema.

    message = {field}
    field   = varint(number << 3 | type) value
    value   = varint (type 0) | 8 bytes (type 1) | varint(length) bytes (type 2) | 4 bytes (type 5)

A decoded message keeps every field in its order, those of unknown meaning too, so it encodes to the same bytes. Fields
of type 2 stay bytes until someone decodes them: most of a module is never looked at. XLA's text cannot stand in for
this: it leaves large constants out and prints -0 as 0.

    >>> message = decode_message(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69]))
    >>> message.number(1), message.text(2)
    (150, 'hi')
    >>> message.set_number(1, 3)
    >>> encode_message(message)
    b'\\x08\\x03\\x12\\x02hi'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import NamedTuple, TypeVar, TypeVarTuple

from reshard.errors import NotationError, ReshardError

_VARINT, _BYTES = 0, 2
_COUNTED = frozenset((_VARINT, _BYTES))
_SIZES = {1: 8, 5: 4}  # bytes of a value, of the types that have a size
_MOST_BITS = 70  # ten groups of seven bits hold every 64-bit number
_WORD = 1 << 64

Value = int | bytes
A = TypeVarTuple("A")
T = TypeVar("T")


def refuse_damage(read: Callable[[*A], T]) -> Callable[[*A], T]:
    """Makes a function raise `NotationError` where damaged bytes would lead it to raise something else.

    Ids without an instruction, numbers past a table, a shape nested without end: each would need a check of its own,
    and the first one forgotten would reach the user as a `KeyError`.
    """

    @wraps(read)
    def reading(*args: *A) -> T:  # without keywords: it is called for each field that is asked for
        try:
            return read(*args)
        except ReshardError:
            raise
        except (LookupError, ValueError, TypeError, ArithmeticError, RecursionError, StopIteration) as error:
            raise NotationError(
                f"serialized HLO: its fields do not fit each other ({type(error).__name__}: {error}); give the bytes "
                "of an HloModuleProto as XLA made them"
            ) from error

    return reading


class Field(NamedTuple):
    """One field: its number, its wire type, and an int (type 0) or the bytes of its value; messages share them."""

    number: int
    wire_type: int
    value: Value


@dataclass(slots=True)
class ProtoMessage:
    """The fields of a message, in order.

    The setters replace the first field of that number where it stands, or add one at the end.
    """

    fields: list[Field]

    def number(self, number: int, default: int = 0) -> int:
        """The last value of an integer field; negative numbers are read as such."""
        for own, _, value in reversed(self.fields):  # Unpacked, which is twice as fast as their names.
            if own == number and isinstance(value, int):
                return _sign_number(value)
        return default

    def data(self, number: int) -> bytes | None:
        """The last value of a field of bytes, None without one."""
        for own, _, value in reversed(self.fields):
            if own == number and isinstance(value, bytes):
                return value
        return None

    def text(self, number: int) -> str:
        """The last value of a field of text, empty without one."""
        return (self.data(number) or b"").decode("utf-8", "replace")

    def all_data(self, number: int) -> list[bytes]:
        """Every value of a repeated field of bytes or messages."""
        return [value for own, _, value in self.fields if own == number and isinstance(value, bytes)]

    def numbers(self, number: int) -> list[int]:
        """Every value of a repeated integer field, packed or not."""
        return unpack_numbers([value for own, _, value in self.fields if own == number])

    def set_number(self, number: int, value: int) -> None:
        """Sets an integer field."""
        self._put(number, [Field(number, _VARINT, value % _WORD)])

    def set_data(self, number: int, value: bytes) -> None:
        """Sets a field of bytes, text or a message."""
        self._put(number, [Field(number, _BYTES, value)])

    def set_numbers(self, number: int, values: Iterable[int]) -> None:
        """Sets a repeated integer field, packed as proto3 does; removes it if there are no values."""
        packed = bytearray()
        for value in values:
            _append_varint(packed, value % _WORD)
        self._put(number, [Field(number, _BYTES, bytes(packed))] if packed else [])

    def set_all_data(self, number: int, values: Iterable[bytes]) -> None:
        """Sets a repeated field of messages."""
        self._put(number, [Field(number, _BYTES, value) for value in values])

    def remove(self, number: int) -> None:
        """Removes every field of that number."""
        self.fields = [field for field in self.fields if field[0] != number]

    def _put(self, number: int, fields: list[Field]) -> None:
        numbers = [own for own, _, _ in self.fields]
        at = numbers.index(number) if number in numbers else len(numbers)
        if len(fields) == 1 and numbers.count(number) <= 1:
            self.fields[at : at + 1] = fields
            return
        after = [field for field in self.fields[at:] if field.number != number]
        self.fields = [*self.fields[:at], *fields, *after]


def decode_message(data: bytes) -> ProtoMessage:
    """Decodes the fields of one message; those inside stay bytes. Raises `NotationError` for other bytes.

    >>> decode_message(b"\\x08\\x01").fields
    [Field(number=1, wire_type=0, value=1)]
    """
    fields: list[Field] = []
    at, end = 0, len(data)
    try:
        while at < end:  # ends: each field takes at least a byte
            key = data[at]  # Most keys, lengths and numbers are of one byte: a call for each would double the time.
            at += 1
            if key >= 0x80:
                key, at = _read_varint(data, at - 1)
            wire_type = key & 7
            if wire_type in _COUNTED:
                value = data[at]
                at += 1
                if value >= 0x80:
                    value, at = _read_varint(data, at - 1)
                if wire_type == _BYTES:
                    at += value
                    value = data[at - value : at]
            elif wire_type in _SIZES:
                at += _SIZES[wire_type]
                value = data[at - _SIZES[wire_type] : at]
            else:
                raise NotationError(f"wire type {wire_type} is not in use")
            if key < 8 or at > end:
                raise NotationError("it has a field that its length cuts off")
            fields.append(Field(key >> 3, wire_type, value))
    except (IndexError, NotationError) as error:
        raise NotationError(
            f"serialized HLO of {len(data)} bytes: byte {at} does not start a field ({error}); "
            "give the bytes of an HloModuleProto, as `as_serialized_hlo_module_proto` returns them"
        ) from None
    return ProtoMessage(fields)


def encode_message(message: ProtoMessage) -> bytes:
    """The bytes of a message."""
    data = bytearray()
    for number, wire_type, value in message.fields:
        _append_varint(data, number << 3 | wire_type)
        if isinstance(value, int):
            _append_varint(data, value)
            continue
        if wire_type == _BYTES:
            _append_varint(data, len(value))
        data += value
    return bytes(data)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while shift < _MOST_BITS:  # ends: the shift grows
        at += 1
        if at >= len(data):
            raise NotationError("a number is cut off")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise NotationError("a number has more than 64 bits")


def _append_varint(data: bytearray, value: int) -> None:
    while value >= 0x80:  # ends: the value shrinks
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)


def unpack_numbers(values: Iterable[Value]) -> list[int]:
    """The numbers of a repeated integer field, packed or not."""
    numbers: list[int] = []
    for value in values:
        if isinstance(value, int):
            numbers.append(_sign_number(value))
            continue
        at, end = 0, len(value)
        while at < end:  # ends: each number takes at least a byte
            number = value[at]
            at += 1
            if number >= 0x80:  # Most numbers are of one byte, and none of those is negative.
                number, at = _read_varint(value, at - 1)
                number = _sign_number(number)
            numbers.append(number)
    return numbers


def _sign_number(value: int) -> int:
    return value - _WORD if value >= _WORD >> 1 else value

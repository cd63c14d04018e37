"""Pickles of plain data, read without running anything: what a pickle would call or build is only written down.

    c"os" "system"  (X"rm -rf /" tR    a pickle that runs a command: here its name is refused

`pickle.Unpickler` is a machine that calls what it is told to. With calls forbidden, it still asks for 2^60 bytes or
2^31 slots of memory at a word, and hashes a key of a million nested tuples until the stack is gone. So this is a
machine of its own, for the 40 opcodes that torch writes: a name becomes a `Named`, a call or an object a `Made`, a list
or dict what it is; sizes are compared with the bytes that are there, keys are text, numbers or things made, and nothing
is walked through: whoever reads the result checks each value as it comes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from reshard.errors import FileError, quoted, shortened

Refuse = Callable[[str, int], FileError]
"""The error for what is found at a byte of the pickle."""


class Named(str):
    """What a pickle names, as module and name."""

    __slots__ = ()


class Made:
    """What a pickle makes: what it calls, with which arguments, and the state that it is given."""

    __slots__ = ("args", "of", "state")

    def __init__(self, of: Named, args: tuple[Any, ...]) -> None:
        self.of, self.args = of, args
        self.state: Any = None


_MOST_PENDING = 1 << 14
"""The most values that wait on the stack to be put into others: a pickler fills lists and dicts 1,000 at a time."""

_CONSTANTS: Mapping[int, Any] = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
_EMPTY: Mapping[int, type[Any]] = {0x5D: list, 0x7D: dict}
_NUMBERS = {0x4B: 1, 0x4D: 2}  # Of so many bytes, without a sign.
_TEXTS = {0x8C: 1, 0x58: 4, 0x8D: 8}  # The length of text takes so many bytes,
_BYTES = {0x43: 1, 0x42: 4, 0x8E: 8}  # and that of bytes.
_BINGET, _LONG_BINGET, _SHORT = 0x68, 0x6A, (0x68, 0x4B)
_GETS, _PUTS = {0x68: 1, 0x6A: 4}, {0x71: 1, 0x72: 4}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_PROTO, _FRAME, _MEMOIZE, _MARK, _STOP = 0x80, 0x95, 0x94, 0x28, 0x2E
_INT4, _LONG1, _FLOAT, _GLOBAL, _STACK_GLOBAL = 0x4A, 0x8A, 0x47, 0x63, 0x93
_TUPLE, _REDUCE, _NEWOBJ, _BUILD, _PERSISTENT = 0x74, 0x52, 0x81, 0x62, 0x51
_APPEND, _APPENDS, _SETITEM, _SETITEMS = 0x61, 0x65, 0x73, 0x75


def read_pickle(content: bytes, known: Mapping[str, Collection[str]], refuse: Refuse) -> Any:
    """What a pickle holds, in `Named`, `Made` and plain values. `known` are the names that it may use, by module.

    >>> import pickle
    >>> from collections import OrderedDict
    >>> known = {"collections": ["OrderedDict"]}
    >>> made = read_pickle(pickle.dumps([1, OrderedDict()]), known, lambda why, at: FileError(why))
    >>> made[0], made[1].of, made[1].args
    (1, 'collections OrderedDict', ())
    """
    machine = _Machine(content, known)
    try:
        # Two thirds of all opcodes put a value into the memo, take one, or are a number of a byte: these stand here.
        stack, memo, size = machine.stack, machine.memo, len(content)
        while (opcode := content[at := machine.at]) != _STOP:
            machine.at = at + 1
            if opcode == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif opcode in _SHORT and at + 2 <= size:
                value = content[at + 1]
                machine.at = at + 2
                stack.append(memo[value] if opcode == _BINGET else value)
            elif opcode == _LONG_BINGET and at + 5 <= size:
                machine.at = at + 5
                stack.append(memo[int.from_bytes(content[at + 1 : at + 5], "little")])
            elif not machine.push_literal(opcode):
                machine.compose(opcode)
            if len(stack) > _MOST_PENDING:
                raise ValueError("too many values wait to be put into others")
        if len(machine.stack) != 1 or machine.marks:
            raise ValueError("more than one value is left at the end")
        return machine.stack[0]
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error) as error:
        why = f"its pickle is damaged or does what no checkpoint needs ({shortened(str(error))}); save it again"
        raise refuse(why, machine.at) from None


class _Machine:
    """The stack machine of pickles: `marks` are places in the stack, `memo` is what was put aside to be used again."""

    def __init__(self, content: bytes, known: Mapping[str, Collection[str]]) -> None:
        self.content, self.known, self.at = content, known, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def take(self, nbytes: int) -> bytes:
        """The next bytes, of which there may be fewer than a pickle claims."""
        if nbytes > len(self.content) - self.at:
            raise ValueError(f"{quoted(nbytes)} bytes are to be read, and {len(self.content) - self.at} are there")
        self.at += nbytes
        return self.content[self.at - nbytes : self.at]

    def take_number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def push_literal(self, opcode: int) -> bool:
        """Does what an opcode with a value of its own says; False for others."""
        push = self.stack.append
        if opcode in _GETS:
            push(self.memo[self.take_number(_GETS[opcode])])
        elif opcode in _PUTS:
            self.memo[self.take_number(_PUTS[opcode])] = self.stack[-1]
        elif opcode in _TEXTS:
            push(self.take(self.take_number(_TEXTS[opcode])).decode())
        elif opcode in _NUMBERS:
            push(self.take_number(_NUMBERS[opcode]))
        elif opcode in _CONSTANTS:
            push(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            push(_EMPTY[opcode]())
        elif opcode in (_INT4, _LONG1):
            push(int.from_bytes(self.take(4 if opcode == _INT4 else self.take_number(1)), "little", signed=True))
        elif opcode in _BYTES:
            push(self.take(self.take_number(_BYTES[opcode])))
        elif opcode == _FLOAT:
            push(struct.unpack(">d", self.take(8))[0])
        elif opcode == _GLOBAL:
            end = self.content.index(b"\n", self.content.index(b"\n", self.at) + 1) + 1
            push(self._name(*self.take(end - self.at).decode().split("\n")[:2]))
        elif opcode in (_PROTO, _FRAME):
            self.take(1 if opcode == _PROTO else 8)
        else:
            return False
        return True

    def compose(self, opcode: int) -> None:
        """Does what an opcode does with values on the stack; raises `ValueError` for those that torch never writes."""
        stack, pop = self.stack, self.stack.pop
        if opcode == _MARK:
            self.marks.append(len(stack))
        elif opcode == _TUPLE:
            stack.append(_checked_tuple(self._pop_marked()))
        elif opcode in _TUPLES:
            stack.append(_checked_tuple(self._pop_last(_TUPLES[opcode])))
        elif opcode == _STACK_GLOBAL:
            module, name = self._pop_last(2)
            stack.append(self._name(module, name))
        elif opcode in (_REDUCE, _NEWOBJ):
            called, args = self._pop_last(2)
            if type(called) is not Named or not isinstance(args, tuple):
                raise ValueError(f"it calls a {type(called).__name__}")
            stack.append(Made(called, tuple(cast("tuple[Any, ...]", args))))
        elif opcode == _BUILD:
            state = pop()
            if type(stack[-1]) is not Made or stack[-1].state is not None:
                raise ValueError(f"it gives a state to a {type(stack[-1]).__name__}")
            stack[-1].state = state
        elif opcode == _PERSISTENT:
            stack.append(Made(Named("persistent id"), (pop(),)))
        elif opcode in (_APPEND, _APPENDS):
            items = self._pop_last(1) if opcode == _APPEND else self._pop_marked()
            _checked_kind(stack[-1], list).extend(items)
        elif opcode in (_SETITEM, _SETITEMS):
            items = self._pop_last(2) if opcode == _SETITEM else self._pop_marked()
            held = _checked_kind(stack[-1], dict)
            for key, value in zip(items[::2], items[1::2], strict=True):
                # A tuple is hashed with all that it nests, on the stack of C.
                if type(key) not in (str, int, Made):
                    raise ValueError(f"a key is a {type(key).__name__}")
                held[key] = value
        else:
            raise ValueError(f"it has the opcode {opcode:#04x}")

    def _name(self, module: object, name: object) -> Named:
        if type(module) is not str or type(name) is not str:
            raise ValueError("it names what is no text")
        if name not in self.known.get(module, ()):
            raise ValueError(f"it names {quoted(f'{module}.{name}')}")
        return Named(f"{module} {name}")

    def _pop_last(self, count: int) -> list[Any]:
        """The last values, none of which lies below a mark."""
        if len(self.stack) - count < (self.marks[-1] if self.marks else 0):
            raise ValueError("values are missing")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _pop_marked(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items


class _OfTuples(tuple[Any, ...]):
    """A tuple that holds tuples, as the arguments of a call may; none of these stands in a tuple again."""


def _checked_tuple(items: list[Any]) -> tuple[Any, ...]:
    kinds = set(map(type, items))
    if _OfTuples in kinds:
        raise ValueError("tuples are nested too deep")
    return _OfTuples(items) if tuple in kinds else tuple(items)


def _checked_kind(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} is filled")
    return value


def quote_plain(value: Any) -> str:
    """A value of a pickle for a message: only text and numbers are quoted, as lists may hold each other 10^12 times."""
    return quoted(value) if isinstance(value, str | int | None) else f"a {type(value).__name__}"

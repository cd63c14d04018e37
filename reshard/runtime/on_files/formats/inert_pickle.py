"""Pickles of plain data, read without running anything: what a pickle would call or build is only written down.

    c"os" "system"  (X"rm -rf /" tR    a pickle that runs a command: here its name is refused

`pickle.Unpickler` is a machine that calls what it is told to. With calls forbidden, it still asks for 2^60 bytes or
2^31 slots of memory at a word, and hashes a key of a million nested tuples until the stack is gone. So this is a
machine of its own for the 40 opcodes that torch writes, which `pickletools` reads: a name becomes a `Named`, a call or
an object a `Made`, a list or dict what it is; keys are text, numbers or things made, and nothing is walked through:
whoever reads the result checks each value as it comes.
"""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
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

_PUSHED = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_CONSTANTS: Mapping[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: Mapping[str, type[Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(content: bytes, known: Mapping[str, Collection[str]], refuse: Refuse) -> Any:
    """What a pickle holds, in `Named`, `Made` and plain values. `known` are the names that it may use, by module.

    >>> import pickle
    >>> from collections import OrderedDict
    >>> known = {"collections": ["OrderedDict"]}
    >>> made = read_pickle(pickle.dumps([1, OrderedDict()]), known, lambda why, at: FileError(why))
    >>> made[0], made[1].of, made[1].args
    (1, 'collections OrderedDict', ())
    """
    machine, file, at = _Machine(known), io.BytesIO(content), 0
    try:
        stack, memo = machine.stack, machine.memo
        for opcode, value, _ in cast("Iterator[tuple[Any, Any, Any]]", pickletools.genops(file)):
            name = opcode.name
            # Two thirds of all opcodes put a value into the memo, take one, or have it with them.
            if name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[value])
            elif name in _PUSHED:
                stack.append(value)
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[value] = stack[-1]
            elif name not in ("PROTO", "FRAME", "STOP"):
                machine.compose(name, value)
            if len(stack) > _MOST_PENDING:
                raise ValueError("too many values wait to be put into others")
            at = file.tell()
        if len(stack) != 1 or machine.marks:
            raise ValueError("more than one value is left at the end")
        return stack[0]
    # Python warns of escapes that do not exist in old strings, and some processes turn warnings into errors.
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error, DeprecationWarning) as error:
        why = f"its pickle is damaged or does what no checkpoint needs ({shortened(str(error))}); save it again"
        raise refuse(why, at) from None


class _Machine:
    """The stack machine of pickles: `marks` are places in the stack, `memo` is what was put aside to be used again."""

    def __init__(self, known: Mapping[str, Collection[str]]) -> None:
        self.known = known
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def compose(self, opcode: str, value: Any) -> None:
        """Does what an opcode does with values on the stack; raises `ValueError` for those that torch never writes."""
        stack, pop = self.stack, self.stack.pop
        if opcode == "MARK":
            self.marks.append(len(stack))
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            stack.append(_EMPTY[opcode]())
        elif opcode == "TUPLE" or opcode in _TUPLES:
            items = self._pop_last(_TUPLES[opcode]) if opcode in _TUPLES else self._pop_marked()
            kinds = set(map(type, items))
            if _OfTuples in kinds:
                raise ValueError("tuples are nested too deep")
            stack.append(_OfTuples(items) if tuple in kinds else tuple(items))
        elif opcode in ("GLOBAL", "STACK_GLOBAL"):
            module, name = value.split(" ", 1) if opcode == "GLOBAL" else self._pop_last(2)
            if type(module) is not str or type(name) is not str:
                raise ValueError("it names what is no text")
            if name not in self.known.get(module, ()):
                raise ValueError(f"it names {quoted(f'{module}.{name}')}")
            stack.append(Named(f"{module} {name}"))
        elif opcode in ("REDUCE", "NEWOBJ"):
            called, args = self._pop_last(2)
            if type(called) is not Named or not isinstance(args, tuple):
                raise ValueError(f"it calls a {type(called).__name__}")
            stack.append(Made(called, tuple(cast("tuple[Any, ...]", args))))
        elif opcode == "BUILD":
            state = pop()
            if type(stack[-1]) is not Made or stack[-1].state is not None:
                raise ValueError(f"it gives a state to a {type(stack[-1]).__name__}")
            stack[-1].state = state
        elif opcode == "BINPERSID":
            stack.append(Made(Named("persistent id"), (pop(),)))
        else:
            self._fill(opcode)

    def _fill(self, opcode: str) -> None:
        """Puts values into the list or dict before them."""
        kind = {"APPEND": list, "APPENDS": list, "SETITEM": dict, "SETITEMS": dict}.get(opcode)
        if kind is None:
            raise ValueError(f"it has the opcode {opcode}")
        items = self._pop_marked() if opcode.endswith("S") else self._pop_last(1 if kind is list else 2)
        held = self.stack[-1]
        if type(held) is not kind:
            raise ValueError(f"a {type(held).__name__} stands where a {kind.__name__} is filled")
        if kind is list:
            cast("list[Any]", held).extend(items)
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            # A tuple is hashed with all that it nests, on the stack of C.
            if type(key) not in (str, int, Made):
                raise ValueError(f"a key is a {type(key).__name__}")
            held[key] = value

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


def quote_plain(value: Any) -> str:
    """A value of a pickle for a message: only text and numbers are quoted, as lists may hold each other 10^12 times."""
    return quoted(value) if isinstance(value, str | int | None) else f"a {type(value).__name__}"

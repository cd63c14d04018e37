"""The data flow of a module, seen through what only wraps or regroups it.

A *region* is a computation that runs by itself: the entry, the body of a loop, a branch. Fusions, calls and
asynchronous calls are opened: the instructions inside are part of the region, and the data flows in and out of them.
Tuples, optimization barriers and the halves of asynchronous instructions are looked through.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from reshard.hlo import Array, Computation, Instruction, Module
from reshard.hlo.shapes import Shape

_OPENED = ("fusion", "call", "async-start", "call-start")
_CONTINUES = ("async-update", "async-done", "call-update", "call-done")
_ENTERED = ("while", "conditional")
_WHOLE = ("opt-barrier", "optimization-barrier")
_NUMBER = re.compile(r"\s*(\d+)")
_GATHERING = re.compile(r"^(?:all-|collective-|reduce-scatter)")


@dataclass(frozen=True, eq=False)
class Scope:
    """A computation as one instruction runs it: `caller`, None for the entry.

    `opened`: its instructions belong to the caller's region.
    """

    computation: Computation
    caller: Site | None
    opened: bool


class Site(NamedTuple):
    """An instruction in its scope."""

    scope: Scope
    instruction: Instruction


class Value(NamedTuple):
    """What an instruction yields, or, with a path, a part of the tuple that it yields."""

    scope: Scope
    name: str
    path: tuple[int, ...] = ()

    @property
    def instruction(self) -> Instruction:
        return self.scope.computation.by_name[self.name]

    @property
    def site(self) -> Site:
        return Site(self.scope, self.instruction)

    @property
    def opcode(self) -> str:
        """HLO's opcode, that of the whole for the first half of an asynchronous pair."""
        return self.instruction.opcode.removesuffix("-start")

    @property
    def array(self) -> Array | None:
        """The array that it is; None for a tuple or a token."""
        instruction = self.instruction
        if instruction.opcode.endswith("-start"):
            at = self.path[0] if self.path else 0
            return instruction.results[at] if at < len(instruction.results) else None
        shape: Shape = instruction.shape
        for at in self.path:
            if isinstance(shape, Array) or at >= len(shape):
                return None
            shape = shape[at]
        return shape if isinstance(shape, Array) else None


class Flow:
    """The data flow of a module."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._inner: dict[tuple[Scope, str], Scope] = {}
        self._origins: dict[Value, Value] = {}
        self.regions: tuple[Scope, ...] = tuple(self._found_regions())

    def sites(self, scope: Scope) -> Iterator[Site]:
        """The instructions of a region, those of opened ones before the instruction that opens them."""
        for instruction in scope.computation.instructions:
            if (inner := self.inner(scope, instruction)) is not None:
                yield from self.sites(inner)
            yield Site(scope, instruction)

    def inner(self, scope: Scope, instruction: Instruction) -> Scope | None:
        """What an instruction opens, if it does."""
        if instruction.opcode not in _OPENED or not instruction.called:
            return None
        key = scope, instruction.name
        if key not in self._inner:
            computation = self.module.computation(instruction.called[0])
            self._inner[key] = Scope(computation, Site(scope, instruction), True)
        return self._inner[key]

    def body(self, scope: Scope) -> Scope | None:
        """The body of the loop that a region is the body or the condition of."""
        if scope.caller is None or scope.caller.instruction.opcode != "while":
            return None
        name = scope.caller.instruction.attributes.get("body", "").lstrip("%")
        return next((region for region in self.regions if region.computation.name == name), None)

    def origin(self, value: Value) -> Value:
        """The same data where it is made, or enters the region."""
        found = self._origins.get(value)
        if found is None:
            found, through = value, self._through(value)
            while through is not None:
                found, through = through, self._through(through)
            self._origins[value] = found
        return found

    def operands(self, value: Value) -> list[Value]:
        """Where the operands of the instruction are made."""
        return [self.origin(Value(value.scope, name)) for name in value.instruction.operands]

    def parts(self, value: Value) -> Iterator[Value]:
        """Where each array of a value, perhaps a tuple, is made."""
        shape = value.instruction.shape
        if value.instruction.opcode.endswith("-start") or isinstance(shape, Array):
            yield self.origin(value)
            return
        for path in _paths(shape):
            yield self.origin(Value(value.scope, value.name, (*value.path, *path)))

    def is_view(self, site: Site) -> bool:
        """Whether the instruction makes nothing and is only looked through."""
        opcode = site.instruction.opcode
        if opcode in ("tuple", "get-tuple-element", *_WHOLE, *_OPENED, *_CONTINUES, "copy-start", "copy-done"):
            return True
        if opcode == "parameter":
            return site.scope.opened
        return _through_async(Value(site.scope, site.instruction.name)) is not None

    def _through(self, value: Value) -> Value | None:
        """One step towards where the data is made; None where it is."""
        scope, path, instruction = value.scope, value.path, value.instruction
        match instruction.opcode:
            case "get-tuple-element":
                return Value(scope, instruction.operands[0], (int(instruction.attributes["index"]), *path))
            case "tuple" if path and path[0] < len(instruction.operands):
                return Value(scope, instruction.operands[path[0]], path[1:])
            case "parameter" if scope.opened and scope.caller is not None:
                arguments = _arguments(scope.caller)
                number = parameter_number(instruction)
                return Value(scope.caller.scope, arguments[number], path) if number < len(arguments) else None
            case opcode if opcode in _OPENED and (inner := self.inner(scope, instruction)):
                root = inner.computation.root
                return None if root is None else Value(inner, root.name, path)
            case opcode if opcode in (*_CONTINUES, *_WHOLE) and instruction.operands:
                return Value(scope, instruction.operands[0], path)
            case "copy-done":
                start = self.origin(Value(scope, instruction.operands[0])).instruction
                return Value(scope, start.operands[0], path)
            case _:
                return _through_async(value)

    def _found_regions(self) -> Iterator[Scope]:
        seen: set[str] = set()
        queue = [Scope(self.module.entry, None, False)]
        while queue:  # ends: each computation is entered once
            region = queue.pop(0)
            if region.computation.name in seen:
                continue
            seen.add(region.computation.name)
            yield region
            for site in self.sites(region):
                if site.instruction.opcode in _ENTERED:
                    entered = (self.module.computation(name) for name in site.instruction.called)
                    queue += [Scope(computation, site, False) for computation in entered]


def _arguments(caller: Site) -> tuple[str, ...]:
    """The operands of a call; those of one that is offloaded come with its -update."""
    users = caller.scope.computation.users.get(caller.instruction.name, ())
    update = next((user for user in users if user.opcode == "call-update"), None)
    return caller.instruction.operands + (() if update is None else update.operands[1:])


def parameter_number(instruction: Instruction) -> int:
    """Which of the operands a parameter stands for."""
    found = _NUMBER.match(instruction.rest)
    return int(found[1]) if found else 0


def _through_async(value: Value) -> Value | None:
    """The data behind the end of an asynchronous pair, and behind TPU's markers of collectives that overlap.

    A fusion with AsyncCollectiveStart yields the collective's operand and its result; that with AsyncCollectiveDone
    states the collective again, of which its value is the result.
    """
    scope, path, instruction = value.scope, value.path, value.instruction
    if instruction.opcode.endswith("-done") and instruction.operands:
        return Value(scope, instruction.operands[0], path)
    if instruction.opcode != "custom-call" or not instruction.operands:
        return None
    if '"AsyncCollectiveStart"' in instruction.rest and path in ((0,), (1,)):
        collective = scope.computation.by_name[instruction.operands[0]]
        return Value(scope, collective.operands[0] if path == (0,) else collective.name)
    if '"AsyncCollectiveDone"' in instruction.rest:
        named = [name for name in instruction.operands if _GATHERING.match(scope.computation.by_name[name].opcode)]
        return Value(scope, named[0]) if named else None
    return None


def _paths(shape: Shape) -> Iterator[tuple[int, ...]]:
    """The paths to the arrays of a shape."""
    if isinstance(shape, Array):
        yield ()
        return
    for at, part in enumerate(shape):
        yield from ((at, *rest) for rest in _paths(part))

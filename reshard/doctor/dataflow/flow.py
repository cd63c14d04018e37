"""The data flow of a module, without the instructions that only wrap or regroup data.

A *region* is a computation that runs by itself: the entry, the body of a loop, a branch. Fusions, calls and
asynchronous calls are *opened*: the instructions inside belong to the region, and data flows in through their
parameters and out through their root. Tuples, optimization barriers and the halves of asynchronous instructions are
looked through:

    %f = f32[8] fusion(%p), calls=%body          origin of %f: the root of %body, in its own scope
    %t = (f32[8], f32[4]) tuple(%f, %q)
    %g = f32[4] get-tuple-element(%t), index=1   origin of %g: %q
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.errors import NotationError
from reshard.hlo import Array, Computation, Instruction, Module, trip_count
from reshard.hlo.instruction import Shape

_OPENED = ("fusion", "call", "async-start", "call-start")
_CONTINUES = ("async-update", "async-done", "call-update", "call-done")
_STARTS_REGIONS = ("while", "conditional")
_TURNS = 64
"""The most iterations of a loop that are followed one by one."""
_BARRIERS = ("opt-barrier", "optimization-barrier")
_COLLECTIVE = re.compile(r"^(?:all-|collective-|reduce-scatter)")


@dataclass(frozen=True, eq=False)
class Scope:
    """A computation as one instruction, the `caller`, runs it; the entry has no caller.

    If it is `opened`, its instructions belong to the caller's region. The body of a loop that is opened has a scope for
    each iteration, its `turn`.
    """

    computation: Computation
    caller: Site | None
    opened: bool
    turn: int = 0


class Site(NamedTuple):
    """An instruction in its scope."""

    scope: Scope
    instruction: Instruction


class HloValue(NamedTuple):
    """The result of an instruction or, with a path, one part of its tuple."""

    scope: Scope
    name: str
    path: tuple[int, ...] = ()

    @property
    def instruction(self) -> Instruction:
        """The instruction that yields the value; raises `NotationError` where a damaged text has none."""
        try:
            return self.scope.computation.by_name[self.name]
        except KeyError:
            where = self.scope.computation.name
            raise NotationError(
                f"HLO computation {where} has no instruction {self.name}, which another takes"
            ) from None

    @property
    def site(self) -> Site:
        """That instruction in its scope."""
        return Site(self.scope, self.instruction)

    @property
    def opcode(self) -> str:
        """HLO's opcode; the start of an asynchronous pair has the opcode of the whole."""
        return self.instruction.opcode.removesuffix("-start")

    @property
    def array(self) -> Array | None:
        """The array that the value is, None for a tuple or a token."""
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
    """The data flow of a module: its regions, and where each value comes from.

    A loop whose body is one of `unrolled` is followed iteration by iteration, as calls of it one after another.
    """

    def __init__(self, module: Module, unrolled: Collection[str] = ()) -> None:
        self.module = module
        self.unrolled = unrolled
        self._inner: dict[tuple[Scope, str, int], Scope] = {}
        self._origins: dict[HloValue, HloValue] = {}
        self._operands: dict[tuple[Scope, str], list[HloValue]] = {}
        self._positions: dict[HloValue, tuple[float, ...]] = {}
        self._orders: dict[str, dict[str, int]] = {}
        self._sites: dict[Scope, list[Site]] = {}
        self._makers: dict[Scope, list[Site]] = {}
        self._shared: set[str] = set()  # computations that several instructions start
        self.regions: tuple[Scope, ...] = tuple(self._all_regions())

    def sites(self, scope: Scope) -> list[Site]:
        """The instructions of a region; those inside a fusion or call come before the fusion or call itself."""
        if scope not in self._sites:
            sites: list[Site] = []
            for instruction in scope.computation.instructions:
                if (inner := self.inner(scope, instruction)) is not None:
                    sites += self.sites(inner)
                sites.append(Site(scope, instruction))
            self._sites[scope] = sites
        return self._sites[scope]

    def makers(self, region: Scope) -> list[Site]:
        """The instructions of a region that make data of their own, so that `origin` does not look through them."""
        if region not in self._makers:
            self._makers[region] = [site for site in self.sites(region) if not self.is_view(site)]
        return self._makers[region]

    def _starting(self, scope: Scope) -> Iterator[Site]:
        """The instructions of a region that may start others; those inside fusions never do."""
        for instruction in scope.computation.instructions:
            if instruction.opcode in _STARTS_REGIONS and not self._count_turns(scope, instruction):
                yield Site(scope, instruction)
            elif instruction.opcode != "fusion" and (inner := self.inner(scope, instruction)) is not None:
                yield from self._starting(inner)

    def inner(self, scope: Scope, instruction: Instruction) -> Scope | None:
        """The scope that an instruction opens, a loop that of its last iteration; None if it opens none."""
        turns = self._count_turns(scope, instruction)
        if (instruction.opcode not in _OPENED and not turns) or not instruction.called:
            return None
        return self._open(scope, instruction, max(0, turns - 1))

    def _count_turns(self, scope: Scope, instruction: Instruction) -> int:
        """How many iterations of a loop are followed one by one; 0 if it is none, or is not unrolled."""
        if instruction.opcode != "while" or loop_body(instruction) not in self.unrolled:
            return 0
        turns = trip_count(self.module, scope.computation, instruction) or 0
        return turns if turns <= _TURNS else 0

    def _open(self, scope: Scope, instruction: Instruction, turn: int) -> Scope:
        """The scope of what an instruction calls; of a loop, that of an iteration."""
        key = scope, instruction.name, turn
        if key not in self._inner:
            name = loop_body(instruction) if instruction.opcode == "while" else instruction.called[0]
            computation = self.module.computation(name)
            outer: Scope | None = scope
            while outer is not None:  # ends: scopes are nested in their callers
                if computation is outer.computation:
                    raise NotationError(f"HLO module {self.module.name}: computation {computation.name} calls itself")
                outer = None if outer.caller is None else outer.caller.scope
            self._inner[key] = Scope(computation, Site(scope, instruction), True, turn)
        return self._inner[key]

    def root_of(self, site: Site, name: str) -> HloValue | None:
        """What a region yields that the instruction starts; None if another starts it as well, or none does."""
        regions = [one for one in self.regions if one.computation.name == name and one.caller == site]
        if not regions or name in self._shared or regions[0].computation.root is None:
            return None
        return HloValue(regions[0], regions[0].computation.root.name)

    def branch_operand(self, parameter: HloValue) -> HloValue | None:
        """What a conditional gives to a parameter of its branch; None if it is not one, or has two values."""
        caller, name = parameter.scope.caller, parameter.scope.computation.name
        if caller is None or caller.instruction.opcode != "conditional" or name in self._shared:
            return None  # a computation that is both branches is shared: it has the operands of either
        operands, at = caller.instruction.operands, 1 + caller.instruction.called.index(name)
        return HloValue(caller.scope, operands[at], parameter.path) if at < len(operands) else None

    def origin(self, value: HloValue) -> HloValue:
        """The value that has the same data where it was made, or where it enters the region."""
        origin = self._origins.get(value)
        if origin is None:
            origin, before = value, self._step_back(value)
            while before is not None:
                origin, before = before, self._step_back(before)
            self._origins[value] = origin
        return origin

    def operands(self, value: HloValue) -> list[HloValue]:
        """The origins of the operands of the value's instruction."""
        site = value.scope, value.name
        known = self._operands.get(site)
        if known is None:
            operands = value.instruction.operands
            known = self._operands[site] = [self.origin(HloValue(value.scope, name)) for name in operands]
        return list(known)

    def array_origins(self, value: HloValue) -> Iterator[HloValue]:
        """The origin of each array of a value, which may be a tuple."""
        instruction = value.instruction
        if instruction.is_array or instruction.opcode.endswith("-start"):
            yield self.origin(value)
            return
        for path in array_paths(instruction.shape):
            yield self.origin(HloValue(value.scope, value.name, (*value.path, *path)))

    def position(self, value: HloValue) -> tuple[float, ...]:
        """Where a value is made: the positions of the instructions that contain it, then its own."""
        known = self._positions.get(value)
        if known is None:
            computation, caller = value.scope.computation, value.scope.caller
            if computation.name not in self._orders:
                names = enumerate(one.name for one in computation.instructions)
                self._orders[computation.name] = {name: at for at, name in names}
            outer = () if caller is None else self.position(HloValue(caller.scope, caller.instruction.name))[:-1]
            own = value.scope.turn, self._orders[computation.name][value.name], math.inf
            known = self._positions[value] = (*outer, *own)
        return known

    def is_view(self, site: Site) -> bool:
        """Whether the instruction makes no data of its own, so that `origin` looks through it."""
        opcode = site.instruction.opcode
        if opcode in ("tuple", "get-tuple-element", *_BARRIERS, *_OPENED, *_CONTINUES, "copy-start", "copy-done"):
            return True
        if opcode in ("parameter", "while"):
            return site.scope.opened if opcode == "parameter" else self.inner(*site) is not None
        return _behind_async(HloValue(site.scope, site.instruction.name)) is not None

    def _step_back(self, value: HloValue) -> HloValue | None:
        """One step towards the origin; None at the origin."""
        scope, path, instruction = value.scope, value.path, value.instruction
        match instruction.opcode:
            case "get-tuple-element":
                return HloValue(scope, instruction.operands[0], (int(instruction.attributes["index"]), *path))
            case "tuple" if path and path[0] < len(instruction.operands):
                return HloValue(scope, instruction.operands[path[0]], path[1:])
            case "parameter" if scope.turn and scope.caller is not None and scope.computation.root is not None:
                before = self._open(*scope.caller, scope.turn - 1)  # what the iteration before has yielded
                return HloValue(before, scope.computation.root.name, path)
            case "parameter" if scope.opened and scope.caller is not None:
                # The operands of a call; an offloaded call gets its operands from its -update.
                users = scope.caller.scope.computation.users.get(scope.caller.instruction.name, ())
                update = next((user for user in users if user.opcode == "call-update"), None)
                arguments = scope.caller.instruction.operands + (() if update is None else update.operands[1:])
                number = parameter_number(instruction)
                return HloValue(scope.caller.scope, arguments[number], path) if number < len(arguments) else None
            case opcode if opcode in (*_OPENED, "while") and (inner := self.inner(scope, instruction)):
                root = inner.computation.root
                return None if root is None else HloValue(inner, root.name, path)
            case opcode if opcode in (*_CONTINUES, *_BARRIERS) and instruction.operands:
                return HloValue(scope, instruction.operands[0], path)
            case "copy-done":
                start = self.origin(HloValue(scope, instruction.operands[0])).instruction
                return HloValue(scope, start.operands[0], path)
            case _:
                return _behind_async(value)

    def _all_regions(self) -> Iterator[Scope]:
        seen: set[str] = set()
        queue = [Scope(self.module.entry, None, False)]
        while queue:  # ends: each computation is entered once
            region = queue.pop(0)
            if region.computation.name in seen:
                self._shared.add(region.computation.name)
                continue
            seen.add(region.computation.name)
            yield region
            for site in self._starting(region):
                started = (self.module.computation(name) for name in site.instruction.called)
                queue += [Scope(computation, site, False) for computation in started]


def loop_body(loop: Instruction) -> str:
    """The name of the computation that a loop repeats."""
    return loop.attributes.get("body", "").lstrip("%")


def parameter_number(instruction: Instruction) -> int:
    """The number of the operand that a parameter stands for."""
    return int(instruction.literal) if instruction.literal.isdigit() else 0


def _behind_async(value: HloValue) -> HloValue | None:
    """The data behind the end of an asynchronous pair, or behind TPU's markers of an overlapped collective.

    A fusion with AsyncCollectiveStart yields the collective's operand and its result. The fusion with
    AsyncCollectiveDone repeats the collective, and yields its result.
    """
    scope, path, instruction = value.scope, value.path, value.instruction
    opcode = instruction.opcode
    if opcode[-5:] == "-done" and instruction.operands:
        return HloValue(scope, instruction.operands[0], path)
    if opcode != "custom-call" or not instruction.operands:
        return None
    target = instruction.attributes.get("custom_call_target")
    if target == '"AsyncCollectiveStart"' and path in ((0,), (1,)):
        collective = scope.computation.by_name[instruction.operands[0]]
        return HloValue(scope, collective.operands[0] if path == (0,) else collective.name)
    if target == '"AsyncCollectiveDone"':
        repeated = [name for name in instruction.operands if _COLLECTIVE.match(scope.computation.by_name[name].opcode)]
        return HloValue(scope, repeated[0]) if repeated else None
    return None


_MOST_DEEP = 100


def array_paths(shape: Shape) -> Iterator[tuple[int, ...]]:
    """The paths to the arrays of a shape; raises `NotationError` for tuples nested as no compiler nests them."""
    left: list[tuple[tuple[int, ...], Shape]] = [((), shape)]
    while left:
        path, part = left.pop()
        if isinstance(part, Array):
            yield path
        elif len(path) > _MOST_DEEP:
            raise NotationError(f"a shape has tuples nested more than {_MOST_DEEP} deep; is the module whole?")
        else:
            left += [((*path, at), each) for at, each in reversed(list(enumerate(part)))]


# Value numbering: equal values get equal numbers. Compilers recompute a value inside every fusion that needs it.


_NOT_SAID = frozenset((
    "metadata", "frontend_attributes", "sharding", "calls", "channel_id", "control-predecessors", "to_apply",
    "called_computations", "true_computation", "false_computation", "branch_computations",
    "operand_layout_constraints",
))  # fmt: skip
_UNIQUE = ("parameter", "while", "conditional", "custom-call", "rng", "rng-bit-generator", "infeed", "recv", "call")
_MOVES = ("bitcast", "reshape", "transpose", "slice", "dynamic-slice", "concatenate", "pad", "constant")


class Numbering:
    """Numbers values so that equal values get equal numbers; a copy in another memory layout is equal.

    Outside of fusions only moves are compared. There, compilers have removed duplicate computations.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._known: dict[HloValue, int] = {}
        self._numbers: dict[tuple[object, ...], int] = {}

    def of(self, value: HloValue) -> int:
        """The number of a value."""
        value = self.flow.origin(value)
        if value in self._known:
            return self._known[value]
        instruction, opcode = value.instruction, value.instruction.opcode
        if opcode == "copy":
            number = self.of(HloValue(value.scope, instruction.operands[0]))
        else:
            key: tuple[object, ...] = (value.scope, value.name, value.path)
            if opcode not in _UNIQUE and (value.scope.opened or opcode in _MOVES):
                operands = tuple(self.of(HloValue(value.scope, name)) for name in instruction.operands)
                key = (describe_instruction(self.flow.module, instruction), value.path, operands)
            number = self._numbers.setdefault(key, len(self._numbers))
        self._known[value] = number
        return number


def describe_instruction(module: Module, instruction: Instruction) -> tuple[object, ...]:
    """What an instruction yields and does to its operands, whatever the names are in it and in what it calls.

    Memory layouts do not matter, nor a compiler's notes on speed. What the branches of a conditional do is left out.
    """
    called = instruction.called if instruction.opcode not in _STARTS_REGIONS else ()
    return (*_describe_alone(instruction), _digest_computations(module, called))


def _describe_alone(instruction: Instruction) -> tuple[object, ...]:
    """The same without what it calls."""
    attributes = {key: text for key, text in instruction.attributes.items() if key not in _NOT_SAID}
    if instruction.opcode != "custom-call":
        attributes.pop("backend_config", None)
    return (
        instruction.opcode,
        tuple((array.dtype, array.dims) for array in instruction.arrays),
        instruction.literal,
        tuple(sorted(attributes.items())),
    )


def _digest_computations(module: Module, names: Sequence[str]) -> tuple[bytes | str, ...]:
    """Digests of what computations yield, whatever the names are in them; the name of one that is not there."""
    reached, more = set[str](), list(names)
    while more:
        name = more.pop()
        if name in module.computations and name not in reached:
            reached.add(name)
            more += (each for one in module.computations[name].instructions for each in one.called)
    # In the order of the text, as what is called stands before its callers there: by recursion, computations that call
    # each other twice would take time without end, and one that calls itself, as in a damaged text, would never end.
    digests: dict[str, bytes] = {}
    for computation in module.computations.values() if reached else ():
        if computation.name not in reached:
            continue
        known: dict[str, bytes] = {}
        for one in computation.instructions:
            called = [digests.get(name, name) for name in one.called]
            operands = [known.get(name, b"") for name in one.operands]
            known[one.name] = digest_bytes(repr((_describe_alone(one), called, operands)).encode())
        digests[computation.name] = known.get("" if computation.root is None else computation.root.name, b"")
    return tuple(digests.get(name, name) for name in names)


def digest_bytes(data: bytes) -> bytes:
    """A short digest."""
    return hashlib.blake2b(data, digest_size=16).digest()

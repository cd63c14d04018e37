"""A compiled module: computations, their instructions, the arrays that these yield, and the lines that they come from.

`text_reader` reads them from what XLA prints, and `combined` takes sums of several arrays apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from reshard.errors import NotationError, quoted, shortened
from reshard.hlo.instruction import Instruction


@dataclass(frozen=True)
class Computation:
    """A list of instructions in the order of the text, which is the schedule if the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...] = field(repr=False)

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """The instructions by their names."""
        return MappingProxyType({instruction.name: instruction for instruction in self.instructions})

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """For each name, the instructions of this computation that take it as an operand."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return MappingProxyType({name: tuple(instructions) for name, instructions in users.items()})

    @cached_property
    def root(self) -> Instruction | None:
        """The instruction that yields the result of the computation."""
        return next((instruction for instruction in reversed(self.instructions) if instruction.root), None)


@dataclass(frozen=True)
class Module:
    """A compiled program; `num_partitions` and `replica_count` are None if its header leaves them out.

    `sums_in_place` is whether its compiler lets a sum between devices overwrite its operand; that for CPUs does not.
    On several TPU slices, both count the devices of one slice.
    """

    name: str
    computations: Mapping[str, Computation] = field(repr=False)
    entry: Computation
    num_partitions: int | None
    replica_count: int | None
    frames: Tables = field(repr=False)
    sums_in_place: bool = True

    @property
    def devices(self) -> int | None:
        """How many devices run the module, None if its header does not say."""
        if self.num_partitions is None and self.replica_count is None:
            return None
        return (self.num_partitions or 1) * (self.replica_count or 1)

    def computation(self, name: str) -> Computation:
        """Returns the computation of that name; raises `NotationError` if the text does not define it."""
        try:
            return self.computations[name]
        except (KeyError, TypeError):
            called = shortened(name) if isinstance(name, str) else quoted(name)  # pyright: ignore
            raise NotationError(
                f"HLO module {self.name}: an instruction calls {called}, which the text does not define; "
                "give the whole module"
            ) from None


# The stack frames of a module: the lines of the user's program that an instruction comes from.
#
#     metadata = "{" {key "=" value} "}"        keys op_name, stack_frame_id; before jax 0.10 source_file, source_line
#     tables   = "FileNames" {id string} "FunctionNames" {id string}
#                "FileLocations" {id "{file_name_id=" id "function_name_id=" id "line=" n ... "}"}
#                "StackFrames" {id "{file_location_id=" id "parent_frame_id=" id "}"}
#
# A frame of `StackFrames` is one line of a stack, and its parent is the line that called it. XLA prints the ids of
# parents one too high, so the outermost frame seems to be its own parent (jax 0.10.2 and 0.12.0.1).

_FIELD = re.compile(r'(\w+)=(?:"((?:[^"\\]|\\.)*)"|(-?\d+))')
_ROW = re.compile(r'^(\d+) (?:"((?:[^"\\]|\\.)*)"|\{(.*)\})\s*$')
_SECTIONS = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_OURS = str(Path(__file__).resolve().parent.parent)
_FRAMEWORKS = "jax|jaxlib|reshard|flax|haiku|equinox|optax|chex|jaxtyping|beartype|einops"
_LIBRARY = re.compile(rf"[/\\](?:site|dist)-packages[/\\](?:{_FRAMEWORKS})[/\\]")


@dataclass(frozen=True)
class Frame:
    """A line of a program.

    >>> Frame("train.py", 12).users, Frame("/env/site-packages/jax/_src/numpy.py", 1).users
    (True, False)
    """

    file: str
    line: int
    function: str = ""

    @property
    def users(self) -> bool:
        """Whether the line is of the program itself, rather than of jax, a framework on top of it or this package."""
        return not (_LIBRARY.search(self.file) or self.file.startswith(_OURS))


@dataclass(frozen=True)
class Source:
    """The origin of an instruction: JAX's name stack and the user's innermost line, as far as they are known.

    Instructions that the partitioner inserts have no line, or only the name of an argument. They get the line of the
    nearest instruction that has one, and `exact` is False. `frames` is the whole stack, innermost first, frameworks'
    lines included.

    >>> print(Source("jit(f)/mul", "train.py", 12), "|", Source("jit(f)/mul", "train.py", 12, exact=False))
    train.py:12 (jit(f)/mul) | near train.py:12 (jit(f)/mul)
    """

    op_name: str
    file: str | None = None
    line: int | None = None
    function: str | None = None
    exact: bool = True
    frames: tuple[Frame, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else ""
        about = "" if self.exact or not where else "near "
        return about + (f"{where} ({self.op_name})" if where and self.op_name else where or self.op_name or "unknown")


class Tables:
    """The stack frames of a module, read from the `text` of its tables on first use."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _frames(self) -> Mapping[int, tuple[Frame, int]]:
        """The frames by their ids, each with the id of its parent, 0 for none."""
        sections: dict[str, dict[int, Mapping[str, str]]] = {name: {} for name in _SECTIONS}
        section: str | None = None
        for line in self.text.splitlines():
            row = _ROW.match(line)
            if row is None:
                section = line.strip() if line.strip() in sections else section
            elif section is not None:  # A row that is a single string has it under the empty key.
                sections[section][int(row[1])] = metadata_fields(row[3]) if row[2] is None else {"": row[2]}
        files, functions, locations, frames = (sections[name] for name in _SECTIONS)
        # XLA prints the ids of parents one too high, so the outermost frame seems to be its own parent.
        offset = int("parent_frame_id" in frames.get(1, {}) and frames[1]["parent_frame_id"] == "1")
        by_id: dict[int, tuple[Frame, int]] = {}
        for at, row in frames.items():
            location = locations.get(_number_in(row, "file_location_id"), {})
            file = files.get(_number_in(location, "file_name_id"), {}).get("", "")
            function = functions.get(_number_in(location, "function_name_id"), {}).get("", "")
            if file:
                frame = Frame(file, _number_in(location, "line"), function)
                by_id[at] = frame, _number_in(row, "parent_frame_id") - offset
        return by_id

    def source(self, metadata: str) -> Source | None:
        """The origin that the metadata states: maybe without a line; None if there is neither line nor name."""
        fields = metadata_fields(metadata)
        stack: list[Frame] = []
        if "source_file" in fields:
            stack.append(Frame(fields["source_file"], _number_in(fields, "source_line")))
        at = 0 if stack else _number_in(fields, "stack_frame_id")
        while at in self._frames:
            frame, parent = self._frames[at]
            stack.append(frame)
            if parent >= at:  # a parent has a lower id than its frame, so the loop ends
                break
            at = parent
        op_name = fields.get("op_name", "")
        frame = next((frame for frame in stack if frame.users), stack[0] if stack else None)
        if frame is None:
            return Source(op_name) if op_name else None
        return Source(op_name, frame.file, frame.line, frame.function or None, frames=tuple(stack))


def _number_in(fields: Mapping[str, str], key: str) -> int:
    """A number of a row, 0 if it is left out; raises `NotationError` where something else stands."""
    text = fields.get(key, "0")
    if not re.fullmatch(r"-?\d+", text):
        raise NotationError(f"HLO stack frames: {key} is {text[:40]!r}, not a number; give a module as XLA prints it")
    return int(text)


def metadata_fields(text: str) -> dict[str, str]:
    """The keys and values of an instruction's `metadata`.

    >>> metadata_fields('{op_name="jit(f)/mul" stack_frame_id=2}')
    {'op_name': 'jit(f)/mul', 'stack_frame_id': '2'}
    """
    return {key: number or string for key, string, number in _FIELD.findall(text)}


# The line of an instruction that has none of its own. XLA's partitioner and its later passes insert collectives without
# metadata, or with the name of an argument alone. Such a collective serves a nearby instruction that has a line: one
# that uses its result, or made its operand.

_MOST_LOOKED_AT = 200  # instructions; in the programs tried, the nearest line is at most 10 away
_THROUGH_NO_DATA = ("tuple", "parameter", "constant")
_WRAPS = ("fusion", "call", "async")


class CallSite(NamedTuple):
    """An instruction in its computation."""

    computation: Computation
    instruction: Instruction


def source_of(module: Module, sites: tuple[CallSite, ...]) -> Source:
    """The origin of the first site's instruction; the other sites are its callers, innermost first.

    In this order: the instruction's own metadata; that of the callers that only wrap it (a fusion, an asynchronous
    call); that of the nearest instructions, users before operands, since a collective serves its users.
    """
    wrapping = next((at for at, one in enumerate(sites) if at and not one.instruction.opcode.startswith(_WRAPS)), None)
    wrapped = sites[:wrapping]
    own = [source for site in wrapped if (source := _stated_source(module, site.instruction))]
    if with_line := next((source for source in own if source.file), None):
        return replace(with_line, op_name=own[0].op_name or with_line.op_name)
    for site in wrapped:
        for source in _sources_nearby(module, site):
            return replace(source, op_name=own[0].op_name if own else source.op_name, exact=False)
    return own[0] if own else Source("")


def _stated_source(module: Module, instruction: Instruction) -> Source | None:
    """The origin in the instruction's own metadata."""
    metadata = instruction.metadata
    return module.frames.source(metadata) if metadata else None


def _sources_nearby(module: Module, site: CallSite) -> Iterator[Source]:
    """The origins of nearby instructions that have a line, the nearest first, and of those inside of fusions."""
    computation, instruction = site
    seen, queue = {instruction.name}, [instruction]
    for one in queue:  # breadth first: the queue grows while it is walked
        fresh: list[Instruction] = []
        operands = (computation.by_name.get(name) for name in one.operands)
        for near in (*computation.users.get(one.name, ()), *operands):
            if near is not None and near.opcode not in _THROUGH_NO_DATA and near.name not in seen:
                fresh.append(near)
        seen.update(near.name for near in fresh)
        queue += fresh[: max(0, _MOST_LOOKED_AT - len(queue))]
        for near in fresh:
            fused = [module.computation(name) for name in near.called] if near.opcode == "fusion" else []
            for inner in (near, *(inner for held in fused for inner in held.instructions)):
                source = _stated_source(module, inner)
                if source and source.file:
                    yield source

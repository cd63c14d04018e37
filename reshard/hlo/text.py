"""XLA's HLO text, read as far as the traffic between devices needs it, and lazily.

    module      = "HloModule" name {"," attribute} [tables] {computation}
    tables      = "FileNames" ... "FunctionNames" ... "FileLocations" ... "StackFrames" ...    see `frames`
    computation = ["ENTRY"] name ["(" parameters ")" "->" shape] "{" {instruction} "}" {"," attribute}
    instruction = ["ROOT"] name "=" shape opcode "(" operands ")" {"," attribute}              one line each
    shape       = array | "(" [shape {"," shape}] ")"
    array       = dtype "[" [size {"," size}] "]" ["{" layout "}"]         f32[8,4]{1,0:T(8,128)(2,1)S(1)}
    size        = number | "<=" number                                     a bound counts as the size
    operands    = [[shape] name {"," [shape] name}] | what a constant or a parameter holds
    attribute   = key "=" value                                            brackets and quotes in it balance

A name may be printed with or without its `%`; comments `/*index=5*/` are dropped. What XLA prints for CPU, GPU
and TPU is one grammar: what differs is layouts, opcodes and the contents of `backend_config`.

A line is split at its opcode when the module is read, and the parts are read when they are asked for: a module
is mostly instructions that nobody asks about, and a constant may be megabytes long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NoReturn

from reshard.errors import NotationError
from reshard.hlo.frames import Tables

_MODULE = re.compile(r"^HloModule +([^\s,]+)(.*)$", re.MULTILINE)
_COMPUTATION = re.compile(r"(ENTRY +)?%?([\w.\-]+).*\{\s*$")
_NAMED = re.compile(r"\s+(ROOT +)?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"(.*?)\s([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\](?:\{([^}]*)\})?")
_SHAPE_PART = re.compile(rf"{_ARRAY.pattern}|([()])")
_COMMENT = re.compile(r"/\*.*?\*/")
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|[{(\[]|[})\]]|,')
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(?:%?([\w.\-]+)|\{([^}]*)\})"
)
_NO_OPERANDS = ("constant", "parameter")
_NO_BYTES = ("token", "opaque")


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a shape; `dtype` is HLO's name (`bf16`), `layout` the text in its braces."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes without the padding of tiles; types below a byte are packed; tokens have none.

        >>> Array("bf16", (8, 4)).nbytes, Array("s4", (3,)).nbytes, Array("token", ()).nbytes
        (64, 2, 0)
        """
        return -(-self.elements * _bits(self.dtype) // 8)


Shape = Array | tuple["Shape", ...]
"""What an instruction yields: an array or, nested, a tuple of them."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name without `%`, its opcode, and the rest, read when asked for."""

    name: str
    opcode: str
    root: bool
    shape_text: str = field(repr=False)
    rest: str = field(repr=False)

    @cached_property
    def shape(self) -> Shape:
        return _shape(self.shape_text)

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays of the result, in order, out of their tuples."""
        return tuple(_array(*found) for found in _ARRAY.findall(self.shape_text))

    @property
    def results(self) -> tuple[Array, ...]:
        """The arrays that it makes: a -start yields its operands before them, and it and a recv contexts after."""
        shape = self.shape
        if isinstance(shape, Array) or len(shape) < 2:
            return self.arrays
        if self.opcode == "recv":
            return _flat(shape[0])
        if not self.opcode.endswith("-start"):
            return self.arrays
        plain = self.opcode == "all-reduce-start" and all(isinstance(part, Array) for part in shape)
        return self.arrays if plain else _flat(shape[1])

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands, without `%`."""
        if self.opcode in _NO_OPERANDS:
            return ()
        text = _COMMENT.sub("", self.rest[: _close(self.rest)])
        if "%" in text:
            return tuple(_NAME.findall(text))
        return tuple(part.split()[-1] for part in _ARRAY.sub("", text).split(",") if part.strip(" ()"))

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """What follows the operands: `{"channel_id": "1", "dimensions": "{0}", ...}`, values as text."""
        parts = _pieces(self.rest[_close(self.rest) + 1 :])
        pairs = (part.partition("=") for part in parts)
        return MappingProxyType({key.strip(): value.strip() for key, _, value in pairs if key.strip()})

    @property
    def sharding(self) -> str | None:
        """The text of its `sharding=` attribute, which `Layout.from_hlo` reads."""
        return self.attributes.get("sharding")

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that it runs, in their order."""
        if "%" not in self.rest and "=" not in self.rest:
            return ()
        found = _CALLED.findall(self.rest)
        names = (name for one, several in found for name in ([one] if one else several.split(",")))
        return tuple(name.strip().lstrip("%") for name in names if name.strip())


@dataclass(frozen=True)
class Computation:
    """A list of instructions in the order of the text, which is the schedule where the module has one."""

    name: str
    instructions: tuple[Instruction, ...] = field(repr=False)

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return MappingProxyType({instruction.name: instruction for instruction in self.instructions})

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """For each name, the instructions of this computation that take it as an operand."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return MappingProxyType({name: tuple(users) for name, users in found.items()})

    @cached_property
    def root(self) -> Instruction | None:
        return next((instruction for instruction in reversed(self.instructions) if instruction.root), None)


@dataclass(frozen=True)
class Module:
    """A module; `num_partitions` and `replica_count` are None where its header does not say.

    On TPU with several slices, they are those of one slice.
    """

    name: str
    computations: Mapping[str, Computation] = field(repr=False)
    entry: Computation
    num_partitions: int | None
    replica_count: int | None
    frames: Tables = field(repr=False)

    @property
    def devices(self) -> int | None:
        """How many devices run it, or None where the header does not say."""
        if self.num_partitions is None and self.replica_count is None:
            return None
        return (self.num_partitions or 1) * (self.replica_count or 1)

    def computation(self, name: str) -> Computation:
        """The computation of that name; raises `NotationError` if the text has none."""
        try:
            return self.computations[name]
        except KeyError:
            raise NotationError(
                f"HLO module {self.name}: an instruction calls {name}, which the text does not define; "
                "give the whole module"
            ) from None


def parse(text: str) -> Module:
    """Reads a module as `compiled.as_text()` and XLA's dumps print it.

    Raises `NotationError`, with what to pass instead, for text that is no HLO module or only part of one.

    >>> module = parse('''HloModule m, num_partitions=4
    ...
    ... ENTRY %main {
    ...   %p = f32[2]{0} parameter(0)
    ...   ROOT %g = f32[8]{0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
    ... }''')
    >>> module.entry.root.arrays, module.entry.root.operands, module.entry.root.attributes["dimensions"]
    ((Array(dtype='f32', dims=(8,), layout='0'),), ('p',), '{0}')
    """
    headers = list(_MODULE.finditer(text)) if isinstance(text, str) else []  # pyright: ignore[reportUnnecessaryIsInstance]
    if len(headers) != 1:
        _refuse(text, len(headers))
    header = headers[0]
    computations, entry, preamble = _computations(header[1], text[header.end() :].split("\n"))
    return Module(
        header[1],
        MappingProxyType(computations),
        computations[entry],
        _count(header[2], "num_partitions"),
        _count(header[2], "replica_count"),
        Tables("\n".join(preamble)),
    )


def _computations(module: str, lines: list[str]) -> tuple[dict[str, Computation], str, list[str]]:
    """The computations by name, the name of the entry, and the lines before the first."""
    found: dict[str, Computation] = {}
    entry: str | None = None
    name: str | None = None
    preamble: list[str] = []
    body: list[Instruction] = []
    for line in lines:
        if line[:1] in (" ", "\t") and name is not None:
            body += _instruction(module, name, line)
        elif line[:1] == "}" and name is not None:
            found[name], name, body = Computation(name, tuple(body)), None, []
        elif name is None and (head := _COMPUTATION.match(line)):
            name = head[2]
            entry = name if head[1] else entry
        elif not found:
            preamble.append(line)
    if name is not None or entry is None:
        where = f"inside computation {name}" if name else "before its ENTRY computation"
        raise NotationError(f"HLO module {module}: the text ends {where}; give the whole module")
    return found, entry, preamble


def _instruction(module: str, computation: str, line: str) -> list[Instruction]:
    """The instruction of a line; none for a line that continues a literal."""
    named = _NAMED.match(line)
    if named is None:
        return []
    opcode = _OPCODE.match(line, named.end())
    if opcode is None:
        raise NotationError(
            f"HLO module {module}, computation {computation}: cannot read the instruction {line.strip()[:120]!r}; "
            "an instruction is a name, =, a shape, an opcode and its operands in parentheses"
        )
    return [Instruction(named[2], opcode[2], bool(named[1]), opcode[1], line[opcode.end() :])]


def _bits(dtype: str) -> int:
    """The size of an element, which HLO's names state."""
    if dtype in _NO_BYTES:
        return 0
    if dtype == "pred":
        return 8
    found = re.search(r"\d+", dtype)
    if found is None:
        raise NotationError(f"HLO dtype {dtype!r}: its size is not known; names like f32, bf16, s4 and pred state it")
    return int(found[0])


def _array(dtype: str, dims: str, layout: str) -> Array:
    return Array(dtype, tuple(int(size.lstrip("<= ")) for size in dims.split(",") if size.strip()), layout)


def _shape(text: str) -> Shape:
    stack: list[list[Shape]] = [[]]
    for part in _SHAPE_PART.finditer(text):
        if part[4] == "(":
            stack.append([])
        elif part[4] == ")" and len(stack) > 1:
            done = tuple(stack.pop())
            stack[-1].append(done)
        elif part[1]:
            stack[-1].append(_array(part[1], part[2], part[3] or ""))
    if len(stack) != 1 or len(stack[0]) != 1:
        raise NotationError(f"HLO shape {text[:120]!r}: give one array, as in f32[8,4]{{1,0}}, or a tuple of shapes")
    return stack[0][0]


def _flat(shape: Shape) -> tuple[Array, ...]:
    return (shape,) if isinstance(shape, Array) else tuple(array for part in shape for array in _flat(part))


def _close(text: str) -> int:
    """Where the parenthesis ends that opens just before the text."""
    depth = 0
    for mark in _MARK.finditer(text):
        depth += {"(": 1, ")": -1}.get(mark[0], 0)
        if depth < 0:
            return mark.start()
    return len(text)


def _pieces(text: str) -> list[str]:
    """The text cut at the commas outside of all brackets and quotes."""
    found: list[str] = []
    depth = start = 0
    for mark in _MARK.finditer(text):
        if mark[0] == "," and depth == 0:
            found.append(text[start : mark.start()])
            start = mark.end()
        elif mark[0] in "{([":
            depth += 1
        elif mark[0] in "})]":
            depth -= 1
    return [*found, text[start:]]


def _count(header: str, key: str) -> int | None:
    found = re.search(rf"\b{key}=(\d+)", header)
    return int(found[1]) if found else None


def _refuse(text: object, headers: int) -> NoReturn:
    if headers:
        raise NotationError(f"HLO text: HloModule stands {headers} times; give one module at a time")
    raise NotationError(f"HLO text: {_instead(text)}")


def _instead(text: object) -> str:
    wanted = "give the text of an optimized module: compiled.as_text(), or a .txt file of --xla_dump_to"
    if not isinstance(text, str):
        return f"it is {type(text).__name__}, not text; {wanted}"
    if not text.strip():
        return f"it is empty; {wanted}"
    if re.search(r"\bmodule @|\bstablehlo\.|\bfunc\.func\b|\bsdy\.", text):
        return f"this is StableHLO, before XLA has compiled it; compile it and {wanted}"
    if re.search(r"[\x00-\x08\x0e-\x1f\ufffd]", text[:4096]):
        return f"this is binary, a serialized proto perhaps; {wanted}, or set --xla_dump_hlo_as_text"
    return f"no line of it starts with HloModule: {text.strip()[:60]!r}; {wanted}"

"""Reads XLA's text of an HLO module, as far as communication needs it, and lazily.

    module      = "HloModule" name {"," attribute} [tables] {computation}
    tables      = "FileNames" ... "FunctionNames" ... "FileLocations" ... "StackFrames" ...    see `module`
    computation = ["ENTRY"] name ["(" parameters ")" "->" shape] "{" {instruction} "}" {"," attribute}
    instruction = ["ROOT"] name "=" shape opcode "(" operands ")" {"," attribute}              one line each
    operands    = [[shape] name {"," [shape] name}] | the literal of a constant, the number of a parameter
    attribute   = key "=" value                                            brackets and quotes in it balance
    shape       = array | "(" [shape {"," shape}] ")"
    array       = dtype "[" [size {"," size}] "]" ["{" layout "}"]         f32[8,4]{1,0:T(8,128)(2,1)S(1)}
    size        = number | "<=" number                                     a bound counts as the size

A name may be printed with or without its `%`; comments `/*index=5*/` are dropped. XLA prints one grammar for CPU, GPU
and TPU; layouts, opcodes and the contents of `backend_config` differ.

`parse` only splits each line at its opcode; a `_Line` parses its operands and attributes on first use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from reshard.errors import NotationError
from reshard.hlo.module import Array, Computation, Instruction, Module, Shape, Tables, read_tables

_MOST_DIGITS = 4300  # Python reads no longer numbers.
_MODULE = re.compile(r"^HloModule +([^\s,]+)(.*)$", re.MULTILINE)
_COMPUTATION = re.compile(r"(ENTRY +)?%?([\w.\-]+).*\{\s*$")
_NAMED = re.compile(r"\s+(ROOT +)?%?([\w.\-]+) = ")
_ONE_ARRAY = re.compile(r"\s+(ROOT +)?%?([\w.\-]+) = ([^\s(]\S*) ([a-z][\w\-]*)\(")  # most lines
_OPCODE = re.compile(r"(.*?)\s([a-z][\w\-]*)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|[{(\[]|[})\]]|,')
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(?:%?([\w.\-]+)|\{([^}]*)\})"
)
_NO_OPERANDS = ("constant", "parameter")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\](?:\{([^}]*)\})?")
_SHAPE_PART = re.compile(rf"{ARRAY.pattern}|([()])")
_MARKS = (
    ("tpu", re.compile(r"\{[\d,]*:T\(\d")),  # tiled memory layouts
    ("gpu", re.compile(r'"operation_queue_id"|"fusion_backend_config"|custom_call_target="__(?:cublas|cudnn|triton)')),
)


class _Line(NamedTuple):
    """An instruction's line: its opcode, the text of its shape, and all that stands after the opening parenthesis."""

    opcode: str
    shape_text: str
    rest: str

    @property
    def is_array(self) -> bool:
        return not self.shape_text.startswith("(")

    def shape(self) -> Shape:
        return read_shape(self.shape_text)

    def operands(self) -> tuple[str, ...]:
        if self.opcode in _NO_OPERANDS:
            return ()
        text = _COMMENT.sub("", self.rest[: _find_close(self.rest)])
        if "%" in text:
            return tuple(_NAME.findall(text))
        return tuple(part.split()[-1] for part in ARRAY.sub("", text).split(",") if part.strip(" ()"))

    def attributes(self) -> Mapping[str, str]:
        text = self.rest[_find_close(self.rest) + 1 :]
        parts: list[str] = []
        depth = start = 0
        for mark in _MARK.finditer(text):  # The commas that are outside of all brackets and quotes end an attribute.
            if mark[0] == "," and depth == 0:
                parts.append(text[start : mark.start()])
                start = mark.end()
            elif mark[0] in "{([":
                depth += 1
            elif mark[0] in "})]":
                depth -= 1
        pairs = (part.partition("=") for part in (*parts, text[start:]))
        return MappingProxyType({key.strip(): value.strip() for key, _, value in pairs if key.strip()})

    def called(self) -> tuple[str, ...]:
        if "%" not in self.rest and "=" not in self.rest:
            return ()
        attributes = _CALLED.findall(self.rest)
        names = (name for one, several in attributes for name in ([one] if one else several.split(",")))
        return tuple(name.strip().lstrip("%") for name in names if name.strip())

    def literal(self) -> str:
        return self.rest.partition(")")[0].strip() if self.opcode in _NO_OPERANDS else ""

    def metadata(self) -> str | None:
        return self.attributes().get("metadata") if "metadata=" in self.rest else None


def parse(text: str) -> Module:
    """Reads an HLO module, as `compiled.as_text()` or a dump of XLA prints it.

    Raises `NotationError`, which says what to pass instead, for text that is not one whole HLO module.

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
        raise NotationError(f"HLO text: {_diagnose_text(text, len(headers))}")
    if re.search(rf"[0-9]{{{_MOST_DIGITS + 1}}}", text):
        raise NotationError(
            f"HLO text: it has a number of more than {_MOST_DIGITS} digits; give a module as XLA prints it"
        )
    header = headers[0]
    computations: dict[str, Computation] = {}
    entry: str | None = None
    name: str | None = None
    preamble: list[str] = []
    body: list[Instruction] = []
    for line in text[header.end() :].split("\n"):
        if line[:1] in (" ", "\t") and name is not None:
            if (instruction := _read_instruction_line(header[1], name, line)) is not None:
                body.append(instruction)
        elif line[:1] == "}" and name is not None:
            computations[name], name, body = Computation(name, tuple(body)), None, []
        elif name is None and (head := _COMPUTATION.match(line)):
            name = head[2]
            entry = name if head[1] else entry
        elif not computations:
            preamble.append(line)
    if name is not None or entry is None:
        where = f"inside computation {name}" if name else "before its ENTRY computation"
        raise NotationError(f"HLO module {header[1]}: the text ends {where}; give the whole module")
    counts = [re.search(rf"\b{key}=(\d+)", header[2]) for key in ("num_partitions", "replica_count")]
    partitions, replicas = (None if count is None else int(count[1]) for count in counts)
    frames = Tables(lambda: read_tables("\n".join(preamble)))
    return Module(header[1], MappingProxyType(computations), computations[entry], partitions, replicas, frames)


def _read_instruction_line(module: str, computation: str, line: str) -> Instruction | None:
    """The instruction on a line; None if the line only continues a literal."""
    if plain := _ONE_ARRAY.match(line):
        return Instruction(plain[2], plain[4], bool(plain[1]), _Line(plain[4], plain[3], line[plain.end() :]))
    named = _NAMED.match(line)
    if named is None:
        return None
    opcode = _OPCODE.match(line, named.end())
    if opcode is None:
        raise NotationError(
            f"HLO module {module}, computation {computation}: cannot read the instruction {line.strip()[:120]!r}; "
            "an instruction is a name, =, a shape, an opcode and its operands in parentheses"
        )
    return Instruction(named[2], opcode[2], bool(named[1]), _Line(opcode[2], opcode[1], line[opcode.end() :]))


def _find_close(text: str) -> int:
    """The index of the parenthesis that closes the one just before the text."""
    depth = 0
    for mark in _MARK.finditer(text):
        depth += {"(": 1, ")": -1}.get(mark[0], 0)
        if depth < 0:
            return mark.start()
    return len(text)


def _diagnose_text(text: object, headers: int) -> str:
    """What the text seems to be, and what to give instead."""
    advice = "give the text of an optimized module: compiled.as_text(), or a .txt file of --xla_dump_to"
    if headers:
        return f"it has {headers} HloModule headers; give one module at a time"
    if not isinstance(text, str):
        return f"it is {type(text).__name__}, not text; {advice}"
    if not text.strip():
        return f"it is empty; {advice}"
    if re.search(r"\bmodule @|\bstablehlo\.|\bfunc\.func\b|\bsdy\.", text):
        return f"this is StableHLO, before XLA has compiled it; compile it and {advice}"
    if re.search(r"[\x00-\x08\x0e-\x1f\ufffd]", text[:4096]):
        return f"this is binary, perhaps a serialized proto; {advice}, or set --xla_dump_hlo_as_text"
    return f"no line of it starts with HloModule: {text.strip()[:60]!r}; {advice}"


def compiled_platform(text: str) -> str:
    """`tpu` or `gpu`, by tiled layouts and by backend configurations; else `cpu`.

    >>> compiled_platform("ENTRY %main (p: bf16[8,128]) -> bf16[8,128] { %p = bf16[8,128]{1,0:T(8,128)} parameter(0)")
    'tpu'
    >>> compiled_platform("ENTRY %main (p: f32[8]) -> f32[8] { ROOT %p = f32[8]{0} parameter(0) }")
    'cpu'
    """
    return next((platform for platform, mark in _MARKS if mark.search(text)), "cpu")


def read_shape(text: str) -> Shape:
    """Reads a shape; raises `NotationError` for text that is not exactly one.

    >>> read_shape("(f32[8,4]{1,0}, s32[])")
    (Array(dtype='f32', dims=(8, 4), layout='1,0'), Array(dtype='s32', dims=(), layout=''))
    """
    stack: list[list[Shape]] = [[]]
    for part in _SHAPE_PART.finditer(text):
        if part[4] == "(":
            stack.append([])
        elif part[4] == ")" and len(stack) > 1:
            shape = tuple(stack.pop())
            stack[-1].append(shape)
        elif part[1]:
            stack[-1].append(_make_array(part[1], part[2], part[3] or ""))
    if len(stack) != 1 or len(stack[0]) != 1:
        raise NotationError(f"HLO shape {text[:120]!r}: give one array, as in f32[8,4]{{1,0}}, or a tuple of shapes")
    return stack[0][0]


def read_arrays(text: str) -> tuple[Array, ...]:
    """Reads the arrays of a shape in order, without their tuples: faster than `read_shape`, and unchecked.

    >>> [array.dtype for array in read_arrays("((f32[8]), u32[])")]
    ['f32', 'u32']
    """
    return tuple(_make_array(*parts) for parts in ARRAY.findall(text))


@lru_cache(maxsize=1 << 14)  # A module has few shapes, and names each of them often.
def _make_array(dtype: str, dims: str, layout: str) -> Array:
    try:
        return Array(dtype, tuple(int(size.lstrip("<= ")) for size in dims.split(",") if size.strip()), layout)
    except ValueError:
        raise NotationError(f"HLO shape {dtype}[{dims[:80]}]: its sizes are not numbers; write f32[8,4]") from None

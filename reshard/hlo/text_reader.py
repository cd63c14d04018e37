"""Reads XLA's text of an HLO module, as far as communication needs it, and lazily.

    module      = ["HloModule" name {"," attribute}] [tables] computation {computation}
    tables      = "FileNames" ... "FunctionNames" ... "FileLocations" ... "StackFrames" ...    see `module`
    computation = ["ENTRY"] name ["(" parameters ")" "->" shape] "{" {instruction} "}" {"," attribute}
    instruction = ["ROOT"] name "=" [shape] opcode "(" operands ")" {"," attribute}
    operands    = [operand {"," operand}] | the literal of a constant, the number of a parameter
    operand     = [shape] name {"#" element} | [shape] opcode "(" operands ")"
    attribute   = key "=" value                                            brackets and quotes in it balance
    shape       = array | "(" [shape {"," shape}] ")" | "b(" shape ")"
    array       = dtype "[" [size {"," size}] "]" ["{" layout "}"]         f32[8,4]{1,0:T(8,128)(2,1)S(1)}
    size        = number | "<=" number                                     a bound counts as the size

A name may be printed with or without its `%`; without an `ENTRY` the last computation is the entry, without a `ROOT`
the last instruction is the root. XLA prints one grammar for CPU, GPU and TPU; layouts, opcodes and the contents of
`backend_config` differ.

XLA's parser, which is the judge of what is HLO, does not care for lines: an instruction may be wrapped, several may
stand on one line, comments anywhere. What XLA *prints* has one instruction on each line, and dumps are large. So
`_read_printed` takes text in exactly that form, one regular expression a line; the first line of any other form makes
`_Reader` read the text from its start, which spells what it reads as XLA prints it:

    add(max(a, b), t#0)         max.anon and t_0 become instructions of their own
    to_apply={ROOT r = ...}     a computation _, which is called by its name
    s = add(a, b)               the shape is inferred, see `_infer_shape`

Neither parses operands and attributes: an `Instruction` does so on first use.

Where XLA guesses, we do not. Refused are a text that ends before the `ENTRY` whose layout its header gives, a single
instruction without a computation, and, when it is asked for, a shape that cannot be known: `f32[?,8]`, or one that is
left out of a convolution, a reduce-window and the like (`_UNKNOWN`). Numbers left out of a constant, also those printed
as `...`, are unknown here, and zeros or garbage to XLA, which also corrects what a text says of the shapes of a send, a
recv and an outfeed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NoReturn

from reshard.errors import NotationError
from reshard.hlo.instruction import (
    CALLS,
    NO_OPERANDS,
    STRING,
    Array,
    Instruction,
    Shape,
    find_close,
    list_attributes,
    spell_shape,
)
from reshard.hlo.module import Computation, Module, Tables

_LONGEST_SHAPE = 1 << 20  # characters of one that is inferred
_MOST_DIGITS = 4300  # Python reads no longer numbers.

# What XLA prints. The rest of a line has no `name =` outside of its strings, so it holds one instruction only, and the
# next line starts another or ends the computation. Operands that are instructions themselves (`add(negate(a), b)`) or
# elements (`t#0`) have a parenthesis after a lower-case word, or a `#`.
_TUPLE = r"\((?:[^()]++|\((?:[^()]++|\([^()]*+\))*+\))*+\)"
_PRINTED = re.compile(
    rf"  (ROOT )?%?([\w.\-]+) = ([a-z]\w*\[[\d,<=]*\](?:\{{[^}}]*\}})?|{_TUPLE}) ([a-z][\w\-]*)\("
    rf"((?:[^\"'\n/=%(#{{]++|\{{[^\"'\n/%(#{{}}]*+\}}|\{{|{STRING}|'[^'\"\n]*'|%[\w.\-]++(?!\s*=)|(?<!\s)=|(?<![a-z0-9_\-])\("
    rf"|/\*[^*\n]*\*/)*+)"
    r"\n(?=  \S|\})"
)
_PRINTED_HEADER = re.compile(rf"^HloModule ([^\s,%:]+)((?:[^\n\"'/]++|{STRING}|'[^'\"\n]*'|/\*[^*\n]*\*/)*+)\n", re.M)
_PRINTED_HEAD = re.compile(r"\s*^(ENTRY )?%?([\w.\-]+)(?: \((?:[^\"=\n/{]++|\{(?!\n)|/\*[^*\n]*\*/)*+| )\{\n", re.M)
_PRINTED_TABLES = re.compile(r"(?:\s*^(?:[A-Z][A-Za-z]+|\d+ (?:\"(?:[^\"\\]|\\.)*\"|\{[\w =\-]*\}))$)*", re.M)
_PRINTED_END = re.compile(r"\}(?:, execution_thread=\"[^\"]*\")?(?:\n|$)")

# What XLA reads, without comments.
_COMMENT = re.compile(rf"({STRING}|'(?:[^'\\]|\\.)*+')|/\*.*?(?:\*/|\Z)|//[^\n\r]*", re.S)
_HEADER = re.compile(r"\s*HloModule\s+%?([^\s,{:]+):?")
_TABLE = re.compile(rf"\s*(?:(File(?:Names|Locations)|FunctionNames|StackFrames)\b|\d+\s*(?:{STRING}|\{{[^}}]*\}}))")
_HEAD = re.compile(r"\s*(ENTRY\s+)?%?([\w.\-]+):?\s*(?=[({])")
_FIRST = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+):?\s*=")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\s*\(")
_OPERAND = re.compile(r"\s*%?([\w.\-]+):?((?:\s*#\s*\d+)*)\s*(?=[,)])")
_KEY = re.compile(r"\s*,\s*([\w.\-]+)=\s*")
_ONE_NAME = re.compile(r"\s*%?([\w.\-]+):?")
_ONE_ARRAY = re.compile(r"\s*[a-z]\w*\s*\[[^\]]*\](?:\s*\{(?=\s*[\d:])[^}]*\})?")
_HEADER_LINE, _END = re.compile(r"^[ \t]*HloModule\b", re.M), re.compile(r"\s*\Z")
_SEVERAL, _OPEN, _CLOSE, _CLOSE_OPERANDS, _COMMA = map(
    re.compile, (r"\s*b?\s*\(", r"\s*\{", r"\s*\}", r"\s*\)", r"\s*,")
)
_NEXT_OPERAND = re.compile(r"\s*(?:,|(?=\)))")
_INLINE = re.compile(r"\s*\{(?=\s*(?:ROOT\s+)?%?[\w.\-]+:?\s*=)")
_VALUE_END = re.compile(
    rf"{STRING}|'(?:[^'\\]|\\.)*+'|[{{(\[]|[}})\]]|,|%[\w.\-]+\s*=|(?<![\w.\-%])[\w.\-]+:?\s+=|\bROOT\s"
)
_WORD_END = re.compile(rf"{STRING}|'(?:[^'\\]|\\.)*+'|[{{(\[]|[}})\]]|,|\s")

_MARKS = (
    ("tpu", re.compile(r"\{[\d,]*:T\(\d")),  # tiled memory layouts
    ("gpu", re.compile(r'"operation_queue_id"|"fusion_backend_config"|custom_call_target="__(?:cublas|cudnn|triton)')),
)


def parse(text: str) -> Module:
    """Reads an HLO module, as `compiled.as_text()` or a dump of XLA prints it, or as people write it for XLA.

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
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise NotationError(f"HLO text: {_diagnose_text(text)}")
    if re.search(rf"[0-9]{{{_MOST_DIGITS + 1}}}", text):
        raise NotationError(
            f"HLO text: it has a number of more than {_MOST_DIGITS} digits; give a module as XLA prints it"
        )
    if (module := _read_printed(text)) is not None:
        return module
    try:
        return _Reader(text).module()
    except RecursionError:
        raise NotationError("HLO text: its computations or instructions nest hundreds of levels deep") from None


def _read_printed(text: str) -> Module | None:
    """The module of a text in exactly the form that XLA prints; None for any other text."""
    if (header := _PRINTED_HEADER.search(text)) is None:
        return None
    tables = _PRINTED_TABLES.match(text, header.end())
    at = header.end() if tables is None else tables.end()
    computations: dict[str, Computation] = {}
    entry = ""
    while head := _PRINTED_HEAD.match(text, at):
        at, body = head.end(), list[Instruction]()
        while line := _PRINTED.match(text, at):
            at = line.end()
            body.append(Instruction(line[2], line[4], bool(line[1]), line[3], line[5]))
        end = _PRINTED_END.match(text, at)
        if end is None or len({one.name for one in body}) < max(len(body), 1):
            return None
        at = end.end()
        computations[head[2]] = _make_computation(head[2], body)
        entry = head[2] if head[1] else entry
    if text[at:].strip() or not entry:
        return None
    return _make_module(header[1], header[2], text[header.end() : tables.end()] if tables else "", computations, entry)


def _make_computation(name: str, body: list[Instruction]) -> Computation:
    if body and not any(one.root for one in body):
        body[-1] = replace(body[-1], root=True)
    return Computation(name, tuple(body))


def _make_module(name: str, header: str, tables: str, computations: dict[str, Computation], entry: str) -> Module:
    attributes = dict(list_attributes(header))
    counts = [re.fullmatch(r"\d+", attributes.get(key, "")) for key in ("num_partitions", "replica_count")]
    partitions, replicas = (None if count is None else int(count[0]) for count in counts)
    return Module(name, MappingProxyType(computations), computations[entry], partitions, replicas, Tables(tables))


class _Reader:
    """Reads a module from its start to its end, in any of the forms that XLA reads."""

    def __init__(self, text: str) -> None:
        self.given = text
        start = _HEADER_LINE.search(text)  # What a program printed before its module is not of it.
        self.text = _COMMENT.sub(lambda found: found[1] or " ", text[start.start() if start else 0 :])
        self.at = self.began = 0
        self.where = ""
        self.computations: dict[str, Computation] = {}
        self.given_names: set[str] = set()

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        self.at = self.at if found is None else found.end()
        return found

    def need(self, pattern: re.Pattern[str]) -> re.Match[str]:
        return self.match(pattern) or self.fail()

    def fail(self) -> NoReturn:
        headers = len(_HEADER_LINE.findall(self.text))
        if headers > 1:
            raise NotationError(f"HLO text: it has {headers} HloModule headers; give one module at a time")
        if not headers and not self.computations:
            raise NotationError(f"HLO text: {_diagnose_text(self.given)}")
        left = self.text[self.at :].strip()
        if not left:
            raise NotationError(f"HLO module {self.where}: the text ends there; give the whole module")
        shown = " ".join(self.text[self.began : self.at + 40].split())
        raise NotationError(
            f"HLO module {self.where}: cannot read the instruction {shown[:120]!r} from {left[:40]!r} on; "
            "an instruction is a name, =, a shape, an opcode and its operands in parentheses"
        )

    def module(self) -> Module:
        header = self.match(_HEADER)
        name = "" if header is None else header[1]
        attributes = self.attributes(_WORD_END) if header else ""
        rows: list[str] = []
        while row := self.match(_TABLE):
            rows.append(row[0].strip())
        entry = ""
        while True:
            self.where = f"{name}, before its next computation"
            self.began = self.at
            head = None if self.computations and self.match(_END) else self.need(_HEAD)
            if head is None:
                break
            if self.match(_SEVERAL):  # Its parameters are instructions as well.
                self.at = find_close(self.text, self.at) + 1
                self.need(re.compile(r"\s*->"))
                self.take_shape()
            self.where = f"{name}, inside computation {head[2]}"
            self.need(_OPEN)
            self.read_body(head[2])
            self.attributes(_WORD_END)
            entry = head[2] if head[1] else entry
        if not entry and "entry_computation_layout=" in attributes:
            raise NotationError(f"HLO module {name}: the text ends before its ENTRY computation; give the whole module")
        entry = entry or next(reversed(self.computations))
        return _make_module(name or f"module_{entry}", attributes, "\n".join(rows), self.computations, entry)

    def read_body(self, name: str) -> None:
        """Reads the instructions of a computation up to its closing brace."""
        made: dict[str, Instruction] = {}
        while not self.match(_CLOSE):
            self.began = self.at
            first = self.need(_FIRST)
            self.read_instruction(first[2], bool(first[1]), made, is_operand=False)
        if not made:
            self.fail()
        self.computations[name] = _make_computation(name, list(made.values()))

    def read_instruction(self, name: str, root: bool, made: dict[str, Instruction], *, is_operand: bool) -> str:
        """Reads what follows the name of an instruction, or an operand that is one; returns its name."""
        shape, opcode = self.take_shape(), self.need(_OPCODE)[1]
        if opcode in NO_OPERANDS:
            end = find_close(self.text, self.at)
            operands, inside, self.at = [], self.text[self.at : end].strip(), end + 1
        else:
            operands = self.operands(made)
            inside = ", ".join(f"%{one}" for one in operands)
        rest = f"{inside}){'' if is_operand else self.attributes()}"
        name = name or self.new_name(f"{opcode}.anon", made)
        if name in made:
            raise NotationError(f"HLO module {self.where}: {name} is made twice; give the whole module")
        one = Instruction(name, opcode, root, shape, rest)
        made[name] = one if shape else self.with_shape(one, operands, made)
        return name

    def operands(self, made: dict[str, Instruction]) -> list[str]:
        """The names of operands; those that are instructions themselves, or elements of one, are made."""
        names: list[str] = []
        while not self.match(_CLOSE_OPERANDS):
            start = self.at
            self.take_shape()
            if named := self.match(_OPERAND):
                name = named[1]
                for index in re.findall(r"\d+", named[2]):
                    name = self.read_element(name, index, made)
                names.append(name)
            else:
                self.at = start
                names.append(self.read_instruction("", False, made, is_operand=True))
            self.need(_NEXT_OPERAND)
        return names

    def read_element(self, name: str, index: str, made: dict[str, Instruction]) -> str:
        """The name of an element of a tuple, which is made on its first use."""
        one = Instruction(f"{name}_{index}", "get-tuple-element", False, "", f"%{name}), index={index}")
        one = self.with_shape(one, [name], made)
        if made.get(one.name) != one:
            one = replace(one, name=self.new_name(one.name, made))
            made[one.name] = one
        return one.name

    def with_shape(self, one: Instruction, operands: Sequence[str], made: Mapping[str, Instruction]) -> Instruction:
        """The instruction with a shape that the text leaves out, as far as it can be inferred."""
        taken = [made[name] for name in operands if name in made]
        length = sum(len(each.shape_text) for each in taken)
        if len(taken) < len(operands) or length > _LONGEST_SHAPE:  # Tuples of tuples grow with every line.
            return one
        try:
            found = _infer_shape(one, taken, self.computations)
        except (NotationError, ValueError, IndexError):  # Of an operand without one, or of attributes that are damaged.
            return one
        return one if found is None else replace(one, shape_text=spell_shape(found))

    def new_name(self, name: str, made: Mapping[str, Instruction]) -> str:
        """A name that nothing has, made as XLA makes them."""
        new, count = name, 0
        while new in self.given_names or new in made or new in self.computations:
            count += 1
            new = f"{name}.{count}"
        self.given_names.add(new)
        return new

    def take_shape(self) -> str:
        """The text of a shape without its blanks; empty if none stands here."""
        start = self.at
        if self.match(_SEVERAL):
            self.at = find_close(self.text, self.at) + 1
        else:
            self.match(_ONE_ARRAY)
        return "".join(self.text[start : self.at].split())

    def attributes(self, end: re.Pattern[str] = _VALUE_END) -> str:
        """The attributes that stand here, as `, key=value` each."""
        parts: list[str] = []
        while key := self.match(_KEY):
            parts.append(f", {key[1]}={self.called() if key[1] in CALLS else self.value(end)}")
        return "".join(parts)

    def value(self, end: re.Pattern[str]) -> str:
        """The value of an attribute: up to the next attribute, the next instruction, or the end of the computation.

        That of a module's or a computation's attribute is one word: a name may follow it.
        """
        depth, start = 0, self.at
        for mark in end.finditer(self.text, start):
            if mark[0] in "{([":
                depth += 1
            elif mark[0] in "})]" and depth:
                depth -= 1
            elif not depth and mark[0][0] not in "\"'":
                self.at = mark.start()
                break
        else:
            self.at = len(self.text)
        return self.text[start : self.at].strip()

    def called(self) -> str:
        """The value of an attribute that names computations; those that it holds themselves are read."""
        if self.match(_INLINE):
            name = self.new_name("_", {})
            self.read_body(name)
            return f"%{name}"
        if not self.match(_OPEN):
            return f"%{self.need(_ONE_NAME)[1]}"
        names: list[str] = []
        while not self.match(_CLOSE):
            names.append(self.called())
            self.match(_COMMA)
        return f"{{{', '.join(names)}}}"


# The shapes that people leave out. XLA infers them; what is not listed has no shape here, and asking for it is refused.

_PARTS = {"c64": "f32", "c128": "f64"}
_UNKNOWN = (
    "batch-norm-grad", "batch-norm-training", "broadcast", "convolution", "fft", "gather", "get-dimension-size", "map",
    "ragged-dot", "reduce-window", "scaled-dot", "scan", "scatter", "select-and-scatter", "set-dimension-size",
)  # fmt: skip


def _infer_shape(made: Instruction, operands: Sequence[Instruction], known: Mapping[str, Computation]) -> Shape | None:
    """The shape of an instruction with these operands; None if it is of a kind that is not inferred."""
    shapes, attributes = [one.shape for one in operands], made.attributes
    match made.opcode, shapes:
        case "tuple", _:
            return tuple(shapes)
        case "get-tuple-element", [tuple() as parts]:
            return parts[int(attributes.get("index", ""))]
        case "after-all", _:
            return Array("token", ())
        case (("partition-id" | "replica-id"), _):
            return Array("u32", ())
        case (("call" | "conditional"), _):
            root = next((known[one].root for one in made.called if one in known), None)
            return None if root is None else root.shape
        case _, [Array() as first, *rest] if all(isinstance(one, Array) for one in rest):
            return _infer_array(made.opcode, first, [one for one in rest if isinstance(one, Array)], attributes)
        case _, [one] if made.opcode not in _UNKNOWN:
            return one
        case _:
            return None


def _infer_array(opcode: str, first: Array, rest: Sequence[Array], attributes: Mapping[str, str]) -> Shape | None:
    """The shape of an instruction that takes arrays."""

    def integers(key: str) -> list[int]:
        return [int(one) for one in re.findall(r"\d+", attributes.get(key, ""))]

    dims = list(first.dims)
    match opcode:
        case _ if opcode in _UNKNOWN:
            return None
        case "compare" | "is-finite":
            return replace(first, dtype="pred")
        case "real" | "imag":
            return replace(first, dtype=_PARTS.get(first.dtype, first.dtype))
        case "complex":
            return replace(first, dtype=next((whole for whole, part in _PARTS.items() if part == first.dtype), "c64"))
        case "select" | "clamp" if rest:
            return rest[0]
        case "transpose" if sorted(order := integers("dimensions")) == list(range(len(dims))):
            return Array(first.dtype, tuple(dims[dim] for dim in order))
        case "concatenate" if (at := integers("dimensions")) and at[0] < len(dims):
            dims[at[0]] += sum(one.dims[at[0]] for one in rest)
            return Array(first.dtype, tuple(dims))
        case "pad":
            for dim, edge in enumerate(attributes.get("padding", "").split("x")[: len(dims)]):
                low, high, inside = ([int(one) for one in edge.split("_")] + [0])[:3]
                dims[dim] += low + high + inside * max(dims[dim] - 1, 0)
            return Array(first.dtype, tuple(dims))
        case "dot" if len(rest) == 1:
            batch = [dims[dim] for dim in integers("lhs_batch_dims")]
            for side, one in (("lhs", first), ("rhs", rest[0])):
                gone = {*integers(f"{side}_batch_dims"), *integers(f"{side}_contracting_dims")}
                batch += [size for dim, size in enumerate(one.dims) if dim not in gone]
            return Array(first.dtype, tuple(batch))
        case "reduce":
            left = tuple(size for dim, size in enumerate(dims) if dim not in integers("dimensions"))
            # Half of what it takes are the values that it starts from.
            several = (first, *rest[: (len(rest) - 1) // 2])
            return tuple(Array(one.dtype, left) for one in several) if len(rest) > 1 else Array(first.dtype, left)
        case "sort" if rest:
            return (first, *rest)
        case _:
            return first


def _diagnose_text(text: object) -> str:
    """What the text seems to be, and what to give instead."""
    advice = "give the text of an optimized module: compiled.as_text(), or a .txt file of --xla_dump_to"
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

"""Reads a serialized HloModuleProto into the `Module` that the text reader fills, without the compiler.

    field                          attribute
    14 dimensions                  dimensions={0,1}
    17 slice_dimensions            slice={[0:13], [0:64:2]}
    92 iota_replica_group_list     replica_groups=[4,2]<=[2,4]T(1,0)
    68 frontend_attributes         frontend_attributes={is_spmd_generated="true"}
    30 dot_dimension_numbers       "field 30": the bytes, as no reader of this package asks for them

What a reader asks for is spelled as XLA prints it, on first use; every other field is an attribute under its number, so
two instructions have the same attributes only if they do the same. Constants are read whole, whatever their size.

The numbers of the fields are those of XLA's `hlo.proto` and `xla_data.proto`, as of jaxlib 0.12.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from reshard.errors import NotationError
from reshard.hlo import wire
from reshard.hlo.module import Array, Computation, Frame, FramesById, Instruction, Module, Shape, Tables
from reshard.hlo.proto import ComputationProto, InstructionProto, ModuleProto
from reshard.hlo.wire import ProtoMessage, Value

_FRAMES = 17
_DTYPES = (
    "invalid", "pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "f32", "f64", "tuple", "opaque",
    "c64", "bf16", "token", "c128", "f8e5m2", "f8e4m3fn", "s4", "u4", "f8e4m3b11fnuz", "f8e5m2fnuz", "f8e4m3fnuz",
    "s2", "u2", "f8e4m3", "f8e3m4", "s1", "u1", "f4e2m1fn", "f8e8m0fnu",
)  # fmt: skip
_TUPLE, _BUFFER = _DTYPES.index("tuple"), len(_DTYPES)
_COMBINED = -(1 << 63)  # a dim of a tile that is combined with the next, printed as *
_NUMBERS = {"pred": 2, "s32": 4, "s64": 5, "u32": 6, "u64": 7}
_AS_BYTES = {"s8": (15, "<i1"), "u8": (3, "<u1"), "s16": (17, "<i2"), "u16": (16, "<u2")}
_FFT_TYPES = ("FFT", "IFFT", "RFFT", "IRFFT")
_APIS = ("UNSPECIFIED", "ORIGINAL", "STATUS_RETURNING", "STATUS_RETURNING_UNIFIED", "TYPED_FFI")
_GROUPED = (
    "all-gather", "all-to-all", "all-reduce", "reduce-scatter", "collective-broadcast", "ragged-all-to-all",
    "all-gather-start", "all-reduce-start",
)  # fmt: skip
_ASYNC = ("async-start", "async-update", "async-done")
_SOURCE_TARGET_PAIRS = 52  # a repeated message, of which {0,0} has no bytes
_PRECISION, _GROUP_COUNTS = 51, (50, 58)
_READ_APART = frozenset((1, 2, 3, 7, 8, 9, 35, 36, 37, 38, 40, 82))  # among them OpShardings, and statistics
_ESCAPED = re.compile(r"[\n\r\t\"'\\]")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


@wire.refuse_damage
def read_proto(proto: bytes | ModuleProto) -> Module:
    """Reads a serialized module; raises `NotationError` for other bytes.

    Computations that two `ModuleProto`s share (see `ModuleProto.decode`) are read once. A proto does not say for how
    many devices it is.
    """
    module = ModuleProto.decode(proto) if isinstance(proto, bytes) else proto
    names = {one.id: one.name for one in module.computations}
    wrapped: set[int] = set()
    for one in module.computations:
        for instruction in one.instructions:
            if instruction.opcode == "async-start" and _wrapped_by(instruction, module) is not None:
                wrapped.update(instruction.called)
    read = [_read_computation(one, module, names) for one in module.computations if one.id not in wrapped]
    computations = MappingProxyType({one.name: one for one in read})
    frames = Tables(lambda: _read_frames(module.message.data(_FRAMES) or b""))
    return Module(module.message.text(1), computations, computations[module.entry.name], None, None, frames)


def _read_computation(proto: ComputationProto, module: ModuleProto, names: Mapping[int, str]) -> Computation:
    """The computation, which is kept with its proto: a rewritten module shares most of its own with the one before."""
    if proto.read is None:
        by_id = {one.id: one for one in proto.instructions}
        root = proto.root_id
        listed: list[Instruction] = []
        order = None if module.schedule is None else module.schedule.get(proto.id)
        for one in proto.instructions if order is None else map(by_id.__getitem__, order):
            opcode, does = one.opcode, one
            if opcode in _ASYNC:
                start = one
                for _ in proto.instructions:  # An end names its start, or an update that does.
                    if start.opcode not in _ASYNC[1:]:
                        break
                    start = by_id[start.operands[0]]
                if (inner := _wrapped_by(start, module)) is not None:
                    # XLA prints an asynchronous call that wraps one instruction as that instruction's start and end.
                    opcode, does = f"{inner.opcode}{opcode.removeprefix('async')}", inner
            listed.append(Instruction(one.name, opcode, one.id == root, _Encoded(one, does, by_id, names)))
        proto.read = Computation(proto.name, tuple(listed))
    return proto.read


def _wrapped_by(start: InstructionProto, module: ModuleProto) -> InstructionProto | None:
    """The one instruction that an asynchronous call runs on its own operands; None if it runs more."""
    if start.opcode != "async-start" or len(start.called) != 1:
        return None
    inside = module.computation(start.called[0])
    root = inside.root
    alone = [one for one in inside.instructions if one.opcode != "parameter"] == [root]
    return root if alone and root.operands == [one.id for one in inside.parameters] else None


@dataclass(eq=False, slots=True)
class _Encoded:
    """An instruction of a proto, and what it `does`: another one, if it is the start or the end of that."""

    proto: InstructionProto
    does: InstructionProto
    by_id: Mapping[int, InstructionProto]
    names: Mapping[int, str]

    @property
    def is_array(self) -> bool:
        return isinstance(self.shape(), Array)

    @wire.refuse_damage
    def shape(self) -> Shape:
        return _read_shape(self.proto.shape)

    @wire.refuse_damage
    def operands(self) -> tuple[str, ...]:
        return tuple(self.by_id[one].name for one in self.proto.operands)

    @wire.refuse_damage
    def called(self) -> tuple[str, ...]:
        numbers = self.does.called
        return tuple(self.names[one] for one in (reversed(numbers) if self.does.opcode == "while" else numbers))

    @wire.refuse_damage
    def literal(self) -> str:
        if self.proto.opcode == "parameter":
            return str(self.proto.parameter)
        return _read_literal(self.proto.message.data(8) or b"", self.shape()) if self.proto.opcode == "constant" else ""

    @wire.refuse_damage
    def metadata(self) -> str | None:
        return _read_metadata(self.proto.metadata) or None

    @wire.refuse_damage
    def attributes(self) -> Mapping[str, str]:
        values: dict[int, list[Value]] = {}
        for number, _, value in self.does.message.fields:
            # XLA prints nothing for what holds without it, and some of that is given for some instructions only: a
            # precision for each operand (after the field's key and length), one group, bytes that are empty.
            unprinted = (value == b"" and number != _SOURCE_TARGET_PAIRS) or (value == 1 and number in _GROUP_COUNTS)
            if number == _PRECISION and isinstance(value, bytes):
                unprinted = not any(value[2:])
            if number not in _READ_APART and not unprinted:
                values.setdefault(number, []).append(value)
        opcode, attributes = self.does.opcode, _computations_of(self.does.opcode, self.called())
        if opcode == "get-tuple-element":
            attributes["index"] = "0"  # A number that is zero is left out of a proto.
        elif opcode == "fft":
            attributes["fft_type"] = _FFT_TYPES[0]
        elif opcode in _GROUPED:
            attributes["replica_groups"] = "{}"
        for number, several in values.items():
            if number in _GROUPS:
                attributes.update(_GROUPS[number](several))
            else:
                name, spell = _SPELLED.get(number, (f"field {number}", repr))
                attributes[name] = spell(several)
        if opcode in ("iota", "broadcast"):
            dims = attributes.pop("dimensions", "{}")
            attributes["dimensions" if opcode == "broadcast" else "iota_dimension"] = (
                dims if opcode == "broadcast" else dims.strip("{}") or "0"
            )
        if metadata := _read_metadata(self.proto.metadata):
            attributes["metadata"] = metadata
        return MappingProxyType(attributes)


def _computations_of(opcode: str, called: Sequence[str]) -> dict[str, str]:
    """The attributes that name the computations that an instruction calls."""
    names = [f"%{one}" for one in called]
    match opcode:
        case _ if not names:
            return {}
        case "while":
            return dict(zip(("condition", "body"), names, strict=True))
        case "conditional" | "custom-call":
            key = "branch_computations" if opcode == "conditional" else "called_computations"
            return {key: f"{{{', '.join(names)}}}"}
        case _:
            key = "calls" if opcode in ("fusion", "async-start") else "to_apply"
            return {key: names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"}


@lru_cache(maxsize=1 << 12)  # A module has few shapes, and each many times.
def _read_shape(data: bytes) -> Shape:
    shape = wire.decode_message(data)
    dtype = shape.number(2)
    if dtype == _TUPLE:
        return tuple(map(_read_shape, shape.all_data(4)))
    if dtype == _BUFFER:  # An array in memory that may be changed.
        return _read_shape(shape.data(4) or b"")
    dims = tuple(shape.numbers(3))
    if any(size < 0 for size in dims):
        raise NotationError("HLO shape: a size is not bounded (f32[?,8]); give a module that is compiled for its sizes")
    memory_layout = shape.data(5)
    text = "" if memory_layout is None else _spell_layout(wire.decode_message(memory_layout))
    return Array(_DTYPES[dtype] if 0 <= dtype < len(_DTYPES) else f"dtype{dtype}", dims, text)


def _spell_layout(layout: ProtoMessage) -> str:
    """A memory layout as XLA prints it: `1,0:T(8,128)(2,1)S(1)`."""

    def lists(numbers: Iterable[int]) -> str:
        return ",".join("*" if one == _COMBINED else str(one) for one in numbers)

    tiles = "".join(f"({lists(wire.decode_message(one).numbers(1))})" for one in layout.all_data(6))
    cuts = [wire.decode_message(one) for one in layout.all_data(17)]
    padded, index, pointer, bits, space, prefix = map(layout.number, (16, 11, 12, 7, 8, 15))
    rest = (f"T{tiles}" if tiles else "") + (f"L({padded})" if padded > 1 else "")
    rest += "".join(
        f"{mark}({_DTYPES[one]})" for mark, one in (("#", index), ("*", pointer)) if one in range(1, _BUFFER)
    )
    rest += (f"E({bits})" if bits else "") + (f"S({space})" if space else "")
    rest += "SC" * bool(cuts) + "".join(f"({one.number(1)}:{lists(one.numbers(2))})" for one in cuts)
    rest += f"M({prefix})" if prefix else ""
    return lists(layout.numbers(1)) + (f":{rest}" if rest else "")


_FLOATS = MappingProxyType({"f32": (8, "<f4"), "f64": (9, "<f8"), "f16": (11, "<f2"), "bf16": (13, "<f4")})
"""The field of a literal that has floats, and how they are stored."""


def _read_literal(data: bytes, shape: Shape) -> str:
    """The numbers of a constant if they are whole ones, or the one that it has; else a digest, which tells it apart."""
    if isinstance(shape, Array) and shape.elements == 1 and shape.dtype in _FLOATS:
        field, packed = _FLOATS[shape.dtype]
        bits = wire.decode_message(data).data(field) or b""
        if shape.dtype == "bf16":  # the upper half of an f32
            bits = bytes(2) + bits
        found = np.frombuffer(bits, packed)
        if found.size == 1 and not np.isnan(found[0]):  # there are many that are no numbers
            return f"{{{float(found[0])}}}" if shape.dims else str(float(found[0]))
    if isinstance(shape, Array) and shape.dtype in (*_NUMBERS, *_AS_BYTES):
        literal = wire.decode_message(data)
        if shape.dtype in _NUMBERS:
            numbers = literal.numbers(_NUMBERS[shape.dtype])
            if shape.dtype == "u64":  # The wire has them as signed ones.
                numbers = [number % (1 << 64) for number in numbers]
        else:
            field, packed = _AS_BYTES[shape.dtype]
            numbers = np.frombuffer(literal.data(field) or b"", packed).tolist()
        if len(numbers) == math.prod(shape.dims):
            # A proto has the elements in the order of the literal's own memory layout: `s32[2,3]{0,1}
            # {{1,2,3},{4,5,6}}` is stored as 1, 4, 2, 5, 3, 6, and read here in row-major order.
            layout = wire.decode_message(literal.data(1) or b"").data(5)
            order = [] if layout is None else wire.decode_message(layout).numbers(1)[::-1]
            if len(order) == len(shape.dims) > 1 and order != sorted(order):
                stored = np.array(numbers, object).reshape([shape.dims[dim] for dim in order])
                numbers = stored.transpose(np.argsort(order)).reshape(-1).tolist()
            text = ",".join(map(str, numbers))
            return f"{{{text}}}" if shape.dims else text
    return f"... {hashlib.blake2b(data, digest_size=16).hexdigest()}"


def _escape(text: str) -> str:
    return _ESCAPED.sub(lambda match: _ESCAPES.get(match[0], f"\\{match[0]}"), text)


def _read_metadata(data: bytes) -> str:
    """An OpMetadata as XLA prints it, as far as it names the operation and its line; empty if it does not."""
    if not data:
        return ""
    message, parts = wire.decode_message(data), list[str]()
    for key, number in (("op_name", 2), ("source_file", 3)):
        if text := message.text(number):
            parts.append(f'{key}="{_escape(text)}"')
    for key, number in (("source_line", 4), ("stack_frame_id", 15)):
        if value := message.number(number):
            parts.append(f"{key}={value}")
    return f"{{{' '.join(parts)}}}" if parts else ""


@wire.refuse_damage
def _read_frames(data: bytes) -> FramesById:
    """A StackFrameIndexProto; ids count from 1."""
    index = wire.decode_message(data)
    files, functions = ([one.decode("utf-8", "replace") for one in index.all_data(number)] for number in (1, 2))
    locations = [wire.decode_message(one) for one in index.all_data(3)]
    frames: dict[int, tuple[Frame, int]] = {}
    for at, one in enumerate(map(wire.decode_message, index.all_data(4)), 1):
        place = locations[one.number(1) - 1] if 0 < one.number(1) <= len(locations) else ProtoMessage([])
        file, function = (
            names[place.number(number) - 1] if 0 < place.number(number) <= len(names) else ""
            for number, names in ((1, files), (2, functions))
        )
        if file:
            frames[at] = Frame(file, place.number(3), function), one.number(2)
    return frames


# How attributes are spelled: the values of a field, to the text that XLA prints for it.


def _spell_ints(values: Iterable[Value]) -> str:
    return f"{{{','.join(map(str, wire.unpack_numbers(values)))}}}"


def _spell_last(values: Sequence[Value]) -> str:
    value = values[-1]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(wire.unpack_numbers([value])[0])


def _decode_messages(values: Iterable[Value]) -> list[ProtoMessage]:
    return [wire.decode_message(one) for one in values if isinstance(one, bytes)]


def _spell_flag(values: Sequence[Value]) -> str:
    return "true" if values[-1] else "false"


def _spell_slices(values: Sequence[Value]) -> str:
    ranges = [(one.number(1), one.number(2), one.number(3)) for one in _decode_messages(values)]
    strided = any(step > 1 for _, _, step in ranges)
    spelled = [f"[{start}:{limit}:{step}]" if strided else f"[{start}:{limit}]" for start, limit, step in ranges]
    return f"{{{', '.join(spelled)}}}"


def _spell_padding(values: Sequence[Value]) -> str:
    dims = [one for config in _decode_messages(values) for one in _decode_messages(config.all_data(1))]
    edges = [(one.number(1), one.number(2), one.number(3)) for one in dims]
    return "x".join(f"{low}_{high}_{inside}" if inside else f"{low}_{high}" for low, high, inside in edges)


def _spell_pairs(values: Sequence[Value]) -> str:
    pairs = (f"{{{one.number(1)},{one.number(2)}}}" for one in _decode_messages(values))
    return f"{{{','.join(pairs)}}}"


def _spell_frontend_attributes(values: Sequence[Value]) -> str:
    entries = [one for each in _decode_messages(values) for one in _decode_messages(each.all_data(1))]
    return "{" + ",".join(sorted(f'{one.text(1)}="{_escape(one.text(2))}"' for one in entries)) + "}"


def _spell_listed_groups(values: Sequence[Value]) -> dict[str, str]:
    groups = (_spell_ints(data for data in [field.value for field in one.fields]) for one in _decode_messages(values))
    return {"replica_groups": f"{{{','.join(groups)}}}"}


def _spell_iota_groups(values: Sequence[Value]) -> dict[str, str]:
    (groups,) = _decode_messages(values)
    sizes, order = groups.numbers(3), groups.numbers(4)
    text = f"[{groups.number(1)},{groups.number(2)}]<=[{','.join(map(str, sizes))}]"
    turned = order != sorted(order)
    return {"replica_groups": text + (f"T({','.join(map(str, order))})" if turned else "")}


def _spell_device_list(values: Sequence[Value]) -> dict[str, str]:
    (devices,) = _decode_messages(values)
    iota = devices.all_data(2)
    return _spell_iota_groups(iota) if iota else _spell_listed_groups(devices.all_data(1))


def _spell_mesh_groups(values: Sequence[Value]) -> dict[str, str]:
    """Groups along axes of a mesh, whose text has a comma: XLA prints what follows it as another attribute."""
    (groups,) = _decode_messages(values)
    mesh = wire.decode_message(groups.data(1) or b"")
    axes = [(one.text(1), one.number(2)) for one in _decode_messages(mesh.all_data(1))]
    used: list[str] = []
    for one in _decode_messages(groups.all_data(2)):
        part = one.data(2)
        cut = None if part is None else wire.decode_message(part)
        name = f"'{axes[one.number(1)][0]}'"
        used.append(name if cut is None else f"{name}:({cut.number(1)}){cut.number(2)}")
    text, along = ",".join(f"'{name}'={size}" for name, size in axes), f"{{{','.join(used)}}}"
    devices = mesh.numbers(2)
    if devices:
        return {"replica_groups": f"mesh[{text}]", "device_ids": f"({','.join(map(str, devices))}) {along}"}
    return {"replica_groups": f"mesh[{text}] {along}"}


_GROUPS: Mapping[int, Callable[[Sequence[Value]], dict[str, str]]] = MappingProxyType(
    {49: _spell_listed_groups, 87: _spell_device_list, 92: _spell_iota_groups, 93: _spell_mesh_groups}
)
_SPELLED: Mapping[int, tuple[str, Callable[[Sequence[Value]], str]]] = MappingProxyType({
    11: ("kind", _spell_last),
    13: ("index", _spell_last),
    14: ("dimensions", _spell_ints),
    17: ("slice", _spell_slices),
    20: ("dynamic_slice_sizes", _spell_ints),
    21: ("padding", _spell_padding),
    26: ("channel_id", _spell_last),
    28: ("custom_call_target", lambda values: f'"{_escape(_spell_last(values))}"'),
    31: ("fft_type", lambda values: _FFT_TYPES[wire.unpack_numbers(values)[-1]]),
    32: ("fft_length", _spell_ints),
    43: ("backend_config", _spell_last),
    52: ("source_target_pairs", _spell_pairs),
    57: ("operand_layout_constraints", repr),
    60: ("is_stable", _spell_flag),
    63: ("direction", _spell_last),
    65: ("custom_call_has_side_effect", _spell_flag),
    68: ("frontend_attributes", _spell_frontend_attributes),
    71: ("use_global_device_ids", _spell_flag),
    74: ("output_to_operand_aliasing", repr),
    77: ("api_version", lambda values: f"API_VERSION_{_APIS[wire.unpack_numbers(values)[-1]]}"),
})  # fmt: skip

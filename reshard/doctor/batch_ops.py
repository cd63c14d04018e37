"""Instructions that do the same to each row of an array, such as an FFT: which dims count the rows, and which rows.

    %f = c64[64,64,64] fft(%g), fft_length={64}       a row is a line along the last dim; dims 0 and 1 count the rows
    %s = (f32[8,64], s32[8,64]) sort(%a, %i), dimensions={1}
    %l = (f32[16,4,4], s32[16]) custom-call(%a), custom_call_target="lapack_spotrf_ffi", {num_batch_dims="1"}

XLA's partitioner runs some of them on whole arrays although each device has whole rows. Run on each device's own rows
instead, they need no gather of their operands; only their results are moved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from reshard.doctor.dataflow.flow import Flow, HloValue, Scope, parameter_number
from reshard.hlo import Array, Computation, Instruction, Module

_OPCODES = ("fft", "sort", "custom-call")
_BATCHED = re.compile(r'\bnum_batch_dims="(\d+)"')
_ATTRIBUTE = re.compile(r"\s*(\w+) = (-?\d+) : (u?i\d+)\s*(?:,|$)")
_IGNORED = ("metadata", "frontend_attributes", "operand_layout_constraints", "to_apply", "called_computations")
_TOP_K = "TopK"


class BatchOp(NamedTuple):
    """An instruction that does the same to each row of its operands.

    `batch` are the dims that count the rows, the same ones in every operand and result, and `results` its arrays.
    `attributes` are those of a call of foreign code: name, number, dtype.
    """

    kind: str
    target: str
    batch: tuple[int, ...]
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    lengths: tuple[int, ...] = ()
    stable: bool = False
    attributes: tuple[tuple[str, int, str], ...] = ()

    def inner(self, array: Array) -> tuple[int, ...]:
        """The dims of an operand or result that are inside a row."""
        return tuple(dim for dim in range(len(array.dims)) if dim not in self.batch)


def batch_op(module: Module, scope: Scope, instruction: Instruction) -> BatchOp | None:
    """The instruction as one that does the same to each row; None if it is not known to.

    >>> from reshard.hlo import parse
    >>> module = parse('''HloModule m
    ...
    ... ENTRY %main {
    ...   %p = c64[4,8]{1,0} parameter(0)
    ...   ROOT %f = c64[4,8]{1,0} fft(%p), fft_type=FFT, fft_length={8}
    ... }''')
    >>> op = batch_op(module, Flow(module).regions[0], module.entry.root)
    >>> op.kind, op.target, op.batch, op.lengths
    ('fft', 'FFT', (0,), (8,))
    """
    if instruction.opcode not in _OPCODES:
        return None
    operands = tuple(scope.computation.by_name[name].arrays for name in instruction.operands)
    results = instruction.arrays
    if not results or any(len(arrays) != 1 for arrays in operands):
        return None
    arrays = tuple(one for (one,) in operands)
    attributes, rank = instruction.attributes, len(arrays[0].dims) if arrays else 0
    match instruction.opcode:
        case "fft":
            lengths = _numbers_in(attributes.get("fft_length", ""))
            batch = tuple(range(rank - len(lengths)))
            return BatchOp("fft", attributes.get("fft_type", ""), batch, arrays, results, lengths)
        case "sort":
            batch = tuple(dim for dim in range(rank) if dim not in _numbers_in(attributes.get("dimensions", "")))
            return BatchOp("sort", "", batch, arrays, results, (), _is_stable(module, instruction))
        case _:
            return _read_foreign_call(instruction, arrays, rank)


def _is_stable(module: Module, instruction: Instruction) -> bool:
    """Whether a sort keeps the order of equal keys: it says so, or it compares their indices, its second operand."""
    if instruction.attributes.get("is_stable") == "true":
        return True
    comparator = module.computation(instruction.called[0])
    indices = [one for one in comparator.instructions if one.opcode == "parameter" and parameter_number(one) > 1]
    return any(comparator.users.get(one.name) for one in indices)


def _read_foreign_call(instruction: Instruction, operands: tuple[Array, ...], rank: int) -> BatchOp | None:
    """A call of foreign code; its attributes say how many of its first dims count rows."""
    attributes = instruction.attributes
    target = attributes.get("custom_call_target", "").strip('"')
    if target == _TOP_K and len(operands) == 1:
        return BatchOp("top_k", target, tuple(range(rank - 1)), operands, instruction.arrays)
    batched = _BATCHED.search(attributes.get("frontend_attributes", ""))
    config = _read_foreign_attributes(attributes.get("backend_config", "{}"))
    if batched is None or config is None or attributes.get("api_version") != "API_VERSION_TYPED_FFI":
        return None
    if "output_to_operand_aliasing" in attributes or "custom_call_has_side_effect" in attributes:
        return None
    return BatchOp("ffi", target, tuple(range(int(batched[1]))), operands, instruction.arrays, attributes=tuple(config))


def _read_foreign_attributes(config: str) -> list[tuple[str, int, str]] | None:
    """The attributes of foreign code, None if some are not numbers."""
    rest, listed = config.strip().removeprefix("{").removesuffix("}"), list[tuple[str, int, str]]()
    while rest.strip():  # ends: each round reads an attribute
        one = _ATTRIBUTE.match(rest)
        if one is None:
            return None
        listed.append((one[1], int(one[2]), one[3].replace("i", "int")))
        rest = rest[one.end() :]
    return listed


def same_op(old: Module, one: Instruction, new: Module, other: Instruction) -> bool:
    """Whether two instructions do the same to a row, whatever the number of rows."""
    return (
        one.opcode == other.opcode
        and _defining_attributes(one) == _defining_attributes(other)
        and [array.dtype for array in one.arrays] == [array.dtype for array in other.arrays]
        and len(one.called) == len(other.called)
        and all(
            _same_computation(old.computation(mine), new.computation(yours))
            for mine, yours in zip(one.called, other.called, strict=True)
        )
    )


def _defining_attributes(instruction: Instruction) -> dict[str, str]:
    """The attributes that say what an instruction does; a compiler's notes on speed do not."""
    attributes = {key: text for key, text in instruction.attributes.items() if key not in _IGNORED}
    if instruction.opcode != "custom-call":
        attributes.pop("backend_config", None)
    return attributes


def _same_computation(one: Computation, other: Computation) -> bool:
    numbers: dict[tuple[object, ...], int] = {}
    return _number_computation(one, numbers) == _number_computation(other, numbers)


def _number_computation(computation: Computation, numbers: dict[tuple[object, ...], int]) -> int | None:
    """The number of what a computation yields, whatever its names and its order; equal values have equal numbers."""
    known: dict[str, int] = {}
    for one in computation.instructions:
        literal = one.literal
        shapes = tuple((array.dtype, array.dims) for array in one.arrays)
        operands = tuple(known[name] for name in one.operands)
        key = (one.opcode, shapes, literal, tuple(sorted(_defining_attributes(one).items())), operands)
        known[one.name] = numbers.setdefault(key, len(numbers))
    return None if computation.root is None else known[computation.root.name]


def batch_ops(flow: Flow) -> Iterator[tuple[Scope, Instruction, BatchOp]]:
    """The instructions of the regions of a module that do the same to each row."""
    for region in flow.regions:
        for instruction in region.computation.instructions:
            op = batch_op(flow.module, region, instruction)
            if op is not None:
                yield region, instruction, op


def results_of(region: Scope, instruction: Instruction) -> list[HloValue]:
    """The arrays that an instruction yields."""
    if isinstance(instruction.shape, Array):
        return [HloValue(region, instruction.name)]
    return [HloValue(region, instruction.name, (at,)) for at in range(len(instruction.arrays))]


def _numbers_in(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))

"""A step as plain data: which operation reads and writes which values, how often it runs, what its loops carry; and
the layouts of all that, as the choice hands them to whoever emits them.

Values are numbered; the arguments of a loop's condition are those of its body. Operations have their numbers in
`TracedStep.ops`. Nobody looks into regions that are part of an operation: what a reduce applies, a user's `shard_map`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend.mlir.dialects import stablehlo as _stablehlo

from reshard.jax.layout_choice.trace_step import TracedStep
from reshard.jax.stablehlo_pass.shardy import read_dtype
from reshard.lower.to_stablehlo import Operation, Value, ir, list_operations
from reshard.types import dtypes
from reshard.types.layout import Layout

stablehlo: Any = _stablehlo
WHILE, BRANCHES, RETURN = "stablehlo.while", ("stablehlo.case", "stablehlo.if"), ("func.return", "stablehlo.return")
BARRIER = "stablehlo.optimization_barrier"
_SPLAT = re.compile(r"dense<([^\[\]<>\"]+)> :")
_MULTIPLIED = ("2.000000e+00", "3.000000e+00")  # powers that compilers write as products


@dataclass(frozen=True)
class FlowValue:
    """A value: its shape and dtype, the operation that makes it (-1 for an argument of the step), and in which loop or
    branch it is (the number of that operation; -1 outside).

    Tokens and the like, which are no tensors, are scalars here.
    """

    shape: tuple[int, ...]
    dtype: str
    maker: int
    inside: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return dtypes.nbytes(self.elements, self.dtype)


@dataclass(frozen=True)
class FlowOp:
    """An operation: its values, how often it runs, in which loop or branch it is, and the last operation inside it.

    `orders` has the dims of each operand in the order in which a transpose or a product takes them: those that both
    operands of a product keep, how many `batches` says, and of its left one those that are summed last, of its right
    one first.
    """

    number: int
    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    times: int
    inside: int
    last: int
    orders: tuple[tuple[int, ...], ...] = ()
    batches: int = 0


@dataclass(frozen=True)
class Loop:
    """A loop: for each value that it carries what it starts with, what its body takes, returns, and what comes out."""

    op: FlowOp
    trips: int | None
    arguments: tuple[int, ...]
    returned: tuple[int, ...]


@dataclass(frozen=True)
class Branches:
    """A conditional, and what each of its branches returns."""

    op: FlowOp
    returned: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StepFlow:
    values: tuple[FlowValue, ...]
    ops: dict[int, FlowOp]
    loops: tuple[Loop, ...]
    branches: tuple[Branches, ...]
    arguments: tuple[int, ...]
    returned: tuple[int, ...]
    readers: tuple[tuple[tuple[int, int], ...], ...]
    """For each value, the operations that read it and the number of the operand; returns are among them."""
    donated: frozenset[int]
    """The arguments whose memory is the step's."""
    platform: str


@dataclass(frozen=True)
class OpLayouts:
    """In which layout an operation reads each operand and writes each result.

    For a loop, one layout for each value that it carries: operands, arguments of its blocks, what its body returns and
    results. For a conditional, `results` are also what its branches return. `anew` has the numbers of the operands
    that are moved for this operation alone.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    anew: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StepLayouts:
    """The layouts of a program's arguments and results, and those of each operation by its number in the program."""

    arguments: tuple[Layout, ...]
    results: tuple[Layout, ...]
    operations: Mapping[int, OpLayouts]


def name_operations(names: str) -> frozenset[str]:
    """The full names of operations of StableHLO that a text has without their prefix."""
    return frozenset(f"stablehlo.{name}" for name in names.split())


def read_flow(step: TracedStep) -> StepFlow:
    """The flow of a step, regions of loops and conditionals included."""
    values: list[FlowValue] = []
    numbers: dict[Value, int] = {}
    ops: dict[int, FlowOp] = {}
    loops: list[Loop] = []
    branches: list[Branches] = []

    def add_value(value: Value, maker: int, inside: int) -> int:
        shape, dtype = (), "int32"
        if isinstance(value.type, ir.RankedTensorType):
            shape, dtype = tuple(value.type.shape), dtypes.canonical(read_dtype(str(value.type.element_type)))
        numbers[value] = len(values)
        values.append(FlowValue(shape, dtype, maker, inside))
        return numbers[value]

    def visit(block: Any, number: int, inside: int, times: int) -> tuple[int, tuple[int, ...]]:
        """The number after the last operation of a block, and what the block returns."""
        operands: tuple[int, ...] = ()
        for view in block.operations:
            op = view.operation
            at, operands = number, tuple(numbers[operand] for operand in op.operands)
            number += 1
            if op.name == WHILE:
                cond, body = (region.blocks[0] for region in op.regions)
                trips = count_trips(op)
                arguments = tuple(add_value(argument, at, at) for argument in body.arguments)
                # Both blocks take the same values: one number for each.
                numbers.update(zip(cond.arguments, arguments, strict=True))
                number, _ = visit(cond, number, at, times * (trips or 1))
                number, returned = visit(body, number, at, times * (trips or 1))
                results = tuple(add_value(result, at, inside) for result in op.results)
                ops[at] = FlowOp(at, op.name, operands, results, times, inside, number - 1)
                loops.append(Loop(ops[at], trips, arguments, returned))
                continue
            if op.name in BRANCHES:
                each: list[tuple[int, ...]] = []
                for region in op.regions:
                    number, returned = visit(region.blocks[0], number, at, times)
                    each.append(returned)
                results = tuple(add_value(result, at, inside) for result in op.results)
                ops[at] = FlowOp(at, op.name, operands, results, times, inside, number - 1)
                branches.append(Branches(ops[at], tuple(each)))
                continue
            # Numbers are positions in the whole list, so operations that are not looked into count.
            if len(op.regions):
                number += len(list_operations(op))
            results = tuple(add_value(result, at, inside) for result in op.results)
            name = name_plainly(op, step.platform)
            ops[at] = FlowOp(at, name, operands, results, times, inside, number - 1, *read_orders(op))
        return number, operands

    block = step.main.regions[0].blocks[0]
    arguments = tuple(add_value(argument, -1, -1) for argument in block.arguments)
    _, returned = visit(block, 0, -1, 1)
    readers: list[list[tuple[int, int]]] = [[] for _ in values]
    for at in sorted(ops):
        for place, operand in enumerate(ops[at].operands):
            readers[operand].append((at, place))
    return StepFlow(
        tuple(values), ops, tuple(loops), tuple(branches), arguments, returned,
        tuple(tuple(each) for each in readers), frozenset(arguments[at] for at in step.donated), step.platform,
    )  # fmt: skip


def find_splat(value: Value) -> str | None:
    """The number that all elements of a value repeat, as its constant spells it; None for any other value."""
    op = value.owner
    if isinstance(op, ir.Block):
        return None
    op = op.operation
    if op.name in ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.convert"):
        return find_splat(op.operands[0])
    if op.name != "stablehlo.constant":
        return None
    try:
        text = f"{op.attributes['value']}" if op.attributes["value"].is_splat else ""
    except TypeError:  # Python has no attributes for complex constants. The operation is slower to write.
        text = op.get_asm(large_elements_limit=0, use_local_scope=True, assume_verified=True)
    found = _SPLAT.search(text)
    return found[1] if found else None


def name_plainly(op: Operation, platform: str) -> str:
    """The name of an operation, or of what compilers write for it."""
    if op.name == "stablehlo.power" and find_splat(op.operands[1]) in _MULTIPLIED:
        return "stablehlo.multiply"
    # What only gets dims of one more lies as it lay.
    if op.name == "stablehlo.broadcast_in_dim" and platform == "cpu":
        before, after = ([size for size in each.type.shape if size > 1] for each in (op.operands[0], op.results[0]))
        return "stablehlo.reshape" if before == after else op.name
    return op.name


def read_orders(op: Operation) -> tuple[tuple[tuple[int, ...], ...], int]:
    """`FlowOp.orders` and `FlowOp.batches` of an operation, which most have none of."""
    if op.name == "stablehlo.transpose":
        return (tuple(list[int](op.attributes["permutation"])),), 0
    if op.name == "stablehlo.convolution":
        numbers: Any = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
        image = int(numbers.input_batch_dimension), *numbers.input_spatial_dimensions
        kernel = *numbers.kernel_spatial_dimensions, int(numbers.kernel_input_feature_dimension)
        ends = int(numbers.input_feature_dimension), int(numbers.kernel_output_feature_dimension)
        return ((*image, ends[0]), (*kernel, ends[1])), 0
    if op.name != "stablehlo.dot_general":
        return (), 0
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    sides = (
        (list[int](numbers.lhs_batching_dimensions), list[int](numbers.lhs_contracting_dimensions)),
        (list[int](numbers.rhs_batching_dimensions), list[int](numbers.rhs_contracting_dimensions)),
    )
    orders: list[tuple[int, ...]] = []
    for place, (operand, (batches, summed)) in enumerate(zip(op.operands, sides, strict=True)):
        kept = [dim for dim in range(len(operand.type.shape)) if dim not in batches and dim not in summed]
        orders.append((*batches, *(summed + kept if place else kept + summed)))
    return tuple(orders), len(sides[0][0])


def count_trips(loop: Operation) -> int | None:
    """How often the body of a `stablehlo.while` runs; None if that is not known.

    It is known of loops that count from a constant to a constant by a constant, as those of `jax.lax.scan` do.
    """
    cond, body = (region.blocks[0] for region in loop.regions)
    compare = list(cond.operations)[-1].operands[0].owner
    if isinstance(compare, ir.Block) or compare.operation.name != "stablehlo.compare":
        return None
    returned = list(list(body.operations)[-1].operands)

    def read_constant(value: Value) -> int | None:
        """The number that a scalar is throughout the loop."""
        if isinstance(value.owner, ir.Block):
            at = value.arg_number
            unchanged = value.owner in (cond, body) and returned[at] == body.arguments[at]
            return read_constant(loop.operands[at]) if unchanged else None
        maker = value.owner.operation
        if maker.name != "stablehlo.constant" or not isinstance(maker.attributes["value"], ir.DenseIntElementsAttr):
            return None
        return int(ir.DenseIntElementsAttr(maker.attributes["value"])[0])

    counter, bound = compare.operation.operands
    limit, direction = read_constant(bound), str(compare.operation.attributes["comparison_direction"])
    if not isinstance(counter.owner, ir.Block) or counter.owner != cond or limit is None:
        return None
    start, after = read_constant(loop.operands[counter.arg_number]), returned[counter.arg_number].owner
    if start is None or isinstance(after, ir.Block) or after.operation.name != "stablehlo.add":
        return None
    terms = list(after.operation.operands)
    by = [read_constant(term) for term in terms if term != body.arguments[counter.arg_number]]
    if len(by) != 1 or by[0] is None or by[0] < 1 or not (" LT" in direction or " LE" in direction):
        return None
    # A counter that starts at the limit, or after it, makes no trip.
    inclusive = " LE" in direction
    return max(0, -(-(limit + inclusive - start) // by[0]))

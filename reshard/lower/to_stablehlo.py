"""The one writer of moves into StableHLO: `insert_plan` builds what applies a plan to a value.

Plans become collectives in one place only, `to_shard_map.tile_function`. It is traced here, once for each plan, and
the result becomes the body of a Shardy manual computation in the program's module.

The rest is what others who read or write modules share: `list_operations`, `run_passes`, `inline_call` and
`spell_sharding`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeAlias

import jax
from jax.extend.mlir import ir as _ir
from jax.extend.mlir import passmanager as _passmanager
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from reshard.errors import PlanError
from reshard.lower.groups import groups_along
from reshard.lower.program import lower_plan
from reshard.lower.to_shard_map import tile_function
from reshard.plans.plan import Plan
from reshard.types import dtypes
from reshard.types.layout import Layout, refuse_pieces
from reshard.types.mesh import SubAxis

# The stubs of jaxlib leave most types of MLIR unknown: they are Any here.
Module: TypeAlias = Any
Operation: TypeAlias = Any
Block: TypeAlias = Any
Value: TypeAlias = Any
Attribute: TypeAlias = Any
ir: Any = _ir
_PassManager: Any = _passmanager.PassManager

CHANNEL = "channel_handle"
_COMPUTATION = "sdy.manual_computation"
_GROUPS = "replica_groups"
_NEUTRAL = "rocm"
"""Whose form every platform compiles: CPU, CUDA and TPU have spellings of their own."""
_MESH_AXIS = re.compile(r'axis_ref<name = "([^"]+)"')


def insert_plan(plan: Plan, operand: Value, mesh: str, channels: Iterator[int]) -> Value:
    """Builds, at MLIR's insertion point, what applies a plan to `operand`; returns the result.

    `mesh` is the symbol, without @, of a mesh of the same module with the axes of the plan's mesh; `channels` numbers
    the collectives. What is built is the same for every platform: a manual computation, and where layouts are uneven
    the padding before it and the slice after it.

    Raises `PlanError` for scalars, and for a mesh with device ids of its own: StableHLO numbers devices by position.

    >>> import itertools
    >>> from jax.interpreters.mlir import make_ir_context
    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> rows, columns = (Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}2, 4]", "f32[4, {x}2]"))
    >>> main = "func.func @main(%a: tensor<4x4xf32>) -> tensor<4x4xf32> { return %a : tensor<4x4xf32> }"
    >>> with make_ir_context(), ir.Location.unknown():
    ...     module = ir.Module.parse('sdy.mesh @mesh = <["x"=2]> ' + main)
    ...     block = module.body.operations[1].regions[0].blocks[0]
    ...     with ir.InsertionPoint.at_block_begin(block):
    ...         moved = insert_plan(plan(rows, columns), block.arguments[0], "mesh", itertools.count(1))
    ...     str(moved.type), "stablehlo.all_to_all" in str(module)
    ('tensor<4x4xf32>', True)
    """
    operand = _resize(operand, plan.source.padded_shape, plan.source, mesh)
    element = ir.RankedTensorType(operand.type).element_type
    result = ir.RankedTensorType.get(plan.target.padded_shape, element)
    names = ", ".join(f'"{name}"' for name in plan.source.mesh.axes)
    attributes = {
        "in_shardings": ir.Attribute.parse(f"#sdy.sharding_per_value<[{spell_sharding(plan.source, mesh)}]>"),
        "out_shardings": ir.Attribute.parse(f"#sdy.sharding_per_value<[{spell_sharding(plan.target, mesh)}]>"),
        "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{names}}}>"),
    }
    made = ir.Operation.create(_COMPUTATION, [result], [operand], attributes, regions=1)
    block = made.regions[0].blocks.append(ir.RankedTensorType.get(plan.source.tile_shape, element))
    with ir.InsertionPoint(block):
        ir.Operation.create("sdy.return", [], [insert_tile_plan(plan, block.arguments[0])])
    for op in list_operations(made):
        if CHANNEL in op.attributes:
            text = f"#stablehlo.channel_handle<handle = {next(channels)}, type = 1>"
            op.attributes[CHANNEL] = ir.Attribute.parse(text)
    return _resize(made.results[0], plan.target.shape, plan.target, mesh)


def insert_tile_plan(plan: Plan, tile: Value, platform: str = _NEUTRAL) -> Value:
    """Builds, at MLIR's insertion point, what applies a plan to a device's tile, inside a manual computation over all
    axes of the plan's mesh; returns the tile of the target. Its channels are numbered like those of other plans.

    Collectives are spelled as the compiler of `platform` takes them best; by default, as every platform takes them.
    """
    module = ir.Module.parse(
        _trace_as_function(plan, platform)
    )  # A named module stays alive, and with it the function.
    (block,) = module.body.operations[0].regions[0].blocks
    return paste_operations(block, [tile])[0]


def paste_operations(block: Block, operands: Sequence[Value]) -> list[Value]:
    """Moves the operations of a block to MLIR's insertion point, with `operands` in place of its arguments; returns
    what its last operation returned, which stays."""
    for argument, operand in zip(block.arguments, operands, strict=True):
        argument.replace_all_uses_with(operand)
    *inner, end = [op.operation for op in block.operations]
    # An operation can be moved to before another one, and nowhere else: this one holds the place.
    place = ir.Operation.create("sdy.return", [], [])
    for op in inner:
        op.move_before(place)
    place.erase()
    return list(end.operands)


def _resize(value: Value, shape: tuple[int, ...], layout: Layout, mesh: str) -> Value:
    """The value padded or cut at the high end of each dim, as manual computations take even tiles only.

    For example, 10 x 16 in 4 pieces of 3 is padded to 12 x 16, and the result of the move is cut to 10 x 16 again.
    """
    tensor = ir.RankedTensorType(value.type)
    now, rank, element = tuple(tensor.shape), len(shape), tensor.element_type
    if now == shape:
        return value
    result, operands = [ir.RankedTensorType.get(shape, element)], [value]
    if now > shape:
        name = "stablehlo.slice"
        numbers = {"start_indices": [0] * rank, "limit_indices": list(shape), "strides": [1] * rank}
    else:
        name = "stablehlo.pad"
        more = [to - size for size, to in zip(now, shape, strict=True)]
        numbers = {"edge_padding_low": [0] * rank, "edge_padding_high": more, "interior_padding": [0] * rank}
        whole, pair = isinstance(element, ir.IntegerType), isinstance(element, ir.ComplexType)
        zero = "0" if whole else "(0.0,0.0)" if pair else "0.0"
        # From text: Python has no attributes for complex constants.
        text = f"dense<{zero}> : tensor<{element}>}}> : () -> tensor<{element}>"
        constant = ir.Operation.parse(f'%0 = "stablehlo.constant"() <{{value = {text}')
        ir.InsertionPoint.current.insert(constant)
        operands.append(constant.results[0])
    attributes = {key: ir.DenseI64ArrayAttr.get(value) for key, value in numbers.items()}
    made = ir.Operation.create(name, result, operands, attributes)
    # Propagation may choose another sharding of it without a constraint.
    sharding = {"sharding": ir.Attribute.parse(f"#sdy.sharding{spell_sharding(layout, mesh)}")}
    return ir.Operation.create("sdy.sharding_constraint", result, [made.results[0]], sharding).results[0]


@lru_cache(maxsize=1024)
def _trace_as_function(plan: Plan, platform: str) -> str:
    """A StableHLO module with one function, from a device's source tile to its target tile; it refers to nothing
    else."""
    mesh, shape = plan.source.mesh, plan.source.tile_shape
    if not plan.source.shape or mesh.device_ids is not None:
        raise PlanError(
            f"{plan.source} on {mesh!r} has no dims, or its mesh has device ids of its own; StableHLO takes neither"
        )
    # Traced under a `shard_map` that stacks the tiles along the first dim, whatever the layouts. Explicit axes, the
    # default of jax 0.12, would require sharded arguments.
    kinds = (AxisType.Auto,) * len(mesh.axes)
    devices = AbstractMesh(tuple(mesh.axes.values()), tuple(mesh.axes), axis_types=kinds)
    spec = PartitionSpec(tuple(mesh.axes))
    tile = tile_function(lower_plan(plan), mesh.axes)
    spread = jax.shard_map(tile, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False)
    ends = plan.source.dtype, plan.target.dtype
    wide = any(dtypes.bits(dtype) // (1 + dtype.startswith("complex")) > 32 for dtype in ends)

    def trace() -> Module:
        with jax.enable_x64(wide):
            tiles = jax.ShapeDtypeStruct((shape[0] * mesh.size, *shape[1:]), plan.source.dtype)
            jitted: Any = jax.jit(spread)  # pyright: ignore[reportUnknownMemberType]
            return jitted.trace(tiles).lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")

    with ThreadPoolExecutor(1) as fresh:  # The caller's `jax.set_mesh` and its trace belong to its own thread.
        module = fresh.submit(trace).result()
    with module.context, ir.Location.unknown():
        (computation,) = (op for op in list_operations(module.operation) if op.name == _COMPUTATION)
        function = _move_to_function(computation, module)
        functions = {op.attributes["sym_name"].value: op.operation for op in module.body.operations}
        while calls := [op for op in list_operations(function) if op.name == "func.call"]:
            for call in calls:
                inline_call(call, functions)
        for op in list_operations(function):
            if _GROUPS in op.attributes and "mesh_axes" in (text := str(op.attributes[_GROUPS])):
                # jax 0.12 writes replica groups as axes of a mesh, a symbol of its own module: listed, they need none.
                axes = [mesh.sub_axis(name) for name in _MESH_AXIS.findall(text)]
                groups = [list(group) for group in groups_along(mesh, [(mesh.stride(a), a.size) for a in axes])]
                listed = f"dense<{groups}> : tensor<{len(groups)}x{len(groups[0])}xi64>"
                op.attributes[_GROUPS] = ir.Attribute.parse(listed)
        run_passes(module, "canonicalize,cse,symbol-dce")
        # Generic, as the short form of some operations on scalars cannot be read again.
        return function.get_asm(print_generic_op_form=True)


def _move_to_function(computation: Operation, module: Module) -> Operation:
    """Makes the body of a manual computation that of a function `tile`; removes the module's `main` and mesh."""
    block = computation.regions[0].blocks[0]
    start = ir.InsertionPoint.at_block_begin(block)

    def clone(maker: Operation) -> Operation:
        """A copy of what makes a constant, after copies of what makes its operands."""
        operands = [clone(operand.owner.operation).results[0] for operand in maker.operands]
        copy = maker.clone(start)
        for at, operand in enumerate(operands):
            copy.operands[at] = operand
        return copy

    # jax passes the constants of a `shard_map` as operands beside the tile; a function of its own has them inside.
    for at in reversed(range(len(computation.operands))):
        maker = computation.operands[at].owner
        if not isinstance(maker, ir.Block):
            block.arguments[at].replace_all_uses_with(clone(maker.operation).results[0])
            block.erase_argument(at)
    last = _last_operation(block)
    with ir.InsertionPoint(last):
        ir.Operation.create("func.return", [], list(last.operands))
    last.erase()
    kinds = ir.FunctionType.get([a.type for a in block.arguments], [o.type for o in _last_operation(block).operands])
    attributes = {"sym_name": ir.StringAttr.get("tile"), "function_type": ir.TypeAttr.get(kinds)}
    with ir.InsertionPoint(module.body):
        function = ir.Operation.create("func.func", [], [], attributes, regions=1)
    block.append_to(function.regions[0])
    for op in list(module.body.operations):
        if op.operation.name == "sdy.mesh" or op.operation.attributes.get("sym_name") == ir.StringAttr.get("main"):
            op.operation.erase()
    return function


def inline_call(call: Operation, functions: Mapping[str, Operation]) -> None:
    """Replaces a call by the operations of the called function; jaxlib has no inliner for functions."""
    copy = functions[call.attributes["callee"].value].clone()
    with ir.InsertionPoint(call):
        values = paste_operations(copy.regions[0].blocks[0], list(call.operands))
    for result, value in zip(call.results, values, strict=True):
        result.replace_all_uses_with(value)
    call.erase()
    copy.erase()


def _last_operation(block: Block) -> Operation:
    return list(block.operations)[-1].operation


def spell_sharding(layout: Layout, mesh: str) -> str:
    """A contiguous layout as a Shardy sharding on the mesh with symbol `mesh`.

    >>> from reshard.types import Mesh
    >>> spell_sharding(Layout.parse("f32[{y}8, {x:(1)2}8]", Mesh(x=4, y=2)), "mesh")
    '<@mesh, [{"y"}, {"x":(1)2}]>'
    >>> spell_sharding(Layout.parse("f32[{y}8] + sum{x}", Mesh(x=4, y=2)), "mesh")
    '<@mesh, [{"y"}], unreduced={"x"}>'
    """
    refuse_pieces(layout, "a Shardy sharding")

    def spell(axes: Iterable[SubAxis]) -> str:
        names = map(layout.mesh.spell, axes)
        return "{" + ", ".join(re.sub(r"^[^:]+", r'"\g<0>"', name) for name in names) + "}"

    dims = [spell(d.axis for d in dim.digits if d.axis is not None) for dim in layout.dims]
    partial = ""
    if layout.partial:
        kind = "" if layout.reduction == "sum" else layout.reduction
        partial = f", unreduced={kind}{spell(layout.partial)}"
    return f"<@{mesh}, [{', '.join(dims)}]{partial}>"


def list_operations(op: Operation) -> list[Operation]:
    """All operations nested in one, in order, as a list: the operation may be changed while one iterates."""
    operations: list[Operation] = []

    def visit(inner: Operation) -> Any:
        operations.append(inner)
        return ir.WalkResult.ADVANCE

    op.walk(visit, ir.WalkOrder.PRE_ORDER)
    return operations[1:]


def run_passes(module: Module, pipeline: str) -> None:
    """Runs MLIR passes on a module in place; `pipeline` is in the syntax of `mlir-opt`."""
    with module.context:
        _PassManager.parse(f"builtin.module({pipeline})").run(module.operation)

"""One operation on the tiles of one device, built where MLIR's insertion point is.

    %2 = dot_general %0, %1 : (8x16, 16x32) -> 8x32             operands [{x}2, 16], [16, {y}16], result [{x}2, {y}16]
    %2 = dot_general %a, %b : (2x16, 16x16) -> 2x16             the same operation, on tiles

Most operations take other result types and nothing else. Those with sizes in their attributes get those of the tiles,
and lookups and updates at indices get the indices among the rows that a device has.
"""

# The stubs of jaxlib leave most types of MLIR unknown: they are Any here.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.mlir.dialects import stablehlo as _stablehlo

from reshard.errors import PlanError
from reshard.jax.layout_choice.op_rules import is_zero, read_windows
from reshard.jax.layout_choice.step_flow import find_splat
from reshard.jax.layout_choice.trace_step import read_body_kind
from reshard.lower.to_stablehlo import Operation, Value, ir, list_operations
from reshard.types.dims import Dim
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis

stablehlo: Any = _stablehlo


def localize_op(
    op: Operation,
    operands: Sequence[Value],
    operand_layouts: Sequence[Layout],
    result_layouts: Sequence[Layout],
    mesh: Mesh,
) -> list[Value]:
    """Builds what an operation does on the tiles of a device; returns the tiles of its results.

    The layouts are those that a split of the operation's rule gives; `operands` are tiles in them.
    """
    copy = op.clone(ir.InsertionPoint.current)
    for at, operand in enumerate(operands):
        copy.operands[at] = operand
    for result, layout in zip(copy.results, result_layouts, strict=True):
        result.set_type(_type_tile(result, layout))
    # A function of Python is called on the first device alone otherwise, where the others would wait for its result.
    if "sdy.sharding" in copy.attributes:
        del copy.attributes["sdy.sharding"]
    _sink_constants(copy)
    adjust = _ADJUST.get(op.name)
    mask = None
    if adjust is not None:
        with ir.InsertionPoint(copy):
            mask = adjust(op, copy, operand_layouts, result_layouts, mesh)
    return (
        list(copy.results)
        if mask is None
        else [stablehlo.select(mask, each, _build_like(0, each)) for each in copy.results]
    )


def _sink_constants(op: Operation) -> None:
    """Copies into the regions of an operation the constants outside that they use, which are of another function."""
    inside = [op, *list_operations(op)] if len(op.regions) else []
    for inner in inside[1:]:
        for at, operand in enumerate(inner.operands):
            owner = operand.owner
            if not isinstance(owner, ir.Block) and owner.operation not in inside:
                inner.operands[at] = owner.operation.clone(ir.InsertionPoint(inner)).results[0]


def localize_source(op: Operation, layout: Layout, mesh: Mesh) -> Value:
    """Builds a source (`is_source`) as a device's tile in a layout; of a sum, the first summand has all of it."""
    if op.name == "stablehlo.iota":
        along = int(op.attributes["iota_dimension"])
        value = _number_elements(layout.dims[along], mesh)
        value = _convert(value, ir.RankedTensorType(op.results[0].type).element_type)
        value = stablehlo.broadcast_in_dim(_type_tile(op.results[0], layout), value, [along])
    elif find_splat(op.results[0]) is not None:
        value = stablehlo.broadcast_in_dim(_type_tile(op.results[0], layout), _build_splat(op), [])
    else:
        value = _take_tile(op.clone(ir.InsertionPoint.current).results[0], layout, mesh)
    partial = layout.partial and layout.reduction == "sum" and not is_zero(op.results[0])
    return _keep_first(value, layout.partial, mesh) if partial else value


def _build_splat(op: Operation) -> Value:
    """The number that a source repeats, as a scalar of its type."""
    kind = ir.RankedTensorType(op.results[0].type).element_type
    if op.name != "stablehlo.constant":
        return _convert(_build_splat(op.operands[0].owner.operation), kind)
    return _build_scalar(find_splat(op.results[0]), kind)


def _build_scalar(number: object, kind: Any) -> Value:
    # From text: Python has no attributes for complex constants.
    text = f'%0 = "stablehlo.constant"() <{{value = dense<{number}> : tensor<{kind}>}}> : () -> tensor<{kind}>'
    constant = ir.Operation.parse(text)
    ir.InsertionPoint.current.insert(constant)
    return constant.results[0]


def _build_like(number: int, value: Value) -> Value:
    """A whole number in every element of a tensor like `value`, whose type has zero as `0` or `0.0`."""
    tensor = ir.RankedTensorType(value.type)
    kind = tensor.element_type
    text = f"{number}" if isinstance(kind, ir.IntegerType) else f"{number}.0"
    scalar = _build_scalar(f"({text}, 0.0)" if isinstance(kind, ir.ComplexType) else text, kind)
    return stablehlo.broadcast_in_dim(tensor, scalar, [])


def _convert(value: Value, kind: Any) -> Value:
    tensor = ir.RankedTensorType(value.type)
    return (
        value if tensor.element_type == kind else stablehlo.convert(ir.RankedTensorType.get(tensor.shape, kind), value)
    )


def _type_tile(value: Value, layout: Layout) -> Any:
    return ir.RankedTensorType.get(layout.tile_shape, ir.RankedTensorType(value.type).element_type)


def _count_along(axes: Sequence[SubAxis], mesh: Mesh) -> Value:
    """The number of this device along some axes, the first major, as a scalar."""
    kind = ir.IntegerType.get_signless(32)
    position = _convert(stablehlo.partition_id(), kind)
    # A partition is a position of the mesh, as its axes are in the order of jax's.
    number = _build_scalar(0, kind)
    for axis in axes:
        along = stablehlo.divide(position, _build_scalar(mesh.stride(axis), kind))
        along = stablehlo.remainder(along, _build_scalar(axis.size, kind))
        number = stablehlo.add(stablehlo.multiply(number, _build_scalar(axis.size, kind)), along)
    return number


def _keep_first(value: Value, axes: Sequence[SubAxis], mesh: Mesh) -> Value:
    """The value on devices whose coordinates along some axes are all 0, and zeros elsewhere: a sum of one summand."""
    number = _count_along(axes, mesh)
    # Which summand has the data is free; the first is one that all axes have.
    first = stablehlo.compare(number, _build_like(0, number), stablehlo.ComparisonDirectionAttr.get("EQ"))
    return stablehlo.select(first, value, _build_like(0, value))


def _number_elements(dim: Dim, mesh: Mesh) -> Value:
    """The global index of each local one along a dim: the digits of both, those that are held from the device."""
    # Numbers are whole until the end: a narrow floating-point type counts to 256 only.
    kind = ir.IntegerType.get_signless(32 if dim.size < 2**31 else 64)
    local = stablehlo.iota(ir.RankedTensorType.get([dim.tile], kind), 0)
    # `place` is what a digit counts for in the global index, `unit` in the local one.
    total, place, unit = None, 1, 1
    for digit in reversed(dim.digits):
        if digit.axis is not None:
            value = _convert(_count_along([digit.axis], mesh), kind)
            value = stablehlo.broadcast_in_dim(local.type, value, [])
        else:
            value = stablehlo.divide(local, _build_like(unit, local)) if unit > 1 else local
            if unit * digit.radix < dim.tile:
                value = stablehlo.remainder(value, _build_like(digit.radix, local))
            unit *= digit.radix
        value = stablehlo.multiply(value, _build_like(place, local)) if place > 1 else value
        total = value if total is None else stablehlo.add(total, value)
        place *= digit.radix
    return local if total is None else total


def _take_tile(whole: Value, layout: Layout, mesh: Mesh) -> Value:
    """A device's tile of a value that it has whole: the digits that are held, at its coordinates."""
    digits = [digit for dim in layout.dims for digit in dim.digits]
    if all(digit.axis is None for digit in digits):
        return whole
    kind = ir.RankedTensorType(whole.type).element_type
    # A dim for each digit: what is held is then one element of a dim, wherever it stands among the local ones.
    apart = stablehlo.reshape(ir.RankedTensorType.get([digit.radix for digit in digits], kind), whole)
    zero = _build_scalar(0, ir.IntegerType.get_signless(32))
    starts = [zero if digit.axis is None else _count_along([digit.axis], mesh) for digit in digits]
    taken = stablehlo.dynamic_slice(apart, starts, [digit.radix if digit.axis is None else 1 for digit in digits])
    return stablehlo.reshape(ir.RankedTensorType.get(layout.tile_shape, kind), taken)


# What is not only the same operation on smaller types. Each changes a copy, before which MLIR inserts.


def _localize_slice(op: Operation, copy: Operation, operands: Sequence[Layout], *_: object) -> None:
    starts, limits, strides = (list(op.attributes[name]) for name in ("start_indices", "limit_indices", "strides"))
    for dim, (size, tile) in enumerate(zip(operands[0].shape, operands[0].tile_shape, strict=True)):
        # A range is whole pieces of the dim, and each piece is smaller here; what strides skip stays in the tile.
        if strides[dim] == 1:
            starts[dim], limits[dim] = starts[dim] * tile // max(size, 1), limits[dim] * tile // max(size, 1)
        else:
            limits[dim] -= size - tile
    copy.attributes["start_indices"] = ir.DenseI64ArrayAttr.get(starts)
    copy.attributes["limit_indices"] = ir.DenseI64ArrayAttr.get(limits)


def _localize_pad(op: Operation, copy: Operation, operands: Sequence[Layout], *_: object) -> None:
    interior = list(op.attributes["interior_padding"])
    for name in ("edge_padding_low", "edge_padding_high"):
        padding = list(op.attributes[name])
        for dim, (size, tile) in enumerate(zip(operands[0].shape, operands[0].tile_shape, strict=True)):
            if interior[dim] == 0 and size:  # What pads nothing at all stays whole.
                padding[dim] = padding[dim] * tile // size
        copy.attributes[name] = ir.DenseI64ArrayAttr.get(padding)


def _localize_dynamic_slice(
    op: Operation, copy: Operation, _: Sequence[Layout], results: Sequence[Layout], *__: object
) -> None:
    copy.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(results[0].tile_shape)


def _localize_convolution(
    op: Operation, copy: Operation, operands: Sequence[Layout], results: Sequence[Layout], *_: object
) -> None:
    """A device that has some groups of features, or of a batch, has fewer of them."""
    numbers: Any = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    image, kernel, made = operands[0].tile_shape, operands[1].tile_shape, results[0].tile_shape
    count = ir.IntegerType.get_signless(64)
    if int(op.attributes["feature_group_count"]) > 1:
        groups = image[int(numbers.input_feature_dimension)] // kernel[int(numbers.kernel_input_feature_dimension)]
        copy.attributes["feature_group_count"] = ir.IntegerAttr.get(count, groups)
    if int(op.attributes["batch_group_count"]) > 1:
        groups = image[int(numbers.input_batch_dimension)] // made[int(numbers.output_batch_dimension)]
        copy.attributes["batch_group_count"] = ir.IntegerAttr.get(count, groups)


def _localize_gather(
    op: Operation, copy: Operation, operands: Sequence[Layout], results: Sequence[Layout], mesh: Mesh
) -> Value | None:
    """Looks up what a device has of the rows: elsewhere than there it adds zeros to the sum."""
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    windows = read_windows(op)
    whole = zip(list(op.attributes["slice_sizes"]), operands[0].shape, operands[0].tile_shape, strict=True)
    sizes = [tile if window == size else window for window, size, tile in whole]
    copy.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(sizes)
    moved, inside = _shift_indices(
        op, copy.operands[1], numbers.index_vector_dim, windows, operands[0], mesh, clamp=True
    )
    if inside is None:
        return None
    copy.operands[1] = moved
    shape = results[0].tile_shape
    batch = [dim for dim in range(len(shape)) if dim not in list(numbers.offset_dims)]
    return stablehlo.broadcast_in_dim(ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(1)), inside, batch)


def _localize_scatter(
    op: Operation, copy: Operation, operands: Sequence[Layout], results: Sequence[Layout], mesh: Mesh
) -> None:
    """Updates at indices elsewhere miss what a device has of the rows, and StableHLO leaves them out.

    Devices with other updates of the same rows make a sum: what is updated must be in one summand alone.
    """
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    arrays = len(op.results)
    moved, _ = _shift_indices(
        op, copy.operands[arrays], numbers.index_vector_dim, read_windows(op), operands[0], mesh, clamp=False
    )
    copy.operands[arrays] = moved
    # The axes of updates that the operand does not have are those of `OpRule.reduced`.
    rest = [axis for axis in operands[-1].held if axis not in (*operands[0].held, *operands[0].partial)]
    if rest and read_body_kind(op) == "sum" and not is_zero(op.operands[0]):
        copy.operands[0] = _keep_first(copy.operands[0], rest, mesh)


def _shift_indices(
    op: Operation,
    indices: Value,
    vector_dim: int,
    windows: Sequence[tuple[int, int | None]],
    layout: Layout,
    mesh: Mesh,
    clamp: bool,
) -> tuple[Value, Value | None]:
    """Indices among the rows that a device has, and whether all of them are there; None if it has every row.

    A gather takes the nearest row for an index that is out of bounds: `clamp` does so before.
    """
    held = {
        index: (size, dim)
        for (window, index), size, dim in zip(windows, layout.shape, layout.dims, strict=True)
        if index is not None and window == 1 and dim.tile < size
    }
    if not held:
        return indices, None
    tensor = ir.RankedTensorType(indices.type)
    shape, kind = list(tensor.shape), tensor.element_type
    if vector_dim == len(shape):
        shape.append(1)
    # Offsets may be negative, and rows are more than some types can count.
    wide = str(kind) == "i64" or str(kind) == "ui64"
    signed = ir.IntegerType.get_signless(64 if wide else 32)
    if str(kind) in ("ui32", "ui64"):
        indices = stablehlo.minimum(indices, _build_like(2 ** (63 if wide else 31) - 1, indices))
    indices = stablehlo.reshape(ir.RankedTensorType.get(shape, signed), _convert(indices, signed))
    # Each component of an index is of one dim: those of dims that are whole here stay as they are.
    parts, inside = list[Value](), None
    for at in range(shape[vector_dim]):
        starts, limits = [0] * len(shape), list(shape)
        starts[vector_dim], limits[vector_dim] = at, at + 1
        part = stablehlo.slice(indices, starts, limits, [1] * len(shape)) if shape[vector_dim] > 1 else indices
        if at in held:
            size, dim = held[at]
            if clamp:
                part = stablehlo.maximum(stablehlo.minimum(part, _build_like(size - 1, part)), _build_like(0, part))
            offset = _convert(_start_piece(dim, mesh, op), signed)
            part = stablehlo.subtract(part, stablehlo.broadcast_in_dim(part.type, offset, []))
            direction = stablehlo.ComparisonDirectionAttr.get
            above = stablehlo.compare(part, _build_like(0, part), direction("GE"))
            below = stablehlo.compare(part, _build_like(dim.tile, part), direction("LT"))
            found = stablehlo.and_(above, below)
            inside = found if inside is None else stablehlo.and_(inside, found)
        parts.append(part)
    moved = parts[0] if len(parts) == 1 else stablehlo.concatenate(parts, vector_dim)
    if len(shape) > len(tensor.shape):
        shape.pop()
        moved = stablehlo.reshape(ir.RankedTensorType.get(shape, signed), moved)
    batch = [size for dim, size in enumerate(shape) if dim != vector_dim]
    kind = ir.IntegerType.get_signless(1)
    return moved, stablehlo.reshape(ir.RankedTensorType.get(batch, kind), inside)


def _start_piece(dim: Dim, mesh: Mesh, op: Operation) -> Value:
    """The first global index of a device's piece of a dim."""
    # Local indices count from it only if no local digit is before a held one.
    axes = [digit.axis for digit in dim.digits if digit.axis is not None]
    held = [digit.axis is not None for digit in dim.digits]
    if held != sorted(held, reverse=True):
        raise PlanError(f"{op.name} looks up rows in tiles that are not contiguous: {dim.digits}; split its dim alone")
    number = _count_along(axes, mesh)
    return stablehlo.multiply(number, _build_like(dim.tile, number))


_ADJUST: dict[str, Callable[..., Value | None]] = {
    "stablehlo.slice": _localize_slice,
    "stablehlo.pad": _localize_pad,
    "stablehlo.dynamic_slice": _localize_dynamic_slice,
    "stablehlo.convolution": _localize_convolution,
    "stablehlo.gather": _localize_gather,
    "stablehlo.scatter": _localize_scatter,
}

"""Layouts emitted as one program on tiles: `emit_step` writes every operation for one device, and plans between them.

    func @main(arguments and results with shardings)
      sdy.manual_computation over all axes
        operation on tiles                 `localize_op`, or here: loops, conditionals, what does nothing itself
        body of a plan                     where a value is read in another layout than the one it was written in
        operation on tiles
        ...

So XLA's partitioner decides nothing. A copy of a value in another layout is made once, where the value itself is
defined, right before its first reader: a reader inside a branch uses what was made outside. A copy *anew* is for one
reader alone: a barrier ties it to another operand of the reader, without which XLA would merge it with equal ones, or
make it long before. What a loop makes in each trip of what it does not change is tied to what it does change: XLA would
make it once, before the loop, and hold it throughout.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.errors import MeshError, ProgramError, quoted
from reshard.jax.layout_choice.localize import localize_op, localize_source
from reshard.jax.layout_choice.op_rules import is_source
from reshard.jax.layout_choice.step_flow import BARRIER, BRANCHES, WHILE, OpLayouts, StepLayouts
from reshard.jax.layout_choice.trace_step import TracedStep, join_transforms
from reshard.jax.stablehlo_pass.shardy import ALIAS, CONSTRAINT, DONOR, MANUAL, SHARDING, read_dtype, read_meshes, sdy
from reshard.lower.to_stablehlo import (
    CHANNEL,
    Block,
    Module,
    Operation,
    Value,
    insert_tile_plan,
    ir,
    list_operations,
    paste_operations,
    spell_sharding,
)
from reshard.synth.choice.prices import MovePrices
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

_SAME = (CONSTRAINT, "sdy.propagation_barrier", "sdy.reshard")
_NOTHING = ("sdy.sharding_group",)


def emit_step(step: TracedStep, layouts: StepLayouts, prices: MovePrices) -> Module:
    """The step as a module of one manual computation, in which every value has the layouts that are given.

    An operation without layouts is done whole by every device. The step is left as it is.

    Raises `ProgramError` for a step that is not emitted: with values that are no arrays, or with a `shard_map` inside
    another one; `MeshError` for a mesh of one device.
    """
    mesh = next((each.mesh for each in (*layouts.arguments, *layouts.results)), None)
    if mesh is None:
        raise ProgramError("the step has neither arguments nor results; nothing can be split")
    if mesh.size == 1:
        # XLA does not partition for one device, and would meet the manual computation unchanged.
        raise MeshError(f"mesh {quoted(str(mesh))} has one device, and nothing to split: jax.jit runs the step")
    with step.module.context, ir.Location.unknown():
        module, symbol = _start_module(step, mesh)
        body: Block = step.main.regions[0].blocks[0]
        inputs: list[Any] = [argument.type for argument in body.arguments]
        outputs: list[Any] = [value.type for value in step.ops[-1].operands]
        kind = ir.FunctionType.get(inputs, outputs)
        attributes = {
            "sym_name": ir.StringAttr.get("main"),
            "sym_visibility": ir.StringAttr.get("public"),
            "function_type": ir.TypeAttr.get(kind),
            "arg_attrs": ir.ArrayAttr.get(_write_arguments(step, layouts, symbol)),
            "res_attrs": ir.ArrayAttr.get(_write_results(step, layouts, symbol)),
        }
        with ir.InsertionPoint(module.body):
            main = ir.Operation.create("func.func", [], [], attributes, regions=1)
        block = main.regions[0].blocks.append(*inputs, arg_locs=[each.location for each in body.arguments])

        def spell_all(each: Sequence[Layout]) -> Any:
            listed = ", ".join(spell_sharding(layout, symbol) for layout in each)
            return ir.Attribute.parse(f"#sdy.sharding_per_value<[{listed}]>")

        axes = ", ".join(f'"{name}"' for name in mesh.axes)
        manual = {
            "in_shardings": spell_all(layouts.arguments),
            "out_shardings": spell_all(layouts.results),
            "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{axes}}}>"),
        }
        with ir.InsertionPoint(block):
            made = ir.Operation.create(MANUAL, outputs, list(block.arguments), manual, regions=1)
            ir.Operation.create("func.return", [], list(made.results))
        sources = frozenset(op for op in step.ops if is_source(op))
        emitter = _Emitter(layouts, prices, step.platform, {op: number for number, op in enumerate(step.ops)}, sources)
        tiles = [_tile_type(each.type, layout) for each, layout in zip(body.arguments, layouts.arguments, strict=True)]
        scope = _Scope(made.regions[0].blocks.append(*tiles))
        emitter.write(body.arguments, scope.block.arguments, layouts.arguments, scope)
        emitter.emit_block(body, scope, layouts.results, "sdy.return")
        join_transforms(main)
        # Every plan and every `shard_map` numbers its channels from 1: TPUs refuse a number that is used twice.
        channels = itertools.count(1)
        for op in list_operations(made):
            if CHANNEL in op.attributes:
                text = f"#stablehlo.channel_handle<handle = {next(channels)}, type = 1>"
                op.attributes[CHANNEL] = ir.Attribute.parse(text)
        try:
            module.operation.verify()
        except ir.MLIRError as error:
            raise ProgramError(f"the step on tiles is not valid StableHLO: {error}") from None
    return module


@dataclass(eq=False)
class _Scope:
    """A block that is being filled: at its end, or before the operation whose regions are being filled.

    Inside a loop, `varying` is a tile that is another one in each trip.
    """

    block: Block
    varying: Value | None = None
    inside: Operation | None = None
    latest: Value | None = None
    sources: dict[tuple[Value, Layout], Value] = field(default_factory=dict[tuple[Value, Layout], Value])

    def insert(self) -> Any:
        return ir.InsertionPoint(self.block) if self.inside is None else ir.InsertionPoint(self.inside)


@dataclass(eq=False)
class _Written:
    """A value of the step as emitted: its tile in the layout in which it was written, and kept tiles in others; `same`
    if it is the same in each trip of the loop that it is made in."""

    tile: Value
    layout: Layout
    scope: _Scope
    same: bool = False
    copies: dict[Layout, Value] = field(default_factory=dict[Layout, Value])


@dataclass(eq=False)
class _Emitter:
    layouts: StepLayouts
    prices: MovePrices
    platform: str
    numbers: Mapping[Operation, int]
    sources: frozenset[Operation]
    written: dict[Value, _Written] = field(default_factory=dict[Value, _Written])

    def write(
        self, values: Any, tiles: Any, layouts: Sequence[Layout], scope: _Scope, same: Sequence[bool] | None = None
    ) -> None:
        """Notes what values of the step became, and which are the same in each trip."""
        for value, tile, layout, alike in zip(values, tiles, layouts, same or [False] * len(layouts), strict=True):
            if tile.type != _tile_type(value.type, layout):
                raise ProgramError(f"the tile of a value in {layout} is {tile.type}, not of shape {layout.tile_shape}")
            self.written[value] = _Written(tile, layout, scope, alike)
            scope.latest = tile

    def emit_block(self, block: Block, scope: _Scope, returned: Sequence[Layout], name: str) -> None:
        """Emits the operations of a block, and a terminator that returns what the block's does in these layouts."""
        *inner, end = [op.operation for op in block.operations]
        for op in inner:
            if op not in self.sources and op.name not in _NOTHING:
                with op.location:
                    self.emit_op(op, scope)
        whole = OpLayouts(tuple(returned), ())
        anew = self.layouts.operations.get(self.numbers[end], whole).anew
        with end.location:
            values = self.read_operands(end, OpLayouts(tuple(returned), (), anew), scope)
            with scope.insert():
                ir.Operation.create(name, [], values)

    def emit_op(self, op: Operation, scope: _Scope) -> None:
        layouts = self.layouts.operations.get(self.numbers[op])
        if layouts is None:
            layouts = OpLayouts(tuple(map(self.whole, op.operands)), tuple(map(self.whole, op.results)))
        # A loop's operands lie as what it carries does.
        if op.name == WHILE:
            layouts = OpLayouts(layouts.results, layouts.results, layouts.anew)
        turned = self.turn_sum(op, layouts, scope)
        tiles = self.read_operands(op, layouts, scope) if turned is None else []
        types = [_tile_type(each.type, layout) for each, layout in zip(op.results, layouts.results, strict=True)]
        if op.name in (WHILE, *BRANCHES):
            # Shardings among the attributes would be of whole arrays.
            kept = {name: op.attributes[name] for name in op.attributes if not name.startswith("sdy.")}
            with scope.insert():
                made = ir.Operation.create(op.name, types, tiles, kept, regions=len(op.regions))
            outer, scope.inside = scope.inside, made
            for number, region in enumerate(op.regions):
                (block,) = region.blocks
                # What a loop carries has one layout; its condition returns a scalar. Branches have no arguments.
                inside = layouts.results if len(block.arguments) else ()
                arguments = [_tile_type(each.type, one) for each, one in zip(block.arguments, inside, strict=True)]
                inner = _Scope(made.regions[number].blocks.append(*arguments), scope.varying)
                ends = list(list(block.operations)[-1].operands)
                same = [returned == each for returned, each in zip(ends, block.arguments, strict=False)]
                if op.name == WHILE and number == 1:
                    changed = [tile for tile, alike in zip(inner.block.arguments, same, strict=True) if not alike]
                    inner.varying = changed[0] if changed else None
                self.write(block.arguments, inner.block.arguments, inside, inner, same if number else None)
                # The condition of a loop alone returns something else than what the operation does.
                scalar = op.name == WHILE and number == 0
                returned = [self.whole(ends[0])] if scalar else layouts.results
                self.emit_block(block, inner, returned, "stablehlo.return")
            scope.inside = outer
            values: Sequence[Value] = list(made.results)
        elif turned is not None:
            values = [turned]
        elif op.name in _SAME:
            # Its layout is the constraint: it was kept when the operand was read.
            values = tiles
        elif op.name == BARRIER:
            with scope.insert():
                values = list(ir.Operation.create(BARRIER, types, tiles).results)
        else:
            with scope.insert():
                values = (
                    _inline_manual(op, tiles)
                    if op.name == MANUAL
                    else localize_op(op, tiles, layouts.operands, layouts.results, self.prices.mesh)
                )
        made_of = [each for each in op.operands if each in self.written]
        same = scope.varying is not None and op.name not in BRANCHES and all(self.written[v].same for v in made_of)
        self.write(op.results, values, layouts.results, scope, [same] * len(layouts.results))

    def turn_sum(self, op: Operation, layouts: OpLayouts, scope: _Scope) -> Value | None:
        """The result of a transpose that alone reads a sum, which is finished after it; None for another operation.

        Compilers make one product of a product and its transpose, as gradients of weights are written, if nothing is
        between them. Otherwise a TPU keeps the sum as it was, and copies all that meets it into that order.
        """
        known = self.written.get(op.operands[0]) if op.name == "stablehlo.transpose" else None
        if known is None or known.scope is not scope or known.layout == layouts.operands[0]:
            return None
        if not known.layout.partial or len(list(op.operands[0].uses)) > 1:
            return None
        order = list[int](op.attributes["permutation"])
        turned = replace(known.layout, dims=tuple(known.layout.dims[dim] for dim in order))
        with scope.insert():
            (tile,) = localize_op(op, [known.tile], [known.layout], [turned], self.prices.mesh)
            return self.move(tile, turned, layouts.results[0])

    def read_operands(self, op: Operation, layouts: OpLayouts, scope: _Scope) -> list[Value]:
        """The tiles of an operation's operands in the layouts in which it reads them."""
        tiles: dict[int, Value] = {}
        operands = list(op.operands)
        if len(operands) != len(layouts.operands):
            raise ProgramError(f"{op.name} has {len(operands)} operands, and {len(layouts.operands)} layouts are given")
        # Last those that are moved anew: by then there is something to tie them to.
        late = [at for at in range(len(operands)) if at in layouts.anew]
        for at in [*(at for at in range(len(operands)) if at not in layouts.anew), *late]:
            value, layout = operands[at], layouts.operands[at]
            # What a source makes is made again in each block: it costs nothing, and is live nowhere else.
            if not isinstance(value.owner, ir.Block) and value.owner.operation in self.sources:
                if (value, layout) not in scope.sources:
                    with scope.insert():
                        made = localize_source(value.owner.operation, layout, self.prices.mesh)
                    scope.sources[value, layout] = made
                tiles[at] = scope.sources[value, layout]
                continue
            known = self.written[value]
            if known.layout == layout:
                tiles[at] = known.tile
            elif at not in layouts.anew:
                # Where the value is made, for those who read it elsewhere, too: outside of the branch that reads first.
                if layout not in known.copies:
                    with known.scope.insert():
                        tile = known.tile
                        if known.same and known.scope.varying is not None:
                            tile = _tie_tiles(tile, known.scope.varying)[0]
                        known.copies[layout] = self.move(tile, known.layout, layout)
                tiles[at] = known.copies[layout]
            else:
                # The barrier's other operand is what the reader needs anyway, else what was made last.
                own = [
                    other
                    for other, tile in tiles.items()
                    if tile != known.tile
                    and operands[other] in self.written
                    and not (known.same and self.written[operands[other]].same)
                ]
                tie = tiles[own[0]] if own else scope.varying if known.same else scope.latest
                tile = known.tile
                with scope.insert():
                    if tie is not None and tie != tile:
                        tied = _tie_tiles(tile, tie)
                        tile = tied[0]
                        if own:
                            tiles[own[0]] = tied[1]
                    tiles[at] = self.move(tile, known.layout, layout)
        return [tiles[at] for at in range(len(operands))]

    def move(self, tile: Value, source: Layout, target: Layout) -> Value:
        """The tile moved by its plan, at MLIR's insertion point."""
        if 0 in source.shape:
            # A plan of nothing reads nothing, not even its argument.
            empty = _tile_type(tile.type, target)
            # From text: Python has no attributes for complex constants.
            nothing = ir.Operation.parse(f'%0 = "stablehlo.constant"() <{{value = dense<> : {empty}}}> : () -> {empty}')
            ir.InsertionPoint.current.insert(nothing)
            return nothing.results[0]
        if source.shape:
            return insert_tile_plan(self.prices.plan(source, target), tile, self.platform)
        # Plans are of arrays with dims.
        ends = [Layout.tiled(one.mesh, (1,), one.dtype, [()], one.partial, one.reduction) for one in (source, target)]
        row = ir.RankedTensorType.get((1,), ir.RankedTensorType(tile.type).element_type)
        tile = ir.Operation.create("stablehlo.reshape", [row], [tile]).results[0]
        moved = insert_tile_plan(self.prices.plan(*ends), tile, self.platform)
        scalar = ir.RankedTensorType.get((), row.element_type)
        return ir.Operation.create("stablehlo.reshape", [scalar], [moved]).results[0]

    def whole(self, value: Value) -> Layout:
        """The layout of a value that every device has whole."""
        if not isinstance(value.type, ir.RankedTensorType):
            raise ProgramError(f"the step has a value of type {value.type}; only arrays can be laid out")
        tensor = ir.RankedTensorType(value.type)
        shape = tuple(tensor.shape)
        return Layout.tiled(self.prices.mesh, shape, read_dtype(str(tensor.element_type)), [()] * len(shape))


def _start_module(step: TracedStep, mesh: Mesh) -> tuple[Module, str]:
    """A module with the meshes of the step and that of the layouts, and the symbol of the latter."""
    module = ir.Module.create()
    name = step.module.operation.attributes.get("sym_name")
    if name is not None:
        module.operation.attributes["sym_name"] = name
    for key, count in (("mhlo.num_partitions", mesh.size), ("mhlo.num_replicas", 1)):
        module.operation.attributes[key] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), count)
    # The step's own meshes stay: groups of devices in a `shard_map` refer to them.
    with ir.InsertionPoint(module.body):
        for op in step.module.body.operations:
            if op.operation.name == "sdy.mesh":
                op.operation.clone()
    return module, name_mesh(module, mesh)


def name_mesh(module: Module, mesh: Mesh) -> str:
    """The symbol of a mesh in a module, which gets the mesh unless it has it already."""
    symbol = next((each for each, one in read_meshes(module).items() if one == mesh), None)
    if symbol is None:
        names = {op.attributes["sym_name"].value for op in module.body.operations if "sym_name" in op.attributes}
        symbol = next(each for each in ("mesh", *(f"mesh_{n}" for n in range(len(names)))) if each not in names)
        axes = [sdy.MeshAxisAttr.get(axis, size) for axis, size in mesh.axes.items()]
        attributes = {"sym_name": ir.StringAttr.get(symbol), "mesh": sdy.MeshAttr.get(axes)}
        with ir.InsertionPoint.at_block_begin(module.body):
            ir.Operation.create("sdy.mesh", [], [], attributes)
    return symbol


def _write_arguments(step: TracedStep, layouts: StepLayouts, symbol: str) -> list[Any]:
    """The attributes of the arguments: shardings, and which results may take their memory."""
    taken = {
        argument: result
        for result, argument in step.carried.items()
        if argument in step.donated and layouts.arguments[argument] == layouts.results[result]
    }
    listed: list[Any] = []
    for at, layout in enumerate(layouts.arguments):
        attributes = {SHARDING: ir.Attribute.parse(f"#sdy.sharding{spell_sharding(layout, symbol)}")}
        if at in taken:
            attributes[ALIAS] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), taken[at])
        elif at in step.donated:
            attributes[DONOR] = ir.BoolAttr.get(True)
        listed.append(ir.DictAttr.get(attributes))
    return listed


def _write_results(step: TracedStep, layouts: StepLayouts, symbol: str) -> list[Any]:
    return [
        ir.DictAttr.get(
            {
                SHARDING: ir.Attribute.parse(f"#sdy.sharding{spell_sharding(layout, symbol)}"),
                "jax.result_info": ir.StringAttr.get(value.name),
            }
        )
        for value, layout in zip(step.results, layouts.results, strict=True)
    ]


def _inline_manual(op: Operation, tiles: Sequence[Value]) -> list[Value]:
    """The body of a `shard_map` of the step, on tiles: it is local already. Axes that it leaves open split nothing."""
    copy = op.clone()
    block: Block = copy.regions[0].blocks[0]
    for argument, tile in zip(block.arguments, tiles, strict=True):
        if argument.type != tile.type:
            raise ProgramError(f"a shard_map takes tiles of {argument.type}, and is given {tile.type}")
    # Constraints over axes that it leaves open say nothing here: every device has these dims whole.
    for inner in list_operations(copy):
        if inner.name == MANUAL:
            raise ProgramError("a shard_map inside another one cannot be emitted; make it one over all of its axes")
        if inner.name in _SAME:
            inner.results[0].replace_all_uses_with(inner.operands[0])
            inner.erase()
    values = paste_operations(block, tiles)
    copy.erase()
    return values


def _tie_tiles(tile: Value, other: Value) -> Sequence[Value]:
    """Both tiles, neither of which is used before both are there."""
    return ir.Operation.create(BARRIER, [tile.type, other.type], [tile, other]).results


def _tile_type(kind: Any, layout: Layout) -> Any:
    """The type of a device's tile of a value of this type."""
    return ir.RankedTensorType.get(layout.tile_shape, ir.RankedTensorType(kind).element_type)

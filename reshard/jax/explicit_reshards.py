"""Where a program's data is resharded: Shardy's propagation, then every reshard spelled out.

After `spell_out`, each operation that Shardy knows computes where its operands are, and `sdy.reshard` moves
what is elsewhere. Two marks stay on operations until `unmark`: what sharding they had before reshards were
spelled out, and which reshards the user asked for (`with_sharding_constraint`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.errors import ProgramError, ReshardError
from reshard.jax import shardings
from reshard.jax.shardings import SHARDING
from reshard.lower.to_stablehlo import Attribute, Module, Operation, Value, ir, run_passes, walk
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

RESHARD = "sdy.reshard"
BEFORE = "reshard.before"
ASKED = "reshard.asked"
PROPAGATE = "canonicalize,sdy-propagation-pipeline"
INSERT = "func.func(sdy-insert-explicit-reshards{enable-full-version=true})"
_STRANGE = ("sdy.sharded_to_unreduced", "sdy.replicated_to_unreduced", "sdy.named_computation")


@dataclass(frozen=True, eq=False)
class Move:
    """One `sdy.reshard`, and whether the user asked for it; without layouts, and `why`, where it has none."""

    op: Operation
    asked: bool
    source: Layout | None
    target: Layout | None
    why: str = ""

    @property
    def maker(self) -> Operation | None:
        """The operation whose result is moved, None for an argument."""
        owner = self.op.operands[0].owner
        return None if isinstance(owner, ir.Block) else owner.operation

    @property
    def users(self) -> list[Operation]:
        """The operations that take what was moved."""
        return users(self.op.results[0])


def spell_out(module: Module) -> None:
    """Propagates shardings through a module and makes every reshard an operation, in place.

    Raises `ProgramError` if what comes out has operations that cannot be handed to XLA.
    """
    run_passes(module, PROPAGATE)
    unit = ir.UnitAttr.get(module.context)
    for op in walk(module.operation):
        if op.name == RESHARD:
            op.attributes[ASKED] = unit
        elif len(op.results):
            op.attributes[BEFORE] = op.attributes.get(SHARDING, unit)
    run_passes(module, INSERT)
    for op in walk(module.operation):
        if op.name in _STRANGE:
            raise ProgramError(
                f"the program has an operation {op.name} at {op.location}, which cannot be handed to XLA"
            )
        if op.name == "sdy.all_reduce":  # XLA makes its own of the operation before it.
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
        elif op.name == RESHARD:
            _join(op)
    _share(module)


def moves(module: Module) -> list[Move]:
    """The reshards of a module after `spell_out`, in order."""
    known = shardings.meshes(module)
    return [_move(op, known) for op in walk(module.operation) if op.name == RESHARD]


def changed(op: Operation) -> bool:
    """Whether an operation got another sharding when reshards were spelled out."""
    return BEFORE in op.attributes and op.attributes[BEFORE] != _sharding(op)


def restore(op: Operation) -> None:
    """Gives an operation the sharding back that it had."""
    before = op.attributes[BEFORE]
    if isinstance(before, ir.UnitAttr):
        del op.attributes[SHARDING]
    else:
        op.attributes[SHARDING] = before


def unmark(module: Module) -> None:
    """Takes the marks off again."""
    for op in walk(module.operation):
        for mark in (BEFORE, ASKED):
            if mark in op.attributes:
                del op.attributes[mark]


def users(value: Value) -> list[Operation]:
    """The operations that use a value."""
    return [use.owner.operation for use in value.uses]


def _sharding(op: Operation) -> Attribute:
    return op.attributes.get(SHARDING, ir.UnitAttr.get(op.context))


def _join(op: Operation) -> None:
    """A reshard of nothing but a reshard: one move, unless the user asked for the stop in between."""
    maker = op.operands[0].owner
    if isinstance(maker, ir.Block) or maker.operation.name != RESHARD or len(users(op.operands[0])) > 1:
        return
    first = maker.operation
    if ASKED in first.attributes:
        if first.attributes["sharding"] != op.attributes["sharding"]:
            return
        op.attributes[ASKED] = first.attributes[ASKED]
    op.operands[0] = first.operands[0]
    first.erase()


def _share(module: Module) -> None:
    """Of reshards of one value to one sharding in a block, all use what the first made, as XLA's partitioner does."""
    firsts: dict[tuple[Value, Attribute], list[Operation]] = {}
    for op in walk(module.operation):
        if op.name != RESHARD:
            continue
        same = firsts.setdefault((op.operands[0], op.attributes["sharding"]), [])
        first = next((other for other in same if other.block == op.block), None)
        if first is None:
            same.append(op)
            continue
        op.results[0].replace_all_uses_with(first.results[0])
        if ASKED in op.attributes:
            first.attributes[ASKED] = op.attributes[ASKED]
        op.erase()


def _move(op: Operation, known: Mapping[str, Mesh]) -> Move:
    asked = ASKED in op.attributes
    try:
        return Move(op, asked, *_layouts(op, known))
    except ReshardError as error:
        return Move(op, asked, None, None, str(error))


def _layouts(op: Operation, known: Mapping[str, Mesh]) -> tuple[Layout, Layout]:
    """The layouts that a reshard is between."""
    value, before, after = op.operands[0], shardings.of_value(op.operands[0]), op.attributes["sharding"]
    symbols = [shardings.mesh_of(after), shardings.mesh_of(before)]
    mesh = next((known[symbol] for symbol in symbols if symbol in known), None)
    if mesh is None:
        raise ProgramError(f"no mesh of the module is that of {after}")
    return shardings.layout(value, before, known, mesh), shardings.layout(value, after, known, mesh)

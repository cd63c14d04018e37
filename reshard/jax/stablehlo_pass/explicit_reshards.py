"""Makes every reshard of a program an operation: Shardy's propagation, then its pass that inserts explicit reshards.

Shardings alone do not say where data moves. For example, here `%a` moves before the addition, implicitly:

    %r = stablehlo.add %a, %b        %a on [{"x"}, {}], %b and %r on [{}, {"x"}]

After `make_explicit` every operation known to Shardy finds its operands where it computes:

    %c = sdy.reshard %a <@mesh, [{}, {"x"}]>
    %r = stablehlo.add %c, %b

Two marks stay on operations until `remove_marks`: the sharding that an operation had before reshards were inserted, and
whether the user wrote the reshard (`with_sharding_constraint`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reshard.errors import ProgramError, ReshardError
from reshard.hlo import Frame
from reshard.jax.stablehlo_pass import shardy
from reshard.jax.stablehlo_pass.shardy import RESHARD, SHARDING
from reshard.lower.to_stablehlo import Attribute, Module, Operation, Value, ir, list_operations, run_passes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.whole import MOST_DEVICES

BEFORE = "reshard.before"
BY_USER = "reshard.by_user"
GIVEN = "reshard.given"
NEVER = ("stablehlo.while",)
"""Operations on which XLA cannot import a sharding even if the program has it; JAX never writes one there."""
PROPAGATE = "canonicalize,sdy-propagation-pipeline"
INSERT = "func.func(sdy-insert-explicit-reshards{enable-full-version=true})"
_FRAME = re.compile(r'"([^"]+)":(\d+):\d+')
_ONE_DEVICE = Mesh(x=1)
_STARTS = ("sdy.replicated_to_unreduced", "sdy.sharded_to_unreduced")
# An all-gather stands for an all-reduce of what a sharded_to_unreduced made.
_MOVES = (*_STARTS, "sdy.all_gather")


@dataclass(frozen=True, eq=False)
class ReshardOp:
    """One `sdy.reshard` with the layouts it is between; they are None if they cannot be expressed, for reason `why`.

    `by_user` says that the user wrote it, as a sharding constraint.
    """

    op: Operation
    by_user: bool
    source: Layout | None
    target: Layout | None
    why: str = ""

    @property
    def maker(self) -> Operation | None:
        """The operation whose result is moved; None for an argument."""
        owner = self.op.operands[0].owner
        return None if isinstance(owner, ir.Block) else owner.operation

    @property
    def users(self) -> list[Operation]:
        """The operations that use the moved value."""
        return users_of(self.op.results[0])

    @property
    def around(self) -> list[Operation]:
        """The operations that use the moved value, then the one that makes it, if there is one."""
        return [*self.users, *([self.maker] if self.maker is not None else [])]

    @property
    def lines(self) -> list[str]:
        """The user's lines, `file:line`: its own, then those of the operations that use and that make the value."""
        places = (place for op in (self.op, *self.around) for place in _FRAME.findall(str(op.location)))
        frames = (Frame(file, int(line)) for file, line in places if file != "-")  # "-": parsed from text.
        return [f"{frame.file}:{frame.line}" for frame in frames if frame.users]


def make_explicit(module: Module) -> None:
    """Propagates shardings through a module and makes every reshard an operation, in place."""
    for name, mesh in shardy.read_meshes(module).items():
        if mesh.size > MOST_DEVICES:  # Shardy ends the process where 32 bits do not count them.
            raise ProgramError(f"mesh {name} has {mesh.size} devices; the pass takes at most {MOST_DEVICES}")
    shardy.spell_out(module)
    for op in list_operations(module.operation):
        # What has a sharding already, to which `rewrite.make_importable` goes back.
        if SHARDING in op.attributes and op.name not in NEVER:
            op.attributes[GIVEN] = op.attributes[SHARDING]
    run_passes(module, PROPAGATE)
    unit = ir.UnitAttr.get(module.context)
    for op in list_operations(module.operation):
        if op.name == RESHARD:
            # One that only leads to the start of a sum is the first part of what the user wrote there.
            if not {user.name for user in users_of(op.results[0])} <= set(_STARTS):
                op.attributes[BY_USER] = unit
        elif len(op.results):
            op.attributes[BEFORE] = op.attributes.get(SHARDING, unit)
    run_passes(module, INSERT)
    for op in list_operations(module.operation):
        if op.name in _MOVES:
            # A reshard to its sharding; one that starts a sum is always of the user's.
            attributes = {"sharding": op.attributes["out_sharding"]}
            if op.name in _STARTS:
                attributes[BY_USER] = unit
            with op.location, ir.InsertionPoint(op):
                made = ir.Operation.create(RESHARD, [op.results[0].type], [op.operands[0]], attributes)
            op.results[0].replace_all_uses_with(made.results[0])
            op.erase()
            op = made
        if op.name == "sdy.all_reduce":  # XLA derives its own from the operation before it.
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
        elif op.name == RESHARD:
            _join_chain(op)
    _share_equal(module)


def reshard_ops(module: Module) -> list[ReshardOp]:
    """The reshards of a module after `make_explicit`, in order."""
    meshes = shardy.read_meshes(module)
    listed: list[ReshardOp] = []
    for op in list_operations(module.operation):
        if op.name != RESHARD:
            continue
        value, by_user = op.operands[0], BY_USER in op.attributes
        before, after = shardy.value_sharding(value), op.attributes["sharding"]
        symbols = [shardy.mesh_symbol(one) for one in (after, before) if one is not None]
        # What neither end splits has any mesh.
        mesh = next((meshes[symbol] for symbol in symbols if symbol in meshes), _ONE_DEVICE)
        try:
            if "" in symbols:
                raise ProgramError(f"its mesh has no name in the module: {before} -> {after}")
            source, target = (shardy.read_value_layout(value, one, meshes, mesh) for one in (before, after))
            listed.append(ReshardOp(op, by_user, source, target))
        except ReshardError as error:
            listed.append(ReshardOp(op, by_user, None, None, str(error)))
    return listed


def is_changed(op: Operation) -> bool:
    """Whether inserting the reshards changed the sharding of an operation's results."""
    return BEFORE in op.attributes and op.attributes[BEFORE] != op.attributes.get(SHARDING, ir.UnitAttr.get(op.context))


def remove_marks(module: Module) -> None:
    """Removes the marks from all operations."""
    for op in list_operations(module.operation):
        for mark in (BEFORE, BY_USER):
            if mark in op.attributes:
                del op.attributes[mark]


def users_of(value: Value) -> list[Operation]:
    """The operations that use a value."""
    return [use.owner.operation for use in value.uses]


def _join_chain(op: Operation) -> None:
    """Merges a reshard with the reshard before it if nothing else uses that one's result.

    For example, A -> B -> C becomes A -> C, unless the user wrote the stop at B and B differs from C.
    """
    maker = op.operands[0].owner
    if isinstance(maker, ir.Block) or maker.operation.name != RESHARD or len(users_of(op.operands[0])) > 1:
        return
    first = maker.operation
    if BY_USER in first.attributes:
        if first.attributes["sharding"] != op.attributes["sharding"]:
            return
        op.attributes[BY_USER] = first.attributes[BY_USER]
    op.operands[0] = first.operands[0]
    first.erase()


def _share_equal(module: Module) -> None:
    """Keeps only the first of several reshards of one value to one sharding in a block, as XLA's partitioner does."""
    firsts: dict[tuple[Value, Attribute], list[Operation]] = {}
    for op in list_operations(module.operation):
        if op.name != RESHARD:
            continue
        same = firsts.setdefault((op.operands[0], op.attributes["sharding"]), [])
        first = next((other for other in same if other.block == op.block), None)
        if first is None:
            same.append(op)
            continue
        op.results[0].replace_all_uses_with(first.results[0])
        if BY_USER in op.attributes:
            first.attributes[BY_USER] = op.attributes[BY_USER]
        op.erase()

"""The shardings that a user gave a program: constraints by line, those of arguments and of results; and edits of them.

    read_shardings   lists them as plain data, each with the line that it stands for
    edit_shardings   changes or removes some of them in a module

A line is that of the call in the user's program. A helper that only constrains is looked through:

    def constrain(x, *spec):                                   # train.py
        return with_sharding_constraint(x, P(*spec))           # 11: not this line,
    ...
    h = constrain(h, "tp", None)                               # 42: but this one

Arrays that have explicit types get a constraint from JAX after every operation. Those that merely follow from their
operands are `derived`; what the user wrote is `jax.sharding.reshard` and `out_sharding=`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.hlo import Frame
from reshard.jax.stablehlo_pass import shardy
from reshard.jax.stablehlo_pass.shardy import ALIAS, CONSTRAINT, DONOR, MANUAL, SHARDING
from reshard.lower.to_stablehlo import Attribute, Module, Operation, ir, list_operations

CONSTRAINTS, IN, OUT, OPERATION = "constraint", "in_sharding", "out_sharding", "operation"
Spec = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim; an open dim has `?` as its last."""
Key = tuple[str, int]
"""A sharding of a module: its kind, and which of that kind, in the module's order."""
_TAG = "reshard.site"
_NO_WORK = ("stablehlo.constant", "func.func", "func.return", "sdy.mesh", CONSTRAINT)


@dataclass(frozen=True)
class UserSharding:
    """One sharding that the user gave: `key` finds it in the module again.

    `spec` is None where an argument or a result has none, or one that `format_spec` cannot say; such a constraint can
    only be removed. `line` is the user's `file:line`; of arguments and results, their name. `derived` constraints are
    those that JAX makes up for explicit types.
    """

    key: Key
    shape: tuple[int, ...]
    itemsize: float
    spec: Spec | None
    mesh: str = ""
    what: str = ""
    line: str = ""
    derived: bool = False
    frames: tuple[Frame, ...] = field(default=(), repr=False)

    @property
    def kind(self) -> str:
        """`constraint`, `in_sharding` or `out_sharding`."""
        return self.key[0]

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array."""
        return int(math.prod(self.shape) * self.itemsize)


def format_spec(spec: Spec | None) -> str:
    """A sharding as JAX writes it.

    >>> format_spec((("dp", "fsdp"), (), ("tp",))), format_spec((("?",),)), format_spec(None)
    ("P(('dp', 'fsdp'), None, 'tp')", 'P(P.UNCONSTRAINED)', 'unspecified')
    """
    if spec is None:
        return "unspecified"
    dims = [
        "P.UNCONSTRAINED" if "?" in axes else "None" if not axes else repr(axes[0] if len(axes) == 1 else axes)
        for axes in spec
    ]
    return f"P({', '.join(dims)})"


def read_frames(location: Any) -> tuple[Frame, ...]:
    """The frames of a location, innermost first, without those of frameworks."""
    frames: list[Frame] = []
    rest: list[tuple[Any, str]] = [(location, "")]
    while rest:  # No recursion: a stack may be a thousand frames deep.
        one, name = rest.pop()
        if isinstance(one, ir.NameLoc):
            rest.append((one.child_loc, one.name_str))
        elif isinstance(one, ir.CallSiteLoc):
            rest += [(one.caller, ""), (one.callee, "")]
        elif isinstance(one, ir.FusedLoc):
            rest += [(each, name) for each in reversed(list(one.locations)[:1])]
        elif isinstance(one, ir.FileLineColLoc):
            frames.append(Frame(one.filename, one.start_line, name))
    return tuple(frame for frame, _ in itertools.groupby(frame for frame in frames if frame.users))


def read_shardings(module: Module) -> list[UserSharding]:
    """The shardings of a module that can be changed: its constraints, then its arguments and its results."""
    entry = find_entry(module)
    callers: dict[str, tuple[Frame, ...]] = {}
    working: set[tuple[str, str]] = set()
    found: list[tuple[int, Operation, tuple[Frame, ...]]] = []
    operations = list_operations(module.operation)
    numbers = {id(op): at for at, op in enumerate(op for op in operations if op.name == CONSTRAINT)}
    stacks = {id(op): read_frames(op.location) for op in operations if op.name not in _NO_WORK or id(op) in numbers}
    for op in operations:  # Inside a jitted function frames end at its call.
        if op.name == "func.call" and (frames := stacks[id(op)]):
            callers.setdefault(op.attributes["callee"].value, frames)
    function = ""
    for op in operations:
        if op.name == "func.func":
            function = op.attributes["sym_name"].value
        frames = stacks.get(id(op), ())
        if id(op) in numbers:
            outer = callers.get(function, ()) if function != "main" else ()
            frames += outer if not frames or frames[-1:] != outer[-1:] else ()
            found.append((numbers[id(op)], op, frames))
        else:
            working |= {(frame.file, frame.function) for frame in frames}
    listed = [_read_constraint(number, op, frames) for number, op, frames in found if not _inside_manual(op)]
    return [*_name_lines(listed, working), *_read_ends(entry, IN), *_read_ends(entry, OUT)]


def edit_shardings(module: Module, edits: Mapping[Key, Spec | None], meshes: Mapping[Key, str]) -> None:
    """Changes shardings of a module in place; None removes one.

    A donated argument may afterwards have other pieces than its result, so XLA is left to pair them.
    """
    entry = find_entry(module)
    constraints = [op for op in list_operations(module.operation) if op.name == CONSTRAINT]
    with module.context:
        for (kind, number), spec in edits.items():
            mesh = meshes[kind, number]
            dims = ", ".join(f"{{{', '.join(a if a == '?' else json.dumps(a) for a in axes)}}}" for axes in spec or ())
            made = None if spec is None else ir.Attribute.parse(f"#sdy.sharding<@{mesh}, [{dims}]>")
            if kind in (IN, OUT):
                name = "arg_attrs" if kind == IN else "res_attrs"
                listed = list(entry.attributes[name])
                named = {pair.name: pair.attr for pair in ir.DictAttr(listed[number])}
                named.pop(SHARDING, None)
                if made is not None:
                    named[SHARDING] = made
                listed[number] = ir.DictAttr.get(named)
                entry.attributes[name] = ir.ArrayAttr.get(listed)
                continue
            op = constraints[number]
            if made is None:
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()
            else:
                op.attributes["sharding"] = made


def tag_sites(module: Module) -> None:
    """Writes the keys of constraints on them, in place, so that they are known in another form."""
    constraints = [op for op in list_operations(module.operation) if op.name == CONSTRAINT]
    with module.context:
        for number, op in enumerate(constraints):
            op.attributes[_TAG] = ir.StringAttr.get(f"{CONSTRAINTS} {number}")


def read_tags(ops: Sequence[Operation]) -> dict[int, Key]:
    """The keys that `tag_sites` wrote, by the places of operations."""
    tags = {at: op.attributes[_TAG].value.split() for at, op in enumerate(ops) if _TAG in op.attributes}
    return {at: (kind, int(number)) for at, (kind, number) in tags.items()}


def share_donations(module: Module) -> None:
    """Lets XLA pair donated arguments with results itself, in place: JAX's pairs say that their pieces are equal."""
    entry = find_entry(module)
    if "arg_attrs" not in entry.attributes:
        return
    with module.context:
        changed: list[Attribute] = []
        for attributes in entry.attributes["arg_attrs"]:
            named = {pair.name: pair.attr for pair in ir.DictAttr(attributes)}
            if named.pop(ALIAS, None) is not None:
                named[DONOR] = ir.BoolAttr.get(True)
            changed.append(ir.DictAttr.get(named))
        entry.attributes["arg_attrs"] = ir.ArrayAttr.get(changed)


def find_entry(module: Module) -> Operation:
    """The function `main` of a module."""
    functions = [op.operation for op in module.body.operations if op.operation.name == "func.func"]
    return next(op for op in functions if op.attributes["sym_name"].value == "main")


def _inside_manual(op: Operation) -> bool:
    """Whether an operation is in the body of a `shard_map`, where shardings say other things."""
    parent: Any = op.parent
    while parent is not None and parent.operation.name != "builtin.module":
        if parent.operation.name == MANUAL:
            return True
        parent = parent.operation.parent
    return False


def _read_spec(attribute: Attribute | None) -> tuple[Spec | None, str]:
    """The axes of each dim of a sharding, and its mesh; None for one that a list of whole axes does not say."""
    mesh = shardy.mesh_symbol(attribute)
    if attribute is None or not mesh:
        return None, mesh
    sharding = shardy.sdy.TensorShardingAttr(attribute)
    dims: list[tuple[str, ...]] = []
    for each in sharding.dimension_shardings:
        dim = shardy.sdy.DimensionShardingAttr(each)
        axes = [shardy.sdy.AxisRefAttr(axis) for axis in dim.axes]
        if any(axis.sub_axis_info is not None for axis in axes):
            return None, mesh
        dims.append((*(axis.name for axis in axes), *(() if dim.is_closed else ("?",))))
    plain = not list(sharding.replicated_axes) and not list(getattr(sharding, "unreduced_axes", ()))
    return (tuple(dims) if plain else None), mesh


def _read_type(kind: Any) -> tuple[tuple[int, ...], float]:
    """The shape of a tensor, and the bytes of an element."""
    tensor = ir.RankedTensorType(kind)
    text = str(tensor.element_type)
    bits = 8 if text == "i1" else int((re.search(r"\d+", text) or ["32"])[0]) * (2 if "complex" in text else 1)
    return tuple(tensor.shape), bits / 8


def _read_constraint(number: int, op: Operation, frames: tuple[Frame, ...]) -> UserSharding:
    spec, mesh = _read_spec(op.attributes["sharding"])
    location: Any = op.location
    name = location.name_str if isinstance(location, ir.NameLoc) else ""
    last, maker = name.rpartition("/")[2], op.operands[0].owner
    what, derived = "with_sharding_constraint", False
    if last == "reshard":
        # The gradient goes back to where the operand was: that follows from the operand.
        what, derived = "jax.sharding.reshard", "transpose(" in name and "remat" not in name
    elif name and last != "sharding_constraint":
        product = not isinstance(maker, ir.Block) and maker.operation.name == "stablehlo.dot_general"
        what, derived = "out_sharding", not product or ("transpose(" in name and "remat" not in name)
        derived = derived or _follows_from_operands(maker.operation, spec)
    return UserSharding((CONSTRAINTS, number), *_read_type(op.results[0].type), spec, mesh, what, "", derived, frames)


def _follows_from_operands(dot: Operation, spec: Spec | None) -> bool:
    """Whether the type of a product follows from those of its operands, so that nobody wrote it."""
    sides = [_read_spec(shardy.value_sharding(operand))[0] for operand in dot.operands]
    if spec is None or any(side is None for side in sides):
        return False
    left, right = (list(side or ()) for side in sides)
    numbers = str(dot.attributes["dot_dimension_numbers"])

    def dims_of(name: str) -> list[int]:
        listed = re.search(rf"{name} = \[([\d, ]*)\]", numbers)
        return [int(each) for each in listed[1].split(",")] if listed and listed[1].strip() else []

    batch = [left[at] for at in dims_of("lhs_batching_dimensions")]
    for side, name in ((left, "lhs"), (right, "rhs")):
        gone = {*dims_of(f"{name}_batching_dimensions"), *dims_of(f"{name}_contracting_dimensions")}
        if any(side[at] for at in dims_of(f"{name}_contracting_dimensions")):
            return False  # JAX refuses such a product without an out_sharding.
        batch += [axes for at, axes in enumerate(side) if at not in gone]
    return tuple(batch) == spec


def _read_ends(entry: Operation, kind: str) -> list[UserSharding]:
    """The shardings of the arguments or of the results of the program."""
    block = entry.regions[0].blocks[0]
    types = [
        value.type
        for value in (block.arguments if kind == IN else block.operations[len(block.operations) - 1].operands)
    ]
    name = "arg_attrs" if kind == IN else "res_attrs"
    attributes = list(entry.attributes[name]) if name in entry.attributes else [None] * len(types)
    ends: list[UserSharding] = []
    for number, (its, attribute) in enumerate(zip(types, attributes, strict=True)):
        if not isinstance(its, ir.RankedTensorType):
            continue  # A token.
        named = {} if attribute is None else {pair.name: pair.attr for pair in ir.DictAttr(attribute)}
        location: Any = block.arguments[number].location if kind == IN else None
        title = location.name_str if isinstance(location, ir.NameLoc) else f"argument {number}"
        if kind == OUT:
            title = named["jax.result_info"].value if "jax.result_info" in named else f"result {number}"
        spec, mesh = _read_spec(named.get(SHARDING))
        ends.append(UserSharding((kind, number), *_read_type(its), spec, mesh, kind + "s", title))
    return ends


def _name_lines(listed: Sequence[UserSharding], working: set[tuple[str, str]]) -> list[UserSharding]:
    """The constraints, each with its line: that of the innermost frame which is not of a helper.

    A function is a helper where all that it does is to constrain; or where calls of one of its lines give different
    shardings, so that the callers decide.
    """
    at_frame: dict[Frame, list[tuple[UserSharding, Frame | None]]] = defaultdict(list)
    lines_of: dict[tuple[str, str], set[int]] = defaultdict(set)
    callers_of: dict[tuple[str, str], set[Frame | None]] = defaultdict(set)
    for one in listed:
        for frame, caller in itertools.zip_longest(one.frames, one.frames[1:]):
            at_frame[frame].append((one, caller))
            lines_of[frame.file, frame.function].add(frame.line)
            callers_of[frame.file, frame.function].add(caller)

    def is_of_helper(frame: Frame) -> bool:
        function = frame.file, frame.function
        if function not in working:
            return len(callers_of[function]) > 1 or len(lines_of[function]) == 1
        return len({caller for _, caller in at_frame[frame]}) > 1 and len({one.spec for one, _ in at_frame[frame]}) > 1

    named: list[UserSharding] = []
    for one in listed:
        frame = next((frame for frame in one.frames[:-1] if not is_of_helper(frame)), None)
        frame = frame or (one.frames[-1] if one.frames else None)
        named.append(replace(one, line="" if frame is None else f"{frame.file}:{frame.line}"))
    return named

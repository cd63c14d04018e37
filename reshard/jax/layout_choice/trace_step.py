"""The step whose layouts are chosen: one StableHLO function without calls, and what its values are called.

A step is traced as `jax.jit` traces it, for the platform where it will run, and needs no devices. A program in a file
is read into the same form; its names are those that jax wrote into it.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax._src import core, custom_partitioning  # pyright: ignore[reportPrivateUsage]
from jax._src.interpreters import mlir as _internal_mlir  # pyright: ignore[reportPrivateUsage]
from jax.extend.mlir.dialects import stablehlo as _stablehlo
from jax.interpreters.mlir import make_ir_context as _make_ir_context
from jax.sharding import PartitionSpec

from reshard.errors import ProgramError, quoted
from reshard.jax.stablehlo_pass import shardy
from reshard.jax.stablehlo_pass.module_pass import name_main, read_stablehlo
from reshard.jax.stablehlo_pass.shardy import CONSTRAINT, read_dtype, spell_out, value_sharding
from reshard.lower.to_stablehlo import Attribute, Module, Operation, Value, inline_call, ir, list_operations, run_passes
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.types import dtypes
from reshard.types.reductions import identity

stablehlo: Any = _stablehlo
make_ir_context: Any = _make_ir_context
# On the last operation of an FFT over several dims that was separated: its type and its lengths.
_TRANSFORM = "whole_transform"
_TRANSFORMING = ("stablehlo.fft", "stablehlo.transpose", CONSTRAINT)
_COMPOSITE = "stablehlo.composite"
PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution")
_TURNING = ("stablehlo.reshape", "stablehlo.reverse", "stablehlo.transpose")
# Whose results are elements of some operands, which may be rounded before as well as after: the first and the last.
_RELAYING = dict.fromkeys(_TURNING, (0, 0)) | {
    "stablehlo.broadcast_in_dim": (0, 0), "stablehlo.concatenate": (0, -1), "stablehlo.dynamic_slice": (0, 0),
    "stablehlo.dynamic_update_slice": (0, 1), "stablehlo.gather": (0, 0), "stablehlo.maximum": (0, 1),
    "stablehlo.minimum": (0, 1), "stablehlo.pad": (0, 1), "stablehlo.select": (1, 2), "stablehlo.slice": (0, 0),
}  # fmt: skip
_REDUCTIONS = {"stablehlo.add": "sum", "stablehlo.maximum": "max", "stablehlo.minimum": "min"}
# Truth values are 0 and 1.
_REDUCTIONS_OF_TRUTH = {"stablehlo.or": "max", "stablehlo.and": "min"}
_KEY = re.compile(r"\[(?:'([^']*)'|(\d+)|<[^>]*>)\]|\.(\w+)|\[([^\]]*)\]")


@dataclass(frozen=True)
class StepValue:
    """An argument or a result of a step: its name, such as `params/w1`, the global shape, our name of the dtype.

    `given` is the sharding that the user gave it, with `PartitionSpec.UNCONSTRAINED` for dims left open; None if the
    user gave none. `position` is the number of the function's argument, or of the function's result, that it is in.
    `key` is the implementation of keys for random numbers, whose data this array is; None for any other array. `weak`
    says whether the dtype gives way to others, as that of Python's numbers does.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    given: PartitionSpec | None
    position: int
    key: Any = None
    weak: bool = False


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A step as one function `main` that calls no other; `ops` are all its operations, numbered by their position.

    The trees are None for a program from a file. `donated` has the numbers of the arguments that are donated. `carried`
    says of which argument a result is the next value, as a step is called in a loop: outputs whose tree, shapes and
    dtypes equal those of an argument. `platform` is where it runs. `callbacks` are the functions of Python that it
    calls, by the numbers that the module has for them.
    """

    module: Module
    main: Operation
    ops: tuple[Operation, ...]
    arguments: tuple[StepValue, ...]
    results: tuple[StepValue, ...]
    in_tree: Any
    out_tree: Any
    donated: frozenset[int]
    carried: Mapping[int, int]
    platform: str
    callbacks: tuple[Any, ...] = ()


def trace_step(
    f: Callable[..., Any], shapes: Sequence[Any], *, donate: int | Sequence[int] = (), platform: str | None = None
) -> TracedStep:
    """The step `f(*shapes)`: `shapes` are trees of arrays or of `jax.ShapeDtypeStruct`, with shardings or without.

    `donate` has the numbers of the arguments that are donated, as in `jax.jit`; `platform` is where the step will run,
    by default jax's own.

    >>> step = trace_step(lambda w, x: (w - x @ x, x.sum()), [jax.ShapeDtypeStruct((4, 4), "f")] * 2, donate=0)
    >>> [value.name for value in (*step.arguments, *step.results)], sorted(step.donated), dict(step.carried)
    (['w', 'x', 'result/0', 'result/1'], [0], {0: 0})
    """
    positions = {donate} if isinstance(donate, int) else set(donate)
    _check_arguments(f, shapes)
    # Numbers of Python have a type like arrays, which says that it gives way to others.
    shapes = jax.tree.map(
        lambda leaf: jax.eval_shape(lambda: leaf) if isinstance(leaf, bool | int | float | complex) else leaf, shapes
    )
    # A function that is jitted already is called inside, so that no argument is dropped and none is donated here: who
    # emits the step says which tile of an argument a result may take.
    try:
        traced: Any = jax.jit(f, keep_unused=True).trace(*shapes)
    except ValueError as error:
        if "static arguments" not in str(error):  # It is the function's own.
            raise
        raise ProgramError(
            f"{quoted(f)} has static arguments, and all are arrays here; bind them before, with functools.partial"
        ) from None
    platform = platform or jax.default_backend()
    # A function with rules of its own for XLA's partitioner (`custom_partitioning`) becomes what it does: asked for its
    # tiles, it would find no sharding on tiles. jax has this door for its own exports.
    lower_inside: Any = lambda ctx, *values, call, **_: _internal_mlir.lower_fun(  # noqa: E731
        core.jaxpr_as_fun(call), multiple_results=True
    )(ctx, *values)
    opened = ((custom_partitioning.custom_partitioning_p, lower_inside),)
    private: Any = _internal_mlir.LoweringParameters(override_lowering_rules=opened)
    try:
        lowered = traced.lower(lowering_platforms=(platform,), _private_parameters=private)
    except ValueError as error:  # Functions of Python are called by platforms that are at hand.
        raise ProgramError(f"jax does not lower the step for {platform}: {error}") from None
    leaves: list[tuple[Any, Any]] = jax.tree_util.tree_flatten_with_path(tuple(shapes))[0]
    # A copy, as jax keeps the module for the next who traces the same function.
    text = lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=True)
    step = _read_step_module(ir.Module.parse(text, make_ir_context()), platform)
    if len(step.arguments) != len(leaves):
        raise ProgramError(
            f"the program of {quoted(f)} takes {len(step.arguments)} arrays, and {len(leaves)} shapes are given; it "
            "has constants that jax passes as arguments: make them arguments of the function"
        )
    names = _parameter_names(f, len(shapes))
    arguments = [
        replace(
            value, name="/".join([names[path[0].idx], *_spell_path(path[1:])]), position=path[0].idx, key=_key_of(leaf)
        )
        for value, (path, leaf) in zip(step.arguments, leaves, strict=True)
    ]
    out_leaves: list[tuple[Any, Any]] = jax.tree_util.tree_flatten_with_path(traced.out_info)[0]
    results = [
        replace(
            value,
            name="/".join(["result", *_spell_path(path)]),
            position=getattr(path[0], "idx", 0) if path else 0,
            key=_key_of(leaf),
            weak=bool(getattr(leaf, "weak_type", False)),
        )
        for value, (path, leaf) in zip(step.results, out_leaves, strict=True)
    ]
    return replace(
        step,
        arguments=tuple(arguments),
        results=tuple(results),
        in_tree=jax.tree.structure(tuple(shapes)),
        out_tree=jax.tree.structure(traced.out_info),
        donated=frozenset(at for at, value in enumerate(arguments) if value.position in positions),
        carried=_match_states(shapes, traced.out_info),
        # Nothing else has them, and a program that calls one which is gone ends the process.
        callbacks=tuple(getattr(lowered, "_lowering").compile_args["host_callbacks"]),  # noqa: B009
    )


def read_step_program(program: str | bytes, *, platform: str | None = None) -> TracedStep:
    """The step of a StableHLO program, which is MLIR text or a portable artifact, to run on a platform.

    Raises `ProgramError` if it cannot be parsed.

    >>> step = read_step_program("func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }")
    >>> step.arguments[0].name, step.results[0].shape
    ('0', (4,))
    """
    return _read_step_module(read_stablehlo(program), platform or jax.default_backend())


def read_given_spec(sharding: Attribute | None) -> PartitionSpec | None:
    """A sharding of Shardy as jax writes it; None without one, and for one over parts of axes or on other devices."""
    if sharding is None:
        return None
    read: Any = shardy.sdy.TensorShardingAttr(sharding)
    dims: list[Any] = []
    for dim in read.dimension_shardings:
        one: Any = shardy.sdy.DimensionShardingAttr(dim)
        axes: list[Any] = [shardy.sdy.AxisRefAttr(axis) for axis in one.axes]
        if any(axis.sub_axis_info is not None for axis in axes):
            return None
        open_dim = not one.is_closed and not axes
        dims.append(PartitionSpec.UNCONSTRAINED if open_dim else tuple(axis.name for axis in axes) or None)
    return PartitionSpec(*dims)


def _read_step_module(module: Module, platform: str) -> TracedStep:
    """The step of a module, which is changed: calls are inlined, and attributes about donation are removed."""
    name_main(module)
    with module.context, ir.Location.unknown():
        spell_out(module)
        main = _inline_all(module)
        if any("token" in f"{argument.type}" for argument in main.regions[0].blocks[0].arguments):
            raise ProgramError(
                "the step has effects in a fixed order, such as io_callback(..., ordered=True), which devices would "
                "have to agree on; let them come in any order (ordered=False), or take them out"
            )
        _separate_starts(main)
        _separate_transforms(main)
        if platform == "tpu":
            _round_factors(main)
        run_passes(module, "func.func(cse),symbol-dce")
        block = main.regions[0].blocks[0]
        given = [read_given_spec(value_sharding(argument)) for argument in block.arguments]
        attributes = _value_attributes(main, "arg_attrs", len(block.arguments))
        out_attributes = _value_attributes(main, "res_attrs", len(list(block.operations)[-1].operands))
        carried = {int(each[shardy.ALIAS].value): at for at, each in enumerate(attributes) if shardy.ALIAS in each}
        arguments: list[StepValue] = []
        for at, argument in enumerate(block.arguments):
            where: Any = argument.location
            name = _spell_key(where.name_str) if isinstance(where, ir.NameLoc) else str(at)
            tensor = ir.RankedTensorType(argument.type)
            arguments.append(StepValue(name, tuple(tensor.shape), read_dtype(str(tensor.element_type)), given[at], at))
        results: list[StepValue] = []
        for at, value in enumerate(list(block.operations)[-1].operands):
            info = out_attributes[at].get("jax.result_info")
            name = _spell_key(info.value) if info else f"result/{at}"
            spec = read_given_spec(out_attributes[at].get(shardy.SHARDING))
            tensor = ir.RankedTensorType(value.type)
            results.append(StepValue(name, tuple(tensor.shape), read_dtype(str(tensor.element_type)), spec, at))
        donated = frozenset(at for at, each in enumerate(attributes) if shardy.ALIAS in each or shardy.DONOR in each)
        for key in ("arg_attrs", "res_attrs"):
            if key in main.attributes:
                del main.attributes[key]
        ops = tuple(list_operations(main))
        _check_operations(ops, platform)
        # By these names what a compiler makes of the step is found again: see `liveness`.
        for number, op in enumerate(ops):
            where = op.location
            name, line = (where.name_str, where.child_loc) if isinstance(where, ir.NameLoc) else ("", where)
            op.location = ir.Location.name(f"{name}#{number}", line)
    return TracedStep(module, main, ops, tuple(arguments), tuple(results), None, None, donated, carried, platform)


def _check_arguments(f: object, shapes: Sequence[Any]) -> None:
    leaves: list[tuple[Any, Any]] = jax.tree_util.tree_flatten_with_path(tuple(shapes))[0]
    for path, leaf in leaves:
        if not (isinstance(leaf, bool | int | float | complex) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))):
            raise ProgramError(
                f"argument {path[0].idx} of {quoted(f)} has {quoted(leaf)}; give arrays, jax.ShapeDtypeStructs or "
                "numbers, and bind what is none of these before, with functools.partial"
            )


def _check_operations(ops: Sequence[Operation], platform: str) -> None:
    """Refuses what devices would have to agree on, or what a program on tiles cannot refer to."""
    for op in ops:
        if any("token" in f"{result.type}" for result in op.results):
            raise ProgramError(
                "the step calls functions of Python (jax.debug.print, jax.pure_callback, io_callback, eqx.error_if), "
                f"which a {platform} calls in a fixed order that devices would have to agree on; take them out"
            )
        if op.name == "stablehlo.rng":
            raise ProgramError(
                "the step draws random numbers without a key (jax.lax.rng_uniform), of which each device would have "
                "others; draw them by jax.random, with a key"
            )
        if len(op.attributes.get("called_computations", ())):
            raise ProgramError(
                f"the step calls {op.attributes['call_target_name']}, which calls a function of the program, as "
                "jax.lax.approx_max_k does; write it by other operations, such as jax.lax.top_k"
            )


def _inline_all(module: Module) -> Operation:
    """Inlines every call and every composite of `main`, in place; returns `main`."""
    functions = {op.attributes["sym_name"].value: op.operation for op in module.body.operations}
    main = functions["main"]
    while calls := [op for op in list_operations(main) if op.name in ("func.call", _COMPOSITE)]:
        for call in calls:
            if call.name == _COMPOSITE:
                callee = {"callee": call.attributes["decomposition"]}
                with call.location, ir.InsertionPoint(call):
                    types = [result.type for result in call.results]
                    plain = ir.Operation.create("func.call", types, list(call.operands), callee)
                for old, new in zip(call.results, plain.results, strict=True):
                    old.replace_all_uses_with(new)
                call.erase()
                call = plain
            inline_call(call, functions)
    return main


def read_body_kind(op: Operation) -> str | None:
    """The reduction that the body of a reduce or a scatter of one array is: sum, max or min; None for any other."""
    block = op.regions[-1].blocks[0]
    body = [each.operation for each in block.operations]
    if len(body) != 2 or len(block.arguments) != 2:
        return None
    # Both arguments and nothing else: a body with a constant would add it at each step.
    returned = body[1].operands[0] == body[0].results[0]
    both = {each for each, argument in enumerate(block.arguments) for used in body[0].operands if used == argument}
    kinds = _REDUCTIONS_OF_TRUTH if read_element_type(op.results[0]) == "i1" else _REDUCTIONS
    return kinds.get(body[0].name) if returned and both == {0, 1} else None


def read_element_type(value: Value) -> str:
    """The type of a value's elements as MLIR spells it."""
    return str(ir.RankedTensorType(value.type).element_type)


def _separate_starts(main: Operation) -> None:
    """Lets reductions of one array start at what changes nothing, and takes in what they started at afterwards.

    On tiles each device would add the start of a sum, and where a tile has one element along what is reduced, XLA takes
    that for the result, wherever the reduction starts.
    """
    for op in list_operations(main):
        kind = read_body_kind(op) if op.name == "stablehlo.reduce" else None
        if kind is None:
            continue
        start, element = op.operands[1], read_element_type(op.operands[1])
        value = f"value = dense<{_spell_identity(element, kind)}> : {start.type}"
        least = ir.Operation.parse(f'%0 = "stablehlo.constant"() <{{{value}}}> : () -> {start.type}')
        with op.location, ir.InsertionPoint(op):
            ir.InsertionPoint.current.insert(least)
            # By their texts, as Python has no attributes for complex constants; results have names of their own there.
            # Each text would else verify the step, and number all values of it.
            made = [each.owner for each in (start, least.results[0]) if not isinstance(each.owner, ir.Block)]
            texts = [each.get_asm(use_local_scope=True, assume_verified=True).partition("=")[2] for each in made]
            if texts[0] == texts[-1] and len(texts) == 2:
                continue
            plain = op.clone()
            plain.operands[1] = least.results[0]
            kind = op.results[0].type
            start = stablehlo.broadcast_in_dim(kind, start, [])
            combine = op.regions[0].blocks[0].operations[0].operation.name
            whole = ir.Operation.create(combine, [kind], [start, plain.results[0]])
        op.results[0].replace_all_uses_with(whole.results[0])
        op.erase()


@lru_cache
def _spell_identity(element: str, kind: str) -> str:
    if "complex" in element:
        return "(0.0,0.0)"
    dtype = dtypes.canonical(read_dtype(element))
    number = identity(dtype, kind) or 0
    if "f" not in element:
        return f"{number}".lower()
    # MLIR has no word for infinity.
    return f"0x{np.asarray(number, numpy_dtype(dtype)).tobytes()[::-1].hex()}" if math.isinf(number) else f"{number:e}"


def _round_factors(main: Operation) -> None:
    """Rounds what products of f32 multiply to bf16 before, as TPUs do unless asked for more precision: XLA moves what
    is rounded already, so that a move may come after it here, too."""

    def is_of(dtype: str, value: Value) -> bool:
        return isinstance(value.type, ir.RankedTensorType) and f"{value.type.element_type}" == dtype

    def round_operand(op: Operation, at: int) -> None:
        shape = list(ir.RankedTensorType(op.operands[at].type).shape)
        with op.location, ir.InsertionPoint(op):
            op.operands[at] = stablehlo.convert(ir.RankedTensorType.get(shape, ir.BF16Type.get()), op.operands[at])

    # From the end on: what is rounded for its readers rounds what it reads, as a kernel that the derivative reverses.
    for op in reversed(list_operations(main)):
        if op.name in PRODUCTS:
            asked = op.attributes.get("precision_config", ())
            if "algorithm" in op.attributes or any("DEFAULT" not in f"{one}" for one in asked):
                continue
            for at, operand in enumerate(op.operands):
                if is_of("f32", operand):
                    round_operand(op, at)
        elif op.name in _RELAYING and is_of("f32", op.results[0]):
            readers = [use.owner for use in op.results[0].uses]
            rounded = [
                reader for reader in readers if reader.name == "stablehlo.convert" and is_of("bf16", reader.results[0])
            ]
            # Others need all of it: then what takes up memory is not made twice.
            if not rounded or (len(rounded) < len(readers) and op.name not in _TURNING):
                continue
            made = op if len(rounded) == len(readers) else op.clone(ir.InsertionPoint(op))
            first, last = _RELAYING[op.name]
            for at in range(first, last % len(op.operands) + 1):
                round_operand(made, at)
            made.results[0].set_type(rounded[0].results[0].type)
            for reader in rounded:
                reader.results[0].replace_all_uses_with(made.results[0])
                reader.erase()


def _separate_transforms(main: Operation) -> None:
    """Replaces each FFT over several dims by one for each dim, of which the others may be split: slabs and pencils."""
    for op in [
        op for op in list_operations(main) if op.name == "stablehlo.fft" and len(op.attributes["fft_length"]) > 1
    ]:
        lengths, kind = list(op.attributes["fft_length"]), str(op.attributes["fft_type"])
        value, last = op.operands[0], len(ir.RankedTensorType(op.results[0].type).shape) - 1
        complex_kind = "IFFT" if "IRFFT" in kind else "FFT" if "RFFT" in kind else None
        # The last dim has real numbers on one side: it is the first forth, and the last back.
        dims = [last, *range(last - len(lengths) + 1, last)]
        for dim in reversed(dims) if "IRFFT" in kind else dims:
            length = lengths[dim - last - 1]
            each = op.attributes["fft_type"]
            if complex_kind and dim != last:
                each = ir.Attribute.parse(f"#stablehlo<fft_type {complex_kind}>")
            turned = [last if at == dim else dim if at == last else at for at in range(last + 1)]
            with op.location, ir.InsertionPoint(op):
                if dim != last:
                    value = stablehlo.transpose(value, turned)
                value = stablehlo.fft(value, each, [length])
                if dim != last:
                    value = stablehlo.transpose(value, turned)
        whole = [op.attributes["fft_type"], op.attributes["fft_length"]]
        value.owner.operation.attributes[_TRANSFORM] = ir.ArrayAttr.get(whole)
        op.results[0].replace_all_uses_with(value)
        op.erase()


def join_transforms(main: Operation) -> None:
    """Puts the FFTs over several dims back that were separated, where nothing is moved between them: compilers run one
    without turning each dim to the end and back."""
    for last in [op for op in list_operations(main) if _TRANSFORM in op.attributes]:
        kind, lengths = last.attributes[_TRANSFORM]
        del last.attributes[_TRANSFORM]
        value, left = last.results[0], 3 * len(lengths) - 2  # Each dim but the last is turned to the end and back.
        joined: list[Operation] = []
        while left and not isinstance(value.owner, ir.Block) and value.owner.operation.name in _TRANSFORMING:
            joined.append(value.owner.operation)
            left -= joined[-1].name != CONSTRAINT
            value = joined[-1].operands[0]
        if left:
            continue
        with last.location, ir.InsertionPoint(last):
            whole = stablehlo.fft(value, kind, lengths)
        last.results[0].replace_all_uses_with(whole)
        for op in joined:
            # What begins alike may be used by others: to erase it then would end the process.
            if list(op.results[0].uses):
                break
            op.erase()


def _value_attributes(main: Operation, key: str, count: int) -> list[dict[str, Attribute]]:
    if key not in main.attributes:
        return [{} for _ in range(count)]
    return [{pair.name: pair.attr for pair in ir.DictAttr(each)} for each in main.attributes[key]]


def _parameter_names(f: Any, count: int) -> list[str]:
    """The names of a function's parameters; numbers where it does not say them."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return [*named[:count], *map(str, range(len(named), count))]


def _spell_path(path: Collection[Any]) -> list[str]:
    return [jax.tree_util.keystr((key,), simple=True) for key in path]


def _key_of(leaf: Any) -> Any:
    """The implementation of keys for random numbers; None for an array of numbers."""
    if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return None
    found: list[Any] = []
    # It takes arrays and what is traced, but no shapes.
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), leaf)
    return found[0]


def _spell_key(text: str) -> str:
    """A path as jax writes it, `params['w1'][0].mu`, with slashes: `params/w1/0/mu`."""
    keys = _KEY.sub(lambda found: "/" + next((each for each in found.groups() if each is not None), ""), text)
    return keys.lstrip("/")


def _match_states(shapes: Sequence[Any], out: Any) -> dict[int, int]:
    """Which leaf of the result is the next value of which leaf of the arguments."""

    def describe(tree: Any) -> tuple[Any, tuple[tuple[tuple[int, ...], str], ...]]:
        leaves, structure = jax.tree.flatten(tree)
        return structure, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)

    starts = [sum(len(jax.tree.leaves(tree)) for tree in shapes[:at]) for at in range(len(shapes))]
    free = {at: describe(tree) for at, tree in enumerate(shapes) if jax.tree.leaves(tree)}
    # A step that returns its only state returns one tree, not a tuple of several; a state may be a tuple itself.
    whole = describe(out) in free.values()
    tops: list[Any] = list(out) if isinstance(out, tuple | list) and not whole else [out]
    carried: dict[int, int] = {}
    place = 0
    for top in tops:
        described = describe(top)
        match = next((at for at, each in free.items() if each == described), None)
        if match is not None:
            del free[match]
            carried |= {place + leaf: starts[match] + leaf for leaf in range(len(described[1]))}
        place += len(described[1])
    return carried

"""An emitted step as a function of JAX: `wrap_module` gives it the trees of the step, its shardings and donation.

The module becomes one primitive, which is lowered by pasting the module's operations. So JAX compiles, caches and
dispatches it like any other `jax.jit`, here or ahead of time.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir as _mlir
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from reshard.errors import MeshError, ProgramError
from reshard.jax.layout_choice.trace_step import StepValue, TracedStep, read_given_spec, read_step_program
from reshard.jax.stablehlo_pass.module_pass import read_stablehlo
from reshard.jax.stablehlo_pass.shardy import SHARDING, read_meshes, value_sharding
from reshard.lower.to_stablehlo import Module, Operation, ir, paste_operations
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.types import dtypes

mlir: Any = _mlir
_CALLBACK = "xla_ffi_python_"


@dataclass(frozen=True, eq=False)
class _EmittedStep:
    """An emitted module as text, by which JAX knows its primitive, the arrays that it returns, and what it calls."""

    text: str
    results: tuple[ShapedArray, ...]
    callbacks: tuple[Any, ...]


def wrap_module(module: Module, step: TracedStep, mesh: JaxMesh) -> Any:
    """A jitted function of the step's arguments that runs an emitted module on a mesh of JAX.

    It takes and returns what the step does, in the shardings of the module, and donates what the step donates; a result
    without a sharding has the compiler's. Like any `jax.jit` it has `lower`, also for a mesh of devices that do not
    exist here. A step from a file takes its arguments one by one, and returns a list.
    """
    main = _find_main(module)
    inputs = [
        place_value(mesh, read_given_spec(value_sharding(argument)), value)
        for argument, value in zip(main.regions[0].blocks[0].arguments, step.arguments, strict=True)
    ]
    given = [ir.DictAttr(each) for each in main.attributes["res_attrs"]] if "res_attrs" in main.attributes else []
    outputs = [
        place_value(mesh, read_given_spec(each[SHARDING] if each is not None and SHARDING in each else None), value)
        for each, value in itertools.zip_longest(given, step.results)
    ]
    kinds = [numpy_dtype(dtypes.canonical(each.dtype)) for each in step.results]
    avals = tuple(ShapedArray(one.shape, kind, one.weak) for one, kind in zip(step.results, kinds, strict=True))
    emitted = _EmittedStep(module.operation.get_asm(enable_debug_info=True), avals, step.callbacks)
    if _CALLBACK in emitted.text and not step.callbacks:
        raise ProgramError(
            "the program of a file calls functions of Python (jax.debug.print, jax.pure_callback, io_callback), which "
            "no file has: trace the function itself, or write a program without them"
        )

    def run_step(*arguments: Any) -> Any:
        flat = [
            leaf if value.key is None else jax.random.key_data(leaf)
            for leaf, value in zip(jax.tree.leaves(arguments), step.arguments, strict=True)
        ]
        results = [
            leaf if value.key is None else jax.random.wrap_key_data(leaf, impl=value.key)
            for leaf, value in zip(_emitted_p.bind(*flat, emitted=emitted), step.results, strict=True)
        ]
        return results if step.out_tree is None else jax.tree.unflatten(step.out_tree, results)

    whole = step.in_tree is not None
    return jax.jit(
        run_step,
        in_shardings=jax.tree.unflatten(step.in_tree, inputs) if whole else tuple(inputs),
        out_shardings=jax.tree.unflatten(step.out_tree, outputs) if whole else outputs,
        donate_argnums=tuple(sorted({step.arguments[at].position for at in step.donated})),
    )


def load_step(program: str | bytes | os.PathLike[str], mesh: JaxMesh) -> Any:
    """The jitted function of a program that `reshard autoshard -o` has written: MLIR text, a portable artifact, or the
    path of a file that has one.

    It takes the step's arrays one by one, as a tree is flattened, in any shardings, and returns a list; what the step
    donates it donates. `mesh` has the axes that the shardings were chosen for.

    Raises `MeshError` for a mesh with other axes, and `ProgramError` for what cannot be read.
    """
    try:
        content = Path(program).read_bytes() if isinstance(program, os.PathLike) else program
        module = read_stablehlo(content)
    except OSError as error:
        raise ProgramError(f"the program cannot be read: {error}") from None
    except ProgramError as error:
        if not isinstance(program, str):
            raise
        raise ProgramError(f"{error}; a str is a program's text: give open(...).read() or a pathlib.Path") from None
    for theirs in read_meshes(module).values():
        if [*theirs.axes.items()] != [*dict(mesh.shape).items()]:
            raise MeshError(
                f"the program is for the mesh {theirs}, and given is {dict(mesh.shape)}; give one of its axes"
            )
    return wrap_module(module, read_step_program(content, platform=mesh.devices.flat[0].platform), mesh)


def place_value(mesh: JaxMesh, spec: PartitionSpec | None, value: StepValue) -> NamedSharding | None:
    """The sharding of an argument or a result, None for the compiler's; that of keys has no dim for what a key is made
    of."""
    if spec is None:
        return None
    dims = list(spec)
    return NamedSharding(mesh, PartitionSpec(*(dims if value.key is None else dims[:-1])))


def _lower_emitted(ctx: Any, *operands: Any, emitted: _EmittedStep) -> Sequence[Any]:
    """Pastes the operations of an emitted module, whose meshes get symbols that no other mesh has here."""
    module = ctx.module_context.module
    # They are called by their numbers, which are those of the step: nothing else is in this program.
    for callback in emitted.callbacks:
        ctx.module_context.add_host_callback(callback)
    # There are more symbols after each paste, so that two pastes differ.
    prefix = f"emitted{sum('sym_name' in op.attributes for op in module.body.operations)}_"
    # Symbols are in types of attributes that Python cannot change: in text, they are words.
    symbols = "|".join(map(re.escape, re.findall(r"sdy\.mesh @(\w+)", emitted.text)))
    pasted = ir.Module.parse(re.sub(rf"@(?=(?:{symbols})\b)", f"@{prefix}", emitted.text), module.context)
    for op in pasted.body.operations:
        if op.operation.name == "sdy.mesh":
            op.operation.clone(ir.InsertionPoint.at_block_begin(module.body))
    return paste_operations(_find_main(pasted).regions[0].blocks[0], operands)


def _find_main(module: Module) -> Operation:
    (main,) = [op.operation for op in module.body.operations if op.operation.name == "func.func"]
    return main


_emitted_p = Primitive("emitted_step")
_emitted_p.multiple_results = True
_emitted_p.def_abstract_eval(lambda *_, emitted: emitted.results)
mlir.register_lowering(_emitted_p, _lower_emitted)

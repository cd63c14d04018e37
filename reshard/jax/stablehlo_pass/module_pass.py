"""The compiler pass over a whole program: Shardy's propagation, then the collectives of plans in place of its reshards.

    explicit_reshards   makes every reshard of the module an operation
    _planned            plans each, or says why it is left to XLA
    rewrite             replaces the operations, so that XLA can import the module

`transform` applies the pass to a module from a file or from memory. `reshard.jax.jit` does not use it: its pass works
inside XLA, where the collectives that XLA itself would run are known.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.export
from jax.extend import mlir
from jax.extend.mlir.dialects import stablehlo as _stablehlo_dialect
from jax.interpreters.mlir import make_ir_context as _make_ir_context

from reshard.errors import NetworkError, ProgramError, ReshardError, shortened
from reshard.hlo import Frame
from reshard.jax.pass_report import PassReport, Reshard
from reshard.jax.stablehlo_pass import explicit_reshards, rewrite
from reshard.jax.stablehlo_pass.explicit_reshards import ReshardOp
from reshard.jax.stablehlo_pass.rewrite import ReshardOutcome
from reshard.lower.to_stablehlo import Module, ir, list_operations
from reshard.plans.plan import Plan
from reshard.runtime.on_jax import in_parts
from reshard.synth import Network
from reshard.synth import plan as best_plan
from reshard.synth.options import read_budget, read_network
from reshard.types.layout import Layout

make_ir_context: Any = _make_ir_context
_mlir: Any = mlir
_stablehlo: Any = _stablehlo_dialect
_CALLEES = ("callee", "decomposition", "called_computations")  # Of other attributes Python cannot read all.
_MOST_LAUNCHES = 1 << 10
_MOST_MESSAGE = 2000
_MOST_DEEP = 1000
_NO_BRACKETS = bytes(set(range(256)).difference(b"([{<>}])"))
_EXPORTED = "xla.sdy.meshes"
_PLACE = re.compile(r'"([^"]+)":(\d+):\d+')
_NAME = re.compile(r'^loc\("((?:[^"\\]|\\.)*)"')
Planner = Callable[[Layout, Layout], Plan]
"""Plans one reshard."""


@dataclass(frozen=True, eq=False)
class Transformed:
    """A program after the pass: its module, and a report of its reshards.

    `exported` is the transformed program as a `jax.export.Exported`, if the original was one.
    """

    module: Module
    report: PassReport
    exported: jax.export.Exported | None = None

    @property
    def text(self) -> str:
        """The module as MLIR text, with locations."""
        return self.module.operation.get_asm(enable_debug_info=True)

    def to_bytes(self) -> bytes:
        """The module as a portable StableHLO artifact."""
        return write_artifact(self.module)


def transform(
    program: str | bytes | jax.export.Exported | Any,
    *,
    network: Network | str | None = None,
    budget: int | str | None = None,
) -> Transformed:
    """Applies the pass to a StableHLO program with Shardy shardings, and leaves the original unchanged.

    `program` is MLIR text, a portable StableHLO artifact, an MLIR module such as
    `jax.jit(f).lower(...).compiler_ir("stablehlo")`, or the result of `jax.export.export`. `network` and `budget`
    (per device, for each reshard) are those of `reshard.plan`. The pass takes over every reshard that needs more
    than gathers or slices. Only a compiler can tell whether that makes the program better: `reshard.jax.jit` asks
    XLA.

    Raises `ProgramError` if `program` is none of these, or cannot be transformed.

    >>> result = transform('''
    ...   sdy.mesh @mesh = <["x"=4, "y"=2]>
    ...   func.func public @main(%a: tensor<16x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {"x"}]>})
    ...       -> tensor<16x16xf32> {
    ...     %b = sdy.sharding_constraint %a <@mesh, [{}, {"x", "y"}]> : tensor<16x16xf32>
    ...     return %b : tensor<16x16xf32>
    ...   }
    ... ''')
    >>> print(result.report)
    reshards taken: 1 of 1
      line 5: f32[{y}8, {x}4] -> f32[16, {x}{y}2]: all_to_all
    """
    planner = partial(best_plan, budget=read_budget(budget), network=read_network(network))
    exported = program if isinstance(program, jax.export.Exported) else None
    module = _parse_module(program if exported is None else exported.mlir_module_serialized)
    name = name_main(module)
    report = transform_module(module, planner)
    rename_function(module, "main", name)
    if exported is not None:
        exported = dataclasses.replace(exported, mlir_module_serialized=write_artifact(module))
    return Transformed(module, report, exported)


def transform_module(module: Module, planner: Planner = best_plan) -> PassReport:
    """Applies the pass to a module, in place.

    Raises `ProgramError` for a module that it cannot handle; the module is then left in an unusable state.
    """
    try:
        explicit_reshards.make_explicit(module)
        ops = explicit_reshards.reshard_ops(module)
        planned = [_plan_reshard(op, planner) for op in ops]
        rows: list[Reshard] = []
        for op, (plan, why) in zip(ops, planned, strict=True):
            # Read now: rewriting erases the operations. The line is its own, else that of what uses or makes the value.
            locations = (str(each.location) for each in (op.op, *op.around))
            frames = [Frame(file, int(line)) for location in locations for file, line in _PLACE.findall(location)]
            frame = next((frame for frame in frames if frame.users), None)
            where = "" if frame is None else f"{frame.file}:{frame.line}"
            if frame is not None and frame.file == "-":
                where = f"line {frame.line}"
            name = _NAME.search(str(op.op.location))
            ends, near = (op.source, op.target), frozenset(op.lines)
            rows.append(Reshard(where, name[1] if name else "", op.by_user, *ends, plan, False, why, near))
        plans = {op: plan for op, (plan, why) in zip(ops, planned, strict=True) if plan is not None and not why}
        outcomes = rewrite.replace_reshards(module, ops, plans)
    except ir.MLIRError as error:
        raise ProgramError(f"MLIR's passes or its verifier fail on the program: {error}") from None
    taken = [outcomes[op] is ReshardOutcome.TAKEN for op in ops]
    return PassReport(tuple(dataclasses.replace(row, taken=its) for row, its in zip(rows, taken, strict=True)))


def _plan_reshard(op: ReshardOp, planner: Planner) -> tuple[Plan | None, str]:
    """The plan of a reshard, None if it has none; and why the reshard is left to XLA, empty if it is taken."""
    source, target = op.source, op.target
    if source is None or target is None:
        return None, op.why
    if source == target:
        return None, "nothing moves"
    if source.partial:
        return None, "it is still to be summed"
    if rewrite.inside_manual(op.op):
        return None, "it is inside a shard_map"
    sets = [frozenset(mesh.device_ids or range(mesh.size)) for mesh in (source.mesh, target.mesh)]
    if sets[0] != sets[1]:
        return None, f"it goes from {len(sets[0])} devices to {len(sets[1])} others; a program has one set of devices"
    if source.mesh.device_ids is not None:
        return None, "its mesh lists the devices in an order of its own"
    try:
        plan = planner(source, target)
    except NetworkError:
        raise
    except ReshardError as error:
        return None, str(error)
    kinds = {step.kind for step in plan.steps}
    if kinds == {"all_gather"} or kinds <= {"slice", "split_sum"}:
        return plan, "XLA does it as well"
    if plan.launches > _MOST_LAUNCHES:  # Each is written out: a tight budget can ask for 100,000.
        return plan, f"its plan has {plan.launches} launches; a larger budget needs fewer"
    return in_parts(plan), ""


def _parse_module(program: Any) -> Module:
    """The program as a new module, which may be changed."""
    if isinstance(program, ir.Module):
        with program.context:
            module = ir.Module.parse(program.operation.get_asm(binary=False, enable_debug_info=True))
    elif not isinstance(program, str | bytes):
        kind = type(program).__name__
        raise ProgramError(f"transform takes MLIR text, a StableHLO artifact, a module or an Exported, not {kind}")
    else:
        module = read_stablehlo(program)
    if _EXPORTED in str(module.operation.attributes.get("mhlo.frontend_attributes")):
        raise ProgramError(
            "the program has its shardings as attributes for XLA, not as operations of Shardy; give the module that "
            "`lower(...).compiler_ir('stablehlo')` or `jax.export.export` returns"
        )
    return module


def read_stablehlo(program: str | bytes) -> Module:
    """The module of MLIR text or of a portable artifact; raises `ProgramError` for anything else."""
    context = make_ir_context()
    if isinstance(program, str):
        # MLIR's reader recurses: at brackets some ten thousand deep, its stack and with it the process ends.
        kept = program.replace("->", "").encode(errors="replace").translate(None, _NO_BRACKETS)
        depths = itertools.accumulate(1 if each in b"([{<" else -1 for each in kept)
        if max(depths, default=0) > _MOST_DEEP:
            raise ProgramError(f"the program is not StableHLO: its brackets are nested more than {_MOST_DEEP} deep")
    try:
        if isinstance(program, bytes) and program.startswith(b"ML\xefR"):
            return _mlir.deserialize_portable_artifact(program, context)
        return ir.Module.parse(program, context)
    except (ir.MLIRError, TypeError, ValueError, RuntimeError) as error:  # TypeError: text that is not UTF-8.
        raise ProgramError(f"the program is not StableHLO: {shortened(str(error), _MOST_MESSAGE)}") from None


def name_main(module: Module) -> str:
    """Names the program's function `main`, which Shardy and XLA look for, in place; returns the name that it had.

    It is the one that is named so, else the one public function, else the only one. Raises `ProgramError` for a module
    without a program, and for one whose functions call each other in a circle: Shardy would end the process.
    """
    functions = {
        op.attributes["sym_name"].value: op for op in module.body.operations if op.operation.name == "func.func"
    }
    called: dict[str, set[str]] = {}
    for name, op in functions.items():
        inside = list_operations(op.operation)
        attributes = [each.attributes[key] for each in inside for key in _CALLEES if key in each.attributes]
        listed = [one for each in attributes if isinstance(each, ir.ArrayAttr) for one in each]
        symbols = {one.value for one in (*attributes, *listed) if isinstance(one, ir.FlatSymbolRefAttr)}
        called[name] = symbols & set(functions)
    while leaves := {name for name, others in called.items() if not others & set(called)}:
        called = {name: others for name, others in called.items() if name not in leaves}
    if called:
        raise ProgramError(
            f"the program's functions {_list_names(called)} call each other in a circle; XLA runs no such"
        )
    whole = {name: op for name, op in functions.items() if len(op.regions[0].blocks)}
    public = [name for name, op in whole.items() if str(op.attributes.get("sym_visibility")) != '"private"']
    choices = ["main"] if "main" in functions else public or list(whole)
    if len(choices) > 1:
        raise ProgramError(
            f"the program has no function @main, and {_list_names(choices)} to choose from; name one of them main, or "
            "make the others private"
        )
    if not choices or choices[0] not in whole:
        raise ProgramError("the program has no function @main with a body; give the whole module")
    # Passes remove private functions that nothing calls.
    whole[choices[0]].attributes["sym_visibility"] = ir.StringAttr.get("public", module.context)
    rename_function(module, choices[0], "main")
    return choices[0]


def rename_function(module: Module, name: str, new: str) -> None:
    """Names a function anew, where it is and where it is called, in place."""
    if name == new:
        return
    for op in list_operations(module.operation):
        if op.name == "func.func" and op.attributes["sym_name"].value == name:
            op.attributes["sym_name"] = ir.StringAttr.get(new, module.context)
        for key in _CALLEES:
            callee = op.attributes.get(key)
            if callee is not None and isinstance(callee, ir.FlatSymbolRefAttr) and callee.value == name:
                op.attributes[key] = ir.FlatSymbolRefAttr.get(new, module.context)


def _list_names(names: Iterable[str]) -> str:
    return ", ".join(f"@{name}" for name in sorted(names))


def write_artifact(module: Module) -> bytes:
    """The module as `jax.export` writes it: for readers up to four weeks older, with Shardy's operations intact."""
    version = _stablehlo.get_version_from_compatibility_requirement(_stablehlo.StablehloCompatibilityRequirement.WEEK_4)
    return _mlir.serialize_portable_artifact(module, version, True)

"""The compiler pass over a whole program: Shardy's propagation, then our collectives for its reshards.

`transform` is the pass on a module in a file or in memory; `reshard.jax.jit` runs it on a traced function.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.export
from jax.extend import mlir
from jax.extend.mlir.dialects import stablehlo as _stablehlo_dialect
from jax.interpreters.mlir import make_ir_context as _make_ir_context

from reshard.errors import NetworkError, ProgramError, ReshardError
from reshard.hlo import Frame
from reshard.jax import explicit_reshards, rewrite
from reshard.jax.explicit_reshards import Move
from reshard.jax.pass_report import Report, Reshard
from reshard.jax.rewrite import Fate
from reshard.lower.to_stablehlo import Module, Operation, ir
from reshard.runtime.on_jax import in_parts
from reshard.synth import Network
from reshard.synth import plan as best_plan
from reshard.types.plan import Plan

make_ir_context: Any = _make_ir_context
_mlir: Any = mlir
_stablehlo: Any = _stablehlo_dialect
_EXPORTED = "xla.sdy.meshes"
_PLACE = re.compile(r'"([^"]+)":(\d+):\d+')
_NAME = re.compile(r'^loc\("((?:[^"\\]|\\.)*)"')


class Options(NamedTuple):
    """How the pass plans, and the lines (`file:line`) whose reshards it leaves to XLA."""

    network: Network | None = None
    budget: int | None = None
    leave: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Transformed:
    """A program after the pass: its module, and what became of its reshards.

    `exported` is the program again as `jax.export` has it, if it was given so.
    """

    module: Module
    report: Report
    exported: jax.export.Exported | None = None

    @property
    def text(self) -> str:
        """The module as MLIR text, with locations."""
        return self.module.operation.get_asm(enable_debug_info=True)

    def to_bytes(self) -> bytes:
        """The module as a portable StableHLO artifact."""
        return _artifact(self.module)


def transform(
    program: str | bytes | jax.export.Exported | Any,
    *,
    network: Network | str | None = None,
    budget: int | None = None,
) -> Transformed:
    """The pass on a StableHLO program with Shardy shardings; the program itself is not changed.

    `program` is MLIR text, a portable StableHLO artifact, an MLIR module such as
    `jax.jit(f).lower(...).compiler_ir("stablehlo")`, or what `jax.export.export` returns. `network` and `budget`
    (bytes a device) are those of `reshard.plan`. Every reshard that takes more than gathers and slices is taken;
    whether that makes the program better only a compiler sees: `reshard.jax.jit` compares.

    Raises `ProgramError` for what is no such program.

    >>> found = transform('''
    ...   sdy.mesh @mesh = <["x"=4, "y"=2]>
    ...   func.func public @main(%a: tensor<16x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {"x"}]>})
    ...       -> tensor<16x16xf32> {
    ...     %b = sdy.sharding_constraint %a <@mesh, [{}, {"x", "y"}]> : tensor<16x16xf32>
    ...     return %b : tensor<16x16xf32>
    ...   }
    ... ''')
    >>> print(found.report)
    reshards taken: 1 of 1
      line 5: f32[{y}8, {x}4] -> f32[16, {x}{y}2]: all_to_all
    """
    options = Options(Network.load(network) if isinstance(network, str) else network, budget)
    exported = program if isinstance(program, jax.export.Exported) else None
    module = _parsed(program if exported is None else exported.mlir_module_serialized)
    report = run(module, options)
    if exported is not None:
        exported = dataclasses.replace(exported, mlir_module_serialized=_artifact(module))
    return Transformed(module, report, exported)


def run(module: Module, options: Options) -> Report:
    """The pass on a module, in place.

    Raises `ProgramError` for a module that it cannot work on, which is then of no use.
    """
    try:
        explicit_reshards.spell_out(module)
        found = explicit_reshards.moves(module)
        places = [(_where(move), _name(move.op)) for move in found]  # The operations are gone after it.
        planned = [_planned(move, where, options) for move, (where, _) in zip(found, places, strict=True)]
        plans = {move: plan for move, (plan, why) in zip(found, planned, strict=True) if plan is not None and not why}
        fates = rewrite.operate(module, found, plans)
    except ir.MLIRError as error:
        raise ProgramError(f"MLIR's passes or its verifier fail on the program: {error}") from None
    rows = zip(found, planned, places, strict=True)
    return Report(
        tuple(
            Reshard(*names, move.asked, move.source, move.target, plan, fates[move] is Fate.TAKEN, why)
            for move, (plan, why), names in rows
        )
    )


def _planned(move: Move, where: str, options: Options) -> tuple[Plan | None, str]:
    """The plan of a move if there is one, and why it is left to XLA, if it is."""
    source, target = move.source, move.target
    if source is None or target is None:
        return None, move.why
    if source == target:
        return None, "nothing moves"
    if source.partial or target.partial:
        return None, "it is still to be summed"
    if rewrite.inside_manual(move.op):
        return None, "it is inside of a shard_map"
    if source.mesh.device_ids is not None:
        return None, "its mesh lists the devices in an order of its own"
    try:
        plan = best_plan(source, target, options.budget, options.network)
    except NetworkError:
        raise
    except ReshardError as error:
        return None, str(error)
    if {step.kind for step in plan.steps} in ({"slice"}, {"all_gather"}):
        return plan, "XLA does it as well"
    if where in options.leave:
        return plan, "taken, this line would gain nothing"
    return in_parts(plan), ""


def _where(move: Move) -> str:
    """The user's line of a move: its own, else that of what takes it or of what makes it."""
    around = [move.op, *move.users, *([move.maker] if move.maker is not None else [])]
    frames = [Frame(file, int(line)) for op in around for file, line in _PLACE.findall(str(op.location))]
    frame = next((frame for frame in frames if frame.users), None)
    if frame is None:
        return ""
    return f"line {frame.line}" if frame.file == "-" else f"{frame.file}:{frame.line}"


def _name(op: Operation) -> str:
    found = _NAME.search(str(op.location))
    return found[1] if found else ""


def _parsed(program: Any) -> Module:
    """A module of our own, to be changed."""
    if isinstance(program, ir.Module):
        with program.context:
            return ir.Module.parse(program.operation.get_asm(binary=False, enable_debug_info=True))
    if not isinstance(program, str | bytes):
        kind = type(program).__name__
        raise ProgramError(f"transform takes MLIR text, a StableHLO artifact, a module or an Exported, not {kind}")
    context = make_ir_context()
    try:
        if isinstance(program, bytes) and program.startswith(b"ML\xefR"):
            module = _mlir.deserialize_portable_artifact(program, context)
        else:
            module = ir.Module.parse(program, context)
    except (ir.MLIRError, ValueError, RuntimeError) as error:
        raise ProgramError(f"the program is no StableHLO: {error}") from None
    if _EXPORTED in str(module.operation.attributes.get("mhlo.frontend_attributes")):
        raise ProgramError(
            "the program has its shardings as attributes for XLA, not as operations of Shardy; give the module that "
            "`lower(...).compiler_ir('stablehlo')` or `jax.export.export` returns"
        )
    return module


def _artifact(module: Module) -> bytes:
    """As `jax.export` writes it: for readers up to four weeks older, and with Shardy's operations as they are."""
    version = _stablehlo.get_version_from_compatibility_requirement(_stablehlo.StablehloCompatibilityRequirement.WEEK_4)
    return _mlir.serialize_portable_artifact(module, version, True)

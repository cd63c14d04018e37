"""The doctor for JAX programs: compiles one as it is, and reports what XLA does to move its data.

The report itself, which needs no jax, is `reshard.doctor`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend import mlir
from jax.interpreters.mlir import make_ir_context as _make_ir_context
from jaxlib import xla_client as _xla_client

from reshard.doctor import Compiled, Known, Report, examine
from reshard.errors import ProgramError, ReshardError
from reshard.hlo import Frame
from reshard.jax import explicit_reshards
from reshard.jax.explicit_reshards import Move
from reshard.lower.to_stablehlo import Module, Operation, ir
from reshard.synth import Network

_jax: Any = jax  # Its own stubs leave too much unknown.
_xla: Any = _xla_client
_mlir: Any = mlir
_topologies: Any = topologies
make_ir_context: Any = _make_ir_context
_PARTITIONS = "mhlo.num_partitions"
_FRAME = re.compile(r'"([^"]+)":(\d+):\d+')


def report(f: Callable[..., Any], *, network: Network | str | None = None, **options: Any) -> Callable[..., Report]:
    """What XLA does with a function's program to move data between devices: `report(f)(*args)`.

    `f` is a function, to be compiled with `options`, those of `jax.jit`; or already a `jax.jit`, or anything else
    with `lower`. The arguments are arrays, or `jax.ShapeDtypeStruct`s with shardings. Nothing is run. `network` is
    that of `reshard.plan`.

    >>> print(report(lambda x: 2 * x)(1.0))
    jit__lambda on 1 device: no data moves between devices
    """
    jitted: Any = f if hasattr(f, "lower") and not options else _jax.jit(f, **options)

    def of(*args: Any, **kwargs: Any) -> Report:
        lowered = jitted.lower(*args, **kwargs)
        known = _known(_copy(lowered.compiler_ir("stablehlo")))
        compiled = lowered.compile()
        return examine(_text(compiled), known=known, network=network, compiled=_memory(compiled.memory_analysis()))

    return of


def report_program(
    program: str | bytes,
    *,
    network: Network | str | None = None,
    platform: str = "cpu",
    topology: str | None = None,
) -> Report:
    """What XLA does with a StableHLO program: MLIR text, or a portable artifact.

    It is compiled for `platform`: for `cpu`, with as many virtual devices as it has partitions, which needs a process
    that has not used jax yet, or one with as many; or ahead of time for a `topology`, `v5p:2x2x2` with `tpu`.

    Raises `ProgramError` for a program that is none, or that does not compile.
    """
    try:
        module = _parsed(program)
    except (ir.MLIRError, ValueError, RuntimeError) as error:
        raise ProgramError(f"the program is no StableHLO: {error}") from None
    if not _has_main(module):  # Shardy's propagation would abort the process.
        raise ProgramError("the program has no function @main with a body; give the whole module")
    partitions = _partitions(module)
    known = _known(_copy(module))
    devices = _devices(partitions, platform, topology)
    client = devices[0].client
    shardy = "sdy." in module.operation.get_asm(enable_debug_info=False)
    try:
        compile_it = client.compile_and_load if topology is None else client.compile
        executable = compile_it(module, *_compile_options(devices, shardy))
    except Exception as error:  # XLA's errors are no class of their own.
        raise ProgramError(f"XLA does not compile the program for {partitions} devices: {error}") from None
    return examine(
        _printed(executable) or executable.hlo_modules()[0].to_string(),
        known=known,
        network=network,
        compiled=_memory(executable.get_compiled_memory_stats()),
    )


def _devices(partitions: int, platform: str, topology: str | None) -> list[Any]:
    """As many devices of a platform; of a topology, they need not be there."""
    if topology is not None:
        try:
            found = list(_topologies.get_topology_desc(topology, platform=platform).devices)
        except Exception as error:  # The plugin's errors are no class of their own.
            raise ProgramError(f"topology {topology!r} of platform {platform!r} is not to be had: {error}") from None
    else:
        if platform == "cpu":
            with suppress(RuntimeError, ValueError):  # The devices are there already: then they are counted below.
                _jax.config.update("jax_num_cpu_devices", partitions)
        found = list(_jax.devices(platform))
    if len(found) < partitions:
        raise ProgramError(
            f"the program has {partitions} partitions, and this process {len(found)} {platform} devices; use a process "
            f"of its own (`reshard doctor FILE`), or set XLA_FLAGS=--xla_force_host_platform_device_count={partitions}"
        )
    return found[:partitions]


def _compile_options(devices: list[Any], shardy: bool) -> tuple[Any, Any]:
    """The devices and the options that `jax.jit` compiles a program with."""
    options = _xla.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, len(devices)
    build.use_spmd_partitioning, build.use_shardy_partitioner = True, shardy
    build.device_assignment = _xla.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    return _xla.DeviceList(tuple(devices)), options


def _partitions(module: Module) -> int:
    attributes = module.operation.attributes
    return int(attributes[_PARTITIONS].value) if _PARTITIONS in attributes else 1


def _parsed(program: str | bytes) -> Module:
    context = make_ir_context()
    if isinstance(program, bytes):
        return _mlir.deserialize_portable_artifact(program, context)
    with context:
        return ir.Module.parse(program)


def _has_main(module: Module) -> bool:
    functions = (op for op in module.body.operations if op.operation.name == "func.func" and len(op.regions[0].blocks))
    return any(op.attributes["sym_name"].value == "main" for op in functions)


def _copy(module: Module) -> Module:
    with module.context:
        return ir.Module.parse(module.operation.get_asm(binary=False, enable_debug_info=True))


def _known(module: Module) -> list[Known]:
    """The moves that a program needs by Shardy's propagation, which changes the module; none where that fails."""
    try:
        explicit_reshards.spell_out(module)
        return [known for move in explicit_reshards.moves(module) if (known := _named(move)) is not None]
    except (ReshardError, ir.MLIRError):
        return []


def _named(move: Move) -> Known | None:
    if move.source is None or move.target is None:
        return None
    around = [move.op, *move.users, *([move.maker] if move.maker is not None else [])]
    lines = [line for op in around for line in _lines(op)]
    return Known(next(iter(lines), ""), move.source, move.target, frozenset(lines))


def _lines(op: Operation) -> Iterator[str]:
    """The user's lines in an operation's location, the innermost first."""
    for file, line in _FRAME.findall(str(op.location)):
        if file != "-" and Frame(file, int(line)).users:  # "-" is the text that the module was parsed from.
            yield f"{file}:{line}"


def _text(compiled: Any) -> str:
    """The optimized HLO of a `jax.stages.Compiled`, with its long constants if jaxlib prints them."""
    executable = getattr(compiled, "executable", compiled)  # That of reshard.jax.jit has JAX's own inside.
    return _printed(executable.runtime_executable()) or compiled.as_text()


def _printed(executable: Any) -> str | None:
    """The text with the tables of offsets, which it has in constants of more than 10 elements."""
    try:
        made: Any = import_module("jaxlib._hlo")
    except ImportError:
        return None
    options = made.HloPrintOptions()
    options.print_large_constants = True
    return executable.hlo_modules()[0].to_string(options)


def _memory(found: Any) -> Compiled | None:
    """The compiler's account of its memory, if the backend has one."""
    if found is None:
        return None
    return Compiled(
        int(found.argument_size_in_bytes),
        int(found.output_size_in_bytes),
        int(found.temp_size_in_bytes),
        int(found.alias_size_in_bytes),
    )

"""The doctor for JAX programs: compiles a program unchanged, and reports how XLA moves its data.

The report itself is made by `reshard.doctor`, which does not need jax.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend import mlir
from jax.interpreters.mlir import make_ir_context as _make_ir_context
from jax.sharding import NamedSharding
from jaxlib import xla_client as _xla_client

from reshard.doctor import CompiledMemory, Known, Report, examine
from reshard.errors import ProgramError, ReshardError, quoted, shortened
from reshard.jax.request import options_on
from reshard.jax.stablehlo_pass import explicit_reshards
from reshard.jax.stablehlo_pass.explicit_reshards import ReshardOp
from reshard.jax.stablehlo_pass.module_pass import check_main
from reshard.jax.stablehlo_pass.shardy_ops import make_compilable
from reshard.lower.to_stablehlo import Module, ir
from reshard.synth import Network
from reshard.synth.options import PlanOptions

_jax: Any = jax  # Its own stubs leave too much unknown.
_xla: Any = _xla_client
_mlir: Any = mlir
_topologies: Any = topologies
make_ir_context: Any = _make_ir_context
_PARTITIONS = "mhlo.num_partitions"


def report(f: Callable[..., Any], *, network: Network | str | None = None, **options: Any) -> Callable[..., Report]:
    """Reports how XLA moves data between devices in a function's program: `report(f)(*args)`.

    `f` is a function, compiled with the `options` of `jax.jit`; or a jitted function, or any other object with
    `lower`. The arguments are arrays, or `jax.ShapeDtypeStruct`s with shardings. The program is compiled but not run.
    `network` is that of `reshard.plan`.

    >>> print(report(lambda x: 2 * x)(1.0))
    jit__lambda on 1 device: no data moves between devices
    """
    lowers = hasattr(f, "lower") and not isinstance(f, str | bytes)  # which have a method of that name, too
    jitted: Any = f if lowers and not options else _jax.jit(checked_function(f), **options)

    def of(*args: Any, **kwargs: Any) -> Report:
        lowered = jitted.lower(*args, **kwargs)
        known = known_moves(lowered.compiler_ir("stablehlo"))
        compiled = lowered.compile()
        return _examine_text(
            optimized_text(compiled), known, network, compiled.memory_analysis(), devices_of_program(compiled)
        )

    return of


def report_program(
    program: str | bytes,
    *,
    network: Network | str | None = None,
    platform: str = "cpu",
    topology: str | None = None,
) -> Report:
    """Reports how XLA moves data in a StableHLO program, which is MLIR text or a portable artifact.

    The program is compiled for the devices of `platform`, or ahead of time for a `topology`, such as `v5p:2x2x2` with
    platform `tpu`. For `cpu` there are as many virtual devices as the program has partitions, unless this process has
    used jax before with fewer.

    Raises `ProgramError` if `program` cannot be parsed or compiled.

    >>> print(report_program("module @same { func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> "
    ...                      "{ return %a : tensor<4xf32> } }"))
    same on 1 device: no data moves between devices
    """
    try:
        module = _parse_program(program)
    except (ir.MLIRError, ValueError, RuntimeError) as error:
        raise ProgramError(f"the program is not StableHLO: {error}") from None
    check_main(module)
    attributes = module.operation.attributes
    partitions = int(attributes[_PARTITIONS].value) if _PARTITIONS in attributes else 1
    known = known_moves(module)
    make_compilable(module)
    devices = devices_for(partitions, platform, topology)
    client = devices[0].client
    shardy = "sdy." in module.operation.get_asm(enable_debug_info=False)
    try:
        compile_it = client.compile_and_load if topology is None else client.compile
        executable = compile_it(module, *compile_options(devices, shardy))
    except Exception as error:  # XLA's errors have no class of their own.
        raise ProgramError(f"XLA does not compile the program for {partitions} devices: {error}") from None
    text = _print_hlo(executable) or executable.hlo_modules()[0].to_string()
    return _examine_text(text, known, network, executable.get_compiled_memory_stats(), devices)


def _examine_text(
    text: str, known: list[Known], network: Network | str | None, memory: Any, devices: list[Any]
) -> Report:
    """The report on a compiled program. Its network is that of the pass: the caller's, else that of the devices."""
    chosen = options_on(devices, PlanOptions.read(network=network)).network
    return examine(text, known=known, network=chosen, compiled=_read_memory(memory), platform=devices[0].platform)


def devices_for(partitions: int, platform: str, topology: str | None) -> list[Any]:
    """One device of the platform for each partition; those of a topology need not exist on this machine."""
    if topology is not None:
        try:
            devices = list(_topologies.get_topology_desc(topology, platform=platform).devices)
        except Exception as error:  # The plugin's errors have no class of their own.
            raise ProgramError(f"topology {topology!r} of platform {platform!r} is not available: {error}") from None
    else:
        if platform == "cpu":
            with suppress(RuntimeError, ValueError):  # jax was used before: its devices are counted below.
                _jax.config.update("jax_num_cpu_devices", partitions)
        try:
            devices = list(_jax.devices(platform))
        except RuntimeError as error:
            raise ProgramError(f"jax has no platform {quoted(platform)} here: {shortened(str(error))}") from None
    if len(devices) < partitions:
        raise ProgramError(
            f"the program has {partitions} partitions, and this process {len(devices)} {platform} devices; use a "
            f"process of its own (the command `reshard`), or set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={partitions}"
        )
    return devices[:partitions]


def compile_options(devices: list[Any], shardy: bool) -> tuple[Any, Any]:
    """The arguments with which `jax.jit` would compile the program: device list and compile options."""
    options = _xla.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, len(devices)
    build.use_spmd_partitioning, build.use_shardy_partitioner = True, shardy
    build.device_assignment = _xla.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    return _xla.DeviceList(tuple(devices)), options


def _parse_program(program: str | bytes) -> Module:
    context = make_ir_context()
    if isinstance(program, bytes):
        return _mlir.deserialize_portable_artifact(program, context)
    with context:
        return ir.Module.parse(program)


def _copy_module(module: Module) -> Module:
    with module.context:
        return ir.Module.parse(module.operation.get_asm(binary=False, enable_debug_info=True))


def known_moves(program: Module) -> list[Known]:
    """The moves that a program needs according to Shardy's propagation; none if it fails."""
    module = _copy_module(program)
    try:
        explicit_reshards.make_explicit(module)
        return [known for op in explicit_reshards.reshard_ops(module) if (known := _known_move(op)) is not None]
    except (ReshardError, ir.MLIRError):
        return []


def _known_move(reshard: ReshardOp) -> Known | None:
    if reshard.source is None or reshard.target is None:
        return None
    lines = reshard.lines
    return Known(next(iter(lines), ""), reshard.source, reshard.target, frozenset(lines))


def optimized_text(compiled: Any) -> str:
    """The optimized HLO of a `jax.stages.Compiled`, with its long constants if jaxlib can print them."""
    return _print_hlo(_stage_of(compiled).runtime_executable()) or compiled.as_text()


def devices_of_program(compiled: Any) -> list[Any]:
    """The devices that a program was compiled for, those of other processes included, in their order; they need not
    exist here."""
    stage = _stage_of(compiled)
    shardings: Any = jax.tree.leaves((stage.input_shardings, stage.output_shardings))
    meshes: Any = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    if meshes:
        return list(meshes[0].devices.flat)
    known = {device.id: device for sharding in shardings for device in sharding.device_set}
    return [known[each] for each in sorted(known)] or list(stage.runtime_executable().local_devices())


def _stage_of(compiled: Any) -> Any:
    """JAX's own `jax.stages.Compiled`, which ours has inside."""
    return getattr(compiled, "executable", compiled)


def _print_hlo(executable: Any) -> str | None:
    """The HLO text with long constants, because tables of offsets are in constants of more than 10 elements."""
    try:
        printer: Any = import_module("jaxlib._hlo")
    except ImportError:
        return None
    options = printer.HloPrintOptions()
    options.print_large_constants = True
    return executable.hlo_modules()[0].to_string(options)


def _read_memory(stats: Any) -> CompiledMemory | None:
    """The compiler's own figures for its memory, if the backend has them."""
    if stats is None:
        return None
    return CompiledMemory(
        int(stats.argument_size_in_bytes),
        int(stats.output_size_in_bytes),
        int(stats.temp_size_in_bytes),
        int(stats.alias_size_in_bytes),
    )


# Arguments of a function as compiling it needs them: their shapes, dtypes and shardings, without their data.


_import_jax: Any = jax  # Its own stubs leave too much unknown.


def checked_function(f: Any) -> Any:
    """Returns the function; raises `ProgramError` for what cannot be called."""
    if not callable(f):
        raise ProgramError(f"{quoted(f)} is a {type(f).__name__}, not a function; give one, as to jax.jit")
    return f


def placement_of(leaf: Any) -> Any:
    """The sharding of an argument; None if JAX is free to choose it.

    >>> placement_of(3.0) is None
    True
    """
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None


def drop_data(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments without their data, which a cached lowering would keep alive. Other leaves stay.

    >>> drop_data((jax.numpy.ones(3), "sum"), {})
    ((ShapeDtypeStruct(shape=(3,), dtype=float32), 'sum'), {})
    """

    def without_data(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        weak = bool(getattr(leaf, "weak_type", False))  # Random keys have no such attribute.
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement_of(leaf), weak_type=weak)

    return _import_jax.tree.map(without_data, (args, kwargs))

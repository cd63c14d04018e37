"""What people look at of a JAX program: `report`, how XLA moves its data, and `show`, where a live array is.

The program is compiled unchanged. The report itself is made by `reshard.doctor`, which does not need jax.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib import utils as _jax_utils  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib import xla_client as _xla_client

from reshard.doctor import CompiledMemory, Known, Report, examine
from reshard.errors import ProgramError, ReshardError, name_arguments, quoted, shortened
from reshard.jax.advise import advise
from reshard.jax.request import options_on
from reshard.jax.stablehlo_pass import explicit_reshards
from reshard.jax.stablehlo_pass.causes import name_causes
from reshard.jax.stablehlo_pass.module_pass import name_main, read_stablehlo
from reshard.jax.stablehlo_pass.shardy import make_compilable
from reshard.jax.xla_pass.fragments import Fragments, print_module
from reshard.lower.to_stablehlo import Module, ir
from reshard.synth import Network
from reshard.synth.options import PlanOptions
from reshard.types.layout import Layout
from reshard.types.whole import whole

log = logging.getLogger(__name__)
_xla: Any = _xla_client
_jaxlib: Any = _jax
_utils: Any = _jax_utils
_PARTITIONS = "mhlo.num_partitions"
_ROWS = 32  # As many as `reshard show` prints.


@name_arguments
def report(
    f: Callable[..., Any], *, network: Network | str | None = None, sums: str = "exact", **options: Any
) -> Callable[..., Report]:
    """Reports how XLA moves data between devices in a function's program: `report(f)(*args)`.

    `f` is a function, compiled with the `options` of `jax.jit`; or a jitted function, or any other object with
    `lower`. The arguments are arrays, or `jax.ShapeDtypeStruct`s with shardings. The program is compiled but not run.
    `network` is that of `reshard.plan`, `sums` that of `reshard.jax.enable`.

    >>> print(report(lambda x: 2 * x)(1.0))
    jit__lambda on 1 device: no data moves between devices
    """
    lowers = hasattr(f, "lower") and not isinstance(f, str | bytes)  # which have a method of that name, too
    jitted: Any = f if lowers and not options else jax.jit(checked_function(f), **options)

    def of(*args: Any, **kwargs: Any) -> Report:
        lowered = jitted.lower(*args, **kwargs)
        module = lowered.compiler_ir("stablehlo")
        program = _write_text(module)
        known = known_moves(module)
        compiled = lowered.compile()
        devices = devices_of_program(compiled)
        report = _examine_text(optimized_text(compiled), known, network, sums, compiled.memory_analysis(), devices)
        return _add_causes(report, program, devices)

    return of


def report_program(
    program: str | bytes,
    *,
    network: Network | str | None = None,
    platform: str = "cpu",
    topology: str | None = None,
    sums: str = "exact",
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
    module = read_stablehlo(program)
    name_main(module)
    attributes = module.operation.attributes
    partitions = int(attributes[_PARTITIONS].value) if _PARTITIONS in attributes else 1
    text = _write_text(module)
    known = known_moves(module)
    make_compilable(module)
    devices = devices_for(partitions, platform, topology)
    try:
        executable = compile_module(devices, module)
    except Exception as error:  # XLA's errors have no class of their own.
        raise ProgramError(f"XLA does not compile the program for {partitions} devices: {error}") from None
    optimized = print_module(executable.hlo_modules()[0])
    report = _examine_text(optimized, known, network, sums, executable.get_compiled_memory_stats(), devices)
    return _add_causes(report, text, devices)


def _write_text(module: Module) -> bytes:
    """A module with its locations, as small as it gets: a report keeps it to give advice later."""
    return zlib.compress(module.operation.get_asm(binary=False, enable_debug_info=True).encode(), 1)


def _add_causes(report: Report, program: bytes, devices: list[Any]) -> Report:
    """The report with the causes of its places, and with a way to give advice."""
    try:
        module = read_stablehlo(zlib.decompress(program).decode())
        name_main(module)
        report = name_causes(report, module)
    except Exception:  # Causes are an extra: a program that they cannot be read of has its report all the same.
        log.debug("no causes", exc_info=True)
    return replace(report, adviser=partial(advise, program, partial(compile_module, devices, fast=True)))


def _examine_text(
    text: str, known: list[Known], network: Network | str | None, sums: str, stats: Any, devices: list[Any]
) -> Report:
    """The report on a compiled program. Its network is that of the pass: the caller's, else that of the devices."""
    chosen = options_on(devices, PlanOptions.read(network=network)).network
    # The compiler's own figures for its memory, if the backend has them.
    names = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes", "alias_size_in_bytes")
    memory = None if stats is None else CompiledMemory(*(int(getattr(stats, name)) for name in names))
    placed = Fragments(devices)
    return examine(
        text, known=known, network=chosen, compiled=memory, platform=placed.platform, processes=placed.processes,
        sums=sums,
    )  # fmt: skip


def devices_for(partitions: int, platform: str, topology: str | None) -> list[Any]:
    """One device of the platform for each partition; those of a topology need not exist on this machine."""
    if topology is not None:
        try:
            devices = list(topologies.get_topology_desc(topology, platform=platform).devices)
        except Exception as error:  # The plugin's errors have no class of their own.
            raise ProgramError(f"topology {topology!r} of platform {platform!r} is not available: {error}") from None
    else:
        if platform == "cpu":
            with suppress(RuntimeError, ValueError):  # jax was used before: its devices are counted below.
                jax.config.update("jax_num_cpu_devices", partitions)
        try:
            devices = list(jax.devices(platform))
        except RuntimeError as error:
            raise ProgramError(f"jax has no platform {quoted(platform)} here: {shortened(str(error))}") from None
    if len(devices) < partitions and topology is not None:
        raise ProgramError(f"{partitions} devices are asked for, and topology {topology!r} has {len(devices)}")
    if len(devices) < partitions:
        raise ProgramError(
            f"the program has {partitions} partitions, and this process {len(devices)} {platform} devices; use a "
            f"process of its own (the command `reshard`), or set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={partitions}"
        )
    return devices[:partitions]


def compile_module(devices: list[Any], module: Module, fast: bool = False) -> Any:
    """The module compiled for these devices, which need not exist here.

    If `fast`, what is compiled for CPUs is not optimized by LLVM, which changes neither its moves nor its memory.
    """
    listed, options = compile_options(devices, "sdy." in module.operation.get_asm(enable_debug_info=False))
    client = devices[0].client
    if fast and client.platform == "cpu":
        debug = options.executable_build_options.debug_options
        debug.xla_backend_optimization_level, debug.xla_llvm_disable_expensive_passes = 0, True
    ahead = isinstance(client, _jaxlib.CompileOnlyPyClient)
    return (client.compile if ahead else client.compile_and_load)(module, listed, options)


@contextmanager
def hush_compiler() -> Generator[None]:
    """Keeps XLA's warnings from stderr meanwhile, as of programs that are compiled only to be compared."""
    own = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1")  # what jax itself sets
    level = int(own) if own.isdecimal() else 0
    _utils.absl_set_min_log_level(max(2, level))
    try:
        yield
    finally:
        _utils.absl_set_min_log_level(level)


def compile_options(devices: list[Any], shardy: bool) -> tuple[Any, Any]:
    """The arguments with which `jax.jit` would compile the program: device list and compile options."""
    options = _xla.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, len(devices)
    build.use_spmd_partitioning, build.use_shardy_partitioner = True, shardy
    build.device_assignment = _xla.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    return _xla.DeviceList(tuple(devices)), options


def known_moves(program: Module) -> list[Known]:
    """The moves that a program needs according to Shardy's propagation; none if it fails."""
    with program.context:
        module = ir.Module.parse(program.operation.get_asm(binary=False, enable_debug_info=True))
    known: list[Known] = []
    try:
        explicit_reshards.make_explicit(module)
        for reshard in explicit_reshards.reshard_ops(module):
            if reshard.source is not None and reshard.target is not None:
                lines = reshard.lines
                known.append(Known(next(iter(lines), ""), reshard.source, reshard.target, frozenset(lines)))
    except (ReshardError, ir.MLIRError):
        return []
    return known


def optimized_text(compiled: Any) -> str:
    """The optimized HLO of a `jax.stages.Compiled`, or of ours, with its long constants."""
    return print_module(getattr(compiled, "executable", compiled).runtime_executable().hlo_modules()[0])


def devices_of_program(compiled: Any) -> list[Any]:
    """The devices that a program was compiled for, those of other processes included, in their order; they need not
    exist here."""
    stage = getattr(compiled, "executable", compiled)  # JAX's own, which ours has inside.
    shardings: Any = jax.tree.leaves((stage.input_shardings, stage.output_shardings))
    meshes: Any = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    if meshes:
        return list(meshes[0].devices.flat)
    known = {device.id: device for sharding in shardings for device in sharding.device_set}
    return [known[each] for each in sorted(known)] or list(stage.runtime_executable().local_devices())


def checked_function(f: Any) -> Any:
    """Returns the function; raises `ProgramError` for what cannot be called."""
    if not callable(f):
        raise ProgramError(f"{quoted(f)} is a {type(f).__name__}, not a function; give one, as to jax.jit")
    return f


def show(array: Any, limit: int = _ROWS) -> None:
    """Prints the layout of a JAX array, its sizes, and a picture of which device holds what.

    `array` is anything with a shape, a dtype and a `NamedSharding`, such as a `jax.ShapeDtypeStruct`; `limit` is about
    how many lines the picture has. Raises `ReshardError` for what has no sharding, as a value inside `jax.jit` has
    none yet, and `LayoutError` for another kind of sharding.

    >>> import jax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    >>> show(jax.device_put(jax.numpy.zeros((4, 8)), rows))  # doctest: +ELLIPSIS
    f32[4, 8]
      mesh     <x=1>, 1 device
    ...
    """
    from reshard.show.layout_picture import show_layout  # Only here does `reshard.jax` need rich.

    rows = whole(limit, 1)
    if rows is None:
        raise ReshardError(f"limit {quoted(limit)}: give the most lines of the picture, a whole number from 1 up")
    try:
        shape, dtype, sharding = array.shape, array.dtype, array.sharding
    except Exception:  # A tracer has errors of its own for what it lacks.
        shape, dtype, sharding = (), None, None
    if sharding is None:
        raise ReshardError(
            f"{quoted(array)} has no sharding: give a jax.Array, outside jax.jit; inside it, "
            f"jax.debug.inspect_array_sharding(x, callback=...) tells what the compiler chose"
        )
    show_layout(Layout.from_jax(sharding, shape, dtype), rows)

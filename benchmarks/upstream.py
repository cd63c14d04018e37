"""Small programs for XLA's developers: what a device receives as XLA partitions them, and what is enough.

    python benchmarks/upstream.py                                    # 8 CPU devices: XLA, the pass, Shardy
    python benchmarks/upstream.py --only stencil,gradient_of_two_axes
    python benchmarks/upstream.py --module step.hlo --devices 128    # a partitioned module, compiled for H100s

Each program is partitioned three times, each time in a process of its own, as some of it ends the process: by XLA (with
and without the pass), by Shardy alone (`sdy-convert-global-to-local`, one program for a device and no partitioner after
it), and by Shardy's `sdy-per-instruction-partitioning`, after which XLA does the rest. Results are compared with XLA's.

A module of `--module` is the text of HLO after partitioning, such as those of XLA's own benchmarks
(openxla/xla, xla/tools/benchmarks/hlo). It is compiled without a partitioner, custom calls are mocked, and copies,
which StableHLO does not have, become bitcasts. H100s need what `benchmarks/aot.py` says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HERE = Path(__file__).resolve().parent
SHARDY = (
    "sdy-propagation-pipeline,sdy-lift-inlined-meshes,func.func(sdy-insert-explicit-reshards{enable-full-version=true}),"
    "sdy-resolve-permutation-factors{replica-count=8 enable-halo-exchange=true},sdy-pad-for-divisibility,"
    "func.func(sdy-reshard-to-collectives),sdy-convert-global-to-local{replica-count=8},"
    "sdy-drop-sharding-and-mesh"
)
PIPELINES = {
    "xla": "",
    "shardy": SHARDY,
    "per instruction": (
        "sdy-propagation-pipeline,sdy-per-instruction-partitioning{partition-count=8 enable-halo-exchange=true}"
    ),
}
_COPIES = re.compile(r" copy\(")
_NOT_IN_STABLEHLO = re.compile(r", (?:operand_layout_constraints|api_version)=.*$")


class Small(NamedTuple):
    """A program: its function, the shapes and shardings of its arguments, and the sharding of its result."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    result: Any


def build_programs() -> dict[str, Small]:
    """The programs, on a mesh of 2 x 4 devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("y", "x"))
    size = 64

    def split(*spec: Any) -> Any:
        return NamedSharding(mesh, PartitionSpec(*spec))

    def shaped(shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=split(*spec))

    def diffuse(u: Any) -> Any:
        around = sum(jnp.roll(u, (dy, dx), (0, 1)) for dy in (-1, 0, 1) for dx in (-1, 0, 1))
        return u + (around - 9 * u) / 60

    def convolve(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def pool(x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")

    def by_weights(x: Any, w: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    def two_by_weights(x: Any, w: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) ** 2))(w)

    def by_table(table: Any, ids: Any) -> Any:
        return jax.grad(lambda table: jnp.sum(table[ids] ** 2))(table)

    matrix, rows = shaped((size, size), "y", "x"), shaped((size, size), "x", None)
    images = shaped((4, 32, 32, 8), None, "y", "x", None)
    weights, both = shaped((size, size)), shaped((2, size, size), None, ("y", "x"), None)
    table, ids = shaped((512, size), "x", None), shaped((size,), "y", dtype=jnp.int32)
    return {
        "roll_by_20": Small(lambda u: jnp.roll(u, 20, 0), (rows,), split("x", None)),
        "stencil": Small(diffuse, (matrix,), split("y", "x")),
        "convolution": Small(convolve, (images, shaped((3, 3, 8, 8))), split(None, "y", "x", None)),
        "pooling": Small(pool, (images,), split(None, "y", "x", None)),
        "pad": Small(lambda u: jnp.pad(u, ((4, 4), (0, 0))), (rows,), split("x", None)),
        "slice": Small(lambda u: u[8:56], (rows,), split("x", None)),
        "concatenate": Small(lambda u, v: jnp.concatenate([u, v]), (rows, rows), split("x", None)),
        "halves": Small(lambda u: u[:32] * u[32:], (rows,), split("x", None)),
        "reverse": Small(lambda u: u[::-1], (rows,), split("x", None)),
        "cumulative_sum": Small(lambda u: jnp.cumsum(u, 0), (rows,), split("x", None)),
        "reshape": Small(lambda u: u.reshape(4 * size, size // 4), (matrix,), split("x", "y")),
        "transpose": Small(lambda u: u.T * 2, (shaped((size, size), "x", "y"),), split("x", "y")),
        "product": Small(lambda u, w: u @ w, (matrix, shaped((size, size), "x", "y")), split("y", "x")),
        "gradient": Small(by_weights, (rows, rows), split("x", None)),
        "gradients_of_two": Small(two_by_weights, (shaped((size, size), ("y", "x"), None), both), both.sharding),
        "gradient_of_two_axes": Small(by_weights, (shaped((4, size, size), "y", "x", None), weights), split()),
        "embedding": Small(lambda table, ids: table[ids], (table, ids), split("y", None)),
        "embedding_gradient": Small(by_table, (table, ids), split("x", None)),
    }


def measure_partitioned(name: str, how: str) -> dict[str, Any]:
    """What a device receives in a program that is partitioned so, and whether its results are XLA's."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax._src import compiler
    from jaxlib import _jax
    from jaxlib.mlir.passmanager import PassManager

    import reshard.jax
    from benchmarks.real_programs.counting import received_bytes
    from reshard.doctor import examine

    f, args, result = build_programs()[name]

    def lower() -> Any:
        return jax.jit(lambda *args: f(*args), out_shardings=result).lower(*args)

    plain = lower().compile()
    row = {"program": name, "how": how}
    if how == "xla":
        row["received"] = received_bytes(plain.as_text())
        for sums in ("exact", "any order"):
            with reshard.jax.enabled(sums=sums):
                row[f"with the pass, {sums}"] = received_bytes(lower().compile().as_text())
        return row | {"needed": examine(plain.as_text(), platform="cpu").needed_bytes}
    module, devices = lower().compiler_ir(), jax.devices()
    grid = np.arange(8).reshape((8, 1) if how == "shardy" else (1, 8))
    options: Any = compiler.get_compile_options(*grid.shape, grid, backend=devices[0].client)
    if how == "shardy":  # a program for one device, which eight replicas run
        options.executable_build_options.use_spmd_partitioning = False
        options.executable_build_options.use_shardy_partitioner = False
    with module.context:
        PassManager.parse(f"builtin.module({PIPELINES[how]})").run(module.operation)
        client: Any = devices[0].client
        compiled = client.compile_and_load(module, _jax.DeviceList(tuple(devices)), options)
    rng = np.random.default_rng(0)
    data = [rng.integers(0, 512, one.shape) if one.dtype == jnp.int32 else rng.normal(size=one.shape) for one in args]
    data = [jax.device_put(np.asarray(one, arg.dtype), arg.sharding) for one, arg in zip(data, args, strict=True)]
    made = compiled.execute_sharded(data).disassemble_into_single_device_arrays()[0]
    expected = plain(*data)
    found = jax.make_array_from_single_device_arrays(expected.shape, expected.sharding, made)
    row["received"] = received_bytes(compiled.hlo_modules()[0].to_string())
    row["same"] = bool(np.allclose(np.asarray(found), np.asarray(expected), rtol=1e-4, atol=1e-5))
    return row


def measure_module(path: Path, count: int) -> dict[str, Any]:
    """What a device receives in a partitioned module as XLA:GPU compiles it for H100s, plain and with the pass."""
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax.experimental import topologies
    from jaxlib import _hlo, _jax
    from jaxlib.mlir import ir

    import reshard.jax
    from benchmarks.real_programs.counting import received_bytes

    lines = _COPIES.sub(" bitcast-convert(", path.read_text()).splitlines()
    lines = [_NOT_IN_STABLEHLO.sub("", line) if "custom_call_target=" in line else line for line in lines]
    proto = _hlo.hlo_module_from_text("\n".join(lines)).as_serialized_hlo_module_proto()
    text = _jax.mlir.xla_computation_to_mlir_module(_hlo.XlaComputation(proto))
    module = ir.Module.parse(text, mlir.make_ir_context())
    config = (HERE / "h100.txtpb").read_text()
    shape = f"1x{max(1, count // 8)}x{min(count, 8)}"
    chips = topologies.get_topology_desc("h100", platform="cuda", target_config=config, topology=shape).devices
    client: Any = chips[0].client
    options: Any = compiler.get_compile_options(1, count, np.arange(count).reshape(1, count), backend=client)
    options.executable_build_options.use_spmd_partitioning = False
    options.executable_build_options.use_shardy_partitioner = False

    def receive() -> int:
        # By jax's own function, which tells the pass the devices.
        compiled: Any = compiler.backend_compile_and_load(
            client, module, _jax.DeviceList(tuple(chips[:count])), options, []
        )
        return received_bytes(compiled.hlo_modules()[0].to_string())

    row: dict[str, Any] = {"module": path.name, "devices": count, "received": receive()}
    with reshard.jax.enabled() as log:
        row["with the pass"] = receive()
    return row | {"replaced": sum(len(report.replaced) for report in log.reports)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="names of programs, separated by commas")
    parser.add_argument("--module", type=Path, help="the text of a partitioned module")
    parser.add_argument("--devices", type=int, default=8, help="the number of that module's partitions")
    parser.add_argument("--how", choices=tuple(PIPELINES), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if options.module:
        os.environ["XLA_FLAGS"] = "--xla_gpu_mock_custom_calls=true"
        print(json.dumps(measure_module(options.module, options.devices)))
        return 0
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    if options.how:
        print(json.dumps(measure_partitioned(options.only, options.how)))
        return 0
    for name in options.only.split(",") if options.only else build_programs():
        for how in PIPELINES:
            command = [sys.executable, str(HERE / "upstream.py"), "--only", name, "--how", how]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                print(done.stdout.strip().splitlines()[-1], flush=True)
            else:
                why = [line for line in done.stderr.splitlines() if "rror: " in line or "Check failed" in line]
                row = {"program": name, "how": how, "exit code": done.returncode, "why": (why or ["none"])[-1][:200]}
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Loads of a checkpoint into shardings, beside Orbax's restore and safetensors with `jax.device_put`: seconds, bytes
read over bytes stored, and every element of every device compared.

    python benchmarks/files_jax.py                                     # one process with 8 CPU devices, a new seed
    python benchmarks/files_jax.py --processes 4                       # jax.distributed: 4 processes, 2 devices each
    python benchmarks/files_jax.py --seed 7 --layouts tp8 --repeats 5
    RESHARD_PEERS=.../bin/python python benchmarks/files_jax.py        # Orbax, by a Python that has it

A model of some layers, its sizes drawn by the seed, lies in files in the page cache. Methods take turns, each time in
processes of their own: "first" is their first load, from the call until all arrays are ready, with imports and devices
made before; "again" is the same once more. Medians over the repeats, of the slowest process. Orbax's checkpoint is
saved on a 4 x 2 mesh. "device_put" is `safetensors.numpy.load_file` and `jax.device_put` of each array in one process,
and in several `get_slice` for each device's shard, which is what each process then needs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAYOUTS = ("tp8", "fsdp8", "2xtp4", "4xtp2", "replicated")
DEVICES = 8
Shapes = dict[str, tuple[int, ...]]


def draw_shapes(seed: int, mib: int) -> Shapes:
    """The arrays of a model of about so many MiB in float32."""
    choose = random.Random(seed)
    width, heads = choose.choice([1024, 1536, 2048]), choose.choice([2, 4])
    wide = choose.choice([2, 3, 4]) * width
    layer = {"q": (width, width), "k": (width // heads, width), "v": (width // heads, width), "o": (width, width)}
    layer |= {"gate": (wide, width), "up": (wide, width), "down": (width, wide), "norm": (width,), "norm2": (width,)}
    shapes: Shapes = {"embed": (8 * width, width), "norm": (width,)}
    number = 0
    while sum(_size(shape) for shape in shapes.values()) * 4 < mib << 20:
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
        number += 1
    return shapes


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size


def make_values(shapes: Shapes) -> dict[str, Any]:
    """Every element a number of its own, as bits of float32."""
    import numpy as np

    start, values = 0, {}
    for name, shape in shapes.items():
        values[name] = np.arange(start, start + _size(shape), dtype=np.uint32).view(np.float32).reshape(shape)
        start += _size(shape)
    return values


def make_shardings(layout: str, shapes: Shapes) -> dict[str, Any]:
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    replicas = {"tp8": 1, "fsdp8": 1, "2xtp4": 2, "4xtp2": 4, "replicated": DEVICES}[layout]
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(replicas, -1), ("rep", "tp"))

    def spec(name: str, shape: tuple[int, ...]) -> P:
        if layout == "fsdp8":
            return P("tp")
        if len(shape) == 1 or layout == "replicated":
            return P()
        return P(None, "tp") if name.rpartition(".")[2] in ("o", "down") else P("tp")

    return {name: NamedSharding(mesh, spec(name, shape)) for name, shape in shapes.items()}


# ---- one process of a method -----------------------------------------------------------------------


def run_method(given: dict[str, Any]) -> dict[str, Any]:
    """Loads twice, and compares what came with what every device should have."""
    import jax
    import numpy as np

    if given["processes"] > 1:
        jax.distributed.initialize(f"localhost:{given['port']}", given["processes"], given["process"])
    shapes = {name: tuple(shape) for name, shape in given["shapes"].items()}
    shardings = make_shardings(given["layout"], shapes)
    folder, method = Path(given["folder"]), given["method"]
    if method == "orbax":
        import orbax.checkpoint as ocp
        import tensorstore

        def load() -> Any:
            wanted = {name: jax.ShapeDtypeStruct(shapes[name], np.float32, sharding=shardings[name]) for name in shapes}
            with ocp.StandardCheckpointer() as checkpointer:
                return checkpointer.restore(folder / "orbax", wanted)

        def count() -> int:
            metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
            return sum(int(value["value"]) for metric in metrics for value in metric["values"])

    elif method == "device_put":
        from safetensors import safe_open
        from safetensors.numpy import load_file

        files = sorted(folder.glob("*.safetensors"))

        def load() -> Any:
            if given["processes"] == 1:
                arrays = {name: array for file in files for name, array in load_file(file).items()}
                return jax.device_put(arrays, shardings)
            made = {}
            for file in files:
                with safe_open(file, "numpy") as opened:
                    for name in opened.keys():  # noqa: SIM118 (a safe_open is no dict)
                        part = opened.get_slice(name)
                        made[name] = jax.make_array_from_callback(
                            shapes[name], shardings[name], lambda index, part=part: part[index]
                        )
            return made

        def count() -> int:
            return 0

    else:
        import reshard.files
        import reshard.jax
        from reshard.runtime.on_files.engine import ReadCounts

        counts = ReadCounts()
        path = folder / "orbax" if method == "plan of orbax" else folder

        def load() -> Any:
            return reshard.files.load(path, shardings, counts=counts)

        def count() -> int:
            return counts.bytes

    return measure_load(load, count, shapes, given["processes"])


def measure_load(load: Any, count: Any, shapes: Shapes, processes: int) -> dict[str, Any]:
    """Two loads: their seconds, the bytes of the last, and the elements of the first that are wrong."""
    import jax

    found: dict[str, Any] = {}
    for turn in ("first", "again"):
        if processes > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices(turn)
        before, began = count(), time.perf_counter()
        arrays = load()
        jax.block_until_ready(arrays)
        found[turn] = time.perf_counter() - began
        found["bytes"] = count() - before
        if turn == "first":
            found["wrong"] = compare_shards(arrays, shapes)
        del arrays
    return found


def compare_shards(arrays: Any, shapes: Shapes) -> int:
    """Elements of this process's devices that are not what they should be."""
    import numpy as np

    wrong = 0
    values = make_values(shapes)
    for name, array in arrays.items():
        seen: set[tuple[int, str]] = set()
        for shard in array.addressable_shards:
            where = (shard.data.unsafe_buffer_pointer(), str(shard.index))
            if where not in seen:  # Devices that share memory have the same.
                found = np.asarray(shard.data).view(np.uint32)
                wrong += int((found != values[name][shard.index].view(np.uint32)).sum())
            seen.add(where)
    return wrong


# ---- all methods, side by side ---------------------------------------------------------------------


def start_method(method: str, given: dict[str, Any], python: str) -> dict[str, Any]:
    """Runs the processes of a method, and sums up what they found."""
    processes = given["processes"]
    with socket.socket() as kept:
        kept.bind(("", 0))
        port = kept.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES // processes}"
    if method == "orbax":
        environment.pop("PYTHONPATH")
    started: list[subprocess.Popen[str]] = []
    for process in range(processes):
        asked = json.dumps({**given, "method": method, "process": process, "port": port})
        command = [python, str(Path(__file__).resolve()), "--child", asked]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    found: list[dict[str, Any]] = []
    for process in started:
        out, errors = process.communicate(timeout=300)
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if process.returncode or not lines:
            raise SystemExit(f"{method}: {errors[-2000:]}")
        found.append(json.loads(lines[-1]))
    return {
        "first": max(each["first"] for each in found),
        "again": max(each["again"] for each in found),
        "bytes": sum(each["bytes"] for each in found),
        "wrong": sum(each["wrong"] for each in found),
    }


def write_checkpoints(folder: Path, shapes: Shapes, peers: str | None) -> None:
    from safetensors.numpy import save_file

    values = make_values(shapes)
    names, count = list(values), 4
    for at in range(count):
        part = {name: values[name] for name in names[at * len(names) // count : (at + 1) * len(names) // count]}
        save_file(part, folder / f"model-0000{at + 1}-of-0000{count}.safetensors")
    where = {
        name: f"model-0000{at + 1}-of-0000{count}.safetensors"
        for at in range(count)
        for name in names[at * len(names) // count : (at + 1) * len(names) // count]
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    if peers:
        given = json.dumps({"save": str(folder / "orbax"), "shapes": shapes})
        flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
        subprocess.run([peers, __file__, "--child", given], env={**os.environ, **flags, "PYTHONPATH": ""}, check=True)


def save_by_orbax(path: str, shapes: Shapes) -> None:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    values = make_values({name: tuple(shape) for name, shape in shapes.items()})
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(
            path, {name: jax.device_put(x, NamedSharding(mesh, P(*"xy"[: x.ndim]))) for name, x in values.items()}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--methods", nargs="+", default=["plan", "device_put", "plan of orbax", "orbax"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where checkpoints are, or are written; a temporary one by default")
    parser.add_argument("--peers", default=os.environ.get("RESHARD_PEERS"), help="a Python with orbax-checkpoint")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        given = json.loads(options.child)
        if "save" in given:
            save_by_orbax(given["save"], given["shapes"])
        else:
            print(json.dumps(run_method(given)))
        return
    shapes = draw_shapes(options.seed, options.mib)
    nbytes = sum(map(_size, shapes.values())) * 4
    print(
        f"seed {options.seed}: {len(shapes)} arrays, {nbytes >> 20} MiB, {options.processes} processes x "
        f"{DEVICES // options.processes} devices",
        flush=True,
    )
    folder = options.folder or Path(tempfile.mkdtemp())
    try:
        if not (folder / "model.safetensors.index.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_checkpoints(folder, shapes, options.peers)
        methods = [method for method in options.methods if options.peers or "orbax" not in method]
        print(f"{'layout':12}{'method':16}{'first':>8}{'again':>8}{'read':>7}  wrong")
        for layout in options.layouts:
            found: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
            for _ in range(options.repeats):
                for method in methods:
                    python = options.peers if method == "orbax" else sys.executable
                    given = {"folder": str(folder), "layout": layout, "shapes": shapes, "processes": options.processes}
                    found[method].append(start_method(method, given, python))
            for method, each in found.items():
                first, again = (median(one[turn] for one in each) for turn in ("first", "again"))
                read = f"{each[0]['bytes'] / nbytes:.2f}" if each[0]["bytes"] else "-"
                wrong = sum(one["wrong"] for one in each)
                print(f"{layout:12}{method:16}{first:8.2f}{again:8.2f}{read:>7}  {wrong}", flush=True)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

"""Loads of a checkpoint into shardings, beside Orbax's restore and safetensors with `jax.device_put`: seconds, bytes
read over bytes stored, and every element of every device compared.

    python benchmarks/files_jax.py                                     # one process with 8 CPU devices, a new seed
    python benchmarks/files_jax.py --processes 4                       # jax.distributed: 4 processes, 2 devices each
    python benchmarks/files_jax.py --seed 7 --layouts tp8 --repeats 5
    RESHARD_PEERS=.../bin/python python benchmarks/files_jax.py        # Orbax, by a Python that has it
    python benchmarks/files_jax.py --check [--processes 4]             # 10 layouts of 6 formats, every element

A model of some layers, its sizes drawn by the seed, lies in files in the page cache. Methods take turns, each time in
processes of their own: "first" is their first load, from the call until all arrays are ready, with imports and devices
made before; "again" is the same once more. Medians over the repeats, of the slowest process. Orbax's checkpoint is
saved on a 4 x 2 mesh. "device_put" is `safetensors.numpy.load_file` and `jax.device_put` of each array in one process,
and in several `get_slice` for each device's shard, which is what each process then needs. "read" is over the bytes of
all elements.

`--check` times nothing: it loads a small model from every format, compressed where a format can be, into ten layouts,
and counts bytes over those of the files, and reads over chunks (or bytes / read_size) + readers x files. A checkpoint
of torch is among the formats where RESHARD_TORCH is a Python that has it.
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


# ---- every format and layout -----------------------------------------------------------------------

FORMATS = ("safetensors", "npy", "zarr", "orbax", "hdf5", "dcp")
READ_SIZE = 64 << 10


def list_layouts(shapes: Shapes, seed: int) -> dict[str, dict[str, Any]]:
    """Ten layouts: by name, the sharding of each array."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    made = {layout: make_shardings(layout, shapes) for layout in LAYOUTS}
    devices, choose = np.array(jax.devices()), random.Random(seed)
    grid = jax.sharding.Mesh(devices.reshape(4, 2), ("x", "y"))
    mixed = jax.sharding.Mesh(devices[[0, 4, 1, 5, 2, 6, 3, 7]].reshape(2, 4), ("x", "y"))
    half = jax.sharding.Mesh(devices[::2].reshape(2, 2), ("x", "y"))
    some = [P("x", "y"), P("y", "x"), P(("y", "x")), P(None, "x"), P("y"), P(None, ("x", "y")), P()]

    def spread(mesh: Any, specs: list[P]) -> dict[str, Any]:
        of = {name: choose.choice(specs) if len(shape) > 1 else P() for name, shape in shapes.items()}
        return {name: NamedSharding(mesh, spec) for name, spec in of.items()}

    made |= {"2d": spread(grid, some[:1]), "columns": spread(grid, some[5:6]), "other order": spread(mixed, some[:1])}
    return made | {"half of the devices": spread(half, some), "each its own": spread(mixed, some)}


def write_formats(folder: Path, shapes: Shapes, torch: str | None) -> list[str]:
    """Writes the model in each format; their names."""
    import numpy as np
    from safetensors.numpy import save_file

    import reshard.files

    values = make_values(shapes)
    written = [each for each in FORMATS if each != "dcp" or torch]
    chunks = {name: tuple(max(1, size // 3) for size in shape) for name, shape in shapes.items()}
    for each in written:
        (folder / each).mkdir(parents=True)
        if each == "safetensors":
            save_file(values, folder / each / "model.safetensors")
        elif each == "npy":
            for name, array in values.items():
                np.save(folder / each / f"{name}.npy", array)
        elif each == "dcp":
            code = (
                "import sys, numpy, torch, torch.distributed.checkpoint as dcp; values = numpy.load(sys.argv[1]); "
                "dcp.save({k: torch.from_numpy(v) for k, v in values.items()}, checkpoint_id=sys.argv[2])"
            )
            np.savez(folder / "values.npz", **values)
            subprocess.run([str(torch), "-c", code, folder / "values.npz", folder / each], check=True, env={"PATH": ""})
            (folder / "values.npz").unlink()
        else:
            shutil.rmtree(folder / each)
            end = folder / (f"{each}.h5" if each == "hdf5" else each)
            codec = "gzip" if each == "hdf5" else "zstd"
            reshard.files.save(end, values, format=each, codec=codec, chunks=chunks)
    return written


def check_formats(given: dict[str, Any]) -> dict[str, Any]:
    """Loads every format into every layout, and compares: by format, what was read and wrong in this process."""
    import jax

    import reshard.files
    import reshard.jax
    from reshard.runtime.on_files.engine import ReadCounts

    if given["processes"] > 1:
        jax.distributed.initialize(f"localhost:{given['port']}", given["processes"], given["process"])
    shapes = {name: tuple(shape) for name, shape in given["shapes"].items()}
    found: dict[str, Any] = {}
    for each in given["formats"]:
        ckpt = reshard.files.open(Path(given["folder"]) / (f"{each}.h5" if each == "hdf5" else each))
        for layout, shardings in list_layouts(shapes, given["seed"]).items():
            counts = ReadCounts()
            arrays = reshard.files.load(ckpt, shardings, counts=counts, read_size=READ_SIZE)
            wrong = compare_shards(arrays, shapes)
            found[f"{each}, {layout}"] = {"bytes": counts.bytes, "calls": counts.calls, "wrong": wrong}
    return found


def print_checks(folder: Path, seed: int, processes: int, torch: str | None) -> None:
    import reshard.files

    # Two layers, and sizes that all layouts divide.
    drawn = draw_shapes(seed, 400)
    shapes = {name: tuple(size // 16 for size in shape) for name, shape in drawn.items() if name.count(".") == 0}
    for layer in ("layers.0.", "layers.1."):
        of = {name: shape for name, shape in drawn.items() if name.startswith(layer)}
        shapes |= {name: tuple(size // 16 for size in shape) for name, shape in of.items()}
    formats = write_formats(folder, shapes, torch)
    given = {"folder": str(folder), "shapes": shapes, "formats": formats, "seed": seed, "processes": processes}
    every = run_processes("check", given, sys.executable)
    elements = sum(map(_size, shapes.values()))
    print(f"{len(shapes)} arrays, {elements * 4 >> 10} KiB, in {len(formats)} formats and 10 layouts")
    print(f"{'format':14}{'bytes read / stored':>22}{'reads / bound':>16}  wrong elements of {10 * elements}")
    for each in formats:
        path = folder / (f"{each}.h5" if each == "hdf5" else each)
        ckpt = reshard.files.open(path)
        raw = all(piece.raw for stored in ckpt.values() for piece in stored.pieces)
        stored = sum(one.stored_bytes for one in ckpt.values()) if raw else sum(file.size for file in ckpt.files)
        pieces = sum(len(one.pieces) for one in ckpt.values())
        bound = (stored // READ_SIZE if raw else pieces) + processes * max(1, len(ckpt.files))
        cases = [name for name in every[0] if name.startswith(f"{each}, ")]
        totals = {
            name: {key: sum(one[name][key] for one in every) for key in ("bytes", "calls", "wrong")} for name in cases
        }
        most = max(total["bytes"] for total in totals.values()) / stored
        calls = max(total["calls"] for total in totals.values()) / bound
        print(f"{each:14}{most:22.3f}{calls:16.2f}  {sum(total['wrong'] for total in totals.values())}", flush=True)


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
    found = run_processes(method, given, python)
    return {
        "first": max(each["first"] for each in found),
        "again": max(each["again"] for each in found),
        "bytes": sum(each["bytes"] for each in found),
        "wrong": sum(each["wrong"] for each in found),
    }


def run_processes(method: str, given: dict[str, Any], python: str) -> list[dict[str, Any]]:
    """What each process of a method has found."""
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
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    found: list[dict[str, Any]] = []
    for process in started:
        out, errors = process.communicate(timeout=300)
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if process.returncode or not lines:
            raise SystemExit(f"{method}: {errors[-2000:]}")
        found.append(json.loads(lines[-1]))
    return found


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
    parser.add_argument("--check", action="store_true", help="every element of 10 layouts of 6 formats, untimed")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        given = json.loads(options.child)
        if "save" in given:
            save_by_orbax(given["save"], given["shapes"])
        elif given["method"] == "check":
            print(json.dumps(check_formats(given)))
        else:
            print(json.dumps(run_method(given)))
        return
    if options.check:
        print(
            f"seed {options.seed}: {options.processes} processes x {DEVICES // options.processes} devices", flush=True
        )
        with tempfile.TemporaryDirectory() as scratch:
            print_checks(Path(scratch), options.seed, options.processes, os.environ.get("RESHARD_TORCH"))
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

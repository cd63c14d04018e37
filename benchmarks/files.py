"""Loads of checkpoints beside their peers: bytes read over bytes stored, reads, peak memory, seconds; every element is
compared.

    python benchmarks/files.py                                      # 10 layouts x 6 formats x {numpy, 4 MPI ranks}
    python benchmarks/files.py --formats safetensors --mib 256 --repeats 3 --seed 7
    python benchmarks/files.py --check                              # all rows in few processes: every element, untimed
    python benchmarks/files.py --throttle                           # a store of 500 MB/s and 20 ms a request
    RESHARD_PEERS=.../bin/python RESHARD_TORCH=.../bin/python python benchmarks/files.py --formats orbax dcp

A model of some layers, its sizes drawn by the seed, lies in files in the page cache, written by the formats' own
libraries: Orbax's and torch's by Pythons that have them, where these are named, else by `reshard.files.save` and by the
tests' own writer. Each row is a process, or four ranks, of its own:

    egress    bytes that all read, over the bytes stored of what they read
    reads     calls of `preadv` and chunks, of all; the most that there may be: chunks, or bytes / read_size, and one
              for each reader and file
    peak      proportional set size (private and shared memory) above that before the load, of the worst process,
              over the plan's results and staging; modules are loaded before
    first     seconds of the first load of the process, imports before; `again` the median of the later ones
    peer      first and again, in four processes of their own: each rank's `get_slice` of what it needs (safetensors),
              Orbax's restore under `jax.distributed`, torch's `dcp.load` into DTensors (`files_peers.py`), and of the
              latter two the bytes that they read over those stored

`--throttle` reads safetensors through a token bucket that all ranks share, for 1, 2 and 4 replicas: seconds over
bytes / bandwidth; beside it what it takes if each rank reads what it needs.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import reshard as rs

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
MPIEXEC = (
    shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])) or "mpiexec"
)
FORMATS = ("safetensors", "npy", "dcp", "zarr", "orbax", "hdf5")
LAYOUTS = (
    "fsdp4", "tp4", "2xtp2", "4 replicas", "2 x 2", "columns", "cyclic", "uneven", "2 of 4", "transposed",
)  # fmt: skip
BANDWIDTH, LATENCY = 500e6, 20e-3
READ_SIZE = 1 << 20
PEERS = {"orbax": os.environ.get("RESHARD_PEERS"), "dcp": os.environ.get("RESHARD_TORCH")}
Shapes = dict[str, tuple[int, ...]]
Box = tuple[slice, ...]


def draw_shapes(seed: int, mib: int) -> Shapes:
    """The arrays of a model of about so many MiB in float32."""
    choose = random.Random(seed)
    width, heads = choose.choice([512, 768, 1024]), choose.choice([2, 4])
    wide = choose.choice([2, 3, 4]) * width
    layer = {"q": (width, width), "k": (width // heads, width), "v": (width // heads, width), "o": (width, width)}
    layer |= {"gate": (wide, width), "up": (wide, width), "down": (width, wide), "norm": (width,), "norm2": (width,)}
    shapes: Shapes = {"embed": (choose.choice([2, 4]) * width, width), "norm": (width,)}
    for number in range(1000):
        if sum(map(np.prod, shapes.values())) * 4 >= mib << 20:
            break
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def make_values(name: str, shape: Sequence[int]) -> np.ndarray:
    """Elements that say which tensor and which place they are of."""
    words = np.arange(np.prod(shape, dtype=np.int64), dtype="uint32") * np.uint32(2654435761)
    return (words + np.uint32(zlib.crc32(name.encode()))).view("float32").reshape(shape)


def choose_target(layout: str, name: str, shape: tuple[int, ...]) -> rs.Layout:
    """Where a tensor is wanted."""
    across = name.split(".")[-1] in ("o", "down")
    dims: list[list[str]] = [[] for _ in shape]
    mesh = rs.Mesh(a=2, b=2)
    both, one = ["a", "b"], (1 if across else 0) if len(shape) > 1 else 0
    match layout:
        case "fsdp4":
            dims[0] = both
        case "uneven":
            mesh, dims[0] = rs.Mesh({"a": 3}, device_ids=[0, 1, 2]), ["a"]
        case "tp4":
            dims[one] = both if len(shape) > 1 else []
        case "2xtp2":
            dims[one] = ["b"] if len(shape) > 1 else []
        case "2 x 2" if len(shape) > 1:
            dims = [["a"], ["b"]]
        case "columns":
            dims[-1] = both
        case "2 of 4":
            mesh, dims[0] = rs.Mesh({"a": 2}, device_ids=[1, 3]), ["a"]
        case "transposed":
            dims[0], shape = both, shape[::-1]
        case _:
            pass
    if layout == "cyclic":
        size = ", ".join([f"{shape[0] // 32}{{a}}{{b}}8", *map(str, shape[1:])])
        return rs.Layout.parse(f"f32[{size}]", mesh)
    return rs.Layout.from_spec(mesh, shape, "float32", dims)


def make_targets(layout: str, shapes: Shapes) -> dict[str, Any]:
    """What `rs.files.load` takes."""
    targets: dict[str, Any] = {name: choose_target(layout, name, shape) for name, shape in shapes.items()}
    if layout == "transposed":
        for name, shape in shapes.items():
            if len(shape) > 1:
                stored = rs.Layout.parse(f"f32[{', '.join(map(str, shape))}]", rs.Mesh(file=1))
                targets[name] = rs.Move(stored, targets[name], view="a b -> b a")
    return targets


# ---- files -----------------------------------------------------------------------------------------


def write_checkpoint(form: str, folder: Path, shapes: Shapes) -> None:
    """The model in a format, chunks of a quarter of the rows where it has chunks."""
    arrays = {name: make_values(name, shape) for name, shape in shapes.items()}
    chunks = {name: (-(-shape[0] // 4), *shape[1:]) for name, shape in shapes.items()}
    names = list(arrays)
    folder.mkdir(parents=True)
    if form == "safetensors":
        from safetensors.numpy import save_file

        homes = {name: f"model-{at * RANKS // len(names):05d}.safetensors" for at, name in enumerate(names)}
        for home in set(homes.values()):
            save_file({name: arrays[name] for name in names if homes[name] == home}, folder / home)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    elif form == "npy":
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
    elif PEERS.get(form):
        task = {"method": f"save {form}", "folder": str(folder), "values": str(folder.with_suffix(".npz"))}
        np.savez(task["values"], **arrays)
        task["dims"] = {name: [["a", "b"], *([] for _ in shape[1:])] for name, shape in shapes.items()}
        folder.rmdir()
        run_peer(form, task)
        os.unlink(task["values"])
    elif form == "dcp":
        from tests.files.dcp_maker import Chunk, Tensor, chunk_zip, write_dcp

        tensors = {}
        for name, array in arrays.items():
            step = chunks[name][0]
            parts = [array[at : at + step] for at in range(0, array.shape[0], step)]
            rest = (0,) * (array.ndim - 1)
            tensors[name] = Tensor(
                "float32",
                array.shape,
                [
                    Chunk((at * step, *rest), part.shape, f"__{at}_0.distcp", chunk_zip(part, "float32"))
                    for at, part in enumerate(parts)
                ],
            )
        write_dcp(folder, tensors)
    elif form == "zarr":
        import zarr

        group = zarr.open_group(str(folder), mode="w")
        for name, array in arrays.items():
            inner = (max(1, chunks[name][0] // 2), *array.shape[1:])
            shards = (2 * inner[0], *array.shape[1:])
            made = group.create_array(name, shape=array.shape, dtype="float32", chunks=inner, shards=shards)
            made[...] = array
    elif form == "hdf5":
        import h5py

        with h5py.File(folder / "model.h5", "w") as file:
            for at, (name, array) in enumerate(arrays.items()):
                how = {"chunks": chunks[name], "compression": "gzip", "compression_opts": 1} if at % 2 else {}
                file.create_dataset(name, data=array, **how)
    else:
        folder.rmdir()
        rs.files.save(folder, arrays, format="orbax", chunks=chunks, codec="zstd")


def path_of(form: str, folder: Path) -> Path:
    """What is opened."""
    return folder / "model.h5" if form == "hdf5" else folder


# ---- one process, or one rank ----------------------------------------------------------------------


class PeakWatch(threading.Thread):
    """The most private and shared memory that this process has had, shared pages by who shares them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stopped, self.base = threading.Event(), self.measure()
        self.most = self.base

    @staticmethod
    def measure() -> int:
        fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        return sum(int(fields[name].split()[0]) << 10 for name in ("Pss_Anon", "Pss_Shmem"))

    def run(self) -> None:
        while not self.stopped.wait(0.01):
            self.most = max(self.most, self.measure())

    def stop(self) -> int:
        self.stopped.set()
        self.join()
        return max(self.most, self.measure()) - self.base


class Throttle:
    """A store that all processes share: each request begins `LATENCY` later, and its bytes pass one behind another."""

    def __init__(self, path: Path) -> None:
        self.file, self.whole = os.open(path, os.O_RDWR | os.O_CREAT), os.preadv

    def take(self, nbytes: int) -> None:
        """Waits until so many bytes of a request have passed."""
        arrives = time.monotonic() + LATENCY
        fcntl.flock(self.file, fcntl.LOCK_EX)
        before = os.pread(self.file, 8, 0)
        free = max(arrives, struct.unpack("d", before)[0] if before else 0.0) + nbytes / BANDWIDTH
        os.pwrite(self.file, struct.pack("d", free), 0)
        fcntl.flock(self.file, fcntl.LOCK_UN)
        time.sleep(max(0.0, free - time.monotonic()))

    def preadv(self, file: int, buffers: Sequence[Any], at: int) -> int:
        count = self.whole(file, buffers, at)
        self.take(count)
        return count


def boxes_of(layout: rs.Layout, device: int) -> Box | None:
    """What a device needs of a tensor, if it is one box."""
    from reshard.types.meaning import meaning

    if device not in layout.mesh.devices:
        return None
    indices = zip(meaning(layout, device), layout.shape, strict=True)
    return tuple(slice(m[0], min(m[-1] + 1, size)) for m, size in indices)


def read_slices(folder: Path, boxes: dict[str, Box], throttle: Throttle | None) -> dict[str, np.ndarray]:
    """Each rank's own `get_slice`."""
    from safetensors import safe_open

    homes = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tiles: dict[str, np.ndarray] = {}
    for home in sorted(set(homes.values())):
        with safe_open(folder / home, "numpy") as opened:
            for name in (name for name in boxes if homes[name] == home):
                tiles[name] = opened.get_slice(name)[boxes[name]]
                if throttle is not None:
                    throttle.take(tiles[name].nbytes)
    return tiles


def compare_tiles(tiles: dict[str, Any], layout: str, shapes: Shapes, device: int | None) -> int:
    """How many elements are compared; raises for one that is wrong."""
    from reshard.types.meaning import meaning

    compared = 0
    for name, shape in shapes.items():
        target = choose_target(layout, name, shape)
        whole = make_values(name, shape).view("uint32")
        whole = whole.T if layout == "transposed" else whole
        of = tiles[name] if device is None else {device: tiles[name]}
        for at, tile in of.items():
            if at not in target.mesh.devices:
                assert tile is None
                continue
            indices = [np.array(m) for m in meaning(target, at)]
            inside = [m < size for m, size in zip(indices, whole.shape, strict=True)]
            want = whole[np.ix_(*(m[ok] for m, ok in zip(indices, inside, strict=True)))]
            got = np.ascontiguousarray(tile).view("uint32")
            np.testing.assert_array_equal(got[np.ix_(*inside)], want, f"{name} on {at}")
            assert not got.sum() or got[np.ix_(*inside)].sum(dtype="uint64") == got.sum(dtype="uint64"), "padding"
            compared += want.size
    return compared


def run_worker(task: dict[str, Any]) -> dict[str, Any]:
    """What one process measures."""
    comm: Any = None
    if task["runtime"] == "mpi":
        from mpi4py import MPI

        import reshard.mpi

        comm = MPI.COMM_WORLD
        _ = reshard.mpi.redistribute
    import reshard.mpi.loading
    from reshard.runtime.on_files import engine

    form, layout, shapes = task["format"], task["layout"], {n: tuple(s) for n, s in task["shapes"].items()}
    path, device = path_of(form, Path(task["folder"])), None if comm is None else comm.rank
    throttle = Throttle(Path(task["throttle"])) if task["throttle"] else None
    if throttle is not None:
        engine.os.preadv = throttle.preadv  # type: ignore[assignment]
    targets = make_targets(layout, shapes)
    goals = {} if comm is None or task["what"] != "slices" else targets
    boxes = {name: box for name, goal in goals.items() if (box := boxes_of(goal, comm.rank)) is not None}

    def barrier() -> None:
        if comm is not None:
            comm.Barrier()

    def measure(do: Callable[[], Any]) -> tuple[float, Any]:
        barrier()
        begun = time.perf_counter()
        made = do()
        barrier()
        return time.perf_counter() - begun, made

    if task["what"] == "peak":
        # Modules, and what ranks share whatever they load, are there.
        small = min(shapes, key=lambda name: np.prod(shapes[name]))
        rs.files.load(path, {small: make_targets("fsdp4", shapes)[small]}, comm=comm, rest="skip")
    seconds: list[float] = []
    counts = rs.files.ReadCounts()
    result: dict[str, Any] = {}
    for _ in range(task["repeats"] + 1):
        watch = None
        if task["what"] == "slices":
            took, tiles = measure(lambda: read_slices(path, boxes, throttle))
        else:
            counts = rs.files.ReadCounts()
            if task["what"] == "peak":
                watch = PeakWatch()  # It takes time of its own: such a load is not among the timed ones.
                watch.start()
            took, tiles = measure(
                lambda: rs.files.load(path, targets, comm=comm, counts=counts, budget=task["budget"], limit=300.0)  # noqa: B023
            )
        if watch is not None:
            result["peak"] = watch.stop()
        seconds.append(took)
    result |= {"seconds": seconds, "bytes": counts.bytes, "calls": counts.calls, "files": len(counts.files)}
    if task["what"] != "slices":
        result["compared"] = compare_tiles(tiles, layout, shapes, device)
        if comm is None or comm.rank == 0:
            devices = list(range(RANKS)) if comm is None else None
            plan = rs.files.plan_load(path, targets, devices=devices)
            ckpt = rs.files.open(path)
            pieces = [piece for stored in ckpt.values() for piece in stored.pieces]
            size = sum(max(0 if piece.raw else 1, -(-piece.nbytes // READ_SIZE)) for piece in pieces)
            readers = 1 if comm is None else RANKS
            result |= {"promised": plan.peak_bytes, "staged": plan.result_bytes + plan.staging_bytes}
            result |= {"stored": plan.stored_bytes, "most_reads": max(size, len(pieces)) + readers * len(ckpt.files)}
    return result


# ---- rows ------------------------------------------------------------------------------------------


def run_task(task: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a process, or of four ranks."""
    return run_tasks([task])[0]


def run_tasks(tasks: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The results of each of some tasks, which one process does, or the same four ranks do, one behind another."""
    task = tasks[0]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(tasks, file)
        file.flush()
        command = [sys.executable, __file__, "--worker", file.name]
        if task["runtime"] == "mpi":
            command = [MPIEXEC, "-n", str(RANKS), sys.executable, "-m", "mpi4py", *command[1:]]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(
            f"{task['format']}, {task['layout']}, {task['runtime']}:\n{done.stdout[-500:]}{done.stderr[-3000:]}"
        )
    made: list[list[dict[str, Any]]] = [[] for _ in tasks]
    for line in done.stdout.splitlines():
        if line.startswith("result "):
            _, number, text = line.split(" ", 2)
            made[int(number)].append(json.loads(text))
    return made


def run_peer(form: str, task: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of the processes of a format's own library has found."""
    count = 1 if task["method"] == "save orbax" else RANKS
    with socket.socket() as kept:
        kept.bind(("", 0))
        port = kept.getsockname()[1]
    env = {"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    if count == 1:
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={RANKS}"
    started: list[subprocess.Popen[str]] = []
    for process in range(count):
        given = json.dumps(task | {"processes": count, "process": process, "port": port})
        command = [str(PEERS[form]), str(ROOT / "benchmarks" / "files_peers.py"), given]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    ends = [process.communicate(timeout=300) for process in started]
    for process, (_, errors) in zip(started, ends, strict=True):
        if process.returncode:
            raise SystemExit(f"{task['method']}:\n{errors[-3000:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in ends if out]


def measure_row(task: dict[str, Any]) -> dict[str, Any]:
    """The figures of a row."""
    ranks = run_task(task)
    first = next(each for each in ranks if "stored" in each)
    row = {key: task[key] for key in ("format", "layout", "runtime")}
    row |= {"egress": sum(each["bytes"] for each in ranks) / first["stored"]}
    row |= {"reads": sum(each["calls"] for each in ranks), "most_reads": first["most_reads"]}
    watched = run_task(task | {"what": "peak", "repeats": 0})
    row |= {"peak": max(each["peak"] for each in watched), "staged": first["staged"], "promised": first["promised"]}
    row |= {"compared": sum(each["compared"] for each in ranks)}
    row |= {"first": ranks[0]["seconds"][0], "again": median(ranks[0]["seconds"][1:] or ranks[0]["seconds"])}
    if task["runtime"] != "mpi":
        return row
    peers: list[dict[str, Any]] = []
    if task["format"] == "safetensors" and task["layout"] not in ("cyclic", "transposed"):
        peers = run_task(task | {"what": "slices"})
    elif PEERS.get(task["format"]) and task["layout"] not in ("cyclic", "transposed", "uneven", "2 of 4"):
        goals = {name: choose_target(task["layout"], name, shape) for name, shape in task["shapes"].items()}
        dims = {name: name_dims(goal) for name, goal in goals.items()}
        keys = {key: task[key] for key in ("folder", "repeats", "shapes")}
        peers = run_peer(task["format"], {"method": f"load {task['format']}", "dims": dims, **keys})
        row |= {"peer_egress": sum(each["bytes"] for each in peers) / first["stored"]}
    if peers:
        worst = [max(times) for times in zip(*(each["seconds"] for each in peers), strict=True)]
        row |= {"peer_first": worst[0], "peer_again": median(worst[1:] or worst)}
    return row


def check_rows(tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Egress, reads and compared elements of each task; the memory of a process that did others says nothing."""
    rows: list[dict[str, Any]] = []
    for task, ranks in zip(tasks, run_tasks([task | {"repeats": 0} for task in tasks]), strict=True):
        first = next(each for each in ranks if "stored" in each)
        row = {key: task[key] for key in ("format", "layout", "runtime")}
        row |= {"egress": sum(each["bytes"] for each in ranks) / first["stored"]}
        row |= {"reads": sum(each["calls"] for each in ranks), "most_reads": first["most_reads"]}
        rows.append(row | {"compared": sum(each["compared"] for each in ranks)})
    return rows


def name_dims(layout: rs.Layout) -> list[list[str]]:
    """The mesh axes by which each dim is cut."""
    return [[digit.axis.axis for digit in dim.digits if digit.axis is not None] for dim in layout.dims]


def print_rows(rows: Sequence[dict[str, Any]], begins: bool) -> None:
    """Rows of a table, which begins with them or goes on; of checked rows the first columns alone."""
    timed = "first" in rows[0]
    names = ["format", "layout", "on", "egress", "reads (most)", "elements"]
    names += ["peak MiB / results + staging", "first s", "again s", "peer: first, again s, egress"] if timed else []
    if begins:
        print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in rows:
        cells = [row["format"], row["layout"], row["runtime"], f"{row['egress']:.4f}"]
        cells += [f"{row['reads']} ({row['most_reads']})", f"{row['compared']}"]
        if timed:
            peak, staged = row["peak"] / 2**20, row["staged"] / 2**20
            cells += [f"{peak:.1f} / {staged:.1f} = {peak / staged:.2f}", f"{row['first']:.3f}", f"{row['again']:.3f}"]
            peer = f"{row['peer_first']:.3f}, {row['peer_again']:.3f}" if "peer_first" in row else ""
            cells.append(peer + (f", {row['peer_egress']:.2f}" if "peer_egress" in row else ""))
        print(f"| {' | '.join(cells)} |", flush=True)


def measure_throttled(folder: Path, task: dict[str, Any], shapes: Shapes) -> None:
    """Seconds over bytes / bandwidth, for 1, 2 and 4 replicas."""
    total = sum(int(np.prod(shape)) * 4 for shape in shapes.values())
    print(
        f"{total / 2**20:.0f} MiB at {BANDWIDTH / 1e6:.0f} MB/s, {LATENCY * 1e3:.0f} ms a request: "
        f"{total / BANDWIDTH:.3f} s"
    )
    for replicas, layout in ((1, "tp4"), (2, "2xtp2"), (4, "4 replicas")):
        task |= {"layout": layout, "throttle": str(folder / f"bucket-{replicas}"), "repeats": 2}
        ranks = run_task(task)
        took, again, read = ranks[0]["seconds"][0], median(ranks[0]["seconds"][1:]), sum(e["bytes"] for e in ranks)
        each = run_task(task | {"what": "slices", "repeats": 0, "throttle": str(folder / f"peer-{replicas}")})[0][
            "seconds"
        ][0]
        calls = sum(rank["calls"] for rank in ranks)
        print(
            f"{replicas} replicas: {again:.3f} s = {again * BANDWIDTH / total:.3f} of it, the first {took:.3f} s; "
            f"{read / total:.4f} of the bytes in {calls} reads; each rank its slices {each:.3f} s = "
            f"{each * BANDWIDTH / total:.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument("--runtimes", nargs="+", default=("numpy", "mpi"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--budget", default=None)
    parser.add_argument("--throttle", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        for number, task in enumerate(json.loads(options.worker.read_text())):
            print(f"result {number} {json.dumps(run_worker(task))}\n", end="", flush=True)
        return
    shapes = draw_shapes(options.seed, options.mib)
    print(f"seed {options.seed}: {len(shapes)} tensors", file=sys.stderr)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    rows: list[dict[str, Any]] = []
    try:
        for form in ("safetensors",) if options.throttle else options.formats:
            write_checkpoint(form, folder / form, shapes)
            task = {"format": form, "folder": str(folder / form), "shapes": shapes, "what": "load", "throttle": None}
            task |= {"repeats": options.repeats, "budget": options.budget, "runtime": "mpi"}
            if options.throttle:
                measure_throttled(folder, task, shapes)
                return
            for runtime in options.runtimes:
                tasks = [task | {"layout": layout, "runtime": runtime} for layout in options.layouts]
                made = check_rows(tasks) if options.check else [measure_row(each) for each in tasks]
                print_rows(made, begins=not rows)
                rows += made
            shutil.rmtree(folder / form, ignore_errors=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

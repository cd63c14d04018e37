"""Saves that are killed, and saves on full disks: the checkpoint at the path is the old one or the new one, and whole.

    python benchmarks/save_kills.py --kills 200 --full 50 --seed 7
    python benchmarks/save_kills.py --kills 40 --full 20 --ranks 4 --format zarr

A kill: a process (with --ranks, one of the ranks, whose launcher ends the others) saves a version over the one before,
and gets SIGKILL at a random moment of that; what is there then is read by the format's own library and compared,
element by element, with both versions. A full disk: a tmpfs (this needs root) with room for the old version and some
of the new one; the save must raise `FileError` on every rank and leave the old version, or succeed. The save after
all kills must leave no other files than its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MPIEXEC = (
    shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])) or "mpiexec"
)
NAMES = ["layers.0.w", "layers.1.w", "embed", "norm", "bias"]
SHAPES = {"layers.0.w": (256, 192), "layers.1.w": (256, 192), "embed": (1024, 128), "norm": (64,), "bias": (4, 3)}
OWN_FILES = {"reshard.json", "model.safetensors.index.json"}


def make_arrays(version: int) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of which no element is alike in two versions."""
    return {
        name: (np.arange(np.prod(shape), dtype=np.float32) + 1000 * at + version / 8).reshape(shape)
        for at, (name, shape) in enumerate(SHAPES.items())
    }


def read_arrays(path: Path, format: str) -> dict[str, np.ndarray[Any, Any]]:
    """What the format's own library reads."""
    if format == "hdf5":
        import h5py

        with h5py.File(path, "r") as file:
            return {name: np.asarray(file[name]) for name in NAMES}
    if format in ("zarr", "zarr2"):
        import zarr

        group = zarr.open_group(path, mode="r")
        return {name: np.asarray(group[name]) for name in NAMES}
    import json

    from safetensors import safe_open

    if path.suffix == ".safetensors":
        homes = dict.fromkeys(NAMES, path.name)
        path = path.parent
    else:
        homes = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, home in homes.items():
        with safe_open(path / home, "np") as file:
            found[name] = file.get_tensor(name)
    return found


def which_version(path: Path, format: str, versions: list[int]) -> int | str:
    """The version that is there whole, or what is wrong."""
    import reshard as rs

    try:
        found = read_arrays(path, format)
    except Exception as error:  # Whatever the library finds, it found no checkpoint.
        return f"{type(error).__name__}: {error}"
    for version in versions:
        wanted = make_arrays(version)
        if found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted):
            # Ours must agree, checksums included: a sidecar of another save would refuse it.
            one = rs.Mesh(one=1)
            layouts = {
                name: rs.Layout.tiled(one, a.shape, "float32", [[] for _ in a.shape]) for name, a in wanted.items()
            }
            tiles = rs.files.load(path, layouts, devices=[0])
            good = all(np.array_equal(tiles[name][0], wanted[name]) for name in wanted)
            return version if good else "our own reader has other elements"
    return "elements of two versions, or of none"


def save_version(path: Path, format: str, version: int) -> None:
    """One save, by this process or by all ranks."""
    import reshard as rs

    arrays = make_arrays(version)
    options: dict[str, Any] = {"format": format, "limit": 20.0}
    if format == "safetensors":
        options["shards"] = "400kB"
    if "RANKS" not in os.environ:
        rs.files.save(path, arrays, **options)
        return
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    mesh = rs.Mesh(x=comm.size)
    layouts = {name: rs.Layout.from_spec(mesh, a.shape, "float32", [["x"]]) for name, a in arrays.items()}
    tiles: dict[str, Any] = {}
    for name, array in arrays.items():
        size = layouts[name].tile_shape[0]
        tiles[name] = array[comm.rank * size : (comm.rank + 1) * size]
    rs.files.save(path, tiles, layouts, comm=comm, **options)


def run_worker(path: Path, format: str, version: int) -> None:
    """The process that is killed: it says when it begins, and what came of it."""
    import reshard.files
    import reshard.files.save  # Its imports are not what is to be killed.

    if "RANKS" in os.environ:
        from mpi4py import MPI

        MPI.COMM_WORLD.barrier()
    os.write(1, f"begin {os.getpid()}\n".encode())
    start = time.perf_counter()
    try:
        save_version(path, format, version)
        print(f"\nsaved {time.perf_counter() - start:.6f} ", flush=True)
    except reshard.errors.FileError as error:
        print(f"\nrefused {error}", flush=True)
    except reshard.errors.ReshardError as error:
        print(f"\nother {type(error).__name__} {error}", flush=True)


def start_worker(path: Path, format: str, version: int, ranks: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--worker", str(path), format, str(version)]
    env = dict(os.environ)
    if ranks > 1:
        command, env["RANKS"] = [MPIEXEC, "-n", str(ranks), *command], str(ranks)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)


def wait_for_begin(worker: subprocess.Popen[str], ranks: int) -> list[int]:
    assert worker.stdout is not None
    pids = []
    while len(pids) < ranks:
        # Lines of several ranks may come without the ends between them.
        line = worker.stdout.readline()
        assert line, "the worker ended before it began"
        pids += map(int, re.findall(r"begin (\d+)", line))
    return pids


def check_clean(path: Path, format: str) -> str | None:
    """What is there beside the files of the last save."""
    beside = {path.name, f"{path.name}.reshard.json"}
    left = [each.name for each in path.parent.iterdir() if each.name not in beside]
    if format == "safetensors" and path.is_dir():
        import json

        homes = set(json.loads((path / "model.safetensors.index.json").read_text())["weight_map"].values())
        left += [each.name for each in path.iterdir() if each.name not in homes | OWN_FILES]
    return f"remains: {left}" if left else None


def end_worker(worker: subprocess.Popen[str]) -> str:
    try:
        said, _ = worker.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        worker.kill()
        return "hung"
    return said


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        run_worker(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--full", type=int, default=0, help="full disks, which need root")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--format", default="safetensors", help="safetensors, file (one of them), zarr, zarr2 or hdf5")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.format}, {given.ranks} process(es)")
    draw = random.Random(given.seed)
    format = "safetensors" if given.format == "file" else given.format
    ending = {"file": ".safetensors", "hdf5": ".h5"}.get(given.format, "")
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="save-kills-") as folder:
        path = Path(folder) / "disk" / f"checkpoint{ending}"
        path.parent.mkdir()
        worker = start_worker(path, format, 0, given.ranks)
        scale = max(map(float, re.findall(r"saved (\d+\.\d+)", end_worker(worker))))
        held = 0
        for number in range(1, given.kills + 1):
            worker = start_worker(path, format, number, given.ranks)
            pids = wait_for_begin(worker, given.ranks)
            # Around the moment of the commit, wherever that is on this machine now.
            time.sleep(draw.uniform(0.2, 1.5) * scale)
            with contextlib.suppress(ProcessLookupError):  # A rank that has saved already may be gone.
                os.kill(draw.choice(pids), signal.SIGKILL)
            end_worker(worker)
            for pid in pids:  # A launcher ends the other ranks sooner or later.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            there = which_version(path, format, [held, number])
            outcomes["old" if there == held else "new" if there == number else "TORN"] += 1
            if isinstance(there, str):
                faults.append(f"kill {number}: {there}")
                break
            scale *= 1.15 if there == held else 0.85
            held = there
        if given.kills:
            end_worker(start_worker(path, format, given.kills + 1, given.ranks))
            there = which_version(path, format, [given.kills + 1])
            fault = there if isinstance(there, str) else check_clean(path, format)
            faults += [f"the save after the kills: {fault}"] if fault else []
        print(f"kills: {dict(outcomes)}")
        full: Counter[str] = Counter()
        disk = Path(folder) / "small"
        disk.mkdir()
        size = sum(4 * int(np.prod(shape)) for shape in SHAPES.values())
        for number in range(given.full):
            room = size + 64_000 + int(draw.uniform(0, 1.15 * size))
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(disk)], check=True)
            try:
                at = disk / path.name
                end_worker(start_worker(at, format, 1, given.ranks))
                said = end_worker(start_worker(at, format, 2, given.ranks))
                # Ranks write at once: each line begins with a break of its own.
                ends = Counter(re.findall(r"(?m)^(saved|refused|other) ", said))
                there = which_version(at, format, [1, 2])
                if ends == {"refused": given.ranks} and there == 1:
                    full["refused, the old one whole"] += 1
                    fault = check_clean(at, format)
                elif ends == {"saved": given.ranks} and there == 2:
                    full["room enough"] += 1
                    fault = check_clean(at, format)
                else:
                    full["TORN"] += 1
                    fault = f"{dict(ends)}, {there}: {said[-600:]}"
                faults += [f"disk {number} of {room} B: {fault}"] if fault else []
            finally:
                subprocess.run(["umount", str(disk)], check=True)
        if given.full:
            print(f"full disks: {dict(full)}")
        shutil.rmtree(path, ignore_errors=True)
    for fault in faults:
        print("FAULT", fault)
    print("0 torn, nothing left behind" if not faults else f"{len(faults)} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()

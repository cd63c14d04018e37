"""New chunks beside rechunker, cubed and dask: what their plans move, and what runs take.

    python benchmarks/rechunk.py model --peers PYTHON [--problems 275] [--seed S]
    python benchmarks/rechunk.py real --peers PYTHON [--only N ...] [--repeat 3] [--folder /tmp] [--processes 4]

`--peers` is a Python that has rechunker, cubed, dask and distributed; this Python needs tensorstore and zarr.

`model` draws random arrays, chunks and memories, and compares the bytes that our plan reads and writes with those of
rechunker's plan, each of whose read blocks is counted once (it runs worse: its tasks are chunks of the store between).
Nothing is run. Chunks count in full. "short runs priced" counts runs of spill files, and chunks of rechunker's store
between, as 4 KiB at least, which is what our planner goes by. "coded" takes what compressed chunks need beside their
elements off the memory of both.

`real` runs eight problems of at most 256 MiB in fresh processes, all tools in turns: bytes by /proc/self/io, from the
call on; the peak of private and shared memory (Pss_Anon + Pss_Shmem, every 5 ms) above what the process had before the
call; seconds, the median, until the new store is on disk (the others' are synced behind their runs). Memory is watched
in a run of its own, which is not timed. Every element is compared with numpy's. dask has no limit of memory: "own+" is
our run with the memory that dask was seen to take. cubed compresses what it stores: its bytes are fewer by that.

With `--processes N` we run on N ranks of MPI, the others on N workers of their own kind. Then the peak is that of the
worst process, above what the first one had before; workers that start during the run read their libraries, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB = 1 << 20

PROBLEMS: list[dict[str, Any]] = [
    {"name": "maps to series", "shape": (1024, 256, 256), "old": (1, 256, 256), "new": (1024, 8, 8), "memory": 64},
    {"name": "the same, half", "shape": (1024, 256, 256), "old": (1, 256, 256), "new": (1024, 8, 8), "memory": 32},
    {"name": "rows to columns", "shape": (8192, 8192), "old": (64, 8192), "new": (8192, 64), "memory": 32},
    {"name": "squares, uneven", "shape": (8192, 8192), "old": (512, 512), "new": (500, 499), "memory": 64},
    {"name": "squares to stripes", "shape": (8192, 8192), "old": (1024, 1024), "new": (8192, 100), "memory": 64},
    {"name": "cubes to bricks", "shape": (256, 512, 512), "old": (64, 64, 64), "new": (16, 256, 64), "memory": 64},
    {
        "name": "ERA5-like, zstd",
        "shape": (1024, 180, 360),
        "old": (1, 180, 360),
        "new": (1024, 12, 15),
        "memory": 64,
        "codec": "zstd",
    },
    {"name": "months to years", "shape": (730, 180, 360), "old": (31, 90, 90), "new": (365, 20, 20), "memory": 24},
]
"""Elements are float32; memory is in MiB."""


def draw_problem(rng: random.Random) -> tuple[list[int], list[int], list[int], int, int]:
    """Shape, chunks before and after, bytes of an element, memory: 64 MiB to 1 TiB in chunks of 16 KiB and more."""
    while True:
        dims, itemsize = rng.randint(1, 4), rng.choice([1, 2, 4, 8])
        most = {1: 33, 2: 18, 3: 12, 4: 9}[dims]
        shape = [int(2 ** rng.uniform(3, most)) for _ in range(dims)]
        old, new = ([_draw_chunk(rng, size) for size in shape] for _ in range(2))
        nbytes = math.prod(shape) * itemsize
        larger, smaller = (pick(math.prod(old), math.prod(new)) * itemsize for pick in (max, min))
        if 64 * MIB <= nbytes <= 1 << 40 and smaller >= 16 << 10 and larger <= nbytes // 4:
            return shape, old, new, itemsize, int(larger * 2 ** rng.uniform(0.01, 6))


def _draw_chunk(rng: random.Random, size: int) -> int:
    return rng.choice([1, size, max(1, int(2 ** rng.uniform(0, math.log2(size)))), max(1, size // rng.randint(1, 8))])


def count_rechunker(problem: Sequence[Any], stages: Sequence[Sequence[Sequence[int]]], least_run: int) -> int:
    """Bytes that rechunker's plan reads and writes if each block is read once, in whole chunks.

    Chunks of its store between that are shorter than `least_run` cost as much, each time they are read or written.
    """
    shape, old, new, itemsize, _ = problem
    written = math.prod(-(-size // chunk) * chunk for size, chunk in zip(shape, new, strict=True))
    ((first, between, last),) = stages
    # The tasks of its only stage are the blocks that are written, if blocks that are read are these or smaller ones.
    if first in (last, between):
        return (count_read(shape, old, last) + written) * itemsize
    chunk = math.prod(between)
    pieces = math.prod(count_pieces(*each) for each in zip(shape, first, between, strict=True))
    total = (count_read(shape, old, first) + written) * itemsize + max(math.prod(shape) * itemsize, pieces * least_run)
    again = count_read(shape, between, last)
    return total + max(again * itemsize, again // chunk * least_run)


def count_pieces(size: int, one: int, other: int) -> int:
    """Into how many pieces two grids cut a dim."""
    return 1 + (size - 1) // one + (size - 1) // other - (size - 1) // math.lcm(one, other)


def count_read(shape: Sequence[int], chunks: Sequence[int], blocks: Sequence[int]) -> int:
    """Elements of whole chunks that are read block by block."""
    total = 1
    for size, chunk, block in zip(shape, chunks, blocks, strict=True):
        starts = range(0, size, block)
        if len(starts) > 100_000:  # In closed form: every boundary that is none of chunks reads one more.
            aligned = (len(starts) - 1) // (chunk // math.gcd(chunk, block))
            total *= chunk * (-(-size // chunk) + len(starts) - 1 - aligned)
        else:
            total *= chunk * sum(-(-min(size, start + block) // chunk) - start // chunk for start in starts)
    return total


def compare_model(options: argparse.Namespace) -> None:
    """Prints the ratios of traffic over random problems."""
    from reshard.plans.rechunk_plan import RechunkTask
    from reshard.synth.rechunking import plan_rechunking

    rng = random.Random(options.seed)
    problems = [draw_problem(rng) for _ in range(options.problems)]
    for what, least_run, buffers in (("bytes alone", 1, 0), ("short runs priced", 4096, 0), ("coded", 1, 2)):
        ratios: list[float] = []
        worse: list[str] = []
        more: list[int] = []
        slowest = 0.0
        larger = [max(math.prod(old), math.prod(new)) * itemsize for _, old, new, itemsize, _ in problems]
        # Of memory that holds no chunk with its bytes as stored and as decoded, neither has a plan.
        asked = [
            (*problem[:4], problem[4] - buffers * chunk)
            for problem, chunk in zip(problems, larger, strict=True)
            if problem[4] - buffers * chunk > chunk
        ]
        for problem, stages in zip(asked, call_peer(options.peers, "plan", asked), strict=True):
            shape, old, new, itemsize, room = problem
            beside = [buffers * math.prod(chunks) * itemsize for chunks in (old, new)]
            memory = room + max(beside)
            start = time.perf_counter()
            task = RechunkTask(tuple(shape), tuple(old), tuple(new), itemsize, memory, 1, *beside, least_run)
            plan = plan_rechunking(task)
            slowest = max(slowest, time.perf_counter() - start)
            assert plan.peak_bytes <= memory, problem
            other = count_rechunker(problem, stages, least_run)
            ratios.append(other / plan.priced_bytes)
            if plan.traffic_bytes > count_rechunker(problem, stages, 1):
                more.append(math.prod(stages[0][1]) * itemsize)
            if plan.priced_bytes > other:
                worse.append(f"    {plan.priced_bytes / other:.3f}  {problem}")
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(
            f"{what:18} {len(ratios)} problems, rechunker / own: geomean {mean:.3f}, most {max(ratios):.2f}, "
            f"own above in {len(worse)}, equal in {sum(abs(each - 1) < 1e-12 for each in ratios)}, "
            f"planned in at most {1000 * slowest:.0f} ms"
        )
        print("\n".join(worse[:8]), end="\n" if worse else "")
        if more:
            print(
                f"{'':18} own moves more bytes in {len(more)}, where the chunks of rechunker's store between have "
                f"{min(more)} to {max(more)} B"
            )


def call_peer(python: str, what: str, given: Any) -> Any:
    """What another Python answers to this script's `peer` command."""
    run = subprocess.run(
        [python, __file__, "peer", what], input=json.dumps(given), capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise SystemExit(f"{what}: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def answer_peer(what: str, given: Any) -> None:
    """Runs in a process of its own, by any Python: a tool on one problem, or rechunker's plans of many."""
    warnings.simplefilter("ignore")
    if what == "plan":
        from rechunker.algorithm import rechunking_plan

        plans = [
            [[[int(size) for size in chunks] for chunks in rechunking_plan(shape, old, new, itemsize, memory)]]
            for shape, old, new, itemsize, memory in given
        ]
        print(json.dumps(plans))
        return
    if what == "own" and given["processes"] > 1 and "rank" not in given:
        from reshard.mpi import launch

        raise SystemExit(launch(given["processes"], [__file__, "peer", "own", json.dumps(given | {"rank": True})]))
    run = {"own": run_own, "rechunker": run_rechunker, "cubed": run_cubed, "dask": run_dask}[what](given)
    base, peak, done = read_memory(), [0], threading.Event()
    before = {pid: read_traffic(pid) for pid in list_family(what)}
    after = dict(before)

    def watch() -> None:
        while not done.wait(0.005 if given["watch"] else 0.05):
            for pid in list_family(what):
                with contextlib.suppress(OSError, KeyError, IndexError):
                    after[pid] = read_traffic(pid)
                    if given["watch"]:
                        peak[0] = max(peak[0], read_memory(pid) - base)

    watcher = threading.Thread(target=watch, daemon=True)
    if given["watch"] or given["processes"] > 1:
        watcher.start()
    start = time.perf_counter()
    run()
    if what != "own":
        sync_tree(given["target"])
    seconds = time.perf_counter() - start
    after[os.getpid()] = read_traffic(os.getpid())
    done.set()
    if watcher.is_alive():
        watcher.join()
    traffic = sum(count - before.get(pid, 0) for pid, count in after.items())
    if "rank" in given:
        from mpi4py import MPI

        ranks = MPI.COMM_WORLD.gather((seconds, traffic, peak[0]))
        if ranks is None:
            return
        seconds, traffic, peak[0] = (
            max(each[0] for each in ranks),
            sum(each[1] for each in ranks),
            max(each[2] for each in ranks),
        )
    print(json.dumps({"seconds": seconds, "traffic": traffic, "peak": peak[0]}), flush=True)


def sync_tree(path: str) -> None:
    """Brings the files below a folder to disk, several at a time, as ours are."""

    def sync_file(file: str) -> None:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync_file, (str(each) for each in Path(path).rglob("*") if each.is_file())))


def list_family(what: str) -> list[int]:
    """This process, and those that it has started, if it is a peer's."""
    if what == "own":
        return [os.getpid()]
    import psutil

    return [os.getpid(), *(each.pid for each in psutil.Process().children(recursive=True))]


def read_memory(pid: int | str = "self") -> int:
    """Bytes of memory that are a process's: its own, and its share of shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))


def read_traffic(pid: int) -> int:
    """Bytes that a process has read and written by system calls."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"]) + int(fields["wchar"])


def run_own(given: dict[str, Any]) -> Callable[[], object]:
    """`reshard.files.rechunk`."""
    import reshard.files
    import reshard.runtime.on_files.drivers
    from reshard.runtime.on_files.formats.tensorstore_arrays import import_tensorstore

    import_tensorstore()
    comm: Any = None
    if "rank" in given:
        from mpi4py import MPI

        import reshard.mpi.rechunking

        comm = MPI.COMM_WORLD
        comm.barrier()
    return lambda: reshard.files.rechunk(
        given["source"], given["target"], chunks=tuple(given["new"]), memory=int(given["memory"] * MIB), comm=comm
    )


def run_rechunker(given: dict[str, Any]) -> Callable[[], object]:
    """rechunker, whose tasks dask runs on two threads, or on processes."""
    import dask
    import numcodecs
    import zarr
    from rechunker import rechunk

    count = given["processes"]
    dask.config.set(scheduler="threads" if count == 1 else "processes", num_workers=2 if count == 1 else count)
    source = zarr.open(given["source"], mode="r")
    coder = numcodecs.Zstd(level=1) if given.get("codec") else None
    plan = rechunk(
        source,
        tuple(given["new"]),
        f"{given['memory']}MiB",
        given["target"],
        target_options={"compressor": coder},
        temp_store=given["temp"],
        temp_options={"compressor": coder},
    )
    return plan.execute


def run_cubed(given: dict[str, Any]) -> Callable[[], object]:
    """cubed, with the memory allowed above what a process has before."""
    import cubed

    reserved = 0
    spec = cubed.Spec(given["temp"], allowed_mem=given["memory"] * MIB + reserved, reserved_mem=reserved)
    source = cubed.from_zarr(given["source"], spec=spec)
    executor = None
    if given["processes"] > 1:
        from cubed.runtime.create import create_executor

        executor = create_executor("processes", {"max_workers": given["processes"]})
    return lambda: cubed.to_zarr(source.rechunk(tuple(given["new"])), given["target"], executor=executor)


def run_dask(given: dict[str, Any]) -> Callable[[], object]:
    """dask, its rechunking from peer to peer, in this process or in workers; it takes the memory that it takes."""
    import dask
    import dask.array
    import numcodecs
    from distributed import Client

    dask.config.set({"temporary-directory": given["temp"], "distributed.worker.memory.target": False})
    dask.config.set({"distributed.worker.memory.spill": False, "distributed.worker.memory.pause": False})
    count = given["processes"]
    client = Client(
        processes=count > 1,
        n_workers=count,
        threads_per_worker=2 if count == 1 else 1,
        dashboard_address=None,
        memory_limit=0,
    )

    def run() -> None:
        with dask.config.set({"optimization.fuse.active": False}):
            source = dask.array.from_zarr(given["source"])
            coder = numcodecs.Zstd(level=1) if given.get("codec") else None
            dask.array.to_zarr(source.rechunk(tuple(given["new"]), method="p2p"), given["target"], compressor=coder)
        client.close()

    return run


def compare_real(options: argparse.Namespace) -> None:
    """Prints a row for each problem and tool."""
    import numpy as np
    import zarr

    rng = np.random.default_rng(options.seed)
    print(f"{'problem':20} {'memory':>7}  {'tool':10} {'units':>6} {'seconds':>8} {'peak':>10} {'wrong':>6}")
    for number, problem in enumerate(PROBLEMS):
        if options.only and number not in options.only:
            continue
        shape = problem["shape"]
        folder = Path(tempfile.mkdtemp(prefix="rechunk-", dir=options.folder))
        try:
            # Smooth in space and time, as weather is, so that a codec has something to do.
            data = rng.standard_normal(shape, dtype=np.float32)
            if problem.get("codec"):
                data = np.round(np.cumsum(0.1 * data, axis=0), 2)
            coder = {"id": "zstd", "level": 1} if problem.get("codec") else None
            options_of_zarr: dict[str, Any] = {"compressors": None}
            if coder is not None:
                import numcodecs

                options_of_zarr = {"compressors": numcodecs.Zstd(level=1)}
            source = zarr.create_array(
                folder / "source", shape=shape, chunks=problem["old"], dtype="float32", zarr_format=2, **options_of_zarr
            )
            source[...] = data
            results: dict[str, list[dict[str, Any]]] = {tool: [] for tool in options.tools}
            memory = dict.fromkeys(options.tools, problem["memory"])
            for number in range(options.repeat + 1):
                for tool in options.tools:
                    if tool == "own+" and results.get("dask"):
                        memory[tool] = max(problem["memory"], results["dask"][0]["peak"] // MIB)
                    given = problem | {each: str(folder / each) for each in ("source", "target", "temp")}
                    given |= {"memory": memory[tool], "processes": options.processes, "watch": not number}
                    own = tool.startswith("own")
                    result = call_peer(sys.executable if own else options.peers, "own" if own else tool, given)
                    found = zarr.open(folder / "target", mode="r")
                    assert found.chunks == problem["new"], found.chunks
                    result["wrong"] = int((found[...] != data).sum())
                    results[tool].append(result)
                    for each in ("target", "temp"):
                        shutil.rmtree(folder / each, ignore_errors=True)
            for tool, found in results.items():
                first = found[0]
                seconds = statistics.median(each["seconds"] for each in found[1:] or found)
                print(
                    f"{problem['name']:20} {memory[tool]:4} MiB  {tool:10} {first['traffic'] / data.nbytes:6.2f} "
                    f"{seconds:8.2f} {first['peak'] / MIB:6.0f} MiB {sum(each['wrong'] for each in found):6}",
                    flush=True,
                )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Reads the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["model", "real", "peer"])
    parser.add_argument("tool", nargs="?")
    parser.add_argument("given", nargs="?")
    parser.add_argument("--peers", default=os.environ.get("RESHARD_PEERS", sys.executable))
    parser.add_argument("--problems", type=int, default=275)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--tools", nargs="*", default=["own", "rechunker", "cubed", "dask", "own+"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.what == "peer":
        answer_peer(options.tool, json.loads(options.given) if options.given else json.load(sys.stdin))
        return
    print(f"seed {options.seed}")
    (compare_model if options.what == "model" else compare_real)(options)


if __name__ == "__main__":
    main()

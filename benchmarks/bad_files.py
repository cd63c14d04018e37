"""Bad files of every format (tests/files/bad_files.py, bad_chunks.py): the seconds and memory that a refusal takes.

    python benchmarks/bad_files.py              each is opened and loaded by one process
    python benchmarks/bad_files.py --ranks 4    each is loaded by that many MPI ranks, the slowest and largest counted

A case counts if `FileError` leaves it with the words that its list demands. Memory is the growth of the largest
resident set (VmHWM, reset before each case), so that of what is mapped or allocated and touched, in any library.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import reshard as rs
from reshard.errors import FileError
from tests.files.bad_chunks import BAD_CHUNKS
from tests.files.bad_files import BAD_FILES, BadFile


def read_status(field: str) -> int:
    """A field of this process's status, in KiB."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split(f"{field}:")[1].split()[0])


def load_bad(bad: BadFile, path: Path, comm: Any) -> str:
    """Opens and loads all tensors whole, on the first device; returns the error."""
    try:
        ckpt = rs.files.open(path)
        mesh = rs.Mesh(x=1)
        targets = {n: rs.Layout.from_spec(mesh, t.shape, t.dtype, [[]] * len(t.shape)) for n, t in ckpt.items()}
        source: Any = path
    except FileError as error:
        if comm is None:
            return str(error)
        source, targets = path, {"w": rs.Layout.parse("f32[4]", rs.Mesh(x=1))}
    try:
        rs.files.load(source, targets, **({"devices": [0]} if comm is None else {"comm": comm}))
    except FileError as error:
        return str(error)
    return ""


def measure_case(name: str, bad: BadFile, comm: Any) -> tuple[bool, float, float]:
    """Whether it is refused as it must be, seconds and MiB."""
    first = comm is None or comm.rank == 0
    with tempfile.TemporaryDirectory() as folder:
        path = bad.make(Path(folder)) if first else None
        if comm is not None:
            path = comm.bcast(path)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, begun = read_status("VmRSS"), time.perf_counter()
        message = load_bad(bad, path, comm)
        seconds, grown = time.perf_counter() - begun, (read_status("VmHWM") - before) / 1024
        if comm is not None:
            comm.Barrier()
    right = re.search(bad.says, message) is not None and str(Path(folder).parent) in message
    if not right:
        print(f"not refused as it must be: {name}: {message or 'loaded'}", flush=True)
    return right, seconds, grown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    comm: Any = None
    if options.ranks > 1:
        from reshard.mpi import launch

        return launch(options.ranks, [__file__, "--on-ranks"])
    if options.on_ranks:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    cases = {**BAD_FILES, **BAD_CHUNKS}
    for name in ("npy: an array of objects", next(iter(BAD_CHUNKS)), next(reversed(BAD_CHUNKS))):
        measure_case(name, cases[name], comm)  # Libraries are loaded by the first file of a format.
    measured = {name: measure_case(name, bad, comm) for name, bad in cases.items()}
    if comm is not None:
        every = comm.allgather(measured)
        measured = {name: tuple(map(max, zip(*(one[name] for one in every), strict=True))) for name in measured}
        refused = sum(all(one[name][0] for one in every) for name in measured)
    else:
        refused = sum(right for right, _, _ in measured.values())
    if comm is None or comm.rank == 0:
        slowest = max(measured, key=lambda name: measured[name][1])
        largest = max(measured, key=lambda name: measured[name][2])
        ranks = "1 process" if comm is None else f"{comm.size} ranks"
        print(
            f"{ranks}: {refused} of {len(measured)} refused by FileError; slowest {measured[slowest][1]:.3f} s "
            f"({slowest}), largest {measured[largest][2]:.1f} MiB ({largest})"
        )
    return 0 if refused == len(measured) else 1


if __name__ == "__main__":
    sys.exit(main())

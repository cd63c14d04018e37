"""Real programs under the pass inside XLA: compiled plain and with `reshard.jax.enable()`, each in its own process.

    python benchmarks/programs.py                                   # 8 CPU devices: compiled, run, compared
    python benchmarks/programs.py --target v5p                      # 8 chips of TPU v5p, ahead of time
    python benchmarks/programs.py --target v5p-256                  # 256 of them: the programs with that tag
    python benchmarks/programs.py --target h100                     # 8 H100s: the programs with that tag
    python benchmarks/programs.py --only zero_adamw,moe_layer --json rows.jsonl
    python benchmarks/programs.py --table rows.jsonl                # the tables of docs/developers/programs.md
    python benchmarks/programs.py --by-hand                         # programs that are written by hand as well
    python benchmarks/programs.py --random 300                      # random programs, in one process
    python benchmarks/programs.py --random 300 --processes 2        # in two, with gloo between them
    python benchmarks/programs.py --random 100 --target v5p         # compiled ahead of time, in large arrays
    python benchmarks/programs.py --random 300 --sums               # random sums between devices

The libraries are those of the extra `bench`. The models for Flax of transformers ended with 4.49, which wants older
tokenizers than tunix: pip install --no-deps transformers==4.49.0 tokenizers==0.21.4 huggingface-hub==0.36.0.
A program whose library is missing says so, and the others go on. H100s need what `benchmarks/aot.py` says.

Each row has, plain and with the pass: the bytes that a device receives (by `reshard.hlo`, and by a count of
`real_programs/counting.py` that shares no code with it), the peak (arguments, outputs and temporaries, less what is
aliased), CPU seconds to compile, the first time and once fragments are there; and what the pass replaced and left, with
the reasons. On CPU both programs run on the same data. The exit code is 1 if a program receives more, needs more
memory, has other results or is refused. A random program whose bits differ is compiled again with `same_bits=True`, and
must have the same ones then.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HERE = Path(__file__).resolve().parent
TARGETS = {"cpu": 8, "v5p": 8, "v5p-256": 256, "h100": 8}
_SECONDS = 3000
_SAME = 1e-5
"""How far results may differ, over the largest element, between programs that add up in another order."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", choices=tuple(TARGETS), default="cpu")
    parser.add_argument("--only", default="", help="names of programs, separated by commas")
    parser.add_argument("--json", type=Path, help="append one line for each program to this file")
    parser.add_argument("--table", type=Path, nargs="+", help="print the tables of such files, and compile nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--by-hand", action="store_true", help="compare with the same programs written by hand")
    parser.add_argument("--times", type=int, default=1, help="compile so often, and report the fewest seconds")
    parser.add_argument("--dump", type=Path, help="a folder for the programs' HLO, plain and with the pass")
    parser.add_argument("--random", type=int, help="compare so many random programs instead")
    parser.add_argument("--sums", action="store_true", help="random sums between devices, in any order as well")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first of them")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the 8 CPU devices")
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.table:
        from benchmarks.real_programs.tables import tables

        rows = [json.loads(line) for path in options.table for line in path.read_text().splitlines()]
        print(tables(rows))
        return 0
    _environment(options.target, options.processes)
    if options.random and options.number is None:
        return _compare_random(options)
    if options.random:
        from benchmarks.real_programs.measuring import devices
        from benchmarks.real_programs.random_programs import compile_programs, measure_programs

        seeds = range(options.first, options.first + options.random)
        if options.target == "cpu":
            rows = measure_programs(seeds, options.number, options.processes, options.port, options.sums)
        else:
            rows = compile_programs(seeds, devices(options.target))
        for row in rows:
            print(json.dumps(row), flush=True)
        return 0
    if options.child:
        from benchmarks.real_programs.measuring import measure_by_hand, measured

        if options.by_hand:
            print(json.dumps(measure_by_hand(options.child, options.target)))
        else:
            print(json.dumps(measured(options.child, options.target, options.dump, options.times)))
        return 0
    from benchmarks.real_programs.tables import compare_by_hand, line_of

    broken = 0
    for name in _names(options):
        row = _in_child(name, options)
        print(compare_by_hand(row) if options.by_hand else line_of(row), flush=True)
        broken += bool(row.get("error") or row.get("violations") or row.get("difference", 0) > _SAME)
        if options.json:
            with options.json.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
    return 1 if broken else 0


def _environment(target: str, processes: int) -> None:
    """What jax reads when it is imported."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would ask a server that only a TPU machine has
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if target == "cpu":
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={TARGETS[target] // processes}"


def _names(options: argparse.Namespace) -> list[str]:
    from benchmarks.real_programs import PROGRAMS
    from benchmarks.real_programs.base import BY_HAND, BY_HAND_SUFFIX

    if options.only:
        return options.only.split(",")
    if options.by_hand:
        return [name.removesuffix(BY_HAND_SUFFIX) for name, one in PROGRAMS.items() if BY_HAND in one.tags]
    tag = "" if options.target in ("cpu", "v5p") else options.target
    left_out = {BY_HAND, *(["cpu"] if options.target != "cpu" else [])}
    return [name for name, one in PROGRAMS.items() if (not tag or tag in one.tags) and not left_out & one.tags]


def _in_child(name: str, options: argparse.Namespace) -> dict[str, Any]:
    target = options.target
    command = [sys.executable, str(HERE / "programs.py"), "--child", name, "--target", target]
    command += ["--times", str(options.times), *(["--dump", str(options.dump)] if options.dump else [])]
    command += ["--by-hand"] if options.by_hand else []
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"program": name, "target": target, "error": f"it took more than {_SECONDS} s"}
    if done.returncode or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        why = f"missing: {last}" if "ModuleNotFoundError" in last else f"exit code {done.returncode}: {last}"
        return {"program": name, "target": target, "error": why}
    row = json.loads(done.stdout.strip().splitlines()[-1])
    return {**row, "child_seconds": round(time.perf_counter() - started, 1)}


def _compare_random(options: argparse.Namespace) -> int:
    """Random programs in processes of their own, which must agree; prints what is violated, and a summary."""
    from benchmarks.real_programs.tables import doctor_is_right

    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "programs.py"), "--random", str(options.random), "--first"]
    command += [str(options.first), "--processes", str(options.processes), "--port", str(port)]
    command += ["--target", options.target, *(["--sums"] if options.sums else []), "--number"]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(options.processes)]
        children: list[subprocess.Popen[bytes]] = []
        for number, path in enumerate(paths):
            with path.open("wb") as out:
                children.append(subprocess.Popen([*command, str(number)], stdout=out))
        try:
            broken = sum(child.wait() != 0 for child in children)
        finally:
            for child in children:
                child.kill()
        lines = [path.read_text().splitlines() for path in paths]
        rows = [[json.loads(line) for line in each if line.startswith("{")] for each in lines]  # gloo prints as well
    for same_seed in zip(*rows, strict=True):
        wrong = {text for row in same_seed for text in row["violations"]}
        print("".join(f"{same_seed[0]['program']}: {text}\n" for text in sorted(wrong)), end="", flush=True)
        broken += bool(wrong)
    received, peaks = ([sum(row[key][at] for row in rows[0]) for at in (0, 1)] for key in ("received", "peaks"))
    rounded = sum(any(row["rounded"] for row in same_seed) for same_seed in zip(*rows, strict=True))
    replaced = [row["replaced"] for row in rows[0]]
    words = [(row["could_save"], row["received"][0] - row["received"][1]) for row in rows[0]]
    wrong = [(row["seed"], *both) for row, both in zip(rows[0], words, strict=True) if not doctor_is_right(*both)]
    print(f"the doctor's word is what the pass saves in all but {len(wrong)} (seed, said, saved): {wrong}")
    print(
        f"{len(replaced)} random programs on {options.target} in {options.processes} processes: "
        f"{broken} violate what must hold, "
        f"{sum(replaced)} chains replaced in {sum(map(bool, replaced))}, {received[0]} -> {received[1]} B received, "
        f"{peaks[0]} -> {peaks[1]} B at their peaks; {rounded} have other bits without same_bits"
    )
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows[0]))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

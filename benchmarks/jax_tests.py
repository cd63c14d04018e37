"""JAX's own tests with this package in the place of JAX's moves, on 8 CPU devices.

    python benchmarks/jax_tests.py JAX/tests pjit_test array_test              # four ways, one after another
    python benchmarks/jax_tests.py JAX/tests pjit_test --ways compared -k Unreduced
    python benchmarks/jax_tests.py JAX/tests --table rows.jsonl                # the figures of rows written before

`JAX/tests` is the folder of a checkout of JAX near the installed version; tests that fail in plain jax are left out.

plain      as they are
compared   each `device_put`, `with_sharding_constraint` and `reshard` is made by JAX and by `redistribute`: values,
           dtypes, shardings and their spelling, types, memories, layouts and entries of jit's cache must be equal. The
           test goes on with JAX's result, so that one difference hides no other
dropin     the test goes on with `redistribute`'s result; what both refuse raises JAX's error
enabled    under `reshard.jax.enable()`

A test that hangs or ends the process is killed, written down, and the next one runs in a new process. Tests that look
at the text of a program or count primitives fail in the way "dropin", where the primitive has another name.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
import unittest
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("plain", "compared", "dropin", "enabled")
FILES = ("pjit_test", "array_test", "shard_map_test", "layout_test", "memories_test", "multi_device_test")
FILES += ("custom_partitioning_test", "shard_alike_test", "linalg_sharding_test", "ragged_collective_test")
FLAGS = "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=600"

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tests", type=Path, help="the folder of JAX's tests")
    parser.add_argument("files", nargs="*", default=FILES, help="test files without .py")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("-k", default="", help="only tests whose name has this text")
    parser.add_argument("--out", type=Path, default=Path("jax_tests.jsonl"), help="a row for each test and call")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds for one test")
    parser.add_argument("--table", type=Path, help="only print the figures of these rows")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return run_file(given.tests, given.files[0], *given.inside, given.out, given.k)
    if given.table is None:
        for file in given.files:
            for way in given.ways.split(","):
                watch_file(given, file, way)
    print_figures([json.loads(line) for line in (given.table or given.out).read_text().splitlines()])


def watch_file(given: argparse.Namespace, file: str, way: str) -> None:
    """Runs a file's tests one way, in as many processes as it takes."""
    environ = {**os.environ, "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    environ["PYTHONPATH"] = f"{ROOT}:{environ.get('PYTHONPATH', '')}"
    after, given.out = "", given.out.resolve()
    while True:
        command = [sys.executable, __file__, str(given.tests), file, "--inside", way, after]
        command += ["--out", str(given.out), "-k", given.k]
        size, seen = 0, time.monotonic()
        with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            while child.poll() is None:
                time.sleep(0.2)
                now = given.out.stat().st_size if given.out.exists() else 0
                size, seen = now, seen if now == size else time.monotonic()
                if time.monotonic() - seen > given.patience:
                    child.kill()
        last = json.loads(given.out.read_text().splitlines()[-1]) if given.out.exists() else {}
        if last.get("kind") != "start" or (last["file"], last["way"]) != (file, way):
            return
        after = last["test"]
        with given.out.open("a") as out:
            row = {
                "kind": "end",
                "file": file,
                "way": way,
                "test": after,
                "outcome": "killed",
                "error": child.returncode,
            }
            print(json.dumps(row), file=out)


# ---- inside a process ------------------------------------------------------------------------------


def run_file(tests: Path, file: str, way: str, after: str, out: Path, text: str) -> None:
    """Runs the tests of a file that come after one of this name."""
    sys.argv = [file]
    # Beside the installed package, from which the tests' own helpers come.
    sys.path.append(str(tests))
    import jax

    with out.open("a", buffering=1) as lines:

        def write(**row: Any) -> None:
            print(json.dumps({**row, "file": file, "way": way}), file=lines)

        calls = Calls(way, write)
        if way in ("compared", "dropin"):
            calls.replace_moves(jax)
        if way == "enabled":
            importlib.import_module("reshard.jax").enable()
        module = importlib.import_module(file)
        listed = list(flatten_suite(unittest.defaultTestLoader.loadTestsFromModule(module)))
        names = [name_test(test) for test in listed]
        listed = listed[names.index(after) + 1 :] if after else listed
        unittest.TestSuite(test for test in listed if text in name_test(test)).run(Result(calls, write))
        write(kind="done")


def flatten_suite(suite: Any) -> Any:
    for test in suite:
        yield from flatten_suite(test) if isinstance(test, unittest.TestSuite) else (test,)


def name_test(test: Any) -> str:
    """The name without the arguments of a parametrized test, whose text has addresses of objects."""
    return test.id().partition(" ")[0]


class Result(unittest.TestResult):
    """Writes a row when a test starts and one when it ends."""

    def __init__(self, calls: Calls, write: Any) -> None:
        super().__init__()
        self.calls, self.write, self.outcome, self.error = calls, write, "passed", ""

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self.calls.test, self.outcome, self.error = name_test(test), "passed", ""
        self.write(kind="start", test=name_test(test))

    def stopTest(self, test: Any) -> None:
        super().stopTest(test)
        self.write(kind="end", test=name_test(test), outcome=self.outcome, error=self.error)

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self.outcome = "skipped"

    def _note(self, error: Any) -> None:
        frames = traceback.extract_tb(error[2])
        ours = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "/reshard/" in frame.filename]
        at = [frame.lineno for frame in frames if frame.filename.endswith("_test.py")]
        text = str(error[1]).strip()[-900:]
        self.outcome, self.error = "failed", f"line {at[-1:]} ours {ours[-1:]} {error[0].__name__}: {text}"

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._note(err)

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._note(err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._note(err)


class Calls:
    """Stands in for JAX's moves and writes a row for each call."""

    def __init__(self, way: str, write: Any) -> None:
        self.way, self.write, self.test = way, write, ""
        self.local = threading.local()
        self.theirs: dict[str, Any] = {}

    def replace_moves(self, jax: Any) -> None:
        self.ours = importlib.import_module("reshard.jax").redistribute
        places = (
            ("device_put", jax, jax._src.api),
            ("with_sharding_constraint", jax.lax, jax._src.pjit),
            ("reshard", jax.sharding, jax),
        )
        for name, *modules in places:
            theirs = self.theirs[name] = getattr(modules[0], name)
            stand_in = functools.wraps(theirs)(functools.partial(self._call, name, theirs))
            for module in modules:
                if getattr(module, name, None) is theirs:
                    setattr(module, name, stand_in)

    def _call(self, name: str, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        call = read_call(name, args, kwargs)
        # What JAX itself calls on the way, and what this package does when a program is lowered.
        own = str(sys._getframe(1).f_globals.get("__name__")).startswith("reshard.")
        if call is None or own or getattr(self.local, "inside", False):
            return theirs(*args, **kwargs)
        self.local.inside = True
        try:
            return (self._compare if self.way == "compared" else self._stand_in)(name, theirs, args, kwargs, *call)
        finally:
            self.local.inside = False

    def _row(self, name: str, x: Any, target: Any, outcome: str, detail: str = "") -> None:
        frames = traceback.extract_stack()
        at = [frame.lineno for frame in frames if frame.filename.endswith("_test.py")][-1:]
        self.write(
            kind="call", test=self.test, call=name, at=at, outcome=outcome, detail=detail, move=say_move(x, target)
        )

    def _stand_in(self, name: str, theirs: Any, args: Any, kwargs: Any, x: Any, target: Any, options: Any) -> Any:
        try:
            return self.ours(x, target, **options)
        except Exception as error:
            theirs(*args, **kwargs)  # What JAX refuses as well raises its error.
            self._row(name, x, target, "refused", f"{type(error).__name__}: {error}"[:600])
            raise

    def _compare(self, name: str, theirs: Any, args: Any, kwargs: Any, x: Any, target: Any, options: Any) -> Any:
        import jax

        refusal: Exception | None = None
        wanted: Any = None
        said = say_move(x, target)
        try:
            # Of a copy where the array is donated, since ours needs it, too.
            copied = {**kwargs, "donate": False, "may_alias": False} if options.get("donate") else kwargs
            wanted = theirs(*args, **copied)
        except Exception as error:
            refusal = error
        try:
            got = self.ours(x, target, **options)
        except Exception as error:
            outcome = "both refuse" if refusal is not None else "refused"
            self._row(name, said, target, outcome, f"{type(error).__name__}: {error}"[:600])
            if refusal is not None:
                raise refusal from None
            return wanted
        if refusal is not None:
            self._row(name, said, target, "answered", f"{type(refusal).__name__}: {refusal}"[:600])
            raise refusal
        found = differences(jax, got, wanted)
        if not found:
            self._row(name, said, target, "equal")
        # JAX's three functions spell some results differently; one function can do it as one of them only.
        peers = [peer for peer in self.theirs if peer != name] if found else []
        for peer in peers:
            with contextlib.suppress(Exception):
                if not differences(jax, got, self.theirs[peer](x, target)):
                    self._row(name, said, target, f"as {peer}", "; ".join(f"{what} {detail}" for what, detail in found))
                    return wanted
        for what, detail in found:
            self._row(name, said, target, what, detail)
        return wanted


def read_call(name: str, args: Any, kwargs: Any) -> tuple[Any, Any, Row] | None:
    """What a call moves where, and our options; None where it asks for no move, or for what has no counterpart."""
    names = ("x", "device") if name == "device_put" else ("x", "shardings")
    names = ("xs", "out_shardings") if name == "reshard" else names
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if any(key not in given for key in names) or given.get("may_alias") is not None or given.get("src") is not None:
        return None
    donate = given.get("donate", False)
    if not isinstance(donate, bool) or given[names[1]] is None:
        return None
    return given[names[0]], given[names[1]], {"donate": True} if donate else {}


def say_move(x: Any, target: Any) -> str:
    if isinstance(x, str):
        return x
    kind = getattr(getattr(x, "aval", None), "str_short", lambda: type(x).__name__)()
    return f"{type(x).__name__} {kind} {getattr(x, 'sharding', '-')} -> {target!r}"[:500]


def differences(jax: Any, ours: Any, theirs: Any) -> list[tuple[str, str]]:
    """What differs between two trees of results, as (what, detail)."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return [each for pair in pairs for each in differing_parts(jax, *pair)]


def differing_parts(jax: Any, ours: Any, theirs: Any) -> Any:
    if isinstance(ours, jax.core.Tracer) != isinstance(theirs, jax.core.Tracer):
        yield "kind", f"{type(ours).__name__}, not {type(theirs).__name__}"
        return
    mine, its = jax.typeof(ours), jax.typeof(theirs)
    if mine != its or repr(mine) != repr(its):
        yield "type", f"{mine!r} {getattr(mine, 'sharding', '')}, not {its!r} {getattr(its, 'sharding', '')}"
    if isinstance(ours, jax.core.Tracer):
        return
    if ours.sharding != theirs.sharding or repr(ours.sharding) != repr(theirs.sharding):
        same = ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
        yield "spelling" if same else "WRONG sharding", f"{ours.sharding!r}, not {theirs.sharding!r}"
    for what in ("committed", "weak_type", "format.layout"):
        mine, its = (
            functools.reduce(lambda at, part: getattr(at, part, None), what.split("."), x) for x in (ours, theirs)
        )
        if mine != its:
            yield what, f"{mine}, not {its}"
    if read_shards(jax, ours) != read_shards(jax, theirs):
        yield "WRONG", f"{ours} {theirs}"[:500]
    traced: list[int] = []
    f = jax.jit(lambda v: (traced.append(1), v)[1])
    with contextlib.suppress(Exception):
        f(theirs)
    if f._cache_size():  # Under the mesh that is set some results are of no use, JAX's as little as ours.
        try:
            f(ours)
        except Exception as error:
            yield "unusable", f"{error}"[:300]
        if f._cache_size() > 1 or len(traced) > 1:
            yield "cache", f"{f._cache_size()} entries, traced {len(traced)} times"


def read_shards(jax: Any, x: Any) -> Any:
    import numpy as np

    x = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return sorted(
        (s.device.id, s.data.shape, str(s.data.dtype), np.asarray(s.data).tobytes()) for s in x.addressable_shards
    )


# ---- figures ---------------------------------------------------------------------------------------


def print_figures(rows: list[Row]) -> None:
    plain = {(r["file"], r["test"]): r["outcome"] for r in rows if r["kind"] == "end" and r["way"] == "plain"}
    tests: dict[str, Counter[str]] = defaultdict(Counter)
    calls: dict[str, Counter[str]] = defaultdict(Counter)
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "end":
            tests[f"{row['way']:10} {row['file']}"][row["outcome"]] += 1
            worse = row["outcome"] in ("failed", "killed") and plain.get((row["file"], row["test"])) == "passed"
            if worse:
                tests[f"{row['way']:10} {row['file']}"]["worse than plain"] += 1
                print(f"{row['way']} fails {row['test']}: {row['error']}"[:700])
        if row["kind"] == "call":
            calls[f"{row['way']:10} {row['call']}"][row["outcome"]] += 1
            if row["outcome"] not in ("equal", "both refuse"):
                kinds[f"{row['outcome']} of {row['call']} at {row['file']} {row['at']}"].append(row)
    for kind, its in sorted(kinds.items()):
        print(f"{kind}, {len(its)} times: {its[0]['move']}: {its[0]['detail']}"[:700])
    for title, table in (("tests", tests), ("calls", calls)):
        print(title)
        for name, counts in sorted(table.items()):
            print(f"  {name}: {', '.join(f'{what} {count}' for what, count in sorted(counts.items()))}")


if __name__ == "__main__":
    main()

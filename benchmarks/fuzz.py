"""Random moves, each checked against an oracle of its own: what is wrong is printed with the line that repeats it.

    python benchmarks/fuzz.py --seed 1 --moves 10000
    python benchmarks/fuzz.py --seed 1 --start 10000 --seconds 3600
    python benchmarks/fuzz.py --seed 1 --kinds moves,trees
    python benchmarks/fuzz.py --seed 1 --kinds transfers    wrong lists of transfers (`fuzz_transfers`)
    python benchmarks/fuzz.py --seed 1 --kinds fused        trees of JAX arrays that are fused, split and tied
    python benchmarks/fuzz.py --seed 1 --programs 2000      wrong programs of all kinds instead (`fuzz_programs`)

Of four moves, one is between random layouts of one array, taken in by any entry, on one set of devices (`layouts`),
one has a view and a cast between any two sets of devices (`moves`), one moves only what devices that hold another
layout lack, or what has changed since (`updates`), and one is a tree (`trees`); all with random options. Checked are

    layouts     shape, tiles and meaning, by the definition of each notation (`fuzz_layouts`)
    elements    the plan runs on numpy, and every device has the elements that the target means (`fuzz_oracle`)
    bytes       the lower bound, worked out anew; at the bound without a budget; the program's lists, counted
    memory      within the plan's promise, by the runtime's account and, sampled, by Python's allocator
    budgets     kept; a refused one is refused for a reason: the smallest works
    proofs      sampled: the plan is proved, and a program with a planted fault that shows is not
    sources     no tile that was given is written to
    bad input   sampled: text and JSON with small changes: a `ReshardError`, or something that is right by itself

Move number n of a seed is the same in every run, whatever comes before it. `RATES` says which share of the moves the
sampled checks see; how often each was made stands at the end.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import reshard as rs
from benchmarks import fuzz_moves, fuzz_programs, fuzz_transfers
from benchmarks.fuzz_faults import mutated_json, mutated_program, mutated_text
from benchmarks.fuzz_layouts import COUNTS as DEVICES
from benchmarks.fuzz_layouts import SIZES, Given, any_given, finished
from benchmarks.fuzz_oracle import (
    WrongError,
    check_figures,
    check_tiles,
    fitted,
    marks,
    must,
    needed,
    own,
    source_tiles,
    traced,
    wire,
)
from reshard.errors import BudgetError, PlanError, ProofError, ReshardError, UndecidedError
from reshard.lower import lower_plan
from reshard.runtime import Account, run
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.types import dtypes
from reshard.types.meaning import meaning

DTYPES = ("int32", "int32", "int64", "int64", "float32", "bfloat16", "uint8", "int4")
NETWORKS = ("tpu-v5p", "h100", "ethernet-100g")
RATES = {"JSON": 0.25, "bad text": 0.1, "bad JSON": 0.1, "no padding": 0.1, "proof": 0.02, "allocator": 0.005}
"""How often the checks are made that cost more than what they look at: a share of all moves."""

MADE: Counter[str] = Counter()
"""How often each check was made in this process."""

MOST_ELEMENTS = (500, 500, 2_000, 2_000, 20_000)
"""The most elements of an array, one of these at random."""

ALLOWANCE = 200_000
"""Bytes that Python itself may take beside the tiles while memory is traced."""


@dataclass(frozen=True)
class Case:
    """One move: its number, both layouts as given, and the options of the plan."""

    source: Given
    target: Given
    dtype: str
    options: dict[str, Any]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.source.text}\n  -> {self.target.text}\n  {self.dtype} {options}"


def case(choose: random.Random) -> Case:
    """A random move."""
    count = choose.choice(DEVICES)
    devices = list(range(count)) if choose.random() < 0.75 else sorted(choose.sample(range(50), count))
    partial, started = (0.9 if choose.random() < 0.2 else 0.0), choose.random() < 0.05
    dtype = choose.choice(DTYPES[:5]) if partial or started else choose.choice(DTYPES)
    shape: list[int] = []
    most = choose.choice(MOST_ELEMENTS)
    for _ in range(choose.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))):
        size = choose.choice(SIZES)
        shape.append(size if math.prod([*shape, size]) <= most else 2)
    source = any_given(choose, devices, shape, dtype, partial)
    if started:
        target = any_given(choose, devices, shape, dtype, 0.9)
    else:
        target = finished(choose, source, dtype) if partial else any_given(choose, devices, shape, dtype)
    return Case(source, target, dtype, _options(choose))


def _options(choose: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if choose.random() < 0.3:
        options["network"] = choose.choice(NETWORKS)
    if choose.random() < 0.3:
        options["donate"] = True
    if choose.random() < 0.4:
        options["slack"] = choose.choice((0, 0.0, 0.01, 0.5))
    if choose.random() < 0.4:
        options["budget"] = choose.choice((0.3, 0.7, 1.0, 1.1, 1.3, 1.7, 3.0))  # of source and target, see `planned`
    return options


def _now(choose: random.Random, check: str) -> bool:
    """Whether this move is one of those for which a check is made, which counts it."""
    now = choose.random() < RATES.get(check, 1)
    MADE[check] += now
    return now


def check(choose: random.Random) -> str:
    """Makes a move of one array on one set of devices and checks it; returns its kind, or raises `WrongError`."""
    try:
        made = case(choose)
    except Exception as error:
        raise WrongError(f"the fuzzer itself failed: {traceback.format_exc()}") from error
    try:
        return _checked(choose, made)
    except Exception as error:
        if isinstance(error, WrongError):
            raise WrongError(f"{error}\n  {made}") from None
        raise WrongError(f"{traceback.format_exc(limit=-5)}\n  {made}") from None


def _checked(choose: random.Random, made: Case) -> str:
    layouts = [given.make() for given in (made.source, made.target)]
    for given, layout in zip((made.source, made.target), layouts, strict=True):
        check_layout(given, layout, made.dtype)
        MADE["layout"] += 1
    source, target = layouts
    try:
        plan = planned(source, target, dict(made.options))
    except PlanError as error:
        if target.partial and "mean" in (source.reduction, target.reduction) and "mean" in str(error):
            return "refused mean"  # Which divides by the number of summands, and cannot be started.
        raise
    if _now(choose, "bad text"):
        check_bad_text(choose, source)
    if plan is None:
        return "refused budget"
    check_bytes(made, plan)
    check_figures(plan)
    check_run(choose, made, plan)
    MADE.update(("elements", "bytes", "memory"))
    if _now(choose, "JSON"):
        must(rs.Plan.from_json(plan.to_json()) == plan, "the plan is another one after JSON")
    if _now(choose, "bad JSON"):
        check_bad_json(choose, made, plan)
    if _now(choose, "proof"):
        check_proof(choose, made, plan)
    return ", ".join(sorted({step.kind for step in plan.steps})) or "nothing to do"


def check_layout(given: Given, layout: rs.Layout, dtype: str) -> None:
    """Compares a layout with what it was made from."""
    must(layout.shape == given.shape and layout.dtype == dtype, "{} has shape {}", layout, layout.shape)
    must(set(layout.mesh.devices) == set(given.indices), "{} is on devices {}", layout, layout.mesh.devices)
    for device, indices in given.indices.items():
        wanted = fitted(indices, layout.tile_shape)
        for index, along, size in zip(wanted, meaning(layout, device), layout.shape, strict=True):
            real = [at if at < size else -1 for at in along]
            must(index.tolist() == real, "{}: device {} means {}, not {}", layout, device, real, index)
    must(rs.Layout.parse(str(layout), layout.mesh) == layout, "{} is another layout once it is read back", layout)


def _sums_change(source: rs.Layout, target: rs.Layout) -> bool:
    """Whether sums are finished or started, which may take more memory than source and target."""
    same = source.mesh == target.mesh and source.reduction == target.reduction
    return source.partial != target.partial or bool(source.partial and not same)


def planned(source: rs.Layout, target: rs.Layout, options: dict[str, Any]) -> rs.Plan | None:
    """The plan, or None if its budget is refused as it must be."""
    share = options.pop("budget", None)
    if share is None:
        return rs.plan(source, target, **options)
    budget = int(share * (source.tile_bytes + target.tile_bytes))
    try:
        plan = rs.plan(source, target, budget=budget, **options)
    except BudgetError as error:
        must(error.smallest > budget, "budget {} is refused, but {} would do", budget, error.smallest)
        least = rs.plan(source, target, budget=error.smallest, **options)
        must(least.peak_bytes <= error.smallest, "a budget of {}, a peak of {}", error.smallest, least.peak_bytes)
        even = source.even and target.even
        floor = source.tile_bytes + target.tile_bytes
        must(budget < floor or _sums_change(source, target), "{} is the floor of {}: even={!r}", budget, floor, even)
        return None
    must(plan.peak_bytes <= budget, "a budget of {}, a peak of {}", budget, plan.peak_bytes)
    return plan


def check_bytes(made: Case, plan: rs.Plan) -> None:
    """Compares the bytes with the bound, which is worked out anew."""
    sums_over_idle_axes = plan.source.partial and plan.idle_axes  # Equal summands: the bound is of plans without.
    below = plan.received_bytes < plan.lower_bound_bytes and not sums_over_idle_axes
    must(not below, "{} B are below the bound: {}", plan.received_bytes, plan)
    ends = [(end.partial, end.reduction, end.partial and end.mesh) for end in (plan.source, plan.target)]
    if ends[0] != ends[1]:  # Summands are made or combined, or counted in two orders: each device has its own.
        return
    bound = dtypes.nbytes(needed(made.source, made.target), made.dtype)
    must(plan.lower_bound_bytes == bound, "the bound is {} B, not {}", bound, plan.lower_bound_bytes)
    if "network" in made.options or "budget" in made.options:
        return
    even = plan.source.even and plan.target.even
    most = bound if even else bound * (1 + made.options.get("slack", 0.05))
    must(plan.received_bytes <= most, "{} B received, {} would do: {}", plan.received_bytes, bound, plan)
    largest = max(plan.source.tile_bytes, plan.target.tile_bytes)
    must(all(step.result.tile_bytes <= largest for step in plan.steps), "a tile of more than {} B: {}", largest, plan)


def check_run(choose: random.Random, made: Case, plan: rs.Plan) -> None:
    """Runs the plan, and compares elements, bytes and memory."""
    whole = marks(made.source.shape, numpy_dtype(made.dtype))
    tiles = source_tiles(choose, made.source, plan.source.tile_shape, whole)
    kept = {device: tile.copy() for device, tile in tiles.items()}
    account, program = Account(made.dtype), lower_plan(plan)
    moved = run(program, tiles, account)
    check_tiles(made.target, plan.target.tile_shape, whole, moved)
    must(all(np.array_equal(tiles[d], kept[d]) for d in kept), "a source's tile was written to")
    counted = {device: elements for device, elements in wire(program).items() if elements}
    must(
        counted == {d: n for d, n in account.elements.items() if n}, "received {}, listed {}", account.elements, counted
    )
    received = max((dtypes.nbytes(n, made.dtype) for n in counted.values()), default=0)
    must(received <= plan.received_bytes, "{} B are received, {} promised", received, plan.received_bytes)
    must(account.peak_bytes <= plan.peak_bytes, "{} B are live, {} promised", account.peak_bytes, plan.peak_bytes)
    must(account.launches == plan.launches, "{} launches, {} promised", account.launches, plan.launches)
    if _now(choose, "no padding"):
        check_unpadded(made, plan, tiles, moved)
    in_place = any(step.mode.in_place for step in plan.steps)  # On numpy, slots are listed element by element.
    if not in_place and _now(choose, "allocator"):
        # The result and the operand of every device, and two more of one device in hand; int4 takes a byte in numpy.
        promised = plan.peak_bytes * (2 if made.dtype == "int4" else 1) * (len(tiles) + 2)
        most = traced(lambda: run(program, tiles))
        must(most <= promised + ALLOWANCE, "{} B were allocated, {} promised", most, promised)


def check_unpadded(made: Case, plan: rs.Plan, tiles: dict[int, np.ndarray], padded: Mapping[int, np.ndarray]) -> None:
    """Gives tiles without padding, in the other byte order, and compares what comes out with the padded result."""
    dtype = numpy_dtype(made.dtype)
    order = "S" if dtype.kind in "iuf" and dtype.isbuiltin == 1 else "="
    own = {d: _cut(tile, made.source.indices[d]).astype(dtype.newbyteorder(order)) for d, tile in tiles.items()}
    for device, tile in rs.simulate(plan, own, padded=False).items():
        wanted = _cut(padded[device], made.target.indices[device])
        must(
            tile.shape == wanted.shape and np.array_equal(tile, wanted),
            "device {} has {}, not {}",
            device,
            tile,
            wanted,
        )


def _cut(tile: np.ndarray, indices: tuple[np.ndarray, ...]) -> np.ndarray:
    """The elements of a tile."""
    return tile[tuple(slice(int((index >= 0).sum())) for index in indices)]


def check_bad_text(choose: random.Random, layout: rs.Layout) -> None:
    """Text with small changes is refused, or is a layout that survives being written and read."""
    text = mutated_text(choose, str(layout))
    spec = mutated_text(choose, "[{'x', 'y':(1)2}, {}], unreduced={'z'}".replace("'", '"'))
    hlo = mutated_text(choose, "{devices=[2,2,2]<=[4,2]T(1,0) last_tile_dim_replicate}")
    jax = mutated_text(choose, "P(('x', 'y'), None, unreduced={'z'})")
    axes = mutated_text(choose, str(layout.mesh))
    shape, dtype, mesh = layout.shape, layout.dtype, layout.mesh
    entries: list[Callable[[], Any]] = [
        lambda: rs.Layout.parse(text, mesh),
        lambda: rs.Layout.from_shardy(spec, mesh, shape, dtype),
        lambda: rs.Layout.from_hlo(hlo, shape, dtype),
        lambda: rs.Layout.from_jax_text(jax, mesh, shape, dtype),
        lambda: rs.Mesh.parse(axes),
        lambda: rs.Layout.from_dtensor([mutated_text(choose, "_S(0, 2)"), "S(0)"], (2, 2), shape, dtype),
    ]
    for entry in entries:
        try:
            read = entry()
        except ReshardError:
            continue
        if isinstance(read, rs.Layout):
            must(
                rs.Layout.parse(str(read), read.mesh) == read,
                "{}, read from {!r}, is not written as itself",
                read,
                text,
            )


def check_bad_json(choose: random.Random, made: Case, plan: rs.Plan) -> None:
    """JSON with small changes is refused, or is a plan that runs right."""
    text = mutated_json(choose, plan.to_json())
    try:
        other = rs.Plan.from_json(text)
    except ReshardError:
        return
    must(rs.Plan.from_json(other.to_json()) == other, "a plan read from {} is not written as itself", text)
    if other == plan:
        return
    whole = marks(other.source.shape, numpy_dtype(other.source.dtype))
    if not (whole.size <= MOST_ELEMENTS[-1] and other.source.mesh.size <= 64) or other.source.reduction == "mean":
        return
    source, target = own(other.source), own(other.target)
    tiles = source_tiles(choose, source, other.source.tile_shape, whole)
    check_tiles(target, other.target.tile_shape, whole, rs.simulate(other, tiles))


def check_proof(choose: random.Random, made: Case, plan: rs.Plan) -> None:
    """The plan is proved; a program with a fault that shows is refused."""
    program = lower_plan(plan)
    rs.prove(plan)
    faulty = mutated_program(choose, program)
    if faulty is None or _right(choose, made, plan, faulty):
        return
    try:
        rs.prove(plan, faulty)
    except (ProofError, UndecidedError):
        return
    raise WrongError(f"a wrong program is proved: {faulty.instructions}")


def _right(choose: random.Random, made: Case, plan: rs.Plan, program: Any) -> bool:
    whole = marks(made.source.shape, numpy_dtype("int64"))
    wide = type(program)(**{**vars(program), "dtype": "int64"})
    try:
        tiles = source_tiles(choose, made.source, plan.source.tile_shape, whole)
        check_tiles(made.target, plan.target.tile_shape, whole, run(wide, tiles))
    except Exception:  # A program that does not even run is wrong.
        return False
    return True


def _check_with_view(
    choose: random.Random, check: Callable[[random.Random], tuple[str, rs.Plan | None]] = fuzz_moves.check_move
) -> str:
    """Makes a move with a view between any two sets of devices, checks it, and sometimes proves it."""
    kind, plan = check(choose)
    if plan is not None and _now(choose, "proof"):
        rs.prove(plan)
    return kind


KINDS: dict[str, Callable[[random.Random], str]] = {
    "layouts": check,
    "moves": _check_with_view,
    "trees": fuzz_moves.check_tree,
    "updates": partial(_check_with_view, check=fuzz_moves.check_update),
    "transfers": fuzz_transfers.check_transfers,
}
"""What is fuzzed, by name; `MIX` says in which turn."""

MIX = ("layouts", "moves", "updates", "trees")


def check_fused(choose: random.Random) -> str:
    """A tree of JAX arrays on eight virtual devices, whose targets name their sources."""
    import_module("tests.conftest")  # It sets what jax reads when it is imported.
    from tests.jax import fused

    fused.check_case(fused.draw_case(choose), donate=choose.random() < 0.5, budget=choose.choice([None, "1MiB"]))
    return "fused"


KINDS["fused"] = check_fused


def fuzz(
    seed: int,
    start: int = 0,
    moves: int | None = None,
    seconds: float | None = None,
    kinds: Sequence[str] = MIX,
) -> Iterator[tuple[int, str]]:
    """The number of each move and the kind that it was; text that starts with "wrong" says what is wrong."""
    begun, number = time.monotonic(), start
    while (moves is None or number < start + moves) and (seconds is None or time.monotonic() - begun < seconds):
        try:
            yield number, KINDS[kinds[number % len(kinds)]](random.Random(f"{seed}/{number}"))
        except Exception as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            text = str(error) if isinstance(error, WrongError) else traceback.format_exc(limit=-5)
            yield number, f"wrong: {text}\n  {notes}"
        number += 1


def _made() -> str:
    return ", ".join(f"{check} {count}" for check, count in MADE.most_common())


def fuzz_wrong_programs(seed: int, start: int, count: int) -> int:
    """Prints each wrong program that is proved and each right one that is refused, and how many there were of each."""
    table: fuzz_programs.Table = {}
    wrong = 0
    for line in fuzz_programs.fuzz_programs(seed, start, count, table):
        wrong += 1
        print(line, flush=True)
    print(*fuzz_programs.report_table(table), sep="\n")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the first move, to go on where an earlier run ended")
    parser.add_argument("--moves", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--kinds", default=",".join(MIX), help="of layouts, moves, updates, trees, transfers, in turn")
    parser.add_argument("--programs", type=int, help="plans of all kinds whose programs are changed, instead of moves")
    options = parser.parse_args()
    if options.programs is not None:
        return fuzz_wrong_programs(options.seed, options.start, options.programs)
    moves = 10_000 if options.moves is None and options.seconds is None else options.moves
    kinds: Counter[str] = Counter()
    begun, number, wrong = time.monotonic(), options.start - 1, 0
    for number, kind in fuzz(options.seed, options.start, moves, options.seconds, options.kinds.split(",")):
        if kind.startswith("wrong"):
            wrong += 1
            again = f"python benchmarks/fuzz.py --seed {options.seed} --start {number} --moves 1"
            again += f" --kinds {options.kinds}" if options.kinds != parser.get_default("kinds") else ""
            print(f"{kind}\n  again: {again}\n", flush=True)
        else:
            kinds[kind] += 1
        if (number + 1) % 10_000 == 0:
            print(f"to {number + 1}: {wrong} wrong, {time.monotonic() - begun:.0f} s; checks: {_made()}", flush=True)
    for kind, count in kinds.most_common():
        print(f"{count:>8}  {kind}")
    print(f"checks: {_made()}")
    done = number + 1 - options.start
    print(f"{done} moves in {time.monotonic() - begun:.0f} s, {wrong} wrong; go on with --start {number + 1}")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""Wrong programs of every kind, made by written-down operators: none may be proved, and no right one refused.

    python benchmarks/fuzz.py --programs 2000 --seed 1

A kind (`KINDS`) makes a random plan with a property: other devices, a relay, a view, a cast, a step in place, a tree.
Its own program must be proved. An operator (`benchmarks/fuzz_faults.py`) changes the program, and an oracle judges what
it made (`find_fault`): the numpy runtime runs it on marked elements, in two orders of the messages of each round, and
what no run shows is looked up in the program itself. What is wrong must be refused. What is right may be proved, or be
refused for what a plan promises beside its elements; the table counts both.
"""

from __future__ import annotations

import math
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

import reshard as rs
from benchmarks.fuzz_faults import Joints, batch_changes, program_changes
from benchmarks.fuzz_oracle import WrongError, check_tiles, marks, own, source_tiles
from reshard.errors import ProofError, ReshardError, UndecidedError
from reshard.lower import Program, lower_plan
from reshard.lower.exchange_rounds import Exchange, ExchangeInPlace
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    CastTiles,
    InParts,
    Permute,
    ReduceScatter,
    join_launches,
    lower_batch,
)
from reshard.plans.plan import Batch, Plan, StepSpec, TreePlan, chain
from reshard.plans.rules.split_steps import possible_counts
from reshard.plans.rules.step_mode import StepMode
from reshard.runtime import Account
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_numpy import Extras, run
from reshard.synth.planner import overlapped
from reshard.types.layout import Digit, Dim, Layout
from tests.layouts import MESHES, random_crossing, random_layout, random_pair
from tests.view_oracle import Case, random_case

Array = np.ndarray
FLOATS = ("float32", "float64", "float16", "bfloat16")
NUMBERS = (*FLOATS, "int8", "int32", "int64", "uint8", "bool")


# ---- kinds of plans -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A plan, and the array that its target means, given the source's; with `held`, in what the target had before."""

    plan: Plan
    meant: Callable[[Array, Array], Array]

    @property
    def program(self) -> Program:
        """Its own program."""
        return lower_plan(self.plan)


def _same(array: Array, held: Array) -> Array:
    return array


def _plain(plan: Plan | None) -> Subject | None:
    return None if plan is None else Subject(plan, _same)


def _one_step(kind: str, ends: tuple[Layout, Layout], **mode: Any) -> Subject:
    return Subject(chain(*ends, [StepSpec(kind, ends[1], StepMode(**mode))], donate=True), _same)


def _any_options(choose: random.Random, ends: tuple[Layout, Layout]) -> dict[str, Any]:
    floor = sum(end.tile_bytes for end in ends)
    options: dict[str, Any] = {
        "donate": choose.random() < 0.4,
        "network": choose.choice((None, None, "tpu-v5p", "h100")),
    }
    if choose.random() < 0.4:
        options["budget"] = max(1, int(choose.choice((0.6, 0.8, 1.0, 1.1, 1.5)) * floor))
    return options


def plan_on_one_set(choose: random.Random) -> Subject | None:
    """Layouts of the same devices, even and uneven, with any options."""
    ends = random_pair(choose, choose.choice(("int32", "float32", "bfloat16")))
    return _plain(rs.plan(*ends, **_any_options(choose, ends)))


def plan_uneven(choose: random.Random) -> Subject | None:
    """Layouts with padding."""
    ends = random_pair(choose)
    return None if ends[0].even and ends[1].even else _plain(rs.plan(*ends))


def plan_reduction(choose: random.Random) -> Subject | None:
    """Sums, maxima, products that are finished, kept or moved."""
    ends = random_pair(choose, partial=True)
    return _plain(rs.plan(*ends, **_any_options(choose, ends))) if ends[0].partial else None


def plan_started_sum(choose: random.Random) -> Subject | None:
    """Arrays that become partial."""
    mesh = choose.choice(MESHES)
    shape = [choose.choice((1, 2, 4, 6, 12)) for _ in range(choose.randint(1, 2))]
    ends = (
        random_layout(choose, mesh, shape, partial=choose.random() < 0.3),
        random_layout(choose, mesh, shape, partial=True),
    )
    return _plain(rs.plan(*ends)) if ends[1].partial else None


def plan_crossing(choose: random.Random) -> Subject | None:
    """Devices that are others, some others, or more or fewer."""
    ends = random_crossing(choose, partial=choose.random() < 0.3, counts=(1, 2, 3, 4, 6, 8))
    network = choose.choice((None, None, "h100"))
    return _plain(rs.plan(*ends, network=network, donate=choose.random() < 0.3))


def plan_relay(choose: random.Random) -> Subject | None:
    """Exchanges whose second turn passes on what the first one brought."""
    return _one_step("exchange", random_crossing(choose, counts=(2, 3, 4, 6, 8)), relay=True)


def plan_pipeline(choose: random.Random) -> Subject | None:
    """Plans of several steps to other devices, whole, or one part of those that overlap."""
    sizes = choose.choice(((4, 2), (2, 8), (8, 4), (4, 6)))
    source, target = rs.Mesh(x=sizes[0]), rs.Mesh({"y": sizes[1], "z": 2}, device_ids=range(20, 20 + 2 * sizes[1]))
    shape = [choose.choice((8, 16, 24, 48)) for _ in range(2)]
    ends = random_layout(choose, source, shape), random_layout(choose, target, shape)
    network = rs.Network("wires", inner=(0.0, 1e9), outer=choose.choice(((0.0, 1e8), (1e-6, 1e9))), domain=64)
    pipeline = overlapped(*ends, network) if choose.random() < 0.7 else None
    plan = pipeline.each if pipeline is not None else rs.plan(*ends, network=network)
    return _plain(plan) if len(plan.steps) > 1 else None


def _of_case(choose: random.Random, case: Case, **options: Any) -> Subject:
    return Subject(rs.plan(case.move, donate=choose.random() < 0.3, **options), case.view.apply)


def plan_view(choose: random.Random) -> Subject | None:
    """Dims that are split, merged and permuted; parts taken and filled."""
    case = random_case(choose, most=96)
    return None if case.move.view.plain else _of_case(choose, case)


def plan_cast(choose: random.Random) -> Subject | None:
    """Moves to wider, narrower and other dtypes, on one set of devices, to others, and of sums."""
    before, after = choose.sample(NUMBERS, 2)
    some = choose.random()
    draw = random_crossing if some < 0.3 else random_pair
    source, target = draw(choose, before, partial=some > 0.8)
    if target.partial or (source.partial and before not in ("int32", "int64", "float32", "float64")):
        return None
    move = rs.Move(source, replace(target, dtype=after), cast=True)
    return _plain(rs.plan(move, donate=choose.random() < 0.3))


def plan_view_and_cast(choose: random.Random) -> Subject | None:
    """Views and a cast in one move."""
    before, after = choose.sample(NUMBERS, 2)
    case = random_case(choose, before, most=96)
    target = replace(case.move.target, dtype=after)
    return _of_case(choose, replace(case, move=rs.Move(case.move.source, target, case.move.view, cast=True)))


def _even_ends(choose: random.Random) -> tuple[Layout, Layout]:
    mesh = choose.choice([mesh for mesh in MESHES if 1 < mesh.size <= 8])
    shape = [mesh.size * choose.choice((1, 1, 2, 3)) for _ in range(choose.randint(1, 3))]
    return random_layout(choose, mesh, shape), random_layout(choose, mesh, shape)


def plan_in_place(choose: random.Random) -> Subject | None:
    """Exchanges in place, whole and in pieces, and parts that take each other's place."""
    ends = _even_ends(choose)
    if choose.random() < 0.7:
        return _one_step("exchange", ends, in_place=True, chunk=choose.choice((None, None, 1, 2, 5)))
    counts = possible_counts(*ends)
    kind = choose.choice(("all_to_all", "all_gather", "slice", "permute", "exchange"))
    return _one_step(kind, ends, parts=choose.choice(counts), in_place=True) if counts else None


def plan_chunks(choose: random.Random) -> Subject | None:
    """Exchanges in pieces: many rounds."""
    ends = random_pair(choose) if choose.random() < 0.6 else random_crossing(choose, counts=(2, 3, 4, 6))
    return _one_step("exchange", ends, chunk=choose.choice((1, 2, 3, 7, 20)))


def plan_parts(choose: random.Random) -> Subject | None:
    """Steps in parts, one after the other or overlapped."""
    ends = _even_ends(choose)
    counts = possible_counts(*ends)
    kind = choose.choice(("all_to_all", "all_gather", "slice", "permute", "exchange", "reduce_scatter", "all_reduce"))
    if kind in ("reduce_scatter", "all_reduce"):
        ends = random_pair(choose, partial=True)
        counts = possible_counts(*ends)
    return _one_step(kind, ends, parts=choose.choice(counts), overlap=choose.random() < 0.5) if counts else None


KINDS: dict[str, Callable[[random.Random], Subject | None]] = {
    "one set": plan_on_one_set,
    "uneven": plan_uneven,
    "reductions": plan_reduction,
    "started sums": plan_started_sum,
    "other devices": plan_crossing,
    "relays": plan_relay,
    "pipelines": plan_pipeline,
    "views": plan_view,
    "casts": plan_cast,
    "views and casts": plan_view_and_cast,
    "in place": plan_in_place,
    "chunks": plan_chunks,
    "parts": plan_parts,
}
TREES = "trees"
"""What makes a random plan of each kind; None, or an error of the package, is another try."""


def draw_subject(choose: random.Random, kind: str) -> Subject:
    """A random plan of a kind, with something to do."""
    while True:
        try:
            subject = KINDS[kind](choose)
        except ReshardError:
            continue
        if subject is None or 0 in subject.plan.source.shape or not subject.plan.steps:
            continue
        layouts = [subject.plan.source, *(step.result for step in subject.plan.steps)]
        if max(layout.mesh.size * math.prod(layout.tile_shape) for layout in layouts) <= MOST_ELEMENTS and not any(
            layout.reduction == "mean" for layout in layouts
        ):
            return subject


MOST_ELEMENTS = 20_000
"""The most elements of all tiles of a layout."""


# ---- the judge ------------------------------------------------------------------------------------


def find_fault(subject: Subject, program: Program, seed: int = 0) -> str | None:
    """What is wrong with a program, None if it is right.

    Elements and bytes show when it runs. What no run on one machine shows: two messages of a device in one round, a
    copy that would have to cross a wire, two tiles for one device, a message without the buffer that it needs.
    """
    plan = subject.plan
    if program.devices != plan.source.mesh.devices:
        return "other devices"
    if program.dtype != plan.source.dtype:
        return "another dtype"
    if program.keep_source == plan.donate:
        return "the source is not given up, or given up"
    for instruction in program.instructions:
        if rule := broken_rule_of(instruction, program):
            return rule
    try:
        for turned in (program, _turned(program)):
            _run_indices(subject, turned, seed)
        if plan.source.dtype != plan.target.dtype or any(isinstance(i, CastTiles) for i in program.instructions):
            _run_values(subject, program, seed)
    except WrongError as wrong:
        return f"elements: {wrong}"
    except Exception as error:  # Whatever it is: a program that does not run is wrong.
        return f"it does not run: {type(error).__name__}: {error}"
    return None


def broken_rule_of(instruction: Any, program: Program) -> str | None:
    """What no run shows of one instruction."""
    step = instruction.each if isinstance(instruction, InParts) else instruction
    if isinstance(step, InParts):
        return "parts of parts"
    if isinstance(step, Permute):
        return _broken_ends([step.pairs])
    if isinstance(step, AllGather | AllToAll | ReduceScatter | AllReduce):
        members = Counter(device for group in step.groups for device in group)
        if any(count > 1 for count in members.values()) or len({len(group) for group in step.groups}) > 1:
            return "groups that overlap, or are not of one size"
    if isinstance(step, ExchangeInPlace):
        if not step.staged and any(t.length > 1 for turn in step.rounds for t in turn):
            return "a message in place without a buffer"
        return _broken_ends([[t[:2] for t in turn] for turn in step.rounds])
    if isinstance(step, Exchange):
        if any(t.sender != t.receiver for t in step.local):
            return "a local copy to another device"
        if len(set(step.receivers)) < len(step.receivers):
            return "two tiles for one device"
        if not step.staged and not all(_is_run(t) for turn in step.rounds for t in turn if t.sender != t.receiver):
            return "a message without a buffer that is no run"
        return _broken_ends([[t[:2] for t in turn] for turn in step.rounds])
    return None


def _broken_ends(turns: Sequence[Sequence[tuple[int, ...]]]) -> str | None:
    for turn in turns:
        for end in (0, 1):
            if max(Counter(pair[end] for pair in turn).values(), default=0) > 1:
                return "two messages of a device in a round"
    return None


def _is_run(t: Any) -> bool:
    """Whether the elements of a message are neighbours, in order, at both ends."""
    ends: tuple[list[int], list[int]] = ([], [])
    for src, dst, axes in t.blocks:
        at = np.array([[src, dst]])
        for extent, *strides in axes:
            at = (at[:, None] + np.arange(max(extent, 0))[:, None] * np.array(strides)).reshape(-1, 2)
        for end, column in zip(ends, at.T, strict=True):
            end += column.tolist()
    return all(end == list(range(end[0], end[0] + len(end))) for end in ends if end)


def _turned(program: Program) -> Program:
    """The program with the messages of each round, and the local copies, in the other order."""

    def backwards(step: Any) -> Any:
        if isinstance(step, InParts):
            return replace(step, each=backwards(step.each))
        if isinstance(step, Exchange):
            return replace(step, local=step.local[::-1], rounds=tuple(turn[::-1] for turn in step.rounds))
        return step

    return replace(program, instructions=tuple(map(backwards, program.instructions)))


def _run_indices(subject: Subject, program: Program, seed: int) -> None:
    """Runs a program on tiles of global indices, without its casts, and compares elements, bytes, launches, memory."""
    plan, choose = subject.plan, random.Random(seed)
    whole = marks(plan.source.shape, np.dtype("int64"))
    held = -1 - np.arange(math.prod(plan.target.shape)).reshape(plan.target.shape)
    tiles = source_tiles(choose, own(plan.source), plan.source.tile_shape, whole)
    kept = {device: tile.copy() for device, tile in tiles.items()}
    into = _held_tiles(plan, held)
    memory = Account(plan.source.dtype)
    wide = replace(program, dtype="int64")
    moved = run(wide, tiles, memory, Extras(into, casts=False))
    check_tiles(own(plan.target), plan.target.tile_shape, subject.meant(whole, held), moved)
    if any(not np.array_equal(tiles[device], kept[device]) for device in tiles):
        raise WrongError("the source was written to")
    for what, got, promised in (
        ("bytes received", memory.received_bytes, plan.received_bytes),
        ("bytes live", memory.peak_bytes, plan.peak_bytes),
    ):
        if got > promised:
            raise WrongError(f"{got} {what}, {promised} promised")
    if memory.launches != plan.launches:
        raise WrongError(f"{memory.launches} launches, {plan.launches} promised")


def _held_tiles(plan: Plan, held: Array) -> dict[int, Array]:
    if plan.view is None or not plan.view.into:
        return {}
    return source_tiles(random.Random(0), own(plan.target), plan.target.tile_shape, held)


def _run_values(subject: Subject, program: Program, seed: int) -> None:
    """Runs a program on values of its dtypes, with its casts, and compares with a cast of the whole array."""
    plan, choose = subject.plan, random.Random(seed)
    source, target = numpy_dtype(plan.source.dtype), numpy_dtype(plan.target.dtype)
    rng = np.random.default_rng(seed)
    # Quarters where the source has them, so that no other dtype on the way keeps them; small, so that all are exact.
    quarters = rng.integers(0, 16 if plan.source.partial else 400, plan.source.shape)
    fine = plan.source.dtype in FLOATS and not plan.source.partial
    whole = (quarters / 4 if fine else quarters // (1 if plan.source.partial else 4)).astype(source)
    held = np.zeros(plan.target.shape, target)
    tiles = source_tiles(choose, own(plan.source), plan.source.tile_shape, whole)
    with np.errstate(all="ignore"):  # A wrong cast may be one of values that the dtype does not have.
        moved = run(program, tiles, None, Extras(_held_tiles(plan, held)))
    wanted = subject.meant(whole.astype(target), held)
    check_tiles(own(plan.target), plan.target.tile_shape, wanted, moved)


# ---- trees ----------------------------------------------------------------------------------------


def draw_tree(choose: random.Random) -> tuple[TreePlan, Batch]:
    """A random tree, and one of its batches that has several arrays and something to send."""
    while True:
        base = [random_pair(choose, partial=choose.random() < 0.3, most_rank=2) for _ in range(choose.randint(1, 2))]
        ends = {f"a{n}": choose.choice(base) for n in range(choose.randint(1, 3))}
        for name, pair in list(ends.items()):  # The same layouts with more columns: other plans in the same launches.
            if choose.random() < 0.7:
                size = choose.choice((2, 3))
                columns = Dim((Digit(size, None),), size)
                ends[f"{name}b"] = tuple(replace(end, dims=(*end.dims, columns)) for end in pair)
        try:
            tree = rs.plan_tree(ends, donate=choose.random() < 0.3)
        except ReshardError:
            continue
        layouts = [end for pair in ends.values() for end in pair]
        if any(0 in end.shape or end.reduction == "mean" for end in layouts):
            continue
        batches = [batch for batch in tree.batches if len(batch.names) > 1 and batch.launches]
        if batches and sum(end.mesh.size * math.prod(end.tile_shape) for end in layouts) < MOST_ELEMENTS:
            return tree, choose.choice(batches)


@contextmanager
def lowered_as(batch: Batch, programs: Sequence[Program], joints: Joints | None) -> Iterator[None]:
    """Whoever lowers a batch gets these programs of it, and these joint launches of them."""

    def lower(one: Batch) -> Any:
        return programs if one is batch else lower_batch(one)

    def join(listed: Sequence[Program]) -> Any:
        return joints if listed is programs and joints is not None else join_launches(listed)

    with ExitStack() as stack:
        for module in ("runtime.on_numpy", "proofs.plan_proof"):
            stack.enter_context(mock.patch(f"reshard.{module}.lower_batch", lower))
            stack.enter_context(mock.patch(f"reshard.{module}.join_launches", join))
        yield


def find_fault_in_tree(tree: TreePlan, batch: Batch, programs: Sequence[Program], joints: Joints | None) -> str | None:
    """What is wrong with a tree whose batch is lowered so, None if it is right."""
    if len(programs) != len(batch.plans):
        return "another number of programs"
    for plan, program in zip(batch.plans, programs, strict=True):
        # Messages and buffers are those of the programs; that elements are right shows when the tree runs.
        if fault := find_fault(Subject(plan, _same), program):
            return fault
    for joint in joints or ():
        for step in joint if isinstance(joint, tuple) else () if joint is None else (joint.packed,):
            if rule := broken_rule_of(step, programs[0]):
                return rule
    try:
        account, given = Account("uint8"), {}
        for name, plan in tree.plans.items():
            whole = marks(plan.source.shape, numpy_dtype(plan.source.dtype))
            given[name] = source_tiles(random.Random(0), own(plan.source), plan.source.tile_shape, whole)
        moved = rs.simulate(tree, given, account)
        for name, plan in tree.plans.items():
            whole = marks(plan.source.shape, numpy_dtype(plan.source.dtype))
            check_tiles(own(plan.target), plan.target.tile_shape, whole, moved[name])
        for what, got, promised in (
            ("launches", account.launches, tree.launches),
            ("bytes received", account.received_bytes, tree.received_bytes),
            ("bytes live", account.peak_bytes, tree.peak_bytes),
        ):
            if got > promised:
                return f"{got} {what}, {promised} promised"
    except WrongError as wrong:
        return f"elements: {wrong}"
    except Exception as error:
        return f"it does not run: {type(error).__name__}: {error}"
    return None


# ---- the loop -------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the programs of one operator and one kind."""

    wrong: int = 0
    accepted: int = 0
    right: int = 0
    refused: int = 0


Table = dict[tuple[str, str], Tally]
"""By kind and operator; the operator of programs as they are is "none"."""


@dataclass(frozen=True)
class Trial:
    """A plan or a tree, its operators, the judge and the prover of what they make."""

    where: str
    changes: Callable[[], Mapping[str, Callable[[], Any]]]
    judge: Callable[[Any], str | None]
    prove: Callable[[Any], object]


def draw_trial(choose: random.Random, kind: str) -> tuple[Any, Trial]:
    """A random plan or tree of a kind: its own program, and how to change and to prove it."""
    if kind != TREES:
        subject = draw_subject(choose, kind)
        plan, program = subject.plan, lower_plan(subject.plan)
        return program, Trial(
            f"{plan.source} -> {plan.target}",
            lambda: program_changes(choose, program),
            lambda made: find_fault(subject, made) or find_fault(subject, made, 1),
            lambda made: rs.prove(plan, made),
        )
    tree, batch = draw_tree(choose)
    programs = lower_batch(batch)
    own = programs, join_launches(programs)

    def judge(made: Any) -> str | None:
        with lowered_as(batch, *made):
            return find_fault_in_tree(tree, batch, *made)

    def prove(made: Any) -> object:
        with lowered_as(batch, *made):
            return rs.prove(tree)

    return own, Trial(str(batch), lambda: batch_changes(choose, *own), judge, prove)


def find_objection(trial: Trial, made: Any) -> str | None:
    """Why a program is not proved, None if it is."""
    try:
        trial.prove(made)
    except (ProofError, UndecidedError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def fuzz_programs(seed: int, start: int, count: int, table: Table, each: int = 12) -> Iterator[str]:
    """Plans number `start` on, of all kinds in turn, and `each` changed programs of each; yields what is wrong.

    Operators that came up least often so far, with this kind and then with others, come first, so that all do.
    """
    for number in range(start, start + count):
        kind = [*KINDS, TREES][number % (len(KINDS) + 1)]
        choose = random.Random(f"programs/{seed}/{number}")
        program, trial = draw_trial(choose, kind)
        where = f"{kind}, --programs 1 --seed {seed} --start {number}: {trial.where}"
        if (fault := trial.judge(program)) is not None:
            yield f"a wrong program of the lowering, {where}: {fault}"
            continue
        own = table.setdefault((kind, "none"), Tally())
        own.right += 1
        try:
            objection = find_objection(trial, program)
            if objection is not None:
                own.refused += 1
                yield f"a right program is refused, {where}: {objection}"
            for _ in range(each):
                name, made = next(_changed(choose, kind, trial, program, table), ("", None))
                if made is None:
                    continue
                tally, fault = table.setdefault((kind, name), Tally()), trial.judge(made)
                objection = find_objection(trial, made)
                if fault is None:
                    tally.right += 1
                    tally.refused += objection is not None
                else:
                    tally.wrong += 1
                    tally.accepted += objection is None
                    if objection is None:
                        yield f"a wrong program is proved, {where}: {name}: {fault}"
        except Exception:
            yield f"{where}: {traceback.format_exc(limit=-5)}"


def _changed(choose: random.Random, kind: str, trial: Trial, program: Any, table: Table) -> Iterator[tuple[str, Any]]:
    changes = trial.changes()
    used: Counter[tuple[str, bool]] = Counter()
    for (where, name), tally in table.items():
        used[name, where == kind] += tally.wrong + tally.right
    for name in sorted(changes, key=lambda name: (used[name, True], used[name, False], choose.random())):
        made = changes[name]()
        if made is not None and made != program:
            yield name, made


def report_table(table: Table) -> Iterator[str]:
    """The counts by kind, and by operator."""
    yield f"{'':>62}  {'wrong':>7} {'proved':>7} {'right':>7} {'refused':>7}"
    own = [tally for (_, name), tally in table.items() if name == "none"]
    yield _row("programs as they are", own)
    for part, title in ((0, "by kind"), (1, "by operator")):
        yield title
        names = sorted({key[part] for key in table if key[1] != "none"})
        for name in names:
            yield _row(name, [tally for key, tally in table.items() if key[part] == name and key[1] != "none"])
    yield _row("all changed programs", [tally for (_, name), tally in table.items() if name != "none"])


def _row(name: str, tallies: Sequence[Tally]) -> str:
    sums = [sum(each) for each in zip(*((t.wrong, t.accepted, t.right, t.refused) for t in tallies), strict=True)]
    return f"  {name:<60}  " + " ".join(f"{count:>7}" for count in sums or [0] * 4)

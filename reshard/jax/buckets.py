"""Many moves in few programs: the leaves of a tree.

Small arrays cost what it costs to compile and to start a program. So up to 100 arrays share one: arrays of one kind
move as a stack, different kinds whose steps share launches as a batch (`plans.plan`), and other kinds side by side. A
program runs as often as there are arrays of its kinds, so that few are compiled.

    56 kinds of move, 9 arrays each          2 programs, of 28 stacks of 3, each started 3 times
    10 kinds of move, 50 arrays each         1 program of 10 stacks of 5, started 10 times
    1 kind of move, 500 arrays               1 program of a stack of 25, started 20 times

Large arrays have programs of their own, one for all equal moves. Between CPU devices of one process, arrays of all
sizes are copied, in one exchange (`crossing.host`), as are the parts of an array that several fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import jax
from jax import lax

from reshard.errors import PlanError
from reshard.jax import crossing, placement
from reshard.jax.agreement import agree_on_moves
from reshard.jax.eager import EagerMove, EagerProgram, Pending, run_pending
from reshard.jax.request import plan_request
from reshard.jax.running import start_program, weaken, weaken_on
from reshard.plans.plan import Batch, Plan, list_lanes
from reshard.runtime import on_jax

MOST = 100
"""The most arrays that move in one program: taking a stack apart is a kernel for each array, which is compiled."""
MOST_KINDS = 32
"""The most kinds of move in one program, and the most arrays of few kinds."""
STACK = 5
"""At least this many arrays of each kind move in one program of several kinds, if there are as many: starting it costs
the collectives of all its kinds."""
ALIKE = 16
"""Kinds share a program if at most one in this many arrays moves twice because of it."""
_OPTIONS = {"cpu": {"xla_backend_optimization_level": 1}}
"""Options by platform that make a program in three quarters of the time, which moves small arrays as fast."""


class Bucket(NamedTuple):
    """The moves of one start of a program: `stack` arrays for each of the kinds, by their places in the list."""

    kinds: tuple[EagerProgram, ...]
    stack: int
    places: list[int]


def run_moves(moves: Sequence[Pending], results: Sequence[int] | None = None) -> list[jax.Array]:
    """Starts all moves; the results are in the order of the moves, or in that of their numbers in `results`, from 0.

    Moves of one number fill parts of one array, which is made once: all of it, or the rest is given `beside` them.
    They are on CPU devices of this process, where they are copies of one exchange (`EagerProgram.host`).
    """
    places: dict[int, list[int]] = {}
    for at, number in enumerate(range(len(moves)) if results is None else results):
        places.setdefault(number, []).append(at)
    moved: dict[int, jax.Array] = {}
    # The moves that may share programs, by mesh and kind, and those that share an exchange; one alone keeps its own.
    shared: dict[object, dict[EagerProgram, list[int]]] = {}
    hosted: dict[int, list[EagerMove]] = {}
    for number, group in places.items():
        parts = [move for move in (moves[at] for at in group) if isinstance(move, EagerMove)]
        views = [part.program.request.view for part in parts]
        # The only part of an array starts from nothing, too, which its own program does not.
        if len(moves) == 1 and not any(view is not None and view.into for view in views):
            continue
        # Copied among others; inside a trace, a move on one set of devices is a part of it.
        copied = [p.program.host and (p.program.request.crosses or not placement.is_tracing()) for p in parts]
        if len(parts) == len(group) and all(copied):
            hosted[number] = parts
        elif len(group) > 1:
            raise PlanError(f"{len(group)} moves into one array need another way than copies on the host; report this")
        elif parts and parts[0].program.together:
            shared.setdefault(_mesh_of_kind(parts[0].program), {}).setdefault(parts[0].program, []).append(number)
    for kinds in shared.values():
        for bucket in fill_buckets(kinds):
            eager = [move for move in (moves[places[at][0]] for at in bucket.places) if isinstance(move, EagerMove)]
            if len(eager) == 1:
                continue
            program = _bucket_program(bucket.kinds, bucket.stack, alone=not placement.is_tracing())
            started = start_program(program, *(move.x for move in eager))
            for number, move, x in zip(bucket.places, eager, started, strict=True):
                moved[number] = x if move.wrapped is None else move.wrapped(x)
    rest = [moves[group[0]] for number, group in places.items() if number not in moved and number not in hosted]
    # Of moves that read one array the last one donates it: here, after those that other programs make.
    read = {id(move.x) for move in rest if isinstance(move, EagerMove)}
    if hosted:
        moved |= _run_on_host(hosted, read)
    moved |= {number: run_pending(moves[group[0]]) for number, group in places.items() if number not in moved}
    for part in (part for parts in hosted.values() for part in parts if id(part.x) in read):
        if part.program.request.options.donate and not part.x.is_deleted():
            part.x.delete()
    return [moved[number] for number in sorted(moved)]


def _run_on_host(groups: Mapping[int, Sequence[EagerMove]], read: Set[int]) -> dict[int, jax.Array]:
    """The moves between CPU devices, each group into one array: all one exchange. Others `read` some arrays later."""
    calls: list[crossing.HostCall] = []
    for number, parts in groups.items():
        for x, program, _, beside in parts:
            assert program.host is not None
            into, scale = (None, None) if beside is None else beside(program)
            donate = program.request.options.donate and id(x) not in read
            calls.append(crossing.HostCall(program.host, x, donate, into, scale, number))
    with placement.without_mesh(), placement.without_transfer_guard():
        moved = crossing.run_host_moves(calls)
        for number, ((_, program, wrapped, _), *_) in groups.items():
            if program.weak and program.request.plain:
                moved[number] = weaken_on(program.request.target)(moved[number])
            if wrapped is not None:
                moved[number] = wrapped(moved[number])
    return moved


def _mesh_of_kind(kind: EagerProgram) -> placement.AnyMesh:
    source, _ = kind.request.ends
    return source.mesh


@lru_cache(maxsize=4096)
def lane_of(kind: EagerProgram) -> object:
    """What moves of other kinds must have in common with this one to share its launches."""
    lane = list_lanes(kind.plan)
    return kind if lane is None else lane


def fill_buckets(
    places: Mapping[EagerProgram, Sequence[int]], lane_of: Callable[[EagerProgram], object] = lane_of
) -> Iterator[Bucket]:
    """All places, in buckets of few programs: kinds of about equal counts share theirs, those of one lane if possible.

    A program costs more to compile than some arrays cost to move twice: the last start has as many as the others.
    """
    rest = sorted(places, key=lambda kind: -len(places[kind]))
    while rest:
        number = _alike_counts([len(places[kind]) for kind in rest])
        alike, rest = rest[:number], rest[number:]
        by_lane: dict[object, list[EagerProgram]] = {}
        for kind in alike:
            by_lane.setdefault(lane_of(kind), []).append(kind)
        ordered = tuple(kind for lane in by_lane.values() for kind in lane)
        each = -(-len(ordered) // -(-len(ordered) // MOST_KINDS))
        for first in range(0, len(ordered), each):
            kinds = ordered[first : first + each]
            listed = [places[kind] for kind in kinds]
            count = max(map(len, listed))
            stack = choose_stack(count, max(MOST_KINDS // len(kinds), min(STACK, MOST // len(kinds))))
            for start in range(0, count, stack):
                yield Bucket(
                    kinds, stack, [every[(start + at) % len(every)] for every in listed for at in range(stack)]
                )


def _alike_counts(counts: Sequence[int]) -> int:
    """How many of some counts, the largest first, may be filled up to that one, so that few arrays move twice.

    >>> _alike_counts([9, 9, 9, 9, 8, 8, 1]), _alike_counts([9, 1])
    (6, 1)
    """
    arrays = 0
    for number, count in enumerate(counts):
        arrays += count
        if ALIKE * (counts[0] * (number + 1) - arrays) > arrays:
            return number
    return len(counts)


def choose_stack(count: int, most: int) -> int:
    """The arrays of a stack: a divisor of their number above half of the most, else one by which few move twice.

    >>> choose_stack(500, 32), choose_stack(50, 3), choose_stack(47, 32), choose_stack(9, 32)
    (25, 2, 24, 9)
    """
    divisors = [stack for stack in range(most, most // 2, -1) if count % stack == 0]
    starts = -(-count // most)
    return next(iter(divisors), -(-count // starts))


@lru_cache(maxsize=1024)
def _bucket_program(kinds: tuple[EagerProgram, ...], stack: int, alone: bool) -> Callable[..., tuple[jax.Array, ...]]:
    """The program of a bucket; one that is a part of another program, which is being traced, has no options."""
    options = _OPTIONS.get(placement.platform_of(_mesh_of_kind(kinds[0])) or "") if alone else None
    if alone:
        agreed = [(kind.request, kind.plan.source.shape, kind.plan.source.dtype) for kind in kinds]
        agree_on_moves(agreed, f"{stack} of each in one program")
    sources = tuple(kind.request.source for kind in kinds for _ in range(stack))
    targets = tuple(kind.request.target for kind in kinds for _ in range(stack))
    moved = partial(_move_stacks, kinds, stack)
    return jax.jit(moved, in_shardings=sources, out_shardings=targets, compiler_options=options)


def _move_stacks(kinds: Sequence[EagerProgram], stack: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """All moves of one start: the arrays of a kind stacked, and the stacks whose steps share launches in one batch."""
    stacks: list[jax.Array] = []
    plans: list[Plan] = []
    groups: dict[object, list[int]] = {}
    for at, kind in enumerate(kinds):
        own, plan, request = arrays[at * stack : (at + 1) * stack], kind.plan, kind.request
        # Stacked along a new dim in front, which stays whole on each device; an array alone is as it is.
        stacks.append(own[0] if stack == 1 else lax.concatenate([lax.expand_dims(x, [0]) for x in own], 0))
        if stack > 1 and plan.steps:
            source, target = (placement.add_leading_dim(end, None) for end in request.ends)
            request = replace(request, source=source, target=target)
            plan = plan_request(request, (stack, *plan.source.shape), stacks[-1].dtype.name)
        plans.append(plan)
        lane = list_lanes(plan)
        groups.setdefault(at if lane is None else lane, []).append(at)
    moved = dict[int, jax.Array]()
    for places in groups.values():
        batch = Batch(tuple(map(str, places)), tuple(plans[at] for at in places))
        mesh = _mesh_of_kind(kinds[places[0]])
        moved |= zip(places, on_jax.apply_batch(batch, mesh, [stacks[at] for at in places]), strict=True)
    results: list[jax.Array] = []
    for at, kind in enumerate(kinds):
        each = moved[at]
        alone = (
            [lax.squeeze(lax.slice_in_dim(each, one, one + 1), [0]) for one in range(stack)] if stack > 1 else [each]
        )
        results += [weaken(x) if kind.weak else x for x in alone]
    return tuple(results)

"""Many moves in few programs: the leaves of a tree.

Small arrays cost what it costs to compile and to start a program. So up to 100 arrays share one: arrays of one kind
move as a stack, different kinds whose steps share launches as a batch (`plans.plan`), and other kinds side by side. A
program runs as often as there are arrays of its kinds, so that few are compiled.

    56 kinds of move, 9 arrays each          2 programs, of 28 stacks of 3, each started 3 times
    10 kinds of move, 50 arrays each         1 program of 10 stacks of 5, started 10 times
    1 kind of move, 500 arrays               1 program of a stack of 25, started 20 times

Large arrays have programs of their own, one for all equal moves.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import jax
from jax import lax

from reshard.jax import placement
from reshard.jax.eager import EagerMove, EagerProgram, Pending, run_move, run_pending
from reshard.jax.request import plan_request
from reshard.jax.starting import start_program
from reshard.jax.weak_types import weaken
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


def run_moves(moves: Sequence[Pending]) -> list[jax.Array]:
    """Starts all moves; the results are in the order of the moves."""
    moved: dict[int, jax.Array] = {}
    for places in _group_by_program(moves).values():
        for bucket in fill_buckets(places):
            moved |= zip(bucket.places, _run_bucket(bucket, [moves[at] for at in bucket.places]), strict=True)
    for at, move in enumerate(moves):
        if at not in moved:
            moved[at] = run_pending(move)
    return [moved[at] for at in range(len(moves))]


def _group_by_program(moves: Sequence[Pending]) -> Mapping[object, Mapping[EagerProgram, list[int]]]:
    """The places of the moves that may share programs, by mesh and kind."""
    shared: dict[object, dict[EagerProgram, list[int]]] = {}
    for at, move in enumerate(moves if len(moves) > 1 else ()):
        if isinstance(move, EagerMove) and move.program.together:
            shared.setdefault(_mesh_of_kind(move.program), {}).setdefault(move.program, []).append(at)
    return shared


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
    for kinds in _of_like_counts(places, lane_of):
        each = -(-len(kinds) // -(-len(kinds) // MOST_KINDS))
        for first in range(0, len(kinds), each):
            yield from _fill_starts(kinds[first : first + each], places)


def _of_like_counts(
    places: Mapping[EagerProgram, Sequence[int]], lane_of: Callable[[EagerProgram], object]
) -> Iterator[tuple[EagerProgram, ...]]:
    """Groups of kinds with about equally many arrays, so that few move twice; kinds of one lane are neighbours."""
    rest = sorted(places, key=lambda kind: -len(places[kind]))
    while rest:
        number = _alike_counts([len(places[kind]) for kind in rest])
        alike, rest = rest[:number], rest[number:]
        by_lane: dict[object, list[EagerProgram]] = {}
        for kind in alike:
            by_lane.setdefault(lane_of(kind), []).append(kind)
        yield tuple(kind for lane in by_lane.values() for kind in lane)


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


def _fill_starts(kinds: tuple[EagerProgram, ...], places: Mapping[EagerProgram, Sequence[int]]) -> Iterator[Bucket]:
    """The starts of the one program that moves all arrays of these kinds, some of them twice."""
    count = max(len(places[kind]) for kind in kinds)
    stack = choose_stack(count, max(MOST_KINDS // len(kinds), min(STACK, MOST // len(kinds))))
    for start in range(0, count, stack):
        listed = [places[kind] for kind in kinds]
        yield Bucket(kinds, stack, [every[(start + at) % len(every)] for every in listed for at in range(stack)])


def choose_stack(count: int, most: int) -> int:
    """The arrays of a stack: a divisor of their number above half of the most, else one by which few move twice.

    >>> choose_stack(500, 32), choose_stack(50, 3), choose_stack(47, 32), choose_stack(9, 32)
    (25, 2, 24, 9)
    """
    divisors = [stack for stack in range(most, most // 2, -1) if count % stack == 0]
    starts = -(-count // most)
    return next(iter(divisors), -(-count // starts))


def _run_bucket(bucket: Bucket, moves: Sequence[Pending]) -> list[jax.Array]:
    eager = [move for move in moves if isinstance(move, EagerMove)]
    if len(eager) == 1:
        return [run_move(eager[0])]
    program = _bucket_program(bucket.kinds, bucket.stack, alone=not placement.is_tracing())
    moved = start_program(program, *(move.x for move in eager))
    return [x if move.wrapped is None else move.wrapped(x) for move, x in zip(eager, moved, strict=True)]


@lru_cache(maxsize=1024)
def _bucket_program(kinds: tuple[EagerProgram, ...], stack: int, alone: bool) -> Callable[..., tuple[jax.Array, ...]]:
    """The program of a bucket; one that is a part of another program, which is being traced, has no options."""
    options = _OPTIONS.get(placement.platform_of(_mesh_of_kind(kinds[0])) or "") if alone else None
    sources = tuple(kind.request.source for kind in kinds for _ in range(stack))
    targets = tuple(kind.request.target for kind in kinds for _ in range(stack))
    moved = partial(_move_stacks, kinds, stack)
    return jax.jit(moved, in_shardings=sources, out_shardings=targets, compiler_options=options)


def _move_stacks(kinds: Sequence[EagerProgram], stack: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """All moves of one start: the arrays of a kind stacked, and the stacks whose steps share launches in one batch."""
    stacks = [_stack_arrays(arrays[at : at + stack]) for at in range(0, len(arrays), stack)]
    plans = [_plan_stack(kind, stack, x.dtype.name) for kind, x in zip(kinds, stacks, strict=True)]
    moved = dict[int, jax.Array]()
    for places in _group_by_lane(plans):
        batch = Batch(tuple(map(str, places)), tuple(plans[at] for at in places))
        mesh = _mesh_of_kind(kinds[places[0]])
        moved |= zip(places, on_jax.apply_batch(batch, mesh, [stacks[at] for at in places]), strict=True)
    each = ((kind.weak, x) for at, kind in enumerate(kinds) for x in _split_stack(moved[at], stack))
    return tuple(weaken(x) if weak else x for weak, x in each)


def _stack_arrays(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays along a new dim in front; an array alone as it is."""
    return arrays[0] if len(arrays) == 1 else lax.concatenate([lax.expand_dims(x, [0]) for x in arrays], 0)


def _split_stack(array: jax.Array, stack: int) -> list[jax.Array]:
    if stack == 1:
        return [array]
    return [lax.squeeze(lax.slice_in_dim(array, at, at + 1), [0]) for at in range(stack)]


def _plan_stack(kind: EagerProgram, stack: int, dtype: str) -> Plan:
    """The plan of a stack: the new dim stays whole on each device."""
    if stack == 1 or not kind.plan.steps:
        return kind.plan
    source, target = (placement.add_leading_dim(end, None) for end in kind.request.ends)
    return plan_request(replace(kind.request, source=source, target=target), (stack, *kind.plan.source.shape), dtype)


def _group_by_lane(plans: Sequence[Plan]) -> Iterable[list[int]]:
    """The numbers of the plans that can be one batch."""
    groups: dict[object, list[int]] = {}
    for at, plan in enumerate(plans):
        lane = list_lanes(plan)
        groups.setdefault(at if lane is None else lane, []).append(at)
    return groups.values()

"""Many moves in few programs: the leaves of a tree.

Small arrays cost what it costs to compile and to start a program. So different moves share one, which runs once for
each array of a kind; and arrays of one kind, where there are many, move in stacks, with one launch a stack.

    56 kinds of move, 9 arrays each          2 programs, of 32 and 24 moves, each started 9 times
    1 kind of move, 500 arrays               2 programs: 62 stacks of 8, and 4 arrays one by one

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
from reshard.jax.eager import EagerMove, EagerProgram, Pending, run, started, traced_move
from reshard.jax.request import plan_of
from reshard.jax.weak_types import weakened
from reshard.runtime import on_jax

MOST = 32
"""The most arrays that move in one program."""
STACK = 8
"""The arrays of a stack. To take a stack apart is a kernel for each array, which costs more to compile than it saves
unless the program runs a few times: arrays are stacked from twice as many on."""


class Bucket(NamedTuple):
    """The moves of one start of a program: `stack` arrays for each of the kinds, by their places in the list."""

    kinds: tuple[EagerProgram, ...]
    stack: int
    places: list[int]


def run_all(moves: Sequence[Pending]) -> list[jax.Array]:
    """Starts all moves; the results are in the order of the moves."""
    moved: dict[int, jax.Array] = {}
    for places in _shared(moves).values():
        for bucket in buckets(places):
            moved |= zip(bucket.places, _run_bucket(bucket, [moves[at] for at in bucket.places]), strict=True)
    for at, move in enumerate(moves):
        if at not in moved:
            moved[at] = run(move) if isinstance(move, EagerMove) else move()
    return [moved[at] for at in range(len(moves))]


def _shared(moves: Sequence[Pending]) -> Mapping[object, Mapping[EagerProgram, list[int]]]:
    """The places of the moves that may share programs, by mesh and kind."""
    shared: dict[object, dict[EagerProgram, list[int]]] = {}
    for at, move in enumerate(moves if len(moves) > 1 else ()):
        if isinstance(move, EagerMove) and move.program.together:
            shared.setdefault(move.program.source.mesh, {}).setdefault(move.program, []).append(at)
    return shared


def buckets(places: Mapping[EagerProgram, Sequence[int]]) -> Iterator[Bucket]:
    """All places, in buckets of few programs: kinds of equal counts share theirs, so each kind is compiled once."""
    counts: dict[int, list[EagerProgram]] = {}
    for kind, listed in places.items():
        counts.setdefault(len(listed), []).append(kind)
    for count, kinds in counts.items():
        stacked = count - count % STACK if count >= 2 * STACK else 0
        yield from _rounds(kinds, places, STACK, range(0, stacked, STACK))
        yield from _rounds(kinds, places, 1, range(stacked, count))


def _rounds(
    kinds: Sequence[EagerProgram], places: Mapping[EagerProgram, Sequence[int]], stack: int, starts: Iterable[int]
) -> Iterator[Bucket]:
    for start in starts:
        for first in range(0, len(kinds), MOST // stack):
            group = tuple(kinds[first : first + MOST // stack])
            yield Bucket(group, stack, [at for kind in group for at in places[kind][start : start + stack]])


def _run_bucket(bucket: Bucket, moves: Sequence[Pending]) -> list[jax.Array]:
    eager = [move for move in moves if isinstance(move, EagerMove)]
    if len(eager) == 1:
        return [run(eager[0])]
    moved = started(_bucket_program(bucket.kinds, bucket.stack), *(move.x for move in eager))
    return [x if move.wrapped is None else move.wrapped(x) for move, x in zip(eager, moved, strict=True)]


@lru_cache(maxsize=1024)
def _bucket_program(kinds: tuple[EagerProgram, ...], stack: int) -> Callable[..., tuple[jax.Array, ...]]:
    sources = tuple(kind.source for kind in kinds for _ in range(stack))
    targets = tuple(kind.request.target for kind in kinds for _ in range(stack))
    return jax.jit(partial(_moved, kinds, stack), in_shardings=sources, out_shardings=targets)


def _moved(kinds: Sequence[EagerProgram], stack: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    moved: list[jax.Array] = []
    for kind in kinds:
        moved += _together(kind, arrays[len(moved) : len(moved) + stack])
    return tuple(moved)


def _together(kind: EagerProgram, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Equal moves in one: the arrays are stacked along a new dim, which stays whole on each device."""
    mesh = kind.source.mesh
    if len(arrays) == 1 or not kind.plan.steps:
        return [traced_move(kind.plan, mesh, kind.weak, x) for x in arrays]
    source, target = (placement.lifted(end, None) for end in (kind.source, kind.request.target))
    request = replace(kind.request, source=source, target=target)
    plan = plan_of(request, (len(arrays), *kind.plan.source.shape), arrays[0].dtype.name)
    stack = on_jax.apply(plan, mesh, lax.concatenate([lax.expand_dims(x, [0]) for x in arrays], 0))
    moved = [lax.squeeze(lax.slice_in_dim(stack, at, at + 1), [0]) for at in range(len(arrays))]
    return [weakened(x) for x in moved] if kind.weak else moved

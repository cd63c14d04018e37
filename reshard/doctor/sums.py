"""Sums of sums: reductions one after another, planned together without changing the order of addition.

    %s = f32[64,8] all-reduce(%p), replica_groups={{0,1},{2,3}}     along x: receives 2 (1 - 1/2) of the array
    %t = f32[64,8] all-reduce(%s), replica_groups={{0,2},{1,3}}     along y: as much again, 2 in all

    reduce_scatter    f32[{x}32, 8] + sum{y}      1/2
    all_reduce        f32[{x}32, 8]               1/2, of half of the array
    all_gather        f32[64, 8]                  1/2: 1.5 in all, as much as one sum along both

Each element is still the sum of the sums along x, so floats keep their bits where a reduce-scatter adds up as an
all-reduce does. One sum along both receives as much in fewer launches, but adds up in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from reshard.doctor.chain_reader import Chain
from reshard.errors import PlanError
from reshard.plans.plan import Plan, chain
from reshard.synth import PlanOptions, find_plan
from reshard.types.dims import Digit, Dim
from reshard.types.layout import Layout
from reshard.types.mesh import SubAxis

Axes = tuple[SubAxis, ...]


class JoinedSums(NamedTuple):
    """A chain of sums one after another, and the chains that it is joined of; one that is not joined is alone."""

    chain: Chain
    parts: tuple[Chain, ...]


def join_sums(chains: Iterable[Chain]) -> Iterator[JoinedSums]:
    """The chains in their order, each that begins with a sum joined to those before it whose only use is this sum."""
    listed = list(chains)
    by_sum = {(one.region, one.collectives[0].name): one for one in listed if len(one.collectives) == 1}
    before: dict[Chain, Chain] = {}
    for one in listed:
        first, *_ = one.collectives
        maker = by_sum.get((one.region, first.instruction.operands[0])) if first.kind == "all_reduce" else None
        if maker is None or maker.collectives[0].kind != "all_reduce" or maker.collectives[0].instruction.root:
            continue
        users = one.region.computation.users[maker.collectives[0].name]
        if [user.name for user in users] == [first.name]:
            before[one] = maker
    inner = set(before.values())
    for one in listed:
        if one in inner:
            continue
        parts = [one]
        while parts[0] in before:  # ends: an operand stands before its user
            parts.insert(0, before[parts[0]])
        collectives = tuple(each for part in parts for each in part.collectives)
        values = tuple(each for part in parts for each in part.values)
        whole = replace(one, collectives=collectives, values=values, leaves=parts[0].leaves) if parts[1:] else one
        yield JoinedSums(whole, tuple(parts))


def plan_rounds(source: Layout, target: Layout, rounds: Sequence[Axes], options: PlanOptions) -> Plan:
    """The plan that adds up along the axes of one round after another.

    After each round but the last, every device has a part of the sums so far, in the target's place where it can be.
    Raises a `ReshardError` if a round has no plan.
    """
    at, steps = source, list[Plan]()
    for number in range(1, len(rounds)):
        middle = _scatter_rounds(source, target, rounds, number)
        steps.append(find_plan(at, middle, options))
        at = middle
    steps.append(find_plan(at, target, options))
    return chain(source, target, [step.spec for plan in steps for step in plan.steps])


def _scatter_rounds(source: Layout, target: Layout, rounds: Sequence[Axes], number: int) -> Layout:
    """The layout after so many rounds: each device has a part of the array along the axes of these."""
    mesh, done = source.mesh, [axis for axes in rounds[:number] for axis in axes]
    places = {(mesh.stride(axis), axis.size) for axis in done}
    base, taken = [[*dim.digits] for dim in source.dims], set[tuple[int, int] | None]()
    if not source.held:  # What the target splits along these axes is split as there.
        base.clear()
        for dim in target.dims:
            digits: list[Digit] = []
            for digit in dim.digits:
                place = None if digit.axis is None else (mesh.stride(digit.axis), digit.axis.size)
                taken.add(place)
                digits.append(digit if place in places else Digit(digit.radix, None))
            base.append(digits)
    for axis in done:
        if (mesh.stride(axis), axis.size) in taken:
            continue
        # Of the others, the most significant local digit is split that can be.
        fitting = (
            (digits, at)
            for digits in base
            for at, digit in enumerate(digits)
            if digit.axis is None and digit.radix % axis.size == 0
        )
        found = next(fitting, None)
        if found is None:
            raise PlanError(f"no dim of {target} can be split along {axis.axis}, so its sums are not scattered")
        digits, at = found
        rest = digits[at].radix // axis.size
        digits[at : at + 1] = [Digit(axis.size, axis), *([Digit(rest, None)] if rest > 1 else [])]
    dims = tuple(Dim(tuple(digits), dim.size) for digits, dim in zip(base, source.dims, strict=True))
    partial = tuple(axis for axes in rounds[number:] for axis in axes)
    return Layout(mesh, dims, source.dtype, source.reduction, partial)

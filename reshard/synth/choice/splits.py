"""Which splits a node may have: every way in which mesh axes divide its factors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from reshard.synth.choice.problem import Node, Problem, Split
from reshard.types.mesh import Mesh

MOST_FACTORS = 7
"""Operations of transformers have no more: batch, position, another position, two of heads, depth and a sum."""


def list_splits(node: Node, mesh: Mesh, orders: Iterable[tuple[str, ...]] = ()) -> tuple[Split, ...]:
    """The splits of a node: each axis of the mesh divides one factor or none, and what it divides must come out even.

    Of two axes that divide the same factor, the mesh's first is the major one, or they are in one of the `orders`. A
    factor of size 0 may be split by any axes. By three axes or more the largest `MOST_FACTORS` may be split.

    >>> rows = Node("w", (4, 3), frozenset({0, 1}), (), ())
    >>> list_splits(rows, Mesh(x=2, y=2))
    (((), ()), (('y',), ()), (('x',), ()), (('x', 'y'), ()))
    """
    if node.only is not None:
        return node.only
    # An axis of one device divides nothing; with it, equal layouts would be counted twice.
    axes = [name for name, size in mesh.axes.items() if size > 1]
    # A state of twelve qubits has as many factors, and three axes 1,753 ways to split them.
    ranked = sorted(node.splittable, key=lambda factor: (-(node.sizes[factor] or math.inf), factor))
    targets = (None, *sorted(ranked[: MOST_FACTORS if len(axes) > 2 else None]))
    found: list[Split] = []
    for chosen in itertools.product(targets, repeat=len(axes)):
        placed = list(zip(axes, chosen, strict=True))
        split = [tuple(name for name, target in placed if target == f) for f in range(len(node.sizes))]
        # Pieces of unequal size are never chosen: operations on them would need masks, and 0 is divided by all.
        if any(size % math.prod(mesh.axes[a] for a in names) for size, names in zip(node.sizes, split, strict=True)):
            continue
        same = [[names, *(order for order in orders if sorted(order) == sorted(names))] for names in split]
        found += itertools.product(*(dict.fromkeys(ways) for ways in same))
    return tuple(found)


def allow_splits(problem: Problem, allowed: Mapping[int, tuple[Split, ...] | None]) -> Problem:
    """The problem in which nodes, by their numbers, may have other splits, None for all; of nodes that are tied those
    stay so that may have the same."""
    nodes = list(problem.nodes)
    for at, only in allowed.items():
        nodes[at] = replace(nodes[at], only=only, tie=nodes[at].tie and f"{nodes[at].tie} {only}")
    return replace(problem, nodes=tuple(nodes))


def list_orders(problem: Problem) -> tuple[tuple[str, ...], ...]:
    """The orders of axes, other than the mesh's, that some node has in the only split that it is allowed.

    All others may follow them: a batch that arrives as P(("y", "x")) would otherwise have to be reordered first.
    """
    place = {name: number for number, name in enumerate(problem.mesh.axes)}
    # Nodes that may choose are given all orders that they may have: these bind nobody else.
    fixed = [names for node in problem.nodes if node.only and len(node.only) == 1 for names in node.only[0]]
    return tuple(dict.fromkeys(names for names in fixed if list(names) != sorted(names, key=place.__getitem__)))

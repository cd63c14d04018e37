"""Whether parts of an array fill it exactly once, by index sets, however the parts are strided.

    q  "(g q d) m", q=0:2 of 4      rows 0..7, 16..23, ...      in each dim, the runs of indices that a part has
    k  "(g q d) m", q=2             rows 8..11, 24..27, ...

A part is the product of its dims' index sets, so an array is swept dim by dim: between two ends of runs the same parts
are there, and these are swept along the next dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from reshard.errors import PlanError
from reshard.types.view import Groups, View, Window

Runs = tuple[tuple[int, int], ...]
"""Indices from each first up to the one after the last, ascending."""

_MOST_RUNS = 1 << 16


def list_region(view: View, filled: bool) -> tuple[Runs, ...]:
    """For each dim, the indices that a view fills in its target, or else takes of its source.

    >>> list_region(View.identity((4,)), filled=True)
    (((0, 4),),)
    """
    groups: Groups = view.target if filled else view.source
    regions: list[Runs] = []
    for dim in groups:
        runs: list[tuple[int, int]] = [(0, 1)]
        for at in dim:
            atom = view.atoms[at]
            start, size = (atom.into if filled else atom.taken) or Window(0, atom.size)
            if atom.size == size:
                # All values of a minor atom: every run is as many times longer.
                runs = [(first * size, last * size) for first, last in runs]
                continue
            if sum(last - first for first, last in runs) > _MOST_RUNS:
                raise PlanError(f"the view {view} has parts of more than {_MOST_RUNS} pieces; give larger ones")
            runs = [(value * size + start, value * size + start + atom.size) for run in runs for value in range(*run)]
        regions.append(tuple(runs))
    return tuple(regions)


def find_fault(
    shape: Sequence[int], regions: Sequence[tuple[Runs, ...]], gaps: bool = True
) -> tuple[tuple[int, ...], list[int]] | None:
    """The first element that no region has, or several have, with these; None if each element is in exactly one.

    Without `gaps`, elements may be in none.

    >>> find_fault((4,), [(((0, 2),),), (((1, 4),),)]), find_fault((4,), [(((0, 2),),), (((2, 4),),)])
    (((1,), [0, 1]), None)
    """

    def sweep_dim(active: list[int], dim: int) -> tuple[tuple[int, ...], list[int]] | None:
        if not active:
            return ((0,) * (len(shape) - dim), active) if gaps else None
        if dim == len(shape):
            return ((), active) if len(active) > 1 else None
        if len(active) == 1 and (not gaps or regions[active[0]][dim:] == wholes[dim:]):
            return None
        ends: dict[int, list[int]] = {0: [], shape[dim]: []}
        for number in active:
            for end in (end for run in regions[number][dim] for end in run):
                ends.setdefault(end, []).append(number)
        here: set[int] = set()
        swept: set[frozenset[int]] = set()
        for place in sorted(ends)[:-1]:
            for number in ends[place]:
                here ^= {number}  # One run may begin where another of the same part ends.
            between = frozenset(here)
            fault = None if between in swept else sweep_dim(sorted(between), dim + 1)
            swept.add(between)
            if fault is not None:
                return (place, *fault[0]), fault[1]
        return None

    wholes = tuple([((0, size),) for size in shape])
    return sweep_dim(list(range(len(regions))), 0) if math.prod(shape) else None

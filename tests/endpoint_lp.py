"""Linear programs for what the busiest device of a move must send or receive, element class by element class.

Elements that the same devices hold and the same devices need are one class. They know nothing of tiles, layouts, views
or plans: only who has what before and after, from `types.meaning` and, for a move with a view, from what numpy makes of
an array of indices (`Reference`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod

import numpy as np
import scipy.sparse
from scipy.optimize import linprog

from reshard.types.layout import Layout
from tests.oracle import PADDING, tiles_of

Class = tuple[frozenset[int], frozenset[int]]
"""The devices that hold an element, and those that lack it."""


Reference = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""The target's array of a move with a view, of the source's array and of what the target holds before."""


def classes(source: Layout, target: Layout, reference: Reference | None = None) -> Counter[Class]:
    """How many elements each class has; those that nobody lacks are left out."""
    holders, wanting = (_devices(layout) for layout in (source, target))
    if reference is not None:
        # Whatever the target holds before comes from no index of the source.
        kept = np.full(target.shape, -1, np.int64)
        comes_from = reference(np.arange(prod(source.shape)).reshape(source.shape), kept).ravel().tolist()
        placed = wanting
        wanting = {comes_from[at]: placed[at] for at in placed if comes_from[at] >= 0}
    counts = Counter((frozenset(holders[at]), frozenset(wanting[at] - holders[at])) for at in wanting)
    return Counter({key: count for key, count in counts.items() if key[1]})


def _devices(layout: Layout) -> dict[int, set[int]]:
    devices: dict[int, set[int]] = {}
    for device, tile in tiles_of(layout).items():
        for at in tile[tile != PADDING].ravel():
            devices.setdefault(int(at), set()).add(device)
    return devices


def pulled(source: Layout, target: Layout) -> float:
    """The least elements that the busiest device sends or receives if only holders send."""
    sizes = classes(source, target)
    return max(_received(sizes), sent(sizes, forwarding=False))


def forwarded(source: Layout, target: Layout, reference: Reference | None = None) -> float:
    """The same if devices may pass on what they receive: each element leaves its holders at least once."""
    sizes = classes(source, target, reference)
    return max(_received(sizes), sent(sizes, forwarding=True))


def _received(sizes: Counter[Class]) -> int:
    received: Counter[int] = Counter()
    for (_, lacking), size in sizes.items():
        received.update(dict.fromkeys(lacking, size))
    return max(received.values(), default=0)


def sent(sizes: Counter[Class], forwarding: bool, whole: bool = False) -> float:
    """min t: each class is sent once to everyone who lacks it, and nobody sends more than t.

    With `whole`, each device sends a whole number of elements of each class.
    """
    if not sizes:
        return 0.0
    variables: list[tuple[int, int]] = []  # (class, sender)
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    bounds: list[float] = []
    every = list(sizes)
    for number, ((holders, lacking), size) in enumerate(sizes.items()):
        for device in sorted(holders | lacking if forwarding else holders):
            if device in holders:
                rows.append(number)
                columns.append(len(variables))
                values.append(-1.0)
            variables.append((number, device))
        bounds.append(-float(size))
    senders = {device: at for at, device in enumerate(sorted({device for _, device in variables}))}
    for column, (_, device) in enumerate(variables):
        rows.append(len(every) + senders[device])
        columns.append(column)
        values.append(1.0)
    for at in range(len(senders)):
        rows.append(len(every) + at)
        columns.append(len(variables))
        values.append(-1.0)
        bounds.append(0.0)
    equal_rows = [number for number, _ in variables]
    equal = scipy.sparse.csr_matrix(
        (np.ones(len(variables)), (equal_rows, range(len(variables)))), shape=(len(every), len(variables) + 1)
    )
    less = scipy.sparse.csr_matrix((values, (rows, columns)), shape=(len(bounds), len(variables) + 1))
    demand = [size * len(lacking) for (_, lacking), size in sizes.items()]
    goal = np.zeros(len(variables) + 1)
    goal[-1] = 1.0
    return float(linprog(goal, less, bounds, equal, demand, bounds=(0, None), integrality=int(whole)).fun)

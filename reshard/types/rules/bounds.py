"""Lower bounds on the bytes that the worst device receives, whatever the plan.

Even layouts: with V = product of the radices held before and local after, a target tile has a
share in V source tiles. If any digit moves between two holders, some device holds nothing it
needs and receives |T|; otherwise every device holds exactly 1/V of it and receives |T| (1 - 1/V).
No device is enumerated. Uneven layouts take the maximum over devices of |T_d minus S_d|.
"""

from __future__ import annotations

import math
from functools import lru_cache

from reshard.types.layout import Layout
from reshard.types.mesh import merged_spans
from reshard.types.pair import exchange_stats
from reshard.types.pair.overlap import fullest
from reshard.types.pair.refine import Refinement, refine


@lru_cache(maxsize=4096)
def lower_bound(source: Layout, target: Layout) -> int:
    """Bytes that some device must receive in any redistribution from source to target.

    Padding is not counted. For a partial source see `_reduction`.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> lower_bound(Layout.parse("f32[{x}4, 8]", mesh), Layout.parse("f32[16, {x}2]", mesh))
    96
    """
    if source.partial != target.partial:
        return source.nbytes(_reduction(source, target))
    refinement = refine(source, target)
    if refinement is None or not refinement.exact:
        return source.nbytes(exchange_stats.fewest_received(source, target))
    return source.nbytes(even(refinement))


def even(refinement: Refinement) -> int:
    """The bound in elements for layouts that no dim pads."""
    shares = refinement.pieces if refinement.swapped else refinement.pieces - 1
    return refinement.common * shares


def _reduction(source: Layout, target: Layout) -> int:
    """The bound for a sum over f devices, in elements: the larger of a mean and a maximum.

    Summing one element takes f - 1 receipts somewhere, and each of its other holders one more, so
    the mean device, and so the worst, receives at least (f - 1 + holders - 1) / devices of the array;
    with one holder that is reduce-scatter's (f - 1) / f of a tile. And no device has a finished
    element of its target before it receives something for it. Devices along axes that neither
    layout uses work by themselves, as in every collective on them.
    """
    mesh = source.mesh
    axes = [*source.held, *source.partial, *target.held, *target.partial]
    used = math.prod(high // low for low, high in merged_spans((mesh.stride(a), mesh.stride(a) * a.size) for a in axes))
    partial, kept = (math.prod(s.size for s in lay.partial) for lay in (source, target))
    devices = used // kept
    holders = devices // math.prod(s.size for s in target.held)
    receipts = (partial // kept - 1) + (holders - 1)
    mean = -(-math.prod(source.shape) * receipts // devices)
    return max(mean, math.prod(fullest(dim) for dim in target.dims))

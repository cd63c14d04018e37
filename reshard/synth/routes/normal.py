"""Routes between layouts that have a common refinement: slice, move, gather.

A worked example: f32[{y}{x}2, 4] -> f32[{z}4, {y}2] on <x=2, y=2, z=2>. A digit and its holders, by row:

    digit     before   after
    dim 0, 2  y        z          the digit that y holds passes to z
    dim 0, 2  x        -          x is spent: nothing holds by it after
    dim 0, 2  -        -
    dim 1, 2  -        y          the chain  - -> y -> z  starts here; z is free: nothing holds by it before
    dim 1, 2  -        -

    step         holders, digit by digit   layout                received
                 y  x  -  -  -             f32[{y}{x}2, 4]
    slice        y  x  -  z  -             f32[{y}{x}2, {z}2]        0 B   the free z, until it is needed elsewhere
    permute      z  x  -  y  -             f32[{z}{x}2, {y}2]       16 B   y and z change digits: a permute cycle
    all_gather   z  -  -  y  -             f32[{z}4, {y}2]          16 B   the spent x

**Normal form** (Rink et al., arXiv 2112.01075, with any digits in between). Slice by the strides that only the target
uses, each at the local digit that starts its chain. Move all digits that change holders in one step. Gather the
strides that only the source uses, each from the digit that ends its chain. This meets the lower bound: slicing first
and gathering last make the tiles that move as small as they can be, and every message of the move is needed where it
goes. The move is an all-to-all if it consists of swaps, a permute if of permute cycles, an exchange if it mixes them.
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard.synth.network import Links
from reshard.synth.routes.chains import Chains, direct, through
from reshard.synth.routes.route import Pair, Route
from reshard.synth.routes.staged import staged


def routes(pair: Pair, links: Links | None) -> Iterator[Route]:
    """The routes of fewest bytes; with a network those worth pricing on it.

    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2, y=2, z=2)
    >>> pair = Pair(Layout.parse("f32[{y}{x}2, 4]", mesh), Layout.parse("f32[{z}4, {y}2]", mesh))
    >>> [step.kind for step in next(routes(pair, None))]
    ['slice', 'permute', 'all_gather']
    """
    if pair.reduces or pair.refinement is None:
        return
    if pair.source == pair.target:
        yield ()
        return
    chains = Chains(pair, pair.refinement)
    yield from fewest_bytes(chains) if links is None else staged(chains, links)


def fewest_bytes(chains: Chains) -> Iterator[Route]:
    """The normal form and the exchange, both at the lower bound, and routes that may save launches or memory."""
    first, last = chains.sliced(), chains.ungathered()
    yield through(chains, [first, last])
    refinement = chains.refinement
    if refinement.swapped or refinement.gathered:
        yield direct(chains)
    if refinement.swapped:
        # Two swaps of halves may receive what one exchange of two rounds does, in collectives of their own.
        yield through(chains, [first, *chains.one_by_one(first, last), last])
        if borrowings := chains.borrowings():
            yield through(chains, [chains.sliced(borrowings), chains.ungathered(borrowings)])

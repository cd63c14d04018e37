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
from itertools import pairwise

from reshard.synth.network import Links
from reshard.synth.routes.chains import Chains, direct, step, through
from reshard.synth.routes.route import Pair, Route
from reshard.synth.routes.staged import staged
from reshard.types.plan import StepSpec


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
    if links is not None:
        yield from staged(chains, links)
        return
    yield from fewest_bytes(chains)
    if not pair.refinement.exact:
        yield from gathers_before_exchanges(Chains(pair, pair.refinement, prime=True))


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


def gathers_before_exchanges(chains: Chains) -> Iterator[Route]:
    """Routes for padded layouts between the normal form, which gathers the padding, and the exchange, which leaves it.

    f32[{x}{y}8/1021] -> f32[1021] on <x=12, y=12>: 122 of the 144 pieces of 8 have elements

        normal form     1 launch      1144 elements received
        exchange        143 launches  1021
        both            12 launches   1029: x is gathered with 88 elements, of which some are padding, then y exchanged

    The major strides are gathered, so that every device has a share of the elements before the exchange.
    """
    first, last = chains.sliced(), chains.ungathered()
    spent = sorted({s for s, end in zip(last, chains.end, strict=True) if end is None and s is not None}, reverse=True)
    for count in range(1, len(spent)):
        opened = tuple(
            None if end is None and s in spent[:count] else s for s, end in zip(last, chains.end, strict=True)
        )
        steps = (step(chains, *ends) for ends in pairwise([chains.start, first, last, opened]))
        yield (*(s for s in steps if s is not None), StepSpec("exchange", chains.target))

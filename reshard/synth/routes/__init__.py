"""Routes: candidate steps from one layout to another, one algorithm a file, all with one signature.

    routes(pair: Pair, links: Links | None) -> Iterator[Route]

    normal          pairs that refine: slice ; move ; gather, at the lower bound, with the layouts on the way as states
                    of who holds each digit; for a network also with gathers and all-to-alls fused or staged by axis
    boxes           pairs that do not refine: an exchange of boxes, with slices before and gathers after
    permute_first   contiguous pairs that refine once a permute has reordered their holders
    reduction       partial sources: finish the reduction, then any of the above; targets that are partial where the
                    source is not: any of the above, then split the sum

The planner itself asks two more, which need more than the links:

    crossing        to other devices: pull, cross and gather, two exchanges, relays
    idle            for a network: over axes that neither layout uses

    route           `Pair`, `Route` and the signature

`list_routes` asks those modules that can route a pair, in this order: of equally good plans the first is taken.

To add a module of routes, say `halos`, for layouts that differ by a shift:

1. write `halos.py` with `routes(pair, links)`; return at once for pairs that it cannot route, and yield tuples of
   `StepSpec`s of kinds that `plans.rules` has. Every plan is checked, so a wrong route raises and never moves data;
2. add `halos.routes` to `list_routes`, and to `reduction.AFTERWARDS` if it may follow a reduction;
3. test in tests/synth/routes that the routes lead to the target and reach the bound.
"""

from reshard.synth.network import Links
from reshard.synth.routes import boxes, normal, permute_first, reduction
from reshard.synth.routes.route import Pair as Pair
from reshard.synth.routes.route import Route as Route
from reshard.types.whole import check_deadline


def list_routes(pair: Pair, links: Links | None) -> list[Route]:
    """All routes between layouts on one set of devices, each once; those of earlier modules win ties.

    >>> from reshard.types import Layout, Mesh
    >>> rows, whole = (Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4]", "f32[16]"))
    >>> [[step.kind for step in route] for route in list_routes(Pair(rows, whole), None)]
    [['all_gather'], ['exchange']]
    """
    if pair.reduces:
        modules = [reduction.routes]
    elif pair.refinement is None:
        modules = [boxes.routes, permute_first.routes]
    else:
        # Pairs that refine need no permute first, but on a network one may be faster.
        modules = [normal.routes] if links is None else [normal.routes, permute_first.routes]
    every: dict[Route, None] = {}
    for routes in modules:
        for route in routes(pair, links):
            check_deadline()
            every[route] = None
    return list(every)

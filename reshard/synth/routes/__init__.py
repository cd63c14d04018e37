"""Routes: candidate steps from one layout to another, one algorithm a file, all with one signature.

    routes(pair: Pair, links: Links | None) -> Iterator[Route]

    normal          pairs that refine: slice ; move ; gather, at the lower bound
    staged          ... and for a network: its gathers and all-to-alls fused or staged by axis
    boxes           pairs that do not refine: an exchange of boxes, with slices before and gathers after
    permute_first   contiguous pairs that refine once a permute has reordered their holders
    reduction       partial sources: finish the reduction, then any of the above
    start           targets that are partial where the source is not: any of the above, then split the sum

The planner itself asks two more, which need more than the links:

    crossing        to other devices: pull, cross and gather, two exchanges, relays
    idle            for a network: over axes that neither layout uses

    route           `Pair`, `Route` and the signature
    chains          the layouts on the way, as states of who holds each digit

The planner asks every module in `ROUTES`, in this order: of equally good plans the first is taken. A module yields
nothing for a pair that it cannot route.

To add a module of routes, say `halos`, for layouts that differ by a shift:

1. write `halos.py` with `routes(pair, links)`; return at once for pairs that it cannot route, and yield tuples of
   `StepSpec`s of kinds that `plans.rules` has. Every plan is checked, so a wrong route raises and never moves data;
2. append `halos.routes` to `ROUTES`, and to `reduction.AFTERWARDS` if it may follow a reduction;
3. test in tests/synth/routes/test_halos.py that the routes lead to the target and reach the bound.
"""

from reshard.synth.routes import boxes, normal, permute_first, reduction, start
from reshard.synth.routes.route import Pair as Pair
from reshard.synth.routes.route import Route as Route

ROUTES = (normal.routes, boxes.routes, permute_first.routes, reduction.routes, start.routes)
"""Every module of routes; the earlier ones win ties."""

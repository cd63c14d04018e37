"""Pairs to route, and what every candidate keeps, whether the planner would choose it or not."""

from __future__ import annotations

import random
from collections.abc import Iterator

from reshard.lower import lower_plan
from reshard.plans.plan import Plan, chain
from reshard.runtime import Account, run
from reshard.synth.routes import Pair, Route
from reshard.synth.routes.normal import Chains
from reshard.types import Layout, Mesh
from tests.layouts import random_layout
from tests.oracle import check_target, source_tiles

MESHES = (Mesh(x=4, y=3), Mesh(x=6, y=2), Mesh(x=2, y=2, z=2), Mesh(x=5, y=2, z=3), Mesh(x=2, y=2, z=2, w=2))


def pair_of(source: str, target: str, mesh: Mesh) -> Pair:
    return Pair(Layout.parse(source, mesh), Layout.parse(target, mesh))


def random_chains(seed: int, count: int, even: bool = False) -> Iterator[Chains]:
    """Chains of random pairs that refine, on meshes of prime and composite axes, of uneven sizes unless `even`."""
    choose = random.Random(seed)
    while count:
        mesh = choose.choice(MESHES)
        shape = [choose.choice((mesh.size, 2 * mesh.size, 7, 12)) for _ in range(choose.randint(1, 3))]
        pair = Pair(random_layout(choose, mesh, shape), random_layout(choose, mesh, shape))
        exact = pair.refinement is not None and (pair.refinement.exact or not even)
        if exact and pair.refinement is not None and pair.source != pair.target:
            count -= 1
            yield Chains(pair, pair.refinement)


def runs(pair: Pair, route: Route) -> Plan:
    """The plan of a candidate; asserts that it ends in the target, within the bytes and the memory that it promises."""
    plan = chain(pair.source, pair.target, route)
    account = Account(plan.source.dtype)
    check_target(plan, run(lower_plan(plan), source_tiles(plan), account))
    assert account.received_bytes <= plan.received_bytes, str(plan)
    assert account.peak_bytes <= plan.peak_bytes, str(plan)
    return plan

"""Plans of few messages, whose programs are short.

A compiler is given the two devices of every message of a permute, and of every round of an exchange: 32 kB of text a
round on 1,024 devices. The groups of an all-to-all are a line.
"""

from __future__ import annotations

from reshard.plans.plan import Plan, chain
from reshard.synth import cost
from reshard.synth.options import PlanOptions
from reshard.synth.routes import Pair, list_routes
from reshard.types.layout import Layout


def message_count(plan: Plan) -> int:
    """How many messages the permutes and exchanges of a plan list, all devices together.

    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2, y=2)
    >>> message_count(plan(Layout.parse("f32[{x}{y}2]", mesh), Layout.parse("f32[{y}{x}2]", mesh)))
    4
    """
    rounds = sum(step.launches for step in plan.steps if step.kind in ("exchange", "permute"))
    return rounds * plan.source.mesh.size


def short_plans(source: Layout, target: Layout, messages: int, options: PlanOptions) -> list[Plan]:
    """The plans on one set of devices that list at most this many `messages`, within the budget of the options.

    Steps are not cut to fit the budget, which would make more messages, and no tile on the way is larger than those at
    the ends. There may be no such plan.
    """
    pair, links = Pair(source, target), None if options.network is None else options.network.links(source.mesh)
    most = max(source.tile_bytes, target.tile_bytes)
    plans = (cost.time_plan(chain(source, target, route, options.donate), links) for route in list_routes(pair, links))
    return [
        plan
        for plan in plans
        if message_count(plan) <= messages
        and (options.budget is None or plan.peak_bytes <= options.budget)
        and all(step.result.tile_bytes <= most for step in plan.steps)
    ]

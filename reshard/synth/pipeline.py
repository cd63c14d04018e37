"""Pipelines to other devices: how many parts, and what their schedule takes.

    a   a part crosses                               the senders' busiest device, or the receivers'
    r   what a receiver takes in of that             counted beside the gather, as if they had one link
    b   a part is gathered on the target's devices

    a  +  (parts - 1) max(a, r + b)  +  b

The first part crosses alone, and the last one is gathered alone. Between, a part crosses while the one before is
gathered. A receiver takes in both, and no less than the sum of both is charged to it: links of their own would be
faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from reshard.errors import PlanError, StepError
from reshard.geometry.remesh import disjoint
from reshard.plans.pipeline import Pipeline, plan_part
from reshard.plans.plan import Plan, chain
from reshard.synth import cost
from reshard.synth.network import Network
from reshard.synth.routes import Pair, crossing
from reshard.types.layout import Layout

MOST = 16
"""The most parts: more gain at most a sixteenth of the shorter step."""


def overlapped(source: Layout, target: Layout, network: Network) -> Pipeline | None:
    """The pipeline of least predicted seconds from one set of devices to another, None if there is none.

    There is one where no device is in both sets, and the target gathers what it replicates.

    >>> from reshard.types import Mesh
    >>> trainer, server = Mesh(fsdp=16), Mesh({"tp": 8, "rep": 16}, device_ids=range(16, 144))
    >>> weights, served = Layout.parse("f32[{fsdp}8, 128]", trainer), Layout.parse("f32[128, {tp}16]", server)
    >>> pipeline = overlapped(weights, served, Network("wires", inner=(0.0, 1e9), domain=128))
    >>> pipeline.parts, round(pipeline.seconds * 1e9 / pipeline.plan.endpoint_bound_bytes, 3)
    (16, 1.027)
    """
    if not disjoint(source.mesh, target.mesh) or source.partial or target.partial:
        return None
    routes = dict.fromkeys(crossing.routes(Pair(source, target), network))
    plans = [chain(source, target, route) for route in routes if len(route) > 1]
    every = [pipeline for plan in plans for pipeline in _list_pipelines(plan, network)]
    return min(every, key=_prefer_pipeline, default=None)


def _prefer_pipeline(pipeline: Pipeline) -> tuple[float, int, int]:
    return float(f"{pipeline.seconds:.9g}"), pipeline.launches, pipeline.peak_bytes


def _list_pipelines(plan: Plan, network: Network) -> Iterator[Pipeline]:
    """The plan in every number of parts that it splits into."""
    for parts in range(2, MOST + 1):
        with suppress(PlanError, StepError):
            yield Pipeline(plan, parts, predict_pipeline(plan_part(plan, parts), parts, network))


def predict_pipeline(each: Plan, parts: int, network: Network) -> float:
    """Predicted seconds of a plan in parts, of which `each` is that of one."""
    first, *later = cost.time_crossing(each, network).steps
    crosses, gathers = first.seconds or 0.0, sum(step.seconds or 0.0 for step in later)
    taken = first.received_bytes / network.crossing.bandwidth
    return crosses + (parts - 1) * max(crosses, taken + gathers) + gathers

"""Launches of plans with the planner's default slack and with none: between uneven layouts, to other devices, of trees.

    python -m benchmarks.slack [PAIRS [FIRST]]

Takes seeded random pairs of contiguous layouts per mesh, 100 by default, of arrays of rank 1 or 2 with sizes that
pieces seldom divide. Prints mean, median and maximum of the launches, and the bytes beside the fewest.

Then ten times as many random pairs on two sets of 1 to 48 devices that overlap, from seed FIRST on: the busiest
device's bytes beside the fewest that any route has, and the launches beside those of the same move with the target on
devices of its own. These are at most twice as many, unless all routes of so few have more bytes than the slack allows.

Last, a Llama of 80 layers from a trainer to a server on half of its devices, and on others.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Iterator

import reshard as rs
from benchmarks.endpoints import pair as random_sets
from benchmarks.planner import llama_moves
from reshard.geometry.remesh import disjoint, one_set
from reshard.plans.plan import chain
from reshard.synth.routes import Pair, crossing
from tests.layouts import contiguous_layouts

MESHES = {
    "8x8": {"x": 8, "y": 8},
    "7x9": {"x": 7, "y": 9},
    "61": {"x": 61},
    "12x12": {"x": 12, "y": 12},
    "8x8x8": {"x": 8, "y": 8, "z": 8},
    "64x32": {"x": 64, "y": 32},
}
SIZES = (513, 997, 1000, 1021, 2049, 5003, 12289, 50257)
SLACKS = (0, 0.05)


def pairs(name: str, count: int) -> list[tuple[rs.Layout, rs.Layout]]:
    """`count` random pairs of different layouts on a mesh, at least one of them uneven."""
    choose, mesh = random.Random(name), rs.Mesh(MESHES[name])
    sample: list[tuple[rs.Layout, rs.Layout]] = []
    while len(sample) < count:
        shape = tuple(choose.choice(SIZES) for _ in range(choose.randint(1, 2)))
        every = list(contiguous_layouts(mesh, shape))
        source, target = choose.choice(every), choose.choice(every)
        if source != target and not (source.even and target.even):
            sample.append((source, target))
    return sample


def overlapping_pairs(count: int, first: int) -> Iterator[tuple[rs.Layout, rs.Layout]]:
    """The random pairs of layouts on two sets of devices that have some in common, of `count` seeds from `first` on."""
    for seed in range(first, first + count):
        source, target = random_sets(seed, 48)
        if not one_set(source.mesh, target.mesh) and not disjoint(source.mesh, target.mesh):
            yield source, target


def place_apart(source: rs.Layout, target: rs.Layout) -> rs.Layout:
    """The target on devices that the source does not have."""
    free = max(source.mesh.devices) + 1
    return rs.Layout.parse(str(target), rs.Mesh(target.mesh.axes, device_ids=range(free, free + target.mesh.size)))


def busiest(plan: rs.Plan) -> int:
    """The bytes that its busiest device sends or receives."""
    return max(plan.sent_bytes, plan.received_bytes)


def print_overlapping(count: int, first: int) -> None:
    """Prints a row for each slack."""
    sample = list(overlapping_pairs(count, first))
    routes: list[list[rs.Plan]] = []
    for source, target in sample:
        both = Pair(source, target)
        routes.append(
            [
                chain(source, target, route)
                for route in (*crossing.routes(both, None), *crossing.list_relays(source, target))
            ]
        )
    for slack in SLACKS:
        more, launches, above, fewer = [1.0], [1.0], 0, 0
        for (source, target), every in zip(sample, routes, strict=True):
            plan, apart = (rs.plan(source, end, slack=slack) for end in (target, place_apart(source, target)))
            least = min(map(busiest, every))
            if least and plan.launches and apart.launches:
                more.append(busiest(plan) / least)
                launches.append(plan.launches / apart.launches)
                within = min(each.launches for each in every if busiest(each) - least <= slack * least)
                above += launches[-1] > 2
                fewer += launches[-1] > 2 >= within / apart.launches
        means = [math.exp(statistics.fmean(map(math.log, each))) for each in (more, launches)]
        print(
            f"{len(sample)} overlapping pairs from seed {first}, slack {slack:4}: bytes beside the fewest geomean "
            f"{means[0]:.4f}, most {max(more):.4f}; launches beside those to other devices geomean {means[1]:.3f}, "
            f"most {max(launches):.1f}, above 2 in {above}, where a route within the slack takes fewer in {fewer}",
            flush=True,
        )


def print_trees() -> None:
    """Prints the launches and bytes of a Llama's weights, for a trainer and a server on half of its devices."""
    for trainer, server in (({"fsdp": 64}, 32), ({"fsdp": 32, "t": 8}, 128), ({"fsdp": 512}, 256)):
        near, size = rs.Mesh(trainer), math.prod(trainer.values())
        for what, at in (("half of them", 0), ("others", size)):
            far = rs.Mesh({"rep": server // 8, "tp": 8}, device_ids=range(at, at + server))
            for slack in SLACKS:
                tree = rs.plan_tree(llama_moves(near, far), slack=slack)
                most = max(tree.sent_bytes, tree.received_bytes)
                print(
                    f"Llama, {near} to {far}, {what}, slack {slack:4}: {tree.launches} launches, busiest device "
                    f"{most / 2**30:.2f} GiB, bound {tree.endpoint_bound_bytes / 2**30:.2f} GiB",
                    flush=True,
                )


def main(count: int, first: int) -> None:
    """Prints a row per mesh and slack, and those of two sets of devices."""
    for name in MESHES:
        sample = pairs(name, count)
        fewest = [rs.plan(source, target, slack=0).received_bytes for source, target in sample]
        for slack in SLACKS:
            plans = [rs.plan(source, target, slack=slack) for source, target in sample]
            launches = [plan.launches for plan in plans]
            more = [plan.received_bytes / least for plan, least in zip(plans, fewest, strict=True) if least]
            mean, median, above = statistics.mean(launches), statistics.median(launches), sum(n > 8 for n in launches)
            print(
                f"{name:6} slack {slack:4}: launches mean {mean:6.1f}, median {median:4.1f}, most {max(launches):4}, "
                f"above 8 in {above}; bytes mean {statistics.mean(more):.4f}, most {max(more):.4f}"
            )
    print_overlapping(10 * count, first)
    print_trees()


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    main(*given, *(100, 0)[len(given) :])

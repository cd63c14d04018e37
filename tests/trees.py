"""Trees of moves for tests, and a run of a tree's plans against the oracle."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from math import prod

import numpy as np

import reshard as rs
from benchmarks.fuzz_moves import random_view
from reshard.runtime import Account
from tests.layouts import MESHES, random_crossing, random_layout, random_pair
from tests.oracle import check_target, source_tiles

Pair = tuple[rs.Layout, rs.Layout]


def random_tree(choose: random.Random) -> dict[str, Pair]:
    """Arrays of a few different moves, some of them partial, on meshes of any sizes."""
    base = [
        random_pair(choose, choose.choice(["int32", "int32", "int16"]), partial=choose.random() < 0.3)
        for _ in range(choose.randint(1, 6))
    ]
    return {f"a{number}": choose.choice(base) for number in range(choose.randint(1, 12))}


def random_moves(choose: random.Random) -> dict[str, rs.Move | Pair]:
    """A few arrays on devices of their own, to others and back, some through views that take or fill a part."""

    def partly() -> rs.Move:
        view = random_view(choose, 96, 1)
        meshes = [end.mesh for end in random_crossing(choose, counts=(1, 2, 3, 4))]
        if choose.random() < 0.3:
            meshes = meshes[:1] * 2
        ends = (random_layout(choose, mesh, shape) for mesh, shape in zip(meshes, view.shapes, strict=True))
        return rs.Move(*ends, **view.options)

    def near() -> Pair:
        axes, first = choose.choice(MESHES[:4]).axes, choose.choice((0, 0, 2, 4, 8))
        mesh = rs.Mesh(axes, device_ids=range(first, first + prod(axes.values())))
        shape = [choose.choice((4, 5, 8, 12)) for _ in range(choose.randint(1, 2))]
        return random_layout(choose, mesh, shape), random_layout(choose, mesh, shape)

    kinds = (partly, partly, near, near, lambda: random_crossing(choose, counts=(1, 2, 3, 4)))
    return {f"a{number}": choose.choice(kinds)() for number in range(choose.randint(1, 4))}


def random_readers(choose: random.Random, devices: int, count: int) -> dict[str, Pair]:
    """Arrays each of whose chunks are on devices of their own, some outside of the target's, which replicates most."""
    meshes = [rs.Mesh(rep=devices // 2, tp=2), rs.Mesh({"rep": devices // 2, "tp": 2}, device_ids=range(devices)[::-1])]
    moves: dict[str, Pair] = {}
    while len(moves) < count:
        shape = [choose.randint(1, 9) for _ in range(choose.randint(1, 3))]
        grid = {f"c{dim}": choose.choice((1, 2, 3)) for dim in range(len(shape))}
        if prod(grid.values()) > devices:
            continue
        readers = choose.sample(range(devices * choose.choice((1, 1, 2))), prod(grid.values()))
        dtype, split = choose.choice(("int32", "int16")), choose.randint(0, len(shape))
        kept = choose.choice((["tp"], ["tp"], ["tp"], ["rep", "tp"]))
        source = rs.Layout.from_spec(rs.Mesh(grid, device_ids=readers), shape, dtype, [[axis] for axis in grid])
        spec = [kept if dim == split else [] for dim in range(len(shape))]
        moves[f"a{len(moves)}"] = source, rs.Layout.from_spec(choose.choice(meshes), shape, dtype, spec)
    return moves


def live_peak(tree: rs.TreePlan) -> int:
    """The most bytes live on a device while batches run one by one, each as the numpy runtime measures it; no plan
    takes more than it says."""

    def ends(plan: rs.Plan) -> list[rs.Layout]:
        return [plan.source, plan.target] if plan.fills else [plan.source]

    def held(plans: Iterable[rs.Plan]) -> Counter[int]:
        tiles = Counter[int]()
        for end in (end for plan in plans for end in ends(plan)):
            tiles.update(dict.fromkeys(end.mesh.devices, end.tile_bytes))
        return tiles

    live = held(tree.plans.values())
    peak = Counter(live)
    for batch in tree.batches:
        plan, account, alone = batch.plans[0], Account("uint8"), rs.TreePlan(batch.names, (batch,))
        tiles = {name: source_tiles(plan) for name, plan in zip(batch.names, batch.plans, strict=True)}
        targets = {name: alone.plans[name].target for name in alone.filled}
        into = {
            name: {device: np.zeros(end.tile_shape, end.dtype) for device in end.mesh.devices}
            for name, end in targets.items()
        }
        rs.simulate(alone, tiles, account, into=into)
        assert len(batch.plans) > 1 or account.peak_bytes <= plan.peak_bytes, plan
        live.subtract(held(batch.plans))
        peak |= live + account.peak
        live.update(account.live)
    return max(peak.values(), default=0)


def llama(mesh: rs.Mesh, layers: int = 2, width: int = 64, hidden: int = 176, rows: int = 512) -> dict[str, object]:
    """The weights of a Llama-like model: from shards over x and y, as a trainer has them, to shards over y."""

    def pair(shape: tuple[int, ...], before: list[list[str]], after: list[list[str]]) -> Pair:
        return tuple(rs.Layout.from_spec(mesh, shape, "int32", spec) for spec in (before, after))

    def layer() -> dict[str, Pair]:
        split, over_columns, over_rows = [["x"], ["y"]], [[], ["y"]], [["y"], []]
        return {
            "wq": pair((width, width), split, over_columns),
            "wk": pair((width // 2, width), split, over_columns),
            "wv": pair((width // 2, width), split, over_columns),
            "wo": pair((width, width), split, over_rows),
            "gate": pair((width, hidden), split, over_columns),
            "up": pair((width, hidden), split, over_columns),
            "down": pair((hidden, width), split, over_rows),
            "norm1": pair((width,), [["x"]], [[]]),
            "norm2": pair((width,), [["x"]], [[]]),
        }

    embedding = pair((rows, width), [["x"], ["y"]], [["y"], []])
    return {"layers": [layer() for _ in range(layers)], "embedding": embedding, "norm": pair((width,), [["x"]], [[]])}


def check_tree(tree: rs.TreePlan) -> Account:
    """Runs all plans on indices: every device ends with what the targets mean, and the tree's figures are what ran.

    The parts of an all-reduce are rounded up array by array in the promise, and once for the batch when it runs.
    """
    account = Account("uint8")
    moved = rs.simulate(tree, {name: source_tiles(plan) for name, plan in tree.plans.items()}, account)
    for name, plan in tree.plans.items():
        check_target(plan, moved[name])
    rounded = any(step.kind == "all_reduce" for plan in tree.plans.values() for step in plan.steps)
    assert account.received_bytes == tree.received_bytes or (rounded and account.received_bytes < tree.received_bytes)
    assert account.launches == tree.launches
    assert account.peak_bytes <= tree.peak_bytes
    return account

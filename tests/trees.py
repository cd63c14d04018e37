"""Trees of moves for tests, and a run of a tree's plans against the oracle."""

from __future__ import annotations

import random

import reshard as rs
from reshard.runtime import Account
from tests.layouts import random_pair
from tests.oracle import check_target, source_tiles

Pair = tuple[rs.Layout, rs.Layout]


def random_tree(choose: random.Random) -> dict[str, Pair]:
    """Arrays of a few different moves, some of them partial, on meshes of any sizes."""
    base = [
        random_pair(choose, choose.choice(["int32", "int32", "int16"]), partial=choose.random() < 0.3)
        for _ in range(choose.randint(1, 6))
    ]
    return {f"a{number}": choose.choice(base) for number in range(choose.randint(1, 12))}


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

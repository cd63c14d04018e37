"""Trees of targets: each leaf of a tree of arrays gets its own, and trees that do not fit are told apart by name."""

from __future__ import annotations

from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from reshard.errors import PlanError
from reshard.jax.target_trees import spread

X, NO = P("x"), P()


@pytest.mark.parametrize(
    ("given", "arrays", "each"),
    [
        (X, [1, (2, 3)], [X, X, X]),
        ([X, NO], [1, (2, 3)], [X, NO, NO]),
        ({"b": NO, "a": X}, {"a": 1, "b": 2}, [X, NO]),
        ({"a": X, "b": None}, {"a": 1, "b": 2}, [X, None]),  # None leaves an array to JAX
        ({"a": X, "b": NO}, {"a": 1, "b": None}, [X]),  # a node without a leaf
        (X, (), []),
    ],
)
def test_each_leaf_gets_its_own(given: Any, arrays: Any, each: list[Any]) -> None:
    assert spread(given, arrays, "target") == each


@pytest.mark.parametrize(
    ("given", "arrays", "message"),
    [
        ({"a": X}, {"a": 1, "b": [2, 3]}, "only the arrays have b.0, b.1; give one"),
        ({"a": X, "c": X}, {"a": 1}, "only the source shardings have c; give one"),
        ([X, [X, NO]], [1, 2], "only the source shardings have 1.0, 1.1; give one"),
        ([X], (1,), "other nodes are not in the same places"),
        ({f"{n}": X for n in range(9)}, {}, "only the source shardings have 0, 1, 2, 3; give one"),
    ],
)
def test_a_tree_of_another_structure(given: Any, arrays: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        spread(given, arrays, "source")

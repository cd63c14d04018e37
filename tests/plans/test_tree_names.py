"""Names of arrays in nested trees."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.plans.plan_data import flatten_tree

A = rs.Layout.parse("f32[8]", rs.Mesh(x=2))


def test_a_pair_of_layouts_is_a_leaf_and_other_tuples_are_not():
    assert flatten_tree(((A, A), [A, A])) == {"0": (A, A), "1": [A, A]}
    assert flatten_tree({"a": ((A, A), (A, A))}) == {"a.0": (A, A), "a.1": (A, A)}


def test_what_is_no_container_is_a_leaf():
    assert flatten_tree({"a": "move"}) == {"a": "move"}


@pytest.mark.parametrize("key", [None, True, 1.5, ("a",)])
def test_other_keys_are_refused(key: object):
    with pytest.raises(PlanError, match="the key"):
        flatten_tree({"top": {key: (A, A)}})

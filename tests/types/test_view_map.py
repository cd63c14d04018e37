"""Index maps of views against lists of all pairs of indices."""

import itertools
import random
from math import prod

from reshard.types.view import ViewMap, canonical_map, compose_maps
from tests.view_oracle import random_case


def pairs(view: ViewMap) -> dict[int, int]:
    """Every source index with its target index."""
    both = {}
    for values in itertools.product(*(range(count) for count, _, _ in view.digits)):
        digits = list(zip(values, view.digits, strict=True))
        both[view.start + sum(v * s for v, (_, s, _) in digits)] = view.end + sum(v * t for v, (_, _, t) in digits)
    return both


def test_equal_maps_are_equal_objects():
    one = canonical_map([(2, 12, 1), (3, 4, 4), (4, 1, 12)])
    two = canonical_map([(4, 1, 12), (1, 5, 9), (2, 12, 1), (3, 4, 4)])
    assert one == two
    assert canonical_map([(2, 12, 12), (3, 4, 4), (4, 1, 1)]) == canonical_map([(24, 1, 1)])
    assert canonical_map([(0, 3, 1), (3, 1, 2)]) == canonical_map([(0, 1, 1)])


def test_a_map_after_another_has_the_pairs_of_both():
    composed = 0
    for seed in range(60):
        one = random_case(random.Random(seed)).move.view
        for other in range(20):
            two = random_case(random.Random(seed * 20 + other)).move.view
            both = compose_maps(one.map, two.map) if prod(one.target_shape) == prod(two.source_shape) else None
            if both is not None:
                first, second = pairs(one.map), pairs(two.map)
                assert pairs(both) == {i: second[j] for i, j in first.items() if j in second}
                composed += 1
    assert composed > 10


def test_a_view_and_its_inverse_make_the_identity():
    turn = canonical_map([(3, 4, 1), (4, 1, 3)])
    assert compose_maps(turn, canonical_map([(4, 3, 1), (3, 1, 4)])) == canonical_map([(12, 1, 1)])


def test_digits_that_do_not_nest_have_no_map():
    assert compose_maps(canonical_map([(2, 3, 1), (3, 1, 2)]), canonical_map([(2, 3, 1), (3, 1, 2)])) is None

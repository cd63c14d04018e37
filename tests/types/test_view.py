"""Views: atoms on both sides, windows, shapes, text, JSON, and what the constructor refuses."""

import itertools
import json
import random
from math import prod

import pytest

from reshard.errors import PlanError
from reshard.types.view import Atom, View, ViewMap, Window, canonical_map, compose_maps
from tests.view_oracle import random_case

QKV = View((Atom("three", 3), Atom("h", 4), Atom("d", 2)), ((0, 1, 2),), ((1,), (0, 2)))


def test_shapes_and_text():
    assert (QKV.source_shape, QKV.target_shape) == ((24,), (4, 6))
    assert str(QKV) == "(three h d) -> h (three d)"
    q = View((Atom("three", 1, Window(2, 3)), Atom("h", 4)), ((0, 1),), ((1,),))
    assert (q.source_shape, q.target_shape) == ((12,), (4,))
    assert str(q) == "(three h) -> h, three=2 of the source's 3"
    assert str(View((), ((),), ())) == "1 ->"


def test_json():
    for view in (QKV, View((Atom("h", 2, None, Window(1, 4)),), ((0,),), ((0,),)), View((), (), ())):
        assert View.from_dict(json.loads(json.dumps(view.to_dict()))) == view


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"atoms": 3, "source": [], "target": []},
        {"atoms": [["a", 2, None]], "source": [[0]], "target": [[0]]},
        {"atoms": [["a", 2, None, None]], "source": [[1]], "target": [[0]]},
        {"atoms": [["a", 2, None, None]], "source": [[0, 0]], "target": [[0]]},
        {"atoms": [["a", True, None, None]], "source": [[0]], "target": [[0]]},
        {"atoms": [["a", 2, [2, 3], None]], "source": [[0]], "target": [[0]]},
        {"atoms": [["a", 2, [1], None]], "source": [[0]], "target": [[0]]},
        {"atoms": [["a", 2, None, None]], "source": [[0]], "target": []},
        {"atoms": [["a", 1 << 62, None, None], ["b", 4, None, None]], "source": [[0, 1]], "target": [[0], [1]]},
    ],
)
def test_what_is_not_a_view_is_refused(data):
    with pytest.raises(PlanError):
        View.from_dict(data)


@pytest.mark.parametrize(
    "parts", [(None, (), ()), ((), 3, ()), ((), (0,), ()), ((), ((0,),), ()), ((Atom("a", 2),), (("x",),), ((0,),))]
)
def test_dims_that_name_no_atoms_are_refused(parts):
    with pytest.raises(PlanError, match="of a view"):
        View(*parts)
    with pytest.raises(PlanError, match="of a view"):
        View.identity(3)  # type: ignore[arg-type]


def test_plain():
    assert View.identity((3, 0)).plain and View((Atom("a", 2), Atom("b", 3)), ((0, 1),), ((0, 1),)).plain
    assert not QKV.plain
    assert not View((Atom("a", 2, None, Window(0, 2)),), ((0,),), ((0,),)).plain


# Index maps of views against lists of all pairs of indices.


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


def test_every_small_map_after_another_has_the_pairs_of_both():
    """A second map that takes any window of the array between, by any step, whatever the digits of the first."""
    composed = 0
    for sizes in ((12,), (3, 4), (2, 6), (2, 3, 2)):
        places = [prod(sizes[at + 1 :]) for at in range(len(sizes))]
        for order in itertools.permutations(range(len(sizes))):
            sources = [prod(sizes[later] for later in order[order.index(at) + 1 :]) for at in range(len(sizes))]
            first = canonical_map(zip(sizes, sources, places, strict=True))
            there = pairs(first)
            for start, count, step in itertools.product(range(12), range(1, 7), range(1, 7)):
                if start + (count - 1) * step < 12:
                    second = canonical_map([(count, step, 1)], start)
                    both = compose_maps(first, second)
                    if both is not None:
                        moved = pairs(second)
                        assert pairs(both) == {i: moved[j] for i, j in there.items() if j in moved}, (first, second)
                        composed += 1
    assert composed > 1000


def test_a_view_and_its_inverse_make_the_identity():
    turn = canonical_map([(3, 4, 1), (4, 1, 3)])
    assert compose_maps(turn, canonical_map([(4, 3, 1), (3, 1, 4)])) == canonical_map([(12, 1, 1)])


def test_digits_that_do_not_nest_have_no_map():
    assert compose_maps(canonical_map([(2, 3, 1), (3, 1, 2)]), canonical_map([(2, 3, 1), (3, 1, 2)])) is None

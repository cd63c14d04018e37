"""Patterns: what they mean, the sizes that follow, and the messages for those that do not fit."""

import pytest

from reshard.errors import NotationError
from reshard.types.notation.einops import parse_pattern, read_part, resolve_pattern


def view(text, source, target, take=None, into=None, **sizes):
    return resolve_pattern(parse_pattern(text), (source, target), sizes, take or {}, into or {})


@pytest.mark.parametrize(
    ("text", "source", "target", "sizes", "atoms"),
    [
        (
            "l (three h d) m -> three l h d m",
            (2, 24, 5),
            (3, 2, 4, 2, 5),
            {},
            {"l": 2, "three": 3, "h": 4, "d": 2, "m": 5},
        ),
        ("(a b) -> (b a)", (12,), (12,), {"a": 3}, {"a": 3, "b": 4}),
        ("a b -> b 1 a", (2, 3), (3, 1, 2), {}, {"a": 2, "b": 3}),
        ("(3 h) -> 3 h", (6,), (3, 2), {}, {"3": 3, "h": 2}),
        ("... a -> a ...", (2, 3, 4), (4, 2, 3), {}, {"_0": 2, "_1": 3, "a": 4}),
        ("a () -> a", (2, 1), (2,), {}, {"a": 2}),
        ("a one -> a", (2, 1), (2,), {}, {"a": 2, "one": 1}),
        ("(a b) -> a b", (0,), (0, 3), {}, {"a": 0, "b": 3}),
        ("->", (), (), {}, {}),
    ],
)
def test_sizes_are_inferred(text, source, target, sizes, atoms):
    made = view(text, source, target, **sizes)
    assert {atom.name: atom.size for atom in made.atoms} == atoms
    assert (made.source_shape, made.target_shape) == (source, target)


@pytest.mark.parametrize("part", [slice(1, 3), (1, 3), slice(-3, -1), slice(1, -1)])
def test_parts(part):
    made = view("(h d) -> h d", (8,), (2, 2), take={"h": part}, h=4)
    assert made.atoms[0] == ("h", 2, (1, 4), None)
    assert view("h d -> (h d)", (2, 2), (8,), into={"h": part}, h=4).atoms[0] == ("h", 2, None, (1, 4))


def test_an_index_is_left_out_where_the_array_has_no_such_dim():
    for text in ("(three h) -> h", "(three h) -> three h"):
        assert view(text, (12,), (4,), take={"three": -1}, three=3).atoms[0] == ("three", 1, (2, 3), None)
    assert view("(three h) -> three h", (12,), (1, 4), take={"three": 2}).target == ((0,), (1,))
    assert view("three h -> (three h)", (4,), (12,), into={"three": 0}, three=3).source_shape == (4,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse_pattern("a b"), "0 arrows"),
        (lambda: parse_pattern("a -> b -> c"), "2 arrows"),
        (lambda: parse_pattern("a a -> a"), "a occurs twice"),
        (lambda: parse_pattern("(a -> a"), "not closed"),
        (lambda: parse_pattern("a) -> a"), "brackets do not match"),
        (lambda: parse_pattern("((a) b) -> a b"), "brackets do not match"),
        (lambda: parse_pattern("(a ...) -> a ..."), "outside of brackets"),
        (lambda: parse_pattern("a ... -> a"), "write it on both"),
        (lambda: parse_pattern("a-b -> a"), "cannot read '-'"),
        (lambda: parse_pattern(3), "give text"),
        (lambda: parse_pattern("a " * 10_000 + "->"), "give text"),
        (lambda: view("(a b) -> a b", (10,), (3, 3)), r"not a multiple of 3|global shape \(9,\)"),
        (lambda: view("(a b) -> (b a)", (10,), (10,)), "the size of a, b cannot be inferred"),
        (lambda: view("(a b) -> (b a)", (10,), (10,), a=3), "not a multiple of 3"),
        (lambda: view("(a b) -> a b", (10,), (5, 2), c=3), "names 'c', which is not an atom"),
        (lambda: view("(a b) -> a b", (10,), (5, 2), a=2.5), "a=2.5"),
        (lambda: view("(a b) -> a b", (10,), (5, 2), a=-5), "a=-5"),
        (lambda: view("a b -> a b", (10,), (5, 2)), "2 dims are written"),
        (lambda: view("a b -> a", (5, 2), (5,)), "take={'b': 0}"),
        (lambda: view("a -> a b", (5,), (5, 2)), "into={'b': 0}"),
        (lambda: view("a -> a", (5,), (5,), take={"a": 5}), "5:6 is not a part"),
        (lambda: view("a -> a", (5,), (5,), take={"a": slice(0, 5, 2)}), "without a step"),
        (lambda: view("a -> a", (5,), (5,), take={"a": "all"}), "give an index"),
        (lambda: view("a -> a", (5,), (5,), take={"a": 0}, into={"a": 0}), "make two moves"),
        (lambda: view("(9" + "9" * 30 + " a) -> a", (5,), (5,)), "a size is a whole number"),
        (lambda: read_part("1:2:3"), "START:STOP"),
        (lambda: read_part("x"), "START:STOP"),
        (lambda: read_part("9" * 5000), "at most"),
    ],
)
def test_messages(call, message):
    with pytest.raises(NotationError, match=message):
        call()


def test_parts_as_text():
    assert [read_part(text) for text in ("2", "0:8", "8:", ":3")] == [2, slice(0, 8), slice(8, None), slice(None, 3)]

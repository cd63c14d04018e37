"""Numerals of unknown radices are read as layouts are, and laws are assembled as written in the field's notation."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from reshard.proofs.rules import (
    POST,
    PRE,
    DigitRun,
    MovedDigit,
    R,
    S,
    Taken,
    Typed,
    X,
    commutes,
    global_index,
    local_index,
)
from reshard.proofs.symbolic import Term
from reshard.types import Layout
from reshard.types.layout import Digit as LayoutDigit
from reshard.types.meaning import meaning
from tests.layouts import random_pair
from tests.proofs.terms import value


@pytest.mark.parametrize("seed", range(3))
def test_the_laws_read_layouts_as_meaning_does(seed: int):
    """Any dim of any layout, taken as a run, one of its digits, and a run."""
    choose, seen = random.Random(seed), 0
    while seen < 60:
        layout, _ = random_pair(choose)
        device = choose.choice(layout.mesh.devices)
        for dim, indices in zip(layout.dims, meaning(layout, device), strict=True):
            if dim.size and len(dim.digits) > 1:
                cut = choose.randrange(len(dim.digits))
                assert read(layout, dim.digits, cut, device) == list(indices)
                seen += 1


def read(layout: Layout, digits: tuple[LayoutDigit, ...], cut: int, device: int) -> list[int]:
    """What `global_index` gives at every local index."""
    radix, axis = digits[cut]
    parts = {"pre": digits[:cut], "post": digits[cut + 1 :]}
    position = layout.mesh.position(device)

    def coordinate(of: LayoutDigit) -> int:
        return position // layout.mesh.stride(of.axis) % of.radix

    def local(part: tuple[LayoutDigit, ...]) -> int:
        return int(np.prod([d.radix for d in part if d.axis is None]))

    def spelled(part: tuple[LayoutDigit, ...], at: int) -> int:
        number, below = 0, local(part)
        for d in part:
            if d.axis is None:
                below //= d.radix
            number = number * d.radix + (coordinate(d) if d.axis else at // below % d.radix)
        return number

    known = {f"all_{n}": int(np.prod([d.radix for d in part])) for n, part in parts.items()}
    known |= {n: lambda at, part=part: spelled(part, at) for n, part in parts.items()}
    known |= {"r": radix, "x": coordinate(digits[cut]) if axis else 0}
    numeral = (PRE, MovedDigit("p", R, X if axis else None), POST)
    names = {n: Term(f"e_{n}") for n in ("pre", "p", "post")}
    at = itertools.product(range(local(parts["pre"])), range(1 if axis else radix), range(local(parts["post"])))
    term = global_index(numeral, names, {})
    return [value(term, known | {"e_pre": a, "e_p": b, "e_post": c}) for a, b, c in at]


def test_a_gathered_digit_by_hand():
    """The law of docs/proofs.md: member e_p has the element, at the receiver's other digits."""
    typed = Typed(((PRE, MovedDigit("p", R, X), POST),), ((PRE, MovedDigit("p", R), POST),))
    law = commutes("a digit", typed, Taken({X: Term("e_p")}, {}))
    assert [" = ".join(map(str, pair)) for pair in law.given] == ["o_pre tile_post + o_post = e_pre tile_post + e_post"]
    assert [" = ".join(map(str, pair)) for pair in law.equal] == [
        "(pre(o_pre) r + e_p) all_post + post(o_post) = (pre(e_pre) r + e_p) all_post + post(e_post)"
    ]
    bounds = {str(digit): None if bound is None else str(bound) for digit, bound in law.digits}
    assert bounds == {"e_pre": None, "e_p": "r", "e_post": "tile_post", "o_pre": None, "o_post": "tile_post", "x": "r"}
    assert set(map(str, law.sizes)) == {"tile_pre", "all_pre", "r", "tile_post", "all_post"}
    (lemma,) = law.lemmas
    assert [str(term) for term in lemma] == ["o_pre", "e_pre", "o_post", "e_post", "tile_post"]


def test_indices_skip_held_digits_and_elements_take_the_sender():
    dim = (DigitRun("pre"), MovedDigit("p", R, X), MovedDigit("q", S))
    names = {name: Term(f"e_{name}") for name in ("pre", "p", "q")}
    assert str(local_index(dim, names)) == "e_pre s + e_q"
    assert str(global_index(dim, names, {})) == "(pre(e_pre) r + x) s + e_q"
    assert str(global_index(dim, names, {X: Term("m")})) == "(pre(e_pre) r + m) s + e_q"

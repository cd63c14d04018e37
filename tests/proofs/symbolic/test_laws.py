"""Terms and laws as text, which is what a proof prints."""

from __future__ import annotations

import pytest

from reshard.proofs.symbolic import Law, Term

A, B, R = Term("a"), Term("b"), Term("r")


@pytest.mark.parametrize(
    ("term", "text"),
    [
        (A, "a"),
        (A + 1, "a + 1"),
        (A * 7 + B, "a 7 + b"),
        ((A + B) * R, "(a + b) r"),
        (A * R * R, "a r r"),
        (Term("pre")(A, B + 1), "pre(a, b + 1)"),
        (Term("pre")(A) * R + B, "pre(a) r + b"),
    ],
)
def test_terms_read_as_formulas(term: Term, text: str):
    assert str(term) == text


def test_terms_are_equal_if_written_alike():
    assert A * R + 1 == A * R + Term("1") != R * A + 1


def test_laws_read_as_sentences():
    law = Law("carry", (R,), ((A, R), (B, None)), ((A + B, R),), ((B, A),), ((A, R),))
    assert str(law) == "carry: b = a, a < r, if a + b = r"
    assert str(Law("same", (), (), equal=((A, A),))) == "same: a = a"

"""Claims and laws as text, and what z3 decides: true and false claims of every kind, and what happens without it."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

import reshard as rs
from reshard.errors import UndecidedError
from reshard.proofs import prove
from reshard.proofs.symbolic import (
    Absent,
    Claim,
    Fewer,
    Law,
    Lemma,
    Query,
    Rounds,
    Term,
    claims,
    decide_claims,
    to_smt2,
)
from reshard.proofs.symbolic.claims import ShareTurn, ShiftAlong
from reshard.types import Layout, Mesh

z3 = pytest.importorskip("z3", reason="proofs need reshard[prove]")

A, B, C, D, R = (Term(name) for name in "abcdr")
ONE_NUMERAL = Law("numerals", (R,), ((A, None), (B, R), (C, None), (D, R)), ((A * R + B, C * R + D),), ((B, D),))
SHIFTED = ShareTurn("j", 4, 4, (ShiftAlong(3, 1, 2, 2),))
SHIFTED_BY_HEAD = ShareTurn("j", 3, 3, (ShiftAlong(2, 3, 1, 3),))
LEMMA = Lemma(A, C, B, D, R)

FALSE = [
    Claim("another digit", (("a", 4), ("b", 4)), (("a", "b"),)),
    Claim("a size that is named", (("a", "n"),), (), below=((((1, "a"),), 4),)),
    Claim("padding", (("a", 4), ("b", 3)), (), ((((3, "a"), (1, "b")), 11),), ((((1, "a"),), 3),)),
    Fewer("more bytes", 3, 2),
    Rounds("two receivers of one sender", ((1, 2), (2, 2)), ((1, None), (1, None)), ()),
    Rounds("a share that is counted wrongly", ((1, 3),), ((1, "j"),), (ShareTurn("j", 1, 2),)),
    Rounds(
        "a shift by the head",
        ((1, 3), (3, 3)),
        ((3, "j"), (1, None)),
        (SHIFTED_BY_HEAD,),
    ),
    Law("a digit without a bound", (R,), ((A, None), (B, None), (C, None), (D, R)), ONE_NUMERAL.given, ((B, D),)),
    Law("not below", (R,), ((A, R),), below=((A + 1, R),)),
    Law("another value of a function", (), ((A, None), (B, None)), equal=((Term("f")(A), Term("f")(B)),)),
    Absent("a solution", "(declare-const n Int)(assert (> n 3))"),
]


@pytest.mark.parametrize("claim", FALSE, ids=lambda claim: claim.about)
def test_false_claims_are_not_decided(claim: Query):
    with pytest.raises(UndecidedError, match="fails where"):
        decide_claims([claim])


TRUE = [
    Claim("padding", (("a", 4), ("b", 3)), (), ((((3, "a"), (1, "b")), 9),), ((((1, "a"),), 3),)),
    Claim("digits", (("a", "n"),), (("a", "a"),)),
    Fewer("as many bytes", 3, 3),
    Rounds("a turned bijection", ((1, 3), (3, 3)), ((3, "j"), (1, None)), (ShareTurn("j", 3, 3),)),
    Rounds("a shifted one", ((1, 4), (4, 4)), ((4, "j"), (1, None)), (SHIFTED,)),
    Law("numerals", ONE_NUMERAL.sizes, ONE_NUMERAL.digits, ONE_NUMERAL.given, ((A, C), (B, D)), lemmas=(LEMMA,)),
    Law("below", (R,), ((A, R),), below=((A, R),)),
    Law("equal values of a function", (), (), ((A, B),), ((Term("f")(A), Term("f")(B)),)),
    Absent("no solution", "(declare-const n Int)(assert (and (> n 3) (< n 4)))"),
]


@pytest.mark.parametrize("claim", TRUE, ids=lambda claim: claim.about)
def test_true_claims_are_decided(claim: Query):
    decide_claims([claim])


@pytest.mark.parametrize("claim", [*TRUE, *FALSE], ids=lambda claim: claim.about)
def test_the_text_says_the_same_to_any_solver(claim: Query):
    text = to_smt2(claim)
    assert text.startswith(f"; {claim}\n")
    other = z3.Solver()
    other.from_string(text)
    assert other.check() == (z3.unsat if claim in TRUE else z3.sat)


@pytest.mark.parametrize("radix", [2, 3, 5])
def test_rounds_by_trying_all(radix: int):
    """Receiver (c, d) hears from (d + j, c) in round j: a bijection if the round counts modulo the same radix."""
    for radix_of_turn in (2, 3, 5):
        claim = Rounds(
            "some", ((1, radix), (radix, radix)), ((radix, "j"), (1, None)), (ShareTurn("j", radix, radix_of_turn),)
        )
        receivers = list(itertools.product(range(radix), repeat=2))
        turns = range(radix_of_turn)
        once = all(len({((d + j) % radix_of_turn, c) for c, d in receivers}) == len(receivers) for j in turns)
        if once:
            decide_claims([claim])
        else:
            with pytest.raises(UndecidedError):
                decide_claims([claim])


def test_a_claim_that_takes_too_much_work_is_undecided():
    """A product of unknowns that z3 cannot settle at once."""
    x, y, z = (Term(name) for name in "xyz")
    cubes = Law("cubes", (x, y, z), (), ((x * x * x + y * y * y, z * z * z),), ((x, y),))
    with pytest.raises(UndecidedError, match=r"z3 does not decide it within 20,000 units of its work \("):
        decide_claims([cubes], work=20_000)


def test_threads_prove_side_by_side():
    """In one context of z3, these would end the process."""
    mesh = Mesh(x=4, y=2)
    plan = rs.plan(Layout.parse("f32[{y}8, 16, {x}4]", mesh), Layout.parse("f32[16, {x}{y}2, 16]", mesh))
    with ThreadPoolExecutor(4) as threads:
        proofs = [threads.submit(prove, plan, launches=True) for _ in range(40)]
    assert len({str(proof.result()) for proof in proofs}) == 1


def test_without_the_solver_nothing_is_proved(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    claims.z3.cache_clear()
    monkeypatch.setattr(claims, "import_module", missing)
    mesh = Mesh(x=4)
    with pytest.raises(UndecidedError, match="pip install z3-solver"):
        prove(rs.plan(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh)))
    claims.z3.cache_clear()

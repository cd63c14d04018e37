"""Claims as text, which is what a proof prints."""

from __future__ import annotations

import pytest

from reshard.proofs.symbolic import Absent, Claim, Fewer, Rounds


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        (Claim("a step", (), ()), "a step: nothing to show"),
        (Claim("a step", (), (("a", "a"), ("b", "b"))), "a step: 2 digits keep their value"),
        (Claim("a step", (), (("a", "b"), ("c", "c"))), "a step: 1 digits keep their value, a = b"),
        (
            Claim("a step", (), (), ((((5, "a"), (1, "b")), 13),), ((((1, "b"),), 3),)),
            "a step: b < 3 if 5 a + b < 13",
        ),
        (Claim("a step", (), (), below=(((), 3),)), "a step: 0 < 3"),
        (Fewer("memory", 3, 4), "memory: 3 N <= 4 N for all N >= 1"),
        (
            Rounds("rounds", (), (), ()),
            "rounds: in each round no device sends twice, and over all rounds every share arrives",
        ),
        (Absent("1 launch or fewer", "(check-sat)"), "1 launch or fewer: no choice meets all conditions"),
    ],
)
def test_claims_read_as_sentences(claim: object, text: str):
    assert str(claim) == text

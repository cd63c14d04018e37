"""Terms evaluated at given values, to compare laws with layouts and runs."""

from __future__ import annotations

from reshard.proofs.symbolic import Term


def value(term: Term, known: dict) -> int:
    """The integer that a term is, where `known` has the values of names and the functions of Python."""
    args = [value(a, known) for a in term.args]
    if term.head in "+*":
        return sum(args) if term.head == "+" else args[0] * args[1]
    if args:
        return known[term.head](*args)
    return int(term.head) if term.head.isdigit() else known[term.head]

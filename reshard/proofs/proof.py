"""What a proof is made of: parts, each with its claims and its argument."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from reshard.proofs.symbolic import Form, Query, to_smt2
from reshard.types.plan import Plan

WIDTH = 100
"""Columns of a proof's text, if nothing says less."""


@dataclass(frozen=True)
class Part:
    """One statement, the steps of its argument, and the claims that z3 decided."""

    statement: str
    argument: tuple[str, ...]
    claims: tuple[Query, ...] = ()
    holds: bool = True


@dataclass(frozen=True)
class Fewest(Part):
    """What a search for a plan of fewer launches came to: it `holds` if there is none. Else `better` is one that meets
    the same bytes and memory, or None where that was not decided.
    """

    better: Plan | None = None


@dataclass(frozen=True)
class Proof:
    """A plan is right and bounded for all sizes of its form; `minimal.holds` says whether it reaches the bound.

    `form.names` are the sizes that vary, at least 1 each; `form.fixed` the dims that keep theirs. `launches` is None
    where no search was asked for.
    """

    plan: Plan
    form: Form
    right: Part
    bounded: Part
    minimal: Part
    launches: Fewest | None = None

    @property
    def parts(self) -> tuple[tuple[str, Part], ...]:
        """The parts by name."""
        found = ("right", self.right), ("bounded", self.bounded), ("minimal", self.minimal)
        return found if self.launches is None else (*found, ("launches", self.launches))

    @property
    def claims(self) -> tuple[Query, ...]:
        """All that z3 decided."""
        return tuple(claim for _, part in self.parts for claim in part.claims)

    def explain(self, width: int = WIDTH) -> str:
        """The argument as text, of so many columns where words allow it."""
        parts = (line for name, part in self.parts for line in lines(name, part, width))
        first, *rest = _head(self)
        return "\n".join([first, *(line for each in rest for line in _wrapped(each, "  ", width)), *parts])

    def to_smt2(self) -> str:
        """Every claim negated, in SMT-LIB 2, one after another: a solver must answer `unsat` to each."""
        return "(reset)\n".join(to_smt2(claim) for claim in self.claims)

    def __str__(self) -> str:
        return self.explain()


def _head(proof: Proof) -> list[str]:
    plan, form = proof.plan, proof.form
    lines = [
        f"{plan.source} -> {plan.target} on {plan.source.mesh}",
        f"form {form.spell(plan.source)} -> {form.spell(plan.target)}",
    ]
    if form.names:
        here = ", ".join(f"{name} = {size}" for name, size in sorted(form.sizes.items()))
        lines.append(f"for all {', '.join(sorted(form.sizes))} >= 1 (here {here}); N is their product")
    else:
        lines.append("for these sizes")
    return lines + [f"dim {at} keeps its size: {why}" for at, why in sorted(form.fixed.items())]


def lines(name: str, part: Part, width: int = WIDTH) -> list[str]:
    """A part as text: its statement, and its argument and claims beneath."""
    head, *rest = f"{name}: {part.statement}".splitlines()
    found = [*textwrap.wrap(head, width, subsequent_indent="  ", break_long_words=False), *rest]
    for line in (*part.argument, *map(str, part.claims)):
        found += _wrapped(line, "  - ", width)
    return found


def _wrapped(line: str, mark: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, initial_indent=mark, subsequent_indent=" " * 4, break_long_words=False)

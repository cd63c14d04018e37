"""What a proof consists of: parts, each with a statement, an argument and claims."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from reshard.errors import ReshardError, quoted
from reshard.plans.plan import Plan
from reshard.proofs.symbolic import Form, Query, to_smt2
from reshard.types.whole import whole

WIDTH = 100
"""Columns of a proof's text, unless a caller asks for fewer."""


@dataclass(frozen=True)
class ProofPart:
    """One statement, the steps of its argument, and the claims that z3 decided.

    >>> ProofPart("a device receives 48 bytes", ("step 1: 48 bytes",)).holds
    True
    """

    statement: str
    argument: tuple[str, ...]
    claims: tuple[Query, ...] = ()
    holds: bool = True


@dataclass(frozen=True)
class Fewest(ProofPart):
    """The result of a search for a plan with fewer launches.

    `holds` if there is none. Otherwise `better` is one within the same bytes and memory, or None if that is undecided.
    """

    better: Plan | None = None


@dataclass(frozen=True)
class Proof:
    """A plan is right and bounded for all sizes of its form; `minimal.holds` says whether it reaches the bound.

    `form.names` are the sizes that vary, each at least 1, and `form.fixed` the dims that keep their size. `launches` is
    None unless `prove` was called with `launches=True`.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=2)
    >>> proof = rs.prove(rs.plan(rs.Layout.parse("f32[{x}4]", mesh), rs.Layout.parse("f32[8]", mesh)))
    >>> proof.right.holds, proof.minimal.holds, proof.form.sizes
    (True, True, {'n0': 4})
    """

    plan: Plan
    form: Form
    right: ProofPart
    bounded: ProofPart
    minimal: ProofPart
    launches: Fewest | None = None

    @property
    def parts(self) -> tuple[tuple[str, ProofPart], ...]:
        """The parts by name."""
        parts = ("right", self.right), ("bounded", self.bounded), ("minimal", self.minimal)
        return parts if self.launches is None else (*parts, ("launches", self.launches))

    @property
    def claims(self) -> tuple[Query, ...]:
        """Everything that z3 decided."""
        return tuple(claim for _, part in self.parts for claim in part.claims)

    def explain(self, width: int = WIDTH) -> str:
        """The argument as text, wrapped to `width` columns where its words allow; `ReshardError` for no such number."""
        plan, form, width = self.plan, self.form, checked_width(width)
        meshes = f"{plan.source.mesh} to {plan.target.mesh}" if plan.crosses else str(plan.source.mesh)
        head = [f"form {form.spell(plan.source)} -> {form.spell(plan.target)}", "for these sizes"]
        if form.names:
            here = ", ".join(f"{name} = {size}" for name, size in sorted(form.sizes.items()))
            head[1] = f"for all {', '.join(sorted(form.sizes))} >= 1 (here {here}); N is their product"
        head += [f"dim {at} keeps its size: {why}" for at, why in sorted(form.fixed.items())]
        text = [f"{plan.source} -> {plan.target} on {meshes}"]
        text += [line for each in head for line in _wrapped(each, "  ", width)]
        return "\n".join([*text, *(line for name, part in self.parts for line in part_lines(name, part, width))])

    def to_smt2(self) -> str:
        """Every claim negated, in SMT-LIB 2, one after another: a solver must answer `unsat` to each."""
        return "(reset)\n".join(to_smt2(claim) for claim in self.claims)

    def __str__(self) -> str:
        return self.explain()


def checked_width(width: object) -> int:
    """The width of a text as an int; raises `ReshardError` unless it is a whole number of at least 1.

    >>> checked_width(80)
    80
    """
    columns = whole(width, 1)
    if columns is None:  # Not nan either, which is neither more nor less than the length of any line.
        raise ReshardError(f"width {quoted(width)}: give columns, a whole number from 1 up")
    return columns


def part_lines(name: str, part: ProofPart, width: int = WIDTH) -> list[str]:
    """A part as lines of text: its statement, with its argument and its claims below."""
    head, *rest = f"{name}: {part.statement}".splitlines()
    text = [*textwrap.wrap(head, width, subsequent_indent="  ", break_long_words=False), *rest]
    for line in (*part.argument, *map(str, part.claims)):
        text += _wrapped(line, "  - ", width)
    return text


def _wrapped(line: str, mark: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, initial_indent=mark, subsequent_indent=" " * 4, break_long_words=False)

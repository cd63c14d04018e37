"""The proof of a tree of plans: each different plan is proved, and the programs of each batch are compared.

plans      every different plan is right and bounded for all sizes of its form, and minimal where it is
batches    the programs of a batch have the same devices in each launch, compared list by list
tree       the sums and maxima that follow: bytes received against the joint bound, and the peak
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from reshard.errors import PlanError
from reshard.lower import Program
from reshard.lower.batch import lower_batch
from reshard.proofs.plan_proof import prove_plan
from reshard.proofs.proof import WIDTH, Proof
from reshard.types.plan import Plan
from reshard.types.plan_tree import TreePlan
from reshard.types.units import bytes_text, counted


@dataclass(frozen=True)
class TreeProof:
    """The proofs of a tree's different plans; `of` has that of each array.

    >>> import reshard as rs
    >>> rows, whole = (rs.Layout.parse(text, rs.Mesh(x=2)) for text in ("f32[{x}4]", "f32[8]"))
    >>> proof = rs.prove(rs.plan_tree({"a": (rows, whole), "b": (rows, whole)}))
    >>> len(proof.proofs), proof.of["b"].right.holds, proof.minimal
    (1, True, True)
    """

    tree: TreePlan
    proofs: tuple[Proof, ...]

    @cached_property
    def of(self) -> Mapping[str, Proof]:
        """The proof of each array's plan, by name."""
        by_plan = {proof.plan: proof for proof in self.proofs}
        return {name: by_plan[plan] for name, plan in self.tree.plans.items()}

    @property
    def minimal(self) -> bool:
        """Whether the busiest device receives no more than some device must, of all arrays together."""
        return self.tree.received_bytes <= self.tree.lower_bound_bytes

    def explain(self, width: int = WIDTH) -> str:
        """The proofs of the different plans, and what follows for the tree."""
        return "\n".join([*self._head(), *(proof.explain(width) for proof in self.proofs)])

    def _head(self) -> Iterator[str]:
        tree = self.tree
        yield (
            f"{counted(len(tree.names), 'array')}, {counted(len(self.proofs), 'different plan')}, all proved; "
            f"{counted(len(tree.batches), 'batch')}, whose programs have the same devices in every launch"
        )
        bound = "as few as in any plans" if self.minimal else f"the bound is {bytes_text(tree.lower_bound_bytes)}"
        yield f"the busiest device receives {bytes_text(tree.received_bytes)} of all arrays together, {bound}"
        yield f"at most {bytes_text(tree.peak_bytes)} live on a device"

    def __str__(self) -> str:
        return self.explain()


@overload
def prove(plan: Plan, program: Program | None = None, *, launches: bool = False, limit: float = 30.0) -> Proof: ...


@overload
def prove(plan: TreePlan, program: None = None, *, launches: bool = False, limit: float = 30.0) -> TreeProof: ...


def prove(
    plan: Plan | TreePlan, program: Program | None = None, *, launches: bool = False, limit: float = 30.0
) -> Proof | TreeProof:
    """Proves a plan, by the program that `lower` makes of it or by the given one; or all plans of a tree.

    `launches=True` also searches for a plan with fewer launches, for at most `limit` seconds; see `fewest`.
    Raises `ProofError` with a counterexample if the program is wrong, and `UndecidedError` if it is neither proved
    nor refuted. Needs z3: `pip install 'reshard[prove]'`.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=3)
    >>> proof = prove(rs.plan(rs.Layout.parse("f32[{x}5]", mesh), rs.Layout.parse("f32[15]", mesh)))
    >>> print(proof.minimal.statement)
    the worst device receives 8 N bytes, as few as in any plan
    """
    if not isinstance(plan, TreePlan):
        return prove_plan(plan, program, launches=launches, limit=limit)
    if program is not None:
        raise PlanError("a tree of plans has a program for each batch; prove the tree without one")
    for batch in plan.batches:
        lower_batch(batch)
    different = dict.fromkeys(plan.plans.values())
    return TreeProof(plan, tuple(prove_plan(each, launches=launches, limit=limit) for each in different))

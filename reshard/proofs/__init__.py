"""Proofs that a plan is right for all sizes of its form, stays within its promised memory, and moves the fewest bytes.

    prove            proves a plan, or raises `ProofError` with a counterexample
    verify           proves a list of transfers between two layouts, whoever made it
    prove_rules      proves the typing rules once, for every mesh and every size
    fewest           searches for a plan with fewer launches, within the same bytes and memory
    instance         the same plan at other sizes of its form
    Proof            what `prove` returns: the parts `right`, `bounded` and `minimal`, and the form
    ProofPart        a statement, its argument, and the claims that z3 decided
    Fewest           the part that `fewest` returns
    Rules            what `prove_rules` returns
    Counterexample   where a wrong program goes wrong
    ProofError       a program is wrong
    UndecidedError   a program is neither proved nor refuted

>>> import reshard as rs
>>> mesh = rs.Mesh(x=4)
>>> proof = prove(rs.plan(rs.Layout.parse("f32[{x}4, 16]", mesh), rs.Layout.parse("f32[16, {x}4]", mesh)))
>>> print(proof.form.spell(proof.plan.source), "->", proof.form.spell(proof.plan.target))
[{x}n0, 4 n1] -> [4 n0, {x}n1]
>>> print(proof.bounded.statement)
at most 48 N bytes live on a device (768 here)
"""

from reshard.errors import ProofError as ProofError
from reshard.errors import UndecidedError as UndecidedError
from reshard.proofs.launches import fewest as fewest
from reshard.proofs.plan_proof import TreeProof as TreeProof
from reshard.proofs.plan_proof import instance as instance
from reshard.proofs.plan_proof import prove as prove
from reshard.proofs.proof import Fewest as Fewest
from reshard.proofs.proof import Proof as Proof
from reshard.proofs.proof import ProofPart as ProofPart
from reshard.proofs.refute import Counterexample as Counterexample
from reshard.proofs.rules import Rules as Rules
from reshard.proofs.rules import prove_rules as prove_rules
from reshard.proofs.transfer_proof import Verified as Verified
from reshard.proofs.transfer_proof import verify as verify

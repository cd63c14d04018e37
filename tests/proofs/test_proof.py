"""What a proof says, and that another solver, or none, can recheck it."""

import random
from itertools import pairwise

import pytest

import reshard as rs
from reshard.errors import UndecidedError
from reshard.lower.even_rounds import EvenRounds
from reshard.proofs import Proof, plan_proof, prove
from reshard.proofs.least import floor
from reshard.proofs.symbolic import Claim, Fewer, Query, Rounds, by_formula, decide, formulas, solver
from reshard.proofs.symbolic.form import form_of
from reshard.types import Layout, Mesh
from reshard.types.pair.refine import Refinement, refine
from reshard.types.rules.bounds import lower_bound
from tests.layouts import random_pair
from tests.test_user_cases import CASES, IDS, ends

MESH = Mesh(x=4, y=2)


def proof_of(source: str, target: str, mesh: Mesh = MESH, **options: object) -> Proof:
    return prove(rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), **options))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_users_cases_are_proved(case: dict):
    proof = prove(rs.plan(*ends(case)))
    assert proof.minimal.holds


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_are_proved(seed: int):
    choose = random.Random(100 + seed)
    for number in range(40):
        source, target = random_pair(choose, choose.choice(["float32", "int4", "bfloat16"]), partial=number % 3 == 0)
        if source.reduction == "mean" and source.dtype == "int4":
            continue
        proof = prove(rs.plan(source, target))
        if source.partial == target.partial:
            bound = floor(source, target, proof.form)
            assert source.nbytes(bound.elements) == proof.plan.lower_bound_bytes
        assert proof.minimal.holds == (proof.plan.received_bytes == proof.plan.lower_bound_bytes)


def test_the_bound_of_a_reduction_is_worked_out_anew():
    """By counting devices: that of `types.bounds` where the sub-axes nest, and never above what a plan receives."""
    choose, compared = random.Random(7), 0
    while compared < 400:
        source, target = random_pair(choose, "float32", partial=True)
        if source.partial == target.partial:
            continue
        found = source.nbytes(floor(source, target, form_of([source, target], (), ())).elements)
        axes = [*source.held, *source.partial, *target.held, *target.partial]
        ends = {e for a in axes for e in (source.mesh.stride(a), source.mesh.stride(a) * a.size)}
        if all(high % low == 0 for low, high in pairwise(sorted(ends))):
            assert found == lower_bound(source, target)
            compared += 1
        assert found <= rs.plan(source, target).received_bytes


def test_sub_axes_that_do_not_nest_are_one_team():
    """Twelve devices make each sum: 6 summands, 3 holders, and so 5 + 2 receipts for each of 12 elements."""
    mesh = Mesh(x=12)
    source, target = Layout.parse("f32[12] + sum{x:(2)6}", mesh), Layout.parse("f32[3{x:(3)4}]", mesh)
    found = floor(source, target, form_of([source, target], (), ()))
    assert found.elements == 7
    assert "7 receipts for each of 12 elements, of which one of 12 devices has 7 or more" in found.argument


def written_plans(count: int) -> list[rs.Plan]:
    """Plans with an even exchange or a permute, on small meshes."""
    choose, found = random.Random(3), list[rs.Plan]()
    while len(found) < count:
        plan = rs.plan(*random_pair(choose, "float32"))
        if any(by_formula(step) for step in plan.steps):
            found.append(plan)
    return found


def test_exchanges_and_permutes_by_their_formulas(monkeypatch: pytest.MonkeyPatch):
    """On small meshes too: the formulas are proved wherever the lists are."""
    monkeypatch.setattr(plan_proof, "MANY_TRANSFERS", 0)
    for plan in written_plans(40):
        assert any(isinstance(claim, Rounds) for claim in prove(plan).claims)


def test_formulas_that_are_wrong_are_not_proved(monkeypatch: pytest.MonkeyPatch):
    """A sender that is off along one digit, and shares counted from another coordinate."""

    class Astray(EvenRounds):
        def __init__(self, r: Refinement) -> None:
            super().__init__(r)
            self._sources = self._sources[1:]
            self.shares = [(digit, digit.src) for digit, _ in self.shares]

    plans = [p for p in written_plans(40) if any(s.kind == "exchange" for s in p.steps) and len(p.steps) == 1]
    monkeypatch.setattr(plan_proof, "MANY_TRANSFERS", 0)
    monkeypatch.setattr(formulas, "EvenRounds", Astray)
    refused = 0
    for plan in plans:
        r = refine(plan.source, plan.target)
        if r.swapped:
            with pytest.raises(UndecidedError):
                prove(plan)
            refused += 1
    assert refused > 3


def test_explain_reads_as_an_argument():
    text = proof_of("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]").explain()
    for said in (
        "for all n0, n1, n2 >= 1 (here n0 = 8, n1 = 2, n2 = 4)",
        "right: every device ends with the elements that the target demands",
        "bounded: at most 96 N bytes live on a device (6144 here)",
        "minimal: the worst device receives 28 N bytes, as few as in any plan",
    ):
        assert said in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_plan_above_the_bound_is_not_called_minimal():
    mesh = Mesh(dcn=2, x=4)
    proof = proof_of("bf16[{dcn}512, {x}256]", "bf16[{x}256, {dcn}512]", mesh, network="h100")
    assert not proof.minimal.holds
    assert proof.minimal.statement.startswith("not shown")


def test_smt2_is_rechecked_from_its_text():
    z3 = pytest.importorskip("z3")
    proof = proof_of("f32[{x}3/10, 4, {y}2]", "f32[10, {x}, {y}2]")
    texts = proof.to_smt2().split("(reset)\n")
    assert len(texts) == len(proof.claims) > 0
    for text in texts:
        solver = z3.Solver()
        solver.from_string(text)
        assert solver.check() == z3.unsat


FALSE = [
    Claim("another digit", (("a", 4), ("b", 4)), (("a", "b"),)),
    Claim("a size that is named", (("a", "n"),), (), below=((((1, "a"),), 4),)),
    Claim("padding", (("a", 4), ("b", 3)), (), ((((3, "a"), (1, "b")), 11),), ((((1, "a"),), 3),)),
    Fewer("more bytes", 3, 2),
    Rounds("two receivers of one sender", ((1, 2), (2, 2)), ((1, None), (1, None)), ()),
    Rounds("a share that is counted wrongly", ((1, 3),), ((1, "j"),), (("j", 1, 2),)),
]


@pytest.mark.parametrize("claim", FALSE, ids=lambda claim: claim.about)
def test_false_claims_are_not_decided(claim: Query):
    with pytest.raises(UndecidedError, match="fails where"):
        decide([claim])


TRUE = [
    Claim("padding", (("a", 4), ("b", 3)), (), ((((3, "a"), (1, "b")), 9),), ((((1, "a"),), 3),)),
    Claim("digits", (("a", "n"),), (("a", "a"),)),
    Fewer("as many bytes", 3, 3),
    Rounds("a turned bijection", ((1, 3), (3, 3)), ((3, "j"), (1, None)), (("j", 3, 3),)),
]


@pytest.mark.parametrize("claim", TRUE, ids=lambda claim: claim.about)
def test_true_claims_are_decided(claim: Query):
    decide([claim])


def test_without_the_solver_nothing_is_proved(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    solver.z3.cache_clear()
    monkeypatch.setattr(solver, "import_module", missing)
    with pytest.raises(UndecidedError, match=r"install reshard\[prove\]"):
        proof_of("f32[{x}4, 16]", "f32[16, {x}4]")
    solver.z3.cache_clear()

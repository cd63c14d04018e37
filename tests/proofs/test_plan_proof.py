"""`prove`: right plans are proved, and planted faults are refused with a counterexample."""

from __future__ import annotations

import ast
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard as rs
from reshard import proofs
from reshard.geometry import refine as refine_module
from reshard.geometry.refine import Refinement, refine
from reshard.lower import Program, lower_plan
from reshard.lower import exchange_rounds as lowered_exchange
from reshard.lower.exchange_rounds import Exchange
from reshard.plans.plan import StepSpec, chain
from reshard.proofs import Counterexample, Proof, ProofError, UndecidedError, plan_proof, prove
from reshard.proofs.symbolic import Rounds
from reshard.runtime import run
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import random_pair
from tests.oracle import tiles_of
from tests.program_faults import KINDS, WHOLE, detected, plans, planted
from tests.proofs.contracts import formula_plans
from tests.test_user_cases import CASES, IDS, ends

MESH = Mesh(x=4, y=2)
EACH = 6


def plan_of(source: str, target: str, mesh: Mesh = MESH, **options: object) -> rs.Plan:
    return rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), **options)


# ---- right plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_users_cases_are_proved(case: dict):
    proof = prove(rs.plan(*ends(case), slack=0))
    assert proof.minimal.holds


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_are_proved(seed: int):
    choose = random.Random(100 + seed)
    for number in range(40):
        source, target = random_pair(choose, choose.choice(["float32", "int4", "bfloat16"]), partial=number % 3 == 0)
        if source.reduction == "mean" and source.dtype == "int4":
            continue
        proof = prove(rs.plan(source, target))
        assert proof.minimal.holds == (proof.plan.received_bytes == proof.plan.lower_bound_bytes)


def test_a_plan_above_the_bound_is_not_called_minimal():
    mesh = Mesh(dcn=2, x=4)
    proof = prove(plan_of("bf16[{dcn}512, {x}256]", "bf16[{x}256, {dcn}512]", mesh, network="h100"))
    assert not proof.minimal.holds
    assert proof.minimal.statement.startswith("not shown")


def test_figures_are_multiples_of_the_sizes_that_vary():
    """3 devices, 5 rows each: 5 x 4 bytes of 2 others; an int4 array is packed, so its figures are for these sizes."""
    mesh = Mesh(x=3)
    proof = prove(plan_of("f32[{x}5]", "f32[15]", mesh))
    assert (proof.form.unit, proof.minimal.statement) == (
        5,
        "the worst device receives 8 N bytes, as few as in any plan",
    )
    assert proof.bounded.statement == "at most 16 N bytes live on a device (80 here)"
    packed = prove(plan_of("int4[{x}5]", "int4[15]", mesh))
    assert packed.bounded.statement == f"at most {packed.plan.peak_bytes} bytes live on a device"


def test_an_empty_array_is_proved():
    proof = prove(plan_of("f32[0, 16]", "f32[0, {x}4]"))
    assert proof.form.fixed[0] == "it is empty"


def test_a_program_of_an_empty_array_must_run():
    plan = plan_of("f32[0, 16]", "f32[0, {x}4]")
    program = lower_plan(plan)
    with pytest.raises((ProofError, UndecidedError)):
        prove(plan, replace(program, tile_shapes=((0, 5),)))


def test_groups_listed_in_another_order_are_proved():
    plan = plan_of("f32[{x}2, {y}4]", "f32[8, {y}4]")
    program = lower_plan(plan)
    (gather,) = program.instructions
    prove(plan, replace(program, instructions=(replace(gather, groups=gather.groups[::-1]),)))


# ---- long lists ------------------------------------------------------------------------------------------


def test_exchanges_and_permutes_by_their_formulas(monkeypatch: pytest.MonkeyPatch):
    """On small meshes too, the formulas are proved wherever the lists are."""
    monkeypatch.setattr(plan_proof, "MANY_TRANSFERS", 0)
    for plan in formula_plans(16):
        assert any(isinstance(claim, Rounds) for claim in prove(plan).claims)


def test_many_devices_are_not_enumerated():
    """2^20 devices: an exchange of 32 rounds would list 2^25 transfers."""
    mesh = Mesh(dcn=64, x=16, y=32, z=32)
    proof = prove(plan_of("bf16[{dcn}{x}{y}64, {z}128]", "bf16[{z}{y}2048, {dcn}{x}4]", mesh))
    assert [step.kind for step in proof.plan.steps] == ["exchange"]
    assert proof.minimal.holds
    assert "on one device of unknown coordinates" in proof.explain()


def test_a_list_that_is_too_long_to_compare_is_not_decided(monkeypatch: pytest.MonkeyPatch):
    """An uneven exchange has no formula in the coordinates, so it is neither proved nor refuted."""
    monkeypatch.setattr(plan_proof, "MANY_TRANSFERS", 4)
    monkeypatch.setattr(plan_proof, "MOST_TRANSFERS", 8)
    with pytest.raises(UndecidedError, match="too many to compare"):
        prove(plan_of("f32[{x}3/10]", "f32[{y}5]"))


# ---- planted faults --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults() -> list[tuple[str, rs.Plan, Program]]:
    """At most six faults of every kind in every plan of the corpus."""
    some = []
    for plan in plans():
        seen: Counter = Counter()
        for kind, _, program in planted(plan):
            seen[kind] += 1
            if seen[kind] <= EACH:
                some.append((kind, plan, program))
    return some


def test_every_planted_fault_is_refuted(faults: list[tuple[str, rs.Plan, Program]]):
    parts: dict[str, set[str]] = {}
    shown: set[str] = set()
    for kind, plan, program in faults:
        with pytest.raises(ProofError) as error:
            prove(plan, program)
        wrong = error.value.counterexample
        parts.setdefault(kind, set()).add(wrong.part)
        if kind not in shown and wrong.index is not None and not (plan.source.partial or plan.target.partial):
            check_counterexample(plan, program, wrong)
            shown.add(kind)
    assert len(shown) >= 15
    assert len(parts) == KINDS
    assert parts["staging forgotten"] == {"bounded", "right"}
    assert parts["a round run twice"] == {"minimal"}
    assert "right" in parts["a wrong slice"]


def check_counterexample(plan: rs.Plan, program: Program, wrong: Counterexample) -> None:
    """The device has, at the local index, the named element or none, after a run on global indices."""
    given = {d: (tile + 1).astype(plan.source.dtype) for d, tile in tiles_of(plan.source).items()}
    tile = run(program, given)[wrong.device]
    index = meaning(plan.target, wrong.device)
    assert wrong.element == tuple(dim[at] for dim, at in zip(index, wrong.index, strict=True))
    # The tiles have index + 1, so that a place that was never written to, which is 0, is not element 0.
    assert tile[wrong.index] != 1 + np.ravel_multi_index(wrong.element, plan.source.shape)
    if wrong.actual is not None:
        assert tile[wrong.index] == 1 + np.ravel_multi_index(wrong.actual, plan.source.shape)


@pytest.mark.parametrize("kind", WHOLE)
def test_faults_of_the_whole_program_are_never_proved(kind: str):
    mesh = Mesh(x=2, y=2, z=2)
    plan = plan_of("f32[{x}4, {z}4, 8, 8]", "f32[8, 8, {z}4, {y}4]", mesh)
    wrong = WHOLE[kind](lower_plan(plan))
    with pytest.raises((ProofError, UndecidedError)):
        prove(plan, wrong)


def test_a_program_that_is_right_by_chance_is_not_decided():
    """Swapping two devices with equal data is not a fault, but no formula covers it: nothing is claimed."""
    plan = plan_of("f32[{x}4, 8]", "f32[8, 8]", Mesh(x=2, y=2, z=2))
    program = lower_plan(plan)
    (gather,) = program.instructions
    a, b, *rest = gather.groups
    wrong = replace(program, instructions=(replace(gather, groups=((a[0], b[1]), (b[0], a[1]), *rest)),))
    with pytest.raises(UndecidedError):
        prove(plan, wrong)


def exchanged(source: str, target: str, mesh: Mesh) -> rs.Plan:
    """A plan of one exchange."""
    ends = Layout.parse(source, mesh), Layout.parse(target, mesh)
    return chain(*ends, [StepSpec("exchange", ends[1])])


@pytest.mark.parametrize(
    ("source", "target", "mesh"),
    [("f32[{x}4, 8]", "f32[16, {x}2]", MESH), ("f32[{x}5, 6]", "f32[15, {x}2]", Mesh(x=3))],
)
def test_launches_are_those_of_the_plan(source: str, target: str, mesh: Mesh):
    """An empty round moves nothing wrong and costs no memory, but it is a launch that the plan does not have."""
    plan = exchanged(source, target, mesh)
    program = lower_plan(plan)
    (step,) = program.instructions
    with pytest.raises(ProofError, match=f"{plan.launches + 1} launches, the plan says {plan.launches}"):
        prove(plan, replace(program, instructions=(replace(step, rounds=(*step.rounds, ())),)))


def test_bytes_are_those_of_the_plan():
    """Device 0 fetches its own share, a quarter of its tile, from device 1, which has the same tile."""
    plan = exchanged("f32[{x}4, 8]", "f32[16, {x}2]", MESH)
    program, form = lower_plan(plan), prove(plan).form
    (step,) = program.instructions
    own = next(t for t in step.local if t.receiver == 0)
    local = tuple(t for t in step.local if t.receiver != 0)
    rounds = ((*step.rounds[0], own._replace(sender=1)), *step.rounds[1:])
    wasteful = replace(program, instructions=(replace(step, local=local, rounds=rounds),))
    assert plan.received_bytes == 96
    with pytest.raises(UndecidedError, match="3 launches and 128 bytes, the plan says 3 and 96"):
        plan_proof._minimal(plan, wasteful, form)
    with pytest.raises(ProofError):
        prove(plan, wasteful)


@pytest.mark.fast(1)
@pytest.mark.parametrize("seed", range(3))
def test_a_mutated_program_that_is_proved_does_run_right(seed: int):
    """Random plans, whose faults often change nothing: what is proved must pass the oracle.

    Staging is left out: the promise may count a buffer that no message of this plan needs.
    """
    choose, refuted, proved = random.Random(seed), 0, 0
    for number in range(60):
        plan = rs.plan(*random_pair(choose, "float32", partial=number % 3 == 0))
        if any(step.mode.parts > 1 for step in plan.steps):
            continue
        every = [fault for fault in planted(plan) if fault[0] != "staging forgotten"]
        for _, _, program in choose.sample(every, min(len(every), 6)):
            try:
                prove(plan, program)
            except ProofError:
                refuted += 1
            except UndecidedError:
                continue
            else:
                assert not detected(plan, program)
                proved += 1
    assert refuted > 100
    assert proved > 0


# ---- independence ----------------------------------------------------------------------------------------


def crossed(operand: Layout, result: Layout) -> Refinement | None:
    """A wrong refinement: two digits of one radix have each other's holders before."""
    right = refine(operand, result)
    held = [] if right is None else [at for at, d in enumerate(right.digits) if d.src is not None]
    for one, other in pairwise(held):
        a, b = right.digits[one], right.digits[other]
        if a.radix == b.radix:
            digits = list(right.digits)
            digits[one], digits[other] = a._replace(src=b.src), b._replace(src=a.src)
            return replace(right, digits=tuple(digits))
    return right


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(
    ("source", "target", "mesh"),
    [
        ("f32[{x}{y}2]", "f32[{y}{x}2]", Mesh(x=2, y=2)),
        ("f32[{x}4, {y}4, 8]", "f32[8, {y}4, {x}4]", Mesh(x=2, y=2)),
        ("f32[{x}3, {y}3, 9]", "f32[9, {x}3, {y}3]", Mesh(x=3, y=3)),
    ],
)
def test_a_fault_in_the_refinement_is_not_confirmed(
    monkeypatch: pytest.MonkeyPatch, source: str, target: str, mesh: Mesh, listed: bool
):
    """The planner and the lowering share `refine`: the lowering goes wrong with it, and the prover notices."""
    plan = exchanged(source, target, mesh)
    prove(plan)
    monkeypatch.setattr(plan_proof, "MANY_TRANSFERS", 1 << 14 if listed else 0)
    for module in [m for name, m in sys.modules.items() if name.startswith("reshard.") and m is not refine_module]:
        if getattr(module, "refine", None) is refine:
            monkeypatch.setattr(module, "refine", crossed)
    with pytest.raises((ProofError, UndecidedError)):
        prove(plan)


READS_OF_BLOCKS = ("sliced", "slice_transfer")
"""How runtimes address blocks by the digits of tiles; the prover has a reading of its own."""


@pytest.mark.parametrize(
    ("source", "target", "mesh"),
    [
        ("f32[{x}3, {y}3, 9]", "f32[9, {x}3, {y}3]", Mesh(x=3, y=3)),
        ("f32[{x}3/10]", "f32[{y}5]", MESH),
        ("f32[3{x}5/27]", "f32[5{x}3/27]", Mesh(x=2)),
    ],
)
def test_the_prover_reads_blocks_by_itself(monkeypatch: pytest.MonkeyPatch, source: str, target: str, mesh: Mesh):
    """A wrong reading in the lowering, which runtimes share, changes no proof and hides no fault."""
    plan = exchanged(source, target, mesh)
    program = lower_plan(plan)
    faults = [wrong for kind, _, wrong in planted(plan) if "off by one" in kind][:6]
    right = str(prove(plan))

    def unread(*args: object) -> None:
        raise AssertionError("the prover reads blocks by code of the lowering")

    for name in READS_OF_BLOCKS:
        monkeypatch.setattr(lowered_exchange.Exchange, name, property(unread))
    monkeypatch.setattr(lowered_exchange, "digit_boxes", unread)
    assert str(prove(plan, program)) == str(prove(plan)) == right
    assert faults
    for wrong in faults:
        with pytest.raises(ProofError):
            prove(plan, wrong)


WRONG_PARTS: dict[str, Callable[[Any], object]] = {
    "_map_local_strides": lambda strides: {at: 2 * stride for at, stride in strides.items()},
    "_piece_axes": lambda axes: axes[:-1],
    "coordinate": lambda value: 0,
    "Block": lambda block: block._replace(src=block.src + 1),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_a_formula_of_the_lowering_that_is_wrong_is_not_proved(monkeypatch: pytest.MonkeyPatch, name: str):
    """What writes long lists is what is proved: the formulas for all devices, the lists on one of them."""
    plan = exchanged("f32[{x}5, 6]", "f32[15, {x}2]", Mesh(x=3))
    right = getattr(lowered_exchange, name)
    monkeypatch.setattr(plan_proof, "MANY_TRANSFERS", 0)
    assert any(isinstance(claim, Rounds) for claim in prove(plan).claims)
    monkeypatch.setattr(lowered_exchange, name, lambda *args, **named: WRONG_PARTS[name](right(*args, **named)))
    with pytest.raises(UndecidedError):
        prove(plan)


MAY_IMPORT = {
    "symbolic/formulas.py": {
        "reshard.geometry.refine",
        "reshard.lower",
    },
    "plan_proof.py": {"reshard.lower", "reshard.lower.program"},
    "refute.py": {"reshard.lower"},
    "launches.py": {"reshard.geometry.figures"},
    "transfer_proof.py": {"reshard.geometry.detect"},  # reads the layouts that callers give
}
"""What the prover uses of the code that it checks; at the top of each file it says why. Elsewhere only data classes."""


def test_the_prover_shares_no_other_code_with_what_it_proves():
    root = Path(proofs.__file__).parent
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module not in MAY_IMPORT.get(name, set()):
                assert not (node.module or "").startswith(("reshard.geometry", "reshard.synth")), (
                    f"{name}: {node.module}"
                )
                if (node.module or "").startswith("reshard.lower"):
                    assert all(alias.name[0].isupper() for alias in node.names), f"{name}: {ast.unparse(node)}"


def test_a_proof_is_of_the_plan():
    plan = plan_of("f32[{x}4, 16]", "f32[16, {x}4]", Mesh(x=4))
    proof = prove(plan)
    assert isinstance(proof, Proof) and proof.plan is plan and proof.launches is None


def test_sums_that_stay_are_bounded_among_plans_that_keep_their_summands():
    mesh = Mesh(z=3, data=4)
    kept = rs.plan(*(Layout.parse(text, mesh) for text in ("f32[16, {data}4] + sum{z}", "f32[16, 16] + sum{z}")))
    assert prove(kept).minimal.statement.endswith("as few as in any plan that moves each summand as it is")


def test_sums_along_other_devices_are_finished_on_the_way():
    """They receive less than all summands would, and are proved."""
    before = Mesh({"z": 3, "data": 4}, device_ids=[1, 0, 3, 4, 6, 8, 5, 7, 10, 2, 9, 11])
    source = Layout.parse("f32[16, {data}4/13] + sum{z}", before)
    plan = rs.plan(source, Layout.parse("f32[16, 13] + sum{z}", Mesh(z=3, w=2, dcn=2)))
    assert prove(plan).right.holds and plan.received_bytes < 768


def test_a_sum_that_is_finished_is_bounded_among_plans_without_idle_axes():
    """Devices along an idle axis have equal summands: with a network each finishes a part, and they receive less."""
    mesh = Mesh({"data": 12})
    pair = [Layout.parse(f"s32[10, 30, {end}", mesh) for end in ("2] + max{data:(1)6}", "{data:(1)2}]")]
    alone, shared = rs.plan(*pair), rs.plan(*pair, network="tpu-v5p")
    assert shared.idle_axes and shared.received_bytes < alone.received_bytes == alone.lower_bound_bytes
    for plan in (alone, shared):
        assert prove(plan).minimal.statement.endswith("as few as in any plan without idle axes")


def test_a_cast_on_the_way_is_proved_and_no_other_one():
    """The dtype of an exchange is part of its program, and so is every message that it casts."""
    mesh = Mesh(x=4)
    move = rs.Move(Layout.parse("f32[{x}4, 8]", mesh), Layout.parse("bf16[16, {x}2]", mesh), cast=True)
    plan = rs.plan(move, budget=move.source.tile_bytes + move.target.tile_bytes + 16)
    proof, program = prove(plan), lower_plan(plan)
    assert proof.right.holds and proof.minimal.holds
    (step,) = program.instructions
    assert isinstance(step, Exchange) and step.dtype == "bfloat16"
    for wrong in ({"dtype": None}, {"dtype": "float16"}, {"dtype": "float32"}, {"rounds": step.rounds[1:]}):
        with pytest.raises((ProofError, UndecidedError)):
            prove(plan, replace(program, instructions=(replace(step, **wrong),)))


def test_a_part_that_crosses_without_buffers_is_proved():
    """What the plan promises beside what is live is for tiles that share memory here, and not for messages."""
    source = Layout.parse("c64[{y:(2)2}3]", Mesh(y=4, w=2))
    target = Layout.parse("c64[2, 4]", Mesh(d=3))
    plan = rs.plan(rs.Move(source, target, view="(a b) -> a b", a=2, b=4, into={"b": slice(1, 4)}))
    assert all(step.cost.scratch == 0 for step in plan.steps)
    prove(plan)

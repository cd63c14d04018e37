"""The typing rules, proved once: every law holds, no planted fault does, and the laws describe the numpy runtime."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from reshard.errors import UndecidedError
from reshard.lower import lower_plan
from reshard.plans.plan import StepSpec, chain
from reshard.proofs import prove_rules, rules
from reshard.proofs.rules import MID, POST, PRE, DigitRun, MovedDigit, R, S, Taken, Typed, X, Y, commutes
from reshard.proofs.rules import spell_number as number
from reshard.proofs.symbolic import Law, Term, decide_claims
from reshard.runtime import run
from reshard.types import Layout, Mesh
from reshard.types.layout import Digit as LayoutDigit
from reshard.types.layout import Dim
from tests.oracle import summands_of, tiles_of
from tests.proofs.terms import value

z3 = pytest.importorskip("z3", reason="proofs need reshard[prove]")

KINDS = ["slice", "all_gather", "all_to_all", "permute", "exchange", "reduce_scatter", "all_reduce", "split_sum"]


LAWS = {
    "numerals": 2,
    "slice": 4,
    "all_gather": 4,
    "all_to_all": 6,
    "permute": 4,
    "exchange": 6,
    "reduce_scatter": 6,
    "all_reduce": 3,
    "split_sum": 8,
}
"""How many laws each rule rests on: a rule that loses one must not pass unnoticed."""


def test_every_rule_is_proved():
    proved = prove_rules()
    assert sorted(proved.parts) == sorted([*KINDS, "numerals"])
    assert {name: len(part.claims) for name, part in proved.parts.items()} == LAWS
    assert all(part.holds for part in proved.parts.values())
    for kind in KINDS:
        assert f"{kind}: it leaves in each tile what meaning(result) says, for every mesh and size" in proved.explain()


@pytest.mark.slow
def test_smt2_is_rechecked_from_its_text():
    proved = prove_rules()
    texts = proved.to_smt2().split("(reset)\n")
    assert len(texts) == len(proved.claims)
    for text in texts:
        solver = z3.Solver()
        solver.from_string(text)
        assert solver.check() == z3.unsat


block_of_member = rules.block_of_member
TWO = ["two digits of a dim", "two digits of two dims"]
E_P, E_Q, E_U, E_V = (Term(f"e_{name}") for name in "pquv")
SLICED, GATHERED = rules.move_two((None, None), (X, Y)), rules.move_two((X, Y), (None, None))
M = Term("m")
BLOCK = rules.kept_block(number(X, Y))
MEMBER = rules.from_member(number(E_U, E_V))


def other_order(taken: Taken) -> Taken:
    """The same description of a number, with its digits in the other order."""
    (_, (a, b)) = taken.where[0], [name for name, _ in taken.unknowns]
    return taken._replace(where=((number(b, a, R), taken.where[0][1]),))


K, N = Term("k"), Term("n")


def tile(*args: Term) -> Term:
    return Term("tile", args)


def apart(law: Law) -> Law:
    """Neighbours that the second tile no longer holds."""
    return replace(law, given=(law.given[0], *law.given[2:]))


def more_rounds() -> Law:
    """Rounds that go on after every share has arrived."""
    c, i, j, v, w = (Term(name) for name in "cijvw")
    digits = ((c, R), (j, R * 2), (i, R * 2), (M, R), (v, Term("3")), (w, Term("3")))
    return Law("more", (R,), digits, ((c + j, v * R + M), (c + i, w * R + M)), ((j, i),))


FAULTS: dict[str, list[Law]] = {
    "slice": [
        *(commutes(how, SLICED[how], rules.kept_block(number(Y, X, R))) for how in TWO),
        commutes("another device's block", rules.move_one(None, X), Taken({}, {"p": M}, ((M, R),))),
        rules.compose_moves(lambda k, i, n, j: tile(number(n, j)), (rules.keep_major, rules.keep_major), tile(K)),
    ],
    "all_gather": [
        rules.compose_moves(lambda k, i, n, j: tile(number(i, k, R)), (rules.hear_major, rules.hear_minor), tile(N)),
        *(commutes(how, GATHERED[how], rules.from_member(number(E_Q, E_P, R))) for how in TWO),
        commutes("the receiver's own tile", rules.move_one(X, None), Taken({}, {})),
        commutes(
            "the block in front of where it belongs",
            Typed(((PRE, MovedDigit("p", R, X), POST),), ((MovedDigit("p", R), PRE, POST),)),
            Taken({X: E_P}, {}),
        ),
    ],
    "all_to_all": [
        rules.compose_moves(
            lambda k, i, n, j: tile(number(k, i), number(n, j)), (rules.swap_major, rules.swap_minor), tile(K, N)
        ),
        commutes("minor member first", rules.two_swaps()["two pairs"], block_of_member(BLOCK, other_order(MEMBER))),
        commutes("minor block first", rules.two_swaps()["two pairs"], block_of_member(other_order(BLOCK), MEMBER)),
        commutes(
            "as they come",
            rules.two_swaps()["two pairs, crossing"],
            block_of_member(BLOCK, rules.from_member(number(E_V, E_U, R))),
        ),
        commutes("the block of the sender", rules.swaps()["in one dim"], Taken({X: E_Q}, {"p": E_Q})),
        commutes("from the receiver itself", rules.swaps()["in two dims"], Taken({}, {"p": X})),
    ],
    "permute": [
        commutes("no tile moves", rules.move_one(X, Y), Taken({}, {})),
        commutes(
            "the sender with the receiver's number",
            Typed(
                ((PRE, MovedDigit("p", R, X), MID, MovedDigit("q", S, Y), POST),),
                ((PRE, MovedDigit("q", S, Y), MID, MovedDigit("p", R, X), POST),),
            ),
            rules.from_member(number(X, Y)),
        ),
    ],
    "exchange": [
        commutes("the coordinate of another axis", rules.move_one(X, Y), Taken({}, {})),
        commutes("each share from the same device", rules.move_one(X, None), Taken({}, {})),
        apart(rules.neighbours()),
        more_rounds(),
    ],
    "reduce_scatter": [
        commutes("the block of the summand's member", rules.move_one(None, X), Taken({}, {"p": M}, ((M, R),))),
        *(commutes(how, SLICED[how], rules.kept_block(number(Y, X, R))) for how in TWO),
        Law("a summand twice", (R, S), tuple((Term(t), R) for t in "abcd"),
            ((number(Term("a"), Term("b")), number(Term("c"), Term("d"))),), ((Term("a"), Term("c")),)),
    ],
    "all_reduce": [
        commutes("another place", Typed(((PRE,),), ((PRE,),)), Taken({}, {"pre": Term("e_pre") + 1})),
    ],
    "split_sum": [
        commutes("an element that another device has", rules.move_one(X, None), Taken({}, {})),
        *(commutes(how, GATHERED[how], rules.from_member(number(E_Q, E_P, R))) for how in TWO),
        commutes("data where the coordinates differ", rules.move_one(X, Y), Taken({}, {})),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_planted_faults_are_not_proved(kind: str):
    """A law of a collective that takes the wrong element fails, at sizes and indices that z3 names."""
    for law in FAULTS[kind]:
        with pytest.raises(UndecidedError, match="fails where"):
            decide_claims([law])


MESH = Mesh(x=2, y=3)
SIZES = {"r": 2, "s": 3}
REAL = [
    *(("slice", SLICED[how], BLOCK) for how in TWO),
    *(("all_gather", GATHERED[how], rules.from_member(number(E_P, E_Q))) for how in TWO),
    *(("all_to_all", typed, block_of_member(BLOCK, MEMBER)) for typed in rules.two_swaps().values()),
    *(("all_to_all", typed, Taken({X: E_Q}, {"p": X})) for typed in rules.swaps().values()),
    *(("reduce_scatter", SLICED[how], BLOCK) for how in TWO),
]


@pytest.mark.parametrize(("kind", "typed", "taken"), REAL, ids=[f"{kind} {n}" for n, (kind, *_) in enumerate(REAL)])
def test_the_laws_take_what_the_numpy_runtime_takes(kind: str, typed: Typed, taken: Taken):
    """A step of unequal radices, where every run is a local digit of 2: both read the same place."""
    operand, result = (layout_of(dims) for dims in typed)
    if kind == "reduce_scatter":
        summed = [LayoutDigit(MESH.axes[name], MESH.sub_axis(name)).axis for name in "xy"]
        operand = Layout(MESH, operand.dims, "int64", "sum", tuple(summed))
    before = summands_of(operand) if operand.partial else tiles_of(operand)
    after = run(lower_plan(chain(operand, result, [StepSpec(kind, result)])), before)
    for device in MESH.devices:
        here = dict(zip("xy", divmod(device, 3), strict=True))
        for digits in itertools.product(*map(range, counts(typed.result))):
            known = SIZES | here | dict(zip(names("e", typed.result), digits, strict=True))
            known |= solved(taken, known)
            senders = [{**here, **{k.head: value(v, known) for k, v in taken.sender.items()}}]
            if operand.partial:
                senders = [{"x": x, "y": y} for x in range(2) for y in range(3)]
            places = known | {f"o_{n}": value(v, known) for n, v in taken.digits.items()}
            at = [places.get(n, places.get(f"e{n[1:]}")) for n in names("o", typed.operand)]
            taken_from = [before[s["x"] * 3 + s["y"]].reshape(counts(typed.operand))[tuple(at)] for s in senders]
            assert after[device].reshape(counts(typed.result))[digits] == sum(taken_from)


def layout_of(dims: tuple) -> Layout:
    def digit(part: DigitRun | MovedDigit) -> LayoutDigit:
        if isinstance(part, DigitRun):
            return LayoutDigit(2, None)
        return LayoutDigit(SIZES[part.radix.head], None if part.holder is None else MESH.sub_axis(part.holder.head))

    digits = [tuple(digit(part) for part in dim) for dim in dims]
    return Layout(MESH, tuple(Dim(d, int(np.prod([x.radix for x in d]))) for d in digits), "int64")


def local_parts(dims: tuple) -> list:
    return [part for dim in dims for part in dim if isinstance(part, DigitRun) or part.holder is None]


def counts(dims: tuple) -> list[int]:
    return [2 if isinstance(part, DigitRun) else SIZES[part.radix.head] for part in local_parts(dims)]


def names(prefix: str, dims: tuple) -> list[str]:
    return [f"{prefix}_{part.name}" for part in local_parts(dims)]


def solved(taken: Taken, known: dict) -> dict[str, int]:
    """The unknowns of a collective, for which there is exactly one choice."""
    solutions = []
    for choice in itertools.product(*(range(value(bound, known)) for _, bound in taken.unknowns)):
        chosen = dict(zip([name.head for name, _ in taken.unknowns], choice, strict=True))
        if all(value(a, known | chosen) == value(b, known | chosen) for a, b in taken.where):
            solutions.append(chosen)
    assert len(solutions) == 1
    return solutions[0]

"""The typing rules, proved once: every law holds, no planted fault does, and the laws describe the numpy runtime.

Numerals of unknown radices are read as layouts are, and laws are assembled as written in the field's notation.
"""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from reshard.errors import UndecidedError
from reshard.lower import lower_plan
from reshard.plans.plan import StepSpec, chain
from reshard.proofs import prove_rules, rules
from reshard.proofs.rules import (
    MID,
    POST,
    PRE,
    DigitRun,
    MovedDigit,
    R,
    S,
    Taken,
    Typed,
    X,
    Y,
    commutes,
    global_index,
    local_index,
)
from reshard.proofs.rules import spell_number as number
from reshard.proofs.symbolic import Law, Term, decide_claims
from reshard.runtime import run
from reshard.types import Layout, Mesh
from reshard.types.layout import Digit as LayoutDigit
from reshard.types.layout import Dim
from reshard.types.meaning import meaning
from tests.layouts import random_pair
from tests.oracle import summands_of, tiles_of

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


def value(term: Term, known: dict) -> int:
    """The integer that a term is, where `known` has the values of names and the functions of Python."""
    args = [value(a, known) for a in term.args]
    if term.head in "+*":
        return sum(args) if term.head == "+" else args[0] * args[1]
    if args:
        return known[term.head](*args)
    return int(term.head) if term.head.isdigit() else known[term.head]


# ---- numerals of unknown radices


@pytest.mark.parametrize("seed", range(3))
def test_the_laws_read_layouts_as_meaning_does(seed: int):
    """Any dim of any layout, taken as a run, one of its digits, and a run."""
    choose, seen = random.Random(seed), 0
    while seen < 60:
        layout, _ = random_pair(choose)
        device = choose.choice(layout.mesh.devices)
        for dim, indices in zip(layout.dims, meaning(layout, device), strict=True):
            if dim.size and len(dim.digits) > 1:
                cut = choose.randrange(len(dim.digits))
                assert read_by_law(layout, dim.digits, cut, device) == list(indices)
                seen += 1


def read_by_law(layout: Layout, digits: tuple[LayoutDigit, ...], cut: int, device: int) -> list[int]:
    """What `global_index` gives at every local index."""
    radix, axis = digits[cut]
    parts = {"pre": digits[:cut], "post": digits[cut + 1 :]}
    position = layout.mesh.position(device)

    def coordinate(of: LayoutDigit) -> int:
        return position // layout.mesh.stride(of.axis) % of.radix

    def local(part: tuple[LayoutDigit, ...]) -> int:
        return int(np.prod([d.radix for d in part if d.axis is None]))

    def spelled(part: tuple[LayoutDigit, ...], at: int) -> int:
        number, below = 0, local(part)
        for d in part:
            if d.axis is None:
                below //= d.radix
            number = number * d.radix + (coordinate(d) if d.axis else at // below % d.radix)
        return number

    known = {f"all_{n}": int(np.prod([d.radix for d in part])) for n, part in parts.items()}
    known |= {n: lambda at, part=part: spelled(part, at) for n, part in parts.items()}
    known |= {"r": radix, "x": coordinate(digits[cut]) if axis else 0}
    numeral = (PRE, MovedDigit("p", R, X if axis else None), POST)
    names = {n: Term(f"e_{n}") for n in ("pre", "p", "post")}
    at = itertools.product(range(local(parts["pre"])), range(1 if axis else radix), range(local(parts["post"])))
    term = global_index(numeral, names, {})
    return [value(term, known | {"e_pre": a, "e_p": b, "e_post": c}) for a, b, c in at]


def test_a_gathered_digit_by_hand():
    """The law of docs/explanation/proofs.md: member e_p has the element, at the receiver's other digits."""
    typed = Typed(((PRE, MovedDigit("p", R, X), POST),), ((PRE, MovedDigit("p", R), POST),))
    law = commutes("a digit", typed, Taken({X: Term("e_p")}, {}))
    assert [" = ".join(map(str, pair)) for pair in law.given] == ["o_pre tile_post + o_post = e_pre tile_post + e_post"]
    assert [" = ".join(map(str, pair)) for pair in law.equal] == [
        "(pre(o_pre) r + e_p) all_post + post(o_post) = (pre(e_pre) r + e_p) all_post + post(e_post)"
    ]
    bounds = {str(digit): None if bound is None else str(bound) for digit, bound in law.digits}
    assert bounds == {"e_pre": None, "e_p": "r", "e_post": "tile_post", "o_pre": None, "o_post": "tile_post", "x": "r"}
    assert set(map(str, law.sizes)) == {"tile_pre", "all_pre", "r", "tile_post", "all_post"}
    (lemma,) = law.lemmas
    assert [str(term) for term in lemma] == ["o_pre", "e_pre", "o_post", "e_post", "tile_post"]


def test_indices_skip_held_digits_and_elements_take_the_sender():
    dim = (DigitRun("pre"), MovedDigit("p", R, X), MovedDigit("q", S))
    names = {name: Term(f"e_{name}") for name in ("pre", "p", "q")}
    assert str(local_index(dim, names)) == "e_pre s + e_q"
    assert str(global_index(dim, names, {})) == "(pre(e_pre) r + x) s + e_q"
    assert str(global_index(dim, names, {X: Term("m")})) == "(pre(e_pre) r + m) s + e_q"

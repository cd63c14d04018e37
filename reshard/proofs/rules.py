"""The typing rules, proved once: each collective commutes with `meaning`, for every mesh and every size.

A typing rule says: if the tiles before hold what `meaning(operand)` gives, then the collective leaves in each tile what
`meaning(result)` gives. This module proves it for numerals with unknown radices, on devices with unknown coordinates,
at an unknown local index:

    all_gather of a digit p of radix r, anywhere in a dim:    pre {x}p post  ->  pre p post

    local index before     o_pre tile_post + o_post              the digit is held, so no tile has it
    global index before    (pre(o_pre) r + x) all_post + post(o_post)
    local index after      (e_pre r + e_p) tile_post + e_post
    global index after     (pre(e_pre) r + e_p) all_post + post(e_post)
    the sender has         x = e_p and the local index e_pre tile_post + e_post

A dim of a layout is a string of parts, major to minor: digits that a step moves, and runs of any number of other
digits. Its global index is the numeral of all parts, with the holder's coordinate for a held digit. Its local index is
the numeral of the local parts.

**Why this covers all shapes.** A dim is a string of digits, some of which a step moves. Between those lie *runs* of any
number of other digits, held or local. Nothing is known about a run but the number of its values; its value is an
unknown function of its local digits. (It also depends on coordinates, but only on those that the step does not change,
in which sender and receiver agree.) Dims without a moved digit are the same on both sides.

**Why this covers steps of many digits.** A step of n + 1 digits is a step of n digits followed by a step of one digit.
Both are well typed, since no two digits share a device coordinate or a place. The launch that moves all digits at once
numbers members and blocks by all n + 1 coordinates. That the two have the same result is a law of its own (*one after
another*), in which the n digits are one number; that a number and its digits determine each other is the law of
*numerals*. The induction over the moved digits has the laws of one digit as its base, and these two as its step. There
are also laws of two digits at once: the smallest case in which an order of digits can be wrong.

An exchange and a permute move all digits at once but independently: a sender's coordinates and a box are given digit by
digit. Their induction is over the digits of a numeral, and its step is the law of *numerals* alone.

**Why this covers padding.** The local digits of a leading run have no bound. So the laws also hold in a tile with more
rounds than contain elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.proofs import symbolic
from reshard.proofs.proof import ProofPart, part_lines
from reshard.proofs.symbolic import Law, Lemma, Term


@dataclass(frozen=True)
class Rules:
    """The typing rules by name, each with its laws; z3 has decided all of them."""

    parts: Mapping[str, ProofPart]

    @property
    def claims(self) -> tuple[symbolic.Query, ...]:
        """All laws."""
        return tuple(claim for part in self.parts.values() for claim in part.claims)

    def explain(self) -> str:
        """The argument as text."""
        return "\n".join(line for name, part in self.parts.items() for line in part_lines(name, part))

    def to_smt2(self) -> str:
        """Every law negated, in SMT-LIB 2, one after another: a solver must answer `unsat` to each."""
        return "(reset)\n".join(symbolic.to_smt2(claim) for claim in self.claims)


def prove_rules() -> Rules:
    """Proves every typing rule; raises `UndecidedError` for one that is false or that z3 does not decide.

    >>> len(prove_rules().parts["all_gather"].claims)
    4
    """
    rules = Rules({name: rule() for name, rule in RULES.items()})
    symbolic.decide_claims(rules.claims)
    return rules


# ---- numerals of unknown radices ----------------------------------------------------------------------


class DigitRun(NamedTuple):
    """Any number of neighbouring digits that a step does not move."""

    name: str


class MovedDigit(NamedTuple):
    """A digit that a step moves: local, or held along the axis on which devices have the coordinate `holder`."""

    name: str
    radix: Term
    holder: Term | None = None


Numeral = tuple[DigitRun | MovedDigit, ...]


class Typed(NamedTuple):
    """The dims that a step changes, before and after."""

    operand: tuple[Numeral, ...]
    result: tuple[Numeral, ...]


class Taken(NamedTuple):
    """Where a collective takes the element for the receiver's coordinates and local digits from.

    `sender` gives the coordinates in which the sender may differ, `digits` those local digits of the operand that the
    result does not have. They may use `unknowns`, each below its radix, for which the equations in `where` hold.
    """

    sender: Mapping[Term, Term]
    digits: Mapping[str, Term]
    unknowns: Sequence[tuple[Term, Term]] = ()
    where: Sequence[tuple[Term, Term]] = ()


def commutes(about: str, typed: Typed, taken: Taken) -> Law:
    """The law that a collective leaves in a tile what the result's meaning gives.

    The receiver's index in its tile is the numeral of its local digits. The place that the collective reads is given as
    an index in the sender's tile, with unknown digits. The law claims that the two global indices are equal.
    """
    here = {p.name: Term(f"e_{p.name}") for dim in typed.result for p in dim if _local(p)}
    there = {p.name: Term(f"o_{p.name}") for dim in typed.operand for p in dim if _local(p)}
    read = {**here, **taken.digits}
    given = (*taken.where, *((local_index(dim, there), local_index(dim, read)) for dim in typed.operand))
    equal = [
        (global_index(a, there, taken.sender), global_index(b, here, {}))
        for a, b in zip(typed.operand, typed.result, strict=True)
    ]
    digits: dict[Term, Term | None] = {}
    for dims, values in ((typed.result, here), (typed.operand, there)):
        for dim in dims:
            for at, p in enumerate(dim):  # A leading run has no bound.
                if _local(p):
                    digits[values[p.name]] = None if at == 0 and isinstance(p, DigitRun) else _radix(p, tile=True)
    parts = [p for dim in (*typed.operand, *typed.result) for p in dim]
    digits |= {p.holder: p.radix for p in parts if isinstance(p, MovedDigit) and p.holder is not None}
    digits |= dict(taken.unknowns)
    # Two equal numerals of the same radices have the same digits, from the last digit on.
    lemmas: list[Lemma] = []
    for one, other in given:
        while one.head == other.head == "+" and one.args[0].head == other.args[0].head == "*":
            (high, radix), (above, other_radix) = one.args[0].args, other.args[0].args
            if radix != other_radix:
                break
            lemmas.append(Lemma(high, above, one.args[1], other.args[1], radix))
            one, other = high, above
    sizes = tuple(dict.fromkeys(_radix(p, tile) for p in parts for tile in (True, False)))
    return Law(about, sizes, tuple(digits.items()), given, tuple(equal), lemmas=tuple(lemmas))


def _local(part: DigitRun | MovedDigit) -> bool:
    return isinstance(part, DigitRun) or part.holder is None


def _radix(part: DigitRun | MovedDigit, tile: bool) -> Term:
    """The number of values that a part has, in all or in a tile."""
    if isinstance(part, MovedDigit):
        return part.radix
    return Term(f"{'tile' if tile else 'all'}_{part.name}")


def local_index(dim: Numeral, digits: Mapping[str, Term]) -> Term:
    """The local index: the numeral of the local digits."""
    return _horner([(digits[p.name], _radix(p, tile=True)) for p in dim if _local(p)])


def global_index(dim: Numeral, digits: Mapping[str, Term], at: Mapping[Term, Term]) -> Term:
    """The global index by the definition of `meaning`: a held digit is the device's coordinate."""
    values: list[tuple[Term, Term]] = []
    for p in dim:
        if isinstance(p, DigitRun):
            values.append((Term(p.name)(digits[p.name]), _radix(p, tile=False)))
        else:
            values.append((digits[p.name] if p.holder is None else at.get(p.holder, p.holder), p.radix))
    return _horner(values)


def _horner(digits: Sequence[tuple[Term, Term]]) -> Term:
    number = digits[0][0]
    for value, radix in digits[1:]:
        number = number * radix + value
    return number


# ---- the steps ----------------------------------------------------------------------------------------

X, Y, R, S = (Term(name) for name in "xyrs")
P, Q = ("p", R), ("q", S)
PRE, MID, POST = DigitRun("pre"), DigitRun("mid"), DigitRun("post")
FRONT, CORE, BACK = DigitRun("front"), DigitRun("core"), DigitRun("back")
"""The runs of a dim that comes to be held, and of one that stops being held."""


def move_one(before: Term | None, after: Term | None) -> Typed:
    """A digit at any place of a dim, with its holder before and after; None if it is local."""
    return Typed(((PRE, MovedDigit(*P, before), POST),), ((PRE, MovedDigit(*P, after), POST),))


def move_two(before: Sequence[Term | None], after: Sequence[Term | None]) -> dict[str, Typed]:
    """Two digits with their holders, in one dim and in two."""

    ends = [(MovedDigit(*P, holders[0]), MovedDigit(*Q, holders[1])) for holders in (before, after)]
    return {
        "two digits of a dim": Typed(*(((PRE, p, MID, q, POST),) for p, q in ends)),
        "two digits of two dims": Typed(*(((PRE, p, POST), (FRONT, q, BACK)) for p, q in ends)),
    }


def swaps() -> dict[str, Typed]:
    """A digit p that x comes to hold while it gives up a digit q: in two dims, or in one dim in either order."""
    out, back = (MovedDigit("p", R), MovedDigit("p", R, X)), (MovedDigit("q", R, X), MovedDigit("q", R))
    return {
        "in two dims": Typed(*(((PRE, out[t], POST), (FRONT, back[t], BACK)) for t in (0, 1))),
        "in one dim": Typed(*(((PRE, out[t], MID, back[t], POST),) for t in (0, 1))),
        "in one dim, the held one first": Typed(*(((PRE, back[t], MID, out[t], POST),) for t in (0, 1))),
    }


def two_swaps() -> dict[str, Typed]:
    """Two such pairs at once, in which the digits arrive in the order of the others or in another one."""

    def taking(*holders: Term | None) -> Numeral:
        return PRE, MovedDigit("p", R, holders[0]), MID, MovedDigit("q", S, holders[1]), POST

    def giving(*digits: MovedDigit) -> Numeral:
        return FRONT, digits[0], CORE, digits[1], BACK

    held, local = (MovedDigit("u", R, X), MovedDigit("v", S, Y)), (MovedDigit("u", R), MovedDigit("v", S))
    return {
        "two pairs": Typed((taking(None, None), giving(*held)), (taking(X, Y), giving(*local))),
        "two pairs, crossing": Typed((taking(None, None), giving(*held[::-1])), (taking(X, Y), giving(*local[::-1]))),
    }


def spell_number(major: Term, minor: Term, radix: Term = S) -> Term:
    """The number of a member or a block, spelled by two coordinates or digits."""
    return major * radix + minor


def kept_block(whole: Term) -> Taken:
    """Reads the block of a number, which the digits p and q of the operand's tile spell."""
    a, b = Term("block1"), Term("block2")
    return Taken({}, {"p": a, "q": b}, ((a, R), (b, S)), ((spell_number(a, b), whole),))


def from_member(whole: Term) -> Taken:
    """Receives from the member of a number, which the coordinates x and y spell."""
    a, b = Term("member1"), Term("member2")
    return Taken({X: a, Y: b}, {}, ((a, R), (b, S)), ((spell_number(a, b), whole),))


def block_of_member(block: Taken, member: Taken) -> Taken:
    """Reads a block of a member's tile."""
    unknowns, where = (*block.unknowns, *member.unknowns), (*block.where, *member.where)
    return Taken(member.sender, block.digits, unknowns, where)


def _slice() -> ProofPart:
    laws = [commutes("a digit", move_one(None, X), Taken({}, {"p": X}))]
    laws += [
        commutes(how, typed, kept_block(spell_number(X, Y))) for how, typed in move_two((None, None), (X, Y)).items()
    ]
    tile = Term("tile")
    laws.append(compose_moves(lambda k, i, n, j: tile(spell_number(n, j)), (keep_major, keep_minor), tile(Term("k"))))
    return _part("slice", "each device keeps the block of its own tile that its coordinates number", laws)


def _all_gather() -> ProofPart:
    e_p, e_q = Term("e_p"), Term("e_q")
    laws = [commutes("a digit", move_one(X, None), Taken({X: e_p}, {}))]
    laws += [
        commutes(how, typed, from_member(spell_number(e_p, e_q)))
        for how, typed in move_two((X, Y), (None, None)).items()
    ]
    tile = Term("tile")
    laws.append(compose_moves(lambda k, i, n, j: tile(spell_number(k, i)), (hear_major, hear_minor), tile(Term("n"))))
    return _part("all_gather", "block n of every result is the tile of member n", laws)


def _all_to_all() -> ProofPart:
    laws = [commutes(f"a pair {how}", typed, Taken({X: Term("e_q")}, {"p": X})) for how, typed in swaps().items()]
    arrived = spell_number(Term("e_u"), Term("e_v"))
    taken = block_of_member(kept_block(spell_number(X, Y)), from_member(arrived))
    laws += [commutes(how, typed, taken) for how, typed in two_swaps().items()]
    tile = Term("tile")
    start: Tile = lambda k, i, n, j: tile(spell_number(k, i), spell_number(n, j))  # noqa: E731
    laws.append(compose_moves(start, (swap_major, swap_minor), tile(Term("n"), Term("k"))))
    return _part("all_to_all", "block n of member k's result is block k of member n's tile", laws)


def _reduce_scatter() -> ProofPart:
    m = Term("m")
    summand = Taken({}, {"p": X}, ((m, R),))
    laws = [commutes("a digit, in the summand of any member", move_one(None, X), summand)]
    laws += [
        commutes(f"{how}, in the summand of any member", typed, kept_block(spell_number(X, Y)))
        for how, typed in move_two((None, None), (X, Y)).items()
    ]
    tile = Term("tile")
    start: Tile = lambda k, i, n, j: tile(spell_number(k, i), spell_number(n, j))  # noqa: E731
    # The members that are summed over stay unknown: n1 and n2 one after another, or all of them at once.
    laws.append(compose_moves(start, (swap_major, swap_minor), tile(Term("n"), Term("k"))))
    return _part("reduce_scatter", "member k gets the sum of all members' blocks k", [*laws, *_summands()])


def _all_reduce() -> ProofPart:
    laws = [commutes("the place in the summand of any member", Typed(((PRE,),), ((PRE,),)), Taken({}, {}))]
    return _part("all_reduce", "each member gets the sum of all members' tiles", [*laws, *_summands()])


def _split_sum() -> ProofPart:
    """Digits change independently, as in an exchange: x becomes partial, and z held nothing before."""
    e_p, e_q = Term("e_p"), Term("e_q")
    z = Term("z")
    laws = [
        commutes("a digit that becomes local", move_one(X, None), Taken({X: e_p}, {})),
        *(
            commutes(how, typed, from_member(spell_number(e_p, e_q)))
            for how, typed in move_two((X, Y), (None, None)).items()
        ),
        commutes("a digit that passes to a coordinate not in use", move_one(X, z), Taken({X: z}, {})),
        commutes("a digit of which each device keeps one value", move_one(None, z), Taken({}, {"p": z})),
        commutes("the place in a summand of any number", Typed(((PRE,),), ((PRE,),)), Taken({}, {})),
        _unique("no element has data in two summands"),
        _complete("each element has data in some summand"),
    ]
    what = "each element stays on the one device of a group whose coordinates number it, and the others have none"
    return _part("split_sum", what, laws)


def _permute() -> ProofPart:
    """Held digits keep their places and change their holders: the sender's coordinates spell the same number."""
    turned = Typed(
        ((PRE, MovedDigit("p", R, X), MovedDigit("q", S, Y), POST),),
        ((PRE, MovedDigit("q", S, Y), MovedDigit("p", R, X), POST),),
    )
    traded = Typed(
        ((PRE, MovedDigit("p", R, X), MID, MovedDigit("q", R, Y), POST),),
        ((PRE, MovedDigit("p", R, Y), MID, MovedDigit("q", R, X), POST),),
    )
    laws = [
        commutes("a run whose digits change places", turned, from_member(spell_number(Y, X, R))),
        commutes("two runs that change holders", traded, Taken({X: Y, Y: X}, {})),
        _unique("no tile belongs to two devices"),
        _complete("each number is spelled by some device"),
    ]
    return _part(
        "permute", "each device gets the tile of the one whose coordinates spell before what its own spell after", laws
    )


def _exchange() -> ProofPart:
    laws = [
        commutes("a digit that changes its holder", move_one(X, Y), Taken({X: Y}, {})),
        commutes("a digit whose shares each come from their holder", move_one(X, None), Taken({X: Term("e_p")}, {})),
        commutes("a digit of whose values a box takes one", move_one(None, Y), Taken({}, {"p": Y})),
        *_rounds(),
        neighbours(),
    ]
    what = "each share of a result comes from the device that holds it, in boxes of neighbouring elements"
    return _part("exchange", what, laws)


# ---- what the steps rest on ---------------------------------------------------------------------------

Tile = Callable[[Term, Term, Term, Term], Term]
"""What member (k, i) has at block (n, j): each is a number of two digits, the first of which may stand for many."""


def swap_major(tile: Tile) -> Tile:
    """Members swap blocks with those that differ in the major digit."""
    return lambda k, i, n, j: tile(n, i, k, j)


def swap_minor(tile: Tile) -> Tile:
    """Members swap blocks with those that differ in the minor digit."""
    return lambda k, i, n, j: tile(k, j, n, i)


def hear_major(tile: Tile) -> Tile:
    """Each member receives the tiles of those that differ in the major digit."""
    return lambda k, i, n, j: tile(n, i, n, j)


def hear_minor(tile: Tile) -> Tile:
    """Each member receives the tiles of those that differ in the minor digit."""
    return lambda k, i, n, j: tile(k, j, n, j)


def keep_major(tile: Tile) -> Tile:
    """Each member keeps the blocks that its major digit numbers."""
    return lambda k, i, n, j: tile(k, i, k, j)


def keep_minor(tile: Tile) -> Tile:
    """Each member keeps the blocks that its minor digit numbers."""
    return lambda k, i, n, j: tile(k, i, n, i)


def compose_moves(start: Tile, moves: Sequence[Callable[[Tile], Tile]], fused: Term) -> Law:
    """The law that one launch over n + 1 digits leaves what a launch over n digits and then one over the last leave."""
    tile = start
    for move in moves:
        tile = move(tile)
    k1, k2, n1, n2 = (Term(t) for t in ("k1", "k2", "n1", "n2"))
    given = ((Term("k"), spell_number(k1, k2)), (Term("n"), spell_number(n1, n2)))
    digits = ((k1, R), (k2, S), (n1, R), (n2, S), (Term("k"), None), (Term("n"), None))
    return Law("one after another", (R, S), digits, given, ((fused, tile(k1, k2, n1, n2)),))


def _unique(about: str) -> Law:
    """The law that a number has only one major and one minor digit."""
    a, b, c, d = (Term(t) for t in "abcd")
    given = ((spell_number(a, b), spell_number(c, d)),)
    return Law(about, (S,), ((a, None), (b, S), (c, None), (d, S)), given, ((a, c), (b, d)))


def _complete(about: str) -> Law:
    """The law that a number below r s has digits below r and s."""
    n, a, b = Term("n"), Term("a"), Term("b")
    return Law(about, (R, S), ((n, R * S), (a, None), (b, S)), ((spell_number(a, b), n),), (), ((a, R),))


def _summands() -> list[Law]:
    """The laws that each summand is that of exactly one member: its coordinates number it."""
    return [_unique("no summand belongs to two members"), _complete("each summand belongs to some member")]


def _rounds() -> list[Law]:
    """The laws on the rounds: in round j, the receiver at c takes share (c + j) mod r.

    Modulo does not occur in a law: the share m is given by c + j = v r + m, with v below 2.
    """
    c, d, j, i, m, v, w = (Term(t) for t in "cdjimvw")
    turns = (v, Term("2")), (w, Term("2"))
    senders = ((c + j, v * R + m), (d + j, w * R + m))
    shares = ((c + j, v * R + m), (c + i, w * R + m))
    return [
        Law("no device sends twice in a round", (R,), ((c, R), (d, R), (j, R), (m, R), *turns), senders, ((c, d),)),
        Law("no share comes twice", (R,), ((c, R), (j, R), (i, R), (m, R), *turns), shares, ((j, i),)),
    ]


def neighbours() -> Law:
    """The law that two runs of neighbours with the same first element have the same elements throughout.

    Element i of a run is the numeral (a, b + i) of its first element's digits, since the run ends within its row. The
    lemmas say so to z3, which would otherwise search among products of unknowns.
    """
    a, b, c, d, i = (Term(t) for t in "abcdi")
    ends = [(Term("left_before"), b, R), (Term("left_after"), d, S)]
    digits = ((a, None), (b, R), (c, None), (d, S), (i, R), *((left, size) for left, _, size in ends))
    inside = [(at + i + 1 + left, size) for left, at, size in ends]
    before, after = Term("before"), Term("after")
    o = [(Term(t), bound) for t, bound in (("a2", None), ("b2", R), ("c2", None), ("d2", S))]
    (a2, _), (b2, _), (c2, _), (d2, _) = o
    given = (*inside, (before(a) * R + b, after(c) * S + d), (a2 * R + b2, a * R + b + i), (c2 * S + d2, c * S + d + i))
    equal = ((before(a2) * R + b2, after(c2) * S + d2),)
    lemmas = (Lemma(a2, a, b2, b + i, R), Lemma(c2, c, d2, d + i, S))
    return Law("a box of neighbours that nest in no common digit", (R, S), (*digits, *o), given, equal, lemmas=lemmas)


def _numerals() -> ProofPart:
    laws = [_unique("a number has one string of digits"), _complete("a number below the radices' product has one")]
    argument = ("digit by digit, from the last one, so that numerals of any length are equal if all digits are",)
    return ProofPart("a number and its digits determine each other", argument, tuple(laws))


def _part(kind: str, definition: str, laws: Sequence[Law]) -> ProofPart:
    statement = "it leaves in each tile what meaning(result) says, for every mesh and size"
    return ProofPart(statement, (f"{kind} means that {definition}",), tuple(laws))


RULES: Mapping[str, Callable[[], ProofPart]] = {
    "numerals": _numerals,
    "slice": _slice,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "exchange": _exchange,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "split_sum": _split_sum,
}

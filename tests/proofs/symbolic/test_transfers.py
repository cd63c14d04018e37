"""Exchanges and permutes, in place too: right lists are accepted on any pair, and what no plan shows is refused.

Lists with elements lost, moved or sent elsewhere are planted in whole programs (`test_plan_proof`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import reshard as rs
from reshard.errors import UndecidedError
from reshard.geometry.blocks import Axis, Block, block_part
from reshard.lower import lower_plan
from reshard.lower.exchange_rounds import Exchange, ExchangeInPlace, Transfer
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.plans.rules.tile_view import TileView
from reshard.proofs.symbolic import transfers
from reshard.proofs.symbolic.contract import StepContract
from reshard.proofs.symbolic.form import Tied
from reshard.proofs.symbolic.transfers import (
    boxes_of,
    broken_message_rule,
    check_exchange,
    check_exchange_in_place,
    check_permute,
    replay_slots,
)
from reshard.types import Layout, Mesh
from tests.geometry.brute import offsets
from tests.layouts import random_pair
from tests.proofs.contracts import contract_of, one_step


def lowered(kind: str, source: str, target: str, mesh: Mesh, **mode: object) -> tuple[Any, StepContract]:
    plan = one_step(kind, source, target, mesh, **mode)
    contract = contract_of(plan.source, plan.target)
    return lower_plan(plan).instructions[0], contract


def check_with_sizes_tied(step: Exchange, contract: StepContract) -> None:
    """Checks as the prover does: digits that boxes cut get no name, and the check starts again."""
    try:
        check_exchange(step, contract)
    except Tied as tied:
        assert tied.places <= contract.names
        digits = contract.digits and tuple(
            d._replace(name=None if d.place in tied.places else d.name) for d in contract.digits
        )
        check_exchange(step, replace(contract, digits=digits, names=contract.names - tied.places))


@pytest.mark.parametrize("seed", range(3))
def test_right_exchanges_are_accepted(seed: int):
    choose = random.Random(seed)
    for _ in range(40):
        source, target = random_pair(choose, "float32")
        if 0 in source.shape or source.mesh != target.mesh:
            continue
        plan = chain(source, target, [StepSpec("exchange", target)]) if source != target else None
        if plan is not None:
            check_with_sizes_tied(lower_plan(plan).instructions[0], contract_of(source, target))


THREE = Mesh(x=3)
EVEN = ("f32[{x}5, 6]", "f32[15, {x}2]", Mesh(x=3))
UNEVEN = ("f32[{x}3/10]", "f32[{y}5]", Mesh(x=4, y=2))


def test_a_message_without_a_buffer_is_one_run_of_memory():
    """Whole rows are contiguous on both sides; columns are not, nor are two blocks: those are right if staged."""
    step, _ = lowered("exchange", "f32[{x}5]", "f32[15]", Mesh(x=3))
    assert not step.staged and broken_message_rule(step) is None
    first, *others = step.rounds[0]
    halves = tuple(block_part(first.blocks[0], [span]) for span in ((0, 2), (2, 3)))
    backwards = (Block(9, 9, (Axis(5, -1, -1),)),)
    columns, _ = lowered("exchange", *EVEN)
    assert columns.staged
    turns = ((first._replace(blocks=blocks), *others) for blocks in (halves, backwards, ()))
    cut = [replace(step, rounds=(turn, *step.rounds[1:])) for turn in turns]
    for wrong in (replace(columns, staged=False), *cut):
        assert "not one run of memory" in str(broken_message_rule(wrong))
        assert broken_message_rule(replace(wrong, staged=True)) is None


def test_blocks_by_hand():
    """Loops that step over rows are listed value by value; those in another order at their other end are refused."""
    whole, rows = TileView((12,), (12,), (12,), (0,), ()), TileView((3, 8), (3, 8), (3, 8), (0, 1), ())

    def read(block: Block, send: TileView = whole) -> list:
        boxes = boxes_of(Exchange(send, rows, (0,), (Transfer(0, 0, (block,)),), (), True))
        return list(zip(boxes.src.tolist(), boxes.dst.tolist(), strict=True))

    assert read(Block(1, 4, (Axis(2, 6, 8), Axis(2, 1, 1)))) == [
        ([[1, 2]], [[0, 1], [4, 2]]),
        ([[7, 2]], [[1, 1], [4, 2]]),
    ]
    assert read(Block(0, 8, (Axis(2, 8, 8), Axis(8, 1, 1))), rows) == [([[0, 2], [0, 8]], [[1, 2], [0, 8]])]
    assert read(Block(0, 0, (Axis(0, 1, 1),))) == []
    with pytest.raises(UndecidedError, match="not a slice"):
        read(Block(0, 0, (Axis(2, 1, 8), Axis(2, 8, 1))), rows)  # transposed
    for wrong in (
        Block(0, 0, (Axis(2, 0, 1),)),
        Block(11, 0, (Axis(2, 1, 1),)),
        Block(-1, 0, (Axis(2, 1, 1),)),
        Block(0, 7, (Axis(2, 1, 1),)),
        Block(0, 24, ()),
    ):
        with pytest.raises(UndecidedError):
            read(wrong)


def test_chunks_tie_the_sizes_that_they_cut():
    """Messages of 10 elements, 5 by 2, in chunks of 4: the digit of 5 is cut, and that of 2 is not."""
    step, contract = lowered("exchange", *EVEN, chunk=4)
    with pytest.raises(Tied) as tied:
        check_exchange(step, contract)
    assert tied.value.places == {(0, 1)} < contract.names


def test_a_summand_stays_with_its_device():
    step, contract = lowered("exchange", "f32[{x}5, 6] + sum{y}", "f32[15, {x}2] + sum{y}", Mesh(x=3, y=2))
    check_exchange(step, contract)
    rounds = tuple(tuple(t._replace(sender=t.sender ^ 1) for t in transfers) for transfers in step.rounds)
    with pytest.raises(UndecidedError, match="a summand of another device"):
        check_exchange(replace(step, rounds=rounds), contract)


@pytest.mark.parametrize(
    ("source", "target", "mesh"),
    [
        ("f32[{x}{y}2]", "f32[{y}{x}2]", Mesh(x=3, y=2)),
        ("f32[{x}5, {y}7]", "f32[{y}5, {x}7]", Mesh(x=3, y=3)),
        ("f32[2{x}3{y}]", "f32[2{y}3{x}]", Mesh(x=5, y=5)),
        ("f32[{x}3/10]", "f32[{y}3/10]", Mesh(x=4, y=4)),
    ],
)
def test_permutes(source: str, target: str, mesh: Mesh):
    """Right pairs are accepted in any order; two swapped senders are not."""
    step, contract = lowered("permute", source, target, mesh)
    check_permute(replace(step, pairs=step.pairs[::-1]), contract)
    (a, b), (c, d), *others = step.pairs
    with pytest.raises(UndecidedError):
        check_permute(replace(step, pairs=((c, b), (a, d), *others)), contract)
    with pytest.raises(UndecidedError, match="each receiver once"):
        check_permute(replace(step, pairs=((a, b), (c, b), *others)), contract)


@pytest.mark.parametrize(
    ("pieces", "what"),
    [
        ([[(0, 3), (0, 2)], [(3, 2), (0, 2)]], None),
        ([[(0, 5), (0, 1)], [(0, 2), (1, 1)], [(2, 3), (1, 1)]], None),
        ([[(0, 3), (0, 2)], [(2, 2), (0, 2)]], "overlap"),  # as many elements as a share, but row 4 is missing
        ([[(0, 3), (0, 2)], [(3, 1), (0, 2)]], "not all of it"),
    ],
)
def test_the_pieces_of_a_share_tile_it(pieces: list, what: str | None):
    """A share of 5 by 2 elements, as (start, extent) along both digits."""
    if what is None:
        transfers._check_pieces(np.array(pieces), [5, 2], "a step")
    else:
        with pytest.raises(UndecidedError, match=what):
            transfers._check_pieces(np.array(pieces), [5, 2], "a step")


def test_too_many_pieces_are_not_compared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transfers, "MOST_PIECES", 1)
    step, contract = lowered("exchange", *EVEN, chunk=4)
    with pytest.raises(UndecidedError, match="too many to compare"):
        check_with_sizes_tied(step, contract)
    monkeypatch.setattr(transfers, "MOST_CELLS", 1)
    step, contract = lowered("exchange", *UNEVEN)
    with pytest.raises(UndecidedError, match="a grid of too many boxes"):
        check_exchange(step, contract)


def test_another_layout_of_the_same_tiles_is_refused():
    """The lists of one exchange do not fit a target that deals the elements out differently."""
    step, _ = lowered("exchange", *UNEVEN)
    other = [Layout.parse(text, Mesh(x=4, y=2)) for text in ("f32[{x}3/10]", "f32[5{y}]")]
    with pytest.raises(UndecidedError):
        check_exchange(step, contract_of(*other))


def elements_turned(step: Exchange) -> Iterator[Exchange]:
    """All elements of one message arrive, but each in the next one's place."""
    for transfer in itertools.chain(step.local, *step.rounds):
        pairs = [pair for block in transfer.blocks for pair in offsets(block)]
        turned = [Block(src, dst, ()) for (src, _), (_, dst) in zip(pairs, pairs[1:] + pairs[:1], strict=True)]
        if len(pairs) > 1:
            yield with_transfer(step, transfer, transfer._replace(blocks=tuple(turned)))


def sent_instead(step: Exchange) -> Iterator[Exchange]:
    """One message between two devices is sent a second time, in place of another."""
    for one, other in itertools.permutations(itertools.chain.from_iterable(step.rounds), 2):
        if one[:2] == other[:2]:
            yield with_transfer(step, one, other._replace(relayed=one.relayed))


def with_transfer(step: Exchange, old: Transfer, new: Transfer) -> Exchange:
    local, *rounds = (tuple(new if t is old else t for t in turn) for turn in (step.local, *step.rounds))
    return replace(step, local=local, rounds=tuple(rounds))


@pytest.mark.parametrize("plant", [elements_turned, sent_instead])
@pytest.mark.parametrize(
    ("source", "target", "meshes", "mode"),
    [
        ("f32[{x}5, 6]", "f32[15, {x}2]", [THREE] * 2, StepMode(4)),
        ("f32[{x}3/10, 2]", "f32[{y}5, 2]", [Mesh(x=4, y=2)] * 2, StepMode(3)),
        ("f32[{x}6]", "f32[12]", [Mesh(x=2), Mesh({"a": 4}, device_ids=[1, 4, 5, 6])], StepMode(2, relay=True)),
        ("f32[8, 3]", "f32[8, {b}2/3]", [Mesh(x=1), Mesh(a=2, b=2)], StepMode(relay=True)),
    ],
)
def test_every_element_has_its_place(source: str, target: str, meshes: list[Mesh], mode: StepMode, plant: Any):
    ends = [Layout.parse(text, mesh) for text, mesh in zip((source, target), meshes, strict=True)]
    contract = contract_of(*ends)
    step = lower_plan(chain(*ends, [StepSpec("exchange", ends[1], mode)])).instructions[0]
    check_with_sizes_tied(step, contract)
    wrong = list(plant(step))
    for each in wrong:
        with pytest.raises(UndecidedError):
            check_with_sizes_tied(each, contract)
    assert wrong or (plant is sent_instead and mode.chunk is None)


def test_equal_boxes_need_not_fill_another_tile():
    """Device 1 has two rows of one column, device 2 one row of two columns; both are given two rows of one."""
    ends = [Layout.parse(text, Mesh(x=2, y=2)) for text in ("f32[{x}2/3, 3]", "f32[{x}2/3, {y}2/3]")]
    step, contract = lower_plan(chain(*ends, [StepSpec("exchange", ends[1])])).instructions[0], contract_of(*ends)
    check_with_sizes_tied(step, contract)
    (first,), (second,) = ([t for t in step.local if t.receiver == device] for device in (1, 2))
    (block,) = first.blocks
    with pytest.raises(UndecidedError, match="elements that no box brings"):
        check_with_sizes_tied(with_transfer(step, second, second._replace(blocks=(block._replace(src=0),))), contract)


# ---- in place


def lowered_in_place(
    source: str, target: str, mesh: Mesh = THREE, **mode: object
) -> tuple[ExchangeInPlace, StepContract]:
    plan = one_step("exchange", source, target, mesh, in_place=True, **mode)
    return lower_plan(plan).instructions[0], contract_of(plan.source, plan.target)


def test_the_slots_of_the_docstring():
    """Shares are numbered (device + 3 * place); as global indices they are those of the table."""
    step, contract = lowered_in_place("f32[{x}3]", "f32[3{x}]")
    packed, first, last = (
        [[0, 2, 1], [4, 3, 5], [8, 7, 6]],
        [[0, 3, 1], [4, 7, 5], [8, 2, 6]],
        [[0, 3, 6], [4, 7, 1], [8, 2, 5]],
    )
    for held, expected in zip(replay_slots(step, contract), (packed, first, last), strict=True):
        place, device = np.divmod(held[:, :, 0], 3)
        assert (3 * device + place).tolist() == expected


PAIRS = [
    ("f32[{x}3]", "f32[3{x}]", THREE),
    ("f32[{x}2, 6]", "f32[6, {x}2]", THREE),
    ("f32[{x}5, {y}4]", "f32[{y}5, {x}4]", Mesh(x=2, y=2)),
    ("f32[{x}{y}, 6, 5]", "f32[6, {y}{x}, 5]", Mesh(x=3, y=2)),
]


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize(("source", "target", "mesh"), PAIRS)
def test_right_exchanges_in_place_are_accepted(source: str, target: str, mesh: Mesh, chunk: int | None):
    """Chunks that cut a slot tie all sizes; the check then runs on a contract without names."""
    step, contract = lowered_in_place(source, target, mesh, chunk=chunk)
    cuts = any(t.length < step.slot for transfers in step.rounds for t in transfers)
    if cuts and contract.names:
        with pytest.raises(Tied) as tied:
            check_exchange_in_place(step, contract)
        assert tied.value.places == contract.names
        contract = replace(contract, names=frozenset())
    check_exchange_in_place(step, contract)


def test_random_exchanges_in_place_are_accepted():
    choose, checked = random.Random(0), 0
    while checked < 30:
        source, target = random_pair(choose, "float32")
        try:
            plan = one_step("exchange", str(source), str(target), source.mesh, in_place=True)
        except rs.errors.ReshardError:
            continue
        step, contract = lower_plan(plan).instructions[0], contract_of(plan.source, plan.target)
        if isinstance(step, ExchangeInPlace) and 0 not in source.shape:
            check_exchange_in_place(step, replace(contract, names=frozenset()))
            checked += 1


IN_PLACE_FAULTS: dict[str, tuple[Callable[[ExchangeInPlace], dict], str]] = {
    "a slot that does not exist": (lambda s: first_sent(s, dst_slot=9), "does not exist"),
    "a piece past the end": (lambda s: first_sent(s, start=1), "reaches out"),
    "half a slot": (lambda s: first_sent(s, length=s.slot // 2), "a slot of several shares"),
    "a device without places": (lambda s: {"pack": {0: s.pack[0]}}, "not every device has places"),
    "a place left out": (lambda s: {"unpack": {**s.unpack, 0: s.unpack[0][1:]}}, "a place that is not unpacked"),
    "unstaged": (lambda s: {"staged": False}, "unstaged messages of several elements"),
    "a slot of another size": (lambda s: {"slot": s.slot + 1}, "another size than a share"),
}


def first_sent(step: ExchangeInPlace, **change: int) -> dict:
    first, *others = step.rounds[0]
    return {"rounds": ((first._replace(**change), *others), *step.rounds[1:])}


@pytest.mark.parametrize("fault", IN_PLACE_FAULTS)
def test_changed_lists_in_place_are_refused(fault: str):
    step, contract = lowered_in_place("f32[{x}2, 6]", "f32[6, {x}2]")
    contract = replace(contract, names=frozenset())
    assert step.slot == 4 and step.staged
    check_exchange_in_place(step, contract)
    change, what = IN_PLACE_FAULTS[fault]
    with pytest.raises(UndecidedError, match=what):
        check_exchange_in_place(replace(step, **change(step)), contract)


def test_what_was_never_written_is_not_unpacked():
    """Device 0 packs one slot less: what arrives over it is fine, but a slot that stays empty is not."""
    step, contract = lowered_in_place("f32[{x}3]", "f32[3{x}]")
    keeps = {**step.pack, 0: step.pack[0][1:]}
    with pytest.raises(UndecidedError, match="a slot of several shares"):
        check_exchange_in_place(replace(step, pack=keeps), contract)


def test_uneven_layouts_are_not_exchanged_in_place():
    step, _ = lowered_in_place("f32[{x}3]", "f32[3{x}]")
    uneven = contract_of(*(Layout.parse(text, THREE) for text in ("f32[{x}3/8]", "f32[3{x}/8]")))
    with pytest.raises(UndecidedError, match="not even"):
        check_exchange_in_place(step, uneven)

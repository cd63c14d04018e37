"""Exchanges in place: the contents of slots, round by round, and changed lists that are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import reshard as rs
from reshard.errors import UndecidedError
from reshard.lower import lower_plan
from reshard.lower.exchange_rounds import ExchangeInPlace
from reshard.proofs.symbolic.contract import StepContract
from reshard.proofs.symbolic.form import Tied
from reshard.proofs.symbolic.transfers import check_exchange_in_place, replay_slots
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.proofs.contracts import contract_of, one_step

THREE = Mesh(x=3)


def lowered(source: str, target: str, mesh: Mesh = THREE, **mode: object) -> tuple[ExchangeInPlace, StepContract]:
    plan = one_step("exchange", source, target, mesh, in_place=True, **mode)
    return lower_plan(plan).instructions[0], contract_of(plan.source, plan.target)


def test_the_slots_of_the_docstring():
    """Shares are numbered (device + 3 * place); as global indices they are those of the table."""
    step, contract = lowered("f32[{x}3]", "f32[3{x}]")
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
def test_right_exchanges_are_accepted(source: str, target: str, mesh: Mesh, chunk: int | None):
    """Chunks that cut a slot tie all sizes; the check then runs on a contract without names."""
    step, contract = lowered(source, target, mesh, chunk=chunk)
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


def other(step: ExchangeInPlace, change: Callable[[tuple], tuple]) -> ExchangeInPlace:
    return replace(step, rounds=(change(step.rounds[0]), *step.rounds[1:]))


FAULTS: dict[str, tuple[Callable[[ExchangeInPlace], ExchangeInPlace], str]] = {
    "a transfer is missing": (lambda s: other(s, lambda r: r[1:]), "another share"),
    "a round is missing": (lambda s: replace(s, rounds=s.rounds[1:]), "another share"),
    "another slot is sent": (
        lambda s: other(s, lambda r: (r[0]._replace(src_slot=(r[0].src_slot + 1) % s.slots), *r[1:])),
        "another share",
    ),
    "a slot that does not exist": (lambda s: other(s, lambda r: (r[0]._replace(dst_slot=9), *r[1:])), "does not exist"),
    "half a slot": (
        lambda s: other(s, lambda r: (r[0]._replace(length=s.slot // 2), *r[1:])),
        "a slot of several shares",
    ),
    "a piece past the end": (lambda s: other(s, lambda r: (r[0]._replace(start=1), *r[1:])), "reaches out"),
    "unpacked elsewhere": (
        lambda s: replace(s, unpack={**s.unpack, 0: tuple((n, p) for (n, _), (_, p) in rotated(s.unpack[0]))}),
        "another share",
    ),
    "a place left out": (lambda s: replace(s, unpack={**s.unpack, 0: s.unpack[0][1:]}), "a place that is not unpacked"),
    "a device without places": (lambda s: replace(s, pack={0: s.pack[0]}), "not every device has places"),
    "unstaged": (lambda s: replace(s, staged=False), "unstaged messages of several elements"),
    "a slot of another size": (lambda s: replace(s, slot=s.slot + 1), "another size than a share"),
}


def rotated(places: tuple) -> list[tuple]:
    return list(zip(places, (*places[1:], places[0]), strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_changed_lists_are_refused(fault: str):
    step, contract = lowered("f32[{x}2, 6]", "f32[6, {x}2]")
    contract = replace(contract, names=frozenset())
    assert step.slot == 4 and step.staged
    check_exchange_in_place(step, contract)
    change, what = FAULTS[fault]
    with pytest.raises(UndecidedError, match=what):
        check_exchange_in_place(change(step), contract)


def test_what_was_never_written_is_not_unpacked():
    """Device 0 packs one slot less: what arrives over it is fine, but a slot that stays empty is not."""
    step, contract = lowered("f32[{x}3]", "f32[3{x}]")
    keeps = {**step.pack, 0: step.pack[0][1:]}
    with pytest.raises(UndecidedError, match="a slot of several shares"):
        check_exchange_in_place(replace(step, pack=keeps), contract)


def test_uneven_layouts_are_refused():
    step, _ = lowered("f32[{x}3]", "f32[3{x}]")
    uneven = contract_of(*(Layout.parse(text, THREE) for text in ("f32[{x}3/8]", "f32[3{x}/8]")))
    with pytest.raises(UndecidedError, match="not even"):
        check_exchange_in_place(step, uneven)

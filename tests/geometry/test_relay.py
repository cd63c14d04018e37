"""Relays: every device gets what it lacks once, and nobody passes on what it has not received."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain as join
from itertools import product
from math import ceil, prod

import numpy as np
import pytest

from benchmarks.endpoints import weights
from reshard.geometry.holders import count_lacked, fewest_through
from reshard.geometry.relay import Demand, RelayTurn, balance_shares, level_sums, relay_figures, relay_messages
from reshard.geometry.remesh import one_set
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.types import Layout, Mesh
from tests import oracle
from tests.endpoint_lp import classes, forwarded
from tests.geometry import brute
from tests.layouts import random_crossing, random_layout
from tests.oracle import PADDING, tiles_of
from tests.view_oracle import KEPT, Case, cut


def check_elements(source: Layout, target: Layout, case: Case | None = None) -> None:
    """Follows every element: devices send what they hold, in the second turn what has arrived in the first, and each
    tile of the target is filled once with what it means. The figures are those of what was sent. A case has a view."""
    index = np.arange(prod(source.shape)).reshape(source.shape)
    ends = tiles_of(source), tiles_of(target) if case is None else cut(target, case.reference(index))
    held, wanted = ({d: tile.ravel().tolist() for d, tile in each.items()} for each in ends)
    made = {device: [at if at >= KEPT else PADDING for at in tile] for device, tile in wanted.items()}
    view = None if case is None else case.move.view
    in_all, turns, largest = Counter[int](), list[RelayTurn](), 0
    for tiles, turn in zip((held, made), relay_messages(source, target, view), strict=True):
        sent, received, ends = Counter[int](), Counter[int](), Counter[tuple[str, int]]()
        arriving: list[tuple[int, int, int]] = []
        for message in turn:
            pairs = [pair for block in message.blocks for pair in brute.offsets(block)]
            moved = [(message.receiver, there, tiles[message.sender][here]) for here, there in pairs]
            assert len(moved) == message.elements > 0
            arriving += moved
            if message.sender != message.receiver:
                assert not {element for *_, element in moved} & set(held.get(message.receiver, ()))
                sent[message.sender] += len(moved)
                received[message.receiver] += len(moved)
                ends.update([("sends", message.sender), ("receives", message.receiver)])
                largest = max(largest, len(moved))
        assert len({(m.sender, m.receiver) for m in turn}) == len(turn)
        for device, at, element in arriving:  # All are read before any is written.
            assert made[device][at] == PADDING != element
            made[device][at] = element
        turns.append(RelayTurn(*(max(each.values(), default=0) for each in (received, sent, ends))))
        in_all += sent
    assert made == wanted
    assert relay_figures(source, target, view) == (tuple(turns), max(in_all.values(), default=0), largest)


def small_relays() -> Iterator[tuple[Layout, Layout]]:
    """Up to 7 elements in blocks, dealt out and replicated, from up to 4 devices to up to 6, however they overlap."""
    for size, (held, copies), first in product((2, 3, 7), ((1, 1), (3, 1), (2, 2), (1, 2)), (0, 1, 3, 6)):
        for count, again in ((1, 1), (3, 1), (2, 2), (5, 1), (3, 2)):
            meshes = (
                Mesh(x=held, r=copies),
                Mesh({"x": count, "r": again}, device_ids=range(first, first + count * again)),
            )
            if not one_set(*meshes):
                yield from product(*(spellings(size, mesh) for mesh in meshes))


def spellings(size: int, mesh: Mesh) -> list[Layout]:
    """Replicated, and along `x` and both axes in blocks or dealt out one by one."""
    ways = [""] + ["{x}"] * (mesh.axes["x"] > 1) + ["{x}{r}"] * (mesh.axes["x"] > 1 < mesh.axes["r"])
    texts = {f"s32[{size}]": None}
    for way in ways[1:]:
        each = -(-size // (mesh.size if "r" in way else mesh.axes["x"]))
        texts |= {f"s32[{way}{each}/{size}]": None, f"s32[{each}{way}/{size}]": None}
    return [Layout.parse(text, mesh) for text in texts]


def test_small_relays_move_every_element_once():
    relays = list(small_relays())
    assert len(relays) > 1000
    for source, target in random.Random(7).sample(relays, 600):
        check_elements(source, target)


@pytest.mark.parametrize("seed", range(4))
def test_random_relays_move_every_element_once(seed: int):
    choose = random.Random(seed)
    for _ in range(30):
        check_elements(*random_crossing(choose))


@pytest.mark.parametrize("part", range(4))
def test_relays_of_weights_move_every_element_once(part: int):
    """Through views, parts taken and filled, also among the same devices; the bound is that of what is counted."""
    for seed in range(20 * part, 20 * part + 20):
        case = weights(seed, 12)[1]
        source, target, view = case.move.source, case.move.target, case.move.view
        check_elements(source, target, case)
        leaving, received = Counter[frozenset[int]](), Counter[int]()
        for (holders, missing), count in classes(source, target, case.view.apply).items():
            leaving[holders] += count
            received.update(dict.fromkeys(missing, count))
        least = (ceil(count / len(holders)) for holders, count in leaving.items())
        assert fewest_through(source, target, view) == max([*received.values(), *least], default=0)


@pytest.mark.fast(20)
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("seed", range(60))
def test_a_relay_moves_every_element_within_its_promise(seed: int, chunk: int | None):
    source, target = random_crossing(random.Random(seed))
    oracle.check(chain(source, target, [StepSpec("exchange", target, StepMode(chunk, relay=True))]))


@pytest.mark.parametrize("seed", range(40))
def test_the_busiest_device_is_near_the_linear_program(seed: int):
    """In whole elements, of arrays that have many."""
    choose = random.Random(seed)
    meshes = [layout.mesh for layout in random_crossing(choose)]
    shape = [choose.choice((24, 32, 60)) for _ in range(2)]
    source, target = (random_layout(choose, mesh, shape) for mesh in meshes)
    busiest = max(relay_figures(source, target).sent, count_lacked(source, target).most)
    assert busiest <= 1.01 * ceil(forwarded(source, target) - 1e-6)


@pytest.mark.parametrize("copies", [2, 3, 6])
def test_holders_that_pass_on_much_send_less_of_their_own(copies: int):
    """Several devices hold each half, and most of them receive the other half and pass it on."""
    source = Layout.parse("s32[{x}30]", Mesh(x=2, r=copies))
    for first, (count, again) in product(range(4), ((4, 1), (2, 2), (6, 1), (8, 1))):
        mesh = Mesh({"y": count, "q": again}, device_ids=range(first, first + count * again))
        for target in (Layout.parse(text, mesh) for text in ("s32[60]", "s32[{q}30]")[:again]):
            if not one_set(source.mesh, mesh):
                assert relay_figures(source, target).sent <= ceil(forwarded(source, target) - 1e-6)


def test_a_broadcast_loads_nobody_more_than_once():
    """From one device to sixteen, itself included: pulled, it would send fifteen times what they need."""
    source, target = Layout.parse("f32[48, 48]", Mesh(x=1)), Layout.parse("f32[48, 48]", Mesh(d=16))
    figures = relay_figures(source, target)
    assert figures.sent == 48 * 48
    assert sum(turn.rounds for turn in figures.turns) == 15 + 14


def test_a_holder_of_much_passes_on_little():
    """Device 0 sends 12 elements of its own; of what others send it, it passes on less than they do."""
    source, target = Layout.parse("f32[{x}12]", Mesh(x=2)), Layout.parse("f32[24]", Mesh(d=6))
    passed = Counter()
    for message in relay_messages(source, target).second:
        passed[message.sender] += message.elements
    assert passed[0] < passed[5]


def test_whole_elements_are_spread_over_all_classes():
    """Twelve classes of 64 elements for 44 devices: whoever gets two of one class gets one of the next."""
    source = Layout.parse("s32[32, {v:(2)17}2/24]", Mesh(v=34))
    target = Layout.parse("s32[32, 24]", Mesh(v=15, w=3))
    figures = relay_figures(source, target)
    assert figures.sent <= fewest_through(source, target)


def test_few_elements_are_passed_on_by_several_devices_each():
    """Of 96 elements for 46 devices, each passes on two; the last four go to a device in each of some groups."""
    source = Layout.parse("s32[96]", Mesh(x=2))
    target = Layout.parse("s32[96]", Mesh(y=48))
    assert relay_figures(source, target).sent <= 1.02 * ceil(forwarded(source, target))
    for size in (1, 5, 40, 47, 130):
        ends = [Layout.parse(f"s32[{size}]", layout.mesh) for layout in (source, target)]
        check_elements(*ends)


def test_sums_are_levelled_as_low_as_they_can_be():
    for bases in join.from_iterable(product(range(5), repeat=count) for count in (1, 2, 3)):
        for amount in range(9):
            added = level_sums(bases, amount)
            highest = next(h for h in range(99) if sum(max(0, h - base) for base in bases) >= amount)
            assert sum(added) == amount and min(added) >= 0
            assert all(base + more <= highest for base, more in zip(bases, added, strict=True) if more)


# Who passes on how much: near a linear program that shares no code, in whole elements.


def test_holders_send_what_nobody_has_room_to_pass_on():
    """Devices 1 and 2 send 100 elements of their own each, so device 0 sends its ten to both."""
    demands = [Demand(10, [0], [1, 2]), Demand(100, [1], [3]), Demand(100, [2], [4])]
    assert balance_shares(demands, enough=100)[0] == (0, 0)


def test_an_early_class_leaves_room_for_a_later_one():
    """Device 1 sends 100 elements of its own, so the two others pass on what device 0 sends."""
    demands = [Demand(60, [0], [1, 2, 3]), Demand(100, [1], [4])]
    counts = balance_shares(demands, enough=100)
    assert counts[0][0] == 0 and sum(counts[0]) == 60

"""Messages of an exchange: every needed element once, from a holder, evenly dealt; through a view, and cut."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings

from reshard.geometry.blocks import Axis, Block, Product, count_product
from reshard.geometry.figures import exchange_figures, received_by_device, sent_by_device
from reshard.geometry.messages import Message, cut_product, exchange_messages, messages_of
from reshard.geometry.view_layouts import BoxIndex, SideBox, common_block, dim_boxes
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh
from tests.geometry import brute
from tests.layouts import MESHES, pairs, random_layout, random_pair
from tests.oracle import PADDING, tiles_of
from tests.view_oracle import KEPT, random_case
from tests.view_oracle import cut as view_tiles

# An unchanged dim that is padded: devices along y exchange unlike numbers of elements.
PADDED = [
    (Layout.parse("f32[{x}3/7, {y}3/5]", mesh), Layout.parse("f32[7, {y}3/5]", mesh)) for mesh in (Mesh(x=3, y=2),)
]


def some_pairs(seed: int) -> list[tuple[Layout, Layout]]:
    choose = random.Random(seed)
    return PADDED + [random_pair(choose, most_rank=2) for _ in range(80)]


@pytest.mark.parametrize("seed", range(3))
def test_every_device_gets_each_element_once_and_what_it_lacks_is_dealt_evenly(seed: int):
    for source, target in some_pairs(seed):
        messages = exchange_messages(source, target)
        held, wanted = tiles_of(source), tiles_of(target)
        arrived: dict[int, list[int]] = {device: [] for device in wanted}
        for message in messages:
            there, here = held[message.sender].reshape(-1), wanted[message.receiver].reshape(-1)
            every = [pair for block in message.blocks for pair in brute.offsets(block)]
            assert len(every) == message.elements
            assert all(there[src] == here[dst] != PADDING for src, dst in every)
            arrived[message.receiver] += [int(here[dst]) for _, dst in every]
        for device, indices in arrived.items():
            assert sorted(indices) == sorted(wanted[device][wanted[device] != PADDING].tolist()), (source, target)

        homes = brute.home_tiles(source)
        holders, expected = Counter(homes.values()), Counter(brute.requests(source, target).keys())
        assert Counter((m.receiver, homes[m.sender]) for m in messages) == expected
        assert all((homes[m.sender] == homes[m.receiver]) == (m.sender == m.receiver) for m in messages)
        sent = Counter(m.sender for m in messages if m.sender != m.receiver)
        asked_of = Counter(homes[m.sender] for m in messages if m.sender != m.receiver)
        for device, tile in homes.items():
            low, rest = divmod(asked_of[tile], holders[tile])
            assert low <= sent[device] <= low + bool(rest)
        busiest = Counter(m.receiver for m in messages if m.sender != m.receiver)
        assert max([0, *sent.values(), *busiest.values()]) == brute.rounds(source, target)


@pytest.mark.parametrize("mesh", [Mesh(x=3, y=2), Mesh({"x": 3, "y": 2}, device_ids=[5, 4, 1, 0, 3, 2])], ids=repr)
def test_summands_are_exchanged_among_their_holders_only(mesh: Mesh):
    source, target = Layout.parse("f32[{x}3/7] + sum{y}", mesh), Layout.parse("f32[7] + sum{y}", mesh)
    for message in exchange_messages(source, target):
        assert mesh.position(message.sender) % 2 == mesh.position(message.receiver) % 2
    assert len(exchange_messages(source, target)) == 6 * 3


def test_two_holders_share_the_requests():
    """The last piece is one element; the four devices along y hold it and deal the requests of the eight others."""
    mesh = Mesh(x=3, y=4)
    source, target = Layout.parse("f32[{x}3/7]", mesh), Layout.parse("f32[7]", mesh)
    last = [
        m
        for m in exchange_messages(source, target)
        if m.sender != m.receiver and list(m.blocks) == [Block(0, 6, (Axis(1, 1, 1),))]
    ]
    assert Counter(m.sender for m in last) == {8: 2, 9: 2, 10: 2, 11: 2}
    assert {m.receiver for m in last} == set(range(8))


# ---- the messages of one device ---------------------------------------------------------------------


def assert_own(before: Layout, after: Layout) -> None:
    listed = exchange_messages(before, after)
    for device in before.mesh.devices:
        own = Counter(each for each in listed if device in (each.sender, each.receiver))
        assert Counter(messages_of(before, after, device)) == own


@given(pairs())
@settings(max_examples=150)
def test_those_of_one_device_are_those_of_the_list_that_name_it(pair: tuple[Layout, Layout]):
    assert_own(*pair)


def test_the_messages_of_one_device_where_meshes_differ():
    one, other = Mesh(x=2, y=3), Mesh({"z": 6}, device_ids=[5, 3, 1, 0, 2, 4])
    assert_own(Layout.parse("f32[{x}4/7]", one), Layout.parse("f32[{z}2/7]", other))


# ---- products, cut at any element -------------------------------------------------------------------

ROWS = (
    Block(0, 7, (Axis(2, 1, 1),)),
    Block(4, 9, (Axis(2, 9, 5), Axis(3, 1, 1))),
    Block(30, 40, (Axis(2, 2, 1),)),
    Block(50, 1, (Axis(3, 1, 1),)),
)
COLUMNS = (Block(1, 0, (Axis(2, 10, 20), Axis(2, 4, 4), Axis(2, 1, 1))),)
PLANES = (Block(5, 5, (Axis(3, 1, 1),)),)


def _listed(products: tuple[Product, ...]) -> list[tuple[tuple[int, int], ...]]:
    """The offsets of every element along each factor, in order."""
    listed = []
    for product in products:
        factors = [[pair for block in factor for pair in brute.offsets(block)] for factor in product]
        listed += itertools.product(*factors)
    return listed


@pytest.mark.parametrize("product", [(), (ROWS,), (COLUMNS,), (ROWS, PLANES), (ROWS, COLUMNS, PLANES)], ids=len)
def test_a_cut_has_the_elements_between_two_numbers_in_order(product: Product):
    every = _listed((product,))
    assert count_product(product) == len(every)
    ends = range(0, len(every) + 1, max(1, len(every) // 25))
    for low, high in itertools.combinations_with_replacement(ends, 2):
        message = Message(0, 1, cut_product(product, low, high))
        assert _listed(message.products) == every[low:high]
        assert message.elements == sum(block.elements for block in message.blocks) == high - low
        assert sum(prod(extents) * times for extents, times in message.shape) == high - low
        assert message.shape == tuple(sorted(Counter(block.extents for block in message.blocks).items()))


def test_a_cut_needs_few_products():
    """Of rank r, at most 2 r - 1 of them: a start, a middle and an end in each factor."""
    product = (PLANES, PLANES, PLANES)
    assert max(len(cut_product(product, low, high)) for low in range(27) for high in range(low, 28)) == 5


# ---- through a view ---------------------------------------------------------------------------------


def test_through_a_view_every_needed_element_is_sent_once_by_a_device_that_has_it():
    for seed in range(200):
        case = random_case(random.Random(seed), most=96)
        source, target, view = case.move.source, case.move.target, case.move.view
        index = np.arange(int(np.prod(source.shape))).reshape(source.shape)
        held, wanted = view_tiles(source, index), view_tiles(target, case.reference(index))
        arrived = {device: np.full(tile.size, PADDING) for device, tile in wanted.items()}
        times = {device: Counter() for device in wanted}
        for message in exchange_messages(source, target, view):
            flat = held[message.sender].reshape(-1)
            every = [pair for block in message.blocks for pair in brute.offsets(block)]
            assert len(every) == message.elements
            for src, dst in every:
                arrived[message.receiver][dst] = flat[src]
                times[message.receiver][dst] += 1
        received = {device: 0 for device in wanted}
        for device, tile in wanted.items():
            needed = (tile.reshape(-1) != PADDING) & (tile.reshape(-1) < KEPT)
            assert np.array_equal(arrived[device][needed], tile.reshape(-1)[needed]), (seed, device)
            assert set(times[device]) == set(np.flatnonzero(needed)) and set(times[device].values()) <= {1}
            own = set(held[device].reshape(-1)) - {PADDING}
            received[device] = sum(value not in own for value in tile.reshape(-1)[needed])
        assert received_by_device(source, target, view).listed == received, seed


def test_figures_through_a_view_are_those_of_the_messages():
    for seed in range(60):
        case = random_case(random.Random(seed), most=96)
        both = (case.move.source, case.move.target, case.move.view)
        sent = [m for m in exchange_messages(*both) if m.sender != m.receiver]
        loads = [*Counter(m.sender for m in sent).values(), *Counter(m.receiver for m in sent).values()]
        figures, by_sender = exchange_figures(*both), Counter[int]()
        for message in sent:
            by_sender[message.sender] += message.elements
        assert sent_by_device(*both).listed == {device: by_sender[device] for device in both[0].mesh.devices}
        assert (figures.rounds, figures.message) == (max(loads, default=0), max((m.elements for m in sent), default=0))
        assert figures.run == (figures.message if all(m.is_run for m in sent) else 1)


def test_the_boxes_of_a_piece_are_its_indices():
    for seed in range(200):
        choose = random.Random(seed)
        sizes = [choose.choice((1, 2, 3, 4, 6)) for _ in range(choose.randint(1, 3))]
        layout = random_layout(choose, choose.choice(MESHES), [prod(sizes)])
        windows = [(start := choose.randrange(size), choose.randint(1, size - start), size) for size in sizes]
        pieces = dim_boxes(layout.dims[0], windows)
        for device in layout.mesh.devices:
            index = meaning(layout, device)[0]
            wanted = {}
            for local, flat in enumerate(index):
                if flat < layout.shape[0]:
                    digits = np.unravel_index(flat, sizes)
                    if all(low <= d < low + count for d, (low, count, _) in zip(digits, windows, strict=True)):
                        wanted[tuple(int(d) - low for d, (low, _, _) in zip(digits, windows, strict=True))] = local
            assert wanted in [_places(boxes) for boxes in pieces], (seed, device)


def _places(boxes: list[SideBox]) -> dict[tuple[int, ...], int]:
    """The place in the tile of every element, by its digits."""
    places: dict[tuple[int, ...], int] = {}
    for box in boxes:
        for at in itertools.product(*(range(low, high) for low, high in zip(box.low, box.high, strict=True))):
            assert at not in places
            steps = zip(at, box.low, box.strides, strict=True)
            places[at] = box.place + sum((value - low) * stride for value, low, stride in steps)
    return places


def test_the_index_gives_every_box_that_overlaps():
    choose = random.Random(0)
    for _ in range(200):
        rank = choose.randint(0, 3)
        boxes = []
        for n in range(choose.randint(0, 12)):
            low = tuple(choose.randrange(10) for _ in range(rank))
            high = tuple(start + choose.randint(1, 10 - start) for start in low)
            boxes.append(((n,), SideBox(low, high, 0, (1,) * rank)))
        index = BoxIndex(boxes, [10] * rank)
        for _, box in boxes:
            near = {pieces for pieces, other in index.candidates(box)}
            assert near >= {pieces for pieces, other in boxes if common_block(other, box) is not None}

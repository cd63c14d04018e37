"""The figures of an exchange in closed form, against counts of elements and messages, and linear programs."""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations, product
from math import ceil, prod

import pytest
from hypothesis import given, settings

from reshard.geometry import exchange_stats
from reshard.geometry.exchange_stats import (
    contiguous_stats,
    count_overlaps,
    count_rounds,
    dim_groups,
    fewest_received,
    largest_message,
)
from reshard.geometry.figures import (
    ByDevice,
    crossing_figures,
    lacked_by_device,
    list_loads,
    loads_of,
    most_sent,
    sent_by_device,
)
from reshard.geometry.holders import count_kept, fewest_through, least_received_across, tile_elements
from reshard.geometry.messages import exchange_messages
from reshard.geometry.overlap import fullest_piece, shared_elements
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from tests.endpoint_lp import classes, forwarded, pulled, sent
from tests.geometry import brute
from tests.layouts import pairs, random_crossing, random_pair
from tests.oracle import PADDING, tiles_of
from tests.sampling import for_each


def pair(source: str, target: str, mesh: Mesh) -> tuple[Layout, Layout]:
    return Layout.parse(source, mesh), Layout.parse(target, mesh)


@pytest.mark.parametrize("seed", range(3))
def test_figures_of_random_pairs(seed: int):
    choose, uneven = random.Random(seed), 0
    for _ in range(150):
        source, target = random_pair(choose, most_rank=2)
        uneven += not (source.even and target.even)
        assert fewest_received(source, target) == brute.fewest_received(source, target), f"{source} -> {target}"
        assert count_rounds(source, target) == brute.rounds(source, target), f"{source} -> {target}"
        assert largest_message(source, target) >= brute.largest_message(source, target), f"{source} -> {target}"
    assert uneven > 30


def test_figures_of_partial_arrays_that_stay_partial():
    """A summand is not a replica: only devices with equal coordinates along the partial axes exchange."""
    choose, partial = random.Random(7), 0
    for _ in range(300):
        source, _ = random_pair(choose, "float32", partial=True, most_rank=1)
        if not source.partial or not source.dims:
            continue
        free = [a for a in source.mesh.axes if all(s.axis != a for s in source.partial)]
        target = Layout.from_spec(source.mesh, source.shape, "f32", [free])
        target = Layout(source.mesh, target.dims, "f32", source.reduction, source.partial)
        partial += 1
        assert count_rounds(source, target) == brute.rounds(source, target), f"{source} -> {target}"
        assert fewest_received(source, target) == brute.fewest_received(source, target), f"{source} -> {target}"
    assert partial > 50


def test_the_largest_message_of_one_group_is_exact():
    choose, seen = random.Random(11), 0
    for _ in range(200):
        source, target = random_pair(choose, most_rank=2)
        if len(dim_groups(source, target)) == 1:
            seen += 1
            assert largest_message(source, target) == brute.largest_message(source, target), f"{source} -> {target}"
    assert seen > 40


def test_many_devices_cost_their_coordinates_only():
    """2^20 devices in two groups of 2^10. A device at the end holds padding only, and lacks its whole target tile."""
    mesh = Mesh(x=1 << 10, y=1 << 10)
    source, target = pair("f32[{x}7/7001, {y}3/3071]", "f32[7001, {y}3/3071]", mesh)
    assert sum(group.size for group in dim_groups(source, target)) == 1 << 11
    assert count_rounds(source, target) == 1023  # each piece goes to all others along x
    assert fewest_received(source, target) == prod((7001, 3))
    assert fullest_piece(target.dims[1]) == 3


def test_a_dim_that_is_whole_at_one_end_has_a_closed_form():
    """The same figures as counted over the devices, and of millions of them at once."""
    choose, closed = random.Random(5), 0
    for _ in range(200):
        for group in dim_groups(*random_pair(choose, most_rank=2)):
            stats = exchange_stats._one_sided_stats(group)
            closed += stats is not None
            assert stats is None or stats == exchange_stats._counted_stats(group), group
    assert closed > 60
    mesh = Mesh(x=1_000_003, y=2)
    source, target = pair("f32[{x}2/2000005, 6]", "f32[2000005, {y}3]", mesh)
    assert fewest_received(source, target) == 3 * (2_000_005 - 1)  # The last device along x has one row.
    assert count_rounds(source, target) == 1_000_002


# ---- contiguous pieces, against a count over all devices -----------------------------------------------


BOTH = Mesh(x=4, y=3, z=2)
AXIS_ORDERS = [order for n in range(1, 4) for order in permutations("xyz", n)]


def tiled(size: int, order: tuple[str, ...], mesh: Mesh = BOTH) -> Layout:
    return Layout.tiled(mesh, (size,), "f32", [[mesh.sub_axis(axis) for axis in order]])


@pytest.mark.parametrize("size", [1, 5, 23, 24, 25, 61, 97])
def test_all_orders_of_axes(size: int):
    for one, other in product(AXIS_ORDERS, AXIS_ORDERS):
        (group,) = dim_groups(tiled(size, one), tiled(size, other))
        assert contiguous_stats(group) == exchange_stats._counted_stats(group), f"{one} -> {other}"


def test_too_many_devices_that_hold_what_they_need_are_counted_instead(monkeypatch: pytest.MonkeyPatch):
    pair = tiled(97, ("x", "y")), tiled(97, ("x",))
    (group,) = dim_groups(*pair)
    assert contiguous_stats(group) is not None
    monkeypatch.setattr(exchange_stats, "_MOST", 3)
    assert contiguous_stats(group) is None


def test_a_transpose_of_a_million_devices():
    """Device (x, y) holds piece 1000 x + y and needs piece 1000 y + x: those with x = y keep theirs."""
    mesh, size = Mesh(x=1000, y=1000), 3_999_989
    source, target = tiled(size, ("x", "y"), mesh), tiled(size, ("y", "x"), mesh)
    assert exchange_stats.count_rounds(source, target) == 1
    assert exchange_stats.fewest_received(source, target) == exchange_stats.largest_message(source, target) == 4
    (group,) = dim_groups(source, target)
    stats = contiguous_stats(group)
    assert stats is not None
    assert {tile.needed for tile in stats.tiles} == {0, 1, 4}
    assert prod(mesh.axes.values()) == group.size


# ---- groups of dims ------------------------------------------------------------------------------------


def test_groups_share_no_coordinates():
    source, target = pair("f32[{x}3/10, {y}5, 7]", "f32[10, 10, 7]", Mesh(x=4, y=2))
    groups = dim_groups(source, target)
    assert [group.factors for group in groups] == [((2, 4),), ((1, 2),), ()]
    assert [group.size for group in groups] == [4, 2, 1]
    # The transpose uses both axes in both dims: one group.
    (together,) = dim_groups(*pair("f32[{x}3/10, {y}5]", "f32[{y}5, {x}3/10]", Mesh(x=4, y=2)))
    assert together.factors == ((2, 4), (1, 2))


# ---- two sets of devices -------------------------------------------------------------------------------


SEEDS = range(150)


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", SEEDS)
def test_figures_are_those_of_the_messages_and_the_best_there_are(seed: int):
    source, target = random_crossing(random.Random(seed))
    figures = crossing_figures(source, target)
    sent, received, sends, receives = Counter(), Counter(), Counter(), Counter()
    crossing_messages = [m for m in exchange_messages(source, target) if m.sender != m.receiver]
    for message in crossing_messages:
        sent[message.sender] += message.elements
        received[message.receiver] += message.elements
        sends[message.sender] += 1
        receives[message.receiver] += 1
    assert len({(m.sender, m.receiver) for m in crossing_messages}) == len(crossing_messages)
    assert figures.sent == max(sent.values(), default=0)
    assert max(received.values(), default=0) == least_received_across(source, target)
    assert figures.rounds == max((*sends.values(), *receives.values()), default=0)
    assert figures.message == max((m.elements for m in crossing_messages), default=0)
    assert {d: n for d, n in (sent_by_device(source, target).listed or {}).items() if n} == sent
    assert max([figures.sent, *received.values()]) == ceil(pulled(source, target) - 1e-6)


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_of_the_busiest_device_is_below_every_plan(seed: int):
    """It counts, element by element, what must leave the holders of a tile, and holds for plans that forward too."""
    source, target = random_crossing(random.Random(seed))
    lacked: Counter[frozenset[int]] = Counter()
    received: Counter[int] = Counter()
    for (holders, missing), count in classes(source, target).items():
        lacked[holders] += count
        received.update(dict.fromkeys(missing, count))
    leaves = (ceil(count / len(holders)) for holders, count in lacked.items())
    bound = fewest_through(source, target)
    assert bound == max([*received.values(), *leaves], default=0)
    assert bound <= ceil(forwarded(source, target) - 1e-6)


LARGE = {
    "rows to rows": ("f32[{x}5, 31]", "f32[{y}2/20, 31]"),
    "rows to columns": ("f32[{x}4, 30]", "f32[16, {y}3/30]"),
    "rows to columns, of prime sizes": ("f32[{x}4/13, 37]", "f32[13, {y}4/37]"),
    "blocks": ("f32[2{x}3/23, {r}16/31]", "f32[{z}12/23, {y}3/31]"),
}


@pytest.mark.parametrize("first", [0, 3, 20])
@pytest.mark.parametrize("name", LARGE)
def test_queues_give_the_figures_of_the_messages_one_by_one(name: str, first: int):
    """Copies on both sides, and more requests than holders: overlapping in all devices, in some, in none."""
    before, after = LARGE[name]
    source = Layout.parse(before, Mesh(x=4, r=2, w=2))
    target = Layout.parse(after, Mesh.parse(f"y=12,z=2@{first}") if "{z}" in after else Mesh.parse(f"y=12@{first}"))
    listed = [m for m in exchange_messages(source, target) if m.sender != m.receiver]
    sent, sends, receives = Counter(), Counter(m.sender for m in listed), Counter(m.receiver for m in listed)
    for message in listed:
        sent[message.sender] += message.elements
    figures = crossing_figures(source, target)
    assert (figures.sent, figures.message) == (max(sent.values()), max(m.elements for m in listed))
    assert figures.rounds == max(*sends.values(), *receives.values())
    assert {device: count for device, count in (sent_by_device(source, target).listed or {}).items() if count} == sent


def test_large_meshes_have_their_figures_at_once():
    """A pull from 1,024 devices to 512 that replicate 64 times: half a million messages, none of them listed."""
    source = Layout.parse("f32[{fsdp}8, 1024]", Mesh(fsdp=1024))
    target = Layout.parse("f32[8192, {tp}128]", Mesh.parse("tp=8,rep=64@1024"))
    figures = crossing_figures(source, target)
    assert (figures.rounds, least_received_across(source, target), figures.sent) == (1024, 8192 * 128, 512 * 8 * 128)


def test_large_meshes_that_overlap_have_their_figures_at_once():
    """Eight copies on 4,096 devices, to columns on 2,048 of these, where some hold part of what they need."""
    source = Layout.parse("f32[{x}8/4091, 4093]", Mesh(x=512, r=8))
    target = Layout.parse("f32[4091, {y}2/4093]", Mesh(y=2048))
    figures = crossing_figures(source, target)
    assert least_received_across(source, target) == 2 * (4091 - 8)
    assert (figures.rounds, figures.sent) == (511, 8 * 4093 // 8 + 3)


@pytest.mark.parametrize("seed", range(15))
def test_an_optimum_in_whole_elements_is_that_in_fractions_rounded_up(seed: int):
    """Both are flows, whose capacities may as well be whole: what plans are compared with."""
    sizes = classes(*random_crossing(random.Random(seed)))
    assert sent(sizes, forwarding=True, whole=True) == pytest.approx(ceil(sent(sizes, forwarding=True) - 1e-6))


# ---- loads of devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_loads_are_those_of_the_messages(seed: int):
    """Among the same devices and between two sets; of tiles that have one holder, and several."""
    choose = random.Random(seed)
    for number in range(60):
        source, target = random_crossing(choose) if number % 3 == 0 else random_pair(choose, most_rank=2)
        messages = [m for m in exchange_messages(source, target) if m.sender != m.receiver]
        assert list_loads(source, target) == loads_of(messages), f"{source} -> {target}"
        sent: Counter[int] = Counter()
        for message in messages:
            sent[message.sender] += message.elements
        if number % 3:
            assert most_sent(source, target) == max(sent.values(), default=0)
            if not (source.even and target.even):
                counts = sent_by_device(source, target).listed
                assert counts == {device: sent[device] for device in source.mesh.devices}


def test_loads_of_thousands_of_devices_are_few():
    """Pieces of 157 rows to pieces of 3: a device receives of at most two pieces of rows, from 64 of columns."""
    mesh = Mesh(x=64, y=64)
    before = Layout.parse("f32[{x}157/10007, {y}65/4099]", mesh)
    every = list_loads(before, Layout.parse("f32[{x}{y}3/10007, 4099]", mesh))
    rows = {length for load in every for _, shape in load for (length, _), _ in shape}
    assert rows == {1, 2, 3} and len(every) < 100
    assert max(sum(number for number, _ in load) for load in every) == 2 * 64


def test_a_message_of_a_million_runs_is_a_few_blocks():
    """An exchange of a long cyclic array is cut into chunks without a walk over its runs."""
    mesh, n = Mesh(x=2, y=2), 1_024_001
    source = Layout.parse(f"f64[{-(-n // 20)}{{y}}{{x}}5/{n}]", mesh)
    target = Layout.parse(f"f64[{-(-n // 16)}{{x}}4{{y}}/{n}]", mesh)
    every = list_loads(source, target)
    assert max(len(shape) for load in every for _, shape in load) < 20
    blocks = [(extents, count) for load in every for _, shape in load for extents, count in shape]
    assert len(blocks) < 100 < 100_000 < sum(prod(extents[:-1]) * count for extents, count in blocks)


# ---- what devices keep, and lack -----------------------------------------------------------------------


@for_each(range(60))
def test_what_devices_keep(seed: int):
    source, target = random_crossing(random.Random(seed))
    wanted = {device: brute.elements(target, device) for device in target.mesh.devices}
    both = {device: brute.elements(source, device) for device in source.mesh.devices if device in wanted}
    assert list(tile_elements(target)) == [len(elements) for elements in wanted.values()]
    counts = {device: len(elements & wanted[device]) for device, elements in both.items()}
    assert dict(count_kept(source, target)) == {device: count for device, count in counts.items() if count}


@for_each(range(60))
def test_overlaps_are_those_of_the_pieces(seed: int):
    source, target = random_crossing(random.Random(seed))
    for one, other in zip(source.dims, target.dims, strict=True):
        shared = shared_elements(one, other)
        of_source, of_target, largest = count_overlaps(one, other)
        assert list(of_target) == [len(by) for by in shared]
        assert list(of_source) == [sum(p in by for by in shared) for p in range(len(of_source))]
        assert largest == max((count for by in shared for count in by.values()), default=0)


@given(pairs())
@settings(max_examples=80, deadline=None)
def test_it_is_a_count_of_elements(ends: tuple[Layout, Layout]):
    source, target = ends
    held, wanted = tiles_of(source), tiles_of(target)
    lacks = lacked_by_device(source, target).on(target.mesh.devices)
    for device in target.mesh.devices:
        count = len({*wanted[device].flat} - {*held[device].flat} - {PADDING})
        assert count == lacks[device]


def test_meshes_too_large_to_list_have_the_worst_devices_figure():
    mesh = Mesh(x=1 << 15, y=2)
    source, target = (Layout.parse(text, mesh) for text in ("f32[{x}{y}2]", "f32[{y}{x}2]"))
    assert lacked_by_device(source, target) == ByDevice(2)
    uneven = Layout.parse(f"f32[{{x}}4/{(1 << 17) - 1}]", mesh)
    assert lacked_by_device(uneven, Layout.parse(f"f32[{{y}}{1 << 16}/{(1 << 17) - 1}]", mesh)) == ByDevice(1 << 16)

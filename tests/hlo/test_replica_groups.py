"""Replica groups in every spelling, against numpy."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import NotationError
from reshard.hlo import parse_groups


def rows(array):
    return tuple(tuple(int(device) for device in row) for row in array)


@pytest.mark.parametrize(
    ("text", "lists"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{3,1,2,0}}", ((3, 1, 2, 0),)),
        ("{{0}, {1,2}}", ((0,), (1, 2))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", rows(np.arange(8).reshape(2, 4))),
        ("[2,4]<=[4,2]T(1,0)", rows(np.arange(8).reshape(4, 2).T.reshape(2, 4))),
        ("[4,2]<=[2,2,2]T(0,2,1)", rows(np.arange(8).reshape(2, 2, 2).transpose(0, 2, 1).reshape(4, 2))),
        ("mesh['x'=4,'y'=2] {'x'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['x'=4,'y'=2] {'y','x'}", ((0, 2, 4, 6, 1, 3, 5, 7),)),
        ("mesh['x'=4,'y'=2] {'x','y'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['x'=4,'y'=2] {'x':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=4,'y'=2] {'x':(2)2, 'y'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['x'=8] {'x':(4)2,'x':(1)2}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=4], device_ids=(7,5,3,1) {'a':(1)2}", ((7, 3), (5, 1))),
        ('mesh["a"=2,"b"=1] {"b"}', ((0,), (1,))),
        ("mesh['x'=2] {}", ((0,), (1,))),
    ],
)
def test_every_spelling(text, lists):
    groups = parse_groups(text, 8)
    assert groups.lists == lists
    assert (groups.count, groups.size) == (len(lists), max(map(len, lists)))


@st.composite
def meshes(draw):
    """Sizes of two or three axes, an order of their devices, and disjoint factors of some axes."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 6, 8]), min_size=2, max_size=3))
    order = draw(st.permutations(range(len(sizes))))
    used = []
    for axis, size in enumerate(sizes):
        ends = sorted(
            draw(st.sets(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]), max_size=3)) | {1}
        )
        chain = [end for at, end in enumerate(ends) if all(end % low == 0 for low in ends[:at])]
        used += [(axis, low, high // low) for low, high in pairwise(chain) if draw(st.booleans())]
    return sizes, order, draw(st.permutations(used))


@given(meshes())
def test_sub_axes_of_any_mesh_in_any_order(drawn):
    sizes, order, used = drawn
    axes = ",".join(f"'a{axis}'={size}" for axis, size in enumerate(sizes))
    named = ", ".join(f"'a{axis}':({before}){size}" for axis, before, size in used)
    iota = ",".join(map(str, sizes))
    text = f"mesh[{axes}], device_ids=([{iota}]T({','.join(map(str, order))})) {{{named}}}"
    devices = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(sizes)
    groups = parse_groups(text, None)
    assert sorted(sorted(group) for group in groups.lists) == sorted(by_hand(devices, used))
    for group in groups.lists:
        assert list(group) == sorted(group, key=lambda device: digits(devices, used, device))


def by_hand(devices, used):
    """Devices are together if they differ in used factors only."""
    groups = {}
    for place in product(*map(range, devices.shape)):
        rest = list(place)
        for axis, before, size in used:
            after = devices.shape[axis] // before // size
            rest[axis] -= place[axis] // after % size * after
        groups.setdefault(tuple(rest), []).append(int(devices[place]))
    return [sorted(group) for group in groups.values()]


def digits(devices, used, device):
    place = np.argwhere(devices == device)[0]
    return [place[axis] // (devices.shape[axis] // before // size) % size for axis, before, size in used]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{{0,1},{2,3}",
        "[2,4]<=[9]",
        "[2,4]<=[4,2]T(1,1)",
        "[2,4]<=[4,2]T(1,2)",
        "[2,4]",
        "mesh['x'=4] {'z'}",
        "mesh['x'=4] {'x':(3)2}",
        "mesh['x'=4] {'x':(0)2}",
        "mesh['x'=4], device_ids=(0,1) {'x'}",
        "mesh['x'=4], device_ids=(a) {'x'}",
    ],
)
def test_unreadable_groups_are_refused(text):
    with pytest.raises(NotationError, match="over each device once"):
        parse_groups(text, 8)


def test_groups_of_all_devices_need_their_number():
    with pytest.raises(NotationError, match="keep num_partitions=8"):
        parse_groups("{}", None)


def test_groups_of_many_devices_cost_nothing_until_they_are_listed():
    parsed = [parse_groups(f"[{2**18},{2**4}]<=[{2**11},{2**11}]T(1,0)", None) for _ in range(1000)]
    assert {(groups.count, groups.size) for groups in parsed} == {(2**18, 2**4)}
    assert parse_groups("mesh['x'=64,'y'=16] {'x'}", None).lists[3][:3] == (3, 19, 35)


HUGE = {
    "an iota": "[1000000,1000000]<=[1000000000000]",
    "a transposed iota": "[1000000,1000000]<=[1000000,1000000]T(1,0)",
    "a mesh": "mesh['x'=1000000,'y'=1000000] {'x'}",
    "a number of 5000 digits": f"[1,{'9' * 5000}]<=[{'9' * 5000}]",
    "a device of 5000 digits": f"{{{{0,{'9' * 5000}}}}}",
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_more_devices_than_can_be_listed_are_refused_before_any_is(text: str):
    with pytest.raises(NotationError, match="over more devices than the 16777216") as caught:
        parse_groups(text, None)
    assert len(str(caught.value)) < 400


def test_all_devices_are_refused_if_they_are_too_many():
    with pytest.raises(NotationError, match="over more devices"):
        parse_groups("{}", 10**12)


@pytest.mark.parametrize("given", [None, 7, b"{{0,1}}", ["{0}"]])
def test_what_is_not_text_is_refused(given: object):
    with pytest.raises(NotationError, match="are not text"):
        parse_groups(given, 8)  # type: ignore[arg-type]

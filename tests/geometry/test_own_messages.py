"""One device's messages against all messages, listed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings

from reshard.geometry.messages import all_messages
from reshard.geometry.own_messages import messages_of
from reshard.types import Layout, Mesh
from tests.layouts import pairs


def assert_own(before: Layout, after: Layout) -> None:
    listed = all_messages(before, after)
    for device in before.mesh.devices:
        own = Counter(each for each in listed if device in (each.sender, each.receiver))
        assert Counter(messages_of(before, after, device)) == own


@given(pairs())
@settings(max_examples=150)
def test_they_are_those_of_the_list_that_name_it(pair: tuple[Layout, Layout]):
    assert_own(*pair)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f32[{x}3/7] + sum{y}", "f32[7] + sum{y}"),  # Each from its own summand.
        ("f32[{x}4/10]", "f32[{y}4/10]"),  # Two holders of a piece share those who lack it.
        ("f32[3{x}1/7, 5]", "f32[7, {z}3/5]"),  # Devices along y exchange among themselves.
    ],
)
def test_holders_deal_what_is_asked_of_them(before: str, after: str):
    mesh = Mesh(x=3, y=3, z=2)
    assert_own(Layout.parse(before, mesh), Layout.parse(after, mesh))


def test_the_meshes_may_differ():
    one, other = Mesh(x=2, y=3), Mesh({"z": 6}, device_ids=[5, 3, 1, 0, 2, 4])
    assert_own(Layout.parse("f32[{x}4/7]", one), Layout.parse("f32[{z}2/7]", other))

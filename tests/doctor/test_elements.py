"""Numbers of elements: equal for the same element, whichever copy of it a device took."""

import numpy as np
import pytest

import reshard as rs
from reshard.doctor.dataflow.trace import NOWHERE, Origins
from reshard.doctor.elements import ElementKeys, HeldElements, LeafOrigin, find_device_groups, first_copies
from reshard.types.meaning import meaning
from tests.doctor.fragments import HERE, move


def held(*rows):
    """Elements as rows of device, leaf, source device and place."""
    device, *origins = np.array(rows, np.int64).reshape(-1, 4).T
    return HeldElements(device, Origins(*origins))


@pytest.mark.parametrize(
    "text", ["f32[{x}{y}2, 6]", "f32[{y}4, {x:(1)2}3]", "f32[24]", "f32[{x:(2)2}5]", "f32[{z}{x}2]", "f32[6] + sum{z}"]
)
def test_the_first_copy_is_the_first_device_with_the_same_tile(text):
    layout = rs.Layout.parse(text, rs.Mesh(z=3, x=4, y=2))
    tiles = [
        (meaning(layout, device), layout.mesh.coordinates(device, layout.partial)) for device in range(layout.mesh.size)
    ]
    assert first_copies(layout).tolist() == [tiles.index(tile) for tile in tiles]


def test_groups_are_joined_by_what_their_devices_have_of_each_other():
    assert find_device_groups(5, [held((0, 0, 2, 0)), held((2, 0, 4, 0))]).tolist() == [0, 1, 0, 3, 0]
    assert find_device_groups(3, [held()]).tolist() == [0, 1, 2]


def test_a_ring_is_one_group():
    ring = held(*((device, 0, (device + 1) % 7, 0) for device in range(7)))
    assert not find_device_groups(7, [ring]).any()


def test_elements_are_equal_if_leaf_place_and_copy_are():
    leaves = {5: LeafOrigin(np.array([0, 0, 2, 2]), move(), HERE, True)}
    elements = held((0, 5, 0, 3), (1, 5, 1, 3), (1, 5, 2, 3), (1, 5, 0, 4), (1, 9, 0, 3), (1, 9, 1, 3))
    keys = ElementKeys(4, leaves, [elements])
    numbers = keys.of(elements)
    assert numbers[0] == numbers[1] and len(set(numbers.tolist())) == 5
    assert keys.leaf(numbers).tolist() == [5, 5, 5, 5, 9, 9]
    assert keys.had(numbers, np.array(1)).tolist() == [True, True, False, True, False, True]


def test_padding_is_not_an_element():
    elements = held((0, 5, 0, 0), (0, NOWHERE, NOWHERE, NOWHERE), (1, NOWHERE, NOWHERE, NOWHERE))
    assert elements.known.device.tolist() == [0]
    first, *padding = ElementKeys(2, {}, [elements]).of(elements).tolist()
    assert first not in padding and len(set(padding)) == 1

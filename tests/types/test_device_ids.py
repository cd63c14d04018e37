"""Device ids from the number of the first one; lists of ids are tested with meshes."""

from __future__ import annotations

import pytest

from reshard.errors import MeshError
from reshard.types.device_ids import checked_ids, numbered_from


def test_ids_are_numbered_from_the_first():
    assert list(numbered_from("8", 4, "z=4@8")) == [8, 9, 10, 11]


@pytest.mark.parametrize("first", ["", "-1", "x", "1.5", "9" * 30, "\u0661"])
def test_the_first_is_a_number(first: str):
    with pytest.raises(MeshError, match="after @ comes the number of the first device"):
        numbered_from(first, 4, f"z=4@{first}")


@pytest.mark.parametrize(("ids", "why"), [([1, 2], "lists 2"), ([1, 1, 2], "distinct"), ("abc", "one id per device")])
def test_a_list_has_one_id_for_each_device(ids: object, why: str):
    with pytest.raises(MeshError, match=why):
        checked_ids(ids, 3, "<x=3>")

"""The parts of a plan's live bytes."""

import pytest

from reshard.show.live_bytes import live_parts
from tests.draw.cases import CASES, planned


@pytest.mark.parametrize("name", list(CASES))
def test_parts_add_up_to_the_live_bytes(name):
    for step in planned(name).steps:
        assert sum(size for _, size in live_parts(step)) == step.live_bytes

"""Boolean options: True and False, numpy's included, and nothing that is only true of itself."""

from __future__ import annotations

import numpy as np
import pytest

from reshard.errors import NetworkError, PlanError
from reshard.types.whole import checked_flag


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_flags_become_bools(value: object):
    assert checked_flag(value, "donate") is bool(value)


@pytest.mark.parametrize("value", ["no", "", 1, 0, 0.0, None, [], NotImplemented, np.array(True), np.ones(2)])
def test_what_is_not_a_flag(value: object):
    with pytest.raises(PlanError, match=r"^donate .*: give True or False$"):
        checked_flag(value, "donate")
    with pytest.raises(NetworkError):
        checked_flag(value, "cubes", NetworkError)

"""Time limits: what is a positive number of seconds."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from reshard.errors import PlanError
from reshard.runtime.on_mpi.collective import check_limit, seconds_of


@pytest.mark.parametrize("limit", [1, 0.5, np.float32(2), np.int8(3), Fraction(1, 2), math.inf])
def test_positive_numbers(limit: float):
    check_limit(limit)
    assert seconds_of(limit) == float(limit)


@pytest.mark.parametrize("limit", [0, 0.0, -1, math.nan, True, None, "3", [3], np.ones(1), 10**400, 3j])
def test_what_is_no_limit(limit: object):
    with pytest.raises(PlanError, match="give a positive number of seconds"):
        check_limit(limit)

"""Topics on ranks: all pairs of a topic and a number of ranks, of which the fast tier runs a few."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def sampled(topics: Sequence[str], ranks: Sequence[int], *fast: tuple[str, int]) -> list[Any]:
    """The pairs as parameters; all except those in `fast` are marked slow."""
    pairs = list(product(topics, ranks))
    assert all(pair in pairs for pair in fast), fast
    return [pytest.param(*pair, marks=() if pair in fast else pytest.mark.slow) for pair in pairs]

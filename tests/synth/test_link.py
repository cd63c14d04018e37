"""Links: what is one, and how it is shown."""

from __future__ import annotations

import numpy as np
import pytest

from reshard.errors import NetworkError
from reshard.synth.link import Link, link_of


def test_links_are_given_as_figures():
    assert link_of((1, 2), "inner") == Link(1, 2) == link_of(Link(1.0, 2.0), "inner")
    assert link_of((1, 2, "ring"), "inner") == Link(1, 2, "ring") != Link(1, 2)
    assert repr(Link(1, 2)) == "Link(latency=1.0, bandwidth=2.0)"
    assert repr(Link(1, 2, "line")) == "Link(latency=1.0, bandwidth=2.0, shape='line')"
    assert Link(2, 1).speed < Link(1, 1).speed < Link(9, 2).speed


@pytest.mark.parametrize("given", [(1,), (1, 2, 3), 9e10, "ring", None, (1, 2, "ring", 4)])
def test_others_are_refused(given: object):
    with pytest.raises(NetworkError, match=r"outer: .* is not a link; give a Link or"):
        link_of(given, "outer")


@pytest.mark.filterwarnings("error")
def test_a_masked_number_is_refused_without_a_warning():
    with pytest.raises(NetworkError, match=r"latency .* is not a number: give seconds"):
        Link(np.ma.masked, 9e10)  # pyright: ignore[reportArgumentType]

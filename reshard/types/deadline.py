"""A time by which planning must end: loops that may run for long look at the clock.

The deadline never changes a plan. It is set around the planning of a call whose other ranks wait for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from reshard.errors import PlanError

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


@contextmanager
def planning_until(moment: float) -> Generator[None]:
    """Ends planning inside this context by a `PlanError` once `time.monotonic()` has passed `moment`.

    >>> with planning_until(time.monotonic() + 60):
    ...     check_deadline()
    """
    token = _deadline.set(min(moment, _deadline.get()))
    try:
        yield
    finally:
        _deadline.reset(token)


def check_deadline() -> None:
    """Raises `PlanError` once the deadline has passed."""
    if time.monotonic() > _deadline.get():
        raise PlanError(
            "planning took longer than the call's limit allows; give a higher limit, or layouts whose pieces are fewer"
        )

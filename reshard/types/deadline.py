"""A time by which planning must end: loops that may run for long look at the clock.

The deadline never changes a plan. It is set around the planning of a call whose other ranks wait for it.
"""

from __future__ import annotations

import math
import time
from contextvars import ContextVar

from reshard.errors import PlanError

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


class planning_until:
    """Ends planning inside this context with a `PlanError` once `time.monotonic()` has passed `moment`.

    >>> with planning_until(time.monotonic() + 60):
    ...     check_deadline()
    """

    def __init__(self, moment: float) -> None:
        self._moment = moment

    def __enter__(self) -> None:
        self._token = _deadline.set(min(self._moment, _deadline.get()))

    def __exit__(self, *_: object) -> None:
        _deadline.reset(self._token)


def check_deadline() -> None:
    """Raises `PlanError` once the deadline has passed."""
    if time.monotonic() > _deadline.get():
        raise PlanError(
            "planning took longer than the call's limit allows; give a higher limit, or layouts whose pieces are fewer"
        )

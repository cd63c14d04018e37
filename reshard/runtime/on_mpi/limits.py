"""Time limits of calls: how long a call may plan and wait for other ranks, in seconds."""

from __future__ import annotations

from numbers import Real

from reshard.errors import PlanError, quoted


def seconds_of(limit: object) -> float | None:
    """A time limit in seconds; None if it is not a positive number.

    >>> seconds_of(3), seconds_of(0), seconds_of("soon")
    (3.0, None, None)
    """
    if type(limit) is float and limit > 0:
        return limit
    if isinstance(limit, bool) or not isinstance(limit, Real):
        return None
    try:
        seconds = float(limit)
    except OverflowError:
        return None
    return seconds if seconds > 0 else None


def check_limit(limit: object) -> None:
    """Raises `PlanError` unless a time limit is a positive number."""
    if seconds_of(limit) is None:
        raise PlanError(f"limit {quoted(limit)}: give a positive number of seconds")

"""Whole numbers: the one check behind *whole sizes*, and how long a list of devices may be.

Every size, radix and count of the package passes `whole` once, where it enters. From there on it is an int of Python,
so that nothing downstream divides by zero, rounds, or allocates what no machine holds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, cast

from reshard.errors import PlanError, ReshardError, quoted

MOST = (1 << 63) - 1
"""The largest size, radix or count: what an index of 64 bits can say."""

MOST_DEVICES = 1 << 22
"""The most devices that are listed one by one. A mesh without `device_ids` may be larger: it is never listed."""

MOST_LISTED = 1 << 12
"""The most dims of an array, axes of a mesh, or entries of a spec."""

_DIGITS = len(str(MOST))


def whole(value: object, least: int = 0, most: int = MOST) -> int | None:
    """The value as an int, or None unless it is a whole number from `least` to `most`; True and False are not.

    >>> whole(8), whole(True), whole(2.0), whole(-1), whole(0, least=1)
    (8, None, None, None, None)
    """
    if type(value) is int:
        return value if least <= value <= most else None
    kind = type(value)
    if kind is bool or "bool" in kind.__name__ or not hasattr(kind, "__index__"):
        return None
    try:
        return whole(int(cast("Any", value).__index__()), least, most)
    except (TypeError, ValueError, OverflowError):  # An array of several numbers has __index__, too.
        return None


def read_items(given: object, any_order: bool = False) -> tuple[Any, ...] | None:
    """What a list, or anything else with an order, holds; with `any_order`, also what a set holds.

    None for text and dicts, and beyond `MOST_LISTED` items.

    >>> read_items([4, 2]), read_items("x"), read_items({4: 2}), read_items(range(10**12))
    ((4, 2), None, None, None)
    >>> read_items({4}), read_items({4}, any_order=True)
    (None, (4,))
    """
    if type(given) is tuple or type(given) is list:  # Most are, and are told from others at once.
        known = cast("Sequence[Any]", given)
        return tuple(known) if len(known) <= MOST_LISTED else None
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        return None
    if isinstance(given, set | frozenset) and not any_order:
        return None
    try:
        items = tuple(itertools.islice(cast("Iterable[Any]", given), MOST_LISTED + 1))
    except Exception:  # An array without dims has __iter__, too, and an iterator is the caller's code.
        return None
    return items if len(items) <= MOST_LISTED else None


def count_items(given: Sized) -> int | None:
    """How many items something has, or None if it cannot say: an array without dims, a range beyond an index.

    >>> count_items([4, 2]), count_items(range(10**30))
    (2, None)
    """
    try:
        return len(given)
    except Exception:  # `__len__` may be the caller's code.
        return None


def written(digits: str) -> int | None:
    """The number that these decimal digits write, or None if it is above `MOST`.

    Python itself refuses to read more than 4300 digits, by a `ValueError`.

    >>> written("0012"), written("9" * 5000)
    (12, None)
    """
    significant = digits.lstrip("0") or "0"
    return whole(int(significant)) if len(significant) <= _DIGITS else None


# A time by which planning must end: loops that may run for long look at the clock.
#
# The deadline never changes a plan. It is set around the planning of a call whose other ranks wait for it.


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


# Boolean options: the one check behind `donate`, `cast`, `padded`, `launches` and the other flags of the package.
#
# donate=True, donate=np.True_      True
# donate="no", donate=1             refused: text is true of itself, and 1 may have been meant for another argument


def checked_flag(value: object, what: str, error: type[ReshardError] = PlanError) -> bool:
    """The value as a bool of Python; raises `error` for anything but True and False, numpy's included.

    >>> checked_flag(False, "donate")
    False
    >>> checked_flag("no", "donate")
    Traceback (most recent call last):
    reshard.errors.PlanError: donate 'no': give True or False
    """
    if value is True or value is False:
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):
        return bool(value)
    raise error(f"{what} {quoted(value)}: give True or False")


def check_kind(value: object, kind: type, what: str, cure: str, error: type[ReshardError] = PlanError) -> None:
    """Raises `error` unless the value is of this kind.

    >>> check_kind(3, str, "log", "the text of a log")
    Traceback (most recent call last):
    reshard.errors.PlanError: log 3: give the text of a log
    """
    if not isinstance(value, kind):
        raise error(f"{what} {quoted(value)}: give {cure}")


# Prime factors of sizes, in time that does not depend on how large the primes are.
#
# Small primes are divided out. What is left is tested by Miller and Rabin's test, which is exact below 3.3e24 with
# these bases, and split by Pollard's rho: numbers of 64 bits take milliseconds, where trial division takes a minute.


_SMALL = 1 << 10
"""Trial division ends here; whatever is left and below its square is prime."""

_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def primes(size: int) -> list[int]:
    """The prime factors of a size, ascending; none of 0 and 1.

    >>> primes(12), primes(1), primes(2**61 - 1)
    ([2, 2, 3], [], [2305843009213693951])
    """
    return list(_prime_factors(size))


@lru_cache(maxsize=4096)
def _prime_factors(size: int) -> tuple[int, ...]:
    small: list[int] = []
    prime = 2
    while prime < _SMALL and prime * prime <= size:
        while size % prime == 0:
            small.append(prime)
            size //= prime
        prime += 1
    return (*small, *sorted(_large_primes(size)))


def _large_primes(size: int) -> list[int]:
    """The prime factors of a number that no prime below `_SMALL` divides, unless the number is one itself."""
    if size <= 1:
        return []
    if size < _SMALL * _SMALL or _is_prime(size):
        return [size]
    # Pollard's rho: a divisor is common to the number and the distance of two walkers, one twice as fast as the other
    # (Floyd). A try that meets all prime factors at once fails, and the next one walks another sequence.
    step, divisor = 0, size
    while divisor == size:
        step, divisor, slow, fast = step + 1, 1, 2, 2
        while divisor == 1:
            slow = (slow * slow + step) % size
            fast = (fast * fast + step) % size
            fast = (fast * fast + step) % size
            divisor = math.gcd(slow - fast, size)
    return [*_large_primes(divisor), *_large_primes(size // divisor)]


def _is_prime(size: int) -> bool:
    """Miller and Rabin's test of an odd number that none of the bases divides."""
    twos = ((size - 1) & (1 - size)).bit_length() - 1
    for base in _BASES:
        power = pow(base, (size - 1) >> twos, size)
        if power in (1, size - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % size
            if power == size - 1:
                break
        else:
            return False
    return True

"""Prime factors of sizes, in time that does not depend on how large the primes are.

Small primes are divided out. What is left is tested by Miller and Rabin's test, which is exact below 3.3e24 with these
bases, and split by Pollard's rho: numbers of 64 bits take milliseconds, where trial division takes a minute.
"""

from __future__ import annotations

import math
from functools import lru_cache

_SMALL = 1 << 10
"""Trial division ends here; whatever is left and below its square is prime."""

_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def primes(size: int) -> list[int]:
    """The prime factors of a size, ascending; none of 0 and 1.

    >>> primes(12), primes(1), primes(2**61 - 1)
    ([2, 2, 3], [], [2305843009213693951])
    """
    return list(_factors(size))


@lru_cache(maxsize=4096)
def _factors(size: int) -> tuple[int, ...]:
    small: list[int] = []
    prime = 2
    while prime < _SMALL and prime * prime <= size:
        while size % prime == 0:
            small.append(prime)
            size //= prime
        prime += 1
    return (*small, *sorted(_large(size)))


def _large(size: int) -> list[int]:
    """The prime factors of a number that no prime below `_SMALL` divides, unless the number is one itself."""
    if size <= 1:
        return []
    if size < _SMALL * _SMALL or _is_prime(size):
        return [size]
    divisor = _divisor(size)
    return [*_large(divisor), *_large(size // divisor)]


def _is_prime(size: int) -> bool:
    """Miller and Rabin's test of an odd number that none of the bases divides."""
    twos = ((size - 1) & (1 - size)).bit_length() - 1
    return all(_passes(pow(base, (size - 1) >> twos, size), size, twos) for base in _BASES)


def _passes(power: int, size: int, twos: int) -> bool:
    if power in (1, size - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % size
        if power == size - 1:
            return True
    return False


def _divisor(size: int) -> int:
    """A divisor of an odd composite number, neither 1 nor the number: Pollard's rho.

    A try fails if it meets all prime factors at once; the next one walks another sequence.
    """
    step = 1
    while (divisor := _met(size, step)) == size:
        step += 1
    return divisor


def _met(size: int, step: int) -> int:
    """A common divisor of the number and the distance of two walkers, one twice as fast as the other (Floyd)."""
    slow = fast = 2
    while True:
        slow = (slow * slow + step) % size
        fast = (fast * fast + step) % size
        fast = (fast * fast + step) % size
        divisor = math.gcd(slow - fast, size)
        if divisor > 1:
            return divisor

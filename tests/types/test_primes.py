"""Prime factors: of small numbers by trial division, of large ones by numbers whose factors are known."""

from __future__ import annotations

import random
from math import isqrt, prod

import pytest

from reshard.types import Layout, Mesh
from reshard.types.whole import primes


def by_trial(size: int) -> list[int]:
    factors, prime = [], 2
    while size > 1:
        while size % prime:
            prime += 1
        factors.append(prime)
        size //= prime
    return factors


def test_small_sizes_by_trial_division():
    for size in [*range(1, 3000), 97 * 97, 1021 * 1021, 1031 * 1031, 1031 * 1033, 3 * 10007, 1 << 20, 3 * 1031**2]:
        assert primes(size) == by_trial(size), size


LARGE = [1031, 10007, 65537, 1_000_003, 16_777_259, 2_147_483_647, 3_037_000_493, 2**61 - 1]
"""Primes, as trial division by the primes below their square roots says of all but the last, a Mersenne prime."""


def test_the_large_primes_are_prime():
    assert all(p % k for p in LARGE[:-1] for k in range(2, isqrt(p) + 1))


@pytest.mark.parametrize("seed", range(20))
def test_products_of_large_primes(seed: int):
    choose, factors = random.Random(seed), list[int]()
    while prod(factors) < 1 << 40:
        factors.append(choose.choice([2, 3, 1021, *LARGE[:-1]]))
    assert primes(prod(factors)) == sorted(factors)


@pytest.mark.parametrize("factors", [[2**61 - 1], [3_037_000_493, 3_037_000_493], [2, 3, 2**61 - 1], [1031] * 6])
def test_the_hardest_sizes_of_64_bits(factors: list[int]):
    """Trial division would take 1.5 billion divisions for the first of these."""
    assert primes(prod(factors)) == factors


@pytest.mark.parametrize("size", [3215031751, 3474749660383, 341550071728321, 3825123056546413051, 561, 29341])
def test_strong_pseudoprimes_are_split(size: int):
    """Composite numbers that Miller and Rabin's test with the first few bases takes for primes."""
    factors = primes(size)
    assert len(factors) > 1
    assert prod(factors) == size
    assert all(p < size for p in factors)


def test_a_mesh_of_a_huge_prime_size_is_planned_at_once():
    import reshard as rs

    mesh = Mesh(x=2**61 - 1)
    plan = rs.plan(Layout.parse("s8[{x}1]", mesh), Layout.parse(f"s8[{2**61 - 1}]", mesh))
    assert [step.kind for step in plan.steps] == ["all_gather"]

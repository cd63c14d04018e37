"""Whole numbers: what counts as one, in which range, and that digits are counted before they are read."""

from __future__ import annotations

import random
import threading
import time
from math import isqrt, prod

import numpy as np
import pytest

import reshard as rs
from reshard.errors import NetworkError, PlanError
from reshard.synth.routes import normal
from reshard.types import Layout, Mesh
from reshard.types.whole import MOST, check_deadline, checked_flag, planning_until, primes, whole, written
from tests.sampling import for_each


class Index:
    """A number that is not an int, as numpy's are."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __index__(self) -> object:
        return self.value


@pytest.mark.parametrize("value", [0, 1, 7, MOST, np.int8(3), np.uint64(5), np.array(6), Index(2)])
def test_whole_numbers_become_ints(value: object):
    number = whole(value)
    assert number == int(value.__index__()) and type(number) is int  # type: ignore[attr-defined]


NUMBERS = [-1, MOST + 1, 10**5000, 2.0, 1j, np.float32(2), np.nan, np.array([1, 2]), np.array([3])]
OTHERS = [True, False, np.True_, "8", b"8", None, [1], int, Index("x"), Index(None), Index(-1)]


@pytest.mark.parametrize("value", [*NUMBERS, *OTHERS], ids=lambda value: type(value).__name__)
def test_what_is_not_a_whole_number(value: object):
    assert whole(value) is None


def test_bounds_belong_to_the_range():
    assert [whole(value, 2, 4) for value in range(1, 6)] == [None, 2, 3, 4, None]


@pytest.mark.parametrize(
    ("digits", "number"), [("0", 0), ("007", 7), ("0" * 5000 + "8", 8), (str(MOST), MOST)], ids=range(4)
)
def test_digits_are_read(digits: str, number: int):
    assert written(digits) == number


@pytest.mark.parametrize("digits", [str(MOST + 1), "9" * 19, "1" * 4301, "1" * 100_000], ids=len)
def test_too_many_digits_are_not_read(digits: str):
    assert written(digits) is None


# Boolean options: True and False, numpy's included, and nothing that is only true of itself.


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_flags_become_bools(value: object):
    assert checked_flag(value, "donate") is bool(value)


@pytest.mark.parametrize("value", ["no", "", 1, 0, 0.0, None, [], NotImplemented, np.array(True), np.ones(2)])
def test_what_is_not_a_flag(value: object):
    with pytest.raises(PlanError, match=r"^donate .*: give True or False$"):
        checked_flag(value, "donate")
    with pytest.raises(NetworkError):
        checked_flag(value, "cubes", NetworkError)


# The deadline of planning: an error once it has passed, the same plan before, and no trace of it afterwards.


def ends(size: int) -> tuple[rs.Layout, rs.Layout]:
    mesh = rs.Mesh(x=4, y=2)
    return tuple(rs.Layout.parse(f"f32[{text}]", mesh) for text in (f"{{x}}{size}, 8", f"{4 * size}, {{y}}4"))


def test_a_plan_ends_at_its_deadline_and_is_made_the_next_time():
    source, target = ends(101)
    with pytest.raises(PlanError, match="planning took longer"), planning_until(time.monotonic() - 1):
        rs.plan(source, target)
    assert rs.plan(source, target).received_bytes > 0
    with planning_until(time.monotonic() - 1):
        rs.plan(source, target)  # A plan that is ready takes no time.


def test_routes_that_never_end(monkeypatch: pytest.MonkeyPatch):
    def endless(pair: object, links: object):
        while True:
            time.sleep(0.001)
            yield ()

    monkeypatch.setattr(normal, "routes", endless)
    start = time.monotonic()
    with pytest.raises(PlanError, match="planning took longer"), planning_until(start + 0.05):
        rs.plan(*ends(103))
    assert time.monotonic() - start < 5


def test_the_earlier_deadline_holds_in_its_own_context_and_thread_only():
    late: list[bool] = []

    def passed() -> bool:
        try:
            check_deadline()
        except PlanError:
            return True
        return False

    with planning_until(time.monotonic() - 1), planning_until(time.monotonic() + 60):
        assert passed()
        other = threading.Thread(target=lambda: late.append(passed()))
        other.start()
        other.join()
    assert late == [False]
    assert not passed()


# Prime factors: of small numbers by trial division, of large ones by numbers whose factors are known.


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


@for_each(range(20))
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

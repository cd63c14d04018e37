"""What a run needed: bytes live on each device, now and at most, and bytes that crossed the wire.

Every runtime keeps one `Account` a call, as it allocates, frees and receives, so that a plan's promise can be
compared with what happened. `measure` collects the accounts of all calls inside a `with`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce

from reshard.types import dtypes


class Account:
    """What a run needed: live bytes now and at most, per device, and bytes and calls on the wire."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.live: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()
        self.elements: Counter[int] = Counter()
        self.launches = 0

    def take(self, device: int, elements: int) -> None:
        """A device allocates a buffer."""
        self.live[device] += dtypes.nbytes(elements, self.dtype)
        self.peak[device] = max(self.peak[device], self.live[device])

    def free(self, device: int, elements: int) -> None:
        """A device frees a buffer."""
        self.live[device] -= dtypes.nbytes(elements, self.dtype)

    def receive(self, device: int, elements: int) -> None:
        """A device receives elements from another one."""
        self.elements[device] += elements

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were live on one device."""
        return max(self.peak.values(), default=0)

    @property
    def received(self) -> Counter[int]:
        """The bytes that each device received, all its messages packed."""
        return Counter({device: dtypes.nbytes(count, self.dtype) for device, count in self.elements.items()})

    @property
    def received_bytes(self) -> int:
        """The most bytes that one device received."""
        return max(self.received.values(), default=0)


class Measured:
    """The accounts of the calls so far, in order, and what they say together, by device id.

    A rank of MPI knows its own device alone: `comm.allgather(measured.peak_bytes)` is every rank's.
    """

    def __init__(self) -> None:
        self.calls: list[Account] = []

    @property
    def peak(self) -> Counter[int]:
        """Per device, the most bytes that were live in one call: tile, result and buffers, as in `plan.peak_bytes`."""
        return reduce(lambda one, other: one | other, (call.peak for call in self.calls), Counter[int]())

    @property
    def received(self) -> Counter[int]:
        """Per device, the bytes that it received in all calls together."""
        return reduce(lambda one, other: one + other, (call.received for call in self.calls), Counter[int]())

    @property
    def peak_bytes(self) -> int:
        """The most of any device here."""
        return max(self.peak.values(), default=0)

    @property
    def received_bytes(self) -> int:
        """The most of any device here."""
        return max(self.received.values(), default=0)


_measuring: ContextVar[tuple[Measured, ...]] = ContextVar("_measuring", default=())


@contextmanager
def measure() -> Generator[Measured]:
    """Measures the calls inside, of the numpy runtime (`rs.simulate`) and of `reshard.mpi`.

    >>> import numpy as np
    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=2)
    >>> rows, columns = (rs.Layout.parse(text, mesh) for text in ("f32[{x}2, 4]", "f32[4, {x}2]"))
    >>> plan = rs.plan(rows, columns)
    >>> with measure() as measured:
    ...     moved = rs.simulate(plan, dict.fromkeys(mesh.devices, np.zeros(rows.tile_shape, "float32")))
    >>> measured.peak_bytes <= plan.peak_bytes, measured.received_bytes == plan.received_bytes
    (True, True)
    """
    measured = Measured()
    token = _measuring.set((*_measuring.get(), measured))
    try:
        yield measured
    finally:
        _measuring.reset(token)


def begin_account(dtype: str, account: Account | None = None) -> Account:
    """The account of a call that begins: the caller's own or a new one, which those who measure see too."""
    begun = Account(dtype) if account is None else account
    for measured in _measuring.get():
        if not any(begun is call for call in measured.calls):
            measured.calls.append(begun)
    return begun

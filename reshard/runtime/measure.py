"""What calls took: the high-water mark of every device's buffers, and what it received.

There is one account, `Memory`, which the runtimes keep as they allocate, free and receive. Here the accounts of all
calls inside a `with` are collected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce

from reshard.runtime.memory import Memory


class Measured:
    """The accounts of the calls so far, in order, and what they say together, by device id.

    A rank of MPI knows its own device alone: `comm.allgather(measured.peak_bytes)` is every rank's.
    """

    def __init__(self) -> None:
        self.calls: list[Memory] = []

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


def account(dtype: str, memory: Memory | None = None) -> Memory:
    """The account of a call that begins: the caller's own or a new one, which those who measure see too."""
    found = Memory(dtype) if memory is None else memory
    for measured in _measuring.get():
        if not any(found is call for call in measured.calls):
            measured.calls.append(found)
    return found

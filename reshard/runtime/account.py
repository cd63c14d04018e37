"""What a run needs: the bytes live on each device, now and at most, and the bytes that it receives.

Every runtime keeps one `Account` for each call and updates it as it allocates, frees and receives. So a plan's promise
can be compared with a measurement that knows nothing of the plan. `measure` collects the accounts of all calls inside
a `with`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce

from reshard.errors import TileError, quoted
from reshard.types import dtypes


class Account:
    """The memory and traffic of one call, by device id.

    >>> account = Account("float32")
    >>> account.take(0, 8), account.free(0, 6), account.receive(0, 2)
    (None, None, None)
    >>> account.peak_bytes, account.live[0], account.received_bytes
    (32, 8, 8)
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.live: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()
        self._received_bits: Counter[int] = Counter()
        self.launches = 0

    def take(self, device: int, elements: int, dtype: str | None = None) -> None:
        """Counts a buffer that a device allocates, of the account's dtype or of another one."""
        self.live[device] += dtypes.nbytes(elements, dtype or self.dtype)
        self.peak[device] = max(self.peak[device], self.live[device])

    def free(self, device: int, elements: int, dtype: str | None = None) -> None:
        """Counts a buffer that a device frees."""
        self.live[device] -= dtypes.nbytes(elements, dtype or self.dtype)

    def cast(self, dtype: str) -> None:
        """From here on, elements are of this dtype."""
        self.dtype = dtype

    def receive(self, device: int, elements: int) -> None:
        """Counts elements that a device receives from another one."""
        self._received_bits[device] += elements * dtypes.bits(self.dtype)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were live on one device."""
        return max(self.peak.values(), default=0)

    @property
    def elements(self) -> Counter[int]:
        """Elements that each device received; those of another dtype count as the elements of this one that they
        fill.
        """
        each = dtypes.bits(self.dtype)
        return Counter({device: bits // each for device, bits in self._received_bits.items()})

    @property
    def received(self) -> Counter[int]:
        """The bytes that each device received, as if all its messages were packed into one."""
        return Counter({device: (bits + 7) // 8 for device, bits in self._received_bits.items()})

    @property
    def received_bytes(self) -> int:
        """The most bytes that one device received."""
        return max(self.received.values(), default=0)


class InBytes(Account):
    """An account in elements of one dtype that counts them as bytes in the account of the whole tree."""

    def __init__(self, dtype: str, tree: Account) -> None:
        super().__init__(dtype)
        self._tree = tree

    def take(self, device: int, elements: int, dtype: str | None = None) -> None:
        self._tree.take(device, dtypes.nbytes(elements, dtype or self.dtype))

    def free(self, device: int, elements: int, dtype: str | None = None) -> None:
        self._tree.free(device, dtypes.nbytes(elements, dtype or self.dtype))

    def receive(self, device: int, elements: int) -> None:
        self._tree.receive(device, dtypes.nbytes(elements, self.dtype))


class Measured:
    """The accounts of the calls so far, in order, and their sums and maxima by device id.

    An MPI rank knows its own device only; `comm.allgather(measured.peak_bytes)` collects those of all ranks.
    """

    def __init__(self) -> None:
        self.calls: list[Account] = []

    def __repr__(self) -> str:
        return f"Measured(calls={len(self.calls)}, received_bytes={self.received_bytes}, peak_bytes={self.peak_bytes})"

    @property
    def peak(self) -> Counter[int]:
        """The most bytes live on each device in any one call: tile, result and buffers, as in `plan.peak_bytes`."""
        return reduce(lambda one, other: one | other, (call.peak for call in self.calls), Counter[int]())

    @property
    def received(self) -> Counter[int]:
        """The bytes that each device received in all calls together."""
        return reduce(lambda one, other: one + other, (call.received for call in self.calls), Counter[int]())

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were live on one device in any one call."""
        return max(self.peak.values(), default=0)

    @property
    def received_bytes(self) -> int:
        """The most bytes that one device received in all calls together."""
        return max(self.received.values(), default=0)


_measuring: ContextVar[tuple[Measured, ...]] = ContextVar("_measuring", default=())


@contextmanager
def measure() -> Generator[Measured]:
    """Measures all calls inside a `with`, of the numpy runtime (`rs.simulate`) and of `reshard.mpi`.

    Loads and saves of files are not among them: `rs.files.load(..., counts=ReadCounts())` counts what is really read.

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


def measures() -> bool:
    """Whether some `measure` wants the account of this call."""
    return bool(_measuring.get())


def begin_account(dtype: str, account: Account | None = None) -> Account:
    """Returns the account for a call that begins, a new one unless the caller brings its own, and measures it."""
    if not (account is None or isinstance(account, Account)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TileError(f"memory {quoted(account)} is not an Account; give Account(dtype), or None")
    account = Account(dtype) if account is None else account
    if isinstance(account, InBytes):
        return account  # That of the tree is measured.
    for measured in _measuring.get():
        if not any(account is call for call in measured.calls):
            measured.calls.append(account)
    return account

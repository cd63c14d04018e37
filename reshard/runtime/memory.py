"""What a run needs: bytes live on each device, now and at most, and what crosses the wire."""

from __future__ import annotations

from collections import Counter

from reshard.types import dtypes


class Memory:
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

"""`Link`: what it costs to send bytes along one mesh axis, and how the devices of the axis are wired."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, SupportsFloat, cast

from reshard.errors import NetworkError, quoted

SHAPES = ("switch", "ring", "line")
"""How the devices of an axis are wired: each to all, or each to its two neighbours, with or without wraparound."""


@dataclass(frozen=True)
class Link:
    """The link of one mesh axis: seconds that an empty message takes, and bytes/second per device and direction.

    `shape` is "switch" where every device reaches every other at once, "ring" or "line" where it reaches its neighbours
    only. The bandwidth of a ring or a line is that of the wires to both neighbours together, and its latency is that of
    one hop. Raises `NetworkError` unless both are finite, latency >= 0 and bandwidth > 0, and for another shape.

    >>> link = Link(1e-6, 9e10)
    >>> f"{link.latency + 9e6 / link.bandwidth:.3e} s"
    '1.010e-04 s'
    """

    latency: float
    bandwidth: float
    shape: str = "switch"

    def __post_init__(self) -> None:
        latency = _read_figure(self.latency, "latency", "seconds, at least 0")
        bandwidth = _read_figure(self.bandwidth, "bandwidth", "bytes/second, above 0")
        if latency < 0:
            raise NetworkError(f"latency {quoted(latency)} is negative: give seconds, at least 0")
        if bandwidth <= 0:
            raise NetworkError(f"bandwidth {quoted(bandwidth)} is not positive: give bytes/second, above 0")
        if not isinstance(self.shape, str) or self.shape not in SHAPES:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise NetworkError(f"shape {quoted(self.shape)} of a link: give one of {', '.join(SHAPES)}")
        object.__setattr__(self, "latency", latency)
        object.__setattr__(self, "bandwidth", bandwidth)

    def __repr__(self) -> str:
        """The figures; the shape only if it is not a switch."""
        shape = "" if self.shape == "switch" else f", shape={self.shape!r}"
        return f"Link(latency={self.latency!r}, bandwidth={self.bandwidth!r}{shape})"

    @property
    def speed(self) -> tuple[float, float]:
        """The key that sorts links from slow to fast."""
        return self.bandwidth, -self.latency


LinkLike = Link | tuple[float, float] | tuple[float, float, str]
"""A `Link`, or its latency in seconds, bandwidth in bytes/second and, if it is not a switch, shape."""


def link_of(value: object, what: str) -> Link:
    """A link that a caller gives, as such or as its figures; raises `NetworkError`, which says `what` it is."""
    if isinstance(value, Link):
        return value
    figures = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()
    if len(figures) != 2 and not (len(figures) == 3 and isinstance(figures[2], str)):
        raise NetworkError(
            f"{what}: {quoted(cast('object', value))} is not a link; give a Link or "
            f"(latency in s, bandwidth in bytes/s)"
        )
    try:
        return Link(*figures)
    except NetworkError as error:
        raise NetworkError(f"{what}: {error}") from None


def _read_figure(value: object, what: str, want: str) -> float:
    # A masked array of numpy would become nan, with a warning.
    if isinstance(value, bool) or not isinstance(value, SupportsFloat) or hasattr(value, "mask"):
        raise NetworkError(f"{what} {quoted(value)} is not a number: give {want}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise NetworkError(f"{what} {quoted(value)} is not a finite number: give {want}")
    return number

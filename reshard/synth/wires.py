"""Wires: `Link`, what it costs to send bytes along one mesh axis, and what rings and lines of devices carry.

A switch carries what its ports carry. On a ring every device reaches its two neighbours only, and what goes further
takes up the wires in between. With tiles of t bytes and wires of W bytes/second to both neighbours together:

    all-to-all, ring of p                        (p / 4) t / W; for odd p (p^2 - 1) / (4 p)
    all-to-all, line of p                        twice that
    all-to-all over several physical axes        the slowest of them
    a sub-axis of q devices, s apart             s times that of a ring of q, or of a line if it does not go round
    all-gather of q tiles, ring                  (q - 1) t / W; a device at the end of a line has half the wires
    all-gather over several physical axes        the wires of all carry it together
    permutes, exchanges                          axis by axis, by digits (`routing`)

Each is a time in which the wires can do it, so none is less than what they allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, permutations
from typing import Any, NamedTuple, SupportsFloat, cast

from reshard.errors import NamedErrors, NetworkError, quoted
from reshard.synth.routing import Row, WiredDigit, join_runs, load_run, route_messages
from reshard.types.mesh import Mesh, SubAxis, is_chain, places
from reshard.types.whole import checked_flag, primes, read_items, whole

SHAPES = ("switch", "ring", "line")
"""How the devices of an axis are wired: each to all, or each to its two neighbours, with or without wraparound."""


@dataclass(frozen=True)
class Link:
    """The link of one mesh axis: seconds that an empty message takes, and bytes/second per device and direction.

    `shape` is "switch" where every device reaches every other at once, "ring" or "line" where it reaches its neighbours
    only. The bandwidth of a ring or a line is that of the wires to both neighbours together, and its latency is that of
    one hop. `issue` is the seconds from one message of a device to its next, by default the latency. Raises
    `NetworkError` unless all are finite, latency and issue >= 0 and bandwidth > 0, and for another shape.

    >>> link = Link(1e-6, 9e10)
    >>> f"{link.latency + 9e6 / link.bandwidth:.3e} s"
    '1.010e-04 s'
    """

    latency: float
    bandwidth: float
    shape: str = "switch"
    issue: float | None = None

    def __post_init__(self) -> None:
        bandwidth = _read_figure(self.bandwidth, "bandwidth", "bytes/second, above 0")
        for name in ("latency", "issue"):
            seconds = getattr(self, name)
            if name == "latency" or seconds is not None:
                seconds = _read_figure(seconds, name, "seconds, at least 0")
                if seconds < 0:
                    raise NetworkError(f"{name} {quoted(seconds)} is negative: give seconds, at least 0")
                object.__setattr__(self, name, seconds)
        if bandwidth <= 0:
            raise NetworkError(f"bandwidth {quoted(bandwidth)} is not positive: give bytes/second, above 0")
        if not isinstance(self.shape, str) or self.shape not in SHAPES:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise NetworkError(f"shape {quoted(self.shape)} of a link: give one of {', '.join(SHAPES)}")
        object.__setattr__(self, "bandwidth", bandwidth)

    def __repr__(self) -> str:
        """The figures; the shape only if it is not a switch, what is issued only if that is given."""
        shape = "" if self.shape == "switch" else f", shape={self.shape!r}"
        issue = "" if self.issue is None else f", issue={self.issue!r}"
        return f"Link(latency={self.latency!r}, bandwidth={self.bandwidth!r}{shape}{issue})"

    def wait(self, messages: float, hops: int = 1) -> float:
        """Seconds until the last of a device's messages has passed its hops, if all are empty.

        >>> Link(1e-6, 9e10).wait(3), Link(1e-6, 9e10, issue=0.0).wait(3, hops=2)
        (3e-06, 2e-06)
        """
        issue = self.latency if self.issue is None else self.issue
        return hops * self.latency + (messages - 1) * issue if messages > 0 else 0.0

    @property
    def speed(self) -> tuple[float, float]:
        """The key that sorts links from slow to fast."""
        return self.bandwidth, -self.latency


LinkLike = Link | tuple[float, float] | tuple[float, float, str] | tuple[float, float, str, float]
"""A `Link`, or its latency in seconds and bandwidth in bytes/second, and perhaps its shape, and seconds of issue."""


def link_of(value: object, what: str) -> Link:
    """A link that a caller gives, as such or as its figures; raises `NetworkError`, which says `what` it is."""
    if isinstance(value, Link):
        return value
    figures = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()
    if not 2 <= len(figures) <= 4 or not all(isinstance(shape, str) for shape in figures[2:3]):
        raise NetworkError(
            f"{what}: {quoted(cast('object', value))} is not a link; give a Link or "
            f"(latency in s, bandwidth in bytes/s)"
        )
    with NamedErrors(what):
        return Link(*figures)


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


_MOST_SUBSETS = 6
"""Physical axes up to which every subset is asked what crosses it."""


class PhysicalAxis(NamedTuple):
    """Devices in a row, each joined to the next; `wraps` joins the last to the first."""

    size: int
    wraps: bool
    link: Link

    @property
    def row(self) -> Row:
        """The devices, without their link."""
        return Row(self.size, self.wraps)


class Stretch(NamedTuple):
    """The part of a mesh axis from stride `low` to `high` within it: it lies on physical axis `on`, `hop` apart."""

    low: int
    high: int
    on: int
    hop: int


class Span(NamedTuple):
    """What some sub-axes take up on one physical axis: `runs` of devices, each (devices between neighbours, size).

    A `rough` span takes up any devices of the axis; its `size` is how many peers meet there.
    """

    axis: PhysicalAxis
    runs: tuple[tuple[int, int], ...]
    size: int
    rough: bool = False

    @property
    def swap(self) -> float:
        """Seconds of an all-to-all for each byte of a device's tile."""
        load = sum(load_run(self.axis.row, hop, size) for hop, size in self.runs)
        return load * (2 if self.rough else 1) / self.axis.link.bandwidth

    @property
    def gather(self) -> float:
        """Seconds of an all-gather for each byte that a device receives: run by run, those that take longer first."""
        if self.rough:
            return self.swap
        costs = sorted(((hop * (1 if self._closes(hop, size) else 2), size) for hop, size in self.runs), reverse=True)
        total, tiles = 0, 1
        for cost, size in costs:
            total += cost * (size - 1) * tiles
            tiles *= size
        return total / (tiles - 1) / self.axis.link.bandwidth

    @property
    def hops(self) -> int:
        """Wires between the two devices that are furthest apart."""
        return sum(hop * (size // 2 if self._closes(hop, size) else size - 1) for hop, size in self.runs)

    def _closes(self, hop: int, size: int) -> bool:
        return self.axis.wraps and hop * size == self.axis.size


class Spans(tuple[Span, ...]):
    """What some sub-axes take up on all the physical axes that they lie on."""

    @property
    def latency(self) -> float:
        """Seconds that an empty message takes to the device that is furthest away."""
        return sum(span.hops * span.axis.link.latency for span in self)

    def swap(self, tile: float) -> float:
        """Seconds that the bytes of an all-to-all of tiles take."""
        return max((span.swap * tile for span in self), default=0.0)

    def gather(self, tile: float) -> float:
        """Seconds that the bytes of an all-gather of tiles take: every subset of the axes has to bring in what comes
        over it.

        >>> ring = Span(PhysicalAxis(4, True, Link(0, 1, "ring")), ((1, 4),), 4)
        >>> Spans((ring,)).gather(1), Spans((ring, ring)).gather(1)
        (3.0, 7.5)
        """
        sizes = range(1, len(self) + 1) if len(self) <= _MOST_SUBSETS else (1, len(self))
        most = 0.0
        for subset in (subset for size in sizes for subset in combinations(self, size)):
            # The tiles of all peers come in over all axes of the subset at once.
            peers = math.prod(span.size for span in subset) - 1
            most = max(most, peers / sum(1 / span.gather for span in subset) * tile if peers else 0.0)
        return most

    def permute(self, tile: float) -> float:
        """Seconds that the bytes of any permutation of tiles take."""
        return 2 * self.swap(tile)


class Wires(Mapping[str, Link]):
    """The links of the axes of a mesh, and where those that are rings, lines or part of a torus lie on wires.

    >>> wires = Wires.of({"x": Link(1e-6, 9e10, "ring"), "y": Link(1e-6, 9e10)}, Mesh(x=4, y=2))
    >>> wires["x"].shape, wires.wired("x"), wires.wired("y")
    ('ring', True, False)
    """

    def __init__(
        self, links: Mapping[str, Link], axes: tuple[PhysicalAxis, ...], stretches: Mapping[str, tuple[Stretch, ...]]
    ) -> None:
        self._links = dict(links)
        self._axes = axes
        self._stretches = stretches
        self._spans: dict[tuple[SubAxis, ...], Spans] = {}
        self._placed: dict[Mesh, list[tuple[PhysicalAxis, list[int]]]] = {}
        self.sizes: tuple[float, float] | None = None
        self.base = self

    @classmethod
    def of(cls, links: Mapping[str, Link], mesh: Mesh) -> Wires:
        """The links as they are if they have wires already, else every ring and line as a physical axis of its own."""
        if isinstance(links, Wires):
            return links
        own = [name for name, link in links.items() if link.shape != "switch" and name in mesh.axes]
        axes = tuple(PhysicalAxis(mesh.axes[name], links[name].shape == "ring", links[name]) for name in own)
        return cls(links, axes, {name: (Stretch(1, mesh.axes[name], on, 1),) for on, name in enumerate(own)})

    def joined(
        self, links: Mapping[str, Link], axes: tuple[PhysicalAxis, ...], stretches: Mapping[str, tuple[Stretch, ...]]
    ) -> Wires:
        """These wires and others, whose stretches count the axes from zero, with the links of all."""
        more = {name: tuple(s._replace(on=s.on + len(self._axes)) for s in parts) for name, parts in stretches.items()}
        return Wires(links, (*self._axes, *axes), {**self._stretches, **more})

    def __getitem__(self, axis: str) -> Link:
        return self._links[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)

    def __repr__(self) -> str:
        return f"Wires({self._links})"

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Routes and times are kept by the wires that they are for, and other wires have theirs even if they are equal.
        return id(self)

    def for_sizes(self, low: float, high: float) -> Wires:
        """The same wires for arrays of any size between `low` and `high` bytes, whatever that of the layouts at hand:
        no route that is the fastest one at some such size is left out."""
        wires = copy(self)
        wires.sizes = low, high
        return wires

    def wired(self, axis: str) -> bool:
        """Whether an axis lies on wires, which others share, and not on a switch of its own."""
        return axis in self._stretches

    def with_bandwidth(self, bandwidth: float) -> Wires:
        """The same wires with another bandwidth."""
        links = {name: replace(link, bandwidth=bandwidth) for name, link in self._links.items()}
        axes = (a._replace(link=replace(a.link, bandwidth=bandwidth)) for a in self._axes)
        return Wires(links, tuple(axes), self._stretches)

    @cached_property
    def slowest(self) -> Link:
        """The slowest of the links that lie on wires."""
        return min((axis.link for axis in self._axes), key=lambda link: link.speed)

    def list_alike(self, mesh: Mesh) -> list[tuple[str, ...]]:
        """The axes of the mesh in classes of equal size, link and wires: renaming those of a class changes no time.

        >>> wires = Wires.of({"x": Link(1e-6, 9e10), "y": Link(1e-6, 9e10), "z": Link(1e-5, 9e10)}, Mesh(x=2, y=2, z=2))
        >>> wires.list_alike(Mesh(x=2, y=2, z=2))
        [('x', 'y'), ('z',)]
        """
        alike: dict[object, tuple[str, ...]] = {}
        for name, size in mesh.axes.items():
            lies = self._stretches.get(name, ())
            alone = all(stretch.low == stretch.hop == 1 and self._axes[stretch.on].size == size for stretch in lies)
            wires = tuple(self._axes[stretch.on] for stretch in lies) if alone and len(lies) < 2 else name
            alike[size, self[name], wires] = (*alike.get((size, self[name], wires), ()), name)
        return list(alike.values())

    def place_devices(self, mesh: Mesh) -> list[tuple[PhysicalAxis, list[int]]] | None:
        """The physical axes, with the coordinate of the device at each position; None unless all axes are wired."""
        if not self._axes or not all(size == 1 or self.wired(axis) for axis, size in mesh.axes.items()):
            return None
        if mesh in self._placed:
            return self._placed[mesh]
        placed = self._placed[mesh] = [(axis, [0] * mesh.size) for axis in self._axes]
        stride = mesh.size
        for name, size in mesh.axes.items():
            stride //= size
            for low, high, on, hop in self._stretches.get(name, ()):
                coordinates = placed[on][1]
                for position in range(mesh.size):
                    coordinates[position] += position // stride % size // low % (high // low) * hop
        return placed

    def spans(self, mesh: Mesh, sub_axes: Iterable[SubAxis]) -> Spans:
        """What sub-axes take up on the wires."""
        key = tuple(sub_axes)
        if key not in self._spans:
            runs: dict[int, set[tuple[int, int]]] = {}
            rough: dict[int, int] = {}
            parts: dict[str, list[tuple[int, int]]] = {}
            for axis, pre, size in key:
                parts.setdefault(axis, []).append((mesh.axes[axis] // (pre * size), size))
            for name, found in parts.items():
                # Those that follow each other are one if it nests with the wires: 3 and 2 of 6 may not, and 6 does.
                # What does not nest even so stays as it is, since less of it is rough.
                joined = [run for run in join_runs(found) if self._cut_by_wires(name, *run)[1]]
                apart = [part for part in found if not any(low <= part[0] < low * size for low, size in joined)]
                for low, size in (*joined, *apart):
                    pieces, nests = self._cut_by_wires(name, low, size)
                    for s, start, end in pieces:
                        if nests:
                            runs.setdefault(s.on, set()).add((s.hop * start // s.low, end // start))
                        else:
                            rough[s.on] = rough.get(s.on, 1) * size
            spans: list[Span] = []
            for on in sorted({*runs, *rough}):
                axis, joined = self._axes[on], join_runs(runs.get(on, set()))
                peers = math.prod(size for _, size in joined)
                whole = Span(axis, ((1, axis.size),), peers * rough.get(on, 0), rough=True)
                spans.append(whole if on in rough else Span(axis, joined, peers))
            self._spans[key] = Spans(spans)
        return self._spans[key]

    def _cut_by_wires(self, axis: str, low: int, size: int) -> tuple[list[tuple[Stretch, int, int]], bool]:
        """What a part of an axis has of each stretch, from where to where; and whether each divides the next."""
        every = ((s, max(low, s.low), min(low * size, s.high)) for s in self._stretches.get(axis, ()))
        pieces = [(s, start, end) for s, start, end in every if start < end]
        return pieces, all(start % s.low == 0 == s.high % end and end % start == 0 for s, start, end in pieces)

    def route(self, mesh: Mesh, origins: Mapping[tuple[int, int], int | None]) -> float | None:
        """Seconds for each byte that a device sends in an exchange, by where senders are; None where that is not known.

        `origins` are the factors (stride, size) of the positions along which senders and receivers differ, with the
        stride along which the receiver has the sender's coordinate, None if that is any.
        """
        placed: dict[WiredDigit, WiredDigit | None] = {}
        for (stride, size), origin in origins.items():
            if not any(self.wired(mesh.axis_at(end)) for end in (stride, origin) if end is not None):
                continue
            for at, prime in places(1, size):
                digit, other = self._place(mesh, stride * at, prime), origin and self._place(mesh, origin * at, prime)
                if digit is None or (origin is not None and other is None):
                    return None
                placed[digit] = other or None
        rows, speeds = [axis.row for axis in self._axes], [axis.link.bandwidth for axis in self._axes]
        return route_messages(tuple(rows), tuple(speeds), tuple(placed.items()))

    def _place(self, mesh: Mesh, stride: int, prime: int) -> WiredDigit | None:
        """Where a prime factor of the positions lies on wires."""
        sub = mesh.sub_axes(stride, prime)[0]
        low = mesh.axes[sub.axis] // (sub.pre * sub.size)
        for part in self._stretches.get(sub.axis, ()):
            if part.low <= low < part.high and not (low % part.low or part.high % (low * prime)):
                return WiredDigit(part.on, part.hop * (low // part.low), prime)
        return None


# `Torus`: the physical axes that the devices of a fabric lie on, chosen from their number or given.
#
# A mesh is a way to count devices; the wires are where they are. 64 chips of TPU v5p are wired as 4x4x4, whatever the
# axes of a mesh over them:
#
#     mesh <x=8, y=8>    positions   1 ... 4 ... 8 ... 16 ... 64
#     y                              |-----------|                   a ring of 4, and half of the next ring
#     x                                          |------------|      the other half, and a ring of 4
#     physical axes                  |-----|-----------|------|


_MOST_AXES = 6


@dataclass(frozen=True)
class Torus:
    """How the devices of a fabric are wired: a torus of `axes` physical axes, as large as it must be.

    An axis wraps around if its size is a multiple of `wrap` (0: none does); with `cubes` only if that holds for all.
    `cores` devices share a chip, and count fastest. `shape` gives the sizes of the physical axes, major to minor, where
    they are known; else they are as equal as the number of devices allows. Raises `NetworkError` for bad figures.

    >>> v5p = Torus(axes=3, wrap=4, cubes=True)
    >>> v5p.sizes(64), v5p.sizes(256), v5p.wraps((4, 8, 8)), v5p.wraps((2, 4, 4))
    ((4, 4, 4), (4, 8, 8), (True, True, True), (False, False, False))
    """

    axes: int = 3
    wrap: int = 1
    cubes: bool = False
    cores: int = 1
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, low, most in (("axes", 1, _MOST_AXES), ("wrap", 0, 1 << 40), ("cores", 1, 1 << 10)):
            if whole(getattr(self, name), low, most) is None:
                raise NetworkError(
                    f"{name} {quoted(getattr(self, name))} of a torus: give a whole number, {low} to {most}"
                )
        object.__setattr__(self, "cubes", checked_flag(self.cubes, "torus cubes", NetworkError))
        sizes = read_items(self.shape)
        if sizes is None or len(sizes) > _MOST_AXES or any(whole(size, 1, 1 << 40) is None for size in sizes):
            raise NetworkError(
                f"shape {quoted(self.shape)} of a torus: give the sizes of at most {_MOST_AXES} physical axes, such as "
                f"(4, 4, 4)"
            )
        object.__setattr__(self, "shape", tuple(sizes))

    def sizes(self, devices: int) -> tuple[int, ...]:
        """The sizes of the physical axes of a number of devices: ascending, or as given, major to minor.

        Raises `NetworkError` if the shape that was given has another number of devices.
        """
        chips = devices // self.cores if devices % self.cores == 0 else devices
        if self.shape:
            if math.prod(self.shape) * self.cores != devices:
                shape = "x".join(map(str, self.shape))
                raise NetworkError(
                    f"the torus {shape} has {math.prod(self.shape) * self.cores} devices, but the inner axes of the "
                    f"mesh have {devices}; give the shape of the slice that the mesh is on, or none"
                )
            return self.shape
        cube = self.wrap**self.axes if self.cubes else 0
        start = self.wrap if cube and chips % cube == 0 else 1
        sizes = [start] * self.axes
        for prime in sorted(primes(chips // start**self.axes), reverse=True):
            sizes[sizes.index(min(sizes))] *= prime
        return tuple(sorted(size for size in sizes if size > 1))

    def wraps(self, sizes: Sequence[int]) -> tuple[bool, ...]:
        """Which physical axes of these sizes wrap around."""
        each = tuple(self.wrap > 0 and size % self.wrap == 0 for size in sizes)
        return (all(each),) * len(each) if self.cubes else each

    def under(self, mesh_axes: Sequence[int]) -> tuple[tuple[int, bool], ...]:
        """The physical axes (size, wraps) below mesh axes of these sizes, major to minor.

        The physical axes are in the order in which most of them end where a mesh axis does. If no order nests with the
        mesh axes, every mesh axis counts as a physical one.

        >>> Torus(axes=3, wrap=4, cubes=True).under([4, 8, 4])
        ((4, True), (8, True), (4, True))
        """
        devices = math.prod(mesh_axes)
        sizes = self.sizes(devices)
        cores = (self.cores,) if self.cores > 1 and devices % self.cores == 0 else ()
        orders = [sizes] if self.shape else sorted(set(permutations(sizes)))
        ends = set(_list_factor_ends(mesh_axes))
        nested = [order for order in orders if is_chain(sorted(ends | set(_list_factor_ends((*order, *cores)))))]
        if not nested:
            sizes = tuple(size for size in mesh_axes if size > 1)
            return tuple(zip(sizes, self.wraps(sizes), strict=True))
        best = max(nested, key=lambda order: len(ends & set(_list_factor_ends((*order, *cores)))))
        wraps = self.wraps(best)
        return (*zip(best, wraps, strict=True), *((size, True) for size in cores))


def _list_factor_ends(sizes: Sequence[int]) -> list[int]:
    """Where the factors of these sizes, major to minor, start and end among the positions."""
    ends = [1]
    for size in reversed(sizes):
        ends.append(ends[-1] * size)
    return ends

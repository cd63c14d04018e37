"""Meshes: named axes, their sub-axes, and the devices at their coordinates.

A device's *position* is its row-major number in the mesh, first axis major. A sub-axis
`y:(2)4` is the factor of size 4 of axis `y` that follows a prefix of size 2; along it, the device
at position `i` has coordinate `i // stride % size`, where `stride` counts positions. Everything
below the text works on such (stride, size) pairs, so a mesh of 2^20 devices costs what one of 8 does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, cast

from reshard.errors import MeshError, NotationError

AXIS_NAME = r"[A-Za-z_][A-Za-z0-9_.\-]*"
_AXIS = re.compile(rf"\s*({AXIS_NAME})\s*=\s*(-?\d+)\s*")
_SUB_AXIS = re.compile(rf"\s*({AXIS_NAME})\s*(?::\s*\((\d+)\)\s*(\d+)\s*)?")


class SubAxis(NamedTuple):
    """The factor `size` of a mesh axis that follows a prefix of `pre`; a whole axis has pre 1."""

    axis: str
    pre: int
    size: int


class Mesh:
    """Devices on named axes.

    `device_ids[i]` is the device at position `i`; without it, devices are numbered by position.
    Raises `MeshError` for a bad name or size, or ids that are not distinct.

    >>> mesh = Mesh(x=4, y=2)
    >>> mesh.size, str(mesh), mesh.sub_axis("x:(2)2")
    (8, '<x=4, y=2>', SubAxis(axis='x', pre=2, size=2))
    """

    __slots__ = ("__dict__", "axes", "device_ids")
    axes: Mapping[str, int]
    device_ids: tuple[int, ...] | None

    def __init__(
        self,
        axes: Mapping[str, int] | Iterable[tuple[str, int]] | None = None,
        /,
        device_ids: Sequence[int] | None = None,
        **named: int,
    ) -> None:
        if isinstance(axes, str):
            raise MeshError(f"mesh {axes!r} is text; read it with Mesh.parse, or give the axes as name=size")
        given = list(cast("Iterable[tuple[str, int]]", axes.items() if isinstance(axes, Mapping) else axes or ()))
        if any(_not_a_pair(pair) for pair in given):
            raise MeshError(f"mesh axes {given}: give a dict of name to size, or (name, size) pairs")
        pairs = [*given, *named.items()]
        for name, size in pairs:
            _check_axis(name, size)
        object.__setattr__(self, "axes", dict(pairs))
        if len(self.axes) != len(pairs):
            raise MeshError(f"mesh {pairs}: an axis name occurs twice; give every axis its own name")
        ids = None if device_ids is None else _ids(device_ids)
        _check_ids(ids, self.size, str(self))
        # The identity order is no order: equal meshes are equal objects.
        ordered = ids is not None and ids == tuple(range(self.size))
        object.__setattr__(self, "device_ids", None if ordered else ids)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Mesh is immutable; build a new one instead of setting {name!r}")

    def __reduce__(self) -> tuple[type[Mesh], tuple[tuple[tuple[str, int], ...], tuple[int, ...] | None]]:
        return Mesh, self._key

    @classmethod
    def parse(cls, text: str, device_ids: Sequence[int] | None = None) -> Mesh:
        """Reads `x=4,y=2` (or `<x=4, y=2>`).

        >>> Mesh.parse("x=4,y=2") == Mesh(x=4, y=2)
        True
        """
        body = text.strip().removeprefix("<").removesuffix(">")
        pairs: list[tuple[str, int]] = []
        for part in filter(None, (p.strip() for p in body.split(","))):
            match = _AXIS.fullmatch(part)
            if match is None:
                raise NotationError(f"mesh {text!r}: cannot read {part!r}; write axes as name=size, e.g. x=4,y=2")
            pairs.append((match[1], int(match[2])))
        return cls(pairs, device_ids=device_ids)

    @cached_property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.axes.values())

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides: dict[str, int] = {}
        below = 1
        for name in reversed(tuple(self.axes)):
            strides[name] = below
            below *= self.axes[name]
        return strides

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Device ids by position."""
        return self.device_ids or tuple(range(self.size))

    def position(self, device: int) -> int:
        """The position of a device id; raises `MeshError` for a device that is not there."""
        if self.device_ids is None:
            found = device if 0 <= device < self.size else None
        else:
            found = self._positions.get(device)
        if found is None:
            raise MeshError(f"device {device} is not in mesh {self} of {self.size} devices")
        return found

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {device: at for at, device in enumerate(self.devices)}

    def sub_axis(self, text: str) -> SubAxis:
        """Reads `x` or `x:(2)2`; raises `MeshError` for an axis or a factor that is not there."""
        match = _SUB_AXIS.fullmatch(text)
        if match is None:
            raise NotationError(f"cannot read axis {text!r}; write x, or x:(pre)size for a sub-axis of x")
        axis = match[1]
        self._require(axis)
        if match[2] is None:
            return SubAxis(axis, 1, self.axes[axis])
        return self.checked(SubAxis(axis, int(match[2]), int(match[3])))

    def checked(self, sub: SubAxis) -> SubAxis:
        """The sub-axis itself, if this mesh has it."""
        self._require(sub.axis)
        size = self.axes[sub.axis]
        if sub.pre < 1 or sub.size < 1 or size % (sub.pre * sub.size):
            raise MeshError(
                f"sub-axis {self.spell(sub)}: {sub.pre} x {sub.size} does not divide axis {sub.axis!r} of "
                f"size {size} in mesh {self}; prefix and size must be factors of the axis"
            )
        return sub

    def _require(self, axis: str) -> None:
        if axis not in self.axes:
            raise MeshError(f"unknown axis {axis!r}: mesh {self} has axes {', '.join(self.axes) or '(none)'}")

    def spell(self, sub: SubAxis) -> str:
        """The text of a sub-axis: `x` for a whole axis, else `x:(pre)size`."""
        if sub.pre == 1 and sub.size == self.axes.get(sub.axis):
            return sub.axis
        return f"{sub.axis}:({sub.pre}){sub.size}"

    def stride(self, sub: SubAxis) -> int:
        """How many positions apart two devices are that are neighbours along a sub-axis."""
        return self._strides[sub.axis] * (self.axes[sub.axis] // (sub.pre * sub.size))

    def coordinate(self, position: int, axis: SubAxis) -> int:
        """Which value along a sub-axis the device at a position keeps.

        >>> mesh = Mesh(x=4, y=2)
        >>> mesh.coordinate(5, mesh.sub_axis("x")), mesh.coordinate(5, mesh.sub_axis("x:(2)2"))
        (2, 0)
        """
        return position // self.stride(axis) % axis.size

    def coordinates(self, position: int, axes: Iterable[SubAxis]) -> tuple[int, ...]:
        """The coordinates of the device at a position along each of these sub-axes.

        >>> mesh = Mesh(x=4, y=2)
        >>> mesh.coordinates(5, [mesh.sub_axis("x"), mesh.sub_axis("y")])
        (2, 1)
        """
        return tuple(self.coordinate(position, axis) for axis in axes)

    def sub_axes(self, stride: int, size: int) -> list[SubAxis]:
        """The sub-axes, major first, that a (stride, size) factor of the positions is made of.

        >>> Mesh(x=4, y=2).sub_axes(1, 4)
        [SubAxis(axis='x', pre=2, size=2), SubAxis(axis='y', pre=1, size=2)]
        """
        found: list[SubAxis] = []
        for name, axis_size in self.axes.items():
            below = self._strides[name]
            low, high = max(stride, below), min(stride * size, below * axis_size)
            if low >= high:
                continue
            if high % low or low % below or (below * axis_size) % high:
                raise MeshError(f"positions {stride} x {size} are no product of sub-axes of mesh {self}")
            found.append(SubAxis(name, below * axis_size // high, high // low))
        return found

    def axis_at(self, stride: int) -> str:
        """The axis along which devices that are `stride` positions apart are neighbours.

        >>> Mesh(x=4, y=2).axis_at(4)
        'x'
        """
        return next(name for name, below in self._strides.items() if below <= stride < below * self.axes[name])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _key(self) -> tuple[tuple[tuple[str, int], ...], tuple[int, ...] | None]:
        return tuple(self.axes.items()), self.device_ids

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return f"<{', '.join(f'{n}={s}' for n, s in self.axes.items())}>"

    def __repr__(self) -> str:
        ids = f", device_ids={list(self.device_ids)}" if self.device_ids else ""
        return f"Mesh({dict(self.axes)}{ids})"


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(stride, stride * size) spans of positions, minor first; those that overlap or do not nest are made one.

    >>> joined([(4, 8), (1, 2), (2, 8)]), joined([(2, 12), (3, 6)])
    ([(1, 2), (2, 8)], [(1, 12)])
    """
    found: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        while found and low % found[-1][1]:
            below, above = found.pop()
            low, high = math.gcd(low, below), math.lcm(high, above)
        found.append((low, high))
    return found


def primes(size: int) -> list[int]:
    """The prime factors of a size, ascending.

    >>> primes(12)
    [2, 2, 3]
    """
    found: list[int] = []
    prime = 2
    while prime * prime <= size:
        while size % prime == 0:
            found.append(prime)
            size //= prime
        prime += 1
    return [*found, size] if size > 1 else found


def places(stride: int, size: int) -> Iterator[tuple[int, int]]:
    """A factor of the device positions as (stride, prime) factors, major first.

    >>> list(places(2, 6))
    [(6, 2), (2, 3)]
    """
    for prime in primes(size):
        size //= prime
        yield stride * size, prime


def prime_places(mesh: Mesh, axis: SubAxis) -> Iterator[tuple[int, int]]:
    """The (stride, prime) factors of the device positions that a sub-axis is made of, major first."""
    return places(mesh.stride(axis), axis.size)


def _check_axis(name: object, size: object) -> None:
    if not isinstance(name, str) or not re.fullmatch(AXIS_NAME, name):
        raise MeshError(f"bad axis name {name!r}: use a letter or _, then letters, digits, '_', '.' or '-'")
    if isinstance(size, bool) or not hasattr(size, "__index__") or int(size) < 1:  # pyright: ignore
        raise MeshError(f"axis {name!r} has size {size!r}: a size is a whole number of at least 1")


def _not_a_pair(pair: object) -> bool:
    return not isinstance(pair, tuple) or len(cast("tuple[object, ...]", pair)) != 2


def _ids(device_ids: Sequence[int]) -> tuple[int, ...]:
    listed = list(device_ids)
    bad = next((i for i in listed if isinstance(i, bool) or not hasattr(i, "__index__")), None)
    if bad is not None:
        raise MeshError(f"device_ids has {bad!r}; a device id is a whole number of at least 0")
    return tuple(int(i) for i in listed)


def _check_ids(ids: tuple[int, ...] | None, size: int, mesh: str) -> None:
    if ids is None:
        return
    if len(ids) != size:
        raise MeshError(f"mesh {mesh} has {size} devices, but device_ids lists {len(ids)}; list one id per device")
    if len(set(ids)) != size or min(ids, default=0) < 0:
        raise MeshError(f"device_ids {list(ids)[:16]} of mesh {mesh}: ids must be distinct and at least 0")

"""Meshes: named axes, their sub-axes, and the devices at their coordinates.

A device's *position* is its row-major number in the mesh, first axis major. On <x=4, y=2>, position 5 is x=2, y=1.
A sub-axis `x:(2)2` is the factor of size 2 of axis `x` that follows a prefix of size 2. Two devices that are
neighbours along it are `stride` positions apart, here 2, and the device at position i has coordinate
i // stride % size along it: 0 for position 5.

Rules, bounds and routes work on such (stride, size) pairs, so a mesh of 2^20 devices costs as little as one of 8.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, cast

from reshard.errors import MeshError, NotationError, did_you_mean, quoted
from reshard.types.whole import MOST, MOST_DEVICES, count_items, primes, read_items, whole, written

AXIS_NAME = r"[A-Za-z_][A-Za-z0-9_.\-]*"
_AXIS = re.compile(rf"\s*['\"]?({AXIS_NAME})['\"]?\s*[=:]\s*(-?\d+)\s*")
_SUB_AXIS = re.compile(rf"\s*({AXIS_NAME})\s*(?::\s*\((\d+)\)\s*(\d+)\s*)?")


class SubAxis(NamedTuple):
    """The factor of size `size` of a mesh axis that follows a prefix of size `pre`; a whole axis has `pre` 1."""

    axis: str
    pre: int
    size: int


MeshLike = Any
"""What says a mesh: a `Mesh`, a dict of names and sizes, text such as `x=4,y=2`, a jax mesh or torch's DeviceMesh."""


class Mesh:
    """Devices on named axes.

    `device_ids[i]` is the device at position `i`. By default, devices are numbered by position.
    The axes are names and sizes, the text of them, or sizes and then names, as in `jax.make_mesh`; or those of a jax
    mesh or of torch's DeviceMesh, which also bring their device ids.
    Raises `MeshError` for a bad name or size, and for ids that are not distinct.

    >>> mesh = Mesh(x=4, y=2)
    >>> mesh.size, str(mesh), mesh.sub_axis("x:(2)2")
    (8, '<x=4, y=2>', SubAxis(axis='x', pre=2, size=2))
    >>> mesh == Mesh("x=4,y=2") == Mesh((4, 2), ("x", "y")) == Mesh({"x": 4, "y": 2})
    True
    """

    __slots__ = ("__dict__", "axes", "device_ids")
    axes: Mapping[str, int]
    device_ids: tuple[int, ...] | None

    def __init__(
        self,
        axes: MeshLike | Iterable[tuple[str, int]] | None = None,
        /,
        device_ids: Sequence[int] | None = None,
        **named: int,
    ) -> None:
        given, device_ids = _read_mesh_axes(axes, device_ids)
        pairs: list[tuple[str, int]] = []
        for name, size in (*given, *named.items()):
            if not isinstance(name, str) or not re.fullmatch(AXIS_NAME, name):
                raise MeshError(
                    f"bad axis name {quoted(name)}: use a letter or _, then letters, digits, '_', '.' or '-'"
                )
            checked = whole(size, 1)
            if checked is None:
                listed = "; give Mesh((4, 2), ('x', 'y')) or Mesh(x=4, y=2)" if isinstance(size, Sized) else ""
                raise MeshError(
                    f"axis {quoted(name)} has size {quoted(size)}: a size is a whole number of at least 1{listed}"
                )
            pairs.append((name, checked))
        object.__setattr__(self, "axes", dict(pairs))
        if len(self.axes) != len(pairs):
            raise MeshError(f"mesh {quoted(pairs)}: an axis name occurs twice; give every axis its own name")
        if self.size > MOST:
            raise MeshError(f"mesh {quoted(pairs)} has {quoted(self.size)} devices; at most {MOST} have numbers")
        object.__setattr__(self, "device_ids", None if device_ids is None else self._checked_ids(device_ids))

    def _checked_ids(self, device_ids: object) -> tuple[int, ...] | None:
        """The ids of the devices, None for those that devices have by their positions: equal meshes compare equal."""
        size, mesh, sized = self.size, quoted(str(self)), isinstance(device_ids, Sized)
        count = count_items(device_ids) if isinstance(device_ids, Sized) else None
        iterable = isinstance(device_ids, Iterable) and not isinstance(device_ids, str | bytes)
        if not iterable or (sized and count is None):
            raise MeshError(
                f"device_ids {quoted(cast('object', device_ids))}: give a list of one id per device, or None"
            )
        if size > MOST_DEVICES:
            raise MeshError(
                f"mesh {mesh} has {size} devices, too many to list ids of; at most {MOST_DEVICES} are listed"
            )
        # The number of ids is checked before any of them is read.
        given = cast("Iterable[object]", device_ids)
        read = list(itertools.islice(given, size + 1)) if count in (None, size) else []
        if (count or len(read)) != size:
            number = count if count is not None else f"{len(read)} or more"
            raise MeshError(f"mesh {mesh} has {size} devices, but device_ids lists {number}; list one id per device")
        read = [getattr(device, "id", device) for device in read] if hasattr(read[0], "id") else read
        # Ints of Python are checked all at once: one by one, 2^24 of them take ten seconds instead of two.
        if set(map(type, read)) != {int} or max(cast("list[int]", read)) > MOST:
            bad = [each for each in read if whole(each) is None and whole(each, -MOST, -1) is None]
            if bad:
                raise MeshError(f"device_ids has {quoted(bad[0])}; a device id is a whole number of at least 0")
            read = [int(cast("int", each)) for each in read]
        ids = tuple(cast("list[int]", read))
        if len(set(ids)) != size or min(ids) < 0:
            raise MeshError(f"device_ids {quoted(list(ids[:16]))} of mesh {mesh}: ids must be distinct and at least 0")
        return None if max(ids) == size - 1 and ids == tuple(range(size)) else ids

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Mesh is immutable; build a new one instead of setting {name!r}")

    def __reduce__(self) -> tuple[type[Mesh], tuple[tuple[tuple[str, int], ...], tuple[int, ...] | None]]:
        return Mesh, self._key

    @classmethod
    def parse(cls, text: str, device_ids: Sequence[int] | None = None) -> Mesh:
        """Reads `x=4,y=2` (or `<x=4, y=2>`), or `x=4,y=2@8` for devices numbered from 8 on.

        >>> Mesh.parse("x=4,y=2") == Mesh(x=4, y=2), Mesh.parse("z=4@8").devices
        (True, (8, 9, 10, 11))
        """
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise NotationError(f"mesh {quoted(text)} is not text; write axes as name=size, e.g. x=4,y=2")
        body, at, first = text.partition("@")
        if at:
            first = first.strip()
            if device_ids is not None:
                raise MeshError(f"mesh {quoted(text)} numbers its devices from {first}; leave device_ids out")
            mesh = cls.parse(body)
            start = written(first) if first.isdecimal() and first.isascii() else None
            if start is None or start + mesh.size > MOST or mesh.size > MOST_DEVICES:
                raise MeshError(
                    f"mesh {quoted(text)}: after @ comes the number of the first device, such as 8 in z=4@8; at most "
                    f"{MOST_DEVICES} devices are numbered so"
                )
            return cls(mesh.axes, device_ids=range(start, start + mesh.size))
        body = body.strip()
        # As meshes print themselves, and as Python writes a dict.
        for brackets in ("<>", "{}"):
            body = body[1:-1] if body[:1] + body[-1:] == brackets else body
        pairs: list[tuple[str, int]] = []
        for part in filter(None, (p.strip() for p in body.split(","))):
            match = _AXIS.fullmatch(part)
            if match is None:
                raise NotationError(
                    f"mesh {quoted(text)}: cannot read {quoted(part)}; write axes as name=size, e.g. x=4,y=2"
                )
            # The size of an axis that text gives, with its sign.
            size = written(match[2].removeprefix("-"))
            if size is None:
                raise MeshError(
                    f"axis {quoted(match[1])} has a size of {len(match[2])} digits; at most {MOST} devices have numbers"
                )
            pairs.append((match[1], (-size if match[2].startswith("-") else size)))
        return cls(pairs, device_ids=device_ids)

    def to_dict(self) -> dict[str, Any]:
        """The mesh as plain data of JSON, which `from_dict` reads back."""
        ids = {} if self.device_ids is None else {"device_ids": list(self.device_ids)}
        return {"axes": dict(self.axes), **ids}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Mesh:
        """Reads the plain data of `to_dict`; raises `MeshError` for other data."""
        given = isinstance(data, Mapping)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not given or not isinstance(data.get("axes"), Mapping):
            raise MeshError(f"{quoted(data)} is not a mesh as plain data; give {{'axes': {{'x': 4}}}}, as to_dict does")
        return cls(data["axes"], device_ids=data.get("device_ids"))

    @property
    def shape(self) -> Mapping[str, int]:
        """The size of each axis by name, as jax meshes say it: `axes`."""
        return self.axes

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes, as jax meshes say them."""
        return tuple(self.axes)

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
        if self.device_ids is None and self.size > MOST_DEVICES:
            raise MeshError(f"mesh {self} has {self.size} devices, too many to list; at most {MOST_DEVICES} are")
        return self.device_ids or tuple(range(self.size))

    def position(self, device: int) -> int:
        """The position of a device id; raises `MeshError` if the mesh does not have the device.

        >>> Mesh({"x": 2}, device_ids=[7, 3]).position(3)
        1
        """
        if self.device_ids is None:
            position = whole(device, 0, self.size - 1)
        else:
            position = None if whole(device) is None else self.positions.get(device)
        if position is None:
            raise MeshError(f"device {quoted(device)} is not in mesh {self} of {self.size} devices")
        return position

    @cached_property
    def positions(self) -> Mapping[int, int]:
        """The position of each device id."""
        return {device: at for at, device in enumerate(self.devices)}

    def sub_axis(self, text: str) -> SubAxis:
        """Reads `x` or `x:(2)2`; raises `MeshError` if the mesh does not have the axis or the factor.

        >>> Mesh(x=4, y=2).sub_axis("x:(2)2")
        SubAxis(axis='x', pre=2, size=2)
        """
        match = _SUB_AXIS.fullmatch(text) if isinstance(text, str) else None  # pyright: ignore
        if match is None:
            raise NotationError(f"cannot read axis {quoted(text)}; write x, or x:(pre)size for a sub-axis of x")
        axis = match[1]
        self._require(axis)
        if match[2] is None:
            return SubAxis(axis, 1, self.axes[axis])
        pre, size = written(match[2]), written(match[3])
        if pre is None or size is None:
            raise MeshError(f"sub-axis {quoted(text)}: its numbers are above {MOST}; give factors of the axis")
        return self.checked(SubAxis(axis, pre, size))

    def checked(self, sub: SubAxis) -> SubAxis:
        """Returns the sub-axis; raises `MeshError` if the mesh does not have it."""
        if not isinstance(sub, SubAxis):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MeshError(f"{quoted(sub)} is not a sub-axis; give a SubAxis, such as mesh.sub_axis('x')")
        self._require(sub.axis)
        size = self.axes[sub.axis]
        if whole(sub.pre) is None or whole(sub.size) is None:
            raise MeshError(
                f"{quoted(sub)} of mesh {self}: prefix and size are ints of at least 1, factors of the axis"
            )
        if sub.pre < 1 or sub.size < 1 or size % (sub.pre * sub.size):
            raise MeshError(
                f"sub-axis {self.spell(sub)}: {sub.pre} x {sub.size} does not divide axis {sub.axis!r} of "
                f"size {size} in mesh {self}; prefix and size must be factors of the axis"
            )
        return sub

    def _require(self, axis: str) -> None:
        if not isinstance(axis, str) or axis not in self.axes:  # pyright: ignore[reportUnnecessaryIsInstance]
            known = ", ".join(self.axes) or "(none)"
            raise MeshError(f"unknown axis {quoted(axis)}: mesh {self} has axes {known}{did_you_mean(axis, self.axes)}")

    def spell(self, sub: SubAxis) -> str:
        """The text of a sub-axis: `x` for a whole axis, else `x:(pre)size`."""
        if not isinstance(sub, SubAxis):  # pyright: ignore[reportUnnecessaryIsInstance]
            self.checked(sub)
        if sub.pre == 1 and sub.size == self.axes.get(sub.axis):
            return sub.axis
        return f"{sub.axis}:({sub.pre}){sub.size}"

    def stride(self, sub: SubAxis) -> int:
        """How many positions apart neighbours along a sub-axis are.

        >>> mesh = Mesh(x=4, y=2)
        >>> mesh.stride(mesh.sub_axis("x")), mesh.stride(mesh.sub_axis("x:(1)2"))
        (2, 4)
        """
        try:
            return self._strides[sub.axis] * (self.axes[sub.axis] // (sub.pre * sub.size))
        except (AttributeError, KeyError, TypeError, ZeroDivisionError):
            self.checked(sub)  # Says what is wrong with it. Checked first, the call would take three times as long.
            raise

    def span(self, sub: SubAxis) -> tuple[int, int]:
        """The range of positions that a sub-axis covers: its stride, and its stride times its size.

        >>> mesh = Mesh(x=4, y=2)
        >>> mesh.span(mesh.sub_axis("x")), mesh.span(mesh.sub_axis("x:(2)2")), mesh.span(mesh.sub_axis("y"))
        ((2, 8), (2, 4), (1, 2))
        """
        stride = self.stride(sub)
        return stride, stride * sub.size

    def coordinate(self, position: int, axis: SubAxis) -> int:
        """The coordinate along a sub-axis of the device at a position: which value of its digit the device holds.

        >>> mesh = Mesh(x=4, y=2)
        >>> mesh.coordinate(5, mesh.sub_axis("x")), mesh.coordinate(5, mesh.sub_axis("x:(2)2"))
        (2, 0)
        """
        try:
            return position // self.stride(axis) % axis.size
        except TypeError:
            raise MeshError(f"position {quoted(position)}: give a whole number below {self.size}") from None

    def coordinates(self, position: int, axes: Iterable[SubAxis]) -> tuple[int, ...]:
        """The coordinates of the device at a position along each of these sub-axes."""
        try:
            return tuple([self.coordinate(position, axis) for axis in axes])
        except TypeError:  # Such as an array without dims, which is iterable by its type.
            raise MeshError(f"axes {quoted(axes)}: give a list of sub-axes") from None

    def sub_axes(self, stride: int, size: int) -> list[SubAxis]:
        """The sub-axes, major first, whose product is the factor (stride, size) of the positions.

        >>> Mesh(x=4, y=2).sub_axes(1, 4)
        [SubAxis(axis='x', pre=2, size=2), SubAxis(axis='y', pre=1, size=2)]
        """
        if whole(stride, 1) is None or whole(size) is None:
            raise MeshError(f"positions {quoted(stride)} x {quoted(size)}: give a stride and a size of at least 1")
        factors: list[SubAxis] = []
        for name, axis_size in self.axes.items():
            below = self._strides[name]
            low, high = max(stride, below), min(stride * size, below * axis_size)
            if low >= high:
                continue
            if high % low or low % below or (below * axis_size) % high:
                raise MeshError(f"positions {stride} x {size} are not a product of sub-axes of mesh {self}")
            factors.append(SubAxis(name, below * axis_size // high, high // low))
        return factors

    def axis_at(self, stride: int) -> str:
        """The axis that has a sub-axis of this stride."""
        for name, below in self._strides.items() if whole(stride) is not None else ():
            if below <= stride < below * self.axes[name]:
                return name
        raise MeshError(f"no axis of mesh {self} has neighbours that are {quoted(stride)} positions apart")

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


def _read_mesh_axes(source: Any, device_ids: Any) -> tuple[Iterable[tuple[Any, Any]], Any]:
    """The names and sizes of whatever says the axes of a mesh, and the ids of its devices, None for their positions."""
    if isinstance(source, str):
        source = Mesh.parse(source, device_ids)
        device_ids = None
    own: Any = None
    if isinstance(source, Mesh):
        source, own = source.axes, source.device_ids
    elif hasattr(source, "axis_names"):
        # An `AbstractMesh` has no devices.
        if type(source).__name__ == "Mesh" and hasattr(source, "devices"):
            own = [device.id for device in source.devices.flat]
        source = [(str(name), int(size)) for name, size in source.shape.items()]
    elif hasattr(source, "mesh_dim_names"):  # torch's
        names = source.mesh_dim_names or [f"d{at}" for at in range(source.mesh.ndim)]
        source, own = list(zip(names, source.mesh.shape, strict=True)), source.mesh.flatten().tolist()
    names = cast("list[Any]", device_ids if isinstance(device_ids, list | tuple) else [])
    sizes: Any = getattr(source, "shape", source)
    if {*map(type, names)} == {str} and isinstance(sizes, list | tuple) and len(cast("list[Any]", sizes)) == len(names):
        if hasattr(source, "flat"):  # An array of devices, or of their numbers, as of jax.sharding.Mesh.
            own = [getattr(device, "id", device) for device in source.flat]
        source, device_ids = list(zip(names, cast("list[Any]", sizes), strict=True)), None
    given = read_items(cast("Any", source).items() if isinstance(source, Mapping) else () if source is None else source)
    if given is None or not all(isinstance(pair, tuple) and len(cast("Any", pair)) == 2 for pair in given):
        shown = cast("object", source) if given is None else list(given)
        raise MeshError(
            f"mesh axes {quoted(shown)}: give a dict of name to size, (name, size) pairs, or sizes and names, as in "
            f"Mesh((4, 2), ('x', 'y'))"
        )
    return given, own if device_ids is None else cast("Any", device_ids)


def merged_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of positions, minor first, with those merged that overlap or do not divide each other.

    >>> merged_spans([(4, 8), (1, 2), (2, 8)]), merged_spans([(2, 12), (3, 6)])
    ([(1, 2), (2, 8)], [(1, 12)])
    """
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        while merged and low % merged[-1][1]:
            below, above = merged.pop()
            low, high = math.gcd(low, below), math.lcm(high, above)
        merged.append((low, high))
    return merged


def is_chain(cuts: Sequence[int]) -> bool:
    """Whether ascending cuts are the place values of one numeral: each divides the next.

    >>> is_chain([1, 2, 8]), is_chain([1, 2, 3])
    (True, False)
    """
    return all(low > 0 and high % low == 0 for low, high in pairwise(cuts))


def places(stride: int, size: int) -> Iterator[tuple[int, int]]:
    """Splits a (stride, size) factor of the positions into (stride, prime) factors, major first.

    >>> list(places(2, 6))
    [(6, 2), (2, 3)]
    """
    for prime in primes(size):
        size //= prime
        yield stride * size, prime


def prime_places(mesh: Mesh, axis: SubAxis) -> Iterator[tuple[int, int]]:
    """The (stride, prime) factors of the positions whose product is a sub-axis, major first."""
    return places(mesh.stride(axis), axis.size)

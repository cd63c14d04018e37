"""Where a device is on the mesh, and which others a collective is among, as `jax.lax` is told."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.groups import Groups

Array = jax.Array


class Place:
    """The mesh as a collective sees it, and where on it this device is."""

    def __init__(self, devices: Sequence[int], axes: Mapping[str, int]) -> None:
        self.devices = devices
        self.axes = {name: size for name, size in axes.items() if size > 1}
        self.names = tuple(self.axes)
        self.positions = {device: at for at, device in enumerate(devices)}
        self._here: Array | None = None

    @property
    def here(self) -> Array:
        """This device's position."""
        if self._here is None:
            self._here = lax.axis_index(self.names)
        return self._here

    def after(self, done: Array) -> Array:
        """What is done, before anything that asks where this device is: without it XLA starts all rounds of an
        exchange at once, and holds all their messages.
        """
        done, self._here = lax.optimization_barrier((done, self.here))
        return done

    def look_up(self, values: Sequence[int] | np.ndarray[Any, Any], turn: Array | None = None) -> Array:
        """This device's entry of a table with one per position, or one per turn and position; a constant where all
        are equal.
        """
        table = np.asarray(values, np.int32)
        if (table == table.flat[0]).all():
            return jnp.asarray(table.flat[0])
        found = jnp.asarray(table)
        return found[self.here] if turn is None else found[turn, self.here]

    def by_device(self, values: Mapping[int, int]) -> Array:
        """This device's entry of a table by device id."""
        return self.look_up([values[device] for device in self.devices])

    def flag(self, devices: Iterable[int]) -> Array:
        """Whether this device is one of these."""
        there = set(devices)
        return self.look_up([int(device in there) for device in self.devices]) != 0

    def group(self, groups: Groups) -> dict[str, Any]:
        """The arguments that say which devices a collective is among, and in which order."""
        listed = tuple(tuple(self.positions[device] for device in group) for group in groups)
        names = _whole_axes(listed, tuple(self.axes.items()))
        if names is not None:
            return {"axis_name": names}
        return {"axis_name": self.names, "axis_index_groups": listed}

    def permute(self, tile: Array, pairs: Sequence[tuple[int, int]]) -> Array:
        """Whole arrays from sender to receiver."""
        return lax.ppermute(tile, self.names, [(self.positions[a], self.positions[b]) for a, b in pairs])


@lru_cache(maxsize=1024)
def _whole_axes(groups: Groups, axes: tuple[tuple[str, int], ...]) -> tuple[str, ...] | None:
    """The axes, major to minor, along which these are the groups; None if they are along parts of axes.

    >>> _whole_axes(((0, 2), (1, 3)), (("x", 2), ("y", 2)))
    ('x',)
    """
    size = len(groups[0])
    strides = {name: math.prod(s for _, s in axes[at + 1 :]) for at, (name, _) in enumerate(axes)}
    sizes = dict(axes)
    chosen: list[str] = []
    below = 1
    while below < size:  # Each turn finds the axis that the next more major place of the group runs along.
        step = groups[0][below] - groups[0][0]
        name = next((n for n, stride in strides.items() if stride == step and n not in chosen), None)
        if name is None or size % (below * sizes[name]):
            return None
        chosen.insert(0, name)
        below *= sizes[name]
    offsets = [0]
    for name in chosen:
        offsets = [at + strides[name] * value for at in offsets for value in range(sizes[name])]
    same = all(group == tuple(group[0] + offset for offset in offsets) for group in groups)
    return tuple(chosen) if same else None

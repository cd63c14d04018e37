"""Elements on devices, as numbers that can be compared: equal numbers are the same element of the same array.

An element is named by where it was before a chain: a leaf, a device and a place in that device's tile. Devices that
have copies of a tile count as one, so an element has one number, whichever copy it was taken from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reshard.doctor.chain_reader import LeafOrigin
from reshard.doctor.dataflow.index_maps import Mask
from reshard.doctor.dataflow.scalars import Numbers
from reshard.doctor.dataflow.trace import NOWHERE, Origins


class HeldElements(NamedTuple):
    """Elements that devices hold: the device of each, and where the element was before the chain."""

    device: Numbers
    origins: Origins

    @property
    def known(self) -> HeldElements:
        """Those that are not padding."""
        kept = self.origins.leaf != NOWHERE
        return HeldElements(self.device[kept], Origins(*(part[kept] for part in self.origins)))


def find_device_groups(devices: int, held: Sequence[HeldElements]) -> Numbers:
    """The group of each device, named by its first device: those that have elements of each other, or of a third.

    >>> nothing = np.zeros(2, np.int64)
    >>> find_device_groups(4, [HeldElements(np.array([0, 3]), Origins(nothing, np.array([2, 1]), nothing))]).tolist()
    [0, 1, 0, 1]
    """
    pairs = np.unique(np.concatenate([each.device * devices + each.origins.device for each in held]))
    one, other = np.divmod(pairs, devices)
    groups, before = np.arange(devices), None
    while before is None or (groups != before).any():  # ends: numbers only fall
        before = groups.copy()
        np.minimum.at(groups, one, before[other])
        np.minimum.at(groups, other, before[one])
    return groups


class ElementKeys:
    """Numbers for elements; `leaves` says what is known of the leaves, by their numbers."""

    def __init__(self, devices: int, leaves: Mapping[int, LeafOrigin], held: Sequence[HeldElements]) -> None:
        self.devices = devices
        self._leaves = np.unique(np.concatenate([each.origins.leaf for each in held]))
        self._span = 1 + max((int(each.origins.place.max()) for each in held if each.device.size), default=0)
        firsts = [leaves[leaf].firsts if leaf in leaves else np.arange(devices) for leaf in self._leaves.tolist()]
        self._firsts = np.array(firsts)

    def of(self, held: HeldElements) -> Numbers:
        """The number of each element."""
        leaf = np.searchsorted(self._leaves, held.origins.leaf)
        device = self._firsts[leaf, held.origins.device]
        return (leaf * self.devices + device) * (self._span + 1) + held.origins.place + 1

    def leaf(self, keys: Numbers) -> Numbers:
        """The leaf of each element."""
        return self._leaves[keys // (self._span + 1) // self.devices]

    def had(self, keys: Numbers, device: Numbers) -> Mask:
        """Whether devices had elements before the chain."""
        leaf, source = np.divmod(keys // (self._span + 1), self.devices)
        return self._firsts[leaf, device] == source

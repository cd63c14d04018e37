"""Finds the arrays that a chain rebuilds: every device comes to have all of one, and uses a part.

This is the one definition of *rebuilt*, for the doctor and for strict mode. It is decided by data flow: every element
that a device uses of a chain's results is traced back to where it was before the chain, and so is every element of the
arrays that the chain makes on the way.

    %p = f32[2,8]  the tile of one of 4 devices    it has    2 rows
    %g = f32[8,8]  all-gather(%p)                  it holds  8 rows, whatever any device uses
    %d = f32[8,2]  dynamic-slice(%g, 0, 2 id)      it uses   2 columns: %g is rebuilt

An array is rebuilt if each device holds whatever *any* device uses, and none uses all of that or had it before. So an
array is not rebuilt if arithmetic, a loop or the program's result uses the whole of it; if all devices use the same
part, as when padding is cut off; or if some device uses everything, as the last one does in a cumsum.

Small arrays are compared element by element. Of large ones, only the results of collectives are compared, at sampled
places, and are not rebuilt if devices use as many elements.

Elements are numbers that can be compared: a leaf of the chain, a device and a place in that device's tile. Devices that
have copies of a tile count as one, so an element has one number, whichever copy it was taken from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from reshard.doctor.chain_reader import Chain, LeafOrigin
from reshard.doctor.dataflow.flow import HloValue, Numbering
from reshard.doctor.dataflow.index_maps import COLLECTIVES, IndexMaps, Mask, Untraceable
from reshard.doctor.dataflow.scalars import Numbers
from reshard.doctor.dataflow.trace import NOWHERE, Origins, Tracer, count_value_elements, points_at
from reshard.hlo import Array

WHOLE, GROUP = "whole", "group"
_EXACT = 1 << 15  # elements, over all devices, that are compared one by one
_BITS = 1 << 24  # devices times elements in the tables for that, of which some are left out of larger ones
_SAMPLED = 256  # places of each array that are compared if there are more
_LARGEST = 16  # arrays of a chain that are compared: a simulation may pass on hundreds of halos


class Rebuilt(NamedTuple):
    """An array that is rebuilt: the `whole` on every device, or all that a `group` of devices has of it.

    `leaf` is the number of the value that it comes from.
    """

    extent: str
    array: Array
    leaf: int


def find_rebuilt(
    chain: Chain, stored: Iterable[HloValue], maps: IndexMaps, numbering: Numbering, leaves: Mapping[int, LeafOrigin]
) -> Rebuilt | None:
    """The largest array that a chain rebuilds, whole ones first; None if it rebuilds none.

    `stored` are the values of the chain that are in memory; `leaves` says what is known of the arrays before it, by
    their numbers.
    """
    arrays = list(_Search(chain, maps, numbering, leaves).rebuilt(stored))
    return next((one for one in arrays if one.extent == WHOLE), next(iter(arrays), None))


class _Table(NamedTuple):
    """What each device uses, holds and had before, of all elements that any device uses: (device, element).

    `groups` has the group of each device.
    """

    groups: Numbers
    leaves: Numbers
    uses: Mask
    holds: Mask
    had: Mask

    def leaf(self, devices: Numbers) -> int | None:
        """A leaf that a group of devices has rebuilt entirely; None if there is none."""
        # Where the text does not say what is used, it may be any part of what is held.
        used = (self.uses if self.uses.any() else self.holds)[devices].any(axis=0)
        for leaf in np.unique(self.leaves[used]):
            here = used & (self.leaves == leaf)
            uses, holds, had = (part[devices][:, here].all(axis=1) for part in self[2:])
            if holds.all() and not (uses | had).any():
                return int(leaf)
        return None


class _Search:
    """Compares what the values of one chain hold with what is used of its results."""

    def __init__(self, chain: Chain, maps: IndexMaps, numbering: Numbering, leaves: Mapping[int, LeafOrigin]) -> None:
        self.chain = chain
        self.maps = maps
        self.numbering = numbering
        self.leaves = leaves
        self.devices = maps.scalars.devices
        forms = [form for value, used in chain.results.items() for form in used or (value,)]
        # Compilers repeat a slice in each fusion that uses it.
        self.forms = list({numbering.of(form): form for form in reversed(forms)}.values())

    def rebuilt(self, stored: Iterable[HloValue]) -> Iterator[Rebuilt]:
        """The rebuilt ones among the largest arrays, the largest first; those used as they are cannot be."""
        used = {self.numbering.of(form) for form in self.forms}
        arrays: dict[int, HloValue] = {}
        for value in stored:
            arrays.setdefault(self.numbering.of(value), value)
        unused = [value for number, value in arrays.items() if number not in used]
        devices = np.arange(self.devices)
        for value in sorted(unused, key=count_value_elements, reverse=True)[:_LARGEST]:
            try:
                found = self._compare(value)
            except Untraceable:
                continue
            if found is None or value.array is None:
                continue
            # What is rebuilt among all devices; else, in the first group of them that has rebuilt its part.
            whole = found.leaf(devices)
            if whole is not None:
                yield Rebuilt(WHOLE, value.array, whole)
                continue
            groups = (devices[found.groups == first] for first in np.unique(found.groups))
            leaf = next((leaf for group in groups if (leaf := found.leaf(group)) is not None), None)
            if leaf is not None:
                yield Rebuilt(GROUP, value.array, leaf)

    def _compare(self, value: HloValue) -> _Table | None:
        """What a value holds, compared with what is used of it; None if only padding is, or all of it may be."""
        uses = self._uses if count_value_elements(value) * self.devices <= _EXACT else None
        if uses is not None:
            compared = uses.known, self._held(value).known
        elif value.opcode not in COLLECTIVES or (compared := self._sample(value)) is None:
            return None  # The size of other values may count padding and repetition.
        uses, holds = compared
        keys = ElementKeys(self.devices, self.leaves, compared)
        elements = np.unique(keys.of(uses if uses.device.size else holds))
        elements = elements[:: 1 + elements.size * self.devices // _BITS]
        if not elements.size:
            return None
        tables = np.zeros((2, self.devices, elements.size), np.bool_)
        for table, each in zip(tables, compared, strict=True):
            numbers = keys.of(each)
            known = np.isin(numbers, elements)
            table[each.device[known], np.searchsorted(elements, numbers[known])] = True
        groups = find_device_groups(self.devices, compared)
        had = keys.had(elements, np.arange(self.devices)[:, np.newaxis])
        return _Table(groups, keys.leaf(elements), tables[0], tables[1], had)

    @cached_property
    def _uses(self) -> HeldElements | None:
        """Every element that is used; None if there are too many, or if the text does not say which."""
        if not self.forms or sum(map(count_value_elements, self.forms)) * self.devices > _EXACT:
            return None
        try:
            return join_held([self._held(form) for form in self.forms])
        except Untraceable:
            return None

    def _held(self, value: HloValue, places: Numbers | None = None, stop: HloValue | None = None) -> HeldElements:
        """The elements of a value on all devices, all or those at some places; traced to the leaves, or to `stop`."""
        ends = self.chain.leaves if stop is None else self.chain.leaves | {stop}
        points = points_at(value, self.devices, places)
        return HeldElements(points.device, Tracer(self.maps, self.numbering, ends)(value, points))

    def _sample(self, value: HloValue) -> tuple[HeldElements, HeldElements] | None:
        """What is used and held of a value at sampled places; None if devices may use all of it.

        Nothing is used if the text does not say what is.
        """
        number, used, is_said = self.numbering.of(value), 0, True
        through: list[Numbers] = []  # places of the value that the used ones come from
        uses: list[HeldElements] = []
        for form in self.forms:
            places = _sample_places(form)
            try:
                comes = self._held(form, places, stop=value).origins
            except Untraceable:  # The text does not say what the form uses: any place of the value may be used.
                is_said, used = False, used + count_value_elements(form)
                through.append(_sample_places(value))
                continue
            if (mine := comes.leaf == number).any():
                used += count_value_elements(form)
                through.append(comes.place[mine])
                uses.append(self._held(form, places).at(mine))
        if not through or used >= count_value_elements(value):
            return None
        places = np.unique(np.concatenate(through))
        try:
            holds = self._held(value, places)
        except Untraceable:  # Traced only to the operands of the value, where the text does not say more.
            points = points_at(value, self.devices, places)
            operands = frozenset(self.maps.flow.operands(value))
            holds = HeldElements(points.device, Tracer(self.maps, self.numbering, operands)(value, points))
        nothing = holds.at(np.zeros(holds.device.size, np.bool_))
        return join_held(uses if is_said else [nothing]).known, holds.known


def _sample_places(value: HloValue) -> Numbers:
    """Random places of a value, the same each time; all of them if they are few."""
    count = count_value_elements(value)
    return np.arange(count) if count <= _SAMPLED else np.random.default_rng(0).integers(0, count, _SAMPLED)


class HeldElements(NamedTuple):
    """Elements that devices hold: the device of each, and where the element was before the chain."""

    device: Numbers
    origins: Origins

    @property
    def known(self) -> HeldElements:
        """Those that are not padding."""
        return self.at(self.origins.leaf != NOWHERE)

    def at(self, mask: Mask) -> HeldElements:
        """Those for which the mask is true."""
        return HeldElements(self.device[mask], Origins(*(part[mask] for part in self.origins)))


def join_held(held: Sequence[HeldElements]) -> HeldElements:
    """All elements of several lists."""
    origins = (np.concatenate(parts) for parts in zip(*(each.origins for each in held), strict=True))
    return HeldElements(np.concatenate([each.device for each in held]), Origins(*origins))


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

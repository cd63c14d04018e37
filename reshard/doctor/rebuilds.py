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

Small arrays are compared element by element, and the results of collectives, if large, on a sample: they are rebuilt if
the used places have the same element on every device, devices use different ones, and no device uses as many elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from reshard.doctor.chain_reader import Chain, LeafOrigin
from reshard.doctor.dataflow.flow import HloValue, Numbering
from reshard.doctor.dataflow.index_maps import COLLECTIVES, IndexMaps, Mask, Untraceable
from reshard.doctor.dataflow.scalars import Numbers
from reshard.doctor.dataflow.trace import Origins, Tracer, points_at
from reshard.doctor.elements import ElementKeys, HeldElements, find_device_groups
from reshard.hlo import Array

WHOLE, GROUP = "whole", "group"
_EXACT = 1 << 15  # elements, over all devices, that are compared one by one
_BITS = 1 << 24  # devices times elements in the tables for that
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
    chain: Chain,
    stored: Iterable[HloValue],
    maps: IndexMaps,
    numbering: Numbering,
    leaves: Mapping[int, LeafOrigin],
) -> Rebuilt | None:
    """The largest array that a chain rebuilds, whole ones first; None if it rebuilds none.

    `stored` are the values of the chain that are in memory; `leaves` says what is known of the arrays before it, by
    their numbers.
    """
    arrays = list(_Search(chain, maps, numbering, leaves).rebuilt(stored))
    return next((one for one in arrays if one.extent == WHOLE), next(iter(arrays), None))


class _Comparison(Protocol):
    """What an array holds, compared with what is used of it; `groups` has the group of each device."""

    @property
    def groups(self) -> Numbers: ...

    def leaf(self, devices: Numbers) -> int | None:
        """A leaf that a group of devices has rebuilt entirely; None if there is none."""
        ...


class _Table(NamedTuple):
    """What each device uses, holds and had before, of all elements that any device uses: (device, element)."""

    groups: Numbers
    leaves: Numbers
    uses: Mask
    holds: Mask
    had: Mask

    def leaf(self, devices: Numbers) -> int | None:
        used = self.uses[devices].any(axis=0)
        for leaf in np.unique(self.leaves[used]):
            here = used & (self.leaves == leaf)
            uses, holds, had = (part[devices][:, here].all(axis=1) for part in self[2:])
            if holds.all() and not (uses | had).any():
                return int(leaf)
        return None


class _Sample(NamedTuple):
    """The elements that an array holds at places that are used, and those that devices use: (device, place).

    `uses` is None if the text does not say which are used.
    """

    groups: Numbers
    leaves: Numbers
    holds: Numbers
    had: Mask
    uses: Numbers | None

    def leaf(self, devices: Numbers) -> int | None:
        same = (self.holds[devices] == self.holds[devices[0]]).all()
        differ = self.uses is None or (self.uses[devices] != self.uses[devices[0]]).any()
        had = self.had[devices].all(axis=1).any()
        return int(self.leaves[0]) if same and differ and not had else None


class _Way(NamedTuple):
    """How elements of a value come to be used: by a form, at its `places`, which are `through` places of the value.

    `places` is None if the text does not say what the form uses; then any place of the value may be used.
    """

    form: HloValue
    places: Numbers | None
    through: Numbers


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
        for value in sorted(unused, key=_count_elements, reverse=True)[:_LARGEST]:
            try:
                comparison = self._comparison(value)
            except Untraceable:
                continue
            if comparison is not None and value.array is not None:
                yield from _list_extents(comparison, value.array)

    def _comparison(self, value: HloValue) -> _Comparison | None:
        uses = self._uses if _count_elements(value) * self.devices <= _EXACT else None
        if uses is not None and uses.device.size * self.devices <= _BITS:
            return self._compare_all(uses, self._held(value))
        if value.opcode not in COLLECTIVES:  # Its size may count padding and repetition: see below.
            return None
        return self._compare_sample(value, list(self._ways(value)))

    @cached_property
    def _uses(self) -> HeldElements | None:
        """Every element that is used; None if there are too many, or if the text does not say which."""
        if not self.forms or sum(map(_count_elements, self.forms)) * self.devices > _EXACT:
            return None
        try:
            held = [self._held(form) for form in self.forms]
            origins = (np.concatenate(parts) for parts in zip(*(each.origins for each in held), strict=True))
            return HeldElements(np.concatenate([each.device for each in held]), Origins(*origins))
        except Untraceable:
            return None

    def _held(self, value: HloValue, places: Numbers | None = None, stop: HloValue | None = None) -> HeldElements:
        """The elements of a value on all devices, all or those at some places; traced to the leaves, or to `stop`."""
        ends = self.chain.leaves if stop is None else self.chain.leaves | {stop}
        points = points_at(value, self.devices, places)
        return HeldElements(points.device, Tracer(self.maps, self.numbering, ends)(value, points))

    def _held_here(self, value: HloValue, places: Numbers) -> HeldElements:
        """The same at some places; traced only to the operands of the value, if the text does not say more."""
        try:
            return self._held(value, places)
        except Untraceable:
            points = points_at(value, self.devices, places)
            operands = frozenset(self.maps.flow.operands(value))
            return HeldElements(points.device, Tracer(self.maps, self.numbering, operands)(value, points))

    def _compare_all(self, uses: HeldElements, holds: HeldElements) -> _Comparison | None:
        """Compares all elements that are used with all that a value holds; None if only padding is used."""
        uses, holds = uses.known, holds.known
        if not uses.device.size:
            return None
        groups = find_device_groups(self.devices, (uses, holds))
        keys = ElementKeys(self.devices, self.leaves, (uses, holds))
        elements, used = np.unique(keys.of(uses), return_inverse=True)
        held = keys.of(holds)
        known = np.isin(held, elements)
        return _Table(
            groups,
            keys.leaf(elements),
            self._table(elements.size, uses.device, used),
            self._table(elements.size, holds.device[known], np.searchsorted(elements, held[known])),
            keys.had(elements, self._column),
        )

    def _compare_sample(self, value: HloValue, ways: Sequence[_Way]) -> _Comparison | None:
        """Compares elements at some places; None if devices may use all of the value.

        The value is what a collective made: its size says how many elements it has only if no padding or repetition
        was added since.
        """
        used = sum(_count_elements(way.form) for way in ways)
        if not ways or used >= _count_elements(value):
            return None
        holds = self._held_here(value, np.unique(np.concatenate([way.through for way in ways])))
        uses = [self._held(way.form, way.places) for way in ways if way.places is not None]
        groups = find_device_groups(self.devices, [each.known for each in (holds, *uses)])
        keys = ElementKeys(self.devices, self.leaves, (holds, *uses))
        held, *each_used = (keys.of(each).reshape(self.devices, -1) for each in (holds, *uses))
        differing = np.concatenate(each_used, axis=1) if len(uses) == len(ways) else None
        return _Sample(groups, keys.leaf(held[0]), held, keys.had(held, self._column), differing)

    def _ways(self, value: HloValue) -> Iterator[_Way]:
        """How the elements of a value come to be used, at sampled places; only the forms that use any of them."""
        number = self.numbering.of(value)
        for form in self.forms:
            places = _sample_places(form)
            try:
                origins = self._held(form, places, stop=value).origins
            except Untraceable:
                yield _Way(form, None, _sample_places(value))
                continue
            through = origins.place[origins.leaf == number]
            if through.size:
                yield _Way(form, places, through)

    @property
    def _column(self) -> Numbers:
        return np.arange(self.devices)[:, np.newaxis]

    def _table(self, elements: int, device: Numbers, element: Numbers) -> Mask:
        table = np.zeros((self.devices, elements), np.bool_)
        table[device, element] = True
        return table


def _list_extents(comparison: _Comparison, array: Array) -> Iterator[Rebuilt]:
    """What is rebuilt among all devices; else, in a group of them."""
    devices = np.arange(comparison.groups.size)
    whole = comparison.leaf(devices)
    if whole is not None:
        yield Rebuilt(WHOLE, array, whole)
        return
    groups = [devices[comparison.groups == first] for first in np.unique(comparison.groups)]
    leaves = (leaf for group in groups if (leaf := comparison.leaf(group)) is not None)
    yield from (Rebuilt(GROUP, array, leaf) for leaf in islice(leaves, 1))


def _count_elements(value: HloValue) -> int:
    return 0 if value.array is None else value.array.elements


def _sample_places(value: HloValue) -> Numbers:
    """Random places of a value, the same each time; all of them if they are few."""
    count = _count_elements(value)
    return np.arange(count) if count <= _SAMPLED else np.random.default_rng(0).integers(0, count, _SAMPLED)

"""Whether a rewritten module takes every element from where the old one took it.

Each replaced value is followed back to the source, in the old module through XLA's chain and in the new one through
the fragment. All devices are followed: along every coordinate, at random points, and at all points of small arrays.
Both must come from the same place of the same device's tile, or of a device that surely has an equal tile. And both
must be rounded alike where dtypes change on the way.

The new value is followed from its users, fusions entered, so a tile that is passed to the wrong one is seen as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from reshard.doctor.checks.proofs import Key, Proofs, Signatures
from reshard.doctor.dataflow.conversions import Conversion, Unconvertible, conversion
from reshard.doctor.dataflow.flow import Flow, HloValue, Scope
from reshard.doctor.dataflow.fragment_maps import FragmentMaps
from reshard.doctor.dataflow.index_maps import IndexMaps, Points, Untraceable, unravel
from reshard.doctor.dataflow.numbering import Numbering
from reshard.doctor.dataflow.replicas import Replicas
from reshard.doctor.dataflow.scalars import Scalars
from reshard.doctor.dataflow.sums import Summands, same_sums, summands
from reshard.doctor.dataflow.trace import NOWHERE, Origins, Tracer
from reshard.doctor.infer_layouts import along
from reshard.doctor.replacements import Replacement, finished
from reshard.errors import SpliceError
from reshard.hlo import Module

_ALL = 1 << 16  # points of a value, over all devices, that are followed one by one
_RANDOM = 1 << 14  # points that are followed of larger ones


class Traced:
    """A module whose values can be followed, through spliced fragments too if it is `spliced`."""

    def __init__(self, module: Module, devices: int, spliced: bool = False) -> None:
        self.flow = Flow(module)
        scalars = Scalars(self.flow, devices)
        self.maps = FragmentMaps(self.flow, scalars) if spliced else IndexMaps(self.flow, scalars)
        self.numbering = Numbering(self.flow)
        self.devices = devices
        self._signatures: dict[HloValue, Signatures] = {}

    def region(self, name: str) -> Scope:
        """The region of that name."""
        return next(region for region in self.flow.regions if region.computation.name == name)

    def signature(self, value: HloValue, leaf: HloValue) -> bytes | None:
        """The digest of how a value is made of a leaf; see `Signatures`."""
        if leaf not in self._signatures:
            self._signatures[leaf] = Signatures(self.maps, self.numbering, leaf)
        return self._signatures[leaf].of(value)

    def origins(self, value: HloValue, leaf: HloValue, points: Points) -> Origins:
        """Where points of a value were in the leaf; raises `SpliceError` if they cannot be followed."""
        try:
            return Tracer(self.maps, self.numbering, frozenset({leaf}))(value, points)
        except Untraceable as error:
            raise SpliceError(f"{value.name}: its elements cannot be followed ({error})") from None

    def summands(self, value: HloValue, leaf: HloValue, points: Points) -> Summands:
        """The elements of the leaf that points of a value sum; raises `SpliceError` if they cannot be followed."""
        try:
            return summands(self.maps, self.numbering, value, leaf, points)
        except (Untraceable, Unconvertible) as error:
            raise SpliceError(f"{value.name}: its summands cannot be followed ({error})") from None

    def conversion(self, value: HloValue, leaf: HloValue) -> Conversion:
        """The conversions between the leaf and a value; raises `SpliceError` if they differ between its elements."""
        try:
            return conversion(self.maps, value, leaf)
        except Unconvertible as error:
            raise SpliceError(f"{value.name}: {error}") from None


class Spliced(NamedTuple):
    """Both modules, the region of a splice, and the instructions there that took the place of others, by name.

    `proofs` are those known so far.
    """

    old: Traced
    new: Traced
    region: str
    stand_ins: Mapping[str, str]
    proofs: Proofs

    def source(self, name: str) -> HloValue:
        """What an instruction of the region yields in the new module, or what took its place."""
        return self.new.flow.origin(HloValue(self.new.region(self.region), self.stand_ins.get(name, name)))

    def key(self, pair: tuple[HloValue, HloValue], leaves: tuple[HloValue, HloValue]) -> Key | None:
        """The key of a proof that an old and a new value have the same elements; None if it cannot be kept."""
        before, after = self.old.signature(pair[0], leaves[0]), self.new.signature(pair[1], leaves[1])
        return None if before is None or after is None else (before, after, self.old.devices)


def check_equivalent(spliced: Spliced, replacement: Replacement, replicas: Replicas) -> None:
    """Raises `SpliceError` unless all users of a replaced value get the same elements as before."""
    old = spliced.old
    leaf = spliced.source(replacement.source)
    before = old.flow.operands(replacement.leaf)[0] if replacement.is_summed else replacement.leaf
    for value in replacement.values:
        for fresh in fresh_values(spliced, value):
            key = spliced.key((value, fresh), (before, leaf))
            if spliced.proofs.hold(key, before, replicas):
                continue
            check = _check_sums if replacement.is_summed else _check_moved
            check(spliced, (value, fresh), (before, leaf), replacement, replicas, key)


def _check_moved(
    spliced: Spliced,
    values: tuple[HloValue, HloValue],
    leaves: tuple[HloValue, HloValue],
    replacement: Replacement,
    replicas: Replicas,
    key: Key | None,
) -> None:
    """Checks that two values, the old and the fresh one, have the same elements, rounded alike."""
    old, new, (value, fresh), leaf = spliced.old, spliced.new, values, leaves[1]
    points = points_of(old.devices, replacement.after.dims)
    before, after = old.origins(value, replacement.leaf, points), new.origins(fresh, leaf, points)
    if (before.leaf == NOWHERE).any():
        raise SpliceError(f"{value.name}: some of its elements are padding")
    was, is_now = old.conversion(value, replacement.leaf), new.conversion(fresh, leaf)
    if was != is_now:
        raise SpliceError(f"{value.name}: {_spelled(was)} would become {_spelled(is_now)}")
    if (after.leaf != new.numbering.of(leaf)).any():
        raise SpliceError(f"{value.name}: some of its elements would not come from {replacement.source}")
    wrong = (after.place != before.place) | replicas.differ(replacement.leaf, after.device, before.device)
    if wrong.any():
        at = int(wrong.argmax())
        raise SpliceError(
            f"{value.name}: device {points.device[at]}, index {tuple(map(int, points.indices[:, at]))} would "
            f"come from place {after.place[at]} of device {after.device[at]}, not from place "
            f"{before.place[at]} of device {before.device[at]}"
        )
    spliced.proofs.add(key, after.device, before.device, old.devices)


def _check_sums(
    spliced: Spliced,
    values: tuple[HloValue, HloValue],
    leaves: tuple[HloValue, HloValue],
    replacement: Replacement,
    replicas: Replicas,
    key: Key | None,
) -> None:
    """Checks that two values, the old and the fresh one, are the same sums."""
    old, new, (value, fresh), (source, leaf) = spliced.old, spliced.new, values, leaves
    points = points_of(old.devices, replacement.after.dims)
    before, after = old.summands(value, source, points), new.summands(fresh, leaf, points)
    dtype, each = replacement.before.dtype, np.arange(old.devices)
    if same_sums(before, after, each, dtype):
        spliced.proofs.add(key, each, each, old.devices)
    elif not same_sums(before, after, replicas.of(source), dtype):
        raise SpliceError(f"{value.name}: its elements would be other sums, or added up in another order")


def fresh_values(spliced: Spliced, value: HloValue) -> list[HloValue]:
    """What users of an old value take in the new module, splices too, and what the region yields in its place.

    Raises `SpliceError` if nothing does.
    """
    taken = list(_fresh_values(spliced, value))
    if not taken:
        raise SpliceError(f"{value.name}: nothing takes what replaces it")
    return taken


def _fresh_values(spliced: Spliced, value: HloValue) -> Iterator[HloValue]:
    old, new, region = spliced.old, spliced.new, spliced.region
    outer = HloValue(value.scope, finished(value))
    while outer.scope.opened and outer.scope.computation.root is outer.instruction and outer.scope.caller is not None:
        outer = HloValue(outer.scope.caller.scope, outer.scope.caller.instruction.name)
    scope = _same_scope(old, new, outer.scope, region)
    if outer.name in spliced.stand_ins and not outer.scope.opened:
        yield spliced.source(outer.name)
    users = outer.scope.computation.users.get(outer.name, ())
    for user in users:
        twin = scope.computation.by_name.get(user.name)
        if twin is None:
            continue  # It is gone with the chain.
        yield from _taken(old, new, HloValue(outer.scope, user.name), HloValue(scope, twin.name), outer)
    root, fresh = outer.scope.computation.root, scope.computation.root
    if root is not None and root.name == outer.name and fresh is not None:
        yield new.flow.origin(HloValue(scope, fresh.name))


def _taken(old: Traced, new: Traced, user: HloValue, twin: HloValue, value: HloValue) -> Iterator[HloValue]:
    """The operands of a user's twin that stand where the user has the value."""
    before, after = user.instruction, twin.instruction
    if before.opcode not in ("fusion", "call"):
        for name, fresh in zip(before.operands, after.operands, strict=True):
            if name == value.name:
                yield new.flow.origin(HloValue(twin.scope, fresh))
        return
    inside, entered = old.flow.inner(user.scope, before), new.flow.inner(twin.scope, after)
    if inside is None or entered is None:
        raise SpliceError(f"{user.name}: what it calls is not known")
    for at, name in enumerate(before.operands):
        if name == value.name:
            yield from _taken_inside(old, new, inside, entered, at)


def _taken_inside(old: Traced, new: Traced, inside: Scope, entered: Scope, number: int) -> Iterator[HloValue]:
    """The operands, inside a fusion, that stand where the old ones had one of its parameters."""
    parameter = next(
        one for one in inside.computation.instructions
        if one.opcode == "parameter" and one.rest.partition(")")[0].strip() == str(number)
    )  # fmt: skip
    value = HloValue(inside, parameter.name)
    for user in inside.computation.users.get(parameter.name, ()):
        if user.name in entered.computation.by_name:
            yield from _taken(old, new, HloValue(inside, user.name), HloValue(entered, user.name), value)


def _same_scope(old: Traced, new: Traced, scope: Scope, region: str) -> Scope:
    """The scope of the new module that is entered in the same way."""
    if not scope.opened or scope.caller is None:
        return new.region(region)
    outer = _same_scope(old, new, scope.caller.scope, region)
    instruction = outer.computation.by_name.get(scope.caller.instruction.name)
    inner = None if instruction is None else new.flow.inner(outer, instruction)
    if inner is None:
        raise SpliceError(f"{scope.caller.instruction.name}: it is gone")
    return inner


def _spelled(one: Conversion) -> str:
    return " to ".join(dtype for dtype, _ in groupby(one))


def points_of(devices: int, dims: Sequence[int]) -> Points:
    """Points of an array on every device: all if they are few, else those along each coordinate and random ones."""
    sizes = (devices, *dims)
    total = math.prod(sizes)
    if total <= _ALL:
        every = unravel(np.arange(total), sizes)
        return Points(every[0], every[1:])
    lines = along(sizes)
    rows = np.random.default_rng(0).integers(0, np.array(sizes).reshape(-1, 1), (len(sizes), _RANDOM))
    coordinates = np.concatenate([np.vstack([lines.device, lines.indices]), rows], axis=1)
    return Points(coordinates[0], coordinates[1:])

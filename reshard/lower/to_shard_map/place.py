"""A device's place on the mesh, and the groups of a collective, in the terms of `jax.lax`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.groups import Groups
from reshard.types.whole import primes

Array = jax.Array
Done = TypeVar("Done", Array, list[Array])
Traced = TypeVar("Traced")
Pairs = Sequence[tuple[int, int]]
Table = np.ndarray[Any, Any]
LARGE = 256
"""From more entries on, a table is cut to what it depends on."""
WIDE = 64
"""From more entries on, a table is spelled in narrow integers."""


class PositionDigit(NamedTuple):
    """A digit of a position: `position // stride % radix`."""

    stride: int
    radix: int


class PositionTerm(NamedTuple):
    """What a digit of a position adds to an entry: `unit` times the number that it stands for, which is one of several
    of `bits` bits each, packed one after another; its own value if there are none."""

    digit: PositionDigit
    unit: int
    bits: int
    packed: int | None


class MeshPlace:
    """The mesh as a collective sees it, and this device's place on it, while the device's program is traced."""

    def __init__(
        self,
        devices: Sequence[int],
        axes: Mapping[str, int],
        constants: dict[bytes, Table] | None = None,
        platform: str | None = None,
    ) -> None:
        self.devices = devices
        self.platform = platform
        self.axes = {name: size for name, size in axes.items() if size > 1}
        self.names = tuple(self.axes)
        self.positions = {device: at for at, device in enumerate(devices)}
        self._here: Array | None = None
        self._entries: dict[bytes, tuple[Array, Array]] = {}
        self._constants = {} if constants is None else constants

    def anew(self) -> MeshPlace:
        """The same place for a loop or a branch, which must not use a position that was traced outside of it."""
        return MeshPlace(self.devices, self.axes, self._constants, self.platform)

    def by_platform(self, *tiles: Array, default: Callable[..., Traced], **forms: Callable[..., Traced]) -> Traced:
        """What `lax.platform_dependent` gives, which traces all forms; on a known platform one is enough."""
        if self.platform is None:
            return lax.platform_dependent(*tiles, default=default, **forms)
        return forms.get("cuda" if self.platform == "gpu" else self.platform, default)(*tiles)

    @property
    def here(self) -> Array:
        """This device's position."""
        if self._here is None:
            self._here = lax.axis_index(self.names) if self.names else jnp.zeros((), np.int32)
        return self._here

    def after(self, done: Done) -> Done:
        """Orders `done` before any later use of the device's position; returns `done`.

        Otherwise XLA starts all rounds of an exchange at once and keeps all their messages alive.
        """
        done, self._here = lax.optimization_barrier((done, self.here))
        return done

    def look_up(self, values: Sequence[int] | Table, turn: Array | int | None = None) -> Array:
        """This device's entry of a table by position, or by turn and position; a constant if all entries are equal.

        An entry that was read before is not read again, but ordered after what `after` was given since: the rounds of
        an exchange share most tables, which on many devices are most of the program's text.
        """
        table = np.asarray(values, np.int32)
        if isinstance(turn, int):
            return self.look_up(table[turn])
        if (table == table.flat[0]).all():
            return jnp.asarray(table.flat[0])
        if turn is not None:
            return self._read(table, turn.astype(np.int32))
        entry, since = self._entries.get(table.tobytes(), (None, None))
        if entry is None:
            computed = spell_table(table, tuple(self.axes.values()))
            entry = self._read(table[np.newaxis], np.int32(0)) if computed is None else self._compute(*computed)
        elif since is not self.here:
            entry, _ = lax.optimization_barrier((entry, self.here))
        self._entries[table.tobytes()] = entry, self.here
        return entry

    def _read(self, table: Table, turn: Array | np.int32) -> Array:
        """The entry of a table by turn and position for this device and a turn."""
        digits: tuple[PositionDigit, ...] = (PositionDigit(1, len(self.devices)),)
        if table.size > LARGE:
            # On 4,096 devices, the coordinate along an axis of 16 is a table of 16 entries.
            table, digits = narrow_table(table, tuple(self.axes.values()))
        units, unit = divide_table(table) if table.size > WIDE else (table, 1)
        # The table is one object for all loops and branches, so that a program's text has it once. It is a copy, since
        # jax spells a table with an axis of stride 0 as a broadcast of another constant.
        constant = self._constants.setdefault(repr((units.shape, units.dtype)).encode() + units.tobytes(), units.copy())
        entries = jnp.asarray(constant).astype(np.int32)
        number: Array | None = None
        for digit in digits:
            value = self._digit(digit)
            number = value if number is None else number * np.int32(digit.radix) + value
        entry = _read_element(entries, (turn, jnp.zeros((), np.int32) if number is None else number))
        return entry if unit == 1 else entry * np.int32(unit)

    def _compute(self, base: int, terms: Sequence[PositionTerm]) -> Array:
        """The entry of a table that is spelled as a sum: a TPU takes 1.2 us to read one from its memory."""
        entry = jnp.asarray(base, np.int32)
        for digit, unit, bits, packed in terms:
            number = self._digit(digit)
            if packed is not None:
                shift = (number * np.int32(bits)).astype(np.uint32)
                number = lax.shift_right_logical(np.uint32(packed), shift) & np.uint32((1 << bits) - 1)
            entry = entry + number.astype(np.int32) * np.int32(unit)
        return entry

    def _digit(self, digit: PositionDigit) -> Array:
        stride, radix = digit
        value = self.here if stride == 1 else lax.div(self.here, np.int32(stride))
        return value if stride * radix == len(self.devices) else lax.rem(value, np.int32(radix))

    def by_device(self, values: Mapping[int, int]) -> Array:
        """This device's entry of a table by device id."""
        return self.look_up([values[device] for device in self.devices])

    def flag(self, devices: Iterable[int]) -> Array:
        """Whether this device is among the given ones."""
        members = set(devices)
        return self.look_up([int(device in members) for device in self.devices]) != 0

    def group(self, groups: Groups) -> dict[str, Any]:
        """The arguments of `jax.lax` for a collective within each of these groups, members in their order.

        Groups along whole mesh axes are given by the names of the axes, which XLA keeps; others are listed.
        """
        listed = tuple(tuple(self.positions[device] for device in group) for group in groups)
        names = _find_whole_axes(listed, tuple(self.axes.items()))
        if names is not None:
            return {"axis_name": names}
        return {"axis_name": self.names, "axis_index_groups": listed}

    def levels(self, groups: Groups) -> tuple[Groups, ...]:
        """The groups as one level; a group of all devices as two levels of smaller ones, the larger first.

        The inner level has as many neighbours in the group as the least prime factor of its size; a prime number of
        devices stays one level.

        >>> MeshPlace(range(4), {"x": 4}).levels(((0, 1, 2, 3),))
        (((0, 2), (1, 3)), ((0, 1), (2, 3)))
        """
        members = groups[0]
        inner = primes(len(members))[0] if len(members) == len(self.devices) > 1 else len(members)
        if inner == len(members):
            return (groups,)
        rows = tuple(members[at : at + inner] for at in range(0, len(members), inner))
        return tuple(zip(*rows, strict=True)), rows

    def permute(self, tile: Array, pairs: Pairs) -> Array:
        """Sends the whole array of each sender to its receiver; every other device gets zeros."""
        return lax.ppermute(tile, self.names, [(self.positions[a], self.positions[b]) for a, b in pairs])

    def permute_in_turn(self, tile: Array, pairs: Sequence[Pairs], turn: Array | int) -> Array:
        """`permute` by the pairs of a turn, which is the same on all devices: a branch for each list of pairs."""
        if isinstance(turn, int):
            return self.permute(tile, pairs[turn])
        listed = [tuple(each) for each in pairs]
        numbers = {each: number for number, each in enumerate(dict.fromkeys(listed))}
        branches = [partial(self.permute, pairs=each) for each in numbers]
        table = jnp.asarray(np.asarray([numbers[each] for each in listed], np.int32))
        return lax.switch(_read_element(table, (turn.astype(np.int32),)), branches, tile)


def _read_element(table: Array, at: Sequence[Array | np.int32]) -> Array:
    """One element of a table; the indices are not negative, which plain indexing would check."""
    return lax.dynamic_slice(table, at, (1,) * len(at), allow_negative_indices=False).reshape(())


def narrow_table(table: Table, sizes: Sequence[int]) -> tuple[Table, tuple[PositionDigit, ...]]:
    """A table by turn and position on axes of these sizes as one by turn and those digits of the position that it
    depends on, major first.

    >>> table, digits = narrow_table(np.array([[0, 0, 1, 1, 0, 0, 1, 1]]), (2, 4))
    >>> table.tolist(), digits
    ([[0, 1]], (PositionDigit(stride=2, radix=2),))
    """
    factors = [prime for size in sizes for prime in primes(size)]
    grid = table.reshape(len(table), *factors)
    digits: list[PositionDigit] = []
    stride = 1
    for axis, radix in zip(range(grid.ndim - 1, 0, -1), reversed(factors), strict=True):
        if (grid == grid.take([0], axis)).all():
            grid = grid.take(0, axis)
        elif digits and digits[0].stride * digits[0].radix == stride:
            digits[0] = PositionDigit(digits[0].stride, digits[0].radix * radix)
        else:
            digits.insert(0, PositionDigit(stride, radix))
        stride *= radix
    return grid.reshape(len(table), -1), tuple(digits)


def spell_table(table: Table, sizes: Sequence[int]) -> tuple[int, tuple[PositionTerm, ...]] | None:
    """A table by position on axes of these sizes as a number and what digits of the position add to it; None if the
    entry of one digit depends on another, or if what a digit stands for does not fit 32 bits.

    >>> base, terms = spell_table(np.array([5, 25, 15, 35, 6, 26, 16, 36]), (2, 4))
    >>> base, terms[1]
    (5, PositionTerm(digit=PositionDigit(stride=1, radix=4), unit=10, bits=2, packed=216))
    """
    # The position as one digit, by axes, or by all its factors: what is spelled in few digits takes few operations.
    for factors in ((len(table),), sizes, [prime for size in sizes for prime in primes(size)]):
        grid, base, stride = table.reshape(factors).astype(np.int64), int(table[0]), len(table)
        total, terms = np.full(grid.shape, base), list[PositionTerm]()
        for axis, radix in enumerate(factors):
            stride //= radix
            added = grid[tuple(slice(None) if at == axis else 0 for at in range(grid.ndim))] - table[0]
            total += added.reshape([radix if at == axis else 1 for at in range(grid.ndim)])
            least, unit = int(added.min()), int(np.gcd.reduce(added))
            numbers = [int(each - least) // max(1, unit) for each in added]
            bits, base = max(numbers).bit_length(), base + least
            packed = sum(number << bits * at for at, number in enumerate(numbers))
            if unit:
                own = numbers == list(range(radix))
                terms.append(PositionTerm(PositionDigit(stride, radix), unit, bits, None if own else packed))
        wide = [each.unit >> 31 or (each.packed is not None and each.bits * each.digit.radix > 32) for each in terms]
        if (total == grid).all() and not any(wide):
            return base, tuple(terms)
    return None


def divide_table(table: Table) -> tuple[Table, int]:
    """A table as multiples of a unit, in the narrowest integers that hold them.

    A program's text spells every entry: places in a tile on 1,024 devices, as bytes, are a quarter as long.

    >>> divide_table(np.array([0, 512, 131072]))
    (array([  0,   1, 256], dtype=uint16), 512)
    """
    unit = max(1, int(np.gcd.reduce(table, axis=None)))
    units = table // unit
    narrowest = np.result_type(*(np.min_scalar_type(int(end)) for end in (units.min(), units.max())))
    return units.astype(narrowest if narrowest.itemsize < 4 else np.int32), unit


@lru_cache(maxsize=1024)
def _find_whole_axes(groups: Groups, axes: tuple[tuple[str, int], ...]) -> tuple[str, ...] | None:
    """The axes, major to minor, along which these are the groups; None if they are along parts of axes.

    >>> _find_whole_axes(((0, 2), (1, 3)), (("x", 2), ("y", 2)))
    ('x',)
    """
    strides = {name: math.prod(size for _, size in axes[at + 1 :]) for at, (name, _) in enumerate(axes)}
    sizes, first = dict(axes), groups[0]
    # What the neighbours in a group suggest: members 1, n, n m, ... differ from member 0 by an axis's stride.
    names: list[str] = []
    offsets = [0]
    while len(offsets) < len(first):
        step = first[len(offsets)] - first[0]
        name = next((n for n, stride in strides.items() if stride == step and n not in names), None)
        if name is None or len(first) % (len(offsets) * sizes[name]):
            return None
        names.insert(0, name)
        offsets = [at + strides[name] * value for value in range(sizes[name]) for at in offsets]
    same = all(group == tuple(group[0] + offset for offset in offsets) for group in groups)
    return tuple(names) if same else None

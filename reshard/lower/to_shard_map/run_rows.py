"""An exchange whose blocks are whole rows of flat tiles, such as one between pieces of any size, where rounds that cut
out each block by itself would be too much code: by tables of rows, or as one ragged all-to-all.

    f32[{x}2, 8] -> f32[{x}(1@0,1@2,1@1,2@0,1@2), 8] on <x=3>, in rows of 8 elements

                  device 0      device 1      device 2
    tile          0 1           2 3           4 5
    sent          1 to 2        3 to 0        4 to 0       the one message of each, at a place that a table has
    arrives       3, then 4     nothing       1
    result        0 3 4         2 . .         1 5 .        each row out of the tile, or of what has arrived

    find_rows     the rows that such an exchange moves
    run_rows      the tables: in a round, messages are as long as the longest
    run_slices    `lax.ragged_all_to_all`: slices of rows leave the tile as it lies, and arrive where they belong

XLA has the ragged collective for TPU and GPU, but not for CPU.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.geometry.blocks import fuse_axes
from reshard.lower.exchange_rounds import Exchange, Transfer
from reshard.lower.program import wire_dtype
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tile_memory import LANES, SUBLANES, make_unfilled, resize_tile
from reshard.types import dtypes

Array = jax.Array
Table = np.ndarray[Any, Any]

MANY = 64
"""From more blocks on that rounds would cut out and write one by one, they are rows of tables: each of them is two
kernels, for which a compiler takes 5 ms to 1 s."""
FEW = 8
"""The same for XLA:CPU, for which a block takes its compiler 5 to 10 ms."""
FEW_ROWS = 1 << 20
"""The most rows of such tables: the program has all of them."""
NARROW = 32
"""Rows of fewer bytes are slow to gather: so many of `MANY` blocks are cut out before tables have them."""
MOST_ROWS = 1 << 24
"""The most rows that tables list: the program has them, four bytes each, for all devices."""
MOST_SLICES = 64
"""The most slices between two devices in a ragged all-to-all, which says where each of them lies."""
LOOPED_ROUNDS = 16
"""From so many rounds on they are a loop, with a branch for the pairs of each."""


Link = tuple[int, int, bool]
"""Sender, receiver, and whether it is passed on."""


@dataclass(frozen=True)
class RowMoves:
    """What an exchange moves, as runs of rows of `width` elements.

    `runs[sender, receiver, relayed]` has a line for each run: where it begins in the sender's tile and in the
    receiver's, and how many rows it has. What is relayed is read from the sender's tile of the result.
    """

    width: int
    runs: dict[Link, Table]

    @property
    def slices(self) -> int:
        """The most runs between two devices."""
        return max(map(len, self.runs.values()), default=0)

    @property
    def rows(self) -> int:
        """How many rows move, those that stay where they are included."""
        return sum(int(runs[:, 2].sum()) for runs in self.runs.values())

    def count_written(self, receivers: Sequence[int]) -> dict[int, int] | None:
        """The rows at the start of each receiver's tile that are written, if no others are."""
        written = dict.fromkeys(receivers, 0)
        ends = dict.fromkeys(receivers, 0)
        for (_, receiver, _), runs in self.runs.items():
            written[receiver] += int(runs[:, 2].sum())
            ends[receiver] = max(ends[receiver], int((runs[:, 1] + runs[:, 2]).max(initial=0)))
        return written if written == ends else None


def find_rows(step: Exchange) -> RowMoves | None:
    """The rows of an exchange, as wide as they can be; None if its blocks are no rows, or too many for tables."""
    if step.gathers:
        return None
    ends = [math.prod(view.tile) for view in (step.send, step.receive)]
    return _find_rows_of((step.local, *step.rounds), math.gcd(*ends))


@lru_cache(maxsize=64)
def _find_rows_of(rounds: tuple[Sequence[Transfer], ...], width: int) -> RowMoves | None:
    runs: dict[Link, list[tuple[int, int, int]]] = {}
    total = count = 0
    for t in itertools.chain(*rounds):
        its = runs.setdefault((t.sender, t.receiver, t.relayed), [])
        total += t.elements
        for block in t.blocks:
            src, dst, axes = fuse_axes(block)
            length = axes[-1].extent if axes and axes[-1][1:] == (1, 1) else 1
            if length == block.elements:
                its.append((src, dst, length))
                continue
            count += block.elements // length
            if count > MOST_ROWS:
                return None
            starts = np.array([(src, dst)], np.int64)
            for extent, *apart in axes[: len(axes) - (length > 1)]:
                steps = np.arange(extent, dtype=np.int64)[:, np.newaxis] * np.array(apart)
                starts = (starts[:, np.newaxis] + steps).reshape(-1, 2)
            its.extend((int(one), int(other), length) for one, other in starts)
    tables = {pair: np.array(its, np.int64).reshape(-1, 3) for pair, its in runs.items() if its}
    width = math.gcd(width, *(int(np.gcd.reduce(table, axis=None)) for table in tables.values()))
    if not width or total > width * MOST_ROWS:
        return None
    return RowMoves(width, {pair: table // width for pair, table in tables.items()})


def count_cuts(step: Exchange) -> int:
    """The blocks that a program cuts out and writes one by one: those of each form that the messages of a round have.
    Rounds of one form of one block are loops, whatever their number."""
    cuts = 0
    for one in (step.local, *step.rounds):
        if max((len(t.blocks) for t in one), default=0) > MANY:
            return NARROW * MANY + 1  # Forms of thousands of blocks need not be compared.
        forms = {t.form for t in one}
        cuts += sum(map(len, forms)) if len(forms) > 1 or any(len(form) > 1 for form in forms) else 0
    return cuts


def run_rows(
    step: Exchange, moves: RowMoves, place: MeshPlace, shape: Sequence[int], into: Array | None, tile: Array
) -> Array:
    """The tile of this shape after the exchange, by tables of the rows that each device sends and receives: in each
    round one gather of rows, and one scatter."""
    rounds: list[Sequence[Transfer]] = [*([step.local] if step.local else ()), *step.rounds]
    longest = [max(t.elements for t in one) // moves.width for one in rounds]
    # Many rounds that read the same tile are a loop, in which all messages are equally long.
    first, passed = len(rounds) - len(step.rounds), sum(not any(t.relayed for t in one) for one in rounds)
    groups: list[range] = [range(at, at + 1) for at in range(first)]
    for its in (range(first, passed), range(passed, len(rounds))):
        if len(its) < LOOPED_ROUNDS:
            groups += [range(at, at + 1) for at in its]
            continue
        groups.append(its)
        longest[its.start : its.stop] = [max(longest[its.start : its.stop])] * len(its)
    total = math.prod(shape) // moves.width
    # Rows behind the end of a tile are those of devices with shorter messages, or none: they are not written.
    sent = [np.zeros((len(place.devices), count), np.int32) for count in longest]
    written = [np.full((len(place.devices), count), total, np.int32) for count in longest]
    done = Counter[Link]()
    for number, one in enumerate(rounds):
        for t in one:
            link, count = (t.sender, t.receiver, t.relayed), t.elements // moves.width
            start = done[link]  # Of a message in pieces, a round has the next rows.
            done[link] += count
            if not count:
                continue
            # Every row of the runs by its number in a tile: first the sender's, then the receiver's.
            begin, end, lengths = moves.runs[link].T
            within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            for table, device, starts in zip((sent, written), link, (begin, end), strict=False):
                column = np.repeat(starts, lengths) + within
                table[number][place.positions[device], :count] = column[start : start + count]
    rows = tile.reshape(-1, moves.width).astype(wire_dtype(tile.dtype.name, step.dtype))
    dtype = step.dtype or tile.dtype
    filled = jnp.zeros(shape, dtype) if into is None or not step.fills else jnp.asarray(into)

    def run(place: MeshPlace, numbers: range, number: Array | int, filled: Array) -> Array:
        at = (jnp.asarray(number, np.int32), place.here.astype(np.int32), np.int32(0))
        source, target = (
            lax.dynamic_slice(table, at, (1, 1, table.shape[2])).reshape(-1)
            for table in (jnp.asarray(np.stack([each[one] for one in numbers])) for each in (sent, written))
        )
        relayed = any(t.relayed for t in rounds[numbers[0]])
        message = (filled.astype(rows.dtype) if relayed else rows).at[source].get(mode="promise_in_bounds")
        pairs = [[(t.sender, t.receiver) for t in rounds[one]] for one in numbers]
        if rounds[numbers[0]] is not step.local:
            message = place.permute_in_turn(message, pairs, number)
        return filled.at[target].set(message.astype(dtype), mode="drop", unique_indices=True)

    filled = filled.reshape(total, moves.width)
    for numbers in groups:
        filled = place.after(filled)
        if len(numbers) == 1:
            filled = run(place, numbers, 0, filled)
            continue

        def turn(number: Array, filled: Array, numbers: range = numbers) -> Array:
            return run(place.anew(), numbers, number, filled)

        filled = lax.fori_loop(0, len(numbers), turn, filled)
    return filled.reshape(tuple(shape))


def choose_row(width: int, dtype: str) -> tuple[int, ...] | None:
    """The dims of a row of so many elements that a TPU sends as it lies, after at most one pass over the tile; None for
    rows that it pads, or rearranges in many passes.

    >>> choose_row(1024, "float32"), choose_row(768, "bfloat16"), choose_row(768, "float32")
    ((8, 128), (768,), None)
    """
    bits = dtypes.bits(dtype)
    if bits < 32:
        return None if width * bits % (32 * LANES) else (width,)
    lanes, rest = divmod(width, LANES)
    return (lanes, LANES) if not rest and bits == 32 and (lanes in (1, 2, 4) or lanes % SUBLANES == 0) else None


def find_group_axes(moves: RowMoves, place: MeshPlace) -> tuple[str, ...]:
    """The mesh axes along which something moves; along others, devices have nothing to do with each other."""
    sizes = tuple(place.axes.values())
    apart = np.zeros(len(sizes), bool)
    for *pair, _ in moves.runs:
        sender, receiver = (np.array(np.unravel_index(place.positions[each], sizes)) for each in pair)
        apart |= sender != receiver
    return tuple(name for name, differs in zip(place.names, apart, strict=True) if differs) or place.names[-1:]


def run_slices(step: Exchange, moves: RowMoves, place: MeshPlace, shape: Sequence[int], tile: Array) -> Array:
    """The tile of this shape after the exchange as one ragged all-to-all; what a device keeps is a slice as well."""
    names, sizes = find_group_axes(moves, place), tuple(place.axes.values())
    axes = [place.names.index(name) for name in names]
    group = [sizes[axis] for axis in axes]

    def number(device: int) -> int:
        at = np.unravel_index(place.positions[device], sizes)
        return int(np.ravel_multi_index([at[axis] for axis in axes], group))

    # By position and peer: where slices lie in the sender's tile, in the receiver's, and how long they are.
    peers = math.prod(group)
    leaving, arriving = np.zeros((2, 3, len(place.devices), peers, moves.slices), np.int32)
    for (sender, receiver, _), runs in moves.runs.items():
        leaving[:, place.positions[sender], number(receiver), : len(runs)] = runs.T
        arriving[:, place.positions[receiver], number(sender), : len(runs)] = runs.T

    flat = tile.reshape(-1, moves.width).astype(wire_dtype(tile.dtype.name, step.dtype))
    # Under vmap, JAX refuses offsets that are not batched like the tile. Adding a zero computed from the tile makes
    # them so.
    nothing = lax.bitwise_and(lax.ne(flat[:1, 0], flat[:1, 0]), np.False_).astype(np.int32)

    def own(table: Table) -> Array:
        listed = jnp.asarray(table.reshape(len(table), -1))
        return lax.dynamic_index_in_dim(listed, place.here.astype(np.int32), keepdims=False) + nothing

    # The tile is padded to whole groups of rows first: otherwise XLA copies all of it to cut off the incomplete group.
    row, multiple = (moves.width,), 1
    if (lanes := choose_row(moves.width, flat.dtype.name)) is not None:
        row, multiple = lanes, SUBLANES
        if len(row) > 1:
            flat = resize_tile(flat, (-(-len(flat) // multiple) * multiple, moves.width))
    rows = flat.reshape(-1, *row)
    written, total = moves.count_written(step.receivers), math.prod(shape) // moves.width
    room = (-(-total // multiple) * multiple, *row)
    start = jnp.zeros(room, rows.dtype) if written is None else make_unfilled(room, rows.dtype)
    (src, dst, length), received = leaving, arriving[2]
    result = lax.ragged_all_to_all(rows, start, own(src), own(length), own(dst), own(received), axis_name=names)
    result = result.reshape(-1, moves.width)
    if written is not None and set(written.values()) != {total}:
        # Padding is zeros; in a pass after all others, which may be one with what the result is used for.
        end = place.by_device({device: written.get(device, 0) for device in place.devices})
        inside = lax.broadcasted_iota(np.int32, result.shape, 0) < end
        result = jnp.where(inside, result, np.zeros((), result.dtype))
    return resize_tile(result, (total, moves.width)).reshape(tuple(shape)).astype(step.dtype or tile.dtype)

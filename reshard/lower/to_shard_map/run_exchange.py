"""An exchange on a device's tiles: one `ppermute` a round, between what is cut out of a tile and written into one.

    run_exchange      one exchange, or those of several arrays whose messages travel together
    BlockMessages     the one reader of blocks: messages taken out of a tile, and written into one
    batch_rounds      an exchange between two sets of devices, in its two halves: pack_message, write_message

Blocks lie in the digits that a tile is reshaped to, where each is a slice at both ends; XLA slices, and a TPU keeps the
tile in its own order of dims. The blocks of a view need not be slices of anything: these are elements at computed
places of flat tiles.

Many rounds alike are a loop, whose body packs a message and writes one. A `ppermute` names its pairs in the program, so
the body has a branch for each list of pairs. Unrolled, every round would be packed and written by code of its own.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.geometry.blocks import cut_block
from reshard.lower.exchange_rounds import Exchange, ExchangeInPlace, SlotTransfer, Transfer
from reshard.lower.program import Program, wire_dtype
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.run_rows import (
    FEW,
    FEW_ROWS,
    MANY,
    NARROW,
    count_cuts,
    find_rows,
    run_rows,
    run_slices,
)
from reshard.lower.to_shard_map.tile_memory import (
    choose_memory_order,
    cut_box,
    fix_layout,
    is_cut_in_place,
    make_unfilled,
    resize_tile,
    write_box,
)
from reshard.plans.rules.tile_view import TileView
from reshard.types import dtypes

Array = jax.Array
Round = Sequence[Transfer]
MOST_JOINT = 16
"""The most rounds that messages of several arrays travel in together."""
PIECES = 4
"""The fewest rounds between the same devices that become a loop: a tight budget cuts messages into thousands of pieces.
"""


def run_exchange(
    steps: Sequence[Exchange],
    place: MeshPlace,
    tiles: Sequence[Array],
    shapes: Sequence[Sequence[int]],
    *,
    into: Array | None = None,
    in_part: bool = False,
) -> list[Array]:
    """The tiles of these shapes after an exchange, or after those of several arrays, one message a round for all.

    `into` is the target's tile, of which an exchange fills a part. `in_part` says that the tile is a part of one: what
    is around it has chosen its order of dims.
    """
    each = zip(steps, tiles, shapes, strict=True)
    by_rows = [_list_row_forms(step, place, tile.dtype.name, shape, into) for step, tile, shape in each]
    # Rounds of pieces are loops, each of one array: thousands of them unrolled would be as many copies of code.
    together = len(steps) == 1 or all(not step.relays and len(step.rounds) <= MOST_JOINT for step in steps)
    if together and not any(by_rows):
        return _run_by_rounds(steps, place, shapes, into, in_part, *tiles)
    moved: list[Array] = []
    for step, tile, shape, forms in zip(steps, tiles, shapes, by_rows, strict=True):

        def in_boxes(tile: Array, step: Exchange = step, shape: Sequence[int] = shape) -> Array:
            return _run_by_rounds([step], place.anew(), [shape], into, in_part, tile)[0]

        moved.append(place.by_platform(tile, **({"default": in_boxes} | forms)))
    return moved


def _list_row_forms(
    step: Exchange, place: MeshPlace, dtype: str, shape: Sequence[int], into: Array | None
) -> dict[str, Callable[[Array], Array]]:
    """By platform, how an exchange runs by rows, where it does; "default" are all others.

    Boxes that rounds cut out one by one may be too much code for any compiler; a CPU takes as long for rows of tables,
    and its compiler half as long.
    """
    cuts = count_cuts(step)
    platforms = () if step.relays else step.sliced_on  # What is passed on arrives before it is sent.
    moves = find_rows(step) if platforms or cuts > FEW else None
    if moves is None:
        return {}
    wide = dtypes.nbytes(moves.width, step.dtype or dtype) >= NARROW
    many = cuts > (MANY if wide else NARROW * MANY)
    sliced = partial(run_slices, step, moves, place.anew(), shape)
    by_table = partial(run_rows, step, moves, place.anew(), shape, into)
    if not (platforms or many):
        return {"cpu": by_table} if moves.rows <= FEW_ROWS else {}
    return {**({"default": by_table} if many else {}), **dict.fromkeys(platforms, sliced)}


class Orders(NamedTuple):
    """The orders in which a TPU has the axes of the operand, of a message, and of the result in memory, while messages
    are cut out of the one and written to the other; None leaves them to XLA."""

    send: tuple[int, ...] | None
    message: tuple[int, ...] | None
    receive: tuple[int, ...] | None


PLAIN = Orders(None, None, None)


def find_box_extents(step: Exchange) -> list[int] | None:
    """The extents by dim of the slices of all messages, or None if they differ, or the dims of the two ends do."""
    if len(step.send.tile) != len(step.receive.tile):
        return None
    forms: set[tuple[int, ...]] = set()
    for extents in {box.extents[0] for one in list_rounds(step) for t in one for box in t.blocks}:
        by_axis = list(zip(step.send.dims, extents, strict=True))
        dims = range(len(step.send.tile))
        forms.add(tuple(math.prod(extent for dim, extent in by_axis if dim == of) for of in dims))
    return list(forms.pop()) if len(forms) == 1 else None


def _choose_orders(step: Exchange, dtype: str, loops: bool, in_part: bool) -> Orders:
    """The orders in which the tiles lie, or of the messages where these would be padded too much."""
    if step.strided or step.relays:
        return PLAIN  # Of a flat tile there is one order; what is passed on is read as it was written.
    box = None if in_part else find_box_extents(step)
    if box is None:
        # In a part, and where messages differ in form, only the result of loops has an order: XLA would lay it out as
        # the loop writes it, whatever the padding.
        return Orders(None, None, choose_memory_order(step.receive.digits, dtype)) if loops else PLAIN
    sent, received = list_rounds(step)[0][0].blocks[0].extents
    (send, receive) = (
        choose_memory_order(view.digits if is_cut_in_place(view.tile, box, dtype) else form, dtype)
        for view, form in ((step.send, sent), (step.receive, received))
    )
    return Orders(send, choose_memory_order(sent, dtype), receive)


def _run_by_rounds(
    steps: Sequence[Exchange],
    place: MeshPlace,
    shapes: Sequence[Sequence[int]],
    into: Array | None,
    in_part: bool,
    *tiles: Array,
) -> list[Array]:
    """The results, round by round, on a TPU with axes in the order that suits tiles and messages best."""
    if len(steps) > 1:
        # Messages of several arrays are flat, so none has an order; and exchanges of many rounds are not joint.
        groups = [[rounds] for rounds in zip(*(_list_transfers(step)[1] for step in steps), strict=True)]
        orders = PLAIN
    else:
        groups = [[(one,) for one in alike] for alike in _group_alike(_list_transfers(steps[0])[1])]
        loops = any(len(alike) > 1 for alike in groups)
        orders = _choose_orders(steps[0], tiles[0].dtype.name, loops, in_part)

    def run(place: MeshPlace, orders: Orders, *tiles: Array) -> list[Array]:
        opened = [tile.reshape(_list_tile_digits(step)) for step, tile in zip(steps, tiles, strict=True)]
        filled = [_start_result(*each, into) for each in zip(steps, tiles, shapes, strict=True)]
        order = range(filled[0].ndim) if orders.receive is None else orders.receive
        if orders.receive is not None:
            filled = [tile.transpose(order) for tile in filled]
        for at, step in enumerate(steps):
            for kind in group_by_form(_list_transfers(step)[0]):
                copies = BlockMessages(step, [kind], place)
                filled[at] = copies.put(filled[at], copies.take(opened[at], orders.send), orders.receive)
        for number, alike in enumerate(groups):
            filled = place.after(filled) if number else filled
            filled = _run_rounds(steps, alike, place, orders, opened, filled)
        if orders.receive is not None:
            filled = [fix_layout(tile).transpose(np.argsort(order)) for tile in filled]
        return [tile.reshape(tuple(shape)) for tile, shape in zip(filled, shapes, strict=True)]

    if all(order is None or order == tuple(range(len(order))) for order in orders):
        return run(place, orders, *tiles)
    # Each form is traced in a branch where the platform is open, and what is traced there is of no use after it.
    here = place.anew() if place.platform is None else place
    return place.by_platform(*tiles, tpu=partial(run, here, orders), default=partial(run, place.anew(), PLAIN))


def _start_result(step: Exchange, tile: Array, shape: Sequence[int], into: Array | None) -> Array:
    """The result before anything is written: zeros where blocks leave padding out, or what it is written into."""
    if step.fills and into is not None:
        return into.reshape(_list_tile_digits(step, True))
    received = Counter[int]()
    for transfer in itertools.chain(step.local, *step.rounds):
        received[transfer.receiver] += transfer.elements
    digits = (math.prod(shape),) if step.strided else step.receive.digits
    every = len(received) == len(step.receivers) and set(received.values()) == {math.prod(digits)}
    dtype = step.dtype or tile.dtype
    return make_unfilled(digits, dtype) if every else jnp.zeros(digits, dtype)


def _group_alike(rounds: Sequence[Round]) -> list[list[Round]]:
    """The rounds, grouped where one loop runs them: each device's message, if it has one, is of one form.

    Loops over the pieces of messages between the same devices need no branches; many such loops are one with branches.
    """
    groups: list[list[Round]] = []

    def kind_of(one: Round) -> tuple[bool, Any]:  # What is passed on is read from another tile.
        return one[0].relayed, one[0].form if len(group_by_form(one)) == 1 else None

    for (_, form), same in itertools.groupby(rounds, kind_of):
        alike = list(same)
        between: list[list[Round]] = []
        for _, of_pairs in itertools.groupby(alike, _list_pairs):
            pieces = list(of_pairs)
            between += [pieces] if form is not None and len(pieces) >= PIECES else [[one] for one in pieces]
        groups += [alike] if form is not None and len(between) >= LOOPED else between
    return groups


def _run_rounds(
    steps: Sequence[Exchange],
    rounds: Sequence[Sequence[Round]],
    place: MeshPlace,
    orders: Orders,
    opened: Sequence[Array],
    filled: list[Array],
) -> list[Array]:
    """Rounds alike, each of one array or of several: each device packs what it sends, if anything, and writes what it
    receives. What a relay passes on is read from the results."""
    relayed = any(t.relayed for t in rounds[0][0])
    if len(rounds) == 1:
        kinds = [
            [BlockMessages(step, [kind], place) for kind in group_by_form(one)]
            for step, one in zip(steps, rounds[0], strict=True)
        ]
        permute = partial(place.permute, pairs=_list_pairs(rounds[0][0]))
        return _run_round(kinds, permute, orders, filled if relayed else opened, filled)

    def run(number: Array, filled: list[Array]) -> list[Array]:
        here = place.anew()
        columns = zip(steps, zip(*rounds, strict=True), strict=True)
        kinds = [[BlockMessages(step, column, here, number)] for step, column in columns]
        permute = partial(here.permute_in_turn, pairs=[_list_pairs(each[0]) for each in rounds], turn=number)
        tiles = filled if relayed else opened
        return [fix_layout(tile) for tile in _run_round(kinds, permute, orders, tiles, filled)]

    return lax.fori_loop(0, len(rounds), run, filled)


def _run_round(
    kinds: Sequence[Sequence[BlockMessages]],
    permute: Callable[[Array], Array],
    orders: Orders,
    opened: Sequence[Array],
    filled: Sequence[Array],
) -> list[Array]:
    if len(kinds) == len(kinds[0]) == 1 and orders.message is not None and len(kinds[0][0].blocks) == 1:
        first = kinds[0][0]
        # On a TPU the message travels in the order of least padding.
        message = first.take(opened[0], orders.send).transpose(orders.message)
        message = permute(message if orders.message == orders.send else fix_layout(message))
        return [first.put(filled[0], message.transpose(np.argsort(orders.message)), orders.receive)]
    messages = [_pack_forms(each, tile, orders.send) for each, tile in zip(kinds, opened, strict=True)]
    written_tiles: list[Array] = []
    for each, tile, message in zip(kinds, filled, _send_together(messages, permute), strict=True):
        for kind in each:
            part = message if len(each) == 1 else message[: kind.elements]
            tile = kind.put(tile, part, orders.receive)
        written_tiles.append(tile)
    return written_tiles


def _pack_forms(
    kinds: Sequence[BlockMessages], opened: Array, order: Sequence[int] | None, size: int | None = None
) -> Array:
    """This device's message, whose form is one of several: it is as long as the longest of them, or as `size`."""
    if len(kinds) == 1 and size is None:
        return kinds[0].take(opened, order)
    length = (size or max(kind.elements for kind in kinds),)
    message = resize_tile(kinds[0].take(opened).reshape(-1), length)
    for kind in kinds[1:]:
        other = resize_tile(kind.take(opened).reshape(-1), length)
        message = lax.select(jnp.broadcast_to(kind.sends(), length), other, message)
    return message


def _send_together(messages: Sequence[Array], permute: Callable[[Array], Array]) -> list[Array]:
    """What arrives of each array, where their messages travel as one."""
    if len(messages) == 1:
        return [permute(messages[0])]
    arrived = permute(jnp.concatenate([message.reshape(-1) for message in messages]))
    ends = itertools.accumulate(message.size for message in messages)
    parts = zip(messages, ends, strict=True)
    return [arrived[end - message.size : end].reshape(message.shape) for message, end in parts]


def _list_pairs(one: Round) -> list[tuple[int, int]]:
    return [(t.sender, t.receiver) for t in one]


def _list_tile_digits(step: Exchange, receiving: bool = False) -> tuple[int, ...]:
    """What a tile of the operand, or of the result, is reshaped to: its digits where blocks are slices of them."""
    if step.strided:
        return (-1,)
    return tuple((step.receive if receiving else step.send).digits)


# The one reader of blocks. Transfers of one form run as one program on all devices: where a device's blocks start is
# looked up by its position, and by the number of the round where one program runs many.


def group_by_form(transfers: Round) -> list[list[Transfer]]:
    """Transfers grouped by form, with at most one transfer a device in each group."""
    kinds: dict[tuple[Any, ...], list[Transfer]] = {}
    seen: Counter[tuple[int, Any]] = Counter()
    for t in transfers:
        form = t.form
        kinds.setdefault((form, seen[t.receiver, form]), []).append(t)
        seen[t.receiver, form] += 1
    return list(kinds.values())


class FlatBox(NamedTuple):
    """A block as a box in a flat tile that is reshaped to these digits, one for each of the block's `axes`."""

    digits: list[int]
    axes: list[int]
    starts: list[Array]


class BlockMessages:
    """Transfers of one form in one round, or in several alike: the devices that take part, and where blocks start."""

    def __init__(self, step: Exchange, rounds: Sequence[Round], place: MeshPlace, number: Array | None = None) -> None:
        self.sliced = not step.strided
        self.dtype = step.dtype
        self.rounds = rounds
        self.number = number
        self.first: Any = next(t for one in rounds for t in one)
        self.elements = self.first.elements
        self.blocks = self.first.blocks
        self.place = place

    def take(self, tile: Array, order: Sequence[int] | None = None) -> Array:
        """This device's blocks in one message, on a TPU cut out of a tile whose axes have this order in memory.

        Elements are narrow in the message, where they are cast on the way.
        """
        narrow = wire_dtype(tile.dtype.name, self.dtype)
        parts: list[Array] = []
        for at, box in enumerate(self.blocks):
            if self.sliced:
                part = cut_box(tile, self._columns(at, "sender"), box.extents[0])
                parts.append(part if order is None else fix_layout(part, order))
            elif (flat := self._find_flat_box(at, "sender", tile.size)) is not None:
                part = cut_box(tile.reshape(flat.digits), flat.starts, [box.extents[axis] for axis in flat.axes])
                parts.append(part.transpose(np.argsort(flat.axes)))
            else:
                parts.append(tile[self._places(at, "sender")])
        parts = [part.astype(narrow) for part in parts]
        # A single box keeps its shape: XLA:CPU would recompute the index of every element of a flat one, half as fast.
        return parts[0] if len(parts) == 1 else jnp.concatenate([part.reshape(-1) for part in parts])

    def put(self, filled: Array, message: Array, order: Sequence[int] | None = None) -> Array:
        """`filled`, its axes in this order, with the blocks at their places, on the devices that receive a message."""
        table = self._members("receiver")
        gets = None if table.all() else self._look_up(table) != 0
        message = message.astype(filled.dtype)
        if gets is not None:
            # What the others have there is read again: XLA would read it where it was before earlier writes, and copy
            # all of the tile to keep it.
            filled = lax.optimization_barrier(filled)
        done = 0
        for at, box in enumerate(self.blocks):
            part = message if len(self.blocks) == 1 else message[done : done + box.elements]
            done += box.elements
            if self.sliced:
                content, starts = part.reshape(box.extents[1]), self._columns(at, "receiver")
                if order is not None:
                    content, starts = content.transpose(order), [starts[axis] for axis in order]
                filled = write_box(filled, content, starts, gets)
            elif (flat := self._find_flat_box(at, "receiver", filled.size)) is not None:
                content = part.reshape([box.extents[axis] for axis in sorted(flat.axes)])
                content = content.transpose(np.argsort(np.argsort(flat.axes)))
                filled = write_box(filled.reshape(flat.digits), content, flat.starts, gets).reshape(filled.shape)
            else:
                places = self._places(at, "receiver")
                # Elsewhere all places are behind the tile's end, and dropped: a select would copy the tile.
                places = places if gets is None else jnp.where(gets, places, filled.size)
                filled = filled.at[places].set(part.reshape(-1), mode="drop", unique_indices=True)
        return filled

    def sends(self) -> Array:
        """Whether this device sends a message."""
        return self._look_up(self._members("sender")) != 0

    def _members(self, side: str) -> np.ndarray[Any, Any]:
        """A table by round and position: 1 for the devices at one side of the transfers."""
        table = np.zeros((len(self.rounds), len(self.place.devices)), np.int32)
        for number, transfers in enumerate(self.rounds):
            table[number, [self.place.positions[getattr(t, side)] for t in transfers]] = 1
        return table

    def _columns(self, at: int, side: str) -> list[Array]:
        """Where block `at` lies at one end, for this device and this round, in a few numbers, whatever its size: its
        start on every digit, or its offset and strides in a flat tile."""
        end = "src" if side == "sender" else "dst"

        def row(transfer: Any) -> Sequence[int]:
            if self.sliced:
                return [start for start, _ in getattr(transfer.blocks[at], end)]
            block = transfer.blocks[at]
            return [getattr(block, end), *(getattr(axis, end) for axis in block.axes)]

        table = np.zeros((len(self.rounds), len(self.place.devices), len(row(self.first))), np.int32)
        for number, transfers in enumerate(self.rounds):
            for t in transfers:
                table[number, self.place.positions[getattr(t, side)]] = row(t)
        return [self._look_up(table[..., column]) for column in range(table.shape[-1])]

    def _find_flat_box(self, at: int, side: str, size: int) -> FlatBox | None:
        """Block `at` at one end as a slice of the flat tile of this size, where it is one on all devices.

        XLA gathers and scatters at computed places element by element, and holds an index for each of them.
        """
        end = "src" if side == "sender" else "dst"
        blocks = [(one, t, t.blocks[at]) for one, transfers in enumerate(self.rounds) for t in transfers]
        extents, strides = self.first.blocks[at].extents, [getattr(axis, end) for axis in self.first.blocks[at].axes]
        if any([getattr(axis, end) for axis in block.axes] != strides for _, _, block in blocks):
            return None
        axes = sorted((axis for axis, extent in enumerate(extents) if extent > 1), key=lambda axis: -strides[axis])
        ends = [size, *(strides[axis] for axis in axes)]
        # Strides that divide one another are places of digits. Those of single elements apart would be a dim of few
        # elements at the end, which a TPU pads to 128.
        if not axes or ends[-1] != 1 or any(high % low for high, low in itertools.pairwise(ends)):
            return None
        digits = [high // low for high, low in itertools.pairwise(ends)]
        table = np.zeros((len(self.rounds), len(self.place.devices), len(axes)), np.int32)
        for one, transfer, block in blocks:
            start = [getattr(block, end) // low % digit for low, digit in zip(ends[1:], digits, strict=True)]
            if any(first + extents[axis] > digit for first, axis, digit in zip(start, axes, digits, strict=True)):
                return None  # It goes on in the next value of the digit before.
            table[one, self.place.positions[getattr(transfer, side)]] = start
        return FlatBox(digits, axes, [self._look_up(table[..., column]) for column in range(len(axes))])

    def _places(self, at: int, side: str) -> Array:
        """The places of the elements of block `at` in this device's flat tile: computed, since a table of them would be
        as large as the tile on every device."""
        extents = self.first.blocks[at].extents
        start, *strides = self._columns(at, side)
        places = jnp.broadcast_to(start, extents)
        for axis, stride in enumerate(strides):
            places = places + lax.broadcasted_iota(jnp.int32, extents, axis) * stride
        return places.reshape(-1)

    def _look_up(self, table: np.ndarray[Any, Any]) -> Array:
        """This device's entry of a table by round and position."""
        return self.place.look_up(table[0]) if self.number is None else self.place.look_up(table, self.number)


def list_rounds(step: Exchange) -> list[Sequence[Any]]:
    """The rounds, after the local copies if there are any."""
    local, rounds = _list_transfers(step)
    return [local, *rounds] if local else list(rounds)


def _list_transfers(step: Exchange) -> tuple[Sequence[Any], Sequence[Sequence[Any]]]:
    """The local copies and the rounds, as slices of digits where blocks are such."""
    return (step.local, step.rounds) if step.strided else step.sliced


# An exchange between two sets of devices in its two halves: what the senders pack, and what the receivers write. What
# carries messages from one set to the other is not part of any program here.


class MessageBatch(NamedTuple):
    """Rounds whose messages have the same forms, so that one program serves all of them.

    `elements` are those of the largest message, to which the others are padded; `relayed` messages are read from the
    sender's tile of the result, once those of the batches before have arrived.
    """

    rounds: tuple[Round, ...]
    forms: tuple[tuple[Any, ...], ...]
    elements: int
    relayed: bool


def batch_rounds(step: Exchange) -> list[MessageBatch]:
    """The local copies, cut to the size of messages, and the rounds of an exchange, by the forms of their messages.

    Those that a relay passes on are the last.
    """
    # What devices copy for themselves goes in rounds as well, in pieces no larger than the largest message.
    most = max((t.elements for one in step.rounds for t in one), default=None)
    copies: dict[int, list[Transfer]] = {}
    for t in step.local:
        for block in t.blocks:
            for part in cut_block(block, most or max(1, t.elements)):
                one = Transfer(t.sender, t.receiver, (part,))
                copies.setdefault(t.receiver, []).append(one if step.strided else step.slice_transfer(one))
    longest = max(map(len, copies.values()), default=0)
    local = [[listed[at] for listed in copies.values() if at < len(listed)] for at in range(longest)]
    by_forms: dict[tuple[bool, tuple[Any, ...]], list[Round]] = {}
    for one in (*map(tuple, local), *_list_transfers(step)[1]):
        forms = tuple(sorted({t.form for t in one}))
        by_forms.setdefault((any(t.relayed for t in one), forms), []).append(one)
    return [
        MessageBatch(tuple(rounds), forms, max(t.elements for one in rounds for t in one), relayed)
        for (relayed, forms), rounds in sorted(by_forms.items(), key=lambda each: each[0][0])
    ]


def pack_message(step: Exchange, batch: MessageBatch, place: MeshPlace, number: Array, tile: Array) -> Array:
    """The message that this device sends in round `number` of the batch, flat, of `batch.elements` elements.

    Messages that a relay passes on are packed on the receivers' mesh, out of tiles of the result.
    """
    opened = tile.reshape(_list_tile_digits(step, batch.relayed))
    return _pack_forms(_list_kinds(step, batch, place, number), opened, None, batch.elements)


def write_message(
    step: Exchange, batch: MessageBatch, place: MeshPlace, number: Array, tile: Array, message: Array
) -> Array:
    """The tile with the message that this device receives in round `number`, if it receives one, in its place."""
    opened = tile.reshape(_list_tile_digits(step, True))
    for kind in _list_kinds(step, batch, place, number):
        opened = kind.put(opened, message[: kind.elements])
    return opened.reshape(tile.shape)


def _list_kinds(step: Exchange, batch: MessageBatch, place: MeshPlace, number: Array) -> list[BlockMessages]:
    """The messages of the batch by their forms, each in the rounds in which some message has it."""
    rounds = ([[t for t in one if t.form == form] for one in batch.rounds] for form in batch.forms)
    return [BlockMessages(step, of_form, place, number) for of_form in rounds]


def sends_whole_tiles(step: Exchange) -> bool:
    """Whether every message is a sender's whole tile and fills its receiver's: then nothing needs packing.

    It is not where messages are in pieces, nor where a device receives several, or passes some on.
    """
    sizes = {math.prod(view.digits) for view in (step.send, step.receive)}
    transfers = [*step.local, *(t for one in step.rounds for t in one)]
    return len(sizes) == 1 and all(t.elements in sizes and not t.relayed for t in transfers)


# An exchange that overwrites its operand, in one buffer of slots that XLA updates in place.


LOOPED = 16
"""The fewest rounds between any devices that become a loop: one piece of code packs and writes the messages of all, of
which XLA would compile a copy for each unrolled round."""


def shares_lie_in_order(program: Program) -> bool:
    """Whether every in-place exchange of a program packs and unpacks nothing: its slots, in order, are the tile.

    Otherwise XLA would copy the tile to rearrange its shares, and so hold it twice.
    """
    return all(
        slots_are_tile(step.pack, step.send) and slots_are_tile(step.unpack, step.receive)
        for step in program.instructions
        if isinstance(step, ExchangeInPlace)
    )


def run_exchange_in_place(step: ExchangeInPlace, place: MeshPlace, tile: Array, shape: Sequence[int]) -> Array:
    """Packs the tile into slots, sends slots round by round, and unpacks the result."""
    size = step.slots * step.slot
    if size == tile.size and slots_are_tile(step.pack, step.send):
        buffer = tile.reshape(step.send.digits).reshape(step.slots, step.slot)
    else:
        opened, packed = tile.reshape(step.send.digits), _Shares(step.pack, step.send, place.devices)

        def pack(place: MeshPlace, number: Array | int, buffer: Array) -> Array:
            slot, starts = packed.look_up(place, number)
            share = lax.dynamic_slice(opened, starts, packed.extents).reshape(1, step.slot)
            return lax.dynamic_update_slice(buffer, share, (slot, jnp.zeros((), jnp.int32)))

        buffer = repeat_rounds(packed.count, place, pack, jnp.zeros((step.slots, step.slot), tile.dtype))
    for length, same in itertools.groupby(step.rounds, lambda turn: turn[0].length):
        turns = list(same)
        buffer = repeat_rounds(len(turns), place, partial(_send_slots, turns, length), buffer)
    if size == math.prod(shape) and slots_are_tile(step.unpack, step.receive):
        return buffer.reshape(tuple(shape))
    unpacked = _Shares(step.unpack, step.receive, place.devices)

    def unpack(place: MeshPlace, number: Array | int, filled: Array) -> Array:
        slot, starts = unpacked.look_up(place, number)
        share = lax.dynamic_slice(buffer, (slot, jnp.zeros((), jnp.int32)), (1, step.slot))
        return lax.dynamic_update_slice(filled, share.reshape(unpacked.extents), starts)

    empty = jnp.zeros(step.receive.digits, buffer.dtype)
    return repeat_rounds(unpacked.count, place, unpack, empty).reshape(tuple(shape))


def _send_slots(
    turns: Sequence[Sequence[SlotTransfer]], length: int, place: MeshPlace, number: Array | int, buffer: Array
) -> Array:
    """The buffer after turn `number`, in which messages of this length go from slot to slot."""
    src, dst, gets, start = np.zeros((4, len(turns), len(place.devices)), np.int32)
    for at, turn in enumerate(turns):
        start[at] = turn[0].start
        for t in turn:
            src[at, place.positions[t.sender]] = t.src_slot
            dst[at, place.positions[t.receiver]] = t.dst_slot
            gets[at, place.positions[t.receiver]] = 1
    first = place.look_up(start, number)
    message = lax.dynamic_slice(buffer, (place.look_up(src, number), first), (1, length))
    message = place.permute_in_turn(message, [[(t.sender, t.receiver) for t in turn] for turn in turns], number)
    receives = None if gets.all() else place.look_up(gets, number) != 0
    return write_box(buffer, message, [place.look_up(dst, number), first], receives)


_Places = Mapping[int, tuple[tuple[int, tuple[int | None, ...]], ...]]
"""By device id, (slot, place in a view) of each share."""


class _Shares:
    """Every device's shares, by number: their slots, and where they lie in a view. Every device has equally many."""

    def __init__(self, places: _Places, view: TileView, devices: Sequence[int]) -> None:
        rows = [[(slot, *(at or 0 for at in where)) for slot, where in places[device]] for device in devices]
        self.count = len(rows[0])
        table = np.asarray(rows, np.int32).reshape(len(devices), self.count, len(view.digits) + 1)
        self.columns = table.transpose(2, 1, 0)  # each by number and device
        first = places[devices[0]][0][1] if self.count else (None,) * len(view.digits)
        self.extents = tuple(radix if at is None else 1 for radix, at in zip(view.digits, first, strict=True))

    def look_up(self, place: MeshPlace, number: Array | int) -> tuple[Array, list[Array]]:
        """The slot of this device's share of that number, and its starts in the view."""
        slot, *starts = (place.look_up(column, number) for column in self.columns)
        return slot, starts


def slots_are_tile(places: _Places, view: TileView) -> bool:
    """Whether the slots of every device, one after another, are the tile as it lies in memory."""
    first = next(iter(places.values()))
    whole = [index is None for index in first[0][1]] if first else []
    if whole != sorted(whole):
        return False
    ranges = [range(radix) for radix, keep in zip(view.digits, whole, strict=True) if not keep]
    order = list(itertools.product(*ranges))
    return all(
        {slot: tuple(i for i in where if i is not None) for slot, where in listed} == dict(enumerate(order))
        for listed in places.values()
    )


def repeat_rounds(
    count: int, place: MeshPlace, run: Callable[[MeshPlace, Array | int, Array], Array], start: Array
) -> Array:
    """What `run` makes of a value in round after round from 0 on: unrolled if they are few, else in a loop.

    It is given the place, which is another one inside a loop, the round's number and the value.
    """

    def run_in_loop(number: Array, value: Array) -> Array:
        return run(place.anew(), number, value)

    if count >= LOOPED:
        return lax.fori_loop(0, count, run_in_loop, start)
    for number in range(count):
        start = run(place, number, start)
    return start

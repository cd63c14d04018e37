"""Windows that ranks share: each rank reads boxes of source chunks, and all copy their rows out of what others read.

    batch of 4 boxes, 4 ranks             rank 0 reads box 0 into its buffer in the node's memory, rank 1 box 1, ...
    window, dealt along dim 1             rank 0 has columns 0-63, rank 1 columns 64-127, ...
    move                                  rank r copies its columns out of all 4 buffers; other nodes send them

Who has what follows from the plan, so no rank asks another. The next batch is read while one moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from reshard.errors import RankError, ReshardError
from reshard.geometry.blocks import Block
from reshard.plans.rechunk_plan import ArrayRechunk
from reshard.plans.stored import Box
from reshard.runtime.account import Account
from reshard.runtime.on_files.commit import Processes, raise_together
from reshard.runtime.on_files.rechunking import BoxReader, BoxWriter, list_shares
from reshard.runtime.on_files.stored_boxes import cut_batches, intersect_boxes, make_box_block
from reshard.runtime.on_mpi.collective import collective, prepare_together
from reshard.runtime.on_mpi.copies.copy_order import order_copies
from reshard.runtime.on_mpi.direct_moves import Direct, move_directly, pull_from
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.runtime.on_mpi.wire.chunks import messages_between
from reshard.runtime.on_mpi.wire.message_exchange import Call

Array = NDArray[Any]

_BATCH = 4 << 20
"""Bytes that a rank reads for a batch if memory allows: more would save no time."""


class SharedWindow:
    """Reads boxes of this rank's share together with the other ranks, and writes this rank's chunks.

    An error of one rank is raised by all at the next batch, since all wait for each other there; one of the last
    chunks that are written in `finish`, which all ranks call.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        limit: float,
        processes: Processes,
        plan: ArrayRechunk,
        reader: BoxReader,
        writer: BoxWriter,
    ) -> None:
        self._comm, self._limit, self._processes, self._plan = comm, limit, processes, plan
        self._reader, self._writer = reader, writer
        self._error: Exception | None = None
        # Two buffers and as much for messages, which the plan has counted for one chunk.
        self._chunk = math.prod(plan.task.source_chunks)
        nbytes = self._chunk * plan.task.itemsize
        free = (plan.task.memory - plan.peak_bytes) // 2
        self._chunks = 1 + max(0, min(free // (4 * nbytes), _BATCH // nbytes - 1))

    def write_box(self, box: Box, data: Array) -> None:
        """Writes whole target chunks of this rank's share; an error waits for the next batch."""
        try:
            if self._error is None:
                self._writer.write_box(box, data)
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Raises on all ranks what one has met since the last batch."""
        raise_together(self._processes, self._error)

    def read_box(self, box: Box, out: Array) -> None:
        """Fills `out` with this rank's share of rows that all ranks ask for at once."""
        task, dealt = self._plan.task, self._plan.dealt
        length = self._plan.region[dealt]
        # The share alone does not say which region it is of where it has no rows: its end does.
        start = (box[dealt][1] - 1) // length * length if box[dealt][1] else 0
        whole = (*box[:dealt], (start, min(task.shape[dealt], start + length)), *box[dealt + 1 :])
        shares = [(*whole[:dealt], share, *whole[dealt + 1 :]) for share in list_shares(self._plan, whole)]
        # Neighbours along the dealt dim one after the other, so that a batch has something for every rank.
        groups: dict[tuple[int, int], list[Box]] = {}
        for each in cut_batches(whole, task.source_chunks, self._chunks):
            groups.setdefault(each[dealt], []).append(each)
        order = [each for column in itertools.zip_longest(*groups.values()) for each in column if each is not None]
        batches = [order[at : at + self._comm.size] for at in range(0, len(order), self._comm.size)]
        failed: ReshardError | None = None
        with (
            collective(self._comm, self._limit, lambda _: None, lambda _: "rechunk") as (team, watch, _),
            ThreadPoolExecutor(1, "reshard-ahead") as ahead,
        ):
            # While ranks copy out of one buffer, the next batch is read into the other: whoever agrees on that one has
            # copied what it needs. In private memory, and by messages, where the node has no room.
            shape = 2, self._chunks * self._chunk
            place = team.arena.take(math.prod(shape) * out.itemsize, partial(team.gather, watch))
            buffers = team.arena.hold(place, shape, out.dtype) if place else np.empty(shape, out.dtype)
            reading = ahead.submit(self._read_share, batches[0], buffers[0])
            for number, batch in enumerate(batches):
                watch.renew()
                try:
                    prepare_together(team, watch, reading.result, lambda _: "batch")
                except RankError:  # A rank is gone: the others cannot know of each other.
                    raise
                except ReshardError as error:
                    failed = error
                    break
                if number + 1 < len(batches):
                    reading = ahead.submit(self._read_share, batches[number + 1], buffers[(number + 1) % 2])
                at = place + number % 2 * buffers[0].nbytes if place else 0
                self._move_batch(team, watch, batch, shares, at, buffers[number % 2], out)
        if failed is not None:
            raise failed

    def _read_share(self, batch: Sequence[Box], buffer: Array) -> None:
        """Reads this rank's box of a batch."""
        if self._error is not None:
            raise self._error
        if self._comm.rank < len(batch):
            self._reader.read_box(batch[self._comm.rank], _shape_box(batch[self._comm.rank], buffer))

    def _move_batch(
        self,
        team: Team,
        watch: Watch,
        batch: Sequence[Box],
        shares: Sequence[Box],
        place: int,
        buffer: Array,
        out: Array,
    ) -> None:
        """Moves a batch, which each rank has in its buffer at `place`, to the shares that it is of."""
        rank, size = team.rank, team.size

        def list_blocks(giver: int, taker: int) -> tuple[Block, ...]:
            part = intersect_boxes(batch[giver], shares[taker]) if giver < len(batch) else ()
            filled = giver < len(batch) and all(start < stop for start, stop in part)
            return (make_box_block(part, batch[giver], shares[taker]),) if filled else ()

        near = [place != 0 and team.near(rank, other) for other in range(size)]
        # A rank sends to the next first, and receives from the previous.
        after, before = ([(rank + step * n) % size for n in range(1, size)] for step in (1, -1))
        pulls = tuple((peer, blocks) for peer in after if near[peer] and (blocks := list_blocks(peer, rank)))
        sent = [(peer, list_blocks(rank, peer)) for peer in after if not near[peer]]
        received = [(peer, list_blocks(peer, rank)) for peer in before if not near[peer]]
        own = list_blocks(rank, rank)
        order = order_copies([*own, *(each for _, blocks in pulls for each in blocks)], out.size, out.itemsize)
        messages = messages_between(sent, received, (), out.itemsize, len(buffer))
        tiles: dict[int, Array] = {}
        for peer, _ in pulls:
            there = team.arena.tile(team.members.index(peer), place, buffer.shape, buffer.dtype)
            tiles[peer] = _shape_box(batch[peer], there)
        tile = _shape_box(batch[rank], buffer) if rank < len(batch) else buffer[:0]
        team.pool.limit(2 * buffer.nbytes)
        call = Call(team, watch, team.pool, Account("uint8"), rank)
        move_directly(call, Direct(own, pulls, order, messages), pull_from(tiles), tile, out)


def _shape_box(box: Box, buffer: Array) -> Array:
    shape = [stop - start for start, stop in box]
    return buffer[: math.prod(shape)].reshape(shape)

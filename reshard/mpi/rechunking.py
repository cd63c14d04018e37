"""Windows that ranks share: each rank reads some source chunks of a batch, and all send each other their rows of these.

    batch of 4 source chunks, 4 ranks     rank 0 reads chunk 0, rank 1 chunk 1, ...
    window, dealt along dim 1             rank 0 has columns 0-63, rank 1 columns 64-127, ...
    exchange                              rank r sends columns 64 s to 64 s + 63 of its chunk to rank s

Who has what follows from the plan, so no rank asks another: one `Alltoallv` a batch, whose counts all know.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from reshard.plans.rechunk_plan import ArrayRechunk
from reshard.runtime.on_files.commit import Processes, raise_together
from reshard.runtime.on_files.rechunking import BoxReader, BoxWriter, list_shares
from reshard.runtime.on_files.stored_boxes import cut_batches, intersect_boxes, select_part
from reshard.types.stored import Box


class SharedWindow:
    """Reads boxes of this rank's share together with the other ranks, and writes this rank's chunks.

    An error of one rank is raised by all at the next batch, since all wait for each other there.
    """

    def __init__(
        self, comm: MPI.Intracomm, processes: Processes, plan: ArrayRechunk, reader: BoxReader, writer: BoxWriter
    ) -> None:
        self._comm, self._processes, self._plan = comm, processes, plan
        self._reader, self._writer = reader, writer
        self._error: Exception | None = None

    def write_box(self, box: Box, data: NDArray[Any]) -> None:
        """Writes whole target chunks of this rank's share; an error waits for the next batch."""
        try:
            if self._error is None:
                self._writer.write_box(box, data)
        except Exception as error:
            self._error = error

    def read_box(self, box: Box, out: NDArray[Any]) -> None:
        """Fills `out` with this rank's share of rows that all ranks ask for at once."""
        task, dealt = self._plan.task, self._plan.dealt
        length = self._plan.region[dealt]
        # The share alone does not say which region it is of where it has no rows: its end does.
        start = (box[dealt][1] - 1) // length * length if box[dealt][1] else 0
        whole = (*box[:dealt], (start, min(task.shape[dealt], start + length)), *box[dealt + 1 :])
        shares = [(*whole[:dealt], share, *whole[dealt + 1 :]) for share in list_shares(self._plan, whole)]
        cells = list(cut_batches(whole, task.source_chunks, 1))
        # Neighbours along the dealt dim one after the other, so that a batch has something for every rank.
        groups: dict[tuple[int, int], list[Box]] = {}
        for cell in cells:
            groups.setdefault(cell[dealt], []).append(cell)
        order = [cell for column in itertools.zip_longest(*groups.values()) for cell in column if cell is not None]
        for at in range(0, len(order), self._comm.size):
            self._exchange(order[at : at + self._comm.size], shares, box, out)
        self._agree()

    def _exchange(self, cells: Sequence[Box], shares: Sequence[Box], box: Box, out: NDArray[Any]) -> None:
        """Reads this rank's chunk of a batch, and moves all of the batch to the shares that it is of."""
        rank, size = self._comm.rank, self._comm.size
        parts = [[intersect_boxes(cell, share) for share in shares] for cell in cells]
        counts = [[math.prod(stop - start for start, stop in part) for part in row] for row in parts]
        counts += [[0] * size for _ in range(size - len(cells))]
        sent = np.empty(sum(counts[rank]), out.dtype)
        if rank < len(cells):
            cell = cells[rank]
            try:
                data = np.empty([stop - start for start, stop in cell], out.dtype)
                self._reader.read_box(cell, data)
                done = 0
                for part, count in zip(parts[rank], counts[rank], strict=True):
                    if count:
                        sent[done : done + count] = data[select_part(part, cell)].reshape(-1)
                        done += count
            except Exception as error:
                self._error = self._error or error
        self._agree()
        received = np.empty(sum(row[rank] for row in counts), out.dtype)
        mine, theirs = counts[rank], [row[rank] for row in counts]
        scale = out.itemsize
        self._comm.Alltoallv(
            [sent.view(np.uint8), [scale * count for count in mine], None, MPI.BYTE],
            [received.view(np.uint8), [scale * count for count in theirs], None, MPI.BYTE],
        )
        done = 0
        for row, count in zip(parts, theirs, strict=False):
            if count:
                part = row[rank]
                place = out[select_part(part, box)]
                place[...] = received[done : done + count].reshape(place.shape)
                done += count

    def _agree(self) -> None:
        """Raises on all ranks the error of one; a flag is all that they exchange while there is none."""
        if self._comm.allreduce(self._error is not None, MPI.LOR):
            raise_together(self._processes, self._error)

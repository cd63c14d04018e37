"""The cheapest way to other chunks: through memory alone, or with files between, whichever moves the fewest bytes."""

from __future__ import annotations

import math
from dataclasses import replace

from reshard.errors import BudgetError
from reshard.plans.rechunk_plan import ArrayRechunk, RechunkTask
from reshard.synth.rechunking.grids import find_window
from reshard.synth.rechunking.one_pass import StreamedRegions, find_streamed_regions
from reshard.synth.rechunking.spill import find_spilled_regions
from reshard.types.units import bytes_text, shape_text

STEP_BYTES = 64 << 20
"""A sweep reads at least so much at a time if memory allows, so that several chunks are on their way at once."""


def plan_rechunking(task: RechunkTask) -> ArrayRechunk:
    """The plan that reads and writes the fewest bytes within memory, short runs of spill files counted as long ones.

    Of equal ones it is the one in a single pass. Raises `BudgetError` if a chunk does not fit in memory.

    >>> rows_to_columns = RechunkTask((8, 8), (1, 8), (8, 1), 1, 64, least_run=1)
    >>> plans = map(plan_rechunking, [rows_to_columns, replace(rows_to_columns, memory=48)])
    >>> [(plan.method, plan.traffic_bytes) for plan in plans]
    [('direct', 128), ('spill', 176)]
    """
    # Nothing is read of an array without elements, and an array without dims is one of a single row.
    if not math.prod(task.shape):
        return ArrayRechunk(task, task.target_chunks, 0, -1, 1, 1, None, 0, 0, 0, 0, 0)
    if not task.shape:
        task = replace(task, shape=(1,), source_chunks=(1,), target_chunks=(1,))
    written = math.prod(-(-size // chunk) * chunk for size, chunk in zip(task.shape, task.target_chunks, strict=True))
    chunks_written = written // math.prod(task.target_chunks)
    streamed = find_streamed_regions(replace(task, processes=1))
    if task.processes > 1:
        # With regions of their own processes need nobody. Together they have larger ones, or enough of them for all.
        joint = find_streamed_regions(task)
        if joint is not None and (streamed is None or joint.read < streamed.read or streamed.region == task.shape):
            streamed = joint
    below = None if streamed is None else (streamed.read + written) * task.itemsize
    # Only a cheaper one is worth the files.
    spilled = find_spilled_regions(task, below)
    if spilled is not None:
        return ArrayRechunk(
            task,
            spilled.region,
            spilled.along,
            -1,
            spilled.spill.reads[spilled.along],
            spilled.window,
            spilled.spill,
            (spilled.read + spilled.spilled) * task.itemsize,
            (written + spilled.spilled) * task.itemsize,
            spilled.price,
            spilled.requests,
            spilled.peak,
        )
    if streamed is None:
        source, target = (math.prod(chunks) * task.itemsize for chunks in (task.source_chunks, task.target_chunks))
        least = max(source + task.read_buffer, target + task.write_buffer, source + task.write_buffer)
        raise BudgetError(
            f"a source chunk of {shape_text(task.source_chunks)} ({bytes_text(source)}) or a target chunk of "
            f"{shape_text(task.target_chunks)} ({bytes_text(target)}), with the buffers that coding it takes, does not "
            f"fit in memory of {bytes_text(task.memory)}; give at least {bytes_text(least)}, or choose smaller chunks",
            least,
        )
    step, window, peak = _widen_step(task, streamed)
    return ArrayRechunk(
        task,
        streamed.region,
        streamed.along,
        streamed.dealt,
        step,
        window,
        None,
        streamed.read * task.itemsize,
        written * task.itemsize,
        (streamed.read + written) * task.itemsize,
        streamed.read // math.prod(task.source_chunks) + chunks_written,
        peak,
    )


def _widen_step(task: RechunkTask, streamed: StreamedRegions) -> tuple[int, int, int]:
    """Rows that are read at a time, rows of the window, bytes at the peak: more rows while memory has room for them."""
    along, region = streamed.along, streamed.region
    buffers = max(task.read_buffer, task.write_buffer)
    cross = streamed.held // max(1, min(streamed.window, region[along])) * task.itemsize
    step, window = task.source_chunks[along], streamed.window
    # A direct region is read at once; the parts of a window that processes share are as they are.
    if window >= region[along] or streamed.dealt >= 0:
        beside = 4 * math.prod(task.source_chunks) * task.itemsize if streamed.dealt >= 0 else 0
        held = streamed.held * task.itemsize + buffers + beside
        return (region[along] if window >= region[along] else step), window, held
    while step < region[along] and step * cross < STEP_BYTES:
        sizes = task.shape[along], region[along], task.source_chunks[along]
        wider = find_window(*sizes, 2 * step, task.target_chunks[along])
        if wider * cross + buffers > task.memory:
            break
        step, window = 2 * step, wider
    return step, window, window * cross + buffers

"""Plans of new chunks against an oracle that tries every region, window and spill of tiny arrays, row by row."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from reshard.errors import BudgetError
from reshard.plans.rechunk_plan import RechunkTask
from reshard.synth.rechunking import plan_rechunking


def find_least_traffic(task: RechunkTask) -> int | None:
    """The fewest bytes that any plan of the kinds that there are moves in one spill at most; None if none has room."""
    shape, old, new = task.shape, task.source_chunks, task.target_chunks
    dims = range(len(shape))
    written = math.prod(math.ceil(size / chunk) * chunk for size, chunk in zip(shape, new, strict=True))
    room = task.memory // task.itemsize - max(task.read_buffer, task.write_buffer) // task.itemsize
    last_room = (task.memory - task.write_buffer) // task.itemsize
    chunk = math.prod(old)
    spills = chunk <= room and math.prod(new) <= last_room
    best = math.inf
    lengths = [
        sorted({min(size, count * part) for count in range(1, size + 1)}) for size, part in zip(shape, new, strict=True)
    ]
    for region in itertools.product(*lengths):
        # Each chunk that a region has a part of is read for it.
        read = math.prod(old)
        for dim in dims:
            read *= sum(
                len({row // old[dim] for row in range(start, min(shape[dim], start + region[dim]))})
                for start in range(0, shape[dim], region[dim])
            )
        if math.prod(region) <= room:
            best = min(best, read + written)
        for along in dims:
            window = max(
                count_window(start, min(shape[along], start + region[along]), old[along], new[along])
                for start in range(0, shape[along], region[along])
            )
            if window * math.prod(region[dim] for dim in dims if dim != along) <= room:
                best = min(best, read + written)
            for dim in dims:
                starts = range(0, region[dim], new[dim]) if dim != along else [0]
                for start in starts if spills else []:
                    others = math.prod(window if at == along else region[at] for at in dims if at != dim)
                    if start and start * others + chunk > room:
                        continue
                    kept = sum(row % region[dim] < start for row in range(shape[dim]))
                    spilled = math.prod(shape) // shape[dim] * (shape[dim] - kept)
                    best = min(best, read + written + 2 * spilled)
    return None if math.isinf(best) else int(best) * task.itemsize


def count_window(start: int, stop: int, old: int, new: int) -> int:
    """The most rows that are read and not yet written, if source chunks are read one by one and target chunks leave."""
    most, written = 0, start
    for row in range(start, stop):
        # All rows of a chunk come at once.
        if (row + 1) % old and row + 1 < stop:
            continue
        most = max(most, row + 1 - written)
        written = max(written, stop if row + 1 == stop else (row + 1) // new * new)
    return most


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_of_a_tiny_array_moves_fewer_bytes(seed: int):
    rng = random.Random(seed)
    methods: set[str] = set()
    for _ in range(300):
        shape = tuple(rng.randint(most // 2, most) for most in rng.choice([(12,), (10, 10), (10, 10), (6, 5, 5)]))
        old, new = (tuple(rng.choice([1, size, *[rng.randint(1, size)] * 3]) for size in shape) for _ in range(2))
        itemsize, buffers = rng.choice([1, 4]), rng.choice([0, 0, 2])
        beside = [buffers * math.prod(chunks) * itemsize for chunks in (old, new)]
        memory = int(max(math.prod(old), math.prod(new)) * itemsize * rng.uniform(0.9, 4)) + max(beside)
        task = RechunkTask(shape, old, new, itemsize, memory, 1, beside[0], beside[1], 1)
        least = find_least_traffic(task)
        if least is None:
            with pytest.raises(BudgetError):
                plan_rechunking(task)
            continue
        plan = plan_rechunking(task)
        assert plan.traffic_bytes == least, (task, plan, least)
        assert plan.peak_bytes <= memory
        methods.add(plan.method)
    assert methods == {"direct", "sweep", "spill"}


def test_short_fragments_take_another_file():
    task = RechunkTask((4096, 4096), (1, 4096), (4096, 1), 4, 100_000)
    plan = plan_rechunking(task)
    assert plan.passes == 3 and plan.traffic_bytes == 6 * task.nbytes
    one = plan_rechunking(RechunkTask((4096, 4096), (1, 4096), (4096, 1), 4, 100_000, least_run=1))
    assert one.passes == 2 and one.traffic_bytes <= 4 * task.nbytes < plan.priced_bytes < 64 * task.nbytes


def test_processes_join_their_memories():
    task = RechunkTask((1024, 64, 64), (1, 64, 64), (1024, 8, 8), 4, 3 << 20)
    alone, joint = (plan_rechunking(replace(task, processes=processes)) for processes in (1, 8))
    assert alone.method == "spill" and joint.method == "direct" and joint.dealt >= 0
    assert joint.traffic_bytes == 2 * task.nbytes < alone.traffic_bytes
    assert joint.peak_bytes <= task.memory

"""Arrays from devices of their own that move together: every element, one gather and few permutes a program."""

from __future__ import annotations

import random
from math import prod

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.jax import redistribute
from reshard.jax.crossing import joint
from tests.jax.crossing.cases import by_messages


def draw_arrays(choose: random.Random, count: int, devices: int) -> tuple[list[jax.Array], list[NamedSharding]]:
    """Arrays of numbered elements, each from devices of its own, and shardings that replicate most."""
    target = Mesh(np.array(jax.devices()[:devices]).reshape(devices // 2, 2), ("rep", "tp"))
    arrays: list[jax.Array] = []
    shardings: list[NamedSharding] = []
    while len(arrays) < count:
        shape = [choose.choice([2, 4, 6, 12]) for _ in range(choose.randint(1, 3))]
        grid = [choose.choice([each for each in (1, 2, 3) if size % each == 0]) for size in shape]
        if prod(grid) > devices:
            continue
        near = Mesh(np.array(choose.sample(jax.devices(), prod(grid))).reshape(grid), tuple("abc"[: len(grid)]))
        values = np.arange(prod(shape), dtype=choose.choice(["float32", "int32"])).reshape(shape) + len(arrays)
        arrays.append(jax.device_put(values, NamedSharding(near, P(*near.axis_names))))
        split = choose.randrange(len(shape) + 1)
        shardings.append(NamedSharding(target, P(*["tp" if dim == split else None for dim in range(len(shape))])))
    return arrays, shardings


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, pytest.param(6, marks=pytest.mark.slow)])
def test_arrays_from_devices_of_their_own_move_together(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six devices of the target, some senders are no multiple of a group outside of it: then messages take turns."""
    arrays, shardings = draw_arrays(random.Random(devices), 12, devices)
    programs: list[str] = []
    compile_group = joint._compile_group

    def record(places, plans, sharding):  # The text of each program, beside what runs.
        program = compile_group(places, plans, sharding)
        each = zip(places, program.tiles, strict=True)
        shapes = [((sharding.mesh.size * tile[0], *tile[1:]), plans[at].source.dtype) for at, (tile, _) in each]
        given = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
        programs.append(program.run.lower(*given).as_text())
        return program

    monkeypatch.setattr(joint, "_compile_group", record)
    with by_messages(monkeypatch):
        moved = redistribute(arrays, shardings)
    for before, after, sharding in zip(arrays, moved, shardings, strict=True):
        assert after.sharding == sharding and after.dtype == before.dtype
        for shard in after.addressable_shards:
            assert np.array_equal(shard.data, np.asarray(before)[shard.index])
    assert programs and len(programs) <= 6  # Two dtypes, and three ways to split.
    for text in programs if devices == 8 else ():
        assert text.count("stablehlo.all_gather") == 1 and text.count("stablehlo.collective_permute") <= 2


@pytest.mark.slow
def test_few_senders_move_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, shardings = draw_arrays(random.Random(1), 3, 8)
    monkeypatch.setattr(joint, "_compile_joint", None)  # Would fail.
    with by_messages(monkeypatch):
        moved = redistribute(arrays, shardings)
    assert all(np.array_equal(before, after) for before, after in zip(arrays, moved, strict=True))

"""Loads into shardings, in one process and in several: every element of every shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import FileError, LayoutError, MissingTensorError, PlanError
from reshard.jax import Part, Target
from reshard.runtime.on_files.engine import ReadCounts
from tests.jax import worker
from tests.jax.loads import assert_shards, load, stored_arrays, tree_of_targets, write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path)
    return tmp_path


@pytest.mark.parametrize("options", [{}, {"wave": "4KiB"}, {"read_size": 1}], ids=str)
def test_one_process(folder: Path, options: dict[str, Any]) -> None:
    targets, wanted = tree_of_targets(jax.devices(), stored_arrays(folder))
    loaded = load(folder, targets, **options)
    assert_shards(loaded, wanted)
    assert loaded["layers"][1]["w"].sharding == targets["layers"][1]["w"]


def test_devices_of_a_process_share_what_is_read(folder: Path) -> None:
    """Replicas are one tile: read once, in one memory."""
    arrays, counts = stored_arrays(folder), ReadCounts()
    targets, wanted = tree_of_targets(jax.devices(), arrays)
    loaded = load(folder, targets, counts=counts)
    assert counts.bytes == sum(array.nbytes for array in arrays.values())
    assert len({shard.data.unsafe_buffer_pointer() for shard in loaded["layers"][1]["w"].addressable_shards}) == 1
    assert_shards(loaded, wanted)


@pytest.mark.slow
def test_processes(folder: Path) -> None:
    worker.check(["processes", str(folder)], devices=2, processes=4, module="tests.jax.loads")


def test_targets_that_do_not_fit(folder: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    half = [Part("q", into={0: slice(0, 16)})]
    faults: list[tuple[Any, type[Exception], str]] = [
        ({"quant": rows, "other": rows}, MissingTensorError, "no tensor 'other', 'quant'"),
        ({"q": whole}, MissingTensorError, "no target names 'layers.0.norm'"),
        ({"w": Target(rows, source="q", scale=2.0, dtype="float32")}, PlanError, "no out= and no scale="),
        ({"w": Target(rows, shape=(24, 8), parts=half)}, PlanError, "fills element"),
        ({"w": Target(rows, shape=(24, 8), parts=[*half, Part("half", take={1: slice(0, 8)})])}, PlanError, "dtype="),
        ({"scale": rows}, LayoutError, "'scale'"),
        (
            {"k": NamedSharding(mesh, P(None, ("x", "y"))), "flags": NamedSharding(mesh, P(("x", "y")))},
            MissingTensorError,
            "no target names",
        ),
        (
            {"layers": [{"norm": NamedSharding(Mesh(mesh.devices.reshape(-1)[:3], ("z",)), P("z"))}]},
            LayoutError,
            "does not divide",
        ),
        ({"q": Target(whole, dtype="float64")}, LayoutError, "jax_enable_x64"),
        ({"q": NamedSharding(jax.sharding.AbstractMesh((4,), ("x",)), P("x"))}, LayoutError, "mesh of devices"),
    ]
    for targets, kind, text in faults:
        with pytest.raises(kind) as caught:
            load(folder, targets)
        assert text in str(caught.value), caught.value


def test_a_read_that_fails(folder: Path) -> None:
    def broken(_: Any) -> None:
        raise FileError("a disk that fails")

    targets, _ = tree_of_targets(jax.devices(), stored_arrays(folder))
    with pytest.raises(FileError, match="a disk that fails"):
        load(folder, targets, broken)

"""Loads into shardings, in one process and in several: every element of every shard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard.files
from reshard.errors import ChecksumError, FileError, LayoutError, MissingTensorError, PlanError
from reshard.jax import Part, Target
from reshard.runtime.on_files.engine import ReadCounts
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


@pytest.mark.parametrize("format", ["zarr", "orbax", "hdf5"])
def test_coded_chunks_are_read_once(folder: Path, tmp_path: Path, format: str) -> None:
    """Chunks that lie across the targets' tiles, of a store whose sums are kept."""
    whole = {name: array for name, array in stored_arrays(folder).items() if array.ndim == 2 and array.size}
    path = tmp_path / ("store.h5" if format == "hdf5" else "store")
    codec = "gzip" if format == "hdf5" else "zstd"
    reshard.files.save(path, whole, format=format, codec=codec, chunks={name: (5, 8) for name in whole})
    ckpt, counts = reshard.files.open(path), ReadCounts()
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    targets = {name: NamedSharding(mesh, P("y", "x")) for name in whole}
    loaded = reshard.files.load(ckpt, targets, counts=counts, wave="8KiB")
    assert_shards(loaded, whole)
    assert counts.bytes < 1.3 * sum(ckpt[name].stored_bytes for name in whole) + 8192  # with indices and headers


def test_damage_is_found_by_the_sums_of_a_save(folder: Path, tmp_path: Path) -> None:
    whole = stored_arrays(folder)
    reshard.files.save(tmp_path / "saved", whole)
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    stat = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    replicated = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P())
    with pytest.raises(ChecksumError, match="crc32"):
        reshard.files.load(tmp_path / "saved", dict.fromkeys(whole, replicated))
    assert_shards(
        reshard.files.load(tmp_path / "saved", dict.fromkeys(whole, replicated), verify=False)["q"], whole["q"]
    )


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

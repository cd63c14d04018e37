"""`rs.files.rechunk`: every element against numpy, by formats, methods and memory, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard.files
from reshard.errors import BudgetError, FileError
from reshard.plans.rechunk_plan import RechunkPlan

zarr: Any = pytest.importorskip("zarr")
pytest.importorskip("tensorstore")
SHAPE = (30, 23, 17)
DATA = np.arange(30 * 23 * 17, dtype="float32").reshape(SHAPE)


def write_source(path: Path, version: int, chunks: tuple[int, ...], **options: Any) -> None:
    group = zarr.open_group(path, mode="w", zarr_format=version, attributes={"title": "reanalysis"})
    array = group.create_array("t2m", shape=SHAPE, chunks=chunks, dtype="float32", **options)
    array[:] = DATA
    array.attrs.update({"units": "K"} | ({"_ARRAY_DIMENSIONS": ["time", "y", "x"]} if version == 2 else {}))
    group.create_array("time", shape=(30,), chunks=(10,), dtype="int64")[:] = np.arange(30)


def read_target(path: Path, name: str) -> np.ndarray[Any, Any]:
    if path.suffix == ".h5":
        h5py: Any = pytest.importorskip("h5py")
        with h5py.File(path) as file:
            return file[name][()]
    if path.suffix == ".npy":
        return np.load(path / f"{name}.npy")
    return zarr.open_group(path, mode="r")[name][...]


@pytest.mark.fast(12)
@pytest.mark.parametrize("memory", [5000, 20_000, "1MiB"])
@pytest.mark.parametrize("target", ["out.zarr2", "out.zarr", "out.h5", "out.npy"])
@pytest.mark.parametrize("version", [2, 3])
def test_every_element_is_where_numpy_has_it(version: int, target: str, memory: int | str, tmp_path: Path):
    options: dict[str, Any] = {"compressors": None} if version == 2 else {"dimension_names": ["time", "y", "x"]}
    write_source(tmp_path / "in.zarr", version, (1, 6, 17), **options)
    kind: Any = {"zarr2": "zarr2", "zarr": "zarr", "h5": "hdf5", "npy": "npy"}[target.partition(".")[2]]
    plan = reshard.files.rechunk(
        tmp_path / "in.zarr", tmp_path / target, chunks={"t2m": (-1, 4, 3)}, memory=memory, format=kind
    )
    assert np.array_equal(read_target(tmp_path / target, "t2m"), DATA)
    assert np.array_equal(read_target(tmp_path / target, "time"), np.arange(30))
    assert sorted(os.listdir(tmp_path)) == ["in.zarr", target]
    if kind in ("zarr", "zarr2"):
        group = zarr.open_group(tmp_path / target, mode="r")
        assert group["t2m"].chunks == (30, 4, 3) and group["time"].chunks == (10,)
        assert group.attrs["title"] == "reanalysis" and group["t2m"].attrs["units"] == "K"
    assert isinstance(plan, RechunkPlan) and "traffic" in str(plan)


def test_parts_of_raw_chunks_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = np.arange(8 * 64 * 1024, dtype="float32").reshape(8, 64, 1024)
    source = zarr.create_array(
        tmp_path / "in.zarr", shape=data.shape, chunks=(1, 64, 1024), dtype="float32", compressors=None
    )
    source[...] = data
    asked: dict[str, Any] = {"chunks": (8, 8, 32), "memory": "260KiB"}
    plan = reshard.files.plan_rechunk(tmp_path / "in.zarr", **asked)
    # In memory for an eighth of the array all of it moves once: regions of 8 rows of each chunk, and no file between.
    assert plan.arrays[""].method == "direct" and plan.traffic_bytes == 2 * data.nbytes
    counts: list[int] = []
    read = os.preadv

    def count_read(*arguments: Any) -> int:
        counts.append(read(*arguments))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", count_read)
    reshard.files.rechunk(tmp_path / "in.zarr", tmp_path / "out.zarr", **asked)
    assert sum(counts) == data.nbytes and np.array_equal(zarr.open_array(tmp_path / "out.zarr")[...], data)


def test_a_shard_is_written_whole(tmp_path: Path):
    write_source(tmp_path / "in.zarr", 3, (5, 23, 17), dimension_names=["time", "y", "x"])
    plan = reshard.files.rechunk(
        tmp_path / "in.zarr", tmp_path / "out.zarr", chunks=(15, 4, 3), shards=(30, 12, 9), memory=45_000
    )
    array = zarr.open_group(tmp_path / "out.zarr", mode="r")["t2m"]
    assert array.shards == (30, 12, 9) and array.chunks == (15, 4, 3)
    assert np.array_equal(array[...], DATA)
    assert plan.arrays["t2m"].task.target_chunks == (30, 12, 9)


def test_all_of_a_store_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_source(tmp_path / "in.zarr", 3, (5, 23, 17))
    synced: list[str] = []
    seen: list[set[str]] = []
    sync, rename = os.fsync, os.rename

    def note_sync(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    def note_rename(old: str, new: str) -> None:
        seen.append({str(path) for path in Path(old).rglob("*")} - set(synced))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    reshard.files.rechunk(tmp_path / "in.zarr", tmp_path / "out.zarr", chunks=(30, 4, 3), memory="1MiB")
    assert seen == [set()] and synced[-1] == str(tmp_path)


def test_nothing_is_left_of_a_run_that_fails(tmp_path: Path):
    write_source(tmp_path / "in.zarr", 3, (5, 23, 17))
    part = next(path for path in (tmp_path / "in.zarr/t2m/c").rglob("0") if path.is_file())
    ckpt = reshard.files.open(tmp_path / "in.zarr")
    part.write_bytes(part.read_bytes()[:-5])
    with pytest.raises(FileError, match="t2m"):
        reshard.files.rechunk(ckpt, tmp_path / "out.zarr", chunks=(30, 4, 3), memory="1MiB")
    assert os.listdir(tmp_path) == ["in.zarr"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"chunks": (3, 3)}, FileError, "no array has so many dims"),
        ({"chunks": {"tim": 4}}, FileError, "did you mean 'time'"),
        ({"chunks": {"t2": (1, 1, 1)}}, FileError, "did you mean 't2m'"),
        ({"chunks": {"t2m": (0, 1, 1)}}, FileError, "a size of at least 1"),
        ({"chunks": (30, 4, 3), "shards": (30, 6, 6)}, FileError, "not whole chunks"),
        ({"chunks": (30, 4, 3), "memory": 1000}, BudgetError, "give at least"),
        ({"chunks": (30, 4, 3), "format": "csv"}, FileError, "'zarr2'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    options: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
):
    write_source(tmp_path / "in.zarr", 3, (5, 23, 17), dimension_names=["time", "y", "x"])
    asked: dict[str, Any] = {"memory": "1MiB"} | options
    with pytest.raises(error, match=words):
        reshard.files.rechunk(tmp_path / "in.zarr", tmp_path / "out.zarr", **asked)
    assert os.listdir(tmp_path) == ["in.zarr"]


def test_what_is_there_is_not_replaced(tmp_path: Path):
    write_source(tmp_path / "in.zarr", 2, (5, 23, 17))
    with pytest.raises(FileError, match="is there already"):
        reshard.files.rechunk(tmp_path / "in.zarr", tmp_path / "in.zarr", chunks=(30, 4, 3), memory="1MiB")

"""Saves of one process: read back by the libraries of the formats, killed, on full disks, behind the caller's work."""

from __future__ import annotations

import itertools
import os
import random
import resource
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard as rs
from reshard.errors import ChecksumError, FileError, LayoutError
from reshard.files import save
from reshard.runtime.on_files.sidecar import BlockSums, list_blocks
from tests.files.save_files import (
    FORMATS,
    assert_same_arrays,
    make_arrays,
    make_layouts,
    read_by_library,
    tiles_by_device,
)

ROOT = Path(__file__).resolve().parent.parent.parent


def path_for(folder: Path, format: str) -> Path:
    return folder / ("saved.h5" if format == "hdf5" else "saved")


@pytest.mark.parametrize("format", FORMATS)
def test_tiles_by_device_are_read_back_by_the_library_of_the_format(tmp_path: Path, format: str):
    path = path_for(tmp_path, format)
    for extra in (0, 5):  # The second one takes the place of the first.
        arrays = make_arrays(extra=extra)
        layouts = make_layouts(arrays)
        save(path, tiles_by_device(arrays, layouts), layouts, format=format)
        assert_same_arrays(read_by_library(path, format), arrays)
        assert rs.files.check(path).faults == ()
    assert {each.name for each in tmp_path.iterdir()} <= {path.name, f"{path.name}.reshard.json"}


@pytest.mark.parametrize(("format", "codec"), [("zarr", "zstd"), ("orbax", "zstd"), ("hdf5", "gzip"), ("zarr2", None)])
def test_chunks_and_codecs(tmp_path: Path, format: str, codec: str | None):
    path, arrays = path_for(tmp_path, format), make_arrays()
    layouts = make_layouts(arrays)
    chunks = {"layers.w": (2, 4, 3), "embed": (8, 10)}
    tiles = tiles_by_device(arrays, layouts)
    save(path, tiles, layouts, format=format, codec=codec, chunks=chunks)
    assert_same_arrays(read_by_library(path, format), arrays)
    ckpt = rs.files.open(path)
    assert (ckpt["embed"].chunks, ckpt["layers.w"].chunks) == ((8, 10), (2, 4, 3))
    one = {name: rs.Layout.tiled(rs.Mesh(z=1), a.shape, a.dtype, [[]] * a.ndim) for name, a in arrays.items()}
    assert_same_arrays({name: of[0] for name, of in rs.files.load(path, one, devices=[0]).items()}, arrays)


def test_whole_arrays_nested_names_and_shards(tmp_path: Path):
    arrays = make_arrays()
    save(
        tmp_path, {"embed": arrays["embed"], "layers": {"w": arrays["layers.w"]}, "none": np.zeros((0, 3))}, shards=700
    )
    found = read_by_library(tmp_path, "safetensors")
    assert_same_arrays(found, {name: arrays[name] for name in ("embed", "layers.w")} | {"none": np.zeros((0, 3))})
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_one_file(tmp_path: Path):
    arrays = {"w": np.arange(6.0), "b": np.arange(3, dtype=">i2")}
    save(tmp_path / "w.safetensors", arrays)
    assert_same_arrays(
        read_by_library(tmp_path / "w.safetensors", "safetensors"), arrays | {"b": np.arange(3, dtype="i2")}
    )
    assert sorted(os.listdir(tmp_path)) == ["w.safetensors", "w.safetensors.reshard.json"]


def test_start_copies_what_it_writes(tmp_path: Path):
    arrays = make_arrays()
    layouts = make_layouts(arrays)
    save(tmp_path, {"w": np.ones(3)})
    for _ in range(2):  # The second time into the memory of the first.
        tiles = tiles_by_device(arrays, layouts)
        pending = rs.files.start(tmp_path, tiles, layouts)
        for tiles_of_array in tiles.values():
            for tile in tiles_of_array.values():
                tile[...] = 77
        pending.wait()
        pending.wait()
        assert pending.done
        assert_same_arrays(read_by_library(tmp_path, "safetensors"), arrays)


def test_before_the_wait_the_old_checkpoint_is_there(tmp_path: Path):
    save(tmp_path, {"w": np.ones(3)})
    pending = rs.files.start(tmp_path, {"w": np.zeros(3)})
    while not pending.done:
        pass
    assert rs.files.load(tmp_path, {"w": rs.Layout.parse("f64[3]", rs.Mesh(z=1))}, devices=[0])["w"][0][0] == 1
    pending.wait()
    assert read_by_library(tmp_path, "safetensors")["w"][0] == 0


def test_files_of_two_saves_are_refused(tmp_path: Path):
    """Of equal names, sizes and headers: only sums tell."""
    for folder, extra in (("one", 0), ("two", 1)):
        save(tmp_path / folder, {name: a + extra for name, a in make_arrays().items() if name != "half"}, format="zarr")
    (tmp_path / "two" / "embed").rename(tmp_path / "kept")
    (tmp_path / "one" / "embed").rename(tmp_path / "two" / "embed")
    layouts = {name: layout for name, layout in make_layouts(make_arrays()).items() if name != "half"}
    with pytest.raises(ChecksumError, match="embed"):
        rs.files.load(tmp_path / "two", layouts, devices=range(4))


@pytest.mark.parametrize("damage", ["index", "shard", "header"])
def test_flips_are_refused(tmp_path: Path, damage: str):
    arrays = make_arrays()
    save(tmp_path, arrays)
    file = next(tmp_path.glob("*.index.json" if damage == "index" else "*.safetensors"))
    content = bytearray(file.read_bytes())
    if damage == "header":  # Of the same length, and JSON still: what is read as another name.
        content = content.replace(b'"norm"', b'"Norm"')
    else:
        content[-30] ^= 4
    file.write_bytes(content)
    layouts = make_layouts(arrays)
    with pytest.raises(FileError):
        rs.files.load(tmp_path, layouts, devices=range(4))


def test_what_does_not_fit_is_refused_before_a_file_is_made(tmp_path: Path):
    arrays = make_arrays()
    layouts = make_layouts(arrays)
    tiles = tiles_by_device(arrays, layouts)
    mesh = rs.Mesh(x=2)
    faults: list[tuple[dict[str, Any], Any, dict[str, Any], type[Exception], str]] = [
        (tiles, None, {}, FileError, "without a layout"),
        (tiles | {"embed": {0: tiles["embed"][0]}}, layouts, {}, FileError, "no tile for devices"),
        (tiles, layouts | {"more": layouts["norm"]}, {}, FileError, "which the tree has not"),
        (tiles, layouts, {"format": "pickle"}, FileError, "'pickle'"),
        (tiles, layouts, {"chunks": {"norm": (4,)}}, FileError, "neither chunks nor codecs"),
        (tiles, layouts, {"format": "zarr", "chunks": {"norm": (0,)}}, FileError, "at least 1"),
        (tiles, layouts, {"format": "zarr", "chunks": {"more": (4,)}}, FileError, "which the tree has not"),
        ({"w": np.zeros(4)}, {"w": rs.Layout.parse("f32[4]", mesh)}, {}, LayoutError, "its layout"),
        (
            {"w": {0: np.zeros(4), 1: np.zeros(4)}},
            {"w": rs.Layout.parse("f64[4] + sum{x}", mesh)},
            {},
            LayoutError,
            "sum",
        ),
        ({3: np.zeros(4)}, None, {}, FileError, "names are text"),
        ({"w": np.zeros(4, "complex128")}, None, {}, FileError, "complex128"),
    ]
    for tree, given, options, kind, text in faults:
        with pytest.raises(kind, match=text):
            save(tmp_path / "none", tree, given, **options)
        assert not (tmp_path / "none").exists() or not any((tmp_path / "none").iterdir())


def test_a_folder_that_no_save_has_made_is_not_replaced(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("of value")
    with pytest.raises(FileError, match="no save has made"):
        save(tmp_path / "mine", {"w": np.zeros(3)}, format="zarr")
    save(tmp_path / "mine", {"w": np.zeros(3)})
    assert (tmp_path / "mine" / "notes.txt").read_text() == "of value"


@pytest.mark.parametrize("format", ["safetensors", "zarr", "hdf5"])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, format: str):
    """Files may not grow beyond a limit, in a process of its own: writing and syncing fail as on a full disk."""
    path = path_for(tmp_path, format)
    arrays = {"embed": np.arange(3000.0), "norm": np.ones(4)}
    save(path, arrays, format=format)
    code = (
        "import resource, sys, numpy as np, reshard.files, reshard.errors\n"
        "reshard.files.save(sys.argv[1] + '.warm', {'w': np.zeros(9)}, format=sys.argv[2])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "try: reshard.files.save(sys.argv[1], {'embed': np.zeros(3000), 'norm': np.zeros(4)}, format=sys.argv[2])\n"
        "except reshard.errors.FileError as error: print('refused', error)\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    run = subprocess.run(
        [sys.executable, "-c", code, str(path), format], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stdout.startswith("refused"), run.stdout + run.stderr
    one = rs.Mesh(z=1)
    layouts = {"embed": rs.Layout.parse("f64[3000]", one), "norm": rs.Layout.parse("f64[4]", one)}
    assert_same_arrays({name: of[0] for name, of in rs.files.load(path, layouts, devices=[0]).items()}, arrays)
    assert not [each for each in (*tmp_path.iterdir(), *tmp_path.glob("saved/.*")) if each.name.endswith(".part")]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "zarr", pytest.param("file", marks=pytest.mark.sweep)])
def test_killed_saves_leave_one_whole_checkpoint(format: str):
    command = [sys.executable, "benchmarks/save_kills.py", "--kills", "6", "--seed", "3", "--format", format]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("seed", range(8))
def test_sums_of_blocks_combine_from_runs_of_several_processes(seed: int):
    draw = random.Random(seed)
    content = draw.randbytes(draw.randrange(1, 40_000))
    starts = list_blocks(len(content), [draw.randrange(len(content)) for _ in range(6)])
    edges = np.append(starts, len(content))
    processes = [BlockSums({0: edges}) for _ in range(4)]
    cuts = sorted({0, len(content), *(draw.randrange(len(content)) for _ in range(30))})
    runs = list(itertools.pairwise(cuts))
    draw.shuffle(runs)
    for low, high in runs:
        draw.choice(processes).add(0, low, content[low:high])
    processes[0].merge(each.partials() for each in processes[1:])
    found = {block: value for each in processes for (_, block), value in each.found.items()}
    wanted = [zlib.crc32(content[low:high]) for low, high in itertools.pairwise(edges)]
    assert [found[block] for block in range(len(starts))] == wanted


@pytest.mark.parametrize("name", ["a", "a.safetensors", "a.zarr", "a.h5", "a.hdf5"])
def test_the_ending_of_a_path_says_the_format(name: str, tmp_path: Path):
    rs.files.save(tmp_path / name, {"w": np.arange(4.0)})
    wanted = {".zarr": "zarr", ".h5": "hdf5", ".hdf5": "hdf5"}.get(Path(name).suffix, "safetensors")
    assert rs.files.open(tmp_path / name).format == wanted

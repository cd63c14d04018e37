"""Bad files of formats in chunks, 36-40: what makes each, and what the error must name. `open` or `load` refuses them.

One thing is not betrayed: a flipped bit of a chunk without a checksum inside. `reshard files check --record`
and `save` write one beside it, as test_damages.py shows.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import numpy as np
import zarr

from tests.files.bad_files import BadFile

WHOLE = np.arange(64 * 48, dtype="float32").reshape(64, 48) * np.float32(1.7)
DATA = Path(__file__).parent.parent / "data"
ABSENT = (1 << 64) - 1


def zarr_array(folder: Path, **how: Any) -> Path:
    """A store with the array "w" in 4 x 4 chunks, or as `how` says."""
    group = zarr.open_group(folder / "store", mode="w")
    group.create_array("w", data=WHOLE, **{"chunks": (16, 12), **how})
    return folder / "store"


def after(change: Callable[[Path], None], **how: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = zarr_array(folder, **how)
        change(path)
        return path

    return make


def chunk(number: str = "1/2") -> Callable[[Path], Path]:
    return lambda path: path / "w" / "c" / number


def cut_chunk(path: Path) -> None:
    file = chunk()(path)
    file.write_bytes(file.read_bytes()[:-100])


def flip_chunk(path: Path) -> None:
    content = bytearray(chunk()(path).read_bytes())
    content[len(content) // 2] ^= 0x10
    chunk()(path).write_bytes(content)


def replace_chunk(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        chunk()(path).unlink()
        make(chunk()(path))

    return change


def edit_index(change: Callable[[np.ndarray, int], None], *, sign: bool = True) -> Callable[[Path], None]:
    """Changes the table of (offset, bytes) of a shard, and signs it again."""

    def edit(path: Path) -> None:
        file = chunk("0/1")(path)
        content = file.read_bytes()
        table = np.frombuffer(content[-4 * 16 - 4 : -4], "<u8").reshape(4, 2).copy()
        change(table, len(content))
        text = table.tobytes()
        signed = google_crc32c.value(text).to_bytes(4, "little") if sign else content[-4:]
        file.write_bytes(content[: -4 * 16 - 4] + text + signed)

    return edit


def move_chunk(at: int, offset: int | None = None, size: int | None = None) -> Callable[[np.ndarray, int], None]:
    def change(table: np.ndarray, _: int) -> None:
        table[at] = (table[at, 0] if offset is None else offset, table[at, 1] if size is None else size)

    return change


def overlap(table: np.ndarray, _: int) -> None:
    table[1] = table[0]


def edit_json(name: str, *keys: str | int, value: Any) -> Callable[[Path], None]:
    """Puts a value into the metadata."""

    def edit(path: Path) -> None:
        data = json.loads((path / name).read_text())
        at = data
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value
        (path / name).write_text(json.dumps(data))

    return edit


SHARDS = {"chunks": (8, 6), "shards": (16, 12)}
CODED = {"compressors": zarr.codecs.ZstdCodec(checksum=True)}
RAW = {"compressors": None}
GRID = ("chunk_grid", "configuration", "chunk_shape")


def orbax(kind: str, change: Callable[[Path], object]) -> Callable[[Path], Path]:
    """A checkpoint of Orbax, changed."""

    def make(folder: Path) -> Path:
        zipfile.ZipFile(DATA / "orbax.zip").extractall(folder)
        changed = change(folder / kind)
        return changed if isinstance(changed, Path) else folder / kind

    return make


def remove(pattern: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        for file in path.glob(pattern):
            file.unlink()

    return change


def rename(name: str) -> Callable[[Path], Path]:
    return lambda path: path.rename(path.with_name(name))


def escape(path: Path) -> None:
    data = json.loads((path / "_METADATA").read_text())
    entry = data["tree_metadata"].pop("('params', 'w')")
    entry["key_metadata"] = [{"key": "../../outside", "key_type": 2}]
    data["tree_metadata"]["('x',)"] = entry
    (path / "_METADATA").write_text(json.dumps(data))


def cut_values(path: Path) -> None:
    largest = max(path.glob("**/d/*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1000])


def hdf5(write: Callable[[Any, Path], object]) -> Callable[[Path], Path]:
    """A file "in/a.h5" beside a folder "out" with a file of its own."""

    def make(folder: Path) -> Path:
        for name in ("in", "out"):
            (folder / name).mkdir()
        with h5py.File(folder / "out" / "b.h5", "w") as file:
            file["w"] = WHOLE
        WHOLE.tofile(folder / "out" / "w.bin")
        path = folder / "in" / "a.h5"
        with h5py.File(path, "w") as file:
            file["v"] = WHOLE
            write(file, folder)
        return path

    return make


def external(name: str) -> Callable[[Any, Path], object]:
    return lambda file, folder: file.create_dataset(
        "w", WHOLE.shape, "f4", external=[(name.format(folder), 0, h5py.h5f.UNLIMITED)]
    )


def virtual(name: str) -> Callable[[Any, Path], object]:
    def write(file: Any, folder: Path) -> None:
        layout = h5py.VirtualLayout(WHOLE.shape, "f4")
        layout[...] = h5py.VirtualSource(name.format(folder), "w", WHOLE.shape)
        file.create_virtual_dataset("w", layout)

    return write


def numbered(file: Any, _: Path) -> None:
    """A virtual dataset of as many files as there are, each with 64 rows."""
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space = h5py.h5s.create_simple(WHOLE.shape, (h5py.h5s.UNLIMITED, 48))
    space.select_hyperslab((0, 0), (h5py.h5s.UNLIMITED, 1), stride=WHOLE.shape, block=WHOLE.shape)
    settings.set_virtual(space, b"../out/b%b.h5", b"w", h5py.h5s.create_simple(WHOLE.shape))
    whole = h5py.h5s.create_simple(WHOLE.shape, (h5py.h5s.UNLIMITED, 48))
    h5py.h5d.create(file.id, b"w", h5py.h5t.IEEE_F32LE, whole, settings)


def plugin(file: Any, _: Path) -> None:
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk((16, 12))
    settings.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))
    space = h5py.h5s.create_simple(WHOLE.shape)
    h5py.Dataset(h5py.h5d.create(file.id, b"w", h5py.h5t.IEEE_F32LE, space, settings))[...] = WHOLE


def damaged_fletcher(folder: Path) -> Path:
    path = folder / "a.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("w", data=WHOLE, chunks=(16, 12), fletcher32=True)
        offset = data.id.get_chunk_info(5).byte_offset
    content = bytearray(path.read_bytes())
    content[offset + 99] ^= 1
    path.write_bytes(content)
    return path


def damaged_tree(folder: Path) -> Path:
    """The list of what a group has is overwritten: HDF5 opens the file, and fails as it is walked."""
    path = folder / "a.h5"
    with h5py.File(path, "w") as file:
        file["w"] = WHOLE
    content = path.read_bytes()
    at = content.index(b"HEAP")
    path.write_bytes(content[:at] + b"PAEH" + content[at + 4 :])
    return path


def cut_hdf5(folder: Path) -> Path:
    path = folder / "a.h5"
    with h5py.File(path, "w") as file:
        file["w"] = WHOLE
    path.write_bytes(path.read_bytes()[:-1000])
    return path


BAD_CHUNKS = {
    "a chunk is gone": BadFile(36, after(lambda path: chunk()(path).unlink(), **RAW), "'w' .1 of 16.*16:32, 24:36"),
    "a coded chunk is gone": BadFile(36, after(lambda path: chunk()(path).unlink(), **CODED), "'w' .1 of 16"),
    "a shard is gone": BadFile(36, after(lambda path: chunk()(path).unlink(), **SHARDS), "'w' .4 of 64"),
    "a chunk in a shard is gone": BadFile(
        36, after(edit_index(move_chunk(2, ABSENT, ABSENT)), **SHARDS), "'w' .1 of 64.*8:16, 12:18"
    ),
    "a chunk is cut": BadFile(37, after(cut_chunk, **RAW), "c/1/2'.*'w'.* 668 B.* takes 768"),
    "a chunk is empty": BadFile(37, after(replace_chunk(lambda file: file.touch()), **RAW), "c/1/2'.*'w'.*has 0 B"),
    "a coded chunk is cut": BadFile(37, after(cut_chunk, **CODED), "'w'.*cannot be read.*c/1/2"),
    "a coded chunk with a flipped bit": BadFile(37, after(flip_chunk, **CODED), "'w'.*cannot be read.*c/1/2"),
    "a chunk is a pipe": BadFile(37, after(replace_chunk(os.mkfifo)), "c/1/2'.* not a regular file"),
    "a chunk is a link out of the folder": BadFile(
        37, after(replace_chunk(lambda file: file.symlink_to("/etc/passwd"))), "c/1/2'.*link to '/etc/passwd'"
    ),
    "the folder of chunks links to itself": BadFile(
        37, after(lambda path: (path / "w" / "again").symlink_to(path)), "again'.*is a link"
    ),
    "a shard's index points behind its file": BadFile(
        38, after(edit_index(move_chunk(3, 1 << 40)), **SHARDS), "c/0/1'.*'w', byte 1099511627776.*outside"
    ),
    "a shard's index points into itself": BadFile(
        38, after(edit_index(move_chunk(3, size=1 << 20)), **SHARDS), "c/0/1'.*'w', byte .*outside"
    ),
    "chunks of a shard overlap": BadFile(38, after(edit_index(overlap), **SHARDS), "c/0/1'.*'w', byte .*overlaps"),
    "a shard's index is not the one that was written": BadFile(
        38, after(edit_index(move_chunk(3, size=5), sign=False), **SHARDS), "c/0/1'.*'w', byte .*CRC-32C"
    ),
    "a shard is shorter than its index": BadFile(
        38, after(lambda path: os.truncate(chunk("0/1")(path), 40), **SHARDS), "c/0/1'.*'w'.*40 B.*index"
    ),
    **{
        f"chunks of size {value}": BadFile(
            38, after(edit_json("w/zarr.json", *GRID, 0, value=value)), "w/zarr.json'.*chunk_shape"
        )
        for value in (0, -1, 1 << 63, 2.0, True, "x", None)
    },
    "sizes whose product is out of range": BadFile(
        38, after(edit_json("w/zarr.json", "shape", value=[1 << 40, 1 << 40])), "w/zarr.json'.*shape"
    ),
    "a shape of other dims": BadFile(38, after(edit_json("w/zarr.json", "shape", value=[64])), "w/zarr.json'.*2 dims"),
    "a codec that nobody knows": BadFile(
        38, after(edit_json("w/zarr.json", "codecs", 1, "name", value="evil")), "w/zarr.json'.*codec is 'evil'"
    ),
    "a dtype that nobody knows": BadFile(
        38, after(edit_json("w/zarr.json", "data_type", value="float33")), "w/zarr.json'.*float33"
    ),
    "a dtype below a byte": BadFile(
        38, after(edit_json("w/zarr.json", "data_type", value="int4")), "w/zarr.json'.*int4"
    ),
    "another grid": BadFile(
        38, after(edit_json("w/zarr.json", "chunk_grid", "name", value="rectilinear")), "w/zarr.json'.*rectilinear"
    ),
    "another version": BadFile(
        38, after(edit_json("w/zarr.json", "zarr_format", value=4)), "w/zarr.json'.*zarr_format is 4"
    ),
    "metadata that are no JSON": BadFile(
        38, after(lambda path: (path / "w/zarr.json").write_text("{" * 100_000)), "w/zarr.json'.*JSON"
    ),
    "metadata of many bytes": BadFile(
        38, after(lambda path: os.truncate(path / "w/zarr.json", 1 << 31)), "w/zarr.json'.*metadata may take"
    ),
    "metadata that are a pipe": BadFile(
        38,
        after(lambda path: ((path / "w/zarr.json").unlink(), os.mkfifo(path / "w/zarr.json"))),
        "zarr.json'.*regular",
    ),
    "the manifest is gone": BadFile(39, orbax("zarr2", remove("manifest.ocdbt")), "manifest.ocdbt' is not there"),
    "the manifest is empty": BadFile(
        39, orbax("zarr2", lambda path: (path / "manifest.ocdbt").write_bytes(b"")), "zarr2'.*database cannot be read"
    ),
    "nodes of the database are gone": BadFile(39, orbax("zarr2", remove("d/*")), "zarr2'.*database cannot be read"),
    "values of the database are cut": BadFile(39, orbax("zarr2", cut_values), "zarr2'.*cannot be read"),
    "a save in progress": BadFile(39, orbax("zarr2", rename("zarr2.orbax-checkpoint-tmp")), "in progress"),
    "an older save in progress": BadFile(39, orbax("zarr2", rename("7.orbax-checkpoint-tmp-12345")), "in progress"),
    "no time of a commit": BadFile(
        39,
        orbax("zarr2", edit_json("_CHECKPOINT_METADATA", "commit_timestamp_nsecs", value=None)),
        "no time of a commit",
    ),
    "an item without its mark of the commit": BadFile(
        39, orbax("steps/3/state", remove("commit_success.txt")), "commit_success"
    ),
    "a step without its mark of the commit": BadFile(
        39, orbax("steps/3", remove("commit_success.txt")), "commit_success"
    ),
    "no tree": BadFile(39, orbax("zarr2", remove("_METADATA")), "zarr2' has no _METADATA"),
    "a tree that is cut": BadFile(
        39, orbax("zarr2", lambda path: os.truncate(path / "_METADATA", 500)), "_METADATA'.*JSON"
    ),
    "a tree with a name that escapes": BadFile(39, orbax("zarr2", escape), "_METADATA'.*'../../outside'"),
    "a folder with a name that escapes": BadFile(39, orbax("folders", escape), "_METADATA'.*'../../outside'"),
    "a tree with an array that is not there": BadFile(
        39,
        orbax("zarr2", edit_json("_METADATA", "tree_metadata", "('params', 'w')", "key_metadata", 1, "key", value="x")),
        "'params.x'",
    ),
    "a chunk of a folder is gone": BadFile(39, orbax("folders", remove("params.w/1.1")), "'params.w' .1 of 8"),
    "an external dataset with a path from the root": BadFile(
        40, hdf5(external("{}/out/w.bin")), "in/a.h5'.*out/w.bin.*outside"
    ),
    "an external dataset that climbs out": BadFile(
        40, hdf5(external("../out/w.bin")), "in/a.h5'.*'../out/w.bin'.*outside"
    ),
    "an external dataset that is not there": BadFile(40, hdf5(external("w.bin")), "in/w.bin'.*cannot be opened"),
    "a virtual dataset with a path from the root": BadFile(
        40, hdf5(virtual("{}/out/b.h5")), "in/a.h5'.*out/b.h5.*outside"
    ),
    "a virtual dataset that climbs out": BadFile(40, hdf5(virtual("../out/b.h5")), "in/a.h5'.*'../out/b.h5'.*outside"),
    "a virtual dataset that is not there": BadFile(40, hdf5(virtual("b.h5")), "in/b.h5'.*cannot be opened"),
    "a virtual dataset of itself": BadFile(40, hdf5(virtual(".")), "in/a.h5'.*part of itself"),
    "a virtual dataset of many files": BadFile(40, hdf5(numbered), "in/a.h5'.*numbered"),
    "a link to another file": BadFile(
        40,
        hdf5(lambda file, _: file.__setitem__("w", h5py.ExternalLink("../out/b.h5", "w"))),
        "in/a.h5'.*out/b.h5.*outside",
    ),
    "a filter that is a plugin": BadFile(40, hdf5(plugin), "in/a.h5', tensor 'w'.*32015.*plugin"),
    "a chunk with a wrong fletcher32": BadFile(37, damaged_fletcher, "a.h5', tensor 'w'.*cannot be read"),
    "an HDF5 file whose groups are damaged": BadFile(37, damaged_tree, "a.h5'.*cannot be read as HDF5"),
    "an HDF5 file that is cut": BadFile(37, cut_hdf5, "a.h5'.*cannot be opened"),
    "a file that is no HDF5": BadFile(40, lambda folder: _text(folder / "a.h5"), "a.h5'.*cannot be opened"),
}


def _text(path: Path) -> Path:
    path.write_text("text")
    return path

"""Damaged checkpoints of 12 formats: a flipped bit, 4 KiB of zeros, a cut file, none; each an error.

Elements are random, so that they do not compress and every damage changes some.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import reshard as rs
from reshard.errors import FileError
from reshard.runtime.on_files.drivers import NewArray, create_stored, open_driver
from tests.files.dcp_maker import Chunk, Tensor, chunk_zip, write_dcp

RANDOM = np.random.default_rng(5)
TREE = {
    "w": RANDOM.standard_normal((96, 128)).astype("float32"),
    "deep.v": RANDOM.integers(0, 1 << 60, (64, 72)),
    "scale": RANDOM.standard_normal(()).astype("float32"),
}
CHUNKS = {"w": (48, 64), "deep.v": (32, 72)}


def saved(name: str, **how: object) -> Callable[[Path], Path]:
    """Saved by `rs.files.save`, which writes the sidecar."""

    def write(folder: Path) -> Path:
        rs.files.save(folder / name, TREE, **how)
        return folder / name

    return write


def recorded(write: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """Written by others; the check has recorded the sums."""

    def record(folder: Path) -> Path:
        path = write(folder)
        report = rs.files.check(path, record=True)
        assert not report.faults
        return path

    return record


def write_npy(folder: Path) -> Path:
    for name, array in TREE.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def write_torch(folder: Path) -> Path:
    tensors = {}
    for name, array in TREE.items():
        half = max(1, len(array) // 2) if array.shape else 0
        parts = {at: array[at : at + half] for at in range(0, len(array), half)} if array.shape else {0: array}
        dtype = str(array.dtype)
        chunks = [
            Chunk((at, 0)[: array.ndim], part.shape, f"__{number}_0.distcp", chunk_zip(part, dtype))
            for number, (at, part) in enumerate(parts.items())
        ]
        tensors[name] = Tensor(dtype, array.shape, chunks)
    write_dcp(folder / "torch", tensors)
    return folder / "torch"


def write_shards(folder: Path) -> Path:
    path = str(folder / "shards.zarr")
    new = {
        name: NewArray(str(array.dtype), array.shape, CHUNKS.get(name, ()), array.shape or None, "zstd")
        for name, array in TREE.items()
    }
    ckpt = create_stored(path, "zarr", new)
    driver = open_driver(ckpt)
    for name, array in TREE.items():
        driver.write_box(ckpt[name], tuple((0, size) for size in array.shape), array)
    return Path(path)


FORMATS = {
    "safetensors": saved("model.safetensors"),
    "safetensors in shards": saved("model", shards=60_000),
    "npy": recorded(write_npy),
    "torch": recorded(write_torch),
    "zarr": saved("raw.zarr", format="zarr", chunks=CHUNKS),
    "zarr, zstd": saved("coded.zarr", format="zarr", chunks=CHUNKS, codec="zstd"),
    "zarr, shards": recorded(write_shards),
    "zarr 2": saved("two.zarr", format="zarr2", chunks=CHUNKS, codec="zstd"),
    "orbax": saved("orbax", format="orbax", chunks=CHUNKS),
    "orbax, zarr 3": saved("orbax3", format="orbax3", chunks=CHUNKS),
    "hdf5": saved("plain.h5", format="hdf5"),
    "hdf5, gzip": saved("coded.h5", format="hdf5", chunks=CHUNKS, codec="gzip"),
}
SILENT = {"safetensors", "safetensors in shards", "npy", "zarr", "zarr 2", "orbax", "hdf5"}
"""Where a flipped bit is loaded without a word if there is no sidecar: the others have sums inside, or a coding that
happens to break."""


def load_whole(path: Path) -> dict[str, np.ndarray]:
    mesh = rs.Mesh(x=2)
    ckpt = rs.files.open(path)
    axes = {2: [["x"], []], 0: []}
    targets = {
        name: rs.Layout.from_spec(mesh, each.shape, each.dtype, axes[len(each.shape)]) for name, each in ckpt.items()
    }
    tiles = rs.files.load(ckpt, targets, devices=[0, 1])
    return {name: np.concatenate([of[0], of[1]]) if np.ndim(of[0]) else of[0] for name, of in tiles.items()}


def place_of_elements(path: Path, seed: int) -> tuple[Path, int, int]:
    """A file that has elements, where those of a piece of "w" are in it, and their bytes."""
    ckpt = rs.files.open(path)
    pieces = [piece for piece in ckpt["w"].pieces if piece.file >= 0]
    if not pieces:  # In a database: in the middle of its largest file.
        largest = max(path.glob("**/d/*"), key=lambda file: file.stat().st_size)
        size = largest.stat().st_size
        return largest, size // 4 + 97 * seed, size // 2
    piece = pieces[seed % len(pieces)]
    return Path(ckpt.files[piece.file].path), piece.offset, piece.nbytes


def damage(path: Path, kind: str, seed: int) -> None:
    file, offset, nbytes = place_of_elements(path, seed)
    content = bytearray(file.read_bytes())
    if kind == "flip":
        content[offset + (nbytes // 7 * (seed + 1)) % nbytes] ^= 1 << seed
    elif kind == "zeros":
        count = min(4096, nbytes)
        content[offset : offset + count] = bytes(count)
    elif kind == "cut":
        del content[-1000:]
    file.unlink()
    if kind != "deleted":
        file.write_bytes(content)


@pytest.mark.parametrize("name", FORMATS)
def test_every_damage_is_an_error(tmp_path: Path, name: str):
    path = FORMATS[name](tmp_path)
    for key, array in load_whole(path).items():
        np.testing.assert_array_equal(array, TREE[key])
    assert not rs.files.check(path).faults
    assert rs.files.check(path).unchecked == 0
    whole = {file: file.read_bytes() for file in tmp_path.glob("**/*") if file.is_file()}
    silent = 0
    for kind in ("flip", "zeros", "cut", "deleted"):
        for seed in range(4 if kind == "flip" else 2):
            damage(path, kind, seed)
            with pytest.raises(FileError) as caught:
                load_whole(path)
            assert str(tmp_path) in str(caught.value)
            with contextlib.suppress(FileError):  # `open` may have refused it already.
                assert rs.files.check(path).faults
            if kind == "flip":
                silent += loads_silently(path)
            for file, content in whole.items():
                file.write_bytes(content)
    assert (silent > 0) == (name in SILENT), silent


def remove_sidecar(path: Path) -> None:
    for file in path.parent.glob("**/*reshard.json"):
        file.unlink()


def loads_silently(path: Path) -> bool:
    """Whether wrong elements come without an error if there is no sidecar."""
    remove_sidecar(path)
    try:
        loaded = load_whole(path)
    except FileError:
        return False
    return any(not np.array_equal(array, TREE[key]) for key, array in loaded.items())


def test_an_undamaged_copy_elsewhere_is_intact(tmp_path: Path):
    """Sums go with the files, whatever their times and folders are."""
    path = FORMATS["zarr"](tmp_path)
    os.rename(path, tmp_path / "moved")
    assert not rs.files.check(tmp_path / "moved").faults


def print_table() -> None:
    """The table in docs/explanation/files.md: `python -m tests.files.test_damages`."""
    import tempfile

    kinds = ("flip", "zeros", "cut", "deleted")
    print(f"| format | {' | '.join(kinds)} | with `reshard.json` |\n|---|---|---|---|---|---|")
    for name, write in FORMATS.items():
        found: dict[tuple[str, bool], int] = {}
        for kind, seed, alone in itertools.product(kinds, range(4), (True, False)):
            with tempfile.TemporaryDirectory() as folder:
                path = write(Path(folder))
                damage(path, kind, seed)
                if alone:
                    remove_sidecar(path)
                try:
                    load_whole(path)
                except FileError:
                    found[kind, alone] = found.get((kind, alone), 0) + 1
        formats_own = [f"{found.get((kind, True), 0)} of 4" for kind in kinds]
        print(f"| {name} | {' | '.join(formats_own)} | {sum(found.get((kind, False), 0) for kind in kinds)} of 16 |")


if __name__ == "__main__":
    print_table()

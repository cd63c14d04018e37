"""Arrays in chunks, as zarr, Orbax and h5py wrote them: what `open` says, and what drivers decode, against numpy."""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
import zarr

import reshard as rs
from reshard.errors import FileError, MissingTensorError
from reshard.plans.stored import Checkpoint, Stored
from reshard.runtime.on_files.drivers import NewArray, check_missing, create_stored, describe_stored_array, open_driver

WHOLE = np.arange(10 * 12, dtype="float32").reshape(10, 12)
DATA = Path(__file__).parent.parent / "data"
ZARR = {
    "raw": {"chunks": (4, 5), "compressors": None},
    "zstd": {"chunks": (4, 5)},
    "gzip": {"chunks": (4, 12), "compressors": zarr.codecs.GzipCodec()},
    "shards": {"chunks": (2, 3), "shards": (4, 6), "compressors": None},
    "coded shards": {"chunks": (2, 3), "shards": (4, 6)},
    "transposed": {"chunks": (4, 5), "filters": zarr.codecs.TransposeCodec(order=(1, 0)), "compressors": None},
}


def read_chunks(ckpt: Checkpoint, name: str, dtype: object = "float32") -> np.ndarray:
    """A tensor, raw pieces by numpy from their bytes, the others chunk by chunk by the driver."""
    stored = ckpt[name]
    out = np.full(stored.shape, 77, dtype)
    driver = open_driver(ckpt)
    for piece in stored.pieces:
        shape = [stop - start for start, stop in piece.box]
        if piece.raw:
            content = Path(ckpt.files[piece.file].path).read_bytes()[piece.offset : piece.offset + piece.nbytes]
            assert len(content) == piece.nbytes
            flat = np.frombuffer(content, dtype)
            strides = [flat.itemsize * each for each in piece.strides] if piece.strides else None
            part = np.lib.stride_tricks.as_strided(flat, shape, strides) if strides else flat.reshape(shape)
        else:
            part = np.empty(shape, dtype)
            driver.start_boxes([(stored, piece.box, part)])()
        out[tuple(slice(*each) for each in piece.box)] = part
    driver.close()
    return out


def write_zarr(path: Path, version: int) -> None:
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name, how in ZARR.items():
        if version == 3 or name in ("raw", "zstd"):
            group.create_array(f"deep/{name}", data=WHOLE, **how)
    group.create_array("scalar", data=np.float32(3), chunks=())
    if version == 2:
        group.create_array("fortran", data=WHOLE, chunks=(4, 5), order="F", compressors=None)
        group.create_array("big-endian", data=WHOLE.astype(">i2"), chunks=(4, 5))
        group.create_array("slashes", data=WHOLE, chunks=(4, 5), chunk_key_encoding={"name": "v2", "separator": "/"})
    group.create_array("dates", shape=(3,), dtype="M8[s]", fill_value=0)


@pytest.mark.parametrize("version", [2, 3])
def test_stores_of_zarr_are_what_zarr_reads(tmp_path: Path, version: int):
    write_zarr(tmp_path / "z", version)
    ckpt = rs.files.open(tmp_path / "z")
    judge = zarr.open_group(tmp_path / "z", mode="r")
    assert set(ckpt) == {name for name, each in judge.members(max_depth=None) if isinstance(each, zarr.Array)} - {
        "dates"
    }
    for name, stored in ckpt.items():
        expected = judge[name][...]
        assert (stored.dtype, stored.shape) == (expected.dtype.name, expected.shape)
        np.testing.assert_array_equal(read_chunks(ckpt, name, expected.dtype.newbyteorder("=")), expected)
    raw = {name for name, stored in ckpt.items() if stored.pieces[0].raw}
    of_version = {2: {"deep/raw", "fortran"}, 3: {"deep/raw", "deep/shards"}}
    assert raw == of_version[version]  # Everything else is decoded whole,
    clipped = [piece.box for piece in ckpt["deep/raw"].pieces if not piece.raw]
    assert clipped == [((at, min(at + 4, 10)), (10, 12)) for at in (0, 4, 8)]  # and where rows are clipped, these too.


def test_an_array_alone_has_no_name(tmp_path: Path):
    zarr.save_array(tmp_path / "z", WHOLE)
    ckpt = rs.files.open(tmp_path / "z")
    assert list(ckpt) == [""]
    np.testing.assert_array_equal(read_chunks(ckpt, ""), WHOLE)


def test_a_grid_of_chunks_is_a_layout(tmp_path: Path):
    for shape, chunks, text in (((12, 8), (3, 4), "f32[{c0}3, {c1}4]"), ((10, 8), (3, 4), "f32[{c0}3/10, {c1}4]")):
        ckpt = create_stored(str(tmp_path / f"{shape}"), "zarr", {"": NewArray("float32", shape, chunks)})
        assert str(ckpt[""].layout) == text


def test_chunks_that_are_missing_are_refused_together_or_filled(tmp_path: Path):
    group = zarr.open_group(tmp_path / "z", mode="w")
    for name, how in ZARR.items():
        array = group.create_array(name, shape=(10, 12), dtype="float32", fill_value=7, **how)
        array[:4, :6] = WHOLE[:4, :6]
    ckpt = rs.files.open(tmp_path / "z")
    with pytest.raises(MissingTensorError, match="missing='fill'") as caught:
        check_missing(ckpt, ckpt)
    assert all(repr(name) in str(caught.value) for name in ZARR)
    box = ((0, 10), (0, 12))
    for name, stored in ckpt.items():
        with pytest.raises(FileError, match="missing"):
            open_driver(ckpt).start_boxes([(stored, box, np.empty((10, 12), "float32"))])()
        out = np.empty((10, 12), "float32")
        open_driver(ckpt, missing="fill").start_boxes([(stored, box, out)])()
        np.testing.assert_array_equal(out, group[name][...])
        there = sum(piece.nbytes > 0 for piece in stored.pieces)
        assert 0 < there < len(stored.pieces)
        assert all(piece.raw or piece.nbytes for piece in stored.pieces[:1])
    check_missing(ckpt, ckpt, "fill")


def test_of_very_many_chunks_the_sizes_are_known(tmp_path: Path):
    array = zarr.create_array(tmp_path / "z", shape=(1 << 20,), chunks=(8,), dtype="float32", compressors=None)
    array[800:816] = 1
    stored = rs.files.open(tmp_path / "z")[""]
    assert (len(stored.pieces), stored.stored_bytes, stored.pieces[101].nbytes, stored.pieces[102].nbytes) == (
        1 << 17,
        64,
        32,
        0,
    )


@pytest.fixture(scope="module")
def orbax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that Orbax wrote, by tests/data/write_orbax.py."""
    folder = tmp_path_factory.mktemp("orbax")
    zipfile.ZipFile(DATA / "orbax.zip").extractall(folder)
    return folder


def marked(shape: tuple[int, ...], dtype: object) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


@pytest.mark.parametrize("kind", ["zarr2", "zarr3", "folders", "steps/3", "steps/3/state", "sparse"])
def test_trees_of_orbax(orbax: Path, kind: str):
    ckpt = rs.files.open(orbax / kind)
    expected = {
        "params.w": marked((32, 24), "float32"),
        "params.emb": marked((10, 12), ml_dtypes.bfloat16),
        "params.layers.0": marked((8,), "int8"),
        "params.layers.1": marked((9,), "float32"),
        "zeros": np.zeros((8, 4), "float32"),
        "step": np.array(7),
    }
    assert (set(ckpt), ckpt.format) == (set(expected), "orbax")
    check_missing(ckpt, ckpt)  # Orbax leaves chunks of zeros out where it says so.
    for name, array in expected.items():
        assert (ckpt[name].dtype, ckpt[name].shape) == (array.dtype.name, array.shape)
        np.testing.assert_array_equal(read_chunks(ckpt, name, array.dtype), array)
    assert str(ckpt["params.w"].layout) == "f32[{c0}8, {c1}12]"


def test_each_byte_of_orbax_is_read_once(orbax: Path):
    """What tensorstore counts, beside the size of the values: nodes of the database are read once, too."""
    ckpt = rs.files.open(orbax / "zarr2")
    driver = open_driver(ckpt)
    stored = ckpt["params.w"]
    for piece in stored.pieces:
        driver.start_boxes([(stored, piece.box, np.empty((8, 12), "float32"))])()
    counts = driver.read_counts()
    assert 0 < counts.bytes < sum(file.size for file in ckpt.files)
    assert counts.requests <= len(stored.pieces) + 8


def write_hdf5(path: Path) -> None:
    with h5py.File(path, "w", userblock_size=512) as file:
        file["plain"] = WHOLE
        file.create_dataset("deep/chunked", data=WHOLE, chunks=(4, 5))
        file.create_dataset("deep/gzip", data=WHOLE, chunks=(4, 5), compression="gzip", shuffle=True, fletcher32=True)
        file.create_dataset("lzf", data=WHOLE, chunks=(4, 5), compression="lzf")
        file["flags"] = WHOLE > 50
        file["complex"] = WHOLE + 1j
        file["big-endian"] = WHOLE.astype(">f4")
        file["scalar"] = np.float32(3)
        file["text"] = ["a", "b"]
        file["none"] = np.zeros((0, 3), "float32")
        file["plain again"] = h5py.SoftLink("/plain")


def test_datasets_of_hdf5_are_what_h5py_reads(tmp_path: Path):
    write_hdf5(tmp_path / "a.h5")
    ckpt = rs.files.open(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as judge:
        expected = {name: judge[name][()] for name in ckpt}
    assert set(ckpt) == {
        *("plain", "deep/chunked", "deep/gzip", "lzf", "flags", "complex", "big-endian", "scalar", "none")
    }
    for name, array in expected.items():
        assert (ckpt[name].dtype, ckpt[name].shape) == (array.dtype.name, array.shape)
        np.testing.assert_array_equal(read_chunks(ckpt, name, array.dtype.newbyteorder("=")), array)
    raw = {name for name, stored in ckpt.items() if stored.pieces[0].raw}
    assert raw >= {"plain", "deep/chunked", "flags", "scalar"} and not raw & {"deep/gzip", "lzf", "big-endian"}


def test_hdf5_of_several_files(tmp_path: Path):
    """Virtual and external datasets are read where all of their files are beside them."""
    for part in range(2):
        with h5py.File(tmp_path / f"part{part}.h5", "w") as file:
            file["x"] = WHOLE[5 * part : 5 * part + 5]
    WHOLE.tofile(tmp_path / "elements.bin")
    layout = h5py.VirtualLayout((10, 12), "float32")
    for part in range(2):
        layout[5 * part : 5 * part + 5] = h5py.VirtualSource(f"part{part}.h5", "x", (5, 12))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", (9, 12), "float32", external=[("elements.bin", 48, h5py.h5f.UNLIMITED)])
    ckpt = rs.files.open(tmp_path / "all.h5")
    np.testing.assert_array_equal(read_chunks(ckpt, "virtual"), WHOLE)
    np.testing.assert_array_equal(read_chunks(ckpt, "external"), WHOLE[1:])


def boxes_of(stored: Stored, unit: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    along = [
        [(at, min(at + each, size)) for at in range(0, size, each)]
        for size, each in zip(stored.shape, unit, strict=True)
    ]
    return list(itertools.product(*along))


@pytest.mark.parametrize("format", ["zarr", "zarr2", "orbax", "orbax3", "hdf5"])
def test_what_is_written_others_read(tmp_path: Path, format: str):
    arrays = {
        "w": (WHOLE, NewArray("float32", (10, 12), (4, 5))),
        "p.bf": (WHOLE.astype(ml_dtypes.bfloat16), NewArray("bfloat16", (10, 12), (4, 12), codec="gzip")),
        "flags": (WHOLE > 50, NewArray("bool", (10, 12), (3, 4))),
        "s": (np.float32(3), NewArray("float32", ())),
    }
    if format == "zarr":
        arrays["a/shards"] = (WHOLE, NewArray("float32", (10, 12), (2, 3), (4, 6), "zstd"))
    path = str(tmp_path / "out.h5")
    ckpt = create_stored(path, format, {name: new for name, (_, new) in arrays.items()}, {"title": "marked"})
    driver = open_driver(ckpt)
    for name, (array, new) in arrays.items():
        for box in boxes_of(ckpt[name], new.shards or new.chunks or ()):
            driver.write_box(ckpt[name], box, np.asarray(array[tuple(slice(*each) for each in box)]))
    driver.close()
    written = rs.files.open(path)
    for name, (array, new) in arrays.items():
        np.testing.assert_array_equal(read_chunks(written, name, array.dtype), array)
        assert all(piece.nbytes for piece in written[name].pieces)
        assert describe_stored_array(written, name).chunks == (new.chunks if new.shape else written[name].chunks)
    if format in ("zarr", "zarr2"):
        judge = zarr.open_group(path, mode="r")
        assert dict(judge.attrs) == {"title": "marked"}
        for name in arrays.keys() - {"p.bf"}:  # zarr-python has no bfloat16.
            np.testing.assert_array_equal(judge[name][...], arrays[name][0])
    if format == "hdf5":
        with h5py.File(path) as file:
            np.testing.assert_array_equal(file["w"][...], WHOLE)


@pytest.mark.parametrize("version", [2, 3])
def test_an_array_described_is_made_again(tmp_path: Path, version: int):
    """What xarray keeps beside elements goes along: fill value, attributes, the names of dims."""
    group = zarr.open_group(tmp_path / "z", mode="w", zarr_format=version)
    named = {"dimension_names": ("time", "y")} if version == 3 else {}
    array = group.create_array("t", data=WHOLE, chunks=(4, 5), fill_value=np.nan, **named)
    array.attrs["units"] = "K"
    if version == 2:
        array.attrs["_ARRAY_DIMENSIONS"] = ["time", "y"]
    new = describe_stored_array(rs.files.open(tmp_path / "z"), "t")
    assert (new.codec, new.chunks, new.dimension_names, new.attributes) == (
        "zstd" if version == 3 else "blosc",
        (4, 5),
        ("time", "y"),
        {"units": "K"},
    )
    create_stored(str(tmp_path / "again"), "zarr" if version == 3 else "zarr2", {"t": new})
    again = zarr.open_group(tmp_path / "again", mode="r")["t"]
    assert np.isnan(again.fill_value) and again.attrs["units"] == "K" and again.chunks == (4, 5)

"""Loads into one process, against numpy: every byte is read once, in the calls that are counted before."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import reshard as rs
from reshard.errors import ChecksumError, FileError, MissingTensorError, PlanError
from reshard.lower.to_files.file_reads import list_file_reads, list_spans
from reshard.plans.stored import ChunkGrid
from reshard.runtime.on_files import engine, result_memory
from reshard.runtime.on_files.engine import CheckpointReader, ReadCounts
from reshard.runtime.on_files.host_load import load_in_process
from reshard.synth.reading import plan_reading
from reshard.types.meaning import meaning
from tests.files.load_files import chunks_of, write_pieces
from tests.synth.loads import draw_problem, expect, fill, store


@pytest.mark.parametrize("start", range(0, 60, 20))
def test_random_loads_of_one_process(tmp_path: Path, start: int):
    for seed in range(start, start + 20):
        problem = draw_problem(random.Random(seed))
        devices = next(iter(problem.moves.values())).target.mesh.devices
        plan = plan_reading(*problem._replace(process_of=dict.fromkeys(devices, 0)))
        arrays = fill(problem.stored)
        ckpt = write_pieces(tmp_path / f"{seed}", problem.stored, arrays)
        counts = ReadCounts()
        with chunks_of(arrays):
            tiles = load_in_process(plan, CheckpointReader(ckpt, counts), lambda _: None)
        want = expect(problem.moves, problem.sources, problem.fills, arrays)
        assert set(tiles) == set(want)
        for name, of in want.items():
            for device, tile in of.items():
                np.testing.assert_array_equal(tiles[name][device], tile, f"{seed}: {name} on {device}")
        raw = [each for each in problem.stored.values() if not isinstance(each.pieces, ChunkGrid)]
        assert counts.bytes == sum(each.nbytes for each in raw)


def test_files_beyond_a_number_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All are read, whatever their number, and few are open at a time."""
    monkeypatch.setattr(engine, "MOST_OPEN", 3)
    arrays = {f"w{at}": np.full((4, 8), at, "float32") for at in range(9)}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    targets = {name: rs.Layout.parse("f32[{x}2, 8]", rs.Mesh(x=2)) for name in arrays}
    ckpt, counts, most = rs.files.open(tmp_path), ReadCounts(), list[int]()
    whole = os.preadv

    def preadv(file: int, buffers: list[np.ndarray], at: int) -> int:
        most.append(len([of for of in map(os.readlink, _list_descriptors()) if str(tmp_path) in of]))
        return whole(file, buffers, at)

    monkeypatch.setattr(engine.os, "preadv", preadv)
    tiles = rs.files.load(ckpt, targets, counts=counts)
    assert all((tiles[name][1] == array[2:]).all() for name, array in arrays.items())
    assert len(counts.files) == 9 and max(most) == 3


def _list_descriptors() -> list[str]:
    return [f"/proc/self/fd/{at}" for at in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{at}")]


def test_results_take_memory_of_dead_ones_alone(tmp_path: Path):
    """Two tiles that live never share a byte, whatever died before; a load of other sizes keeps nothing idle."""
    arrays = {size: np.arange(size * 1024, dtype="float32").reshape(size, 1024) for size in (1024, 1536)}
    rows = {}
    for size, array in arrays.items():
        save_file({"w": array}, tmp_path / f"{size}.safetensors")
        rows[size] = {"w": rs.Layout.parse(f"f32[{size}, 1024]", rs.Mesh(x=1))}

    def load(size: int) -> np.ndarray:
        return rs.files.load(tmp_path / f"{size}.safetensors", rows[size])["w"][0]

    held, dead = load(1024), load(1024)
    del dead
    first, second = load(1024), load(1024)
    first[...], second[...] = 1, 2
    assert np.array_equal(held, arrays[1024]) and (first == 1).all() and (second == 2).all()
    del first, second
    assert np.array_equal(load(1024), arrays[1024])
    assert np.array_equal(load(1536), arrays[1536])
    assert sum(map(len, result_memory.IDLE.values())) <= 1
    assert np.array_equal(held, arrays[1024])


def test_neighbours_of_a_file_are_one_call(tmp_path: Path):
    stored = {f"w{at}": store(f"w{at}", (4, 8), at=128 * at) for at in range(1500)}
    ckpt = write_pieces(tmp_path / "file", stored, fill(stored))
    counts = ReadCounts()
    mesh = rs.Mesh(x=2)
    targets = {name: rs.Layout.parse("f32[{x}2, 8]", mesh) for name in stored}
    plan = rs.files.plan_load(ckpt, targets, devices=[0, 1], read_size=1)
    tiles = rs.files.load(ckpt, targets, counts=counts)
    assert np.array_equal(tiles["w7"][1], fill(stored)["w7"][2:])
    # 3,000 tiles, of which a call fills 1,024 at most.
    assert (counts.bytes, counts.files) == (1500 * 128, {0})
    assert counts.calls <= 3 + 2 * (len(plan.waves) - 1)


def test_columns_of_one_process_are_read_together(tmp_path: Path):
    stored = {"w": store("w", (600, 64))}
    arrays = fill(stored)
    ckpt, counts = write_pieces(tmp_path / "file", stored, arrays), ReadCounts()
    mesh = rs.Mesh(x=8)
    tiles = rs.files.load(ckpt, {"w": rs.Layout.parse("f32[600, {x}8]", mesh)}, counts=counts)["w"]
    for device in mesh.devices:
        np.testing.assert_array_equal(tiles[device], arrays["w"][:, 8 * device : 8 * device + 8])
    assert (counts.bytes, counts.calls) == (600 * 256, 1)
    # A part of them is as many spans as rows, unless it is every column.
    layout = rs.Layout.parse("f32[600, {x}8]", mesh)
    for devices, count in ((range(3), 600), (range(8), 1)):
        reads = [(device, 4, list_file_reads(stored["w"], layout, device)) for device in devices]
        assert len(list_spans(reads)) == count


def test_what_no_move_takes_is_not_read(tmp_path: Path):
    whole = np.arange(96 * 64 * 8, dtype="float32").reshape(96, 64, 8)
    save_file({"w": whole}, tmp_path / "w.safetensors")
    np.save(tmp_path / "fortran.npy", np.asfortranarray(whole))
    for name, codec in (("zarr", "zstd"), ("orbax", "zstd"), ("hdf5", "gzip")):
        at = tmp_path / (name if name != "hdf5" else "w.h5")
        rs.files.save(at, {"w": whole}, format=name, chunks={"w": (16, 16, 8)}, codec=codec)
    mesh, unit = rs.Mesh(x=2, y=2), 16 * 16 * 8 * 4
    # What is taken, and of what is taken apart how many chunks of six rows of four; of two moves, what either takes.
    cases = [
        ({0: slice(20, 44)}, "f32[{x}12, {y}32, 8]", 8),
        ({0: slice(16, 48), 1: slice(20, 44)}, "f32[{y}16, {x}12, 8]", 4),
        ({0: 7}, "f32[{x}32, 8]", 4),
        ([{0: slice(0, 16)}, {0: slice(32, 40)}], "f32[{x}{y}4, 64, 8]", 12),
    ]
    for file in ("w.safetensors", "fortran.npy", "zarr", "orbax", "w.h5"):
        ckpt = rs.files.open(tmp_path / file)
        (name,) = ckpt
        for take, text, chunks in cases:
            takes = take if isinstance(take, list) else [take]
            layouts = [rs.Layout.parse(text.replace("4, 64", f"{4 // (at + 1)}, 64"), mesh) for at in range(len(takes))]
            moves = {
                f"t{at}": rs.Move(ckpt[name].as_stored, layout, take=each)
                for at, (each, layout) in enumerate(zip(takes, layouts, strict=True))
            }
            counts = ReadCounts()
            tiles = rs.files.load(
                ckpt,
                moves,
                sources=dict.fromkeys(moves, name),
                read_size=1,
                counts=counts,
                wave=unit * 2,
                devices=range(4),
            )
            for at, each in enumerate(takes):
                of = tuple(each.get(dim, slice(None)) for dim in range(3))
                for device, tile in tiles[f"t{at}"].items():
                    indices = [np.array(m) for m in meaning(layouts[at], device)]
                    np.testing.assert_array_equal(tile, whole[of][np.ix_(*indices)], f"{file}, {each}")
            stored = rs.files.plan_load(ckpt, moves, sources=dict.fromkeys(moves, name), read_size=1).stored_bytes
            if file.endswith((".safetensors", ".npy")):
                assert counts.bytes == stored < whole.nbytes
            else:
                assert stored <= chunks * unit + (file == "zarr") * 100 and counts.bytes < stored + 2000


def test_short_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stored = {"v": store("v", (10,)), "w": store("w", (50, 40), at=40)}
    arrays, whole = fill(stored), os.preadv
    ckpt, counts = write_pieces(tmp_path / "file", stored, arrays), ReadCounts()

    def some_of_it(file: int, buffers: list[np.ndarray], at: int) -> int:
        return whole(file, [memoryview(buffers[0].reshape(-1).view("u1"))[:37]], at)

    monkeypatch.setattr(engine.os, "preadv", some_of_it)
    layouts = {
        name: rs.Layout.parse(text, rs.Mesh(x=2)) for name, text in (("v", "f32[{x}5]"), ("w", "f32[50, {x}20]"))
    }
    tiles = rs.files.load(ckpt, layouts, counts=counts)
    np.testing.assert_array_equal(tiles["w"][1], arrays["w"][:, 20:])
    np.testing.assert_array_equal(tiles["v"][1], arrays["v"][5:])
    assert counts.bytes == 8040


def test_files_that_change_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_file({"w": np.arange(4096, dtype="f4").reshape(64, 64)}, path := tmp_path / "w.safetensors")
    ckpt, whole = rs.files.open(path), os.preadv
    target = {"w": rs.Layout.parse("f32[{x}32, 64]", rs.Mesh(x=2))}

    def cut(file: int, buffers: list[np.ndarray], at: int) -> int:
        os.truncate(path, 8000)
        return whole(file, buffers, at)

    def touched(file: int, buffers: list[np.ndarray], at: int) -> int:
        os.utime(path)
        return whole(file, buffers, at)

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    for made, says in (
        (failing, "cannot read 16384 B from byte"),
        (touched, "has changed since"),
        (cut, "ends at byte"),
    ):
        ckpt = rs.files.open(path)
        monkeypatch.setattr(engine.os, "preadv", made)
        with pytest.raises(FileError, match=says) as caught:
            rs.files.load(ckpt, target)
        monkeypatch.setattr(engine.os, "preadv", whole)
        assert str(path) in str(caught.value)
        assert threading.active_count() == 1 or "reshard-reader" not in {t.name for t in threading.enumerate()}
    with pytest.raises(FileError, match=r"had .* B"):
        rs.files.load(ckpt, target)
    os.unlink(path)
    with pytest.raises(FileError, match="cannot open"):
        rs.files.load(ckpt, target)
    os.mkfifo(path)
    with pytest.raises(FileError, match="not a regular file"):
        rs.files.load(ckpt, target)


def test_what_does_not_fit_is_refused_before_a_byte_is_read(tmp_path: Path):
    save_file({"w": np.zeros((4, 4), "f4")}, path := tmp_path / "w.safetensors")
    layout, counts = rs.Layout.parse("f32[{x}2, 4]", rs.Mesh(x=2)), ReadCounts()
    with pytest.raises(MissingTensorError, match="v"):
        rs.files.load(path, {"w": layout, "v": layout}, counts=counts)
    with pytest.raises(PlanError, match="missing='some'"):
        rs.files.load(path, {"w": layout}, missing="some", counts=counts)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="leave out devices="):
        rs.files.load(path, {"w": layout}, comm=object(), devices=[0, 1], counts=counts)
    assert counts == ReadCounts()


def test_a_flipped_bit_is_an_error_where_there_are_sums(tmp_path: Path):
    array = np.arange(1 << 16, dtype="f4").reshape(256, 256)
    mesh = rs.Mesh(x=2)
    rows, columns = (rs.Layout.parse(text, mesh) for text in ("f32[{x}128, 256]", "f32[256, {x}128]"))
    tiles = {device: array[128 * device : 128 * device + 128] for device in (0, 1)}
    rs.files.save(tmp_path / "out", {"w": tiles}, {"w": rows})
    for at in (0, 100_000, (1 << 18) - 1):
        assert np.array_equal(rs.files.load(tmp_path / "out", {"w": columns})["w"][1], array[:, 128:])
        ckpt = rs.files.open(tmp_path / "out")
        piece = ckpt["w"].pieces[0]
        path = Path(ckpt.files[piece.file].path)
        whole, status = bytearray(path.read_bytes()), path.stat()
        whole[piece.offset + at] ^= 4
        path.write_bytes(whole)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(ChecksumError, match="'w'"):
            rs.files.load(tmp_path / "out", {"w": columns})
        loaded = rs.files.load(tmp_path / "out", {"w": rows}, verify=False)["w"]
        assert (loaded[0] != tiles[0]).sum() + (loaded[1] != tiles[1]).sum() == 1
        whole[piece.offset + at] ^= 4
        path.write_bytes(whole)


def test_a_tile_may_be_any_view_of_memory(tmp_path: Path):
    stored = {"w": store("w", (12, 10))}
    arrays = fill(stored)
    ckpt = write_pieces(tmp_path / "file", stored, arrays)
    layout = rs.Layout.parse("f32[{x}6, 10]", rs.Mesh(x=2))
    reading = rs.files.plan_load(ckpt, {"w": layout}, devices=[0, 1]).waves[0].readings[0]
    room = np.zeros((2, 6, 30), "f4")
    with CheckpointReader(ckpt) as reader:
        reader.read_tiles([(reading, {device: room[device, :, 3:23:2] for device in (0, 1)})])
    np.testing.assert_array_equal(room[:, :, 3:23:2].reshape(12, 10), arrays["w"])
    assert not room[:, :, :3].any() and not room[:, :, 4::2].any()


def test_targets_are_said_as_layouts_are(tmp_path: Path):
    arrays = {"w": np.arange(32, dtype="float32").reshape(4, 8), "b": np.arange(8, dtype="float32")}
    save_file(arrays, tmp_path / "m.safetensors")
    for said in ("f32[4, {x}4]", "P(None, 'x')", "[Shard(1)]", rs.Layout.parse("f32[4, {x}4]", rs.Mesh(x=2))):
        tiles = rs.files.load(tmp_path, {"w": said, "b": "P()"}, mesh="x=2")
        for device in range(2):
            np.testing.assert_array_equal(tiles["w"][device], arrays["w"][:, 4 * device :][:, :4])
            np.testing.assert_array_equal(tiles["b"][device], arrays["b"])
    # By another name, the shape is that of what it reads.
    moved = rs.files.load(tmp_path, {"v": "P('x')"}, mesh="x=2", sources={"v": "b"}, rest="skip")
    np.testing.assert_array_equal(moved["v"][1], arrays["b"][4:])
    with pytest.raises(MissingTensorError, match=r"'x'.*no target names 'w'"):
        rs.files.load(tmp_path, {"x": "P()", "b": "P()"}, mesh="x=2")
    with pytest.raises(PlanError, match="give a dict"):
        rs.files.load(tmp_path, ["w", "b"], mesh="x=2")
    with pytest.raises(rs.errors.NotationError, match="give the mesh"):
        rs.files.load(tmp_path, {"w": "P()", "b": "P()"})

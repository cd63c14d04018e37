"""Checkpoints for tests of loads into shardings, and what every shard must be by numpy.

`tests.jax.worker` runs `processes` in several.

Every element is a number of its own, or of its place, so that a wrong one would be seen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import reshard.files
from reshard.errors import AgreementError, FileError, MissingTensorError
from reshard.files.plan_load import read_targets
from reshard.jax import Part, Target, loading
from reshard.jax.loading import PreparedLoad, ReadWave, load_shardings
from reshard.runtime.on_files.engine import ReadCounts
from tests.jax.worker import SECONDS


def write_checkpoint(folder: Path) -> None:
    """Two files of tensors: large and small ones, of several dtypes, a scalar and an empty one."""
    count = iter(range(1000))

    def numbered(dtype: Any, *shape: int) -> np.ndarray:
        return (np.arange(np.prod(shape)).reshape(shape) + 10_000 * next(count)).astype(dtype)

    first = {f"layers.{at}.w": numbered("float32", 64, 32) for at in range(3)}
    first |= {f"layers.{at}.norm": numbered("float32", 64) for at in range(3)} | {"scale": np.array(3.5, "float32")}
    second = {"q": numbered("int32", 16, 8), "k": numbered("int32", 8, 8), "none": np.zeros((0, 4), "float32")}
    second |= {"half": numbered(ml_dtypes.bfloat16, 24, 16), "flags": numbered("uint8", 40) % 2 == 0}
    second |= {"alone": numbered("int16", 16, 8)}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(second, folder / "model-00002-of-00002.safetensors")
    files = {name: f"model-0000{at}-of-00002.safetensors" for at, each in ((1, first), (2, second)) for name in each}
    (folder / "model.safetensors.index.json").write_text(repr({"weight_map": files}).replace("'", '"'))


def stored_arrays(folder: Path) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        arrays |= load_file(file)
    return arrays


def save_again(folder: Path) -> None:
    """The checkpoint by our own save, and what has chunks in coded ones."""
    reshard.files.save(folder / "saved", stored_arrays(folder))
    coded = {name: array for name, array in stored_arrays(folder).items() if array.ndim and array.size}
    chunks = {name: tuple(max(1, size // 3) for size in array.shape) for name, array in coded.items()}
    reshard.files.save(folder / "coded", coded, format="zarr", codec="zstd", chunks=chunks)


def tree_of_targets(devices: Sequence[Any], arrays: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
    """Targets on meshes whose axes are along processes, across them and both, and the arrays that they make."""
    mesh = Mesh(np.array(devices).reshape(4, 2), ("x", "y"))
    mixed = Mesh(np.array(devices)[[0, 4, 1, 5, 2, 6, 3, 7]].reshape(2, 4), ("rep", "tp"))

    def on(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    targets: Any = {
        "layers": [
            {"w": on("x", "y"), "norm": on()},
            {"w": on(), "norm": on("y")},
            {"w": NamedSharding(mixed, P("tp")), "norm": NamedSharding(mixed, P("tp"))},
        ],
        "scale": on(),
        "none": on(None, "x"),
        "flags": on("y"),
        "half": NamedSharding(mixed, P(None, "rep")),
        "fused": Target(
            on("y"), shape=(24, 8), parts=[Part("q", into={0: slice(0, 16)}), Part("k", into={0: slice(16, 24)})]
        ),
        "turned": Target(on("y", "x"), source="layers.0.w", view="(a b) c -> c b a", a=4),
        "narrow": Target(NamedSharding(mixed, P("rep")), source="layers.1.w", dtype="bfloat16"),
        "wide": Target(on("x"), source="half", dtype="float32"),
        "aside": Target(on(None, "y"), source="alone", view="a b -> b a"),
        "part": Target(on(None, "y"), source="q", take={0: slice(4, 12)}),
    }
    wanted = {
        "layers": [{name: arrays[f"layers.{at}.{name}"] for name in ("w", "norm")} for at in range(3)],
        **{name: arrays[name] for name in ("scale", "none", "flags", "half")},
        "fused": np.concatenate([arrays["q"], arrays["k"]]),
        "turned": arrays["layers.0.w"].reshape(4, 16, 32).transpose(2, 1, 0),
        "narrow": arrays["layers.1.w"].astype(ml_dtypes.bfloat16),
        "wide": arrays["half"].astype("float32"),
        "aside": arrays["alone"].T,
        "part": arrays["q"][4:12],
    }
    return targets, wanted


def load(folder: Path, targets: Any, read: ReadWave | None = None, **options: Any) -> Any:
    """The load of a folder, or with `read` one that reads so."""
    if read is None:
        return reshard.files.load(folder, targets, **options)

    def prepare() -> PreparedLoad:
        ckpt = reshard.files.open(folder)
        plan = reshard.files.plan_load(ckpt, targets, **options)
        return PreparedLoad(plan, read_targets(ckpt, targets).shardings, read)

    return load_shardings(prepare, str(folder))


def assert_shards(loaded: Any, wanted: Any) -> None:
    """Every element of every shard of this process, and the structure."""
    assert jax.tree.structure(loaded) == jax.tree.structure(wanted)
    for x, right in zip(jax.tree.leaves(loaded), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (right.shape, right.dtype)
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), right[shard.index])


def processes(folder: Path) -> None:
    """Loads whose arrays cross processes; what one cannot read, or asks otherwise, is an error in all."""
    number, count = jax.process_index(), jax.process_count()
    arrays = stored_arrays(folder)
    targets, wanted = tree_of_targets(jax.devices(), arrays)
    stored = sum(array.nbytes for array in arrays.values())
    several: list[dict[str, Any]] = [{}, {"read_size": 1}, {"read_size": 1, "wave": "4KiB"}]
    # On one host, on two, of which one has three processes, and on four.
    for host in (0, number // 3, number):
        with patch.object(loading, "describe_host", lambda host=host: f"host {host}"):
            loading.group_by_host.cache_clear()
            for options in several:
                counts = ReadCounts()
                with patch.object(loading, "_AT_ONCE", 1 << 10 if options else 1 << 30):
                    assert_shards(load(folder, targets, counts=counts, **options), wanted)
                assert multihost_utils.process_allgather(counts.bytes).sum() == stored
    shared_memory(number, count)
    for host in (number // 2, 0):
        with patch.object(loading, "describe_host", lambda host=host: f"host {host}"):
            loading.group_by_host.cache_clear()
            assert_shards(load(folder, targets), wanted)
    of_last = {"layers": targets["layers"][2]} | {"last": NamedSharding(targets["scale"].mesh, P())}

    def broken(reading: Any) -> None:
        if number == 2:
            raise FileError("a disk that fails")
        for _, tiles in reading:
            for tile in tiles.values():
                tile[...] = 0

    faults: list[tuple[type[Exception], str, Any]] = [
        (FileError, "a disk that fails", (targets, broken)),
        (FileError, "there is no tensor 'last'", (of_last if number == 1 else targets, None)),
        (
            AgreementError,
            "by plan",
            (targets | {"scale": targets["layers"][0]["norm"]}, None)
            if number
            else (targets | {"q": targets["scale"]}, None),
        ),
    ]
    for kind, text, (asked, read) in faults:
        began = time.monotonic()
        try:
            load(folder, asked, read, read_size=1, wave="4KiB")
        except kind as error:
            assert text in str(error), error
            assert isinstance(error, MissingTensorError) == (text.startswith("there") and number == 1)
        else:
            raise AssertionError(text)
        assert time.monotonic() - began < SECONDS / 10
    assert_shards(load(folder, targets), wanted)
    coded = {name: array for name, array in arrays.items() if array.ndim and array.size}
    for spec in (P(), P("x"), P(("y", "x"))):  # Small tensors of one and of two dims, packed.
        sharding = NamedSharding(targets["scale"].mesh, spec)
        assert_shards(load(folder / "coded", dict.fromkeys(coded, sharding)), coded)
    damaged(folder / "saved", number, arrays, targets["layers"][0]["norm"])


def shared_memory(number: int, count: int) -> None:
    """All processes see what one writes, and a large tile's memory is given back by the last one that leaves it."""
    one, other, small = loading.share_host_memory([1 << 20, 3 << 20, 9], range(count))
    assert not any(tile.any() for tile in (one, other, small))
    multihost_utils.sync_global_devices("made")
    if number == 1:
        one[:], other[:], small[:] = 1, 2, 3
    multihost_utils.sync_global_devices("written")
    assert (one.sum(), other.sum(), small.sum()) == (1 << 20, 6 << 20, 27)
    whole, start = np.asarray(other.base), other.ctypes.data - one.ctypes.data
    at = np.flatnonzero(whole == 2)[0] - start
    if number:
        del one
    multihost_utils.sync_global_devices("left by most")
    assert whole[at : at + (1 << 20)].sum() == 1 << 20
    multihost_utils.sync_global_devices("seen by all")
    one = None
    multihost_utils.sync_global_devices("left by all")
    assert not whole[at : at + (1 << 20)].any() and (other.sum(), small.sum()) == (6 << 20, 27)


def damaged(folder: Path, number: int, arrays: Mapping[str, np.ndarray], whole: NamedSharding) -> None:
    """A block that no process reads all of is compared by all together: what is wrong in it is an error in all."""
    shardings = dict.fromkeys(arrays, whole)
    assert_shards(reshard.files.load(folder, shardings, read_size=1), dict(arrays))
    multihost_utils.sync_global_devices("read")
    if number == 0:
        (file,) = folder.glob("*.safetensors")
        data, times = bytearray(file.read_bytes()), file.stat()
        data[-100] ^= 4
        file.write_bytes(data)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    multihost_utils.sync_global_devices("damaged")
    try:
        reshard.files.load(folder, shardings, read_size=1)
    except FileError as error:
        assert "crc32" in str(error), error
    else:
        raise AssertionError("damage is loaded")

"""What is saved in tests, and what the library of each format itself reads from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import reshard as rs
from tests.oracle import tiles_of

FORMATS = ("safetensors", "zarr", "zarr2", "orbax", "orbax3", "hdf5")


def make_arrays(dtypes: Mapping[str, Any] | None = None, extra: int = 0) -> dict[str, np.ndarray]:
    """Arrays of several ranks and dtypes, every element a number of its own where the dtype has so many."""
    shapes = {"embed": (24, 10), "layers.w": (9, 4, 5), "norm": (16,), "scale": (), "half": (12, 6)}
    given = {"half": ml_dtypes.bfloat16, "norm": np.int64, **(dtypes or {})}
    return {
        name: (np.arange(np.prod(shape)).reshape(shape) + 100 * at + extra).astype(given.get(name, np.float32))
        for at, (name, shape) in enumerate(shapes.items())
    }


def make_layouts(arrays: Mapping[str, np.ndarray], devices: int = 4) -> dict[str, rs.Layout]:
    """Tiles of two dims, uneven ones, block-cyclic ones, replicas, rows by owner, and an array on one device alone."""
    mesh = rs.Mesh(x=2, y=devices // 2)
    texts = {"embed": "[{x}(9@1,11@0,4@1), {y}5]", "layers.w": "[{y}5/9, 4, {x}3/5]", "norm": "[2{x}4]", "scale": "[]"}
    made = {name: rs.Layout.parse(f"{arrays[name].dtype}{text}", mesh) for name, text in texts.items()}
    alone = rs.Mesh({"one": 1}, device_ids=[devices - 1])
    return made | {"half": rs.Layout.parse("bf16[12, 6]", alone)}


def tiles_by_device(arrays: Mapping[str, np.ndarray], layouts: Mapping[str, rs.Layout]) -> dict[str, Any]:
    """The tile of every device, from the meaning of layouts; padding is an element of another place."""
    return {
        name: {device: np.asarray(arrays[name].reshape(-1)[index]) for device, index in tiles_of(layout).items()}
        for name, layout in layouts.items()
    }


def read_by_library(path: Path, format: str) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint, as safetensors, zarr, tensorstore or h5py read them."""
    if format == "safetensors":
        from safetensors.numpy import load_file

        if path.is_file():
            return load_file(path)
        homes = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        return {name: load_file(path / home)[name] for name, home in homes.items()}
    if format == "hdf5":
        import h5py

        found: dict[str, np.ndarray] = {}
        with h5py.File(path, "r") as file:
            file.visititems(
                lambda name, each: found.update({name: each[()]}) if isinstance(each, h5py.Dataset) else None
            )
        return found
    import tensorstore

    found = {}
    for name in make_arrays():
        base: Any = {"driver": "file", "path": str(path)}
        store = {"driver": "ocdbt", "base": base, "path": name} if format.startswith("orbax") else base
        if not format.startswith("orbax"):
            store = base | {"path": f"{path}/{name}"}
        driver = "zarr3" if format in ("zarr", "orbax3") else "zarr"
        found[name] = tensorstore.open({"driver": driver, "kvstore": store}).result().read().result()
    return found


def assert_same_arrays(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """Names, dtypes, shapes and bits of all elements."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        got = np.asarray(found[name])
        assert got.shape == array.shape, name
        assert got.dtype.itemsize == array.dtype.itemsize, name
        np.testing.assert_array_equal(got.view(array.dtype), array, err_msg=name)

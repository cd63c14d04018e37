"""Saves by the processes of `jax.distributed`: what safetensors and tensorstore read, and an error of one in all.

`tests.jax.worker` runs `processes` in several.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard.files
from reshard.errors import FileError
from tests.files.save_files import assert_same_arrays, make_arrays, read_by_library
from tests.jax.worker import SECONDS


def put_arrays(devices: Any, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Arrays on meshes whose axes are along processes and across them, one of them everywhere."""
    mesh = Mesh(np.array(devices).reshape(4, 2), ("x", "y"))
    mixed = Mesh(np.array(devices)[[0, 4, 1, 5, 2, 6, 3, 7]].reshape(2, 4), ("rep", "tp"))
    shardings = {
        "embed": NamedSharding(mesh, P("x", "y")),
        "layers.w": NamedSharding(mesh, P(None, "x")),
        "norm": NamedSharding(mixed, P("tp")),
        "scale": NamedSharding(mesh, P()),
        "half": NamedSharding(mixed, P("tp", "rep")),
    }
    return {
        name: jax.make_array_from_callback(array.shape, shardings[name], lambda index, of=array: of[index])
        for name, array in arrays.items()
    }


def processes(folder: Path) -> None:
    """Each format twice, then a disk that is full for one process."""
    number = jax.process_index()
    wanted = make_arrays({"norm": np.int32})
    held = put_arrays(jax.devices(), wanted)
    for format in ("safetensors", "zarr", "orbax"):
        for behind in (True, False):
            if behind:
                reshard.files.start(folder / format, held, format=format, limit=SECONDS).wait()
            else:
                reshard.files.save(folder / format, held, format=format, limit=SECONDS)
            if number == 0:
                assert_same_arrays(read_by_library(folder / format, format), wanted)
            multihost_utils.sync_global_devices("checked")

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    try:
        with mock.patch.object(os, "pwritev", full) if number == 2 else mock.MagicMock():
            reshard.files.save(folder / "safetensors", held, limit=SECONDS)
    except FileError as error:
        assert "No space left" in str(error)
    else:
        raise AssertionError("it was saved")
    assert_same_arrays(read_by_library(folder / "safetensors", "safetensors"), wanted)

"""Saves of jax.Arrays; `test_redistribute_processes` has those of several processes."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import reshard.files
from tests.files.save_files import assert_same_arrays, make_arrays, read_by_library
from tests.jax.saves import put_arrays


def test_one_process(tmp_path: Path) -> None:
    wanted = make_arrays({"norm": np.int32})
    held = put_arrays(jax.devices(), wanted) | {"scale": jnp.asarray(wanted["scale"])}
    reshard.files.save(tmp_path, held | {"layers": {"w": held.pop("layers.w")}})
    assert_same_arrays(read_by_library(tmp_path, "safetensors"), wanted)

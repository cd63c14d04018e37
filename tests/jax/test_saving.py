"""Saves of jax.Arrays, in one process and in several."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reshard.files
from tests.files.save_files import assert_same_arrays, make_arrays, read_by_library
from tests.jax import worker
from tests.jax.saves import put_arrays


def test_one_process(tmp_path: Path) -> None:
    wanted = make_arrays({"norm": np.int32})
    held = put_arrays(jax.devices(), wanted) | {"scale": jnp.asarray(wanted["scale"])}
    reshard.files.save(tmp_path, held | {"layers": {"w": held.pop("layers.w")}})
    assert_same_arrays(read_by_library(tmp_path, "safetensors"), wanted)


@pytest.mark.slow
def test_processes(tmp_path: Path) -> None:
    worker.check(["processes", str(tmp_path)], devices=2, processes=4, module="tests.jax.saves")

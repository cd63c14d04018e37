"""Writes tests/data/orbax.zip with Orbax itself: `python tests/data/write_orbax.py`, where Orbax is installed.

Checkpoints of one tree on 4 x 2 devices: "zarr2" (Orbax's default), "zarr3", "folders" (no database), "steps/3" (of a
manager, one item) and "sparse", which has no chunk where there are only zeros.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path


def main() -> None:
    os.environ.update(XLA_FLAGS="--xla_force_host_platform_device_count=8", JAX_PLATFORMS="cpu")
    import jax
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.serialization import tensorstore_utils

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))

    def put(shape: tuple[int, ...], dtype: str, *spec: str | None) -> jax.Array:
        marked = jnp.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        return jax.device_put(marked, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    tree = {
        "params": {
            "w": put((32, 24), "float32", "x", "y"),
            "emb": put((10, 12), "bfloat16", None, "y"),
            "layers": [put((8,), "int8"), put((9,), "float32", None)],
        },
        "zeros": jnp.zeros((8, 4)),
        "step": np.int64(7),
        "nothing": None,
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        kinds = {"zarr2": {}, "zarr3": {"use_zarr3": True}, "folders": {"use_ocdbt": False}}
        for name, options in kinds.items():
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as saver:
                saver.save(root / name, args=ocp.args.PyTreeSave(tree))
        with ocp.CheckpointManager(root / "steps") as manager:
            manager.save(3, args=ocp.args.Composite(state=ocp.args.StandardSave(tree)))
            manager.wait_until_finished()
        tensorstore_utils.STORE_ARRAY_DATA_EQUAL_TO_FILL_VALUE = False
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as saver:
            saver.save(root / "sparse", args=ocp.args.PyTreeSave(tree))
        with zipfile.ZipFile(Path(__file__).with_name("orbax.zip"), "w", zipfile.ZIP_DEFLATED) as out:
            for file in sorted(root.rglob("*")):
                if file.is_file():
                    out.write(file, file.relative_to(root))


if __name__ == "__main__":
    main()

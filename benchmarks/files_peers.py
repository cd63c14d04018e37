"""A process of a peer of `files.py`, which a Python runs that has the peer: Orbax under `jax.distributed`, or torch's
distributed checkpoints with gloo. Run by `files.py`.

    python files_peers.py '{"method": "load dcp", "process": 0, "processes": 4, "port": ..., ...}'

`save orbax` and `save dcp` write the arrays of an .npz, cut as `dims` says over the mesh <a=2, b=2>; `load ...` loads
them so and prints its seconds, and the bytes that it has read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def run_orbax(task: dict[str, Any]) -> Any:
    import jax
    import orbax.checkpoint as ocp
    import tensorstore
    from jax.sharding import NamedSharding, PartitionSpec

    if task["processes"] > 1:
        jax.distributed.initialize(f"localhost:{task['port']}", task["processes"], task["process"])
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    shardings = {
        name: NamedSharding(mesh, PartitionSpec(*(tuple(axes) or None for axes in dims)))
        for name, dims in task["dims"].items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        if task["method"] == "save orbax":
            values = np.load(task["values"])
            checkpointer.save(task["folder"], {name: jax.device_put(values[name], s) for name, s in shardings.items()})
            return None
        wanted = {
            name: jax.ShapeDtypeStruct(tuple(task["shapes"][name]), np.float32, sharding=sharding)
            for name, sharding in shardings.items()
        }

        def load() -> None:
            jax.block_until_ready(checkpointer.restore(task["folder"], wanted))

        def count() -> int:
            found = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
            return sum(int(value["value"]) for metric in found for value in metric["values"])

        def wait() -> None:
            if task["processes"] > 1:
                from jax.experimental import multihost_utils

                multihost_utils.sync_global_devices("turn")

        return measure(load, count, wait, task["repeats"])


def run_torch(task: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, empty

    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(task["port"])}
    dist.init_process_group("gloo", rank=task["process"], world_size=task["processes"])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    placements = {
        name: [next((Shard(at) for at, axes in enumerate(dims) if axis in axes), Replicate()) for axis in ("a", "b")]
        for name, dims in task["dims"].items()
    }
    try:
        if task["method"] == "save dcp":
            values = np.load(task["values"])
            state = {
                name: distribute_tensor(torch.from_numpy(values[name]), mesh, of) for name, of in placements.items()
            }
            dcp.save(state, checkpoint_id=task["folder"])
            return None
        state: dict[str, DTensor] = {}

        def load() -> None:
            state.clear()
            for name, of in placements.items():
                state[name] = empty(*task["shapes"][name], device_mesh=mesh, placements=of)
            dcp.load(state, checkpoint_id=task["folder"])

        def count() -> int:
            lines = Path("/proc/self/io").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("rchar")).split()[1])

        return measure(load, count, dist.barrier, task["repeats"])
    finally:
        dist.destroy_process_group()


def measure(load: Callable[[], None], count: Callable[[], int], wait: Callable[[], object], repeats: int) -> Any:
    seconds: list[float] = []
    read = 0
    for _ in range(repeats + 1):
        wait()
        before, began = count(), time.perf_counter()
        load()
        seconds.append(time.perf_counter() - began)
        read = count() - before  # Of the last: the first also reads modules.
    return {"seconds": seconds, "bytes": read}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    found = run_orbax(given) if given["method"].endswith("orbax") else run_torch(given)
    if found is not None:
        print(json.dumps(found))

"""A part of `make demo`: the weights of a small Llama go from a trainer's devices to a server's, in one call.

    trainer <fsdp=4, tp=2>, 8 devices    ->    server <rep=2, tp=4>, 8 other devices: two replicas, split 4 ways each

Fused QKV, fused gate and up, embeddings and norms, in bfloat16, on 16 virtual CPU devices in a process of its own.
Every element on every device is compared with what its layout means, and what the plans promise with what the reference
runtime counts. `jax.device_put` of the same tree stands beside it.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.xla_identity import XlaError, _environment

DEVICES = 16


@dataclass(frozen=True)
class Served:
    """What was promised for the busiest device, what the reference runtime counted, and what the process needed.

    Bytes on a device: `bound`, `promised`, `received`, and the peaks of a server's device. `right` of `elements` are
    those of all shards. `ours` and `theirs` are the seconds of a call, the median of three, and the most new memory of
    the process in one.
    """

    leaves: int
    array_bytes: int
    bound: int
    promised: int
    received: int
    promised_peak: int
    peak: int
    right: int
    elements: int
    ours: tuple[float, int]
    theirs: tuple[float, int]


def served() -> Served:
    """The figures of the move; raises `XlaError` if the process fails."""
    command = [sys.executable, str(Path(__file__).resolve())]
    freed = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # What is freed goes back to the system, so that memory can be counted.
    environment = _environment(DEVICES) | freed
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=False)
    if done.returncode:
        raise XlaError(f"the move to other devices failed:\n{done.stderr[-2000:]}")
    read = json.loads(done.stdout)
    return Served(**{name: tuple(value) if isinstance(value, list) else value for name, value in read.items()})


def disagreements(figures: Served) -> list[str]:
    """Everything in the figures that does not fit together."""
    problems: list[str] = []
    if figures.right != figures.elements:
        problems.append(f"{figures.elements - figures.right} of {figures.elements} elements of the server are wrong")
    if figures.received != figures.promised:
        problems.append(f"a server's device received {figures.received} B, {figures.promised} B were promised")
    if figures.promised < figures.bound:
        problems.append(f"{figures.promised} B are promised, less than the bound of {figures.bound} B")
    if figures.peak > figures.promised_peak:
        problems.append(f"{figures.peak} B live on a server's device, {figures.promised_peak} B were promised")
    return problems


# ---- in the process of its own ---------------------------------------------------------------------

WIDTH, KEYS, HIDDEN, WORDS, LAYERS = 512, 128, 1408, 8192, 2


def weights() -> dict[str, tuple[tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]]:
    """Shape, trainer's spec and server's spec of every weight."""
    kinds = {
        "norm": ((WIDTH,), (), ()),
        "qkv": ((WIDTH, WIDTH + 2 * KEYS), ("fsdp", "tp"), (None, "tp")),
        "out": ((WIDTH, WIDTH), ("tp", "fsdp"), ("tp", None)),
        "gate_up": ((WIDTH, 2 * HIDDEN), ("fsdp", "tp"), (None, "tp")),
        "down": ((HIDDEN, WIDTH), ("tp", "fsdp"), ("tp", None)),
    }
    layers = {f"layer {n} {name}": kind for n in range(LAYERS) for name, kind in kinds.items()}
    ends = {
        "embed": ((WORDS, WIDTH), (("tp", "fsdp"),), ("tp",)),
        "head": ((WIDTH, WORDS), ("fsdp", "tp"), (None, "tp")),
    }
    return {**layers, **ends}


def measured() -> dict[str, Any]:
    """The figures, as plain data."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import reshard as rs
    import reshard.jax
    from reshard.runtime import Account
    from reshard.types.meaning import meaning

    devices = np.array(jax.devices())
    trainer = Mesh(devices[:8].reshape(4, 2), ("fsdp", "tp"))
    server = Mesh(devices[8:].reshape(2, 4), ("rep", "tp"))
    source, target, arrays = {}, {}, {}
    for seed, (name, (shape, before, after)) in enumerate(weights().items()):
        bits = np.random.default_rng(seed).integers(0, 1 << 16, shape, np.uint16)  # Any bits: bytes are compared.
        source[name] = NamedSharding(trainer, PartitionSpec(*before))
        target[name] = NamedSharding(server, PartitionSpec(*after))
        arrays[name] = bits.view(jnp.bfloat16)

    first = jax.device_put(arrays, source)
    copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=source)

    def placed() -> Any:  # `jax.device_put` keeps a copy of what it has moved once: each call has arrays of its own.
        return jax.block_until_ready(copied(first))

    def called(function: Any) -> tuple[Any, float, int]:
        function(placed())  # The first call compiles.
        calls: list[tuple[float, int]] = []
        moved = None
        for _ in range(3):
            moved = None
            tree = placed()
            gc.collect()
            before = _resident("VmRSS", again=True)
            start = time.perf_counter()
            moved = jax.block_until_ready(function(tree))
            calls.append((time.perf_counter() - start, _resident("VmHWM") - before))
        seconds, memory = zip(*calls, strict=True)
        return moved, statistics.median(seconds), max(memory)

    moved, *ours = called(lambda tree: reshard.jax.redistribute(tree, target))
    right = elements = 0
    plans: list[rs.Plan] = []
    received = peak = kept = promised_peak = 0
    for name, values in arrays.items():
        ends = [rs.Layout.from_jax(end[name], values.shape, "bfloat16") for end in (source, target)]
        plan = rs.plan(*ends)
        plans.append(plan)
        tiles = {device: values[np.ix_(*meaning(ends[0], device))] for device in ends[0].mesh.devices}
        counted = Account("bfloat16")
        rs.simulate(plan, tiles, counted)
        received += counted.received_bytes
        peak = max(peak, kept + counted.peak_bytes)
        promised_peak = max(promised_peak, kept + plan.peak_bytes)
        kept += plan.target.tile_bytes
        for shard in moved[name].addressable_shards:
            wanted = values[np.ix_(*meaning(ends[1], shard.device.id))]
            right += int(np.sum(np.asarray(shard.data).view("uint16") == wanted.view("uint16")))
            elements += wanted.size
    del moved
    _, *theirs = called(lambda tree: jax.device_put(tree, target))
    return {
        "leaves": len(arrays),
        "array_bytes": sum(values.nbytes for values in arrays.values()),
        "bound": sum(plan.lower_bound_bytes for plan in plans),
        "promised": sum(plan.received_bytes for plan in plans),
        "received": received,
        "promised_peak": promised_peak,
        "peak": peak,
        "right": right,
        "elements": elements,
        "ours": ours,
        "theirs": theirs,
    }


def _resident(field: str, again: bool = False) -> int:
    """Bytes of the process's memory now, or at its peak, which starts `again`; 0 where the system does not say."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    if again:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    (line,) = [line for line in status.read_text(encoding="ascii").splitlines() if line.startswith(field)]
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    print(json.dumps(measured()))

"""The links and the speed of the devices at hand, measured by programs that they all run at once.

Seconds of one round are those of many less those of one, by the number of further rounds: the call of the program is
in both. Of each collective along an axis of p devices, with tiles of t bytes, the model of a link (`synth.cost`) says

    permute      1 message                   t bytes
    all_to_all   p - 1                       (p - 1) / p t
    all_gather   p' - 1 of each prime p'     (p - 1) t

so that tiles of a few bytes give the latency and large ones the bandwidth, each the median of the three. Distances are
not seen: of a ring of 8 each of the three says another bandwidth, from 0.44 to 1 of the wires'; nor is what axes that
share wires take from each other.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import MeshError, PlanError, quoted
from reshard.runtime.platform_network import Calibration, store_calibration
from reshard.synth import Link, Network
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.types.mesh import Mesh
from reshard.types.whole import primes

_REPEATS = 5
_ROUNDS, _MOST_ROUNDS = 16, 1 << 14
_TILES = 64, 1 << 20
"""Elements of f32 of the small tiles and of the large ones."""


def calibrate(mesh: JaxMesh | str | None = None, name: str = "calibrated", *, store: bool = True) -> Calibration:
    """Measures the links along each axis of a mesh, and how fast a device works. The mesh is one of jax, or text such
    as x=4,y=2 for the first devices; by default all devices are in a row.

    Unless `store` is False, later calls on devices of this kind on this machine plan for what was measured, where they
    name no network and `RESHARD_NETWORK` does not either. Give the mesh of your program: an axis of a name that is not
    in it has the slowest link. Takes seconds; nothing else should run meanwhile.

    Raises `PlanError` for devices of several processes, whose files may differ: there, give them one file as
    `RESHARD_NETWORK`.
    """
    if mesh is None or isinstance(mesh, str):
        found = jax.devices()
        ours = Mesh(x=len(found)) if mesh is None else Mesh.parse(mesh)
        if ours.size > len(found):
            raise MeshError(f"mesh {ours} has {ours.size} devices, and jax finds {len(found)}; give a smaller one")
        mesh = JaxMesh(np.array(found[: ours.size]).reshape(tuple(ours.axes.values())), tuple(ours.axes))
    if not isinstance(mesh, JaxMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"mesh {quoted(mesh)}: give a jax.sharding.Mesh of the devices to measure")
    devices = list(mesh.devices.flat)
    if len({device.process_index for device in devices}) > 1:
        raise PlanError("calibrate() measures the devices of one process; name a network with RESHARD_NETWORK=FILE")
    source = f"measured on {len(devices)} devices {devices[0].device_kind!r}, all at once"
    links = {axis: _measure_axis(mesh, axis, size) for axis, size in mesh.shape.items() if size > 1}
    # A single device has no link; plans on it move nothing, so any figure serves.
    slowest = min(links.values(), key=lambda link: link.speed, default=Link(0.0, 1e12))
    network = Network(name, slowest, slowest, len(devices), links, source)
    measured = Calibration(network, _measure_speed(mesh, name, source))
    if store:
        store_calibration(str(devices[0].device_kind), measured)
    return measured


def _measure_axis(mesh: JaxMesh, axis: str, size: int) -> Link:
    ring = [(at, (at + 1) % size) for at in range(size)]

    def swap(_: Any, tile: Any) -> Any:
        return lax.all_to_all(tile.reshape(size, -1), axis, 0, 0).reshape(tile.shape)

    def gather(_: Any, tile: Any) -> Any:
        # The next device's tile of all, which no compiler can know before it runs to be all that is needed.
        every = lax.all_gather(tile, axis)
        return lax.dynamic_index_in_dim(every, (lax.axis_index(axis) + tile[0].astype(int)) % size, keepdims=False)

    rounds: list[tuple[Callable[[Any, Any], Any], int, float]] = [
        (lambda _, tile: lax.ppermute(tile, axis, ring), 1, 1.0),
        (swap, size - 1, (size - 1) / size),
        (gather, sum(prime - 1 for prime in primes(size)), size - 1.0),
    ]
    waits: list[float] = []
    speeds: list[float] = []
    for run, messages, share in rounds:
        small, large = (size * -(-elements // size) for elements in _TILES)
        short, long = (_time_round(mesh, run, jnp.zeros(elements, jnp.float32)) for elements in (small, large))
        waits.append(short / messages)
        speeds.append(share * 4 * (large - small) / max(long - short, 1e-9))
    return Link(statistics.median(waits), statistics.median(speeds))


def _measure_speed(mesh: JaxMesh, name: str, source: str) -> DeviceSpeed:
    """Rates of products of square matrices and of a copy, on all devices at once: they may share a memory."""
    cpu = mesh.devices.flat[0].platform == "cpu"
    # No cache may hold what is copied.
    side, copied = (512, 1 << 22) if cpu else (4096, 1 << 26)
    rates: dict[str, float] = {}
    for dtype, spelled in ((jnp.float32, "f32"), (jnp.bfloat16, "bf16")):
        matrix = jnp.eye(side, dtype=dtype)
        seconds = _time_round(mesh, lambda _, tile, by=matrix: tile @ by, matrix)
        rates[spelled] = 2 * side**3 / seconds
    copy = _time_round(mesh, lambda _, tile: tile + 1, jnp.zeros(copied, jnp.float32))
    fastest_first = dict(sorted(rates.items(), key=lambda rate: -rate[1]))
    return DeviceSpeed(name, fastest_first, 2 * 4 * copied / copy, source=source)


def _time_round(mesh: JaxMesh, run: Callable[[Any, Any], Any], tile: Any) -> float:
    """Median seconds of one round, of its number and a tile, on a tile of its own on each device."""

    def run_rounds(tile: Any, rounds: Any) -> Any:
        return lax.fori_loop(0, rounds, run, tile)

    program = jax.jit(jax.shard_map(run_rounds, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False))
    put = jax.device_put(tile, NamedSharding(mesh, P()))

    def time_call(rounds: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready(program(put, rounds))
        return time.perf_counter() - started

    time_call(1)
    short = statistics.median(time_call(1) for _ in range(_REPEATS))
    rounds = _ROUNDS
    # Until the rounds take several times as long as all else, whose times vary: it may be larger than a few rounds.
    while time_call(1 + rounds) < _REPEATS * short and rounds < _MOST_ROUNDS:
        rounds *= 2
    long = statistics.median(time_call(1 + rounds) for _ in range(_REPEATS))
    # Where the clock is too coarse for small rounds, the least that it can tell.
    return max((long - short) / rounds, 1e-9)

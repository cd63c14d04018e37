"""`calibrate`: what it measures follows the devices, is kept for later calls, and gives way to what a caller names."""

import json
import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import reshard
import reshard.jax
from reshard.errors import MeshError, NetworkError, PlanError
from reshard.jax.layout_choice import calibration
from reshard.jax.request import platform_network
from reshard.runtime.platform_network import Calibration, find_calibration, store_calibration
from reshard.synth import Link, Network
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.cost import predict_collective

MEASURED = Calibration(Network.preset("shm-mpi"), DeviceSpeed.preset("cpu"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RESHARD_CACHE", str(tmp_path))
    monkeypatch.delenv("RESHARD_NETWORK", raising=False)
    return tmp_path


@pytest.mark.slow
def test_what_is_measured_is_planned_for(monkeypatch):
    monkeypatch.setattr(calibration, "_REPEATS", 3)
    monkeypatch.setattr(calibration, "_ROUNDS", 8)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    network, speed = reshard.jax.calibrate(mesh, "here")
    assert network.name == speed.name == "here"
    assert [axis for axis, _ in network.axes] == ["x"]
    figures = [speed.memory_bytes_per_second, *speed.flops.values(), *(link.bandwidth for _, link in network.axes)]
    assert all(1e5 < figure < 1e15 for figure in figures), figures
    assert platform_network("cpu") == network
    assert find_calibration("cpu") == (network, speed)


def test_seconds_of_a_round_leave_out_the_call(monkeypatch):
    """A clock that a stand-in for a program moves on: 3 s a call, 0.25 s a round."""
    now = [0.0]
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now[0])

    def jit(_):
        def program(tile, rounds):
            now[0] += 3.0 + 0.25 * rounds
            return tile

        return program

    monkeypatch.setattr(calibration.jax, "jit", jit)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    assert math.isclose(calibration._time_round(mesh, lambda _, tile: tile, jax.numpy.zeros(4)), 0.25)


def test_what_is_kept_gives_way_to_what_is_named(monkeypatch):
    assert platform_network("lab device") is None
    store_calibration("lab device", MEASURED)
    assert platform_network("lab device") == MEASURED.network
    assert platform_network("another device") is None
    monkeypatch.setenv("RESHARD_NETWORK", "h100")
    assert platform_network("lab device") == Network.preset("h100")
    monkeypatch.setenv("RESHARD_NETWORK", "none")
    assert platform_network("lab device") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"network": {"name": "x"}, "speed": 3})])
def test_a_damaged_file_is_named(text):
    path = store_calibration("lab device", MEASURED)
    path.write_text(text)
    store_calibration("other device", MEASURED)  # What was read before is read anew.
    with pytest.raises(NetworkError, match=path.name):
        find_calibration("lab device")


def test_wrong_arguments_are_refused(cache, monkeypatch):
    with pytest.raises(PlanError, match="mesh"):
        reshard.jax.calibrate(4)
    with pytest.raises(MeshError, match="jax finds"):
        reshard.jax.calibrate("x=4096")
    blocked = cache / "file"
    blocked.write_text("")
    monkeypatch.setenv("RESHARD_CACHE", str(blocked))
    with pytest.raises(NetworkError, match="RESHARD_CACHE"):
        store_calibration("lab device", MEASURED)


def test_a_ring_is_taken_for_a_switch(monkeypatch):
    """Distances are not measured: each axis gets one link, as far from each of its collectives as from the others."""
    size, ours = 8, reshard.Mesh(x=8)
    factors = [(stride, 2) for stride in (1, 2, 4)]
    ring = {"x": Link(1e-6, 1e10, "ring")}
    kinds = iter(kind for kind in ("permute", "all_to_all", "all_gather") for _ in range(2))

    def time_round(_mesh, _run, tile):
        return predict_collective(next(kinds), factors, tile.nbytes, ours, ring)

    monkeypatch.setattr(calibration, "_time_round", time_round)
    link = calibration._measure_axis(Mesh(np.array(jax.devices()[:size]), ("x",)), "x", size)
    assert link.shape == "switch"
    for kind in ("permute", "all_to_all", "all_gather"):
        said, true = (predict_collective(kind, factors, 1 << 20, ours, links) for links in ({"x": link}, ring))
        assert 0.4 < said / true < 2.5, kind

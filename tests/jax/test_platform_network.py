"""The network that a move uses where its caller names none."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from reshard.errors import NetworkError
from reshard.jax import placement, request
from reshard.jax.request import ReshardRequest, options_on, plan_request
from reshard.runtime.platform_network import name_network
from reshard.synth import plan
from reshard.synth.network import PRESETS, Network
from reshard.synth.options import PlanOptions
from reshard.synth.planner import message_count
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.move import Move


@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        ("TPU v4", "tpu-v4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5e", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
        ("TPU7x", "tpu-7x"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("NVIDIA GH200 480GB", None),
        ("TPU v3", None),
        ("cpu", None),
    ],
)
def test_kinds_of_devices_have_presets(kind: str, preset: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RESHARD_NETWORK", raising=False)
    assert request.platform_network(kind) is (None if preset is None else PRESETS[preset])


def test_the_environment_names_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "lab.json"
    file.write_text(Network.uniform(1e-6, 1e9).to_json())
    for name, network in (("none", None), ("h100", PRESETS["h100"]), (str(file), Network.uniform(1e-6, 1e9))):
        monkeypatch.setenv("RESHARD_NETWORK", name)
        assert request.platform_network("TPU v4") == network and name_network("b200") == "b200"
    monkeypatch.setenv("RESHARD_NETWORK", "h1000")
    with pytest.raises(NetworkError, match="'h1000' is not a preset"):
        request.platform_network("cpu")


def test_what_a_caller_names_comes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RESHARD_NETWORK", "h100")
    for given, network in (("tpu-v4", PRESETS["tpu-v4"]), ("none", None), (None, PRESETS["h100"])):
        assert options_on(jax.devices(), PlanOptions.read(network=given)).network is network
    assert options_on([], PlanOptions()).network is None


def test_moves_on_cpus_have_the_fewest_bytes_unless_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RESHARD_NETWORK", raising=False)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    source, target = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("x",), ()))
    assert options_on(placement.devices_of(mesh), PlanOptions()).network is None
    assert plan_request(ReshardRequest(target, source), (8, 8), "float32").seconds is None
    for network, timed in (("none", False), ("h100", True)):
        named = ReshardRequest(target, source, PlanOptions.read(network=network))
        assert (plan_request(named, (8, 8), "float32").seconds is not None) == timed


SWAP = ("bf16[{c}256, {b}{a}16, 4096]", "bf16[4096, {c}256, {a}{b}16]")


def test_long_exchanges_give_way_to_a_few_collectives(monkeypatch: pytest.MonkeyPatch):
    """256 rounds among 4,096 devices are megabytes of text; they stay with a budget that is tight, and where the
    collectives take much longer."""
    mesh, network = Mesh(a=16, b=16, c=16), PRESETS["tpu-v5p"]
    fast = plan(*(Layout.parse(text, mesh) for text in SWAP), network=network)
    assert message_count(fast) == 256 * 4096 and fast.seconds is not None
    monkeypatch.setattr(request, "best_plan", lambda *_: fast)
    monkeypatch.setattr(placement, "platform_of", lambda mesh: "tpu")
    move, options = Move(fast.source, fast.target), PlanOptions(network=network)
    nowhere = jax.sharding.AbstractMesh((16, 16, 16), ("a", "b", "c"))
    short = request.best_plan_on(nowhere, move, options)
    assert short.launches <= 3 and message_count(short) <= 4096 and short.seconds is not None
    assert fast.seconds <= short.seconds <= 2.0 * fast.seconds
    assert request.best_plan_on(nowhere, move, options._replace(budget=fast.peak_bytes)) is fast
    monkeypatch.setattr(request, "SLOWER", 1.0)
    assert request.best_plan_on(nowhere, move, options) is fast


def test_a_long_exchange_of_a_part_keeps_its_part(monkeypatch: pytest.MonkeyPatch):
    """Short plans are found between two layouts; the view or the part of a move must not be lost."""
    monkeypatch.setattr(request, "LONG", 2)
    monkeypatch.setattr(request, "options_on", lambda _, options: options._replace(network=PRESETS["tpu-v5e"]))
    mesh = Mesh(x=2, y=2)
    move = Move(Layout.parse("f32[{x}{y}20]", mesh), Layout.parse("f32[20]", mesh), take={0: slice(0, 20)})
    devices = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    made = request.best_plan_on(devices, move, PlanOptions())
    assert made.view == move.view and message_count(made) > 2

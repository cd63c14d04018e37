"""`reshard simulate`: random data, the check of every element and every promise, and its limits."""

import itertools
import random
import sys

import numpy as np
import pytest

import reshard as rs
from reshard import runtime
from reshard.cli import trial
from reshard.cli.trial import Fault, Trial, check_simulated_size, show_verdict
from reshard.errors import ReshardError
from reshard.runtime import Account, simulate
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.types.meaning import meaning
from tests.cli.cases import MESH, SOURCE, TARGET
from tests.draw.cases import planned
from tests.layouts import random_pair
from tests.show.printing import printed

REAL = runtime.simulate

SIMULATED = [
    (SOURCE, TARGET),
    ("f32[{x}3/10]", "f32[{y}5]"),
    ("s4[{x}4]", "s4[16]"),
    ("pred[{x}4, 2]", "pred[16, {y}1]"),
    ("c64[{x}4] + sum{y}", "c64[{x}{y}2]"),
    ("f8e5m2[8, 4] + mean{x}", "f8e5m2[{x}2, 4]"),
    ("f8e8m0fnu[{x}4]", "f8e8m0fnu[16]"),
    ("pred[8] + max{x}", "pred[{y}4]"),
    ("f64[10] + min{y}", "f64[{x}3/10]"),
    ("f32[] + sum{x}", "f32[]"),
    ("s2[{x}4]", "s2[{y}8]"),
]


@pytest.mark.parametrize(("source", "target"), SIMULATED)
def test_right_plans(call, source, target):
    ran = call("simulate", *MESH, source, target, "--seed", "3")
    assert ran.code == 0, ran.out + ran.err
    assert "right: each of the 8 devices holds what the target says" in ran.out
    assert ran.out.count("kept") == 3


def test_it_follows_every_option(call):
    ran = call("simulate", *MESH, SOURCE, TARGET, "--budget", "4KiB", "--network", "h100", "--donate")
    assert ran.code == 0
    assert "exchange" in ran.out
    assert "seconds" in ran.out


def _planted(change):
    def run(plan, tiles, memory):
        tiles_after = REAL(plan, tiles, memory)
        return change(tiles_after) or tiles_after

    return run


def _one_element(tiles):
    tiles[5] = tiles[5].copy()
    tiles[5][3, 1, 2] += 1


def _swapped(tiles):
    tiles[0], tiles[1] = tiles[1], tiles[0]


def _lost(tiles):
    del tiles[7]


def _transposed(tiles):
    tiles[2] = tiles[2].transpose(2, 1, 0)[:1]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (_one_element, "WRONG: 1 element on 1 of 8 devices"),
        (_swapped, "on 2 of 8 devices"),
        (_lost, "device 7: 1 wrong, first at global (): no tile"),
        (_transposed, "device 2: 1 wrong, first at global (): shape (1, 2, 16)"),
    ],
)
def test_it_finds_a_planted_fault(call, monkeypatch, change, verdict):
    monkeypatch.setattr(runtime, "simulate", _planted(change))
    ran = call("simulate", *MESH, SOURCE, TARGET)
    assert ran.code == 1
    assert verdict in ran.out


def test_it_names_the_first_wrong_element(call, monkeypatch):
    monkeypatch.setattr(runtime, "simulate", _planted(_one_element))
    assert "device 5: 1 wrong, first at global (3, 11, 2):" in call("simulate", *MESH, SOURCE, TARGET).out


def test_it_finds_a_partial_sum_that_is_off(call, monkeypatch):
    monkeypatch.setattr(runtime, "simulate", _planted(lambda tiles: {d: t * 1.001 for d, t in tiles.items()}))
    assert call("simulate", *MESH, "f32[8, 16] + sum{x}", "f32[{x}2, 16]").code == 1


def test_it_finds_a_broken_promise(call, monkeypatch):
    def greedy(plan, tiles, memory):
        tiles_after = REAL(plan, tiles, memory)
        memory.receive(0, 1024)
        return tiles_after

    monkeypatch.setattr(runtime, "simulate", greedy)
    ran = call("simulate", *MESH, SOURCE, TARGET)
    assert ran.code == 1
    assert "BROKEN" in ran.out


def test_without_ml_dtypes_it_names_what_to_install(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    numpy_dtype.cache_clear()
    ran = call("simulate", *MESH, "bf16[{x}4]", "bf16[16]")
    assert ran.code == 2
    assert "install ml_dtypes" in ran.err


def test_an_unknown_exception_is_not_swallowed(call, monkeypatch):
    def broken(*_):
        raise KeyError("planted")

    monkeypatch.setattr(runtime, "simulate", broken)
    with pytest.raises(KeyError, match="planted"):
        call("simulate", *MESH, SOURCE, TARGET)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("partial", [False, True])
def test_source_tiles_are_cut_by_the_meaning(seed, partial):
    source, target = random_pair(random.Random(seed), "float32", partial)
    made = Trial(source, target, seed)
    for device, tile in made.source_tiles().items():
        summand = made.summands[source.mesh.coordinates(source.mesh.position(device), source.partial)]
        for local, element in zip(np.ndindex(tile.shape), itertools.product(*meaning(source, device)), strict=True):
            if all(index < size for index, size in zip(element, source.shape, strict=True)):
                assert tile[local] == summand[element]


@pytest.mark.parametrize("text", ["f32[{x}3/7, 5]", "s8[2{x}2/11]", "bf16[{x}{y}1/5, {z}2/3]"])
def test_each_wrong_element_is_a_fault_and_padding_is_not(text):
    layout = rs.Layout.parse(text, rs.Mesh(x=3, y=2, z=2))
    made = Trial(layout, layout, 0)
    for device in layout.mesh.devices:
        for local, element in enumerate(itertools.product(*meaning(layout, device))):
            tiles = made.source_tiles()
            tiles[device].flat[local] += 1
            true = all(index < size for index, size in zip(element, layout.shape, strict=True))
            assert [(f.device, f.count, f.at) for f in made.faults(tiles)] == [(device, 1, element)] * true


def measured(plan):
    account = Account(plan.source.dtype)
    simulate(plan, Trial(plan.source, plan.target, 0).source_tiles(), account)
    return account


def test_the_limits_are_exact(monkeypatch):
    plan = planned("two dims")
    needed = 8 * plan.peak_bytes + 16 * 16 * 4  # all tiles at the peak, and the array that they are cut from
    for name, limit, message in [
        ("MOST_BYTES", needed, "give a shape with 2 times fewer elements"),
        ("MOST_DEVICES", 8, "8 devices on mesh <x=4, y=2> are too many"),
        ("MOST_ROUNDS", plan.launches, "launches are too many to simulate"),
    ]:
        with monkeypatch.context() as changed:
            changed.setattr(trial, name, limit)
            check_simulated_size(plan)
            changed.setattr(trial, name, limit - 1)
            with pytest.raises(ReshardError, match=message):
                check_simulated_size(plan)


def test_the_verdict_counts_devices_and_elements():
    plan = planned("partial")
    assert "right: each of the 8 devices holds what the target says, within rounding" in printed(
        show_verdict, plan, [], True
    )
    assert "rounding" not in printed(show_verdict, planned("one dim"), [], True)
    faults = [Fault(device, 3, (0,), "1", "2") for device in range(10)]
    lines = printed(show_verdict, plan, faults, True).splitlines()
    assert lines[0] == "WRONG: 30 elements on 10 of 8 devices"
    assert lines[1:] == [f"  device {device}: 3 wrong, first at global (0,): 1, not 2" for device in range(8)]

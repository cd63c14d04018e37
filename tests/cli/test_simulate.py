"""`reshard simulate`: every element is checked, and every promise."""

import sys

import pytest

from reshard import runtime
from tests.cli.cases import MESH, SOURCE, TARGET

REAL = runtime.simulate

SIMULATED = [
    (SOURCE, TARGET),
    ("f32[{x}3/10]", "f32[{y}5]"),
    ("bf16[2{x}4, {y}8]", "bf16[{y}16, {x}4]"),
    ("s4[{x}4]", "s4[16]"),
    ("pred[{x}4, 2]", "pred[16, {y}1]"),
    ("c64[{x}4] + sum{y}", "c64[{x}{y}2]"),
    ("f8e5m2[8, 4] + mean{x}", "f8e5m2[{x}2, 4]"),
    ("f8e8m0fnu[{x}4]", "f8e8m0fnu[16]"),
    ("u8[8] + sum{x}{y}", "u8[{x}2] + sum{y}"),
    ("s32[8] + product{x}", "s32[8]"),
    ("pred[8] + max{x}", "pred[{y}4]"),
    ("f64[10] + min{y}", "f64[{x}3/10]"),
    ("f32[] + sum{x}", "f32[]"),
    ("f32[0, 4]", "f32[0, {x}1]"),
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


def test_other_device_orders(call):
    ran = call("simulate", "{devices=[4,2]0,2,1,3,7,6,5,4}", "{devices=[2,4]<=[8]}", "--shape", "8,8", "--dtype", "f32")
    assert ran.code == 0, ran.out + ran.err


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
    ran = call("simulate", *MESH, "bf16[{x}4]", "bf16[16]")
    assert ran.code == 2
    assert "install ml_dtypes" in ran.err


def test_an_unknown_exception_is_not_swallowed(call, monkeypatch):
    def broken(*_):
        raise KeyError("planted")

    monkeypatch.setattr(runtime, "simulate", broken)
    with pytest.raises(KeyError, match="planted"):
        call("simulate", *MESH, SOURCE, TARGET)

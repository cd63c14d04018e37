"""Fragments: the captured module has the tiles of the program, and does what the plan does."""

import jax
import numpy as np
import pytest

import reshard as rs
from reshard.errors import SpliceError
from reshard.hlo import Array
from reshard.hlo.proto import ModuleProto
from reshard.jax.xla_pass import fragments, program_peaks, xla_hook
from reshard.jax.xla_pass.fragments import FragmentKey, Fragments, JaxlibReader

MESH = rs.Mesh(y=2, x=4)


def key(before="2,1,0", after="2,1,0"):
    """The move of jax-ml/jax#21562 on tiles 8 x 16 x 4, dims in the order of the program."""
    plan = rs.plan(*(rs.Layout.parse(text, MESH) for text in ("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]")))
    places = ((8, 64), (16, 4), (4, 1))
    return FragmentKey(plan, Array("f32", (8, 16, 4), before), Array("f32", (16, 2, 16), after), places)


@pytest.fixture
def hook():
    with xla_hook.enabled():
        yield


@pytest.mark.parametrize(("before", "after"), [("2,1,0", "2,1,0"), ("1,0,2", "0,2,1")])
def test_it_takes_and_yields_the_layouts_asked_for(hook, before, after):
    module = ModuleProto.decode(Fragments(jax.devices()).get(key(before, after)).module)
    (parameter,) = module.entry.parameters
    text = JaxlibReader().text(Fragments(jax.devices()).get(key(before, after)).module)
    entry = text[text.index("ENTRY") :]
    assert f"f32[8,16,4]{{{before}}} parameter(0)" in entry
    assert any(f"f32[16,2,16]{{{after}}}" in line for line in entry.splitlines() if "ROOT" in line)
    assert parameter.opcode == "parameter"


def test_each_is_compiled_once(hook, monkeypatch):
    known = Fragments(jax.devices())
    first = known.get(key())
    monkeypatch.setattr(fragments, "_lower_fragment", None)
    assert known.get(key()) is first


def test_its_peak_has_both_tiles(hook):
    fragment = Fragments(jax.devices()).get(key())
    assert fragment.peak_bytes >= 2 * 8 * 16 * 4 * 4


def test_what_does_not_compile_is_refused(hook):
    with pytest.raises(SpliceError, match=r"does not compile here"):
        Fragments(jax.devices()[:4]).get(key())


def test_an_unknown_memory_layout_is_refused():
    with pytest.raises(SpliceError, match=r"memory layout 2,1,0:X\(3\) is not known"):
        fragments._layout_of(Array("f32", (2, 2, 2), "2,1,0:X(3)"))


@pytest.mark.parametrize(
    ("text", "order", "tiles"),
    [("1,0", (0, 1), None), ("0,2,1", (1, 2, 0), None), ("2,1,0:T(8,128)(2,1)", (0, 1, 2), ((8, 128), (2, 1)))],
)
def test_memory_layouts_of_hlo(text, order, tiles):
    layout = fragments._layout_of(Array("f32", (2,) * len(order), text))
    assert tuple(layout.major_to_minor) == order
    assert (layout.tiling or None) == tiles


def test_only_a_thread_that_compiles_a_fragment_captures():
    assert not fragments.capture_module(b"module")


def test_the_tile_function_rearranges_the_tile():
    """With one device the plan does nothing, so what is left is the order of the digits."""
    mesh = rs.Mesh(x=1)
    plan = rs.plan(rs.Layout.parse("f32[4, 6]", mesh), rs.Layout.parse("f32[4, 6]", mesh))
    one = FragmentKey(plan, Array("f32", (6, 4), "1,0"), Array("f32", (4, 6), "1,0"), ((4, 1), (6, 4)))
    run = one.function({"axis0": 1})
    tile = np.arange(24, dtype="float32").reshape(6, 4)
    (moved,) = run(jax.numpy.asarray(tile))
    np.testing.assert_array_equal(np.asarray(moved), tile.T)


def test_compiling_it_quickly_changes_nothing_that_is_kept(hook, monkeypatch):
    quick = Fragments(jax.devices()).get(key())
    monkeypatch.setattr(fragments, "_QUICKER", {})
    slow = Fragments(jax.devices()).get(key())
    assert quick[1:] == slow[1:]
    assert program_peaks.digest_module(quick.module) == program_peaks.digest_module(slow.module)

"""Where elements came from, traced backwards, against an interpreter that runs the same text forwards."""

import re

import numpy as np
import pytest

from reshard.doctor.dataflow.flow import Numbering
from reshard.doctor.dataflow.trace import NOWHERE, Tracer
from tests.doctor.fragments import DATA, GATHER, OFFSET, SLICE, ZERO, Analysis, text
from tests.doctor.tracing import everywhere, follow, follow_to_start, program


def test_through_fusions():
    lines = program("%g = f32[24,4]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}",
                    "ROOT %r = f32[4,2]{1,0} fusion(%at, %g), kind=kLoop, calls=%inner")  # fmt: skip
    inner = """%inner {
  %b = f32[24,4]{1,0} parameter(1)
  %a = s32[] parameter(0)
  %z = s32[] constant(0)
  %d = f32[2,4]{1,0} dynamic-slice(%b, %a, %z), dynamic_slice_sizes={2,4}
  ROOT %t = f32[4,2]{1,0} transpose(%d), dimensions={1,0}
}

ENTRY"""
    got, want = follow_to_start(lines.replace("ENTRY", inner), "r")
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.hlo")), ids=lambda path: path.stem)
def test_a_recorded_program(path):
    """All sizes in the text are divided by 64: the array of 512 x 512 x 256 becomes one of 8 x 8 x 4."""
    got, want = follow(_shrunk(path.read_text()), _busiest_result)
    assert got.shape == (8, 8, 1, 4)
    np.testing.assert_array_equal(got, want)


def _busiest_result(analysis):
    """The result of the chain that receives most, and its leaves."""
    chain = max(analysis.chains(), key=lambda chain: sum(one.received_bytes for one in chain.collectives))
    (value,) = chain.results
    return value, chain.leaves


def _shrunk(text):
    """The program with all sizes divided by 64, offsets included; 32768 is a product of two sizes."""
    smaller = re.sub(r"\b32768\b", "8", text)
    return re.sub(r"\b(2048|512|256|128|64)\b", lambda size: str(int(size[1]) // 64), smaller)


def tracer_of(*lines):
    analysis = Analysis(text(*lines))
    return analysis, Tracer(analysis.maps, Numbering(analysis.flow), frozenset())


def test_elements_of_a_leaf():
    analysis, tracer = tracer_of("ROOT %t = f32[8,2]{1,0} transpose(%p), dimensions={1,0}")
    points = everywhere(4, (8, 2))
    origins = tracer(analysis.value("t"), points)
    assert (origins.device == points.device).all() and len(tracer.tiles) == 1
    np.testing.assert_array_equal(origins.place, points.indices[1] * 8 + points.indices[0])


def test_padding_comes_from_nowhere():
    analysis, tracer = tracer_of("%z = f32[] constant(0)", "ROOT %w = f32[3,8]{1,0} pad(%p, %z), padding=0_1x0_0")
    origins = tracer(analysis.value("w"), everywhere(4, (3, 8)))
    np.testing.assert_array_equal(origins.leaf.reshape(4, 3, 8)[:, 2] == NOWHERE, True)
    assert (origins.leaf.reshape(4, 3, 8)[:, :2] != NOWHERE).all()


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("p", 0),
        ("g", 3 * 16),  # three of four tiles
        ("d", 3 * 4),  # two columns of three tiles
        ("twice", 3 * 4),  # the same elements again
    ],
)
def test_elements_that_arrive_from_other_devices(name, elements):
    twice = "%twice = f32[8,4]{1,0} concatenate(%d, %d), dimensions={1}"
    analysis, tracer = tracer_of(*OFFSET, ZERO, GATHER, SLICE, twice, "ROOT %r = f32[8,4]{1,0} add(%twice, %twice)")
    assert tracer.arriving([analysis.value(name)]) == elements


def test_elements_of_several_values_count_once():
    analysis, tracer = tracer_of(*OFFSET, ZERO, GATHER, SLICE, "ROOT %r = f32[8,2]{1,0} add(%d, %d)")
    assert tracer.arriving([analysis.value("d"), analysis.value("g")]) == 3 * 16


def test_too_many_elements_are_not_counted():
    analysis, tracer = tracer_of("ROOT %w = f32[2,8,65536]{2,1,0} broadcast(%p), dimensions={0,1}")
    assert tracer.arriving([analysis.value("w")]) is None


def test_padding_does_not_arrive():
    padded = "%w = f32[3,8]{1,0} pad(%p, %z), padding=0_1x0_0"
    analysis, tracer = tracer_of("%z = f32[] constant(0)", padded, "ROOT %r = f32[3,8]{1,0} add(%w, %w)")
    assert tracer.arriving([analysis.value("w")]) == 0

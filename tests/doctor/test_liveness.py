"""The memory that a chain holds, in modules where it can be counted by hand."""

import pytest

from reshard.doctor.dataflow.flow import Numbering
from reshard.doctor.memory import Liveness
from tests.doctor.fragments import GATHER, RECORDED, RESHARD, Analysis, text

STARTED = GATHER.replace("%g = f32[8,8]{1,0} all-gather", "%s = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start")
USE = "ROOT %r = f32[8,8]{1,0} add(%g, %g)"


def memory(*lines, **options):
    """The peak, the temporary bytes and the largest array on the way, of the one chain that there is."""
    analysis = Analysis(text(*lines, **options))
    (chain,) = analysis.chains()
    use = Liveness(analysis.flow, Numbering(analysis.flow)).of(chain)
    return use.peak_bytes, use.temp_bytes, None if use.largest is None else use.largest.dims


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # the source of 64 B and the result of 256 B: nothing beside these two
        ([GATHER, USE], (320, 0, None)),
        # the source, the gathered array, and the result of 64 B
        (RESHARD, (384, 256, (8, 8))),
        # the same, started and awaited apart: the gathered array lives on after its end
        ([line if line != GATHER else f"{STARTED}\n  %g = f32[8,8]{{1,0}} all-gather-done(%s)" for line in RESHARD],
         (384, 256, (8, 8))),
        # two shapes of half the array between them, one after the other: the first is gone when the third is made
        ([GATHER, "%s = f32[4,8]{1,0} slice(%g), slice={[0:4], [0:8]}",
          "%m = f32[4,8]{1,0} collective-permute(%s), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}",
          "ROOT %r = f32[4,8]{1,0} add(%m, %m)"], (64 + 256 + 128, 256, (8, 8))),
        # a bitcast is a view: it keeps the gathered array alive up to its own last use
        ([GATHER, "%b = f32[64]{0} bitcast(%g)", "%s = f32[16]{0} slice(%b), slice={[0:16]}",
          "%m = f32[16]{0} collective-permute(%s), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}",
          "%n = f32[16]{0} slice(%b), slice={[16:32]}", "%j = f32[32]{0} concatenate(%m, %n), dimensions={0}",
          "ROOT %r = f32[32]{0} add(%j, %j)"], (64 + 256 + 2 * 64, 256, (8, 8))),
    ],
    ids=["result", "gather and slice", "asynchronous", "half of it", "view"],
)  # fmt: skip
def test_what_is_live_at_once(lines, expected):
    assert memory(*lines) == expected


def test_a_fusion_does_not_store_what_is_inside():
    """The gathered array is sliced inside a fusion that computes: it is stored, its slice is not."""
    inside = """%fused {
  %w = f32[8,8]{1,0} parameter(0)
  %o = u32[] parameter(1)
  %z = u32[] constant(0)
  %d = f32[8,2]{1,0} dynamic-slice(%w, %z, %o), dynamic_slice_sizes={8,2}
  ROOT %n = f32[8,2]{1,0} negate(%d)
}

"""
    fusion = "ROOT %f = f32[8,2]{1,0} fusion(%g, %at), kind=kLoop, calls=%fused"
    assert memory(*RESHARD[:3], GATHER, fusion, before=inside) == (64 + 256 + 64, 256, (8, 8))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_bounds_in_recorded_modules(path):
    """No chain holds less than its results, nor less beside them than its largest array on the way."""
    analysis = Analysis(path.read_text())
    numbering = Numbering(analysis.flow)
    liveness = Liveness(analysis.flow, numbering)
    for chain in analysis.chains():
        use = liveness.of(chain)
        results = {numbering.of(value): value.array for value in chain.results}
        assert use.peak_bytes >= max((array.nbytes for array in results.values() if array), default=0)
        assert 0 <= use.temp_bytes <= use.peak_bytes
        if use.largest is not None:
            assert use.peak_bytes >= use.largest.nbytes

"""Index maps of what fragments consist of, against numpy doing the same on marked tiles."""

import numpy as np
import pytest

from reshard import hlo
from reshard.doctor.checks.equivalence import Traced
from reshard.doctor.dataflow.flow import HloValue
from reshard.doctor.dataflow.index_maps import Points, unravel_places
from reshard.errors import SpliceError

HEAD = """HloModule m, num_partitions=2

%wrote (a: (f32[6], f32[2])) -> f32[6] {
  %a = (f32[6]{0}, f32[2]{0}) parameter(0)
  %base = f32[6]{0} get-tuple-element(%a), index=0
  %part = f32[2]{0} get-tuple-element(%a), index=1
  %one = s32[] constant(1)
  ROOT %w = f32[6]{0} dynamic-update-slice(%base, %part, %one)
}

%kept (b: (f32[6], f32[2])) -> f32[6] {
  %b = (f32[6]{0}, f32[2]{0}) parameter(0)
  ROOT %k = f32[6]{0} get-tuple-element(%b), index=0
}

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

ENTRY %main {
  %p = f32[6]{0} parameter(0)
  %i = u32[] partition-id()
  %n = s32[] convert(%i)
  %two = s32[] constant(2)
  %at = s32[] multiply(%n, %two)
  %zero = f32[] constant(0)
  %part = f32[2]{0} dynamic-slice(%p, %at), dynamic_slice_sizes={2}
"""


def origins(lines, name, dims):
    """Where the elements of a value come from: device and place in %p, a row per device; -1 for padding."""
    traced = Traced(hlo.parse(HEAD + lines + "}\n"), 2, spliced=True)
    region = traced.region("main")
    count = int(np.prod(dims))
    points = Points(np.repeat(np.arange(2), count), unravel_places(np.tile(np.arange(count), 2), dims))
    result = traced.origins(HloValue(region, name), HloValue(region, "p"), points)
    return np.where(result.leaf < 0, -1, result.place).reshape(2, -1).tolist(), result.device.reshape(2, -1)


def test_an_update_at_an_offset_of_the_device():
    places, _ = origins("  ROOT %u = f32[6]{0} dynamic-update-slice(%p, %part, %n)\n", "u", (6,))
    expected = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    for device in range(2):
        expected[device][device : device + 2] = [2 * device, 2 * device + 1]
    assert places == expected


def test_an_update_past_the_end_is_moved_back():
    lines = "  %far = s32[] constant(9)\n  ROOT %u = f32[6]{0} dynamic-update-slice(%p, %part, %far)\n"
    assert origins(lines, "u", (6,))[0] == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 3]]


def test_an_update_of_zeros_leaves_padding():
    lines = (
        "  %z = f32[6]{0} broadcast(%zero), dimensions={}\n  ROOT %u = f32[6]{0} dynamic-update-slice(%z, %part, %n)\n"
    )
    assert origins(lines, "u", (6,))[0] == [[0, 1, -1, -1, -1, -1], [-1, 2, 3, -1, -1, -1]]


def test_a_reduction_over_dims_of_size_one():
    lines = (
        "  %r = f32[2,1,3]{2,1,0} reshape(%p)\n"
        "  ROOT %d = f32[2,3]{1,0} reduce(%r, %zero), dimensions={1}, to_apply=%sum\n"
    )
    assert origins(lines, "d", (2, 3))[0] == [[0, 1, 2, 3, 4, 5]] * 2


def test_a_real_reduction_cannot_be_followed():
    lines = "  %r = f32[2,3]{1,0} reshape(%p)\n  ROOT %d = f32[2]{0} reduce(%r, %zero), dimensions={1}, to_apply=%sum\n"
    with_leaf = origins(lines, "d", (2,))  # It is a leaf of its own, and not %p.
    assert with_leaf[0] == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("branches", "expected"),
    [
        ("%flag, %t, %t), true_computation=%wrote, false_computation=%kept", [[0, 1, 2, 3, 4, 5], [0, 2, 3, 3, 4, 5]]),
        ("%n, %t, %t), branch_computations={%wrote, %kept}", [[0, 0, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5]]),
    ],
)
def test_each_device_runs_its_own_branch(branches, expected):
    lines = (
        "  %flag = pred[] convert(%i)\n"
        "  %t = (f32[6]{0}, f32[2]{0}) tuple(%p, %part)\n"
        f"  ROOT %c = f32[6]{{0}} conditional({branches}\n"
    )
    assert origins(lines, "c", (6,))[0] == expected


def test_an_unknown_offset_is_refused():
    lines = (
        '  %q = s32[] custom-call(%p), custom_call_target="anything"\n'
        "  %u = f32[6]{0} dynamic-update-slice(%p, %part, %q)\n"
        "  ROOT %v = f32[6]{0} copy(%u)\n"
    )
    places, _ = origins(lines, "v", (6,))
    assert places == [[0, 1, 2, 3, 4, 5]] * 2  # Of %u, which is where following ends.


def test_the_error_names_the_value():
    lines = "  ROOT %u = (f32[6]{0}, f32[2]{0}) tuple(%p, %part)\n"
    with pytest.raises(SpliceError, match="cannot be followed"):
        origins(lines, "u", (6,))

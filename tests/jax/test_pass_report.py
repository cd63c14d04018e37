"""Reports of the passes: what is taken and left, the figures of programs, and decisions; as data and as text."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import reshard as rs
from reshard.jax.jit import jit
from reshard.jax.pass_report import Decision, PassReport, ProgramFigures, Reshard, describe_savings, read_figures
from reshard.jax.stablehlo_pass.module_pass import transform
from tests.jax.modules import COLUMNS, constraint, module
from tests.jax.moving import numbered, program

MESH = rs.Mesh(x=2, y=3)


ROWS, COLUMNS_6 = rs.Layout.parse("f32[{x}3, 6]", MESH), rs.Layout.parse("f32[6, {x}3]", MESH)


TAKEN = Reshard("a.py:3", "f/add", True, ROWS, COLUMNS_6, rs.plan(ROWS, COLUMNS_6), True)
LEFT = Reshard("", "f/mul", False, ROWS, COLUMNS_6, None, False, "no plan fits")
IDLE = Reshard("a.py:5", "", True, ROWS, ROWS, None, False, "nothing moves")
UNKNOWN = Reshard("", "", False, None, None, None, False, "quantized")


def test_reports_are_plain_data() -> None:
    report = transform(module(constraint(COLUMNS))).report
    (data,) = report.to_dict()["reshards"]
    assert (data["source"], data["taken"], data["plan"]["received_bytes"]) == ("f32[{x}4, {y}8]", True, 96)
    assert report.left == ()
    assert PassReport((Reshard("", "", False, None, None, None, False, "why"),)).left  # what cannot be planned is left


def test_what_moves_is_taken_or_left() -> None:
    report = PassReport((TAKEN, LEFT, IDLE, UNKNOWN))
    assert report.taken == (TAKEN,)
    assert report.left == (LEFT, UNKNOWN)


def test_a_row_names_the_line_else_the_operation() -> None:
    assert str(PassReport((TAKEN, LEFT, IDLE, UNKNOWN))).splitlines() == [
        "reshards taken: 1 of 3",
        "  a.py:3: f32[{x}3, 6] -> f32[6, {x}3]: all_to_all",
        "  f/mul: f32[{x}3, 6] -> f32[6, {x}3]: left, no plan fits",
        "  (unknown): cannot be planned: left, quantized",
    ]


PLAIN = ProgramFigures(received_bytes=1000, launches=2, temp_bytes=1 << 20, peak_bytes=1 << 20, flops=1e6)


def ours(**changes: Any) -> ProgramFigures:
    return replace(PLAIN, **changes)


def test_what_is_saved() -> None:
    text = describe_savings(PLAIN, ours(received_bytes=17, launches=1, temp_bytes=3))
    assert text == (
        "17 B received instead of 1000 B, in 1 collectives instead of 2; 3 B of temporary memory instead of 1048576 B"
    )


# ---- what is read ----------------------------------------------------------------------------------

HLO = """HloModule jit_f, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}, num_partitions=2

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %moved = f32[8,4]{1,0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %moved)
}

%cond (q: (s32[], f32[8,4])) -> pred[] {
  %q = (s32[], f32[8,4]{1,0}) parameter(0)
  %y = f32[8,4]{1,0} get-tuple-element(%q), index=1
  ROOT %go = pred[] custom-call(%y), custom_call_target="unknown"
}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %all = f32[16,4]{1,0} all-gather(%a), channel_id=2, replica_groups={{0,1}}, dimensions={0}, metadata={LINE}
  %half = f32[8,4]{1,0} slice(%all), slice={[0:8], [0:4]}
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,4]{1,0}) tuple(%zero, %half)
  %end = (s32[], f32[8,4]{1,0}) while(%start), condition=%cond, body=%body
  ROOT %r = f32[8,4]{1,0} get-tuple-element(%end), index=1
}
""".replace("LINE", 'op_name="f" source_file="/me/a.py" source_line=7')


class Fake:
    """A compiled program with known analyses."""

    def __init__(self, flops: Any) -> None:
        self.flops = flops

    def as_text(self) -> str:
        return HLO

    def memory_analysis(self) -> Any:
        return SimpleNamespace(
            temp_size_in_bytes=100, argument_size_in_bytes=30, output_size_in_bytes=20, alias_size_in_bytes=5
        )

    def cost_analysis(self) -> Any:
        if isinstance(self.flops, type):
            raise self.flops
        return self.flops


def test_figures_of_a_known_module() -> None:
    """A gather of one tile of 128 B, and a permute of the same in a loop of unknown length, counted once."""
    read = read_figures(Fake({"flops": 12.0}))
    assert (read.received_bytes, read.loop_bytes, read.launches) == (256, 128, 2)
    assert (read.temp_bytes, read.peak_bytes, read.flops) == (100, 145, 12.0)
    assert read.by_line == {"/me/a.py:7": (128, 1), "": (128, 1)}


@pytest.mark.parametrize("analysis", [None, {}, NotImplementedError, RuntimeError])
def test_a_backend_without_a_cost_analysis(analysis: Any) -> None:
    assert read_figures(Fake(analysis)).flops == 0


def test_the_lines_are_the_users() -> None:
    compiled = jit(program).lower(numbered()).compile()
    read = read_figures(compiled.executable)
    (line,) = (line for line in read.by_line if line)
    assert line.startswith(str(program.__code__.co_filename)) and read.by_line[line] == (1792, 1)


def test_decisions_are_json() -> None:
    decision = Decision("reshard", "it is better", plain=PLAIN, ours=ours(by_line={"a": (1, 2)}))
    data = json.loads(json.dumps(decision.to_dict()))
    assert data["plain"]["received_bytes"] == 1000 and data["ours"]["by_line"] == {"a": [1, 2]}
    assert str(decision) == "reshard: it is better"

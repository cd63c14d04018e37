"""Comparison of compiled programs: figures of known modules, and each reason to drop ours."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from reshard.jax.compare import (
    FLOPS_PER_BYTE,
    SLACK_BYTES,
    Decision,
    ProgramFigures,
    figures,
    savings,
    unprofitable_lines,
    why_worse,
)
from reshard.jax.jit import jit
from tests.jax.moving import numbered, program

PLAIN = ProgramFigures(received_bytes=1000, launches=2, temp_bytes=1 << 20, peak_bytes=1 << 20, flops=1e6)
LAUNCH = 10
SLACK = SLACK_BYTES + PLAIN.peak_bytes // 100


def ours(**changes: Any) -> ProgramFigures:
    return replace(PLAIN, **changes)


def test_fewer_bytes_are_better() -> None:
    assert why_worse(PLAIN, ours(received_bytes=999), LAUNCH) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"received_bytes": 1001}, "it would receive 1001 B instead of 1000 B"),
        ({"received_bytes": 500, "loop_bytes": 7}, "it would receive 7 B instead of 0 B in each turn of a loop"),
        ({"received_bytes": 500, "temp_bytes": PLAIN.temp_bytes + SLACK + 1}, "of temporary memory instead of"),
        ({"received_bytes": 999, "flops": 1e8}, "it would compute 1e+08 operations instead of 1e+06"),
        ({"received_bytes": 991, "launches": 3}, "it would start 3 collectives instead of 2"),
        ({}, "it would receive as much, in as many collectives"),
    ],
)
def test_each_reason(changes: dict[str, Any], why: str) -> None:
    assert why in why_worse(PLAIN, ours(**changes), LAUNCH)


@pytest.mark.parametrize(
    "changes",
    [
        {"received_bytes": 989, "launches": 3},  # 11 B for one launch of 10 B
        {"received_bytes": 999, "temp_bytes": PLAIN.temp_bytes + SLACK},
        {"temp_bytes": PLAIN.temp_bytes - SLACK},  # as many bytes, in less memory
        {"launches": 1},
        {"received_bytes": 900, "flops": 1e6 * 1.01 + FLOPS_PER_BYTE * 110},
    ],
)
def test_at_the_edge_it_is_better(changes: dict[str, Any]) -> None:
    assert why_worse(PLAIN, ours(**changes), LAUNCH) == ""


def test_what_is_saved() -> None:
    text = savings(PLAIN, ours(received_bytes=17, launches=1, temp_bytes=3))
    assert text == (
        "17 B received instead of 1000 B, in 1 collectives instead of 2; 3 B of temporary memory instead of 1048576 B"
    )


# ---- lines -----------------------------------------------------------------------------------------


def test_lines_that_lose_and_lines_that_do_not_gain() -> None:
    plain = ours(by_line={"a": (100, 1), "b": (50, 1), "c": (70, 1)}, received_bytes=220, launches=3)
    after = ours(by_line={"a": (10, 1), "b": (45, 2), "c": (70, 1)}, received_bytes=125, launches=4)
    losing, not_gaining = unprofitable_lines(plain, after, ["a", "b", "c"], LAUNCH)
    assert (losing, not_gaining) == ({"b"}, {"b", "c"})


def test_a_line_that_xla_does_not_name_is_credited_with_the_rest() -> None:
    """All of the plain program's bytes are of no line: they are what "a" saves."""
    plain = ours(by_line={"": (1000, 2)})
    after = ours(by_line={"a": (300, 1)}, received_bytes=300, launches=1)
    assert unprofitable_lines(plain, after, ["a"], LAUNCH) == (frozenset(), frozenset())
    more = ours(by_line={"a": (1300, 1)}, received_bytes=1300, launches=1)
    assert unprofitable_lines(plain, more, ["a"], LAUNCH) == ({"a"}, {"a"})


def test_costs_of_lines() -> None:
    one = ours(by_line={"a": (100, 3)})
    assert one.cost(LAUNCH) == 1020
    assert (one.cost_of("a", LAUNCH), one.cost_of("b", LAUNCH)) == (130, 0)


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
    read = figures(Fake({"flops": 12.0}))
    assert (read.received_bytes, read.loop_bytes, read.launches) == (256, 128, 2)
    assert (read.temp_bytes, read.peak_bytes, read.flops) == (100, 145, 12.0)
    assert read.by_line == {"/me/a.py:7": (128, 1), "": (128, 1)}


@pytest.mark.parametrize("analysis", [None, {}, NotImplementedError, RuntimeError])
def test_a_backend_without_a_cost_analysis(analysis: Any) -> None:
    assert figures(Fake(analysis)).flops == 0


def test_the_lines_are_the_users() -> None:
    compiled = jit(program).lower(numbered()).compile()
    read = figures(compiled.executable)
    (line,) = (line for line in read.by_line if line)
    assert line.startswith(str(program.__code__.co_filename)) and read.by_line[line] == (1792, 1)


def test_decisions_are_json() -> None:
    decision = Decision("reshard", "it is better", plain=PLAIN, ours=ours(by_line={"a": (1, 2)}))
    data = json.loads(json.dumps(decision.to_dict()))
    assert data["plain"]["received_bytes"] == 1000 and data["ours"]["by_line"] == {"a": [1, 2]}
    assert str(decision) == "reshard: it is better"

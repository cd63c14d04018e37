"""Which parts travel as pairs of rows on a TPU; `test_unfilled` has them move arrays."""

from __future__ import annotations

import pytest

from reshard.lower import lower_plan
from reshard.lower.program import InParts
from reshard.lower.to_shard_map.block_writes import lane_pairs
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.cost import StepMode
from reshard.types import Layout, Mesh


@pytest.mark.parametrize(
    ("kind", "source", "target", "able"),
    [
        ("all_gather", "bf16[512, 512, {x}64]", "bf16[512, 512, 512]", True),
        ("all_to_all", "bf16[512, 512, {x}64]", "bf16[{x}64, 512, 512]", True),
        ("all_gather", "bf16[512, 512, {x}128]", "bf16[512, 512, 1024]", False),  # full lanes
        ("all_gather", "bf16[512, 512, {x}32]", "bf16[512, 512, 256]", False),  # quarters
        ("all_gather", "bf16[512, {x}64, 512]", "bf16[512, 512, 512]", False),  # along another dim
        ("all_gather", "bf16[1024, 1024, {x}64]", "bf16[1024, 1024, 512]", False),  # a part is too large for the chip
    ],
)
def test_halves_of_rows_of_lanes_travel_in_pairs(kind: str, source: str, target: str, able: bool):
    ends = [Layout.parse(text, Mesh(x=8)) for text in (source, target)]
    program = lower_plan(chain(ends[0], ends[1], [StepSpec(kind, ends[1], StepMode(parts=8))]))
    step = program.instructions[0]
    assert isinstance(step, InParts)
    assert (lane_pairs(step, program.tile_shapes[0], program.dtype) is not None) == able

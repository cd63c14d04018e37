"""Runs a text forwards with the oracle and follows it backwards with the tracer, over all elements."""

import numpy as np

from reshard.doctor.dataflow.flow import Numbering
from reshard.doctor.dataflow.index_maps import Points, unravel_places
from reshard.doctor.dataflow.trace import NOWHERE, Tracer
from tests.doctor.fragments import Analysis
from tests.doctor.oracle import Machine

_OFFSETS = """
  %id = u32[] partition-id()
  %table = s32[4]{0} constant({2, 0, 6, 4})
  %row = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}
  %at = s32[] reshape(%row)
  %zero = s32[] constant(0)
  %none = f32[] constant(0)
"""


def program(*lines):
    """A module on 4 devices with arguments p and q, and an offset `at` for each device from a table."""
    body = "\n".join(f"  {line}" for line in lines)
    return (
        "HloModule m, num_partitions=4\n\nENTRY %main {\n  %p = f32[6,4]{1,0} parameter(0)\n"
        f"  %q = f32[6,4]{{1,0}} parameter(1){_OFFSETS}{body}\n}}\n"
    )


def everywhere(devices, dims):
    """All points of an array."""
    count = int(np.prod(dims))
    return Points(np.repeat(np.arange(devices), count), unravel_places(np.tile(np.arange(count), devices), dims))


def follow(text, choose):
    """The origins of all points of a value, as the numbers of the oracle, and the oracle's own result.

    `choose` gets the analysis of the text, and returns the value and its leaves.
    """
    analysis, machine = Analysis(text), Machine(text)
    value, leaves = choose(analysis)
    numbering, devices = Numbering(analysis.flow), analysis.module.devices
    tracer = Tracer(analysis.maps, numbering, leaves)
    origins = tracer(value, everywhere(devices, value.array.dims))
    bases = {numbering.of(analysis.value(name)): base for name, base in machine.made.items()}
    numbers = np.full(origins.leaf.size, -1)
    for leaf, tile in tracer.tiles.items():
        mine = origins.leaf == leaf
        numbers[mine] = bases[leaf] + origins.device[mine] * tile.elements + origins.place[mine]
    assert (origins.leaf[numbers == -1] == NOWHERE).all()
    return numbers.reshape(devices, *value.array.dims), machine.values[value.name]


def follow_to_start(text, name):
    """The same for a value of the entry, back to the parameters."""
    return follow(text, lambda analysis: (analysis.flow.origin(analysis.value(name)), frozenset()))

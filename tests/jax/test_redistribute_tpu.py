"""Real TPU executables without the hardware, for v5p: the collectives are the plan's, and the compiler's own figures
for memory are near the plan's promise. Skipped without libtpu.

The arrays are large, because XLA turns a small reduce-scatter into an all-reduce. Without a budget large moves are
split into parts, as for users.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard import hlo
from reshard.errors import BudgetError
from reshard.jax import redistribute
from reshard.lower import lower_plan
from reshard.lower.to_shard_map import tile_function
from reshard.runtime import on_jax
from reshard.types import Layout
from tests.jax.oracle import executed, on, promised
from tests.layouts import contiguous_layouts
from tests.sampling import sampled

pytest.importorskip("libtpu", reason="ahead-of-time compiles for TPU need libtpu: pip install 'jax[tpu]'")

SLACK = 1.06
"""The largest ratio of the compiler's peak to the plan's."""
TABLES = 1 << 15
"""Bytes of a program's tables of indices, which no plan promises."""
Pair = tuple[Layout, Layout]


@lru_cache
def devices(topology: str) -> np.ndarray:
    from jax.experimental import topologies

    return np.array(topologies.get_topology_desc(topology, platform="tpu").devices)


def mesh_of(topology: str, sizes: dict[str, int], kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    grid = devices(topology)[: math.prod(sizes.values())].reshape(tuple(sizes.values()))
    return jax.sharding.Mesh(grid, tuple(sizes), axis_types=(kind,) * len(sizes))


def compiled(topology: str, pair: Pair, network: str | None = "none", **options: Any) -> Any:
    """The program of a move, by default of the plan with the fewest bytes."""
    return lowered(topology, pair, network, **options).compile()


def lowered(topology: str, pair: Pair, network: str | None, **options: Any) -> Any:
    options = {"network": network, **options}
    mesh = mesh_of(topology, dict(pair[0].mesh.axes))
    source, target = on(mesh, pair[0]), on(mesh, pair[1])
    f = jax.jit(
        lambda x: redistribute(x, target, source=source, **options),
        in_shardings=source,
        out_shardings=target,
        donate_argnums=(0,) if options.get("donate") else (),
    )
    return f.lower(jax.ShapeDtypeStruct(pair[0].shape, pair[0].dtype))


def random_pairs(
    count: int, meshes: list[dict[str, int]], shapes: list[tuple[int, ...]], dtype: str
) -> tuple[Pair, ...]:
    """Different pairs between which data moves."""
    choose, drawn = random.Random(1), []
    while len(drawn) < count:
        mesh, shape = rs.Mesh(choose.choice(meshes)), choose.choice(shapes)
        source, target = choose.sample(list(contiguous_layouts(mesh, shape, dtype)), 2)
        if rs.plan(source, target).launches and (source, target) not in drawn:
            drawn.append((source, target))
    return tuple(drawn)


EIGHT = [{"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"k": 8}]
SMALL = random_pairs(60, EIGHT, [(1 << 16,), (512, 256), (64, 64, 32)], "float32")
LARGE = random_pairs(24, EIGHT[:2], [(512, 512, 512)], "bfloat16")


@pytest.mark.fast(0, slow=2)
@pytest.mark.parametrize("part", sampled(range(12)))
def test_the_compiled_program_is_the_plan(part: int):
    for pair in SMALL[part::12]:
        plan = rs.plan(*pair)
        assert executed(compiled("v5p:2x2x2", pair)) == promised(plan), plan


@pytest.mark.slow
def test_on_the_platforms_network_it_needs_no_more_memory_than_xla():
    """Plans for the chips' own network take the form that is fastest, and may need what XLA's own reshard needs."""
    other = 0
    for pair in LARGE[:2]:
        ours, fewest = (compiled("v5p:2x2x2", pair, network=network) for network in (None, "none"))
        mesh = mesh_of("v5p:2x2x2", dict(pair[0].mesh.axes))
        array = jax.ShapeDtypeStruct(pair[0].shape, pair[0].dtype, sharding=on(mesh, pair[0]))
        xla = jax.jit(lambda x: x, out_shardings=on(mesh, pair[1])).lower(array).compile()
        assert ours.memory_analysis().peak_memory_in_bytes <= xla.memory_analysis().peak_memory_in_bytes
        other += executed(ours) != executed(fewest)
    assert other


@pytest.mark.slow
def test_the_sample_has_every_step_that_moves():
    kinds = Counter(step.kind for pair in SMALL for step in rs.plan(*pair).steps if step.launches)
    assert set(kinds) == {"all_gather", "all_to_all", "permute", "exchange"} and min(kinds.values()) >= 4, kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "before", "after", "times"),
    [
        # A target of 64 lanes, padded beside its buffers; a source whose parts are narrow; another dim becomes minor.
        ({"x": 8}, "bf16[256, 8, {x}32, 64]", "bf16[256, 8, 256, 64]", 1.3),
        pytest.param({"x": 8}, "bf16[{x}32, 8, 256, 64]", "bf16[256, 8, {x}32, 64]", 1.3, marks=pytest.mark.sweep),
        pytest.param({"x": 8}, "f32[{x}64, 256, 192]", "f32[512, {x}32, 192]", 1.31, marks=pytest.mark.sweep),
        # An all-to-all at once and small arrays, in parts however small they are.
        ({"x": 8}, "bf16[4096, {x}1024]", "bf16[{x}512, 8192]", 1.5),
        pytest.param({"x": 2, "y": 2, "z": 2}, "f32[{x}192, {y}128]", "f32[384, 256]", 1.2, marks=pytest.mark.sweep),
        # No form of this one fits: its rows of 32 lanes are copied.
        ({"x": 4, "y": 2}, "f32[{x}128, {y}128]", "f32[512, {y}{x}32]", 1.125),
    ],
)
def test_under_a_budget_what_is_compiled_keeps_to_it(sizes: dict[str, int], before: str, after: str, times: float):
    """Or to the one that the refusal says works."""
    mesh = rs.Mesh(sizes)
    pair = Layout.parse(before, mesh), Layout.parse(after, mesh)
    budget = int(times * sum(end.tile_bytes for end in pair))
    try:
        executable = compiled("v5p:2x2x2", pair, network=None, budget=budget)
    except BudgetError as error:
        assert times == 1.125
        budget = error.smallest
        executable = compiled("v5p:2x2x2", pair, network=None, budget=budget)
    assert executable.memory_analysis().peak_memory_in_bytes <= budget


def test_an_unreduced_source_is_reduced_by_a_reduce_scatter():
    """TPU keeps it as one if it is large enough."""
    mesh = mesh_of("v5p:2x2x2", {"x": 4, "y": 2}, AxisType.Explicit)
    source = NamedSharding(mesh, P(unreduced={"x"}))
    before = jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=source)
    f = jax.jit(lambda x: redistribute(x, NamedSharding(mesh, P("x"))))
    assert executed(f.lower(before).compile()) == {("reduce_scatter", 3 * 256 * 512 * 4): 1}


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("source", "target", "network"),
    [
        ("f32[4096, 512] + sum{x}{y}", "f32[{x}{y}512, 512]", None),
        ("f32[512, 2048] + sum{y}{x}", "f32[512, {y}{x}256]", None),
        ("f32[1024, 1024] + sum{x}{y}", "f32[{y}512, {x}256]", None),
        ("bf16[{y}2, 512, 1024] + sum{x}", "bf16[{y}2, {x}128, 1024]", None),
        ("bf16[4, 512, 1024] + sum{x}", "bf16[4, 512, 1024]", "tpu-v5p"),
    ],
)
def test_a_reduce_scatter_receives_what_the_plan_says(source: str, target: str, network: str | None):
    """Among all devices of the program, too, and in the middle of a plan; libtpu makes other spellings all-reduces.

    It pads large blocks a little, and moves the padding by a permute.
    """
    mesh = rs.Mesh(x=4, y=2)
    plan = rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), network=network)
    assert "reduce_scatter" in [step.kind for step in plan.steps]
    grid = jax.sharding.Mesh(devices("v5p:2x2x2").reshape(4, 2), ("x", "y"))
    run, spec = tile_function(lower_plan(plan), {"x": 4, "y": 2}), P(("x", "y"))
    f = jax.jit(jax.shard_map(lambda x: run(x[0])[None], mesh=grid, in_specs=spec, out_specs=spec, check_vma=False))
    tiles = jax.ShapeDtypeStruct((8, *plan.source.tile_shape), plan.source.dtype, sharding=NamedSharding(grid, spec))
    received = hlo.traffic(hlo.parse(f.lower(tiles).compile().as_text())).received_bytes
    assert plan.received_bytes <= received <= 1.02 * plan.received_bytes


# ---- memory ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("step", [16, pytest.param(1, marks=pytest.mark.sweep)])
def test_large_moves_keep_to_the_plans_memory(step: int):
    """Each keeps its plan's promise, and all need little more than source and target."""
    logs = []
    for pair in LARGE[::step]:
        plan = on_jax.in_parts(rs.plan(*pair))
        executable = compiled("v5p:2x2x2", pair)
        assert executed(executable) == promised(plan), plan
        used, ends = executable.memory_analysis().peak_memory_in_bytes, pair[0].tile_bytes + pair[1].tile_bytes
        assert used <= on_jax.peak_bytes(plan) * SLACK, (
            f"{used / on_jax.peak_bytes(plan):.3f} times the promise: {plan}"
        )
        assert ends <= used <= 2 * ends, f"{used / ends:.3f} times source and target: {plan}"
        logs.append(math.log(used / ends))
    assert math.exp(sum(logs) / len(logs)) <= 1.3


@pytest.mark.fast(0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "before", "after"),
    [
        # Tiles whose minor dim becomes narrow: 64, half a vector register's lanes.
        ({"x": 2, "y": 2, "z": 2}, "bf16[{x}256, {z}256, {y}256]", "bf16[512, 512, {y}{x}{z}64]"),
        ({"x": 4, "y": 2}, "bf16[{y}256, 512, {x}128]", "bf16[512, 512, {x}{y}64]"),
        ({"x": 2, "y": 2, "z": 2}, "bf16[{y}256, {z}256, 512]", "bf16[512, 512, {y}{x}{z}64]"),
        ({"x": 4, "y": 2}, "bf16[512, {y}256, 512]", "bf16[512, 512, {y}{x}64]"),
        # A permute of whole tiles, whose buffers would be tiles too.
        ({"x": 2, "y": 2, "z": 2}, "bf16[512, {y}{x}{z}64, 512]", "bf16[512, {y}{z}{x}64, 512]"),
    ],
)
def test_the_moves_that_need_most_memory(sizes: dict[str, int], before: str, after: str):
    """The worst of 120 more random pairs."""
    mesh = rs.Mesh(sizes)
    pair = Layout.parse(before, mesh), Layout.parse(after, mesh)
    plan, ends = on_jax.in_parts(rs.plan(*pair)), pair[0].tile_bytes + pair[1].tile_bytes
    used = compiled("v5p:2x2x2", pair).memory_analysis().peak_memory_in_bytes
    promise = on_jax.peak_bytes(plan)
    text = f"{used / promise:.3f} times the promise, {used / ends:.3f} times source and target: {plan}"
    assert used <= promise * SLACK and used <= 2 * ends, text


@pytest.mark.fast(0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "before", "after"),
    [
        # No dim of the result's tile, or none of any tile, has 128 elements: a TPU pads them to twice their bytes.
        ({"x": 4, "y": 2}, "bf16[64, {x}{y}16, 128, 64]", "bf16[64, {y}64, {x}32, 64]"),
        ({"x": 4, "y": 2}, "bf16[64, {x}32, {y}64, 64]", "bf16[64, 128, {x}32, 64]"),
        # A slice that leaves another dim minor, at once and in parts.
        ({"x": 8}, "bf16[512, 512, 512]", "bf16[512, 512, {x}64]"),
        ({"x": 8}, "bf16[64, 128, 128, 64]", "bf16[64, 128, {x}16, 64]"),
        # Steps that share a loop: no tile between them is whole.
        ({"x": 2, "y": 2, "z": 2}, "bf16[{x}{y}{z}64, 512, 512]", "bf16[{x}{z}128, 512, 512]"),
        # Lanes are full in a part of 128 rows of the dim that stays where it is.
        ({"x": 8}, "bf16[512, 512, {x}64]", "bf16[512, {x}64, 512]"),
        # A part of the operand is cut out as that lies in memory: in the order of the result, all of it was copied.
        ({"x": 4, "y": 2}, "bf16[512, 1024, {y}256]", "bf16[512, 1024, {x}{y}64]"),
        # One lane: dims 0 and 1 are the minor ones, in the loop's result, too.
        ({"x": 4, "y": 2}, "bf16[4096, 2048, {y}{x}1]", "bf16[4096, 2048, {x}{y}1]"),
        # Messages that leave and arrive as they lie in memory have buffers, and all travel at once.
        ({"x": 4, "y": 2}, "bf16[{y}{x}64, 512, 512]", "bf16[{x}128, 512, 512]"),
    ],
)
def test_the_promise_counts_padding(sizes: dict[str, int], before: str, after: str):
    mesh = rs.Mesh(sizes)
    pair = Layout.parse(before, mesh), Layout.parse(after, mesh)
    plan, executable = on_jax.in_parts(rs.plan(*pair)), compiled("v5p:2x2x2", pair)
    assert executed(executable) == promised(plan), plan
    used, promise = executable.memory_analysis().peak_memory_in_bytes, on_jax.peak_bytes(plan, padded=True)
    assert promise / 1.3 <= used <= promise + TABLES, f"{used / promise:.3f} times the promise: {plan}"


@pytest.mark.fast(0, slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "before", "after"),
    [
        ({"x": 4, "y": 2}, "bf16[{y}{x}64, 512, 128, 64]", "bf16[{x}{y}64, 512, 128, 64]"),
        # Parts that lie alike in both tiles; slots to rearrange, and another minor dim; tiles of 8 x 128 cut apart.
        ({"x": 8}, "bf16[{x}512, 512, 1024]", "bf16[4096, {x}64, 1024]"),
        ({"x": 4, "y": 2}, "bf16[4096, {x}256, {y}256]", "bf16[{x}{y}512, 1024, 512]"),
        ({"x": 8}, "bf16[{x}16384, 32768]", "bf16[131072, {x}4096]"),
        ({"x": 4, "y": 2}, "bf16[{y}1024, 1024, {x}256]", "bf16[{x}512, 1024, {y}512]"),
    ],
)
def test_a_large_donated_source_is_overwritten(sizes: dict[str, int], before: str, after: str):
    """In one tile and a few parts: no second tile is live at any time, and no place is read from a table in HBM."""
    mesh = rs.Mesh(sizes)
    pair = Layout.parse(before, mesh), Layout.parse(after, mesh)
    plan = on_jax.in_parts_on_tpu(rs.plan(*pair, donate=True))
    executable = compiled("v5p:2x2x2", pair, donate=True)
    assert executed(executable) == promised(plan), plan
    assert not re.search(r"s32\[[1,]+\]\S* dynamic-slice", executable.as_text())
    memory = executable.memory_analysis()
    used, promise = memory.peak_memory_in_bytes, on_jax.peak_bytes(plan, padded=True)
    assert memory.alias_size_in_bytes == pair[0].tile_bytes
    assert used <= promise * SLACK and used <= 1.3 * pair[0].tile_bytes, f"{used / pair[0].tile_bytes:.3f}: {plan}"


@pytest.mark.slow
@pytest.mark.parametrize("times", [1.25, pytest.param(2.0, marks=pytest.mark.sweep)])
def test_memory_under_a_budget(times: float):
    """In parts if they fit, even if a single collective would fit, too."""
    mesh = rs.Mesh(x=4, y=2)
    for before, after in (
        ("bf16[{x}128, 512, 512]", "bf16[512, {x}128, 512]"),
        ("bf16[{x}{y}64, 512, 512]", "bf16[{y}256, 512, 512]"),
    ):
        pair = Layout.parse(before, mesh), Layout.parse(after, mesh)
        budget = int(times * (pair[0].tile_bytes + pair[1].tile_bytes))
        executable = compiled("v5p:2x2x2", pair, budget=budget)
        assert executable.memory_analysis().peak_memory_in_bytes <= budget


@pytest.mark.slow
def test_parts_are_the_reason(monkeypatch: pytest.MonkeyPatch):
    """The same all-to-all in one piece needs 1.3 times the memory."""
    mesh = rs.Mesh(x=4, y=2)
    pair = Layout.parse("bf16[{x}128, 512, 512]", mesh), Layout.parse("bf16[512, {x}128, 512]", mesh)
    parts = compiled("v5p:2x2x2", pair)
    monkeypatch.setattr(on_jax, "in_parts", lambda plan, **options: plan)
    whole = compiled("v5p:2x2x2", pair)
    assert executed(whole) == promised(rs.plan(*pair))
    peaks = [each.memory_analysis().peak_memory_in_bytes for each in (parts, whole)]
    assert peaks[0] * 1.3 < peaks[1], peaks


# ---- many chips -------------------------------------------------------------------------------------


@pytest.mark.fast(0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "before", "after"),
    [
        # A fused all-to-all over two dims; a gather of one axis of three after a move over the others; an exchange.
        ({"x": 16, "y": 16}, "f32[{x}64, {y}64]", "f32[{y}64, {x}64]"),
        ({"x": 4, "y": 8, "z": 8}, "f32[{x}256, {y}128, {z}128]", "f32[1024, {z}{x}32, {y}128]"),
        ({"x": 16, "y": 16}, "f32[{x}{y}16, 4096]", "f32[4096, {x}256]"),
    ],
)
def test_256_chips(sizes: dict[str, int], before: str, after: str):
    mesh = rs.Mesh(sizes)
    pair = Layout.parse(before, mesh), Layout.parse(after, mesh)
    plan = on_jax.in_parts(rs.plan(*pair))
    assert executed(compiled("v5p:4x8x8", pair)) == promised(plan), plan


@pytest.mark.fast(0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "before", "after"),
    [
        # A loop over 32 rounds whose messages have 32 lanes of 128 at both ends; 8 rounds, of 16 lanes in the result.
        ({"x": 4, "y": 8, "z": 8}, "bf16[{z}256, {y}{x}64, 2048]", "bf16[2048, {z}256, {y}{x}64]"),
        ({"x": 8, "y": 8}, "bf16[1024, 1024, {x}{y}16]", "bf16[1024, {x}128, {y}128]"),
    ],
)
def test_exchanges_of_many_rounds_keep_to_the_promise(sizes: dict[str, int], before: str, after: str):
    """No tile is copied to the messages' order of dims unless the promise says so."""
    mesh = rs.Mesh(sizes)
    pair = Layout.parse(before, mesh), Layout.parse(after, mesh)
    plan, executable = on_jax.in_parts(rs.plan(*pair)), compiled({64: "v5p:4x4x4", 256: "v5p:4x8x8"}[mesh.size], pair)
    assert [step.kind for step in plan.steps] == ["exchange"] and executed(executable) == promised(plan)
    used, promise = executable.memory_analysis().peak_memory_in_bytes, on_jax.peak_bytes(plan, padded=True)
    assert promise / 1.1 <= used <= promise + 4 * TABLES, f"{used / promise:.3f} times the promise: {plan}"


@pytest.mark.slow
def test_addresses_are_no_trees_of_selects():
    """Where all devices send in a round, libtpu spells them so unless it is told not to: many times the code."""
    mesh = rs.Mesh(x=8, y=8)
    program = lowered(
        "v5p:4x4x4", (Layout.parse("f32[64, {y}{x}1, 64]", mesh), Layout.parse("f32[64, {x}8, {y}8]", mesh)), None
    )
    tables = program.compile(compiler_options={"xla_tpu_max_collective_permute_tree_core_location_devices": 0})
    as_it_is = program.compile()
    sizes = [each.memory_analysis().generated_code_size_in_bytes for each in (as_it_is, tables)]
    assert sizes[0] == sizes[1]


@pytest.mark.fast(0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "before"), [({"x": 64}, "bf16[{x}64, 1024]"), ({"x": 16, "y": 4}, "bf16[64, {x}{y}128]")]
)
def test_a_gather_among_a_whole_slice_receives_what_the_plan_says(sizes: dict[str, int], before: str):
    """Two gathers; libtpu makes an all-reduce of one, which receives twice as much."""
    mesh = rs.Mesh(sizes)
    source = Layout.parse(before, mesh)
    pair = source, Layout.from_spec(mesh, source.shape, source.dtype, [[], []])
    plan = rs.plan(*pair)
    counted = executed(compiled("v5p:4x4x4", pair))
    assert sum(times for _, times in counted.items()) == 2 and {kind for kind, _ in counted} == {"all_gather"}
    assert sum(received * times for (_, received), times in counted.items()) == plan.received_bytes

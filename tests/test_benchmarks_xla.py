"""The benchmarks against XLA: pairs, figures and verdicts, on small arrays.

Times and other compilers' memory are for the scripts; here are the parts that read and add them up.
"""

from __future__ import annotations

import jax
import pytest

from benchmarks import aot, tpu_traffic, xla
from benchmarks.against_shardy import named
from benchmarks.schedule import Fabric
from reshard import hlo
from reshard.synth import plan
from reshard.types.layout import Layout


def parsed(mesh: str, *texts: str) -> list[Layout]:
    return [Layout.parse(text, named(mesh)) for text in texts]


def mesh_of(name: str) -> jax.sharding.Mesh:
    return aot.jax_mesh(named(name), jax.devices()[:8])


@pytest.mark.slow
def test_a_timed_pair_says_what_ran_and_whether_xla_rebuilt_the_array():
    source, target = parsed("4x2", "f32[{y}32, 64, {x}16]", "f32[64, {x}{y}8, 64]")
    (row,) = xla.run([xla.Timing((source, target), mesh_of("4x2"), network="shm-mpi")], sweeps=2, repeat=1, seed=0)
    assert row.rebuilt and "all_gather" in row.xla
    assert row.steps == ("all_to_all",) and row.launches == 1
    assert {"default", "network"} <= set(row.ways) and all(min(seconds) > 0 for seconds in row.seconds.values())
    pair = tuple(parsed("8", "f32[{x}8, 64]", "f32[64, {x}8]"))
    (kept,) = xla.run([xla.Timing(pair, mesh_of("8"))], sweeps=1, repeat=1, seed=0)
    assert not kept.rebuilt and kept.xla == ("all_to_all",)


@pytest.mark.parametrize(
    "texts", [("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]"), ("f32[{y}{x}2, 16]", "f32[{x}4, 16]")]
)
def test_what_is_compiled_is_compared_with_what_is_promised(texts: tuple[str, str]):
    source, target = parsed("4x2", *texts)
    row = aot.row(aot.Compilation.of((source, target), jax.devices()[:8]))
    promised = plan(source, target)
    assert row.agrees and sum(count for count, _ in row.compiled.values()) == promised.launches
    assert sum(received for _, received in row.compiled.values()) == promised.received_bytes
    assert (row.ours.argument, row.ours.output) == (source.tile_bytes, target.tile_bytes)
    assert row.xla is not None and row.xla.output == row.ours.output


def test_local_bytes_count_loops_by_trips_slices_alone_and_padding():
    """Two iterations read and write slices of 1024 B; the copy's 8 x 64 tile is padded to 8 x 128; S(1) is free."""
    text = """HloModule m

%slice (a: f32[2,256], i: s32[]) -> f32[1,256] {
  %a = f32[2,256]{1,0:T(1,128)} parameter(0)
  %i = s32[] parameter(1)
  ROOT %d = f32[1,256]{1,0:T(1,128)} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,256}
}

%body (p: (s32[], f32[2,256])) -> (s32[], f32[2,256]) {
  %p = (s32[], f32[2,256]{1,0:T(1,128)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[2,256]{1,0:T(1,128)} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %f = f32[1,256]{1,0:T(1,128)} fusion(%v, %i), kind=kLoop, calls=%slice
  %chip = f32[1,256]{1,0:T(1,128)S(1)} fusion(%v, %i), kind=kLoop, calls=%slice
  %g = f32[2,256]{1,0:T(1,128)} all-gather(%f), channel_id=1, replica_groups=[1,2]<=[2], dimensions={0}
  %next = s32[]{:S(6)} add(%i, %one)
  ROOT %t = (s32[], f32[2,256]{1,0:T(1,128)}) tuple(%next, %g)
}

%condition (q: (s32[], f32[2,256])) -> pred[] {
  %q = (s32[], f32[2,256]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %two = s32[] constant(2)
  ROOT %less = pred[] compare(%j, %two), direction=LT
}

ENTRY %main (x: f32[8,64], y: f32[2,256]) -> f32[8,64] {
  %x = f32[8,64]{1,0:T(8,128)} parameter(0)
  %y = f32[2,256]{1,0:T(1,128)} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[2,256]) tuple(%zero, %y)
  %loop = (s32[], f32[2,256]) while(%start), condition=%condition, body=%body
  ROOT %c = f32[8,64]{1,0:T(8,128)} copy(%x)
}"""
    counter = 2 * 4 * 4  # it is read by the addition and both fusions, the constant once
    assert tpu_traffic.local_bytes(hlo.parse(text)) == 2 * 3 * 1024 + counter + 2 * 8 * 128 * 4


LINES = Fabric(tuple((n & 1, n >> 1 & 1, n >> 2) for n in range(8)), (False,) * 3, 1.0)
RING = Fabric(tuple((n,) for n in range(8)), (True,), 1.0)
SWITCH = Fabric(tuple((n,) for n in range(8)), (), 1.0)


@pytest.mark.parametrize(
    ("fabric", "collective", "seconds"),
    [
        # Of every 800 bytes of 8 devices, 4 x 4 blocks of 100 cross each cut, over its 4 links.
        (LINES, "f32[200]{0} all-to-all(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}", 400),
        (LINES, "f32[200]{0} all-to-all(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}", 400),
        (RING, "f32[200]{0} all-to-all(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}", 800),
        (RING, "f32[200]{0} all-to-all(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}", 800),
        (SWITCH, "f32[200]{0} all-to-all(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}", 700),
        # A gathered tile of 100 bytes comes in over 3 links, or over the one of a line that leads to its peer.
        (LINES, "f32[200]{0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}", 700 / 3),
        (LINES, "f32[200]{0} all-gather(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}", 400),
        (RING, "f32[200]{0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}", 350),
        (RING, "f32[25]{0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,0}}", 50),
        (LINES, "f32[25]{0} collective-permute(%p), source_target_pairs={{0,1},{2,1},{4,5}}", 75),
        (LINES, "f32[25]{0} collective-permute(%p), source_target_pairs={{0,0}}", 0),
    ],
)
def test_a_collective_takes_what_its_worst_cut_takes(fabric: Fabric, collective: str, seconds: float):
    module = hlo.parse(
        f"HloModule m, num_partitions=8\n\nENTRY %main {{\n  %p = f32[25]{{0}} parameter(0)\n"
        f"  ROOT %c = {collective}, channel_id=1, use_global_device_ids=true\n}}"
    )
    (one,) = hlo.collectives(module)
    assert fabric.seconds(one) == pytest.approx(seconds)

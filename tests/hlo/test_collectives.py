"""The collectives that a module executes: their spellings, replica groups, bytes, and how often loops run."""

import json
import math
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard import hlo
from reshard.errors import NotationError
from reshard.hlo import Total, parse_groups
from reshard.hlo.executed_collectives import read_permute_pairs
from tests.hlo import record
from tests.hlo.fragments import GROUPS, PARAMETERS, computation, module, only

TILE = 64 * 256  # of 256 x 256 elements in 4 pieces
SMALL = 64 * 128  # in 4 x 2
LAYER = 4096 * 2048  # of 4096 x 4096, gathered over 4 from a quarter
COUNTED = {
    "gather": [("all_gather", 3 * TILE, 1)],
    "swap": [("permute", TILE // 2, 1)],
    "scatter": [("reduce_scatter", 256 * 1024 // 2, 1)],
    "kinds": [
        ("all_gather", 3 * SMALL, 1),
        ("all_reduce", SMALL, 1),
        ("all_to_all", SMALL * 7 // 8, 1),
        ("permute", 0, 1),
        ("permute", SMALL, 1),
        ("reduce_scatter", SMALL * 3 // 4, 1),
    ],
    "ring": [("permute", TILE, 15)],
    "branch": [("all_reduce", TILE * 3 // 2, 1), ("permute", TILE, 1)],
    "endless": [("all_reduce", 1.5, 1), ("all_reduce", TILE, None)],
    "overlap": [("all_gather", LAYER * 3 // 4, 1), ("all_gather", LAYER * 3 // 4, 1), ("all_reduce", LAYER // 2, 1)],
}
"""The collectives of each program: kind, elements received, how often it runs."""

INSTEAD = {
    # XLA:CPU does not create reduce-scatters; on TPU, XLA turns a small one into an all-reduce.
    "scatter_cpu": [("all_reduce", 256 * 1024, 1)],
    "kinds_v5p": [("all_reduce", SMALL * 3 // 2, 1) if c[0] == "reduce_scatter" else c for c in COUNTED["kinds"]],
    # Two slices, with the axis x across them: first the slices exchange, then the 2 x 2 chips of each.
    "gather_v5p-2slices": [("all_gather", TILE, 1), ("all_gather", 2 * TILE, 1)],
    "kinds_v5p-2slices": [
        ("all_gather", SMALL, 1),
        ("all_gather", 2 * SMALL, 1),
        ("all_reduce", SMALL, 1),
        ("all_reduce", SMALL, 1),
        ("all_to_all", SMALL * 7 // 8, 1),
        ("permute", 0, 1),
        ("permute", SMALL, 1),
        ("reduce_scatter", SMALL // 4, 1),
    ],
}


def counted(program, platform, nbytes):
    expected = INSTEAD.get(f"{program}_{platform}", COUNTED[program])
    return sorted(((kind, elements * nbytes, times) for kind, elements, times in expected), key=str)


def measured(text):
    return sorted(((c.kind, c.received_bytes, c.times) for c in hlo.collectives(hlo.parse(text))), key=str)


@pytest.mark.parametrize("path", sorted(record.DATA.glob("*.hlo")), ids=lambda path: path.stem)
def test_recorded_modules(path):
    program, platform, _ = path.stem.split("_")
    nbytes = 4 if platform in ("cpu", "v5p-2slices") else 2
    assert measured(path.read_text(encoding="utf-8")) == counted(program, platform, nbytes)


@pytest.fixture(scope="module")
def compiled():
    """The HLO of all programs, compiled for CPU by the installed jax."""
    run = subprocess.run(
        [sys.executable, record.__file__, "cpu"], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.fast(3)
@pytest.mark.parametrize("program", record.PROGRAMS)
def test_freshly_compiled_modules(compiled, program):
    assert measured(compiled[program]) == counted(program, "cpu", 4)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("all_gather", "lax.all_gather("),
        ("all_to_all", "lax.all_to_all("),
        ("reduce_scatter", "lax.psum_scatter("),
        ("all_reduce", "lax.pmax("),
    ],
)
def test_the_users_line(compiled, kind, call):
    one = only(c for c in hlo.collectives(hlo.parse(compiled["kinds"])) if c.kind == kind)
    lines = Path(record.__file__).read_text(encoding="utf-8").splitlines()
    assert one.source.exact and one.source.file == "record.py" and one.source.function == "kinds.<locals>.body"
    assert call in lines[one.source.line - 1]


# ---- calls


@pytest.mark.parametrize(
    "lines",
    [
        ["%s = ((f32[8]), f32[8], s32[]) async-start(%p), calls=%w", "ROOT %r = f32[8] async-done(%s), calls=%w"],
        ["%s = ((), ()) call-start(), to_apply=%w", "%u = (f32[8]) call-update(%s, %p)", "%r = f32[8] call-done(%u)"],
        ["ROOT %r = f32[8] call(%p), to_apply=%w"],
        ["ROOT %r = f32[8] fusion(%p), kind=kCustom, calls=%w"],
        ['ROOT %r = f32[8] custom-call(%p), custom_call_target="x", called_computations={%w}'],
        ["%s = (f32[8]) async-start(%p), calls=%w.outer", "ROOT %r = f32[8] async-done(%s)"],
    ],
)
def test_a_wrapped_collective_counts_once(lines):
    inner = ["%a = f32[8] parameter(0)", f"ROOT %b = f32[8] all-to-all(%a), {GROUPS}, dimensions={{0}}"]
    before = computation("w", *inner)
    before += computation("w.outer", "%o = f32[8] parameter(0)", "ROOT %c = f32[8] call(%o), to_apply=%w")
    one = only(hlo.collectives(module(*PARAMETERS, *lines, before=before)))
    assert (one.kind, one.computation, one.received_bytes) == ("all_to_all", "w", 24)


def test_a_computation_that_is_called_twice_counts_twice():
    before = computation("w", "%a = f32[8] parameter(0)", f"ROOT %b = f32[8] all-to-all(%a), {GROUPS}")
    read = module(*PARAMETERS, "%r = f32[8] call(%p), to_apply=%w", "%s = f32[8] call(%r), to_apply=%w", before=before)
    assert hlo.traffic(read) == hlo.Traffic(2, 48, {"all_to_all": Total(2, 48)}, True)


# ---- loops and branches

REDUCE = f"all-reduce(%v), {GROUPS}, use_global_device_ids=true"


def loop(name, body, condition="cond", count=None):
    config = f', backend_config={{"known_trip_count":{{"n":"{count}"}}}}' if count is not None else ""
    return f"%{name} = f32[8] while(%v), condition=%{condition}, body=%{body}{config}"


def bodies(*more):
    v = "%v = f32[8] parameter(0)"
    return "".join(
        [
            computation("cond", v, "ROOT %less = pred[] custom-call(%v)"),
            computation("reduces", v, f"%sum = f32[8] {REDUCE}", "ROOT %less = pred[] custom-call(%sum)"),
            computation("inner", v, f"ROOT %sum = f32[8] {REDUCE}"),
            computation("outer", v, "ROOT " + loop("nested", "inner", count=4)),
            computation("unknown", v, "ROOT " + loop("nested", "inner")),
            *more,
        ]
    )


@pytest.mark.parametrize(
    ("line", "times"),
    [
        (loop("w", "inner", count=5), [5]),
        (loop("w", "outer", count=3), [12]),
        (loop("w", "inner", count=0), [0]),
        (loop("w", "inner"), [None]),
        (loop("w", "unknown", count=3), [None]),
        (loop("w", "outer"), [None]),
        (loop("w", "inner", "reduces", count=5), [6, 5]),
    ],
)
def test_loops_multiply(line, times):
    read = module("%v = f32[8] parameter(0)", line, before=bodies())
    assert [one.times for one in hlo.collectives(read)] == times
    total = hlo.traffic(read)
    assert total.launches == sum(1 if count is None else count for count in times)
    assert total.received_bytes == 48 * total.launches
    assert total.exact == (None not in times)


@pytest.mark.parametrize(
    "branches", ["branch_computations={%inner, %outer, %cond}", "true_computation=%inner, false_computation=%outer"]
)
def test_the_worst_branch_counts(branches):
    read = module("%v = f32[8] parameter(0)", f"ROOT %c = f32[8] conditional(%i, %v, %v), {branches}", before=bodies())
    assert [one.times for one in hlo.collectives(read)] == [4]
    assert [one.times for one in hlo.collectives(read, every_branch=True)] == [1, 4]


# ---- refused


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%r = f32[8] all-gather(%p), replica_groups={{0,1}", "over each device once"),
        ('%r = (f32[8]) recv(%p), frontend_attributes={_xla_megascale_transfer_type="NEW"}', "NEW is not known"),
    ],
)
def test_what_cannot_be_counted_is_refused(line, message):
    with pytest.raises(NotationError, match=message):
        hlo.collectives(module(line, header=""))


@pytest.mark.parametrize(
    ("call", "size", "received"),
    [
        ("f32[32] all-gather(%p), dimensions={0}, replica_groups={}", 4, 96),
        ("f32[32] all-gather(%p), dimensions={0}", 4, 96),
        ("f32[2] reduce-scatter(%p), dimensions={0}, to_apply=%f, replica_groups={}", 4, 24),
        ("f32[8] all-reduce(%p), to_apply=%f, replica_groups={}", 1, 0),  # One replica of one partition, to XLA.
    ],
)
def test_groups_of_all_devices_without_a_count(call, size, received):
    one = only(hlo.collectives(module("%p = f32[8] parameter(0)", f"%r = {call}", header="")))
    assert (one.group_size, one.received_bytes) == (size, received)


@pytest.mark.parametrize(
    ("attributes", "lists"),
    [
        ("channel_id=1, replica_groups={}, use_global_device_ids=true", ((0, 1, 2, 3, 4, 5),)),
        ("channel_id=1, replica_groups={{0},{1}}", ((0, 1, 2), (3, 4, 5))),
        ("channel_id=1, replica_groups={{1,0}}", ((3, 4, 5, 0, 1, 2),)),
        ("replica_groups={}", ((0, 1),)),
        ("channel_id=1, replica_groups={{0,5},{1,4},{2,3}}", ((0, 5), (1, 4), (2, 3))),
    ],
)
def test_replicas_and_partitions(attributes, lists):
    """2 replicas of 3 partitions: without global ids, groups are of replicas if their ids allow it."""
    line = f"ROOT %r = f32[6] all-reduce(%p), {attributes}"
    read = module(line, header=", replica_count=2, num_partitions=3")
    assert only(hlo.collectives(read)).groups.lists == lists


@pytest.mark.parametrize(
    ("line", "kind", "received"),
    [
        ("%r = f32[32] all-gather(%p), GROUPS, dimensions={0}", "all_gather", 96),
        ("%r = (f32[32], bf16[16]) all-gather(%p, %q), GROUPS, dimensions={0}", "all_gather", 96 + 24),
        ("%r = f32[8] all-to-all(%p), GROUPS, dimensions={0}", "all_to_all", 24),
        ("%r = (f32[2], f32[2], f32[2], f32[2]) all-to-all(%a, %b, %c, %d), GROUPS", "all_to_all", 24),
        ("%r = f32[2] reduce-scatter(%p), GROUPS, dimensions={0}, to_apply=%add", "reduce_scatter", 24),
        ("%r = (f32[2], bf16[1]) reduce-scatter(%p, %q), GROUPS, to_apply=%add", "reduce_scatter", 24 + 6),
        ("%r = f32[8] all-reduce(%p), GROUPS, use_global_device_ids=true, to_apply=%add", "all_reduce", 48),
        ("%r = u8[1] all-reduce(%p), GROUPS, use_global_device_ids=true, to_apply=%add", "all_reduce", 2),
        ("%r = (f32[8], bf16[4]) all-reduce(%p, %q), GROUPS, use_global_device_ids=true", "all_reduce", 60),
        ("%r = f32[8] collective-permute(%p), source_target_pairs={{0,0},{1,2}}", "permute", 32),
        ("%r = f32[8] collective-permute(%p), source_target_pairs={{0,0},{11,11}}", "permute", 0),
        ("%r = f32[8] collective-permute(%p), source_target_pairs={{1,11}}", "permute", 32),
        ("%r = f32[8] collective-permute(%p), source_target_pairs={}", "permute", 0),
        ("%r = f32[8] collective-broadcast(%p), GROUPS", "broadcast", 32),
        ("%r = f32[8] collective-broadcast(%p), replica_groups={{0},{1}}", "broadcast", 0),
        ("%r = f32[8] ragged-all-to-all(%p, %q, %a, %b, %c, %d), GROUPS", "ragged_all_to_all", 32),
        # asynchronous, as XLA prints them for GPU
        ("%r = (f32[8], f32[32]) all-gather-start(%p), GROUPS, dimensions={0}", "all_gather", 96),
        ("%r = ((f32[8], bf16[4]), (f32[32], bf16[16])) all-gather-start(%p, %q), GROUPS", "all_gather", 96 + 24),
        ("%r = f32[8] all-reduce-start(%p), GROUPS, use_global_device_ids=true, to_apply=%add", "all_reduce", 48),
        ("%r = (f32[8], bf16[4]) all-reduce-start(%p, %q), GROUPS, use_global_device_ids=true", "all_reduce", 60),
        ("%r = (f32[8], f32[8], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}",
         "permute", 32),
        ("%r = ((f32[8], bf16[4]), (f32[8], bf16[4])) collective-permute-start(%p, %q), source_target_pairs={{0,1}}",
         "permute", 40),
        ("%r = ((f32[8]), f32[8], u32[]) all-to-all-start(%p), GROUPS, dimensions={0}", "all_to_all", 24),
        ("%r = ((f32[8]), f32[2]) reduce-scatter-start(%p), GROUPS, to_apply=%add", "reduce_scatter", 24),
        ("%r = ((f32[8]), f32[8]) collective-broadcast-start(%p), GROUPS", "broadcast", 32),
        # split into send and recv: for pipelining, and between slices
        ('%r = (f32[8], u32[], token[]) recv(%t), channel_id=1, frontend_attributes='
         '{_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}', "permute", 32),
        ('%r = (f32[8], u32[], token[]) recv(%t), frontend_attributes={_xla_megascale_target="{1,2,4}x{0:3}",'
         '_xla_megascale_transfer_type="REDUCE_SCATTER"}', "reduce_scatter", 64),
        ('%r = (f32[8], u32[], token[]) recv(%t), frontend_attributes={_xla_megascale_target="{1:4}x{0:3}",'
         '_xla_megascale_transfer_type="ALL_GATHER"}', "all_gather", 24),
        ("%r = (f32[8], u32[], token[]) recv(%t), frontend_attributes={_xla_megascale_target={{100000,300000}},"
         '_xla_megascale_transfer_type="ALL_REDUCE"}', "all_reduce", 32),
        ("%r = (f32[8], u32[], token[]) recv(%t), frontend_attributes={_xla_megascale_target={{100000->300000}},"
         '_xla_megascale_transfer_type="ONE_TO_ONE"}', "permute", 32),
    ],
)  # fmt: skip
def test_the_bytes_of_every_form(line, kind, received):
    one = only(hlo.collectives(module(*PARAMETERS, line.replace("GROUPS", GROUPS))))
    assert (one.kind, one.received_bytes, one.times) == (kind, received, 1)


@pytest.mark.parametrize(
    "line",
    [
        "%r = f32[8] all-gather-done(%p)",
        "%r = f32[8] all-reduce-done(%p)",
        "%r = f32[8] async-done(%p), calls=%wrapped",
        "%r = (f32[8]) async-update(%p), calls=%wrapped",
        "%r = f32[8] call-done(%p), to_apply=%wrapped",
        "%r = (f32[8], token[]) recv-done(%p)",
        "%r = (f32[8], u32[], token[]) recv(%p), is_host_transfer=true",
        "%r = (f32[8], u32[], token[]) send(%p), frontend_attributes={_xla_megascale_transfer_type=\"ALL_GATHER\"}",
        "%r = u32[] partition-id()",
        "%r = f32[8] broadcast(%p), dimensions={0}",
    ],
)  # fmt: skip
def test_instructions_that_are_not_collectives_or_only_end_one(line):
    wrapped = computation("wrapped", "%w = f32[8] parameter(0)", f"ROOT %g = f32[32] all-gather(%w), {GROUPS}")
    assert hlo.collectives(module(*PARAMETERS, line, before=wrapped)) == ()


def reduced(*after):
    """A fusion with an all-reduce, followed by these lines."""
    reduce = f"%r = f32[8] all-reduce(%a), {GROUPS}, use_global_device_ids=true"
    return computation("f", "%a = f32[8] parameter(0)", "%i = s32[] constant(0)", reduce, *after)


FUSED = "ROOT %x = f32[2] fusion(%p), kind=kCustom, calls=%f"
SLICE = "ROOT %s = f32[2] dynamic-slice(%r, %i), dynamic_slice_sizes={2}"


@pytest.mark.parametrize(
    ("after", "kind", "received"),
    [
        ([SLICE], "reduce_scatter", 24),
        (["%v = f32[2,4] bitcast(%r)", SLICE.replace("%r", "%v")], "reduce_scatter", 24),
        (["%u = f32[8] negate(%r)", SLICE], "all_reduce", 48),
        (["ROOT %u = f32[8] negate(%r)"], "all_reduce", 48),
        (["ROOT %v = f32[2,4] bitcast(%r)"], "all_reduce", 48),
        ([SLICE.replace("ROOT ", ""), "ROOT %v = f32[2,4] bitcast(%r)"], "all_reduce", 48),
    ],
)
def test_an_all_reduce_in_a_fusion_that_uses_only_slices_of_it(after, kind, received):
    one = only(hlo.collectives(module(*PARAMETERS, FUSED, before=reduced(*after))))
    assert (one.kind, one.opcode, one.received_bytes) == (kind, "all-reduce", received)


def test_a_chain_of_fusions_without_its_start_is_not_counted():
    """The recorded v5e module has such a chain; here its start is removed."""
    text = (record.DATA / "overlap_v5e_0.12.0.1.hlo").read_text(encoding="utf-8")
    assert text.count(" all-gather(") == 4 and text.count("AsyncCollectiveStart") == 1
    whole = hlo.traffic(hlo.parse(text)).by_kind["all_gather"].launches
    assert hlo.traffic(hlo.parse(text.replace("AsyncCollectiveStart", ""))).by_kind["all_gather"].launches == whole - 1
    assert hlo.traffic(hlo.parse(text.replace("chain_id", ""))).by_kind["all_gather"].launches == whole + 2


@pytest.mark.parametrize(
    "line",
    [
        "%r = f32[8] collective-permute(%p), source_target_pairs={{0,1},{12,3}}",
        "%r = (f32[8], f32[8]) collective-permute-start(%p), source_target_pairs={{0,1},{12,3}}",
        '%r = (f32[8], u32[]) recv(%t), frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{12,3}}"}',
    ],
)
def test_the_pairs_of_a_permute(line):
    assert read_permute_pairs(module(line).entry.instructions[0]) == ((0, 1), (12, 3))


def rows(array):
    return tuple(tuple(int(device) for device in row) for row in array)


@pytest.mark.parametrize(
    ("text", "lists"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{3,1,2,0}}", ((3, 1, 2, 0),)),
        ("{{0}, {1,2}}", ((0,), (1, 2))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", rows(np.arange(8).reshape(2, 4))),
        ("[2,4]<=[4,2]T(1,0)", rows(np.arange(8).reshape(4, 2).T.reshape(2, 4))),
        ("[4,2]<=[2,2,2]T(0,2,1)", rows(np.arange(8).reshape(2, 2, 2).transpose(0, 2, 1).reshape(4, 2))),
        ("mesh['x'=4,'y'=2] {'x'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['x'=4,'y'=2] {'y','x'}", ((0, 2, 4, 6, 1, 3, 5, 7),)),
        ("mesh['x'=4,'y'=2] {'x','y'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['x'=4,'y'=2] {'x':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=4,'y'=2] {'x':(2)2, 'y'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['x'=8] {'x':(4)2,'x':(1)2}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=4], device_ids=(7,5,3,1) {'a':(1)2}", ((7, 3), (5, 1))),
        ('mesh["a"=2,"b"=1] {"b"}', ((0,), (1,))),
        ("mesh['x'=2] {}", ((0,), (1,))),
    ],
)
def test_every_spelling(text, lists):
    groups = parse_groups(text, 8)
    assert groups.lists == lists
    assert (groups.count, groups.size) == (len(lists), max(map(len, lists)))


@st.composite
def meshes(draw):
    """Sizes of two or three axes, an order of their devices, and disjoint factors of some axes."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 6, 8]), min_size=2, max_size=3))
    order = draw(st.permutations(range(len(sizes))))
    used = []
    for axis, size in enumerate(sizes):
        ends = sorted(
            draw(st.sets(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]), max_size=3)) | {1}
        )
        chain = [end for at, end in enumerate(ends) if all(end % low == 0 for low in ends[:at])]
        used += [(axis, low, high // low) for low, high in pairwise(chain) if draw(st.booleans())]
    return sizes, order, draw(st.permutations(used))


@given(meshes())
def test_sub_axes_of_any_mesh_in_any_order(drawn):
    sizes, order, used = drawn
    axes = ",".join(f"'a{axis}'={size}" for axis, size in enumerate(sizes))
    named = ", ".join(f"'a{axis}':({before}){size}" for axis, before, size in used)
    iota = ",".join(map(str, sizes))
    text = f"mesh[{axes}], device_ids=([{iota}]T({','.join(map(str, order))})) {{{named}}}"
    devices = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(sizes)
    groups = parse_groups(text, None)
    assert sorted(sorted(group) for group in groups.lists) == sorted(by_hand(devices, used))
    for group in groups.lists:
        assert list(group) == sorted(group, key=lambda device: digits(devices, used, device))


def by_hand(devices, used):
    """Devices are together if they differ in used factors only."""
    groups = {}
    for place in product(*map(range, devices.shape)):
        rest = list(place)
        for axis, before, size in used:
            after = devices.shape[axis] // before // size
            rest[axis] -= place[axis] // after % size * after
        groups.setdefault(tuple(rest), []).append(int(devices[place]))
    return [sorted(group) for group in groups.values()]


def digits(devices, used, device):
    place = np.argwhere(devices == device)[0]
    return [place[axis] // (devices.shape[axis] // before // size) % size for axis, before, size in used]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{{0,1},{2,3}",
        "[2,4]<=[9]",
        "[2,4]<=[4,2]T(1,1)",
        "[2,4]<=[4,2]T(1,2)",
        "[2,4]",
        "mesh['x'=4] {'z'}",
        "mesh['x'=2,'y'=0] {'x'}",
        "mesh['x'=4] {'x':(3)2}",
        "mesh['x'=4] {'x':(0)2}",
        "mesh['x'=4], device_ids=(0,1) {'x'}",
        "mesh['x'=4], device_ids=(a) {'x'}",
    ],
)
def test_unreadable_groups_are_refused(text):
    with pytest.raises(NotationError, match="over each device once"):
        parse_groups(text, 8)


def test_groups_of_many_devices_cost_nothing_until_they_are_listed():
    parsed = [parse_groups(f"[{2**18},{2**4}]<=[{2**11},{2**11}]T(1,0)", None) for _ in range(1000)]
    assert {(groups.count, groups.size) for groups in parsed} == {(2**18, 2**4)}
    assert parse_groups("mesh['x'=64,'y'=16] {'x'}", None).lists[3][:3] == (3, 19, 35)


HUGE = {
    "an iota": "[1000000,1000000]<=[1000000000000]",
    "one group of 16 million": "[1,16777216]<=[16777216]",
    "a transposed iota": "[1000000,1000000]<=[1000000,1000000]T(1,0)",
    "a mesh": "mesh['x'=1000000,'y'=1000000] {'x'}",
    "a number of 5000 digits": f"[1,{'9' * 5000}]<=[{'9' * 5000}]",
    "a device of 5000 digits": f"{{{{0,{'9' * 5000}}}}}",
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_more_devices_than_can_be_listed_are_refused_before_any_is(text: str):
    with pytest.raises(NotationError, match="over more devices than the 4194304") as caught:
        parse_groups(text, None)
    assert len(str(caught.value)) < 400


def test_partitions_that_no_machine_has_are_refused_before_any_is_listed():
    """Every replica stands for all of its partitions: 2^32 of them would take 64 GiB."""
    line = "ROOT %r = f32[6] all-reduce(%p), channel_id=1, replica_groups={{0},{1}}"
    read = module(line, header=f", replica_count=2, num_partitions={1 << 32}")
    with pytest.raises(NotationError, match="over more devices than the 4194304"):
        hlo.collectives(read)
    with pytest.raises(NotationError, match="over more devices"):
        hlo.collectives(module(line.replace("{0},{1}", "").replace("{{}}", "{}"), header=f", num_partitions={1 << 32}"))


SUM = "(s32[], f32[8], s32[])"
START = [
    "%zero = s32[] constant(0)",
    "%count = s32[] constant(12)",
    "%v = f32[8] parameter(0)",
    f"%start = {SUM} tuple(%zero, %v, %count)",
]
CONDITION = [
    f"%p = {SUM} parameter(0)",
    "%i = s32[] get-tuple-element(%p), index=0",
    "%bound = s32[] constant(12)",
    "ROOT %less = pred[] compare(%i, %bound), direction=LT",
]
BODY = [
    f"%q = {SUM} parameter(0)",
    "%j = s32[] get-tuple-element(%q), index=0",
    "%k = s32[] get-tuple-element(%q), index=2",
    "%w = f32[8] get-tuple-element(%q), index=1",
    "%one = s32[] constant(1)",
    "%next = s32[] add(%j, %one)",
    f"ROOT %t = {SUM} tuple(%next, %w, %k)",
]


def count(start=START, condition=CONDITION, body=BODY, config="", **replaced):
    """The trip count of the loop, with parts of its lines replaced."""
    before = computation("condition", *condition) + computation("body", *body)
    loop = f"ROOT %loop = {SUM} while(%start), condition=%condition, body=%body{config}"
    read = module(*start, loop, before=before)
    return hlo.trip_count(read, read.entry, read.entry.by_name["loop"])


def but(lines, old, new):
    assert any(old in line for line in lines)
    return [line.replace(old, new) for line in lines]


@pytest.mark.parametrize(
    ("start", "bound", "step", "direction", "expected"),
    [
        (0, 12, 5, "LT", 3),
        (3, 12, 1, "LT", 9),
        (0, 12, 1, "LE", 13),
        (0, 12, 5, "LE", 3),
        (0, 10, 5, "LE", 3),
        (12, 0, -1, "GT", 12),
        (12, 0, -5, "GE", 3),
        (12, 3, 1, "LT", 0),
        (0, 12, -1, "LT", None),
        (0, 12, 0, "LT", None),
        (0, 12, 1, "GT", None),
        (0, 12, 1, "NE", None),
    ],
)
def test_counted_loops_of_all_kinds(start, bound, step, direction, expected):
    trips = count(
        but(START, "constant(0)", f"constant({start})"),
        but(but(CONDITION, "constant(12)", f"constant({bound})"), "LT", direction),
        but(BODY, "constant(1)", f"constant({step})"),
    )
    steps = range(start, bound + {"LE": 1, "GE": -1}.get(direction, 0), step) if expected else range(0)
    assert trips == expected == (expected and len(steps))


def test_copies_are_seen_through():
    start = [*but(START, "tuple(%zero", "tuple(%c2")]
    start[1:1] = ["%c1 = (s32[], s32[], u32[]) copy-start(%zero)", "%c2 = s32[] copy-done(%c1)"]
    body = but(BODY, "add(%j", "add(%jj")
    body.insert(2, "%jj = s32[] copy(%j)")
    assert count(start, body=body) == 12


def test_the_bound_may_be_carried_along():
    condition = but(CONDITION, "constant(12)", "get-tuple-element(%p), index=2")
    assert count(condition=condition) == 12
    changed = but(BODY, "tuple(%next, %w, %k)", "tuple(%next, %w, %next)")
    assert count(condition=condition, body=changed) is None


@pytest.mark.parametrize(
    ("part", "old", "new"),
    [
        ("start", "tuple(%zero, %v, %count)", "custom-call(%zero, %v, %count)"),
        ("start", "%zero = s32[] constant(0)", "%zero = s32[] parameter(1)"),
        ("condition", "compare(%i, %bound), direction=LT", "custom-call(%i, %bound)"),
        ("condition", "%bound = s32[] constant(12)", "%bound = s32[] custom-call(%p)"),
        ("body", "add(%j, %one)", "multiply(%j, %one)"),
        ("body", "add(%j, %one)", "add(%one, %one)"),
        ("body", "add(%j, %one)", "add(%k, %one)"),
        ("body", "%one = s32[] constant(1)", "%one = s32[] custom-call(%q)"),
        ("body", "tuple(%next, %w, %k)", "custom-call(%next, %w, %k)"),
    ],
)
def test_a_count_that_depends_on_data_is_unknown(part, old, new):
    lines = {"start": START, "condition": CONDITION, "body": BODY}
    lines[part] = but(lines[part], old, new)
    assert count(**lines) is None


@pytest.mark.parametrize(
    "config",
    [
        ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}',
        ", backend_config={known_trip_count={n=7}}",
    ],
)
def test_the_annotation_of_xla_comes_first(config):
    assert count(config=config) == 7

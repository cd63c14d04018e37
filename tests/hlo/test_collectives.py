"""Collectives of real modules, and of every form; what they receive is computed here from the programs' shapes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reshard import hlo
from reshard.errors import NotationError
from reshard.hlo import Array, Total
from tests.hlo import record
from tests.hlo.fragments import computation, module, only

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
"""For each program kind, elements received and times of its collectives."""

INSTEAD = {
    # XLA:CPU makes no reduce-scatter of its own; on TPU it makes an all-reduce of a small one.
    "scatter_cpu": [("all_reduce", 256 * 1024, 1)],
    "kinds_v5p": [("all_reduce", SMALL * 3 // 2, 1) if c[0] == "reduce_scatter" else c for c in COUNTED["kinds"]],
    # Two slices: the axis x lies across them; what the slices exchange, then what the 2 x 2 in each do.
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


def found(text):
    return sorted(((c.kind, c.received_bytes, c.times) for c in hlo.collectives(hlo.parse(text))), key=str)


@pytest.mark.parametrize("path", sorted(record.DATA.glob("*.hlo")), ids=lambda path: path.stem)
def test_recorded_modules(path):
    program, platform, _ = path.stem.split("_")
    nbytes = 4 if platform in ("cpu", "v5p-2slices") else 2
    assert found(path.read_text(encoding="utf-8")) == counted(program, platform, nbytes)


@pytest.fixture(scope="module")
def compiled():
    """The HLO of all programs as the jax that is installed compiles them for CPU."""
    run = subprocess.run(
        [sys.executable, record.__file__, "cpu"], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("program", record.PROGRAMS)
def test_compiled_here(compiled, program):
    assert found(compiled[program]) == counted(program, "cpu", 4)


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


def test_groups_and_arrays_of_a_compiled_module(compiled):
    one = only(hlo.collectives(hlo.parse(compiled["gather"])))
    assert one.groups.lists == ((0, 2, 4, 6), (1, 3, 5, 7)) and one.group_size == 4
    assert [array.dims for array in (*one.operands, *one.results)] == [(64, 256), (256, 256)]
    assert (one.dtype, one.opcode, one.pairs) == ("f32", "all-gather", ())
    ring = only(hlo.collectives(hlo.parse(compiled["ring"])))
    assert sorted(ring.pairs) == [(2 * i + j, (2 * i + 2) % 8 + j) for i in range(4) for j in range(2)]


# ---- forms ------------------------------------------------------------------------------------------

GROUPS = "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}"
PARAMETERS = ["%p = f32[8] parameter(0)", "%q = bf16[4] parameter(1)"]


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
        # apart, for pipelining and between slices
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
def test_every_form_is_priced(line, kind, received):
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
def test_what_is_no_collective_or_only_ends_one(line):
    wrapped = computation("wrapped", "%w = f32[8] parameter(0)", f"ROOT %g = f32[32] all-gather(%w), {GROUPS}")
    assert hlo.collectives(module(*PARAMETERS, line, before=wrapped)) == ()


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
def test_wrapped_collectives_are_found_once(lines):
    inner = ["%a = f32[8] parameter(0)", f"ROOT %b = f32[8] all-to-all(%a), {GROUPS}, dimensions={{0}}"]
    before = computation("w", *inner)
    before += computation("w.outer", "%o = f32[8] parameter(0)", "ROOT %c = f32[8] call(%o), to_apply=%w")
    one = only(hlo.collectives(module(*PARAMETERS, *lines, before=before)))
    assert (one.kind, one.computation, one.received_bytes) == ("all_to_all", "w", 24)


def test_what_is_called_twice_counts_twice():
    before = computation("w", "%a = f32[8] parameter(0)", f"ROOT %b = f32[8] all-to-all(%a), {GROUPS}")
    read = module(*PARAMETERS, "%r = f32[8] call(%p), to_apply=%w", "%s = f32[8] call(%r), to_apply=%w", before=before)
    assert hlo.traffic(read) == hlo.Traffic(2, 48, {"all_to_all": Total(2, 48)}, True)


def reduced(*after):
    """An all-reduce in a fusion, and what follows it."""
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
def test_an_all_reduce_in_a_fusion_of_which_only_slices_are_used(after, kind, received):
    one = only(hlo.collectives(module(*PARAMETERS, FUSED, before=reduced(*after))))
    assert (one.kind, one.opcode, one.received_bytes) == (kind, "all-reduce", received)


def test_an_all_reduce_that_is_the_result_of_its_fusion():
    before = reduced(SLICE.replace("ROOT ", "")).replace("%r =", "ROOT %r =")
    one = only(hlo.collectives(module(*PARAMETERS, FUSED, before=before)))
    assert (one.kind, one.received_bytes) == ("all_reduce", 48)


def test_outside_of_a_fusion_an_all_reduce_is_one():
    called = "ROOT %x = f32[2] call(%p), to_apply=%f"
    one = only(hlo.collectives(module(*PARAMETERS, called, before=reduced(SLICE))))
    assert (one.kind, one.received_bytes) == ("all_reduce", 48)


def test_a_chain_of_fusions_without_its_start_is_not_counted():
    """The recorded v5e module has such a chain; here its start is planted away."""
    text = (record.DATA / "overlap_v5e_0.12.0.1.hlo").read_text(encoding="utf-8")
    assert text.count(" all-gather(") == 4 and text.count("AsyncCollectiveStart") == 1
    whole = hlo.traffic(hlo.parse(text)).by_kind["all_gather"].launches
    assert hlo.traffic(hlo.parse(text.replace("AsyncCollectiveStart", ""))).by_kind["all_gather"].launches == whole - 1
    assert hlo.traffic(hlo.parse(text.replace("chain_id", ""))).by_kind["all_gather"].launches == whole + 2


# ---- how often --------------------------------------------------------------------------------------

REDUCE = f"all-reduce(%v), {GROUPS}, use_global_device_ids=true"


def loop(name, body, condition="cond", count=None):
    config = f', backend_config={{"known_trip_count":{{"n":"{count}"}}}}' if count is not None else ""
    return f"%{name} = f32[8] while(%v), condition=%{condition}, body=%{body}{config}"


def bodies(*more):
    v = "%v = f32[8] parameter(0)"
    return "".join(
        [
            computation("cond", v, "ROOT %less = pred[] custom-call(%v)"),
            computation("asks", v, f"%sum = f32[8] {REDUCE}", "ROOT %less = pred[] custom-call(%sum)"),
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
        (loop("w", "inner", "asks", count=5), [6, 5]),
    ],
)
def test_loops_multiply(line, times):
    read = module("%v = f32[8] parameter(0)", line, before=bodies())
    assert [one.times for one in hlo.collectives(read)] == times
    total = hlo.traffic(read)
    assert total.launches == sum(1 if often is None else often for often in times)
    assert total.received_bytes == 48 * total.launches
    assert total.exact == (None not in times)


@pytest.mark.parametrize(
    "branches", ["branch_computations={%inner, %outer, %cond}", "true_computation=%inner, false_computation=%outer"]
)
def test_the_worst_branch_counts(branches):
    read = module("%v = f32[8] parameter(0)", f"ROOT %c = f32[8] conditional(%i, %v, %v), {branches}", before=bodies())
    assert [one.times for one in hlo.collectives(read)] == [4]
    assert [one.times for one in hlo.collectives(read, every_branch=True)] == [1, 4]


def test_of_branches_that_receive_the_same_the_one_with_more_launches_counts():
    v, line = "%v = f32[8] parameter(0)", "collective-permute(%v), source_target_pairs={{0,0}}"
    two = computation("two", v, f"%a = f32[8] {line}", f"ROOT %b = f32[8] {line}")
    one = computation("one", v, f"ROOT %c = f32[8] {line}")
    branches = "ROOT %c = f32[8] conditional(%i, %v, %v), branch_computations={%one, %two}"
    assert [found.name for found in hlo.collectives(module(v, branches, before=one + two))] == ["a", "b"]


def test_collectives_stand_in_the_order_of_the_program():
    lines = [f"%a = f32[8] {REDUCE}", loop("w", "inner", count=2), f"%z = f32[8] {REDUCE}"]
    read = module("%v = f32[8] parameter(0)", *lines, before=bodies())
    assert [one.name for one in hlo.collectives(read)] == ["a", "sum", "z"]


# ---- what cannot be read ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%r = f32[8] all-gather(%p), dimensions={0}", "all-gather r has no replica_groups"),
        ("%r = f32[8] all-gather(%p), replica_groups={{0,1}", "over each device once"),
        ('%r = (f32[8]) recv(%p), frontend_attributes={_xla_megascale_transfer_type="NEW"}', "type NEW is not known"),
    ],
)
def test_what_cannot_be_counted_is_refused(line, said):
    with pytest.raises(NotationError, match=said):
        hlo.collectives(module(line))


def test_all_devices_of_a_header_that_does_not_say_how_many():
    with pytest.raises(NotationError, match="keep num_partitions=8"):
        hlo.collectives(module("%r = f32[8] all-gather(%p), replica_groups={}", header=""))


def test_traffic_of_some_collectives():
    found = hlo.collectives(hlo.parse((record.DATA / "kinds_cpu_0.12.0.1.hlo").read_text(encoding="utf-8")))
    total = hlo.traffic(one for one in found if one.kind == "permute")
    assert total == hlo.Traffic(2, SMALL * 4, {"permute": Total(2, SMALL * 4)}, True)


def test_a_token_is_no_operand():
    transfer = '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_GATHER"'
    recv = f"%r = (f32[8], u32[], token[]) recv(%t), frontend_attributes={{{transfer}}}"
    one = only(hlo.collectives(module("%t = token[] after-all()", recv)))
    assert one.operands == () and one.results == (Array("f32", (8,)),) and one.groups is None


def test_operands_that_stand_elsewhere():
    one = only(hlo.collectives(module(f"%r = f32[32] all-gather(%gone), {GROUPS}")))
    assert one.operands == () and one.results == (Array("f32", (32,)),)

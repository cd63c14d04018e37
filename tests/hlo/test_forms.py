"""Every spelling of a collective, and instructions that are not collectives or only end one."""

import pytest

from reshard import hlo
from reshard.errors import NotationError
from reshard.hlo import Array
from reshard.hlo.executed_collectives import collective_form, permute_pairs
from tests.hlo import record
from tests.hlo.fragments import GROUPS, PARAMETERS, computation, module, only


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


def test_an_all_reduce_that_is_also_the_result_of_its_fusion():
    before = reduced(SLICE.replace("ROOT ", "")).replace("%r =", "ROOT %r =")
    one = only(hlo.collectives(module(*PARAMETERS, FUSED, before=before)))
    assert (one.kind, one.received_bytes) == ("all_reduce", 48)


def test_outside_of_a_fusion_an_all_reduce_stays_one():
    called = "ROOT %x = f32[2] call(%p), to_apply=%f"
    one = only(hlo.collectives(module(*PARAMETERS, called, before=reduced(SLICE))))
    assert (one.kind, one.received_bytes) == ("all_reduce", 48)


def test_a_chain_of_fusions_without_its_start_is_not_counted():
    """The recorded v5e module has such a chain; here its start is removed."""
    text = (record.DATA / "overlap_v5e_0.12.0.1.hlo").read_text(encoding="utf-8")
    assert text.count(" all-gather(") == 4 and text.count("AsyncCollectiveStart") == 1
    whole = hlo.traffic(hlo.parse(text)).by_kind["all_gather"].launches
    assert hlo.traffic(hlo.parse(text.replace("AsyncCollectiveStart", ""))).by_kind["all_gather"].launches == whole - 1
    assert hlo.traffic(hlo.parse(text.replace("chain_id", ""))).by_kind["all_gather"].launches == whole + 2


def test_tokens_are_not_operands():
    transfer = '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_GATHER"'
    recv = f"%r = (f32[8], u32[], token[]) recv(%t), frontend_attributes={{{transfer}}}"
    one = only(hlo.collectives(module("%t = token[] after-all()", recv)))
    assert one.operands == () and one.results == (Array("f32", (8,)),) and one.groups is None


def test_an_unknown_transfer_between_slices_is_refused():
    line = '%r = (f32[8]) recv(%p), frontend_attributes={_xla_megascale_transfer_type="NEW"}'
    with pytest.raises(NotationError, match="type NEW is not known"):
        hlo.collectives(module(line))


@pytest.mark.parametrize(
    ("target", "slices"), [("{1,2}x{0:3}", 2), ("{1:4}x{0:3}", 4), ("{0:2,5}x{0:3}", 4), ("{{100000->300000}}", 2)]
)
def test_the_slices_that_a_transfer_joins(target, slices):
    attributes = f'_xla_megascale_target="{target}",_xla_megascale_transfer_type="ALL_GATHER"'
    read = module(f"%r = (f32[8], u32[], token[]) recv(%t), frontend_attributes={{{attributes}}}")
    assert collective_form(read.entry, read.entry.instructions[0], fused=False).group_size == slices


@pytest.mark.parametrize(
    "line",
    [
        "%r = f32[8] collective-permute(%p), source_target_pairs={{0,1},{12,3}}",
        "%r = (f32[8], f32[8]) collective-permute-start(%p), source_target_pairs={{0,1},{12,3}}",
        '%r = (f32[8], u32[]) recv(%t), frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{12,3}}"}',
    ],
)
def test_the_pairs_of_a_permute(line):
    assert permute_pairs(module(line).entry.instructions[0]) == ((0, 1), (12, 3))

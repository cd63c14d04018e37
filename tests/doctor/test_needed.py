"""Which chains surely receive what is needed: those of one collective whose result is used whole, and no others."""

from reshard.doctor.chain_reader import is_needed
from tests.doctor.fragments import GATHER, RESHARD, Analysis, text

USE = "ROOT %r = f32[8,8]{1,0} add(%g, %g)"


def answers(*lines):
    analysis = Analysis(text(*lines))
    return [is_needed(chain, analysis.flow) for chain in analysis.chains()]


def test_a_gather_that_is_used_whole():
    assert answers(GATHER, USE) == [True]
    assert answers(GATHER, "%t = f32[64]{0} bitcast(%g)", "ROOT %r = f32[64]{0} add(%t, %t)") == [True]


def test_a_gather_that_is_sliced_is_wasteful():
    assert answers(*RESHARD) == [False]


def test_what_could_be_moved_in_a_narrower_dtype_is_left_to_layouts():
    narrow = "%n = bf16[2,8]{1,0} convert(%p)"
    wide = "%w = f32[2,8]{1,0} convert(%n)"
    assert answers(narrow, wide, GATHER.replace("%p", "%w"), USE) == [False]
    assert answers("%w = f32[2,8]{1,0} copy(%p)", GATHER.replace("%p", "%w"), USE) == [True]


def test_reductions_and_chains_of_several_collectives():
    total = "%s = f32[2,8]{1,0} all-reduce(%p), channel_id=3, replica_groups={{0,1,2,3}}"
    assert answers(total, "ROOT %r = f32[2,8]{1,0} add(%s, %s)") == [False]
    first = "%a = f32[4,8]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}"
    second = "%b = f32[8,8]{1,0} all-gather(%a), channel_id=2, replica_groups={{0,2},{1,3}}, dimensions={0}"
    assert answers(first, second, "ROOT %r = f32[8,8]{1,0} add(%b, %b)") == [False]

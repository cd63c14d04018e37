"""The fragments that proposals ask for: one for each plan, one for all shifts of a dtype, one for an operation."""

from reshard.jax.xla_pass.fragments import FragmentKey, OpFragmentKey
from reshard.jax.xla_pass.hlo_pass import asked_fragments
from tests.doctor.batched import FFT, HEAD
from tests.doctor.fragments import RESHARD, text
from tests.doctor.test_proposals import proposals


def test_a_move_asks_for_its_plan():
    (one,) = proposals(text(*RESHARD))
    ((key, uses),) = asked_fragments(one)
    assert isinstance(key, FragmentKey) and (key.plan,) == one.outcome.plans
    assert [use.name for use in uses] == ["d"] and key.received_bytes == one.outcome.planned_bytes


def test_an_operation_asks_for_itself_on_rows():
    (one,) = proposals(HEAD + FFT)
    ((key, uses),) = asked_fragments(one)
    assert isinstance(key, OpFragmentKey) and key.received_bytes == one.outcome.planned_bytes
    assert [(use.name, use.output) for use in uses] == [("d", 0)]

"""What proposals cost by their plans alone: bytes, memory, and sums that would be added up in another order."""

import pytest

from reshard.doctor import examine
from tests.doctor.batched import FFT, HEAD
from tests.doctor.fragments import GATHER, OFFSET, RESHARD, SLICE, ZERO, only, text
from tests.doctor.test_proposals import REDUCE, SCATTERED


def test_the_memory_of_a_plan_beside_its_ends():
    place = only(examine(text(*RESHARD)))
    assert (place.temp_bytes, place.planned_temp_bytes, place.saved_temp_bytes) == (256, 64, 192)


def narrow(*between):
    """A gather of bf16 that is sent as f32."""
    wide = ["%n = bf16[2,8]{1,0} convert(%p)", "%w = f32[2,8]{1,0} convert(%n)"]
    return text(
        *OFFSET, ZERO, *wide, *between, GATHER.replace("%p", "%w"), SLICE, "ROOT %r = f32[8,2]{1,0} add(%d, %d)"
    )


def test_a_compiler_that_sends_no_short_floats_sends_twice_as_much():
    """Half of 48 B for the plan in bf16, twice that where no collective sends bf16, as on CPU."""
    place = only(examine(narrow()))
    assert place.replaced and place.planned_bytes == 48


@pytest.mark.parametrize(("platform", "saved"), [("cpu", 144), ("tpu", 0)])
def test_what_the_pass_leaves_is_not_said_to_be_saved(platform, saved):
    """On an accelerator, so few bytes are not worth compiling the program for its peak, which hardly falls."""
    report = examine(text("%big = f32[64,64]{1,0} parameter(1)", *RESHARD), platform=platform)
    assert report.saved_bytes == saved
    assert bool(saved) == (not only(report).why_left) == bool(report.memory.saved_bytes)


def test_on_an_accelerator_plans_need_no_more_memory_than_their_chains(monkeypatch):
    """Whether they may is for the compiler to say, and the doctor compiles nothing."""
    monkeypatch.setattr("reshard.doctor.proposals.ALIGNMENT", -385)  # a plan of 256 B needs more than 384 B
    lines = ["%big = f32[1024,1024]{1,0} parameter(1)", "%twice = f32[1024,1024]{1,0} add(%big, %big)", *RESHARD]
    cpu, tpu = (examine(text(*lines), platform=platform) for platform in ("cpu", "tpu"))
    assert only(cpu).replaced and only(tpu).why_left.startswith("the plan would need")


def test_a_sum_in_the_same_order_is_scattered():
    report = examine(text(*SCATTERED, before=REDUCE))
    assert [(place.kind, place.does, place.saved_bytes) for place in report.accounts().places] == [
        ("reduction", "all_reduce", 192)
    ]


@pytest.mark.parametrize("order", ["0,2,1,3", "3,2,1,0"])
def test_a_sum_in_another_order_stays(order):
    """The bits of a sum of floats depend on it."""
    lines = [line.replace("{{0,1,2,3}}", f"{{{{{order}}}}}") for line in SCATTERED]
    place = only(examine(text(*lines, before=REDUCE)))
    assert not place.replaced and place.why_left == "its elements would be added up in another order"


def test_integers_may_be_added_up_in_any_order():
    lines = [line.replace("{{0,1,2,3}}", "{{0,2,1,3}}").replace("f32", "s32") for line in SCATTERED]
    assert only(examine(text(*lines, before=REDUCE.replace("f32", "s32")))).replaced


def test_an_operation_on_rows_has_its_moves():
    place = only(examine(HEAD + FFT))
    assert (place.does, place.saved_bytes, place.plans[-1].received_bytes) == ("all_gather", 384 - 96, 96)
    assert [str(move.target) for move in place.moves] == ["c64[8, {d0}2]"]

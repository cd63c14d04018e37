"""What is proposed for chains: what is preferred decides, none receives more than its chain; and what plans cost."""

from dataclasses import replace

import pytest

from reshard import hlo
from reshard.doctor import examine
from reshard.doctor.equivalence import Traced
from reshard.doctor.places import PassOutcome
from reshard.doctor.proposals import (
    ProposalCost,
    ProposalOptions,
    Proposals,
    explain_unmeasured,
)
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.synth.options import PREFERENCES, PlanOptions
from tests.doctor.batched import FFT, HEAD
from tests.doctor.fragments import GATHER, OFFSET, REDUCE, RESHARD, SCATTERED, SLICE, SUMMED, ZERO, only, place, text


def proposals(module_text, prefer="bytes", cost=None, platform="cpu", network=None, devices=4, cut=lambda plan: ()):
    module = hlo.parse(module_text)
    traced = Traced(module, devices)

    def measure(one):
        return cost(one) if callable(cost) else cost or ProposalCost(one.outcome.planned_bytes, 0)

    options = ProposalOptions(PlanOptions.read(network=network, prefer=prefer), platform)
    collectives = hlo.collectives(module, every_branch=True)
    return list(Proposals(traced.flow, traced.maps, traced.numbering, collectives, None, options, measure, cut=cut))


def test_a_rebuilt_array_is_moved_by_a_plan():
    (one,) = proposals(text(*RESHARD))
    assert one.outcome.replaced and (one.received_bytes, one.outcome.planned_bytes) == (192, 48)
    assert [step.kind for plan in one.outcome.plans for step in plan.steps] == ["all_to_all"]
    assert one.allowed_bytes == 384 and not one.excess_bytes


@pytest.mark.parametrize(("platform", "replaced"), [("cpu", True), ("gpu", False), ("tpu", False)])
def test_few_bytes_are_not_worth_more_collectives(platform, replaced):
    (one,) = proposals(text(*RESHARD), cost=ProposalCost(48, 0, launches=2), platform=platform)
    assert one.outcome.replaced == replaced
    assert replaced or one.outcome.why == "the plan would save 144 B with 1 more collectives"


@pytest.mark.parametrize(
    ("platform", "saves", "rest", "after", "why"),
    [
        ("cpu", 1, 1 << 30, 10, None),
        ("tpu", 1, 1 << 30, 4, ""),
        ("tpu", 1 << 20, 1 << 20, 10, None),
        ("tpu", 1, 1, 5, "1 B saved in all are not worth compiling the program for its peak"),
        ("tpu", 1 << 20, 1 << 30, 5, "1048576 B saved in all are not worth compiling the program for its peak"),
    ],
)
def test_when_the_peak_of_a_program_is_measured(platform, saves, rest, after, why):
    taken = replace(place(received=4 + saves), outcome=PassOutcome(4))
    left = replace(place(received=rest), outcome=PassOutcome(4, why="left"))
    assert explain_unmeasured([taken, left], ProposalOptions(platform=platform), lambda: (10, after)) == why


def test_a_gather_that_is_used_whole_stays():
    (one,) = proposals(text(GATHER, "ROOT %r = f32[8,8]{1,0} add(%g, %g)"))
    assert not one.replacements and one.outcome.why == "it receives no more than is needed between these layouts"


def test_a_sum_and_its_slices_are_one_proposal():
    (one,) = proposals(text(*SCATTERED, before=REDUCE))
    assert one.place.does_with_op == "all_reduce" and (one.received_bytes, one.outcome.planned_bytes) == (384, 192)


def test_a_sum_among_all_devices_of_a_tpu_stays():
    (one,) = proposals(text(*SCATTERED, before=REDUCE), platform="tpu")
    assert not one.replacements and one.outcome.why.endswith("among all devices in two levels, in another order")
    pairs = [line.replace("{{0,1,2,3}}", "{{0,1},{2,3}}") for line in SCATTERED]
    assert all("two levels" not in one.outcome.why for one in proposals(text(*pairs, before=REDUCE), platform="tpu"))


def test_devices_outside_the_groups_of_a_sum_do_not_share_its_work():
    """They need not have equal summands."""
    lines = [line.replace("8,8", "4096,1024") for line in ("%w = f32[8,8]{1,0} parameter(1)", SUMMED)]
    used = "ROOT %r = f32[4096,1024]{1,0} add(%s, %s)"
    halves = text(*lines, used, before=REDUCE).replace("{{0,1,2,3}}", "{{0,1,2,3},{4,5,6,7}}")
    (one,) = proposals(halves, platform="tpu", network="tpu-v5p", devices=8)
    assert one.outcome.why.startswith("it receives no more than is needed"), one.outcome.why


def test_an_operation_takes_the_gather_of_its_rows():
    (one,) = proposals(HEAD + FFT)
    assert one.moves is not None and one.place.does_with_op == "all_gather, fft" and one.outcome.planned_bytes == 96


@pytest.mark.parametrize("prefer", PREFERENCES)
def test_nothing_that_receives_more_is_proposed(prefer):
    (one,) = proposals(text(*RESHARD), prefer, ProposalCost(193, 0))
    assert not one.replacements and "would receive 193 B as compiled here" in one.outcome.why


@pytest.mark.parametrize(("prefer", "replaced"), [("bytes", False), ("memory", True), ("time", False)])
def test_as_many_bytes_are_a_gain_only_in_memory_or_time(prefer, replaced):
    """A permute of two arrays, then back, could be one launch less, but here there is one in both."""
    (one,) = proposals(text(*RESHARD), prefer, ProposalCost(192, 64))
    assert bool(one.replacements) == replaced


def test_memory_has_to_become_less():
    (one,) = proposals(text(*RESHARD), "memory", ProposalCost(48, 384))
    assert not one.replacements and one.outcome.why == "the plan would need 384 B at once, no less than XLA's 384 B"
    (one,) = proposals(text(*RESHARD), "memory", ProposalCost(48, 383))
    assert one.replacements


def test_what_needs_more_memory_than_the_program_stays():
    (one,) = proposals(text(*RESHARD), "bytes", ProposalCost(48, 1 << 20))
    assert not one.replacements and "would need 1048576 B at once" in one.outcome.why


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


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_plans_may_need_more_memory_than_their_chains_where_the_peak_is_elsewhere(monkeypatch, platform):
    monkeypatch.setattr("reshard.doctor.proposals.ALIGNMENT", -385)  # a plan of 256 B needs more than 384 B
    big = ["%big = f32[1024,1024]{1,0} parameter(1)", "%twice = f32[1024,1024]{1,0} add(%big, %big)"]
    (one,) = proposals(text(*big, *RESHARD), platform=platform, cost=ProposalCost(48, 0))
    assert one.outcome.replaced and one.excess_bytes


def test_forms_are_tried_by_falling_memory_until_one_fits(monkeypatch):
    """Each is compiled, so none is tried after the first that fits. The chain needs 384 B."""
    monkeypatch.setattr("reshard.doctor.proposals.ALIGNMENT", 0)
    compiled = {("all_to_all", None): 1000, ("exchange", None): 500, ("exchange", 2): 384}
    tried = []

    def cut(plan):
        for chunk in (1, 2, None):
            yield chain(plan.source, plan.target, [StepSpec("exchange", plan.target, StepMode(chunk=chunk))])

    def measure(one):
        ((step,),) = (plan.steps for plan in one.outcome.plans)
        tried.append((step.kind, step.mode.chunk))
        return ProposalCost(48, compiled[tried[-1]])

    (one,) = proposals(text(*RESHARD), cost=measure, cut=cut)
    assert one.outcome.replaced and not one.excess_bytes and tried == list(compiled)


@pytest.mark.parametrize(
    ("was", "is_now", "by_itself"),
    [
        ("", "", True),
        ("multiply(%id, %two)", "add(%id, %two)", False),  # a device takes another part than its own
        ("{{0,1,2,3}}", "{{3,2,1,0}}", False),
        ("ROOT %r = ", "%u = f32[8,8]{1,0} add(%s, %s)\n  ROOT %r = ", False),  # and another user has the whole
    ],
)
def test_xla_makes_a_reduce_scatter_of_a_sliced_sum_on_gpus_by_itself(was, is_now, by_itself):
    """After the pass: to compile a plan for it would take time, and save nothing."""
    lines = [line.replace(was, is_now) for line in SCATTERED]
    (one,) = proposals(text(*lines, before=REDUCE), platform="gpu")
    assert (one.outcome.why == "XLA makes a reduce-scatter of it by itself") == by_itself
    (one,) = proposals(text(*SCATTERED, before=REDUCE), platform="cpu")
    assert one.outcome.replaced


@pytest.mark.parametrize("order", ["0,2,1,3", "3,2,1,0"])
def test_a_sum_in_another_order_stays(order):
    """The bits of a sum of floats depend on it."""
    lines = [line.replace("{{0,1,2,3}}", f"{{{{{order}}}}}") for line in SCATTERED]
    place = only(examine(text(*lines, before=REDUCE)))
    assert not place.replaced and place.why_left == "its elements would be added up in another order"


def test_integers_may_be_added_up_in_any_order():
    lines = [line.replace("{{0,1,2,3}}", "{{0,2,1,3}}").replace("f32", "s32") for line in SCATTERED]
    assert only(examine(text(*lines, before=REDUCE.replace("f32", "s32")))).replaced

"""The pass on recorded modules, with recorded fragments: every decision, without compiling anything."""

from dataclasses import replace

import pytest

from reshard.doctor.places import PassOutcome
from reshard.doctor.proposals import ProgramCost, ProposalOptions
from reshard.errors import SpliceError
from reshard.hlo.proto import ModuleProto
from reshard.jax.xla_pass import hlo_pass
from reshard.jax.xla_pass.fragments import Fragment
from reshard.jax.xla_pass.hlo_pass import has_collectives, improve_module
from reshard.synth import PlanOptions
from tests.doctor.fragments import place
from tests.hlo.splices import NAMES, recorded


class Recordings:
    """Stands for the compiler: fragments in the order in which they were recorded, and the recorded text."""

    def __init__(self, name, peak_bytes=0, broken=False, received_bytes=0, launches=0, platform="cpu"):
        self.recorded = recorded(name)
        self.devices = tuple(range(8))
        self.peak_bytes = peak_bytes
        self.received_bytes = received_bytes
        self.launches = launches
        self.platform = platform
        self.broken = broken
        self.asked = []

    def get(self, key):
        shapes = [ModuleProto.decode(one.fragment).entry.parameters[0].shape for one in self.recorded.splices]
        self.asked.append(key)
        if self.broken:
            raise SpliceError("it does not compile")
        assert len(shapes) >= len(self.asked)
        fragment = self.recorded.splices[len(self.asked) - 1].fragment
        return Fragment(fragment, self.peak_bytes, self.received_bytes, self.launches)


DEFAULTS = ProposalOptions()


def improved_module(name, options=DEFAULTS, **choices):
    compiler = Recordings(name, **choices)
    return improve_module(compiler.recorded.module, compiler, options)


def test_a_chain_that_receives_no_more_than_is_needed_stays():
    improved = improved_module("train_cpu", broken=True)
    assert improved.module is None and improved.name == "jit_step"
    reasons = sorted(place.why_left for place in improved.places)
    assert reasons[0] == "it does not compile" and reasons[1].startswith("it receives no more than is needed")


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_that_needs_more_memory_is_not_taken(name):
    improved = improved_module(name, peak_bytes=1 << 40)
    assert improved.module is None
    assert any("would need 1099511627776 B at once" in place.why_left for place in improved.places)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_that_receives_more_as_compiled_is_not_taken(name):
    """CPU has no collectives of bf16: it sends twice what the plan says."""
    improved = improved_module(name, received_bytes=1 << 40)
    assert improved.module is None
    assert any("would receive 1099511627776 B as compiled here" in place.why_left for place in improved.places)


class Measured:
    """Stands for the compiler of whole programs: the peak of the plain one, and of each of the others in turn.

    The plain one receives 100 bytes.
    """

    def __init__(self, before, *after, receives=50):
        self.before = before
        self.after = list(after)
        self.receives = receives

    def of(self, module):
        peak = self.before if module is None else self.after.pop(0)
        if peak is None:
            raise SpliceError("the program cannot be compiled for its peak")
        return ProgramCost(peak, 100 if module is None else self.receives)


def measured(monkeypatch, peaks, changes=(b"better", b"smaller"), lower=False, saves=1 << 20):
    """An accelerator, where the search finds these modules: with plans that exceed chains, and without."""
    asked = []

    def found(module, fragments, options, may_exceed):
        asked.append(may_exceed)
        one = replace(place(received=4 + saves), outcome=PassOutcome(4))
        return hlo_pass.Improved("jit_step", changes[0 if may_exceed else 1], (one,))

    monkeypatch.setattr(hlo_pass, "_improve_in_rounds", found)
    monkeypatch.setattr(hlo_pass, "_estimate_peaks", lambda improved: (10, 4 if lower else 10))
    return improve_module(b"", Recordings("train_cpu", platform="tpu"), ProposalOptions(), peaks), asked


@pytest.mark.parametrize(
    ("peaks", "module", "asked"),
    [
        (Measured(10, 10), b"better", [True]),
        (Measured(10, 11, 9), b"smaller", [True, False]),
        (Measured(10, 11, 11), None, [True, False]),
        (Measured(10, 10, receives=100), None, [True]),
        (Measured(10, 9, receives=100), b"better", [True]),
        (Measured(10, 10, receives=101), None, [True]),
        (Measured(10, None), None, [True]),
        (Measured(None), None, [True]),
        (None, b"smaller", [False]),
    ],
)
def test_the_compiler_says_whether_the_peak_rises(monkeypatch, peaks, module, asked):
    improved, searched = measured(monkeypatch, peaks)
    assert (improved.module, searched) == (module, asked)
    assert all(place.replaced for place in improved.places) == (module is not None)


def test_a_peak_that_is_surely_lower_is_not_measured(monkeypatch):
    assert measured(monkeypatch, Measured(None), lower=True)[0].module == b"better"


def test_a_few_bytes_are_not_worth_measuring(monkeypatch):
    improved = measured(monkeypatch, Measured(None), saves=100)[0]
    assert improved.module is None and improved.places[0].why_left.startswith("100 B saved in all are not worth")


def test_nothing_replaced_is_not_measured(monkeypatch):
    assert measured(monkeypatch, Measured(None), changes=(None, None))[0].module is None


def test_a_budget_below_the_floor_leaves_the_chain():
    improved = improved_module("train_cpu", ProposalOptions(PlanOptions(budget=1)))
    assert improved.module is None and any("budget" in place.why_left for place in improved.places)


def test_a_fragment_of_another_move_is_refused():
    """`scan` moves forth and back, between tiles of other shapes."""

    class Swapped(Recordings):
        def get(self, key):
            self.asked.append(key)
            if len(self.asked) > 1:
                raise SpliceError("it does not compile")
            return Fragment(self.recorded.splices[1].fragment, 0)

    compiler = Swapped("scan_cpu")
    improved = improve_module(compiler.recorded.module, compiler, ProposalOptions())
    assert any("another shape or layout" in place.why_left for place in improved.places)


def test_places_are_plain_data():
    improved = improved_module("train_cpu", broken=True)
    for left in improved.places:
        data = left.to_pass_dict()
        assert data["where"].startswith("train.py:") and data["received_bytes"] > 0 and not data["replaced"]
        assert "left, " in str(left)


@pytest.mark.parametrize("name", NAMES)
def test_the_prefilter_sees_collectives(name):
    assert has_collectives(recorded(name).module)
    assert not has_collectives(b"jit_step\x12\x0bmain")

"""The pass on recorded modules, with recorded fragments: every decision, without compiling anything."""

import pytest

from reshard import hlo
from reshard.errors import SpliceError
from reshard.hlo.proto import ModuleProto
from reshard.jax import chain_fate
from reshard.jax.fragments import Fragment
from reshard.jax.hlo_pass import HloPassOptions, has_collectives, improve
from tests.hlo.splices import NAMES, recorded


class Recordings:
    """Stands for the compiler: fragments in the order in which they were recorded, and the recorded text."""

    def __init__(self, name, peak_bytes=0, broken=False, received_bytes=0):
        self.recorded = recorded(name)
        self.devices = tuple(range(8))
        self.peak_bytes = peak_bytes
        self.received_bytes = received_bytes
        self.broken = broken
        self.asked = []

    def get(self, key):
        shapes = [ModuleProto.decode(one.fragment).entry.parameters[0].shape for one in self.recorded.splices]
        self.asked.append(key)
        if self.broken:
            raise SpliceError("it does not compile")
        assert len(shapes) >= len(self.asked)
        return Fragment(self.recorded.splices[len(self.asked) - 1].fragment, self.peak_bytes, self.received_bytes)

    def text(self, module):
        assert module == self.recorded.module
        return self.recorded.text

    def shardings(self, module):
        return ()


DEFAULTS = HloPassOptions()


def fates(name, options=DEFAULTS, **choices):
    compiler = Recordings(name, **choices)
    return improve(compiler.recorded.module, compiler, compiler, options)


def test_a_chain_that_receives_no_more_than_is_needed_stays():
    improved = fates("train_cpu", broken=True)
    assert improved.module is None and improved.name == "jit_step"
    reasons = sorted(fate.why for fate in improved.fates)
    assert reasons[0] == "it does not compile" and reasons[1].startswith("it receives no more than is needed")


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_that_needs_more_memory_is_not_taken(name):
    improved = fates(name, peak_bytes=1 << 40)
    assert improved.module is None
    assert any("would need 1099511627776 B at once" in fate.why for fate in improved.fates)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_that_receives_more_as_compiled_is_not_taken(name):
    """CPU has no collectives of bf16: it sends twice what the plan says."""
    improved = fates(name, received_bytes=1 << 40)
    assert improved.module is None
    assert any("would receive 1099511627776 B as compiled here" in fate.why for fate in improved.fates)


def test_a_budget_below_the_floor_leaves_the_chain():
    improved = fates("train_cpu", HloPassOptions(budget=1))
    assert improved.module is None and any("budget" in fate.why for fate in improved.fates)


def test_a_fragment_of_another_move_is_refused():
    """`scan` moves forth and back, between tiles of other shapes."""

    class Swapped(Recordings):
        def get(self, key):
            self.asked.append(key)
            if len(self.asked) > 1:
                raise SpliceError("it does not compile")
            return Fragment(self.recorded.splices[1].fragment, 0)

    compiler = Swapped("scan_cpu")
    improved = improve(compiler.recorded.module, compiler, compiler, HloPassOptions())
    assert any("another shape or layout" in fate.why for fate in improved.fates)


def test_fates_are_plain_data():
    improved = fates("train_cpu", broken=True)
    for fate in improved.fates:
        data = fate.to_dict()
        assert data["where"].startswith("train.py:") and data["received_bytes"] > 0 and not data["replaced"]
        assert "left, " in str(fate)


@pytest.mark.parametrize("name", NAMES)
def test_the_prefilter_sees_collectives(name):
    assert has_collectives(recorded(name).module)
    assert not has_collectives(b"jit_step\x12\x0bmain")


def test_counts_of_kinds():
    module = hlo.parse(recorded("scan_cpu").text)
    kinds = [one.kind for one in hlo.collectives(module, every_branch=True)]
    assert list(chain_fate._counted(kinds)) == [f"{len(kinds)} all_gather"]

"""The pass on recorded modules and on files, without XLA and with it; peaks of whole programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reshard import hlo
from reshard.doctor.equivalence import Proofs
from reshard.doctor.places import PassOutcome
from reshard.doctor.proposals import ProgramCost, ProposalOptions, Room
from reshard.errors import NotationError, ProgramError, SpliceError
from reshard.hlo import wire
from reshard.hlo.proto import ModuleProto
from reshard.jax.program_report import optimized_text
from reshard.jax.xla_pass import hlo_pass, program_peaks
from reshard.jax.xla_pass.fragments import Fragment
from reshard.jax.xla_pass.hlo_files import improve_hlo
from reshard.jax.xla_pass.hlo_pass import has_collectives, improve_module
from reshard.jax.xla_pass.program_peaks import CompilingThread, ProgramPeaks
from reshard.synth import PlanOptions
from tests.doctor.fragments import place
from tests.hlo.splices import NAMES, recorded
from tests.jax.moving import AFTER, numbered


class Recordings:
    """Stands for the compiler: fragments in the order in which they were recorded, and the recorded text."""

    def __init__(self, name, peak_bytes=0, broken=False, received_bytes=0, launches=0, platform="cpu"):
        self.recorded = recorded(name)
        self.devices = tuple(range(8))
        self.peak_bytes = peak_bytes
        self.received_bytes = received_bytes
        self.launches = launches
        self.platform = platform
        self.processes = 1
        self.broken = broken
        self.asked = []

    def get(self, key):
        shapes = [ModuleProto.decode(one.fragment).entry.parameters[0].shape for one in self.recorded.splices]
        if key not in self.asked:
            self.asked.append(key)
        if self.broken:
            raise SpliceError("it does not compile")
        assert len(shapes) >= len(self.asked)
        fragment = self.recorded.splices[self.asked.index(key)].fragment
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

    def __init__(self, before, *after, receives=50, given_back=0):
        self.module = b"as it was"
        self.known = {None: before, self.module: given_back}
        self.after = list(after)
        self.receives = receives

    def of(self, module, read=None):
        peak = self.known[module] if module in self.known else self.known.setdefault(module, self.after.pop(0))
        if peak is None:
            raise SpliceError("the program cannot be compiled for its peak")
        return ProgramCost(peak, 100 if module is None else self.receives)


@pytest.mark.parametrize(
    ("handed_back", "receives", "prefer", "is_taken"),
    [(111, 50, "bytes", True), (109, 50, "bytes", False), (120, 100, "bytes", False), (120, 50, "memory", False)],
)
def test_the_order_that_xla_gives_any_module_that_is_given_back_is_no_fault_of_a_plan(
    handed_back, receives, prefer, is_taken
):
    options = ProposalOptions(PlanOptions(prefer=prefer))
    improved = hlo_pass.Improved("jit_step", b"better", ())
    before, after = improved.measure(Measured(100, 112, receives=receives, given_back=handed_back), options)
    assert bool(hlo_pass.explain_no_better(before, after, options)) != is_taken


FOUND = {Room.PROGRAM: b"better", Room.LEAST: b"in parts", Room.CHAIN: b"smaller"}


def measured(monkeypatch, peaks, changes=FOUND, lower=False, saves=1 << 20):
    """An accelerator, where the search finds these modules: with plans that exceed chains, and without."""
    asked = []

    def found(module, fragments, options, room):
        asked.append(room)
        one = replace(place(received=4 + saves), outcome=PassOutcome(4))
        return hlo_pass.Improved("jit_step", changes[room], (one,), has_excess=bool(room))

    monkeypatch.setattr(hlo_pass, "_improve_in_rounds", found)
    monkeypatch.setattr(hlo_pass.Improved, "estimate_peaks", lambda improved: (10, 4 if lower else 10))
    return improve_module(b"", Recordings("train_cpu", platform="tpu"), ProposalOptions(), peaks), asked


@pytest.mark.parametrize(
    ("peaks", "module", "asked"),
    [
        (Measured(10, 10), b"better", [Room.PROGRAM]),
        (Measured(10, 11, 9), b"in parts", [Room.PROGRAM, Room.LEAST]),
        (Measured(10, 11, 11, 9), b"smaller", [Room.PROGRAM, Room.LEAST, Room.CHAIN]),
        (Measured(10, 11, 11, 11), None, [Room.PROGRAM, Room.LEAST, Room.CHAIN]),
        (Measured(10, 10, receives=100), None, [Room.PROGRAM]),
        (Measured(10, 9, receives=100), b"better", [Room.PROGRAM]),
        (Measured(10, 10, receives=101), None, [Room.PROGRAM]),
        (Measured(10, None), None, [Room.PROGRAM]),
        (Measured(None), None, [Room.PROGRAM]),
        (None, b"smaller", [Room.CHAIN]),
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


@pytest.mark.parametrize(
    ("chains", "culprits", "kept", "tries"),
    [(2, "1", "0", 3), (8, "5", "0123467", 7), (8, "05", "123", 7), (8, "01234567", "", 7)],
)
def test_only_the_chains_that_raise_the_peak_are_left(monkeypatch, chains, culprits, kept, tries):
    """By halves, and with a bound: a try is a compilation."""
    searched = []
    one = place(received=100)
    alike = [replace(one, collectives=(replace(one.collectives[0], name=str(number)),)) for number in range(chains)]

    def found(module, fragments, options, room, left=()):
        searched.append(left)
        places = [replace(each, outcome=PassOutcome(number)) for number, each in enumerate(alike)]
        places = [each.left("it rises") if each.collectives[0].name in left else each for each in places]
        module = "".join(each.collectives[0].name for each in places if each.replaced)
        return hlo_pass.Improved("jit_step", module.encode() or None, tuple(places))

    class Xla:
        module = None

        def of(self, module, read=None):
            return ProgramCost(10 + sum(each in (module or b"").decode() for each in culprits), 9 if module else 10)

    monkeypatch.setattr(hlo_pass, "_improve_in_rounds", found)
    monkeypatch.setattr(hlo_pass.Improved, "estimate_peaks", lambda improved: (10, 10))
    improved = improve_module(b"", Recordings("train_cpu"), ProposalOptions(), Xla())
    assert (improved.module or b"").decode() == kept and len(searched) <= tries
    assert kept == "".join(each.collectives[0].name for each in improved.places if each.replaced)
    assert all("and XLA's needs 10 B" in each.why_left for each in improved.places if not each.replaced) or kept


def test_a_module_is_read_once_for_all_tries(monkeypatch):
    compiler, read = Recordings("train_cpu"), []
    compiler.proofs = Proofs()

    class Reading(hlo_pass._Reading):
        def __init__(self, module, *devices):
            read.append(module)
            super().__init__(module, *devices)

    monkeypatch.setattr(hlo_pass, "_Reading", Reading)
    monkeypatch.setattr(hlo_pass.Improved, "estimate_peaks", lambda improved: (10, 10))
    halves = iter([3, 2, 1, 0])  # tries that are left
    monkeypatch.setattr(hlo_pass, "_halve", lambda names: [names] if next(halves) else [])
    module = compiler.recorded.module
    improved = improve_module(module, compiler, ProposalOptions(), Measured(10, 11))
    assert improved.module is None and next(halves, None) is None and read == [module]


def test_a_budget_below_the_floor_leaves_the_chain():
    improved = improved_module("train_cpu", ProposalOptions(PlanOptions(budget=1)))
    assert improved.module is None and any("budget" in place.why_left for place in improved.places)


def test_a_fragment_of_another_move_is_refused():
    """`scan` moves forth and back, between tiles of other shapes."""

    class Swapped(Recordings):
        def get(self, key):
            if key not in self.asked:
                self.asked.append(key)
            if self.asked.index(key):
                raise SpliceError("it does not compile")
            return Fragment(self.recorded.splices[1].fragment, 0)

    compiler = Swapped("scan_cpu")
    improved = improve_module(compiler.recorded.module, compiler, ProposalOptions())
    assert any("another shape or layout" in place.why_left for place in improved.places)


@pytest.mark.parametrize("name", NAMES)
def test_the_prefilter_sees_collectives(name):
    assert has_collectives(recorded(name).module)
    assert not has_collectives(b"jit_step\x12\x0bmain")


TABLE = np.linspace(-1, 1, 16).astype("float32")


def step(v: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(v * 2, AFTER) + jnp.asarray(TABLE)


@pytest.mark.slow
def test_text_and_proto_become_the_same_better_module() -> None:
    compiled = jax.jit(step).lower(numbered()).compile()
    text = optimized_text(compiled)
    proto = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    ours = [improve_hlo(text), improve_hlo(proto, devices=8)]
    for one in ours:
        traffic = hlo.traffic(hlo.parse(one.text))
        assert (traffic.received_bytes, traffic.launches) == (1792, 1)
        assert one.unscheduled and ModuleProto.decode(one.proto).schedule is None
        assert "{...}" not in one.text and str(TABLE[3])[:8] in one.text
        assert improve_hlo(one.text).proto  # what comes out can be read again, and has nothing to gain
        assert not any(place.replaced for place in improve_hlo(one.text).places)
    assert ours[0].to_dict()["chains"] == ours[1].to_dict()["chains"]
    for devices, message in [(-1, "1 or more"), (3, "has 8 partitions")]:
        with pytest.raises(ProgramError, match=message):
            improve_hlo(text, devices=devices)
    for whole, damaged in [("parameter(0)", "parameter(7)"), ("parameter(0)", "parameter(0), x=" + "{" * 5000)]:
        with pytest.raises(NotationError, match="XLA does not read the HLO text"):  # XLA ends the process.
            improve_hlo(text.replace(whole, damaged))


def module(name: str, number: int) -> bytes:
    """A module of that name, with the number that a process gives it, and lines that it was traced from."""
    message = wire.ProtoMessage([])
    message.set_data(1, name.encode())
    message.set_number(5, number)
    message.set_data(17, f"train.py:{number}".encode())
    return wire.encode_message(message)


TEXT = """HloModule m, num_partitions=4

ENTRY %main {
  %p = f32[2,8]{1,0} parameter(0)
  ROOT %g = f32[8,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
}
"""


class Xla:
    """Hands out a module, and needs as many bytes as the name of the one that it compiles is long."""

    def __init__(self, hands_out: bytes, times: int = 1) -> None:
        self.hands_out = hands_out
        self.times = times
        self.compiled: list[str] = []

    def __call__(self, options: Mapping[str, Any]) -> Any:
        answers = [program_peaks.answer_to_xla(self.hands_out) for _ in range(self.times)]
        instead = answers[0][0] if answers and answers[0] else None
        name = wire.decode_message(instead or self.hands_out).text(1)
        self.compiled.append(name)
        sizes = {"argument_size_in_bytes": 0, "output_size_in_bytes": 0, "alias_size_in_bytes": 0}
        memory = SimpleNamespace(temp_size_in_bytes=len(name), **sizes)
        text = SimpleNamespace(to_string=lambda: TEXT)
        return SimpleNamespace(get_compiled_memory_stats=lambda: memory, hlo_modules=lambda: [text])


def test_both_programs_are_compiled_once() -> None:
    xla, known = Xla(module("plain", 2)), {}
    peaks = ProgramPeaks(module("plain", 1), xla, known)
    costs = [peaks.of(None), peaks.of(module("better", 3)), peaks.of(None)]
    assert [(cost.peak_bytes, cost.received_bytes) for cost in costs] == [(5, 192), (6, 192), (5, 192)]
    later = ProgramPeaks(module("plain", 7), xla, known)
    assert [later.of(None), later.of(module("better", 8))] == costs[:2]
    assert xla.compiled == ["plain", "better"]


@pytest.mark.parametrize("xla", [Xla(module("other", 1)), Xla(module("plain", 1), 2), Xla(module("plain", 1), 0)])
def test_another_module_than_before_is_refused(xla: Xla) -> None:
    with pytest.raises(SpliceError, match="XLA hands out another module"):
        ProgramPeaks(module("plain", 1), xla, {}).of(module("better", 1))


def test_an_error_of_the_compiler_is_refused() -> None:
    def again(options: Mapping[str, Any]) -> Any:
        raise RuntimeError("out of memory\nat length")

    with pytest.raises(SpliceError, match=r"cannot be compiled for its peak \(out of memory\)"):
        ProgramPeaks(module("plain", 1), again, {}).of(None)


def test_other_threads_compile_with_the_pass() -> None:
    assert program_peaks.answer_to_xla(module("plain", 1)) is None


def test_an_error_is_raised_where_the_thread_was_started() -> None:
    def fails() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        CompilingThread[int]("peaks").run(1, fails)

"""The doctor on whole programs: its report has every collective of the compiled module in exactly one place."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard.jax
from reshard import hlo
from reshard.doctor import Place
from reshard.errors import ProgramError
from reshard.hlo.combined import open_sums
from reshard.jax.program_report import report, report_program
from tests.jax.programs import BY_NAME, PROGRAMS
from tests.sampling import sampled

ROOT = Path(__file__).parents[2]
NO_MOVE = {"callback"}  # XLA warns of a constant that it would replicate and cut, but folds it before it runs.
NO_LINE = {"xla-44795"}  # jax 0.12 hoists a gather out of a loop, and nothing around it has a line.
SMALL = {"cond"}
"""Rebuilt without a warning: 16 sums are gathered and cut."""


class Once:
    """A jitted function that is compiled once, for the report and for the test."""

    def __init__(self, program):
        self.program = program
        self.mesh = program.make_mesh()
        with program.entered(self.mesh):
            self.case = program.build(self.mesh)
            self.lowered = self.case.jitted().lower(*self.case.args)
            self.report = report(self)(*self.case.args)

    def lower(self, *args):
        return self

    def compiler_ir(self, dialect):
        return self.lowered.compiler_ir(dialect)

    @cached_property
    def compiled(self):
        return self.lowered.compile()

    def compile(self):
        return self.compiled


@cache
def compiled_once(name):
    return Once(BY_NAME[name])


NO_LAYOUTS = {
    "dnsjax-snapshot", "heat-1932", "join-and-flip", "kv-cache", "lorrax-xy-swap", "order-ops",
    "three-by-two", "transformer-train", "uneven",
}  # fmt: skip
"""They have a place that is not a move between two layouts: padding, flips, windows, several arrays, parts of one."""


NAMES = [program.name for program in PROGRAMS]
FAST = ["jax-21562", "uneven"]
SLOW = [*FAST, *(name for name in NAMES[4::9] if name not in FAST)]


@pytest.mark.parametrize(
    "name",
    [*sampled(SLOW, *FAST), *sampled([name for name in NAMES if name not in SLOW], rest=pytest.mark.sweep)],
)
def test_a_program(name: str):
    once = compiled_once(name)
    is_what_the_module_does(once)
    says_what_is_rebuilt(once)
    for place in once.report.places:
        holds(name, place)


def is_what_the_module_does(once: Once):
    """Every collective is in one place, each array of a combined sum in its own, and the totals are the compiler's."""
    module = hlo.parse(once.compiled.as_text())
    opened = hlo.collectives(open_sums(module), every_branch=True)
    wanted = [(c.kind, c.name, c.received_bytes, c.times) for c in opened]
    places = once.report.places
    reported = [(c.kind, c.name, c.received_bytes, c.times) for place in places for c in place.collectives]
    assert Counter(reported) == Counter(wanted)
    assert once.report.traffic == hlo.traffic(module)
    assert once.report.devices == once.program.device_count
    assert once.report.compiled.temp_bytes == once.compiled.memory_analysis().temp_size_in_bytes
    assert bool(places) == once.program.moves
    live, compiled = once.report.memory.peak_bytes, once.report.compiled.peak_bytes
    assert abs(live - compiled) < 0.2 * compiled + 2048  # the compiler aligns each buffer
    accounts = once.report.accounts()
    assert accounts.received_bytes == once.report.received_bytes >= once.report.wasted_bytes


def says_what_is_rebuilt(once: Once):
    """The report lists rebuilt arrays exactly where XLA warns of them."""
    name = once.program.name
    assert bool(once.report.rebuilt) == ((once.program.remat and name not in NO_MOVE) or name in SMALL)
    for place in once.report.rebuilt:
        tiles = [tile for move in place.moves for tile in (move.before, move.after) if tile is not None]
        assert place.largest.elements > max(tile.elements for tile in tiles)
        wholes = [np.prod(move.source.shape) for move in place.moves if move.whole]
        assert place.largest.elements >= max(wholes, default=0)


def holds(name: str, place: Place):
    """The figures and layouts of a place are consistent."""
    assert 0 <= place.needed_bytes <= place.received_bytes
    assert 0 <= place.temp_bytes <= place.peak_bytes
    assert name in NO_LINE or Path(place.where.file).is_relative_to(ROOT / "tests")
    for move in place.moves:
        if move.source is None:
            assert not move.exact and move.plan is None
            assert place.kind != "reshard" or name in NO_LAYOUTS
            continue
        assert move.exact and move.source.shape == move.target.shape and move.source.dtype == move.target.dtype
        assert np.prod(move.target.tile_shape) <= move.after.elements  # more only by padding
        if move.plan is not None:
            assert (move.plan.source, move.plan.target) == (move.source, move.target)
            assert move.plan.received_bytes >= move.needed_bytes == move.plan.lower_bound_bytes


@pytest.mark.slow
def test_layouts_are_those_of_the_programs_constraints():
    """Programs whose constraints alone, without the HLO, say what moves on a line."""
    wanted = {
        "jax-21562": ("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]"),
        "jax-18591": ("f32[{x}{y}4, 16]", "f32[32, {x}4]"),
        "lorrax-vq": ("c64[{x}{y}, 8, 12]", "c64[8, {x}2, 12]"),
        "lorrax-wsolve": ("c64[8, {x}3, {y}6]", "c64[{x}{y}, 12, 12]"),
        "uneven": ("f32[{x}3/10, 17]", "f32[10, {x}{y}3/17]"),
        "dnsjax-snapshot": ("c64[3, 16, {np0}2, {np1}2]", "c64[3, {np0}{np1}2, 8, 4]"),
        "adi-scan": ("f32[{p}2, 16]", "f32[16, {p}2]"),
    }
    for name, layouts in wanted.items():
        places = compiled_once(name).report.places
        assert layouts in [(str(move.source), str(move.target)) for place in places for move in place.moves], name


def test_the_two_gathers_of_jax_21562():
    (place,) = compiled_once("jax-21562").report.places
    tile = 16 * 16 * 16 * 4 // 8
    assert (place.kind, place.does, place.times) == ("reshard", "2 all_gather", 1)
    assert (place.received_bytes, place.needed_bytes, place.exact) == (7 * tile, tile * 7 // 8, True)
    assert place.rebuilds_whole and place.largest.dims == (16, 16, 16)
    assert [step.kind for plan in place.plans for step in plan.steps] == ["all_to_all"]
    assert (place.planned_bytes, place.saved_bytes) == (1792, 12544)
    lines = Path(place.where.file).read_text().splitlines()
    assert lines[place.where.line - 1].strip() == "d = with_sharding_constraint(d, second)"


def test_nothing_to_report():
    nothing = compiled_once("no-reshard").report
    assert nothing.places == () and str(nothing).endswith("no data moves between devices")


@pytest.mark.slow
def test_a_loop_counts_each_time():
    places = compiled_once("adi-scan").report.places
    assert {place.times for place in places if place.kind == "reshard"} == {5}
    assert sum(place.runs * place.received_bytes for place in places) == compiled_once("adi-scan").report.received_bytes


def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


def test_a_report_needs_only_shapes_and_options():
    before, after = (NamedSharding(mesh(), spec) for spec in (P("x"), P(None, "x")))
    argument = jax.ShapeDtypeStruct((64, 32), "float32", sharding=before)
    (place,) = report(lambda a: a * 2, out_shardings=after)(argument).places
    tile = 64 * 32 * 4 // 4
    assert (place.does, place.received_bytes, place.needed_bytes) == ("all_to_all", tile * 3 // 4, tile * 3 // 4)
    assert [(str(m.source), str(m.target)) for m in place.moves] == [("f32[{x}16, 32]", "f32[64, {x}8]")]


def test_a_network_makes_the_plans():
    case = compiled_once("jax-21562").case
    priced = report(case.f, network="tpu-v5p", **case.jit)(*case.args)
    assert all(plan.seconds is not None for place in priced.places for plan in place.plans)


def test_after_the_pass_nothing_is_rebuilt():
    case = compiled_once("jax-21562").case
    after = report(reshard.jax.jit(case.f, **case.jit))(*case.args)
    assert (after.received_bytes, after.rebuilt, after.wasted_bytes) == (1792, (), 0)


@pytest.mark.parametrize("name", sampled(["jax-21562", "uneven", "openpi-193"], "jax-21562"))
def test_a_program_in_a_file_is_the_same_program(name: str):
    once = compiled_once(name)
    text = once.lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=True)
    assert report_program(text).to_dict() == once.report.to_dict()


def test_a_portable_artifact():
    case = compiled_once("jax-21562").case
    artifact = jax.export.export(jax.jit(case.f, **case.jit))(*case.args).mlir_module_serialized
    (place,) = report_program(artifact).places
    assert (place.received_bytes, place.needed_bytes, place.where.line) == (14336, 1792, 23)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("module {", "not StableHLO"),
        (b"ML\xefR\x00nonsense", "not StableHLO"),
        ("module { func.func private @main() }", "no function @main"),
        ("module { func.func @f() { return } func.func @g() { return } }", "@f, @g to choose from"),
        (
            "module attributes {mhlo.num_partitions = 512 : i32} { func.func @main() { return } }",
            "512 partitions, and this process 8 cpu devices",
        ),
        (
            'module { func.func @main() { "stablehlo.custom_call"() '
            '{call_target_name = "none", has_side_effect = true} : () -> () return } }',
            "does not compile",
        ),
    ],
)
def test_invalid_programs_are_refused(program, message):
    with pytest.raises(ProgramError, match=re.escape(message)):
        report_program(program)


def test_a_program_for_fewer_devices_than_there_are():
    program = (
        "module @two attributes {mhlo.num_partitions = 2 : i32} "
        "{ func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> } }"
    )
    assert report_program(program).devices == 2


def test_an_unknown_topology_is_refused():
    with pytest.raises(ProgramError, match="topology 'v99:1' of platform 'tpu'"):
        report_program("module { func.func @main() { return } }", platform="tpu", topology="v99:1")


@pytest.mark.skipif(find_spec("libtpu") is None, reason="install jax[tpu] to compile for TPUs")
def test_a_function_is_reported_for_devices_that_are_not_here():
    """A program that is compiled ahead of time has no devices of this process; its shardings name them."""
    chips = topologies.get_topology_desc("v5p:2x2x1", platform="tpu").devices
    mesh = Mesh(np.array(chips).reshape(4), ("x",))
    rows, columns = (NamedSharding(mesh, spec) for spec in (P("x"), P(None, "x")))
    argument = jax.ShapeDtypeStruct((512, 512), "float32", sharding=rows)
    assert report(lambda v: v + 1, out_shardings=columns)(argument).received_bytes == 3 * 512 * 512 * 4 // 16


@pytest.mark.parametrize("given", ["step.py", 3, None])
def test_what_is_no_function(given):
    for call in (reshard.jax.report, reshard.jax.jit)[: 1 if given is None else 2]:  # Without one, jit is a decorator.
        with pytest.raises(ProgramError, match="not a function; give one"):
            call(given)

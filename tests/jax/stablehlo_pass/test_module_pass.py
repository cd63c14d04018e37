"""The pass on modules as text, artifact and object: what it takes, leaves, reports and refuses."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.extend import mlir
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import NetworkError, ProgramError
from reshard.jax.stablehlo_pass.module_pass import transform
from tests.jax.modules import COLUMNS, MESH, SPLIT, SWAPPED, TYPE, constraint, count, layouts, module, uneven


def test_a_constraint_becomes_our_collective() -> None:
    result = transform(module(constraint(COLUMNS)))
    assert layouts(result.report) == [("f32[{x}4, {y}8]", "f32[16, {y}{x}2]", True)]
    assert count(result.text, "sdy.manual_computation") == count(result.text, "stablehlo.all_to_all") == 1
    assert 'in_shardings=[<@mesh, [{"x"}, {"y"}]>] out_shardings=[<@mesh, [{}, {"y", "x"}]>]' in result.text
    assert "sdy.reshard" not in result.text and "reshard." not in result.text


def test_the_plan_is_that_of_the_planner() -> None:
    (reshard,) = transform(module(constraint(COLUMNS))).report.reshards
    assert reshard.source is not None and reshard.target is not None
    assert reshard.plan == rs.plan(reshard.source, reshard.target)
    assert reshard.explicit and not reshard.why


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ('[{"x"}, {}]', "[{}, {}]", "XLA does it as well"),  # a gather
        ('[{"x"}, {}]', '[{"x"}, {"y"}]', "XLA does it as well"),  # a slice
        ('[{"x"}, {"y"}]', '[{"x"}, {"y"}]', "nothing moves"),
    ],
)
def test_what_xla_does_as_well_is_left(source: str, target: str, why: str) -> None:
    result = transform(module(constraint(target), source))
    assert [(r.taken, r.why) for r in result.report.reshards] == [(False, why)]
    assert "sdy.manual_computation" not in result.text
    assert constraint(target).split(" = ")[1] in result.text.replace("%arg0", "%a")


def test_a_move_that_an_operation_requires() -> None:
    """An elementwise operation on operands of different shardings: no user wrote the second reshard."""
    body = f"""{constraint(SWAPPED, result="%b")}
      %r = stablehlo.add %a, %b {{sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{{"x"}}, {{"y"}}]>]>}} : {TYPE}"""
    result = transform(module(body))
    assert [(r.explicit, r.taken) for r in result.report.reshards] == [(True, True), (False, True)]
    assert layouts(result.report)[1] == ("f32[{y}8, {x}4]", "f32[{x}4, {y}8]", True)


def test_sub_axes() -> None:
    """Shardy does not let results keep sub-axes, so a gather follows."""
    result = transform(module(constraint('[{}, {"x":(2)2, "y"}]'), '[{"x":(1)2}, {}]'))
    assert layouts(result.report)[0] == ("f32[{x:(1)2}8, 16]", "f32[16, {x:(2)2}{y}4]", True)
    assert '<@mesh, [{}, {"x":(2)2, "y"}]>' in result.text


def test_meshes_of_the_same_devices() -> None:
    meshes = MESH + '\nsdy.mesh @other = <["a"=2, "b"=4]>'
    text = module(constraint('[{"b"}, {}]'), mesh=meshes).replace("%a <@mesh", "%a <@other")
    result = transform(text)
    assert layouts(result.report) == [("f32[{x}4, {y}8]", "f32[{b}4, 16]", True)]


def test_a_mesh_with_an_order_of_its_own_is_left() -> None:
    mesh = 'sdy.mesh @mesh = <["x"=4, "y"=2], device_ids=[7, 6, 5, 4, 3, 2, 1, 0]>'
    (reshard,) = transform(module(constraint(COLUMNS), mesh=mesh)).report.reshards
    assert not reshard.taken and "order" in reshard.why


FUNCTION = """func.func %s(%%a: tensor<16x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>})
    -> tensor<16x16xf32> { %s }"""
MOVES = """%b = sdy.sharding_constraint %a <@mesh, [{}, {"x"}]> : tensor<16x16xf32> return %b : tensor<16x16xf32>"""
CALLS = "%b = call @inner(%a) : (tensor<16x16xf32>) -> tensor<16x16xf32> return %b : tensor<16x16xf32>"


@pytest.mark.parametrize(
    ("functions", "name"),
    [
        ([("@step", MOVES)], "step"),
        ([("private @step", MOVES)], "step"),
        ([("public @step", CALLS), ("private @inner", MOVES)], "step"),
        ([("public @other", MOVES), ("@main", MOVES)], "main"),
        ([("private @main", MOVES)], "main"),
    ],
)
def test_the_program_is_main_or_the_only_public_function(functions: list[tuple[str, str]], name: str) -> None:
    result = transform('sdy.mesh @mesh = <["x"=4]>\n' + "\n".join(FUNCTION % each for each in functions))
    assert "all_to_all" in str(result.report) and f"@{name}(" in result.text
    assert name == "main" or "@main" not in result.text


@pytest.mark.parametrize(
    ("functions", "why"),
    [
        ([("@f", MOVES), ("public @g", MOVES)], "@f, @g to choose from; name one of them main"),
        ([("private @f", MOVES), ("private @g", MOVES)], "@f, @g to choose from"),
        ([("@f", MOVES), ("private @main", "")], "no function @main with a body"),
        ([("@main", CALLS), ("private @inner", CALLS)], "@inner, @main call each other in a circle"),
    ],
)
def test_a_module_without_one_program_is_refused(functions: list[tuple[str, str]], why: str) -> None:
    """Shardy would end the process."""
    text = 'sdy.mesh @mesh = <["x"=4]>\n' + "\n".join(FUNCTION % each for each in functions).replace("{  }", "")
    with pytest.raises(ProgramError, match=why):
        transform(text)


def test_a_move_to_more_devices_is_left() -> None:
    moves = '%b = sdy.sharding_constraint %a <@more, [{}, {"x"}]> : tensor<16x16xf32> return %b : tensor<16x16xf32>'
    meshes = 'sdy.mesh @mesh = <["x"=4]>\nsdy.mesh @more = <["x"=16]>\n'
    (reshard,) = transform(meshes + FUNCTION % ("@main", moves)).report.reshards
    assert not reshard.taken and reshard.why == "it goes from 4 devices to 16 others; a program has one set of devices"


def test_budget_and_network_reach_the_planner() -> None:
    text = module(constraint(COLUMNS))
    (reshard,) = transform(text, budget=300).report.reshards
    assert (
        reshard.plan is not None
        and 0 < reshard.plan.peak_bytes <= 300 < rs.plan(reshard.plan.source, reshard.plan.target).peak_bytes
    )
    (reshard,) = transform(text, budget=10).report.reshards
    assert not reshard.taken and "budget" in reshard.why
    with pytest.raises(NetworkError, match="no link for axis"):
        transform(text, network=rs.Network("short", inner=(1e-6, 1e9), domain=2))


@pytest.mark.parametrize("program", ["what", b"what", b"ML\xefRwhat", 3, None, "module {}", "module {" + "(" * 5000])
def test_invalid_programs_are_refused(program: Any) -> None:
    with pytest.raises(ProgramError):
        transform(program)


def test_what_would_end_or_hold_up_the_process_is_refused_or_left() -> None:
    text = module(constraint(SPLIT))
    with pytest.raises(ProgramError, match="4294967296 devices; the pass takes at most"):
        transform(text.replace('"x"=4', '"x"=2147483648'))
    large = text.replace("16x16", "16384x16384")
    (reshard,) = transform(large, budget=402653184 + 4096).report.reshards
    assert not reshard.taken and "launches; a larger budget needs fewer" in reshard.why


def test_a_program_that_shardy_refuses_is_an_error() -> None:
    with pytest.raises(ProgramError, match="static shape"):
        transform(module(constraint(SPLIT)).replace("16x16", "?x16"))


def test_dtypes() -> None:
    names = ["i1", "ui8", "i32", "ui64", "bf16", "f8E4M3FN", "f64", "complex<f64>", "i4"]
    for name in names:
        result = transform(uneven('[{"x"}, {}]', SPLIT, 10).replace("xf32>", f"x{name}>"))
        assert [r.taken for r in result.report.reshards][1], name
        assert f"tensor<12x16x{name}>" in result.text


# ---- programs of jax -------------------------------------------------------------------------------


def mesh() -> JaxMesh:
    return JaxMesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


def program(v: jax.Array) -> jax.Array:
    moved = jax.lax.with_sharding_constraint(v, NamedSharding(mesh(), P(None, ("y", "x"))))
    return moved + 1


def argument() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((16, 16), np.float32, sharding=NamedSharding(mesh(), P("x", "y")))


def test_the_users_line_and_operation() -> None:
    (reshard,) = transform(jax.jit(program).lower(argument()).compiler_ir("stablehlo")).report.reshards
    line = program.__code__.co_firstlineno + 1
    assert reshard.where == f"{__file__}:{line}"
    assert reshard.operation == "jit(program)/sharding_constraint"


def test_a_module_is_not_changed() -> None:
    before = jax.jit(program).lower(argument()).compiler_ir("stablehlo")
    text = str(before)
    assert len(transform(before).report.taken) == 1
    assert str(before) == text


def test_an_exported_program_runs() -> None:
    exported = jax.export.export(jax.jit(program))(argument())
    result = transform(exported)
    assert result.exported is not None and len(result.report.taken) == 1
    x = jax.device_put(np.arange(256, dtype="f").reshape(16, 16), argument().sharding)
    compiled = jax.jit(result.exported.call).lower(x).compile()
    assert "all-to-all" in compiled.as_text() and "all-gather" not in compiled.as_text()
    np.testing.assert_array_equal(compiled(x), np.asarray(x) + 1)


def test_an_artifact_is_read_and_written() -> None:
    exported = jax.export.export(jax.jit(program))(argument())
    result = transform(exported.mlir_module_serialized)
    assert len(result.report.taken) == 1 and result.exported is None
    twice = transform(result.to_bytes())
    assert twice.report.taken == () and count(twice.text, "stablehlo.all_to_all") == 1
    assert count(twice.text, "sdy.manual_computation") == 1


def test_shardings_as_attributes_for_xla_are_refused() -> None:
    """An artifact of older readers has no Shardy in it: the pass would find nothing there, which would be wrong."""
    plain = jax.jit(program).lower(argument()).compiler_ir("stablehlo")
    with pytest.raises(ProgramError, match="attributes for XLA"):
        transform(mlir.serialize_portable_artifact(plain, "1.9.0"))

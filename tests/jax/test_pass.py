"""The pass on modules as text, artifact and object: what it takes, what it leaves and says, what it refuses."""

from __future__ import annotations

import re
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
from reshard.jax.module_pass import transform
from reshard.jax.pass_report import PassReport, Reshard

MESH = 'sdy.mesh @mesh = <["x"=4, "y"=2]>'
TYPE = "tensor<16x16xf32>"
COLUMNS, ROWS, SWAPPED, SPLIT = '[{}, {"y", "x"}]', '[{"y", "x"}, {}]', '[{"y"}, {"x"}]', '[{}, {"x"}]'


def module(body: str, source: str = '[{"x"}, {"y"}]', mesh: str = MESH) -> str:
    """A program of one argument `%a` whose result is `%r`."""
    return f"""{mesh}
      func.func public @main(%a: {TYPE} {{sdy.sharding = #sdy.sharding<@mesh, {source}>}}) -> {TYPE} {{
        {body}
        return %r : {TYPE}
      }}"""


def constraint(target: str, value: str = "%a", result: str = "%r") -> str:
    return f"{result} = sdy.sharding_constraint {value} <@mesh, {target}> : {TYPE}"


def moves(report: PassReport) -> list[tuple[str, str, bool]]:
    return [(str(r.source), str(r.target), r.taken) for r in report.reshards]


def count(text: str, name: str) -> int:
    return len(re.findall(rf"\b{name}\b", text))


def test_a_constraint_becomes_our_collective() -> None:
    found = transform(module(constraint(COLUMNS)))
    assert moves(found.report) == [("f32[{x}4, {y}8]", "f32[16, {y}{x}2]", True)]
    assert count(found.text, "sdy.manual_computation") == count(found.text, "stablehlo.all_to_all") == 1
    assert 'in_shardings=[<@mesh, [{"x"}, {"y"}]>] out_shardings=[<@mesh, [{}, {"y", "x"}]>]' in found.text
    assert "sdy.reshard" not in found.text and "reshard." not in found.text


def test_the_plan_is_that_of_the_planner() -> None:
    (reshard,) = transform(module(constraint(COLUMNS))).report.reshards
    assert reshard.source is not None and reshard.target is not None
    assert reshard.plan == rs.plan(reshard.source, reshard.target)
    assert reshard.asked and not reshard.why


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ('[{"x"}, {}]', "[{}, {}]", "XLA does it as well"),  # a gather
        ('[{"x"}, {}]', '[{"x"}, {"y"}]', "XLA does it as well"),  # a slice
        ('[{"x"}, {"y"}]', '[{"x"}, {"y"}]', "nothing moves"),
    ],
)
def test_what_xla_does_as_well_is_left(source: str, target: str, why: str) -> None:
    found = transform(module(constraint(target), source))
    assert [(r.taken, r.why) for r in found.report.reshards] == [(False, why)]
    assert "sdy.manual_computation" not in found.text
    assert constraint(target).split(" = ")[1] in found.text.replace("%arg0", "%a")


def test_a_move_that_the_operations_ask_for() -> None:
    """An elementwise operation on operands that lie differently: nobody wrote a constraint on the second one."""
    body = f"""{constraint(SWAPPED, result="%b")}
      %r = stablehlo.add %a, %b {{sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{{"x"}}, {{"y"}}]>]>}} : {TYPE}"""
    found = transform(module(body))
    assert [(r.asked, r.taken) for r in found.report.reshards] == [(True, True), (False, True)]
    assert moves(found.report)[1] == ("f32[{y}8, {x}4]", "f32[{x}4, {y}8]", True)


def test_a_chain_is_one_move_unless_the_user_asked_for_the_stop() -> None:
    """Propagation gives the sine the constraint's sharding, and insertion moves its result there: one move."""
    sine = f"%b = stablehlo.sine %a : {TYPE}\n{constraint(COLUMNS, '%b')}"
    assert moves(transform(module(sine)).report) == [("f32[{x}4, {y}8]", "f32[16, {y}{x}2]", True)]
    stop = f"{constraint(COLUMNS, result='%b')}\n{constraint(ROWS, '%b')}"
    assert [row[1] for row in moves(transform(module(stop)).report)] == ["f32[16, {y}{x}2]", "f32[{y}{x}2, 16]"]


def test_one_value_is_moved_once_to_one_place() -> None:
    body = f"""{constraint(SWAPPED, result="%b")}
      {constraint(SWAPPED, result="%c")}
      %r = stablehlo.add %b, %c : {TYPE}"""
    found = transform(module(body))
    assert count(found.text, "sdy.manual_computation") == 1 and len(found.report.taken) == 1


def test_sub_axes() -> None:
    """Shardy lets no result keep sub-axes: a gather follows."""
    found = transform(module(constraint('[{}, {"x":(2)2, "y"}]'), '[{"x":(1)2}, {}]'))
    assert moves(found.report)[0] == ("f32[{x:(1)2}8, 16]", "f32[16, {x:(2)2}{y}4]", True)
    assert '<@mesh, [{}, {"x":(2)2, "y"}]>' in found.text


def uneven(first: str, second: str, size: int) -> str:
    """A move between uneven tiles, of an array that comes and goes whole."""
    steps = constraint(first, "%a", "%b"), constraint(second, "%b", "%c"), constraint("[{}, {}]", "%c")
    return module("\n".join(steps), "[{}, {}]").replace("16x16", f"{size}x16")


def test_uneven_tiles_are_padded_around_the_move() -> None:
    found = transform(uneven('[{"x"}, {}]', SPLIT, 10))
    assert moves(found.report)[1] == ("f32[{x}3/10, 16]", "f32[10, {x}4]", True)
    assert re.search(r"manual_computation.*(\n.*)*: \(tensor<12x16xf32>\) -> tensor<10x16xf32>", found.text)


def test_the_same_padding_is_moved_along() -> None:
    """30 in 4 pieces of 8 and in 8 of 4 is 32 both times: one all-to-all of that."""
    found = transform(uneven('[{"x"}, {"y"}]', '[{"x", "y"}, {}]', 30))
    (reshard,) = found.report.taken
    assert (str(reshard.source), str(reshard.target)) == ("f32[{x}8/30, {y}8]", "f32[{x}{y}4/30, 16]")
    assert re.search(r"manual_computation.*(\n.*)*: \(tensor<32x16xf32>\) -> tensor<32x16xf32>", found.text)
    assert "[0:30, 0:16]" in found.text


def test_meshes_of_the_same_devices() -> None:
    meshes = MESH + '\nsdy.mesh @other = <["a"=2, "b"=4]>'
    text = module(constraint('[{"b"}, {}]'), mesh=meshes).replace("%a <@mesh", "%a <@other")
    found = transform(text)
    assert moves(found.report) == [("f32[{x}4, {y}8]", "f32[{b}4, 16]", True)]


def test_a_mesh_with_an_order_of_its_own_is_left() -> None:
    mesh = 'sdy.mesh @mesh = <["x"=4, "y"=2], device_ids=[7, 6, 5, 4, 3, 2, 1, 0]>'
    (reshard,) = transform(module(constraint(COLUMNS), mesh=mesh)).report.reshards
    assert not reshard.taken and "order" in reshard.why


def test_channels_are_numbered_anew() -> None:
    body = f"{constraint(COLUMNS, result='%b')}\n{constraint(SWAPPED, '%b')}"
    handles = re.findall(r"channel_handle<handle = (\d+)", transform(module(body)).text)
    assert len(handles) >= 2 and len(set(handles)) == len(handles)


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


def test_complex_and_large_constants_survive() -> None:
    """MLIR's Python has no complex constants: touching one ends the process."""
    numbers = ", ".join(f"({at}.0, -{at}.5)" for at in range(16))
    body = f"""%k = stablehlo.constant dense<[{numbers}]> : tensor<16xcomplex<f32>>
      %w = stablehlo.broadcast_in_dim %k, dims = [0] : (tensor<16xcomplex<f32>>) -> {TYPE}
      %b = stablehlo.multiply %a, %w : {TYPE}
      {constraint(COLUMNS, "%b")}"""
    text = transform(module(body).replace("xf32>", "xcomplex<f32>>").replace("complex<complex<f32>>", "complex<f32>"))
    assert "sdy.constant" not in text.text and "elided" not in text.text and "-1.550000e+01" in text.text
    assert len(text.report.taken) == 1


@pytest.mark.parametrize("program", ["what", b"what", b"ML\xefRwhat", 3, None])
def test_what_is_no_program_is_refused(program: Any) -> None:
    with pytest.raises(ProgramError):
        transform(program)


def test_what_shardy_refuses_is_an_error() -> None:
    with pytest.raises(ProgramError, match="static shape"):
        transform(module(constraint(SPLIT)).replace("16x16", "?x16"))


def test_dtypes() -> None:
    names = ["i1", "ui8", "i32", "ui64", "bf16", "f8E4M3FN", "f64", "complex<f64>", "i4"]
    for name in names:
        found = transform(uneven('[{"x"}, {}]', SPLIT, 10).replace("xf32>", f"x{name}>"))
        assert [r.taken for r in found.report.reshards][1], name
        assert f"tensor<12x16x{name}>" in found.text


# ---- what jax makes --------------------------------------------------------------------------------


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
    found = transform(exported)
    assert found.exported is not None and len(found.report.taken) == 1
    x = jax.device_put(np.arange(256, dtype="f").reshape(16, 16), argument().sharding)
    compiled = jax.jit(found.exported.call).lower(x).compile()
    assert "all-to-all" in compiled.as_text() and "all-gather" not in compiled.as_text()
    np.testing.assert_array_equal(compiled(x), np.asarray(x) + 1)


def test_an_artifact_is_read_and_written() -> None:
    exported = jax.export.export(jax.jit(program))(argument())
    found = transform(exported.mlir_module_serialized)
    assert len(found.report.taken) == 1 and found.exported is None
    twice = transform(found.to_bytes())
    assert twice.report.taken == () and count(twice.text, "stablehlo.all_to_all") == 1
    assert count(twice.text, "sdy.manual_computation") == 1


def test_shardings_that_were_made_xlas_are_refused() -> None:
    """An artifact of older readers has no Shardy in it: nothing would be found there, and that would be wrong."""
    plain = jax.jit(program).lower(argument()).compiler_ir("stablehlo")
    with pytest.raises(ProgramError, match="attributes for XLA"):
        transform(mlir.serialize_portable_artifact(plain, "1.9.0"))


def test_reports_are_plain_data() -> None:
    report = transform(module(constraint(COLUMNS))).report
    (data,) = report.to_dict()["reshards"]
    assert (data["source"], data["taken"], data["plan"]["received_bytes"]) == ("f32[{x}4, {y}8]", True, 96)
    left = report.given_up("no")
    assert [(r.taken, r.why) for r in left.reshards] == [(False, "no")]
    assert left.left == left.reshards and report.left == ()
    assert str(left.reshards[0]).endswith("left, no")
    assert PassReport((Reshard("", "", False, None, None, None, False, "why"),)).left  # what cannot be planned is left

"""Modules with operations of Shardy that XLA does not import: what is compiled, what it computes, what is reported."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.interpreters.mlir import make_ir_context
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.xla_client import HloSharding

import reshard as rs
from reshard.jax import transform
from reshard.jax.program_report import compile_options, report_program
from reshard.jax.stablehlo_pass.shardy import make_compilable
from reshard.lower.to_stablehlo import ir, list_operations
from reshard.types.meaning import meaning
from tests.sampling import sampled

MESHES = """
  sdy.mesh @mesh = <["x"=4, "y"=2]>
  sdy.mesh @empty = <[]>
  sdy.mesh @single = <["z"=1]>
"""
TYPE = "tensor<12x20xf32>"
SOURCES = {'[{"y"}, {"x"}]': P("y", "x"), '[{}, {"x"}]': P(None, "x"), "[{}, {}]": P()}
ADD = f"%r = stablehlo.add %b, %b : {TYPE}"
BLOCK = '"f"(%a) {0} (%v: tensor<12x20xf32>) {{ %s = stablehlo.sine %v : {1} sdy.return %s : {1} }} : ({1}) -> {1}'
"""A named computation, with or without shardings."""


def program(body: str, source: str = '[{"y"}, {"x"}]', partitions: int = 8) -> str:
    argument = f"%a: {TYPE} {{sdy.sharding = #sdy.sharding<@mesh, {source}>}}"
    return (
        f"module @m attributes {{mhlo.num_partitions = {partitions} : i32}} {{ {MESHES}"
        f"func.func public @main({argument}) -> {TYPE} {{ {body}\n return %r : {TYPE} }} }}"
    )


def moved(operation: str, sharding: str) -> str:
    return program(f"%b = sdy.{operation} {sharding} : {TYPE}\n{ADD}")


ROWS = '[{}, {"x"}]'
MOVES = {
    "reshard": moved("reshard %a", '<@mesh, [{"x"}, {}]>'),
    "reshard, its mesh inline": moved("reshard %a", '<mesh<["x"=4, "y"=2]>, [{"x"}, {}]>'),
    "all_gather": moved('all_gather [{"y"}, {}] %a', f"out_sharding=<@mesh, {ROWS}>"),
    "all_to_all": moved('all_to_all [{"x"}: 1->0] %a', 'out_sharding=<@mesh, [{"y", "x"}, {}]>'),
    "collective_permute": moved("collective_permute %a", 'out_sharding=<@mesh, [{"x":(1)2}, {"x":(2)2, "y"}]>'),
    "inside a shard_map": program(
        f"""%r = sdy.manual_computation(%a) in_shardings=[<@mesh, {ROWS}>] out_shardings=[<@mesh, {ROWS}>]
          manual_axes={{"x"}} (%v: tensor<12x5xf32>) {{
            %w = sdy.reshard %v <@mesh, [{{"y"}}, {{}}]> : tensor<12x5xf32>
            %s = stablehlo.add %w, %w : tensor<12x5xf32>
            sdy.return %s : tensor<12x5xf32> }} : ({TYPE}) -> {TYPE}"""
    ),
    "the result": program(f'%r = sdy.reshard %a <@mesh, [{{"x"}}, {{}}]> : {TYPE}'),
    "named computation, sharded": program(
        "%r = sdy.named_computation<"
        + BLOCK.format('in_shardings=[<@mesh, [{"y"}, {"x"}]>] out_shardings=[<@mesh, [{"x"}, {}]>]', TYPE).replace(
            '"f"', '"f">'
        )
    ),
    "to an empty mesh": moved("reshard %a", "<@empty, [{}, {}]>"),
    "to a mesh of one device": moved("reshard %a", '<@single, [{"z"}, {}]>'),
}
STILL = {
    "all_slice": program(
        f'%b = sdy.all_slice [{{"y"}}, {{}}] %a out_sharding=<@mesh, [{{"y"}}, {{"x"}}]> : {TYPE}\n{ADD}', ROWS
    ),
    "all_reduce": program(f'%b = sdy.all_reduce {{"y"}} %a out_sharding=<@mesh, {ROWS}> : {TYPE}\n{ADD}', ROWS),
    "reduce_scatter": program(
        f'%b = sdy.reduce_scatter [{{"y"}}, {{}}] %a out_sharding=<@mesh, [{{"y"}}, {{"x"}}]> : {TYPE}\n{ADD}', ROWS
    ),
    "replicated_to_unreduced": program(
        f'%b = sdy.replicated_to_unreduced {{"y"}} %a out_sharding=<@mesh, {ROWS}, unreduced={{"y"}}> : {TYPE}\n{ADD}',
        ROWS,
    ),
    "sharded_to_unreduced": moved(
        'sharded_to_unreduced [{"y"}, {}] %a', f'out_sharding=<@mesh, {ROWS}, unreduced={{"y"}}>'
    ),
    "data_flow_edge": program(f"%b = sdy.data_flow_edge %a sharding=<@mesh, [{{}}, {{}}]> : {TYPE}\n{ADD}"),
    "propagation_barrier": program(f"%b = sdy.propagation_barrier %a allowed_direction=FORWARD : {TYPE}\n{ADD}"),
    "sharding_group": program(f"sdy.sharding_group %a group_id=0 : {TYPE}\n%r = stablehlo.add %a, %a : {TYPE}"),
    "constant": program(f"%b = sdy.constant dense<1.0> : {TYPE}\n%r = stablehlo.add %a, %b : {TYPE}"),
    "named computation": program(f"%r = sdy.named_computation<{BLOCK.format('', TYPE)}".replace('"f"', '"f">')),
    "named computation in another": program(
        f"""%r = sdy.named_computation<"g">(%a) (%u: {TYPE}) {{
          %w = sdy.named_computation<{BLOCK.format("", TYPE)}
          %t = stablehlo.add %w, %u : {TYPE}
          sdy.return %t : {TYPE} }} : ({TYPE}) -> {TYPE}""".replace('"f"(%a)', '"f">(%u)')
    ),
    "an empty mesh": program(f"%b = sdy.reshard %a <@empty, [{{}}, {{}}]> : {TYPE}\n{ADD}", "[{}, {}]"),
    "a mesh of one device": program(f'%b = sdy.reshard %a <@single, [{{"z"}}, {{}}]> : {TYPE}\n{ADD}', "[{}, {}]"),
}
SINE = ("named computation, sharded", "named computation")


def expected(name: str, a: np.ndarray) -> np.ndarray:
    if name == "named computation in another":
        return np.sin(a) + a
    return np.sin(a) if name in SINE else a if name == "the result" else a + 1 if name == "constant" else a + a


def run(text: str, a: np.ndarray) -> list[tuple[np.ndarray, tuple[tuple[int, ...], ...]]]:
    """The tiles of a program's result, each with the global indices of its rows and columns."""
    module: Any = ir.Module.parse(text, make_ir_context())
    make_compilable(module)
    devices = jax.devices()[:8]
    executable: Any = devices[0].client.compile_and_load(module, *compile_options(devices, True))
    spec = next(spec for source, spec in SOURCES.items() if f"#sdy.sharding<@mesh, {source}>" in text)
    place = NamedSharding(JaxMesh(np.array(devices).reshape(4, 2), ("x", "y")), spec)
    (tiles,) = executable.execute_sharded([jax.device_put(a, place)]).disassemble_into_single_device_arrays()
    (sharding,) = executable.get_output_shardings()
    layout = rs.Layout.from_hlo(str(HloSharding.from_proto(sharding)), a.shape, "f32", num_devices=8)
    return [(np.asarray(tile), meaning(layout, device)) for device, tile in enumerate(tiles)]


@pytest.mark.fast(6, slow=2)
@pytest.mark.parametrize("name", [*MOVES, *STILL])
def test_a_program_computes_what_it_says(name: str) -> None:
    a = np.random.default_rng(0).standard_normal((12, 20)).astype(np.float32)
    text = (MOVES | STILL)[name]
    tiles = run(text, a)
    assert len(tiles) == 8
    for tile, indices in tiles:
        np.testing.assert_allclose(tile, expected(name, a)[np.ix_(*indices)], rtol=1e-6)


@pytest.mark.fast(5)
@pytest.mark.parametrize("name", MOVES)
def test_a_move_is_reported(name: str) -> None:
    assert report_program(MOVES[name]).received_bytes > 0


@pytest.mark.parametrize("name", STILL)
def test_nothing_moves(name: str) -> None:
    assert report_program(STILL[name]).received_bytes == 0
    if "unreduced" not in name:
        assert not [one for one in transform(STILL[name]).report.taken if one.source != one.target]


@pytest.mark.fast(2, slow=2)
@pytest.mark.parametrize(
    "name", sampled([name for name in (*MOVES, *STILL) if "unreduced" not in name], "reshard", "data_flow_edge")
)
def test_after_the_pass_it_compiles(name: str) -> None:
    before, after = report_program((MOVES | STILL)[name]), report_program(transform((MOVES | STILL)[name]).text)
    assert after.received_bytes <= before.received_bytes


def test_a_move_has_the_names_of_its_reshard() -> None:
    (place,) = report_program(MOVES["reshard"]).places
    assert [(str(move.source), str(move.target)) for move in place.moves] == [("f32[{y}6, {x}5]", "f32[{x}3, 20]")]
    (taken,) = transform(MOVES["reshard"]).report.taken
    assert (str(taken.source), str(taken.target)) == ("f32[{y}6, {x}5]", "f32[{x}3, 20]")


@pytest.mark.parametrize("name", ["an empty mesh", "a mesh of one device"])
def test_a_mesh_that_splits_nothing_moves_nothing(name: str) -> None:
    assert all(one.source == one.target is not None for one in transform(STILL[name]).report.reshards)
    alone = STILL[name].replace('@mesh = <["x"=4, "y"=2]>', "@mesh = <[]>").replace("partitions = 8", "partitions = 1")
    assert report_program(alone).devices == 1
    assert not transform(alone).report.left


def test_nothing_is_left_that_xla_does_not_import() -> None:
    for text in (MOVES | STILL).values():
        module = ir.Module.parse(text, make_ir_context())
        make_compilable(module)
        allowed = {"mesh", "sharding_constraint", "manual_computation", "return", "propagation_barrier", "constant"}
        names = {op.name.removeprefix("sdy.") for op in list_operations(module.operation) if op.name.startswith("sdy.")}
        assert names <= {*allowed, "sharding_group"}

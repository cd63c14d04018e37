"""What lies in memory: as the program is written, and as a compiled program of it says.

The oracle is XLA's own figure of what it allocates, and modules that are written by hand.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh as JaxMesh
from jax.sharding import PartitionSpec as P

import reshard.jax
from reshard import hlo
from reshard.jax.layout_choice.graph import build_graph
from reshard.jax.layout_choice.liveness import RunOrder, order_as_compiled, order_as_written
from reshard.jax.layout_choice.op_rules import read_op_rules
from reshard.jax.layout_choice.step_flow import OpLayouts, StepFlow, StepLayouts, read_flow
from reshard.jax.layout_choice.trace_step import read_step_program, trace_step
from reshard.jax.xla_pass.fragments import print_module
from reshard.synth.choice.assess import assess_splits
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.prices import MovePrices
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

# %0 = a * a;  %1 = %0 + a;  %2 = a @ %1;  %3 = %1 * %2
STEP = """func.func @main(%a: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %m = stablehlo.multiply %a, %a : tensor<8x8xf32>
  %s = stablehlo.add %m, %a : tensor<8x8xf32>
  %d = stablehlo.dot_general %a, %s, contracting_dims = [1] x [0]
      : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %p = stablehlo.multiply %s, %d : tensor<8x8xf32>
  return %p : tensor<8x8xf32>
}"""
# The sum is made for the product and once more, transposed; the last fusion makes it again. Products lost their name.
COMPILED = """HloModule m, is_scheduled=true

%sum (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %m = f32[8,8]{1,0} multiply(%p, %p), metadata={op_name="mul#0"}
  ROOT %s = f32[8,8]{1,0} add(%m, %p), metadata={op_name="add#1"}
}

%last (q: f32[8,8], r: f32[8,8]) -> f32[8,8] {
  %q = f32[8,8]{1,0} parameter(0)
  %r = f32[8,8]{1,0} parameter(1)
  %m2 = f32[8,8]{1,0} multiply(%q, %q), metadata={op_name="mul#0"}
  %s2 = f32[8,8]{1,0} add(%m2, %q), metadata={op_name="add#1"}
  %b = f32[8,8]{1,0} bitcast(%r), metadata={op_name="dot#2"}
  ROOT %e = f32[8,8]{1,0} multiply(%s2, %b), metadata={op_name="mul#3"}
}

ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0), metadata={op_name="a"}
  %t = f32[8,8]{0,1LAID} copy(%a)
  %f = f32[8,8]{1,0} fusion(%a), kind=kLoop, calls=%sum, metadata={op_name="add#1"}
  %c = f32[8,8]{0,1} copy(%f)
  %d = f32[8,8]{1,0} dot(%t, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %o = f32[8,8]{1,0} fusion(%a, %d), kind=kLoop, calls=%last, metadata={op_name="mul#3"}
}
"""


def read_order(laid: str = "") -> tuple[StepFlow, RunOrder]:
    step = read_step_program(STEP)
    flow = read_flow(step)
    whole = Layout.tiled(Mesh(x=2), (8, 8), "f32", [(), ()])
    layouts = {at: OpLayouts((whole,) * len(op.operands), (whole,) * len(op.results)) for at, op in flow.ops.items()}
    module = hlo.parse(COMPILED.replace("LAID", laid))
    return flow, order_as_compiled(flow, module, StepLayouts((whole,), (whole,), layouts))


def test_what_a_compiled_program_stores_and_does_twice_is_found_again() -> None:
    flow, order = read_order()
    (argument,), (total,), (product,) = flow.arguments, flow.ops[1].results, flow.ops[2].results
    # Positions: a 0, copy 1, sum 2, its copy 3, product 4, last fusion 5, return 6.
    assert order.stored - {argument} == {total, product, *flow.ops[3].results}
    assert [order.starts[at] for at in range(5)] == [2, 2, 4, 5, 6]
    # The last fusion makes the sum again from the argument: its memory is free after it was copied.
    assert order.needs[3, 0] == 0 and order.needs[3, 1] == 5 and order.needs[0, 0] == 5
    # The sum and its copy are both there where the copy is made; then the copy is the sum.
    assert set(order.copies) == {(argument, 1, 4, 1), (total, 3, 3, 1)} and order.needs[2, 1] == 4


@pytest.mark.parametrize(("laid", "count"), [(":T(8,128)", 16), (":T(8,128)S(1)", 0), (":T(8)", 1)])
def test_padding_counts_and_what_lies_beside_the_main_memory_does_not(laid: str, count: int) -> None:
    flow, order = read_order(laid)
    assert [count for value, *_, count in order.copies if value in flow.arguments] == [count] * (count > 0)


def orthogonalize(weights: Any, momentum: Any, gradient: Any, factors: Any) -> Any:
    """A step of Muon: XLA for CPUs fuses each sum of a chain into the next, and so holds all products."""
    momentum = 0.9 * momentum + gradient

    def iterate(x: Any) -> Any:
        x = x / (jnp.linalg.norm(x) + 1e-6)
        for _ in range(5):
            a = x @ x.T
            x = factors[0] * x + (factors[1] * a + (factors[2] * a) @ a) @ x
        return x

    return weights - jax.vmap(iterate)(momentum), momentum


@pytest.fixture(scope="module")
def mesh() -> JaxMesh:
    return JaxMesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


@pytest.mark.slow
def test_the_peak_is_the_compilers_before_it_was_asked_and_after(mesh: JaxMesh) -> None:
    shapes = [*[jax.ShapeDtypeStruct((8, 256, 256), jnp.float32)] * 3, jax.ShapeDtypeStruct((3,), jnp.float32)]
    choice = reshard.jax.autoshard(orthogonalize, mesh, *shapes, donate=(0, 1), network="tpu-v5p", compare="none")
    search, planned = choice.search, choice.best.planned
    assert planned is not None
    compiled = choice.jit().lower(*shapes).compile()
    module = hlo.parse(print_module(compiled.runtime_executable().hlo_modules()[0]))
    order = order_as_compiled(search.graph.flow, module, search.graph.spell_layouts(planned))
    graph = build_graph(search.step, search.rules, search.mesh, order=order)
    seen = graph.renumber(planned, search.graph)
    learned = assess_splits(graph.problem, seen.splits, seen.anew, search.prices, search.speed)
    assert learned.seconds == pytest.approx(planned.seconds)
    assert choice.in_shardings[0].spec != P()
    for each in (planned, learned):
        assert each.peak_bytes == pytest.approx(choice.peak_bytes, rel=0.01)


def test_of_branches_the_largest_counts(mesh: JaxMesh) -> None:
    def step(which: Any, x: Any, w: Any) -> Any:
        branches = [lambda y: jnp.tanh(y @ w) @ w, lambda y: jnp.exp(y @ w.T) @ w, lambda y: y @ w @ w @ w]
        return jax.lax.switch(which, branches, jnp.sin(x)) @ w

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2048, 128), (128, 128))]
    number = jax.ShapeDtypeStruct((), jnp.int32)
    choice = reshard.jax.autoshard(step, mesh, number, *shapes, network="tpu-v5p", compare="none")
    assert choice.best.planned is not None
    assert choice.best.planned.peak_bytes == pytest.approx(choice.peak_bytes, rel=0.02)


# Two layers, the gradient of the first weight by what the second makes, and updates last, as programs have them.
LAYERS = """func.func @main(%w: tensor<8x8xbf16> {tf.aliasing_output = 0 : i32}, %x: tensor<8x8xbf16>)
    -> (tensor<8x8xbf16>, tensor<8x8xbf16>, tensor<8x8xbf16>) {
  %h = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<8x8xbf16>, tensor<8x8xbf16>) -> tensor<8x8xbf16>
  %n = stablehlo.tanh %h : tensor<8x8xbf16>
  %t = stablehlo.multiply %h, %n : tensor<8x8xbf16>
  %y = stablehlo.dot_general %t, %x, contracting_dims = [1] x [0]
      : (tensor<8x8xbf16>, tensor<8x8xbf16>) -> tensor<8x8xbf16>
  %m = stablehlo.multiply %y, %t : tensor<8x8xbf16>
  %g = stablehlo.dot_general %x, %m, contracting_dims = [0] x [0]
      : (tensor<8x8xbf16>, tensor<8x8xbf16>) -> tensor<8x8xbf16>
  %z = stablehlo.dot_general %m, %x, contracting_dims = [1] x [0]
      : (tensor<8x8xbf16>, tensor<8x8xbf16>) -> tensor<8x8xbf16>
  %u = stablehlo.subtract %w, %g : tensor<8x8xbf16>
  return %u, %z, %y : tensor<8x8xbf16>, tensor<8x8xbf16>, tensor<8x8xbf16>
}"""


@pytest.mark.parametrize(("platform", "stored"), [("tpu", "hyzmu"), ("cpu", "htygzmu")])
def test_tpus_make_again_what_one_value_is_enough_for_and_store_what_two_products_read(
    platform: str, stored: str
) -> None:
    flow = read_flow(read_step_program(LAYERS, platform=platform))
    order = order_as_written(flow)
    names = {flow.ops[at].results[0]: name for at, name in enumerate("hntymgzu")}
    assert {names[value] for value in order.stored - set(flow.arguments)} == set(stored)
    if platform == "tpu":  # The gradient's product makes the tanh again, so that what it is made of is needed, and the
        # update as well, so that the gradient lies nowhere.
        assert order.needs[1, 0] == order.starts[4]


@pytest.mark.parametrize("platform", ["tpu", "cpu"])
def test_tpus_scatter_one_element_a_row_inside_of_what_reads_it(platform: str) -> None:
    def pick(x: Any, index: Any) -> Any:
        return jnp.take_along_axis(jnp.tanh(x @ x), index, 1).sum()

    shapes = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8, 1), jnp.int32)
    flow = read_flow(trace_step(jax.grad(pick), shapes, platform=platform))
    (scattered,) = [op.results[0] for op in flow.ops.values() if op.name == "stablehlo.scatter"]
    assert (scattered in order_as_written(flow).stored) is (platform == "cpu")


def test_what_leads_on_to_a_smaller_value_is_stored_as_that_and_summed_up_beside() -> None:
    """A gradient in f32: products read it in bf16, and a bias's gradient is its sum."""
    tiles = "tensor<8x8xf32>", "tensor<8x8xbf16>"
    product = "stablehlo.dot_general %{}, %{}, contracting_dims = [1] x [0] : ({}, {}) -> {}"
    lines = [
        f"%d = {product.format('x', 'x', tiles[1], tiles[1], tiles[0])}",
        f"%p = {product.format('x', 'w', tiles[1], tiles[1], tiles[0])}",
        f"%e = chlo.erf %p : {tiles[0]} -> {tiles[0]}",
        f"%g = stablehlo.multiply %d, %e : {tiles[0]}",
        "%z = stablehlo.constant dense<0.0> : tensor<f32>",
        f"%s = stablehlo.reduce(%g init: %z) applies stablehlo.add across dimensions = [0] : ({tiles[0]}, tensor<f32>) "
        "-> tensor<8xf32>",
        f"%c = stablehlo.convert %g : ({tiles[0]}) -> {tiles[1]}",
        f"%a = {product.format('c', 'x', tiles[1], tiles[1], tiles[1])}",
        f"%b = {product.format('c', 'w', tiles[1], tiles[1], tiles[1])}",
        f"return %s, %a, %b : tensor<8xf32>, {tiles[1]}, {tiles[1]}",
    ]
    head = f"func.func @main(%x: {tiles[1]}, %w: {tiles[1]}) -> (tensor<8xf32>, {tiles[1]}, {tiles[1]}) "
    flow = read_flow(read_step_program(head + "{" + "\n".join(lines) + "}", platform="tpu"))
    named = {op.results[0]: op.name.rpartition(".")[2] for op in flow.ops.values() if op.results}
    stored = sorted(named[each] for each in order_as_written(flow).stored if each in named)
    assert stored == ["constant", "convert", *["dot_general"] * 3, "reduce"]


@pytest.mark.parametrize(("platform", "tiles"), [("tpu", 4), ("cpu", 3)])
def test_on_tpus_there_is_room_for_results_from_the_start(platform: str, tiles: int) -> None:
    """Of w, its square, the square of that and of that, two squares are live beside w, and the room for the last."""
    tile, mesh = "tensor<8x8xbf16>", Mesh(x=2)
    lines = [
        f"%{new} = stablehlo.dot_general %{old}, %{old}, contracting_dims = [1] x [0] : ({tile}, {tile}) -> {tile}"
        for old, new in ("wa", "ab", "bc")
    ]
    text = f"func.func @main(%w: {tile}) -> {tile} {{" + "\n".join([*lines, f"return %c : {tile}}}"])
    step = read_step_program(text, platform=platform)
    problem = build_graph(step, read_op_rules(step), mesh).problem
    whole = tuple(((),) * len(node.sizes) for node in problem.nodes)
    prices, speed = MovePrices(mesh, "tpu-v5p"), DeviceSpeed.preset("tpu-v5p")
    assert assess_splits(problem, whole, (), prices, speed).peak_bytes == tiles * 128


@pytest.mark.parametrize(("platform", "lanes"), [("tpu", 128), ("cpu", 4)])
def test_rows_that_tpus_gather_take_whole_lanes(platform: str, lanes: int) -> None:
    """The table, of rows of 4, and what is gathered from it, which is added up."""
    shapes = jax.ShapeDtypeStruct((1024, 4), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.int32)
    step, mesh = trace_step(lambda table, rows: table[rows].sum(), shapes, platform=platform), Mesh(x=2)
    problem = build_graph(step, read_op_rules(step), mesh).problem
    whole = tuple(((),) * len(node.sizes) for node in problem.nodes)
    peak = assess_splits(problem, whole, (), MovePrices(mesh, "tpu-v5p"), DeviceSpeed.preset("tpu-v5p")).peak_bytes
    assert peak == pytest.approx(4 * 1024 * lanes, rel=0.05)


@pytest.mark.parametrize("frees", [True, False])
def test_an_update_that_frees_memory_runs_as_soon_as_it_can(frees: bool) -> None:
    text = LAYERS
    if not frees:  # The weights are not the step's to write over, and the gradient is returned.
        text = text.replace(" {tf.aliasing_output = 0 : i32}", "").replace("%z, %y :", "%z, %g :")
    order = order_as_written(read_flow(read_step_program(text, platform="tpu")))
    gradient, other, update = 5, 6, 7
    assert order.starts[gradient] < order.starts[update]
    assert (order.starts[update] < order.starts[other]) is frees


def take_up(x: Any, y: Any) -> Any:
    h = x @ y
    b = h * 2
    return b @ y, b + h


@pytest.mark.parametrize(
    ("f", "devices", "stored"),
    [
        (take_up, 1, "dot_general multiply dot_general add"),
        (lambda x, y: (-(h := x @ y) * x, -h + 1), 1, "dot_general multiply add"),  # each negates for itself
        (lambda x, y: ((e := jnp.exp(x @ y)) * x, e + 1), 1, "dot_general exponential multiply add"),
        (lambda x, y: ((h := jax.lax.pow(x @ y, 3.0)) * x, h + 1), 1, "dot_general multiply add"),
        (lambda x, y: ((h := jax.lax.pow(x @ y, 4.0)) * x, h + 1), 1, "dot_general power multiply add"),
        (lambda x, y: (e := jnp.exp(x @ y)) * e + 1, 1, "dot_general add"),  # one loop reads it twice
        (lambda x, y: ((h := (x @ y) / y[0, 0]) * x, h + 1), 1, "dot_general multiply add"),  # times the inverse
        (lambda x, y: ((h := (x @ y) / y) * x, h + 1), 1, "dot_general divide multiply add"),
        # Of two large values: made once, since a product reads it.
        (lambda x, y: ((h := x @ y + x) @ y, h * 2), 1, "dot_general add dot_general multiply"),
        (lambda x, y: ((h := x @ y + x) * y, h * 2), 1, "dot_general multiply multiply"),
        # A sum of 4,096 elements on a device is the library's, which takes in what is made for it alone.
        (lambda x, y: ((h := (x @ y) * 2).sum(1), h + 1), 1, "dot_general multiply reduce add"),
        (lambda x, y: ((h := (x @ y) * 2).sum(1), h + 1), 2, "dot_general reduce add"),
        (lambda x, y: ((x @ y) * 2).sum(1), 1, "dot_general reduce"),
        (lambda x, y: jax.lax.sort((x @ y)[None]), 1, "dot_general sort"),
        (lambda x, y: jnp.exp(y[0])[:, None] * x, 1, "exponential multiply"),  # else once for each row
        (lambda x, y: (x @ y).reshape(32, 128) @ y.reshape(128, 32), 1, "dot_general dot_general"),
        (lambda x, y: (x @ y * 2).reshape(32, 128) @ y.reshape(128, 32), 1, "dot_general reshape dot_general"),
        (lambda x, y: jnp.concatenate([x @ y, y * 2]) + 1, 1, "dot_general add"),
        (lambda x, y: jnp.concatenate([x @ y, y * 2], 1) + 1, 1, "dot_general multiply concatenate add"),
    ],
)
def test_cpus_make_again_in_loops_what_is_cheap(f: Any, devices: int, stored: str) -> None:
    flow = read_flow(trace_step(f, [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2, platform="cpu"))
    order = order_as_written(flow, devices)
    made = [op for op in flow.ops.values() if op.operands and order.stored.intersection(op.results)]
    spread = [op for op in made if flow.values[op.results[0]].elements < 64]
    names = [op.name.rpartition(".")[2] for op in made if op not in spread]
    assert sorted(names) == sorted(stored.split())


def weigh_cpu_step(f: Any, shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[int, int]:
    """The bytes that a step takes on one device, by the model and as XLA compiles it."""
    step, mesh = trace_step(f, shapes, platform="cpu"), Mesh(x=1)
    problem = build_graph(step, read_op_rules(step), mesh).problem
    whole = tuple(((),) * len(node.sizes) for node in problem.nodes)
    prices, speed = MovePrices(mesh, "tpu-v5p"), DeviceSpeed.preset("tpu-v5p")
    memory = jax.jit(f).lower(*shapes).compile().memory_analysis()
    assert memory is not None
    compiled = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return assess_splits(problem, whole, (), prices, speed).peak_bytes, compiled


def take_gradient(x: Any, w: Any) -> Any:
    return jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)


TABLE = np.arange(128 * 128, dtype=np.float32).reshape(128, 128) / 2**14


def convolve(x: Any, w: Any) -> Any:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def square_one(x: Any) -> Any:
    y = x + 1
    return jax.lax.dot_general(y, jnp.swapaxes(y, 1, 2), (((2,), (1,)), ((0,), (0,))))


def mask_alike(x: Any, y: Any) -> Any:
    """A loop whose trips make the same mask, and read it before most else."""

    def mask(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        x, y = state
        masked = jnp.where(y @ y > 0, x, 1)
        return jnp.sin(masked @ masked) @ masked, y

    return jax.lax.fori_loop(0, 9, mask, (x, y))[0]


def iterate_on_one(x: Any, w: Any) -> Any:
    for _ in range(4):
        x = 2 * x + (x @ jnp.swapaxes(x, 1, 2)) @ x
    return x + w


@pytest.mark.parametrize(
    ("f", "shapes", "dtype"),
    [
        (lambda x, y: jnp.einsum("bqhd,bkhd->bhqk", x + 1, y + 1), [(4, 32, 8, 64)] * 2, "float32"),
        (lambda x, y: (x + 1) @ (y - 1).T, [(256, 256)] * 2, "float32"),
        (take_gradient, [(8, 64, 128), (128, 128)], "float32"),
        (lambda x, y: jnp.swapaxes(x, 0, 1) @ y, [(64, 16, 32), (16, 32, 64)], "float32"),
        (square_one, [(1, 128, 512)], "float32"),
        (iterate_on_one, [(1, 128, 128)] * 2, "float32"),
        (
            lambda x, w: jax.grad(lambda w: jnp.tanh(convolve(x, w)).sum())(w),
            [(4, 16, 16, 32), (3, 3, 32, 32)],
            "float32",
        ),
        (lambda x, y: (x + 1).T @ (y - 1), [(2048, 64), (2048, 64)], "bfloat16"),
        # A loop writes over what it reads, and makes constants again.
        (lambda x, w: ((e := jnp.exp(x)) / e.sum(1, keepdims=True)) @ w, [(512, 512), (512, 8)], "float32"),
        (lambda x: jax.lax.fori_loop(0, 9, lambda _, y: jnp.sin(y @ (y * TABLE)), x), [(128, 128)], "float32"),
        (mask_alike, [(128, 128)] * 2, "float32"),
    ],
)
def test_what_cpus_hold_beside_the_values_of_a_step_is_counted(f: Any, shapes: Any, dtype: str) -> None:
    model, compiled = weigh_cpu_step(f, [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes])
    assert model == pytest.approx(compiled, rel=0.02)


def test_what_a_loop_makes_again_it_needs_the_operands_of_and_kernels_run_as_soon_as_they_can() -> None:
    def take_up_late(x: Any, y: Any) -> Any:
        h = x @ y
        b = h * 2
        for _ in range(3):
            h = h @ y
        return b @ y, b + h, y * 3

    flow = read_flow(trace_step(take_up_late, [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2, platform="cpu"))
    order = order_as_written(flow)
    first, *others = [at for at, op in flow.ops.items() if op.name == "stablehlo.dot_general"]
    twice, thrice = [at for at, op in flow.ops.items() if op.name == "stablehlo.multiply"]
    (total,) = [at for at, op in flow.ops.items() if op.name == "stablehlo.add"]
    # The sum makes the product times two again, long after it was stored for another product.
    assert order.needs[twice, 0] == order.starts[total] > order.starts[others[1]] > order.starts[twice]
    assert order.needs[total, 0] == 0
    # What needs arguments alone runs before what needs a product.
    assert order.starts[thrice] < order.starts[others[0]] and order.starts[first] < order.starts[others[0]]


def test_chains_of_cheap_operations_may_be_longer_than_a_stack() -> None:
    def walk(x: Any, y: Any) -> Any:
        start = end = x * y + jnp.flip(x)
        for _ in range(1500):
            end = end + y
        return end * start

    flow = read_flow(trace_step(walk, [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2, platform="cpu"))
    # One loop adds it all up, and makes the start in both places.
    assert len(order_as_written(flow).stored.difference(flow.arguments)) == 1

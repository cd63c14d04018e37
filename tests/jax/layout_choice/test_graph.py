"""Steps as problems of choice: what the layouts of their operations say must be what the problem counts.

The oracle are the spelled layouts themselves: whoever reads a value in another layout than it was written in must be
one of the moves that the problem lists for the same assignment, and the other way round.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from reshard.errors import ProgramError
from reshard.jax.layout_choice.graph import StepGraph, build_graph
from reshard.jax.layout_choice.op_rules import read_op_rules
from reshard.jax.layout_choice.trace_step import TracedStep, trace_step
from reshard.synth.choice.assess import list_placed_moves
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.milp import choose_splits
from reshard.synth.choice.prices import MovePrices
from reshard.synth.choice.problem import Assignment, Split
from reshard.synth.choice.splits import list_splits
from reshard.types.mesh import Mesh

MESH = Mesh(x=4, y=2)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def train_mlp(params: dict[str, Any], x: Any) -> Any:
    def loss(p: dict[str, Any]) -> Any:
        return jnp.mean((jax.nn.softmax(x @ p["w1"] + p["b1"]) @ p["w2"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: p - g / norm, params, grads), value


def accumulate(w: Any, batches: Any) -> Any:
    """Gradients of several batches in a loop: their sum need not be finished before the loop is over."""

    def add(total: Any, x: Any) -> Any:
        return total + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), None

    return w - jax.lax.scan(add, jnp.zeros_like(w), batches)[0]


def scan_layers(ws: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1)
        return jax.nn.softmax(y @ w) + x, None

    block = jax.checkpoint(layer)
    return jax.grad(lambda ws: jnp.sum(jax.lax.scan(block, x, ws)[0] ** 2))(ws)


def branch(p: Any, x: Any) -> Any:
    mesh: Any = jax.sharding.AbstractMesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    constrained = jax.lax.with_sharding_constraint(x @ x.T, jax.NamedSharding(mesh, P("y")))
    return jax.lax.cond(p > 0, lambda v: v.T * 2, lambda v: v - 1, constrained).reshape(4, 4, 16)


PROGRAMS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "mlp": (train_mlp, [{"w1": floats(16, 32), "b1": floats(32), "w2": floats(32, 8)}, floats(64, 16)]),
    "accumulate": (accumulate, [floats(16, 8), floats(5, 32, 16)]),
    "scan": (scan_layers, [floats(3, 16, 16), floats(32, 16)]),
    "branch": (branch, [floats(), floats(16, 16)]),
}


def make_graph(name: str, **fixed: Any) -> tuple[TracedStep, StepGraph]:
    f, shapes = PROGRAMS[name]
    step = trace_step(f, shapes, donate=0)
    return step, build_graph(step, read_op_rules(step), MESH, **fixed)


def draw_splits(graph: StepGraph, rng: random.Random) -> tuple[Split, ...]:
    return tuple(rng.choice(list(list_splits(node, MESH))) for node in graph.problem.nodes)


@pytest.mark.parametrize("name", PROGRAMS)
def test_layouts_of_operations_need_the_moves_that_the_problem_counts(name: str):
    _, graph = make_graph(name)
    flow = graph.flow
    for seed in range(20):
        splits = draw_splits(graph, random.Random(seed))
        layouts = graph.spell_layouts(Assignment(splits, frozenset(), 0, 0, 0, 0, 0))
        written = dict(zip(flow.arguments, zip(layouts.arguments, graph.ends[0], strict=True), strict=True))
        for at, each in layouts.operations.items():
            written |= zip(flow.ops[at].results, zip(each.results, graph.views[at][1], strict=True), strict=True)
        for loop in flow.loops:  # What the body takes lies as the result does.
            written |= zip(loop.arguments, (written[value] for value in loop.op.results), strict=True)
        needed = set[tuple[str, str]]()
        for value, (layout, view) in written.items():
            if view is None:  # Sources, and what is made of them: readers take their slice.
                continue
            for reader, place in flow.readers[value]:
                around = layouts.operations[reader].operands
                if flow.ops[reader].name == "stablehlo.return":  # of a loop or a branch, whose results it becomes
                    around = layouts.operations[flow.ops[reader].inside].results
                    if len(around) <= place or around[place].shape != layout.shape:
                        continue
                if around[place] != layout:
                    needed.add((str(layout), str(around[place])))
        counted = {(str(move.source), str(move.target)) for move in list_placed_moves(graph.problem, splits, ())}
        assert needed == counted, seed


def test_what_rules_leave_whole_stays_whole():
    def turn(x: Any) -> Any:
        return jnp.flip(jnp.exp(x), 0) * jnp.sort(x, 1) + jnp.roll(x * 2, 3, 1)

    step = trace_step(turn, [floats(16, 16)])
    rules = read_op_rules(step)
    graph = build_graph(step, rules, MESH)
    for seed in range(20):
        splits = draw_splits(graph, random.Random(seed))
        layouts = graph.spell_layouts(Assignment(splits, frozenset(), 0, 0, 0, 0, 0))
        for at, rule in rules.items():
            each = layouts.operations[at]
            for layout, dims in zip((*each.operands, *each.results), (*rule.operands, *rule.results), strict=True):
                for dim, factors in zip(layout.dims, dims, strict=True):
                    assert rule.splittable & set(factors) or all(digit.axis is None for digit in dim.digits), seed


@pytest.mark.slow
def test_a_state_that_goes_into_products_may_lie_elsewhere_meanwhile():
    def orthogonalize(w: Any, m: Any, g: Any) -> Any:
        m = 0.9 * m + g
        z = m / jnp.sqrt(jnp.sum(m * m, (1, 2), keepdims=True))
        for _ in range(3):
            z = 2.0 * z - 1.0 * (z @ z.swapaxes(1, 2)) @ z
        return w - 0.1 * z, m

    step = trace_step(orthogonalize, [floats(8, 1024, 1024)] * 3, donate=(0, 1))
    rows = P(None, ("x", "y"), None)
    graph = build_graph(step, read_op_rules(step), MESH, fixed_arguments=dict.fromkeys(range(3), rows))
    prices, speed = MovePrices(MESH, "tpu-v5p"), DeviceSpeed.preset("tpu-v5p")
    best = choose_splits(graph.problem, prices, speed, time_limit=30)
    tile = 8 * 1024 * 1024 * 4 // 8
    assert best.received_bytes <= 2 * tile  # in once and out once, each without what is there already


def test_reads_anew_are_those_of_one_operation():
    _, graph = make_graph("mlp")
    nodes = graph.problem.nodes
    splits = draw_splits(graph, random.Random(1))
    every = frozenset((at, read) for at, node in enumerate(nodes) for read in range(len(node.reads)))
    layouts = graph.spell_layouts(Assignment(splits, every, 0, 0, 0, 0, 0))
    products = [at for at, op in graph.flow.ops.items() if op.name == "stablehlo.dot_general"]
    assert len(products) == 5 and all(layouts.operations[at].anew == {0, 1} for at in products)
    # A softmax reads its product several times, in one copy.
    shared = [at for at, op in graph.flow.ops.items() if op.operands and len(graph.flow.readers[op.operands[0]]) > 1]
    assert any(not layouts.operations[at].anew for at in shared if at not in products)


def test_repeated_layers_are_split_alike_and_scalars_take_no_node():
    def deep(ws: list[Any], x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w) * 2
        return x.sum()

    shapes = [[floats(16, 16)] * 9, floats(32, 16)]
    step = trace_step(jax.grad(deep), shapes)
    nodes = build_graph(step, read_op_rules(step), MESH).problem.nodes
    products = [node for node in nodes if node.name.startswith("dot_general")]
    # Layers near the ends differ from those in the middle, which have like ones all around.
    assert len(products) == 26 and len({node.tie or node.name for node in products}) <= 16
    assert not any(node for node in nodes if not node.sizes and not node.reads and not node.writes)


def test_a_sum_that_a_loop_adds_up_may_be_finished_after_it():
    _, graph = make_graph("accumulate")
    carried = [node for node in graph.problem.nodes if " carries " in node.name and 0 in node.sizes]
    (node,) = carried
    split = ((), (), ("x",))
    layouts = [access.sums and split[access.sums[0]] for access in (*node.reads, *node.writes)]
    assert layouts == [("x",)] * len(layouts) and len(layouts) >= 2
    assert [access.times for access in node.writes] == [5, 1]  # in the body of five trips, and out of it


def test_what_is_given_stays_and_the_rest_is_free():
    _, graph = make_graph("mlp", fixed_arguments={0: P(None), 2: P("x", P.UNCONSTRAINED)})
    nodes = {node.name: node for node in graph.problem.nodes}
    assert nodes["params/b1"].only == (((),),)
    assert nodes["params/w2"].only == ((("x",), ()), (("x",), ("y",)))
    assert nodes["params/w1"].only is None
    # The next value of a parameter lies as the parameter does: one node, and no move of its own.
    assert graph.results[:3] and all(nodes[name].reads for name in ("params/b1", "params/w1", "params/w2"))


@pytest.mark.parametrize(("platform", "touched"), [("cpu", 6), ("tpu", 4)])
def test_a_kernel_reads_an_array_once(platform: str, touched: int):
    """A TPU computes all of a cluster that can run at once in one kernel, a CPU what is stored one by one: each result
    of `w` and `g`, half of which is made again."""

    def descend(w: Any, g: Any) -> Any:
        half = g / 2
        return w - half * jnp.sin(half), w * half

    step = trace_step(descend, [floats(64, 16)] * 2, platform=platform)
    nodes = build_graph(step, read_op_rules(step), MESH).problem.nodes
    assert [node.touched for node in nodes if node.flops] == [(((0, 1), touched * 64 * 16 * 4),)]


def test_sums_that_nothing_but_cheap_operations_are_made_of_are_joined():
    def descend(ws: list[Any], x: Any) -> Any:
        slopes = jax.grad(lambda ws: jnp.sum((jnp.tanh(x @ ws[0]) @ ws[1]) ** 2))(ws)
        return [w - 0.1 * slope for w, slope in zip(ws, slopes, strict=True)]

    step = trace_step(descend, [[floats(16, 32), floats(32, 8)], floats(64, 16)])
    graph = build_graph(step, read_op_rules(step), MESH)
    products = [each for each in graph.problem.tensors if each.name.startswith("dot_general")]
    # Gradients of weights are added up at the end; what layers make, where it is needed.
    assert {(each.shape, each.joined) for each in products} == {
        ((64, 32), 1), ((64, 8), 1), ((8, 32), 2), ((32, 16), 2)
    }  # fmt: skip


def test_trips_multiply_and_unknown_ones_are_named():
    def loops(x: Any, n: Any) -> Any:
        def outer(x: Any, _: Any) -> Any:
            return jax.lax.fori_loop(0, 4, lambda _, v: v @ v, x), None

        x = jax.lax.scan(outer, x, None, length=3)[0]
        return jax.lax.fori_loop(0, n, lambda _, v: v @ x, x)

    step = trace_step(loops, [floats(16, 16), jax.ShapeDtypeStruct((), jnp.int32)])
    graph = build_graph(step, read_op_rules(step), MESH)
    assert sorted(node.times for node in graph.problem.nodes if node.name.startswith("dot_general")) == [1, 12]
    assert len(graph.unknown_trips) == 1


def test_a_shard_map_on_another_mesh_is_refused():
    other = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    double = jax.shard_map(lambda tile: 2 * tile, mesh=other, in_specs=P("x"), out_specs=P("x"))
    step = trace_step(lambda x: double(x) + 1, [jax.ShapeDtypeStruct((8, 8), "float32")])
    with pytest.raises(ProgramError, match=r"<x=2, y=4>.*<x=4, y=2>; use one mesh"):
        build_graph(step, read_op_rules(step), Mesh(x=4, y=2))


def test_what_products_make_of_scalars_is_split_and_takes_work():
    """Such as the states of a circuit, by the angles of its gates: small at first, and not for nothing."""

    def turn(angle: Any) -> Any:
        cos, sin = jnp.cos(angle[0]), jnp.sin(angle[0])
        gates = jnp.stack([jnp.stack([cos, -sin]), jnp.stack([sin, cos])])
        state = jnp.zeros((64, 2, 64)).at[0, 0, 0].set(1)
        return jnp.einsum("ij,ajb->aib", gates, state)

    step = trace_step(turn, (floats(1),))
    nodes = build_graph(step, read_op_rules(step), MESH).problem.nodes
    assert any(node.flops >= 2 * 64 * 2 * 64 * 2 and node.splittable for node in nodes)

"""Steps emitted in layouts drawn at random, for every operation its own, against the same functions under `jax.jit`."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

import reshard as rs
from reshard import hlo
from reshard.errors import ProgramError
from reshard.jax.layout_choice.emit import emit_step
from reshard.jax.layout_choice.op_rules import OpRule, is_source, read_op_rules
from reshard.jax.layout_choice.step_flow import OpLayouts, StepLayouts
from reshard.jax.layout_choice.trace_step import TracedStep, read_step_program, trace_step
from reshard.jax.layout_choice.wrap_module import wrap_module
from reshard.jax.program_report import compile_module, devices_for
from reshard.jax.stablehlo_pass.shardy import read_dtype
from reshard.jax.xla_pass.fragments import print_module
from reshard.lower.to_stablehlo import ir, list_operations
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.synth.choice.prices import MovePrices
from reshard.synth.choice.problem import Access, Node, Problem, Tensor, access_layout

P = PartitionSpec
MESH = rs.Mesh(x=4, y=2)
CARRIES = ("stablehlo.while", "stablehlo.optimization_barrier")
BRANCHES = ("stablehlo.case", "stablehlo.if")


def jax_mesh(devices: Any = None) -> JaxMesh:
    return JaxMesh(np.array(jax.devices()[:8] if devices is None else devices).reshape(4, 2), ("x", "y"))


def mlp(w: Any, x: Any) -> Any:
    def loss(w: Any, x: Any) -> Any:
        return ((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2).mean()

    value, slope = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, slope), value


def layers(w: Any, x: Any) -> Any:
    """A scan of recomputed layers, and its derivative: two loops, barriers, and sums that are carried."""

    def loss(w: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return h + jnp.sin(h @ w["a"]) @ w["b"], h.sum()

        h, sums = jax.lax.scan(jax.checkpoint(layer), x, w)
        return (jax.nn.softmax(h) ** 2).mean() + sums.sum() * 1e-3

    value, slope = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, slope), value


def control(w: Any, x: Any, key: Any) -> Any:
    """Keys, a branch that reads what is made outside, a sort, and a loop whose condition is a scalar."""
    key, other = jax.random.split(key)
    y = x + jax.random.normal(other, x.shape)
    y = jax.lax.cond(y.sum() > 0, lambda y: y @ w["a"] @ w["b"], lambda y: y * 2 + w["b"][0].sum(), y)
    y = jnp.sort(y, axis=0)
    _, y = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * jnp.cos(c[1]).mean()), (0, y * 0.1))
    return y, key


def arguments(f: Callable[..., Any]) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    lead = (3,) if f is layers else ()

    def draw(*shape: int) -> Any:
        return rng.normal(size=shape).astype("f") * 0.1

    w = {"a": draw(*lead, 16, 32), "b": draw(*lead, 32, 16)}
    return (w, draw(64, 16), jax.random.key(1)) if f is control else (w, draw(64, 16))


def shapes_of(args: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)


def lay_out(value: Any, node: Node, dims: Any, split: Any, rule: OpRule | None = None) -> rs.Layout:
    tensor = ir.RankedTensorType(value.type)
    known = Tensor("", tuple(tensor.shape), read_dtype(str(tensor.element_type)), 0, 0)
    sums = () if rule is None else tuple(f for f in sorted(rule.reduced) if split[f])
    access = Access(0, dims, 0, 1, sums, "sum" if rule is None else rule.reduction)
    return access_layout(Problem(MESH, (known,), (node,)), node, access, split)


def draw_split(sizes: Any, splittable: Any, rng: random.Random) -> tuple[tuple[str, ...], ...]:
    split: list[tuple[str, ...]] = [()] * len(sizes)
    left = list(sizes)
    for axis in rng.sample([*MESH.axes], 2):
        fits = [f for f in sorted(splittable) if left[f] % MESH.axes[axis] == 0]
        if fits and rng.random() < 0.7:
            at = rng.choice(fits)
            split[at], left[at] = (*split[at], axis), left[at] // MESH.axes[axis]
    return tuple(split)


def draw_value(value: Any, rng: random.Random | None) -> rs.Layout:
    sizes = tuple(ir.RankedTensorType(value.type).shape)
    split = ((),) * len(sizes) if rng is None else draw_split(sizes, range(len(sizes)), rng)
    node = Node("", sizes, frozenset(range(len(sizes))), (), ())
    return lay_out(value, node, tuple((f,) for f in range(len(sizes))), split)


def draw_layouts(step: TracedStep, seed: int, anew: float = 0.3) -> StepLayouts:
    """For each operation a split of its own rule, so that nearly all values are moved; some of them anew."""
    rng, rules = random.Random(seed), read_op_rules(step)
    drawn: dict[int, OpLayouts] = {}
    with step.module.context, ir.Location.unknown():
        for number, op in enumerate(step.ops):
            if number in rules:
                rule = rules[number]
                split = draw_split(rule.sizes, rule.splittable, rng)
                node = Node("", rule.sizes, rule.splittable, (), ())
                operands = [lay_out(v, node, dims, split) for v, dims in zip(op.operands, rule.operands, strict=True)]
                results = [
                    lay_out(v, node, dims, split, rule) for v, dims in zip(op.results, rule.results, strict=True)
                ]
            elif op.name in CARRIES and not is_source(op):
                operands = results = [draw_value(each, rng) for each in op.results]
            elif op.name in BRANCHES:
                operands = [draw_value(each, None) for each in op.operands]
                results = [draw_value(each, rng) for each in op.results]
            else:
                continue
            apart = frozenset(at for at in range(len(operands)) if rng.random() < anew)
            drawn[number] = OpLayouts(tuple(operands), tuple(results), apart)
        first = [draw_value(each, rng) for each in step.main.regions[0].blocks[0].arguments]
        last = [draw_value(each, rng) for each in step.ops[-1].operands]
        for result, argument in step.carried.items():
            last[result] = first[argument]
    return StepLayouts(tuple(first), tuple(last), drawn)


def assert_same(f: Callable[..., Any], got: Any, args: Any) -> None:
    for one, other in zip(jax.tree.leaves(jax.jit(f)(*args)), jax.tree.leaves(got), strict=True):
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("f", "seed"),
    [(mlp, 0), *(pytest.param(f, 1, marks=pytest.mark.slow) for f in (layers, control))],
)
def test_random_layouts_change_no_result(f: Callable[..., Any], seed: int):
    args = arguments(f)
    step = trace_step(f, shapes_of(args), donate=() if f is control else 0)
    module = emit_step(step, draw_layouts(step, seed), MovePrices(MESH, "tpu-v5p"))
    run = wrap_module(module, step, jax_mesh())
    assert_same(f, run(*args), args)


def count_gathers(anew: bool, *, scan: bool = False, devices: Any = None) -> int:
    """How often the compiled program gathers a matrix that three operations need whole."""
    devices = jax.devices()[:8] if devices is None else devices

    def apply(w: Any, x: Any) -> Any:
        for _ in range(3):
            x = jnp.tanh(jnp.dot(x, w, precision="highest"))  # TPUs would round it else.
        return x

    def repeat(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (apply(w, x), None), x, None, length=5)[0]

    args = np.zeros((16, 16), "f"), np.zeros((64, 16), "f")
    step = trace_step(repeat if scan else apply, shapes_of(args), platform=devices[0].platform)
    rows, apart = rs.Layout.parse("f32[{x}{y}8, 16]", MESH), rs.Layout.parse("f32[{x}{y}2, 16]", MESH)
    whole = rs.Layout.parse("f32[16, 16]", MESH)
    operations: dict[int, OpLayouts] = {}
    for number, op in enumerate(step.ops):
        if op.name == "stablehlo.while":
            held = [apart if tuple(v.type.shape) == (16, 16) else rows for v in op.results if v.type.shape]
            with step.module.context:
                scalars = [draw_value(v, None) for v in op.results if not v.type.shape]
            assert [len(v.type.shape) for v in op.results] == [2, 0, 2]
            operations[number] = OpLayouts((), (held[0], *scalars, held[1]))
        elif op.name == "stablehlo.dot_general":
            operations[number] = OpLayouts((rows, whole), (rows,), frozenset({1} if anew else ()))
        elif op.name == "stablehlo.tanh":
            operations[number] = OpLayouts((rows,), (rows,))
    module = emit_step(step, StepLayouts((apart, rows), (rows,), operations), MovePrices(MESH, "tpu-v5p"))
    executable = compile_module(devices, module)
    found = hlo.collectives(hlo.parse(print_module(executable.hlo_modules()[0])))
    assert {one.kind for one in found} == {"all_gather"}
    return sum(one.times or 1 for one in found)


def test_a_kept_copy_is_made_once_and_one_anew_for_each_reader():
    assert count_gathers(anew=False) == 1
    assert count_gathers(anew=True) == 3


def test_in_a_loop_copies_are_made_in_each_trip():
    """XLA moves nothing out of the loop, though what is gathered is the same in each trip."""
    assert count_gathers(anew=False, scan=True) == 5
    assert count_gathers(anew=True, scan=True) == 15


@pytest.mark.slow
def test_compilers_of_tpus_share_and_hoist_nothing():
    """Without barriers, a TPU gathers once for all readers; it also would before a loop."""
    devices = devices_for(8, "tpu", "v5p:2x2x2")
    counts = [count_gathers(anew, scan=scan, devices=devices) for anew in (False, True) for scan in (False, True)]
    assert counts == [1, 5, 3, 15]


@pytest.mark.parametrize("alone", [True, False])
def test_a_sum_that_a_transpose_alone_reads_is_made_after_it(alone: bool):
    """As of a gradient of weights: libtpu would keep what is added up transposed, and copy what meets it."""

    def multiply(x: Any, g: Any) -> Any:
        made = jax.lax.dot_general(g, x, (((0,), (0,)), ((), ())))
        return made.T if alone else (made.T, made)

    rng = np.random.default_rng(0)
    args = rng.normal(size=(64, 16)).astype("f"), rng.normal(size=(64, 8)).astype("f")
    step = trace_step(multiply, shapes_of(args))
    texts = ("[{x}{y}8, 16]", "[{x}{y}8, 8]", "[8, 16] + sum{x}{y}", "[8, 16]", "[16, 8]")
    x, g, partial, whole, turned = (rs.Layout.parse(f"f32{text}", MESH) for text in texts)
    ways = {
        "stablehlo.dot_general": OpLayouts((g, x), (partial,)),
        "stablehlo.transpose": OpLayouts((whole,), (turned,)),
    }
    operations = {at: ways[op.name] for at, op in enumerate(step.ops) if op.name in ways}
    results = (turned,) if alone else (turned, whole)
    module = emit_step(step, StepLayouts((x, g), results, operations), MovePrices(MESH, "tpu-v5p"))
    sums = [op for op in list_operations(module.operation) if op.name == "stablehlo.all_reduce"]
    made_by = "stablehlo.transpose" if alone else "stablehlo.dot_general"
    assert [one.operands[0].owner.name for one in sums] == [made_by]
    assert_same(multiply, wrap_module(module, step, jax_mesh())(*args), args)


def test_shard_maps_and_constraints_of_the_step_are_emitted():
    mesh = jax_mesh()

    def f(w: Any, x: Any) -> Any:
        full = jax.shard_map(
            lambda a, b: jax.lax.psum(a @ b, "y"), mesh=mesh, in_specs=(P("x", "y"), P("y")), out_specs=P("x"),
            check_vma=False,
        )  # fmt: skip
        over_x = jax.shard_map(
            lambda a: a - jax.lax.pmax(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"},
            check_vma=False,
        )  # fmt: skip
        y = jax.lax.with_sharding_constraint(over_x(full(x, w["a"])), NamedSharding(mesh, P(P.UNCONSTRAINED, "y")))
        return y @ w["b"]

    args = arguments(mlp)
    step = trace_step(f, shapes_of(args))
    drawn = draw_layouts(step, 3)
    manual = [number for number, op in enumerate(step.ops) if op.name == "sdy.manual_computation"]
    texts = ("f32[{x}16, {y}8]", "f32[{y}8, 32]", "f32[{x}16, 32]")
    x, w, y = (rs.Layout.parse(text, MESH) for text in texts)
    operations = {**drawn.operations, manual[0]: OpLayouts((x, w), (y,)), manual[1]: OpLayouts((y,), (y,))}
    module = emit_step(step, StepLayouts(drawn.arguments, drawn.results, operations), MovePrices(MESH, "tpu-v5p"))
    assert_same(f, wrap_module(module, step, mesh)(*args), args)
    rows = rs.Layout.parse("f32[64, {x}8]", MESH)
    wrong = {**operations, manual[1]: OpLayouts((rows,), (rows,))}
    with pytest.raises(ProgramError, match="shard_map takes tiles"):
        emit_step(step, StepLayouts(drawn.arguments, drawn.results, wrong), MovePrices(MESH, "tpu-v5p"))


def test_states_keep_their_memory():
    args = arguments(mlp)
    step = trace_step(mlp, shapes_of(args), donate=0)
    assert (dict(step.carried), step.donated) == ({0: 0, 1: 1}, {0, 1})
    module = emit_step(step, draw_layouts(step, 0), MovePrices(MESH, "tpu-v5p"))
    stats = compile_module(jax.devices()[:8], module).get_compiled_memory_stats()
    held = wrap_module(module, step, jax_mesh()).lower(*shapes_of(args)).compile().memory_analysis()
    assert stats.alias_size_in_bytes == held.alias_size_in_bytes > 0


def test_a_step_is_read_from_a_file_as_it_is_traced():
    traced = trace_step(mlp, shapes_of(arguments(mlp)), donate=0)
    names = [value.name for value in (*traced.arguments, *traced.results)]
    assert names == ["w/a", "w/b", "x", "result/0/a", "result/0/b", "result/1"]
    lowered = jax.jit(mlp, donate_argnums=0).lower(*shapes_of(arguments(mlp)))
    read = read_step_program(lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=True))
    assert [value.name for value in (*read.arguments, *read.results)] == names
    assert (read.donated, dict(read.carried)) == (traced.donated, dict(traced.carried))
    assert len(read.ops) == len(traced.ops)


@pytest.mark.fast(0, slow=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "shape", "target"),
    [
        ("bf16", "1024, 1024", "[{x}{y}128, 1024]"), ("bf16", "1024, 1024", "[1024, {x}{y}128]"),
        ("bf16", "1024, 1024", "[{x}256, {y}512]"), ("bf16", "1024, 1024", "[1024, {y}{x}128]"),
        # Blocks of 3 and of 1.5 tiles of memory, and of tiles of 4 rows; libtpu scatters no sums of other dtypes.
        ("f32", "192, 128", "[{x}{y}24, 128]"), ("f32", "16, 1024", "[{x}4, {y}512]"),
        ("f32", "4096, 3", "[{x}{y}512, 3]"), ("s32", "64, 128", "[{x}{y}8, 128]"),
    ],
)  # fmt: skip
def test_tpus_scatter_sums_and_do_not_reduce_them_everywhere(dtype: str, shape: str, target: str):
    """A sum over rows of which each device has one."""
    texts = (f"[{{x}}{{y}}1, {shape}]", f"[{shape}] + sum{{x}}{{y}}", target, "[]")
    rows, partial, result, scalar = (rs.Layout.parse(f"{dtype}{text}", MESH) for text in texts)
    shapes = [jax.ShapeDtypeStruct(rows.shape, numpy_dtype(rows.dtype))]
    step = trace_step(lambda x: jax.lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), shapes, platform="tpu")
    operations = {at: OpLayouts((rows, scalar), (partial,)) for at, op in enumerate(step.ops) if op.results}
    module = emit_step(step, StepLayouts((rows,), (result,), operations), MovePrices(MESH, "tpu-v5p"))
    executable = compile_module(devices_for(8, "tpu", "v5p:2x2x2"), module)
    found = hlo.collectives(hlo.parse(print_module(executable.hlo_modules()[0])))
    assert {one.kind for one in found} == {"all_to_all" if dtype == "s32" else "reduce_scatter"}
    assert 7 * result.tile_bytes <= hlo.traffic(found).received_bytes <= 1.05 * 7 * result.tile_bytes

"""Operations on tiles, in random splits of their rules, against the same operations on whole arrays.

A program gives its operations and, run on one device, the values of all of them. Each operation is then built on tiles
inside a manual computation of its own, whose operands and results have a dim for each digit: so arrays are cut and put
together by jax's own shardings, in layouts that no `NamedSharding` of the array itself says.
"""

import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

import reshard as rs
from reshard.jax.layout_choice.experts import Expert, write_expert
from reshard.jax.layout_choice.localize import localize_op, localize_source
from reshard.jax.layout_choice.op_rules import OpRule, is_source, read_op_rules
from reshard.jax.layout_choice.trace_step import TracedStep, trace_step
from reshard.jax.program_report import compile_module
from reshard.lower.to_stablehlo import ir, list_operations
from reshard.synth.choice.problem import Access, Node, Problem, Tensor, access_layout
from reshard.types import dtypes

MESH = rs.Mesh(x=2, y=2, z=2)
JAX_MESH: Any = None
COMBINE = {"sum": np.add.reduce, "max": np.maximum.reduce, "min": np.minimum.reduce}


def run_whole(step: TracedStep, arguments: list[np.ndarray]) -> dict[tuple[int, int], np.ndarray]:
    """The value of every result of the operations of `main` itself, by the number of the operation."""
    with step.module.context, ir.Location.unknown():
        block = step.main.regions[0].blocks[0]
        numbers = {op: number for number, op in enumerate(step.ops)}
        body = [op.operation for op in block.operations][:-1]
        keys = [(numbers[op], at) for op in body for at in range(len(op.results))]
        values = [step.ops[number].results[at] for number, at in keys]
        whole = ir.Module.parse(step.module.operation.get_asm())
        (main,) = (op.operation for op in whole.body.operations if op.attributes["sym_name"].value == "main")
        copies = list_operations(main)
        last = copies[-1]
        with ir.InsertionPoint(last):
            ir.Operation.create("func.return", [], [copies[number].results[at] for number, at in keys])
        last.erase()
        types = ir.FunctionType.get([a.type for a in block.arguments], [value.type for value in values])
        main.attributes["function_type"] = ir.TypeAttr.get(types)
        executable = compile_module(jax.devices()[:1], whole)
        results = executable.execute_sharded([jax.device_put(a, jax.devices()[0]) for a in arguments])
        arrays = results.disassemble_into_single_device_arrays()
    return {key: np.asarray(array[0]) for key, array in zip(keys, arrays, strict=True)}


def lay_rule(op: Any, rule: OpRule, split: Any) -> tuple[list[rs.Layout], list[rs.Layout]]:
    """The layouts of operands and results, as whoever chooses lays them."""
    values = [*op.operands, *op.results]
    tensors = tuple(Tensor("", tuple(t.shape), dtypes.canonical(name_dtype(t)), 0, 0) for t in map(read_type, values))
    sums = tuple(sorted(rule.reduced))
    count = len(op.operands)
    reads = tuple(Access(at, dims, 0) for at, dims in enumerate(rule.operands))
    writes = tuple(Access(count + at, d, 0, 1, sums, rule.reduction) for at, d in enumerate(rule.results))
    node = Node("", rule.sizes, rule.splittable, reads, writes)
    problem = Problem(MESH, tensors, (node,))
    return [[access_layout(problem, node, each, split) for each in some] for some in (reads, writes)]


def read_type(value: Any) -> Any:
    return ir.RankedTensorType(value.type)


def name_dtype(tensor: Any) -> str:
    name = str(tensor.element_type)
    names = {"i1": "bool", "complex<f32>": "complex64", "f32": "float32", "bf16": "bfloat16"}
    return names.get(name) or name.replace("ui", "uint").replace("i", "int", 1).replace("uintnt", "uint")


def choose_split(rule: OpRule, rng: random.Random) -> tuple[list[tuple[str, ...]], list[str]]:
    split: list[tuple[str, ...]] = [()] * len(rule.sizes)
    free: list[str] = []
    for axis in rng.sample([*MESH.axes], len(MESH.axes)):
        places = [f for f in rule.splittable if rule.sizes[f] % (2 ** (len(split[f]) + 1)) == 0]
        if places and rng.random() < 0.8:
            at = rng.choice(places)
            split[at] = (*split[at], axis)
        else:
            free.append(axis)
    return split, free


def add_partial(layout: rs.Layout, axis: str) -> rs.Layout:
    return rs.Layout(MESH, layout.dims, layout.dtype, "sum", (*layout.partial, MESH.sub_axis(axis)))


def digits_of(layout: rs.Layout) -> list[Any]:
    return [digit for dim in layout.dims for digit in dim.digits]


def spec_of(layout: rs.Layout) -> PartitionSpec:
    axes = [None if digit.axis is None else digit.axis.axis for digit in digits_of(layout)]
    return PartitionSpec(*(axis.axis for axis in layout.partial), *axes)


def spread(value: np.ndarray, layout: rs.Layout, rng: np.random.Generator) -> np.ndarray:
    """An array with a dim for each axis of a sum, of random summands, and one for each digit."""
    axes = [axis.size for axis in layout.partial]
    summands = np.zeros((*axes, *value.shape), value.dtype)
    if axes:
        noise = rng.integers(-3, 3, summands.shape).astype(value.dtype)
        rest = np.array(value - noise.sum(tuple(range(len(axes))), dtype=value.dtype))
        noise[(0,) * len(axes)] = np.add(noise[(0,) * len(axes)][None], rest[None])[0]  # Whole numbers wrap around.
        summands = noise
    else:
        summands = value
    return summands.reshape([*axes, *(digit.radix for digit in digits_of(layout))])


def run_split(cases: list[tuple[Any, list[Any], list[Any], list[Any]]], step: TracedStep) -> list[list[np.ndarray]]:
    """Runs operations on tiles, each with its operands' arrays and layouts and its results' layouts."""
    types = []
    with step.module.context, ir.Location.unknown():
        module = ir.Module.parse('sdy.mesh @mesh = <["x"=2, "y"=2, "z"=2]>')

        def spell(layout: rs.Layout) -> str:
            dims = ["{}" if axis is None else f'{{"{axis}"}}' for axis in spec_of(layout)]
            return f"<@mesh, [{', '.join(dims)}]>"

        def type_of(layout: rs.Layout, value: Any, local: bool) -> Any:
            sizes = [1 if local else a.size for a in layout.partial]
            sizes += [1 if local and d.axis is not None else d.radix for d in digits_of(layout)]
            return ir.RankedTensorType.get(sizes, read_type(value).element_type)

        taken = [(layout, value) for op, _, ins, _ in cases for layout, value in zip(ins, op.operands, strict=False)]
        given = [(layout, value) for op, _, _, outs in cases for layout, value in zip(outs, op.results, strict=True)]
        types = ir.FunctionType.get(
            [type_of(*each, False) for each in taken], [type_of(*each, False) for each in given]
        )
        with ir.InsertionPoint(module.body):
            attributes = {"sym_name": ir.StringAttr.get("main"), "function_type": ir.TypeAttr.get(types)}
            function = ir.Operation.create("func.func", [], [], attributes, regions=1)
        block = function.regions[0].blocks.append(*types.inputs)
        with ir.InsertionPoint(block):
            arguments = iter(block.arguments)
            results = []
            for op, _, ins, outs in cases:
                shardings = [f"#sdy.sharding_per_value<[{', '.join(map(spell, each))}]>" for each in (ins, outs)]
                made = ir.Operation.create(
                    "sdy.manual_computation",
                    [type_of(layout, value, False) for layout, value in zip(outs, op.results, strict=True)],
                    list(itertools.islice(arguments, len(ins))),
                    {
                        "in_shardings": ir.Attribute.parse(shardings[0]),
                        "out_shardings": ir.Attribute.parse(shardings[1]),
                        "manual_axes": ir.Attribute.parse('#sdy<manual_axes{"x", "y", "z"}>'),
                    },
                    regions=1,
                )
                locals_ = [type_of(layout, value, True) for layout, value in zip(ins, op.operands, strict=False)]
                body = made.regions[0].blocks.append(*locals_)
                with ir.InsertionPoint(body):
                    if is_source(op):
                        tiles = [localize_source(op, outs[0], MESH)]
                    else:
                        tiles = [
                            shape_as(argument, layout.tile_shape)
                            for argument, layout in zip(body.arguments, ins, strict=True)
                        ]
                        tiles = localize_op(op, tiles, ins, outs, MESH)
                    ends = [
                        shape_as(tile, type_of(layout, value, True).shape)
                        for tile, layout, value in zip(tiles, outs, op.results, strict=True)
                    ]
                    ir.Operation.create("sdy.return", [], ends)
                results += list(made.results)
            ir.Operation.create("func.return", [], results)
        assert module.operation.verify()
        executable = compile_module(jax.devices()[:8], module)
    mesh = JaxMesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("x", "y", "z"))
    with jax.enable_x64(True):  # Random bits are computed in 64 bits, whatever the arrays of the program have.
        placed = [
            jax.device_put(array, NamedSharding(mesh, spec_of(layout)))
            for _, arrays, ins, _ in cases
            for array, layout in zip(arrays, ins, strict=True)
        ]
    outputs = executable.execute_sharded(placed).disassemble_into_single_device_arrays()
    whole = iter([assemble(tiles, layout, mesh) for tiles, (layout, _) in zip(outputs, given, strict=True)])
    return [list(itertools.islice(whole, len(outs))) for _, _, _, outs in cases]


def shape_as(value: Any, shape: Any) -> Any:
    kind = ir.RankedTensorType.get(list(shape), read_type(value).element_type)
    return value if kind == value.type else ir.Operation.create("stablehlo.reshape", [kind], [value]).results[0]


def assemble(tiles: list[Any], layout: rs.Layout, mesh: JaxMesh) -> np.ndarray:
    """The array of tiles that have a dim for each axis of the sum and each digit; copies must be equal."""
    shape = [*(axis.size for axis in layout.partial), *(digit.radix for digit in digits_of(layout))]
    places = NamedSharding(mesh, spec_of(layout)).devices_indices_map(tuple(shape))
    whole, filled = np.zeros(shape, tiles[0].dtype), np.zeros(shape, bool)
    for device, tile in zip(jax.devices()[:8], tiles, strict=True):
        where = places[device]
        if filled[where].all():
            np.testing.assert_array_equal(whole[where], np.asarray(tile))
        whole[where], filled[where] = np.asarray(tile), True
    assert filled.all()
    axes = tuple(range(len(layout.partial)))
    combined = COMBINE[layout.reduction](whole, axis=axes) if axes else whole
    return combined.astype(whole.dtype).reshape(layout.shape)


def check_program(f: Any, arguments: list[np.ndarray], seed: int, tries: int = 2) -> dict[str, int]:
    """Runs each operation of a program in some random splits; returns how many of each kind were split."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    step = trace_step(f, arguments)
    rules = read_op_rules(step)
    values = run_whole(step, arguments)
    block = step.main.regions[0].blocks[0]
    numbers = {op: number for number, op in enumerate(step.ops)}

    def find(value: Any) -> np.ndarray:
        if isinstance(value.owner, ir.Block):
            return arguments[list(block.arguments).index(value)]
        op = value.owner.operation
        return values[numbers[op], list(op.results).index(value)]

    cases, counts, seen = list[Any](), dict[str, int](), set[str]()
    with step.module.context:
        for number, op in enumerate(step.ops[:-1]):
            if (number, 0) not in values:
                continue
            rule = rules.get(number)
            if rule is None and is_source(op):
                # Anything may be split, and a dim in its minor factor alone.
                parts = [(2, n // 2) if n % 4 == 0 else (n,) for n in read_type(op.results[0]).shape]
                ends = [0, *itertools.accumulate(map(len, parts))]
                dims = tuple(tuple(range(*pair)) for pair in itertools.pairwise(ends))
                sizes = tuple(itertools.chain.from_iterable(parts))
                rule = OpRule(sizes, (), (dims,), frozenset(end - 1 for end in ends[1:]))
            alike = f"{op.name} {[*map(str, (value.type for value in (*op.operands, *op.results)))]} {rule}"
            if rule is None or alike in seen:
                continue
            seen.add(alike)
            for _ in range(tries):
                split, free = choose_split(rule, rng)
                ins, outs = lay_rule(op, rule, split)
                if free and rule.linear and (not rule.reduced or rule.reduction == "sum") and rng.random() < 0.5:
                    partial = rng.choice(rule.linear)
                    ins = [add_partial(each, free[0]) if at in partial else each for at, each in enumerate(ins)]
                    outs = [add_partial(each, free[0]) for each in outs]
                if is_source(op):
                    ins = []
                    if free and "bool" not in outs[0].dtype:
                        outs = [add_partial(outs[0], free[0])]
                arrays = [spread(find(v), layout, noise) for v, layout in zip(op.operands, ins, strict=False)]
                if any(split):
                    counts[op.name] = counts.get(op.name, 0) + 1
                cases.append((op, arrays, ins, outs))
    for (op, _, ins, outs), results in zip(cases, run_split(cases, step), strict=True):
        for at, result in enumerate(results):
            expected = values[numbers[op], at]
            where = f"{op} from {[*map(str, ins)]} to {[*map(str, outs)]}"
            tolerance = 3e-2 if "bf16" in where else 2e-4
            around = tolerance * np.max(np.abs(expected), initial=1.0, where=np.isfinite(expected))
            np.testing.assert_allclose(result, expected, rtol=tolerance, atol=around, err_msg=where)
    return counts


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def attend(x, w, mask):
    q, k = (x @ w).reshape(8, 16, 4, 2, 4)[:, :, :, 0], (x @ w).reshape(8, 16, 4, 8)[..., 4:]
    scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e30)
    return jax.nn.softmax(scores, -1).transpose(0, 2, 1, 3).reshape(8, 64, 16)


def compute_pieces(x, i):
    """Slices, padding and pieces one after the other, as rotary embeddings have them, and their gradients."""
    raised = jax.lax.reduce(x, np.float32(1), jax.lax.add, (2,))  # A sum that starts at 1 starts once.
    far = x * jnp.arange(16.0) + jnp.arange(16, dtype="int8")[:4, None]
    half = jnp.concatenate([-x[..., 8:], x[..., :8]], -1)
    pairs = jnp.stack([x[..., ::2], -x[..., 1::2]], -1).reshape(x.shape)
    window = jax.lax.dynamic_slice(x, (i, 0, 0), (2, 4, 16))
    put = jax.lax.dynamic_update_slice(x, window * 2, (i + 1, 0, 0))
    grad = jax.grad(lambda x: (x[:, ::2] ** 2).sum() + (x[:, :, 4:8] ** 3).sum() + (x[1:3] ** 2).sum())(x)
    return raised, far, half, pairs, put, grad, jnp.pad(x, ((0, 0), (1, 1), (16, 0))), x[:, ::-1], jnp.roll(x, 3, 1)


def compute_lookups(table, tokens, x, rows):
    """Embeddings and their gradients, sums by segment, one element of each row, and updates in rows."""
    found = table[tokens]
    cut = jax.lax.gather(
        table,
        tokens[..., None] * 3 - 5,
        jax.lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,)),
        (1, 8),
        mode="clip",
    )
    grad = jax.grad(lambda t: (t[tokens] ** 2).sum())(table)
    sums = jax.ops.segment_sum(x, rows, 8)
    most = jax.ops.segment_max(x, rows, 8)
    picked = jnp.take_along_axis(x, rows[:, None] % 8, 1)
    plain = table[tokens[0], tokens[1] % 8]
    added = table.at[tokens[0]].add(x[:16]) + table.at[tokens[0], tokens[1] % 8].add(1.0)
    far = table.at[tokens[0] * 5 - 9].add(x[:16], mode="drop").at[rows[:4].astype("uint32")].set(x[:4])
    return found, cut, grad, sums, most, picked, plain, added, far


def compute_images(x, kernel, patches, depth):
    """Convolutions with their gradients, poolings, patches, groups of features."""

    def convolve(x, kernel, **options):
        return jax.lax.conv_general_dilated(x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    def loss(x, kernel, patches, depth):
        y = convolve(x, kernel, window_strides=(1, 1), padding="SAME")
        tokens = convolve(y, patches, window_strides=(4, 4), padding="VALID")
        pooled = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        near = jax.lax.reduce_window(y, 0.0, jax.lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        groups = convolve(y, depth, window_strides=(1, 1), padding="SAME", feature_group_count=4)
        return (tokens**2).sum() + (pooled**2).sum() + (near * groups**2).sum()

    return jax.value_and_grad(loss, (0, 1, 2, 3))(x, kernel, patches, depth)


def compute_various(x, k, a):
    """Sorting, the largest few, running sums, transforms, factorizations, random bits."""
    top, at = jax.lax.top_k(x, 2)
    bits = jax.random.normal(jax.random.key(3), x.shape) + jax.random.uniform(jax.random.wrap_key_data(k), x.shape)
    wave = jnp.fft.fft2(x).real + jnp.fft.irfft(jnp.fft.rfft(x, axis=1), axis=1)
    lower = jnp.linalg.cholesky(a @ a.transpose(0, 2, 1) + 8 * jnp.eye(4))
    solved = jax.scipy.linalg.solve_triangular(lower, a, lower=True)
    q, r = jnp.linalg.qr(a)
    whole = jnp.argmax(x, 1), jnp.any(x > 1, 0), jnp.cumsum(x, 1), jnp.cumprod(x, 0), jnp.max(x), jnp.prod(x, 2)
    return top, at, jnp.sort(x, 1), jnp.argsort(x, 0), bits, wave, solved, q, r, whole, jax.nn.one_hot(at, 8)


def compute_numbers(x, y):
    """Types: a narrow one, pairs of numbers, whole numbers, booleans, bits."""
    small = (x.astype("bfloat16") * 3).sum(0).astype("float32")
    pair = jax.lax.complex(x, y) * (1 + 2j)
    whole = (x * 8).astype(int)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 3
    kept = jnp.where(jnp.isnan(y) | (x > 0), jnp.clip(x, -1, 1), jax.nn.gelu(y) + jax.lax.erf_inv(y / 9))
    return small, pair.sum(1), pair @ pair.T, whole.sum(0), whole // 3, bits, kept, jnp.logical_not(whole > 2).all(1)


TOKENS = np.random.default_rng(1).integers(0, 32, (2, 16)).astype(np.int32)
PROGRAMS: dict[str, tuple[Any, list[np.ndarray]]] = {
    "attention": (attend, [normal(8, 16, 8), normal(8, 32), np.tril(np.ones((16, 16), bool))]),
    "pieces": (compute_pieces, [normal(4, 4, 16), np.int32(1)]),
    "lookups": (compute_lookups, [normal(32, 8), TOKENS, normal(32, 8, seed=1), TOKENS.ravel() % 8]),
    "images": (
        compute_images,
        [normal(4, 8, 8, 4), normal(3, 3, 4, 8), normal(4, 4, 8, 8), normal(3, 3, 2, 8)],
    ),
    "various": (compute_various, [normal(4, 4, 8), np.array([1, 2], np.uint32), normal(4, 4, 4)]),
    "numbers": (compute_numbers, [normal(8, 4), normal(8, 4, seed=1)]),
}


SPLIT = {  # What must be split at least once, beside the operations that every program has.
    "attention": "dot_general transpose reshape slice reduce",
    "pieces": "slice pad concatenate dynamic_slice dynamic_update_slice reverse",
    "lookups": "gather scatter compare select",
    "images": "convolution reduce_window select_and_scatter",
    "various": "top_k sort fft iota constant reduce_window custom_call",
    "numbers": "convert complex bitcast_convert erf_inv",
}


def test_transforms_over_several_dims_are_one_for_each() -> None:
    def solve(x, y):
        waves = jnp.fft.rfftn(x, axes=(1, 2, 3))
        return jnp.fft.irfftn(waves, axes=(1, 2, 3)) * jnp.fft.ifft2(jnp.fft.fft2(y)).real, waves

    arguments = [normal(2, 4, 6, 10), normal(2, 4, 6, 10, seed=1)]
    step = trace_step(solve, arguments)
    values, rules = run_whole(step, arguments), read_op_rules(step)
    transforms = [number for number, op in enumerate(step.ops) if op.name == "stablehlo.fft"]
    assert [len(rules[number].splittable) for number in transforms] == [3] * 10
    whole = str(write_expert(step, Expert("plain", (PartitionSpec(),) * 2, (None,) * 2), MESH))
    for kind, lengths in (("RFFT", "4, 6, 10"), ("IRFFT", "4, 6, 10"), ("FFT", "6, 10"), ("IFFT", "6, 10")):
        assert f"type = {kind}, length = [{lengths}]" in whole
    assert "whole_transform" not in whole
    results = list(step.ops[-1].operands)
    for value, expected in zip(results, solve(*arguments), strict=True):
        made = values[step.ops.index(value.owner.operation), 0]
        np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-4)


LONG = ("images", "various", "numbers")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in PROGRAMS])
def test_operations_on_tiles_do_what_they_do_on_arrays(name: str) -> None:
    counts = check_program(*PROGRAMS[name], seed=0)
    assert not [each for each in SPLIT[name].split() if not {f"stablehlo.{each}", f"chlo.{each}"} & {*counts}]

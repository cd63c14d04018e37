"""What compiled programs take: collectives timed as the plans that they come from, and products counted by hand."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.jax.layout_choice.compiled_figures import ExecutableFigures, measure_executable
from reshard.jax.program_report import devices_for
from reshard.lower import lower_plan
from reshard.lower.to_shard_map import tile_function
from reshard.synth.choice.device_speed import DeviceSpeed

AXES = {"dcn": 2, "x": 4}
NETWORK = rs.Network.of({"x": rs.Link(1e-6, 1e11), "dcn": rs.Link(1e-5, 1e9)})
SPEED = DeviceSpeed("slow", {"f32": 1e6}, 1e6)


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), tuple(AXES))


def measure(f, *shapes, **options) -> ExecutableFigures:
    compiled = jax.jit(f, **options).lower(*shapes).compile()
    return measure_executable(compiled.runtime_executable(), rs.Mesh(AXES), NETWORK.links(rs.Mesh(AXES)), SPEED)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[{x}1024, 8]", "f32[4096, 8]"),
        ("f32[{dcn}{x}512, 8]", "f32[4096, 8]"),
        ("f32[{dcn}{x}512, 8]", "f32[{x}1024, {dcn}4]"),
        ("f32[64, 64] + sum{x}", "f32[64, 64]"),
        ("f32[64, 64] + sum{dcn,x}", "f32[{x}16, {dcn}32]"),
        ("f32[8] + sum{dcn,x}", "f32[{dcn}{x}1]"),
        ("f32[{x}16, {dcn}32]", "f32[{x:(2)2}{x:(1)2}16, {dcn}32]"),
    ],
)
def test_collectives_take_as_long_as_the_plan_that_they_are_of(mesh, source, target):
    ends = [rs.Layout.parse(text, rs.Mesh(AXES)) for text in (source, target)]
    plan = rs.plan(*ends, network=NETWORK)
    tile = tile_function(lower_plan(plan), AXES)
    run = jax.shard_map(tile, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    figures = measure(run, jax.ShapeDtypeStruct(ends[0].tile_shape, jnp.float32))
    assert figures.received_bytes == plan.received_bytes > 0
    assert math.isclose(figures.move_seconds, plan.seconds, rel_tol=1e-9)
    # Collectives themselves are counted as moves; the kernels that pack for them are work.
    assert figures.work_seconds == 0 or plan.steps[0].kind != "all_reduce"


def test_products_count_as_often_as_they_run(mesh):
    def layers(a, weights):
        return jax.lax.scan(lambda a, w: (jnp.tanh(a @ w), None), a, weights)[0].sum()

    shapes = [((64, 128), P("x")), ((5, 128, 128), P(None, None, "dcn"))]
    given = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in shapes]
    figures = measure(jax.grad(layers, 1), *given)
    assert figures.flops == 3 * 5 * (2 * 64 * 128 * 128) / 8  # Forward, and twice as much back, on 8 devices.
    kernel = jax.ShapeDtypeStruct((3, 3, 4, 16), jnp.float32)
    image = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float32)
    dims = ("NHWC", "HWIO", "NHWC")
    convolve = partial(jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=dims)
    convolved = measure(convolve, image, kernel)
    # At an edge of the image one of three taps meets padding.
    assert convolved.flops == 2 * (2 * 16) * (3 * 8 - 2) ** 2 * 4
    assert convolved.move_seconds == convolved.received_bytes == 0


def test_the_peak_is_arguments_results_and_temporaries(mesh):
    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    peaks = [measure(lambda x: x + 1, shape, donate_argnums=given).peak_bytes for given in ((), (0,))]
    assert peaks[0] - peaks[1] == 256 * 256 * 4


def test_each_kernel_takes_as_long_as_its_products_or_its_memory(mesh):
    n = 64
    given = [jax.ShapeDtypeStruct((n, n), jnp.float32), jax.ShapeDtypeStruct((n * n,), jnp.float32)]
    # A product is all arithmetic, and a sum of two arrays all memory: neither hides the other.
    figures = measure(lambda a, b: (a @ a, b + 1.0, jnp.cos(b)), *given)
    assert figures.flops == 2 * n**3
    assert math.isclose(figures.seconds, (2 * n**3 + 2 * 2 * 4 * n**2) / 1e6)


def test_kernels_read_what_their_results_are_made_of(mesh):
    given = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    # Sixteen rows of both summands, and of both factors; a loop reads a row a trip, and writes one.
    sliced = measure(lambda a, b: jnp.sqrt(a + b)[:16], *given)
    assert math.isclose(sliced.work_seconds, 3 * 16 * 64 * 4 / 1e6)
    summed = measure(lambda a, b: (a * b)[:16].sum(0), *given)
    assert math.isclose(summed.work_seconds, (2 * 16 + 1) * 64 * 4 / 1e6)

    def write_rows(a, b):
        write = jax.lax.dynamic_update_index_in_dim
        return jax.lax.fori_loop(0, 64, lambda i, a: write(a, jnp.sqrt(b[i]), i, 0), a)

    looped = measure(write_rows, *given, donate_argnums=(0,))
    assert math.isclose(looped.touched_bytes, 64 * 2 * 64 * 4, rel_tol=0.1)


@pytest.mark.slow
def test_products_on_tpus_count_what_they_multiply():
    """Heads, which both operands keep, become a window over heads, most of which it pads."""
    devices = np.array(devices_for(8, "tpu", "v5p:2x2x2")).reshape(2, 4)
    split = NamedSharding(Mesh(devices, tuple(AXES)), P("dcn", "x"))
    q, k = (jax.ShapeDtypeStruct((4, 16, rows, 64), jnp.float32, sharding=split) for rows in (128, 256))

    def f(q, k):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        return scores.sum((0, 1)), jnp.einsum("bhqk,bhkd->bqhd", scores, k)

    compiled = jax.jit(f).lower(q, k).compile().runtime_executable()
    assert " convolution(" in compiled.hlo_modules()[0].to_string()
    free = DeviceSpeed("free memory", {"f32": 1e6}, 1e30)
    figures = measure_executable(compiled, rs.Mesh(AXES), NETWORK.links(rs.Mesh(AXES)), free)
    assert figures.flops == 2 * (2 * 4 * 16 * 128 * 256 * 64) / 8
    assert math.isclose(figures.work_seconds, figures.flops / 1e6)


@pytest.mark.slow
def test_the_memory_on_a_tpus_chip_is_not_counted():
    """All pairs of rows, 4 MiB, lie there: main memory holds the rows and what leaves."""
    device = devices_for(8, "tpu", "v5p:2x2x2")[0]
    given = jax.ShapeDtypeStruct((1024, 8), jnp.float32, sharding=SingleDeviceSharding(device))

    def f(x):
        apart = jnp.sqrt(jnp.square(x[:, None] - x).sum(-1))
        return (apart / apart.max(0)).sum(1)

    compiled = jax.jit(f).lower(given).compile().runtime_executable()
    whole = compiled.get_compiled_memory_stats().peak_memory_in_bytes
    peak = measure_executable(compiled, rs.Mesh(x=1), NETWORK.links(rs.Mesh(x=1)), SPEED).peak_bytes
    assert peak < 2**22 < whole

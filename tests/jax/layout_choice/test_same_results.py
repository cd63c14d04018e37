"""What a chosen program computes is what the function computes, to the bit or within the bound that the docs state.

A choice changes in which order a sum over devices is added up, and how the compiler fuses what is left on each device.
Sums of small whole numbers are exact in any order: there results are equal to the bit. Of other numbers, two orders of
a sum of n terms differ by at most 2 (n - 1) u times the sum of the terms' sizes, u being half the distance from 1 to
the next number (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import reshard.jax

MESHES = {"4x2": ((4, 2), ("x", "y")), "2x2x2": ((2, 2, 2), ("x", "y", "z")), "8": ((8,), ("x",))}
UNIT = 2.0**-24  # Half the distance from 1 to the next float32.


def jax_mesh(name: str) -> Mesh:
    sizes, names = MESHES[name]
    return Mesh(np.array(jax.devices()[:8]).reshape(sizes), names)


def sgd(params: Any, batch: Any) -> Any:
    """A linear layer, a linear loss: all that is computed is sums of products."""

    def loss(params: Any) -> Any:
        return jnp.sum((batch @ params["w"]) * (batch @ params["v"]) + params["b"])

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def whole_numbers(*shapes: tuple[int, ...], seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-3, 4, shape).astype("float32") for shape in shapes]


def choose(f: Any, mesh: str, *given: Any, **options: Any) -> Any:
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), given)
    return reshard.jax.autoshard(
        f, jax_mesh(mesh), *shapes, network="tpu-v5p", compare="none", time_limit=10, **options
    )


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_sums_of_whole_numbers_are_equal_to_the_bit(mesh: str):
    w, v, b, batch = whole_numbers((64, 128), (64, 128), (128,), (32, 64), seed=len(mesh))
    params = {"w": w, "v": v, "b": b}
    made = choose(sgd, mesh, params, batch).jit()(params, batch)
    assert all(np.array_equal(made[name], each) for name, each in sgd(params, batch).items())


@pytest.mark.fast(1)
@pytest.mark.parametrize("spec", [PartitionSpec(None, "x"), PartitionSpec("x"), PartitionSpec(("x", "y"))])
def test_a_product_is_within_the_bound_whatever_its_operand_is_split_along(spec: PartitionSpec):
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal(shape).astype("float32") for shape in ((64, 512), (512, 32)))
    made = choose(lambda a, b: a @ b, "4x2", a, b, fixed={"a": spec}).jit()(a, b)
    # Each of the two is within this of the exact product, so they are within twice this of each other.
    bound = (512 - 1) * UNIT * (abs(a.astype("float64")) @ abs(b.astype("float64")))
    assert np.all(abs(np.asarray(made, "float64") - a.astype("float64") @ b.astype("float64")) <= bound)


def attention(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[name]) for name in "qkv")
            weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
            x = x + jnp.einsum("bhts,bshk,hkd->btd", weights, v, w["o"])
            return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 4)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g / (jnp.abs(g) + 1e-3), params, grads), value


def convolve(kernel: Any, images: Any) -> Any:
    y = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.lax.reduce_window(jax.nn.relu(y), 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def pass_messages(w: Any, vertices: Any, edges: Any) -> Any:
    for _ in range(2):
        messages = jnp.tanh(vertices[edges[:, 0]] @ w)
        vertices = vertices + jax.ops.segment_sum(messages, edges[:, 1], len(vertices))
    return vertices, jnp.argsort(vertices[:, 0]), jax.lax.top_k(vertices, 3)[0]


def transform(field: Any) -> Any:
    for _ in range(3):
        field = jnp.moveaxis(jnp.fft.fft(field, axis=-1), -1, 0)
    return jnp.cumsum(field.real, axis=1)


def draw(key: Any, x: Any) -> Any:
    return x + jax.random.normal(jax.random.wrap_key_data(key), x.shape), jnp.where(x > 0, x, 0).sum(0)


def branch(choose: Any, x: Any) -> Any:
    y = jax.lax.cond(choose > 0, lambda x: x @ x.T, lambda x: x + x.T, x)
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ c[1] / 64), (0, y))[1]


def given_for(name: str) -> tuple[Any, ...]:
    rng = np.random.default_rng(11)

    def make(*shape: int) -> Any:
        return rng.standard_normal(shape) / 4

    weights = {each: make(2, 32, 4, 8) for each in "qkv"} | {"o": make(2, 4, 8, 32)}
    return {
        "attention": (weights, make(8, 16, 32)),
        "convolve": (make(3, 3, 8, 16), make(8, 16, 16, 8)),
        "pass_messages": (make(16, 16), make(64, 16), rng.integers(0, 64, (256, 2)).astype("int32")),
        "transform": (make(16, 16, 16).astype("complex128"),),
        "draw": (np.array([1, 2], "uint32"), make(64, 32)),
        "branch": (np.int32(1), make(64, 64)),
    }[name]


@pytest.mark.fast(0, slow=4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "mesh"),
    [
        *((f, "4x2") for f in (attention, convolve, pass_messages, transform, draw, branch)),
        *((f, "2x2x2") for f in (transform, pass_messages)),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_steps_are_equal_but_for_the_last_digits_of_doubles(f: Any, mesh: str):
    """In float64, sums of at most 4,096 terms, some tens of them one after the other, leave ten digits."""
    with jax.enable_x64(True):
        given = given_for(f.__name__)
        made, plain = choose(f, mesh, *given).jit()(*given), jax.jit(f)(*given)
        assert jax.tree.structure(made) == jax.tree.structure(plain)
        for ours, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(plain), strict=True):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            size = max(1.0, float(abs(np.asarray(theirs)).max()))
            assert np.allclose(ours, theirs, rtol=0, atol=1e-10 * size)

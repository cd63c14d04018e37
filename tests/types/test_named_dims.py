"""Layouts of xarray's arrays and jaxtyping's annotations."""

from types import SimpleNamespace

import pytest

import reshard as rs
from reshard.errors import LayoutError, NotationError
from reshard.types import Layout, Mesh
from reshard.types.named_dims import from_jaxtyping, from_xarray

MESH = Mesh(x=4, y=2)
ARRAY = SimpleNamespace(dims=("batch", "head", "feature"), shape=(16, 3, 10), dtype="bfloat16")


def annotated(dims: str, *dtypes: str) -> SimpleNamespace:
    return SimpleNamespace(dim_str=dims, dtypes=dtypes or ("bfloat16",))


def test_dims_are_split_by_their_names():
    split = {"feature": ["y"], "batch": "x"}
    layout = from_xarray(ARRAY, MESH, split)
    assert layout == Layout.parse("bf16[{x}4, 3, {y}5]", MESH)
    assert from_jaxtyping(annotated("batch 3 feature"), MESH, split, batch=16, feature=10) == layout
    assert from_jaxtyping(annotated("batch head=3 feature=10"), MESH, split, batch=16) == layout
    assert from_jaxtyping(annotated(""), MESH, {}) == Layout.parse("bf16[]", MESH)
    many = annotated("3", "float16", "float32")
    assert from_jaxtyping(many, MESH, {}, dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: from_xarray(ARRAY, MESH, {"fature": "y"}), LayoutError, "did you mean 'feature'?"),
        (lambda: from_xarray(3.0, MESH, {}), LayoutError, "give an xarray.DataArray"),
        (lambda: from_xarray(ARRAY, MESH, ["x"]), LayoutError, "give a dict"),
        (lambda: from_jaxtyping(int, MESH, {}), LayoutError, "not an annotation of jaxtyping"),
        (lambda: from_jaxtyping(annotated("a b"), MESH, {}, a=4), LayoutError, "dim 'b' has no size; give it: b=16"),
        (lambda: from_jaxtyping(annotated("a ..."), MESH, {}, a=4), NotationError, "dim '...' has no single size"),
        (lambda: from_jaxtyping(annotated("a"), MESH, {}, a=4, b=2), LayoutError, "there is no dim 'b' among a"),
        (lambda: from_jaxtyping(annotated("4", "a", "b"), MESH, {}), LayoutError, "say which: dtype="),
        (lambda: from_jaxtyping(annotated("a"), MESH, {}, a=-4), LayoutError, "-4"),
    ],
)
def test_a_mistake_is_named(call, error, words):
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)


def test_arrays_of_both_libraries_are_read_and_move():
    jax = pytest.importorskip("jax")
    jaxtyping, xarray = pytest.importorskip("jaxtyping"), pytest.importorskip("xarray")
    weather = xarray.DataArray(jax.numpy.zeros((16, 10)), dims=("time", "station"))
    assert from_xarray(weather, MESH, {"time": "x"}) == Layout.parse("f32[{x}4, 10]", MESH)
    annotation = jaxtyping.Float32[jaxtyping.Array, "batch feature=8"]
    assert from_jaxtyping(annotation, MESH, {"batch": ("x", "y")}, batch=64) == Layout.parse("f32[{x}{y}8, 8]", MESH)
    line = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    here = jax.sharding.NamedSharding(line, jax.sharding.PartitionSpec("x"))
    moved = weather.copy(data=rs.jax.redistribute(weather.data, here))
    assert (moved.dims, moved.data.sharding) == (("time", "station"), here)

"""Layouts of xarray's arrays and jaxtyping's annotations; the examples in docs run where both libraries are."""

import doctest
from pathlib import Path
from types import SimpleNamespace

import pytest

from reshard.errors import LayoutError, NotationError
from reshard.types import Layout, Mesh
from reshard.types.named_dims import from_jaxtyping, from_xarray
from tests.test_docs import blocks

MESH = Mesh(x=4, y=2)
ARRAY = SimpleNamespace(dims=("batch", "head", "feature"), shape=(16, 3, 10), dtype="bfloat16")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "language.md"


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


def test_the_examples_in_docs():
    pytest.importorskip("jaxtyping")
    pytest.importorskip("xarray")
    (block,) = blocks(DOCS.read_text(encoding="utf-8"), "pycon")
    test = doctest.DocTestParser().get_doctest(block.text, {}, "language.md", str(DOCS), block.line)
    assert len(test.examples) >= 8 and not doctest.DocTestRunner().run(test).failed

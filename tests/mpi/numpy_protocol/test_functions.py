"""numpy's functions, operators and methods on distributed arrays: of one rank here, on several by `running`."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.errors import LayoutError, TileError
from reshard.mpi import DistArray
from reshard.mpi.numpy_protocol.array_reductions import norm
from reshard.mpi.numpy_protocol.contractions import place_operands
from reshard.mpi.numpy_protocol.tiled_array import align_layouts, apply_elementwise
from reshard.types import Layout, Mesh
from tests.mpi import running
from tests.mpi.numpy_protocol.arrays import array, as_rank, whole

A = np.arange(6.0).reshape(2, 3)


def test_comparisons() -> None:
    a, b = array(A), array(A + np.eye(2, 3))
    assert np.array_equal(a, array(A)) and not np.array_equal(a, b) and not np.array_equal(a, array(A.T))
    assert np.allclose(a, a + 1e-12) and not np.allclose(a, b) and np.allclose(array(A * 0), 0)
    nan = array(np.array([np.nan]))
    assert not np.array_equal(nan, nan) and np.array_equal(nan, nan, equal_nan=True)
    assert np.array_equal(array(np.zeros((0, 3))), array(np.zeros((0, 3))))
    assert np.array_equal(a, A) and np.array_equal(A, a) and not np.array_equal(a, A + 1)
    with pytest.raises(TypeError, match="to_global"):
        np.testing.assert_array_equal(a, a)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(TypeError, match=r"numpy\.median is not implemented for DistArrays.*to_global"):
        np.median(array(A))
    with pytest.raises(TypeError, match=r"numpy\.mean of a DistArray takes a.*to_global|takes array.*to_global"):
        np.mean(array(A), where=A > 1)
    with pytest.raises(TypeError, match="to_global"):
        np.where(array(A))
    assert np.sum(array(A), out=None) == A.sum()


def test_no_implicit_conversion() -> None:
    a = array(A)
    for call in (np.asarray, np.array, list, float, int, complex, iter, lambda a: a.item()):
        with pytest.raises(TypeError, match="to_global"):
            call(a)
    with pytest.raises(TileError, match=r"a\.any\(\) or a\.all\(\)"):
        bool(a == a)
    with pytest.raises(TileError, match="to_global"):
        bool(array(np.zeros(0)))
    with pytest.raises(TypeError, match="without dims"):
        len(array(1.0))
    assert (len(a), 4.0 in a, 9 in a) == (2, True, False)


def test_arrays_of_one_element_are_numbers() -> None:
    s = array(np.int64(3))
    assert (float(s), int(s), complex(s), bool(s), [5, 6, 7, 8][s], s.item()) == (3.0, 3, 3 + 0j, True, 8, 3)
    assert bool(array([[0.0]])) is False
    with pytest.raises(TypeError, match="is an index"):
        [1, 2][array(1.0)]  # pyright: ignore


def test_copies_and_dtypes() -> None:
    a = array(A)
    for made in (a.copy(), np.copy(a), copy.copy(a), copy.deepcopy(a)):
        assert np.array_equal(made, a) and not np.shares_memory(made.tile, a.tile)
    assert whole(a.astype("i4")).dtype == np.int32
    with pytest.raises(TileError, match="cast it first"):
        a.astype(">f8")
    assert whole(np.ones_like(a, dtype="complex64")).tolist() == np.ones_like(A).tolist()
    assert (np.shape(a), np.ndim(a), np.size(a), np.size(a, 1)) == ((2, 3), 2, 6, 3)
    z = array(A + 2j * A)
    assert np.array_equal(whole(z.real + z.imag), 3 * A) and np.array_equal(whole(z.conj()), A - 2j * A)
    assert all(array(np.ones(2, dtype)).conj().dtype == dtype for dtype in ("bool", "int8", "float32", "complex64"))


class Somewhere(DistArray):
    """An array of any layout: `align_layouts` looks at layouts only."""

    def __init__(self, text: str, mesh: Mesh) -> None:
        layout = Layout.parse(text, mesh)
        super().__init__(layout, np.zeros(layout.tile_shape, layout.dtype), as_rank(mesh))


def test_rows_and_columns_broadcast() -> None:
    a = array(A)
    assert np.array_equal(whole(a + array(A[0])), A + A[0])
    assert np.array_equal(whole(array(A[:1]) * array(A[:, :1])), A[:1] * A[:, :1])
    with pytest.raises(LayoutError, match="do not broadcast together"):
        a + array(np.zeros(2))


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (("f64[{x}2/7, 5]", "f64[5]"), "f64[{x}2/7, 5]"),
        (("f64[{x}2/7, 5]", "f64[1, 5]", "f64[]"), "f64[{x}2/7, 5]"),
        (("f64[{x}2/7, 1]", "f64[1, {y}3]"), "f64[{x}2/7, {y}3]"),
        (("f64[{x}1/1]", "f64[1]"), "f64[{x}/1]"),
        (("f64[{x}2/7, 1]", "f64[1, {x}2]"), None),
        (("f64[{x}2/7, 5]", "f64[7, 5]"), None),
        (("f64[{x}1/1, 5]", "f64[7, 5]"), None),
        (("f64[2{x}1/7]", "f64[{x}2/7]"), None),
    ],
)
def test_where_tiles_have_the_same_elements(texts: tuple[str, ...], wanted: str | None) -> None:
    arrays = [Somewhere(text, Mesh(x=4, y=2)) for text in texts]
    if wanted is None:
        with pytest.raises(LayoutError, match="redistribute one of them"):
            align_layouts("add", arrays)
    else:
        assert str(align_layouts("add", arrays)) == wanted


def test_other_meshes_and_partial_arrays_are_refused() -> None:
    one, other = Somewhere("f64[8]", Mesh(x=4)), Somewhere("f64[8]", Mesh(y=4))
    with pytest.raises(LayoutError, match="redistribute one of them"):
        align_layouts("add", [one, other])
    with pytest.raises(LayoutError, match="still to be summed"):
        align_layouts("add", [Somewhere("f64[8] + sum{x}", Mesh(x=4))])


def test_padding_is_not_computed_with() -> None:
    layout = Layout.parse("f64[{x}2/7]", Mesh(x=4))
    a = DistArray(layout, np.array([1.0, 0.0]), as_rank(layout.mesh, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part = apply_elementwise("reciprocal", np.reciprocal, a)
    assert part.tile.tolist() == [1.0, 0.0]
    assert apply_elementwise("add", np.add, a, 1).tile.tolist() == [2.0, 0.0]


def test_out() -> None:
    a, out = array(A), array(np.zeros((2, 3)))
    assert np.add(a, 1, out=out) is out
    assert np.array_equal(whole(out), A + 1)
    same = a
    a += 1
    assert a is same
    assert np.array_equal(whole(a), A + 1)
    with pytest.raises(LayoutError, match="out has layout"):
        np.add(a, 1, out=array(np.zeros((3, 2))))
    with pytest.raises(TileError, match="out is a ndarray"):
        np.add(a, 1, out=np.zeros((2, 3)))
    with pytest.raises(TypeError, match="to_global"):
        np.add(a, 1, out=out, where=A > 3)


def test_elementwise_functions_refuse_what_needs_other_tiles() -> None:
    a = array(A)
    if hasattr(np, "matvec"):  # from numpy 2.2 on
        with pytest.raises(TypeError, match=r"matvec of DistArrays is not implemented.*to_global"):
            np.matvec(a, a)
    with pytest.raises(LayoutError, match="do not broadcast together"):
        a + A.T
    with pytest.raises(LayoutError, match=r"memoryview of shape .*give a number, numpy's array"):
        a + memoryview(A)  # pyright: ignore
    with pytest.raises(TypeError, match="mask"):
        a + np.ma.masked_array(A, A > 1)
    with pytest.raises(TypeError, match="cannot hold"):
        a + A.astype(object)


def test_whole_arrays_and_lists() -> None:
    a = array(A)
    for given, wanted in (
        (a + A, A + A),
        (A - a, A - A),
        ([1, 2, 3] * a, [1, 2, 3] * A),
        (array([1, 2]) ** [1, 2], np.array([1, 4])),
        (np.where(A > 2, a, 0), np.where(A > 2, A, 0)),
        (np.clip(a, [1, 1, 2], A + 1), np.clip(A, [1, 1, 2], A + 1)),
        (a @ A.T, A @ A.T),
        (A.T @ a, A.T @ A),
    ):
        assert np.array_equal(whole(given), wanted)
    with pytest.raises(ValueError, match="negative integer powers"):
        array([1, 2]) ** [1, -2]


def test_the_array_api_has_its_names() -> None:
    a = array(A)
    xp = a.__array_namespace__()
    assert a.to_device(a.device) is a and a.astype("f8", copy=False) is a and a.astype("f8") is not a
    assert np.array_equal(whole(xp.permute_dims(a + xp.ones((2, 3)), (1, 0))), (A + 1).T)
    assert np.array_equal(whole(xp.concat([a, a])), np.concatenate([A, A]))
    assert xp.std(a, correction=1) == A.std(ddof=1)
    assert np.array_equal(whole(xp.concat([a, a.mT], axis=None)), np.concatenate([A, A.T], axis=None))
    assert xp.result_type(a, np.int8, 2) == "float64" and xp.empty_like(a).shape == a.shape
    assert np.array_equal(whole(xp.linalg.vecdot(a, a, axis=0)), np.vecdot(A, A, axis=0))
    with pytest.raises(TileError, match="give 'cpu'"):
        a.to_device("gpu")


@pytest.mark.fast(12)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "complex64"])
@pytest.mark.parametrize("name", ["sum", "prod", "mean", "min", "max", "any", "all"])
def test_dtypes(name: str, dtype: str) -> None:
    values = np.array([[1, 0, 3], [2, 1, 1]]).astype(dtype)
    for axis in (None, 0, (0, 1)):
        given, wanted = getattr(array(values), name)(axis=axis), getattr(values, name)(axis=axis)
        assert (given.dtype, given.shape) == (wanted.dtype, wanted.shape)
        assert np.array_equal(whole(given) if wanted.ndim else given, wanted)


def test_where_extrema_are() -> None:
    for values in (A[::-1] * [[1, -1, 1]], np.array([[3, np.nan, 1], [np.nan, 7, 7]]), np.array([[True, False, True]])):
        for name in ("argmin", "argmax"):
            for axis in (None, 0, 1):
                given, wanted = getattr(np, name)(array(values), axis=axis), getattr(np, name)(values, axis=axis)
                assert np.array_equal(whole(given) if wanted.ndim else given, wanted), (values, name, axis)


def test_no_elements() -> None:
    nothing = array(np.zeros((0, 2)))
    assert nothing.sum() == 0 and nothing.all() and not nothing.any()
    assert np.linalg.norm(nothing, np.inf) == 0  # as newer versions of numpy have it; 1.26 raises
    with pytest.raises(TileError, match="no elements have no min"):
        nothing.min()
    assert whole(nothing.max(axis=1)).shape == (0,)


@pytest.mark.parametrize("order", [None, 0, 1, 2, 3, np.inf, -np.inf])
def test_norms_of_vectors(order: object) -> None:
    values = np.array([[3.0, -4.0, 0.0], [1.0, 2.0, 5.0]])
    for axis in (0, 1, -1):
        given = norm(array(values), order, axis)
        assert np.allclose(whole(given), np.linalg.norm(values, order, axis))  # pyright: ignore


@pytest.mark.parametrize("order", [None, "fro", 1, -1, np.inf, -np.inf])
def test_norms_of_matrices(order: object) -> None:
    values = np.array([[3.0, -4.0, 0.0], [1.0, 2.0, 5.0]])
    assert np.allclose(np.linalg.norm(array(values), order), np.linalg.norm(values, order))  # pyright: ignore
    kept = np.linalg.norm(array(values), order, (1, 0), keepdims=True)  # pyright: ignore
    assert np.allclose(whole(kept), np.linalg.norm(values, order, (1, 0), keepdims=True))  # pyright: ignore


def test_norms_and_sums_refuse_what_needs_the_whole() -> None:
    for order in (2, "nuc"):
        with pytest.raises(TypeError, match="to_global"):
            np.linalg.norm(array(np.eye(2)), order)  # pyright: ignore
    with pytest.raises(ValueError, match="invalid norm order"):
        np.linalg.norm(array(np.ones(2)), "fro")
    with pytest.raises(TypeError, match="to_global"):
        np.sum(array(np.ones(2)), initial=3)


LEFT, RIGHT = np.arange(12.0).reshape(3, 4), np.arange(20.0).reshape(4, 5)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((3, 4), (4, 5)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((2, 3, 4), (4, 5)),
        ((2, 1, 3, 4), (7, 4, 5)),
        ((1, 1), (1, 1)),
    ],
)
def test_matmul(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    left, right = np.random.default_rng(0).random(one), np.random.default_rng(1).random(other)
    assert np.allclose(whole(array(left) @ array(right)), left @ right)


@pytest.mark.parametrize("axes", [0, 1, ([1], [0]), (1, 0), ((-1,), (0,))])
def test_tensordot(axes: object) -> None:
    assert np.allclose(whole(np.tensordot(array(LEFT), array(RIGHT), axes)), np.tensordot(LEFT, RIGHT, axes))  # pyright: ignore


def test_dot() -> None:
    assert array(LEFT[0]).dot(array(LEFT[1])) == LEFT[0].dot(LEFT[1])
    assert np.array_equal(whole(np.dot(array(LEFT), array(RIGHT))), LEFT @ RIGHT)
    assert np.array_equal(whole(np.dot(2, array(RIGHT))), 2 * RIGHT)
    flags = np.array([[True, False], [True, True]])
    assert np.array_equal(whole(array(flags) @ array(flags)), flags @ flags)


def test_products_refuse_shapes_and_operands_that_do_not_fit() -> None:
    for call in (
        lambda: array(LEFT) @ array(LEFT),
        lambda: array(LEFT) @ array(3.0),
        lambda: array(LEFT) @ LEFT,
        lambda: np.tensordot(array(LEFT), array(RIGHT), 3),
        lambda: np.tensordot(array(LEFT), array(RIGHT), ([0, 1], [0])),
    ):
        with pytest.raises(LayoutError):
            call()
    with pytest.raises(TypeError, match="to_global"):
        np.matmul(array(LEFT), array(RIGHT), out=array(LEFT))


@pytest.mark.parametrize(
    ("left", "right", "placed"),
    [
        # SUMMA: a ninth of what is received where one stays and large products are added up.
        ("[{x}4096, {y}256]", "[{x}256, {y}4096]", "[{x}4096, 512] [512, {y}4096] [{x}4096, {y}4096]"),
        ("[{x}4096, {y}256]", "[{x}256, {y}2]", "[{x}4096, {y}256] [{y}256, 4] [{x}4096, 4] + sum{y}"),
        ("[{x}2, {y}256]", "[{x}256, {y}4096]", "[4, {x}256] [{x}256, {y}4096] [4, {y}4096] + sum{x}"),
        # The sum is larger than both operands, but its devices share the products.
        ("[64, {x}{y}2]", "[{x}{y}2, 64]", "[64, {x}{y}2] [{x}{y}2, 64] [64, 64] + sum{x}{y}"),
    ],
)
def test_products_are_made_where_least_is_received(left: str, right: str, placed: str) -> None:
    ends = [Layout.parse(f"f32{text}", Mesh(x=2, y=2)) for text in (left, right)]
    way = place_operands(*ends, ("m", "k"), ("k", "n"), ("m", "n"))
    assert [str(way.left), str(way.right), str(way.product)] == [f"f32{text}" for text in re.split(r" (?=\[)", placed)]


MISSED = ["special.reductions", "special.errors", "special.layouts"]
"""What random expressions miss."""
RUNS = [
    (1, ["conformance.values"]),
    (3, ["conformance.values_sampled", "conformance.documented", *MISSED]),
    pytest.param(4, ["conformance.values_sampled", "special.reductions"], marks=pytest.mark.sweep),
    *(pytest.param(ranks, ["conformance.values"], marks=pytest.mark.sweep) for ranks in (2, 3, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "topics"), RUNS, ids=str)
def test_numpys_expressions_on_ranks(ranks: int, topics: list[str], tmp_path: Path) -> None:
    running.check_all([f"numpy_protocol.{topic}" for topic in topics], ranks, tmp_path)

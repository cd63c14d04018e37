"""True parts of tiles, and transposes, reshapes, slices and joins: layouts and elements, against marked tiles."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")
from mpi4py import MPI

from reshard.errors import LayoutError
from reshard.lower.to_mpi import devices_by_id
from reshard.mpi import DistArray
from reshard.mpi.numpy_protocol import array_views as views
from reshard.mpi.numpy_protocol import tiled_array as tiled
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.mpi.numpy_protocol.arrays import COMM, array, as_rank, whole
from tests.oracle import PADDING, tiles_of

A = np.arange(24).reshape(4, 6)
SHAPES = [(24,), (2, 12), (2, 2, 6), (8, 3), (4, 1, 6), (1, 24, 1), (3, 8), (6, 4), (-1, 2), (5, 5)]


def _reshaped(layout: Layout, shape: tuple[int, ...]) -> Layout | None:
    """The layout of a reshaped array, whose marked tiles are compared on every device; None if it is refused."""
    result = None
    for seat, device in enumerate(devices_by_id(layout.mesh)):
        a = DistArray(layout, tiles_of(layout)[device].astype("int32"), as_rank(layout.mesh, seat))
        try:
            b = views.reshape(a, shape)
        except LayoutError:
            assert result is None
            continue
        result = b.layout
        assert np.array_equal(b.tile, tiles_of(result)[device]), (layout, result, device)
    return result


@pytest.mark.parametrize(
    ("text", "shape", "wanted"),
    [
        ("s32[{x}4, 6]", (2, 8, 6), "s32[{x:(1)2}, {x:(2)2}4, 6]"),
        ("s32[{x}4, 6]", (96,), "s32[{x}24]"),
        ("s32[16, {x}2]", (4, 4, 8), "s32[4, 4, {x}2]"),
        ("s32[16, {x}2]", (128,), "s32[16{x}2]"),
        ("s32[{x}3/10, 6]", (10, 2, 3), "s32[{x}3/10, 2, 3]"),
        ("s32[{x}3/10, 6]", (1, 10, 6), "s32[1, {x}3/10, 6]"),
        ("s32[{x}3/10, 6]", (60,), "s32[1{x}18/60]"),
        ("s32[{x}(3,5,0,2), 6]", (60,), "s32[{x}(18,30,0,12)]"),
        ("s32[{x}(6@0,9@3,6@0)]", (7, 3), "s32[{x}(2@0,3@3,2@0), 3]"),
        ("s32[{x}(6@0,9@3,6@0)]", (3, 7), None),
        ("s32[6, {x}(3,5,0,2)]", (60,), None),
        ("s32[{x}4, 6]", (3, 32), None),
        ("s32[{x}/1, 6]", (6,), "s32[1{x}6/6]"),
        ("s32[2{x}{y}3, 5]", (8, 30), "s32[2{x}, {y}15]"),
    ],
)
def test_digits_are_cut_elsewhere(text: str, shape: tuple[int, ...], wanted: str | None) -> None:
    layout = _reshaped(Layout.parse(text, Mesh(x=4, y=2)), shape)
    assert (None if layout is None else str(layout)) == wanted


def test_any_reshape_is_right_or_refused() -> None:
    choose, done = random.Random(4), 0
    for _ in range(200):
        layout = random_pair(choose)[0]
        size = int(np.prod(layout.shape))
        rows = choose.choice([k for k in range(1, size + 1) if size % k == 0] or [0])
        if size and size < 1000:
            done += _reshaped(layout, (rows, size // rows)) is not None
    assert done > 30


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: tuple[int, ...]) -> None:
    try:
        wanted = A.reshape(shape)
    except ValueError:
        with pytest.raises(LayoutError, match="cannot reshape"):
            np.reshape(array(A), shape)
    else:
        assert np.array_equal(whole(array(A).reshape(*shape)), wanted)
    assert array(np.zeros((0, 3))).reshape(5, 0).shape == (5, 0)
    with pytest.raises(TypeError, match="to_global"):
        np.reshape(array(A), (24,), order="F")


def test_a_transpose_is_a_view() -> None:
    layout = Layout.parse("s32[{x}2/7, {y}3, 4]", Mesh(x=4, y=2))
    for seat, device in enumerate(devices_by_id(layout.mesh)):
        a = DistArray(layout, tiles_of(layout)[device].astype("int32"), as_rank(layout.mesh, seat))
        turned = views.transpose(a, (2, 0, 1))
        assert str(turned.layout) == "s32[4, {x}2/7, {y}3]"
        real = tiles_of(turned.layout)[device] != PADDING
        assert np.array_equal(turned.tile, np.moveaxis(a.tile, 2, 0)) and real.shape == turned.tile.shape
        assert np.shares_memory(turned.tile, a.tile)
    with pytest.raises(ValueError, match="not a permutation"):
        array(A).transpose(0, 0)


@pytest.mark.parametrize(
    "key",
    [1, -1, (slice(1, 3),), (slice(None), 2), (slice(None, None, -2), slice(4, 1, -1)), (..., 0), None, (None, 1, ...),
     (slice(9, 9),), (np.int64(2), 3), (), slice(None)],
)  # fmt: skip
def test_slices(key: object) -> None:
    given, wanted = array(A)[key], A[key]  # pyright: ignore
    assert np.array_equal(whole(given) if isinstance(wanted, np.ndarray) else given, wanted)
    assert not isinstance(given, DistArray) or not np.shares_memory(given.tile, array(A).tile)


def test_refused_indices() -> None:
    for key in ([0, 1], A > 3, True, "a", 1.0):
        with pytest.raises(TypeError, match="to_global"):
            array(A)[key]
    for key in (4, -5, (0, 0, 0), (..., ...)):
        with pytest.raises(IndexError):
            array(A)[key]
    with pytest.raises(TypeError, match=r"written to a\.tile"):
        array(A)[0] = 1


def test_concatenate() -> None:
    assert np.array_equal(whole(np.concatenate([array(A), array(A[:1])])), np.concatenate([A, A[:1]]))
    mixed = np.concatenate([array(A), array(A.astype(float))], axis=-1)
    assert mixed.dtype == np.float64 and mixed.shape == (4, 12)
    for parts in ([array(A), array(A[:, :2])], [array(A), A], [array(A), array(A[0])]):
        with pytest.raises(LayoutError):
            np.concatenate(parts)


def test_local_dims() -> None:
    layout = Layout.parse("f32[{x}4, {y}3, 10, 9]", Mesh(x=4, y=2))
    assert str(views.make_dims_local(layout, (0, 1))) == "f32[16, 6, {x}{y}2/10, 9]"
    assert views.make_dims_local(layout, (3,)) == layout


def test_rows_in_pieces_are_cut_where_they_are() -> None:
    """Each rank has the rows of the part that it had before, in the order of the part; none waits for another."""
    choose, mesh = random.Random(6), Mesh(x=2, y=3)
    for _ in range(150):
        size = choose.choice([1, 5, 13, 31])
        owners = np.array([choose.randrange(6) for _ in range(size)])
        layout = Layout.from_owners(owners if choose.random() < 0.7 else np.sort(owners), mesh, (size, 2), "int32")
        first, last = (choose.choice([None, choose.randint(-size - 1, size + 1)]) for _ in range(2))
        key = slice(first, last, choose.choice([None, 1, 2, 3, -1, -2]))
        for seat, device in enumerate(devices_by_id(mesh)):
            a = DistArray(layout, tiles_of(layout)[device].astype("int32"), as_rank(mesh, seat))
            if layout.ragged:
                rows = np.arange(size)[key]
                mine = rows[np.isin(rows, [row for run in a.local_index_ranges()[0] for row in run])]
                assert np.array_equal(a[key].unpadded, 2 * mine[:, None] + [[0, 1]]), (layout, key)


def test_a_rank_without_a_tile_refuses_as_the_others_do() -> None:
    for text in ("f64[{x}3/5, 2]", "f64[{x}(4,1), 2]", "f64[{x}(1@1,4@0), 2]", "f64[{x}2, 2]"):
        layout, comm = Layout.parse(text, Mesh(x=2)), SimpleNamespace(rank=2, size=3)
        a: Any = DistArray(layout, None, cast("Any", comm))
        calls = [lambda a: a + 1, lambda a: a.astype("f4"), lambda a: np.array_equal(a, a)]
        if layout.ragged:  # Other slices begin with a move.
            calls += [lambda a: a[1:], lambda a: a[0], lambda a: np.concatenate([a, a])]
        for call in calls:
            with pytest.raises(TypeError, match="with a tile on each of the 3 ranks"):
                call(a)


def test_the_true_part_is_all_elements_and_no_padding() -> None:
    choose = random.Random(1)
    for _ in range(150):
        layout = random_pair(choose)[0]
        for rank, device in enumerate(devices_by_id(layout.mesh)):
            real = tiles_of(layout)[device] != PADDING
            inside = np.zeros(layout.tile_shape, bool)
            inside[tuple(map(slice, tiled.measure_extents(layout, rank)))] = True
            assert np.array_equal(inside, real), (layout, rank)


def test_a_new_tile_has_zeros_for_padding() -> None:
    layout = Layout.parse("f64[2{x}2/3]", Mesh(x=1))
    a = DistArray(layout, np.full(layout.tile_shape, 7.0), COMM)
    made = tiled.wrap_true_part(a, layout, np.ones(3, "int32"))
    assert made.layout.dtype == "int32"
    assert made.tile.tolist() == [1, 1, 1, *[0] * (layout.tile_shape[0] - 3)]


def test_dtypes_without_a_name() -> None:
    assert tiled.name_dtype(np.dtype("M8[D]")) == "uint64"
    for kind in ("O", "U3"):
        with pytest.raises(TypeError, match="to_global"):
            tiled.name_dtype(np.dtype(kind))
    with pytest.raises(TypeError, match="sum of a DistArray of dtype datetime64"):
        layout = Layout.parse("u64[3]", Mesh(x=1))
        DistArray.from_global(np.zeros(3, "M8[D]"), layout, COMM, dtype="M8[D]").sum()


def test_axes() -> None:
    assert tiled.normalize_axes((-1, 0), 3) == (0, 2)
    with pytest.raises(ValueError, match="duplicate"):
        tiled.normalize_axes((0, -1), 1)
    with pytest.raises(np.exceptions.AxisError):
        tiled.normalize_axes(2, 2)


def test_other_communicators() -> None:
    a = array([1.0])
    copy = DistArray(a.layout, a.tile, COMM.Dup())
    assert float(a + copy) == 2.0
    tiled.check_together("add", [a, copy])
    if MPI.COMM_WORLD.size == 1:
        return
    with pytest.raises(LayoutError, match="different communicators"):
        tiled.check_together("add", [a, DistArray(a.layout, a.tile, MPI.COMM_WORLD)])

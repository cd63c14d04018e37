"""Strided copies against numpy's own, for views of any order, and the choices that make them fast."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from reshard.runtime.on_mpi.copies import strided_copy
from reshard.runtime.on_mpi.copies.strided_copy import blocked, copy, raw, view, widened


@pytest.mark.parametrize("dtype", ["bool", "int16", "float32", "complex64", "complex128", "S3", "i4,f4,i4"])
def test_raw_words_have_the_bytes_of_the_elements(dtype: str):
    array = np.frombuffer(bytes(range(120)), np.uint8).copy().view(np.uint8)
    array = array[: 120 // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize] % 2
    elements = array.view(dtype)
    words = raw(elements)
    assert words.dtype.itemsize == elements.dtype.itemsize
    assert words.tobytes() == elements.tobytes()
    assert np.shares_memory(words, elements)


@pytest.mark.parametrize("order", ["C", "F", "reversed"])
def test_a_view_has_the_elements_of_its_axes(order: str):
    array = np.arange(7 * 5 * 3).reshape(7, 5, 3)
    array = array[::-1] if order == "reversed" else np.array(array, order=order)
    seen = view(array, (1, 0, 2), [(1, 2), (0, 3), (0, 1)], (2, 2, 3))
    wanted = [[[array[1 + 3 * i + j, 2 * c, 2] for j in range(3)] for i in range(2)] for c in range(2)]
    assert np.array_equal(seen, wanted)
    seen[...] = -1
    assert (array == -1).sum() == 12


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    """Sizes at which small arrays are copied as large ones are."""
    monkeypatch.setattr(strided_copy, "_SMALL", 0)
    monkeypatch.setattr(strided_copy, "_LARGE", 64)
    monkeypatch.setattr(strided_copy, "_BLOCK", 8)
    monkeypatch.setattr(strided_copy, "_TRIED", 16)
    monkeypatch.setattr(strided_copy, "_THICK", 2)
    monkeypatch.setattr(strided_copy, "_LONGEST", 20)
    monkeypatch.setattr(strided_copy, "_best", {})
    monkeypatch.setattr(strided_copy, "_BLOCKINGS", ((4, 2, 2), (2, 2, 2), (1 << 62,) * 3))


@pytest.mark.parametrize("shape", [(23, 5, 7), (1, 41, 3), (6, 0, 2), (64,), (), (3, 2, 29, 2)])
@pytest.mark.parametrize("dtype", ["u1", "u8", "c16"])
def test_a_copy_copies_every_element_whatever_the_orders(small_blocks: None, shape: tuple[int, ...], dtype: str):
    content = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    for before, after in itertools.product(itertools.permutations(range(len(shape))), repeat=2):
        source = np.array(content.transpose(before), order="C").transpose(np.argsort(before))
        target = np.zeros([shape[d] for d in after], dtype).transpose(np.argsort(after))
        copy(target, source)
        assert np.array_equal(target, content)


def test_a_blocking_is_measured_once_and_kept(small_blocks: None):
    source = np.arange(40 * 30 * 2, dtype="u4").reshape(40, 30, 2)
    target = np.zeros((30, 40, 2), "u4").transpose(1, 0, 2)
    for _ in range(2):
        target[...] = 0
        copy(target, source[::1])
        assert np.array_equal(target, source)
    assert len(strided_copy._best) == 1


def test_only_large_copies_between_orders_are_blocked():
    large = np.zeros((1 << 9, 1 << 9), "u4")
    assert blocked(large, large.T)
    assert not blocked(large, large)
    assert not blocked(large[:64, :64], large[:64, :64].T)
    assert not blocked(large.view("V2048"), large.view("V2048"))


@pytest.mark.parametrize(("run", "wide"), [(2, "u8"), (4, "c16"), (5, "V20"), (128, None)])
def test_runs_that_are_one_in_both_views_are_one_element(run: int, wide: str | None):
    one, other = (np.arange(20000, dtype="u4").reshape(-1, 200)[:, :run] for _ in range(2))
    one, other = np.tile(one, (64, 1)), np.ascontiguousarray(np.tile(other, (64, 1)))
    rows = np.zeros((6400, 300), "u4")[:, :run]
    target, source = widened(rows, other)
    assert target.dtype == (np.dtype(wide) if wide else rows.dtype)
    np.copyto(target, source)
    assert np.array_equal(rows, one)

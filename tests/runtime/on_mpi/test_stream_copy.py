"""Copies past the caches write what numpy's do, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.runtime.on_mpi.copies import stream_copy
from reshard.runtime.on_mpi.copies.stream_copy import (
    LARGE,
    SWITCH,
    copy_all,
    describe_copies,
    find_kernel,
    stream_steps,
)
from reshard.runtime.on_mpi.copies.strided_copy import Array

needs_kernel = pytest.mark.skipif(find_kernel() is None, reason="the C extension was not built")

GUARD = 256


def memory(nbytes: int, offset: int) -> Array:
    """Memory of bytes that starts this far from a cache line's beginning, with guards around it."""
    whole = np.full(nbytes + 2 * GUARD + 64, 0xEE, np.uint8)
    start = -whole.ctypes.data % 64 + offset + 64
    return whole[start : start + nbytes]


def guarded(part: Array) -> bool:
    """Whether the memory around a part is untouched."""
    whole = part
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    start = part.ctypes.data - whole.ctypes.data
    return bool((whole[:start] == 0xEE).all() and (whole[start + part.nbytes :] == 0xEE).all())


@needs_kernel
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_same_as_numpy(data: st.DataObject) -> None:
    """Several parts of rows into tiles of their own, or back, some backwards, with axes in another order."""
    lead = data.draw(st.lists(st.integers(1, 5), max_size=3))
    row, copies = data.draw(st.sampled_from([16, 48, 64, 128, 192, 1040])), data.draw(st.integers(1, 4))
    taken = data.draw(st.lists(st.integers(0, copies - 1), min_size=1, unique=True))
    order = [*data.draw(st.permutations(range(len(lead)))), len(lead)]
    offsets = data.draw(st.tuples(*[st.sampled_from([0, 0, 16, 8])] * 2))
    itemsize = data.draw(st.sampled_from([1, 4, 8, 16]))
    dtype = np.dtype({1: "u1", 4: "u4", 8: "u8", 16: "c16"}[itemsize])
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))

    shape = [*lead, copies * row]
    big = memory(int(np.prod(shape)) * itemsize, offsets[0])
    parts = [memory(big.size // copies, offsets[1]) for _ in taken]
    views: list[tuple[Array, Array]] = []
    for part, number in zip(parts, taken, strict=True):
        mine = part.view(dtype).reshape([[*lead, row][axis] for axis in order]).transpose(np.argsort(order))
        views.append((mine, big.view(dtype).reshape(shape)[..., number * row : (number + 1) * row]))
    if data.draw(st.booleans()):
        views = [(one[::-1], other[::-1]) for one, other in views]
    if data.draw(st.booleans()):
        views = [(other, one) for one, other in views]
    for view in views:
        view[1][...] = rng.integers(0, 255, view[1].shape)
    wanted = [source.copy() for _, source in views]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_copy, "_PART", data.draw(st.sampled_from([256, 2048, 1 << 20])))
        patch.setattr(stream_copy, "_LEAST", 0)
        steps = stream_steps(views, 0)
    for step in steps or ():
        step()
    if steps is not None:
        assert all(np.array_equal(target, source) for (target, _), source in zip(views, wanted, strict=True))
    assert all(map(guarded, [big, *parts]))


def pencils(run: int, gap: int = 0, rows: int = 2048) -> list[tuple[Array, Array]]:
    """Four parts of rows, in runs of `run` bytes, into tiles of their own; with a gap at the end of each row."""
    source = memory(rows * (4 * run + gap), 0).reshape(rows, 4 * run + gap)
    source[...] = np.arange(source.size, dtype=np.uint32).astype(np.uint8).reshape(source.shape)
    return [(memory(rows * run, 0).reshape(rows, run), source[:, n * run : (n + 1) * run]) for n in range(4)]


def matches(views: Sequence[tuple[Array, Array]]) -> bool:
    return all(np.array_equal(*pair) for pair in views)


@needs_kernel
@pytest.mark.parametrize("run, gap", [(512, 0), (512, 512), (64, 128), (512, 100 * 64)])
def test_rows_and_gaps(run: int, gap: int) -> None:
    views = pencils(run, gap)
    steps = stream_steps(views, 0)
    assert steps is not None
    for step in steps:
        step()
    assert matches(views) and all(guarded(target) for target, _ in views)


@needs_kernel
@pytest.mark.parametrize("run, why", [(72, "runs are no multiple of 16 bytes"), (80, "short runs at no cache line")])
def test_left_to_numpy(run: int, why: str) -> None:
    views = pencils(run)
    assert stream_steps(views, 0) is None, why
    copy_all(views)
    assert matches(views)


@needs_kernel
def test_a_tile_that_is_shifted_onto_itself_is_left_to_numpy() -> None:
    tile = memory(1 << 20, 0)
    tile[...] = np.arange(1 << 20, dtype=np.uint32).astype(np.uint8)
    wanted = memory((1 << 20) - 64, 0)
    wanted[...] = tile[:-64]
    views = [(tile[64:], tile[:-64])]
    assert stream_steps(views, 0) is None
    assert stream_steps([(wanted, tile[:-64])], 0) is not None
    copy_all(views)
    assert np.array_equal(tile[64:], wanted)


@needs_kernel
def test_large_only() -> None:
    """Of fewer bytes than `LARGE`, or of copies that are small each, numpy makes the copies."""
    assert stream_steps(pencils(512, rows=LARGE // 2048 - 1)) is None
    assert stream_steps(pencils(512, rows=LARGE // 2048)) is not None
    blocks = memory(LARGE, 0).reshape(64, -1)
    assert stream_steps([(np.empty_like(block), block) for block in blocks]) is None


@needs_kernel
def test_steps_keep_their_arrays() -> None:
    target = memory(LARGE, 0)
    steps = stream_steps([(target, np.full(LARGE, 7, np.uint8))])
    for step in steps or ():
        step()
    assert (target == 7).all()


@pytest.mark.parametrize("why", ["the C extension was not built", f"{SWITCH} is 0"])
def test_without_the_extension(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if SWITCH in why and find_kernel() is None:
        pytest.skip("the C extension was not built")
    monkeypatch.setenv(SWITCH, "0") if SWITCH in why else monkeypatch.setattr(stream_copy, "_stream", None)
    assert describe_copies().startswith(f"numpy: {why}")
    views = pencils(512)
    assert stream_steps(views, 0) is None
    copy_all(views)
    assert matches(views)


@needs_kernel
def test_a_table_of_another_size_is_refused() -> None:
    kernel = find_kernel()
    assert kernel is not None
    with pytest.raises(ValueError, match="another size"):
        kernel(np.array([64, 3, 1, 0, 0], np.int64).tobytes(), 0, 64)

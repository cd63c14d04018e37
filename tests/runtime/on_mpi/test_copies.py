"""Copies between strided views copy every element and nothing else: by numpy, past the caches, in order, and fused."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Hashable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.geometry.blocks import Axis, Block
from reshard.runtime.on_mpi.copies import copy_order, stream_copy, strided_copy
from reshard.runtime.on_mpi.copies.copy_order import MANY_BLOCKS, fuse_copies
from reshard.runtime.on_mpi.copies.stream_copy import (
    LARGE,
    SWITCH,
    copy_views,
    describe_copies,
    find_kernel,
    list_stream_steps,
)
from reshard.runtime.on_mpi.copies.strided_copy import (
    Array,
    TileCopies,
    copy_view,
    needs_blocks,
    view_as_words,
    view_block,
    widen_views,
)
from tests.sampling import for_each


@pytest.mark.parametrize("dtype", ["bool", "int16", "float32", "complex64", "complex128", "S3", "i4,f4,i4"])
def test_raw_words_have_the_bytes_of_the_elements(dtype: str):
    array = np.frombuffer(bytes(range(120)), np.uint8).copy().view(np.uint8)
    array = array[: 120 // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize] % 2
    elements = array.view(dtype)
    words = view_as_words(elements)
    assert words.dtype.itemsize == elements.dtype.itemsize
    assert words.tobytes() == elements.tobytes()
    assert np.shares_memory(words, elements)


@for_each(range(60))
def test_very_many_short_runs_are_copied_by_index(seed: int):
    """Runs of equal and other lengths, with and without gaps, of one axis or two, in order on neither side, or one."""
    choose = random.Random(seed)
    unit, shuffled, rows = choose.choice([1, 2, 8]), seed % 2, choose.choice([1, 1, 3])
    lengths = [unit * choose.randint(1, 4 if seed % 3 else 1) for _ in range(choose.choice([64, 300]))]
    places: list[list[int]] = []
    for gaps in (seed % 5 < 3, seed % 7 < 3):
        order, at = list(range(len(lengths))), 0
        choose.shuffle(order) if shuffled and gaps else None
        place = [0] * len(lengths)
        for number in order:
            place[number] = at
            at += rows * lengths[number] + unit * choose.randint(0, gaps)
        places.append([*place, at + choose.randint(0, 3)])
    axes = [(Axis(rows, n, n), Axis(n, 1, 1)) if rows > 1 else (Axis(n, 1, 1),) for n in lengths]
    blocks = [Block(src, dst, of) for src, dst, of in zip(places[0][:-1], places[1][:-1], axes, strict=True)]
    source = np.arange(places[0][-1]).astype(choose.choice(["u1", "u4", "c16"]))
    target, wanted = (np.zeros(places[1][-1], source.dtype) for _ in range(2))
    for block, length in zip(blocks, lengths, strict=True):
        wanted[block.dst : block.dst + rows * length] = source[block.src : block.src + rows * length]
    copies = [TileCopies(blocks, target, source)]
    by_source, made = choose.random() < 0.5, dict[Hashable, object]()
    for _ in range(2):
        target[:] = 0
        steps = copy_order.list_copy_steps(copies, (), made, source if by_source else None)
        assert 0 < len(steps) < MANY_BLOCKS
        for step in steps:
            step()
        assert np.array_equal(target, wanted)


def test_long_blocks_and_blocks_of_many_runs_are_not_copied_by_index():
    long = [Block(4096 * at, 4096 * at, (Axis(4096, 1, 1),)) for at in range(MANY_BLOCKS)]
    many = [Block(20 * at, 10 * at, (Axis(10, 2, 1),)) for at in range(MANY_BLOCKS)]
    source, target = np.zeros((2, 4096 * MANY_BLOCKS), "u4")
    for blocks in (long, many):
        order = copy_order.order_copies(blocks, target.size, 4)
        assert len(copy_order.list_copy_steps([TileCopies(blocks, target, source)], order, {})) == MANY_BLOCKS


@pytest.mark.parametrize("order", ["C", "F", "reversed"])
def test_a_view_has_the_elements_of_its_axes(order: str):
    array = np.arange(7 * 5 * 3).reshape(7, 5, 3)
    array = array[::-1] if order == "reversed" else np.array(array, order=order)
    block = Block(0, 17, (Axis(2, 1, 6), Axis(2, 1, 45), Axis(3, 1, 15)))
    seen = view_block(array, block, "dst")
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
        copy_view(target, source)
        assert np.array_equal(target, content)


def test_a_blocking_is_measured_once_and_kept(small_blocks: None):
    source = np.arange(40 * 30 * 2, dtype="u4").reshape(40, 30, 2)
    target = np.zeros((30, 40, 2), "u4").transpose(1, 0, 2)
    for _ in range(2):
        target[...] = 0
        copy_view(target, source[::1])
        assert np.array_equal(target, source)
    assert len(strided_copy._best) == 1


def test_only_large_copies_between_orders_are_blocked():
    large = np.zeros((1 << 9, 1 << 9), "u4")
    assert needs_blocks(large, large.T)
    assert not needs_blocks(large, large)
    assert not needs_blocks(large[:64, :64], large[:64, :64].T)
    assert not needs_blocks(large.view("V2048"), large.view("V2048"))


@pytest.mark.parametrize(("run", "wide"), [(2, "u8"), (4, "c16"), (5, "V20"), (128, None)])
def test_runs_that_are_one_in_both_views_are_one_element(run: int, wide: str | None):
    one, other = (np.arange(20000, dtype="u4").reshape(-1, 200)[:, :run] for _ in range(2))
    one, other = np.tile(one, (64, 1)), np.ascontiguousarray(np.tile(other, (64, 1)))
    rows = np.zeros((6400, 300), "u4")[:, :run]
    target, source = widen_views(rows, other)
    assert target.dtype == (np.dtype(wide) if wide else rows.dtype)
    np.copyto(target, source)
    assert np.array_equal(rows, one)


def copy_by_hand(table: np.ndarray, wanted: int) -> None:
    """What the extension does, run by run, box after box: for machines without it, and as a second reading of its
    tables. Boxes that are done have no turns left.
    """
    boxes, ndim = table[0], table[1]
    numbers = table[5 : 5 + 9 * boxes].reshape(-1, 9)
    axes = table[5 + 9 * boxes : 5 + 9 * boxes + 4 * ndim].reshape(-1, 4)
    assert table.size == 5 + 10 * boxes + 4 * ndim
    for box in numbers:
        source, target, run, _, first, _, end, left, _ = box.tolist()
        if left and wanted > 0:
            for at in itertools.product(*(range(extent) for extent in axes[first:end, 0])):
                by = [sum(i * step for i, step in zip(at, axes[first:end, side], strict=True)) for side in (1, 2)]
                ctypes.memmove(int(target + by[1]), int(source + by[0]), run)
                wanted -= run
            box[7] = 0


@pytest.fixture(params=["by hand", "extension"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies go past the caches by the extension, or by hand in its place."""
    if request.param == "by hand":
        monkeypatch.setattr(stream_copy, "find_kernel", lambda: copy_by_hand)
    elif find_kernel() is None:
        pytest.skip("the C extension was not built")


needs_kernel = pytest.mark.usefixtures("kernel")
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
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_same_as_numpy(data: st.DataObject) -> None:
    """Several parts of rows into tiles of their own, or back, some backwards, with axes in another order."""
    lead = data.draw(st.lists(st.integers(1, 5), max_size=3))
    row, copies = data.draw(st.sampled_from([5, 16, 33, 64, 128, 1040])), data.draw(st.integers(1, 4))
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
    for _, source in views:
        source[...] = rng.integers(0, 255, source.shape)
    wanted = [source.copy() for _, source in views]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_copy, "_PART", data.draw(st.sampled_from([256, 2048, 1 << 20])))
        patch.setattr(stream_copy, "_LEAST", 0)
        patch.setattr(stream_copy, "_SHORTEST", data.draw(st.sampled_from([0, 128])))
        steps = list_stream_steps(views, 0)
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
@pytest.mark.parametrize("run, gap", [(512, 0), (512, 512), (256, 128), (512, 100 * 64), (264, 0), (400, 8), (129, 3)])
def test_rows_and_gaps(run: int, gap: int) -> None:
    """Apart and together again: runs of any bytes, at any place, end within lines that others complete, or nobody."""
    views = pencils(run, gap)
    whole = memory(2048 * (4 * run + gap), 8).reshape(2048, -1)
    back = [(whole[:, n * run : (n + 1) * run], target) for n, (target, _) in enumerate(views)]
    for each in (views, back):
        steps = list_stream_steps(each, 0)
        assert steps is not None
        for step in steps:
            step()
        assert matches(each)
    assert guarded(whole) and (whole[:, 4 * run :] == 0xEE).all() and all(guarded(target) for target, _ in views)


@needs_kernel
def test_left_to_numpy() -> None:
    views = pencils(120)
    assert list_stream_steps(views, 0) is None, "short runs"
    copy_views(views)
    assert matches(views)


@needs_kernel
@pytest.mark.parametrize("seed", range(8))
def test_unrelated_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns of a tile in blocks that have nothing to do with each other, dealt to three others and back, in
    rows and parts of any size.
    """
    choose = random.Random(seed)
    monkeypatch.setattr(stream_copy, "_ROW", choose.choice([1, 100, 4096]))
    monkeypatch.setattr(stream_copy, "_PART", choose.choice([70, 5000, 1 << 20]))
    monkeypatch.setattr(stream_copy, "_LEAST", 0)
    monkeypatch.setattr(stream_copy, "_SHORTEST", 0)
    dtype = np.dtype(choose.choice(["u1", "u4", "u8", "V3"]))
    shape = choose.randrange(60, 200), choose.randrange(60, 200)
    whole = memory(shape[0] * shape[1] * dtype.itemsize, 4).view(dtype).reshape(shape)
    whole.view("u1")[...] = np.random.default_rng(seed).integers(0, 255, whole.view("u1").shape)
    cuts = [sorted({0, size, *choose.sample(range(size), choose.randrange(1, 9))}) for size in shape]
    others = [np.zeros(shape, dtype) for _ in range(3)]
    spans = itertools.product(*(itertools.pairwise(cut) for cut in cuts))
    dealt = [(choose.choice(others), (slice(*rows), slice(*columns))) for rows, columns in spans]
    copy = memory(whole.nbytes, 12).view(dtype).reshape(shape)
    for views in ([(to[at], whole[at]) for to, at in dealt], [(copy[at], to[at]) for to, at in dealt]):
        steps = list_stream_steps(views, 0)
        assert steps is not None
        for step in steps:
            step()
        assert matches(views)
    assert np.array_equal(copy, whole) and guarded(copy) and guarded(whole)


@needs_kernel
def test_a_tile_that_is_shifted_onto_itself_is_left_to_numpy() -> None:
    tile = memory(1 << 20, 0)
    tile[...] = np.arange(1 << 20, dtype=np.uint32).astype(np.uint8)
    wanted = memory((1 << 20) - 64, 0)
    wanted[...] = tile[:-64]
    views = [(tile[64:], tile[:-64])]
    assert list_stream_steps(views, 0) is None
    assert list_stream_steps([(wanted, tile[:-64])], 0) is not None
    copy_views(views)
    assert np.array_equal(tile[64:], wanted)


@needs_kernel
def test_large_only() -> None:
    """Of fewer bytes than `LARGE`, or of copies that are small each, numpy makes the copies."""
    assert list_stream_steps(pencils(512, rows=LARGE // 2048 - 1)) is None
    assert list_stream_steps(pencils(512, rows=LARGE // 2048)) is not None
    blocks = memory(LARGE, 0).reshape(512, -1)
    assert list_stream_steps([(np.empty_like(block), block) for block in blocks]) is None


@needs_kernel
def test_steps_keep_their_arrays() -> None:
    target = memory(LARGE, 0)
    steps = list_stream_steps([(target, np.full(LARGE, 7, np.uint8))])
    for step in steps or ():
        step()
    assert (target == 7).all()


@pytest.mark.parametrize("why", ["the C extension was not built", f"{SWITCH} is 0"])
def test_without_the_extension(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if SWITCH in why and find_kernel() is None:
        pytest.skip("the C extension was not built")
    monkeypatch.setenv(SWITCH, "0") if SWITCH in why else monkeypatch.setattr(stream_copy, "copy_boxes", None)
    assert describe_copies().startswith(f"numpy: {why}")
    views = pencils(512)
    assert list_stream_steps(views, 0) is None
    copy_views(views)
    assert matches(views)


def test_a_table_of_another_size_is_refused() -> None:
    kernel = find_kernel()
    if kernel is None:
        pytest.skip("the C extension was not built")
    with pytest.raises(ValueError, match="another size"):
        kernel(np.array([1, 3, 0, 0, 0, *[0] * 21], np.int64), 64)


HALVES = [Block(at, at, (Axis(4096, 64, 64), Axis(32, 1, 1))) for at in (0, 32)]


def test_long_runs_and_single_copies_are_not_cut():
    rows = [Block(0, at * 4096, (Axis(4, 1, 2 * 4096), Axis(4096, 1, 1))) for at in (1, 0)]
    assert [part.number for part in copy_order.order_copies(rows, 8 * 4096, 8)] == [1, 0]
    assert len(copy_order.order_copies(HALVES[:1], 4096 * 64, 8)) == 1


@pytest.mark.parametrize("part", [64, 300, 1 << 20])
def test_the_parts_of_a_copy_are_the_copy(part: int, monkeypatch: pytest.MonkeyPatch):
    """Interleaved columns of 13 rows: each element of the tile is counted once, and addresses never go back."""
    monkeypatch.setattr(copy_order, "_PART", part)
    tile = np.zeros((13, 30), "u4")
    blocks = [Block(0, at, (Axis(13, 10, 30), Axis(10, 1, 3))) for at in range(3)]
    order = copy_order.order_copies(blocks, tile.size, tile.itemsize)
    starts = []
    for number, where, _ in order:
        view = view_block(tile, blocks[number], "dst")[where]
        starts.append(view.__array_interface__["data"][0])
        view += 1
    assert (tile == 1).all()
    assert starts == sorted(starts)
    assert len(order) > len(blocks) or part > tile.nbytes


def test_short_runs_of_a_tile_are_read_ahead(monkeypatch: pytest.MonkeyPatch):
    """Every byte of the tile is read once, before the copies that take it; not longer runs, nor a tile hardly used, nor
    one that caches hold."""
    monkeypatch.setenv(SWITCH, "0")  # Numpy's copies alone are read ahead.
    rows = 1 << 17
    source, target = np.arange(16 * rows, dtype="u8").reshape(rows, 16), np.zeros((rows, 16), "u8")
    halves = [Block(at, at, (Axis(rows, 16, 16), Axis(8, 1, 1))) for at in (0, 8)]
    order = copy_order.order_copies(halves, source.size, 8, True)
    ahead = [part.ahead for part in order if part.ahead]
    assert ahead[0][0] == 0 and ahead[-1][1] == source.nbytes and len(ahead) > 1
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ahead))
    assert order[0].ahead and not order[1].ahead
    steps = copy_order.list_copy_steps([TileCopies(halves, target, source)], order, {}, source)
    assert len(steps) == len(order) + len(ahead)
    for step in steps:
        step()
    assert np.array_equal(target, source)
    sparse = [block._replace(axes=(Axis(rows, 32, 16), Axis(8, 1, 1))) for block in halves]
    assert not any(part.ahead for part in copy_order.order_copies(sparse, rows * 32, 8, True))
    wide = [Block(at, at, (Axis(rows // 2, 32, 32), Axis(16, 1, 1))) for at in (0, 16)]
    assert not any(part.ahead for part in copy_order.order_copies(wide, source.size, 8, True))
    few = [block._replace(axes=(Axis(rows // 4, 16, 16), Axis(8, 1, 1))) for block in halves]
    assert not any(part.ahead for part in copy_order.order_copies(few, source.size // 4, 8, True))


def test_transposing_copies_go_one_by_one():
    source, target = np.arange(512 * 512, dtype="u4").reshape(512, 512), np.zeros((512, 512), "u4")
    halves = [Block(at, 512 * at, (Axis(256, 1, 512), Axis(512, 512, 1))) for at in (0, 256)]
    order = copy_order.CopyPart(0, (...,)), copy_order.CopyPart(1, (...,))
    steps = copy_order.list_copy_steps([TileCopies(halves, target, source)], order, {})
    assert len(steps) == 2
    for step in steps:
        step()
    assert np.array_equal(target, source.T)


@needs_kernel
def test_a_table_serves_tiles_at_other_addresses() -> None:
    """What is worked out once: the same copies between other tiles, and into tiles of other strides."""
    made: dict[Hashable, stream_copy.CopyTable] = {}
    halves = [[Block(0, at, (Axis(4096, 128, 256), Axis(128, 1, 1)))] for at in (0, 128)]
    for shift, pitch in ((0, 256), (64, 256), (0, 260)):
        sources = [np.arange(shift, 4096 * 128 + shift, dtype="u8").reshape(4096, 128) + at for at in (0, 9)]
        target = np.zeros((4096, pitch), "u8")[:, :256]
        copies = [TileCopies(half, target, source) for half, source in zip(halves, sources, strict=True)]
        for step in copy_order.list_copy_steps(
            copies, copy_order.order_copies([*halves[0], *halves[1]], 1 << 20, 8), made
        ):
            step()
        assert np.array_equal(target, np.hstack(sources))
    assert len(made) == 2


def elements(copies: list[Block]) -> list[tuple[int, int]]:
    """(source, target) of every element."""
    return sorted(
        (
            each.src + sum(i * axis.src for i, axis in zip(at, each.axes, strict=True)),
            each.dst + sum(i * axis.dst for i, axis in zip(at, each.axes, strict=True)),
        )
        for each in copies
        for at in itertools.product(*map(range, each.extents))
    )


@for_each(range(20))
def test_the_same_elements_are_copied(seed: int):
    choose = random.Random(seed)
    shapes = [(Axis(2, 24, 64), Axis(3, 8, 8)), (Axis(2, 8, 16),), ()]
    copies = [
        Block(256 * choose.randrange(4), 8 * choose.randrange(6), choose.choice(shapes))
        for _ in range(choose.randrange(9))
    ]
    made = fuse_copies(copies)
    assert elements(made) == elements(copies)
    assert len(made) <= len(copies)


def test_a_grid_of_blocks_is_one_copy():
    copies = [Block(1000 * a + 100 * b, 80 * a + 8 * b, (Axis(4, 8, 160),)) for a in range(3) for b in range(2)]
    assert [each.extents for each in fuse_copies(copies)] == [(3, 2, 4)]
    turned = [Block(1000 * (2 - a) + 100 * b, 80 * a + 8 * b, (Axis(4, 8, 160),)) for a in range(3) for b in range(2)]
    assert [each.axes[0] for each in fuse_copies(turned)] == [Axis(3, -1000, 80)]

"""Pieces of any size in the language: text, one form for equal pieces, what the constructor refuses."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import pickle
from array import array
from collections.abc import Callable

import numpy as np
import pytest

from reshard.errors import LayoutError, NotationError, ReshardError
from reshard.types import Digit, Dim, Layout, Mesh, Pieces
from reshard.types.meaning import meaning
from tests.mpi import pencils

MESH = Mesh(x=4, y=2)


def parse(text: str) -> Layout:
    return Layout.parse(text, MESH)


@pytest.mark.parametrize(
    ("text", "canonical", "sizes"),
    [
        ("{x}(3,5,0,2)", "{x}(3,5,0,2)", (3, 5, 0, 2)),
        ("{x}(3@0,2@2,5@0)", "{x}(3@0,2@2,5@0)", (8, 0, 2, 0)),
        ("{x}(3@0,0@1,2@2,1@2,5@0)", "{x}(3@0,3@2,5@0)", (8, 0, 3, 0)),
        ("{x}(2@0,3@1)", "{x}(2,3,0,0)", (2, 3, 0, 0)),
        ("{x}~10", "{x}~10", (3, 3, 2, 2)),
        ("{x}(3,3,2,2)", "{x}~10", (3, 3, 2, 2)),
        # A numeral says the same.
        ("{x}~8", "{x}2", (2, 2, 2, 2)),
        ("{x}~11", "{x}3/11", (3, 3, 3, 2)),
        ("{x}(3,3,3,1)", "{x}3/10", (3, 3, 3, 1)),
        ("{x}(8,2,0,0)", "1{x}8/10", (8, 2, 0, 0)),
        ("{x}(2@0,2@1,2@2,2@3,2@0,1@1)", "2{x}2/11", (4, 3, 2, 2)),
        ("{x}(0,0,0,0)", "0", (0, 0, 0, 0)),
        ("{x:(1)2}{x:(2)2}(3,5,0,2)", "{x}(3,5,0,2)", (3, 5, 0, 2)),
        ("(5)", "5", (5, 5, 5, 5)),
        # Pieces that are intervals in some order of the axes are written in that order, others in the mesh's.
        ("{y}{x}(1,2,3,4,5,6,7,8)", "{y}{x}(1,2,3,4,5,6,7,8)", (1, 2, 3, 4)),
        ("{x}{y}(1@0,2@2,3@4,4@6,5@1,6@3,7@5,8@7)", "{y}{x}(1,2,3,4,5,6,7,8)", (1, 2, 3, 4)),
        ("{y}{x}(5@3,1@0)", "{x}{y}(5@6,1@0)", (1, 0, 0, 5)),
    ],
)
def test_text(text: str, canonical: str, sizes: tuple[int, ...]):
    layout = parse(f"f32[{text}, 2]")
    assert str(layout) == f"f32[{canonical}, 2]"
    assert parse(str(layout)) == layout
    assert hash(parse(str(layout))) == hash(layout)
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert [layout.tile_shape_of(device)[0] for device in (0, 2, 4, 6)] == list(sizes)
    assert layout.tile_shape == (max(layout.tile_shape_of(device)[0] for device in MESH.devices), 2)


def test_padding_is_no_index_of_the_dim():
    layout = parse("f32[{x}(3@0,2@2,5@0)]")
    indices = [meaning(layout, device)[0] for device in (0, 2, 4, 6)]
    assert indices[0] == (0, 1, 2, 5, 6, 7, 8, 9)
    assert indices[2][:2] == (3, 4)
    padding = [index for own in (indices[1], indices[2][2:], indices[3]) for index in own]
    assert min(padding) >= 10
    assert len(set(padding)) == len(padding)


def test_equal_pieces_are_equal_layouts():
    """Every table of up to 5 owners, in two orders of the axes: layouts are equal only where devices hold alike."""
    mesh = Mesh(x=2, y=2)
    layouts: dict[Layout, tuple[object, ...]] = {}
    for size in range(1, 6):
        for owners in itertools.product(range(4), repeat=size):
            listed = [Layout.from_owners(owners, mesh, (size,), "f32")]
            swapped = Pieces.from_owners([owner % 2 * 2 + owner // 2 for owner in owners], 4)
            held = (Digit(2, mesh.sub_axis("y")), Digit(2, mesh.sub_axis("x")), Digit(swapped.largest, None))
            listed.append(Layout(mesh, (Dim(held, size, swapped),), "f32"))
            assert listed[0] == listed[1]
            means = tuple(tuple(at for at in range(size) if owners[at] == device) for device in range(4))
            held_by = [[at for at in meaning(listed[0], device)[0] if at < size] for device in range(4)]
            assert [tuple(held) for held in held_by] == list(means), str(listed[0])
            assert layouts.setdefault(listed[0], means) == means
            assert Layout.parse(str(listed[0]), mesh) == listed[0]
    assert len(layouts) == sum(4**size for size in range(1, 6))


@pytest.mark.parametrize(
    "make", [list, tuple, np.array, lambda each: np.array(each, np.uint8), lambda each: array("i", each)]
)
def test_owners_from_lists_and_buffers(make: Callable[[list[int]], object]):
    owners = [2, 2, 0, 1, 1, 1, 2]
    layout = Layout.from_owners(make(owners), Mesh(x=3), (4, 7), "f32", dim=1)
    assert str(layout) == "f32[4, {x}(2@2,1@0,3@1,1@2)]"


def test_numpy_counts_tables_as_the_standard_library_does(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(31)
    kinds = [rng.integers(0, 9, 3000), np.sort(rng.integers(0, 9, 900)), np.zeros(300, int), np.arange(2000) // 3 % 9]
    for owners in [*kinds, *(each.astype("i4")[::2] for each in kinds)]:
        seen: list[object] = []
        for long in (1, 1 << 60):
            monkeypatch.setattr("reshard.types.pieces._LONG", long)
            pieces = Pieces.from_owners(owners, 9)
            again = Pieces(np.ones(len(owners), int), owners, 9)
            assert (pieces, hash(pieces), str(pieces)) == (again, hash(again), str(again))
            assert [pieces.numbers[at] for at in np.repeat(range(len(pieces.lengths)), pieces.lengths)] == [*owners]
            assert pieces.sizes == tuple(np.bincount(owners, minlength=9))
            runs = [[*pieces.runs_of(number)] for number in range(9)]
            places = sorted((run.start, run.local) for of in runs for run in of)
            assert places == [*zip(pieces.starts, pieces.locals, strict=True)]
            seen.append((str(pieces), hash(pieces), runs))
        assert seen[0] == seen[1]
    monkeypatch.setattr("reshard.types.pieces._LONG", 1)
    with pytest.raises(LayoutError, match="piece -1 of 2"):
        Pieces([1, 2], [0, -1], 2)
    with pytest.raises(LayoutError, match="has -1 elements"):
        Pieces([1, -1], [0, 1], 2)
    with pytest.raises(LayoutError, match="give ints of at most"):
        Pieces.from_owners(np.full(9, 1 << 63, np.uint64), 2)


def test_owners_along_some_axes():
    one = Layout.from_owners([3, 0, 0, 2], MESH, (4, 7), "f32", axes=["x"])
    assert one == parse("f32[{x}(1@3,2@0,1@2), 7]")
    assert Layout.from_owners([3, 0], MESH, (2,), "f32", axes=["y", "x"]) == parse("f32[{y}{x}(1@3,1@0)]")
    with pytest.raises(LayoutError, match="exact cover"):
        Layout.from_owners([4], MESH, (1,), "f32", axes=["x"])


def test_sizes_along_some_axes():
    layout = Layout.from_sizes(np.array([1, 9]), MESH, (4, 10), "f32", dim=-1, axes=["y"])
    assert str(layout) == "f32[4, {y}(1,9)]"
    assert str(Layout.from_sizes([1, 2, 3, 4, 5, 6, 7, 8], MESH, (36,), "f32")) == "f32[{x}{y}(1,2,3,4,5,6,7,8)]"


def test_ranges_of_a_solver():
    """PETSc's getOwnershipRanges, and the first row of each block of a CSR matrix."""
    for offsets in ([0, 3, 8, 8, 10], np.array([0, 3, 8, 8, 10], np.int32), range(0, 41, 10)):
        wanted = [len(range(*pair)) for pair in itertools.pairwise(offsets)]
        assert Layout.from_ranges(offsets, Mesh(x=4), (offsets[-1], 7), "f32") == Layout.from_sizes(
            wanted, Mesh(x=4), (offsets[-1], 7), "f32"
        )
    assert str(Layout.from_ranges([0, 1, 9], MESH, (4, 9), "f32", dim=1, axes=["y"])) == "f32[4, {y}(1,8)]"


def test_chunks_of_dask():
    """What `dask.array` says of its own chunks, where it is installed, and as it says it elsewhere."""
    known = {
        ((10, 8), (3, 8)): ((3, 3, 3, 1), (8,)),
        ((9, 7), (4, 5)): ((4, 4, 1), (5, 2)),
        ((12, 6), (5, 3)): ((5, 5, 2), (3, 3)),
    }
    for (shape, size), chunks in known.items():
        with contextlib.suppress(ImportError):
            assert importlib.import_module("dask.array").zeros(shape, chunks=size).chunks == chunks
        mesh = Mesh(x=len(chunks[0]), y=len(chunks[1]))
        layout = Layout.from_chunks(chunks, mesh, "f32", ["x", ("y",)])
        assert layout.shape == shape
        for device, at in enumerate(np.ndindex(mesh.axes["x"], mesh.axes["y"])):
            box = [range(sum(own[:n]), sum(own[: n + 1])) for n, own in zip(at, chunks, strict=True)]
            extents = layout.tile_shape_of(device)
            held = [each[:n] for each, n in zip(meaning(layout, device), extents, strict=True)]
            assert held == [tuple(each) for each in box]
    # A dim without axes is whole on every device, however it is chunked.
    assert str(Layout.from_chunks(((3, 3, 2, 2), (4, 4)), MESH, "f32", ["x", None])) == "f32[{x}~10, 8]"


def test_as_even_as_can_be_is_array_split_and_what_heat_does():
    for size, count in itertools.product((0, 1, 9, 10, 11, 24), (1, 2, 3, 4, 7)):
        parts = np.array_split(np.arange(size), count)
        # heat's `comm.chunk`: the first size % count ranks have one more.
        heat = [size // count + (rank < size % count) for rank in range(count)]
        layout = Layout.parse(f"f32[{{x}}~{size}]", Mesh(x=count))
        assert [layout.tile_shape_of(device)[0] for device in range(count)] == heat == [len(part) for part in parts]
        assert layout == Layout.from_sizes(heat, Mesh(x=count), (size,), "f32")


@pytest.mark.parametrize(
    "rows", ["{x}2", "{x}~7", "2{x}1", "{x}{y}1", "8", "{x}(1@0,3@2,3@1)", "{y}(0,7)", "{x}2/7", "1{x}4/7", "{x}1/3"]
)
def test_nonzeros_go_where_their_rows_are(rows: str):
    choose = np.random.default_rng(7)
    layout = parse(f"f32[{rows}, 9]")
    counts = choose.integers(0, 4, layout.shape[0])
    indptr = np.concatenate([[0], np.cumsum(counts)])
    nonzeros = Layout.from_csr(indptr, layout, "s32")
    assert (nonzeros.shape, nonzeros.dtype) == ((indptr[-1],), "int32")
    for device in MESH.devices:
        own = meaning(layout, device)[0][: layout.tile_shape_of(device)[0]]
        held = [at for row in own for at in range(indptr[row], indptr[row + 1])]
        assert [*meaning(nonzeros, device)[0][: nonzeros.tile_shape_of(device)[0]]] == held


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{x}(3,5)", "exact cover"),
        ("{x}(3@4,5@1)", "exact cover"),
        ("(3,5)", "exact cover"),
        ("2{x}(3,5,1,1)", "radix match"),
        ("{x}2(3,5,1,1)", "radix match"),
        ("{x}(3,5,1,99999999999999999999)", "whole sizes"),
        ("{x}~99999999999999999999", "whole sizes"),
        ("{x}(9223372036854775807,9223372036854775807,0,0)", "whole sizes"),
        ("{x}(1,2,3,4), {x}2", "single use"),
    ],
)
def test_invariants(text: str, name: str):
    with pytest.raises(LayoutError, match=name):
        parse(f"f32[{text}]")


@pytest.mark.parametrize(
    ("pieces", "digits", "size", "name"),
    [
        (Pieces.from_sizes([3, 5, 0, 2]), (4, 5), 11, "exact cover"),
        (Pieces.from_sizes([3, 5, 0, 2]), (4, 6), 10, "radix match"),
        (Pieces.from_sizes([3, 5, 0, 2]), (4,), 10, "radix match"),
        ("(3,5,0,2)", (4, 5), 10, "reshard.types.Pieces"),
    ],
)
def test_dims_built_in_python(pieces: Pieces, digits: tuple[int, ...], size: int, name: str):
    held = (Digit(4, MESH.sub_axis("x")), *(Digit(radix, None) for radix in digits[1:]))
    with pytest.raises(LayoutError, match=name):
        Layout(MESH, (Dim(held, size, pieces),), "f32")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pieces([-1, 2], [0, 1], 2),
        lambda: Pieces([1, 2], [0], 2),
        lambda: Pieces([1, 2], [0, 1], 0),
        lambda: Pieces([1.0, 2], [0, 1], 2),
        lambda: Pieces([True, 2], [0, 1], 2),
        lambda: Pieces.from_sizes("12"),
        lambda: Pieces.from_sizes(None),
        lambda: Layout.from_owners(np.zeros((2, 2), int), MESH, (4,), "f32"),
        lambda: Layout.from_owners(np.zeros(4), MESH, (4,), "f32"),
        lambda: Layout.from_owners([8], MESH, (1,), "f32"),
        lambda: Layout.from_owners([-1], MESH, (1,), "f32"),
        lambda: Layout.from_owners([0, 1], MESH, (3,), "f32"),
        lambda: Layout.from_owners([0, 1], MESH, (2,), "f32", dim=1),
        lambda: Layout.from_sizes([1, 1], MESH, (2,), "f32"),
        lambda: Layout.from_sizes([1, 1], MESH, (2,), "f32", axes=["z"]),
        lambda: Layout.from_ranges([], MESH, (2,), "f32", axes=["y"]),
        lambda: Layout.from_ranges([1, 1, 2], MESH, (2,), "f32", axes=["y"]),
        lambda: Layout.from_ranges([0, 3, 2], MESH, (2,), "f32", axes=["y"]),
        lambda: Layout.from_ranges([0, 3], MESH, (3,), "f32", axes=["y"]),
        lambda: Layout.from_ranges(7, MESH, (3,), "f32", axes=["y"]),
        lambda: Layout.from_chunks(((1, 1),), MESH, "f32", ["y", None]),
        lambda: Layout.from_chunks(((1, float("nan")),), MESH, "f32", ["y"]),
        lambda: Layout.from_chunks((1, 1), MESH, "f32", ["y", None]),
        lambda: Layout.from_chunks(None, MESH, "f32", ["y"]),
        lambda: Layout.from_chunks(((1, 1),), MESH, "f32", [3]),
        lambda: Layout.from_csr([0, 1, 2], parse("f32[2{y}1, 3]")),
        lambda: Layout.from_csr([0, 1, 2], parse("f32[{y}1, {x}3]")),
        lambda: Layout.from_csr([0, 1, 2], parse("f32[{y}1]")),
        lambda: Layout.from_csr([0, 1, 2], parse("f32[{y}1, 3] + sum{x}")),
        lambda: Layout.from_csr([0, 2, 1], parse("f32[{y}1, 3]")),
        lambda: Layout.from_csr([0, 1.5, 2], parse("f32[{y}1, 3]")),
        lambda: Layout.from_csr([0, 1, 2], "f32[{y}1, 3]"),
    ],
)
def test_what_is_no_table_is_refused(make: Callable[[], object]):
    with pytest.raises(ReshardError):
        make()


@pytest.mark.parametrize(
    "text", ["{x}(3,5@1)", "{x}()", "{x}(3,5,1,1)2", "{x}(3,,5,1)", "{x}~", "{x}~x", "{x}(3,5,0,2)/10"]
)
def test_text_that_is_no_list_of_pieces(text: str):
    with pytest.raises(NotationError):
        parse(f"f32[{text}]")


def test_a_sharding_of_jax_is_refused():
    with pytest.raises(LayoutError, match="pieces of any size, and a NamedSharding"):
        parse("f32[{x}(3,5,0,2)]").to_jax(None)


def test_long_tables_are_short_in_errors_and_differ_there():
    mesh = Mesh(x=64)
    owners = [5 * at % 64 for at in range(1000)]
    one, other = (Layout.from_owners([*owners, last], mesh, (1001,), "f32") for last in (5, 7))
    assert len(str(one)) > 4000
    assert max(len(f"{one}"), len(repr(one))) < 150
    assert f"{one}" != f"{other}"
    assert Layout.parse(str(one), mesh) == one


def test_an_axis_of_several_primes_has_one_form():
    """An axis of 6 is 2 x 3 and 3 x 2: however it is spelled, equal tables are one layout, and numerals are found."""
    mesh = Mesh(x=6)
    for size in range(1, 5):
        for owners in itertools.product(range(6), repeat=size):
            one = Layout.from_owners(owners, mesh, (size,), "f32")
            for spelling in (["x:(1)3", "x:(3)2"], ["x:(1)2", "x:(2)3"]):
                axes = [mesh.sub_axis(name) for name in spelling]
                for order in (axes, axes[::-1]):
                    minor = axes[1].size
                    turned = [n if order is axes else n % minor * axes[0].size + n // minor for n in owners]
                    pieces = Pieces.from_owners(turned, 6)
                    held = (*(Digit(axis.size, axis) for axis in order), Digit(pieces.largest, None))
                    assert Layout(mesh, (Dim(held, size, pieces),), "f32") == one
    for text in ("{x:(3)2}{x:(1)3}2", "{x:(2)3}{x:(1)2}2", "{x:(1)2}3{x:(2)3}", "2{x:(3)2}2{x:(1)3}", "{x}2/11"):
        numeral = Layout.parse(f"f32[{text}]", mesh)
        indices = [meaning(numeral, device)[0] for device in range(6)]
        owned = [next(device for device in range(6) if at in indices[device]) for at in range(numeral.shape[0])]
        assert Layout.from_owners(owned, mesh, numeral.shape, "f32") == numeral


@pytest.mark.parametrize("ranks", pencils.RECORDED)
def test_pencils_are_those_of_mpi4py_fft(ranks: int):
    layouts = [layout for grid in pencils.list_grids(ranks) for layout in grid.layouts()]
    tiles = [pencils.tile_of(layout, rank) for layout in layouts for rank in range(ranks)]
    assert len(tiles) == 4 * pencils.ARRAYS * ranks
    assert pencils.digest_tiles(tiles) == pencils.RECORDED[ranks]


def test_a_table_that_its_owner_changes_later_changes_no_pieces():
    table, owners = array("q", [3, 5, 1, 1]), array("q", [2, 0, 2, 1])
    pieces = Pieces(table, owners, 3)
    table[0], owners[3] = 7, 0
    assert pieces == Pieces([3, 5, 1, 1], [2, 0, 2, 1], 3) and pieces.sizes == (5, 1, 4)


def test_tables_that_no_machine_can_list_are_refused():
    with pytest.raises(LayoutError, match="give ints of at most"):
        Layout.from_sizes(range(10**12), Mesh(x=4), (10,), "f32")
    with pytest.raises(LayoutError, match="its mesh dim has 2 devices"):
        Layout.from_dtensor(["Owned(999999999999)"], (2,), (9,), "f32")
    with pytest.raises(LayoutError, match=r"2 pieces .* 1 coordinates"):
        Layout.from_sizes([3, 4], Mesh(x=4), (8,), "f32", axes=[])

"""What is checked of tiles and layouts, tiles assigned to ranks, the figures of schedules, and measured networks."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.errors import LayoutError, PlanError, TileError
from reshard.mpi import DistArray, measurements, schedule_figures
from reshard.mpi import tile_checks as tiles
from reshard.mpi.tile_checks import count_retained, relabelled
from reshard.synth import Link, Network
from reshard.types import Layout, Mesh
from tests.oracle import PADDING, tiles_of

# ---- Checks of tiles and whole arrays, and layouts derived from others


ROWS = Layout.parse("f32[{x}3/5, 7]", Mesh(x=2))
TILE = np.zeros((3, 7), np.float32)
WORDS = Layout.parse("u64[{x}4]", Mesh(x=2))


def test_a_tile_that_fits_is_returned_as_an_array() -> None:
    assert tiles.check_tile(TILE, ROWS, "tile") is TILE
    assert tiles.check_tile(np.zeros((7, 3), np.float32).T, ROWS, "tile").shape == (3, 7)


def read_only() -> np.ndarray:
    array = np.zeros((3, 7), np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("rank", [0, 1])
def test_tiles_without_padding_are_copied_to_padded_ones(rank: int) -> None:
    own = np.arange(21, dtype=np.float32).reshape(3, 7)[: 3 - rank]
    given = tiles.check_given_tile(own, ROWS, rank)
    assert given.shape == (3, 7) and np.array_equal(given[: 3 - rank], own) and not given[3 - rank :].any()
    assert (given is own) == (rank == 0)
    assert np.array_equal(tiles.true_part(given, ROWS, rank), own)
    with pytest.raises(TileError, match=r"the tile has shape \(2, 7\), but tiles of"):
        tiles.check_given_tile(np.zeros((2, 7), np.float32), ROWS, 0)


def test_no_copy_beside_a_budget() -> None:
    assert tiles.check_given_tile(TILE, ROWS, 1, budget=100) is TILE
    for tile in (TILE[:2], TILE.astype(">f4")):
        assert tiles.check_given_tile(tile, ROWS, 1).dtype == np.float32
        with pytest.raises(TileError, match=r"copied beside the budget; give one of shape \(3, 7\)"):
            tiles.check_given_tile(tile, ROWS, 1, budget=100)


def test_results_without_padding() -> None:
    own = np.zeros((2, 7), np.float32)
    assert tiles.check_true_out(own, ROWS, 1, TILE, None) is own
    wrong: list[tuple[Any, str]] = [
        (np.zeros((3, 7), np.float32), "the out has shape (3, 7), but without padding this rank's tile of"),
        (own.astype(">f4"), "out is >f4, the tile float32; give one dtype"),
        (own.tolist(), "out is a list; give a numpy array"),
        (read_only()[:2], "out is read-only"),
        (TILE[:2], "out overlaps the tile"),
    ]
    for out, text in wrong:
        with pytest.raises(TileError) as caught:
            tiles.check_true_out(out, ROWS, 1, TILE, None)
        assert text in str(caught.value)
    with pytest.raises(TileError, match="copied beside the budget; give no out"):
        tiles.check_true_out(own, ROWS, 1, TILE, 100)


def test_a_result_has_the_dtype_of_the_tile() -> None:
    """Both stand for words of 8 bytes, but are not the same."""
    dates = np.zeros(4, "M8[s]")
    with pytest.raises(TileError, match=r"out is datetime64\[D\], the tile datetime64\[s\]"):
        tiles.check_out(np.zeros(4, "M8[D]"), WORDS, dates)
    out = np.zeros(4, "M8[s]")
    assert tiles.check_out(out, WORDS, dates) is out


@pytest.mark.parametrize(
    ("dtype", "fits"),
    [
        ("u8", True),
        ("M8[D]", True),
        ("V8", True),
        ("i4,f4", True),
        ("f8", False),
        ("i8", False),
        ("O", False),
        ("V4", False),
    ],
)
def test_dtypes_without_a_name_are_words_of_their_size(dtype: str, fits: bool) -> None:
    assert tiles.represents_dtype(WORDS, np.dtype(dtype)) == fits
    if fits:
        assert tiles.element_dtype(WORDS, dtype) == np.dtype(dtype)
    else:
        with pytest.raises(TileError, match="does not fit"):
            tiles.element_dtype(WORDS, dtype)


def test_dtypes_of_the_other_byte_order_say_so() -> None:
    with pytest.raises(TileError, match=r"dtype >f4 does not fit .* byte order of this machine"):
        tiles.element_dtype(ROWS, ">f4")
    assert tiles.element_dtype(ROWS, "f4") == tiles.element_dtype(ROWS, "<f4") == np.float32


def test_the_dtype_of_a_layout_without_one_given() -> None:
    assert tiles.element_dtype(ROWS, None) == np.float32
    assert tiles.element_dtype(Layout.parse("bf16[4]", Mesh()), None).name == "bfloat16"


# ---- Relabelling: the elements that stay are counted as the meaning says, and no assignment of tiles keeps more


pytest.importorskip("scipy")

TURNED = Mesh({"x": 3}, device_ids=[2, 0, 1])
PAIRS = [
    ("f32[{x}4, 6]", Mesh(x=3), "f32[{x}4, 6]", TURNED),
    ("f32[{x}4, 6]", Mesh(x=3), "f32[12, {x}2]", TURNED),
    ("f32[{x}3/7, 5]", Mesh(x=3), "f32[3{x}1/7, 5]", Mesh(x=3)),
    ("f32[{a}2/3, {b}3/5]", Mesh(a=2, b=2), "f32[3, {b}{a}2/5]", Mesh(a=2, b=2)),
    ("f32[6]", Mesh(x=4), "f32[{x}2/6]", Mesh(x=4)),
    ("f32[{x}3/7, 5]", Mesh(x=3), "f32[4{x}1/7, 5]", Mesh({"x": 2}, device_ids=[1, 2])),
    ("f32[{x}1/1]", Mesh(x=2), "f32[{x}1/1]", Mesh({"x": 2}, device_ids=[1, 0])),  # one element is worth two tiles
]


def layouts(pair: tuple[str, Mesh, str, Mesh]) -> tuple[Layout, Layout]:
    before, one, after, other = pair
    return Layout.parse(before, one), Layout.parse(after, other)


def in_common(source: Layout, target: Layout) -> np.ndarray:
    """At [r, t], the elements of device r's tile that are in device t's tile of the target, from the oracle's tiles."""
    held, wanted = ({d: set(t.ravel()) - {PADDING} for d, t in tiles_of(side).items()} for side in (source, target))
    devices = sorted(target.mesh.devices)
    return np.array([[len(held.get(mine, set()) & wanted[theirs]) for theirs in devices] for mine in devices])


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_no_assignment_keeps_more(pair: tuple[str, Mesh, str, Mesh]) -> None:
    source, target = layouts(pair)
    result = relabelled(source, target)
    counts = in_common(source, target)
    assert np.array_equal(count_retained(source, target), counts)
    most = max(sum(counts[rank, tile] for rank, tile in enumerate(order)) for order in permutations(range(len(counts))))
    assert np.trace(in_common(source, result)) == most
    assert result.mesh.axes == target.mesh.axes and set(result.mesh.devices) == set(target.mesh.devices)
    assert (result.dims, result.dtype) == (target.dims, target.dtype)


def test_if_all_assignments_keep_as_much_no_tile_changes_its_rank() -> None:
    rows, columns = Layout.parse("f32[{x}2, 6]", Mesh(x=3)), Layout.parse("f32[6, {x}2]", TURNED)
    assert relabelled(rows, columns) == columns


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(tiles, "import_module", absent)
    with pytest.raises(PlanError, match="pip install scipy"):
        relabelled(*layouts(PAIRS[0]))


def test_what_is_not_a_layout_is_refused():
    layout = Layout.parse("f32[{x}4, 6]", Mesh(x=3))
    with pytest.raises(LayoutError, match=r"the target .* is a list, not a Layout"):
        relabelled(layout, [1.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="give two layouts of one array"):
        relabelled(layout, Layout.parse("f32[{x}4, 5]", Mesh(x=3)))
    with pytest.raises(LayoutError, match=r"the layout .* is a ndarray, not a Layout"):
        DistArray(np.zeros((4, 6)), layout, comm=None)  # pyright: ignore[reportArgumentType]


# ---- The figures of a rank's schedule, on meshes that no test could start


MESH = Mesh(x=8)
ROWS_FIGURES, COLUMNS = Layout.parse("f32[{x}2, 16, 8192]", MESH), Layout.parse("f32[16, {x}2, 8192]", MESH)
"""In runs that are long enough to be read by the ranks of a node, so that all goes straight."""


@pytest.mark.parametrize(
    ("nodes", "messages"), [(None, 7), (8, 7), (4, 6), (2, 4), ([0, 0, 0, 1, 1, 2, 2, 2], 5), (1, 0)]
)
def test_messages_go_to_the_ranks_of_other_nodes(nodes: int | list[int] | None, messages: int) -> None:
    figures = schedule_figures(ROWS_FIGURES, COLUMNS, rank=2, nodes=nodes)
    assert (figures.sends, figures.receives) == (messages, messages)
    assert figures.seconds > 0 and figures.bytes > 0
    if nodes == 4:
        same = schedule_figures(ROWS_FIGURES, COLUMNS, rank=np.array(2), nodes=np.array(4))  # pyright: ignore
        assert same[2:] == figures[2:]


def test_a_rank_among_thousands_needs_little_memory() -> None:
    mesh = Mesh(x=64, y=64)
    pencils = Layout.parse("f32[{x}64, {y}64, 4096]", mesh), Layout.parse("f32[{x}64, 4096, {y}64]", mesh)
    figures = schedule_figures(*pencils, rank=1234)
    assert (figures.sends, figures.receives) == (63, 63)
    assert figures.bytes < 1 << 20
    assert schedule_figures(*pencils, rank=1234, nodes=64).bytes < 1 << 20


@pytest.mark.slow
def test_a_slab_on_thousand_ranks_takes_one_message_a_node_in_place_of_one_a_rank() -> None:
    mesh = Mesh(x=1024)
    slabs = Layout.parse("f32[{x}1, 1024, 16]", mesh), Layout.parse("f32[1024, {x}1, 16]", mesh)
    assert schedule_figures(*slabs, rank=1).sends == 1023
    carried = [schedule_figures(*slabs, rank=rank, nodes=16)[2:] for rank in (1, 63)]
    assert carried == [(1, 1), (0, 0)]  # 15 nodes in 4 groups of ranks: 60 messages, on 64 ranks
    assert schedule_figures(*slabs, rank=1, nodes=16, budget=2 * slabs[0].tile_bytes).sends == 1023


def test_reductions_and_other_devices() -> None:
    summed = Layout.parse("f32[64] + sum{x}", MESH)
    assert schedule_figures(summed, Layout.parse("f32[{x}8]", MESH))[2:] == (0, 0)
    there = Layout.parse("f32[{z}32]", Mesh({"z": 2}, device_ids=[8, 9]))
    assert schedule_figures(Layout.parse("f32[{x}8]", MESH), there, rank=3)[2:] == (1, 0)
    assert schedule_figures(Layout.parse("f32[{x}8]", MESH), there, rank=9)[2:] == (0, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 8}, "rank 8: .* has ranks 0 to 7"),
        ({"rank": np.arange(2)}, "has ranks 0 to 7"),
        ({"nodes": 3}, "nodes 3: 8 ranks are not spread evenly over that many"),
        ({"nodes": [0, 1]}, "give the node of each of the 8 ranks"),
    ],
)
def test_what_the_layouts_do_not_have(options: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        schedule_figures(ROWS_FIGURES, COLUMNS, **options)


# ---- Calibration: measured links become a network, the same on all ranks


NEAR, FAR = Link(1e-6, 1e10), Link(1e-5, 1e9)


def calibrated(monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], far: Link | None) -> Network:
    """The network of a team with these nodes, whose links are measured as given."""
    team = SimpleNamespace(nodes=nodes, size=len(nodes))
    agreed = nullcontext((team, None, None))
    monkeypatch.setattr(measurements, "collective", lambda *_: agreed)
    monkeypatch.setattr(measurements, "measure_link", lambda team, watch, near: NEAR if near else far)
    comm: Any = None
    return measurements.calibrate(comm, "mine", store=False)


def test_links_within_and_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    network = calibrated(monkeypatch, (0, 0, 0, 1, 1), FAR)
    assert (network.inner, network.outer) == (NEAR, FAR)
    assert (network.name, network.domain) == ("mine", 2)  # the smallest node
    assert network.source == "measured on 5 ranks on 2 nodes, all ranks exchanging at once"


def test_on_one_node_the_outer_link_is_the_inner_one(monkeypatch: pytest.MonkeyPatch) -> None:
    network = calibrated(monkeypatch, (0, 0, 0), None)
    assert network.outer == network.inner and network.domain == 3
    assert "on 1 node," in str(network.source)

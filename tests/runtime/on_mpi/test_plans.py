"""What a rank prepares from a request: the plan's steps, the transport, direct moves, launches of many arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

import reshard as rs
from reshard.errors import BudgetError, PlanError, TileError
from reshard.lower.program import CastTiles
from reshard.lower.to_mpi import NewSummand, Overwrite, Reduce, devices_by_id, is_unreplicated
from reshard.mpi import redistribute
from reshard.runtime.on_mpi.copies.stream_copy import copy_views
from reshard.runtime.on_mpi.copies.strided_copy import view_as_words
from reshard.runtime.on_mpi.direct_moves import (
    list_pushes,
    node_packing,
    pack_for_node,
    plan_direct,
    pull_from,
    push_into,
    run_bytes,
    unpack_from,
)
from reshard.runtime.on_mpi.launches import (
    STACKED,
    Bundle,
    Hop,
    Launch,
    Stack,
    list_hops,
    list_launches,
)
from reshard.runtime.on_mpi.node.node_sync import WORDS
from reshard.runtime.on_mpi.prepare import Request, TilePlan, plan_uncached, prepare_tile, read_options
from reshard.runtime.on_mpi.run_plan import RankStep, rank_plan
from reshard.runtime.on_mpi.team import Facts
from reshard.runtime.on_mpi.transports import TileTransfer, choose_transport
from reshard.runtime.on_mpi.window_tiles import Posted, WindowTile
from reshard.runtime.on_mpi.wire.by_node import FREE, NodeLoad, is_aggregated
from reshard.runtime.on_mpi.wire.chunks import Messages
from reshard.synth import Network
from reshard.types import Layout, Mesh
from tests.layouts import pairs
from tests.oracle import PADDING, tiles_of

# ---- Requests: the way that all ranks choose alike, the room for buffers, and what is refused


MESH = Mesh(x=4)


def layouts(before: str, after: str, mesh: Mesh = MESH) -> tuple[Layout, Layout]:
    return Layout.parse(before, mesh), Layout.parse(after, mesh)


def asked(
    source: Layout, target: Layout, budget: object = None, into: bool = False, shared: bool = False, **options: Any
) -> Request:
    return Request.of_tile(source, target, read_options(budget, **options), into, shared)


def ready(request: Request, facts: Facts, rank: int = 0, tile: np.ndarray | None = None) -> TilePlan:
    team = cast(Any, SimpleNamespace(size=len(facts.nodes), rank=rank, facts=facts))
    if tile is None:
        tile = np.zeros(request.source.tile_shape, request.source.dtype)
    return prepare_tile(team, request, tile)


ONE_NODE = Facts((0, 0, 0, 0), False)
READS = Facts((0, 0, 0, 0), True)
TWO_NODES = Facts((0, 0, 1, 1), True)
APART = Facts((0, 1, 2, 3), True)
SHORT = layouts("f32[{x}4, 16]", "f32[16, {x}4]")
LONG = layouts("f32[{x}4, 16, 16384]", "f32[16, {x}4, 16384]")
"""In runs of 256 KiB."""

SUM = layouts("f32[16, 16] + sum{x}", "f32[{x}4, 16]")


def test_networks_of_one_name_are_two_requests():
    texts = [str(asked(*SHORT, network=rs.Network.of({"x": (0, bandwidth)}, "lab"))) for bandwidth in (1, 2)]
    assert texts[0] != texts[1] and "bandwidth=2.0" in texts[1]
    assert str(asked(*SHORT, network="h100")).endswith("network=h100")


@pytest.mark.parametrize(
    ("pair", "facts", "options", "way", "otherwise"),
    [
        (SHORT, ONE_NODE, {}, "stage", "stage"),
        (SHORT, READS, {}, "stage", "stage"),
        (LONG, READS, {}, "read", "stage"),
        (LONG, ONE_NODE, {}, "stage", "stage"),
        (LONG, READS, {"shared": True}, "pull", "stage"),
        (LONG, APART, {}, "pull", "plan"),
        (LONG, TWO_NODES, {}, "read", "plan"),
        (SUM, ONE_NODE, {}, "plan", "plan"),
        (SHORT, ONE_NODE, {"budget": 2 * 256}, "plan", "plan"),
    ],
)
def test_the_way_of_a_request(pair: tuple[Layout, Layout], facts: Facts, options: dict, way: str, otherwise: str):
    request = asked(*pair, **options)
    everyone = [ready(request, facts, rank) for rank in range(4)]
    assert {(each.transport, each.otherwise) for each in everyone} == {(way, otherwise)}
    assert [each.device for each in everyone] == [0, 1, 2, 3]
    assert len({(each.push, each.buffered, each.spare) for each in everyone}) == 1


def test_without_room_to_stage_a_message_between_nodes_the_plan_is_run():
    tight = asked(*SHORT, budget=2 * 256)
    assert ready(tight, TWO_NODES).direct is None
    assert ready(tight, ONE_NODE).direct is not None


@pytest.mark.parametrize("pair", [SHORT, LONG])
@pytest.mark.parametrize("facts", [ONE_NODE, TWO_NODES, APART])
@pytest.mark.parametrize("careful", [False, True])
def test_buffers_stay_within_the_plan(pair: tuple[Layout, Layout], facts: Facts, careful: bool):
    source, target = pair
    request = asked(source, target, into=careful)
    for rank in range(4):
        mine = ready(request, facts, rank)
        assert mine.direct is not None
        messages = mine.direct.messages
        used = source.tile_bytes if "stage" in (mine.transport, mine.otherwise) else 0
        staged = messages.staging * 4 * (1 if messages.held else 2)
        received = rs.plan(source, target).received_bytes if messages.held else 0
        assert staged + received + used <= mine.spare or messages.staging == 0
        assert not messages.held or careful


def test_a_donated_tile_is_overwritten_only_under_a_budget_below_two_tiles():
    source, target = layouts("f32[{x}4, 16]", "f32[16, {x}4]")
    two = source.tile_bytes + target.tile_bytes
    assert ready(asked(source, target, donate=True), ONE_NODE).transport == "stage"
    assert ready(asked(source, target, two, donate=True), ONE_NODE).transport == "plan"
    tight = asked(source, target, two - 1, donate=True)
    assert ready(tight, ONE_NODE).transport == "overwrite"
    with pytest.raises(TileError, match="not C-ordered or not writeable"):
        ready(tight, ONE_NODE, tile=np.zeros((4, 16), "f4", order="F"))
    with pytest.raises(BudgetError, match="smallest that works is 512 B"):
        ready(asked(source, target, two - 1), ONE_NODE)
    with pytest.raises(BudgetError, match="smallest that works is 512 B"):
        ready(asked(source, target, two - 1, donate=True, into=True), ONE_NODE)


def test_a_growing_tile_cannot_be_overwritten():
    source, target = layouts("f32[{x}4, 16]", "f32[16, 16]")
    with pytest.raises(BudgetError):
        ready(asked(source, target, target.tile_bytes, donate=True), ONE_NODE)


def test_devices_are_ranks():
    request = asked(*layouts("f32[{x}2]", "f32[4]", Mesh({"x": 2}, device_ids=[3, 9])))
    text = (
        r"on <x=2> \(devices 3, 9\): not every device is one of the 4 ranks of the communicator; device ids are ranks"
    )
    with pytest.raises(PlanError, match=text):
        ready(request, ONE_NODE)
    assert ready(request, Facts((0, 0), False), 1).device == 9
    assert [ready(request, Facts((0,) * 10, False), rank).device for rank in (0, 3, 9)] == [0, 3, 9]


def test_a_request_as_text():
    source, target = layouts("f32[{x}4, 16]", "f32[16, {x}4]")
    plain = "f32[{x}4, 16] -> f32[16, {x}4] on Mesh({'x': 4})"
    assert str(asked(source, target)) == plain
    request = asked(source, target, 600, True, True, network="shm-mpi", donate=True)
    assert str(request) == f"{plain}, budget=600, network=shm-mpi, donate=True"
    assert (request.careful, asked(source, target, into=True).careful) == (False, True)
    turned = Layout(Mesh({"x": 4}, device_ids=[1, 2, 3, 0]), target.dims, target.dtype)
    assert str(asked(source, turned)).endswith("on Mesh({'x': 4}) and Mesh({'x': 4}, device_ids=[1, 2, 3, 0])")


def test_tiles_without_room_to_stage_are_read_if_their_runs_are_not_too_short():
    one, other = Mesh(x=2), Mesh({"y": 2}, device_ids=[2, 3])
    for side, way in ((1024, "read"), (256, "plan")):
        ends = (
            Layout.parse(f"f64[{{x}}{side // 2}, {side}]", one),
            Layout.parse(f"f64[{side}, {{y}}{side // 2}]", other),
        )
        assert ready(asked(*ends, into=True), READS).transport == way
        assert ready(asked(*ends, into=True), ONE_NODE).transport == "plan"


# ---- Moves on 1 to 8 ranks, in every way, against the oracle (see `tests.mpi.cases`); and which way is chosen


class Room:
    """An arena without memory, which has a place for so many blocks of a kilobyte at most."""

    def __init__(self, blocks: int) -> None:
        self.left = blocks

    def take(self, nbytes: int, gather: object, members: tuple[int, ...]) -> int:
        assert members
        assert nbytes <= 1024
        self.left -= 1
        return 64 if self.left >= 0 else 0

    def hold(self, place: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.zeros(shape, dtype)


def transfer(
    way: str, posts: list[tuple[int, int]], *, nodes: int = 1, plain: bool = True, room: int = 9, **options: Any
) -> TileTransfer:
    """A transfer of 4 x 16 floats of rank 0; `posts` has the places of tile and `out` of each rank of its node."""
    size = nodes * len(posts)
    mesh = Mesh(x=size)
    target = Layout.from_spec(mesh, (size, 16), "float32", [["x"]] if not options.pop("replicated", False) else [])
    source = Layout.from_spec(mesh, (4 * size, 16), "float32", [["x"]])
    members = tuple(range(len(posts)))
    team = SimpleNamespace(
        plain=plain, rank=0, members=members, one_node=nodes == 1, size=size, arena=Room(room), gather=list
    )
    request = SimpleNamespace(into=options.pop("into", False), source=source, target=target)
    ready = SimpleNamespace(
        transport=way,
        otherwise="stage",
        moves=options.pop("moves", object()),
        push=options.pop("push", False),
        crowded=options.pop("crowded", 0),
        by_node=None,
    )
    posted = {rank: Posted(place, 8, out) for rank, (place, out) in enumerate(posts)}
    call, held = SimpleNamespace(team=team, watch=None), WindowTile(np.zeros((4, 16), "f4"))
    return TileTransfer(*(cast(Any, each) for each in (call, ready, request, held, None, posted)))


PRIVATE, SHARED = [(0, 0)] * 4, [(3, 0)] * 4
NO_ROOM = {"room": 0}


@pytest.mark.parametrize(
    ("way", "posts", "options", "chosen"),
    [
        ("stage", SHARED, {}, "pull"),  # results of an earlier call
        ("read", SHARED, {}, "pull"),
        ("read", PRIVATE, {}, "push"),
        ("read", PRIVATE, {"crowded": -4}, "read"),  # more ranks receive than send
        ("plan", SHARED, {}, "pull"),
        ("plan", SHARED, {"nodes": 2}, "plan"),  # the budget has no room for messages between nodes
        ("stage", SHARED, {"push": True}, "push"),
        ("stage", PRIVATE, {}, "push"),  # the results will lie in windows
        ("plan", PRIVATE, {}, "push"),
        ("plan", PRIVATE, {"nodes": 2}, "plan"),
        ("stage", [*SHARED[:3], (0, 0)], {}, "push"),
        ("stage", PRIVATE, NO_ROOM, "plan"),
        ("stage", PRIVATE, {**NO_ROOM, "nodes": 2}, "messages"),  # the other node may have room
        ("stage", PRIVATE, {**NO_ROOM, "into": True}, "plan"),
        ("stage", SHARED, NO_ROOM, "pull"),
        ("stage", SHARED, {**NO_ROOM, "push": True}, "pull"),
        ("plan", PRIVATE, NO_ROOM, "plan"),
        ("plan", SHARED, NO_ROOM, "pull"),
        ("stage", PRIVATE, {"into": True, "replicated": True}, "stage"),
        ("read", PRIVATE, NO_ROOM, "read"),
        ("read", PRIVATE, {"into": True, "plain": False}, "pack"),  # some tile is not C-ordered
        ("stage", PRIVATE, {"into": True}, "pack"),  # `out` in private memory
        ("stage", [(0, 5)] * 4, {"into": True}, "push"),
        ("stage", [(0, 5)] * 3 + [(0, 0)], {"into": True}, "pack"),
        ("stage", [(0, 0)] * (WORDS + 1), {"into": True}, "stage"),  # more ranks than words
        ("pull", [(0, 0)], {"nodes": 3}, "pull"),  # alone on a node
        ("stage", [(0, 0)], {}, "pull"),
        ("plan", SHARED, {"moves": None}, "plan"),
        ("overwrite", SHARED, {"moves": None}, "overwrite"),
    ],
)
def test_the_way_follows_from_what_the_ranks_of_the_node_posted(way: str, posts: list, options: dict, chosen: str):
    assert choose_transport(transfer(way, posts, **options)) == chosen


# ---- When messages between nodes are joined: many short ones, on networks where a message costs more than the copies


NODES = tuple(rank // 64 for rank in range(1024))
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("load", "room", "network", "joined"),
    [
        (NodeLoad(960, 240 * KIB, 16 * KIB), FREE, None, True),
        (NodeLoad(960, 240 * KIB, 16 * KIB), 500 * KIB, None, False),  # no room
        (NodeLoad(15, 240 * KIB, 0), FREE, None, False),  # no more messages than nodes
        (NodeLoad(1, 8, 0), FREE, Network.uniform(1, 1e9), False),  # nothing to join
        (NodeLoad(960, 15 * MIB, 0), 64 * MIB, None, False),  # long messages: copies cost more
        (NodeLoad(960, 15 * MIB, 0), 64 * MIB, Network.uniform(1e-4, 1e9), True),  # unless each is slow to arrive
    ],
)
def test_which_moves_are_joined(load: NodeLoad, room: int, network: Network | None, joined: bool):
    assert is_aggregated(load, NODES, room, network) == joined


def test_the_room_is_for_what_a_rank_carries_in_both_directions():
    nodes, load = (0, 0, 1, 1, 2, 2, 3, 3), NodeLoad(60, 600, 0)  # Two of three stripes of 400 B.
    assert is_aggregated(load, nodes, 1600, Network.uniform(1, 1e9))
    assert not is_aggregated(load, nodes, 1599, Network.uniform(1, 1e9))


# ---- Direct moves without MPI: the tiles of all ranks in one process, pulled, pushed, packed, or sent in messages


NO_CALL = cast(Any, None)


def nodes_of(size: int, nodes: int) -> tuple[int, ...]:
    return tuple(rank * nodes // size for rank in range(size))


def by_rank(layout: Layout) -> list[np.ndarray]:
    tiles = tiles_of(layout)
    return [tiles[device].copy() for device in devices_by_id(layout.mesh)]


def assert_filled(layout: Layout, tiles: list[np.ndarray]) -> None:
    for rank, wanted in enumerate(by_rank(layout)):
        real = wanted != PADDING
        assert np.array_equal(tiles[rank][real], wanted[real]), f"rank {rank} of {layout}"


def moves(source: Layout, target: Layout, nodes: tuple[int, ...]) -> list:
    return [plan_direct(source, target, rank, nodes, 8, 1 << 20) for rank in range(len(nodes))]


def exchange(all_moves: list, before: list[np.ndarray], after: list[np.ndarray]) -> None:
    """All messages between nodes, by way of a buffer."""
    wire: dict[tuple[int, int], list[np.ndarray]] = {}
    for rank, move in enumerate(all_moves):
        for chunk in move.messages.sends.chunks:
            buffer = np.zeros(chunk.elements, np.int64)
            copy_views(chunk.packing(before[rank], buffer))
            wire.setdefault((rank, chunk.peer), []).append(buffer)
    for rank, move in enumerate(all_moves):
        for chunk in move.messages.receives.chunks:
            copy_views(chunk.unpacking(after[rank], wire[chunk.peer, rank].pop(0)))
    assert not any(wire.values()), "messages that nobody receives"


@given(pairs(), st.integers(1, 4), st.sampled_from(["pull", "push", "pack"]))
@settings(max_examples=90)
def test_every_target_is_filled(pair: tuple[Layout, Layout], count: int, way: str):
    source, target = pair
    nodes = nodes_of(source.mesh.size, count)
    if way == "pack" and not is_unreplicated(target):
        way = "pull"
    before = by_rank(source)
    after = [np.full(target.tile_shape, PADDING) for _ in nodes]
    every = moves(source, target, nodes)
    packed = {rank: packed_of(source, target, rank, nodes, before[rank]) for rank in range(len(nodes)) if way == "pack"}
    for rank, move in enumerate(every):
        if way == "push":
            fill = push_into(list_pushes(source, target, rank, nodes, 8), dict(enumerate(after)))
        elif way == "pack":
            fill = unpack_from({giver: packed[giver][rank] for giver, _ in move.pulls})
        else:
            fill = pull_from(dict(enumerate(before)))
        for step in fill(NO_CALL, move, view_as_words(before[rank]), view_as_words(after[rank])):
            step()
    exchange(every, before, after)
    assert_filled(target, after)


def packed_of(source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], tile: np.ndarray) -> dict:
    """What a rank packed, from the start of each receiver's part on; the whole is no larger than its tile."""
    packing = node_packing(source, target, rank, nodes, 8)
    packed = np.full(tile.size, PADDING)
    pack_for_node(packing, view_as_words(tile), view_as_words(packed))
    return {to: packed[start:] for to, start in packing.starts.items()}


def test_ranks_of_other_nodes_are_never_pulled_from():
    mesh = Mesh(x=6)
    source, target = Layout.parse("f32[{x}2, 12]", mesh), Layout.parse("f32[12, {x}2]", mesh)
    nodes = nodes_of(6, 2)
    for rank, move in enumerate(moves(source, target, nodes)):
        assert {nodes[giver] for giver, _ in move.pulls} == {nodes[rank]}
        assert {nodes[chunk.peer] for chunk in move.messages.receives.chunks} == {1 - nodes[rank]}
        assert move.pulled == 2 * 4
        assert sum(chunk.elements for chunk in move.messages.receives.chunks) == 3 * 4


def test_pushing_is_preferred_if_the_runs_are_shorter_in_the_source():
    """Columns to everything: runs are long in the source and short in the result, and the other way round."""
    mesh = Mesh(x=4)
    columns, everything = Layout.parse("f32[64, {x}16]", mesh), Layout.parse("f32[64, 64]", mesh)
    gather = run_bytes(columns, everything, 0, 4, 4)
    assert (gather.reach, gather.landing, gather.run) == (64 * 16 * 4, 64, 64)
    assert not gather.prefers_push
    halves = run_bytes(Layout.parse("f32[64, {x}16]", mesh), Layout.parse("f32[{x}16, 64]", mesh), 0, 4, 4)
    assert (halves.reach, halves.landing) == (16 * 16 * 4, 64)
    back = run_bytes(Layout.parse("f32[{x}16, 64]", mesh), Layout.parse("f32[64, {x}16]", mesh), 0, 4, 4)
    assert (back.reach, back.landing) == (64, 16 * 16 * 4)
    assert back.prefers_push


# ---- Plans of several steps on four ranks, see `tests.mpi.calls`, and what a rank's plan is made of


def test_ranks_number_the_devices_by_their_ids():
    mesh = Mesh({"x": 3}, device_ids=[9, 4, 6])
    plan = rs.plan(Layout.parse("f32[{x}3, 6]", mesh), Layout.parse("f32[9, {x}2]", mesh))
    mine = rank_plan(plan, 0, 3, 4)
    assert mine.ranks == {4: 0, 6: 1, 9: 2}
    (step,) = mine.steps
    assert step.after == (9, 2) and isinstance(step.run, Messages)
    assert {chunk.peer for chunk in step.run.sends.chunks} == {1, 2}
    assert rank_plan(plan, 0, 3, 4) is mine


def test_each_kind_of_step():
    mesh = Mesh(x=2)
    source, target = Layout.parse("f32[4, 6] + sum{x}", mesh), Layout.parse("f32[{x}2, 6]", mesh)
    assert [type(step.run) for step in rank_plan(rs.plan(source, target), 1, 2, 4).steps] == [Reduce]
    start = rs.plan(target, source)
    assert [type(step.run) for step in rank_plan(start, 1, 2, 4).steps] == [NewSummand]
    rows, columns = Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)
    tight = rs.plan(rows, columns, budget=rows.tile_bytes, donate=True)
    assert [type(step.run) for step in rank_plan(tight, 1, 2, 4).steps] == [Overwrite]


def steps(source: str, target: str, **options) -> tuple[list[str], tuple[RankStep, ...]]:
    plan = rs.plan(rs.Move(*(rs.Layout.parse(text, rs.Mesh(x=4)) for text in (source, target)), **options))
    return [step.kind for step in plan.steps], rank_plan(plan, 1, 4, 4).steps


def test_views_that_keep_memory_are_left_out():
    kinds, mine = steps("f32[3{x}2, 5]", "bf16[8, 5]", view="(t h) d -> h d", take={"t": 1}, t=3, cast=True)
    assert kinds == ["cast", "view", "take", "view", "all_gather"]
    assert [isinstance(step.run, CastTiles) for step in mine] == [True, False, False]
    assert [(step.before, step.after) for step in mine] == [((6, 5), (6, 5)), ((3, 2, 5), (1, 2, 5)), ((2, 5), (8, 5))]
    assert not any(step.fills for step in mine)


def test_a_step_that_fills_the_target():
    kinds, mine = steps("f32[{x}2, 5]", "f32[3{x}2, 5]", view="h d -> (t h) d", into={"t": 1}, t=3)
    assert kinds == ["view", "put", "view"]
    assert [step.fills for step in mine] == [True]


# ---- Schedules of trees: which moves go together, within what the tree's plan promises


MESH_LAUNCHES = rs.Mesh(x=4)
TURN = ("f32[{x}4, 16]", "f32[16, {x}4]")


def parts(
    moves: dict[str, tuple[str, str]], nodes: tuple[int, ...] = (0, 0, 0, 0), apart: bool = False
) -> list[Launch]:
    ends = {name: tuple(rs.Layout.parse(text, MESH_LAUNCHES) for text in pair) for name, pair in moves.items()}
    return list_launches(rs.plan_tree(ends), Facts(nodes, False), apart)


def stacks(*given: Launch) -> list[tuple[str, ...]]:
    return [stack.names for part in given for stack in (part.stacks if isinstance(part, Bundle) else (part,))]


def test_equal_moves_are_one_stack_of_one_bundle() -> None:
    (bundle,) = parts({"a": TURN, "b": ("f32[{x}2, 16]", "f32[8, {x}4]"), "c": TURN})
    assert isinstance(bundle, Bundle)
    assert stacks(bundle) == [("a", "c"), ("b",)]
    assert str(bundle.stacks[0].plan.source) == "f32[2, {x}4, 16]"


def test_large_tiles_move_alone() -> None:
    size = 2 * STACKED // 4
    move = (f"f32[{{x}}{size}]", f"f32[{4 * size}]")
    assert stacks(*parts({"a": move, "b": move})) == [("a",), ("b",)]


def test_what_has_no_buffers_is_not_stacked() -> None:
    move = ("f32[16]", "f32[{x}4]")
    assert stacks(*parts({"a": move, "b": move})) == [("a",), ("b",)]


def test_sums_run_the_steps_of_their_plan_and_the_rest_is_bundled_by_dtype() -> None:
    moves = {"a": TURN, "s": ("f32[16] + sum{x}", "f32[{x}4]"), "b": TURN, "h": ("bf16[{x}4]", "bf16[16]")}
    made = parts(moves, (0, 0, 1, 1))
    assert [stacks(part) for part in made if isinstance(part, Stack)] == [[("s",)]]
    assert sorted(name for part in made if isinstance(part, Bundle) for names in stacks(part) for name in names) == [
        "a",
        "b",
        "h",
    ]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("nodes", [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3)])
def test_what_messages_and_copies_take_is_within_the_promise(nodes: tuple[int, ...], apart: bool) -> None:
    whole = ("f32[{x}64]", "f32[256]")
    ends = {f"{at}{name}": pair for at in range(30) for name, pair in {"t": TURN, "w": whole}.items()}
    layouts = {name: tuple(rs.Layout.parse(text, MESH_LAUNCHES) for text in pair) for name, pair in ends.items()}
    tree = rs.plan_tree(layouts)
    live = sum(plan.source.tile_bytes for plan in tree.plans.values())
    for part in list_launches(tree, Facts(nodes, False), apart):
        assert isinstance(part, Bundle)
        live += sum(stack.plan.target.tile_bytes for stack in part.stacks)
        copies = [stack.plan for stack in part.stacks if len(stack.names) > 1]
        # Results that are copied apart live beside the copies, when those of the sources have gone.
        copied = max(sum(each.source.tile_bytes for each in copies), apart * sum(e.target.tile_bytes for e in copies))
        assert live + copied + 2 * part.staging <= tree.peak_bytes


TRAINER, SERVER = rs.Mesh(fsdp=4), rs.Mesh({"tp": 2, "rep": 2}, device_ids=[4, 5, 6, 7])


def plan(source: str, target: str, **options) -> rs.Plan:
    return rs.plan(rs.Layout.parse(source, TRAINER), rs.Layout.parse(target, SERVER), **options)


def test_a_plan_that_gathers_has_a_hop_for_each_step_between_nodes_and_one_inside() -> None:
    gathers = plan("f32[{fsdp}4, 8]", "f32[16, {tp}4]")
    assert [step.kind for step in gathers.steps] == ["exchange", "all_gather"]
    hops = list_hops(gathers, True)
    assert hops is not None
    assert [(hop.source, hop.target) for hop in hops] == [(step.operand, step.result) for step in gathers.steps]
    assert list_hops(gathers, False) == (Hop(gathers.source, gathers.target),)


def test_sums_and_casts_and_relays_cut_by_a_budget_have_none() -> None:
    assert list_hops(plan("f32[16] + sum{fsdp}", "f32[{tp}8]"), False) is None
    ends = rs.Layout.parse("f32[12]", rs.Mesh(x=1)), rs.Layout.parse("f32[12]", rs.Mesh(d=5))
    cut = rs.plan(*ends, budget=2 * 48 + 8)
    assert cut.steps[0].mode.relay and cut.steps[0].mode.chunk
    assert list_hops(cut, True) is None
    ends = rs.Layout.parse("f32[{fsdp}4]", TRAINER), rs.Layout.parse("bf16[16]", TRAINER)
    assert list_hops(rs.plan(rs.Move(*ends, cast=True)), False) is None


def test_a_move_through_a_view_is_one_hop() -> None:
    source, target = rs.Layout.parse("f32[{fsdp}3]", TRAINER), rs.Layout.parse("f32[{tp}2, 3]", SERVER)
    (hop,) = list_hops(rs.plan(rs.Move(source, target, view="(a b) -> a b")), False) or ()
    assert hop.form is not None and not hop.fills


def test_what_goes_to_a_peer_is_one_message() -> None:
    ends = [plan("f32[{fsdp}4, 8]", "f32[{tp}8, 8]"), plan("f32[{fsdp}2]", "f32[{tp}4]")]
    routes = tuple((Hop(each.source, each.target),) for each in ends)
    facts = Facts((0,) * 4 + (1,) * 4, False)
    for rank in range(8):
        part = Bundle((), routes, 4, 1 << 20).part(0, (False, False), rank, facts)
        for side in (part.messages.sends, part.messages.receives):
            peers = [chunk.peer for chunk in side.chunks]
            assert len(peers) == len(set(peers))
            assert sum(len(each.chunks) for each in side.sides) == 2 * len(peers)


@pytest.mark.parametrize("dtype", ["M8[s]", "uint64", [("a", "i4"), ("b", "f4")]])
def test_equal_moves_of_elements_without_a_name_keep_their_dtypes(dtype: object) -> None:
    source, target = rs.Layout.parse("u64[4{x}1]", rs.Mesh(x=1)), rs.Layout.parse("u64[4]", rs.Mesh(y=1))
    words = np.arange(4, dtype="u8")
    moved = redistribute({"a": words.view(dtype), "b": words}, source, target, MPI.COMM_SELF)
    assert moved["a"].dtype == np.dtype(dtype) and np.array_equal(moved["a"].view("u8"), words)
    assert moved["b"].dtype == np.uint64


@pytest.mark.parametrize("more", [0, 8, 64, 1000])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f32[{x}2500001/10000003]", "f32[39063{x}64/10000003]"),
        ("f32[357143{x}7/10000003]", "bf16[500001{x}5/10000003]"),
        ("f32[13{x}64/3163, 3163]", "f32[3163, 9{x}96/3163]"),
        ("f32[13{x}64/3163, 3163]", "bf16[3163, 9{x}96/3163]"),
    ],
)
def test_budgets_without_room_for_buffers_do_not_cut_ten_million_elements_to_pieces(before: str, after: str, more: int):
    """Messages of a few elements each would be millions; the least of a page, or of one in a thousand, are few."""
    source, target = (Layout.parse(text, Mesh(x=4)) for text in (before, after))
    move, casts = rs.Move(source, target, cast=source.dtype != target.dtype), source.dtype != target.dtype
    with pytest.raises(rs.errors.BudgetError) as refused:
        rs.plan(move, budget=1)
    budget = refused.value.smallest + more
    plan = rs.plan(move, budget=budget)
    steps = [step.run for step in rank_plan(plan, 0, 4, 4).steps if isinstance(step.run, Messages)]
    sides = [messages for step in steps for messages in (step.sends, step.receives)]
    assert sides
    if not casts:
        request = Request.of_tile(source, target, read_options(budget))
        ready = plan_uncached(request, 0, Facts((0, 1, 2, 3), True), 4)
        sides += [] if ready.direct is None else [ready.direct.messages.sends, ready.direct.messages.receives]
    assert all(len(side.chunks) <= 6000 for side in sides)

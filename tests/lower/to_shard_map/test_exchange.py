"""Exchanges on tiles: round by round, joined at the end, in place, in two halves that numpy ties together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard import hlo
from reshard.lower import lower_plan
from reshard.lower.program import Exchange
from reshard.lower.to_shard_map import place, run_exchange
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.run_exchange import find_box_extents
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.types import Layout, Mesh
from tests.lower.to_shard_map.on_xla import MESH, check_on_xla, one_step, stacked
from tests.oracle import tiles_of
from tests.sampling import sampled
from tests.view_oracle import cut

# ---- round by round --------------------------------------------------------------------------------

STEPS = [
    ("f32[{x}3/10, 8]", "f32[{y}5, 8]"),
    ("f32[{x}4, 8]", "f32[16, {x}2]"),  # even, many shares of a device's own
    ("f32[{x}4, 8]", "f32[{y}8, 8]"),
    ("f32[{x}{y}2, 8]", "f32[16, 8]"),
    ("f32[{x}(3,5,0,2), 8]", "f32[{y}{x}(1@7,2@0,4@5,1@7,2@1), 8]"),  # pieces of any size
]


@pytest.mark.fast(2, slow=3)
@pytest.mark.parametrize("chunk", sampled([None, 3, 1], None, 3))
@pytest.mark.parametrize(("source", "target"), STEPS)
def test_exchanges(source: str, target: str, chunk: int | None):
    """Whole and in pieces, as local copies are, too."""
    check_on_xla(one_step("exchange", source, target, StepMode(chunk)))


def test_positions_that_were_traced_for_one_platform_stay_there():
    """Rounds have a form of their own for TPUs; what follows them must not use what was traced in it."""
    mesh = Mesh(x=2, y=4)
    layouts = [Layout.parse(f"f32[{dim}]", mesh) for dim in ("9{y}2{x}2", "9{x}4{y}", "72{y}", "{y}72")]
    kinds = ("exchange", "all_gather", "exchange")
    moves = [StepSpec(kind, layout, StepMode()) for kind, layout in zip(kinds, layouts[1:], strict=True)]
    check_on_xla(chain(layouts[0], layouts[-1], moves, False))


UNEVEN = [
    ("f32[{x}{y}9/70, 6]", "f32[{y}35, 6]"),  # a message begins before the tile, while it is filled
    ("f32[{y}25, {x}3/10, 2]", "f32[{x}13/50, {y}5, 2]"),
    ("f32[2, 3, {y}{x}13/100]", "f32[{y}1, 3, {x}25]"),
    ("f32[{y}25, {x}13/50]", "f32[{x}{y}7/50, 50]"),  # nothing stays on some devices
]


@pytest.mark.parametrize(("source", "target"), sampled(UNEVEN, UNEVEN[0], UNEVEN[3]))
def test_uneven_messages_are_rows_of_tables_on_cpus(source: str, target: str):
    """One permute a round, and few kernels, whatever the number of forms."""
    plan = one_step("exchange", source, target)
    text = check_on_xla(plan).as_text() or ""
    done = hlo.collectives(hlo.parse(text))
    assert [(one.kind, one.times) for one in done] == [("permute", 1)] * plan.launches
    assert text.count(" fusion(") < 5 * plan.launches


def lowered(source: str, target: str, chunk: int | None = None, mesh: Mesh = MESH) -> Exchange:
    before, after = Layout.parse(source, mesh), Layout.parse(target, mesh)
    (step,) = lower_plan(chain(before, after, [StepSpec("exchange", after, StepMode(chunk))])).instructions
    assert isinstance(step, Exchange)
    return step


def count_alike(source: str, target: str, chunk: int | None = None) -> list[int]:
    """The number of rounds in each group that one loop runs."""
    return [len(rounds) for rounds in run_exchange._group_alike(lowered(source, target, chunk).sliced[1])]


def test_rounds_that_share_a_loop(monkeypatch: pytest.MonkeyPatch):
    # Three messages of 8 elements to the other devices along x, whole or in pieces: two pieces are too few.
    assert count_alike("f32[{x}4, 8]", "f32[16, {x}2]") == [1, 1, 1]
    assert count_alike("f32[{x}4, 8]", "f32[16, {x}2]", 2) == [4, 4, 4]
    assert count_alike("f32[{x}4, 8]", "f32[16, {x}2]", 4) == [1] * 6
    monkeypatch.setattr(run_exchange, "LOOPED", 3)
    assert count_alike("f32[{x}4, 8]", "f32[16, {x}2]") == [3]
    assert count_alike("f32[{x}4, 8]", "f32[16, {x}2]", 2) == [12]  # three loops otherwise
    assert count_alike("f32[{x}2, 8]", "f32[{y}4, 8]") == [1, 1]
    assert count_alike("f32[{x}3/10, 8]", "f32[{y}5, 8]") == [1] * 3  # boxes of several shapes


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("source", "target", "chunk"),
    [
        ("f32[{x}4, 8]", "f32[16, {x}2]", 3),  # in pieces, the last of which is shorter
        ("f32[{x}{y}2, 8]", "f32[16, {x:(1)2}4]", None),  # a part of an axis
        ("f32[{x}3/10, 8]", "f32[{y}5, 8]", 4),  # uneven
        ("f32[{x}{y}2, 8]", "f32[{y}8, {x}2]", None),
        ("f32[{x}4, 16]", "f32[16, {x}{y}2]", None),
        ("f32[{x}{y}2, 8]", "f32[16, {y}{x}1]", None),
        ("f32[{x}{y}2]", "f32[{y}{x}2]", 1),
    ],
)
def test_loops_over_rounds_between_any_devices(
    source: str, target: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
):
    """One loop, with a branch for each list of pairs; tables are cut to what they depend on, in bytes."""
    monkeypatch.setattr(run_exchange, "LOOPED", 2)
    monkeypatch.setattr(place, "LARGE", 1)
    monkeypatch.setattr(place, "WIDE", 1)
    check_on_xla(one_step("exchange", source, target, StepMode(chunk)))


def test_a_loop_sends_what_is_promised(monkeypatch: pytest.MonkeyPatch):
    """Each iteration runs one of the branches."""
    monkeypatch.setattr(run_exchange, "LOOPED", 2)
    plan = one_step("exchange", "f32[{x}4, 8]", "f32[16, {x}2]")
    f, _ = stacked(lower_plan(plan), MESH.axes)
    text = f.lower(jax.ShapeDtypeStruct((8, 4, 8), "float32")).compile().as_text()
    assert " while(" in text and " conditional(" in text
    permutes = hlo.traffic(hlo.parse(text)).by_kind["permute"]
    assert (permutes.launches, permutes.received_bytes) == (plan.launches, plan.received_bytes)


def test_transfers_of_a_kind_have_one_form_and_each_device_once():
    """Two messages of one form to one device, as local copies may be, are two kinds."""
    local, rounds = lowered("f32[{x}3/10, 8]", "f32[{y}5, 8]").sliced
    for one in [local, (*local, *local), *rounds]:
        kinds = run_exchange.group_by_form(one)
        assert sorted(t for kind in kinds for t in kind) == sorted(one)
        for kind in kinds:
            assert len({t.form for t in kind}) == 1
            assert len({t.receiver for t in kind}) == len(kind)


# ---- messages that fill a target ----------------------------------------------------------------------


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("mesh", "source", "target"),
    [
        (Mesh(x=3), "f32[{x}2, 6]", "f32[6, {x}2]"),
        (Mesh(x=2, y=3), "f32[{x}3, {y}5]", "f32[6, 15]"),
        (Mesh(x=2, y=2), "f32[2{x}2, 3]", "f32[8, 3]"),
        (Mesh(x=5), "f32[{x}3]", "f32[15]"),
        (Mesh(x=4, y=2), "f32[{x}{y}1, 16]", "f32[8, {y}{x}2]"),
        (Mesh(x=4, y=2), "f32[{x}{y}2]", "f32[{y}{x}2]"),
    ],
)
def test_messages_that_fill_the_target(mesh: Mesh, source: str, target: str):
    before, after = Layout.parse(source, mesh), Layout.parse(target, mesh)
    check_on_xla(chain(before, after, [StepSpec("exchange", after)]))


# ---- in place --------------------------------------------------------------------------------------


@pytest.mark.fast(3)
@pytest.mark.parametrize("looped", [16, 2])
@pytest.mark.parametrize(
    ("source", "target", "chunk"),
    [
        ("f32[{x}4, 16]", "f32[16, {x}4]", 5),  # the last piece is shorter
        ("f32[{x}4, {y}4]", "f32[{y}8, {x}2]", None),
        ("f32[{x}4]", "f32[16]", None),
        ("f32[16]", "f32[{x}4]", 1),
        ("f32[2{x}{y}2, 8]", "f32[2{y}{x}2, 8]", 2),
    ],
)
def test_exchanges_in_place(source: str, target: str, chunk: int | None, looped: int, monkeypatch: pytest.MonkeyPatch):
    """Rounds and shares one by one, and in loops."""
    monkeypatch.setattr(run_exchange, "LOOPED", looped)
    check_on_xla(one_step("exchange", source, target, StepMode(chunk, in_place=True), donate=True))


# ---- two sets of devices ---------------------------------------------------------------------------

SIX = Mesh(x=3, y=2)
PAIRS = [
    ("s32[{x}4, 12]", "s32[{t}6, {u}6]", Mesh({"t": 2, "u": 2}, [5, 1, 7, 2]), 7),
    ("s32[{x}4, {y}6]", "s32[12, {t}3]", Mesh({"t": 4}, [6, 7, 8, 9]), None),
    ("s32[{x}{y}2/11]", "s32[{t}4/11]", Mesh({"t": 3}, [0, 7, 8]), None),
    ("s32[7]", "s32[7]", Mesh({"t": 2}, [8, 9]), None),
]


def crossing(source: str, target: str, mesh: Mesh, chunk: int | None) -> tuple[Layout, Layout, Exchange]:
    operand, result = Layout.parse(source, SIX), Layout.parse(target, mesh)
    (step,) = lower_plan(chain(operand, result, [StepSpec("exchange", result, StepMode(chunk))])).instructions
    assert isinstance(step, Exchange)
    return operand, result, step


def on_each(layout: Layout, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of a round's number and tiles on every device of a layout's mesh, along a new first dim."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: layout.mesh.size]), ("d",))

    def one(number: jax.Array, tiles: list[jax.Array]) -> jax.Array:
        here = MeshPlace(layout.mesh.devices, {"d": layout.mesh.size})
        return function(here, number, *(tile[0] for tile in tiles))[None]

    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"), check_vma=False))


def carry(operand: Layout, result: Layout, step: Exchange, tiles: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The tiles of the result, whose messages are packed and written by XLA, and carried by numpy."""
    near = np.stack([tiles[device] for device in operand.mesh.devices])
    far = np.full((result.mesh.size, *result.tile_shape), -1, "int32")
    largest = max(t.elements for one in step.rounds for t in one)
    for batch in run_exchange.batch_rounds(step):
        assert batch.elements <= largest, "a local copy is larger than all messages"
        pack = on_each(result if batch.relayed else operand, partial(run_exchange.pack_message, step, batch))
        write = on_each(result, partial(run_exchange.write_message, step, batch))
        for number, one in enumerate(batch.rounds):
            sent = np.asarray(pack(np.int32(number), [far if batch.relayed else near]))
            assert sent.shape == ((result if batch.relayed else operand).mesh.size, batch.elements)
            arrived = np.full((result.mesh.size, batch.elements), -9, "int32")
            for t in one:
                arrived[result.mesh.position(t.receiver)] = sent[
                    (result if t.relayed else operand).mesh.position(t.sender)
                ]
            far = np.asarray(write(np.int32(number), [far, arrived]))
    return {device: far[result.mesh.position(device)] for device in result.mesh.devices}


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", PAIRS, ids=lambda case: f"{case[0]} to {case[1]} by {case[3]}")
def test_messages_carried_by_hand(case: tuple[str, str, Mesh, int | None]):
    operand, result, step = crossing(*case)
    tiles = {device: tile.astype("int32") for device, tile in tiles_of(operand).items()}
    moved = carry(operand, result, step, tiles)
    for device, wanted in tiles_of(result).items():
        real = wanted >= 0
        assert np.array_equal(moved[device][real], wanted[real])


@pytest.mark.parametrize("chunk", [None, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("relay", [False, True])
def test_messages_of_a_view_carried_by_hand(chunk: int | None, relay: bool):
    """One device is in both sets; a relay is to two devices for each tile."""
    operand = Layout.parse("s32[{x}6, 5]", Mesh(x=4))
    there = Mesh({"t": 3, "r": 2}, [5, 1, 7, 4, 2, 6]) if relay else Mesh({"t": 3}, [5, 1, 7])
    result = Layout.parse("s32[{t}, 5, 8]", there)
    view = rs.Move(operand, result, view="(three h) d -> three d h", three=3).view
    spec = StepSpec("exchange", result, StepMode(chunk, relay=relay, view=view))
    (step,) = lower_plan(chain(operand, result, [spec], view=view)).instructions
    assert isinstance(step, Exchange) and step.strided and any(t.relayed for t in step.rounds[-1]) == relay
    values = np.arange(120, dtype="int32").reshape(24, 5)
    moved = carry(operand, result, step, cut(operand, values))
    for device, tile in cut(result, values.reshape(3, 8, 5).transpose(0, 2, 1)).items():
        assert np.array_equal(moved[device], tile)


def test_whole_tiles_need_no_packing():
    assert [run_exchange.sends_whole_tiles(crossing(*case)[2]) for case in PAIRS] == [False, False, False, True]


@pytest.mark.parametrize(
    ("source", "target", "extents"),
    [
        ("f32[{x}4, 16, 6]", "f32[16, {y}8, 6]", [4, 8, 6]),
        ("f32[16, 4, {x}{y}3]", "f32[{y}{x}2, 4, 24]", [2, 4, 3]),
        ("f32[{x}5/17, 6, 4]", "f32[17, {x}2/6, 4]", None),  # in boxes of several extents
    ],
)
def test_the_extents_of_all_messages(source: str, target: str, extents: list[int] | None):
    mesh = Mesh(x=4, y=2)
    before, after = Layout.parse(source, mesh), Layout.parse(target, mesh)
    (step,) = lower_plan(chain(before, after, [StepSpec("exchange", after)])).instructions
    assert isinstance(step, Exchange)
    assert find_box_extents(step) == extents

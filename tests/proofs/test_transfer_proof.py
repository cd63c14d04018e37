"""Transfers proved and refuted: those of plans, with planted faults, and of others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import reshard as rs
from benchmarks import fuzz, fuzz_transfers
from benchmarks.fuzz_moves import MoveCase, random_move
from reshard.errors import PlanError, ProofError, UndecidedError
from reshard.plans.descriptors import Descriptor, Descriptors
from reshard.proofs import transfer_proof
from tests.sampling import few_or_all

TWO = rs.Mesh(x=2)
SOURCE, TARGET = rs.Layout.parse("f32[{x}4]", TWO), rs.Layout.parse("f32[8]", TWO)
ROWS = transfer_proof._list_rows  # pyright: ignore[reportPrivateUsage]
RUNS = [(0, 0, 0, 0, 4), (1, 0, 0, 4, 4), (0, 1, 0, 0, 4), (1, 1, 0, 4, 4)]


def copying_moves(seed: int, count: int) -> Iterator[tuple[MoveCase, rs.Move]]:
    """Random moves that add and cast nothing."""
    for number in range(count):
        choose = random.Random(f"{seed}/{number}")
        case = random_move(choose, choose.choice(("int32", "uint8", "float64")), 120)
        move = case.make()
        if not move.casts and not move.source.partial:
            yield case, move


@pytest.mark.parametrize("count", few_or_all(120, 350))
def test_the_transfers_of_plans_are_proved_with_what_the_plan_says(count: int) -> None:
    turns: Counter[int] = Counter()
    for case, move in copying_moves(1, count):
        plan = rs.plan(move)
        made = plan.to_descriptors()
        verified = rs.verify(made, move)
        assert verified.received_bytes <= plan.received_bytes and verified.sent_bytes <= plan.sent_bytes, (case, plan)
        assert verified.endpoint_bound_bytes == plan.endpoint_bound_bytes
        assert Descriptors.from_json(made.to_json()) == made
        turns[verified.turns] += 1
        devices = sorted({*move.source.mesh.devices, *move.target.mesh.devices})
        parts = [
            each for device in devices for turn in plan.schedule_for(device) for each in (*turn.receives, *turn.copies)
        ]
        assert Counter(parts) == Counter(made)
    assert set(turns) >= {1, 2}, turns


@pytest.mark.parametrize("moves", few_or_all(60, 500))
def test_planted_faults_are_refuted_by_the_first_wrong_element(moves: int) -> None:
    kinds = [kind for _, kind in fuzz.fuzz(3, moves=moves, kinds=["transfers"])]
    assert not [kind for kind in kinds if kind.startswith("wrong")], "\n".join(kinds)
    refused = {kind.removesuffix(", refused") for kind in kinds if kind.endswith(", refused")}
    assert len(refused) >= min(len(fuzz_transfers.FAULTS), moves // 6)


def give_all_alike(layout: rs.Layout, device: int) -> Any:
    """Tiles that all have what the first device's has."""
    return ROWS(layout, min(layout.mesh.devices))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_find_outside", lambda *_: None),  # What leaves a tile lands in the next one.
        ("_list_rows", give_all_alike),
        ("_unravel", lambda *_: (0,)),  # Another element is named.
    ],
)
def test_a_verdict_that_is_wrong_is_found(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_proof, name, broken)
    assert any(kind.startswith("wrong") for _, kind in fuzz.fuzz(3, moves=30, kinds=["transfers"]))


@pytest.mark.parametrize("form", ["tuples", "lists", "array", "transfers", "pairs"])
def test_runs_are_read_in_every_form(form: str) -> None:
    forms: dict[str, Any] = {
        "tuples": RUNS,
        "lists": [list(run) for run in RUNS],
        "array": np.array(RUNS, "i4"),
        "transfers": iter(Descriptor(*run[:4], (run[4],), (1,), (1,)) for run in RUNS),
        "pairs": [(*run[:4], [2, 2], [(2, 2), (1, 1)]) for run in RUNS],
    }
    verified = rs.verify(forms[form], SOURCE, TARGET)
    assert (verified.transfers, verified.received_bytes, verified.sent_bytes, verified.ratio) == (4, 16, 16, 1.0)


def test_tables_of_arrow_are_read() -> None:
    arrow = pytest.importorskip("pyarrow")
    made = rs.plan(SOURCE, TARGET).to_descriptors()
    columns = dict(
        zip(
            ("source_device", "target_device", "source_offset", "target_offset", "length"),
            zip(*RUNS, strict=True),
            strict=True,
        )
    )
    for table in (arrow.table(made.to_columns()), arrow.table(made.to_columns()).drop(["step"]), arrow.table(columns)):
        assert rs.verify(table, SOURCE, TARGET).transfers == 4
        assert rs.verify(table.to_reader(), SOURCE, TARGET).transfers == 4
        with pytest.raises(ProofError):
            rs.verify(table.slice(1), SOURCE, TARGET)
        with pytest.raises(PlanError, match="columns"):
            rs.verify(table.drop(["source_offset"]), SOURCE, TARGET)
    with pytest.raises(PlanError):
        rs.verify(arrow.table({**columns, "length": [4, 4, None, 4]}), SOURCE, TARGET)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: None}, r"device 0 must hold element \(0,\) .* but no transfer writes it"),
        ({0: None, 3: None}, r"device 0 must hold element \(0,\)"),
        (
            {3: (1, 1, 1, 4, 3)},
            r"device 1 must hold element \(4,\) .* but element \(5,\) .* from device 1 \(transfer 3\)",
        ),
        (
            {3: (1, 1, 0, 3, 4)},
            r"device 1 must hold element \(3,\) .* at local index \(3,\), but transfers 2 and 3 both write there",
        ),
        ({3: (1, 1, 0, 5, 4)}, r"transfer 3 writes elements 5 to 8 of the tile of device 1, which has room for 8"),
        ({3: (1, 1, 1, 4, 4)}, r"transfer 3 reads elements 1 to 4 of the tile of device 1, which holds 4"),
        ({3: (7, 1, 0, 4, 4)}, r"of the tile of device 7, which holds 0"),
        ({3: (1, 1, 2**63 - 1, 4, 4)}, r"transfer 3 reads"),
        ({3: Descriptor(1, 1, 3, 4, (4,), (-1,), (1,))}, r"element \(7,\) is copied"),
        ({3: Descriptor(1, 1, 0, 4, (4,), (0,), (1,))}, r"element \(4,\) is copied"),
        (
            {3: Descriptor(1, 1, 0, 4, (4,), (1,), (0,))},
            r"device 1 must hold element \(4,\) .* but transfer 3 writes there twice",
        ),
        ({3: Descriptor(1, 1, 0, 4, (4,), (1,), (1,), 1)}, r"device 0 must hold element \(0,\)"),
    ],
)
def test_the_first_wrong_element_is_named(changed: dict[int, Any], message: str) -> None:
    made = [changed.get(at, run) for at, run in enumerate(RUNS) if changed.get(at, run) is not None]
    with pytest.raises(ProofError, match=message) as refused:
        rs.verify(made, SOURCE, TARGET)
    assert refused.value.counterexample is not None


@pytest.mark.parametrize(
    "given",
    [
        [(0, 0, 0, 0)],
        [(0, 0, 0, 0, 1.5)],
        [(0, 0, 0, -1, 4)],
        [("0", 0, 0, 0, 4)],
        [(0, 0, 0, 0, (4,), (1, 1), (1,))],
        [(0, 0, 0, 0, (4,), ((1,),))],
        [Descriptor(0, 0, 0, 0, [4], (1,), None)],  # pyright: ignore[reportArgumentType]
        [(0, 0, 0, 0, (2**62, 2), (1, 1), (1, 1))],
        ["01234"],
        None,
        5,
        [Descriptor(0, 0, 0, 0, (4,), (1,), (1,), None)],  # pyright: ignore[reportArgumentType]
        np.zeros((3, 4), int),
        np.zeros((3, 5)),
        np.full((1, 5), -1),
    ],
)
def test_what_are_no_transfers_is_refused(given: Any) -> None:
    with pytest.raises(PlanError):
        rs.verify(given, SOURCE, TARGET)


def test_sums_casts_and_missing_targets_are_refused() -> None:
    summed = rs.Layout.parse("f32[8] + sum{x}", TWO)
    cases: Any = (
        (summed, TARGET),
        (SOURCE, None),
        (rs.Move(SOURCE, rs.Layout.parse("bf16[8]", TWO), cast=True),),
    )
    for move in cases:
        with pytest.raises(PlanError):
            rs.verify(RUNS, *move)
    for plan in (rs.plan(summed, TARGET), rs.plan(rs.Move(SOURCE, rs.Layout.parse("bf16[8]", TWO), cast=True))):
        with pytest.raises(PlanError, match="computes"):
            plan.to_descriptors()
    with pytest.raises(PlanError, match="device 5"):
        rs.plan(SOURCE, TARGET).schedule_for(5)


def test_what_would_take_all_memory_is_undecided() -> None:
    rows, columns = (rs.Layout.parse(text, TWO) for text in ("u8[{x}67108864, 8]", "u8[134217728, {x}4]"))
    with pytest.raises(UndecidedError, match="runs of neighbours"):
        rs.verify([(0, 0, 0, 0, 1)], rows, columns)
    far = [Descriptor(*run[:4], (4,), (1,), (1,)) for run in RUNS]
    with pytest.raises(UndecidedError):
        rs.verify(
            [far[0]._replace(target_offset=2**63 - 4), far[1]._replace(target_device=1), far[1]._replace(step=1)],
            SOURCE,
            TARGET,
        )


def test_what_is_proved_costs_no_more_where_runs_are_long() -> None:
    whole = rs.Layout.parse("u8[1099511627776]", TWO)
    assert rs.verify([(d, d, 0, 0, 1099511627776) for d in (0, 1)], whole, whole).ratio == 1.0
    with pytest.raises(ProofError, match=r"element \(5,\) .* but element \(6,\)"):
        rs.verify([(0, 0, 0, 0, 5), (0, 0, 6, 5, 2**40 - 6), (1, 1, 0, 0, 2**40)], whole, whole)


def test_what_all_transfers_move_whole_is_looked_at_once() -> None:
    """Of 7.5 billion elements no two neighbours stay neighbours, but all boxes have whole rows and columns."""
    source, target = placed("bf16[{d}8, 7168, 4096]", 32), placed("bf16[256, {d}512, 7168]", 8, 32)
    move = rs.Move(source, target, view="e a b -> e b a")
    boxes = list(rs.plan(move).to_descriptors())
    assert rs.verify(boxes, move).ratio == 1.0
    wrong = boxes[77]._replace(source_offset=boxes[77].source_offset - 1)
    with pytest.raises(ProofError, match=r"must hold element \(72, 0, 2560\) .* but element \(72, 0, 2559\)"):
        rs.verify([*boxes[:77], wrong, *boxes[78:]], move)
    cut = boxes[77]._replace(extents=(8, 511, 7168))
    with pytest.raises(ProofError, match=r"\(72, 0, 3071\) .* but no transfer writes it"):
        rs.verify([*boxes[:77], cut, *boxes[78:]], move)


@pytest.mark.parametrize(
    ("move", "made", "message"),
    [
        (  # Rows and columns stay as they are, in boxes of all rows and columns, and should change places.
            lambda: rs.Move(
                placed("f32[4, 8]", 1), placed("f32[4, 4]", 1, 1), "a (b two) -> b a", two=2, take={"two": 0}
            ),
            [(0, 1, 0, 0, (4, 4), (8, 2), (4, 1))],
            r"element \(1, 0\) .* but element \(0, 2\)",
        ),
        (  # Rows are dealt two by two, and taken for four neighbours.
            lambda: rs.Move(placed("f32[2{d}2, 8]", 2), placed("f32[8, {d}4]", 2, 2)),
            [(d, 2 + half, 4 * half, 16 * d, (4, 4), (8, 1), (4, 1)) for d in (0, 1) for half in (0, 1)],
            r"device 2 must hold element \(2, 0\) .* but element \(4, 0\)",
        ),
    ],
)
def test_boxes_that_are_wrong_behind_their_first_element(move: Any, made: list[Any], message: str) -> None:
    with pytest.raises(ProofError, match=message):
        rs.verify(made, move())


def placed(text: str, count: int, first: int = 0) -> rs.Layout:
    """A layout on one axis `d` of devices from `first` on."""
    return rs.Layout.parse(text, rs.Mesh({"d": count}, device_ids=range(first, first + count)))


PUBLIC_BUGS: dict[str, tuple[rs.Move, list[Any], str]] = {
    # pytorch#179502: 12 x 8, split by columns, seen as 16 x 6, split by rows, without that anything moves.
    "a view that needs a move": (
        rs.Move(placed("f32[12, {d}2]", 4), placed("f32[{d}24]", 4), view="a b -> (a b)"),
        [(rank, rank, 0, 0, 24) for rank in range(4)],
        r"device 0 must hold element \(0, 2\) .* but element \(1, 0\)",
    ),
    # vllm#52516: 4 heads, each on two of 8 ranks; the rank that has one head is taken for one that has all.
    "replicated heads taken for a whole cache": (
        rs.Move(placed("u8[{d:(1)4}1, 16]", 8), placed("u8[4, 16]", 1, 8)),
        [(0, 8, 0, 0, 16)],
        r"device 8 must hold element \(1, 0\) .* but no transfer writes it",
    ),
    # sglang#19086: 2 heads, each on two of 4 ranks, counted as 4: every rank writes a head of its own.
    "more heads than there are": (
        rs.Move(placed("u8[{d:(1)2}1, 8]", 4), placed("u8[2, 8]", 1, 4)),
        [(rank, 4, 0, 8 * rank, 8) for rank in range(4)],
        r"transfer 2 writes elements 16 to 23 of the tile of device 4, which has room for 16",
    ),
    # TensorRT-LLM#6507: pages are token x head x element, and are split as if they were head x token x element.
    "heads before tokens": (
        rs.Move(placed("f16[4, 2, 2]", 1), placed("f16[4, {d}1, 2]", 2, 1)),
        [(0, 1 + head, 8 * head, 0, 8) for head in range(2)],
        r"device 2 must hold element \(0, 1, 0\) .* but element \(2, 0, 0\)",
    ),
    # vllm-ascend#11885: 8 heads on 8 ranks for two that have 4 each; a rank's own head is taken for all that there are.
    "heads of a rank for those of the model": (
        rs.Move(placed("u8[{d}1, 16]", 8), placed("u8[{d}4, 16]", 2, 8)),
        [(4 * rank, 8 + rank, 0, 0, 16) for rank in range(2)],
        r"device 8 must hold element \(1, 0\) .* but no transfer writes it",
    ),
    # vllm-gguf-plugin#103: a loader that is not told its rank takes that of rank 0, and all have the same columns.
    "the shard of rank 0 on every rank": (
        rs.Move(placed("f16[6, 8]", 1), placed("f16[6, {d}4]", 2, 1)),
        [(0, 1 + rank, 0, 0, (6, 4), (8, 1), (4, 1)) for rank in range(2)],
        r"device 2 must hold element \(0, 4\) .* but element \(0, 0\)",
    ),
    # sglang#32781: shards of 3 rows are padded to 4, and 4 is where the next one is looked for in rows without padding.
    "offsets of padded shards": (
        rs.Move(placed("f16[12, 2]", 1), placed("f16[{d}3, 2]", 4, 1)),
        [(0, 1 + rank, 8 * rank, 0, 6) for rank in range(3)] + [(0, 4, 24, 0, 0)],
        r"device 2 must hold element \(3, 0\) .* but element \(4, 0\)",
    ),
    # cubed#896: two tasks each read a chunk, fill their part and write all of it back.
    "a chunk that two tasks write": (
        rs.Move(placed("f32[{d}3]", 2), placed("f32[6]", 1, 2)),
        [(0, 2, 0, 0, 3), (1, 2, 0, 3, 3), (1, 2, 0, 0, 3)],
        r"device 2 must hold element \(0,\) .* but transfers 0 and 2 both write there",
    ),
}


@pytest.mark.parametrize("bug", PUBLIC_BUGS)
def test_public_bugs_are_refuted(bug: str) -> None:
    move, transfers, message = PUBLIC_BUGS[bug]
    with pytest.raises(ProofError, match=message):
        rs.verify(transfers, move)
    assert rs.verify(rs.plan(move).to_descriptors(), move).ratio <= 2


TRAINER, SERVER = rs.Mesh(fsdp=4), rs.Mesh({"tp": 2, "rep": 2}, device_ids=range(4, 8))
FUSED = rs.Layout.parse("bf16[{tp}8, 6]", SERVER)


def parts_of(target: rs.Layout) -> dict[str, rs.Move]:
    """Moves of q, k and v into one array, of 8, 4 and 4 rows; and of the output, whole."""
    rows = {"q": (0, 8), "k": (8, 12), "v": (12, 16)}
    moves = {
        name: rs.Move(
            rs.Layout.parse(f"bf16[{{fsdp}}{(stop - start) // 4}, 6]", TRAINER), target, into={0: slice(start, stop)}
        )
        for name, (start, stop) in rows.items()
    }
    return {
        **moves,
        "o": rs.Move(
            *(rs.Layout.parse(text, mesh) for text, mesh in (("f32[6, {fsdp}4]", TRAINER), ("f32[6, {tp}8]", SERVER)))
        ),
    }


def test_a_tree_is_verified_as_one_and_carried_by_its_schedules() -> None:
    moves, targets = parts_of(FUSED), dict.fromkeys("qkv", "qkv")
    tree = rs.plan_tree(moves, targets=targets)
    lists = tree.to_descriptors()
    verified = rs.verify(lists, moves, targets=targets)
    assert verified.filled == () and verified.transfers == sum(map(len, lists.values()))
    assert (verified.received_bytes, verified.sent_bytes) == (tree.received_bytes, tree.sent_bytes)
    assert verified.endpoint_bound_bytes == tree.endpoint_bound_bytes
    assert rs.verify(
        {name: lists[name] for name in "qk"}, {name: moves[name] for name in "qk"}, targets={"q": "qkv", "k": "qkv"}
    ).filled == ("qkv",)
    for turns in zip(*(tree.schedule_for(device) for device in range(8)), strict=True):
        sent = Counter((name, each) for turn in turns for name, step in turn.items() for each in step.sends)
        received = Counter((name, each) for turn in turns for name, step in turn.items() for each in step.receives)
        assert sent == received and sent
    with pytest.raises(ProofError, match=r"^v: device 6 must keep what it has at local index \(0, 0\)"):
        rs.verify({**lists, "v": [each._replace(target_offset=0) for each in lists["v"]]}, moves, targets=targets)


def test_both_sides_of_a_transfer_list_it_in_the_same_place() -> None:
    """Messages between two devices are matched by their order."""
    for _, move in copying_moves(7, 60):
        plan = rs.plan(move)
        schedules = {d: plan.schedule_for(d) for d in {*move.source.mesh.devices, *move.target.mesh.devices}}
        for one, turns in schedules.items():
            for at, turn in enumerate(turns):
                for other in {each.target_device for each in turn.sends}:
                    there = [each for each in schedules[other][at].receives if each.source_device == one]
                    assert there == [each for each in turn.sends if each.target_device == other]


def test_what_stays_on_devices_takes_no_turn_of_its_own() -> None:
    """A part is taken and put where it goes by the messages themselves."""
    whole, half = placed("f32[{d}2, 12]", 4), placed("f32[{d}4, 6]", 2, 4)
    part = rs.Move(half, whole, into={1: slice(3, 9)})
    for move in (rs.Move(whole, half, take={1: slice(3, 9)}), part):
        plan = rs.plan(move)
        assert rs.verify(plan.to_descriptors(), move).turns == 1, plan
    assert {each.target_strides for each in rs.plan(part).to_descriptors()} == {(12, 1)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"transfers": []}, "not a dict of lists"),
        ({"transfers": {"q": []}}, "transfers and no move, or a move and no transfers"),
        ({"target": {"q": FUSED}}, "not a dict of layouts of the same names"),
        ({"targets": {"w": "qkv"}}, "give a dict of names of moves"),
        ({"sources": ["q"]}, "give a dict of names of moves"),
        ({"sources": {"q": "x", "k": "x"}}, "in 2 layouts"),
        ({"targets": {"q": "qkv", "o": "qkv"}}, "in 2 layouts"),
    ],
)
def test_trees_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    moves = parts_of(FUSED)
    given: dict[str, Any] = {"transfers": rs.plan_tree(moves).to_descriptors(), "source": moves, **changed}
    with pytest.raises(PlanError, match=message):
        rs.verify(**given)
    with pytest.raises(PlanError, match="both fill an element of"):
        both = {"q": moves["q"], "k": rs.Move(moves["k"].source, FUSED, into={0: slice(6, 10)})}
        rs.verify(rs.plan_tree(both).to_descriptors(), both, targets={"q": "qkv", "k": "qkv"})

"""Trees whose moves read one array, or fill parts of one: what is checked, counted and written down.

The random ones of `benchmarks/fuzz_moves.py` are run on numbered elements, against numpy's reshapes.
"""

import random
from collections import Counter

import numpy as np
import pytest

import reshard as rs
from benchmarks.fuzz_moves import check_tree
from reshard import Layout, Mesh, Move, TreePlan
from reshard.errors import PlanError, ProofError
from reshard.plans.plan import Batch
from reshard.runtime.account import Account
from tests.view_oracle import cut

MESH = Mesh(x=4, y=2)
EACH = {"q": slice(0, 32), "k": slice(32, 48), "v": slice(48, 64)}


def fuse(target: str = "f32[64, {x}4]") -> dict[str, Move]:
    """Three arrays of rows into one."""
    fused = Layout.parse(target, MESH)
    sources = {name: Layout.parse(f"f32[{{x}}{(s.stop - s.start) // 4}, 16]", MESH) for name, s in EACH.items()}
    return {name: Move(sources[name], fused, into={0: span}) for name, span in EACH.items()}


def test_a_fused_target_is_written_and_counted_once() -> None:
    moves = fuse()
    tree = rs.plan_tree(moves, targets=dict.fromkeys(moves, "qkv"))
    arrays = {name: np.random.default_rng(0).random(move.source.shape, "f") for name, move in moves.items()}
    account = Account("uint8")
    moved = rs.simulate(tree, {name: cut(moves[name].source, array) for name, array in arrays.items()}, account)
    assert list(moved) == ["qkv"]
    for device, tile in cut(moves["q"].target, np.concatenate([arrays[name] for name in "qkv"])).items():
        assert (moved["qkv"][device] == tile).all()
    assert account.peak_bytes == 3072 <= tree.peak_bytes
    assert account.launches == tree.launches == 1
    assert account.received_bytes == tree.received_bytes == tree.lower_bound_bytes
    assert TreePlan.from_json(tree.to_json()) == tree


@pytest.mark.parametrize("donate", [False, True])
def test_shared_arrays_count_once_while_batches_run(donate: bool) -> None:
    moves = fuse("f32[{y}32, {x}4]")  # To other columns of rows: exchanges, whose messages travel together.
    tree, account = rs.plan_tree(moves, targets=dict.fromkeys(moves, "qkv"), donate=donate), Account("uint8")
    tiles = {name: cut(move.source, np.zeros(move.source.shape, "f")) for name, move in moves.items()}
    rs.simulate(tree, tiles, account)
    assert account.launches == tree.launches < sum(plan.launches for plan in tree.plans.values())
    # Not every device sends or receives the longest message of each array in one round.
    assert 0.85 * tree.peak_bytes <= account.peak_bytes <= tree.peak_bytes
    # The sources, the target, and the buffers of a message each way: what a donated source leaves is used again.
    assert sum(move.source.tile_bytes for move in moves.values()) + moves["q"].target.tile_bytes <= tree.peak_bytes
    rows, *ends = (Layout.parse(text, MESH) for text in ("f32[{x}4, 8]", "f32[16, 8]", "f32[16, {x}2]"))
    split = dict(zip("ab", ((rows, end) for end in ends), strict=True))
    tree, account = rs.plan_tree(split, sources=dict.fromkeys(split, "w"), donate=donate), Account("uint8")
    rs.simulate(tree, {"w": cut(rows, np.zeros((16, 8), "f"))}, account)
    assert len(tree.batches) == 2 and account.peak_bytes == tree.peak_bytes
    assert account.live[0] == sum(end.tile_bytes for end in ends) + rows.tile_bytes * (not donate)


def test_what_two_moves_need_of_one_array_is_bounded_once() -> None:
    rows, whole = (Layout.parse(text, MESH) for text in ("f32[{x}4, 8]", "f32[16, 8]"))
    tied = {"embed": (rows, whole), "head": (rows, whole)}
    tree, alone = rs.plan_tree(tied, sources=dict.fromkeys(tied, "tokens")), rs.plan(rows, whole)
    assert tree.lower_bound_bytes == alone.lower_bound_bytes < tree.received_bytes == 2 * alone.received_bytes
    assert rs.plan_tree(tied).lower_bound_bytes == 2 * alone.lower_bound_bytes
    # Both read it in one batch, and the last of them frees it.
    donated, account = rs.plan_tree(tied, sources=dict.fromkeys(tied, "tokens"), donate=True), Account("uint8")
    rs.simulate(donated, {"tokens": cut(rows, np.zeros((16, 8), "f"))}, account)
    assert len(donated.batches) == 1 and account.live[0] == 2 * whole.tile_bytes


@pytest.mark.parametrize("wrong", [slice(16, 32), slice(31, 47)])
def test_parts_that_overlap_are_refused(wrong: slice) -> None:
    moves = fuse()
    moves["k"] = Move(moves["k"].source, moves["k"].target, into={0: wrong})
    with pytest.raises(PlanError, match=rf"q and k both fill element \[{wrong.start}, 0\] of 'qkv'"):
        rs.plan_tree(moves, targets=dict.fromkeys(moves, "qkv"))


def test_an_array_has_one_layout() -> None:
    moves = fuse()
    moves["k"] = Move(moves["k"].source, Layout.parse("f32[64, {y}8]", MESH), into={0: EACH["k"]})
    plans = [rs.plan(move) for move in moves.values()]
    batches = tuple(Batch((name,), (plan,)) for name, plan in zip(moves, plans, strict=True))
    with pytest.raises(PlanError, match=r"q fills 'qkv' as .*, and k as .*; an array has one layout"):
        TreePlan(tuple(moves), batches, (), ("qkv",) * 3)


def test_random_trees_with_shared_ends_do_what_they_mean() -> None:
    kinds = Counter(check_tree(random.Random(f"shared/{number}")) for number in range(12))
    assert kinds["tree, shared ends"] > 4


def test_a_tree_of_parts_is_proved() -> None:
    pytest.importorskip("z3")
    moves = fuse("f32[{x}16, 16]")
    targets = dict.fromkeys(moves, "qkv")
    assert "qkv is filled in 3 parts without an element in common, which is all of it" in str(
        rs.prove(rs.plan_tree(moves, targets=targets))
    )
    del moves["k"], targets["k"]
    tree = rs.plan_tree(moves, targets=targets)
    assert tree.filled == ("qkv",) and "256 elements stay as the given array has them" in str(rs.prove(tree))
    # What the constructor refuses, the proof refutes by itself.
    wrong = rs.plan_tree(fuse("f32[{x}16, 16]") | {"k": fuse("f32[{x}16, 16]")["v"]})
    object.__setattr__(wrong, "targets", ("qkv",) * 3)
    with pytest.raises(ProofError, match="k and v fill an element both"):
        rs.prove(wrong)

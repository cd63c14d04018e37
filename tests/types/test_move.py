"""Moves: what they say, hashing, text, JSON, and what they refuse."""

import copy
import pickle

import pytest

import reshard as rs
from reshard.errors import NotationError, PlanError
from reshard.types.view import View

MESH = rs.Mesh(x=2, y=3)


def layout(text: str) -> rs.Layout:
    return rs.Layout.parse(text, MESH)


QKV = layout("f32[12, {x}2]")


def test_equal_moves_are_equal_and_hashable():
    one, two = (rs.Move(QKV, layout("f32[3, {x}2, 4]"), view="(t h) d -> t d h", t=3) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert rs.Move.from_json(one.to_json()) == one
    assert str(one) == "f32[12, {x}2] -> f32[3, {x}2, 4] on <x=2, y=3>, view (t h) d -> t d h"


def test_without_a_view_it_is_the_same_array():
    move = rs.Move(QKV, layout("f32[{x}6, 4]"))
    assert move.plain and str(move) == "f32[12, {x}2] -> f32[{x}6, 4] on <x=2, y=3>"
    assert rs.plan(move) == rs.plan(move.source, move.target)


def test_parts_of_dims_by_number():
    assert rs.Move(QKV, layout("f32[5, {x}2]"), take={0: slice(2, 7)}).view.target_shape == (5, 4)
    assert rs.Move(QKV, layout("f32[4]"), take={0: 3}).view.target_shape == (4,)
    assert rs.Move(layout("f32[4]"), QKV, into={0: -1}).view.source_shape == (4,)


def test_a_cast():
    move = rs.Move(QKV, layout("bf16[12, {x}2]"), cast=True)
    assert move.casts and not move.plain and str(move).endswith(", cast")
    assert rs.Move(QKV, QKV, cast=True).plain


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rs.Move("f32[4]", QKV), "not a Layout"),
        (lambda: rs.Move(QKV, layout("f32[3, 4, 4]")), "give a view"),
        (lambda: rs.Move(QKV, layout("bf16[12, 4]")), "cast=True"),
        (lambda: rs.Move(QKV, layout("bf16[12, 4]"), cast=1), "give True or False"),
        (lambda: rs.Move(QKV, QKV, h=3), "need a view"),
        (lambda: rs.Move(QKV, QKV, view=3), "give text"),
        (lambda: rs.Move(QKV, QKV, view=View.identity((12, 4)), take={"a": 0}), "already"),
        (lambda: rs.Move(QKV, QKV, view=View.identity((12, 3))), r"global shape \(12, 3\)"),
        (lambda: rs.Move(QKV, QKV, take=3), "give a dict"),
        (lambda: rs.Move(QKV, QKV, take={"h": 3}), "by number, from 0 to 1"),
        (lambda: rs.Move(QKV, QKV, take={2: 3}), "by number, from 0 to 1"),
        (lambda: rs.Move(QKV, QKV, view="a b -> a b", take={0: 3}), "as the view does"),
        (lambda: rs.Move(QKV, layout("bf16[12, 4] + sum{x}"), cast=True), "rounded sum"),
        (lambda: rs.Move(QKV, layout("f32[13, 4] + sum{x}"), into={0: slice(0, 12)}), "finish the sum first"),
        (lambda: rs.Move(layout("c64[4]"), layout("f32[4]"), cast=True), "imaginary"),
        (lambda: rs.Move.from_json("3"), "not a move in JSON"),
        (lambda: rs.Move.from_json("{}"), "not a move in JSON"),
        (lambda: rs.plan(rs.Move(QKV, QKV), QKV), "a move has its target"),
    ],
)
def test_messages(call, message):
    with pytest.raises((PlanError, NotationError), match=message):
        call()

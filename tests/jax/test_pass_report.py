"""Reports of the pass: what is taken and left, as data and as text."""

from __future__ import annotations

import json

import reshard as rs
from reshard.jax.pass_report import PassReport, Reshard
from reshard.jax.stablehlo_pass.module_pass import transform
from tests.jax.modules import COLUMNS, constraint, module

MESH = rs.Mesh(x=2, y=3)
ROWS, COLUMNS_6 = rs.Layout.parse("f32[{x}3, 6]", MESH), rs.Layout.parse("f32[6, {x}3]", MESH)
TAKEN = Reshard("a.py:3", "f/add", True, ROWS, COLUMNS_6, rs.plan(ROWS, COLUMNS_6), True)
LEFT = Reshard("", "f/mul", False, ROWS, COLUMNS_6, None, False, "no plan fits")
IDLE = Reshard("a.py:5", "", True, ROWS, ROWS, None, False, "nothing moves")
UNKNOWN = Reshard("", "", False, None, None, None, False, "quantized")


def test_reports_are_plain_data() -> None:
    report = transform(module(constraint(COLUMNS))).report
    (data,) = report.to_dict()["reshards"]
    assert (data["source"], data["taken"], data["plan"]["received_bytes"]) == ("f32[{x}4, {y}8]", True, 96)
    assert report.left == ()
    assert PassReport((Reshard("", "", False, None, None, None, False, "why"),)).left  # what cannot be planned is left


def test_what_moves_is_taken_or_left() -> None:
    report = PassReport((TAKEN, LEFT, IDLE, UNKNOWN))
    assert report.taken == (TAKEN,)
    assert report.left == (LEFT, UNKNOWN)


def test_a_row_names_the_line_else_the_operation() -> None:
    assert str(PassReport((TAKEN, LEFT, IDLE, UNKNOWN))).splitlines() == [
        "reshards taken: 1 of 3",
        "  a.py:3: f32[{x}3, 6] -> f32[6, {x}3]: all_to_all",
        "  f/mul: f32[{x}3, 6] -> f32[6, {x}3]: left, no plan fits",
        "  (unknown): cannot be planned: left, quantized",
    ]


def test_the_data_is_json() -> None:
    data = json.loads(json.dumps(PassReport((TAKEN, UNKNOWN)).to_dict()))
    taken, unknown = data["reshards"]
    assert taken["explicit"] is True and taken["where"] == "a.py:3"
    assert taken["plan"]["received_bytes"] == 3 * 3 * 4  # half of a tile of 3 x 6
    assert (unknown["source"], unknown["target"], unknown["plan"]) == ("", "", None)

"""What is read from JSON: each field of each text with a value of another type or size, one after another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import reshard as rs
from reshard.errors import PlanError, ReshardError
from reshard.types.json_fields import Fields

MESH = rs.Mesh(x=4, y=2)
ROWS, COLUMNS = (rs.Layout.parse(text, MESH) for text in ("f32[{x}4, 8]", "f32[16, {x}2]"))
OTHER = rs.Layout.parse("f32[16, {z}4]", rs.Mesh({"z": 2}, device_ids=[8, 9]))
TURN = rs.Move(ROWS, rs.Layout.parse("f32[8, {x}4]", MESH), view="a b -> b a")
HALF = rs.Move(ROWS, rs.Layout.parse("f32[{x}4, 4]", MESH), view="a (h b) -> a b", b=4, take={"h": 1})

TEXTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "plan": (rs.Plan.from_json, rs.plan(ROWS, COLUMNS, budget=400, network="h100").to_json()),
    "plan to other devices": (rs.Plan.from_json, rs.plan(ROWS, OTHER).to_json()),
    "plan with a view": (rs.Plan.from_json, rs.plan(TURN).to_json()),
    "tree": (rs.TreePlan.from_json, rs.plan_tree({"v": (ROWS, COLUMNS), "w": TURN}, network="h100").to_json()),
    "move": (rs.Move.from_json, HALF.to_json()),
    "manifest": (rs.Manifest.from_json, rs.Manifest.of({"v": (ROWS, COLUMNS), "w": TURN}, version=3).to_json()),
    "network": (rs.Network.from_json, rs.Network("lab", (1e-6, 1e9), (1e-5, 1e8, "ring"), 8, {"z": (0, 1)}).to_json()),
}

NUMBERS = (True, False, -1, 0, 1, 3, 1.0, 0.5, -2.5, 1e308, 10**30, 10**400)
JUNK = (None, *NUMBERS, "", "x", "9", [], [7], ["x"], {}, {"x": 4})


def _places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in JSON; of lists, to the first item."""
    items = data.items() if isinstance(data, dict) else list(enumerate(data))[:1] if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _changed(text: str, path: tuple[Any, ...], junk: Any) -> Any:
    """The text with another value at this place."""
    data = at = json.loads(text)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = junk
    return data


def _says(given: Any, made: Any) -> bool:
    """Whether what was given is what is written, type for type; fields may be left out."""
    if isinstance(given, dict) and isinstance(made, dict):
        return all(_says(value, made[name]) for name, value in given.items() if name in made)
    if isinstance(given, list) and isinstance(made, list):
        return len(given) == len(made) and all(map(_says, given, made))
    if type(given) is int and type(made) is float:
        return float(given) == made
    return type(given) is type(made) and given == made


@pytest.mark.parametrize("name", TEXTS)
def test_a_field_of_another_type_is_refused(name: str):
    """What is read all the same is written as it was given: nothing is taken for something else."""
    read, text = TEXTS[name]
    assert read(text) == read(read(text).to_json())
    for path in _places(json.loads(text)):
        for junk in JUNK:
            data = _changed(text, path, junk)
            try:
                other = read(json.dumps(data))
            except ReshardError as error:
                assert len(str(error)) < 2000
                continue
            assert _says(data, json.loads(other.to_json())), (path, junk)


@pytest.mark.parametrize(
    ("path", "junk", "words"),
    [
        (("launches",), True, "launches True of the plan, but its steps make"),
        (("format",), 1.0, "format 1.0"),
        (("donate",), 0, "donate is 0, not true or false"),
        (("mesh",), [["x", 4]], "mesh is [['x', 4]], not an object"),
        (("seconds",), 10**400, "seconds an int of"),
        (("steps",), {"0": 1}, "steps is {'0': 1}, not a list"),
        (("steps", 0), "slice", "step 1 is 'slice', not an object"),
        (("steps", 0, "parts"), True, "step 1: parts is True, not a whole number"),
        (("steps", 0, "chunk"), 4.0, "step 1: chunk is 4.0, not a whole number or null"),
        (("steps", 0, "result"), 7, "step 1: result is 7, not text"),
        (("steps", 0, "received_bytes"), float(10**6), "received_bytes 1000000.0 of step 1"),
    ],
)
def test_the_field_is_named(path: tuple[Any, ...], junk: Any, words: str):
    read, text = TEXTS["plan"]
    with pytest.raises(PlanError) as caught:
        read(json.dumps(_changed(text, path, junk)))
    assert words in str(caught.value)


def test_a_missing_field_is_named():
    data = json.loads(TEXTS["tree"][1])
    del data["plans"][1]["steps"][0]["result"]
    with pytest.raises(PlanError, match="step 1: result is missing"):
        rs.TreePlan.from_json(json.dumps(data))
    with pytest.raises(PlanError, match=r"batch 1: plans are \[-1\], but there are 2"):
        rs.TreePlan.from_json(json.dumps(_changed(TEXTS["tree"][1], ("batches", 0, "plans"), [-1])))


def test_what_is_no_object():
    for text in ("[]", "null", "7", None, b"\xff", '{"a"'):
        with pytest.raises(PlanError, match="this is not a thing in JSON"):
            Fields.read(text, "a thing")

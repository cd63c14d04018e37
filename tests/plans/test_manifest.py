"""Manifests: hashed in order, read back, and told apart in words."""

from __future__ import annotations

import json

import pytest

import reshard as rs
from reshard.errors import AgreementError, PlanError, VersionError
from reshard.plans.manifest import Manifest, list_differences

MESH = rs.Mesh(x=4)
ROWS, COLUMNS = (rs.Layout.parse(text, MESH) for text in ("f32[{x}4, 8]", "f32[16, {x}2]"))
OURS = Manifest.of({"a": (ROWS, COLUMNS), "b": (ROWS, COLUMNS)}, version=7)


def test_json_is_read_back() -> None:
    assert Manifest.from_json(OURS.to_json()) == OURS
    assert Manifest.from_json(OURS.to_json()).sha256 == OURS.sha256


def test_equal_trees_are_equal_however_they_are_nested() -> None:
    nested = Manifest.of({"layers": [{"w": ROWS}, {"w": ROWS}]})
    assert nested == Manifest.of({"layers.0.w": ROWS, "layers.1.w": ROWS})


OTHERS = {
    "a name": (Manifest.of({"a": (ROWS, COLUMNS), "c": (ROWS, COLUMNS)}, version=7), "'b' only here; 'c' only there"),
    "an array": (Manifest.of({"a": (ROWS, COLUMNS)}, version=7), "'b' only here"),
    "the order": (Manifest.of({"b": (ROWS, COLUMNS), "a": (ROWS, COLUMNS)}, version=7), "array 0 is 'a' here and 'b'"),
    "a version": (Manifest.of({"a": (ROWS, COLUMNS), "b": (ROWS, COLUMNS)}, version=8), "'a' has version 7 here and 8"),
    "one version": (
        Manifest.of({"a": (ROWS, COLUMNS), "b": (ROWS, COLUMNS)}, version={"a": 7, "b": 6}),
        "'b' has version 7 here and 6 there",
    ),
    "a layout": (Manifest.of({"a": (ROWS, COLUMNS), "b": (ROWS, ROWS)}, version=7), "'b' has layout f32"),
}


@pytest.mark.parametrize(("other", "message"), OTHERS.values(), ids=OTHERS)
def test_what_differs_is_said(other: Manifest, message: str) -> None:
    assert other.sha256 != OURS.sha256
    with pytest.raises(AgreementError, match=message):
        OURS.check(other)


def test_many_differences_are_counted() -> None:
    tree = {f"w{n}": ROWS for n in range(50)}
    said = list_differences(Manifest.of(tree, version=1), Manifest.of(tree, version=2))
    assert len(said) == 5 and said[-1] == "46 more differences"
    assert list_differences(Manifest.of(tree), Manifest.of({}))[0].endswith("and 46 more only here")


def test_the_devices_are_part_of_a_layout() -> None:
    turned = rs.Layout.parse("f32[{x}4, 8]", rs.Mesh({"x": 4}, device_ids=[3, 2, 1, 0]))
    assert Manifest.of({"w": turned}) != Manifest.of({"w": ROWS})


@pytest.mark.parametrize("tree", [7, {"a": 7}, {"a": (ROWS, 7)}, {"a": None}])
def test_what_is_not_a_tree_of_layouts_is_refused(tree: object) -> None:
    with pytest.raises(PlanError):
        Manifest.of(tree)


@pytest.mark.parametrize("version", [1.5, True, [], {"a": 1.5}])
def test_versions_are_text_or_ints(version: object) -> None:
    with pytest.raises(PlanError, match="the version"):
        Manifest.of({"a": ROWS}, version)


def test_another_format_is_refused() -> None:
    with pytest.raises(PlanError, match="format 2"):
        Manifest.from_json(json.dumps(json.loads(OURS.to_json()) | {"format": 2}))


def test_a_changed_entry_is_not_what_was_hashed() -> None:
    data = json.loads(OURS.to_json())
    data["entries"][0]["version"] = 8
    with pytest.raises(PlanError, match="not the one that was hashed"):
        Manifest.from_json(json.dumps(data))


# ---- updates ----


def test_an_update_is_applied_once_and_in_order() -> None:
    held: rs.Manifest = Manifest.of({"a": ROWS, "b": ROWS}, version=7)
    first, second = ({"a": rs.Update(at, at + 1)} for at in (7, 8))
    ours = held.updated(Manifest.of({"a": ROWS}, first))
    assert [entry.version for entry in ours.entries] == [8, 7]
    with pytest.raises(VersionError, match="from 7 to 8 was applied already; 'a' has version 8"):
        ours.updated(Manifest.of({"a": ROWS}, first))
    with pytest.raises(VersionError, match="from 8 to 9 starts from another version than 'a' has, 7"):
        held.updated(Manifest.of({"a": ROWS}, second))
    # All of an array takes the place of whatever was there, of what nobody holds nothing can be brought up to date.
    assert [entry.version for entry in held.updated(Manifest.of({"a": ROWS}, 12)).entries] == [12, 7]
    with pytest.raises(PlanError, match="'c' is updated, and not held"):
        held.updated(Manifest.of({"c": ROWS}, 12))
    assert [entry.version for entry in ours.updated(Manifest.of({"a": ROWS}, second)).entries] == [9, 7]


@pytest.mark.parametrize("update", [rs.Update(7, 7), rs.Update(None, 7), rs.Update(7, None), rs.Update(True, 7)])
def test_versions_that_are_no_update_are_refused(update: rs.Update) -> None:
    with pytest.raises(PlanError):
        update.check_held(7)


def test_what_has_changed_is_part_of_what_both_sides_agree_on() -> None:
    moves = [rs.Move(ROWS, COLUMNS, changed=rows) for rows in ([1], [2], None)]
    one, other, none = (Manifest.of({"w": move}, rs.Update(7, 8)) for move in moves)
    with pytest.raises(AgreementError, match=r"changed \[1, :\].* here and .*changed \[2, :\].* there"):
        one.check(other)
    with pytest.raises(AgreementError, match="'w' has base 7 here and 6 there"):
        one.check(Manifest.of({"w": moves[0]}, rs.Update(6, 8)))
    assert none != one and Manifest.from_json(one.to_json()) == one
    # A manifest without updates is what it was before there were any.
    assert "base" not in OURS.to_json()


def test_arrays_that_moves_read_and_fill_are_part_of_what_both_sides_agree_on() -> None:
    moves = {"a": (ROWS, COLUMNS)}
    plain, read, filled = (
        Manifest.of(moves, **ends) for ends in ({}, {"sources": {"a": "w"}}, {"targets": {"a": "w"}})
    )
    with pytest.raises(AgreementError, match=r"'a' has view  here and  of 'w' there"):
        plain.check(read)
    with pytest.raises(AgreementError, match=r"of 'w' here and  into 'w' there"):
        read.check(filled)
    assert Manifest.of(moves, {"w": 7}, sources={"a": "w"}).entries[0].version == 7


def test_many_devices_are_compared_by_a_hash():
    """Meshes that differ in two ids of a thousand disagree, and the manifest of a thousand such arrays is short."""
    ids = list(range(1024))
    ids[500], ids[501] = 501, 500
    one, other = (
        Manifest.of({"w": rs.Layout.parse("f32[{x}4]", rs.Mesh({"x": 1024}, device_ids=each))})
        for each in (range(1, 1025), [at + 1 for at in ids])
    )
    assert one.sha256 != other.sha256 and len(one.to_json()) < 400
    with pytest.raises(AgreementError, match="sha256"):
        one.check(other)
    assert Manifest.from_json(one.to_json()) == one

"""The typing rules: what each derives, at costs computed by hand, and what each refuses."""

from __future__ import annotations

import random

import pytest

from reshard.errors import StepError
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.rules.checker import RULES, check_step
from reshard.types.rules.cost import FREE, PLAIN, Cost, StepMode
from tests.layouts import random_pair

MESH = Mesh(x=4, y=2)


def cost(kind: str, operand: str, result: str, mode: StepMode = PLAIN, mesh: Mesh = MESH) -> Cost:
    return check_step(kind, Layout.parse(operand, mesh), Layout.parse(result, mesh), mode)


@pytest.mark.parametrize(
    ("operand", "result"),
    [
        ("f32[16]", "f32[{x}4]"),
        ("f32[{y}8]", "f32[{y}{x}2]"),
        ("f32[16, 4]", "f32[{x}4, {y}2]"),
        ("f32[16]", "f32[4{x}]"),
        ("f32[16]", "f32[2{x:(1)2}4]"),
        ("f32[8] + sum{x}", "f32[{y}4] + sum{x}"),
        ("f32[10]", "f32[{x}3/10]"),
        ("f32[0]", "f32[0]"),
    ],
)
def test_slice_is_free(operand: str, result: str):
    assert cost("slice", operand, result) == FREE == Cost(0, 0, 0)


@pytest.mark.parametrize(
    ("operand", "result", "expected"),
    [
        # Three tiles of 4 elements arrive in place.
        ("f32[{x}4]", "f32[16]", Cost(3 * 16, 1, 0)),
        # Arriving blocks are strips of columns: a buffer of the whole result.
        ("f32[4, {x}4]", "f32[4, 16]", Cost(3 * 64, 1, 256)),
        # A unit dim before changes nothing.
        ("f32[1, {x}4]", "f32[1, 16]", Cost(3 * 16, 1, 0)),
        ("f32[{x}{y}2]", "f32[16]", Cost(7 * 8, 1, 0)),
        # y then x would be the order of the blocks: the group is in that order, and they arrive in place.
        ("f32[{y}{x}2]", "f32[16]", Cost(7 * 8, 1, 0)),
        ("f32[{x}{y}2]", "f32[{x}4]", Cost(8, 1, 0)),
        ("f32[{x}{y}2]", "f32[{x:(1)2}{y}4]", None),
        # Padded tiles travel whole: three of three elements.
        ("f32[{x}3/10]", "f32[10]", Cost(3 * 12, 1, 48)),
        ("c128[{y}4] + sum{x}", "c128[8] + sum{x}", Cost(64, 1, 0)),
        ("s4[{x}3]", "s4[12]", Cost(5, 1, 0)),
    ],
)
def test_all_gather(operand: str, result: str, expected: Cost | None):
    if expected is None:
        with pytest.raises(StepError, match="only held digits may change"):
            cost("all_gather", operand, result)
    else:
        assert cost("all_gather", operand, result) == expected


@pytest.mark.parametrize(
    ("operand", "result", "expected"),
    [
        # A tile of 4 x 16: 3/4 of 256 B arrive. Blocks of columns are packed, rows arrive in place.
        ("f32[{x}4, 16]", "f32[16, {x}4]", Cost(192, 1, 256)),
        # The way back: rows leave in place, blocks of columns are unpacked.
        ("f32[16, {x}4]", "f32[{x}4, 16]", Cost(192, 1, 256)),
        # Neither end in place: packed and unpacked, the packed operand freed before the result is made.
        ("f32[2, {x}4, 16]", "f32[2, 16, {x}4]", Cost(384, 1, 512)),
        # Both ends in place: the digit moves one place down.
        ("f32[{x}4]", "f32[4{x}]", Cost(12, 1, 0)),
        # Two sub-axes at once, in one step: 7/8 of 128 B.
        ("f32[{x}2, {y}2, 8]", "f32[8, 4, {x}{y}]", Cost(112, 1, 128)),
        ("f32[{x}4, 16] + sum{y}", "f32[16, {x}4] + sum{y}", Cost(192, 1, 256)),
    ],
)
def test_all_to_all(operand: str, result: str, expected: Cost):
    assert cost("all_to_all", operand, result) == expected


@pytest.mark.parametrize(
    ("operand", "result", "expected"),
    [
        ("f32[{x}{y}2]", "f32[{y}{x}2]", Cost(8, 1, 0)),
        ("f32[{x:(1)2}8]", "f32[{y}8]", Cost(32, 1, 0)),
        ("f32[2{x:(1)2}3, 5]", "f32[2{x:(2)2}3, 5]", Cost(120, 1, 0)),
        ("f32[{y}8] + sum{x:(1)2}", "f32[{x:(2)2}8] + sum{x:(1)2}", Cost(32, 1, 0)),
    ],
)
def test_permute(operand: str, result: str, expected: Cost):
    assert cost("permute", operand, result) == expected


def test_permute_to_another_order_of_devices():
    a, b = Mesh(x=4), Mesh({"x": 4}, device_ids=[3, 1, 2, 0])
    assert check_step("permute", Layout.parse("f32[{x}2]", a), Layout.parse("f32[{x}2]", b)) == Cost(8, 1, 0)


@pytest.mark.parametrize(
    ("operand", "result", "chunk", "expected"),
    [
        # Messages of 4 x 4 elements from three others; two staging buffers of 64 B.
        ("f32[{x}4, 16]", "f32[16, {x}4]", None, Cost(192, 3, 128)),
        # Chunks of two rows: six rounds, buffers of 32 B.
        ("f32[{x}4, 16]", "f32[16, {x}4]", 8, Cost(192, 6, 64)),
        # Chunks of nine elements are two rows as well.
        ("f32[{x}4, 16]", "f32[16, {x}4]", 9, Cost(192, 6, 64)),
        # One row of four lies together in both tiles: no buffers.
        ("f32[{x}4, 16]", "f32[16, {x}4]", 4, Cost(192, 12, 0)),
        ("f32[{x}4, 16]", "f32[16, {x}4]", 1, Cost(192, 48, 0)),
        # As an all-gather: whole tiles, in place.
        ("f32[{x}4]", "f32[16]", None, Cost(48, 3, 0)),
        # A swap of holders with one digit that becomes local: no device has its share yet.
        ("f32[{x:(1)2}{x:(2)2}4]", "f32[{x:(2)2}8]", None, Cost(32, 2, 0)),
        # Uneven: device 3 has one element of ten and fetches three tiles of three.
        ("f32[{x}3/10]", "f32[10]", None, Cost(36, 3, 24)),
        ("f32[10]", "f32[{x}3/10]", None, Cost(0, 0, 0)),
        ("f32[{x}4]", "f32[{x}4]", None, Cost(0, 0, 0)),
        ("f32[0, {x}]", "f32[0, 4]", None, Cost(0, 0, 0)),
    ],
)
def test_exchange(operand: str, result: str, chunk: int | None, expected: Cost):
    assert cost("exchange", operand, result, StepMode(chunk)) == expected


@pytest.mark.parametrize(
    ("operand", "result", "chunk", "expected"),
    [
        # The same rounds as beside the operand; pieces of a packed share need not follow its rows.
        ("f32[{x}4, 16]", "f32[16, {x}4]", None, Cost(192, 3, 128)),
        ("f32[{x}4, 16]", "f32[16, {x}4]", 9, Cost(192, 6, 64)),
        ("f32[{x}4, 16]", "f32[16, {x}4]", 6, Cost(192, 9, 48)),
        ("f32[{x}4, 16]", "f32[16, {x}4]", 1, Cost(192, 48, 0)),
        ("f32[{x}4]", "f32[16]", None, Cost(48, 3, 32)),
        ("f32[{x}4]", "f32[{x}4]", None, Cost(0, 0, 0)),
        ("f32[0, {x}]", "f32[0, 4]", None, Cost(0, 0, 0)),
    ],
)
def test_exchange_in_place(operand: str, result: str, chunk: int | None, expected: Cost):
    assert cost("exchange", operand, result, StepMode(chunk, in_place=True)) == expected


@pytest.mark.parametrize(
    ("operand", "result", "mesh"),
    [("f32[{x}3/10]", "f32[10]", MESH), ("f32[{x}3]", "f32[{y}2]", Mesh(x=2, y=3))],
)
def test_exchange_in_place_needs_even_layouts(operand: str, result: str, mesh: Mesh):
    with pytest.raises(StepError, match="only even layouts with a common refinement go in place"):
        cost("exchange", operand, result, StepMode(in_place=True), mesh)


@pytest.mark.parametrize(
    ("operand", "result", "expected"),
    [
        ("f32[16] + sum{x}", "f32[{x}4]", Cost(48, 1, 0)),
        ("f32[4, 16] + sum{x}", "f32[4, {x}4]", Cost(192, 1, 256)),
        ("f32[16] + max{x}{y}", "f32[{x}{y}2]", Cost(56, 1, 0)),
        ("f32[16] + sum{x}{y}", "f32[{x}4] + sum{y}", Cost(48, 1, 0)),
        ("f32[{y}8] + product{x}", "f32[{y}{x}2]", Cost(24, 1, 0)),
    ],
)
def test_reduce_scatter(operand: str, result: str, expected: Cost):
    assert cost("reduce_scatter", operand, result) == expected


@pytest.mark.parametrize(
    ("operand", "result", "expected"),
    [
        ("f32[16] + sum{x}", "f32[16]", Cost(2 * 3 * 64 // 4, 1, 0)),
        ("f32[{x}4] + mean{y}", "f32[{x}4]", Cost(16, 1, 0)),
        ("f32[16] + sum{x}{y}", "f32[16] + sum{x}", Cost(64, 1, 0)),
        ("f32[3] + min{x}", "f32[3]", Cost(5 * 4, 1, 0)),  # 2 * 3/4 * 3 elements, rounded up
    ],
)
def test_all_reduce(operand: str, result: str, expected: Cost):
    assert cost("all_reduce", operand, result) == expected


REFUSED = [
    ("slice", "f32[{x}4]", "f32[16]", "only local digits may change"),
    ("slice", "f32[{x}4, 16]", "f32[16, {x}4]", "only local digits may change"),
    ("slice", "f32[{x}{y}2]", "f32[{y}{x}2]", "only to sub-axes not in use"),
    ("slice", "f32[16] + sum{x}", "f32[{x}4]", "partial sub-axes must stay"),
    ("all_gather", "f32[16]", "f32[{x}4]", "only held digits may change"),
    ("all_gather", "f32[{x}4, 16]", "f32[16, {x}4]", "only held digits may change"),
    ("all_gather", "f32[{x}4] + sum{y}", "f32[16]", "partial sub-axes must stay"),
    ("all_gather", "f32[{x}{y}2]", "f32[{y}8]", "only held digits may change"),
    ("all_to_all", "f32[{x}4, 16]", "f32[16, {y}8]", "must be those that take local ones"),
    ("all_to_all", "f32[{x}4, 16]", "f32[16, 16]", "must be those that take local ones"),
    ("all_to_all", "f32[16, 16]", "f32[{x}4, 16]", "must be those that take local ones"),
    ("all_to_all", "f32[{x}4, {y}8]", "f32[{y}8, {x}4]", "must be those that take local ones"),
    ("all_to_all", "f32[{x}4, 16] + sum{y}", "f32[16, {x}4]", "partial sub-axes must stay"),
    ("permute", "f32[{x}4]", "f32[{y}8]", "the tiles must be the same ones"),
    ("permute", "f32[{y}8]", "f32[8{y}]", "the tiles must be the same ones"),
    ("permute", "f32[{y}8] + sum{x:(1)2}", "f32[{y}8] + sum{x:(2)2}", "the tiles must be the same ones"),
    ("exchange", "f32[16] + sum{x}", "f32[16]", "reduces nothing"),
    ("exchange", "f32[16]", "f32[16] + sum{x}", "reduces nothing"),
    ("reduce_scatter", "f32[16] + sum{x}", "f32[{y}8]", "must come to hold local digits"),
    ("reduce_scatter", "f32[16] + sum{x}", "f32[16]", "must come to hold local digits"),
    ("reduce_scatter", "f32[16]", "f32[{x}4]", "must come to hold local digits"),
    ("reduce_scatter", "f32[16] + sum{x}", "f32[{x}{y}2]", "must come to hold local digits"),
    ("reduce_scatter", "f32[{y}8] + sum{x}", "f32[{x}4]", "must come to hold local digits"),
    ("reduce_scatter", "f32[16] + sum{x}", "f32[{x:(1)2}8] + sum{y}", "must come to hold local digits"),
    ("all_reduce", "f32[16]", "f32[16]", "must become replicated"),
    ("all_reduce", "f32[16]", "f32[16] + sum{x}", "must become replicated"),
    ("all_reduce", "f32[16] + sum{x}", "f32[{x}4]", "must become replicated"),
    ("all_reduce", "f32[{y}8] + sum{x}", "f32[16]", "must become replicated"),
    ("all_reduce", "f32[16] + sum{x}", "f32[16] + sum{y}", "must become replicated"),
]


@pytest.mark.parametrize(("kind", "operand", "result", "why"), REFUSED)
def test_refusals(kind: str, operand: str, result: str, why: str):
    with pytest.raises(StepError) as caught:
        cost(kind, operand, result)
    message = str(caught.value)
    assert message.startswith(f"{kind}: {operand} -> {result} (global ")
    assert why in message
    assert "mesh <x=4, y=2>" in message


@pytest.mark.parametrize("kind", list(RULES))
@pytest.mark.parametrize(
    ("operand", "result"),
    [
        ("f32[16] + sum{x}", "f32[16] + max{x}"),
        ("f32[16] + sum{x}{y}", "f32[16] + max{y}"),
        ("f32[16] + sum{x}{y}", "f32[{x}4] + max{y}"),
        ("f32[16] + sum{x}", "f32[{y}8] + max{x}"),
        ("f32[{y}8] + sum{x}", "f32[16] + max{x}"),
        ("f32[{y}8, 16] + sum{x}", "f32[16, {y}8] + max{x}"),
        ("f32[{y}8] + sum{x:(1)2}", "f32[{x:(2)2}8] + max{x:(1)2}"),
    ],
)
def test_no_rule_changes_what_the_reduction_is(kind: str, operand: str, result: str):
    with pytest.raises(StepError):
        cost(kind, operand, result)


@pytest.mark.parametrize("kind", list(RULES))
def test_every_rule_keeps_shape_dtype_and_devices(kind: str):
    for operand, result, why in (
        ("f32[16]", "f32[17]", "keeps the global shape and the dtype"),
        ("f32[16]", "f32[16, 1]", "keeps the global shape and the dtype"),
        ("f32[16]", "s32[16]", "keeps the global shape and the dtype"),
    ):
        with pytest.raises(StepError, match=why):
            cost(kind, operand, result)
    with pytest.raises(StepError, match="keeps the devices"):
        check_step(kind, Layout.parse("f32[{x}4]", Mesh(x=4)), Layout.parse("f32[{x}2]", Mesh(x=8)))


@pytest.mark.parametrize("kind", list(RULES))
@pytest.mark.parametrize(
    ("operand", "result"), [("f32[{x}4]", "f32[{x}4]"), ("f32[{x}4]", "f32[8]"), ("f32[8]", "f32[{x}4]")]
)
def test_every_rule_keeps_the_devices(kind: str, operand: str, result: str):
    here, there = Mesh(x=2), Mesh({"x": 2}, device_ids=[4, 5])
    with pytest.raises(StepError):
        check_step(kind, Layout.parse(operand, here), Layout.parse(result, there))


@pytest.mark.parametrize("mode", [StepMode(4), StepMode(in_place=True)])
def test_only_exchanges_are_chunked_or_in_place(mode: StepMode):
    for kind in set(RULES) - {"exchange"}:
        with pytest.raises(StepError, match="only an exchange is chunked, by at least 1 element, or in place"):
            cost(kind, "f32[16]", "f32[{x}4]", mode)


@pytest.mark.parametrize("chunk", [0, -1])
def test_chunks_have_elements(chunk: int):
    for in_place in (False, True):
        with pytest.raises(StepError, match="at least 1 element"):
            cost("exchange", "f32[{x}4]", "f32[16]", StepMode(chunk, in_place))


def test_unknown_steps():
    with pytest.raises(StepError, match=r"unknown step 'teleport'; the steps are slice, all_gather"):
        cost("teleport", "f32[16]", "f32[16]")


def test_no_common_refinement_is_for_exchanges():
    mesh = Mesh(x=2, y=3)
    for kind in ("slice", "all_gather", "all_to_all"):
        with pytest.raises(StepError, match="no common refinement; use an exchange"):
            cost(kind, "f32[{x}3]", "f32[{y}2]", mesh=mesh)
    # Piece 0..2 against 0..1, then 2..3, then 4..5: the middle one has one element of each half.
    assert cost("exchange", "f32[{x}3]", "f32[{y}2]", mesh=mesh).received == 2 * 4


@pytest.mark.parametrize("seed", range(2))
def test_a_rule_that_accepts_is_the_only_kind_of_its_pair_or_equally_right(seed: int):
    """Of all kinds, those that derive a random pair are those that its atoms allow."""
    choose = random.Random(seed)
    derived = 0
    for _ in range(400):
        source, target = random_pair(choose)
        kinds: dict[str, Cost] = {}
        for kind in RULES:
            try:
                kinds[kind] = check_step(kind, source, target)
            except StepError:
                continue
        assert "exchange" in kinds
        assert not kinds.keys() & {"reduce_scatter", "all_reduce"}
        for kind, found in kinds.items():
            derived += 1
            # A slice is right for what every device holds already, and for nothing else.
            assert (kind == "slice") <= (kinds["exchange"].received == 0)
            assert found.received >= kinds["exchange"].received
    assert derived > 400

"""What no run on one machine shows: dtypes, rounds, receivers and copies of a whole program, each planted wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import reshard as rs
from reshard.errors import ProofError, UndecidedError
from reshard.lower import Program, lower_plan
from reshard.lower.exchange_rounds import Exchange, ExchangeInPlace
from reshard.lower.program import AllGather, AllToAll, CastTiles, InParts, Permute, ReduceScatter
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from tests.program_faults import replaced

MESH, CUBE, THREE = rs.Mesh(x=4, y=2), rs.Mesh(x=2, y=2, z=2), rs.Mesh(x=3)


def moved(source: str, target: str, mesh: rs.Mesh = MESH, to: rs.Mesh | None = None, **options: Any) -> rs.Plan:
    ends = rs.Layout.parse(source, mesh), rs.Layout.parse(target, to or mesh)
    return rs.plan(rs.Move(*ends, **options)) if options else rs.plan(*ends)


def one_step(kind: str, source: str, target: str, mesh: rs.Mesh, to: rs.Mesh | None = None, **mode: Any) -> rs.Plan:
    ends = rs.Layout.parse(source, mesh), rs.Layout.parse(target, to or mesh)
    return chain(*ends, [StepSpec(kind, ends[1], StepMode(**mode))], donate=True)


PLANS = {
    "gather": moved("f32[{x}{y}2, 3]", "f32[16, 3]"),
    "even exchange": one_step("exchange", "f32[{x}4, 12]", "f32[12, {x}4]", THREE),
    "uneven exchange": moved("f32[{x}3/10, 4]", "f32[10, {x}]"),
    "several blocks": moved("f32[3{x}5/27]", "f32[5{x}3/27]", rs.Mesh(x=2)),
    "a cycle and a move": moved("f32[{x}{y}2, {z}4]", "f32[{z}4, 2{x}2]", CUBE),
    "in place": one_step("exchange", "f32[{x}4, 12]", "f32[12, {x}4]", THREE, in_place=True),
    "in place, in pieces": one_step("exchange", "f32[{x}4, 12]", "f32[12, {x}4]", THREE, in_place=True, chunk=3),
    "in parts": one_step("exchange", "f32[{x}4, 12, 2]", "f32[12, {x}4, 2]", THREE, parts=2),
    "all to all": moved("f32[{x}4, 12]", "f32[12, {x}4]", THREE),
    "reduce": moved("f32[12, 2] + sum{x}", "f32[{x}4, 2]", THREE),
    "permute": moved("f32[{x}{y}2]", "f32[{y}{x}2]"),
    "other devices": moved("f32[{x}6]", "f32[{a}4]", rs.Mesh(x=2), rs.Mesh({"a": 3}, device_ids=[4, 5, 6])),
    "relay": one_step(
        "exchange", "f32[{x}6]", "f32[12]", rs.Mesh(x=2), rs.Mesh({"a": 3}, device_ids=[4, 5, 6]), relay=True
    ),
    "wider": moved("f32[{x}6, 5]", "f64[24, 5]", cast=True),
    "narrower": moved("f32[{x}6, 5]", "bf16[24, 5]", cast=True),
    "wider after a move": moved("int8[24, 5]", "int32[{x}6, 5]", cast=True),
    "view and cast": moved("f32[{x}6, 4]", "f64[2, 12, {x}]", view="(a b) c -> a b c", a=2, cast=True),
    "view exchange": moved("f32[{x}6]", "f32[{x}2]", view="(t h) -> h", take={"t": 1}, t=3),
}

Faulty = Iterator[Any]


def cast_elsewhere(step: CastTiles, program: Program) -> Faulty:
    yield from (CastTiles(dtype) for dtype in ("bool", "int8", "int32", "float16", "float64") if dtype != step.dtype)


def cast_left_out(step: CastTiles, program: Program) -> Faulty:
    yield CastTiles(program.dtype)
    yield None


def rounds_joined(step: Exchange | ExchangeInPlace, program: Program) -> Faulty:
    for at in range(len(step.rounds) - 1):
        joined = (*step.rounds[at], *step.rounds[at + 1])
        yield replace(step, rounds=(*step.rounds[:at], joined, (), *step.rounds[at + 2 :]))


def message_halved(step: Exchange, program: Program) -> Faulty:
    for at, turn in enumerate(step.rounds):
        for number, t in enumerate(turn):
            if len(t.blocks) > 1:
                halves = t._replace(blocks=t.blocks[:1]), t._replace(blocks=t.blocks[1:])
                yield replace(step, rounds=replaced(step.rounds, at, (*turn[:number], *halves, *turn[number + 1 :])))


def message_sent_again(step: Exchange | ExchangeInPlace, program: Program) -> Faulty:
    for at, turn in enumerate(step.rounds):
        if turn:
            yield replace(step, rounds=replaced(step.rounds, at, (*turn, turn[0])))


def receiver_added(step: Exchange, program: Program) -> Faulty:
    for device in (step.receivers[0], max(*step.receivers, *program.devices) + 1, *program.devices):
        yield replace(step, receivers=(*step.receivers, device))


def message_as_local_copy(step: Exchange, program: Program) -> Faulty:
    for at, turn in enumerate(step.rounds):
        for number, t in enumerate(turn):
            if t.sender != t.receiver:
                fewer = replaced(step.rounds, at, (*turn[:number], *turn[number + 1 :]))
                yield replace(step, rounds=fewer, local=(*step.local, t))


def copy_passed_on(step: Exchange, program: Program) -> Faulty:
    for at, t in enumerate(step.local):
        yield replace(step, local=replaced(step.local, at, t._replace(relayed=True)))


def other_flags(step: Exchange, program: Program) -> Faulty:
    yield replace(step, fills=not step.fills)
    if not step.strided:
        yield replace(step, strided=True)


def pair_twice(step: Permute, program: Program) -> Faulty:
    yield from (Permute((*step.pairs, pair)) for pair in step.pairs)


def tile_sent_in_blocks(step: AllGather, program: Program) -> Faulty:
    yield replace(step, send=replace(step.send, blocks=(0,)))


def dims_of_views_swapped(step: AllGather | AllToAll, program: Program) -> Faulty:
    for side in ("send", "receive"):
        view = getattr(step, side)
        other = tuple(len(view.tile) - 1 - dim for dim in view.dims)
        if other != view.dims:
            yield replace(step, **{side: replace(view, dims=other)})


FAULTS: dict[str, tuple[tuple[type, ...], Callable[[Any, Program], Faulty]]] = {
    "a cast to another dtype": ((CastTiles,), cast_elsewhere),
    "a cast left out": ((CastTiles,), cast_left_out),
    "two rounds at once": ((Exchange, ExchangeInPlace), rounds_joined),
    "a message in two halves": ((Exchange,), message_halved),
    "a message sent again in its round": ((Exchange, ExchangeInPlace), message_sent_again),
    "an extra receiver": ((Exchange,), receiver_added),
    "a message as a local copy": ((Exchange,), message_as_local_copy),
    "a local copy that passes on what has yet to arrive": ((Exchange,), copy_passed_on),
    "an exchange of another kind": ((Exchange,), other_flags),
    "a pair twice": ((Permute,), pair_twice),
    "a tile that is sent in blocks": ((AllGather,), tile_sent_in_blocks),
    "views of other dims": ((AllToAll, ReduceScatter), dims_of_views_swapped),
}


def wrong_programs(program: Program) -> Iterator[tuple[str, Program]]:
    """Every fault of the table planted at every instruction, and casts there and back at every place."""
    for at, step in enumerate(program.instructions):
        plain = step.each if isinstance(step, InParts) else step
        for kind, (of, plant) in FAULTS.items():
            for wrong in plant(plain, program) if isinstance(plain, of) else ():
                steps, shapes = program.instructions, program.tile_shapes
                if wrong is None:
                    yield (
                        kind,
                        replace(
                            program,
                            instructions=(*steps[:at], *steps[at + 1 :]),
                            tile_shapes=(*shapes[:at], *shapes[at + 1 :]),
                        ),
                    )
                else:
                    changed = replace(step, each=wrong) if isinstance(step, InParts) else wrong
                    yield kind, replace(program, instructions=replaced(steps, at, changed))
        shape = program.tile_shapes[at]
        dtype = next(
            (i.dtype for i in reversed(program.instructions[: at + 1]) if isinstance(i, CastTiles)), program.dtype
        )
        there_and_back = (CastTiles("bool"), CastTiles(dtype))
        yield (
            "a cast there and back",
            replace(
                program,
                instructions=(*program.instructions[: at + 1], *there_and_back, *program.instructions[at + 1 :]),
                tile_shapes=(*program.tile_shapes[: at + 1], shape, shape, *program.tile_shapes[at + 1 :]),
            ),
        )


def test_every_planted_program_is_refused():
    seen: dict[str, int] = {}
    for name, plan in PLANS.items():
        program = lower_plan(plan)
        assert rs.prove(plan, program).right.holds, name
        for number, (kind, wrong) in enumerate(wrong_programs(program)):
            with pytest.raises((ProofError, UndecidedError)) as error:
                rs.prove(plan, wrong)
                pytest.fail(f"{name}, fault {number}: proved with {kind}")
            assert len(str(error.value)) > 20
            seen[kind] = seen.get(kind, 0) + 1
    assert set(seen) == {*FAULTS, "a cast there and back"}
    assert sum(seen.values()) > 150


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("narrower", "a cast to another dtype", "leaves tiles of bool, the plan says bfloat16"),
        ("wider", "a cast left out", "leaves tiles of float32, the plan says float64"),
        ("in place", "two rounds at once", "in round 1, a device sends more than one message"),
        ("view exchange", "an extra receiver", "a device is listed twice among the receivers"),
        ("even exchange", "a message as a local copy", "a local copy goes to another device"),
    ],
)
def test_the_reason_is_said(name: str, kind: str, message: str):
    plan = PLANS[name]
    wrong = next(wrong for each, wrong in wrong_programs(lower_plan(plan)) if each == kind)
    with pytest.raises(ProofError, match=message):
        rs.prove(plan, wrong)

"""Small changes for `benchmarks/fuzz.py`: of text, of JSON, and of lowered programs."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

from reshard.lower import Program
from reshard.lower import program as instructions

BIG = "99999999999999999999"
JUNK = (*tuple("{}[](),:/+-=07'\"x \n.é"), "sum", "<=", "T(", "d0", "None", "1e9", BIG)


def mutated_text(choose: random.Random, text: str) -> str:
    """One to three characters or words dropped, doubled, replaced or swapped."""
    for _ in range(choose.randint(1, 3)):
        at, end = sorted(choose.randint(0, len(text)) for _ in range(2))
        end = min(end, at + 4)
        piece = choose.choice((choose.choice(JUNK), text[at:end] * 2, "", text[at:end][::-1]))
        text = text[:at] + piece + text[end:]
    return text


def mutated_json(choose: random.Random, text: str) -> str:
    """A leaf or a branch of the JSON replaced; sometimes the text itself is damaged."""
    if choose.random() < 0.15:
        return mutated_text(choose, text)
    data = json.loads(text)
    at, key = _place(choose, data)
    value = at[key]
    options: list[Any] = [None, True, -1, 0, 1, 2, 0.5, "", [], {}, 10**30, -value if isinstance(value, int) else 7]
    if isinstance(value, int):
        options += [value + 1, value - 1, value * 2] * 3
    if isinstance(value, str):
        options += [mutated_text(choose, value)] * 10
    at[key] = choose.choice(options)
    return json.dumps(data)


def _place(choose: random.Random, data: Any) -> tuple[Any, Any]:
    """A random container in JSON and one of its keys."""
    at: Any = data
    while True:
        key = choose.choice(list(at)) if isinstance(at, dict) else choose.randrange(len(at))
        below = at[key]
        if not isinstance(below, dict | list) or not below or choose.random() < 0.1:
            return at, key
        at = below


def mutated_program(choose: random.Random, program: Program) -> Program | None:
    """The program with one instruction changed, or None if this one has nothing to change."""
    if not program.instructions:
        return None
    number = choose.randrange(len(program.instructions))
    old = program.instructions[number]
    if isinstance(old, instructions.InParts):
        each = _changed(choose, old.each, program.devices)
        new = None if each is None else replace(old, each=each)
    else:
        new = _changed(choose, old, program.devices)
    if new is None or new == old:
        return None
    return replace(program, instructions=(*program.instructions[:number], new, *program.instructions[number + 1 :]))


def _changed(choose: random.Random, old: Any, devices: tuple[int, ...]) -> Any:
    if isinstance(old, instructions.Slice):
        device = choose.choice(devices)
        return replace(old, block={**old.block, device: choose.choice(list(old.block.values()))})
    if isinstance(old, instructions.Permute):
        (one, a), (other, b) = choose.choices(old.pairs, k=2)
        swapped = {(one, a): (one, b), (other, b): (other, a)}
        return replace(old, pairs=tuple(swapped.get(pair, pair) for pair in old.pairs)) if a != b else None
    if isinstance(old, instructions.Exchange):
        return _other_exchange(choose, old)
    if hasattr(old, "groups"):
        one, other = choose.choice(old.groups), choose.choice(old.groups)
        a, b = choose.choice(one), choose.choice(other)
        swap = {a: b, b: a}
        return replace(old, groups=tuple(tuple(swap.get(d, d) for d in group) for group in old.groups))
    return None


def _other_exchange(choose: random.Random, old: Any) -> Any:
    if not old.rounds:
        return None
    at = choose.randrange(len(old.rounds))
    turn = list(old.rounds[at])
    number = choose.randrange(len(turn))
    transfer = turn[number]
    kind = choose.choice(("drop", "sender", "shift", "block"))
    if kind == "drop":
        del turn[number]
    elif kind == "sender":
        turn[number] = transfer._replace(sender=choose.choice(turn).sender)
    elif kind == "block" and len(transfer.blocks) > 1:
        turn[number] = transfer._replace(blocks=transfer.blocks[1:])
    else:
        block = transfer.blocks[0]
        side = choose.choice(("src", "dst"))
        digits = (old.send if side == "src" else old.receive).digits
        if not digits:
            return None
        stride = math.prod(digits[choose.randrange(len(digits)) + 1 :])
        block = block._replace(**{side: max(0, getattr(block, side) + choose.choice((-stride, stride)))})
        turn[number] = transfer._replace(blocks=(block, *transfer.blocks[1:]))
    return replace(old, rounds=(*old.rounds[:at], tuple(turn), *old.rounds[at + 1 :]))

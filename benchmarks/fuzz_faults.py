"""Small changes for `benchmarks/fuzz.py`: of text, of JSON, and of lowered programs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.geometry.blocks import Axis, Block
from reshard.lower import Program
from reshard.lower.exchange_rounds import Exchange, ExchangeInPlace, Transfer
from reshard.lower.program import (
    CastTiles,
    InParts,
    PackedCollective,
    Permute,
    PutPart,
    Reorder,
    Slice,
    SplitSum,
    TakePart,
)
from reshard.plans.rules.split_steps import Cut
from reshard.plans.rules.tile_view import TileView
from reshard.plans.rules.view_steps import TileOrder

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


# ---- operators on lowered programs ----------------------------------------------------------------
#
# An operator has a name and makes one wrong-looking instruction, or program, of a right one. Some of what they make
# changes nothing: whoever uses them judges each program by itself (`benchmarks/fuzz_programs.py`).
#
# Each function below takes apart what it may change, and returns its operators as {name: change}; a change that finds
# nothing to do returns None.

Change = Callable[[], Any]
Changes = dict[str, Change]
DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
REDUCTIONS = ("sum", "max", "min", "product", "mean")


def _put(items: Sequence[Any], at: int, *new: Any) -> tuple[Any, ...]:
    """The items with others, or none, in place of one."""
    return (*items[:at], *new, *items[at + 1 :])


def _swap(items: Sequence[Any], one: int, other: int) -> tuple[Any, ...]:
    return _put(_put(items, one, items[other]), other, items[one])


def _pick_two(choose: random.Random, items: Sequence[Any]) -> tuple[int, int] | None:
    """The places of two different items, None if there are none."""
    if len(items) > 64:  # All pairs of a long list take minutes; most of a few random ones differ.
        drawn = (tuple(choose.sample(range(len(items)), 2)) for _ in range(64))
        return next(((a, b) for a, b in drawn if items[a] != items[b]), None)
    different = [(a, b) for a in range(len(items)) for b in range(a) if items[a] != items[b]]
    return choose.choice(different) if different else None


def _shuffled(choose: random.Random, items: Sequence[Any]) -> tuple[Any, ...] | None:
    pair = _pick_two(choose, items)
    return None if pair is None else _swap(items, *pair)


def change_rounds(choose: random.Random, step: Any, devices: Sequence[int]) -> Changes:
    """Rounds of messages, of exchanges of both kinds and of a permute, by their senders and receivers alone."""
    pairs = isinstance(step, Permute)
    turns = ([Transfer(*pair, ()) for pair in step.pairs],) if pairs else step.rounds
    busy = [at for at, turn in enumerate(turns) if turn]
    if not busy:
        return {}
    at = choose.choice(busy)
    turn = turns[at]
    number = choose.randrange(len(turn))
    t, stranger = turn[number], choose.choice([*devices, max(devices) + 1])
    twins = _pick_two(choose, turn)

    def of_turns(*new: Any) -> Any:
        return replace(step, pairs=tuple(t[:2] for t in new[0])) if pairs else replace(step, rounds=tuple(new))

    def of_turn(*new: Any) -> Any:
        return of_turns(*_put(turns, at, tuple(new)))

    def trade(end: str) -> Any:
        if twins is None:
            return None
        a, b = (turn[each] for each in twins)
        one, other = a._replace(**{end: getattr(b, end)}), b._replace(**{end: getattr(a, end)})
        return of_turn(*_put(_put(turn, twins[0], one), twins[1], other))

    changes: Changes = {
        "a message left out": lambda: of_turn(*_put(turn, number)),
        "a message sent again in its round": lambda: of_turn(*turn, t),
        "another sender": lambda: of_turn(*_put(turn, number, t._replace(sender=stranger))),
        "another receiver": lambda: of_turn(*_put(turn, number, t._replace(receiver=stranger))),
        "a message to another device too": lambda: of_turn(*turn, t._replace(receiver=stranger)),
        "sender and receiver swapped": lambda: of_turn(
            *_put(turn, number, t._replace(sender=t.receiver, receiver=t.sender))
        ),
        "two senders swapped": lambda: trade("sender"),
        "two receivers swapped": lambda: trade("receiver"),
        "messages of a round in another order": lambda: of_turn(*turn[::-1]),
    }
    if pairs:
        return changes
    other = choose.randrange(len(turns))
    changes |= {
        "a message in another round": lambda: of_turns(
            *_put(_put(turns, at, _put(turn, number)), other, (*_put(turns, at, _put(turn, number))[other], t))
        ),
        "a message sent again in another round": lambda: of_turns(*_put(turns, other, (*turns[other], t))),
        "a message sent again at the end": lambda: of_turns(*turns, (t,)),
        "two rounds at once": lambda: of_turns(*_put(_put(turns, at, (*turn, *turns[other])), other)),
        "two rounds at once, and an empty one": lambda: of_turns(
            *_put(_put(turns, other, ()), at, (*turn, *turns[other]))
        ),
        "a round left out": lambda: of_turns(*_put(turns, at)),
        "a round run twice": lambda: of_turns(*_put(turns, at, turn, turn)),
        "a round run again at the end": lambda: of_turns(*turns, turn),
        "two rounds swapped": lambda: of_turns(*_swap(turns, at, other)),
        "all rounds backwards": lambda: of_turns(*turns[::-1]),
        "an empty round": lambda: of_turns(*_put(turns, at, turn, ())),
        "staging otherwise": lambda: replace(step, staged=not step.staged),
    }
    return changes


def change_messages(choose: random.Random, step: Exchange, devices: Sequence[int]) -> Changes:
    """The blocks of one message or local copy of an exchange, its local copies, receivers and flags."""
    turns: tuple[Any, ...] = (step.local, *step.rounds)
    busy = [at for at, turn in enumerate(turns) if turn]
    if not busy:
        return {}
    at = choose.choice(busy)
    turn = turns[at]
    number = choose.randrange(len(turn))
    t = turn[number]

    def of_turns(new: Sequence[Any]) -> Any:
        return replace(step, local=new[0], rounds=tuple(new[1:]))

    def of_message(*new: Any) -> Any:
        return of_turns(_put(turns, at, _put(turn, number, *new)))

    def of_blocks(*new: Block) -> Any:
        return of_message(t._replace(blocks=tuple(new)))

    def sent_locally() -> Any:
        if not step.rounds:
            return None
        if at:
            return of_turns(((*step.local, t), *_put(turns, at, _put(turn, number))[1:]))
        fewer = _put(turns, 0, _put(turn, number))
        return of_turns(_put(fewer, 1, (*fewer[1], t)))

    def in_two(same_round: bool) -> Any:
        halves = _halve(choose, t)
        if halves is None:
            return None
        if same_round or not at:
            return of_message(*halves)
        return of_turns((*_put(turns, at, _put(turn, number, halves[0])), (halves[1],)))

    twins = _pick_two(choose, turn)

    def blocks_traded() -> Any:
        if twins is None:
            return None
        a, b = (turn[each] for each in twins)
        one, other = a._replace(blocks=b.blocks), b._replace(blocks=a.blocks)
        return of_turns(_put(turns, at, _put(_put(turn, twins[0], one), twins[1], other)))

    receivers, stranger = step.receivers, choose.choice([*devices, max(devices) + 1])
    some = choose.randrange(len(receivers))
    changes: Changes = {
        "a message copied, or a copy sent": sent_locally,
        "a copy to another device": lambda: None if at else of_message(t._replace(receiver=stranger)),
        "a copy left out, or a message": lambda: of_message(),
        "a message in two halves in a round": lambda: in_two(True),
        "a message over two rounds": lambda: in_two(False),
        "blocks of two messages swapped": blocks_traded,
        "relayed otherwise": lambda: of_message(t._replace(relayed=not t.relayed)),
        "a receiver added": lambda: replace(step, receivers=(*receivers, stranger)),
        "a receiver twice": lambda: replace(step, receivers=(*receivers, receivers[some])),
        "a receiver left out": lambda: replace(step, receivers=_put(receivers, some)),
        "another receiver of the result": lambda: replace(step, receivers=_put(receivers, some, stranger)),
        "fills otherwise": lambda: replace(step, fills=not step.fills),
        "viewed otherwise": lambda: replace(step, viewed=not step.viewed),
    }
    return changes | (change_blocks(choose, step, t.blocks, of_blocks) if t.blocks else {})


def change_blocks(
    choose: random.Random, step: Exchange, blocks: tuple[Block, ...], of_blocks: Callable[..., Any]
) -> Changes:
    """One block of a message."""
    which = choose.randrange(len(blocks))
    block = blocks[which]

    def of_block(*new: Block) -> Any:
        return of_blocks(*_put(blocks, which, *new))

    sizes = [math.prod(view.digits) for view in (step.send, step.receive)]
    jumps = {1, -1, *(by for extent, *steps in block.axes for by in (*steps, extent)), *sizes, -sizes[0], -sizes[1]}
    by = choose.choice(sorted(jumps - {0}))
    changes: Changes = {
        "a block left out": lambda: of_block(),
        "a block twice": lambda: of_block(block, block),
        "a block elsewhere in the source": lambda: of_block(block._replace(src=block.src + by)),
        "a block elsewhere in the target": lambda: of_block(block._replace(dst=block.dst + by)),
        "a block elsewhere at both ends": lambda: of_block(block._replace(src=block.src + by, dst=block.dst + by)),
        "the two ends of a block swapped": lambda: of_block(block.reversed),
        "a block once more, elsewhere": lambda: of_block(block, block._replace(dst=block.dst + by)),
        "an overlapping block once more": lambda: of_block(block, block._replace(src=block.src + by)),
        "blocks in another order": lambda: of_blocks(*blocks[::-1]),
    }
    if not block.axes:
        return changes
    loop = choose.randrange(len(block.axes))
    axis = block.axes[loop]

    def of_axis(*new: Axis) -> Any:
        return of_block(block._replace(axes=_put(block.axes, loop, *new)))

    def cut_axis(sizes: tuple[int, int]) -> Any:
        """The block in two along an axis, the second part at its place or not."""
        first, second = sizes
        if first <= 0 or second <= 0:
            return None
        one = block._replace(axes=_put(block.axes, loop, axis._replace(extent=first)))
        src, dst = block.src + first * axis.src, block.dst + first * axis.dst
        return of_block(one, Block(src, dst, _put(block.axes, loop, axis._replace(extent=second))))

    more = choose.choice((1, -1, 2))
    changes |= {
        "a block of another extent": lambda: of_axis(axis._replace(extent=axis.extent + more)),
        "a block without elements": lambda: of_axis(axis._replace(extent=choose.choice((0, -1, -axis.extent)))),
        "a block of another stride in the source": lambda: of_axis(axis._replace(src=axis.src + more)),
        "a block of another stride in the target": lambda: of_axis(axis._replace(dst=axis.dst + more)),
        "a stride of 0, or backwards": lambda: of_axis(
            axis._replace(**{choose.choice(("src", "dst")): choose.choice((0, -axis.src))})
        ),
        "an axis of a block backwards at both ends": lambda: of_block(
            Block(
                block.src + (axis.extent - 1) * axis.src,
                block.dst + (axis.extent - 1) * axis.dst,
                _put(block.axes, loop, Axis(axis.extent, -axis.src, -axis.dst)),
            )
        ),
        "an axis of a block left out": lambda: of_axis(),
        "axes of a block in another order": lambda: of_block(block._replace(axes=block.axes[::-1])),
        "strides of two axes swapped at one end": lambda: _cross_strides(choose, block, of_block),
        "a block in two": lambda: cut_axis((axis.extent // 2, axis.extent - axis.extent // 2)),
        "a block in two that overlap": lambda: cut_axis((axis.extent // 2, axis.extent - axis.extent // 2 + 1)),
        "a block in two that leave some out": lambda: cut_axis((axis.extent // 2, axis.extent - axis.extent // 2 - 1)),
    }
    return changes


def _halve(choose: random.Random, t: Transfer) -> tuple[Transfer, Transfer] | None:
    if len(t.blocks) > 1:
        at = choose.randrange(1, len(t.blocks))
        return t._replace(blocks=t.blocks[:at]), t._replace(blocks=t.blocks[at:])
    for block in t.blocks:
        for loop, axis in enumerate(block.axes):
            if axis.extent > 1:
                one = block._replace(axes=_put(block.axes, loop, axis._replace(extent=1)))
                rest = _put(block.axes, loop, axis._replace(extent=axis.extent - 1))
                other = Block(block.src + axis.src, block.dst + axis.dst, rest)
                return t._replace(blocks=(one,)), t._replace(blocks=(other,))
    return None


def _cross_strides(choose: random.Random, block: Block, of_block: Callable[..., Any]) -> Any:
    pair = _pick_two(choose, [axis.src for axis in block.axes])
    if pair is None:
        return None
    one, other = (block.axes[at] for at in pair)
    axes = _put(block.axes, pair[0], one._replace(src=other.src))
    return of_block(block._replace(axes=_put(axes, pair[1], other._replace(src=one.src))))


def change_slots(choose: random.Random, step: ExchangeInPlace) -> Changes:
    """The slots of an exchange in place: what is packed, sent and unpacked where."""
    changes: Changes = {
        "slots of another size": lambda: replace(step, slot=step.slot + choose.choice((1, -1))),
        "another number of slots": lambda: replace(step, slots=step.slots + choose.choice((1, -1))),
    }
    for name in ("pack", "unpack"):
        table: dict[int, Any] = getattr(step, name)
        device = choose.choice(list(table))
        own, foreign = table[device], table[choose.choice(list(table))]
        if not own:
            continue
        at = choose.randrange(len(own))
        slot, place = own[at]

        def of_places(new: Any, name: str = name, table: Any = table, device: int = device) -> Any:
            return None if new is None else replace(step, **{name: {**table, device: tuple(new)}})

        def swap_slots(own: Any = own) -> Any:
            pair = _pick_two(choose, own)
            if pair is None:
                return None
            (a, p), (b, q) = (own[each] for each in pair)
            return _put(_put(own, pair[0], (a, q)), pair[1], (b, p))

        def elsewhere(own: Any = own, at: int = at, slot: int = slot, place: Any = place) -> Any:
            digits = [number for number, value in enumerate(place) if value is not None]
            if not digits:
                return None
            digit = choose.choice(digits)
            return _put(own, at, (slot, _put(place, digit, place[digit] + choose.choice((1, -1)))))

        changes |= {
            f"a place of {name}ing left out": lambda own=own, at=at, of=of_places: of(_put(own, at)),
            f"a place of {name}ing twice": lambda own=own, at=at, of=of_places: of((*own, own[at])),
            f"another slot in {name}ing": lambda own=own, at=at, of=of_places, place=place, slot=slot: of(
                _put(own, at, ((slot + choose.choice((1, -1))) % max(1, step.slots), place))
            ),
            f"two slots of {name}ing swapped": lambda of=of_places, swap=swap_slots: of(swap()),
            f"{name}ing elsewhere": lambda of=of_places, move=elsewhere: of(move()),
            f"{name}ing of another device": lambda of=of_places, foreign=foreign: of(foreign),
            f"{name}ing of a whole digit": lambda of=of_places, own=own, at=at, slot=slot, place=place: of(
                _put(own, at, (slot, _put(place, choose.randrange(len(place)), None) if place else place))
            ),
        }
    busy = [at for at, turn in enumerate(step.rounds) if turn]
    if not busy:
        return changes
    at = choose.choice(busy)
    turn = step.rounds[at]
    number = choose.randrange(len(turn))
    t, by = turn[number], choose.choice((1, -1))

    def of_slot(**new: int) -> Any:
        return replace(step, rounds=_put(step.rounds, at, _put(turn, number, t._replace(**new))))

    changes |= {
        "another source slot": lambda: of_slot(src_slot=(t.src_slot + by) % step.slots),
        "another target slot": lambda: of_slot(dst_slot=(t.dst_slot + by) % step.slots),
        "a slot that does not exist": lambda: of_slot(**{choose.choice(("src_slot", "dst_slot")): step.slots}),
        "a piece of a slot that starts elsewhere": lambda: of_slot(start=t.start + by),
        "a piece of a slot of another length": lambda: of_slot(length=t.length + by),
        "slots swapped": lambda: of_slot(src_slot=t.dst_slot, dst_slot=t.src_slot),
    }
    return changes


def change_groups(choose: random.Random, step: Any, devices: Sequence[int]) -> Changes:
    """The groups of a collective, and its reduction."""
    groups = step.groups
    at = choose.randrange(len(groups))
    group = groups[at]
    member, stranger = choose.randrange(len(group)), choose.choice([*devices, max(devices) + 1])

    def of_groups(*new: Any) -> Any:
        return replace(step, groups=tuple(new))

    def trade_member() -> Any:
        if len(groups) < 2:
            return None
        other = choose.choice([n for n in range(len(groups)) if n != at])
        there = choose.randrange(len(groups[other]))
        new = _put(groups, at, _put(group, member, groups[other][there]))
        return of_groups(*_put(new, other, _put(groups[other], there, group[member])))

    def other_axis() -> Any:
        flat = [device for one in groups for device in one]
        turned = [flat[n :: len(groups)] for n in range(len(groups))]
        return of_groups(*map(tuple, turned)) if len(groups) > 1 and len(group) > 1 else None

    def of_order(new: Any) -> Any:
        return None if new is None else of_groups(*_put(groups, at, new))

    changes: Changes = {
        "two groups trade a member": trade_member,
        "groups along another axis": other_axis,
        "members of a group in another order": lambda: of_order(_shuffled(choose, group)),
        "members of all groups backwards": lambda: of_groups(*(one[::-1] for one in groups)),
        "groups in another order": lambda: of_groups(*groups[::-1]),
        "another member": lambda: of_order(_put(group, member, stranger)),
        "a member left out": lambda: of_order(_put(group, member)),
        "a member twice": lambda: of_order((*group, group[member])),
        "a group left out": lambda: of_groups(*_put(groups, at)),
        "a group twice": lambda: of_groups(*groups, group),
        "two groups in one": lambda: of_groups(*_put(groups, at)[1:], (*groups[0], *group)) if at else None,
        "a group in two": lambda: of_groups(*_put(groups, at, group[:1], group[1:])) if len(group) > 1 else None,
    }
    if hasattr(step, "reduction"):
        changes["another reduction"] = lambda: replace(step, reduction=choose.choice(REDUCTIONS))
    return changes


def change_views(choose: random.Random, step: Any) -> Changes:
    """How a tile is seen as blocks, before or after."""
    side = choose.choice(("send", "receive"))
    view: TileView = getattr(step, side)

    def of_view(**new: Any) -> Any:
        return replace(step, **{side: replace(view, **new)})

    changes: Changes = {
        "views of both ends swapped": lambda: replace(step, send=step.receive, receive=step.send),
        "a view of another tile": lambda: of_view(tile=view.tile[::-1]),
        "a view of a larger tile": lambda: of_view(tile=_put(view.tile, 0, view.tile[0] + 1)) if view.tile else None,
        "a view padded otherwise": lambda: of_view(padded=view.padded[::-1]),
        "a view padded more": lambda: of_view(padded=_put(view.padded, 0, view.padded[0] + 1)) if view.padded else None,
        "a view of other dims": lambda: of_view(dims=_shuffled(choose, view.dims) or tuple(d + 1 for d in view.dims)),
        "block axes of a view left out": lambda: of_view(blocks=view.blocks[1:]) if view.blocks else None,
        "block axes of a view in another order": lambda: of_view(blocks=view.blocks[::-1]),
    }
    if not view.digits:
        return changes
    at = choose.randrange(len(view.digits))
    radix = view.digits[at]

    def swapped() -> Any:
        if at + 1 >= len(view.digits):
            return None
        moved = {at: at + 1, at + 1: at}
        return of_view(digits=_swap(view.digits, at, at + 1), blocks=tuple(moved.get(b, b) for b in view.blocks))

    def split_digit() -> Any:
        factor = next((f for f in range(2, radix) if radix % f == 0), 1)
        blocks = [own for b in view.blocks for own in ((b, b + 1) if b == at else (b + (b > at),))]
        digits = _put(view.digits, at, radix // factor, factor)
        return of_view(digits=digits, dims=_put(view.dims, at, view.dims[at], view.dims[at]), blocks=tuple(blocks))

    def join_digits() -> Any:
        if at + 1 >= len(view.digits):
            return None
        digits = _put(_put(view.digits, at + 1), at, radix * view.digits[at + 1])
        blocks = dict.fromkeys(b - (b > at) for b in view.blocks)
        return of_view(digits=digits, dims=_put(view.dims, at + 1), blocks=tuple(blocks))

    changes |= {
        "digits of a view swapped": swapped,
        "digits of a view swapped, and not its blocks": lambda: of_view(
            digits=_shuffled(choose, view.digits) or view.digits
        ),
        "a digit of a view split": split_digit,
        "digits of a view joined": join_digits,
        "a digit of another radix": lambda: of_view(digits=_put(view.digits, at, radix + choose.choice((1, -1)))),
        "another block axis": lambda: (
            of_view(blocks=_put(view.blocks, choose.randrange(len(view.blocks)), at)) if view.blocks else None
        ),
        "one more block axis": lambda: of_view(blocks=(*view.blocks, at)),
    }
    return changes


def change_tables(choose: random.Random, step: Slice | SplitSum) -> Changes:
    """Which block each device keeps, and where it puts it."""
    changes: Changes = {}
    for name in ("block", "keep", "place"):
        table: dict[int, Any] | None = getattr(step, name, None)
        if not table:
            continue
        devices = list(table)
        device, other = choose.choice(devices), choose.choice(devices)
        values = [*table.values(), None if name == "place" else 0, (table[device] or 0) + 1, -1]

        def of_table(new: Any, name: str = name) -> Any:
            return replace(step, **{name: new})

        changes |= {
            f"another {name}": lambda of=of_table, t=table, d=device, v=values: of({**t, d: choose.choice(v)}),
            f"two {name}s swapped": lambda of=of_table, t=table, d=device, o=other: of({**t, d: t[o], o: t[d]}),
            f"a {name} left out": lambda of=of_table, t=table, d=device: of({k: v for k, v in t.items() if k != d}),
            f"all {name}s turned": lambda of=of_table, t=table: of(
                dict(zip(t, [*t.values()][1:] + [*t.values()][:1], strict=True))
            ),
        }
    if isinstance(step, SplitSum):
        changes["filled for another reduction"] = lambda: replace(step, reduction=choose.choice(REDUCTIONS))
    return changes


def change_view_step(choose: random.Random, step: Reorder | TakePart | PutPart | CastTiles) -> Changes:
    """The index map of an instruction that sends nothing, or the dtype that it casts to."""
    if isinstance(step, CastTiles):
        return {"a cast to another dtype": lambda: CastTiles(choose.choice(DTYPES))}
    if isinstance(step, Reorder):
        digits, order = step.order
        return {
            "digits of a tile in another order": lambda: Reorder(TileOrder(digits, _shuffled(choose, order) or order)),
            "a tile reordered backwards": lambda: Reorder(TileOrder(digits, tuple(map(order.index, sorted(order))))),
            "a tile of other digits": lambda: Reorder(TileOrder(_shuffled(choose, digits) or digits, order)),
            "a tile not reordered": lambda: Reorder(TileOrder(digits, tuple(sorted(order)))),
        }
    if not step.spans:
        return {}
    at = choose.randrange(len(step.spans))
    start, extent = step.spans[at]
    by = choose.choice((1, -1))

    def of_span(*new: Any) -> Any:
        return replace(step, spans=_put(step.spans, at, *new))

    return {
        "a part that starts elsewhere": lambda: of_span((start + by, extent)),
        "a part of another extent": lambda: of_span((start, extent + by)),
        "a part moved and cut": lambda: of_span((start + by, extent - by)),
        "spans of a part in another order": lambda: replace(step, spans=_shuffled(choose, step.spans) or step.spans),
        "a span of a part left out": lambda: of_span(),
    }


def change_parts(choose: random.Random, step: InParts) -> Changes:
    """How a step that runs in parts cuts its tiles."""
    side = choose.choice(("take", "put"))
    cut: Cut = getattr(step, side)

    def of_cut(**new: int) -> Any:
        return replace(step, **{side: cut._replace(**new)})

    return {
        "parts along another axis": lambda: of_cut(axis=cut.axis + choose.choice((1, -1))),
        "parts of other digits": lambda: of_cut(outer=cut.inner, inner=cut.outer),
        "parts of minor digits": lambda: of_cut(outer=cut.outer * cut.inner, inner=1),
        "parts of major digits": lambda: of_cut(inner=cut.outer * cut.inner, outer=1),
        "more parts": lambda: of_cut(parts=cut.parts * 2),
        "fewer parts": lambda: of_cut(parts=cut.parts - 1),
        "fewer parts, of both tiles": lambda: replace(
            step, take=step.take._replace(parts=cut.parts - 1), put=step.put._replace(parts=cut.parts - 1)
        ),
        "both tiles cut alike": lambda: replace(step, take=step.put, put=step.take),
        "overlapped otherwise": lambda: replace(step, overlap=not step.overlap),
        "in place otherwise": lambda: replace(step, in_place=not step.in_place),
        "in parts no more": lambda: step.each,
        "in parts twice": lambda: replace(step, each=step),
    }


def change_instruction(choose: random.Random, step: Any, devices: Sequence[int]) -> Changes:
    """The operators of one instruction."""
    changes: Changes = {}
    match step:
        case InParts():
            inner = change_instruction(choose, step.each, devices)

            def of_each(change: Change) -> Any:
                each = change()
                return None if each is None else replace(step, each=each)

            changes |= {name: lambda change=change: of_each(change) for name, change in inner.items()}
            changes |= change_parts(choose, step)
        case Exchange():
            changes |= change_rounds(choose, step, devices) | change_messages(choose, step, devices)
        case ExchangeInPlace():
            changes |= change_rounds(choose, step, devices) | change_slots(choose, step)
        case Permute():
            changes |= change_rounds(choose, step, devices)
        case Slice() | SplitSum():
            changes |= change_tables(choose, step)
        case Reorder() | TakePart() | PutPart() | CastTiles():
            changes |= change_view_step(choose, step)
        case _:
            changes |= change_groups(choose, step, devices)
    if hasattr(step, "send"):
        changes |= change_views(choose, step)
    return changes


def change_program(choose: random.Random, program: Program) -> Changes:
    """The operators of a whole program."""
    steps, shapes, devices = program.instructions, program.tile_shapes, program.devices
    before = (program.tile_shape, *shapes)
    at = choose.randrange(len(steps)) if steps else 0
    dtype = choose.choice(DTYPES)

    def of_steps(new: Sequence[Any], tiles: Sequence[Any]) -> Program:
        return replace(program, instructions=tuple(new), tile_shapes=tuple(tiles))

    def other_tile(shape: tuple[int, ...]) -> tuple[int, ...] | None:
        if not shape:
            return (1,)
        dim = choose.randrange(len(shape))
        more = _put(shape, dim, shape[dim] + choose.choice((1, -1)))
        return choose.choice([_shuffled(choose, shape), more, (math.prod(shape),), (*shape, 1)])

    def of_tile(shape: tuple[int, ...] | None) -> Program | None:
        return None if shape is None else of_steps(steps, _put(shapes, at, shape))

    cast = CastTiles(dtype)
    own = next((step.dtype for step in reversed(steps[:at]) if isinstance(step, CastTiles)), program.dtype)
    back = CastTiles(own)
    changes: Changes = {
        "a program of another dtype": lambda: replace(program, dtype=dtype),
        "a program without a device": lambda: replace(program, devices=_put(devices, choose.randrange(len(devices)))),
        "a program of one more device": lambda: replace(program, devices=(*devices, max(devices) + 1)),
        "devices in another order": lambda: replace(program, devices=_shuffled(choose, devices) or devices),
        "the source kept otherwise": lambda: replace(program, keep_source=not program.keep_source),
        "a source of another tile": lambda: replace(program, tile_shape=other_tile(program.tile_shape) or (1,)),
        "a cast put in": lambda: of_steps(_put(steps, at, cast, *steps[at : at + 1]), (*shapes[:at], *before[at:])),
        "a cast there and back": lambda: of_steps(
            _put(steps, at, cast, back, *steps[at : at + 1]), (*shapes[:at], before[at], *before[at:])
        ),
    }
    if steps:
        other = choose.randrange(len(steps))
        changes |= {
            "a tile of another shape": lambda: of_tile(other_tile(shapes[at])),
            "an instruction left out": lambda: of_steps(_put(steps, at), _put(shapes, at)),
            "an instruction left out, and not its tile": lambda: of_steps(_put(steps, at), _put(shapes, at - 1)),
            "an instruction twice": lambda: of_steps(
                _put(steps, at, steps[at], steps[at]), _put(shapes, at, shapes[at], shapes[at])
            ),
            "two instructions swapped": lambda: of_steps(_swap(steps, at, other), _swap(shapes, at, other)),
            "two instructions swapped, and not their tiles": lambda: of_steps(_swap(steps, at, other), shapes),
            "an instruction of another step": lambda: of_steps(_put(steps, at, steps[other]), shapes),
        }
    return changes


def program_changes(choose: random.Random, program: Program) -> dict[str, Callable[[], Program | None]]:
    """All operators that a program has a place for: those of one of its instructions, and its own."""
    changes: dict[str, Callable[[], Program | None]] = dict(change_program(choose, program))
    if not program.instructions:
        return changes
    at = choose.randrange(len(program.instructions))
    devices = sorted({*program.devices, *_devices_named(program)})

    def of_instruction(change: Change) -> Program | None:
        new = change()
        return None if new is None else replace(program, instructions=_put(program.instructions, at, new))

    own = change_instruction(choose, program.instructions[at], devices)
    return changes | {name: lambda change=change: of_instruction(change) for name, change in own.items()}


def _devices_named(program: Program) -> Iterator[int]:
    """The devices that exchanges and permutes bring in."""
    for step in program.instructions:
        if isinstance(step, Exchange):
            yield from step.receivers
        elif isinstance(step, Permute):
            yield from (receiver for _, receiver in step.pairs)


Joints = list[PackedCollective | tuple[Exchange, ...] | None]


def batch_changes(
    choose: random.Random, programs: Sequence[Program], joints: Joints
) -> dict[str, Callable[[], tuple[Sequence[Program], Joints] | None]]:
    """The operators of the programs of a batch, and of what they do together in each step."""
    at, step = choose.randrange(len(programs)), choose.randrange(len(joints))
    joint, other = joints[step], choose.randrange(len(programs))
    changes: dict[str, Callable[[], Any]] = {
        "programs of a batch swapped": lambda: (_swap(programs, at, other), list(_swap(joints, step, step))),
        "a program of a batch left out": lambda: (_put(programs, at), joints),
        "a program of a batch twice": lambda: (_put(programs, at, programs[at], programs[at]), joints),
        "another program of the batch": lambda: (_put(programs, at, programs[other]), joints),
    }

    def of_one(change: Callable[[], Program | None]) -> Any:
        made = change()
        return None if made is None else (_put(programs, at, made), None)

    changes |= {
        f"{name}, in a batch": lambda change=change: of_one(change)
        for name, change in program_changes(choose, programs[at]).items()
    }
    if joint is None:
        return changes

    def of_joint(new: Any) -> Any:
        return None if new is None else (programs, list(_put(joints, step, new)))

    def joint_left_out() -> Any:
        return programs, list(_put(joints, step, None))

    changes["arrays of a batch one after another"] = joint_left_out
    if isinstance(joint, tuple):
        one, two = choose.randrange(len(joint)), choose.randrange(len(joint))
        own = change_instruction(choose, joint[one], programs[0].devices)
        changes |= {
            "exchanges of a batch swapped": lambda: of_joint(_swap(joint, one, two)),
            "an exchange of a batch left out": lambda: of_joint(_put(joint, one)),
            "an exchange of a batch for another": lambda: of_joint(_put(joint, one, joint[two])),
        }
        changes |= {
            f"{name}, in a joint exchange": lambda change=change: of_joint(
                None if (new := change()) is None else _put(joint, one, new)
            )
            for name, change in own.items()
        }
        return changes
    own = change_instruction(choose, joint.packed, programs[0].devices)
    changes |= {
        f"{name}, in a packed launch": lambda change=change: of_joint(
            None if (new := change()) is None else replace(joint, packed=new)
        )
        for name, change in own.items()
    }
    side = choose.choice(("send", "receive"))
    views = getattr(joint, side)
    if not views:
        return changes
    one, two = choose.randrange(len(views)), choose.randrange(len(views))
    if views[one].digits:
        inner = change_views(choose, _Viewed(views[one], views[one]))
        changes |= {
            f"{name}, in packing": lambda change=change: of_joint(
                None
                if (new := change()) is None
                else replace(joint, **{side: _put(views, one, new.send if new.send != views[one] else new.receive)})
            )
            for name, change in inner.items()
        }
    changes |= {
        "views of two arrays swapped": lambda: of_joint(replace(joint, **{side: _swap(views, one, two)})),
        "a view of an array left out": lambda: of_joint(replace(joint, **{side: _put(views, one)})),
    }
    return changes


@dataclass(frozen=True)
class _Viewed:
    """What `change_views` changes: two views of one array."""

    send: TileView
    receive: TileView


def mutated_program(choose: random.Random, program: Program) -> Program | None:
    """The program changed by an operator, or None if it found nothing to change."""
    made = choose.choice(list(program_changes(choose, program).values()))()
    return None if made == program else made

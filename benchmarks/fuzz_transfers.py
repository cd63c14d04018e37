"""Lists of transfers with faults of every kind: none may be verified, no right one refused, and the first wrong element
must be the one that is named.

    python benchmarks/fuzz.py --kinds transfers --moves 1000

A list is that of a random plan: plain or with a view, padded, on equal, overlapping or other devices, with relays, of
two plans one after another, or of what devices that hold another version lack. It must be verified as it is. A fault
(`FAULTS`) changes it, and a judge that copies marked elements one by one (`judge_transfers`) says what is wrong then.
It shares no code with what it judges: what the layouts mean comes from `fuzz_layouts`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import reshard as rs
from benchmarks.fuzz_layouts import any_given
from benchmarks.fuzz_moves import MoveCase, UpdateCase, random_move, random_update
from benchmarks.fuzz_oracle import cut, fitted, must
from reshard.errors import PlanError, ProofError, UndecidedError
from reshard.plans.descriptors import Descriptor

MOST_ELEMENTS = 100_000
"""A transfer of more elements is not copied by the judge: no tile here has so many."""


class Wrong(NamedTuple):
    """The first thing that is wrong: a transfer that leaves a tile, an element written twice on the way, or the first
    element, by its index in the target, that is not what belongs there."""

    transfer: int | None = None
    device: int | None = None
    local: int | None = None
    belongs: int | None = None
    actual: int | None = None


MALFORMED = Wrong()
"""Inputs that are not lists of transfers, or that no machine can run."""


class Subject(NamedTuple):
    """A move that adds and casts nothing, the transfers of a plan for it, and what devices hold of their tiles already,
    as offsets."""

    case: MoveCase
    move: rs.Move
    transfers: list[Descriptor]
    fresh: dict[int, set[int]]


def random_transfers(choose: random.Random) -> Subject | None:
    """A random move and the transfers of a plan for it; None if it adds or casts."""
    if choose.random() < 0.15:
        update = random_update(choose)
        case, move = update.move, update.make()
        if move.casts or move.source.partial:
            return None
        return Subject(case, move, list(rs.plan(move).to_descriptors()), _list_fresh(update, move))
    case = random_move(choose, choose.choice(("int32", "uint8", "float64")), 120)
    move = case.make()
    if move.casts or move.source.partial:
        return None
    options = choose.choice(({}, {}, {"slack": 0}, {"network": choose.choice(("tpu-v5p", "h100"))}))
    if choose.random() < 0.25:  # Over another layout of the source, which makes further turns.
        devices = sorted(choose.choice((case.source, case.target)).indices)
        middle = any_given(choose, devices, case.source.shape, case.dtypes[0]).make()
        first = list(rs.plan(move.source, middle, **options).to_descriptors())
        rest = rs.plan(rs.Move(middle, move.target, cast=True, **case.view.options), **options).to_descriptors()
        turns = 1 + max((each.step for each in first), default=-1)
        return Subject(case, move, first + [each._replace(step=each.step + turns) for each in rest], {})
    return Subject(case, move, list(rs.plan(move, **options).to_descriptors()), {})


def _list_fresh(update: UpdateCase, move: rs.Move) -> dict[int, set[int]]:
    unchanged = update.move.view.apply(~update.stale, np.zeros(move.target.shape, bool))
    fresh: dict[int, set[int]] = {}
    for device, tile in update.move.target.indices.items():
        held = np.zeros(move.target.shape, bool)
        if device in (have := (update.have or update.move.target).indices):
            held[np.ix_(*(index[index >= 0] for index in have[device]))] = True
        local = cut((held & unchanged).astype(int), fitted(tile, move.target.tile_shape), 0)
        fresh[device] = set(np.flatnonzero(local).tolist())
    return fresh


# ---- the judge ------------------------------------------------------------------------------------


Marks = dict[int, dict[int, Any]]
"""What is at the offsets of the tile of each device."""


def judge_transfers(subject: Subject) -> Wrong | None:
    """What is wrong with transfers first, by copying elements one after another; None if nothing is."""
    case, move, transfers, fresh = subject
    if any(map(_is_malformed, transfers)):
        return MALFORMED
    source, wanted, order = mark_tiles(case, move)
    tiles: Marks = {device: dict(enumerate(tile)) for device, tile in source.items()}
    room = {device: len(tile) for device, tile in source.items()}
    numbered = sorted(enumerate(transfers), key=lambda each: each[1].step)
    turns = [list(turn) for _, turn in itertools.groupby(numbered, key=lambda each: each[1].step)] or [[]]
    for turn in turns[:-1]:
        ends: dict[int, int] = {}
        for _, each in turn:
            for _, dst in list_copies(each):
                ends[each.target_device] = max(ends.get(each.target_device, 0), dst + 1)
        if (left := _find_outside(turn, room, ends)) is not None:
            return left
        tiles, room = _copy_turn(turn, tiles, ends), ends
        if doubled := [(d, at) for d in sorted(ends) for at, mark in sorted(tiles[d].items()) if mark == "several"]:
            return Wrong(None, *doubled[0])
    ends = {device: len(tile) for device, tile in wanted.items()}
    if (left := _find_outside(turns[-1], room, ends)) is not None:
        return left
    tiles = _copy_turn(turns[-1], tiles, ends)
    wrong: list[tuple[int, int, int, Any, Any]] = []
    for device, tile in wanted.items():
        for local, belongs in enumerate(tile):
            has = tiles[device].get(local)
            if has is None and local in fresh.get(device, ()):
                continue
            if has == "several" if belongs is None else has != (None if belongs == "kept" else belongs):
                wrong.append((order[device][local], device, local, belongs, has))
    if not wrong:
        return None
    _, device, local, *found = min(wrong, key=lambda each: each[:3])
    return Wrong(None, device, local, *(mark if type(mark) is int and mark >= 0 else None for mark in found))


def _is_malformed(each: Descriptor) -> bool:
    sides = each.source_strides, each.target_strides
    reach = max(sum(max(0, n - 1) * abs(s) for n, s in zip(each.extents, side, strict=True)) for side in sides)
    least, most = min(*each[:4], *each.extents, each.step), max(*each[:4], reach)
    return least < 0 or most > 2**62 or each.elements > MOST_ELEMENTS


def _find_outside(turn: Sequence[tuple[int, Descriptor]], room: dict[int, int], ends: dict[int, int]) -> Wrong | None:
    for number, each in turn:
        for src, dst in list_copies(each):
            if not (0 <= src < room.get(each.source_device, 0) and 0 <= dst < ends.get(each.target_device, 0)):
                return Wrong(number)
    return None


def _copy_turn(turn: Sequence[tuple[int, Descriptor]], tiles: Marks, ends: dict[int, int]) -> Marks:
    written: Marks = {device: {} for device in ends}
    for _, each in turn:
        for src, dst in list_copies(each):
            tile = written[each.target_device]
            tile[dst] = "several" if dst in tile else tiles[each.source_device].get(src, "nothing")
    return written


def mark_tiles(
    case: MoveCase, move: rs.Move
) -> tuple[dict[int, list[Any]], dict[int, list[Any]], dict[int, list[int]]]:
    """The flat tiles of the source, each element marked by its index; those that the target means, None for padding and
    "kept" where the move leaves what is there; and the indices in the target, of padding behind all others."""
    marks = np.arange(math.prod(case.source.shape)).reshape(case.source.shape)
    meant = case.view.apply(marks, np.full(case.target.shape, -2))
    places = np.arange(math.prod(case.target.shape)).reshape(case.target.shape)

    def tile(whole: np.ndarray, given: Any, shape: tuple[int, ...], padding: int) -> dict[int, list[int]]:
        return {d: cut(whole, fitted(at, shape), padding).ravel().tolist() for d, at in given.indices.items()}

    held = tile(meant, case.target, move.target.tile_shape, -1)
    names = {-1: None, -2: "kept"}
    return (
        {device: list(at) for device, at in tile(marks, case.source, move.source.tile_shape, -1).items()},
        {device: [names.get(mark, mark) for mark in at] for device, at in held.items()},
        tile(places, case.target, move.target.tile_shape, 2**62),
    )


def list_copies(each: Descriptor) -> Iterator[tuple[int, int]]:
    """The offsets in both tiles of every element that a transfer copies."""
    for at in itertools.product(*map(range, each.extents)):
        src = each.source_offset + sum(i * s for i, s in zip(at, each.source_strides, strict=True))
        yield src, each.target_offset + sum(i * s for i, s in zip(at, each.target_strides, strict=True))


# ---- faults ---------------------------------------------------------------------------------------
#
# Each takes the transfers, the number of one of them, and the move; what it makes may be right all the same, where
# replicas hold the same or padding is meant. None where there is nothing to change.

Fault = Callable[[random.Random, list[Descriptor], int, rs.Move], list[Descriptor] | None]


def _changed(made: list[Descriptor], at: int, **fields: Any) -> list[Descriptor]:
    return [*made[:at], made[at]._replace(**fields), *made[at + 1 :]]


def _change_axis(choose: random.Random, made: list[Descriptor], at: int, field: str, by: Callable[[int], int]) -> Any:
    values = list(getattr(made[at], field))
    if not values:
        return None
    axis = choose.randrange(len(values))
    values[axis] = by(values[axis])
    return _changed(made, at, **{field: tuple(values)})


def _shift(field: str, steps: Sequence[int]) -> Fault:
    def shift(choose: random.Random, made: list[Descriptor], at: int, move: rs.Move) -> Any:
        return _changed(made, at, **{field: max(0, getattr(made[at], field) + choose.choice(steps))})

    return shift


def _swap(*fields: str) -> Fault:
    def swap(choose: random.Random, made: list[Descriptor], at: int, move: rs.Move) -> Any:
        other = choose.randrange(len(made))
        one, two = ({field: getattr(made[n], field) for field in fields} for n in (other, at))
        return None if one == two else _changed(_changed(made, at, **one), other, **two)

    return swap


def _move_device(side: str) -> Fault:
    def move_device(choose: random.Random, made: list[Descriptor], at: int, move: rs.Move) -> Any:
        mesh = move.source.mesh if side == "source" else move.target.mesh
        return _changed(made, at, **{f"{side}_device": choose.choice([*mesh.devices, max(mesh.devices) + 1])})

    return move_device


def _scale_axis(field: str, *by: Callable[[int], int]) -> Fault:
    return lambda choose, made, at, move: _change_axis(choose, made, at, field, choose.choice(by))


def _swap_turns(choose: random.Random, made: list[Descriptor], at: int, move: rs.Move) -> Any:
    steps = sorted({each.step for each in made})
    if len(steps) < 2:
        return None
    one, two = choose.sample(steps, 2)
    return [each._replace(step={one: two, two: one}.get(each.step, each.step)) for each in made]


def _move_turn(by: int) -> Fault:
    return lambda choose, made, at, move: _changed(made, at, step=max(0, made[at].step + by))


def _overlap(same: bool) -> Fault:
    """Another transfer writes one element of a transfer again: the same element, or another one of the same tile."""

    def overlap(choose: random.Random, made: list[Descriptor], at: int, move: rs.Move) -> Any:
        src, dst = choose.choice(list(list_copies(made[at])) or [(0, 0)])
        src = src if same else choose.randrange(src + 2)
        extra = made[at]._replace(source_offset=src, target_offset=dst, extents=(1,))
        made.insert(choose.randrange(len(made) + 1), extra._replace(source_strides=(1,), target_strides=(1,)))
        return made

    return overlap


def _in_bytes(choose: random.Random, made: list[Descriptor], at: int, move: rs.Move) -> Any:
    size = max(2, move.source.nbytes(1))

    def scale(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size * value for value in values)

    return [Descriptor(*each[:2], *scale(each[2:4]), each.extents, *map(scale, each[5:7]), each.step) for each in made]


def _split(choose: random.Random, made: list[Descriptor], at: int, move: rs.Move) -> Any:
    """A transfer in two, of which the second begins one element late: what an off-by-one in a loop over parts does."""
    if not made[at].extents or made[at].extents[0] < 2:
        return None
    each = made[at]
    first = choose.randrange(1, each.extents[0])
    made[at] = each._replace(extents=(first, *each.extents[1:]))
    skip = min(first + 1, each.extents[0])
    offsets = {
        f"{side}_offset": getattr(each, f"{side}_offset") + skip * getattr(each, f"{side}_strides")[0]
        for side in ("source", "target")
    }
    made.insert(at + 1, each._replace(extents=(each.extents[0] - skip, *each.extents[1:]), **offsets))
    return made


FAULTS: dict[str, Fault] = {
    "dropped": lambda choose, made, at, move: made[:at] + made[at + 1 :],
    "doubled": lambda choose, made, at, move: [*made, made[at]],
    "source offset": _shift("source_offset", (-2, -1, 1, 2, 7)),
    "target offset": _shift("target_offset", (-2, -1, 1, 2, 7)),
    "sources swapped": _swap("source_device", "source_offset"),
    "targets swapped": _swap("target_device", "target_offset"),
    "offsets swapped": _swap("source_offset"),
    "another source device": _move_device("source"),
    "another target device": _move_device("target"),
    "devices swapped": lambda choose, made, at, move: _changed(
        made, at, source_device=made[at].target_device, target_device=made[at].source_device
    ),
    "extent": _scale_axis("extents", lambda n: n - 1, lambda n: n + 1, lambda n: n // 2, lambda n: 0),
    "source stride": _scale_axis("source_strides", lambda n: n + 1, lambda n: max(0, n - 1), lambda n: -n, lambda n: 0),
    "target stride": _scale_axis("target_strides", lambda n: n + 1, lambda n: max(0, n - 1), lambda n: -n, lambda n: 0),
    "axes swapped": lambda choose, made, at, move: _changed(
        made, at, source_strides=made[at].source_strides[::-1], extents=made[at].extents
    ),
    "turns swapped": _swap_turns,
    "a turn late": _move_turn(1),
    "a turn early": _move_turn(-1),
    "written again": _overlap(True),
    "written again with another": _overlap(False),
    "in bytes": _in_bytes,
    "split one late": _split,
    "negative": lambda choose, made, at, move: _changed(
        made, at, **{choose.choice(("source_device", "target_device", "source_offset", "target_offset", "step")): -1}
    ),
    "huge": lambda choose, made, at, move: _changed(
        made,
        at,
        **{choose.choice(("source_device", "target_offset", "source_offset")): choose.choice((2**63 - 1, 2**70))},
    ),
    "huge extent": _scale_axis("extents", lambda n: 2**40, lambda n: 2**64),
    "huge stride": _scale_axis("target_strides", lambda n: 2**61, lambda n: -(2**62)),
}


# ---- one list, and its verdict --------------------------------------------------------------------


def compare_verdict(subject: Subject) -> bool:
    """Whether the transfers are right, by the judge; raises `WrongError` where `rs.verify` says something else."""
    wrong = judge_transfers(subject)
    try:
        rs.verify(subject.transfers, subject.move)
    except (ProofError, PlanError, UndecidedError) as error:
        must(wrong is not None, "a right list is refused: {}", error)
        if wrong is None or wrong is MALFORMED:
            return False
        must(isinstance(error, ProofError) and error.counterexample, "{} is refused by {!r}", wrong, error)
        _compare_counterexample(subject.move, wrong, str(error), error.counterexample)  # pyright: ignore
        return False
    must(wrong is None, "{} is not refused", wrong)
    return True


def _compare_counterexample(move: rs.Move, wrong: Wrong, text: str, named: Any) -> None:
    if wrong.local is None:
        must(text.startswith(f"transfer {wrong.transfer} "), "transfer {} leaves a tile, but {}", wrong.transfer, text)
    elif named.index is None:
        must(f"element {wrong.local} of the tile of device {wrong.device};" in text, "{} is first, but {}", wrong, text)
    else:
        sides = (
            (move.target.tile_shape, wrong.local),
            (move.source.shape, wrong.belongs),
            (move.source.shape, wrong.actual),
        )
        meant = [
            None if at is None else tuple(map(int, np.unravel_index(at, shape))) if shape else () for shape, at in sides
        ]
        said = [named.device, named.index, named.element, named.actual]
        must(said == [wrong.device, *meant], "{} {} is first, but {}", wrong, meant, text)


def check_transfers(choose: random.Random) -> str:
    """Verifies the transfers of a random plan, as they are and with a fault; returns what the fault was and did."""
    while True:
        subject = random_transfers(choose)
        fault = choose.choice(list(FAULTS))
        if subject is None or not subject.transfers:
            continue
        try:
            must(compare_verdict(subject), "the list of a plan is refused")
            transfers, at = list(subject.transfers), choose.randrange(len(subject.transfers))
            changed = FAULTS[fault](choose, transfers, at, subject.move)
            if changed is not None and changed != subject.transfers:
                right = compare_verdict(subject._replace(transfers=changed))
                return f"{fault}, {'right all the same' if right else 'refused'}"
        except Exception as error:
            error.add_note(f"{fault} in transfers of\n{subject.case}")
            raise

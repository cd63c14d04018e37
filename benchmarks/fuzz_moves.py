"""Random moves between any two sets of devices, with views and casts, alone and in trees, for `benchmarks/fuzz.py`.

A view is made of *atoms*: both arrays have the same atoms, grouped into dims and ordered on each side by itself, and
one of them may be taken or filled in part. Its meaning is numpy's reshape, slice and transpose of the whole array.

    atoms (2, 3, 4), order (2, 0, 1)    (a0 a1) a2 -> a2 (a0 a1)    f32[6, 4] -> f32[4, 6]
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

import reshard as rs
from benchmarks.fuzz_layouts import COUNTS, Given, any_given
from benchmarks.fuzz_oracle import check_tiles, cut, fitted, marks, must, source_tiles
from reshard.errors import BudgetError, PlanError
from reshard.runtime import Account
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.types import dtypes

KEPT = 100
"""What the target holds before a move that fills part of it: the place of an element, from here on."""

CASTS = ("int8", "uint8", "int16", "int32", "int64", "bfloat16", "float32", "float64", "complex64", "bool")

SUMMED = ("int32", "int64", "float32")
"""Dtypes of partial arrays: the sums of small marks are exact in them."""


class Window(NamedTuple):
    """An atom on both sides: `count` values, from `taken` on in its `source`, from `filled` on in its `target`."""

    source: int
    taken: int
    count: int
    target: int
    filled: int


@dataclass(frozen=True)
class RandomView:
    """A view with its meaning in numpy: atoms in the source's order, and their order in the target."""

    windows: tuple[Window, ...]
    order: tuple[int, ...]
    groups: tuple[tuple[int, ...], tuple[int, ...]]
    """How many atoms each dim has, of the source and of the target."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The global shapes of source and target."""
        there = [self.windows[at] for at in self.order]
        return (
            _merge_sizes([atom.source for atom in self.windows], self.groups[0]),
            _merge_sizes([atom.target for atom in there], self.groups[1]),
        )

    @property
    def options(self) -> dict[str, Any]:
        """What `rs.Move` takes for it: the text, the atoms' sizes, and the parts."""
        here, there = self.groups
        sides = _spell_dims(range(len(self.order)), here), _spell_dims(self.order, there)
        given: dict[str, Any] = {"view": " -> ".join(sides)}
        for at, (source, taken, count, target, filled) in enumerate(self.windows):
            given[f"a{at}"] = max(source, target)
            if count < source:
                given.setdefault("take", {})[f"a{at}"] = slice(taken, taken + count)
            if count < target:
                given.setdefault("into", {})[f"a{at}"] = slice(filled, filled + count)
        return given

    def apply(self, source: np.ndarray, held: np.ndarray) -> np.ndarray:
        """The target's array, of the source's and of what the target holds before."""
        atoms = source.reshape([atom.source for atom in self.windows])
        part = atoms[tuple(slice(atom.taken, atom.taken + atom.count) for atom in self.windows)]
        there = [self.windows[at] for at in self.order]
        whole = held.reshape([atom.target for atom in there]).copy()
        whole[tuple(slice(atom.filled, atom.filled + atom.count) for atom in there)] = part.transpose(self.order)
        return whole.reshape(held.shape)


def _merge_sizes(sizes: Sequence[int], groups: Sequence[int]) -> tuple[int, ...]:
    ends = np.cumsum([0, *groups])
    return tuple(math.prod(sizes[start:end]) for start, end in pairwise(ends))


def _spell_dims(order: Sequence[int], groups: Sequence[int]) -> str:
    ends = np.cumsum([0, *groups])
    dims = [[f"a{at}" for at in order[start:end]] for start, end in pairwise(ends)]
    return " ".join(f"({' '.join(dim)})" for dim in dims)


def random_view(choose: random.Random, most: int = 500, parts: float = 0.33) -> RandomView:
    """A view of one to four atoms of at most `most` elements, with a part taken or filled in a share of the cases."""
    sizes: list[int] = []
    for _ in range(choose.randint(1, 4)):
        sizes.append(choose.choice([size for size in (1, 2, 3, 4, 5, 6, 7, 8, 12) if size * math.prod(sizes) <= most]))
    windows = [Window(size, 0, size, size, 0) for size in sizes]
    if choose.random() < parts:
        at = choose.randrange(len(sizes))
        start = choose.randrange(sizes[at])
        count = choose.randint(start + 1, sizes[at]) - start
        taken = choose.random() < 0.5
        windows[at] = Window(sizes[at], start, count, count, 0) if taken else Window(count, 0, count, sizes[at], start)
    order = list(range(len(sizes)))
    if choose.random() < 0.7:
        choose.shuffle(order)
    groups = _random_groups(choose, len(sizes)), _random_groups(choose, len(sizes))
    return RandomView(tuple(windows), tuple(order), groups)


def _random_groups(choose: random.Random, count: int) -> tuple[int, ...]:
    groups = [1]
    for _ in range(count - 1):
        if choose.random() < 0.5:
            groups[-1] += 1
        else:
            groups.append(1)
    return tuple(groups)


@dataclass(frozen=True)
class MoveCase:
    """One move: both layouts as given, the view between them, and the dtypes."""

    source: Given
    target: Given
    view: RandomView
    dtypes: tuple[str, str]

    def __str__(self) -> str:
        return f"{self.source.text}\n  -> {self.target.text}\n  {self.dtypes} {self.view.options}"

    def make(self) -> rs.Move:
        """The move as the package takes it."""
        return rs.Move(self.source.make(), self.target.make(), cast=True, **self.view.options)

    @property
    def parts(self) -> bool:
        """Whether the move fills only part of its target."""
        return any(atom.count < atom.target for atom in self.view.windows)

    def tiles(
        self, choose: random.Random, plan: rs.Plan
    ) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray], np.ndarray]:
        """The source's tiles, those that the target holds before, and the whole array that the target means."""
        before, after = map(numpy_dtype, self.dtypes)
        whole = marks(self.source.shape, before)
        held = ((np.arange(math.prod(self.target.shape)) + KEPT) % 127).reshape(self.target.shape).astype(after)
        given = source_tiles(choose, self.source, plan.source.tile_shape, whole)
        into = {d: cut(held, fitted(at, plan.target.tile_shape)) for d, at in self.target.indices.items()}
        return given, into, self.view.apply(whole.astype(after), held)


def random_move(choose: random.Random, dtype: str, most: int = 500, parts: float = 0.33) -> MoveCase:
    """A move between random sets of devices: the same one, a part of it, an overlapping or another one."""
    pool = choose.sample(range(40), 24) if choose.random() < 0.25 else list(range(24))
    counts = choose.choice(COUNTS), choose.choice(COUNTS)
    start = choose.choice((0, 0, counts[0] // 2, min(counts[0], 24 - counts[1])))
    devices = sorted(pool[: counts[0]]), sorted(pool[start : start + counts[1]])
    if choose.random() < 0.2:
        devices = devices[0], devices[0]
    view = random_view(choose, most, parts)
    if choose.random() < 0.3:  # The same dims on both sides, which has closed forms of its own.
        view = RandomView(view.windows, tuple(range(len(view.windows))), (view.groups[0],) * 2)
    dtypes = dtype, choose.choice(CASTS) if choose.random() < 0.3 else dtype
    if dtypes[0].startswith("complex") and not dtypes[1].startswith("complex"):
        dtypes = dtype, dtype
    filled = any(atom.count < atom.target for atom in view.windows)  # A part is not of sums: no summand has the rest.
    partial = 0.9 if dtype in SUMMED and not filled and choose.random() < 0.25 else 0.0
    source = any_given(choose, devices[0], view.shapes[0], dtypes[0], partial)
    return MoveCase(source, any_given(choose, devices[1], view.shapes[1], dtypes[1]), view, dtypes)


def check_move(choose: random.Random) -> tuple[str, rs.Plan | None]:
    """Plans a random move and runs it; returns its kind, and the plan unless its budget was refused rightly."""
    case = random_move(choose, choose.choice(CASTS))
    try:
        return _check_case(choose, case)
    except Exception as error:
        error.add_note(str(case))
        raise


def _check_case(choose: random.Random, case: MoveCase) -> tuple[str, rs.Plan | None]:
    move = case.make()
    must(rs.Move.from_json(move.to_json()) == move, "{} is another move after JSON", move)
    options: dict[str, Any] = {}
    if choose.random() < 0.3:
        options["network"] = choose.choice(("tpu-v5p", "h100", "ethernet-100g"))
    if choose.random() < 0.3:
        options["donate"] = True
    kind = _kind_of(case, move)
    if choose.random() < 0.3:
        share = choose.choice((0.5, 1, 1, 1.2, 2))
        options["budget"] = int(share * (move.source.tile_bytes + move.target.tile_bytes))
    try:
        plan = plan_within(move, options)
    except PlanError as error:  # Documented: the digits of a sum must end where the view's atoms end.
        must(move.source.partial and not move.view.plain and "finish the sum" in str(error), "{}", error)
        return f"{kind}, refused sum", None
    if plan is None:
        return f"{kind}, refused budget", None
    must(rs.Plan.from_json(plan.to_json()) == plan, "{} is another plan after JSON", plan)
    _check_bound(plan, options)
    ends = max(plan.received_bytes, plan.sent_bytes)
    must(ends >= plan.endpoint_bound_bytes, "{} B at the busiest device are below its bound: {}", ends, plan)
    given, into, wanted = case.tiles(choose, plan)
    kept = {device: tile.copy() for device, tile in given.items()}
    account = Account(plan.source.dtype)
    moved = rs.simulate(plan, given, account, into=into if case.parts else None)
    check_tiles(case.target, plan.target.tile_shape, wanted, moved)
    must(all(np.array_equal(given[d], kept[d]) for d in kept), "a source's tile was written to")
    _check_account(account, plan)
    return kind, plan


def _check_bound(plan: rs.Plan, options: dict[str, Any]) -> None:
    """Compares the bytes with the lower bound, which plans on one set of devices reach where nothing else is asked."""
    bound, received = plan.lower_bound_bytes, plan.received_bytes
    must(received >= bound or plan.source.partial, "{} B are below the bound: {}", received, plan)
    one_set = set(plan.source.mesh.devices) == set(plan.target.mesh.devices)
    if one_set and not plan.source.partial and not {"network", "budget"} & set(options):
        must(received <= bound * 1.05, "{} B are received, {} would do: {}", received, bound, plan)


def _kind_of(case: MoveCase, move: rs.Move) -> str:
    before, after = set(case.source.indices), set(case.target.indices)
    where = "same devices" if before == after else "overlapping" if before & after else "other devices"
    what = "plain" if move.view.plain else "into" if case.parts else "take" if move.view.taken else "view"
    return f"{where}, {what}{', cast' if move.casts else ''}"


def plan_within(move: rs.Move, options: dict[str, Any]) -> rs.Plan | None:
    """The plan, or None where its budget is refused with the smallest that works."""
    budget = options.get("budget")
    try:
        plan = rs.plan(move, **options)
    except BudgetError as error:
        must(budget is not None and error.smallest > budget, "{} is refused, but {} would do", budget, error.smallest)
        least = rs.plan(move, **{**options, "budget": error.smallest})
        must(least.peak_bytes <= error.smallest, "a budget of {}, a peak of {}", error.smallest, least.peak_bytes)
        must(budget < _floor_of(move), "{} is source and target of {}", budget, move)
        return None
    must(budget is None or plan.peak_bytes <= budget, "a budget of {}, a peak of {}", budget, plan.peak_bytes)
    return plan


def _floor_of(move: rs.Move) -> float:
    """The bytes from which on every budget is met, whatever is cast; no such bytes are promised of a sum."""
    if move.source.partial or move.target.partial:
        return math.inf
    return move.source.tile_bytes + move.target.tile_bytes


def _check_account(account: Account, plan: rs.Plan | rs.TreePlan) -> None:
    """Compares what a run took with what the plan promised."""
    received, launches, peak = account.received_bytes, account.launches, account.peak_bytes
    must(received <= plan.received_bytes, "{} B are received, {} promised", received, plan.received_bytes)
    must(launches == plan.launches, "{} launches, {} promised", launches, plan.launches)
    must(peak <= plan.peak_bytes, "{} B are live, {} promised", peak, plan.peak_bytes)


def random_parts(choose: random.Random, most: int = 160) -> list[RandomView]:
    """The views of parts of one target that do not overlap and mostly cover it: fused, stacked, interleaved, and boxes
    of several atoms, each part of an array with an order and dims of its own."""
    sizes = [size for size, *_ in random_view(choose, most, 0).windows]
    boxes = [[(0, size) for size in sizes]]
    for _ in range(choose.randint(1, 4)):
        box = boxes.pop(choose.randrange(len(boxes)))
        several = [at for at, (_, count) in enumerate(box) if count > 1]
        if not several:
            boxes.append(box)
            continue
        start, count = box[at := choose.choice(several)]
        ends = [0, *(range(1, count) if choose.random() < 0.3 else [choose.randrange(1, count)]), count]
        boxes += [[*box[:at], (start + low, high - low), *box[at + 1 :]] for low, high in pairwise(ends)]
    choose.shuffle(boxes)
    left_out = 1 if len(boxes) > 1 and choose.random() < 0.3 else 0
    groups = _random_groups(choose, len(sizes))
    return [_random_part(choose, sizes, box, groups) for box in boxes[left_out:]]


def _random_part(
    choose: random.Random, sizes: Sequence[int], box: Sequence[tuple[int, int]], groups: Sequence[int]
) -> RandomView:
    """The view that fills a box of a target's atoms, some of which it has in finer ones."""
    there: list[Window] = []
    ends: list[int] = []
    sized = iter(zip(sizes, box, strict=True))
    for group in groups:
        for size, (start, count) in (next(sized) for _ in range(group)):
            finer = choose.choice([one for one in range(1, size + 1) if size % one == 0])
            split = count == size and choose.random() < 0.4
            there += (
                [Window(one, 0, one, one, 0) for one in (finer, size // finer)]
                if split
                else [Window(count, 0, count, size, start)]
            )
        ends.append(len(there) - sum(ends))
    here = list(range(len(there)))
    if choose.random() < 0.5:
        choose.shuffle(here)
    order = tuple(here.index(at) for at in range(len(there)))
    return RandomView(tuple(there[at] for at in here), order, (_random_groups(choose, len(there)), tuple(ends)))


def _reverse_view(view: RandomView) -> RandomView:
    """The view back, which takes the part that this one fills."""
    back = [view.windows[at] for at in view.order]
    windows = tuple(Window(to, filled, count, of, taken) for of, taken, count, to, filled in back)
    return RandomView(windows, tuple(view.order.index(at) for at in range(len(view.order))), view.groups[::-1])


@dataclass
class TreeCase:
    """The moves of a tree, and the arrays that they read and fill where these are not their own."""

    moves: dict[str, MoveCase]
    sources: dict[str, str]
    targets: dict[str, str]

    def __str__(self) -> str:
        moves = "\n".join(f"{name}: {case}" for name, case in self.moves.items())
        return f"{moves}\nsources {self.sources}, targets {self.targets}"

    def add_parts(self, choose: random.Random, name: str, most: int = 24) -> None:
        """Adds moves into parts of one target, or from parts of one source, between two sets of at most so many
        devices."""
        views, fuse = random_parts(choose), choose.random() < 0.6
        counts = [each for each in COUNTS if each <= most]
        count = choose.choice(counts), choose.choice(counts)
        start = min(choose.choice((0, 0, 0, count[0] // 2, count[0])), most - count[1])
        each, whole = range(count[0]), range(start, start + count[1])
        dtype = choose.choice(("int16", "int32", "float32", "bfloat16", "int8"))
        shape = views[0].shapes[1]
        shared = any_given(choose, whole, shape, dtype)
        alike = choose.random() < 0.5
        known: dict[tuple[int, ...], Given] = {}  # Parts of one shape are often in one layout, and share launches.
        for number, view in enumerate(views):
            part = f"{name}{number}"
            own, cast = view.shapes[0], choose.choice(("int16", "float32")) if choose.random() < 0.15 else dtype
            given = known.setdefault(own, any_given(choose, each, own, cast)) if alike and cast == dtype else None
            given = any_given(choose, each, own, cast) if given is None else given
            if fuse:
                self.moves[part], self.targets[part] = MoveCase(given, shared, view, (cast, dtype)), name
            else:
                self.moves[part] = MoveCase(shared, given, _reverse_view(view), (dtype, cast))
                self.sources[part] = name

    def run(
        self, choose: random.Random, tree: rs.TreePlan, run: Callable[[ArrayTiles, ArrayTiles], ArrayTiles]
    ) -> None:
        """Runs it on numbered elements, given the tiles of sources and those of targets that are there, and checks all
        tiles of all targets."""
        arrays: dict[str, np.ndarray] = {}
        wanted: dict[str, np.ndarray] = {}
        ends: dict[str, MoveCase] = {}
        tiles: ArrayTiles = {}
        into: ArrayTiles = {}
        for number, (name, case) in enumerate(self.moves.items()):
            source, target = self.sources.get(name, name), self.targets.get(name, name)
            if source not in arrays:
                shape = tree.source_layouts[source].tile_shape
                arrays[source] = _number_elements(number, case)
                tiles[source] = source_tiles(choose, case.source, shape, arrays[source])
            if target not in wanted:
                count, after = math.prod(case.target.shape), numpy_dtype(case.dtypes[1])
                held = wanted[target] = ((np.arange(count) + KEPT) % 127).reshape(case.target.shape).astype(after)
                shape = tree.target_layouts[target].tile_shape
                if target in tree.filled:
                    into[target] = {d: cut(held, fitted(at, shape)) for d, at in case.target.indices.items()}
                ends[target] = case
            wanted[target] = case.view.apply(arrays[source].astype(wanted[target].dtype), wanted[target])
        moved = run(tiles, into)
        must(list(moved) == list(wanted), "{} are made, not {}", list(moved), list(wanted))
        for target, case in ends.items():
            check_tiles(case.target, tree.target_layouts[target].tile_shape, wanted[target], moved[target])


ArrayTiles = dict[str, dict[int, np.ndarray]]
"""Tiles by the name of their array, and by device."""


def check_tree(choose: random.Random) -> str:
    """Plans a tree of random moves, some of them equal and some with shared ends, and runs it; returns its kind.

    One in four has many moves, from sets of devices of their own: then relays gather, and share launches.
    """
    most, count = ((4, 8), (16, 40))[choose.random() < 0.25]
    few = [random_move(choose, choose.choice(CASTS), 120, 0.2) for _ in range(choose.randint(1, most))]
    case = TreeCase({f"w{at}": choose.choice(few) for at in range(choose.randint(1, count))}, {}, {})
    if choose.random() < 0.6:
        for name in "pq"[: choose.randint(1, 2)]:
            case.add_parts(choose, name)
        items = list(case.moves.items())
        choose.shuffle(items)
        case.moves = dict(items)
    try:
        return _check_cases(choose, case)
    except Exception as error:
        error.add_note(str(case))
        raise


def _check_cases(choose: random.Random, tree_case: TreeCase) -> str:
    cases = tree_case.moves
    moves = {name: case.make() for name, case in cases.items()}
    options: dict[str, Any] = {"sources": tree_case.sources, "targets": tree_case.targets}
    options |= {"donate": True} if choose.random() < 0.3 else {}
    if choose.random() < 0.3:
        options["network"] = choose.choice(("tpu-v5p", "h100", "ethernet-100g"))
    try:
        tree = rs.plan_tree(moves, **options)
    except PlanError as error:
        must(any(move.source.partial for move in moves.values()) and "finish the sum" in str(error), "{}", error)
        return "tree, refused sum"
    if choose.random() < 0.3:
        summed = any(math.isinf(_floor_of(move)) for move in moves.values())
        ends = {*tree.source_layouts.items(), *((f">{name}", end) for name, end in tree.target_layouts.items())}
        floor = math.inf if summed else sum(end.tile_bytes for _, end in ends)
        budget = int(tree.peak_bytes * choose.choice((0.6, 0.8, 0.9, 1)))
        budget = int(floor) if choose.random() < 0.5 and floor < math.inf else budget
        try:
            tree = rs.plan_tree(moves, budget=budget, **options)
        except BudgetError as error:
            must(error.smallest > budget, "budget {} is refused, but {} would do", budget, error.smallest)
            must(budget < floor, "{} is all sources and targets: {}", budget, error)
            tree = rs.plan_tree(moves, budget=(budget := error.smallest), **options)
        must(tree.peak_bytes <= budget, "a budget of {}, a peak of {}", budget, tree.peak_bytes)
    must(rs.TreePlan.from_json(tree.to_json()) == tree, "{} is another tree after JSON", tree)
    account = Account("uint8")
    tree_case.run(choose, tree, lambda tiles, into: rs.simulate(tree, tiles, account, into=into))
    _check_account(account, tree)
    shared = ", shared ends" if tree_case.sources or tree_case.targets else ""
    return ("tree of one array" if len(cases) == 1 else "tree") + shared


def _number_elements(number: int, case: MoveCase) -> np.ndarray:
    """The array that a move reads; others of its shape have other elements, where the dtypes have so many."""
    whole = marks(case.source.shape, np.dtype("int64"))
    small = any(numpy_dtype(dtype).itemsize == 1 or dtype == "bfloat16" for dtype in case.dtypes)
    return ((whole * 37 + 11 * number) % 127 if small else whole + 1000 * number).astype(numpy_dtype(case.dtypes[0]))


# Updates: devices hold an array in some layout already, and some elements have changed since.


@dataclass(frozen=True)
class UpdateCase:
    """A move beside what devices of the target hold; `have` is None for the target itself, `stale` a mask."""

    move: MoveCase
    have: Given | None
    stale: np.ndarray
    changed: Any

    def __str__(self) -> str:
        have = "the target" if self.have is None else self.have.text
        return f"{self.move}\n  have {have}, changed {self.changed!r}"

    def make(self) -> rs.Move:
        """The move as the package takes it."""
        ends = self.move.source.make(), self.move.target.make()
        have = None if self.have is None else self.have.make()
        return rs.Move(*ends, cast=True, have=have, changed=self.changed, **self.move.view.options)

    def needed(self, device: int) -> int:
        """The elements that a device needs and neither has in its source tile nor holds fresh, element by element."""
        source, target, apply = self.move.source, self.move.target, self.move.view.apply
        outside = np.zeros(target.shape, bool)
        moved = apply(np.ones(source.shape, bool), outside)
        here = apply(_mark_tile(source, device), outside)
        fresh = apply(~self.stale, outside) & _mark_tile(self.have or target, device)
        return int((_mark_tile(target, device) & moved & ~here & ~fresh).sum())


def _mark_tile(given: Given, device: int) -> np.ndarray:
    """Which elements of the array a device has; none outside of the layout's devices."""
    here = np.zeros(given.shape, bool)
    if device in given.indices:
        here[np.ix_(*(index[index >= 0] for index in given.indices[device]))] = True
    return here


def random_changes(choose: random.Random, shape: Sequence[int]) -> tuple[Any, np.ndarray]:
    """What changed, in one of the forms that are taken, and as a mask of all elements."""
    stale = np.zeros(shape, bool)
    way = choose.choice(("nothing", "all", "mask", "first dims", "rows", "boxes", "boxes"))
    if way == "all" or not shape:
        stale[...] = True
        return stale.copy(), stale
    if way == "mask":
        rows = choose.choice((0.1, 0.5, 0.9))
        stale = np.random.default_rng(choose.getrandbits(32)).random(shape) < rows
        return stale.copy(), stale
    if way == "first dims":
        rank = choose.randint(1, len(shape))
        part = np.random.default_rng(choose.getrandbits(32)).random(shape[:rank]) < 0.3
        stale[part] = True
        return part, stale
    if way == "rows":
        rows = [choose.randrange(shape[0]) for _ in range(choose.randint(0, 4) if shape[0] else 0)]
        stale[rows] = True
        return rows, stale
    boxes: list[Any] = []
    for _ in range(choose.randint(1, 4) if way == "boxes" else 0):
        box: list[Any] = []
        for size in shape[: choose.randint(1, len(shape))]:
            ends = sorted(choose.randint(0, size) for _ in range(2))
            step = choose.choice((None, None, 2))
            box.append(choose.randrange(-size, size) if size and choose.random() < 0.3 else slice(*ends, step))
        boxes.append(box[0] if len(box) == 1 and choose.random() < 0.5 else tuple(box))
        stale[boxes[-1]] = True
    return boxes, stale


def random_update(choose: random.Random, most: int = 500) -> UpdateCase:
    """A random move of what is no sum, with what devices hold, in any layout on any devices, and what changed."""
    while True:
        move = random_move(choose, choose.choice(CASTS), most)
        if all(len(group) == 1 for group in (*move.source.groups, *move.target.groups)):
            break
    have = None
    if not move.parts and choose.random() < 0.6:
        devices = list(move.target.indices)
        if choose.random() < 0.4:
            devices = sorted({*choose.sample(range(24), choose.choice((1, 2, 4))), *devices[:2]})[
                : choose.choice(COUNTS)
            ]
        have = any_given(choose, devices, move.target.shape, move.dtypes[1])
    changed, stale = random_changes(choose, move.source.shape)
    return UpdateCase(move, have, stale, changed)


def check_update(choose: random.Random) -> tuple[str, rs.Plan | None]:
    """Plans a random update and runs it; returns its kind, and the plan unless its budget was refused rightly."""
    case = random_update(choose)
    try:
        return _check_update(choose, case)
    except Exception as error:
        error.add_note(str(case))
        raise


def _check_update(choose: random.Random, case: UpdateCase) -> tuple[str, rs.Plan | None]:
    move = case.make()
    must(rs.Move.from_json(move.to_json()) == move, "{} is another move after JSON", move)
    must(move.changed is not None and move.changed.elements == case.stale.sum(), "{} has other changes", move)
    options: dict[str, Any] = {"donate": True} if choose.random() < 0.3 else {}
    if choose.random() < 0.3:
        options["network"] = choose.choice(("tpu-v5p", "h100", "ethernet-100g"))
    if choose.random() < 0.3:
        share = choose.choice((0.5, 1, 1.2, 2))
        options["budget"] = int(share * (move.source.tile_bytes + move.target.tile_bytes))
    kind = f"update, {_kind_of(case.move, move)}"
    try:
        plan = rs.plan(move, **options)
    except BudgetError as error:
        must(error.smallest > options["budget"], "{} is refused, but {} would do", options["budget"], error.smallest)
        least = rs.plan(move, **{**options, "budget": error.smallest})
        must(least.peak_bytes <= error.smallest, "a budget of {}, a peak of {}", error.smallest, least.peak_bytes)
        return "update, refused budget", None
    must(plan.peak_bytes <= options.get("budget", math.inf), "{} is over its budget", plan)
    must(rs.Plan.from_json(plan.to_json()) == plan, "{} is another plan after JSON", plan)
    bits = min(dtypes.bits(layout.dtype) for layout in (plan.source, plan.target))
    lacked = {device: case.needed(device) for device in plan.target.mesh.devices}
    bound = -(-max(lacked.values()) * bits // 8)
    must(plan.received_bytes == plan.lower_bound_bytes == bound, "{} B are the difference, not as in {}", bound, plan)
    ends = max(plan.received_bytes, plan.sent_bytes)
    must(ends >= plan.endpoint_bound_bytes, "{} B at the busiest device are below its bound: {}", ends, plan)
    if not move.casts:
        rs.verify(plan.to_descriptors(), move)
    given, _, wanted = case.move.tiles(choose, plan)
    # What is held is what the target means, but where that is stale, or where no move fills it (`into`).
    fresh = case.move.view.apply(~case.stale, np.ones(wanted.shape, bool))
    old = np.where(fresh, wanted, (wanted == 0).astype(wanted.dtype))
    have = case.have or case.move.target
    layout = plan.have
    must(layout is not None, "{} has forgotten what is held", plan)
    held = {device: cut(old, fitted(at, layout.tile_shape)) for device, at in have.indices.items()} if layout else {}
    kept = {device: tile.copy() for device, tile in (*given.items(), *((-1 - d, t) for d, t in held.items()))}
    account = Account(plan.source.dtype)
    moved = rs.simulate(plan, given, account, have=held)
    check_tiles(case.move.target, plan.target.tile_shape, wanted, moved)
    both = {**given, **{-1 - device: tile for device, tile in held.items()}}
    must(all(np.array_equal(both[d], kept[d]) for d in kept), "a tile that was given was written to")
    _check_account(account, plan)
    counted = {device: -(-count * bits // 8) for device, count in lacked.items() if count}
    received = {device: nbytes for device, nbytes in account.received.items() if nbytes}
    must(received == counted, "{} bytes are received, and {} are the difference", received, counted)
    return kind, plan

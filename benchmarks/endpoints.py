"""What the busiest device of a move to other devices sends or receives, beside linear programs.

    python -m benchmarks.endpoints [PAIRS [DEVICES]]
    python -m benchmarks.endpoints --moves [MOVES [DEVICES]]

Takes seeded random pairs of layouts on two sets of 1 to DEVICES devices, 2,000 pairs and 48 by default, disjoint or
overlapping, of arrays of rank 2. Prints, every hundred pairs, how often an exchange alone (a pull) loads its busiest
device with more whole elements than the optimum of a linear program in which only holders send; and the largest ratios
of the chosen plan's to the optimum of one in which devices may pass on what they receive, to the same in whole
elements, and to the pull's; and of a relay's, where the target replicates.

In whole elements, an optimum is that of its linear program, rounded up: both are flows, whose capacities may as well be
whole, and the copies of an element that devices pass on always make up a tree.

With `--moves`, moves of weights instead: parts of a fused qkv (GQA, its parts in order or by group), of gate and up, of
stacked experts, taken, filled, transposed, cast or all of these, between meshes of dp x tp x pp that are one set of
devices, overlap or do not. Every plan is proved and run, and its elements are compared with numpy's.
"""

from __future__ import annotations

import math
import random
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import reshard as rs
from benchmarks.fuzz_moves import RandomView, Window
from reshard.errors import PlanError
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import PLAIN, StepMode
from reshard.types import dtypes
from tests.layouts import random_crossing, random_layout
from tests.view_oracle import Case, run_plan

RELAY = StepMode(relay=True)
SIZES = (24, 32, 48, 60, 64, 96)


def pair(seed: int, devices: int) -> tuple[rs.Layout, rs.Layout]:
    """A random pair on two sets of devices; the same for the same seed."""
    choose = random.Random(seed)
    meshes = [layout.mesh for layout in random_crossing(choose, counts=range(1, devices + 1))]
    shape = [choose.choice(SIZES) for _ in range(2)]
    source, target = (random_layout(choose, mesh, shape) for mesh in meshes)
    return source, target


def busiest(plan: rs.Plan) -> float:
    """What its busiest device sends or receives, in elements."""
    return max(plan.sent_bytes, plan.received_bytes) / plan.source.nbytes(1)


class Figures(NamedTuple):
    """A pair's busiest device, in elements: of the pull, of the relay if the target replicates, of the chosen plan, and
    of the two linear programs."""

    seed: int
    pull: float
    relay: float | None
    chosen: float
    pulled: float
    forwarded: float

    @property
    def above_pulled(self) -> bool:
        """Whether the pull is above its optimum in whole elements."""
        return self.pull > _rounded_up(self.pulled)

    @property
    def to_forwarded(self) -> float:
        """The chosen plan's over the optimum where devices pass elements on."""
        return self.chosen / max(self.forwarded, 1)

    @property
    def to_whole(self) -> float:
        """The same over the optimum in whole elements."""
        return self.chosen / max(_rounded_up(self.forwarded), 1)

    @property
    def relay_to_whole(self) -> float:
        """The relay's over the optimum in whole elements."""
        return 1.0 if self.relay is None else self.relay / max(_rounded_up(self.forwarded), 1)

    @property
    def to_pull(self) -> float:
        """The chosen plan's over the pull's."""
        return self.chosen / max(self.pull, 1)


def figures(seed: int, devices: int) -> Figures:
    """The figures of one pair."""
    source, target = pair(seed, devices)
    pull, relay = (busiest(chain(source, target, [StepSpec("exchange", target, mode)])) for mode in (PLAIN, RELAY))
    replicated = math.prod(axis.size for axis in target.held) < target.mesh.size
    chosen = busiest(rs.plan(source, target))
    from tests.endpoint_lp import forwarded, pulled  # Here, since `weights` are moved where there is no scipy, too.

    optima = pulled(source, target), forwarded(source, target)
    return Figures(seed, pull, relay if replicated else None, chosen, *optima)


def _rounded_up(optimum: float) -> int:
    return math.ceil(optimum - 1e-6)


def summary(rows: Sequence[Figures]) -> str:
    """How far the figures are from the optima."""
    ratios = {
        "the linear program that forwards": [row.to_forwarded for row in rows],
        "it in whole elements": [row.to_whole for row in rows],
    }
    relays = [row.relay_to_whole for row in rows if row.relay is not None]
    texts = [f"to {of} at most {max(r):.3f}, above 1.1 in {sum(x > 1.1 for x in r)}" for of, r in ratios.items()]
    pulls = [row.to_pull for row in rows]
    return (
        f"{len(rows):5} pairs: pulls above their linear program {sum(row.above_pulled for row in rows)}; "
        f"{len(relays)} relays to the one that forwards, in whole elements, at most {max(relays, default=1.0):.3f}; "
        f"plans "
        f"{', '.join(texts)}; to pulls at most {max(pulls):.3f}, above 1 in {sum(x > 1 for x in pulls)}"
    )


# Moves of weights.


def weights(seed: int, devices: int) -> tuple[str, Case]:
    """A random move of weights, and what it is called; the same for the same seed."""
    choose = random.Random(seed)
    name, windows = choose.choice((_fused_qkv, _grouped_qkv, _gate_up, _experts, _whole))(choose)
    if choose.random() < 0.5:  # The other way round: a part is filled instead.
        name = name.replace("take", "into")
        windows = [Window(*atom[3:], atom.count, *atom[:2]) for atom in windows]
    order = list(range(len(windows)))
    if choose.random() < 0.2:
        choose.shuffle(order)
    groups = [_group_rows(choose, len(order)) for _ in range(2)]
    if choose.random() < 0.5:
        groups[1] = groups[0]
    view = RandomView(tuple(windows), tuple(order), (groups[0], groups[1]))
    kinds = choose.choice((("int32",) * 2, ("int8",) * 2, ("int32", "int16"), ("int16", "int64"), ("int8", "int32")))
    meshes, where = _two_meshes(choose, devices)
    ends = [_weight_layout(choose, *each) for each in zip(meshes, view.shapes, kinds, strict=True)]
    bits = [dtypes.bits(dtype) for dtype in kinds]
    cast = "narrows" if bits[1] < bits[0] else "widens" if bits[1] > bits[0] else "no cast"
    return f"{where}, {name}, {cast}", Case(rs.Move(*ends, cast=True, **view.options), view)


def _taken(size: int, start: int, count: int) -> Window:
    return Window(size, start, count, count, 0)


def _all(size: int) -> Window:
    return _taken(size, 0, size)


def _fused_qkv(choose: random.Random) -> tuple[str, list[Window]]:
    """q, k or v out of heads that lie one after another."""
    keys, group, each = choose.choice((1, 2, 4, 8)), choose.choice((1, 2, 3, 4)), choose.choice((2, 4))
    heads = [keys * group, keys, keys]
    at = choose.randrange(3)
    rows = _taken(sum(heads) * each, sum(heads[:at]) * each, heads[at] * each)
    if choose.random() < 0.5:  # In heads; a slice of rows otherwise.
        return "take heads of qkv", [_taken(sum(heads), sum(heads[:at]), heads[at]), _all(each), _hidden(choose)]
    return "take rows of qkv", [rows, _hidden(choose)]


def _grouped_qkv(choose: random.Random) -> tuple[str, list[Window]]:
    """q, k or v out of groups of the query heads of a key, this and its value."""
    keys, group, each = choose.choice((1, 2, 4, 8)), choose.choice((1, 2, 4)), choose.choice((2, 3))
    start, count = choose.choice(((0, group), (group, 1), (group + 1, 1)))
    return "take grouped qkv", [_all(keys), _taken(group + 2, start, count), _all(each), _hidden(choose)]


def _gate_up(choose: random.Random) -> tuple[str, list[Window]]:
    """Gate or up."""
    inner = choose.choice((12, 16, 24, 32))
    return "take gate or up", [_taken(2, choose.randrange(2), 1), _all(inner), _hidden(choose)]


def _experts(choose: random.Random) -> tuple[str, list[Window]]:
    """An expert, or a few, or the gate or up of all, out of a stack."""
    experts, inner, hidden = choose.choice((4, 6, 8)), choose.choice((6, 8, 12)), choose.choice((12, 16, 24))
    if choose.random() < 0.3:
        half = _taken(2, choose.randrange(2), 1)
        return "take gate or up of experts", [_all(experts), half, _all(inner), _all(hidden)]
    count = choose.choice((1, 1, 2))
    start = choose.randrange(experts - count + 1)
    return "take experts", [_taken(experts, start, count), _all(inner), _all(hidden)]


def _whole(choose: random.Random) -> tuple[str, list[Window]]:
    """A weight of heads, all of it."""
    return "view", [_all(choose.choice((4, 6, 8, 12))), _all(choose.choice((2, 4))), _hidden(choose)]


def _hidden(choose: random.Random) -> Window:
    return _all(choose.choice((24, 32, 48, 64, 96)))


def _group_rows(choose: random.Random, atoms: int) -> tuple[int, ...]:
    """How many atoms each dim has: a matrix of rows and columns, mostly, or a dim for each."""
    return (atoms - 1, 1) if choose.random() < 0.7 else (1,) * atoms


def _two_meshes(choose: random.Random, devices: int) -> tuple[list[rs.Mesh], str]:
    """Meshes of dp x tp x pp on one set of devices, on one within another, on two that overlap, or do not."""
    sizes = [[choose.choice((1, 1, 2, 3, 4, 8)) for _ in range(3)] for _ in range(2)]
    for each in sizes:
        while math.prod(each) > devices:
            each[each.index(max(each))] //= 2
    where = choose.choice(("one set", "overlapping", "disjoint"))
    if where == "one set":
        sizes[1] = choose.sample(sizes[0], 3)
    first, second = map(math.prod, sizes)
    starts = {"one set": [0], "disjoint": [first], "overlapping": [0, first // 2, max(0, first - second)]}
    start = choose.choice(starts[where])
    meshes: list[rs.Mesh] = []
    for each, begin in zip(sizes, (0, start), strict=True):
        ids = list(range(begin, begin + math.prod(each)))
        if choose.random() < 0.2:
            choose.shuffle(ids)
        axes = dict(zip(choose.sample(("dp", "tp", "pp"), 3), each, strict=True))
        meshes.append(rs.Mesh(axes, device_ids=None if ids == list(range(len(ids))) else ids))
    return meshes, where


def _weight_layout(choose: random.Random, mesh: rs.Mesh, shape: Sequence[int], dtype: str) -> rs.Layout:
    """Axes on dims, in pieces of a dim one after another, the others replicas; any layout of the language at times."""
    if choose.random() < 0.15:
        return random_layout(choose, mesh, shape, dtype)
    held: list[list[rs.types.SubAxis]] = [[] for _ in shape]
    for axis, size in mesh.axes.items():
        if choose.random() < {"dp": 0.4, "tp": 0.9, "pp": 0.5}[axis]:
            dim = choose.choice((0, 0, len(shape) - 1, choose.randrange(len(shape))))
            # Of a dim too short for the axis, its major part splits it, and the rest is replicas.
            room = shape[dim] // math.prod(each.size for each in held[dim])
            part = max((n for n in range(1, size + 1) if size % n == 0 and n <= room), default=1)
            if part > 1:
                held[dim].append(rs.types.SubAxis(axis, 1, part))
    return rs.Layout.tiled(mesh, shape, dtype, held)


class WeightFigures(NamedTuple):
    """A move's busiest device in elements, its optimum, its bound, and its plan's steps."""

    seed: int
    name: str
    chosen: float
    forwarded: float
    bound: float
    launches: int
    steps: str

    @property
    def to_forwarded(self) -> float:
        """The chosen plan's over the optimum, in whole elements."""
        return self.chosen / max(_rounded_up(self.forwarded), 1)


def weight_figures(seed: int, devices: int) -> WeightFigures:
    """The figures of one move, which is run and proved."""
    name, case = weights(seed, devices)
    move = case.move
    plan = rs.plan(move)
    run_plan(plan, move, case.reference)
    sent = _sent_elements(plan)
    assert sent is None or plan.source.nbytes(sent) <= plan.sent_bytes, f"{sent} elements are sent: {plan}"
    assert rs.prove(plan).right.holds
    width = min(dtypes.bits(end.dtype) for end in (move.source, move.target)) / 8
    from tests.endpoint_lp import forwarded

    optimum = forwarded(move.source, move.target, case.view.apply)
    chosen = max(plan.sent_bytes, plan.received_bytes) / width
    assert plan.endpoint_bound_bytes / width <= _rounded_up(optimum) and chosen >= optimum - 1e-6, plan
    steps = " ".join(step.kind + "*" * step.mode.relay for step in plan.steps if step.launches)
    return WeightFigures(seed, name, chosen, optimum, plan.endpoint_bound_bytes / width, plan.launches, steps)


def _sent_elements(plan: rs.Plan) -> int | None:
    """What the busiest device sends, by the list of transfers; None where a plan computes."""
    try:
        transfers = plan.to_descriptors()
    except PlanError:
        return None
    sent: Counter[int] = Counter()
    for each in transfers:
        if each.source_device != each.target_device:
            sent[each.source_device] += math.prod(each.extents)
    return max(sent.values(), default=0)


def sweep_weights(moves: int, devices: int) -> None:
    """Prints a row for every hundred moves; then one for every kind, and the moves that are furthest off."""
    rows: list[WeightFigures] = []
    wrong = 0

    def summary_of(some: Sequence[WeightFigures]) -> str:
        ratios = [row.to_forwarded for row in some if row.forwarded > 0] or [1.0]
        bounds = [max(row.bound, 1) / max(_rounded_up(row.forwarded), 1) for row in some]
        return (
            f"{len(some):5} moves: to the optimum {np.exp(np.mean(np.log(ratios))):.4f} (geomean), at most "
            f"{max(ratios):.3f}, above 1.1 in {sum(ratio > 1.1 for ratio in ratios)}; bounds at least "
            f"{min(bounds):.3f} of it"
        )

    for seed in range(moves):
        try:
            rows.append(weight_figures(seed, devices))
        except Exception:
            wrong += 1
            print(f"seed {seed}: {traceback.format_exc(limit=-2)}", flush=True)
        if rows and ((seed + 1) % 100 == 0 or seed + 1 == moves):
            print(f"{summary_of(rows)}; {wrong} wrong", flush=True)
    for kinds in zip(*(row.name.split(", ") for row in rows), strict=True):
        for kind in sorted(set(kinds)):
            print(f"{summary_of([row for row in rows if kind in row.name.split(', ')])}  {kind}")
    for row in sorted(rows, key=lambda row: row.to_forwarded)[-15:]:
        print(f"{row.to_forwarded:.3f} {row}")


def main(pairs: int, devices: int) -> None:
    """Prints a row for every hundred pairs, and the pairs that are furthest off."""
    rows: list[Figures] = []
    for seed in range(pairs):
        rows.append(figures(seed, devices))
        if (seed + 1) % 100 == 0 or seed + 1 == pairs:
            print(summary(rows), flush=True)
    for what, ratios in (
        ("the optimum in whole elements", [(row.to_whole, row.seed) for row in rows]),
        ("pulls", [(row.to_pull, row.seed) for row in rows]),
    ):
        print(f"furthest above {what}:", [(round(ratio, 3), seed) for ratio, seed in sorted(ratios)[-10:]])


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:] if text != "--moves"]
    (sweep_weights if "--moves" in sys.argv else main)(*given, *(2000, 48)[len(given) :])

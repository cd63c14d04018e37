"""Our default plans beside those of Shardy's own pass: bytes, launches, predicted seconds.

    python benchmarks/against_shardy.py                  # the tables
    python benchmarks/against_shardy.py --mesh 2x4 --show 3

Shardy's steps become a plan of ours (`chain`), so that one set of typing rules prices both, and one
time model. `compared` makes the data; the test and this script only read it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean

from rich.console import Console

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shardy_peer import Steps, shardy_many
from reshard.errors import NetworkError, StepError
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.synth import cost
from reshard.synth.network import PRESETS, Network
from reshard.synth.planner import plan
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis
from tests.layouts import sample_pairs

MESHES = ("2x2", "2x3", "2x4", "2x2x2", "2x2x2x2", "3x5", "8x10", "4x6x2", "16x16x2")
RANKS = (1, 2, 3)
TOLERANCE = 1e-7
"""Relative: the same seconds summed in another order differ by less, and so do two orders of an axis's parts whose
wires carry a few bytes more or less, beside a latency that is the same."""

Pair = tuple[Layout, Layout]


@dataclass(frozen=True)
class Compared:
    """One pair that Shardy can do: its plan and ours, and for each preset our plan and its seconds.

    `theirs` is None where our rules refuse one of its steps; `refusal` then says why.
    """

    source: Layout
    target: Layout
    ours: Plan
    theirs: Plan | None
    refusal: str | None
    timed: dict[str, tuple[Plan, float]]

    @property
    def bound(self) -> int:
        """The fewest bytes that the worst device can receive."""
        return self.ours.lower_bound_bytes

    @property
    def more_bytes(self) -> bool:
        """Whether we move more bytes than Shardy."""
        return self.theirs is not None and self.ours.received_bytes > self.theirs.received_bytes

    @property
    def more_launches(self) -> bool:
        """Whether we need more launches for the same bytes."""
        theirs = self.theirs
        return (
            theirs is not None
            and self.ours.received_bytes == theirs.received_bytes
            and self.ours.launches > theirs.launches
        )

    def slower(self, preset: str) -> bool:
        """Whether our plan for this preset is predicted to take longer than Shardy's steps on it."""
        if preset not in self.timed:
            return False
        ours, theirs = self.timed[preset]
        return (ours.seconds or 0.0) > theirs * (1 + TOLERANCE)


@dataclass(frozen=True)
class Data:
    """The comparison of many pairs of one mesh; `total` also counts the pairs that Shardy cannot plan."""

    mesh: Mesh
    total: int
    pairs: tuple[Compared, ...]

    @property
    def presets(self) -> list[str]:
        """The presets that have a link for every axis of the mesh."""
        return presets(self.mesh)


def named(sizes: str, slow: bool = False) -> Mesh:
    """A mesh from `2x4`: axes x, y, ...; with `slow` the first one is `dcn`, an outer axis to every preset.

    >>> str(named("2x4")), str(named("2x4", slow=True))
    ('<x=2, y=4>', '<dcn=2, y=4>')
    """
    mesh = Mesh(zip("xyzwuv", map(int, sizes.split("x")), strict=False))
    return Mesh(("dcn" if slow and at == 0 else axis, size) for at, (axis, size) in enumerate(mesh.axes.items()))


def presets(mesh: Mesh) -> list[str]:
    """The presets that have a link for every axis of the mesh."""
    return [name for name, network in PRESETS.items() if _links(mesh, network) is not None]


def scaled(pairs: Iterable[Pair], factor: int) -> list[Pair]:
    """The same layouts of an array `factor` times larger in every dim: more bytes, as many messages."""
    return [(_scaled(source, factor), _scaled(target, factor)) for source, target in pairs]


def summed(pairs: Iterable[Pair], seed: int = 0) -> list[Pair]:
    """The same pairs, the sources still to be summed over some of the axes that they do not hold.

    Pairs whose source holds all axes are left out.
    """
    choose = random.Random(seed)
    pairs_to_sum: list[Pair] = []
    for source, target in pairs:
        held = {sub.axis for sub in source.held}
        free = [SubAxis(name, 1, size) for name, size in source.mesh.axes.items() if name not in held and size > 1]
        if free:
            axes = choose.sample(free, choose.randint(1, len(free)))
            pairs_to_sum.append((Layout(source.mesh, source.dims, source.dtype, "sum", tuple(axes)), target))
    return pairs_to_sum


def compared(mesh: Mesh, pairs: Sequence[Pair], networks: Iterable[str] = PRESETS) -> Data:
    """Both plans of each pair that Shardy can do, and both priced by each preset that knows the mesh."""
    wanted = {n: links for n in networks if (links := _links(mesh, PRESETS[n])) is not None}
    # Presets with the same figures for this mesh (H100 and H200) share their plans.
    alike: dict[tuple[cost.Link, ...], list[str]] = {}
    for name, links in wanted.items():
        alike.setdefault(tuple(links.values()), []).append(name)
    pairs_compared: list[Compared] = []
    for (source, target), steps in zip(pairs, shardy_many(pairs), strict=True):
        if steps is None:
            continue
        ours = plan(source, target)
        theirs, refusal = _theirs(source, target, steps)
        timed: dict[str, tuple[Plan, float]] = {}
        if theirs is not None:
            for names in alike.values():
                both = plan(source, target, network=PRESETS[names[0]]), priced(theirs, wanted[names[0]])
                timed.update(dict.fromkeys(names, both))
        pairs_compared.append(Compared(source, target, ours, theirs, refusal, timed))
    return Data(mesh, len(pairs), tuple(pairs_compared))


def priced(plan: Plan, links: cost.Links) -> float:
    """Predicted seconds of a plan's steps, whoever made them."""
    return sum(cost.predict_seconds(s.spec, s.operand, links) for s in plan.steps)


def _links(mesh: Mesh, network: Network) -> cost.Links | None:
    try:
        return network.links(mesh)
    except NetworkError:
        return None


def _theirs(source: Layout, target: Layout, steps: Steps) -> tuple[Plan | None, str | None]:
    """Shardy's steps as a checked plan, or why our rules refuse one of them."""
    try:
        return chain(source, target, [StepSpec(kind, layout) for kind, layout in steps]), None
    except StepError as error:
        return None, str(error)


def _scaled(layout: Layout, factor: int) -> Layout:
    axes = [[d.axis for d in dim.digits if d.axis is not None] for dim in layout.dims]
    shape = tuple(size * factor for size in layout.shape)
    return Layout.tiled(layout.mesh, shape, layout.dtype, axes, layout.partial, layout.reduction)


# ---- what the script prints ------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum:
    """One planner's figures over many pairs."""

    ratios: list[float]
    launches: list[int]

    @classmethod
    def of(cls, plans: Iterable[Plan]) -> Sum:
        """Ratios leave out plans whose bound is 0: slices, and moves to where the data is."""
        listed = list(plans)
        ratios = [p.received_bytes / p.lower_bound_bytes for p in listed if p.lower_bound_bytes]
        return cls(ratios, [p.launches for p in listed])

    def cells(self) -> list[str]:
        """Geomean and maximum of bytes over bound, mean launches."""
        if not self.ratios:
            return ["-", "-", f"{fmean(self.launches or [0]):.2f}"]
        return [f"{geometric_mean(self.ratios):.3f}", f"{max(self.ratios):.2f}", f"{fmean(self.launches):.2f}"]


def table(rows: Sequence[tuple[str, Data]]) -> str:
    """One row per label, in Markdown: what Shardy can do, both planners' figures, and where we are worse."""
    figures = [f"{who}: {column}" for who in ("Shardy", "reshard") for column in ("bytes/bound", "max", "launches")]
    worse = ["more bytes", "more launches", "slower (of)"]
    lines = [["mesh", "pairs", "bound 0", "Shardy cannot", "refused", *figures, *worse]]
    lines.append(["---"] * len(lines[0]))
    for label, data in rows:
        both = [c for c in data.pairs if c.theirs is not None]
        theirs, ours = Sum.of(c.theirs for c in both if c.theirs), Sum.of(c.ours for c in both)
        slower = sum(c.slower(p) for c in both for p in c.timed)
        missing = (sum(not c.bound for c in data.pairs), data.total - len(data.pairs), len(data.pairs) - len(both))
        counts = (sum(c.more_bytes for c in both), sum(c.more_launches for c in both))
        timed = f"{slower} ({sum(len(c.timed) for c in both)})"
        lines.append(
            [label, str(len(data.pairs)), *map(str, missing), *theirs.cells(), *ours.cells(), *map(str, counts), timed]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def failures(data: Data) -> Iterator[tuple[str, str, Compared]]:
    """Every (measure, preset or "", pair) on which we are worse, or whose steps our rules refuse."""
    for c in data.pairs:
        if c.refusal:
            yield "refused", "", c
        if c.more_bytes:
            yield "more bytes", "", c
        if c.more_launches:
            yield "more launches", "", c
        for name in c.timed:
            if c.slower(name):
                yield "more seconds", name, c


def explained(measure: str, preset: str, c: Compared) -> str:
    """One pair with both plans, as lines to read."""
    if c.theirs is None:
        return f"{c.source.mesh} {c.source} -> {c.target}\n    {c.refusal}"
    if not preset:
        ours, seconds = c.ours, ["", ""]
    else:
        ours, theirs = c.timed[preset]
        seconds = [f", {ours.seconds or 0:.6e} s", f", {theirs:.6e} s on {preset}"]
    lines = [f"{measure}: {c.source.mesh} {c.source} -> {c.target} (bound {c.bound} B)"]
    for who, planned, took in (("ours  ", ours, seconds[0]), ("theirs", c.theirs, seconds[1])):
        steps = "; ".join(f"{s.kind} {s.result}" for s in planned.steps)
        lines.append(f"    {who} {planned.received_bytes} B, {planned.launches} launches{took}: {steps}")
    return "\n".join(lines)


def _kinds(plan: Plan | None) -> str:
    return "?" if plan is None else " ".join(s.kind for s in plan.steps)


def _report(console: Console, rows: Sequence[tuple[str, Data]], show: int) -> int:
    """Prints the failures by class, worst first in each; returns how many there are."""
    classes: dict[tuple[str, str, str], list[tuple[float, str, Compared]]] = {}
    presets_of: dict[tuple[str, str, str], Counter[str]] = {}
    for _, data in rows:
        for measure, name, c in failures(data):
            ours = c.timed[name][0] if name else c.ours
            key = (measure, _kinds(ours), _kinds(c.theirs))
            ratio = (c.timed[name][0].seconds or 0.0) / (c.timed[name][1] or 1e-30) if name else 1.0
            classes.setdefault(key, []).append((ratio, name, c))
            presets_of.setdefault(key, Counter())[name] += 1
    for key, worse in sorted(classes.items(), key=lambda item: -len(item[1])):
        measure, ours, theirs = key
        worst = max(ratio for ratio, _, _ in worse)
        console.print(
            f"\n{len(worse)} x {measure}, up to {worst:.4f}: ours \\[{ours}], theirs \\[{theirs}]", style="bold"
        )
        console.print("    " + ", ".join(f"{n or 'no network'}: {k}" for n, k in presets_of[key].most_common()))
        small = sorted(worse, key=lambda item: (item[2].source.mesh.size, len(item[2].source.shape), -item[0]))
        for _, name, c in [*small[:show], max(worse, key=lambda item: item[0])]:
            console.print(explained(measure, name, c), highlight=False, soft_wrap=True, markup=False)
    return sum(map(len, classes.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="*", default=list(MESHES), help="mesh sizes, as 2x4")
    parser.add_argument("--rank", nargs="*", type=int, default=list(RANKS))
    parser.add_argument("--pairs", type=int, default=300, help="pairs per mesh and rank; all there are if fewer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", nargs="*", type=int, default=[1], help="times larger dims than evenness needs")
    parser.add_argument("--slow", action="store_true", help="name the first axis dcn, slow to every preset")
    parser.add_argument("--sums", action="store_true", help="sources still to be summed over axes they do not hold")
    parser.add_argument("--network", nargs="*", default=list(PRESETS), help="presets; give none to leave time out")
    parser.add_argument("--show", type=int, default=1, help="examples per class of pairs on which we are worse")
    parser.add_argument("--json", action="store_true", help="one JSON object per mesh and rank instead of tables")
    given = parser.parse_args()
    console = Console(width=150 if not sys.stdout.isatty() else None)
    everything: list[tuple[str, Data]] = []
    start = time.perf_counter()
    for scale, sizes in ((scale, sizes) for scale in given.scale for sizes in given.mesh):
        mesh = named(sizes, given.slow)
        for rank in given.rank:
            pairs = scaled(sample_pairs(mesh, rank, given.pairs, given.seed), scale)
            pairs = summed(pairs, given.seed) if given.sums else pairs
            everything.append((f"{mesh}, rank {rank}", compared(mesh, pairs, given.network)))
            if given.json:
                print(json.dumps(_plain(sizes, f"rank {rank}", scale, everything[-1][1])), flush=True)
    if given.json:
        return
    print(table(everything))
    worse = _report(console, everything, given.show)
    console.print(
        f"\n{worse} of {sum(len(d.pairs) for _, d in everything)} pairs x measures worse, "
        f"{time.perf_counter() - start:.0f} s"
    )


def _plain(sizes: str, label: str, scale: int, data: Data) -> dict[str, object]:
    both = [c for c in data.pairs if c.theirs is not None]
    worse = Counter(measure for measure, _, _ in failures(data))
    figures = {
        who: dict(zip(("geomean", "max", "launches"), Sum.of(plans).cells(), strict=True))
        for who, plans in (("theirs", [c.theirs for c in both if c.theirs]), ("ours", [c.ours for c in both]))
    }
    return {"mesh": sizes, "rank": label, "scale": scale, "total": data.total, "pairs": len(data.pairs),
            **figures, "worse": dict(worse)}  # fmt: skip


if __name__ == "__main__":
    main()

"""Random small programs to choose layouts for, and what every choice takes, counted from the definitions alone.

A layout here is the set of elements of each device; tiles, lifetimes and sums of prices are counted again, position by
position. Only the prices of pairs are shared with what is tested: `TablePrices` makes them up.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from dataclasses import dataclass, field, replace
from functools import cache

from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.prices import MovePrice
from reshard.synth.choice.problem import Access, Node, Problem, Tensor
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh

SPEED = DeviceSpeed("toy", {"f32": 1e3}, 1e3)
INFINITE = math.inf


@cache
def price_pair(seed, source, target, joined=1):
    """A price made up for two placements: (elements of each device, sums). Some are free, some impossible. Sums
    that are joined with others take less time."""
    rng = random.Random(zlib.crc32(repr((seed, source, target)).encode()))
    seconds = rng.choice([0.0, rng.uniform(1, 2), rng.uniform(1, 10), rng.uniform(1, 10)])
    if rng.random() < 0.03:
        seconds = INFINITE
    if source[1] is not None:
        seconds /= joined
    size = sum(4 * math.prod(map(len, placed[0][0])) for placed in (source, target))
    return MovePrice(seconds, rng.randrange(100), size + rng.choice([0, 0, rng.randrange(200)]))


@dataclass
class TablePrices:
    """Prices made up from a seed, by what layouts mean."""

    mesh: Mesh
    seed: int
    known: dict[Layout, tuple] = field(default_factory=dict)

    def price_pairs(self, pairs):
        return [price_pair(self.seed, self._place(one), self._place(other), joined) for one, other, joined in pairs]

    def _place(self, layout):
        if layout not in self.known:
            tiles = tuple(meaning(layout, device) for device in range(self.mesh.size))
            sums = (layout.reduction, tuple(sorted(axis.axis for axis in layout.partial)))
            self.known[layout] = (tiles, sums if layout.partial else None)
        return self.known[layout]


def place_access(problem, node, access, split):
    """The elements that each device has of what a node reads or writes, and over what it sums."""
    axes = problem.mesh.axes
    tiles = []
    for coordinates in itertools.product(*(range(size) for size in axes.values())):
        at = dict(zip(axes, coordinates, strict=True))
        tile = []
        for size, factors in zip(problem.tensors[access.tensor].shape, access.dims, strict=True):
            indices = [0]
            for factor in factors:
                part, parts = 0, 1
                for name in split[factor]:
                    part, parts = part * axes[name] + at[name], parts * axes[name]
                length = node.sizes[factor] // parts
                values = range(part * length, (part + 1) * length)
                indices = [i * node.sizes[factor] + v for i in indices for v in values]
            tile.append(tuple(indices) if factors else tuple(range(size)))
        tiles.append(tuple(tile))
    sums = tuple(sorted(name for factor in access.sums for name in split[factor]))
    return tuple(tiles), (access.reduction, sums) if sums else None


def list_ways(problem, node):
    """Every split of a node, by trying all ways to give axes to factors."""
    if node.only is not None:
        return list(node.only)
    ways = []
    for chosen in itertools.product([-1, *sorted(node.splittable)], repeat=len(problem.mesh.axes)):
        split = tuple(
            tuple(name for name, factor in zip(problem.mesh.axes, chosen, strict=True) if factor == number)
            for number in range(len(node.sizes))
        )
        parts = [math.prod(problem.mesh.axes[name] for name in names) for names in split]
        if all(size % part == 0 for size, part in zip(node.sizes, parts, strict=True)):
            ways.append(split)
    return ways


class Enumeration:
    """Every assignment of a problem: seconds and peak of each."""

    def __init__(self, problem, seed, most):
        self.problem, self.seed = problem, seed
        self.tensors = {}
        for number, node in enumerate(problem.nodes):
            for access in node.writes:
                self.tensors[access.tensor] = (number, access, [])
        for number, node in enumerate(problem.nodes):
            for index, access in enumerate(node.reads):
                self.tensors[access.tensor][2].append((number, index, access))
        teams = {}
        for number, node in enumerate(problem.nodes):
            teams.setdefault(node.tie or number, []).append(number)
        ways = [list_ways(problem, problem.nodes[team[0]]) for team in teams.values()]
        # Only of what several read, or a loop reads again and again, does it matter whether a copy is kept.
        asked = {
            (node, index)
            for _, _, reads in self.tensors.values()
            if len(reads) > 1 or any(access.held for *_, access in reads)
            for node, index, access in reads
        }
        reads = sorted({(min(team), index) for team in teams.values() for node, index in asked if node in team})
        self.size = math.prod(map(len, ways)) * 2 ** len(reads)
        self.found = []
        if self.size > most:
            return
        for chosen in itertools.product(*ways):
            splits = [None] * len(problem.nodes)
            for team, split in zip(teams.values(), chosen, strict=True):
                for number in team:
                    splits[number] = split
            placed = self._place(splits)
            for flags in itertools.product([False, True], repeat=len(reads)):
                first = {read for read, flag in zip(reads, flags, strict=True) if flag}
                anew = {(n, i) for team in teams.values() for n in team for i in range(9) if (min(team), i) in first}
                self.found.append((*self._assess(splits, placed, anew), tuple(splits), anew))

    def _place(self, splits):
        nodes = self.problem.nodes
        return {
            (kind, number, index): place_access(self.problem, node, access, splits[number])
            for number, node in enumerate(nodes)
            for kind, accesses in (("r", node.reads), ("w", node.writes))
            for index, access in enumerate(accesses)
        }

    def _assess(self, splits, placed, anew):
        seconds, lives, runs = self._follow(splits, placed, anew)
        peak = 0
        for position in range(1 + max((last for _, last, _ in lives), default=0)):
            more = max((more for at, more in runs if at == position), default=0)
            peak = max(peak, count_live(lives, position) + more)
        return seconds, peak

    def price_bytes(self, splits, anew, prices):
        """The seconds of an assignment, and the bytes that live at some positions at their prices."""
        seconds, lives, _ = self._follow(splits, self._place(splits), anew)
        return seconds + sum(price * count_live(lives, position) for position, price in prices.items())

    def _follow(self, splits, placed, anew):
        seconds = 0.0
        for node, split in zip(self.problem.nodes, splits, strict=True):
            of_factor = [names if size else () for size, names in zip(node.sizes, split, strict=True)]

            def divide(nbytes, factors, of_factor=of_factor):
                axes = {name for factor in factors for name in of_factor[factor]}
                return nbytes / math.prod(self.problem.mesh.axes[name] for name in axes)

            everything = range(len(of_factor))
            read = sum(divide(nbytes, factors) for factors, nbytes in node.touched)
            seconds += node.times * max(divide(node.flops, everything), read) / 1e3
            seconds += divide(node.held_bytes, everything) / 1e5
        lives, runs = [], []  # (first, last, bytes); (position, bytes beside)
        for tensor, (writer, write, reads) in self.tensors.items():
            about = self.problem.tensors[tensor]
            home = placed["w", writer, self.problem.nodes[writer].writes.index(write)]
            until, received = about.born, 0
            ends = [access.held[1] if access.held else access.at for *_, access in reads]
            stays = about.dies > max(ends, default=about.born)
            groups = {}
            for (node, index, access), end in zip(reads, ends, strict=True):
                there = placed["r", node, index]
                if there == home:
                    until = max(until, end)
                elif (node, index) in anew and (len(reads) > 1 or access.held):
                    price = price_pair(self.seed, home, there, about.joined)
                    seconds += price.seconds * access.times
                    # It is moved before the reader runs.
                    lives.append((access.at - 1, access.at, held_bytes(about, there)))
                    runs.append((access.at - 1, price.peak_bytes - tile_bytes(home) - tile_bytes(there)))
                    until, received = max(until, end), received + price.received_bytes
                else:
                    begin = access.held[0] if access.held else access.at
                    groups.setdefault(there, []).append((begin - 1, end))
            for there, spans in groups.items():
                price = price_pair(self.seed, home, there, about.joined)
                seconds += price.seconds * write.times
                begin = min(first for first, _ in spans)
                if tile_bytes(there) < tile_bytes(home) and not stays:
                    begin = about.born + 1
                lives.append((begin, max(last for _, last in spans), held_bytes(about, there)))
                runs.append((begin, price.peak_bytes - tile_bytes(home) - tile_bytes(there)))
                until, received = max(until, begin), received + price.received_bytes
            if about.dies >= about.born or (about.fused and received):
                lives.append((about.born, about.dies if stays else until, held_bytes(about, home)))
        for number, node in enumerate(self.problem.nodes):
            for read, write in node.reuses:
                source, target = node.reads[read], node.writes[write]
                ends = ("r", read, source), ("w", write, target)
                sizes = {
                    held_bytes(self.problem.tensors[access.tensor], placed[side, number, index])
                    for side, index, access in ends
                }
                born, dies = self.problem.tensors[target.tensor].born, self.problem.tensors[source.tensor].dies
                if len(sizes) == 1 and source.held is None and source.at == dies == born:
                    lives.append((born, born, -sizes.pop()))
        return seconds, lives, runs

    def best(self, budget=INFINITE):
        """The fewest seconds of any assignment within a budget."""
        return min((seconds for seconds, peak, *_ in self.found if peak <= budget), default=INFINITE)


def count_live(lives, position):
    return sum(size for first, last, size in lives if first <= position <= last)


def tile_bytes(placed):
    return 4 * math.prod(len(indices) for indices in placed[0][0])


def held_bytes(tensor, placed):
    """The bytes of a tile, whose last dim may take whole lanes of 128."""
    elements = len(placed[0][0][-1])
    return tile_bytes(placed) // elements * (math.ceil(elements / 128) * 128 if tensor.padded else elements)


def random_problem(rng, most_nodes=8):
    """A program of a few nodes: elementwise ones, products, sums, a loop around some, ties, fixed splits, reuse."""
    mesh = rng.choice([Mesh(x=2), Mesh(x=2, y=2), Mesh(x=4, y=2), Mesh(x=3, y=2)])
    count = rng.randint(2, most_nodes)
    loop = tuple(sorted(rng.sample(range(1, count + 1), 2))) if count > 3 and rng.random() < 0.4 else (count, count)
    nodes, shapes = [], []
    for number in range(count):
        node, shape = _random_node(rng, number, shapes, loop)
        nodes.append(node)
        shapes.append(tuple(shape))
    tensors = []
    for number, shape in enumerate(shapes):
        last = max([number, *(a.last for node in nodes for a in node.reads if a.tensor == number)])
        dies = last if rng.random() < 0.7 else rng.choice([count, number - 1, last + 1])
        marks = random.Random(f"{shapes}{number}")  # so that a seed means the same graph with and without these
        fused = dies < number and marks.random() < 0.7
        tensors.append(Tensor(f"t{number}", shape, "f32", number, dies, fused=fused, padded=marks.random() < 0.1))
    problem = Problem(mesh, tuple(tensors), tuple(nodes))
    for number, node in enumerate(nodes):
        ways = list_ways(problem, node)
        most = rng.choice([1, 2, 3, 3, 4])
        if len(ways) > most:
            nodes[number] = replace(node, only=tuple(rng.sample(ways, most)))
    # Nodes that look alike are tied, and have the same splits.
    for one, two in itertools.combinations(range(count), 2):
        same = [(n.sizes, n.splittable, len(n.reads), n.writes[0].sums, n.times) for n in (nodes[one], nodes[two])]
        if same[0] == same[1] and not nodes[one].tie and rng.random() < 0.5:
            nodes[one] = replace(nodes[one], tie=f"tie{one}")
            nodes[two] = replace(nodes[two], tie=f"tie{one}", only=nodes[one].only)
    return replace(problem, nodes=tuple(nodes))


def _random_node(rng, number, shapes, loop):
    """A node that writes the tensor of its number, and the shape of that."""
    inside = loop[0] <= number < loop[1]
    trips = 3 if inside else 1
    # What a loop makes is read inside it alone.
    there = [n for n in range(number) if inside or not loop[0] <= n < loop[1]]

    def read(tensor, dims):
        held = (loop[0], loop[1] - 1) if inside and not loop[0] <= tensor < loop[1] else None
        return Access(tensor, dims, number, trips, held=held)

    kind = rng.choice(["source", "same", "same", "product", "reduce", "two"] if there else ["source"])
    if kind == "source":
        shape = sizes = rng.choice([(12,), (12, 4), (4, 12), (12, 12)])
        out, reads, sums = tuple((i,) for i in range(len(shape))), (), ()
    else:
        tensor = rng.choice(there)
        shape = sizes = shapes[tensor]
        own = out = tuple((i,) for i in range(len(shape)))
        sums, reads = (), (read(tensor, own),)
        if kind == "reduce" and len(shape) == 2:
            out, sums, shape = ((0,),), (1,), shape[:1]
        elif kind == "product" and len(shape) == 2:
            others = [n for n in there if len(shapes[n]) == 2 and shapes[n][0] == shape[1]]
            if others:
                other = rng.choice(others)
                sizes, out, sums = (*shape, shapes[other][1]), ((0,), (2,)), (1,)
                reads = (*reads, read(other, ((1,), (2,))))
                shape = (shape[0], shapes[other][1])
        elif kind == "two":
            reads = (*reads, read(rng.choice([n for n in there if shapes[n] == shape]), own))
        elif kind == "same" and shape[0] == 12 and rng.random() < 0.3:
            # The dim in two factors, as of a reshape: 12 = 3 * 4.
            sizes, out = (3, 4, *shape[1:]), ((0, 1), *((i + 1,) for i in range(1, len(shape))))
            reads = (read(tensor, out),)
    if rng.random() < 0.15:
        sums, sizes = (*sums, len(sizes)), (*sizes, 0)
        reads = tuple(replace(access, sums=(len(sizes) - 1,)) for access in reads)
    splittable = frozenset(f for f in range(len(sizes)) if rng.random() < 0.9)
    write = Access(number, out, number, trips, sums=sums)
    work = rng.choice([0.0, rng.uniform(0, 5e3)])
    held = 0.0 if reads else 1e3 * math.prod(shape)
    reuses = ((0, 0),) if reads and rng.random() < 0.5 else ()
    touched = tuple((tuple(itertools.chain(*access.dims)), work / 2) for access in (*reads, write) if work)
    return Node(
        f"{kind}{number}", tuple(sizes), splittable, reads, (write,), work, touched, trips, held, reuses=reuses
    ), shape

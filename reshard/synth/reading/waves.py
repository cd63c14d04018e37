"""`plan_reading`: stored tensors in the layouts in which they are read, in waves, each with its tree of moves.

    tensors        each in the layout that `as_read` chooses
    readers        fewer of those that would read least, where there would be more reads than bytes / read_size
    packs          small ones as one array, gathered once and split on each device (`packs`)
    slabs          large ones in parts that a wave has room for (`slabs`)
    waves          in the order of files, as many bytes as a wave may stage
    trees          what a wave moves is an ordinary `plan_tree`

A read of less than `read_size` bytes is made where more readers have each a part of what they need, as long as all
reads together are as few as if none were: bytes / read_size, and one for each reader of each file.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.errors import BudgetError
from reshard.geometry.holders import multiply_by_piece, piece_columns
from reshard.geometry.overlap import piece_extents
from reshard.plans.load_plan import DECODED, DirectRead, LoadPlan, ReaderFigures, Reading, Wave, sum_by_process
from reshard.plans.plan import TreePlan
from reshard.plans.stored import NO_FILE, Box, ChunkGrid, Stored
from reshard.synth.network import Network
from reshard.synth.options import PlanOptions
from reshard.synth.planner import find_tree_plan
from reshard.synth.reading.as_read import (
    PlacedReaders,
    Readers,
    ReadOptions,
    leave_out,
    list_left,
    list_own_axes,
    list_turns,
    list_units,
    place_readers,
    split_axis,
)
from reshard.synth.reading.packs import is_flat, is_raw, pack_tensors
from reshard.synth.reading.slabs import cut_slabs
from reshard.synth.reading.taken_parts import find_taken_part
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.move import Move
from reshard.types.units import bytes_text, counted

WAVE = 64 << 20
"""The most bytes of readings in a process that a wave stages, where nobody says."""

WAVES, LITTLE_WAVE = 8, 8 << 20
"""Where each device is a process, a wave is one in so many of a load, but no less than this: moves there are copies out
of staging, which is small enough to stay in caches, and the first read and the last move hide behind nothing."""

LEAST_WAVE, LEAST_READ = 1 << 18, 1 << 14
"""The least wave and the least `read_size` that are tried for a budget."""

FEW_WAVES = 256
"""A plan of so many waves is made in less than a second."""

MOST_RECEIVERS = 8
"""The most tiles of which a reader has parts, if that is not too many reads: to each of them it sends in a launch."""

SMALL = 16
"""A tensor is packed if its devices receive at most a part in this many of `read_size` that they do not need."""

PACKED_SHARE = 50
"""What devices receive of packs that they do not need is at most one part in this many of the results."""


EVEN = 1.04
"""The largest load over the mean for which no tensor's readers are shifted."""

MOST_TURNS = 32
"""The most choices of readers that are looked at for a tensor."""

MOST_SHIFTED = 256
"""The most devices of a mesh on which readers of uneven chunks are shifted: each choice looks at all of them."""


@dataclass(frozen=True)
class ReadTensor:
    """A stored tensor, the moves that read it, by name, who reads it, and where in the order of files it comes.

    Where moves take a box of it alone, `stored` is that box as a tensor.
    """

    stored: Stored
    moves: Mapping[str, Move]
    placed: PlacedReaders
    at: tuple[int, int]
    box: Box | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh on which it is read, as that of its targets."""
        return self.placed.layout.mesh


@dataclass(frozen=True)
class ReadItem:
    """A reading, how it is read straight into a target, or else its moves, by name, and what these fill."""

    reading: Reading
    at: tuple[int, int]
    moves: Mapping[str, Move]
    fills: Mapping[str, str]
    direct: DirectRead | None = None
    tensors: tuple[ReadTensor, ...] = ()

    @property
    def staged(self) -> list[Layout]:
        """The layouts of what it stages beside targets: of a pack, what is gathered too."""
        return [] if self.direct else [self.reading.layout, *(m.target for m in self.moves.values() if self.tensors)]


def plan_reading(
    stored: Mapping[str, Stored],
    moves: Mapping[str, Move],
    sources: Mapping[str, str],
    fills: Mapping[str, str],
    process_of: Mapping[int, int] | None,
    options: ReadOptions,
    network: Network | None = None,
) -> LoadPlan:
    """The plan of a load: `moves` by name, each from the stored tensor `sources[name]` to the target `fills[name]`.

    Where `sources` or `fills` do not have a move, these are of its own name. Equal arguments give equal plans in every
    process. Raises `BudgetError`, with the smallest budget that works.
    """
    readers, given = Readers(process_of), stored
    filled = {name: fills.get(name, name) for name in moves}
    # Moves by the tensor that they read: it is read once, whatever their number.
    of_tensor: dict[str, dict[str, Move]] = {}
    for name, move in moves.items():
        of_tensor.setdefault(sources.get(name, name), {})[name] = move
    # What no move takes is not read.
    parts = {name: find_taken_part(stored[name], named, options.read_size) for name, named in of_tensor.items()}
    stored = {name: stored[name] if part is None else part.stored for name, part in parts.items()}
    of_tensor |= {name: dict(part.moves) for name, part in parts.items() if part is not None}
    placed = place_tensors([(stored[name], named) for name, named in of_tensor.items()], readers, options)
    placed = [each if (part := parts[each.stored.name]) is None else replace(each, box=part.box) for each in placed]
    tensors, packed = pick_packed(placed, filled, readers, options)
    tensors, whole = reduce_readers(tensors, packed, readers, options)
    turned = turn_readers(tensors, readers)
    coded = [stored[name] for name in of_tensor if not is_raw(stored[name])]
    chunks = {each.name: dtypes.nbytes(math.prod(list_units(each)), each.dtype) for each in coded}
    # What a wave stages is found by trying: buffers of moves are known once they are planned.
    least: LoadPlan | None = None
    total = sum(stored[name].stored_bytes for name in of_tensor)
    size = options.wave or WAVE
    if options.wave is None and process_of is None:
        devices = max((move.target.mesh.size for move in moves.values()), default=1)
        size = max(LITTLE_WAVE, min(WAVE, total // (WAVES * devices)))
    targets = {filled[name]: move.target for name, move in moves.items()}
    # Within a budget, the buffers of a wave become smaller with it.
    results = 0 if options.budget is not None else sum(target.tile_bytes for target in targets.values())
    while True:
        items = [*pack_items(packed, readers, size, whole), *list_items(turned, filled, readers, size)]
        # In the order of files, so that what is read next is what comes next in them.
        items.sort(key=lambda item: item.at)
        parts = cut_waves(items, readers, size)
        waves = [make_wave(part, filled, readers, network, chunks, results) for part in parts]
        figures = count_reads(items, {each.stored.name: each for each in (*tensors, *packed)}, readers)
        asked = sum(count_asked(each, readers) for each in (*tensors, *packed))
        listed = [stored[name].pieces for name in of_tensor if not isinstance(stored[name].pieces, ChunkGrid)]
        files = {piece.file for pieces in listed for piece in pieces if piece.file != NO_FILE}
        plan = LoadPlan(targets, tuple(waves), process_of, figures, total, asked, len(files))
        if options.budget is None or plan.peak_bytes <= options.budget:
            return plan
        # Half the wave, half the staging and half the buffers of its moves, until slabs can be no thinner.
        least = plan if least is None or plan.peak_bytes < least.peak_bytes else least
        if options.wave is not None or size <= LEAST_WAVE:
            # More readers have smaller parts and thinner slabs: tried where these make waves larger than asked for, and
            # where trying takes little.
            beyond = least.peak_bytes - least.result_bytes > (min(2, len(least.waves)) + 1) * size
            if (beyond or len(plan.waves) <= FEW_WAVES) and options.read_size // 4 >= LEAST_READ:
                less = replace(options, read_size=options.read_size // 4, wave=size)
                try:
                    return plan_reading(given, moves, sources, fills, process_of, less, network)
                except BudgetError as error:
                    if error.smallest < least.peak_bytes:
                        raise
            raise BudgetError(
                f"budget {options.budget} B is too small to load {counted(len(of_tensor), 'tensor')}: results take "
                f"{least.result_bytes} B in a process, two waves {least.staging_bytes} B, buffers "
                f"{least.scratch_bytes} B; the smallest that works is {least.peak_bytes} B, or less with a wave= below "
                f"{bytes_text(size)} or a read_size= below {bytes_text(min(options.read_size, LEAST_READ))}",
                least.peak_bytes,
            )
        size //= 2


def place_tensors(
    tensors: Sequence[tuple[Stored, Mapping[str, Move]]], readers: Readers, options: ReadOptions
) -> list[ReadTensor]:
    """Each tensor near where most of it goes; those that are alike are placed once."""
    known: dict[object, PlacedReaders] = {}
    made: list[ReadTensor] = []
    for stored, named in tensors:
        # Several moves may read one tensor: it is read near where most of it goes.
        largest = max(named.values(), key=lambda move: move.target.tile_bytes)
        first = stored.pieces[0] if len(stored.pieces) else None
        kind = len(stored.pieces) if stored.chunks is None else stored.chunks
        # A model has hundreds of tensors, and a dozen that differ in this.
        key = stored.shape, stored.dtype, kind, list_units(stored), largest.target, largest.view
        if key not in known or (stored.chunks is None and len(stored.pieces) > 1):
            known[key] = place_readers(stored, largest, readers, options)
        made.append(ReadTensor(stored, named, known[key], (0, 0) if first is None else (first.file, first.offset)))
    return made


def pick_packed(
    tensors: Sequence[ReadTensor], filled: Mapping[str, str], readers: Readers, options: ReadOptions
) -> tuple[list[ReadTensor], list[ReadTensor]]:
    """The tensors that are read on their own, and those that are packed.

    A pack is gathered whole, so that devices receive what they do not need of it: nothing of what the target
    replicates, and else little, of each tensor and of all together.
    """
    # Targets that several tensors fill count once.
    results = Counter[Mesh]()
    for target in {filled[name]: move.target for each in tensors for name, move in each.moves.items()}.values():
        results[target.mesh] += target.tile_bytes
    excess: list[tuple[int, int]] = []
    for at, each in enumerate(tensors):
        meshes = {move.target.mesh for move in each.moves.values()}
        readers_of = math.prod(axis.size for axis in readers.list_crossing(each.mesh))
        whole, size = each.stored.nbytes, math.prod(each.stored.shape)
        small = whole < readers_of * options.read_size and whole <= WAVE // 8
        plain = len(meshes) == 1 and size and not any(move.target.partial for move in each.moves.values())
        # A pack has tensors whole.
        if readers_of == 1 or not small or not plain or each.box is not None:
            continue
        needed = 0
        for move in each.moves.values():
            # Of a target's tile, what this tensor fills.
            cut = math.prod(axis.size for axis in itertools.chain(*list_own_axes(move)))
            needed += math.prod(atom.size for atom in move.view.atoms) // cut
        beyond = max(0, whole - dtypes.nbytes(needed, each.stored.dtype))
        if beyond <= options.read_size // SMALL:
            excess.append((beyond, at))
    # Those that cost least first, as long as all of them together cost little.
    packed, used = set[int](), Counter[Mesh]()
    for beyond, at in sorted(excess):
        mesh = tensors[at].mesh
        used[mesh] += beyond
        if used[mesh] * PACKED_SHARE <= results[mesh] or not beyond:
            packed.add(at)
    alone = [each for at, each in enumerate(tensors) if at not in packed]
    return alone, [each for at, each in enumerate(tensors) if at in packed]


def reduce_readers(
    tensors: Sequence[ReadTensor], packed: Sequence[ReadTensor], readers: Readers, options: ReadOptions
) -> tuple[list[ReadTensor], bool]:
    """Fewer readers of the tensors whose parts are smallest, until there are few enough reads in all.

    And whether packed tensors should have one reader each, too, rather than all readers even shares of them.
    """
    every = {process for mesh in {each.mesh for each in tensors} for process in readers.list_processes(mesh)}
    files = {piece.file for each in (*tensors, *packed) for piece in each.stored.pieces[:1]}
    # What the reads of a loader would be that has no choice: none below `read_size` but the last of a file.
    allowed = len(every) * len(files)
    for each in (*tensors, *packed):
        pieces = len(each.stored.pieces)
        by_size = max(each.stored.nbytes // options.read_size, pieces if pieces > 1 else 0)
        allowed += by_size if is_raw(each.stored) else pieces
    made = list(tensors)
    # Packed tensors that are neighbours in a file are one run, which readers share out.
    ends = {(each.at[0], each.at[1] + each.stored.stored_bytes) for each in packed}
    cuts = len(every) - 1 if packed else 0
    reads = sum(map(count_file_runs, tensors)) + sum(each.at not in ends for each in packed) + cuts
    whole = reads > allowed
    if whole:
        reads += len(packed) - sum(each.at not in ends for each in packed) - cuts
    # Those that are read where they are wanted come last, since with fewer readers they move: the others move anyway,
    # and from fewer readers in fewer launches.
    largest = [max(each.moves.values(), key=lambda move: move.target.tile_bytes) for each in made]
    straight = [each.placed.layout == move.target for each, move in zip(made, largest, strict=True)]
    parts = [each.stored.nbytes / max(1, each.placed.processes) for each in made]
    order = sorted(range(len(made)), key=lambda at: (straight[at], parts[at]))
    known: dict[object, PlacedReaders] = {}
    # Where parts of `read_size` do not do, since readers send to few or a tensor lies in many pieces, larger ones may.
    for (receivers, factor), at in itertools.product(((MOST_RECEIVERS, 1), (0, 1), (0, 2), (0, 4), (0, 8)), order):
        if reads <= allowed and (straight[at] or not receivers or not whole):
            break
        each, move = made[at], largest[at]
        most = max(1, each.stored.nbytes // (factor * options.read_size))
        if receivers:
            crossing = (axis.size for axis in move.target.held if not readers.is_inside(each.mesh, axis))
            most = max(most, math.prod(crossing) // receivers)
        if most >= each.placed.processes:
            continue
        key = each.stored.shape, each.stored.dtype, each.stored.chunks, move.target, move.view, most
        if key not in known:
            known[key] = place_readers(each.stored, move, readers, options, most)
        fewer = replace(each, placed=known[key])
        reads += count_file_runs(fewer) - count_file_runs(each)
        made[at] = fewer
    return made, whole


def count_file_runs(each: ReadTensor) -> int:
    """The reads of a tensor by all processes: of what is coded, no chunk twice."""
    reads = each.placed.processes * each.placed.runs
    return reads if is_raw(each.stored) else min(reads, len(each.stored.pieces))


def turn_readers(tensors: Sequence[ReadTensor], readers: Readers) -> list[tuple[ReadTensor, Layout]]:
    """Each tensor with the layout in which it is read, so that all processes read as much in the end.

    Where only some devices read a tensor, those do that have least so far. Where chunks make some read more than
    others, these are others for each tensor, by shifts of the devices along the axes that cross processes.
    """
    loads: defaultdict[int, int] = defaultdict(int)
    turned: defaultdict[int, int] = defaultdict(int)
    layouts: list[Layout] = [each.placed.layout for each in tensors]
    uneven: list[tuple[int, list[int]]] = []
    known: dict[Layout, list[int]] = {}
    even = 0.0
    # The largest first, as each goes to whoever has least so far.
    for at in sorted(range(len(tensors)), key=lambda at: -tensors[at].stored.nbytes):
        each, layout = tensors[at], layouts[at]
        mesh, dropped = layout.mesh, each.placed.dropped
        owners = readers.list_processes(mesh)
        for process in owners if not turned else ():
            turned[process] = 0
        if dropped:
            # Each turn is other devices, at one coordinate along each axis left over; a few of them stand for all.
            positions, turns = list_left(layout, dropped), list_turns(mesh, dropped)
            some = positions[:: max(1, len(positions) // 4)]
            turn = min(range(len(turns)), key=lambda at: max(turned[owners[turns[at] + place]] for place in some))
            layouts[at] = leave_out(layout, dropped, turn)
            for position in positions:
                turned[owners[turns[turn] + position]] += each.stored.nbytes // len(positions)
        if layout.even:
            even += 0 if dropped else each.stored.nbytes / len(turned)
            continue
        if layout not in known:
            known[layout] = multiply_by_piece(layout, [piece_extents(dim) for dim in layout.dims])
        sizes = [known[layout][position] for position in list_left(layout, dropped)] if dropped else known[layout]
        uneven.append((at, [layout.nbytes(size) for size in sizes]))
        for process, size in zip(readers.list_processes(layouts[at].mesh), uneven[-1][1], strict=True):
            loads[process] += size
    # Shifted readers receive more, since they read what others need: so those tensors first that make most of it.
    for at, sizes in sorted(uneven, key=lambda each: sum(each[1]) / len(each[1]) - max(each[1])):
        layout = layouts[at]
        mesh = layout.mesh
        total = sum(loads.values()) / max(1, len(turned)) + even
        if max(loads.values()) + even <= EVEN * total:
            break
        if mesh.size > MOST_SHIFTED or layout in {move.target for move in tensors[at].moves.values()}:
            continue
        owners, best = readers.list_processes(mesh), (math.inf, range(0))
        for process, size in zip(owners, sizes, strict=True):
            loads[process] -= size
        for places in list_shifts(mesh, readers.list_crossing(mesh)):
            # The most of all would be the same for many choices; whoever has much already should have little here.
            twice = sum(loads[owners[place]] * size for place, size in zip(places, sizes, strict=True))
            best = min(best, (twice, places), key=lambda each: each[0])
        for place, size in zip(best[1], sizes, strict=True):
            loads[owners[place]] += size
        moved = Mesh(mesh.axes, device_ids=[mesh.devices[place] for place in best[1]])
        layouts[at] = Layout(moved, layout.dims, layout.dtype)
    return list(zip(tensors, layouts, strict=True))


def list_shifts(mesh: Mesh, axes: Sequence[SubAxis]) -> Iterator[Sequence[int]]:
    """The positions of a mesh in other orders: those in which each is shifted by as much along some axes, at most a
    few, the first as they are.

    >>> mesh = Mesh(x=2, y=2)
    >>> [list(places) for places in list_shifts(mesh, [mesh.sub_axis("y")])]
    [[0, 1, 2, 3], [1, 0, 3, 2]]
    """
    every = itertools.product(*(range(axis.size) for axis in axes))
    total = math.prod(axis.size for axis in axes)
    for shifts in itertools.islice(every, 0, None, max(1, total // MOST_TURNS)):
        places = list(range(mesh.size))
        for axis, shift in zip(axes, shifts, strict=True):
            stride, size = mesh.stride(axis), axis.size
            places = [at + ((at // stride + shift) % size - at // stride % size) * stride for at in places]
        yield places


def pack_items(packed: Sequence[ReadTensor], readers: Readers, size: int, whole: bool) -> Iterator[ReadItem]:
    """The packs: of tensors of one mesh and one dtype, all flat or none, as large as half a wave.

    With `whole`, each tensor is read by one reader.
    """
    groups: defaultdict[tuple[Mesh, str, bool], list[ReadTensor]] = defaultdict(list)
    for each in packed:
        groups[each.mesh, each.stored.dtype, is_flat(each.stored)].append(each)
    # A launch gathers one dtype. Whole tensors go in, up to what leaves a wave room for the other half.
    number = 0
    for (mesh, dtype, _), members in groups.items():
        devices = max(Counter(readers.list_processes(mesh)).values())
        most = max(1, size * 4 // devices // dtypes.bits(dtype))
        members.sort(key=lambda each: each.at)
        totals = itertools.accumulate(math.prod(each.stored.shape) for each in members)
        parts = itertools.groupby(zip(members, totals, strict=True), key=lambda pair: (pair[1] - 1) // most)
        for _, part in parts:
            tensors = tuple(each for each, _ in part)
            pack = pack_tensors([each.stored for each in tensors], mesh, readers.list_crossing(mesh), whole=whole)
            number += 1
            name = f"pack {number} of {dtypes.short(dtype)}"
            move = Move(pack.layout, pack.gathered)
            reading = Reading(name, "", None, pack.layout, 1, pack.parts)
            yield ReadItem(reading, tensors[0].at, {name: move}, {name: name}, None, tensors)


def list_items(
    tensors: Sequence[tuple[ReadTensor, Layout]], filled: Mapping[str, str], readers: Readers, size: int
) -> Iterator[ReadItem]:
    """The readings of tensors that are read on their own, in slabs where one would be more than a wave."""
    for each, layout in tensors:
        name = each.stored.name
        moves = {at: Move(layout, move.target, move.view, cast=move.cast) for at, move in each.moves.items()}
        direct = None
        if len(moves) == 1:
            ((move_name, move),) = moves.items()
            direct = read_straight(name, filled[move_name], move)
        fills = {at: filled[at] for at in moves}
        whole = ReadItem(Reading(name, name, each.box, layout), each.at, moves, fills, direct)
        staged = 0 if direct else layout.tile_bytes * readers.count_devices(layout.mesh)
        # Where its rows do not let it be cut, it is a wave of its own, larger than asked for, and counted so.
        slabs = None
        if staged > size:
            slabs = cut_slabs(layout, list_units(each.stored)[0], [*moves.values()], -(-staged // size), not each.box)
        if slabs is None:
            yield whole
            continue
        starts = [start for start, _ in each.box or ()]
        for at, slab in enumerate(slabs):
            named = {f"{old} slab {at}": move for old, move in zip(moves, slab.moves, strict=True)}
            box = tuple((low + start, high + start) for (low, high), start in zip(slab.box, starts, strict=False))
            reading = Reading(f"{name} slab {at}", name, box or slab.box, slab.layout, slab.split)
            yield ReadItem(reading, each.at, named, {f"{old} slab {at}": to for old, to in fills.items()})


def read_straight(name: str, target: str, move: Move) -> DirectRead | None:
    """How a reading is read straight into its target, None if it has to move.

    It is where the target's devices have what they read in the same order, in all of their tiles or in a box of them.

    >>> mesh = Mesh(x=2)
    >>> layer, stack = Layout.parse("f32[{x}4, 8]", mesh), Layout.parse("f32[3, {x}4, 8]", mesh)
    >>> move = Move(layer, stack, view="h m -> l h m", into={"l": 2}, l=3)
    >>> read_straight("w", "stack", move).box
    ((2, 3), (0, 4), (0, 8))
    """
    source, goal, view = move.source, move.target, move.view
    if move.casts or source.mesh != goal.mesh or source.partial or goal.partial:
        return None
    if move.view.plain:
        return DirectRead(name, target) if source == goal else None
    box: list[tuple[int, int]] = []
    read: list[int] = []
    for at, group in enumerate(view.target):
        tile, atoms = goal.tile_shape[at], [view.atoms[number] for number in group]
        parts = [number for number in group if view.atoms[number].into is not None]
        if not parts:
            # A dim as it is: the same atoms make it on both sides, and the same devices cut it.
            dims = [where for where, other in enumerate(view.source) if other == group]
            if any(atom.taken for atom in atoms) or (group and (not dims or source.dims[dims[0]] != goal.dims[at])):
                return None
            read += dims if group else []
            box.append((0, tile))
            continue
        window = atoms[0].into
        dims = [where for where, other in enumerate(view.source) if parts[0] in other]
        local = tile == goal.shape[at] and all(view.source[where] == group for where in dims)
        if len(group) > 1 or window is None or atoms[0].taken or not local:
            return None
        # What fills a part of a dim has all of its own, on every device.
        if any(source.tile_shape[where] != source.shape[where] for where in dims):
            return None
        read += dims
        box.append((window.start, window.start + atoms[0].size))
    return DirectRead(name, target, tuple(box)) if read == list(range(len(view.source))) else None


def cut_waves(items: Sequence[ReadItem], readers: Readers, size: int) -> Iterator[list[ReadItem]]:
    """The items of each wave: as many as stage about so many bytes in a process, or one alone."""
    # What some processes read is taken to be shared out evenly by then; a wave's own figure is exact.
    most = max((move.target.mesh.size for item in items for move in item.moves.values()), default=1)
    wave: list[ReadItem] = []
    staged = 0.0
    for item in items:
        more = 0.0
        for layout in item.staged:
            more += layout.tile_bytes * readers.count_devices(layout.mesh) * layout.mesh.size / most
        if wave and staged + more > size:
            yield wave
            wave, staged = [], 0.0
        wave.append(item)
        staged += more
    if wave:
        yield wave


def make_wave(
    items: Sequence[ReadItem],
    filled: Mapping[str, str],
    readers: Readers,
    network: Network | None,
    chunks: Mapping[str, int],
    results: int,
) -> Wave:
    """The wave of some readings: what is read straight into targets, and the trees of the other moves.

    `chunks` has the bytes of the elements of a chunk, of each tensor whose chunks are coded; `results` are those of all
    waves on a device, of which the buffers of a wave are a share.
    """
    # A tree never sees what stays where it was read: its bytes are read into the result, and staged nowhere.
    direct = tuple(item.direct for item in items if item.direct is not None)
    moving = [item for item in items if item.direct is None]
    options = PlanOptions(network=network)
    tree = split = None
    if moving:
        moves = {name: move for item in moving for name, move in item.moves.items()}
        sources = {name: item.reading.name for item in moving for name in item.moves}
        targets = {name: target for item in moving for name, target in item.fills.items()}
        tree = find_tree_plan(moves, options, sources, targets, results)
    tensors = [each for item in moving for each in item.tensors]
    if tensors:
        split = split_packs(tensors, filled, options)
    # Packs count twice: as they are read, and as they are gathered.
    staged = [layout for item in moving for layout in item.staged]
    staging = max(sum_by_process(staged, readers.process_of).values(), default=0)
    # Chunks as they are stored, as a filter makes them, decoded, and where several tiles share them in a buffer.
    coded = [item.reading for item in items if not chunks.keys().isdisjoint(item.reading.tensors)]
    largest = max((chunks.get(name, 0) for reading in coded for name in reading.tensors), default=0)
    decoded = max(sum_by_process([reading.layout for reading in coded], readers.process_of).values(), default=0)
    staging += 4 * min(max(decoded, largest), max(DECODED, 2 * largest))
    return Wave(tuple(item.reading for item in items), direct, tree, split, staging)


def split_packs(tensors: Sequence[ReadTensor], filled: Mapping[str, str], options: PlanOptions) -> TreePlan:
    """The moves from packed tensors, which every device has whole once their pack is gathered."""
    moves: dict[str, Move] = {}
    sources: dict[str, str] = {}
    for each in tensors:
        whole = Layout.tiled(each.mesh, each.stored.shape, each.stored.dtype, [()] * len(each.stored.shape))
        for name, move in each.moves.items():
            moves[name] = Move(whole, move.target, move.view, cast=move.cast)
            sources[name] = each.stored.name
    return find_tree_plan(moves, options, sources, {name: filled[name] for name in moves})


def count_asked(each: ReadTensor, readers: Readers) -> int:
    """The bytes that a loader reads of a tensor which reads in each process what its devices need."""
    asked = 0
    for move in each.moves.values():
        mesh, held = move.target.mesh, {part for axis in move.target.held for part in split_axis(axis)}
        copies = math.prod(axis.size for axis in readers.list_crossing(mesh) if axis not in held)
        asked += copies * dtypes.nbytes(math.prod(atom.size for atom in move.view.atoms), each.stored.dtype)
    return asked


def count_reads(
    items: Sequence[ReadItem], tensors: Mapping[str, ReadTensor], readers: Readers
) -> dict[int, ReaderFigures]:
    """The bytes, runs and files of each process.

    Where tiles are even, all processes of a mesh read as much, and none is listed for each tensor.
    """
    even: defaultdict[Mesh, list[int]] = defaultdict(lambda: [0, 0])
    files: defaultdict[Mesh, set[int]] = defaultdict(set)
    sizes, runs = Counter[int](), Counter[int]()
    alike: dict[Mesh, int] = {}
    for item in items:
        layout = item.reading.layout
        mesh = layout.mesh
        if mesh not in alike:  # The processes of a mesh, 0 where some have other parts of it than others.
            count = math.prod(axis.size for axis in readers.list_crossing(mesh))
            alike[mesh] = count if count == len({*readers.list_processes(mesh)}) else 0
        members = [tensors[name] for name in item.reading.tensors]
        for each in members:
            if not isinstance(each.stored.pieces, ChunkGrid):
                files[mesh].update(piece.file for piece in each.stored.pieces)
        # Coded bytes are read in proportion to the elements that they are.
        ratio = sum(each.stored.stored_bytes for each in members) / max(1, sum(each.stored.nbytes for each in members))
        if layout.even and not item.tensors and alike[mesh]:
            even[mesh][0] += round(layout.nbytes(math.prod(layout.shape)) * ratio / alike[mesh])
            even[mesh][1] += members[0].placed.runs
            continue
        parts, reads = count_tiles(item, members)
        # Each distinct tile of a process once.
        tiles: dict[tuple[int, ...], None] = dict.fromkeys(
            zip(readers.list_processes(mesh), *piece_columns(layout), strict=True)
        )
        for process, *numbers in tiles:
            if size := math.prod(of[number] for of, number in zip(parts, numbers, strict=True)):
                sizes[process] += round(layout.nbytes(size) * ratio)
                runs[process] += math.prod(of[number] for of, number in zip(reads, numbers, strict=True))
    for mesh, (size, count) in even.items():
        for process in dict.fromkeys(readers.list_processes(mesh)):
            sizes[process] += size
            runs[process] += count
    # Each process is taken to read of each file that its mesh reads: a few of them may have no part of a small one.
    held: defaultdict[int, set[int]] = defaultdict(set)
    for mesh, numbers in files.items():
        for process in dict.fromkeys(readers.list_processes(mesh)):
            held[process] |= numbers - {NO_FILE}
    return {process: ReaderFigures(sizes[process], runs[process], len(held[process])) for process in sorted(sizes)}


def count_tiles(item: ReadItem, members: Sequence[ReadTensor]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """For each dim of a reading and each of its pieces, elements and reads: those of a tile are products of them."""
    layout = item.reading.layout
    extents = [piece_extents(dim) for dim in layout.dims]
    if not item.tensors:
        first = members[0]
        units = list_units(first.stored)
        if is_raw(first.stored) or item.reading.split > 1:
            # Of a raw tensor all dims but the first are as if in one read, which the first has all of.
            return [*extents], [[first.placed.runs if at == 0 else 1] * len(each) for at, each in enumerate(extents)]
        counts = [[-(-part // unit) for part in each] for each, unit in zip(extents, units, strict=True)]
        return [*extents], [*counts]
    # What lies between the tensors of a slot of a pack, or behind them, is read by nobody.
    slot, filled, reads = layout.tile_shape[0], Counter[int](), Counter[int]()
    before = (NO_FILE, 0)
    for each, part in zip(members, item.reading.packed, strict=True):
        end = part.start + math.prod(each.stored.shape)
        for number in range(part.start // slot, -(-end // slot)):
            # A neighbour of the tensor before it goes on in the same run.
            goes_on = before == each.at and part.start > number * slot and is_flat(each.stored)
            filled[number] += min(end, (number + 1) * slot) - max(part.start, number * slot)
            reads[number] += 0 if goes_on else len(each.stored.pieces)
        before = each.at[0], each.at[1] + each.stored.stored_bytes
    numbers = range(len(extents[0]))
    return [[filled[number] for number in numbers]], [[reads[number] for number in numbers]]

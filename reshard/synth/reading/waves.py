"""`plan_reading`: stored tensors in the layouts in which they are read, in waves, each with its tree of moves.

tensors        each in the layout that `as_read` chooses
packs          small ones as one array, gathered once and split on each device
waves          in the order of files, as many bytes as a wave may stage
trees          what a wave moves is an ordinary `plan_tree`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reshard.plans.load_plan import DirectRead, LoadPlan, ReaderFigures, Reading, Wave, sum_by_process
from reshard.synth.network import Network
from reshard.synth.options import PlanOptions
from reshard.synth.planner import find_tree_plan
from reshard.synth.reading.as_read import Readers, ReadOptions, place_readers
from reshard.types.move import Move
from reshard.types.stored import Stored

WAVE = 64 << 20
"""The bytes of readings in a process that a wave stages, where nobody says."""


@dataclass(frozen=True)
class ReadItem:
    """A reading and the moves from it, by name, with the target that each fills."""

    reading: Reading
    moves: Mapping[str, Move]
    fills: Mapping[str, str]
    at: tuple[int, int]


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
    process.
    """
    # Moves by the tensor that they read: it is read once, whatever their number.
    readers = Readers(process_of)
    of_tensor: dict[str, list[str]] = {}
    for name in moves:
        of_tensor.setdefault(sources.get(name, name), []).append(name)
    items: list[ReadItem] = []
    for tensor, names in of_tensor.items():
        # Several moves may read one tensor: it is read near where most of it goes.
        largest = max(names, key=lambda name: moves[name].target.tile_bytes)
        layout = place_readers(stored[tensor], moves[largest], readers, options)
        read = {name: Move(layout, moves[name].target, moves[name].view, cast=moves[name].cast) for name in names}
        first = stored[tensor].pieces[0] if len(stored[tensor].pieces) else None
        at = (0, 0) if first is None else (first.file, first.offset)
        items.append(ReadItem(Reading(tensor, tensor, None, layout), read, {n: fills.get(n, n) for n in names}, at))
    # In the order of files, so that what is read next is what comes next in them.
    items.sort(key=lambda item: item.at)
    waves: list[Wave] = []
    staged: list[ReadItem] = []
    for item in items:
        staged.append(item)
        if count_staging(staged, process_of) > (options.wave or WAVE) and len(staged) > 1:
            waves.append(make_wave(staged[:-1], process_of, network))
            staged = [item]
    if staged:
        waves.append(make_wave(staged, process_of, network))
    targets = {fills.get(name, name): move.target for name, move in moves.items()}
    read = {name: stored[name] for name in of_tensor}
    totals = sum_by_process((item.reading.layout for item in items), process_of)
    figures = {process: ReaderFigures(size, len(items), 1) for process, size in totals.items()}
    files = {piece.file for each in read.values() for piece in each.pieces[:1]}
    stored_bytes = sum(each.stored_bytes for each in read.values())
    return LoadPlan(targets, tuple(waves), process_of, figures, stored_bytes, stored_bytes, len(files))


def count_staging(items: Sequence[ReadItem], process_of: Mapping[int, int] | None) -> int:
    """The bytes of readings that are not read straight into targets, in the process that has most of them."""
    layouts = [item.reading.layout for item in items if not find_direct(item)]
    return max(sum_by_process(layouts, process_of).values(), default=0)


def find_direct(item: ReadItem) -> DirectRead | None:
    """How a reading is read straight into its target, None if it has to move."""
    if len(item.moves) != 1:
        return None
    (name, move), layout = next(iter(item.moves.items())), item.reading.layout
    return DirectRead(item.reading.name, item.fills[name]) if move.plain and move.target == layout else None


def make_wave(items: Sequence[ReadItem], process_of: Mapping[int, int] | None, network: Network | None) -> Wave:
    """The wave of some readings: what is read straight into targets, and the tree of the other moves."""
    # A tree never sees what stays where it was read: its bytes are read into the result, and staged nowhere.
    direct = [each for each in map(find_direct, items) if each is not None]
    there = {each.reading for each in direct}
    moving = [item for item in items if item.reading.name not in there]
    moves = {name: move for item in moving for name, move in item.moves.items()}
    tree = None
    if moves:
        sources = {name: item.reading.name for item in moving for name in item.moves}
        targets = {name: target for item in moving for name, target in item.fills.items()}
        tree = find_tree_plan(moves, PlanOptions(network=network), sources, targets)
    return Wave(tuple(item.reading for item in items), tuple(direct), tree, None, count_staging(items, process_of))

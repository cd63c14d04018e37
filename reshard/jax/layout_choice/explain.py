"""A choice of layouts in the words that people use: what was chosen, what still moves, and what does not have to.

chosen
  batch                batch over x
  params/*/w1          by columns over y; gathered over x for each of 2 uses; gradient reduce-scattered over x
  params/layers/w2     by dim 1 over y; gathered over y slice by slice, for each of 2 uses
the dearest moves
  dot_general f.py:12  all-reduced over y, 8.0 MiB received, 24 times, 1.2 ms; without it the step takes 3.0 ms longer
what FSDP moves beside it
  params/*/w2          gathered over x, 105.0 MiB received, 2.1 ms; here 0 s
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from rich.console import Console

from reshard.errors import join_first
from reshard.show import terminal
from reshard.synth.choice.assess import PlacedMove, assess_splits, list_placed_moves
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.prices import MovePrices
from reshard.synth.choice.problem import Assignment, Node, Problem, access_layout
from reshard.synth.choice.splits import list_splits
from reshard.types.layout import Layout
from reshard.types.units import bytes_text, counted, listed, seconds_text

MOST_LISTED = 3  # Dearest moves, and patterns of names in one line.
_MOST_TRIED = 24  # Other splits of a node, of which the best says what a move is worth.
_HOPS_TO_GRADIENT = 8  # Operations between a sum of gradients and the next value of a parameter.
_VIEWING = frozenset(("while", "dynamic_slice", "slice", "reshape", "optimization_barrier", "convert"))
_FREE = re.compile(r"sliced (?!.*(turned|gathered))")  # What a device has already, it slices for nothing.


@dataclass(frozen=True)
class GroupWords:
    """Arguments that lie alike and are used alike: patterns of their names, how many there are, and how they lie."""

    names: tuple[str, ...]
    count: int
    words: str

    def __str__(self) -> str:
        return f"{join_first(self.names, MOST_LISTED)}{f' ({self.count})' if self.count > len(self.names) else ''}"


@dataclass(frozen=True)
class Explanation:
    """What was chosen, by group of arguments, the moves that stay, those of the `rival`, and what memory would buy."""

    groups: tuple[GroupWords, ...]
    moves: tuple[tuple[str, str], ...]
    rival: str
    avoided: tuple[tuple[str, str], ...]
    memory: str

    def __str__(self) -> str:
        return terminal.print_plain(lambda out: show_explanation(out, self))

    def to_dict(self) -> dict[str, Any]:
        """The same as data for JSON."""
        rows = {"moves": self.moves, "avoided": self.avoided}
        named = {key: [{"tensor": name, "words": words} for name, words in each] for key, each in rows.items()}
        return asdict(self) | named


def show_explanation(out: Console, told: Explanation) -> None:
    """Prints an explanation, part by part."""
    parts = [("chosen", [(str(group), group.words) for group in told.groups])]
    parts.append(("the dearest moves" if told.moves else "nothing moves", list(told.moves)))
    parts += [(f"what {told.rival} moves beside it", list(told.avoided))] if told.avoided else []
    for title, rows in parts:
        terminal.print_paragraph(out, title, style=terminal.NAME)
        terminal.print_facts(out, rows)
    terminal.print_paragraph(out, told.memory)


def explain_choice(
    problem: Problem,
    chosen: Assignment,
    arguments: Sequence[tuple[str, int]],
    prices: MovePrices,
    speed: DeviceSpeed,
    rival: tuple[str, Assignment] | None = None,
    budgets: Sequence[tuple[int, Assignment]] = (),
    state: Collection[int] = (),
) -> Explanation:
    """Says what was chosen and why; `arguments` are names with the numbers of their tensors.

    `rival` is an assignment to compare with, by its name; `budgets` are larger budgets with what would be chosen;
    `state` has the tensors of arguments that results replace, also where these lie otherwise.
    """
    moves = list_placed_moves(problem, chosen.splits, chosen.anew)
    costs = {move: move.times * prices.price(*move.ends).seconds for move in moves}
    groups, names = _group_arguments(problem, chosen, arguments, moves, state)
    # Moves that are told alike count as one: those of repeated layers, and of arrays of one size.
    alike: defaultdict[tuple[str, str, str], list[PlacedMove]] = defaultdict(list)
    for move in moves:
        price = prices.price(*move.ends)
        if price.received_bytes:  # A slice of what a device has is a copy.
            alike[_say_change(move), bytes_text(price.received_bytes), seconds_text(price.seconds)].append(move)
    shown: list[tuple[str, str]] = []
    dearest = sorted(alike.items(), key=lambda item: -sum(costs[move] for move in item[1]))
    for (change, received, _), each in dearest[:MOST_LISTED]:
        runs = sum(move.times for move in each)
        words = f"{change}, {received} received{f', {runs} times' if runs > 1 else ''}, "
        words += f"{seconds_text(sum(costs[move] for move in each))} in all"
        others = (_weigh_move(problem, chosen, move, costs[move], prices, speed) for move in each[:MOST_LISTED])
        named = join_first([*dict.fromkeys(names[move.tensor] for move in each)], MOST_LISTED).replace(
            ", gradient of ", ", "
        )
        shown.append((named, words + next(filter(None, others), "")))
    avoided = () if rival is None else _list_avoided(problem, costs, names, rival[1], prices)
    memory = _say_memory(chosen, budgets)
    return Explanation(groups, tuple(shown), rival[0] if rival else "", avoided, memory)


def describe_split(layout: Layout, batch: bool = False) -> str:
    """How an array lies; the first dim of a `batch` is called so.

    >>> describe_split(Layout.parse("f32[16, {x}{y}2]", "x=4,y=2"))
    'by columns over x, y'
    >>> describe_split(Layout.parse("s32[{x}4, 8]", "x=4,y=2"), batch=True)
    'batch over x'
    """
    names = ["in pieces"] if layout.ndim == 1 else ["by rows", "by columns"]
    # Rows and columns are words for matrices only.
    if layout.ndim > 2:
        names = [f"by dim {at}" for at in range(layout.ndim)]
    if batch:
        names[0] = "batch"
    words: list[str] = []
    for name, dim in zip(names, layout.dims, strict=False):
        axes = [layout.mesh.spell(digit.axis) for digit in dim.digits if digit.axis is not None]
        if not axes:
            continue
        # A local digit above a held one: each device has several runs of the dim, as after a reshape.
        dealt = " in several runs" if dim.digits[0].axis is None else ""
        words.append(f"{name}{dealt} over {', '.join(axes)}")
    if layout.partial:
        words.append(f"a {layout.reduction} over {', '.join(map(layout.mesh.spell, layout.partial))}")
    # Axes that split nothing are those along which devices have copies: not said, as in a PartitionSpec.
    return listed(words) or "whole on every device"


def describe_change(source: Layout, target: Layout) -> str:
    """What a move does, by what becomes of each axis.

    >>> describe_change(Layout.parse("f32[{x}4, 8] + sum{y}", "x=4,y=2"), Layout.parse("f32[16, {y}4]", "x=4,y=2"))
    'reduce-scattered over y, gathered over x'
    """
    before, after = _place_axes(source), _place_axes(target)
    done: defaultdict[str, list[str]] = defaultdict(list)
    for axis in dict.fromkeys([*before, *after]):
        old, new = before.get(axis), after.get(axis)
        if old == new:
            continue
        # A sum whose axis comes to hold a dim needs no more than its own part of the result.
        if old == "sum":
            kind = "all-reduced" if new is None else "reduce-scattered"
        elif new is None:
            kind = "gathered"
        elif old is None:
            kind = "sliced"
        else:
            kind = "turned"
        done[kind].append(axis)
    words = [
        f"turned to lie {describe_split(target)}" if kind == "turned" else f"{kind} over {', '.join(done[kind])}"
        for kind in ("reduce-scattered", "all-reduced", "sliced", "turned", "gathered")
        if done[kind]
    ]
    return ", ".join(words) or "dealt out in another order"


def _place_axes(layout: Layout) -> dict[str, int | str]:
    places: dict[str, int | str] = {layout.mesh.spell(axis): "sum" for axis in layout.partial}
    for at, dim in enumerate(layout.dims):
        places |= {layout.mesh.spell(digit.axis): at for digit in dim.digits if digit.axis is not None}
    return places


def name_pattern(name: str) -> str:
    """A name with stars for the numbers of its containers, those of layers: `params/layers/*/w1`."""
    return re.sub(r"(?<=\D)\d+(?=/)|(?<=/)\d+$", "*", name)


def _find_views(problem: Problem, arguments: Sequence[tuple[str, int]]) -> dict[int, int]:
    """The tensors that are an argument or slices of its first dim, as loops carry and cut it, with the argument's."""
    views = {tensor: tensor for _, tensor in arguments}
    readers: defaultdict[int, list[Node]] = defaultdict(list)
    for node in problem.nodes:
        for tensor in {access.tensor for access in node.reads}:
            readers[tensor].append(node)
    reached = list(views)
    for tensor in reached:
        shape = problem.tensors[views[tensor]].shape
        for node in readers[tensor]:
            if node.name.split()[0] not in _VIEWING or any(access.tensor != tensor for access in node.reads):
                continue
            for made in (write.tensor for write in node.writes):
                if made not in views and problem.tensors[made].shape in _list_slices(shape):
                    views[made] = views[tensor]
                    reached.append(made)
    return views


def _list_slices(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [shape, shape[1:], (1, *shape[1:])]


def _group_arguments(
    problem: Problem,
    chosen: Assignment,
    arguments: Sequence[tuple[str, int]],
    moves: Iterable[PlacedMove],
    state: Collection[int],
) -> tuple[tuple[GroupWords, ...], list[str]]:
    """Groups arguments that are described alike, the group with the most bytes first; and what tensors are called."""
    names = [name_pattern(tensor.name) for tensor in problem.tensors]
    views = _find_views(problem, arguments)
    writers = {access.tensor: at for at, node in enumerate(problem.nodes) for access in node.writes}
    by_tensor: defaultdict[int, list[PlacedMove]] = defaultdict(list)
    sliced: defaultdict[int, list[PlacedMove]] = defaultdict(list)
    for move in moves:
        by_tensor[move.tensor].append(move)
    has_state = bool(state) or any(problem.nodes[writers[tensor]].reads for _, tensor in arguments)
    groups: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    gradients: set[PlacedMove] = set()
    readers = Counter(access.tensor for node in problem.nodes for access in node.reads)
    # A gradient leads to the next moments of an optimizer, too: it is told of the parameter, which has more readers.
    for name, tensor in sorted(arguments, key=lambda argument: -readers[argument[1]]):
        node = problem.nodes[writers[tensor]]
        [write] = [access for access in node.writes if access.tensor == tensor]
        layout = access_layout(problem, node, write, chosen.splits[writers[tensor]])
        # In a step that has state, what no result replaces is the data of one call.
        words = [describe_split(layout, batch=has_state and not node.reads and tensor not in state and layout.ndim > 0)]
        for view in [view for view, whose in views.items() if whose == tensor and view != tensor]:
            names[view] = name_pattern(name)
            if problem.tensors[view].shape == layout.shape:
                by_tensor[tensor] += by_tensor[view]
            else:
                sliced[tensor] += by_tensor[view]
        words += _say_uses(by_tensor[tensor])
        slices = Counter(map(_say_change, sliced[tensor]))
        words += [
            f"{change} slice by slice{f', for each of {count} uses' if count > 1 else ''}"
            for change, count in slices.items()
            if not _FREE.match(change)
        ]
        following = [access.tensor for access in node.reads]
        words += [f"next value {_say_change(move)}" for after in following for move in by_tensor[after]]
        found = _find_gradient(problem, following, writers, by_tensor) - gradients
        words += dict.fromkeys(f"gradient {_say_change(move)}" for move in found)
        gradients |= found
        for move in found:
            names[move.tensor] = f"gradient of {name_pattern(name)}"
        groups["; ".join(words)].append((name, layout.size))
    ordered = sorted(groups.items(), key=lambda item: -sum(size for _, size in item[1]))
    patterns = Counter(one for members in groups.values() for one in {name_pattern(name) for name, _ in members})
    told: list[GroupWords] = []
    for words, members in ordered:
        # A pattern says which arrays are meant only if all of them are here.
        called = (name_pattern(name) if patterns[name_pattern(name)] == 1 else name for name, _ in members)
        told.append(GroupWords(tuple(dict.fromkeys(called)), len(members), words))
    return tuple(told), names


def _say_uses(moves: Sequence[PlacedMove]) -> list[str]:
    """How the readers of an argument get it, where not as it lies."""
    uses: defaultdict[str, list[PlacedMove]] = defaultdict(list)
    for move in moves:
        uses[_say_change(move)].append(move)
    words: list[str] = []
    for change, alike in uses.items():
        # A copy that is kept is made once for all that read it; another one in every trip of the loop around it.
        count = sum(len(move.reads) if move.kept else move.times for move in alike)
        if _FREE.match(change):
            words.append(change)
        elif count == 1:
            words.append(f"{change} for its use")
        elif len(alike) == 1 and alike[0].kept:
            words.append(f"{change} once, for {counted(count, 'use')}")
        else:
            words.append(f"{change} for each of {counted(count, 'use')}")
    return words


def _say_change(move: PlacedMove) -> str:
    return describe_change(move.source, move.target)


def _find_gradient(
    problem: Problem,
    following: Sequence[int],
    writers: Mapping[int, int],
    by_tensor: Mapping[int, Sequence[PlacedMove]],
) -> set[PlacedMove]:
    """The sums that are finished on the way to an argument's next value: of arrays of its shape, or of one layer's."""
    # Gradients of matrices are often made transposed.
    sizes = [sorted(part) for tensor in following for part in _list_slices(problem.tensors[tensor].shape)]
    reached = following
    # Backwards from the next value, through clipping, moments and decay, until a sum is finished.
    for _ in range(_HOPS_TO_GRADIENT):
        reads = [access.tensor for tensor in reached for access in problem.nodes[writers[tensor]].reads]
        reached = [tensor for tensor in dict.fromkeys(reads) if sorted(problem.tensors[tensor].shape) in sizes]
        found = {move for tensor in reached for move in by_tensor.get(tensor, ()) if move.source.partial}
        if found:
            return found
    return set()


def _weigh_move(
    problem: Problem, chosen: Assignment, move: PlacedMove, cost: float, prices: MovePrices, speed: DeviceSpeed
) -> str:
    """What the step takes if one side of a move is split so that nothing moves there, in the best way of doing so."""
    [writer] = [at for at, node in enumerate(problem.nodes) if any(each.tensor == move.tensor for each in node.writes)]
    readers = {node for node, _ in move.reads}
    others: list[Assignment] = []
    # Where several nodes read what is moved, no change of one of them spares the move.
    for at in [writer, *(readers if len(readers) == 1 else ())]:
        node, goal = problem.nodes[at], move.target if at == writer else move.source
        ends = [each for each in (node.writes if at == writer else node.reads) if each.tensor == move.tensor]
        fitting = (
            split
            for split in list_splits(node, problem.mesh)
            if all(access_layout(problem, node, each, split) == goal for each in ends)
        )
        # Layers that are tied stay alike: each of them changes, and the price is of all.
        alike = {
            other for other, each in enumerate(problem.nodes) if other == at or (node.tie and each.tie == node.tie)
        }
        for split in islice(fitting, _MOST_TRIED):
            splits = [split if other in alike else old for other, old in enumerate(chosen.splits)]
            others.append(assess_splits(problem, splits, chosen.anew, prices, speed))
    best = min(others, key=lambda other: other.seconds, default=None)
    if best is None:
        return ""
    if chosen.seconds < best.seconds < chosen.seconds + 0.1 * cost:
        return "; other moves in its place take as long"
    if best.seconds > chosen.seconds:
        return f"; without it the step takes {seconds_text(best.seconds - chosen.seconds)} longer"
    return f"; without it the peak is {bytes_text(best.peak_bytes)}" if best.peak_bytes > chosen.peak_bytes else ""


def _list_avoided(
    problem: Problem,
    costs: Mapping[PlacedMove, float],
    names: Sequence[str],
    rival: Assignment,
    prices: MovePrices,
) -> tuple[tuple[str, str], ...]:
    """Where another assignment spends the most more on moves, by the names of what it moves."""
    here: defaultdict[str, float] = defaultdict(float)
    for move, seconds in costs.items():
        here[names[move.tensor]] += seconds
    there: defaultdict[str, float] = defaultdict(float)
    changes: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for move in list_placed_moves(problem, rival.splits, rival.anew):
        name, price = names[move.tensor], prices.price(*move.ends)
        there[name] += move.times * price.seconds
        words = _say_change(move)
        changes[name][words] = changes[name].get(words, 0) + move.times * price.received_bytes
    # By the sums of all moves of such a name: a rival may move less of one kind and more of another.
    more = [name for name in there if there[name] > here[name] and any(changes[name].values())]
    more.sort(key=lambda name: here[name] - there[name])
    rows: list[tuple[str, str]] = []
    for name in more[:MOST_LISTED]:
        dearest = max(changes[name], key=lambda words: changes[name][words])
        received = bytes_text(sum(changes[name].values()))
        rows.append(
            (name, f"{dearest}, {received} received, {seconds_text(there[name])}; here {seconds_text(here[name])}")
        )
    return tuple(rows)


def _say_memory(chosen: Assignment, budgets: Sequence[tuple[int, Assignment]]) -> str:
    said = f"{bytes_text(chosen.peak_bytes)} at the peak of a device, by the model"
    for budget, other in budgets:
        # A smaller gain is within the gap of the choice.
        if other.seconds < 0.99 * chosen.seconds:
            faster = 1 - other.seconds / chosen.seconds
            said += f"; with a budget of {bytes_text(budget)} the step would take {faster:.0%} less time"
        else:
            said += f"; a budget of {bytes_text(budget)} would gain nothing"
    return said

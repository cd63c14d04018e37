"""The typing rules: one per collective, each a judgement `kind : operand -> result`.

    slice            local digits become held by unused sub-axes
    all_gather       held digits become local
    all_to_all       held digits become local, and local digits held by the same sub-axes
    permute          the same tiles on other devices
    exchange         any layout to any layout, as rounds of boxes
    reduce_scatter   partial sub-axes come to hold local digits
    all_reduce       partial sub-axes become replicated

A rule refuses with `StepError`, or answers what the step costs: bytes received by the worst
device, launches (collective calls) and scratch bytes. Checking a plan, its history, bytes and
peak memory are folds over `check_step`; there is no second place that knows what a collective does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import NamedTuple

from reshard.errors import StepError
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.pair import exchange_stats, messages
from reshard.types.pair.pieces import largest, pieces
from reshard.types.pair.refine import Refinement, refine, same_devices
from reshard.types.reductions import all_reduce_elements
from reshard.types.rules import bounds, tile_view
from reshard.types.rules.parts import split_step


class Cost(NamedTuple):
    """What one step costs the worst device: bytes received, collective calls, bytes of scratch."""

    received: int
    launches: int
    scratch: int


class StepMode(NamedTuple):
    """How a step runs: in one go, or in `parts`, one after the other. For an exchange, `chunk` caps the
    elements of one message, None for no cap; `in_place` lets the result overwrite the operand.
    """

    chunk: int | None = None
    in_place: bool = False
    parts: int = 1


FREE = Cost(0, 0, 0)
PLAIN = StepMode()
Rule = Callable[[Layout, Layout, StepMode], Cost]


@lru_cache(maxsize=8192)
def check_step(kind: str, operand: Layout, result: Layout, mode: StepMode = PLAIN) -> Cost:
    """The cost of a well-typed step.

    Raises `StepError` for a step that the rule of its kind does not derive.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> check_step("all_gather", Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh))
    Cost(received=48, launches=1, scratch=0)
    """
    rule = RULES.get(kind)
    if rule is None:
        raise StepError(f"unknown step {kind!r}; the steps are {', '.join(RULES)}")
    if operand.shape != result.shape or operand.dtype != result.dtype:
        raise refusal(kind, operand, result, "a step keeps the global shape and the dtype")
    if not _one_set(operand.mesh, result.mesh):
        raise refusal(kind, operand, result, "a step keeps the devices")
    if operand.partial and result.partial and operand.reduction != result.reduction:
        raise refusal(kind, operand, result, "a step keeps the reduction of what stays partial")
    if mode == PLAIN:
        return rule(operand, result, mode)
    if mode.parts != 1:
        return _in_parts(kind, operand, result, mode)
    if kind != "exchange" or (mode.chunk is not None and mode.chunk < 1):
        raise refusal(kind, operand, result, f"{mode}: only an exchange is chunked, by at least 1 element, or in place")
    return rule(operand, result, mode)


def _in_parts(kind: str, operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Each part is a step on a smaller array, between a copy out of the operand and one into the result."""
    part = split_step(operand, result, mode.parts) if mode.parts > 1 and mode == StepMode(parts=mode.parts) else None
    if part is None:
        raise refusal(kind, operand, result, f"{mode}: it cannot be done in so many parts; see parts.counts()")
    one = check_step(kind, part.operand, part.result)
    staged = part.operand.tile_bytes + part.result.tile_bytes
    return Cost(one.received * mode.parts, one.launches * mode.parts, one.scratch + staged)


def _one_set(a: Mesh, b: Mesh) -> bool:
    return same_devices(a, b) or (a.size == b.size and set(a.devices) == set(b.devices))


def _slice(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    r = _even("slice", operand, result)
    if r.gathered or r.swapped or set(scatter_order(r)) & r.used_before:
        raise refusal("slice", operand, result, "only local digits may change, and only to sub-axes not in use")
    _keep_partial("slice", operand, result)
    return FREE


def _all_gather(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    r = _even("all_gather", operand, result)
    if r.sliced or r.swapped:
        raise refusal("all_gather", operand, result, "only held digits may change, and only to local")
    _keep_partial("all_gather", operand, result)
    size = tile_view.before(operand, r).elements
    received = tile_view.after(result, r, gather_order(r))
    scratch = 0 if received.in_place else operand.nbytes(received.elements)
    return Cost(operand.nbytes((r.pieces - 1) * size), 1, scratch)


def _all_to_all(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    r = _even("all_to_all", operand, result)
    order = scatter_order(r)
    if r.swapped or set(order) != {a.src for a in r.gathered}:
        raise refusal(
            "all_to_all", operand, result, "the sub-axes that release digits must be those that take local ones"
        )
    _keep_partial("all_to_all", operand, result)
    sent, received = tile_view.before(operand, r, order), tile_view.after(result, r, order)
    share = sent.elements // sent.count
    pack = 0 if sent.in_place else sent.elements
    unpack = 0 if received.in_place else received.elements
    return Cost(
        operand.nbytes(sent.elements - share),
        1,
        _staging(operand.nbytes(pack), operand.nbytes(unpack), result.tile_bytes),
    )


def _permute(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    if _local_places(operand) != _local_places(result) or operand.partial != result.partial:
        raise refusal("permute", operand, result, "the tiles must be the same ones, only on other devices")
    return Cost(operand.tile_bytes, 1, 0)


def _exchange(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    if operand.partial != result.partial:
        raise refusal("exchange", operand, result, "an exchange moves data and reduces nothing")
    if mode.in_place:
        return _exchange_in_place(operand, result, mode.chunk)
    size = exchange_size(operand, result)
    cap = size.message if mode.chunk is None else min(mode.chunk, size.message)
    rounds, piece = size.cut(cap)
    # A piece that is one run of both tiles goes from memory to memory, unstaged.
    scratch = 0 if cap <= size.run else 2 * operand.nbytes(piece)
    return Cost(bounds.lower_bound(operand, result), rounds, scratch)


def _exchange_in_place(operand: Layout, result: Layout, chunk: int | None) -> Cost:
    """Each message is received where the last one sent made room; a single element needs no buffer."""
    r = refine(operand, result)
    if r is None or not r.exact:
        raise refusal("exchange", operand, result, "only even layouts with a common refinement go in place")
    turns = (r.pieces if r.swapped else r.pieces - 1) if r.common else 0
    count, piece = in_place_cut(r.common, chunk)
    scratch = 2 * operand.nbytes(piece) if turns and piece > 1 else 0
    return Cost(bounds.lower_bound(operand, result), turns * count, scratch)


def in_place_cut(message: int, chunk: int | None) -> tuple[int, int]:
    """How many pieces a message is sent in, and the elements of one.

    >>> in_place_cut(10, 4), in_place_cut(10, None)
    ((3, 4), (1, 10))
    """
    count = -(-message // min(chunk or message, message)) if message else 0
    return count, -(-message // count) if count else 0


def _reduce_scatter(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    r = _even("reduce_scatter", operand, result)
    order = scatter_order(r)
    if r.gathered or r.swapped or not order or set(order) != {f.stride for f in r.reduced}:
        raise refusal(
            "reduce_scatter", operand, result, "partial sub-axes must come to hold local digits, and nothing else"
        )
    sent = tile_view.before(operand, r, order)
    share = sent.elements // sent.count
    return Cost(operand.nbytes(sent.elements - share), 1, 0 if sent.in_place else operand.nbytes(sent.elements))


def _all_reduce(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    r = _even("all_reduce", operand, result)
    if r.sliced or r.gathered or r.swapped or not r.reduced:
        raise refusal("all_reduce", operand, result, "partial sub-axes must become replicated, and nothing else")
    group = math.prod(f.size for f in r.reduced)
    elements = math.prod(operand.tile_shape)
    return Cost(operand.nbytes(all_reduce_elements(elements, group)), 1, 0)


RULES: dict[str, Rule] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "exchange": _exchange,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}


class ExchangeSize(NamedTuple):
    """An exchange's rounds, its largest message and least run of neighbours in elements, and, for
    cutting it, the loads of its devices.
    """

    rounds: int
    message: int
    run: int
    loads: Callable[[], Collection[messages.Load]]

    def cut(self, cap: int) -> tuple[int, int]:
        """Rounds of messages of at most `cap` elements, and the elements of the largest one."""
        if cap >= self.message:
            return self.rounds, self.message
        loads = self.loads()
        rounds = max(sum(n * pieces(box, cap) for n, shape in load for box in shape) for load in loads)
        return rounds, max(largest(box, cap) for load in loads for _, shape in load for box in shape)


def exchange_size(operand: Layout, result: Layout) -> ExchangeSize:
    """The rounds and messages of an exchange; even ones in closed form, without their devices.

    An even exchange sends one message of the same size in every round: V rounds if a digit moves
    between holders, else V - 1, since then every device holds one share already.
    """
    r = refine(operand, result)
    if r is None or not r.exact:
        rounds, message = exchange_stats.rounds(operand, result), exchange_stats.largest_message(operand, result)
        run = exchange_stats.shortest_run(operand, result)
        return ExchangeSize(rounds, message, run, lambda: messages.loads(operand, result))
    extents = tuple(a.radix for a in r.atoms if a.src is None and a.dst is None)
    rounds = (r.pieces if r.swapped else r.pieces - 1) if r.common else 0
    return ExchangeSize(rounds, r.common, _run(r), lambda: (((rounds, (extents,)),),))


def _run(r: Refinement) -> int:
    """Elements that lie next to each other in both tiles: minor digits that are local on both sides."""
    run = 1
    for at in range(len(r.atoms) - 1, -1, -1):
        atom = r.atoms[at]
        if atom.src is None and atom.dst is None:
            run *= atom.radix
        elif atom.src is None or atom.dst is None:
            break
    return run


def scatter_order(r: Refinement) -> tuple[int, ...]:
    """The order of a group's members that lets blocks leave the operand without packing."""
    return tuple(a.dst for a in r.sliced if a.dst is not None)


def gather_order(r: Refinement) -> tuple[int, ...]:
    """The order of a group's members that lets blocks arrive in the result without unpacking."""
    return tuple(a.src for a in r.gathered if a.src is not None)


def _staging(pack: int, unpack: int, result: int) -> int:
    """Scratch of pack -> collective -> unpack; operand and result are counted already.

    Without unpacking, blocks arrive in the result itself, which lives beside the packed operand.
    With it, the packed operand is freed before the result is made.
    """
    return max(pack + unpack - result, unpack) if unpack else pack


def _even(kind: str, operand: Layout, result: Layout) -> Refinement:
    r = refine(operand, result)
    if r is None:
        raise refusal(kind, operand, result, "the two have no common refinement; use an exchange")
    return r


def _keep_partial(kind: str, operand: Layout, result: Layout) -> None:
    if operand.partial != result.partial:
        raise refusal(kind, operand, result, "this step reduces nothing; partial sub-axes must stay")


def _local_places(layout: Layout) -> list[tuple[int, list[tuple[int, int]]]]:
    """Per dim, the padded size and the local digits at their place values: the shape of its tiles."""
    found: list[tuple[int, list[tuple[int, int]]]] = []
    for dim in layout.dims:
        place, local = 1, list[tuple[int, int]]()
        for radix, axis in reversed(dim.digits):
            if axis is None and radix != 1:
                local.append((place, radix))
            place *= radix
        found.append((place, local))
    return found


def refusal(kind: str, operand: Layout, result: Layout, why: str) -> StepError:
    """The error for a step that is not well typed, with global and local shapes and the meshes."""
    meshes = str(operand.mesh) if operand.mesh == result.mesh else f"{operand.mesh} to {result.mesh}"
    return StepError(
        f"{kind}: {operand} -> {result} (global {operand.shape}, tile {operand.tile_shape} -> {result.tile_shape}, "
        f"mesh {meshes}): {why}"
    )

"""Which values of a step XLA for CPUs fuses into loops, and in which order its kernels run.

It makes what is cheap again in each loop that reads it, and stores what something else reads:

    a = x @ y      stored
    b = a * 2      stored: the product below reads it; the loop of d makes it again, as it needs no more than a
    c = b @ y
    e = exp(a)     costly, so it is made once: stored, as two loops read it
    d = b + e
    f = e - 1

What is made of several large values is only made again if all that reads it is a loop: else it would be read once more.
Large sums are kernels of a library, which take in what is made for them alone. What products read is stored, if in
another order of its dims as a copy, which a loop makes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from reshard.jax.layout_choice.step_flow import RETURN, FlowOp, StepFlow, name_operations
from reshard.jax.layout_choice.trace_step import PRODUCTS

FUSED = name_operations(
    "abs add and atan2 bitcast_convert broadcast_in_dim cbrt ceil clamp compare complex convert cosine divide "
    "dynamic_slice exponential exponential_minus_one floor imag iota is_finite log log_plus_one logistic maximum "
    "minimum multiply negate not or popcnt power real reduce_precision remainder reverse round_nearest_afz "
    "round_nearest_even rsqrt select shift_left shift_right_arithmetic shift_right_logical sign sine slice sqrt "
    "subtract tan tanh xor"
) | frozenset(
    f"chlo.{name}"
    for name in ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "digamma", "erf", "erf_inv", "erfc",
                 "lgamma", "sinh", "square", "tan")
)  # fmt: skip
_RESHAPE, _SUM = "stablehlo.reshape", "stablehlo.reduce"
_TRANSPOSE, _CONVERT = "stablehlo.transpose", "stablehlo.convert"
_NARROW = ("bfloat16", "float16")
_SPREAD = name_operations("broadcast_in_dim constant iota")
_LOOPS = FUSED | name_operations("concatenate dynamic_update_slice gather pad reduce reshape transpose")
_COSTLY = (
    frozenset(name for name in FUSED if name.startswith("chlo"))
    | name_operations("atan2 cbrt divide exponential exponential_minus_one gather log log_plus_one logistic power")
    | name_operations("remainder rsqrt sqrt tan tanh")
) - {"chlo.square"}
_LIBRARY_SUM = 4096  # elements of a device from which on a sum is the library's
_JOINED = 8  # operands up to which arrays are joined in a loop
_LONG_ROWS = 2048  # bytes from which on what is joined along rows is copied
_VIEWS = name_operations("broadcast_in_dim constant iota reshape reverse slice transpose")
_HOISTED = _LOOPS | name_operations("constant reverse") | {*PRODUCTS}
_APART = 4  # numbers from one operation of a step with its copies to the next: each may have two before it


def spell_copies(flow: StepFlow, devices: int) -> StepFlow:
    """A step with what XLA for CPUs makes of operands for products, as transposes and reshapes before them, and without
    the transposes that products take in.

        q @ k.T               k as it lies: products take the last two dims in either order
        "bqhd,bkhd->bhqk"     copies of q and k, whose batches b and h do not lie before all else
        x.T @ g, 3-d          a copy of x.T: what is summed over two dims is one dim in the middle
        x @ w, 3-d            x reshaped, which takes no memory, but is made by a loop if x is

    An operation `at` is numbered `space_number(at)`, and values as they were. What is the same in all trips of a loop
    is made before it.
    """
    flow = _hoist_invariants(flow)
    values = [replace(v, maker=space_number(v.maker), inside=space_number(v.inside)) for v in flow.values]
    ops: dict[int, FlowOp] = {}
    made: dict[tuple[str, int, tuple[int, ...], int], int] = {}
    for at, op in sorted(flow.ops.items()):
        operands, inside = list(op.operands), space_number(op.inside)
        for place, order in enumerate(op.orders if op.name != _TRANSPOSE else ()):
            operands[place], name = _read_operand(flow, op, place, devices)
            if not name:
                continue
            key = name, operands[place], () if name == _CONVERT else order, op.inside
            if key not in made:
                number, made[key] = space_number(at) - 1 - place, len(values)
                dtype = "float32" if name == _CONVERT else values[operands[place]].dtype
                values.append(replace(values[operands[place]], dtype=dtype, maker=number, inside=inside))
                ops[number] = FlowOp(number, name, (operands[place],), (made[key],), op.times, inside, number)
            operands[place] = made[key]
        number, last = space_number(at), space_number(op.last)
        ops[number] = replace(op, number=number, operands=tuple(operands), inside=inside, last=last)
    readers: list[list[tuple[int, int]]] = [[] for _ in values]
    # From the last on, as what nobody reads any more reads nothing.
    for at, op in sorted(ops.items(), reverse=True):
        if op.name == _TRANSPOSE and not readers[op.results[0]] and flow.readers[op.results[0]]:
            del ops[at]
            continue
        for place, operand in enumerate(op.operands):
            readers[operand].append((at, place))
    return replace(flow, values=tuple(values), ops=ops, readers=tuple(tuple(sorted(each)) for each in readers))


def _hoist_invariants(flow: StepFlow) -> StepFlow:
    """A step that makes before its loops what is the same in all of their trips; readers are as they were.

        while i < n:                     negative = index < 0        one more array that lives until the loop is over
            x = f(x, index < 0)          while i < n:
                                             x = f(x, negative)

    The operands are then values from outside of the loop, or those that it hands on unchanged. Constants and views cost
    nothing, so they leave a loop only with an operation that reads them.
    """
    carried = {loop.op.number: loop.arguments for loop in flow.loops}
    handed = {
        argument: start
        for loop in flow.loops
        for start, argument, returned in zip(loop.op.operands, loop.arguments, loop.returned, strict=True)
        if argument == returned
    }
    # In which loop or branch each could be made, and of what: outer ones have smaller numbers.
    moved: dict[int, tuple[int, tuple[int, ...]]] = {}
    inside, constant = [value.inside for value in flow.values], set[int]()
    readers: list[set[int]] = [set() for _ in flow.values]
    for at, op in sorted(flow.ops.items()):
        moved[at] = op.inside, op.operands
        constant.update(each for each in carried.get(at, ()) if handed.get(each) in constant)
        constant.update(op.results if op.name in _HOISTED and constant.issuperset(op.operands) else ())
        while op.name in _HOISTED and (loop := moved[at][0]) in carried:
            outer = tuple(handed.get(each, each) if inside[each] == loop else each for each in moved[at][1])
            if any(inside[each] >= loop for each in outer):
                break
            moved[at] = flow.ops[loop].inside, outer
        for each in op.results:
            inside[each] = moved[at][0]
        for each in (*op.operands, *moved[at][1]):
            readers[each].add(at)
    for at, op in sorted(flow.ops.items(), reverse=True):
        place, operands = moved[at]
        if place != op.inside and (op.name in _VIEWS or not constant.isdisjoint(op.results)):
            place = max(place, min((moved[each][0] for value in op.results for each in readers[value]), default=-1))
            moved[at] = place, op.operands if place == op.inside else operands
        for each in op.results:
            inside[each] = place
    return replace(
        flow,
        values=tuple(replace(value, inside=place) for value, place in zip(flow.values, inside, strict=True)),
        ops={at: replace(op, inside=moved[at][0], operands=moved[at][1]) for at, op in flow.ops.items()},
    )


def space_number(at: int) -> int:
    """The number of an operation in the step with its copies."""
    return at if at < 0 else _APART * at + _APART - 1


def _read_operand(flow: StepFlow, op: FlowOp, place: int, devices: int) -> tuple[int, str]:
    """From which value a product reads an operand, and what is made of it before, if anything."""
    operand, order, first = op.operands[place], op.orders[place], [*range(op.batches)]
    shape, is_dot = flow.values[operand].shape, op.name == "stablehlo.dot_general"
    root, whole = _skip_transposes(flow, op, place)
    # With batches first, one dim that is kept and one that is summed, operands are taken as they are, except that no
    # library sums the first dim of narrow floats.
    if is_dot and all(len(each) <= op.batches + 2 and [*each[: op.batches]] == first for each in op.orders):
        if flow.values[operand].dtype in _NARROW and _skip_transposes(flow, op, 0)[1][-1] < len(op.orders[0]) - 1:
            return root, _CONVERT
        whole = tuple(whole[order.index(dim)] for dim in range(len(order)))
        order = tuple(range(len(order)))
    # Batches of one on each device are dropped first; dims that are kept, or summed, become one.
    dropped = op.batches and math.prod(shape[dim] for dim in order[: op.batches]) <= devices
    reshape = _RESHAPE if is_dot and (dropped or len(order) > op.batches + 2) else ""
    if _is_in_order(flow.values[root].shape, whole):
        return root, reshape
    if is_dot and not reshape and [*whole[: op.batches]] == first:
        return root, ""
    return operand, reshape if _is_in_order(shape, order) else _TRANSPOSE


def _skip_transposes(flow: StepFlow, op: FlowOp, place: int) -> tuple[int, tuple[int, ...]]:
    """What transposes before a product are made of, and in which order the product takes its dims."""
    root, order = op.operands[place], op.orders[place]
    while (maker := flow.ops.get(flow.values[root].maker)) and maker.name == _TRANSPOSE and maker.inside == op.inside:
        root, order = maker.operands[0], tuple(maker.orders[0][dim] for dim in order)
    return root, order


def _is_in_order(shape: Sequence[int], order: Sequence[int]) -> bool:
    dims = [dim for dim in order if shape[dim] > 1]
    return dims == sorted(dims)


def fuse_loops(flow: StepFlow, devices: int) -> tuple[frozenset[int], Mapping[int, Sequence[int]]]:
    """The values that lie in memory of their own, and the readers that make each value again, or for themselves."""
    return _LoopFusion(flow, devices).fuse()


class _LoopFusion:
    """The decisions so far, from the last value to the first; what is decided of a value rests on its readers."""

    def __init__(self, flow: StepFlow, devices: int) -> None:
        self.flow = flow
        self.again: dict[int, list[int]] = {}
        self.once = set[int]()  # made once, though loops read it
        self.repeats = set[int]()  # of which a loop that makes it needs an element more than once
        # The kernels that make what an operation makes.
        self.kernels = {at: set() if op.results else {at} for at, op in flow.ops.items()}
        # Sums of the library, and what is made for one of them alone.
        self.summing = set[int]()
        for at, op in sorted(flow.ops.items(), reverse=True):
            readers = {reader for value in op.results for reader, _ in flow.readers[value]}
            large = op.name == _SUM and flow.values[op.operands[0]].elements >= _LIBRARY_SUM * devices
            if large or (op.name in FUSED | {_RESHAPE} and len(readers) == 1 and readers <= self.summing):
                self.summing.add(at)
        # All operations that one needs, itself among them, as bits.
        self.above: dict[int, int] = {-1: 0}
        for at, op in sorted(flow.ops.items()):
            self.above[at] = 1 << at
            for operand in op.operands:
                self.above[at] |= self.above.get(flow.values[operand].maker, 0)

    def fuse(self) -> tuple[frozenset[int], Mapping[int, Sequence[int]]]:
        flow, stored = self.flow, set[int]()
        for value in sorted(range(len(flow.values)), key=lambda each: flow.values[each].maker, reverse=True):
            maker, readers = flow.values[value].maker, {reader for reader, _ in flow.readers[value]}
            fusing = self.again[value] = self._list_fusing(value, readers)
            kernels = {kernel for reader in fusing for kernel in self.kernels[reader]}
            if maker < 0 or not readers or len(fusing) < len(readers):
                stored.add(value)
                kernels.add(maker)
            self.kernels.setdefault(maker, set()).update(kernels)
        # A reshape of what is stored lies in its memory.
        looped: dict[int, bool] = {}
        for at, op in sorted(flow.ops.items()):
            if op.name == _RESHAPE:
                (operand,), (result,) = op.operands, op.results
                looped[result] = looped[operand] if operand in looped else at in self.again[operand]
                if not looped[result] and not any(
                    flow.ops[reader].name in RETURN for reader, _ in flow.readers[result]
                ):
                    stored.discard(result)
        return frozenset(stored), self.again

    def _list_fusing(self, value: int, readers: set[int]) -> list[int]:
        fusing = [reader for reader in sorted(readers) if self._may_fuse(value, reader)]
        if fusing and self._is_read_apart(value, readers):
            self.once.add(value)
            return []
        repeating = [reader for reader in fusing if self._repeats(value, reader)]
        if self._is_costly(value):
            kernels = {kernel for reader in readers for kernel in self.kernels[reader]}
            if repeating or len(kernels) > 1:
                return []
        elif repeating:
            self.repeats.add(value)
        return fusing

    def _may_fuse(self, value: int, reader: int) -> bool:
        """Whether a reader may make a value, for all that the two say."""
        maker, inside = self.flow.values[value].maker, self.flow.values[value].inside
        if maker < 0 or inside != self.flow.ops[reader].inside:
            return False
        if reader in self.summing:
            return maker in self.summing and self.flow.ops[maker].name != _SUM
        return self._is_loop(maker) and self._is_loop(reader)

    def _is_loop(self, at: int) -> bool:
        op = self.flow.ops[at]
        if op.name == "stablehlo.concatenate":
            result, first = (self.flow.values[each] for each in (op.results[0], op.operands[0]))
            rows = len(result.shape) > 1 and result.shape[-1] != first.shape[-1] and result.nbytes >= _LONG_ROWS
            return len(op.operands) <= _JOINED and not rows
        return op.name in _LOOPS and at not in self.summing

    def _is_costly(self, value: int) -> bool:
        op = self.flow.ops.get(self.flow.values[value].maker)
        if op is None or op.name not in _COSTLY:
            return False
        # Divided is by one number for many: then it is multiplied by the inverse.
        by = self.flow.ops.get(self.flow.values[op.operands[-1]].maker)
        return op.name != "stablehlo.divide" or by is None or by.name not in _SPREAD

    def _repeats(self, value: int, reader: int) -> bool:
        """Whether the loops of a reader need an element more than once."""
        op, many = self.flow.ops[reader], self.flow.values[value].elements
        wider = op.name == "stablehlo.broadcast_in_dim" and self.flow.values[op.results[0]].elements > many
        return wider or op.name == "stablehlo.gather" or not self.repeats.isdisjoint(op.results)

    def _is_read_apart(self, value: int, readers: set[int]) -> bool:
        """Whether a value that is made of several large ones is read by something else than loops, too, or by one that
        also needs what others make of it."""
        values, op = self.flow.values, self.flow.ops[self.flow.values[value].maker]
        rank = _count_dims(values[value].shape)
        large = [each for each in op.operands if _count_dims(values[each].shape) >= rank and not self._is_spread(each)]
        if len(large) < 2 or sum(values[each].elements for each in set(op.operands)) <= values[value].elements:
            return False
        known: dict[int, bool] = {}
        return not all(self._joins(op.number, reader, known) for reader in readers)

    def _is_spread(self, value: int) -> bool:
        op = self.flow.ops.get(self.flow.values[value].maker)
        return op is not None and op.name in _SPREAD

    def _joins(self, at: int, reader: int, known: dict[int, bool]) -> bool:
        """Whether on all ways from an operation to a reader each can be fused into the next."""
        # By a list of its own: chains may be longer than Python's stack.
        known[at] = True
        path = [reader]
        while path:
            end = path[-1]
            if end not in known:
                makers = [self.flow.values[each].maker for each in self._list_between(at, end)]
                opened = next((maker for maker in makers if not known.get(maker, False)), None)
                if any(not self._may_join(each, end) for each in self._list_between(at, end)):
                    known[end] = False
                elif opened is None:
                    known[end] = True
                elif opened in known:
                    known[end] = False
                else:
                    path.append(opened)
                    continue
            path.pop()
        return known[reader]

    def _list_between(self, at: int, end: int) -> list[int]:
        """The operands of an operation that another one leads to."""
        operands = self.flow.ops[end].operands
        return [each for each in operands if self.above.get(self.flow.values[each].maker, 0) >> at & 1]

    def _may_join(self, value: int, reader: int) -> bool:
        alone = len(self.flow.readers[value]) < 2 or not self._is_costly(value)
        return value not in self.once and self._may_fuse(value, reader) and alone


def _count_dims(shape: Sequence[int]) -> int:
    return sum(size > 1 for size in shape)


def sort_breadth_first(flow: StepFlow, stored: frozenset[int], again: Mapping[int, Sequence[int]]) -> list[int]:
    """The operations as XLA for CPUs runs them: whatever has all that it needs, in the order in which it came to have
    it. What is fused runs where the first kernel does that it is fused into."""
    # The kernels that each operation needs, arguments from -2 down, and what is fused into it, in order.
    needed: dict[int, set[int]] = {at: set() for at in flow.ops}
    fused: dict[int, dict[int, None]] = {at: {} for at in flow.ops}
    blocks: dict[int, list[list[int]]] = {}  # of each loop and conditional, and the step's own
    for at, op in sorted(flow.ops.items()):
        inside = blocks.setdefault(op.inside, [[]])
        inside[-1].append(at)
        if op.name in RETURN:
            inside.append([])
        for value in op.operands:
            maker = flow.values[value].maker
            if maker < 0:
                needed[at].add(-2 - value)
            elif flow.values[value].inside == op.inside and (value not in stored or at in again[value]):
                needed[at] |= needed[maker]
                fused[at].update({**fused[maker], maker: None})
            else:
                needed[at].add(maker)
        # What is inside needs what is made outside.
        outer = op.inside
        while outer >= 0:
            place = flow.ops[outer].inside
            needed[outer] |= {each for each in needed[at] if each < 0 or flow.ops[each].inside <= place} - {outer}
            outer = flow.ops[outer].inside
    order: dict[int, None] = {}

    def run(block: Sequence[int], arguments: Sequence[int] = ()) -> None:
        kernels = [
            at
            for at in block
            if flow.ops[at].name not in RETURN
            and (not flow.ops[at].results or not stored.isdisjoint(flow.ops[at].results))
        ]
        sources = [-2 - value for value in arguments]
        known = {*kernels, *sources}
        waits = {at: len(needed[at] & known) for at in kernels}
        readers: dict[int, list[int]] = {}
        for at in kernels:
            for each in needed[at] & known:
                readers.setdefault(each, []).append(at)
        queue = [*(at for at in kernels if not waits[at]), *sources]
        for at in queue:  # It grows meanwhile.
            if at >= 0:
                order.update(dict.fromkeys((*(each for each in fused[at] if each not in order), at)))
                for each in blocks.get(at, ()):
                    run(each)
            for reader in readers.get(at, ()):
                waits[reader] -= 1
                if not waits[reader]:
                    queue.append(reader)
        order.update(dict.fromkeys(block))

    run(blocks[-1][0], flow.arguments)
    return list(order)

"""Which dims of an operation's operands and results go together, and along which of them it can be split.

A rule writes an operation as an einsum does: each dim of a tensor has *factors*, and equal factors are split alike.

    dot_general  [i, k], [k, j] -> [i, j]       reduced {k}: if k is split, the results are sums over its axes
    reshape      [i j] -> [i, j]                a dim of two factors, the major first: 32 -> (4, 8)
    slice        [a i] -> [i]                   x[:, :32] of 64 columns: a = 2 stays whole, i = 32 may be split
    gather       [v, d], [b] -> [b, d]          reduced {v}: a device looks up the rows that it has, and adds zeros

Shardy's own pass, which jaxlib registers, finds the factors. What it leaves whole, but need not be, has a rule here:
slices, padding and concatenation in equal pieces, and windows that do not overlap. Windows that overlap would need
halos of the neighbours' elements: dims with such windows stay whole.
"""

# The stubs of jaxlib leave most types of MLIR unknown: they are Any here.

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jax.extend.mlir.dialects import sdy as _sdy
from jax.extend.mlir.dialects import stablehlo as _stablehlo

from reshard.jax.layout_choice.step_flow import BARRIER, BRANCHES, RETURN, WHILE, find_splat
from reshard.jax.layout_choice.trace_step import TracedStep, read_body_kind, read_element_type
from reshard.jax.stablehlo_pass.shardy import MANUAL
from reshard.lower.to_stablehlo import Operation, Value, ir, list_operations, run_passes

Dims: TypeAlias = tuple[tuple[int, ...], ...]
"""The factors of each dim of a tensor, major first: none where the dim is never split."""

sdy: Any = _sdy
stablehlo: Any = _stablehlo
# What the pass of Shardy writes on each operation.
_RULE = "sdy.sharding_rule"
# Operations in the regions of these run as often as values go by; those of a reduction belong to it.
_REGIONS = ("func.func", WHILE, *BRANCHES)
_NO_RULE = (*RETURN, WHILE, *BRANCHES, BARRIER, MANUAL)
# Each element of the result is of the elements at its place alone. Names are listed, so that an operation of which
# nobody knows here stays whole.
_POINTWISE = re.compile(
    r"stablehlo\.(abs|add|and|atan2|bitcast_convert|cbrt|ceil|clamp|compare|complex|convert|cosine|count_leading_zeros"
    r"|divide|exponential|exponential_minus_one|floor|imag|is_finite|log|log_plus_one|logistic|maximum|minimum|multiply"
    r"|negate|not|or|popcnt|power|real|reduce_precision|remainder|round_nearest_afz|round_nearest_even|rsqrt|select"
    r"|shift_left|shift_right_arithmetic|shift_right_logical|sign|sine|sqrt|subtract|tan|tanh|xor)"
    r"|chlo\.(acosh?|asinh?|atanh?|bessel_i1e|conj|cosh|digamma|erf|erf_inv|erfc|is_inf|is_neg_inf|is_pos_inf|lgamma"
    r"|next_after|polygamma|sinh|square|tan|zeta)"
    r"|sdy\.sharding_constraint"
)
# Shardy's factors are right for these on tiles, less those that it marks: permutations, which would be halos, and
# dims that must be whole.
_BY_SHARDY = re.compile(
    r"stablehlo\.(broadcast_in_dim|cholesky|convolution|dot_general|dynamic_slice|dynamic_update_slice|fft|gather|reduce"
    r"|reshape|reverse|scatter|sort|transpose|triangular_solve)"
)
_LINEAR_IN_FIRST = re.compile(
    r"stablehlo\.(broadcast_in_dim|dynamic_slice|fft|gather|imag|negate|real|reshape|reverse|slice|transpose)|chlo\.conj"
)
_ZERO = re.compile(r"\(?-?0(\.0*e\+00)?(, ?-?0\.0*e\+00\))?")


@dataclass(frozen=True)
class OpRule:
    """The factors of an operation: their sizes, and those of each dim of its operands and results.

    The sizes of the factors of a dim multiply to its size; a dim without factors stays whole. Factors outside
    `splittable` stay whole too. If factors of `reduced` are split, the results are partial along their axes, to be
    finished by `reduction`. `linear` has sets of operands: if exactly these are partial sums, so are the results.
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    splittable: frozenset[int]
    reduced: frozenset[int] = frozenset()
    reduction: str = "sum"
    linear: tuple[frozenset[int], ...] = ()


@dataclass
class _Draft:
    """A rule as it is written: factors of any size, which need not fit all dims that they are in."""

    operands: list[Dims]
    results: list[Dims]
    sizes: list[int] = field(default_factory=list[int])
    whole: set[int] = field(default_factory=set[int])
    reduced: set[int] = field(default_factory=set[int])
    reduction: str = "sum"

    def add_factor(self, size: int, *, whole: bool = False) -> int:
        self.sizes.append(size)
        if whole:
            self.whole.add(len(self.sizes) - 1)
        return len(self.sizes) - 1


def read_op_rules(step: TracedStep) -> dict[int, OpRule]:
    """The rules of a step's operations by their numbers, those of loops and branches included.

    Whatever is not known to run on tiles has a rule without factors: it runs on whole operands. Control flow, sources
    (`is_source`) and the operations inside reductions and sorts have none.
    """
    rules: dict[int, OpRule] = {}
    with step.module.context, ir.Location.unknown():
        run_passes(step.module, "func.func(sdy-populate-op-sharding-rules)")
        local = -1  # What is in a user's `shard_map` is on tiles already, and comes right after it.
        for number, op in enumerate(step.ops):
            text = op.attributes.get(_RULE)
            if text is not None:
                del op.attributes[_RULE]  # Compilers of TPUs refuse modules that have them.
            if op.name == MANUAL:
                local = max(local, number + len(list_operations(op)))
            if number > local and op.parent.name in _REGIONS and op.name not in _NO_RULE and not is_source(op):
                rules[number] = _write_rule(op, text)
    return rules


def is_source(op: Operation) -> bool:
    """Whether an operation makes the same value everywhere from nothing: whoever reads it makes it as needed."""
    if op.name in ("stablehlo.constant", "stablehlo.iota"):
        return True
    if op.name not in ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.convert"):
        return False
    return find_splat(op.operands[0]) is not None


def is_zero(value: Value) -> bool:
    """Whether all elements of a value are known to be zero."""
    # A zero of either sign changes no sum.
    number = find_splat(value)
    return number is not None and bool(_ZERO.fullmatch(number))


def read_value_shape(value: Value) -> tuple[int, ...]:
    """The global shape of a value."""
    return tuple(ir.RankedTensorType(value.type).shape)


def _write_rule(op: Operation, shardy: Any) -> OpRule:
    """The rule of one operation: its own, or Shardy's."""
    draft = _Draft(
        [((),) * len(read_value_shape(v)) for v in op.operands], [((),) * len(read_value_shape(v)) for v in op.results]
    )
    if op.name in _OWN:
        _OWN[op.name](op, draft)
    elif _POINTWISE.fullmatch(op.name):
        _align_pointwise(op, draft)
    elif _BY_SHARDY.fullmatch(op.name) and shardy is not None:
        _read_shardy(op, shardy, draft)
    return _fit_rule(op, draft)


def _align_pointwise(op: Operation, draft: _Draft) -> None:
    """Dims of equal numbers go together; scalars stay whole. An operand of another shape leaves all whole."""
    shape = read_value_shape(op.results[0])
    if all(read_value_shape(operand) in ((), shape) for operand in op.operands):
        dims = tuple((draft.add_factor(size),) for size in shape)
        draft.operands = [dims if read_value_shape(operand) else () for operand in op.operands]
        draft.results = [dims]


def _read_shardy(op: Operation, text: Any, draft: _Draft) -> None:
    rule = sdy.OpShardingRuleAttr(text)

    def read(mappings: Iterable[Any]) -> list[Dims]:
        tensors = [sdy.TensorMappingAttr(each).dim_mappings for each in mappings]
        return [tuple(tuple(sdy.DimMappingAttr(dim).factor_indices) for dim in dims) for dims in tensors]

    draft.sizes = list(rule.factor_sizes)
    draft.operands, draft.results = read(rule.operand_mappings), read(rule.result_mappings)
    draft.whole |= {*rule.need_replication_factors, *rule.permutation_factors, *rule.blocked_propagation_factors}
    draft.reduced = set(rule.reduction_factors)
    if op.name in ("stablehlo.reduce", "stablehlo.scatter"):
        kind = read_body_kind(op)
        draft.reduction = kind or "sum"
        if kind is None:
            draft.whole |= draft.reduced
    if op.name == "stablehlo.convolution":
        _split_patches(op, draft)
    if op.name == "stablehlo.gather" and read_element_type(op.results[0]) == "i1":
        draft.whole |= draft.reduced
    if op.name in ("stablehlo.gather", "stablehlo.scatter"):
        # A window that is longer would reach into the next piece.
        # A piece of the operand takes those windows that start in it: those of one element, at an index.
        windows = zip(read_value_shape(op.operands[0]), read_windows(op), draft.operands[0], strict=True)
        for size, (window, indexed), factors in windows:
            if window != size and not (window == 1 and indexed is not None):
                draft.whole |= set(factors)


def read_windows(op: Operation) -> list[tuple[int, int | None]]:
    """For each dim of the first operand of a gather or a scatter, the extent of a window, and which index has its
    start.

    Dims that go along with a dim of the indices have windows of their own size.
    """
    shape = read_value_shape(op.operands[0])
    if op.name == "stablehlo.gather":
        numbers: Any = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
        batching, starts = list(numbers.operand_batching_dims), list(numbers.start_index_map)
        windows: list[int] = list(op.attributes["slice_sizes"])
    else:
        numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
        # Windows of updates leave out the dims of one element that `inserted_window_dims` has.
        batching, starts = list(numbers.input_batching_dims), list(numbers.scattered_dims_to_operand_dims)
        updates, alone = read_value_shape(op.operands[-1]), {*numbers.inserted_window_dims, *batching}
        rest = iter([updates[dim] for dim in list[int](numbers.update_window_dims)])
        windows = [1 if dim in alone else next(rest) for dim in range(len(shape))]
    windows = [size if dim in batching else windows[dim] for dim, size in enumerate(shape)]
    return [(window, starts.index(dim) if dim in starts else None) for dim, window in enumerate(windows)]


def _slice_pieces(op: Operation, draft: _Draft) -> None:
    """Every stride-th element, or a range that is whole pieces of the dim: x[:, 32:64] of 128 is the second of four."""
    names = ("start_indices", "limit_indices", "strides")
    numbers = zip(*(list(op.attributes[name]) for name in names), strict=True)
    taken, left = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for size, result, (start, limit, stride) in zip(
        read_value_shape(op.operands[0]), read_value_shape(op.results[0]), numbers, strict=True
    ):
        if stride == 1:
            _pair_pieces(draft, taken, left, size, result, math.gcd(size, start, limit))
        elif size == result * stride:
            kept = draft.add_factor(result)
            taken.append((kept, draft.add_factor(stride, whole=True)))
            left.append((kept,))
        else:
            taken.append(())
            left.append(())
    draft.operands, draft.results = [tuple(taken)], [tuple(left)]


def _pair_pieces(
    draft: _Draft, first: list[tuple[int, ...]], second: list[tuple[int, ...]], size: int, other: int, piece: int
) -> None:
    """Adds a dim to two tensors, of `size` and of `other` elements, which are both in pieces that may be split."""
    # Whole pieces are taken or left, so that each device has the same share of every piece.
    shared = draft.add_factor(piece)
    for dims, elements in ((first, size), (second, other)):
        dims.append((*([draft.add_factor(elements // piece, whole=True)] if elements > piece else []), shared))


def _pad_pieces(op: Operation, draft: _Draft) -> None:
    """Whole pieces before and after, or a whole number of elements around each."""
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    numbers = zip(*(list(op.attributes[name]) for name in names), strict=True)
    taken, left = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for size, result, (low, high, interior) in zip(
        read_value_shape(op.operands[0]), read_value_shape(op.results[0]), numbers, strict=True
    ):
        if interior == 0:
            _pair_pieces(draft, taken, left, size, result, math.gcd(size, low, high))
        elif min(low, high) >= 0 and low + high == interior:
            kept = draft.add_factor(size)
            taken.append((kept,))
            left.append((kept, draft.add_factor(interior + 1, whole=True)))
        else:
            taken.append(())
            left.append(())
    draft.operands, draft.results = [tuple(taken), ()], [tuple(left)]


def _join_pieces(op: Operation, draft: _Draft) -> None:
    """Arrays one after the other, as far as their sizes have a common divisor."""
    along = int(op.attributes["dimension"])
    shapes = [read_value_shape(operand) for operand in op.operands]
    result = read_value_shape(op.results[0])
    # Heads of queries, keys and values, 32, 8 and 8 of them, are pieces of 8.
    piece = math.gcd(*(shape[along] for shape in shapes))
    common = [draft.add_factor(piece if dim == along else size) for dim, size in enumerate(result)]

    def lay(shape: tuple[int, ...]) -> Dims:
        count = shape[along] // max(piece, 1)
        outer = (draft.add_factor(count, whole=True),) if count > 1 else ()
        return tuple((*outer, at) if dim == along else (at,) for dim, at in enumerate(common))

    draft.operands, draft.results = [lay(shape) for shape in shapes], [lay(result)]


def _pair_windows(op: Operation, rank: int) -> Iterator[tuple[bool, int]]:
    """For each dim, whether its windows lie side by side, and how many elements a window has."""

    def read(name: str, default: int) -> list[int]:
        return list(op.attributes[name]) if name in op.attributes else [default] * rank

    # Attributes are left out where all their numbers are the usual ones.
    padding = [*op.attributes["padding"]] if "padding" in op.attributes else [0] * (2 * rank)
    if "window_dimensions" in op.attributes:
        windows = read("window_dimensions", 1)
        dilations = [*zip(read("base_dilations", 1), read("window_dilations", 1), strict=True)]
    else:
        numbers: Any = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
        windows = [read_value_shape(op.operands[1])[dim] for dim in numbers.kernel_spatial_dimensions]
        dilations = [*zip(read("lhs_dilation", 1), read("rhs_dilation", 1), strict=True)]
    for dim, (window, stride) in enumerate(zip(windows, read("window_strides", 1), strict=True)):
        plain = dilations[dim] == (1, 1) and not any(padding[2 * dim : 2 * dim + 2])
        yield plain and window == stride, window


def _reduce_windows(op: Operation, draft: _Draft) -> None:
    """Windows side by side, as a pooling has them: both factors of a dim are its window's number and the place in it.

    The gradient of a maximum selects in windows of its first operand, and scatters what its second has for each.
    """
    scatters = op.name == "stablehlo.select_and_scatter"
    shape, few = read_value_shape(op.operands[0]), read_value_shape(op.operands[1] if scatters else op.results[0])
    wide, narrow = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for size, count, (apart, window) in zip(shape, few, _pair_windows(op, len(shape)), strict=True):
        if not apart or size != count * window:
            wide.append(())
            narrow.append(())
            continue
        number = draft.add_factor(count)
        wide.append((number, *([draft.add_factor(window, whole=True)] if window > 1 else [])))
        narrow.append((number,))
    if scatters:
        draft.operands, draft.results = [tuple(wide), tuple(narrow), ()], [tuple(wide)]
        return
    arrays = len(op.results)
    draft.operands = [tuple(wide)] * arrays + [()] * arrays
    draft.results = [tuple(narrow)] * arrays


def _split_patches(op: Operation, draft: _Draft) -> None:
    """The spatial dims of a convolution: whole, except where windows lie side by side, as patches of an image do."""
    numbers: Any = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    image, kernel, result = (list(dims) for dims in (*draft.operands, *draft.results))
    # Shardy puts the place in a window before the window's number, and splits where XLA would then exchange halos.
    for dim in numbers.kernel_spatial_dimensions:
        kernel[dim] = ()
    taken, made = read_value_shape(op.operands[0]), read_value_shape(op.results[0])
    sources, targets = list[int](numbers.input_spatial_dimensions), list[int](numbers.output_spatial_dimensions)
    windows = _pair_windows(op, len(sources))
    for source, target, (apart, window) in zip(sources, targets, windows, strict=True):
        image[source] = result[target] = ()
        if apart and taken[source] == made[target] * window:
            number = draft.add_factor(made[target])
            image[source] = (number, *([draft.add_factor(window, whole=True)] if window > 1 else []))
            result[target] = (number,)
    draft.operands, draft.results = [tuple(image), tuple(kernel)], [tuple(result)]


def _keep_batch(op: Operation, draft: _Draft) -> None:
    """Factorizations and the like, of many matrices: jax says how many dims in front are a batch's."""
    # Other custom calls are whole: nobody knows here what they do.
    said = op.attributes.get("mhlo.frontend_attributes")
    count = int(said["num_batch_dims"].value) if said is not None and "num_batch_dims" in said else 0
    batch = [draft.add_factor(size) for size in read_value_shape(op.operands[0])[:count]] if count else []

    def lay(dims: Dims) -> Dims:
        return tuple((batch[dim],) if dim < count else () for dim in range(len(dims)))

    draft.operands, draft.results = [[lay(dims) for dims in some] for some in (draft.operands, draft.results)]


def _take_top(op: Operation, draft: _Draft) -> None:
    """The largest elements along the last dim, which stays whole."""
    shape = read_value_shape(op.operands[0])
    dims = (*((draft.add_factor(size),) for size in shape[:-1]), ())
    draft.operands, draft.results = [dims], [dims] * len(op.results)


_OWN = {
    "stablehlo.slice": _slice_pieces,
    "stablehlo.pad": _pad_pieces,
    "stablehlo.concatenate": _join_pieces,
    "stablehlo.reduce_window": _reduce_windows,
    "stablehlo.select_and_scatter": _reduce_windows,
    "stablehlo.custom_call": _keep_batch,
    "chlo.top_k": _take_top,
}


def _fit_rule(op: Operation, draft: _Draft) -> OpRule:
    """The rule without the factors of one element, and with dims whole that their factors do not make up."""
    values = [*op.operands, *op.results]
    whole = set(draft.whole)
    kept: list[Dims] = []
    # A factor that some dim cannot have is whole in all of them.
    for value, dims in zip(values, [*draft.operands, *draft.results], strict=True):
        fitted: list[tuple[int, ...]] = []
        for size, factors in zip(read_value_shape(value), dims, strict=True):
            # A slice that cuts through pieces gets the factor of the dim it was cut from, of another size.
            fits = math.prod(draft.sizes[factor] for factor in factors) == size
            whole |= set() if fits else set(factors)
            fitted.append(tuple(factor for factor in factors if fits and draft.sizes[factor] > 1))
        kept.append(tuple(fitted))
    # Factors of one element say nothing and are gone: what is left is numbered anew.
    used = sorted({factor for dims in kept for factors in dims for factor in factors})
    renumber = {factor: number for number, factor in enumerate(used)}
    places = [tuple(tuple(renumber[factor] for factor in factors) for factors in dims) for dims in kept]
    count = len(op.operands)
    return OpRule(
        tuple(draft.sizes[factor] for factor in used),
        tuple(places[:count]),
        tuple(places[count:]),
        frozenset(renumber[factor] for factor in used if factor not in whole),
        frozenset(renumber[factor] for factor in draft.reduced if factor in renumber and factor not in whole),
        draft.reduction,
        _list_linear(op),
    )


def _list_linear(op: Operation) -> tuple[frozenset[int], ...]:
    """The sets of operands in which an operation is linear: of partial sums it makes partial sums."""
    if (
        not op.results
        or read_element_type(op.results[0]) == "i1"
        or any(read_element_type(value) == "i1" for value in op.operands[:1])
    ):
        return (
            (frozenset({1, 2}),) if op.name == "stablehlo.select" and read_element_type(op.results[0]) != "i1" else ()
        )
    # Whole numbers wrap around: sums and products of theirs are linear, and quotients are not.
    whole_numbers = re.fullmatch(r"u?i\d+", read_element_type(op.results[0])) is not None
    first, second = frozenset({0}), frozenset({1})
    match op.name.removeprefix("stablehlo."):
        case "add" | "subtract" | "complex" | "dynamic_update_slice":
            return (first | second,)
        case "multiply" | "dot_general" | "convolution":
            return first, second
        case "divide":
            return () if whole_numbers else (first,)
        case "select":
            return (frozenset({1, 2}),)
        case "concatenate":
            return (frozenset(range(len(op.operands))),)
        case "convert":
            # To a floating-point type that loses nothing.
            source, target = (
                re.fullmatch(r"b?f(\d+)", read_element_type(each)) for each in (op.operands[0], op.results[0])
            )
            return (first,) if source and target and int(source[1]) < int(target[1]) else ()
        case "pad":
            return (first,) if is_zero(op.operands[1]) else ()
        case "reduce" | "reduce_window":
            return (first,) if read_body_kind(op) == "sum" and is_zero(op.operands[1]) else ()
        case "scatter":
            return (frozenset({0, 2}),) if read_body_kind(op) == "sum" else ()
        case "triangular_solve":
            return (second,)
        case _:
            return (first,) if _LINEAR_IN_FIRST.fullmatch(op.name) else ()

"""Instructions that could run on each device's own rows: the layouts of what they take, of their rows, and of results.

    %g = c64[64,64] all-gather(%p)                 p: c64[{d0}8, 64]
    %f = c64[64,64] fft(%g), fft_length={64}
    %d = c64[64,8] dynamic-slice(%f, 0, 8 id)      d: c64[64, {d0}8]

Each device has whole rows of `p`, so it transforms those, and a plan from c64[{d0}8, 64] to c64[64, {d0}8] yields
`d`. If the source has parts of rows, it is moved first, to the rows of the results or to whole rows of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from reshard.doctor.batch_ops import BatchOp, batch_op, results_of
from reshard.doctor.chain_reader import ChainReader, Unfit, use_of
from reshard.doctor.chains import Chain
from reshard.doctor.dataflow.flow import Flow, HloValue, Numbering, Scope
from reshard.doctor.dataflow.index_maps import COLLECTIVES, IndexMaps, Untraceable, unravel_places
from reshard.doctor.dataflow.trace import Tracer, points_at
from reshard.doctor.infer_layouts import GlobalDigit, TracedDigits, build_layouts, build_mesh, trace_digits
from reshard.errors import LayoutError, MeshError, ReshardError
from reshard.hlo import Array, Instruction
from reshard.hlo.splice import Use
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

_NOT_FORMS = (*COLLECTIVES, "convert")
_MOST = 1 << 12  # elements of a value, on each device, that are compared with an index


class OpInput(NamedTuple):
    """What an operand is: the data that is moved, or else the index along a dim of it."""

    index_dim: int | None = None


class OpOutput(NamedTuple):
    """A form of a result that is used.

    `number` is that of the result. `order` has the local digits of its layout, as radices and strides in the tile.
    """

    number: int
    after: Array
    order: tuple[tuple[int, int], ...]
    uses: tuple[Use, ...]
    values: tuple[HloValue, ...]


@dataclass(frozen=True)
class OpReplacement:
    """An operation to run on rows that devices have.

    `source` is an instruction of the region, which yields `leaf`, the array `before`, and `places` is the order of its
    digits, as in `InferredMove`. `choices` has the layouts to choose from.
    """

    instruction: str
    op: BatchOp
    inputs: tuple[OpInput, ...]
    source: str
    leaf: HloValue
    before: Array
    places: tuple[tuple[int, int], ...]
    choices: tuple[OpMoves, ...]
    outputs: tuple[OpOutput, ...]


class OpFinder:
    """Finds what could run on the rows of each device."""

    def __init__(self, reader: ChainReader) -> None:
        self.reader = reader
        self.flow: Flow = reader.flow
        self.maps: IndexMaps = reader.maps
        self.numbering: Numbering = reader.numbering

    def joined(self, chains: Sequence[Chain]) -> Iterator[tuple[Chain, Instruction, BatchOp]]:
        """The chains that bring an operation's operands, as one, and the operation."""
        takers: dict[tuple[Scope, str], list[Chain]] = {}
        ops: dict[tuple[Scope, str], BatchOp] = {}
        by_form = {form: chain for chain in chains if not chain.reduces for form in _list_used_forms(chain)}
        for region in {chain.region for chain in by_form.values()}:
            for instruction in region.computation.instructions:
                op = batch_op(self.flow.module, region, instruction)
                if op is None:
                    continue
                origins = [self.flow.origin(HloValue(region, name)) for name in instruction.operands]
                feeding = [chain for origin in origins if (chain := by_form.get(origin)) is not None]
                if feeding and all(_list_used_forms(chain) <= set(origins) for chain in feeding):
                    takers[region, instruction.name] = list(dict.fromkeys(feeding))
                    ops[region, instruction.name] = op
        for (region, name), parts in takers.items():
            yield _merge_chains(parts), region.computation.by_name[name], ops[region, name]

    def replacement(self, chain: Chain, instruction: Instruction, op: BatchOp) -> OpReplacement:
        """What has to be made for the results of an operation; raises `Unfit` with the reason if that is not known."""
        region = chain.region
        operands = [self.flow.origin(HloValue(region, name)) for name in instruction.operands]
        self._check_taken(region, operands, instruction)
        inputs = tuple(self._input(value, op) for value in operands)
        moved = [value for value, one in zip(operands, inputs, strict=True) if one.index_dim is None]
        if len({self.numbering.of(value) for value in moved}) != 1:
            raise Unfit(f"{instruction.name} takes {len(moved)} arrays")
        source = self._source(chain, moved[0])
        before = self._digits_before(moved[0], source[1])
        outputs = self._outputs(region, instruction, op)
        if not outputs:
            raise Unfit(f"nothing uses the results of {instruction.name}")
        after = [self._digits_after(region, instruction, output) for output in outputs]
        choices = Choices(op, before, after, self.maps.scalars.devices, self.reader.mesh)
        orders = [choices.order(dims) for dims in choices.after]
        described = tuple(output._replace(order=order) for output, order in zip(outputs, orders, strict=True))
        moves = choices.of([op.results[output.number] for output in outputs])
        places = choices.order(choices.before)
        return OpReplacement(instruction.name, op, inputs, *source, places, moves, described)

    def _check_taken(self, region: Scope, operands: Sequence[HloValue], instruction: Instruction) -> None:
        """Only the operation may take what the chain made: what another instruction takes has to be made anyway."""
        for site in self.flow.sites(region):
            if site.instruction is instruction or self.flow.is_view(site) or site.instruction.opcode == "parameter":
                continue
            taken = {self.flow.origin(HloValue(site.scope, name)) for name in site.instruction.operands}
            both = [value for value in operands if value in taken and not self._is_index(value)]
            if both:
                raise Unfit(f"{site.instruction.name} takes {both[0].name} as well")

    def _is_index(self, value: HloValue) -> bool:
        return value.opcode == "iota"

    def _input(self, value: HloValue, op: BatchOp) -> OpInput:
        """What an operand is; an index along a dim inside the rows need not be moved."""
        leaf = value
        while (sources := self.maps.sources(leaf)) is not None and len(sources) == 1:  # ends: no value is its own form
            leaf = sources[0]
        if leaf.opcode != "iota" or value.array is None:
            return OpInput()
        for dim in op.inner(value.array):
            if is_index(self.maps, self.numbering, value, dim):
                return OpInput(dim)
        return OpInput()

    def _source(self, chain: Chain, value: HloValue) -> tuple[str, HloValue, Array]:
        """The instruction of the region that has the data, what it yields, and the array that this is."""
        moved, entered = set(chain.values), dict[int, HloValue]()
        queue = [value]
        while queue:  # ends: no value is made of itself
            for one in self.maps.sources(queue.pop()) or ():
                if one in moved:
                    queue.append(one)
                else:
                    entered.setdefault(self.numbering.of(one), one)
        if len(entered) != 1:
            raise Unfit(f"{value.name} joins {len(entered)} arrays")
        (leaf,) = entered.values()
        if leaf.array is None or value.array is None or leaf.array.dtype != value.array.dtype:
            raise Unfit(f"{value.name} is converted on the way")
        return self.reader.stored_name(chain.region, leaf), leaf, leaf.array

    def _digits_before(self, value: HloValue, leaf: HloValue) -> RowDims:
        """The digits of each dim of an operand: the devices that hold them before the chain, or their place there."""
        traced = self._traced(value, leaf)
        if any(one.place or one.device not in (0, one.weight) for one in traced.device):
            raise Unfit(f"{value.name} is not only gathered")
        return [
            [RowDigit(one.weight, one.radix, None if one.place else one.device, one.place or None) for one in dim]
            for dim in traced.index
        ]

    def _digits_after(self, region: Scope, instruction: Instruction, output: OpOutput) -> RowDims:
        """The digits of each dim of a result: the devices that hold them afterwards, or their place in what is used."""
        value, dims = output.values[0], output.after.dims
        result = results_of(region, instruction)[output.number]
        traced = self._traced(value, result)
        if any(one.device != one.weight for one in traced.device):
            raise Unfit(f"{value.name} is moved between devices")
        digits = [RowDigit(one.place, one.radix, one.weight, None) for one in traced.device if one.place]
        strides = tile_strides(dims)
        for stride, dim in zip(strides, traced.index, strict=True):
            digits += [RowDigit(one.place, one.radix, None, one.weight * stride) for one in dim]
        return group_by_dim(digits, () if result.array is None else result.array.dims, value.name)

    def _traced(self, value: HloValue, leaf: HloValue) -> TracedDigits:
        try:
            traced = trace_digits(Tracer(self.maps, self.numbering, frozenset({leaf})), value, ())
        except (Untraceable, ReshardError) as error:
            raise Unfit(str(error)) from None
        if traced is None:
            raise Unfit(f"no layout describes how {value.name} comes from {leaf.name}")
        return traced

    def _outputs(self, region: Scope, instruction: Instruction, op: BatchOp) -> list[OpOutput]:
        """The used forms of each result, equal ones together."""
        outputs: list[OpOutput] = []
        for number, result in enumerate(results_of(region, instruction)):
            groups: dict[tuple[int, Array | None], dict[HloValue, None]] = {}
            for form in self._used(region, result):
                value = self._in_whole(form, op.results[number].elements)
                groups.setdefault((self.numbering.of(value), value.array), {}).update(
                    dict.fromkeys(self._named(region, value))
                )
            outputs += [self._output(region, number, tuple(values), op) for values in groups.values()]
        return outputs

    def _in_whole(self, form: HloValue, elements: int) -> HloValue:
        """This form of a result, or an earlier one if the devices together have only some elements of this one."""
        while form.array is not None and form.array.elements * self.maps.scalars.devices < elements:
            sources = self.maps.sources(form)  # ends: each step goes back to a source
            if sources is None or len(sources) != 1:
                break
            form = sources[0]
        return form

    def _named(self, region: Scope, value: HloValue) -> list[HloValue]:
        """The instructions that yield a value and nothing else: those that take it out, if it is part of a tuple."""
        if not value.path:
            return [value]
        parts = [one for one in region.computation.instructions if one.opcode == "get-tuple-element"]
        named = [HloValue(region, one.name) for one in parts]
        return [one for one in named if self.flow.origin(one) == value]

    def _output(self, region: Scope, number: int, values: tuple[HloValue, ...], op: BatchOp) -> OpOutput:
        if not values or values[0].array is None:
            raise Unfit(f"a result of {op.target or op.kind} is used as part of a tuple")
        after = values[0].array
        if after.dtype != op.results[number].dtype:
            raise Unfit(f"{values[0].name} is converted on the way")
        return OpOutput(number, after, (), tuple(use_of(region, one) for one in values), values)

    def _used(self, region: Scope, result: HloValue) -> list[HloValue]:
        """The forms of a result that the region yields, or that an instruction other than a local move takes."""
        forms = {result}
        used: dict[HloValue, None] = {}
        for site in self.flow.sites(region):
            if self.flow.is_view(site):
                continue
            value = HloValue(site.scope, site.instruction.name)
            sources = None if site.instruction.opcode in _NOT_FORMS else self.maps.sources(value)
            if sources and forms.issuperset(sources):
                forms.add(value)
                continue
            taken = (self.flow.origin(HloValue(site.scope, name)) for name in site.instruction.operands)
            used.update(dict.fromkeys(one for one in taken if one in forms))
        root = region.computation.root
        if root is not None:
            yielded = self.flow.array_origins(HloValue(region, root.name))
            used.update(dict.fromkeys(one for one in yielded if one in forms))
        return list(used)


def _list_used_forms(chain: Chain) -> set[HloValue]:
    """The used forms of what a chain moves."""
    return {form for value, forms in chain.results.items() for form in forms or (value,)}


def _merge_chains(chains: Sequence[Chain]) -> Chain:
    """Several chains of a region as one."""
    if len(chains) == 1:
        return chains[0]
    results = {value: forms for chain in chains for value, forms in chain.results.items()}
    return Chain(
        chains[0].region,
        tuple(one for chain in chains for one in chain.collectives),
        tuple(one for chain in chains for one in chain.values),
        results,
        frozenset[HloValue]().union(*(chain.leaves for chain in chains)),
    )


def is_index(maps: IndexMaps, numbering: Numbering, value: HloValue, dim: int) -> bool:
    """Whether each element of a value is its own index along a dim, in points on all devices."""
    array = value.array
    if array is None:
        return False
    count = min(array.elements, _MOST)
    places = (
        np.arange(count) if count == array.elements else np.random.default_rng(0).integers(0, array.elements, count)
    )
    points = points_at(value, maps.scalars.devices, places)
    tracer = Tracer(maps, numbering, frozenset())
    try:
        origins = tracer(value, points)
    except Untraceable:
        return False
    index = np.full(points.device.size, -1, np.int64)
    for number, end in tracer.ends.items():
        if end.opcode != "iota" or end.array is None:
            return False
        at = origins.leaf == number
        along = int(end.instruction.attributes.get("iota_dimension", "0"))
        index[at] = unravel_places(origins.place[at], end.array.dims)[along]
    return bool((index == points.indices[dim]).all())


# Where an operation's rows may be: the layouts of what it takes and of its results, and of both where it runs.
#
# Every dim is a list of digits, each held by devices or local. Where the operation runs, the digits inside a row are
# local, and those that count rows are held as they are before, or as they are afterwards.


class OpMoves(NamedTuple):
    """The layouts of the source, of its rows where the operation runs, and those of each output before and after."""

    source: Layout
    rows: Layout
    outputs: tuple[tuple[Layout, Layout], ...]


class RowDigit(NamedTuple):
    """A digit of one dim: its weight and radix there, the stride of the devices that hold it or of its local place."""

    weight: int
    radix: int
    device: int | None
    place: int | None


RowDims = list[list[RowDigit]]  # of each dim, least significant first


class Choices:
    """The layouts that an operation's rows may have; `before` and `after` have the digits of its operand and results.

    Digits of dims that count rows are cut so that all have the same.
    """

    def __init__(self, op: BatchOp, before: RowDims, after: Sequence[RowDims], devices: int, mesh: Mesh | None) -> None:
        self.op = op
        self.devices = devices
        self.mesh = mesh
        self.before = list(before)
        self.after = [list(dims) for dims in after]
        for dim in op.batch:
            one, *others = _align_digits([self.before[dim], *(dims[dim] for dims in self.after)])
            self.before[dim] = one
            for dims, other in zip(self.after, others, strict=True):
                dims[dim] = other

    def order(self, dims: RowDims) -> tuple[tuple[int, int], ...]:
        """The local digits of an array in the order of its dims, as radices and strides."""
        return tuple((one.radix, one.place) for dim in dims for one in reversed(dim) if one.place is not None)

    def of(self, results: Sequence[Array]) -> tuple[OpMoves, ...]:
        """The layouts to choose from, for outputs that are forms of these results; raises `Unfit` if there are none."""
        made: dict[OpMoves, None] = {}
        for rows in self._rows():
            try:
                made[self._moves(rows, results)] = None
            except (MeshError, LayoutError):
                continue
        if not made:
            raise Unfit("no layout has whole rows on each device")
        return tuple(made)

    def _rows(self) -> Iterator[list[list[int | None]]]:
        """Which devices may hold each digit of the dims that count rows: those before, or those after."""
        for dims in (self.before, *self.after):
            yield [[one.device for one in dims[dim]] for dim in self.op.batch]

    def _moves(self, rows: list[list[int | None]], results: Sequence[Array]) -> OpMoves:
        holders = dict(zip(self.op.batch, rows, strict=True))
        arrays = [
            _list_global_digits(self.before, holders),
            *(_list_global_digits(dims, holders) for dims in self.after),
        ]
        dtypes = [array.dtype for array in (self.op.operands[0], *results)]
        pairs = [
            build_layouts(mesh, dims, dtype, ())
            for mesh in [self._mesh(arrays)]
            for dims, dtype in zip(arrays, dtypes, strict=True)
        ]
        (source, at_rows), *others = pairs
        return OpMoves(source, at_rows, tuple((rows, used) for used, rows in others))

    def _mesh(self, arrays: Sequence[list[list[GlobalDigit]]]) -> Mesh:
        """The program's mesh, if all digits are of its axes, else one made for them."""
        dims = [dim for array in arrays for dim in array]
        if self.mesh is not None and self.mesh.size == self.devices:
            try:
                build_layouts(self.mesh, dims, "f32", ())
                return self.mesh
            except (MeshError, LayoutError):
                pass
        return build_mesh(self.devices, dims, ())


def _list_global_digits(dims: RowDims, holders: dict[int, list[int | None]]) -> list[list[GlobalDigit]]:
    """The digits of an array, most significant first: held as they are, and as where the operation runs."""
    rows = [holders.get(at, [None] * len(digits)) for at, digits in enumerate(dims)]
    return [
        [GlobalDigit(one.radix, one.device, at, one.place) for one, at in zip(digits, holder, strict=True)][::-1]
        for digits, holder in zip(dims, rows, strict=True)
    ]


def _align_digits(several: Sequence[list[RowDigit]]) -> list[list[RowDigit]]:
    """The same dim as digits of the same weights; raises `Unfit` if there are none."""
    cuts = sorted({one.weight * one.radix for digits in several for one in digits})
    if any(high % low for low, high in pairwise([1, *cuts])):
        raise Unfit("the rows are counted in other digits before and after")
    return [[part for one in digits for part in _cut_digit(one, cuts)] for digits in several]


def _cut_digit(digit: RowDigit, cuts: Sequence[int]) -> Iterator[RowDigit]:
    """The digits that a digit is made of, cut at these weights."""
    for cut in cuts:
        if digit.weight < cut < digit.weight * digit.radix:
            low = cut // digit.weight
            yield digit._replace(radix=low)
            digit = RowDigit(cut, digit.radix // low, _scale_stride(digit.device, low), _scale_stride(digit.place, low))
    yield digit


def group_by_dim(digits: Iterable[RowDigit], dims: Sequence[int], name: str) -> RowDims:
    """Digits whose weights are strides in a row-major array, by its dims; raises `Unfit` unless they are all of it."""
    strides = tile_strides(dims)
    made: RowDims = [[] for _ in dims]
    for digit in digits:
        for part in _cut_digit(digit, sorted(strides)):
            at = next(at for at, stride in enumerate(strides) if stride <= part.weight and dims[at] > 1)
            made[at].append(part._replace(weight=part.weight // strides[at]))
    for at, size in enumerate(dims):
        made[at].sort()
        ends = [1, *(one.weight * one.radix for one in made[at])]
        if [one.weight for one in made[at]] != ends[:-1] or ends[-1] != size:
            raise Unfit(f"{name} is used in part")
    return made


def tile_strides(dims: Sequence[int]) -> list[int]:
    return [math.prod(dims[at + 1 :]) for at in range(len(dims))]


def _scale_stride(number: int | None, factor: int) -> int | None:
    return None if number is None else number * factor

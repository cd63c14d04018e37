"""Instructions that do the same to each row, such as an FFT: which dims count the rows, and where rows may be.

    %f = c64[64,64,64] fft(%g), fft_length={64}       a row is a line along the last dim; dims 0 and 1 count the rows
    %s = (f32[8,64], s32[8,64]) sort(%a, %i), dimensions={1}
    %l = (f32[16,4,4], s32[16]) custom-call(%a), custom_call_target="lapack_spotrf_ffi", {num_batch_dims="1"}

XLA's partitioner runs some of them on whole arrays although each device has whole rows:

    %g = c64[64,64] all-gather(%p)                 p: c64[{d0}8, 64]
    %f = c64[64,64] fft(%g), fft_length={64}
    %d = c64[64,8] dynamic-slice(%f, 0, 8 id)      d: c64[64, {d0}8]

Run on each device's own rows of `p` instead, the operation needs no gather, and a plan from c64[{d0}8, 64] to
c64[64, {d0}8] yields `d`. If the source has parts of rows, it is moved first, to the rows of the results or to whole
rows of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from reshard.doctor.chain_reader import Chain, ChainReader, Unfit, join_chains, use_of
from reshard.doctor.dataflow.flow import Flow, HloValue, Numbering, Scope, describe_instruction, parameter_number
from reshard.doctor.dataflow.index_maps import COLLECTIVES, IndexMaps, Untraceable, unravel_places
from reshard.doctor.dataflow.trace import Tracer, points_at
from reshard.doctor.infer_layouts import (
    CoordinateDigit,
    GlobalDigit,
    TracedDigits,
    build_layouts,
    fit_mesh_to_digits,
    trace_digits,
)
from reshard.errors import LayoutError, MeshError, ReshardError
from reshard.geometry.blocks import list_strides
from reshard.hlo import Array, Collective, Instruction, Module
from reshard.hlo.splice import Use
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

_OPCODES = ("fft", "sort", "custom-call")
_BATCHED = re.compile(r'\bnum_batch_dims="(\d+)"')
_ATTRIBUTE = re.compile(r"\s*(\w+) = (-?\d+) : (u?i\d+)\s*(?:,|$)")
_NOT_FORMS = (*COLLECTIVES, "convert")
_MOST = 1 << 12  # elements of a value, on each device, that are compared with an index


class BatchOp(NamedTuple):
    """An instruction that does the same to each row of its operands.

    `batch` are the dims that count the rows, the same ones in every operand and result, and `results` its arrays.
    `attributes` are those of a call of foreign code: name, number, dtype.
    """

    kind: str
    target: str
    batch: tuple[int, ...]
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    lengths: tuple[int, ...] = ()
    stable: bool = False
    attributes: tuple[tuple[str, int, str], ...] = ()

    def inner(self, array: Array) -> tuple[int, ...]:
        """The dims of an operand or result that are inside a row."""
        return tuple(dim for dim in range(len(array.dims)) if dim not in self.batch)


def batch_op(module: Module, scope: Scope, instruction: Instruction) -> BatchOp | None:
    """The instruction as one that does the same to each row; None if it is not known to.

    >>> from reshard.hlo import parse
    >>> module = parse('''HloModule m
    ...
    ... ENTRY %main {
    ...   %p = c64[4,8]{1,0} parameter(0)
    ...   ROOT %f = c64[4,8]{1,0} fft(%p), fft_type=FFT, fft_length={8}
    ... }''')
    >>> op = batch_op(module, Flow(module).regions[0], module.entry.root)
    >>> op.kind, op.target, op.batch, op.lengths
    ('fft', 'FFT', (0,), (8,))
    """
    if instruction.opcode not in _OPCODES:
        return None
    operands = tuple(scope.computation.by_name[name].arrays for name in instruction.operands)
    results, attributes = instruction.arrays, instruction.attributes
    if not results or any(len(arrays) != 1 for arrays in operands):
        return None
    arrays = tuple(one for (one,) in operands)
    rank = len(arrays[0].dims) if arrays else 0
    if instruction.opcode == "fft":
        lengths = _numbers_in(attributes.get("fft_length", ""))
        batch = tuple(range(rank - len(lengths)))
        return BatchOp("fft", attributes.get("fft_type", ""), batch, arrays, results, lengths)
    if instruction.opcode == "sort":
        batch = tuple(dim for dim in range(rank) if dim not in _numbers_in(attributes.get("dimensions", "")))
        stable = attributes.get("is_stable") == "true"
        if (
            not stable and instruction.called
        ):  # it also keeps the order of equal keys if it compares their indices, its second operand
            comparator = module.computation(instruction.called[0])
            parameters = [one for one in comparator.instructions if one.opcode == "parameter"]
            stable = any(comparator.users.get(one.name) for one in parameters if parameter_number(one) > 1)
        return BatchOp("sort", "", batch, arrays, results, (), stable)
    # The attributes of foreign code say how many of its first dims count rows.
    target = attributes.get("custom_call_target", "").strip('"')
    if target == "TopK" and len(arrays) == 1:
        return BatchOp("top_k", target, tuple(range(rank - 1)), arrays, results)
    batched = _BATCHED.search(attributes.get("frontend_attributes", ""))
    if batched is None or attributes.get("api_version") != "API_VERSION_TYPED_FFI":
        return None
    if "output_to_operand_aliasing" in attributes or "custom_call_has_side_effect" in attributes:
        return None
    config = attributes.get("backend_config", "{}").strip().removeprefix("{").removesuffix("}")
    listed: list[tuple[str, int, str]] = []
    while config.strip():  # ends: each round reads an attribute
        one = _ATTRIBUTE.match(config)
        if one is None:  # it is not a number
            return None
        listed.append((one[1], int(one[2]), one[3].replace("i", "int")))
        config = config[one.end() :]
    return BatchOp("ffi", target, tuple(range(int(batched[1]))), arrays, results, attributes=tuple(listed))


def same_op(old: Module, one: Instruction, new: Module, other: Instruction) -> bool:
    """Whether two instructions do the same to a row, whatever the number of rows."""
    mine, yours = describe_instruction(old, one), describe_instruction(new, other)
    dtypes = [[array.dtype for array in each.arrays] for each in (one, other)]
    return (mine[0], *mine[2:]) == (yours[0], *yours[2:]) and dtypes[0] == dtypes[1]


def has_batch_ops(flow: Flow) -> bool:
    """Whether a module has any instruction that does the same to each row."""
    sites = ((region, one) for region in flow.regions for one in region.computation.instructions)
    return any(batch_op(flow.module, region, one) is not None for region, one in sites)


def _numbers_in(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


# Where an operation's rows may be: the layouts of what it takes, of its rows, and of its results.


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

    Of its operands, `indices` has None for the data that is moved, or else the dim of which it is the index. `sources`
    has an instruction of the region, which yields `leaves`, the arrays `befores`: one of each. `places` is the order of
    its digits, as in `InferredMove`. `choices` has the layouts to choose from.
    """

    instruction: str
    op: BatchOp
    indices: tuple[int | None, ...]
    sources: tuple[str]
    leaves: tuple[HloValue]
    befores: tuple[Array]
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

    def joined(
        self, chains: Sequence[Chain], collectives: Sequence[Collective]
    ) -> Iterator[tuple[Chain, Instruction, BatchOp]]:
        """The chains that bring an operation's operands, as one, and the operation; all `collectives` in order."""
        used = {
            chain: {form for value, forms in chain.results.items() for form in forms or (value,)}
            for chain in chains
            if not chain.reduces
        }
        by_form = {form: chain for chain, forms in used.items() for form in forms}
        for region in {chain.region for chain in by_form.values()}:
            for instruction in region.computation.instructions:
                op = batch_op(self.flow.module, region, instruction)
                if op is None:
                    continue
                origins = [self.flow.origin(HloValue(region, name)) for name in instruction.operands]
                feeding = [chain for origin in origins if (chain := by_form.get(origin)) is not None]
                if feeding and all(used[chain] <= set(origins) for chain in feeding):
                    yield join_chains(list(dict.fromkeys(feeding)), collectives), instruction, op

    def replacement(self, chain: Chain, instruction: Instruction, op: BatchOp) -> OpReplacement:
        """What has to be made for the results of an operation; raises `Unfit` with the reason if that is not known."""
        region = chain.region
        operands = [self.flow.origin(HloValue(region, name)) for name in instruction.operands]
        # Only the operation may take what the chain made: what another instruction takes has to be made anyway.
        for site in self.flow.sites(region):
            if site.instruction is instruction or self.flow.is_view(site) or site.instruction.opcode == "parameter":
                continue
            taken = {self.flow.origin(HloValue(site.scope, name)) for name in site.instruction.operands}
            both = [value for value in operands if value in taken and value.opcode != "iota"]
            if both:
                raise Unfit(f"{site.instruction.name} takes {both[0].name} as well")
        indices = tuple(self._find_index_dim(value, op) for value in operands)
        moved = [value for value, dim in zip(operands, indices, strict=True) if dim is None]
        if len({self.numbering.of(value) for value in moved}) != 1:
            raise Unfit(f"{instruction.name} takes {len(moved)} arrays")
        leaf = self._find_leaf(chain, moved[0])
        if leaf.array is None or moved[0].array is None or leaf.array.dtype != moved[0].array.dtype:
            raise Unfit(f"{moved[0].name} is converted on the way")
        source, _ = self.reader.source_name(region, [leaf])
        traced = self._trace(moved[0], leaf)
        if any(one.place or one.device not in (0, one.weight) for one in traced.device):
            raise Unfit(f"{moved[0].name} is not only gathered")
        if not all(one.device or one.place for dim in traced.index for one in dim):
            raise Unfit(f"two indices of {moved[0].name} have the same element")
        # What adds to both the device and the place was local before, too: there are copies on those devices.
        before = [[one._replace(device=0 if one.place else one.device) for one in dim] for dim in traced.index]
        outputs = self._list_outputs(region, instruction, op)
        if not outputs:
            raise Unfit(f"nothing uses the results of {instruction.name}")
        after = [self._digits_after(region, instruction, output) for output in outputs]
        arrays, results = cut_rows(op, [before, *after]), [op.results[output.number] for output in outputs]
        described = [one._replace(order=order_digits(dims)) for one, dims in zip(outputs, arrays[1:], strict=True)]
        moves = list_op_moves(op, arrays, results, self.maps.scalars.devices, self.reader.mesh)
        places = order_digits(arrays[0])
        return OpReplacement(
            instruction.name, op, indices, (source,), (leaf,), (leaf.array,), places, moves, tuple(described)
        )

    def _find_index_dim(self, value: HloValue, op: BatchOp) -> int | None:
        """The dim inside the rows of which an operand is the index, so that it need not be moved; None for data."""
        leaf = value
        while (sources := self.maps.sources(leaf)) is not None and len(sources) == 1:  # ends: no value is its own form
            leaf = sources[0]
        if leaf.opcode == "iota" and value.array is not None:
            for dim in op.inner(value.array):
                if is_index(self.maps, self.numbering, value, dim):
                    return dim
        return None

    def _find_leaf(self, chain: Chain, value: HloValue) -> HloValue:
        """What an operand was before the chain."""
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
        return leaf

    def _digits_after(self, region: Scope, instruction: Instruction, output: OpOutput) -> RowDims:
        """The digits of each dim of a result: the devices that hold them afterwards, or their place in what is used."""
        value, result = output.values[0], _list_results(region, instruction)[output.number]
        traced = self._trace(value, result)
        if any(one.device != one.weight for one in traced.device):
            raise Unfit(f"{value.name} is moved between devices")
        digits = [CoordinateDigit(one.place, one.radix, one.weight, 0) for one in traced.device if one.place]
        for stride, dim in zip(list_strides(output.after.dims), traced.index, strict=True):
            digits += [CoordinateDigit(one.place, one.radix, 0, one.weight * stride) for one in dim]
        # Their weights are strides in the row-major result: they are told apart by its dims, and have to be all of it.
        dims = () if result.array is None else result.array.dims
        strides = list_strides(dims)
        made: RowDims = [[] for _ in dims]
        for part in [part for digit in digits for part in _cut_digit(digit, sorted(strides))]:
            at = next(at for at, stride in enumerate(strides) if stride <= part.weight and dims[at] > 1)
            made[at].append(part._replace(weight=part.weight // strides[at]))
        for own, size in zip(made, dims, strict=True):
            own.sort()
            ends = [1, *(one.weight * one.radix for one in own)]
            if [one.weight for one in own] != ends[:-1] or ends[-1] != size:
                raise Unfit(f"{value.name} is used in part")
        return made

    def _trace(self, value: HloValue, leaf: HloValue) -> TracedDigits:
        try:
            traced = trace_digits(Tracer(self.maps, self.numbering, frozenset({leaf})), value, ())
        except (Untraceable, ReshardError) as error:
            raise Unfit(str(error)) from None
        if traced is None:
            raise Unfit(f"no layout describes how {value.name} comes from {leaf.name}")
        return traced

    def _list_outputs(self, region: Scope, instruction: Instruction, op: BatchOp) -> list[OpOutput]:
        """The used forms of each result, equal ones together."""
        outputs: list[OpOutput] = []
        for number, result in enumerate(_list_results(region, instruction)):
            groups: dict[tuple[int, Array | None], dict[HloValue, None]] = {}
            for form in self._list_used(region, result):
                # An earlier form is taken if the devices together have only some elements of this one.
                while form.array and form.array.elements * self.maps.scalars.devices < op.results[number].elements:
                    sources = self.maps.sources(form)  # ends: each step goes back to a source
                    if sources is None or len(sources) != 1:
                        break
                    form = sources[0]
                # Part of a tuple is replaced where instructions take it out.
                parts = [one for one in region.computation.instructions if one.opcode == "get-tuple-element"]
                named = [HloValue(region, one.name) for one in parts if form.path]
                named = [one for one in named if self.flow.origin(one) == form] if form.path else [form]
                groups.setdefault((self.numbering.of(form), form.array), {}).update(dict.fromkeys(named))
            for values in map(tuple, groups.values()):
                if not values or values[0].array is None:
                    raise Unfit(f"a result of {op.target or op.kind} is used as part of a tuple")
                if values[0].array.dtype != op.results[number].dtype:
                    raise Unfit(f"{values[0].name} is converted on the way")
                uses = tuple(use_of(region, one) for one in values)
                outputs.append(OpOutput(number, values[0].array, (), uses, values))
        return outputs

    def _list_used(self, region: Scope, result: HloValue) -> list[HloValue]:
        """The forms of a result that the region yields, or that an instruction other than a local move takes."""
        forms = {result}
        taken: list[HloValue] = []
        for site in self.flow.sites(region):
            if self.flow.is_view(site):
                continue
            value = HloValue(site.scope, site.instruction.name)
            sources = None if site.instruction.opcode in _NOT_FORMS else self.maps.sources(value)
            if sources and forms.issuperset(sources):
                forms.add(value)
                continue
            origins = [self.flow.origin(HloValue(site.scope, name)) for name in site.instruction.operands]
            taken += [one for one in origins if one in forms]
        if (root := region.computation.root) is not None:
            taken += [one for one in self.flow.array_origins(HloValue(region, root.name)) if one in forms]
        return list(dict.fromkeys(taken))


def _list_results(region: Scope, instruction: Instruction) -> list[HloValue]:
    """The arrays that an instruction yields."""
    if isinstance(instruction.shape, Array):
        return [HloValue(region, instruction.name)]
    return [HloValue(region, instruction.name, (at,)) for at in range(len(instruction.arrays))]


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


# The layouts to choose from.
#
# Every dim is a list of digits, each held by devices or local. Where the operation runs, the digits inside a row are
# local, and those that count rows are held as they are before, or as they are afterwards.


class OpMoves(NamedTuple):
    """The layouts of the source, of its rows where the operation runs, and those of each output before and after."""

    source: Layout
    rows: Layout
    outputs: tuple[tuple[Layout, Layout], ...]


RowDims = list[list[CoordinateDigit]]
"""Of each dim the digits, least significant first: each is held by devices of a stride, or local, at a place."""


def cut_rows(op: BatchOp, arrays: Iterable[RowDims]) -> list[RowDims]:
    """The digits of an operation's operand and results, cut so that the rows of all are counted in the same ones."""
    made = [list(dims) for dims in arrays]
    for dim in op.batch:
        cuts = sorted({one.weight * one.radix for dims in made for one in dims[dim]})
        if any(high % low for low, high in pairwise([1, *cuts])):
            raise Unfit("the rows are counted in other digits before and after")
        for dims in made:
            dims[dim] = [part for one in dims[dim] for part in _cut_digit(one, cuts)]
    return made


def list_op_moves(
    op: BatchOp, arrays: Sequence[RowDims], results: Sequence[Array], devices: int, mesh: Mesh | None
) -> tuple[OpMoves, ...]:
    """The layouts to choose from, of the operand and of outputs that are forms of these results; raises `Unfit` if
    there are none. `arrays` are what `cut_rows` makes.
    """
    made: dict[OpMoves, None] = {}
    dtypes = [array.dtype for array in (op.operands[0], *results)]
    for chosen in arrays:  # The rows are where these digits are.
        dims = [
            [
                [
                    GlobalDigit(
                        own.radix, own.device or None, (at in op.batch and there.device) or None, own.place or None
                    )
                    for own, there in reversed([*zip(digits, chosen[at] if at in op.batch else digits, strict=True)])
                ]
                for at, digits in enumerate(each)
            ]
            for each in arrays
        ]
        try:
            found = fit_mesh_to_digits(mesh, devices, [dim for each in dims for dim in each])
            pairs = [build_layouts(found, each, dtype) for each, dtype in zip(dims, dtypes, strict=True)]
        except (MeshError, LayoutError):
            continue
        (source, at_rows), *others = pairs
        made[OpMoves(source, at_rows, tuple((rows, used) for used, rows in others))] = None
    if not made:
        raise Unfit("no layout has whole rows on each device")
    return tuple(made)


def order_digits(dims: RowDims) -> tuple[tuple[int, int], ...]:
    """The local digits of an array in the order of its dims, as radices and strides."""
    return tuple((one.radix, one.place) for dim in dims for one in reversed(dim) if one.place)


def _cut_digit(digit: CoordinateDigit, cuts: Sequence[int]) -> Iterator[CoordinateDigit]:
    """The digits that a digit is made of, cut at these weights."""
    for cut in cuts:
        if digit.weight < cut < digit.weight * digit.radix:
            low = cut // digit.weight
            yield digit._replace(radix=low)
            digit = CoordinateDigit(cut, digit.radix // low, digit.device * low, digit.place * low)
    yield digit

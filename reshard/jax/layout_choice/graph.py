"""A step as a `Problem` of `synth.choice`, and what is chosen of it as the layouts of the step's operations.

The nodes are clusters of operations, arguments with their next values, results, and each value that a loop carries, a
conditional returns or a barrier holds. Sources, broadcasts of scalars and small values that are made of these alone
have none: they are made whole, and whoever reads them takes its slice. Nor have scalars, which are whole, except those
that are partial sums.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.mlir.dialects import sdy as _sdy
from jax.sharding import PartitionSpec

from reshard.errors import ProgramError
from reshard.jax.layout_choice.clusters import HEAVY, Cluster, find_accumulators, find_clusters
from reshard.jax.layout_choice.liveness import (
    RELAID,
    RunOrder,
    find_padded,
    find_stored,
    list_kernels,
    order_as_written,
)
from reshard.jax.layout_choice.op_rules import OpRule, is_source, is_zero
from reshard.jax.layout_choice.op_work import count_flops, count_read_bytes
from reshard.jax.layout_choice.step_flow import (
    BARRIER,
    RETURN,
    Branches,
    FlowOp,
    Loop,
    OpLayouts,
    StepFlow,
    StepLayouts,
    read_flow,
)
from reshard.jax.layout_choice.trace_step import TracedStep, read_given_spec
from reshard.jax.stablehlo_pass.shardy import CONSTRAINT, MANUAL, read_meshes
from reshard.jax.stablehlo_pass.user_shardings import read_frames
from reshard.synth.choice.problem import LANES, Access, Assignment, Node, Problem, Split, Tensor, access_layout
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

sdy: Any = _sdy
SMALL_BYTES = 1 << 20  # values made of sources alone, which every device can make whole
TIE_ROUNDS = 3  # how far around a node another must look the same to be split alike

# Which node reads or writes an operand or a result, and how; None where it is whole.
View = tuple[int, Access] | None


@dataclass(frozen=True)
class StepGraph:
    """What is chosen among for a step: the problem, and where its tensors are in the step.

    `arguments` and `results` have the tensor of each, -1 for a scalar, and for a result that is made of sources.
    `unknown_trips` are the loops that are counted as one trip. `values` has every value of the step as a tensor: by its
    number the accesses of `ends` and `views` name it. `uses` is for which operand of which operation a read is.
    """

    problem: Problem
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    unknown_trips: tuple[int, ...]
    values: Problem = field(repr=False)
    ends: tuple[tuple[View, ...], tuple[View, ...]] = field(repr=False)
    views: Mapping[int, tuple[tuple[View, ...], tuple[View, ...]]] = field(repr=False)
    flow: StepFlow = field(repr=False)
    uses: Mapping[tuple[int, int], tuple[int, int]] = field(repr=False)

    def spell_layouts(self, chosen: Assignment) -> StepLayouts:
        """The layouts that an assignment gives to the step's arguments, results and operations."""
        nodes = self.problem.nodes

        def lay(value: int, view: View) -> Layout:
            if view is None:
                about = self.flow.values[value]
                return Layout.tiled(self.problem.mesh, about.shape, about.dtype, [()] * len(about.shape))
            return access_layout(self.values, nodes[view[0]], view[1], chosen.splits[view[0]])

        anew: dict[int, set[int]] = {}
        for read in chosen.anew:
            if read in self.uses:
                op, place = self.uses[read]
                anew.setdefault(op, set()).add(place)
        operations: dict[int, OpLayouts] = {}
        for at, (operands, results) in self.views.items():
            op = self.flow.ops[at]
            operations[at] = OpLayouts(
                tuple(lay(value, view) for value, view in zip(op.operands, operands, strict=True)),
                tuple(lay(value, view) for value, view in zip(op.results, results, strict=True)),
                frozenset(anew.get(at, ())),
            )
        first, last = self.ends
        return StepLayouts(
            tuple(lay(value, view) for value, view in zip(self.flow.arguments, first, strict=True)),
            tuple(lay(value, view) for value, view in zip(self.flow.returned, last, strict=True)),
            operations,
        )

    def renumber(self, chosen: Assignment, other: StepGraph) -> Assignment:
        """An assignment of another graph of the step, whose memory is in another order, as one of this graph."""
        made = {other.uses[read] for read in chosen.anew if read in other.uses}
        return replace(chosen, anew=frozenset(read for read, use in self.uses.items() if use in made))


@dataclass
class _NodeDraft:
    """A node as it is made: what it reads is by value, with all the places where it does."""

    name: str
    sizes: tuple[int, ...]
    splittable: frozenset[int]
    kinds: tuple[str, ...] = ()
    reads: dict[tuple[int, tuple[tuple[int, ...], ...], tuple[int, ...]], list[tuple[int, int, int]]] = field(
        default_factory=dict[tuple[int, tuple[tuple[int, ...], ...], tuple[int, ...]], list[tuple[int, int, int]]]
    )
    writes: list[Access] = field(default_factory=list[Access])
    flops: float = 0.0
    touched: Counter[tuple[int, ...]] = field(default_factory=Counter[tuple[int, ...]])
    held: float = 0.0
    times: int = 1
    only: tuple[Split, ...] | None = None
    in_place: bool = False


def build_graph(
    step: TracedStep,
    rules: Mapping[int, OpRule],
    mesh: Mesh,
    fixed_arguments: Mapping[int, PartitionSpec] | None = None,
    fixed_results: Mapping[int, PartitionSpec] | None = None,
    order: RunOrder | None = None,
) -> StepGraph:
    """What is chosen among for a step on a mesh.

    `fixed_arguments` and `fixed_results` give specs by number; dims that are UNCONSTRAINED there stay
    free. A result that is an argument's next value has the argument's layout, unless its own is given. `order` says
    what lies in memory until when, by default as the program is written: the nodes are the same in every order.
    """
    with step.module.context:
        return _GraphBuilder(step, rules, mesh, dict(fixed_arguments or {}), dict(fixed_results or {}), order).build()


class _GraphBuilder:
    def __init__(
        self,
        step: TracedStep,
        rules: Mapping[int, OpRule],
        mesh: Mesh,
        fixed_arguments: dict[int, PartitionSpec],
        fixed_results: dict[int, PartitionSpec],
        order: RunOrder | None,
    ) -> None:
        self.step, self.mesh, self.meshes = step, mesh, read_meshes(step.module)
        self.fixed_arguments, self.fixed_results = fixed_arguments, fixed_results
        self.flow = flow = read_flow(step)
        self.free = self._find_free(rules)
        self.rules = {
            at: rule
            for at, rule in rules.items()
            if not self.free.issuperset(flow.ops[at].results) and flow.ops[at].name != CONSTRAINT
        }
        self.stored, self.padded = find_stored(flow, mesh.size), find_padded(flow)
        self.order = order or order_as_written(flow, mesh.size)
        self.end = self.order.length
        self.copies = list(self.order.copies)
        self.drafts: list[_NodeDraft] = []
        self.tensors: dict[int, int] = {}  # by value
        self.born: dict[int, int] = {}
        self.aliases: set[int] = set()  # values in another's memory
        self.views: dict[int, tuple[list[View], list[View]]] = {
            at: ([None] * len(op.operands), [None] * len(op.results)) for at, op in flow.ops.items()
        }
        self.argument_views: list[View] = [None] * len(flow.arguments)
        self.result_views: list[View] = [None] * len(flow.returned)
        # When the first of all stored values that take so many bytes is needed for the last time.
        self.freed: dict[int, int] = {}
        for value in self.order.stored.difference(flow.arguments, flow.returned):
            last = max((self.order.needs[read] for read in flow.readers[value]), default=0)
            nbytes = flow.values[value].nbytes
            self.freed[nbytes] = min(last, self.freed.get(nbytes, last))
        # The last position at which a value is needed, by whatever is made of it in the same memory.
        self.dies: dict[int, int] = {}

    # ---- values ------------------------------------------------------------------------------------------------------

    def _find_free(self, rules: Mapping[int, OpRule]) -> frozenset[int]:
        """What costs nothing in any layout: sources, broadcasts of scalars, and what is small and made of these."""
        flow, free = self.flow, set[int]()
        for at, op in sorted(flow.ops.items()):
            if is_source(self.step.ops[at]):
                free.update(op.results)
            elif at in rules and all(flow.values[result].shape for result in op.results) and op.operands:
                inputs = all(value in free or not flow.values[value].shape for value in op.operands)
                size = sum(self.flow.values[result].nbytes for result in op.results)
                cheap = op.name.startswith(("stablehlo", "chlo")) and op.name not in HEAVY
                # Larger ones that are made of few bits, as random masks are, cost more than their slices.
                if inputs and cheap and (op.name == "stablehlo.broadcast_in_dim" or size <= SMALL_BYTES):
                    free.update(op.results)
        return frozenset(free)

    def _is_tensor(self, value: int) -> bool:
        return value not in self.free and bool(self.flow.values[value].shape)

    def _number(self, value: int) -> int:
        return self.tensors.setdefault(value, len(self.tensors))

    # ---- drafts ------------------------------------------------------------------------------------------------------

    def _add_dims_node(self, name: str, value: int, times: int = 1) -> int:
        """A node that is split along the dims of one value."""
        shape = self.flow.values[value].shape
        axes = [size for size in self.mesh.axes.values() if size > 1]
        splittable = frozenset(at for at, size in enumerate(shape) if any(size % axis == 0 for axis in axes))
        self.drafts.append(_NodeDraft(name, shape, splittable, times=times, held=self.flow.values[value].nbytes))
        return len(self.drafts) - 1

    def _dims_view(self, node: int, value: int, sums: tuple[int, ...] = ()) -> tuple[int, Access]:
        return node, Access(value, tuple((at,) for at in range(len(self.flow.values[value].shape))), 0, sums=sums)

    def _read(self, view: tuple[int, Access], op: int, place: int, at: int) -> None:
        """Enters that a node reads a value for an operand, and until when the operand is needed."""
        node, access = view
        key = access.tensor, access.dims, access.sums
        self.drafts[node].reads.setdefault(key, []).append((op, place, at))

    def _write(self, view: tuple[int, Access], at: int, times: int) -> None:
        node, access = view
        self.born[access.tensor] = at
        self.drafts[node].writes.append(replace(access, at=at, times=times))

    def _write_copy(self, view: tuple[int, Access], value: int, born: int, dies: int, count: int = 1) -> None:
        """Enters that a value lies in memory once more, in the layout in which a node has it."""
        self.copies.append((value, born, dies, count))
        self.drafts[view[0]].writes.append(replace(view[1], tensor=-len(self.copies)))

    # ---- the parts of a step -----------------------------------------------------------------------------------------

    def build(self) -> StepGraph:
        flow = self.flow
        for at, value in enumerate(flow.arguments):
            if self._is_tensor(value):
                self._add_argument(at, value)
        loops = {loop.op.number: loop for loop in flow.loops}
        branches = {each.op.number: each for each in flow.branches}
        for at, op in sorted(flow.ops.items()):
            if at in loops:
                self._add_loop(loops[at])
            elif at in branches:
                self._add_branches(branches[at])
            elif op.name in (BARRIER, CONSTRAINT):
                self._add_slots(op)
            elif op.name == MANUAL:
                self._add_manual(op)
        clusters = find_clusters(flow, self.rules, self.mesh, self.free)
        self.kernels = list_kernels(flow, self.stored, [cluster.ops for cluster in clusters])
        for cluster in clusters:
            # Arithmetic on scalars is whole, and takes nothing.
            values = [value for at in cluster.ops for value in (*flow.ops[at].operands, *flow.ops[at].results)]
            if cluster.sums or any(flow.values[value].shape for value in values):
                self._add_cluster(cluster)
        carried = dict(self.step.carried)
        for at, value in enumerate(flow.returned):
            if self._is_tensor(value):
                self._add_result(at, value, carried.get(at))
        self._read_scalars()
        return self._finish()

    def _add_argument(self, at: int, value: int) -> None:
        given = self.step.arguments[at]
        node = self._add_dims_node(given.name, value)
        if at in self.fixed_arguments:
            self.drafts[node].only = list_splits_of_spec(self.fixed_arguments[at], given.shape, self.mesh)
        self.argument_views[at] = self._dims_view(node, value)
        self._write(self._dims_view(node, value), 0, 1)
        # Whoever calls the step still has it.
        if at not in self.step.donated:
            self.dies[value] = self.end

    def _add_result(self, at: int, value: int, argument: int | None) -> None:
        flow, named = self.flow, self.step.results[at].name
        fixed = self.fixed_results.get(at)
        view = None if argument is None or fixed is not None else self.argument_views[argument]
        if view is None:
            node = self._add_dims_node(f"result {named}", value)
            if fixed is not None:
                self.drafts[node].only = list_splits_of_spec(fixed, flow.values[value].shape, self.mesh)
            view = self._dims_view(node, value)
        self.result_views[at] = view = view[0], replace(view[1], tensor=value)
        # There is room from the start for what the step returns, unless it takes the place of what is donated.
        # Except on TPUs, what is as large and needed no more when it is made lies there meanwhile.
        born = self.born.get(value, 0)
        kept = argument is None or argument not in self.step.donated
        lent = flow.platform != "tpu" and self.freed.get(flow.values[value].nbytes, born) < born
        if kept and born and not lent:
            self._write_copy(view, value, 0, born - 1)
        last = max(flow.ops)
        self.views[last][0][at] = view
        # An argument that is returned as its own next value moves nowhere.
        if value in flow.arguments and self.argument_views[flow.arguments.index(value)] == view:
            self.dies[value] = self.end
        else:
            self._read(view, last, at, self.order.starts[last])

    def _add_loop(self, loop: Loop) -> None:
        """One node for each value that a loop carries."""
        op, flow, order = loop.op, self.flow, self.order
        begin, end = order.starts[op.number], order.ends[op.number]
        trips = op.times * (loop.trips or 1)
        sum_ups = find_accumulators(flow, loop)
        carried = zip(op.operands, loop.arguments, loop.returned, op.results, strict=True)
        for place, (start, argument, returned, result) in enumerate(carried):
            if not flow.values[argument].shape:
                continue
            node = self._add_dims_node(f"{self._name(op.number)} carries {place}", argument, op.times)
            sums: tuple[int, ...] = ()
            if argument in sum_ups and (start not in self.free or is_zero(self.step.ops[op.number].operands[place])):
                draft = self.drafts[node]
                sums = (len(draft.sizes),)
                draft.sizes, draft.splittable = (*draft.sizes, 0), draft.splittable | set(sums)
            # Its start, what the body takes and returns, and its result are all in one layout.
            view = self._dims_view(node, argument, sums)
            self.views[op.number][0][place] = node, replace(view[1], tensor=start)
            self.views[op.number][1][place] = node, replace(view[1], tensor=result)
            unchanged = returned == argument
            if self._is_tensor(start):
                self._read((node, replace(view[1], tensor=start)), op.number, place, begin)
                if unchanged:  # The loop, and who reads its result, read where it began.
                    last = max([end, *(order.needs[read] for read in flow.readers[result])])
                    self._read((node, replace(view[1], tensor=start)), -1, -1, last)
            self._write(view, begin, trips)
            self.dies[argument] = end - 1
            if unchanged:
                # Constants are made inside of loops.
                maker = flow.values[start].maker
                sunk = flow.platform == "cpu" and maker >= 0 and is_source(self.step.ops[maker])
                sunk = sunk or self._is_tensor(start)
                self.aliases |= {argument, result} if sunk else {result}
            elif self._is_tensor(returned):
                # The body's return is the only read; the value that it returns moves in each trip.
                self._read((node, replace(view[1], tensor=returned)), -1, -1, end)
                self.drafts[node].times = trips
                last = max([0, *(order.needs[read] for read in flow.readers[argument])])
                maker = flow.values[returned].maker
                made = order.starts[maker] if maker >= 0 else -1
                # It takes the place of the old one. TPUs use the memory for others until it is made.
                if made == last or (made > last and flow.platform != "tpu"):
                    self.aliases.add(returned)
                elif made > last:
                    self.dies[argument] = last
            self._write((node, replace(view[1], tensor=result)), end, op.times)

    def _add_branches(self, branches: Branches) -> None:
        """One node for each result of a conditional, which reads what every branch returns for it."""
        flow, order, op = self.flow, self.order, branches.op
        end = order.ends[op.number]
        for place, result in enumerate(op.results):
            if not flow.values[result].shape:
                continue
            view = self._dims_view(self._add_dims_node(self._name(op.number), result, op.times), result)
            self.views[op.number][1][place] = view
            self._write(view, end, op.times)
            for each in branches.returned:
                if self._is_tensor(returned := each[place]):
                    # What a branch makes lies where the result does, and only one branch runs: it is over with its own.
                    maker = flow.values[returned].maker
                    leaves = [order.needs[read] for read in flow.readers[returned] if flow.ops[read[0]].name in RETURN]
                    last = max(order.starts[maker], max(leaves) - 1) if maker > op.number else end
                    self._read((view[0], replace(view[1], tensor=returned)), -1, -1, last)

    def _add_slots(self, op: FlowOp) -> None:
        """One node for each operand that an operation hands on as it is; the result lies in the operand's memory."""
        start = self.order.starts[op.number]
        for place, (operand, result) in enumerate(zip(op.operands, op.results, strict=True)):
            if not self.flow.values[result].shape:
                continue
            node = self._add_dims_node(self._name(op.number), result, op.times)
            view = self._dims_view(node, result)
            if op.name == CONSTRAINT:
                spec = read_given_spec(self.step.ops[op.number].attributes["sharding"])
                self.drafts[node].only = (
                    None if spec is None else list_splits_of_spec(spec, self.drafts[node].sizes, self.mesh)
                )
            self.views[op.number][0][place] = node, replace(view[1], tensor=operand)
            self.views[op.number][1][place] = view
            if self._is_tensor(operand):
                taken = node, replace(view[1], tensor=operand)
                last = max([start, *(self.order.needs[read] for read in self.flow.readers[result])])
                self._read(taken, op.number, place, start)
                self._read(taken, -1, -1, last)
                self.aliases.add(result)
            self._write(view, start, op.times)

    def _add_manual(self, op: FlowOp) -> None:
        """A user's `shard_map`: its layouts are given, over all axes; what is not manual is whole."""
        attributes, start = self.step.ops[op.number].attributes, self.order.starts[op.number]
        draft = _NodeDraft(self._name(op.number), (), frozenset(), (op.name,), times=op.times)
        self.drafts.append(draft)
        node, split = len(self.drafts) - 1, list[tuple[str, ...]]()
        sides = ("in_shardings", op.operands, 0), ("out_shardings", op.results, 1)
        for name, values, side in sides:
            shardings = sdy.TensorShardingPerValueAttr(attributes[name]).shardings
            for place, (value, sharding) in enumerate(zip(values, shardings, strict=True)):
                symbol = f"{sdy.TensorShardingAttr(sharding).mesh_or_ref}".lstrip("@")
                theirs = self.meshes.get(symbol)
                if theirs is None or [*theirs.axes.items()] != [*self.mesh.axes.items()]:
                    raise ProgramError(
                        f"a shard_map of the step is on the mesh {theirs or 'of one device'}, and shardings are chosen "
                        f"on {self.mesh}; use one mesh for both"
                    )
                spec = read_given_spec(sharding) or PartitionSpec()
                dims: list[tuple[int, ...]] = []
                for at, size in enumerate(self.flow.values[value].shape):
                    dims.append((len(split),))
                    split.append(_read_entry(spec[at] if at < len(spec) else None) or ())
                    draft.sizes += (size,)
                view = node, Access(value, tuple(dims), start)
                self.views[op.number][side][place] = view
                if side:
                    self._write(view, start, op.times)
                elif self._is_tensor(value):
                    self._read(view, op.number, place, start)
        # All of it is given; an axis may split several dims, each of another array.
        draft.only = (tuple(split),)

    def _add_cluster(self, cluster: Cluster) -> None:
        flow, inner = self.flow, {value for at in cluster.ops for value in self.flow.ops[at].results}
        first = flow.ops[cluster.ops[0]]
        kinds = tuple(flow.ops[at].name for at in cluster.ops)
        draft = _NodeDraft(self._name(cluster.ops[0]), cluster.sizes, cluster.splittable, kinds, times=first.times)
        # Products read their operands while they write; what is elementwise may write over what it reads.
        draft.in_place = len(cluster.ops) > 1 or first.name.rpartition(".")[2] not in ("dot_general", "convolution")
        extra = ()
        if cluster.sums:
            extra = (len(cluster.sizes),)
            draft.sizes, draft.splittable = (*draft.sizes, 0), draft.splittable | set(extra)
        node = len(self.drafts)
        self.drafts.append(draft)
        partial = set[int]()  # what the cluster writes as a sum
        read = set[tuple[int, int, int]]()
        for at in cluster.ops:
            op, rule, own = flow.ops[at], self.rules[at], cluster.factors[at]
            draft.flops += count_flops(self.step.ops[at], op, flow)
            sums = tuple(sorted({own[factor] for factor in rule.reduced & rule.splittable} & cluster.splittable))
            for place, (operand, dims) in enumerate(zip(op.operands, rule.operands, strict=True)):
                view = node, Access(operand, tuple(tuple(own[f] for f in dim) for dim in dims), at)
                if (at, place) in cluster.sums or (extra and operand in inner):
                    view = node, replace(view[1], sums=extra)
                self.views[at][0][place] = view
                # What the cluster itself has written as a sum it may read whole: a softmax, for example.
                outside = operand not in inner or (operand in partial and not view[1].sums)
                if outside and operand not in self.free and (flow.values[operand].shape or view[1].sums):
                    self._read(view, at, place, self.order.needs[at, place])
                    if (at, place) in self.order.relaid:
                        self._write_copy(view, operand, *self.order.relaid[at, place])
                # A kernel reads an array once, whatever part of it several slices take.
                made = self.kernels.get(flow.values[operand].maker, frozenset()) if operand in inner else frozenset()
                if operand not in self.free and (operand not in inner or operand in self.stored):
                    nbytes = count_read_bytes(op, place, flow)
                    whole = nbytes == flow.values[operand].nbytes
                    new = {(operand, each, -1 if whole else at) for each in self.kernels[at] - made} - read
                    read |= new
                    self._touch(draft, view[1], len(new) * nbytes)
            for place, (result, dims) in enumerate(zip(op.results, rule.results, strict=True)):
                view = node, Access(result, tuple(tuple(own[f] for f in dim) for dim in dims), at)
                view = node, replace(view[1], sums=(*sums, *extra), reduction=rule.reduction)
                self.views[at][1][place] = view
                if view[1].sums:
                    partial.add(result)
                self._write(view, self.order.starts[at], op.times)
                if result in self.stored and (op.name not in RELAID or self._returns(result)):
                    self._touch(draft, view[1], flow.values[result].nbytes)

    def _touch(self, draft: _NodeDraft, access: Access, nbytes: int) -> None:
        """Enters that a node reads or writes bytes of a value. Who splits narrow rows passes over as many lanes."""
        dims, last = access.dims, self.flow.values[access.tensor].shape[-1:]
        if access.tensor in self.padded and 0 < last[0] <= LANES:
            dims, nbytes = dims[:-1], nbytes * LANES // last[0]
        draft.touched[tuple(itertools.chain(*dims))] += nbytes

    def _returns(self, value: int) -> bool:
        return any(self.flow.ops[reader].name in RETURN for reader, _ in self.flow.readers[value])

    def _read_scalars(self) -> None:
        """One node that reads every scalar that is a partial sum, and is whole for those who need it whole."""
        # Otherwise a loss would cost nothing while it is a sum, though all devices have to finish it.
        node = len(self.drafts)
        self.drafts.append(_NodeDraft("scalars", (), frozenset()))
        partial = {access.tensor for draft in self.drafts for access in draft.writes if access.sums}
        for value in sorted(partial):
            if self.flow.values[value].shape:
                continue
            for reader, place in self.flow.readers[value]:
                view = self.views[reader][0][place]
                if view is None or not view[1].sums:
                    self._read((node, Access(value, (), reader)), reader, place, self.order.starts[reader])
                    break
        if not self.drafts[node].reads:
            self.drafts.pop()

    def _finish(self) -> StepGraph:
        flow = self.flow
        # Values inside a cluster that nobody else reads matter only for the memory that they take.
        read = {key[0] for draft in self.drafts for key in draft.reads}
        stored = self.order.stored
        kept = read | {value for value in self.born if value in stored and flow.values[value].shape}
        kept |= set(flow.arguments)
        # A copy beside a value is a tensor that nobody reads, numbered from -1 down.
        copies: dict[int, list[int]] = {}
        for at, (value, *_) in enumerate(self.order.copies):
            copies.setdefault(value, []).append(-1 - at)
        last: dict[int, int] = {}
        nodes: list[Node] = []
        uses: dict[tuple[int, int], tuple[int, int]] = {}
        for at, draft in enumerate(self.drafts):
            # Reads in one layout share a copy, which is live from the first of them to the last: two accesses say so.
            reads: list[Access] = []
            for (value, dims, sums), places in draft.reads.items():
                # A scalar of no node is whole: a partial sum takes it up without a move.
                if value not in self.born:
                    continue
                first, until = self._place_reads(value, places)
                last[value] = max(last.get(value, -1), until)
                times = max((flow.ops[op].times for op, _, _ in places if op >= 0), default=draft.times)
                # A copy for the reads of several operations is one copy, so they share the kept one: none is made anew.
                if len(places) == 1:
                    uses[at, len(reads)] = places[0][:2]
                reads.append(Access(self._number(value), dims, first, times, sums))
                if until > first:
                    reads.append(Access(self._number(value), dims, until, times, sums))
            writes = tuple(
                replace(access, tensor=self._number(value), dims=((),) * (value < 0) + access.dims)
                for access in draft.writes
                for value in (access.tensor, *copies.get(access.tensor, ()))
                if value in kept or value < 0
            )
            nodes.append(
                Node(
                    draft.name,
                    draft.sizes,
                    draft.splittable,
                    tuple(reads),
                    writes,
                    draft.flops,
                    tuple(draft.touched.items()),
                    draft.times,
                    draft.held,
                    draft.only,
                )
            )
        sums = {access.tensor for draft in self.drafts for access in draft.writes if access.sums} & kept
        joined = count_joined(flow, sums)
        named = dict(zip(flow.arguments, (given.name for given in self.step.arguments), strict=True))
        over = self._find_written_over()
        tensors: list[Tensor] = []
        for value in self.tensors:
            copied, *span, count = self.copies[-1 - value] if value < 0 else (value, 1)
            each = flow.values[copied]
            name = named.get(copied) or self._name(each.maker if each.maker >= 0 else max(each.inside, 0))
            if span:
                tensors.append(Tensor(name, (count, *each.shape), each.dtype, span[0], span[1]))
                continue
            born = self.born[value]
            own = (self.order.needs[read] for read in flow.readers[value])
            dies = max(born, last.get(value, -1), self.dies.get(value, -1), *own)
            # What is fused into its readers, or lies in another's memory, takes none of its own.
            fused = value not in stored and each.maker >= 0 and value not in self.aliases
            relaid = each.maker >= 0 and flow.ops[each.maker].name in RELAID
            if value in self.aliases or fused:
                dies = born - 1
            elif value not in read and dies in over.get(value, ()):
                dies -= 1
            many, kept = joined.get(value, 1), fused and not relaid
            tensors.append(Tensor(name, each.shape, each.dtype, born, dies, many, kept, value in self.padded))
        nodes = [
            replace(node, reuses=_pair_reuses(node, tensors)) if self.drafts[at].in_place else node
            for at, node in enumerate(nodes)
        ]
        nodes = tie_alike(nodes, tensors, [draft.kinds for draft in self.drafts])
        return StepGraph(
            Problem(self.mesh, tuple(tensors), tuple(nodes)),
            tuple(self.tensors.get(value, -1) for value in flow.arguments),
            tuple(self.tensors.get(value, -1) for value in flow.returned),
            tuple(loop.op.number for loop in flow.loops if loop.trips is None),
            Problem(self.mesh, tuple(Tensor("", each.shape, each.dtype, 0, 0) for each in flow.values), ()),
            (tuple(self.argument_views), tuple(self.result_views)),
            {at: (tuple(operands), tuple(results)) for at, (operands, results) in self.views.items()},
            flow,
            uses,
        )

    def _find_written_over(self) -> dict[int, set[int]]:
        """For each value that a cluster stores, when it stores an equal one, which a loop may write in its place."""
        found: dict[int, set[int]] = {}
        for draft in self.drafts if self.flow.platform == "cpu" else ():
            alike: dict[tuple[Any, ...], list[int]] = {}
            for access in draft.writes if draft.in_place else ():
                if access.tensor in self.order.stored:
                    each = self.flow.values[access.tensor]
                    alike.setdefault((each.shape, each.dtype, access.dims, access.sums), []).append(access.tensor)
            for values in alike.values():
                for value in values:
                    found[value] = {self.born[other] for other in values if other != value}
        return found

    def _place_reads(self, value: int, places: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
        """From where to where a node needs a value that it reads at several places."""
        first, last = self.end, -1
        for op, _, until in places:
            start, inside = (until if op < 0 else self.order.starts[op]), self.flow.ops[op].inside if op >= 0 else -1
            # A copy for a product is made before.
            start = min(start, max(until, 1 + self.born.get(value, 0)))
            # What is made outside of a loop is needed until the loop ends, if any trip needs it.
            while inside >= 0 and inside != self.flow.values[value].inside:
                start, until = self.order.starts[inside], max(until, self.order.ends[inside])
                inside = self.flow.ops[inside].inside
            first, last = min(first, start), max(last, until)
        # What a loop hands on as it is may be read before it.
        first = max(first, 1 + self.born.get(value, -1))
        return first, max(first, last)

    def _name(self, at: int) -> str:
        """An operation in words: its kind, and the innermost line of the user's that wrote it."""
        frames = read_frames(self.step.ops[at].location)
        kind = self.flow.ops[at].name.rpartition(".")[2]
        return f"{kind} {frames[0].file.rpartition('/')[2]}:{frames[0].line}" if frames else kind


def count_joined(flow: StepFlow, sums: Collection[int]) -> dict[int, int]:
    """Of those of some values that nothing is made of but by cheap operations, as of gradients, how many there are of a
    dtype: their all-reduces do not wait for each other, and compilers make one of them."""
    ends = set[int]()  # operations that are cheap, and so is all that follows
    for at, op in sorted(flow.ops.items(), reverse=True):
        readers = {reader for value in op.results for reader, _ in flow.readers[value]}
        if op.inside < 0 and (op.name in RETURN or (op.name not in HEAVY and readers <= ends)):
            ends.add(at)
    last = [
        value
        for value in sums
        if flow.values[value].maker >= 0
        and flow.ops[flow.values[value].maker].inside < 0
        and all(reader in ends for reader, _ in flow.readers[value])
    ]
    many = Counter(flow.values[value].dtype for value in last)
    return {value: many[flow.values[value].dtype] for value in last}


def list_splits_of_spec(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> tuple[Split, ...] | None:
    """The splits along the dims of a value that a spec allows; None, all of them, where none is even on this mesh.

    >>> list_splits_of_spec(PartitionSpec("x", PartitionSpec.UNCONSTRAINED), (8, 6), Mesh(x=4, y=2))
    ((('x',), ()), (('x',), ('y',)))
    """
    dims = [_read_entry(spec[at] if at < len(spec) else None) for at in range(len(shape))]
    used = {axis for names in dims for axis in names or ()}
    if not used <= mesh.axes.keys():
        return None
    # The axes that the spec does not name may split the dims that it leaves open.
    left = [axis for axis, size in mesh.axes.items() if axis not in used and size > 1]
    open_dims = [at for at, names in enumerate(dims) if names is None]
    found: list[Split] = []
    for owners in itertools.product([-1, *open_dims], repeat=len(left)):
        given = list(zip(left, owners, strict=True))
        split = [
            tuple(axis for axis, owner in given if owner == at) if names is None else names
            for at, names in enumerate(dims)
        ]
        pieces = [math.prod(mesh.axes[axis] for axis in names) for names in split]
        if all(size % count == 0 for size, count in zip(shape, pieces, strict=True)):
            found.append(tuple(split))
    return tuple(found) or None


def _read_entry(entry: Any) -> tuple[str, ...] | None:
    """The axes of a dim as a spec has them; None where the dim is free."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return None
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _pair_reuses(node: Node, tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """What is written in the place of what is read last there: one read for each write."""
    pairs: list[tuple[int, int]] = []
    taken = set[int]()
    for w, write in enumerate(node.writes):
        made = tensors[write.tensor]
        for r, read in enumerate(node.reads):
            old = tensors[read.tensor]
            # Equal tiles in equal places: whoever splits the node splits both alike.
            same = (old.shape, old.dtype, read.dims) == (made.shape, made.dtype, write.dims)
            if same and old.dies == made.born and read.tensor not in taken and made.dies >= made.born:
                pairs.append((r, w))
                taken.add(read.tensor)
                break
    return tuple(pairs)


def tie_alike(nodes: Sequence[Node], tensors: Sequence[Tensor], kinds: Sequence[tuple[str, ...]]) -> list[Node]:
    """The nodes, with a tie between those that look the same as far as `TIE_ROUNDS` tensors away: repeated layers."""

    def describe(access: Access) -> tuple[Any, ...]:
        tensor = tensors[access.tensor]
        return tensor.shape, tensor.dtype, access.dims, access.sums, access.reduction, access.times

    writer = {access.tensor: (at, describe(access)) for at, node in enumerate(nodes) for access in node.writes}
    readers: dict[int, list[tuple[int, tuple[Any, ...]]]] = {}
    for at, node in enumerate(nodes):
        for access in node.reads:
            readers.setdefault(access.tensor, []).append((at, describe(access)))
    colours = [
        hash(
            (
                kinds[at], node.sizes, node.splittable, node.flops, node.touched, node.times, node.only,
                tuple(map(describe, node.reads)), tuple(map(describe, node.writes)),
            )
        )
        for at, node in enumerate(nodes)
    ]  # fmt: skip
    for _ in range(TIE_ROUNDS):
        around: list[int] = []
        for at, node in enumerate(nodes):
            # In order, since the reads of tied nodes correspond by number; readers have no order of their own.
            above = [(colours[writer[access.tensor][0]], writer[access.tensor][1]) for access in node.reads]
            below = [
                frozenset(Counter((colours[reader], how) for reader, how in readers.get(access.tensor, ())).items())
                for access in node.writes
            ]
            around.append(hash((colours[at], tuple(above), tuple(below))))
        colours = around
    # Hashes of what is around stand for it; equal ones by accident would tie nodes that cannot be split alike.
    counts = Counter(colours)
    names: dict[int, str] = {}
    tied: list[Node] = []
    for at, (node, colour) in enumerate(zip(nodes, colours, strict=True)):
        if counts[colour] > 1:
            node = replace(node, tie=names.setdefault(colour, f"{at} {node.name}"))
        tied.append(node)
    return tied

"""What experts would write for a step, made from the step alone: beside these every choice of layouts is measured.

An expert says how arguments are split, and constrains activations, so that the compiler does not choose between the
batch and the weights by itself:

    data parallel        the batch over all axes; weights whole
    ZeRO-1               the same, and what the optimizer keeps over all axes
    FSDP                 the same, and the weights as well, by their largest dim
    tensor parallel      the first product's weights by columns, the next one's by rows
    sequence parallel    tensor parallel, and activations between such pairs by position
    mixtures             the batch over some axes, weights by columns and rows over another; FSDP over the former too
    domain parallel      where no argument is a batch: every array by its first dim, or by its first two

Which arguments are weights is read from how the step uses them. *Marks* say of a dim of a value what it is: of the
batch, of positions, or a feature that columns of weights have split. They start at the batch and follow the rules of
operations; a weight is split by rows where its product sums over marked features, else by columns, which marks the
features of its result.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec

from reshard.jax.layout_choice.emit import name_mesh
from reshard.jax.layout_choice.op_rules import OpRule
from reshard.jax.layout_choice.step_flow import BARRIER, BRANCHES, RETURN, WHILE
from reshard.jax.layout_choice.trace_step import PRODUCTS, StepValue, TracedStep, join_transforms
from reshard.jax.stablehlo_pass import shardy
from reshard.lower.to_stablehlo import Attribute, Module, Operation, Value, ir, list_operations
from reshard.types.mesh import Mesh

P = PartitionSpec
OWN = "your own"
"""The name of the shardings that a user gave."""
BATCH, POSITION, FEATURE = "batch", "position", "feature"
_OF_ACTIVATIONS = {BATCH, POSITION}
"""Of these dims weights and their gradients have none. A batch of one has positions alone."""
_UNSPLIT = {BATCH: 1, POSITION: 1, FEATURE: 1}
"""Devices over which each kind of dim is split, before any is."""
Marks = tuple[str, ...]
"""What each dim of a value is; empty where it is nothing in particular."""
_LOOKUP = "stablehlo.gather"
_VIEWS = (
    "convert", "reshape", "transpose", "slice", "dynamic_slice", "broadcast_in_dim", "sharding_constraint",
)  # fmt: skip
_SMALL = 1024
"""Arrays of fewer elements stay whole: to split them gains nothing."""


@dataclass(frozen=True)
class Expert:
    """Shardings as an expert gives them: those of the arguments and of the results, and constraints on activations.

    None leaves an end to the compiler. `constraints` are on the first result of operations, by their number.
    """

    name: str
    in_shardings: tuple[PartitionSpec | None, ...]
    out_shardings: tuple[PartitionSpec | None, ...]
    constraints: Mapping[int, PartitionSpec] = field(default_factory=dict[int, PartitionSpec])

    @property
    def axes(self) -> set[str]:
        """The axes over which it splits arguments and results."""
        parts = (part for spec in (*self.in_shardings, *self.out_shardings) for part in spec or ())
        return {axis for part in parts if part is not P.UNCONSTRAINED for axis in _list_axes(part)}


def list_experts(
    step: TracedStep,
    rules: Mapping[int, OpRule],
    mesh: Mesh,
    fixed_arguments: Mapping[int, PartitionSpec] | None = None,
    fixed_results: Mapping[int, PartitionSpec] | None = None,
) -> list[Expert]:
    """The experts of a step, the user's own shardings first if there are any; those that come out alike once.

    What is fixed stays as it is. The last axes of a mesh are the nearest, so tensor parallelism is tried on each axis
    by itself, the last one first.
    """
    roles = _StepRoles(step, rules)
    axes = [name for name, size in mesh.axes.items() if size > 1]
    found: list[Expert] = []
    if any(value.given is not None for value in step.arguments):
        found.append(_join_ends(OWN, step, [value.given for value in step.arguments]))
    if roles.batch:
        found += [
            roles.write("data parallel", mesh, batch=axes),
            roles.write("ZeRO-1", mesh, batch=axes, optimizer=axes),
            roles.write("FSDP", mesh, batch=axes, weights=axes),
            roles.write("tensor parallel", mesh, features=axes),
            roles.write("sequence parallel", mesh, features=axes, positions=True),
        ]
        for inner in reversed(axes) if len(axes) > 1 else ():
            outer, label = [name for name in axes if name != inner], f"tensor parallel over {inner}"
            for data, weights in (("data", ()), ("FSDP", outer)):
                write = partial(roles.write, mesh=mesh, batch=outer, weights=weights, features=[inner])
                found += [write(f"{data} and {label}"), write(f"{data}, sequence and {label}", positions=True)]
    else:
        # Without examples to split, a step works on fields: neighbours stay together if leading dims are split.
        for parts in [[axes], *([axes[:at], axes[at:]] for at in range(1, len(axes)))]:
            specs: list[PartitionSpec | None] = []
            for value in step.arguments:
                split: list[list[str]] = [*parts, *[[] for _ in value.shape]]
                small = math.prod(value.shape) < _SMALL
                specs.append(_spell_dims([
                    [] if small else _dividing(size, over, mesh) for size, over in zip(value.shape, split, strict=False)
                ]))  # fmt: skip
            found.append(_join_ends("domain parallel" + " over two dims" * (len(parts) - 1), step, specs))
    kept: dict[Any, Expert] = {}
    for one in found:
        arguments = _keep_fixed(one.in_shardings, fixed_arguments or {})
        results = _keep_fixed(one.out_shardings, fixed_results or {})
        kept.setdefault(
            (arguments, results, tuple(one.constraints.items())), Expert(one.name, arguments, results, one.constraints)
        )
    return list(kept.values())


def _keep_fixed(
    written: Sequence[PartitionSpec | None], fixed: Mapping[int, PartitionSpec]
) -> tuple[PartitionSpec | None, ...]:
    """An expert's specs with those that are fixed in their places: dims that these leave open are as the expert has
    them, unless another dim has the axes."""
    kept = list(written)
    for at, spec in fixed.items():
        own, opened = written[at], [part is P.UNCONSTRAINED for part in spec]
        if own is None and all(opened):
            continue
        used = {name for part in spec if part is not P.UNCONSTRAINED for name in _list_axes(part)}
        offered = [*(own or ()), *[None] * len(spec)]
        dims = [
            part if not free else None if used.intersection(_list_axes(other)) else other
            for part, free, other in zip(spec, opened, offered, strict=False)
        ]
        kept[at] = P(*dims)
    return tuple(kept)


def _list_axes(part: Any) -> tuple[str, ...]:
    """The axes that one entry of a spec names."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def write_expert(step: TracedStep, expert: Expert, mesh: Mesh) -> Module:
    """The step with an expert's shardings, as `jax.jit` would lower it: a module of its own, ready to compile."""
    with step.module.context, ir.Location.unknown():
        module = ir.Module.parse(step.module.operation.get_asm(enable_debug_info=True))
        main = next(op.operation for op in module.body.operations if op.operation.name == "func.func")
        symbol = name_mesh(module, mesh)
        ops = list_operations(main)
        for at, spec in expert.constraints.items():
            result = ops[at].results[0]
            with ops[at].location, ir.InsertionPoint.after(ops[at]):
                value = shardy.add_constraint(result, _spell_spec(spec, symbol, len(spec)))
            # Not of the constraint itself, which would then read its own result.
            result.replace_all_uses_except(value, value.owner.operation)
        join_transforms(main)
        ends = ((step.arguments, expert.in_shardings, "arg_attrs"), (step.results, expert.out_shardings, "res_attrs"))
        for values, specs, key in ends:
            listed: list[Attribute] = []
            for at, (value, spec) in enumerate(zip(values, specs, strict=True)):
                named = {} if spec is None else {shardy.SHARDING: _spell_spec(spec, symbol, len(value.shape))}
                if key == "arg_attrs" and at in step.donated:
                    named[shardy.DONOR] = ir.BoolAttr.get(True)
                listed.append(ir.DictAttr.get(named))
            main.attributes[key] = ir.ArrayAttr.get(listed)
        return module


def _spell_spec(spec: PartitionSpec, symbol: str, rank: int) -> Attribute:
    """A spec as a sharding of Shardy; dims that are unconstrained, or beyond its length, are open and whole."""

    def spell(part: Any) -> str:
        return "{?}" if part is P.UNCONSTRAINED else f"{{{', '.join(map(json.dumps, _list_axes(part)))}}}"

    dims = map(spell, (*spec, *[None] * (rank - len(spec))))
    return ir.Attribute.parse(f"#sdy.sharding<@{symbol}, [{', '.join(dims)}]>")


def _join_ends(
    name: str,
    step: TracedStep,
    arguments: Sequence[PartitionSpec | None],
    constraints: Mapping[int, PartitionSpec] | None = None,
) -> Expert:
    """The expert that splits arguments so, and each result like the argument that it is the next value of."""
    results = [arguments[step.carried[at]] if at in step.carried else value.given
               for at, value in enumerate(step.results)]  # fmt: skip
    return Expert(name, tuple(arguments), tuple(results), constraints or {})


def _dividing(size: int, axes: Sequence[str], mesh: Mesh) -> list[str]:
    """Those of the axes, in their order, that together divide a size and are of the most devices."""
    # Larger subsets first, so that of equal products the one of most axes is taken.
    subsets = (subset for count in range(len(axes), -1, -1) for subset in itertools.combinations(axes, count))
    fitting = [subset for subset in subsets if size % _count_devices(subset, mesh) == 0]
    return list(max(fitting, key=lambda subset: _count_devices(subset, mesh)))


def _count_devices(axes: Collection[str], mesh: Mesh) -> int:
    return math.prod(mesh.axes[name] for name in axes)


def _spell_dims(dims: Sequence[Sequence[str]]) -> PartitionSpec:
    """The spec of axes by dim."""
    return P(*[None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in dims])


class _StepRoles:
    """What the arguments of a step are: a batch, with the dim that counts its examples; weights; or an optimizer's.

    The batch is every argument that is not state and has as many examples as the others. A weight is a state (or one of
    a tree of several arrays) that products or lookups read. Every other state belongs to an optimizer and follows a
    weight: the one whose name ends alike, else the first of its shape.
    """

    def __init__(self, step: TracedStep, rules: Mapping[int, OpRule]) -> None:
        self.step, self.rules = step, rules
        self.block = step.main.regions[0].blocks[0]
        self.origins = self._trace_views()
        multiplied = {
            origin[0]
            for op in step.ops
            if op.name in (*PRODUCTS, _LOOKUP)
            for operand in list(op.operands)[: 1 if op.name == _LOOKUP else 2]
            if (origin := self.origins.get(operand))
        }
        states = set(step.carried.values())
        # A step that trains changes its weights. One that answers keeps a cache, with examples in some dim.
        answers = not multiplied & states
        # Where time is the first dim, loops take it apart: the examples, in the next one, reach more of the step. So do
        # features, but those reach the weights.
        self.time_first = False
        batches = [self._find_batch(states, answers, dim) for dim in (0, 1)]
        (first, _), (second, kept) = map(self._count_reached, batches)
        # A first dim of one is a single example, with positions behind it.
        one = any(step.arguments[at].shape[dim] == 1 for at, dim in batches[0].items())
        self.time_first = not answers and not kept and not one and second > first
        self.batch = batches[self.time_first]
        self.weights = multiplied - set(self.batch)
        # Biases and scales are in no product; unlike what an optimizer keeps, they meet values with examples.
        _, marks = self._spread_marks(_UNSPLIT)
        for op in step.ops:
            if any(not _OF_ACTIVATIONS.isdisjoint(marks.get(operand, ())) for operand in op.operands):
                met = {self.origins[operand][0] for operand in op.operands if operand in self.origins}
                self.weights |= met - set(self.batch)
        self.follows: dict[int, int] = {}
        for at, value in enumerate(step.arguments):
            if at in self.batch or at in self.weights:
                continue
            alike = [one for one in sorted(self.weights) if step.arguments[one].shape == value.shape]
            # `moments/1/mu/layers/0/up` belongs to `weights/layers/0/up`; names without a path say nothing.
            ends = [one for one in alike if value.name.endswith(step.arguments[one].name.partition("/")[2] or "\0")]
            if alike:
                self.follows[at] = (ends or alike)[0]

    def _find_batch(self, states: Collection[int], answers: bool, dim: int) -> dict[int, int]:
        """The arguments with examples, and which dim counts them, if it is this one of the data."""
        examples = self._count_examples(states, dim)
        batch: dict[int, int] = {}
        for at, value in enumerate(self.step.arguments):
            first = 0 if at in states else dim
            dims = value.shape if at in states else value.shape[dim : dim + 1]
            if examples in dims and not _is_key(value) and (answers or at not in states):
                batch[at] = first + dims.index(examples)
        return batch

    def _count_reached(self, batch: dict[int, int]) -> tuple[int, bool]:
        """How many values of the step have a dim of the batch, and whether next values of states do."""
        self.batch, self.weights = batch, set()
        marks = self._spread_marks(_UNSPLIT)[1]
        ends = list(self.step.ops[-1].operands)
        kept = any(BATCH in marks.get(ends[at], ()) for at in self.step.carried)
        return sum(BATCH in found for found in marks.values()), kept

    def _count_examples(self, states: Collection[int], dim: int) -> int:
        """The size of the batch: that of a dim that most arguments have which are no states; 0 without any.

        Trees of several arrays are no batch unless all have one size, as batches of dicts have. Whole numbers, such as
        tokens, are a batch before all others, even if the step returns the next ones.
        """
        groups: dict[int, list[StepValue]] = {}
        for at, value in enumerate(self.step.arguments):
            if (at not in states or value.dtype[0] in "isu") and not _is_key(value):
                groups.setdefault(value.position, []).append(value)
        sizes: Counter[int] = Counter()
        for members in groups.values():
            sizes_here = {value.shape[dim : dim + 1] for value in members}
            whole_numbers = any(value.dtype[0] in "isu" for value in members)
            # Of a single example there are tokens at least; scalars and other arrays of one are settings.
            least = 1 if whole_numbers and len(members[0].shape) > 1 else 2
            if len(sizes_here) == 1 and (size := math.prod(*sizes_here)) >= least:
                sizes[size] += 100 if whole_numbers else 1
        # The last of those that are as many: weights come before the data in most signatures.
        return max(reversed(list(sizes)), key=lambda size: sizes[size], default=0)

    def _trace_views(self) -> dict[Value, tuple[int, tuple[int | None, ...]]]:
        """Of values that are views of an argument: which argument, and which of its dims each dim is."""
        origins: dict[Value, tuple[int, tuple[int | None, ...]]] = {}
        for at, argument in enumerate(self.block.arguments):
            origins[argument] = at, tuple(range(len(self.step.arguments[at].shape)))
        for at, op in enumerate(self.step.ops):
            for operand, value in _list_edges(op):
                if operand in origins:
                    origins.setdefault(value, origins[operand])
            rule = self.rules.get(at)
            if rule is None or op.name.rpartition(".")[2] not in _VIEWS or op.operands[0] not in origins:
                continue
            argument, dims = origins[op.operands[0]]
            of_factor = {_leading(rule, factors): dim for factors, dim in zip(rule.operands[0], dims, strict=True)}
            of_factor.pop(None, None)  # dims of size 1, which come and go
            origins[op.results[0]] = argument, tuple(of_factor.get(_leading(rule, one)) for one in rule.results[0])
        return origins

    def write(
        self,
        name: str,
        mesh: Mesh,
        batch: Sequence[str] = (),
        weights: Sequence[str] = (),
        optimizer: Sequence[str] = (),
        features: Sequence[str] = (),
        positions: bool = False,
    ) -> Expert:
        """The expert with the batch, the weights and the optimizer's states over these axes, each by their largest
        dim, and features over others."""
        step = self.step
        examples = next((step.arguments[at].shape[dim] for at, dim in self.batch.items()), 1)
        batch = _dividing(examples, batch, mesh)
        axes_of = {BATCH: batch, FEATURE: list(features), POSITION: list(features) if positions else []}
        counts = {mark: _count_devices(axes, mesh) for mark, axes in axes_of.items()}
        split, marks = self._spread_marks(counts)

        def lay_out(at: int) -> PartitionSpec:
            value = step.arguments[at]
            dims: list[list[str]] = [[] for _ in value.shape]
            leader = self.follows.get(at, at)
            if at in self.batch:
                dims[self.batch[at]] = batch
                return _spell_dims(dims)
            if leader in split and self.step.arguments[leader].shape == value.shape:
                dims[split[leader]] = list(features)
            # Weights that FSDP splits take their states along; ZeRO-1 splits the states alone.
            over = weights or (() if at in self.weights else optimizer)
            free = [
                dim for dim, size in enumerate(value.shape) if not dims[dim] and size % _count_devices(over, mesh) == 0
            ]
            if over and free and math.prod(value.shape) >= _SMALL:
                dims[max(free, key=lambda dim: value.shape[dim])] = list(over)
            return _spell_dims(dims)

        constraints: dict[int, PartitionSpec] = {}
        for at, op in enumerate(step.ops):
            found = marks.get(op.results[0], ()) if op.name in (*PRODUCTS, _LOOKUP) else ()
            if not _OF_ACTIVATIONS.isdisjoint(found):  # The gradient of a weight has none, and follows the weight.
                # Features and positions are split over the same axes: between a pair of products the features are.
                at_positions = axes_of[POSITION] if FEATURE not in found else []
                laid = {**axes_of, POSITION: at_positions, "": []}
                constraints[at] = _spell_dims([laid[mark] for mark in found])
        return _join_ends(name, step, [lay_out(at) for at in range(len(step.arguments))], constraints)

    def _spread_marks(self, counts: Mapping[str, int]) -> tuple[dict[int, int], dict[Value, Marks]]:
        """The dim of each weight that holds columns or rows, and the marks of all values; a dim is marked if it splits
        into so many parts."""
        split: dict[int, int] = {}
        marks: dict[Value, Marks] = {}
        for at, dim in self.batch.items():
            shape = self.step.arguments[at].shape
            # Time before the batch is what loops go through.
            positioned = dim + 1 < len(shape) and shape[dim + 1] > 1 and not self.time_first
            found = ["" for _ in shape]
            found[dim] = BATCH
            if positioned:
                found[dim + 1] = POSITION
            marks[self.block.arguments[at]] = tuple(found)
        for _ in range(3):  # What a loop carries is known once its body has been seen, and a weight's first use.
            for at, op in enumerate(self.step.ops):
                for value, found in self._mark_results(at, op, marks, split, counts):
                    if any(found):
                        marks[value] = found
            for at, dim in split.items():
                shape = self.step.arguments[at].shape
                marks[self.block.arguments[at]] = tuple(FEATURE if one == dim else "" for one in range(len(shape)))
        return split, marks

    def _mark_results(
        self, at: int, op: Operation, marks: Mapping[Value, Marks], split: dict[int, int], counts: Mapping[str, int]
    ) -> Iterator[tuple[Value, Marks]]:
        """The marks of what an operation makes, or hands to a loop; weights that it is the first to use are split."""
        for operand, value in _list_edges(op):
            yield value, marks.get(operand, ()) or marks.get(value, ())
        rule = self.rules.get(at)
        if rule is None:
            return
        of_factor: dict[int, str] = {}
        for operand, dims in zip(op.operands, rule.operands, strict=True):
            for mark, factors in zip(marks.get(operand, ()), dims, strict=False):
                factor = _leading(rule, factors)
                if mark and factor is not None and rule.sizes[factor] % counts[mark] == 0:
                    of_factor.setdefault(factor, mark)
        for operand, dims in zip(op.operands, rule.operands, strict=True):
            origin = self.origins.get(operand)
            if origin is not None and origin[0] in self.weights and origin[0] not in split:
                self._split_weight(op, rule, origin, dims, of_factor, split, counts[FEATURE])
        # A mark that stands on two dims, as of a batch with itself, can split the first alone.
        for result, dims in zip(op.results, rule.results, strict=True):
            found: list[str] = []
            for factors in dims:
                factor = _leading(rule, factors)
                mark = "" if factor is None else of_factor.get(factor, "")
                found.append("" if mark in found else mark)
            yield result, tuple(found)

    def _split_weight(
        self,
        op: Operation,
        rule: OpRule,
        origin: tuple[int, tuple[int | None, ...]],
        dims: Sequence[tuple[int, ...]],
        of_factor: dict[int, str],
        split: dict[int, int],
        parts: int,
    ) -> None:
        """Splits a weight at its first use: by rows if its product sums over split features, by columns otherwise."""
        argument, places = origin
        factors = [(place, factor) for place, one in zip(places, dims, strict=True)
                   if place is not None and (factor := _leading(rule, one)) is not None
                   if rule.sizes[factor] % parts == 0]  # fmt: skip
        if op.name in PRODUCTS:
            rows = [place for place, factor in factors if factor in rule.reduced and of_factor.get(factor) == FEATURE]
            if rows:
                split[argument] = rows[0]
                return
            # Columns, unless the other operand has features split that stay in the result.
            used = set(of_factor.values())
            free = [(place, factor) for place, factor in factors if factor not in of_factor
                    and factor not in rule.reduced]  # fmt: skip
            if free and FEATURE not in used:
                split[argument] = free[0][0]
                of_factor[free[0][1]] = FEATURE
        # A table is split by its rows, the vocabulary, so that its gradient is.
        elif op.name == _LOOKUP and places[0] is not None:
            shape = self.step.arguments[argument].shape
            if shape[places[0]] % parts == 0:
                split[argument] = places[0]
        elif rows := [place for place, factor in factors if of_factor.get(factor) == FEATURE]:
            split[argument] = rows[0]


def _is_key(value: StepValue) -> bool:
    """Whether an argument is a key for random numbers, which a program from a file has as its data."""
    return value.key is not None or (value.dtype == "u32" and len(value.shape) == 1 and math.prod(value.shape) <= 4)


def _list_edges(op: Operation) -> Iterator[tuple[Value, Value]]:
    """What becomes what where nothing is computed: a barrier's operands its results, a loop's operands what its body
    takes, what a body or a branch returns the results, and in a loop what the body takes next."""
    if op.name == WHILE:
        yield from zip(op.operands, op.regions[1].blocks[0].arguments, strict=True)
    elif op.name == BARRIER:
        yield from zip(op.operands, op.results, strict=True)
    if op.name not in RETURN:
        return
    outer, block = op.parent.operation, op.operation.block
    if outer.name in BRANCHES:
        yield from zip(op.operands, outer.results, strict=True)
    elif outer.name == WHILE and block == outer.regions[1].blocks[0]:
        yield from zip(op.operands, outer.results, strict=True)
        yield from zip(op.operands, block.arguments, strict=True)


def _leading(rule: OpRule, factors: Sequence[int]) -> int | None:
    """The factor of a dim that is split first: the first that may be."""
    return next((factor for factor in factors if factor in rule.splittable and rule.sizes[factor] > 1), None)

"""Which devices surely have equal values: each value gets a class per device, and devices of one class are equal.

    constant            one class
    partition-id        a class per device
    parameter           devices along the axes that its sharding does not name are equal
    all-gather          the classes of the group's members, in order: equal for all members
    arithmetic          the classes of all operands together
    while               the classes before it, refined until its body yields what it takes
    conditional         the classes of the predicate and of all branches together

The analysis is conservative: values that it cannot follow differ on every device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from reshard.doctor.dataflow.flow import HloValue, Scope, Site, array_paths, loop_body, parameter_number
from reshard.doctor.dataflow.index_maps import IndexMaps, Untraceable, group_tables, senders_of
from reshard.doctor.dataflow.scalars import Numbers
from reshard.errors import NotationError, ReshardError
from reshard.types.layout import Layout

_GROUPED = ("all-gather", "all-reduce")
_DETERMINISTIC = frozenset((
    "abs", "add", "and", "atan2", "bitcast", "bitcast-convert", "broadcast", "cbrt", "ceil", "clamp", "compare",
    "complex", "concatenate", "convert", "convolution", "copy", "cosine", "count-leading-zeros", "divide", "dot",
    "dynamic-slice", "dynamic-update-slice", "erf", "exponential", "exponential-minus-one", "floor", "gather", "imag",
    "is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "pad",
    "popcnt", "power", "real", "reduce", "reduce-precision", "reduce-window", "remainder", "reshape", "reverse",
    "round-nearest-afz", "round-nearest-even", "rsqrt", "scatter", "select", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "sine", "slice", "sqrt", "subtract", "tan", "tanh", "transpose", "xor",
))  # fmt: skip
_MOST = 20_000  # values that are worth following
_TURNS = 16  # of a loop until its classes are found, or taken to be different everywhere


class Replicas:
    """The classes of a module's values by device.

    `shardings` returns those of the entry's parameters in HLO's notation, and is asked only where copies matter;
    without them, parameters differ everywhere.
    """

    def __init__(self, maps: IndexMaps, shardings: Callable[[], Sequence[str]] = tuple) -> None:
        self.maps = maps
        self._read_shardings = shardings
        self.devices = maps.scalars.devices
        self._known: dict[HloValue, Numbers] = {}
        self._loops: dict[tuple[Scope, str], dict[tuple[int, ...], Numbers]] = {}

    @cached_property
    def shardings(self) -> Sequence[str]:
        """The shardings of the entry's parameters."""
        return self._read_shardings()

    def of(self, value: HloValue) -> Numbers:
        """The class of each device for a value."""
        value = self.maps.flow.origin(value)
        stack = [value]
        waiting: set[HloValue] = set()
        while stack:  # ends: each value is put aside once, and known afterwards
            one = stack[-1]
            if one in self._known:
                stack.pop()
                continue
            missing = [] if one in waiting else [o for o in self._operands(one) if o not in self._known]
            waiting.add(one)
            if missing and len(waiting) < _MOST:
                stack += missing
                continue
            self._known[one] = self._classes(one)
            stack.pop()
        return self._known[value]

    def differ(self, value: HloValue, one: Numbers, other: Numbers) -> Numbers:
        """Whether devices, each beside another, may have different values; finding copies takes long, so asked last."""
        if (one == other).all():
            return np.zeros(one.shape, bool)
        classes = self.of(value)
        return classes[one] != classes[other]

    def _operands(self, value: HloValue) -> list[HloValue]:
        followed = value.opcode in _DETERMINISTIC or value.opcode in (*_GROUPED, "collective-permute", "all-to-all")
        return self.maps.flow.operands(value) if followed else []

    def _classes(self, value: HloValue) -> Numbers:
        own = np.arange(self.devices)
        numbers = self.maps.scalars.at(value)
        if isinstance(numbers, np.ndarray):
            return _number_rows(numbers.reshape(self.devices, -1).T)
        if value.opcode in ("constant", "iota"):
            return np.zeros(self.devices, np.int64)
        if value.opcode == "parameter":
            return self._parameter(value)
        if value.opcode == "while":
            return self._loop(value.site).get(value.path, own)
        if value.opcode == "conditional":
            roots = [self.maps.flow.root_of(value.site, name) for name in value.instruction.called]
            parts = [own if root is None else self.of(root._replace(path=value.path)) for root in roots]
            return _number_rows([self.of(self.maps.flow.operands(value)[0]), *parts])
        operands = [self._known.get(operand, own) for operand in self._operands(value)]
        if not operands:
            return own
        try:
            together = _number_rows(operands)
            if value.opcode in _DETERMINISTIC:
                return together
            if value.opcode == "collective-permute":
                sources = senders_of(self.maps, value)
                return _number_rows([np.where(sources < 0, -1, together[sources])])
            columns = together[group_tables(self.maps, value)[0]].T
            return _number_rows(columns if value.opcode in _GROUPED else [*columns, own])
        except (Untraceable, NotationError, KeyError, ValueError, IndexError):
            return own

    def _parameter(self, value: HloValue) -> Numbers:
        """The classes of a parameter: by its sharding if it is one of the entry's, else by what its caller gives it."""
        number, caller = parameter_number(value.instruction), value.scope.caller
        if caller is not None and caller.instruction.opcode == "while":
            return self._loop(caller).get(value.path, np.arange(self.devices))
        if (operand := self.maps.flow.branch_operand(value)) is not None:
            return self.of(operand)
        if caller is not None or number >= len(self.shardings) or value.array is None:
            return np.arange(self.devices)
        return sharding_classes(self.shardings[number], len(value.array.dims), self.devices)

    def _loop(self, site: Site) -> dict[tuple[int, ...], Numbers]:
        """The classes of the arrays that a loop carries, in every turn and after the last; empty if not known.

        Devices are equal after it only if they also make as many turns.
        """
        key = site.scope, site.instruction.name
        if key in self._loops:
            return self._loops[key]
        self._loops[key] = {}  # what a loop inside itself carries is not known
        flow, loop = self.maps.flow, site.instruction
        condition = flow.root_of(site, loop.attributes.get("condition", "").lstrip("%"))
        body = flow.root_of(site, loop_body(loop))
        if body is None or condition is None:
            return {}
        paths = list(array_paths(loop.shape))
        carried = {path: self.of(HloValue(site.scope, loop.operands[0], path)) for path in paths}
        for _ in range(_TURNS):
            turn = Replicas(self.maps, lambda: self.shardings)
            for region in (body.scope, condition.scope):
                (parameter,) = (one for one in region.computation.instructions if one.opcode == "parameter")
                turn._known.update({HloValue(region, parameter.name, path): one for path, one in carried.items()})
            going_on = turn.of(condition)
            refined = {
                path: _number_rows([was, turn.of(body._replace(path=path)), going_on]) for path, was in carried.items()
            }
            if all(refined[path].max() == was.max() for path, was in carried.items()):
                self._loops[key] = carried
                break
            carried = refined
        return self._loops[key]


def sharding_classes(sharding: str, rank: int, devices: int) -> Numbers:
    """The class of each device for an array of that sharding: its coordinates along the axes that split the array.

    >>> [int(one) for one in sharding_classes("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", 2, 8)]
    [0, 0, 0, 0, 1, 1, 1, 1]
    """
    if re.fullmatch(r"\{(mesh\[\], )?replicated\}", sharding):
        return np.zeros(devices, np.int64)
    try:
        layout = Layout.from_hlo(sharding, (devices,) * rank, "float32", num_devices=devices)
    except ReshardError:
        return np.arange(devices)
    mesh = layout.mesh
    if mesh.size != devices or mesh.device_ids is not None or layout.partial:
        return np.arange(devices)
    columns = [[mesh.coordinate(at, axis) for at in range(devices)] for axis in layout.held]
    return _number_rows(np.array(columns, np.int64).reshape(-1, devices))


def _number_rows(columns: Sequence[Numbers] | Numbers) -> Numbers:
    """Numbers for the rows of a table, given by its columns: equal rows get equal ones."""
    table = np.asarray(columns).T
    if not table.shape[1]:
        return np.zeros(len(table), np.int64)
    return np.unique(table, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)

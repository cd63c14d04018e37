"""From the text of a compiled module to the report of its places."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from reshard import hlo
from reshard.doctor.chain_reader import Chain, Matcher, Pair, place_chain
from reshard.doctor.dataflow.flow import Flow, HloValue, Numbering
from reshard.doctor.dataflow.index_maps import COLLECTIVES, IndexMaps
from reshard.doctor.dataflow.scalars import Scalars
from reshard.doctor.live_bytes import ProgramMemory, add_up_program
from reshard.doctor.places import MANUAL, REDUCTION, RESHARD, SHIFT, Known, Place, sort_by_waste
from reshard.doctor.proposals import (
    Proposal,
    ProposalOptions,
    Proposals,
    Room,
    explain_unmeasured,
    list_proposed_moves,
    predict_costs,
    read_sums,
)
from reshard.doctor.rebuilds import find_rebuilt
from reshard.doctor.report import Report
from reshard.doctor.report.findings import CompiledMemory
from reshard.errors import MeshError, NotationError, ReshardError, quoted, shortened
from reshard.hlo import Collective, Module
from reshard.hlo.combined import open_sums
from reshard.hlo.module import metadata_fields
from reshard.hlo.text_reader import compiled_platform
from reshard.plans.plan import Plan
from reshard.synth import Network, PlanOptions, find_plan
from reshard.types.mesh import Mesh
from reshard.types.whole import read_items

_CALLS = "all_gather|all_to_all|ppermute|pshuffle|pbroadcast|psum|psum_scatter|pmax|pmin|pmean|reduce_scatter"
_IN_SHARD_MAP = re.compile(rf"\bshard_map/(?:.*/)?(?:{_CALLS}|ragged_all_to_all)\w*$")
_MESH = re.compile(r"^mesh\[([^\]]*)\]")
_AXIS = re.compile(r"'([A-Za-z_][\w.\-]*)'=(\d+)")
_GENERATED = re.compile(r"axis_\d+")


def examine(
    text: str,
    *,
    known: Iterable[Known] = (),
    network: Network | str | None = None,
    compiled: CompiledMemory | None = None,
    platform: str | None = None,
    processes: int = 1,
    sums: str = "exact",
) -> Report:
    """Reports every place where a compiled program moves data between devices.

    `text` is the optimized HLO: `compiled.as_text()`, or a dump of XLA. `known` lists the moves that the program is
    known to ask for, which name its lines and axes better than HLO does. `network` is that of `reshard.plan`.
    `compiled` is the compiler's own account of the program's memory. `platform` is `cpu`, `gpu` or `tpu`; without it,
    the text says. `processes` share it: between several, sums of floats on CPU stay as they are, unless `sums` may be
    added up in "any order", as in `reshard.jax.enable`.

    Raises `NotationError` if the text is not an HLO module, or one that XLA has not partitioned yet.

    >>> report = examine('''HloModule m, num_partitions=4
    ...
    ... ENTRY %main {
    ...   %p = f32[2,8]{1,0} parameter(0), metadata={op_name="x"}
    ...   %i = u32[] partition-id()
    ...   %two = u32[] constant(2)
    ...   %at = u32[] multiply(%i, %two)
    ...   %zero = u32[] constant(0)
    ...   %g = f32[8,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
    ...   ROOT %d = f32[8,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={8,2}
    ... }''')
    >>> (place,) = report.places
    >>> place.kind, place.rebuilds, place.received_bytes, place.needed_bytes, place.planned_bytes
    ('reshard', 'whole', 192, 48, 48)
    """
    if not (platform is None or isinstance(platform, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ReshardError(f"platform {quoted(platform)}: give cpu, gpu or tpu, or None to go by the text")
    moves = tuple(known) if isinstance(known, list | tuple) else read_items(known)
    if moves is None or not all(isinstance(move, Known) for move in moves):
        raise ReshardError(f"known {quoted(known)}: give a list of `Known` moves")
    # XLA's partitioner removes these calls, so a module that has them is not partitioned yet. The reader below refuses
    # anything but text.
    is_text = isinstance(text, str)  # pyright: ignore[reportUnnecessaryIsInstance]
    if is_text and re.search(r'custom_call_target="(?:Sharding|xla\.sdy\.)', text):
        raise NotationError(
            "the module still has sharding constraints: XLA has not partitioned it, so it moves nothing yet; give what "
            "XLA compiled, compiled.as_text() or the file of a dump that ends in after_optimizations.txt"
        )
    compiled_for = platform or compiled_platform(text)
    module = replace(open_sums(hlo.parse(text)), sums_in_place=compiled_for != "cpu")
    collectives = hlo.collectives(module, every_branch=True)
    _check_operands(module)
    options = ProposalOptions(PlanOptions.read(network=network), compiled_for, processes, sums=read_sums(sums))
    try:
        examination = _Examination(module, collectives, moves, options)
        places = sort_by_waste(examination.places())
        devices = count_devices(module, collectives)
        return Report(module.name, devices, places, hlo.traffic(module), compiled, examination.memory())
    except ReshardError:
        raise
    except (LookupError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        # A slice of another rank, an attribute left out: each would need a check of its own, as in a proto's reader.
        raise NotationError(
            f"HLO module {module.name}: its instructions do not fit each other ({type(error).__name__}: "
            f"{shortened(str(error))}); give the module as XLA prints it"
        ) from error


_TAKES_ONE = (
    *COLLECTIVES, "all-reduce", "reduce-scatter", "copy", "convert", "bitcast", "reshape", "transpose", "broadcast",
    "slice", "reverse", "reduce", "while", "get-tuple-element", "copy-done",
)  # fmt: skip
_TAKES_TWO = ("pad", "dynamic-slice", "dynamic-update-slice", "conditional")
_LEAST_TAKEN = {"select": 3} | dict.fromkeys(_TAKES_TWO, 2) | dict.fromkeys(_TAKES_ONE, 1)


def _check_operands(module: Module) -> None:
    """Raises `NotationError` for a damaged text, in which an instruction takes what is not made before it.

    Data flow is followed from one instruction to another, so a circle would have no end.
    """
    for computation in module.computations.values():
        made: set[str] = set()
        for one in computation.instructions:
            where = f"HLO module {module.name}, computation {computation.name}: {one.name}"
            unknown = next((name for name in one.operands if name not in made), None)
            if unknown is not None:
                raise NotationError(f"{where} takes {unknown}, which nothing before it makes; is the text whole?")
            if len(one.operands) < _LEAST_TAKEN.get(one.opcode.removesuffix("-start"), 0):
                raise NotationError(f"{where}, a {one.opcode}, takes only {len(one.operands)} operands")
            if one.opcode == "get-tuple-element" and not one.attributes.get("index", "").isdigit():
                raise NotationError(f"{where}, a get-tuple-element, does not say which element")
            if one.name in made:
                raise NotationError(f"{where} is made twice; is the text whole?")
            made.add(one.name)


class _Examination:
    """The analyses of one module, and the places that they yield."""

    def __init__(
        self, module: Module, collectives: Sequence[Collective], known: Sequence[Known], options: ProposalOptions
    ) -> None:
        self.devices = count_devices(module, collectives)
        self.position = {collective: at for at, collective in reversed(list(enumerate(collectives)))}
        self.flow = Flow(module)
        self.maps = IndexMaps(self.flow, Scalars(self.flow, self.devices))
        self.numbering = Numbering(self.flow)
        mesh = find_mesh(collectives, self.devices, {move.source.mesh for move in known})
        self.proposals = Proposals(
            self.flow,
            self.maps,
            self.numbering,
            collectives,
            mesh,
            options,
            predict_costs(collectives),
            # Where the compiler decides, plans stay that need little: those that need much raise most peaks.
            Room.PROGRAM if options.platform == "cpu" else Room.LEAST,
        )
        self.liveness = self.proposals.liveness
        self.network = options.plan.network
        self.matcher = Matcher(known)

    @cached_property
    def proposed(self) -> list[Proposal]:
        """The proposals in the order of the program; none counts as better if all together are not worth it."""
        every = sorted(self.proposals, key=lambda one: self.position[one.chain.collectives[0]])
        why = explain_unmeasured(
            [one.place for one in every],
            self.proposals.options,
            lambda: (self.proposals.peak_bytes, self._planned_peak(every)),
        )
        return [one.left(why) if why and one.replacements else one for one in every]

    def memory(self) -> ProgramMemory:
        """The memory of the whole program, with what moves make."""
        moved: dict[HloValue, str] = {}
        for chain in self.proposals.apart:
            if not chain.reduces:
                kinds = ", ".join(dict.fromkeys(collective.kind for collective in chain.collectives))
                moved |= dict.fromkeys(chain.values, kinds)
        return replace(add_up_program(self.flow, moved), planned_bytes=self._planned_peak(self.proposed))

    def _planned_peak(self, proposals: Sequence[Proposal]) -> int:
        """The peak of the program with the plans of these proposals."""
        planned = [one.planned_chain for one in proposals if one.replacements]
        return add_up_program(self.flow, planned=planned).peak_bytes

    def places(self) -> list[Place]:
        """A place for each proposal, in the order of the program, with what becomes of it."""
        return [self._place_of(one) for one in self.proposed]

    def _place_of(self, one: Proposal) -> Place:
        """The place of a proposal: a chain as the program has it, or several that plans take together."""
        parts = [part for part in self.proposals.apart if part.is_part_of(one.chain)]
        if len(parts) == 1 and not (one.replacements and parts[0].reduces) and one.moves is None:
            place = self._place(parts[0])
        else:
            own = [self._place(part) for part in parts]
            kind = own[0].kind if len({part.kind for part in own}) == 1 else RESHARD
            memory = self.liveness.of(one.chain)
            place = replace(
                place_chain(one.chain), kind=kind, moves=list_proposed_moves(one), peak_bytes=memory.peak_bytes,
                temp_bytes=memory.temp_bytes, largest=memory.largest,
            )  # fmt: skip
            rebuilding = (part for part in own if part.kind != REDUCTION)
            worst = max(rebuilding, key=lambda part: (part.rebuilds_whole, bool(part.rebuilds)), default=place)
            place = replace(place, rebuilds=worst.rebuilds, rebuilt=worst.rebuilt, rebuilt_move=worst.rebuilt_move)
        outcome = one.outcome
        if not one.replacements:
            return replace(place, outcome=outcome)
        # The pass plans between layouts on a mesh that it made up. Those of the user say the same if they receive as
        # much; else the pass has found another way, which is what will run.
        named = [move.plan for move in place.moves if move.plan is not None]
        received = sum(move.arrays * move.plan.received_bytes for move in place.moves if move.plan is not None)
        if len(named) == len(place.moves) and received == outcome.planned_bytes and one.moves is None:
            outcome = replace(outcome, plans=tuple(named))
        return replace(place, outcome=outcome, planned_temp_bytes=one.temp_bytes)

    def _place(self, chain: Chain) -> Place:
        """The place of a chain as the program has it, with the array that it rebuilds, if there is one."""
        place = place_chain(chain)
        if chain.reduces:
            return place
        # A collective is the user's own by its op_name: its `source` may be that of a neighbour.
        names = (metadata_fields(one.instruction.attributes.get("metadata", "")) for one in chain.collectives)
        is_manual = all(_IN_SHARD_MAP.search(fields.get("op_name", "")) for fields in names)

        def plan(pair: Pair) -> Plan | None:
            try:
                return find_plan(*pair, PlanOptions(None, self.network))
            except ReshardError:
                return None

        planner = None if is_manual else plan
        moves, where, leaves, counted = self.proposals.reader.moves(chain, place.where, self.matcher, planner)
        memory = self.liveness.of(chain)
        arrays = [array for array in (memory.largest, *(move.after for move in moves)) if array is not None]
        # Parts of tiles that are only passed on to neighbours are no move between layouts.
        permutes = all(collective.kind == "permute" for collective in chain.collectives)
        is_shift = permutes and all(move.source is None for move in moves)
        place = replace(
            place, kind=MANUAL if is_manual else SHIFT if is_shift else RESHARD, where=where, moves=moves,
            peak_bytes=memory.peak_bytes, temp_bytes=memory.temp_bytes,
            largest=max(arrays, key=lambda array: array.nbytes, default=None), counted_bytes=counted,
        )  # fmt: skip
        if is_manual:
            return place
        array = find_rebuilt(chain, self.liveness.stored(chain), self.maps, self.numbering, leaves)
        if array is None:
            return place
        origin = leaves.get(array.leaf)
        move, where = (None, place.where) if origin is None else (origin.move, origin.where)
        return replace(place, where=where, rebuilds=array.extent, rebuilt=array.array, rebuilt_move=move)


def count_devices(module: Module, collectives: Sequence[Collective]) -> int:
    """The number of devices that run the module; if its header does not say, the most that its groups name."""
    if module.devices is not None:
        return module.devices
    return max((one.groups.count * one.groups.size for one in collectives if one.groups), default=1)


def find_mesh(collectives: Sequence[Collective], devices: int, known: Iterable[Mesh] = ()) -> Mesh | None:
    """The user's mesh: that of the known moves, else the one that collectives name; None if it is not unique."""
    meshes = set(known)
    for collective in () if meshes else collectives:
        attributes = collective.instruction.attributes
        named = _MESH.match(attributes.get("replica_groups", ""))
        axes = [] if named is None else _AXIS.findall(named[1])
        # XLA makes up the names of axes where it has none, and numbers devices in another order.
        if axes and "device_ids" not in attributes and not all(_GENERATED.fullmatch(name) for name, _ in axes):
            with suppress(MeshError):
                meshes.add(Mesh([(name, int(size)) for name, size in axes]))
    fitting = [mesh for mesh in meshes if mesh.size == devices and mesh.device_ids is None]
    return fitting[0] if len(fitting) == 1 else None

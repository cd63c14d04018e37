"""From the text of a compiled module to the report of its places."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from reshard import hlo
from reshard.doctor.chains import Chain, chains
from reshard.doctor.flow import Flow
from reshard.doctor.index_maps import Movement
from reshard.doctor.matching import Matcher
from reshard.doctor.memory import Ledger, Memory
from reshard.doctor.moves import Mover
from reshard.doctor.numbering import Numbering
from reshard.doctor.report.model import MANUAL, REDUCTION, RESHARD, SHIFT, Compiled, Known, Move, Place, Report, order
from reshard.doctor.scalars import Scalars
from reshard.errors import MeshError
from reshard.hlo import Array, Collective, Module, Source
from reshard.hlo.frames import metadata_fields
from reshard.synth import Network
from reshard.types.mesh import Mesh

_CALLS = "all_gather|all_to_all|ppermute|pshuffle|pbroadcast|psum|psum_scatter|pmax|pmin|pmean|reduce_scatter"
_BY_USER = re.compile(rf"\bshard_map/(?:.*/)?(?:{_CALLS}|ragged_all_to_all)\w*$")
_NAMED = re.compile(r"^mesh\[([^\]]*)\]")
_AXIS = re.compile(r"'([A-Za-z_][\w.\-]*)'=(\d+)")
_MADE_UP = re.compile(r"axis_\d+")


def examine(
    text: str,
    *,
    known: Iterable[Known] = (),
    network: Network | str | None = None,
    compiled: Compiled | None = None,
) -> Report:
    """Every place where a compiled program moves data between devices.

    `text` is the optimized HLO: `compiled.as_text()`, or a dump of XLA. `known` are the moves that the program asks
    for, where that is known: they name lines and axes better than HLO does. `network` is that of `reshard.plan`.

    Raises `NotationError` for text that is no HLO module.

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
    module = hlo.parse(text)
    found = hlo.collectives(module, every_branch=True)
    loaded = Network.load(network) if isinstance(network, str) else network
    places = _Examination(module, found, tuple(known), loaded).places()
    return Report(module.name, _devices(module, found), order(places), hlo.traffic(module), compiled)


class _Examination:
    """One module, and what is known of all of it."""

    def __init__(
        self, module: Module, collectives: Sequence[Collective], known: Sequence[Known], network: Network | None
    ) -> None:
        self.collectives = collectives
        self.devices = _devices(module, collectives)
        self.flow = Flow(module)
        self.movement = Movement(self.flow, Scalars(self.flow, self.devices))
        numbering = Numbering(self.flow)
        mesh = _mesh(known, collectives, self.devices)
        self.ledger = Ledger(self.flow, numbering)
        self.mover = Mover(self.movement, numbering, Matcher(known), mesh, network)

    def places(self) -> list[Place]:
        return [self._place(chain) for chain in chains(self.flow, self.movement, self.collectives)]

    def _place(self, chain: Chain) -> Place:
        where, computation = _source(chain.collectives), chain.region.computation.name
        if chain.reduces:
            return Place(REDUCTION, where, computation, chain.collectives)
        manual = all(map(_by_user, chain.collectives))
        moves, where = self.mover.read(chain, where, planned=not manual)
        held = self.ledger.of(chain)
        kind = MANUAL if manual else SHIFT if _shifts(chain, moves) else RESHARD
        largest = max(filter(None, (held.on_the_way, *(move.after for move in moves))), key=_size, default=None)
        rebuilds = _rebuilds(chain, moves, held, self.devices)
        return Place(
            kind, where, computation, chain.collectives, moves, held.peak_bytes, held.temp_bytes, largest, rebuilds
        )


def _by_user(collective: Collective) -> bool:
    """Whether it is one that the user wrote; by its own name, since its origin may be that of another near to it."""
    metadata = collective.instruction.attributes.get("metadata", "")
    return bool(_BY_USER.search(metadata_fields(metadata).get("op_name", "")))


def _devices(module: Module, collectives: Sequence[Collective]) -> int:
    """How many devices run it; of a module that does not say, as many as its groups name."""
    if module.devices is not None:
        return module.devices
    return max((one.groups.count * one.groups.size for one in collectives if one.groups), default=1)


def _mesh(known: Sequence[Known], collectives: Sequence[Collective], devices: int) -> Mesh | None:
    """The user's mesh: that of the known moves, else the one that the collectives name, if they name one."""
    meshes = {move.source.mesh for move in known}
    if not meshes:
        meshes = {mesh for one in collectives if (mesh := _named_mesh(one)) is not None}
    fitting = [mesh for mesh in meshes if mesh.size == devices and mesh.device_ids is None]
    return fitting[0] if len(fitting) == 1 else None


def _named_mesh(collective: Collective) -> Mesh | None:
    attributes = collective.instruction.attributes
    named = _NAMED.match(attributes.get("replica_groups", ""))
    axes = [] if named is None else _AXIS.findall(named[1])
    if not axes or "device_ids" in attributes or all(_MADE_UP.fullmatch(name) for name, _ in axes):
        return None
    try:
        return Mesh([(name, int(size)) for name, size in axes])
    except MeshError:
        return None


def _source(collectives: Sequence[Collective]) -> Source:
    """The origin of the first collective that has a line of its own."""
    sources = [collective.source for collective in collectives]
    return next((source for source in sources if source.exact and source.file), sources[0])


def _shifts(chain: Chain, moves: Sequence[Move]) -> bool:
    """Whether it passes parts of tiles on, by no rule of layouts."""
    permutes = all(collective.kind == "permute" for collective in chain.collectives)
    return permutes and all(move.source is None for move in moves)


def _rebuilds(chain: Chain, moves: Sequence[Move], held: Memory, devices: int) -> str:
    """Whether it makes all of an array where each device needs only a part: `whole`, `group` or not."""
    made = held.on_the_way
    tiles = [array for move in moves for array in (move.before, move.after) if array is not None]
    if made is None or made.elements <= max((array.elements for array in tiles), default=made.elements):
        return ""
    if any(move.before is not None and made.elements >= devices * move.before.elements for move in moves):
        return "whole"
    for move in moves:
        if move.source is not None and made.elements >= math.prod(move.source.shape):
            return "whole" if move.whole else "group"
    gathers = [one.group_size for one in chain.collectives if one.kind == "all_gather"]
    return "" if not gathers else "whole" if max(gathers) == devices else "group"


def _size(array: Array) -> int:
    return array.nbytes

"""Short modules for the tests: a tile f32[2,8] of f32[8,8] on each of 4 devices, gathered and sliced."""

from dataclasses import replace
from pathlib import Path

import reshard as rs
from reshard import hlo
from reshard.doctor import ArrayMove, Known, Place
from reshard.doctor.chain_reader import list_chains
from reshard.doctor.dataflow.flow import Flow, HloValue
from reshard.doctor.dataflow.index_maps import IndexMaps
from reshard.doctor.dataflow.scalars import Scalars
from reshard.doctor.places import RESHARD as KIND
from reshard.doctor.places import PassOutcome
from reshard.hlo import Array, Source

DATA = Path(__file__).parent / "data"
HLO_DATA = DATA.parent.parent / "hlo" / "data"
RECORDED = sorted([*DATA.glob("*.hlo"), *HLO_DATA.glob("*.hlo")])

GATHER = "%g = f32[8,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}"
OFFSET = ["%id = u32[] partition-id()", "%two = u32[] constant(2)", "%at = u32[] multiply(%id, %two)"]
ZERO = "%zero = u32[] constant(0)"
SLICE = "%d = f32[8,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={8,2}"
RESHARD = [*OFFSET, ZERO, GATHER, SLICE, "ROOT %r = f32[8,2]{1,0} add(%d, %d)"]
"""Every device gathers the whole array, and slices its two columns: f32[{d0}2, 8] -> f32[8, {d0}2]."""

FORTH, BACK = ("f32[{a}2, 8]", "f32[8, {a}2]"), ("f32[8, {a}2]", "f32[{a}2, 8]")
REDUCE = """%sum {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}
"""
SUMMED = "%s = f32[8,8]{1,0} all-reduce(%w), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%sum"
SCATTERED = [
    "%w = f32[8,8]{1,0} parameter(1)",
    SUMMED,
    "%id = u32[] partition-id()",
    "%two = u32[] constant(2)",
    "%at = u32[] multiply(%id, %two)",
    "%zero = u32[] constant(0)",
    "%d = f32[2,8]{1,0} dynamic-slice(%s, %at, %zero), dynamic_slice_sizes={2,8}",
    "ROOT %r = f32[2,8]{1,0} add(%d, %d)",
]


def text(*lines, before="", devices=4):
    """A module whose entry starts with p = f32[2,8], one tile of f32[8,8] over 4 devices."""
    body = "\n".join(f"  {line}" for line in ["%p = f32[2,8]{1,0} parameter(0)", *lines])
    return f"HloModule m, num_partitions={devices}\n\n{before}\nENTRY %main {{\n{body}\n}}\n"


def only(report):
    """The one place that there is."""
    (place,) = report.places
    return place


def layouts(place):
    """The layouts of each array that a place moves."""
    return [(str(move.source), str(move.target)) for move in place.moves]


def known(where, source, target, near=()):
    """A known move on a mesh of 4 devices."""
    mesh = rs.Mesh(a=4)
    return Known(where, rs.Layout.parse(source, mesh), rs.Layout.parse(target, mesh), frozenset(near))


class Analysis:
    """The analyses of a text, up to its chains."""

    def __init__(self, text):
        self.module = hlo.parse(text)
        self.flow = Flow(self.module)
        self.maps = IndexMaps(self.flow, Scalars(self.flow, self.module.devices))

    def value(self, name, path=()):
        """The value of an instruction, in the first region that has it; fusions are looked into."""
        sites = (site for region in self.flow.regions for site in self.flow.sites(region))
        scope = next(site.scope for site in sites if site.instruction.name == name)
        return HloValue(scope, name, path)

    def chains(self):
        return list(list_chains(self.flow, self.maps, hlo.collectives(self.module, every_branch=True)))


HERE = Source("jit(f)/mul", "train.py", 26, "step")
TILE = Array("f32", (2, 8))
MOVED = known("train.py:26", *FORTH)[1:3]
"""The layouts of FORTH; a device needs 48 B of a tile of 64 B."""


def move(needed=48, exact=True, plan=True):
    """A move between the layouts of FORTH, with its plan or without."""
    return ArrayMove(TILE, TILE, needed, exact, *MOVED, True, rs.plan(*MOVED) if plan else None)


def place(kinds=("all_gather",), received=96, times=1, where=HERE, kind=KIND, replaced=True, **figures):
    """A place with these collectives, which together receive `received` bytes in one run.

    If all moves have plans that receive no more, it is `replaced` by them.
    """
    gather = hlo.collectives(hlo.parse(text(GATHER)))[0]
    each = received // len(kinds)
    collectives = (replace(gather, kind=kind, received_bytes=each, times=times) for kind in kinds)
    one = Place(kind, where, "main", tuple(collectives), **figures)
    if not replaced or not one.plans or one.planned_bytes > one.received_bytes:
        return one
    temp = max(plan.peak_bytes - plan.floor_bytes for plan in one.plans)
    return replace(one, outcome=PassOutcome(one.planned_bytes, one.plans), planned_temp_bytes=temp)

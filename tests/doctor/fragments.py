"""Short modules for the tests: a tile f32[2,8] of f32[8,8] on each of 4 devices, gathered and sliced."""

from pathlib import Path

import reshard as rs
from reshard import hlo
from reshard.doctor import Known
from reshard.doctor.chains import chains
from reshard.doctor.flow import Flow, HloValue
from reshard.doctor.index_maps import IndexMaps
from reshard.doctor.scalars import Scalars

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
        return list(chains(self.flow, self.maps, hlo.collectives(self.module, every_branch=True)))

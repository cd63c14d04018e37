"""Short modules in which an operation on whole rows gets a gathered array, and the same ones with fewer rows."""

from typing import NamedTuple

from reshard import hlo
from reshard.doctor.batch_ops import OpFinder
from reshard.doctor.chain_reader import ChainReader, list_chains
from reshard.doctor.equivalence import Traced

HEAD = """HloModule m, num_partitions=4

%less (x: f32[], y: f32[], i: s32[], j: s32[]) -> pred[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  %i = s32[] parameter(2)
  %j = s32[] parameter(3)
  ROOT %lt = pred[] compare(%x, %y), direction=LT
}

%more (x: f32[], y: f32[], i: s32[], j: s32[]) -> pred[] {
  %j = s32[] parameter(3)
  %i = s32[] parameter(2)
  %y = f32[] parameter(1)
  %x = f32[] parameter(0)
  ROOT %lt = pred[] compare(%x, %y), direction=GT
}

ENTRY %main {
  %id = u32[] partition-id()
  %two = u32[] constant(2)
  %at = u32[] multiply(%id, %two)
  %zero = u32[] constant(0)
"""
GATHER = "channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}"
FFT = f"""  %p = c64[2,8]{{1,0}} parameter(0)
  %g = c64[8,8]{{1,0}} all-gather(%p), {GATHER}
  %f = c64[8,8]{{1,0}} fft(%g), fft_type=FFT, fft_length={{8}}
  ROOT %d = c64[8,2]{{1,0}} dynamic-slice(%f, %zero, %at), dynamic_slice_sizes={{8,2}}
}}
"""
OWN_FFT = """  %p = c64[2,8]{1,0} parameter(0)
  %f.1 = c64[2,8]{1,0} fft(%p), fft_type=FFT, fft_length={8}
  %s = c64[2,4,2]{2,1,0} reshape(%f.1)
  %x = c64[4,2,2]{2,1,0} transpose(%s), dimensions={1,0,2}
  %y = c64[4,2,2]{2,1,0} all-to-all(%x), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %d = c64[8,2]{1,0} reshape(%y)
}
"""
SORT = f"""  %p = f32[2,8]{{1,0}} parameter(0)
  %iota = s32[2,8]{{1,0}} iota(), iota_dimension=1
  %g = f32[8,8]{{1,0}} all-gather(%p), {GATHER}
  %k = s32[8,8]{{1,0}} all-gather(%iota), {GATHER.replace("=1,", "=2,", 1)}
  %sort = (f32[8,8]{{1,0}}, s32[8,8]{{1,0}}) sort(%g, %k), dimensions={{1}}, is_stable=true, to_apply=%less
  %order = s32[8,8]{{1,0}} get-tuple-element(%sort), index=1
  ROOT %d = s32[2,8]{{1,0}} dynamic-slice(%order, %at, %zero), dynamic_slice_sizes={{2,8}}
}}
"""
OWN_SORT = """  %p = f32[2,8]{1,0} parameter(0)
  %j = s32[2,8]{1,0} iota(), iota_dimension=1
  %own = (f32[2,8]{1,0}, s32[2,8]{1,0}) sort(%p, %j), dimensions={1}, is_stable=true, to_apply=%less
  ROOT %d = s32[2,8]{1,0} get-tuple-element(%own), index=1
}
"""


class Proposed(NamedTuple):
    """A module, and what the finder says of its only operation."""

    traced: Traced
    finder: OpFinder
    joined: tuple

    def replacement(self):
        (one,) = self.joined
        return self.finder.replacement(*one)


def proposed(body):
    traced = Traced(hlo.parse(HEAD + body), 4)
    collectives = hlo.collectives(traced.flow.module)
    listed = list(list_chains(traced.flow, traced.maps, collectives))
    finder = OpFinder(ChainReader(traced.flow, traced.maps, traced.numbering, None))
    return Proposed(traced, finder, tuple(finder.joined(listed, collectives)))

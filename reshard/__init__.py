"""Sharding specs as types: the cheapest collectives between two layouts of a distributed array.

>>> import reshard as rs
>>> mesh = rs.Mesh(x=4, y=2)
>>> source = rs.Layout.parse("f32[{y}8, 16, {x}4]", mesh)
>>> target = rs.Layout.parse("f32[16, {x}{y}2, 16]", mesh)
>>> print(rs.plan(source, target))
f32[{y}8, 16, {x}4] -> f32[16, {x}{y}2, 16] on <x=4, y=2>
  step        type after it         received    live
  all_to_all  f32[16, {x}{y}2, 16]    1792 B  6144 B
received 1792 B (bound 1792 B), 1 launch, peak 6144 B a device
"""

from reshard import draw as draw
from reshard import errors as errors
from reshard.errors import ProofError as ProofError
from reshard.prove import Proof as Proof
from reshard.prove import prove as prove
from reshard.simulate import simulate as simulate
from reshard.synth import Link as Link
from reshard.synth import Network as Network
from reshard.synth import plan as plan
from reshard.types import Layout as Layout
from reshard.types import Mesh as Mesh
from reshard.types.plan import Plan as Plan
from reshard.types.plan import Step as Step

__version__ = "0.1.0"

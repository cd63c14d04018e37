"""The language: what a layout is, which steps there are, and what they cost. This is the small core that is trusted.

    Mesh, SubAxis        devices on named axes, and factors of these axes
    Digit, Dim, Layout   where each element of an array is: every dim a numeral of local and held digits

    canonical.py         the invariants of layouts, one check each
    meaning.py           which elements a device holds: the definition of correctness
    step.py, plan.py     Step and Plan: chains of steps, checked as they are built
    traffic.py           the busiest devices of a plan between two sets of devices
    named_dims.py        layouts of xarray's arrays and jaxtyping's annotations
    positions.py         the coordinates of all positions of a mesh at once
    rules/               one typing rule a collective
    pair/                what two layouts have in common
    notation/            shardings written as in JAX, Shardy, HLO, DTensor, ScaLAPACK
    reductions.py        sum, max, min, product, mean
    dtypes.py, units.py  names and sizes of element types; sizes, times and shapes as text

Nothing here depends on `synth`, which proposes plans, or on `lower`, which turns them into programs: both are checked
against this package.
"""

from reshard.types.layout import Digit as Digit
from reshard.types.layout import Dim as Dim
from reshard.types.layout import Layout as Layout
from reshard.types.mesh import Mesh as Mesh
from reshard.types.mesh import SubAxis as SubAxis

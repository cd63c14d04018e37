"""The language: what a layout is, which steps there are, and what they cost. This is the small core that is trusted.

    Mesh, SubAxis        devices on named axes, and factors of these axes
    Digit, Dim, Layout   where each element of an array is: every dim a numeral of local and held digits

    mesh.py, dims.py, layout.py     the three above; device_ids.py the ids of a mesh, positions.py all coordinates
    canonical.py                    the invariants of layouts, one check each
    meaning.py                      which elements a device holds: the definition of correctness
    step.py, plan.py                Step and Plan: chains of steps, checked as they are built; plan_data.py their JSON
    traffic.py, idle.py             the busiest devices of a plan to other devices; the axes that only its steps use
    move.py, view.py, view_map.py   a plan's request with a view; which index becomes which; views one after another
    batch.py, plan_tree.py          plans of many arrays; tree_names.py their names, tree_memory.py what is live
    manifest.py                     what both sides of a move must agree on
    pipeline.py                     a plan to other devices in parts that overlap
    named_dims.py                   layouts of xarray's arrays and jaxtyping's annotations
    rules/                          one typing rule a collective
    pair/                           what two layouts have in common
    notation/                       shardings written as in JAX, Shardy, HLO, DTensor, ScaLAPACK
    dtypes.py, reductions.py        names and sizes of element types; sum, max, min, product, mean
    units.py, whole.py, primes.py   sizes, times and shapes as text; the one check of whole numbers; prime factors
    deadline.py                     a time by which planning must end

Nothing here depends on `synth`, which proposes plans, or on `lower`, which turns them into programs: both are checked
against this package.
"""

from reshard.types.layout import Digit as Digit
from reshard.types.layout import Dim as Dim
from reshard.types.layout import Layout as Layout
from reshard.types.mesh import Mesh as Mesh
from reshard.types.mesh import SubAxis as SubAxis

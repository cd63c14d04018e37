"""The language: what a layout, a view and a move are. This is the small core that a proof of correctness trusts.

    Mesh, SubAxis        devices on named axes, and factors of these axes
    Digit, Dim, Layout   where each element of an array is: every dim a numeral of local and held digits

    mesh.py, dims.py, layout.py     the three above; the invariants of layouts, one check each, are in dims.py
    pieces.py                       pieces of any size, which a table says and no numeral
    meaning.py                      which elements a device holds: the definition of correctness
    move.py, view.py                a plan's request with a view; which index becomes which, and views one after another
    named_dims.py                   layouts of xarray's arrays and jaxtyping's annotations
    notation/                       shardings written as in JAX, Shardy, HLO, DTensor, ScaLAPACK
    json_fields.py, input_files.py  JSON read field by field; files that callers name, opened
    dtypes.py, reductions.py        names and sizes of element types; sum, max, min, product, mean
    units.py, whole.py              sizes, times and shapes as text; checks of whole numbers and flags, prime factors

Nothing here knows what two layouts have in common (`geometry`), what a step is (`plans`), or how steps are proposed
(`synth`) and spelled (`lower`): all of these are checked against this package.
"""

from reshard.types.layout import Digit as Digit
from reshard.types.layout import Dim as Dim
from reshard.types.layout import Layout as Layout
from reshard.types.mesh import Mesh as Mesh
from reshard.types.mesh import SubAxis as SubAxis
from reshard.types.pieces import Pieces as Pieces

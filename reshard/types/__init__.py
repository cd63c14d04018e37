"""What a layout is, which steps there are, and what they cost: the trusted core."""

from reshard.types.layout import Digit as Digit
from reshard.types.layout import Dim as Dim
from reshard.types.layout import Layout as Layout
from reshard.types.mesh import Mesh as Mesh
from reshard.types.mesh import SubAxis as SubAxis

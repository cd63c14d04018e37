"""XLA's HLO text: the collectives of a compiled module, what each device receives in them, and where they come from.

    module = parse(compiled.as_text())
    for one in collectives(module):
        print(one.kind, one.received_bytes, one.times, one.source)
    traffic(module).received_bytes, largest(module).array.elements

The grammar stands in `text`, `groups` and `frames`; the ways in which a collective is spelled stand in `forms`.
"""

from reshard.hlo.arrays import Held as Held
from reshard.hlo.arrays import large_arrays as large_arrays
from reshard.hlo.arrays import largest as largest
from reshard.hlo.forms import KINDS as KINDS
from reshard.hlo.frames import Frame as Frame
from reshard.hlo.frames import Source as Source
from reshard.hlo.groups import Groups as Groups
from reshard.hlo.groups import parse_groups as parse_groups
from reshard.hlo.loops import trip_count as trip_count
from reshard.hlo.text import Array as Array
from reshard.hlo.text import Computation as Computation
from reshard.hlo.text import Instruction as Instruction
from reshard.hlo.text import Module as Module
from reshard.hlo.text import parse as parse
from reshard.hlo.walk import Collective as Collective
from reshard.hlo.walk import Total as Total
from reshard.hlo.walk import Traffic as Traffic
from reshard.hlo.walk import collectives as collectives
from reshard.hlo.walk import traffic as traffic

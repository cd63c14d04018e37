"""XLA's HLO: the collectives of a compiled module, what each device receives in them, and where they come from.

    module = parse(compiled.as_text())
    for collective in collectives(module):
        print(collective.kind, collective.received_bytes, collective.times, collective.source)
    traffic(module).received_bytes

Reading a module
    `parse` reads the text; `Module`, `Computation`, `Instruction` and `Array` are what it returns.
Collectives
    `collectives` lists every `Collective` that a module executes; `KINDS` maps HLO's opcodes to our names.
    `traffic` adds them up: a `Traffic`, with one `Total` per kind.
    `parse_groups` reads `replica_groups` in any spelling and returns `Groups`.
    `trip_count` is the number of iterations of a while loop.
Origins
    `Source` is the user's line for an instruction, `Frame` one line of its stack; `module.source_of` finds a line near
    an instruction that has none, and `text_reader.compiled_platform` says which compiler wrote a text.
"""

from reshard.hlo.executed_collectives import KINDS as KINDS
from reshard.hlo.executed_collectives import Collective as Collective
from reshard.hlo.executed_collectives import Groups as Groups
from reshard.hlo.executed_collectives import Total as Total
from reshard.hlo.executed_collectives import Traffic as Traffic
from reshard.hlo.executed_collectives import collectives as collectives
from reshard.hlo.executed_collectives import parse_groups as parse_groups
from reshard.hlo.executed_collectives import traffic as traffic
from reshard.hlo.executed_collectives import trip_count as trip_count
from reshard.hlo.instruction import Array as Array
from reshard.hlo.instruction import Instruction as Instruction
from reshard.hlo.module import Computation as Computation
from reshard.hlo.module import Frame as Frame
from reshard.hlo.module import Module as Module
from reshard.hlo.module import Source as Source
from reshard.hlo.text_reader import parse as parse

"""XLA's HLO text: the collectives of a compiled module, what each device receives in them, and where they come from.

    module = parse(compiled.as_text())
    for collective in collectives(module):
        print(collective.kind, collective.received_bytes, collective.times, collective.source)
    traffic(module).received_bytes, largest(module).array.elements

Reading a module
    `parse` reads the text; `Module`, `Computation`, `Instruction` and `Array` are what it returns.
Collectives
    `collectives` lists every `Collective` that a module executes; `KINDS` maps HLO's opcodes to our names.
    `traffic` adds them up: a `Traffic`, with one `Total` per kind.
    `parse_groups` reads `replica_groups` in any spelling and returns `Groups`.
    `trip_count` is the number of iterations of a while loop.
Arrays
    `largest` is the largest array of a module; `large_arrays` lists the instructions that make large ones. Both
    return an `ArrayDefinition`.
Origins
    `Source` is the user's line for an instruction, `Frame` one line of its stack. `origin` finds a line near an
    instruction that has none, and `platform` says which compiler wrote the text.

Rewriting a module
    `proto` edits a serialized module and `instruction_proto` one instruction, on the codec of `wire`; `splice` puts a
    compiled fragment in the place of a chain, `dead_code` removes what nobody uses then, and `integrity` checks the
    result.

The grammars are in `module`, `shapes`, `replica_groups` and `frames`; the spellings of collectives are in `forms`.
`walk` goes through what a module executes, and `loops` counts how often.
"""

from reshard.hlo.collectives import KINDS as KINDS
from reshard.hlo.collectives import ArrayDefinition as ArrayDefinition
from reshard.hlo.collectives import Collective as Collective
from reshard.hlo.collectives import Groups as Groups
from reshard.hlo.collectives import Total as Total
from reshard.hlo.collectives import Traffic as Traffic
from reshard.hlo.collectives import collectives as collectives
from reshard.hlo.collectives import large_arrays as large_arrays
from reshard.hlo.collectives import largest as largest
from reshard.hlo.collectives import parse_groups as parse_groups
from reshard.hlo.collectives import traffic as traffic
from reshard.hlo.collectives import trip_count as trip_count
from reshard.hlo.frames import Frame as Frame
from reshard.hlo.frames import Source as Source
from reshard.hlo.module import Array as Array
from reshard.hlo.module import Computation as Computation
from reshard.hlo.module import Instruction as Instruction
from reshard.hlo.module import Module as Module
from reshard.hlo.text import parse as parse

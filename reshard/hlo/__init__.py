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

Rewriting a module
    `wire` is the codec, and `proto` what can be edited of a serialized module; `splice` puts a compiled fragment in the
    place of a chain and removes what nobody uses then, and `integrity` checks the result.

`instruction` is a line of a text, and `module` all of them, as `text_reader` finds them; XLA itself prints what is
serialized.
`combined` opens a sum of several arrays, so that each is a sum of its own, and shrinks it where some are gone.
`compiled_cycles` adds up what the TPU compiler expects kernels to take.
`executed_collectives` has the ways in which compilers spell a collective, and goes through what a module executes.
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
